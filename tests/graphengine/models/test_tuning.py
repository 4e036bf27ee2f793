"""Tables of plans, the choice among them, numerics ids, and the search with an injected timer."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.buckets import BucketLadder
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.linear.plans import LinearKind, LinearPlan, RowFamily, heuristic_plan
from graphengine.models.linears import LinearPlans, heuristic_plans
from graphengine.models.plans import choosing as tuning
from graphengine.models.plans import plan_limits, tuning_tables
from graphengine.models.plans.choosing import numerics_id
from graphengine.models.plans.tuning_tables import TunedPlan, TuningKey
from graphengine.opening.budget.workspace import step_bytes
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tuning.candidates import candidate_plans
from launches.tuning_cases import BF16, DOT, FAMILIES, FMA, KINDS, MODEL, key_of, keys

KEY = TuningKey("dot", "store", 800, 72, BF16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's own tables."""
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tuned(plan: LinearPlan, us: float = 1.5) -> TunedPlan:
    return TunedPlan(plan, us, torch="2.11.0", triton="3.6.0", date="2026-11-21")


# The file.


@settings(max_examples=30, deadline=None)
@given(table=st.dictionaries(keys(), st.floats(1e-3, 1e6), max_size=4))
def test_a_table_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: dict[TuningKey, float]
) -> None:
    path = tmp_path_factory.mktemp("table") / "deeper" / "table.json"
    plans = {}
    for key, us in table.items():
        tried = candidate_plans(key)
        if tried:
            plans[key] = tuned(tried[-1], us)
    tuning_tables.write_table(path, "Some GPU", plans)
    assert tuning_tables.read_table(path, "Some GPU") == plans
    lines = path.read_text().splitlines()
    assert sum('"family"' in line for line in lines) == len(plans)
    assert len(lines) == len(plans) + 6


def test_entries_are_sorted_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    larger, other = KEY._replace(M=900), KEY._replace(family="fma")
    tuning_tables.write_table(path, "gpu", {larger: tuned(DOT), KEY: tuned(DOT)})
    before = path.read_text().splitlines()
    tuning_tables.write_table(
        path, "gpu", {other: tuned(FMA), KEY: tuned(DOT._replace(splits=1), 1.25)}
    )
    assert list(tuning_tables.read_table(path, "gpu")) == [KEY, larger, other]
    assert tuning_tables.read_table(path, "gpu")[KEY] == tuned(DOT._replace(splits=1), 1.25)
    after = path.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["M"] for line in after[4:-2]] == [800, 900, 800]
    assert len(set(after) - set(before)) == 3, "one entry new, one changed, one got its comma"


SHIPPED = {"NVIDIA H100 80GB HBM3": "nvidia-h100-80gb-hbm3.json", "NVIDIA H200": "nvidia-h200.json"}


def test_the_shipped_tables_can_be_read() -> None:
    folder = Path(tuning.__file__).parents[2] / "tuned"
    assert {file.name for file in folder.iterdir()} == set(SHIPPED.values())
    for device, name in SHIPPED.items():
        table = tuning_tables.shipped_table(device)
        assert table and table == tuning_tables.read_table(folder / name, device)
        assert (folder / name).read_text() == tuning_tables._format_table(device, table)
    assert tuning_tables.shipped_table("Some other GPU") == {}


def test_where_the_users_table_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "own"))
    name = "tuned-nvidia-h100-80gb-hbm3.json"
    for variable, folder in (
        ("GRAPHENGINE_CACHE_DIR", tmp_path / "own"),
        ("XDG_CACHE_HOME", tmp_path / "xdg" / "graphengine"),
        ("HOME", tmp_path / "home" / ".cache" / "graphengine"),
    ):
        assert tuning_tables.user_table_path("NVIDIA H100 80GB HBM3") == folder / name
        # Empty is as good as unset.
        monkeypatch.setenv(variable, "")


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's table lies below the home directory."""
    for name in ("GRAPHENGINE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_user_without_a_home_has_no_table(
    no_variables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    caplog.set_level(logging.INFO)
    _, sources = tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    assert str(sources) == "heuristic"
    (message,) = caplog.messages
    assert "no home directory, and neither GRAPHENGINE_CACHE_DIR nor XDG_CACHE_HOME" in message
    # Who wants to write one must be told.
    with pytest.raises(ValueError, match="no home directory"):
        tuning_tables.user_table_path("cpu")


def fail_at(path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int) -> None:
    """`Path.method` of this path fails, as the superuser who runs tests never sees it fail."""
    working = getattr(Path, method)

    def failing(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise OSError(number, os.strerror(number), str(self))
        return working(self, *args, **options)

    monkeypatch.setattr(Path, method, failing)


def test_a_folder_that_may_not_be_entered_holds_no_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuning_tables.user_table_path("cpu")
    fail_at(path, monkeypatch, "stat", errno.EACCES)
    caplog.set_level(logging.INFO)
    _, sources = tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    assert str(sources) == "heuristic"
    (message,) = caplog.messages
    assert str(path) in message and "Permission denied" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may enter every folder")
def test_a_locked_folder_holds_no_table(cache: Path) -> None:
    path = tuning_tables.user_table_path("cpu")
    tuning_tables.write_table(path, "cpu", {KEY: tuned(DOT)})
    cache.chmod(0)
    try:
        assert tuning_tables.read_user_table("cpu") == {}
    finally:
        cache.chmod(stat.S_IRWXU)


def test_a_home_that_is_a_file_holds_no_table(
    no_variables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/null is the home of some services."""
    monkeypatch.setenv("HOME", os.devnull)
    caplog.set_level(logging.INFO)
    assert tuning_tables.read_user_table("cpu") == {}
    assert not caplog.messages


@pytest.mark.parametrize(
    ("method", "number"),
    [("stat", errno.EIO), ("read_bytes", errno.EIO), ("read_bytes", errno.EACCES)],
)
def test_a_table_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    path = tuning_tables.user_table_path("cpu")
    tuning_tables.write_table(path, "cpu", {KEY: tuned(DOT)})
    fail_at(path, monkeypatch, method, number)
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*{os.strerror(number)}"):
        tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")


def test_a_folder_in_the_tables_place_is_an_error() -> None:
    path = tuning_tables.user_table_path("cpu")
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*Is a directory"):
        tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        tuning_tables.write_table(path, "cpu", {KEY: tuned(DOT)})


def test_an_interrupted_write_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    tuning_tables.write_table(path, "gpu", {KEY: tuned(DOT)})
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        assert path.read_bytes() == before, "nothing may be visible before the rename"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuning_tables.write_table(path, "gpu", {KEY: tuned(DOT, 9.0)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_table_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"table\.json is not JSON"):
        tuning_tables.write_table(path, "gpu", {KEY: tuned(DOT)})
    assert path.read_text() == "{"


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(ValueError, match=r"to be written .*block_m=3 must be a power of two"):
        tuning_tables.write_table(path, "gpu", {KEY: tuned(DOT._replace(block_m=3))})
    with pytest.raises(ValueError, match="us is inf, not a positive number"):
        tuning_tables.write_table(path, "gpu", {KEY: tuned(DOT, math.inf)})
    assert not list(tmp_path.iterdir())


# Every error, with the file and the entry in it.


def document(**changes: Any) -> dict[str, Any]:
    """A good file of two entries, the second of which `changes` alters."""
    good = json.loads(tuning_tables._format_table("gpu", {KEY: tuned(DOT)}))
    entry = good["entries"][0]
    plan = {name: changes.pop(name, value) for name, value in entry["plan"].items()}
    second = {**entry, "M": 900, "plan": plan} | changes
    return good | {"entries": [entry, second]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"M": "900"}, "M is '900', not an integer of at least 1"),
        ({"K": 0}, "K is 0, not an integer of at least 1"),
        ({"M": True}, "M is True, not an integer of at least 1"),
        ({"kind": "matmul"}, "kind is 'matmul', none of store, swiglu, residual, sample"),
        ({"family": ["dot"]}, r"family is \['dot'\], none of fma, dot"),
        ({"dtype": "float8"}, "dtype is 'float8', none of float32, bfloat16, float16"),
        ({"kind": "swiglu", "M": 901}, "M=901 must be even"),
        ({"us": "1"}, "us is '1', not a positive number"),
        ({"us": -1.0}, "us is -1.0, not a positive number"),
        ({"us": math.nan}, "us is nan, not a positive number"),
        ({"us": 10**400}, "us is 1000+\\.\\.\\., not a positive number"),
        ({"M": 10**400}, "M is 1000+\\.\\.\\., at most 2147483647 fits"),
        ({"K": 2**31}, "K is 2147483648, at most 2147483647 fits"),
        ({"block_k": 10**400}, "block_k is 1000+\\.\\.\\., at most 2147483647 fits"),
        ({"tb_per_s": 1.0}, "has the unknown tb_per_s"),
        ({"torch": 2}, "torch is 2, not a string"),
        ({"date": None}, "date is None, not a string"),
        ({"note": 1}, "has the unknown note"),
        ({"plan": 3}, "plan must be an object, not 3"),
        ({"plan": {"block_m": 1}}, "lacks block_k, splits, stages, warps"),
        ({"block_m": 24}, "block_m=24 must be a power of two from 16 to 256 for store in dot"),
        ({"block_m": 8}, "block_m=8 must be a power of two from 16 to 256"),
        ({"block_m": 512}, "block_m=512 must be a power of two from 16 to 256"),
        ({"block_m": 32.0}, "block_m is 32.0, not an integer"),
        ({"block_k": 48}, "block_k=48 must be a power of two from 16 to 8192"),
        ({"block_k": 8}, "block_k=8 must be a power of two"),
        ({"splits": 0}, "splits=0 must be a power of two from 1 to 16"),
        ({"splits": 4}, "splits=4 want more than the 3 tiles of block_k=32 in K=72"),
        ({"kind": "sample"}, "splits=2 must be 1 for sample: its M is a vocabulary"),
        ({"warps": 3}, "warps=3 must be a power of two from 1 to 16"),
        ({"warps": 32}, "warps=32 must be a power of two from 1 to 16"),
        ({"stages": 0}, r"stages=0 must be in \[1, 8\]"),
        ({"stages": 9}, r"stages=9 must be in \[1, 8\]"),
        (
            {"block_m": 64, "block_k": 1024, "splits": 1, "K": 4096},
            "stages=3 of block_m=64 x block_k=1024 take 589824 bytes of shared memory, at most",
        ),
        ({"family": "fma", "block_m": 8}, "splits=2 and stages=3 must be 1: fma has no loop"),
        ({"family": "fma", "block_m": 32}, "block_m=32 must be a power of two from 1 to 16"),
        (
            {"family": "fma", "block_m": 16, "splits": 1, "stages": 1, "K": 9000},
            "block_m=16 rows of K=9000 take 282 registers a thread with warps=8, at most 255",
        ),
        (
            {"family": "fma", "block_m": 1, "splits": 1, "stages": 1, "K": 2**18, "warps": 16},
            "block_m=1 rows of K=262144 take 256 registers a thread with warps=16, at most 128",
        ),
        (
            {"family": "fma", "kind": "swiglu", "block_m": 1, "splits": 1, "stages": 1},
            "block_m=1 must be a power of two from 2 to 16 for swiglu in fma",
        ),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document(**changes)))
    label = r"table\.json, entry 1 \(.*\): "
    with pytest.raises(ValueError, match=label + message):
        tuning_tables.read_table(path, "gpu")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", r"must hold an object, not \[\]"),
        ("{}", "has version None, this program reads 1"),
        ({"version": 2}, "has version 2, this program reads 1: delete the file or run"),
        ({"version": True}, "has version True"),
        ({"version": 1.0}, "has version 1.0, this program reads 1"),
        ({"version": 10**400}, r"has version 1000+\.\.\., this"),
        ("1" * 5000, "is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is nested too deeply"),
        ({"version": "1"}, "has version '1'"),
        ({"device": "other"}, "device is 'other', not 'gpu'"),
        ({"entries": {}}, "entries must be a list, not {}"),
        ({"more": 1}, "has the unknown more"),
        ({"entries": [4]}, r"entry 0 \(4\): must be an object, not 4"),
        ({"entries": [{}]}, r"entry 0 \(\? \? \? x \? \?\): lacks family, kind, M, K, dtype, plan"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | dict[str, Any], message: str) -> None:
    path = tmp_path / "table.json"
    text = content if isinstance(content, str) else json.dumps(document() | content)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"table\.json.*" + message):
        tuning_tables.read_table(path, "gpu")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"device": "gpu"', '"device": "other", "device": "gpu"', ": has more than one device"),
        ('"version": 1', '"version": 2, "version": 1', ": has more than one version"),
        ('"M": 900', '"M": 1, "M": 900', r", entry 1 \(dot store 900 .*\): has more than one M"),
        ('"warps": 8', '"warps": 8, "warps": 8', r", entry 0 .*: has more than one warps"),
    ],
)
def test_a_repeated_name_is_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "table.json"
    text = json.dumps(document())
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"table\.json" + message):
        tuning_tables.read_table(path, "gpu")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    # Beyond float64, beyond int32, and words that mean something.
    | st.sampled_from([10**400, -(10**400), 2**31, *KINDS, *FAMILIES, "bfloat16", "gpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from([*range(6), *TuningKey._fields, *LinearPlan._fields]), value=VALUES)
def test_any_value_in_any_place_is_read_or_a_value_error(place: int | str, value: Any) -> None:
    table = document()
    entry = table["entries"][1]
    if isinstance(place, str):
        (entry["plan"] if place in entry["plan"] else entry)[place] = value
    else:
        names = [*table, "plan", "us", "date"]
        (table if place < 3 else entry)[names[place]] = value
    try:
        tuning_tables.parse_table(json.dumps(table).encode(), "gpu", origin="some file")
    except ValueError as error:
        assert str(error).startswith("some file"), error


def test_values_nested_almost_too_deeply_are_named(tmp_path: Path) -> None:
    """Depths around what the parser can take: what it lets pass can be printed, too."""
    path = tmp_path / "table.json"
    text = json.dumps(document(kind="?"))
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 5):
        path.write_text(text.replace('"?"', "[" * depth + "]" * depth))
        with pytest.raises(ValueError, match=r"table\.json"):
            tuning_tables.read_table(path, "gpu")


def test_a_missing_field_and_a_second_plan_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    good = document()
    del good["device"]
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="lacks device"):
        tuning_tables.read_table(path, "gpu")
    path.write_text(json.dumps(document(M=800)))
    with pytest.raises(
        ValueError, match=r"entry 1 .*: a second plan for dot store 800 x 72 bfloat16"
    ):
        tuning_tables.read_table(path, "gpu")


# The choice.


def test_the_users_plans_win_over_shipped_ones_over_the_heuristic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = {key_of(name): tuned(FMA) for name in ("qkv", "down")}
    monkeypatch.setattr(tuning, "shipped_table", lambda device: shipped)
    own = FMA._replace(block_m=8)
    path = tuning_tables.user_table_path("cpu")
    tuning_tables.write_table(
        path, "cpu", {key_of(name): tuned(own) for name in ("qkv", "lm_head")}
    )
    plans, sources = tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    heuristic = heuristic_plans(MODEL.linears, BF16, "fma")
    assert plans == heuristic.replace({"qkv": own, "down": FMA, "lm_head": own})
    assert list(sources.values()) == ["user", "heuristic", "heuristic", "shipped", "user"]
    assert sources.untuned == ("output", "gate_up")
    assert str(sources) == (
        "qkv user, output heuristic, gate_up heuristic, down shipped, lm_head user"
    )
    # Another dtype and another family are other keys.
    for dtype, family in ((torch.float16, "fma"), (BF16, "dot")):
        plans, sources = tuning.choose_plans(MODEL.linears, dtype, family, "cpu")  # type: ignore[arg-type]
        assert plans == heuristic_plans(MODEL.linears, dtype, family)  # type: ignore[arg-type]
        assert str(sources) == "heuristic"


def test_what_was_not_tuned_is_logged_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    tuning.choose_plans(MODEL.linears, BF16, "dot", "cpu")
    assert not caplog.messages
    whole = DOT._replace(splits=1)
    table = {
        key_of(name, "dot"): tuned(whole) for name in MODEL_LINEARS if name not in ("qkv", "down")
    }
    path = tuning_tables.user_table_path("NVIDIA Test")
    tuning_tables.write_table(path, "NVIDIA Test", table)
    with assumed(H200):
        tuning.choose_plans(MODEL.linears, BF16, "dot", "cuda")
    (message,) = caplog.messages
    assert message.startswith(
        "no tuned plan on NVIDIA Test for dot bfloat16: qkv 800 x 72, down 72 x 100; "
        "`graphengine tune --family dot`"
    )
    caplog.clear()
    more = {key_of(name, "dot"): tuned(whole) for name in ("qkv", "down")}
    tuning_tables.write_table(path, "NVIDIA Test", more)
    with assumed(H200):
        _, sources = tuning.choose_plans(MODEL.linears, BF16, "dot", "cuda")
    assert not caplog.messages
    assert str(sources) == "user"


def test_a_damaged_table_of_the_user_is_an_error() -> None:
    path = tuning_tables.user_table_path("cpu")
    path.parent.mkdir()
    path.write_text("[]")
    with pytest.raises(ValueError, match=str(path)):
        tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")


# Numerics.

MODEL_LINEARS = tuple(MODEL.linears)
RESIDUAL = {name for name, linear in MODEL.linears.items() if linear.kind == "residual"}


def ident(plan: LinearPlan, extra: Mapping[str, Any] | None = None, **others: LinearPlan) -> str:
    plans = LinearPlans(dict.fromkeys(MODEL_LINEARS, plan) | others)
    return numerics_id(MODEL.linears, plans, dtype=BF16, extra=extra or {})


def test_a_numerics_id_is_short_and_stable() -> None:
    assert len(ident(DOT)) == 12
    assert int(ident(DOT), 16) >= 0
    # A change here means that NUMERICS_VERSION, or what the id covers, has changed.
    assert ident(DOT, {"attention_split": 256}) == "5999838593eb"


@pytest.mark.parametrize("linear", MODEL_LINEARS)
@pytest.mark.parametrize(
    ("plan", "change", "matters"),
    [
        (FMA, {"block_k": 256}, True),
        (FMA, {"warps": 4}, True),
        (FMA, {"block_m": 8}, True),
        (DOT, {"block_k": 64}, True),
        (DOT, {"splits": 1}, True),
        (DOT, {"warps": 4}, True),
        (DOT, {"stages": 4}, False),
    ],
)
def test_what_a_numerics_id_depends_on(
    linear: str, plan: LinearPlan, change: dict[str, Any], matters: bool
) -> None:
    assert (ident(plan, **{linear: plan._replace(**change)}) != ident(plan)) is matters


@pytest.mark.parametrize("linear", MODEL_LINEARS)
def test_rows_of_a_dot_tile_matter_where_squares_are_summed(linear: str) -> None:
    changed = ident(DOT, **{linear: DOT._replace(block_m=64)})
    assert (changed != ident(DOT)) is (linear in RESIDUAL)


def test_other_parts_of_a_numerics_id(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = LinearPlans(dict.fromkeys(MODEL_LINEARS, DOT))
    ids = {
        ident(DOT),
        ident(DOT._replace(family="fma")),
        ident(DOT, {"attention_split": 256}),
        ident(DOT, {"attention_split": 512}),
        ident(DOT, qkv=DOT._replace(splits=1)),
        ident(DOT, gate_up=DOT._replace(splits=1)),
        numerics_id(MODEL.linears, plans, dtype=torch.float16, extra={}),
    }
    assert len(ids) == 7
    assert ident(DOT, {"a": 1, "b": 2}) == ident(DOT, {"b": 2, "a": 1})
    monkeypatch.setattr(tuning, "NUMERICS_VERSION", tuning.NUMERICS_VERSION + 1)
    assert ident(DOT) not in ids


# What is valid.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_every_heuristic_plan_is_valid(
    family: RowFamily, kind: LinearKind, dtype: torch.dtype
) -> None:
    odd = [1, 15, 16, 17, 72, 100, 191, 192, 1025, 2049, 3000, 4097, 13_000, 24_577]
    usual = [576, 896, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 9728, 14_336, 18_944, 28_672]
    for K in [*odd, *usual, 32_768]:
        for M in (2, 74, 800, 1024, 2048, 4096, 6144, 16_384, 28_672, 128_256, 262_144):
            plan = heuristic_plan(kind, M, K, dtype, family)
            plan_limits.check_plan(plan, kind, K, dtype)
            if family == "fma":
                assert plan_limits.weight_registers(plan, K, dtype) <= 128, f"{M} x {K}: {plan}"


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_parts_of_a_split_product_are_in_the_workspace(rows: int) -> None:
    """Beside the logits: the parts of the widest plan that a table can hold."""
    model = model_shape("llama-8b")
    workspace = step_bytes(model, rows, BucketLadder(16, (16,)), BF16, 4096)
    for kind, M, K, *_ in model.linears.values():
        plan = LinearPlan("dot", block_m=64, block_k=64, splits=plan_limits.MAX_SPLITS)
        if kind == "sample":
            with pytest.raises(ValueError, match="splits=16 must be 1 for sample"):
                plan_limits.check_plan(plan, kind, K, BF16)
        else:
            plan_limits.check_plan(plan, kind, K, BF16)
            parts = 4 * plan.splits * rows * -(-M // plan.block_m) * plan.block_m
            assert workspace > parts + 4 * rows * model.vocab_size
