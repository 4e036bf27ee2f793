"""Tables of options: rows, checks, documentation, flags, and the files that are made of them."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from graphengine.buckets import Field
from graphengine.cli import option_files
from graphengine.cli.option_files import files, keyword_arguments, markdown, with_tables
from graphengine.cli.option_flags import add_flags, given_options
from graphengine.cli.option_groups import GROUPS
from graphengine.config import EngineConfig
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.options.table import (
    NOT_NEGATIVE,
    SHARE,
    Bound,
    Flag,
    SlotField,
    at_least,
    at_most,
    check_options,
    documented,
    option,
    read_integers,
    rows,
    within,
)
from graphengine.profiles.arguments import integers
from graphengine.program.fields import field_table
from graphengine.requests.processing import GROUP, processing_fields
from graphengine.sampling_params import LOGITS_FIELDS, SAMPLER_FIELDS, SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def half(text: str) -> int:
    number = int(text) if text.isdecimal() else 1
    if number % 2:
        raise ValueError(f"{text!r} must be an even number")
    return number // 2


@dataclass(frozen=True, slots=True)
class Inner:
    """What an option may be beside a plain value."""


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """All kinds of options."""

    count: int = option(2, within(0, 5), doc="how many", flag=Flag())
    share: float = option(0.5, SHARE, doc="100% or less", flag=Flag(default=0.25))
    limit: int | None = option(
        None, at_most(9), at_least(1, or_none=True), doc="at most; None: any", flag=Flag()
    )
    on: bool = option(True, doc="do it", flag=Flag(name="off", inverse=True, help="do not"))
    loud: bool = option(False, doc="say so", flag=Flag())
    maybe: bool | None = option(None, doc="either", flag=Flag())
    mode: Literal["one", "two", "three"] = option("one", doc="which", flag=Flag())
    family: Literal["a", "b"] | None = option(None, doc="whose")
    inner: Inner | None = option(None, doc="more of it")
    words: tuple[str, ...] = option(
        (), doc="to say", flag=Flag(name="word", many=True, collect=tuple)
    )
    halves: list[int] | None = option(
        None, doc="of numbers", flag=Flag(parse=half, many=True, metavar="N"), hashed=False
    )
    place: str = option(factory=lambda: "here", doc="where")
    a_name_that_leaves_no_room: int = option(
        0,
        Bound("be an even number", lambda value: value % 2 == 0, whole=True),
        doc="a text that is so long that it does not fit a line of the documentation, which has "
        "a hundred columns",
    )

    def __post_init__(self) -> None:
        check_options(self)


# Rows and checks.


def test_rows_say_what_the_fields_say() -> None:
    table = {row.name: row for row in rows(Table)}
    assert list(table) == [field.name for field in fields(Table)]
    assert [(row.kind, row.optional) for row in table.values()] == [
        (int, False), (float, False), (int, True), (bool, False), (bool, False), (bool, True),
        (("one", "two", "three"), False), (("a", "b"), True), (Inner, True), (None, False),
        (None, True), (None, False), (int, False),
    ]  # fmt: skip
    assert table["count"].default == 2 and table["count"].annotation == "int"
    assert table["limit"].annotation == "int | None"


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("count", 6, "be in [0, 5]"),
        ("count", -1, "be in [0, 5]"),
        ("count", 1.0, "be an integer"),
        ("count", True, "be an integer"),
        ("count", None, "be an integer"),
        ("share", 0, "be in (0, 1]"),
        ("share", math.nan, "be in (0, 1]"),
        ("share", "1", "be a number"),
        ("limit", 10, "be at most 9"),
        ("limit", 0, "be at least 1, or None"),
        ("limit", 2.5, "be an integer"),
        ("on", 1, "be True or False"),
        ("on", None, "be True or False"),
        ("maybe", 0, "be True, False or None"),
        ("mode", "four", "be 'one', 'two' or 'three'"),
        ("mode", ["one"], "be 'one', 'two' or 'three'"),
        ("mode", None, "be 'one', 'two' or 'three'"),
        ("family", "c", "be 'a', 'b' or None"),
        ("inner", Inner, "be Inner or None"),
        ("a_name_that_leaves_no_room", 3, "be an even number"),
        ("a_name_that_leaves_no_room", "3", "be an even number"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(name: str, value: Any, must: str) -> None:
    with pytest.raises(ValueError) as refused:
        Table(**{name: value})
    assert str(refused.value) == f"{name}={value!r} must {must}"


def test_what_can_be_is_kept_as_pythons_own_numbers() -> None:
    made = Table(count=np.int8(5), share=np.float32(0.5), limit=np.int64(9), maybe=True)
    assert (made.count, made.share, made.limit) == (5, 0.5, 9)
    assert [type(value) for value in (made.count, made.share, made.limit)] == [int, float, int]
    assert type(Table(share=1).share) is float
    with pytest.raises(ValueError, match=r"^count=9 must"):
        Table(count=np.int8(9))
    with pytest.raises(FrozenInstanceError):
        made.count = 1  # type: ignore[misc]


def test_bounds_end_where_they_say() -> None:
    assert NOT_NEGATIVE.holds(0) and not NOT_NEGATIVE.holds(-1)
    assert within(1e-6, 1e6).must == "be in [1e-06, 1e+06]"
    assert within(-2.0, 2.0).must == "be in [-2, 2]"
    assert within(0, 2**30 - 1).must == "be in [0, 1073741823]"
    assert not at_least(1).holds(math.nan) and not at_most(1).holds(math.nan)


def test_an_unhashed_option_leaves_the_object_hashable() -> None:
    assert hash(Table(halves=[1])) == hash(Table(halves=[2]))
    assert hash(SamplingParams(logit_bias={1: 2.0})) == hash(SamplingParams())


def test_the_documentation_has_a_line_for_each_option() -> None:
    text = Table.__doc__ or ""
    assert text.startswith("All kinds of options.\n\n    count                   how many\n")
    assert (
        "    a_name_that_leaves_no_room\n"
        "                            a text that is so long that it does not fit a line of the "
        "documentation,\n                            which has a hundred columns\n"
    ) in text
    assert max(map(len, text.splitlines())) <= 100


# Flags.


def parsed(*arguments: str, **choice: Any) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Table, **choice)
    return given_options(parser.parse_args(arguments), Table, prefix=choice.get("prefix", ""))


def test_only_what_was_given_is_read_and_the_commands_own_defaults() -> None:
    assert parsed() == {"share": 0.25}
    assert Table(**parsed()) == Table(share=0.25)


def test_flags_are_of_the_options_types() -> None:
    arguments = "--count 3 --share 1 --limit 4 --off --loud --no-maybe --mode two --word a --word b"
    given = parsed(*arguments.split(), "--halves", "4", "--halves", "8")
    assert given == {
        "count": 3, "share": 1.0, "limit": 4, "on": False, "loud": True, "maybe": False,
        "mode": "two", "words": ("a", "b"), "halves": [2, 4],
    }  # fmt: skip
    assert Table(**given).halves == [2, 4]


@pytest.mark.parametrize(
    ("text", "value"), [("16", (16,)), ("16,064", (16, 64)), (" 0, 8 ", (0, 8))]
)
def test_integers_are_read_from_a_flag(text: str, value: tuple[int, ...]) -> None:
    assert read_integers(text) == value
    assert integers(text, "rows", least=0) == [*value]


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "-1", "1.0", "1 2", "²", "٣"])
def test_what_is_no_list_of_integers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} must be integers with commas between them$"):
        read_integers(text)
    with pytest.raises(ValueError, match=f"^rows={text!r} must be positive integers, comma-sep"):
        integers(text, "rows")


def test_a_prefix_keeps_two_tables_apart() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Table, only=("count",))
    parser.add_argument("--other", dest="second_count", type=int)
    found = parser.parse_args(["--count", "1", "--other", "2"])
    assert given_options(found, Table)["count"] == 1
    assert given_options(found, Table, prefix="second_") == {"count": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "x"), "argument --count: invalid int value: 'x'"),
        (("--mode", "four"), "argument --mode: invalid choice: 'four'"),
        (("--halves", "3"), "argument --halves: '3' must be an even number"),
        (("--inner", "x"), "unrecognized arguments: --inner"),
    ],
)
def test_a_wrong_flag_is_an_error(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert message in capsys.readouterr().err


def test_a_command_may_leave_flags_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--count", "3", only=("count", "share")) == {"count": 3, "share": 0.25}
    for choice in ({"only": ("count",)}, {"but": ("limit",)}):
        with pytest.raises(SystemExit):
            parsed("--limit", "3", **choice)
        assert "unrecognized arguments" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="inner"):
        parsed(only=("inner",))


def test_help_is_the_rows_text() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Table)
    # One line each, whatever the terminal.
    shown = " ".join(parser.format_help().split())
    assert "--count COUNT how many (default: 2)" in shown
    assert "--share SHARE 100% or less (default: 0.25)" in shown
    assert "--limit LIMIT at most; left out: any" in shown
    assert "--off do not" in shown and "--word WORD to say; may be repeated" in shown
    assert "--halves N of numbers; may be repeated" in shown


# Files.


@pytest.mark.parametrize("path", files(ROOT), ids=lambda path: path.name)
def test_what_is_on_file_is_what_the_tables_say(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == files(ROOT)[path], (
        f"{option_files.COMMAND} writes it"
    )


def test_keyword_arguments_import_what_their_types_need() -> None:
    text = keyword_arguments(EngineConfig, "Options", "A meaning.")
    assert "\nimport torch\n" in text and "import WaitMode\n" in text
    names = "KvDtype, LoadFormat, RoundedKind, SamplingDefaults, StateDtype"
    assert f"from graphengine.config import {names}\n" in text
    assert "BucketLadder" not in text and "MAX_LANES" not in text
    assert "    max_batch: int\n" in text and '    """slots, and the largest bucket' in text


def test_a_table_for_readers_has_every_option() -> None:
    lines = markdown(Table).splitlines()
    assert len(lines) == 2 + len(fields(Table))
    assert "| `count`<br>`--count` | `2` | how many |" in lines
    assert "| `on`<br>`--off` | `True` | do it |" in lines
    assert "| `place` |  | where |" in lines


def test_a_page_shows_the_groups_and_an_option_in_none_is_an_error() -> None:
    names = [field.name for field in fields(Table)]
    groups = {"First": names[:1], "Others": names[1:]}
    shown = markdown(Table, groups)
    assert re.findall("^### (.*)$", shown, re.MULTILINE) == ["First", "Others"]
    assert shown.count("\n| `") == len(names)
    for wrong, said in (
        ({"First": names[:1]}, rf"Table\.{min(names[1:])} is in 0 groups"),
        ({**groups, "Twice": names[:1]}, rf"Table\.{names[0]} is in 2 groups"),
        ({**groups, "None": ["nothing"]}, r"Table\.nothing is in 1 groups .* no option"),
    ):
        with pytest.raises(ValueError, match=said):
            markdown(Table, wrong)


def test_the_groups_of_the_page_have_every_option_once() -> None:
    for table, groups in GROUPS.items():
        shown = [name for names in groups.values() for name in names]
        assert sorted(shown) == sorted(row.name for row in rows(table))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A page without tables, and no module."""
    (tmp_path / "graphengine" / "cli").mkdir(parents=True)
    markers = []
    for name in option_files.PAGE_TABLES:
        markers += [f"<!-- {name}: made by `{option_files.COMMAND}` -->", f"<!-- end of {name} -->"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "options.md").write_text("before\n" + "\n".join(markers) + "\nafter\n")
    return tmp_path


def test_the_command_writes_the_files(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert option_files.main(["--root", str(checkout), "--check"]) == 1
    assert capsys.readouterr().err.count("is not what the tables say") == 3
    assert not (checkout / "graphengine" / "engine_options.py").exists()
    assert option_files.main(["--root", str(checkout)]) == 0
    assert option_files.main(["--root", str(checkout), "--check"]) == 0
    page = (checkout / "docs" / "options.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n")
    assert "| `top_p`<br>`--top-p` | `1.0` | keep the shortest prefix" in page


def test_a_page_without_a_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 times the marker"):
        with_tables("nothing")


# Static fields.


def static_fields() -> dict[str, Field]:
    config = EngineConfig(device="cpu")
    sizes = {"slots": 8, "table_blocks": 2, "prefill_tokens": 16, "stop_ids": 2}
    made = field_table(**sizes, swap_pairs=1, arrivals=1)
    made += processing_fields(config, vocab_size=64, max_seq_len=32, width=1)
    return {field.name: field for field in made}


def test_every_number_of_a_request_has_its_field() -> None:
    """A row with a static field is all that the tables of fields need."""
    found = static_fields()
    for table, group in ((SAMPLER_FIELDS, ""), (LOGITS_FIELDS, GROUP)):
        for name, slot in table.items():
            field = found[name]
            assert (field.shape, field.dtype, field.pad) == ((8,), slot.dtype, slot.pad)
            assert (field.owner, field.group) == ("host", group)
    assert {"temperature", "top_k", "seed"} < SAMPLER_FIELDS.keys()
    assert "repetition_penalty" in LOGITS_FIELDS


def test_a_padded_slot_is_neutral_to_the_sampler() -> None:
    neutral = SamplingTensors.neutral(3)._asdict()
    assert neutral.keys() == {*SAMPLER_FIELDS, "stop_ids", "min_len"}
    found = static_fields()
    for name, tensor in neutral.items():
        assert (tensor.dtype, {*tensor.flatten().tolist()}) == (
            found[name].dtype,
            {found[name].pad},
        )


@pytest.mark.parametrize("name", sorted(SAMPLER_FIELDS | LOGITS_FIELDS))
def test_what_asks_for_nothing_is_the_pad(name: str) -> None:
    field = (SAMPLER_FIELDS | LOGITS_FIELDS)[name]
    default = getattr(SamplingParams(), name)
    if name == "temperature":
        # Where nothing is drawn, no noise is.
        assert field.pad == 0
    elif default is not None:
        assert field.number(default) == field.pad


def test_values_that_are_off_are_the_pad_on_the_device() -> None:
    field = SlotField(dtype=torch.int32, pad=0, meaning="", off=(-1, None))
    assert [field.number(value) for value in (-1, None, 0, 5)] == [0, 0, 0, 5]
