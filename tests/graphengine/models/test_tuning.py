"""Tables of plans, the choice among them, numerics ids, and the search with an injected timer."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.buckets import BucketLadder
from graphengine.cli import main as cli
from graphengine.kernels import (
    DecodeLanes,
    LinearKind,
    LinearPlan,
    Residual,
    RopeConfig,
    RowFamily,
    heuristic_plan,
)
from graphengine.models import tuning
from graphengine.models.blocks import gqa
from graphengine.models.contract import (
    DecodeLaunch,
    LinearPlans,
    StateTensors,
    heuristic_plans,
)
from graphengine.models.decoder import DecoderConfig
from graphengine.models.tuning import TunedPlan, TuningKey, numerics_id
from graphengine.opening.memory import _workspace_bytes
from graphengine.profiles import tune
from graphengine.profiles.benchmark.shapes import model_shape
from graphengine.profiles.tune import ChainBench, Step, Times

FAMILIES: tuple[RowFamily, ...] = get_args(RowFamily)
KINDS: tuple[LinearKind, ...] = get_args(LinearKind)
BF16 = torch.bfloat16

MODEL = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=331,
    hidden_size=72,
    ffn_size=100,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=80,
    norm_eps=1e-5,
    max_positions=512,
    rope=RopeConfig(kind="default", theta=1e4),
)

FMA = LinearPlan("fma", block_m=4, block_k=128, warps=2)
DOT = LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=3, warps=8)
KEY = TuningKey("dot", "store", 800, 72, BF16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's own tables."""
    monkeypatch.setenv("GRAPHENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tuned(plan: LinearPlan, us: float = 1.5) -> TunedPlan:
    return TunedPlan(plan, us, torch="2.11.0", triton="3.6.0", date="2026-11-21")


# The file.


def keys() -> st.SearchStrategy[TuningKey]:
    return st.builds(
        TuningKey,
        st.sampled_from(FAMILIES),
        st.sampled_from(KINDS),
        st.integers(1, 70_000).map(lambda half: 2 * half),
        st.integers(1, 16_384),
        st.sampled_from([torch.float32, torch.float16, BF16]),
    )


@settings(max_examples=30, deadline=None)
@given(table=st.dictionaries(keys(), st.floats(1e-3, 1e6), max_size=4))
def test_a_table_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: dict[TuningKey, float]
) -> None:
    path = tmp_path_factory.mktemp("table") / "deeper" / "table.json"
    plans = {}
    for key, us in table.items():
        candidates = tune.candidate_plans(key)
        if candidates:
            plans[key] = tuned(candidates[-1], us)
    tuning.write_table(path, "Some GPU", plans)
    assert tuning.read_table(path, "Some GPU") == plans
    lines = path.read_text().splitlines()
    assert sum('"family"' in line for line in lines) == len(plans)
    assert len(lines) == len(plans) + 6


def test_entries_are_sorted_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    larger, other = KEY._replace(M=900), KEY._replace(family="fma")
    tuning.write_table(path, "gpu", {larger: tuned(DOT), KEY: tuned(DOT)})
    before = path.read_text().splitlines()
    tuning.write_table(path, "gpu", {other: tuned(FMA), KEY: tuned(DOT._replace(splits=1), 1.25)})
    assert list(tuning.read_table(path, "gpu")) == [KEY, larger, other]
    assert tuning.read_table(path, "gpu")[KEY] == tuned(DOT._replace(splits=1), 1.25)
    after = path.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["M"] for line in after[4:-2]] == [800, 900, 800]
    assert len(set(after) - set(before)) == 3, "one entry new, one changed, one got its comma"


def test_the_shipped_tables_can_be_read() -> None:
    folder = Path(tuning.__file__).parents[1] / "tuned"
    files = list(folder.iterdir())
    assert [file.name for file in files] == ["nvidia-h200.json"]
    assert tuning.shipped_table("NVIDIA H200") == tuning.read_table(files[0], "NVIDIA H200")
    assert files[0].read_text() == tuning._format_table(
        "NVIDIA H200", tuning.shipped_table("NVIDIA H200")
    )
    assert tuning.shipped_table("Some other GPU") == {}


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
        assert tuning.user_table_path("NVIDIA H100 80GB HBM3") == folder / name
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
        tuning.user_table_path("cpu")


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
    path = tuning.user_table_path("cpu")
    fail_at(path, monkeypatch, "stat", errno.EACCES)
    caplog.set_level(logging.INFO)
    _, sources = tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    assert str(sources) == "heuristic"
    (message,) = caplog.messages
    assert str(path) in message and "Permission denied" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may enter every folder")
def test_a_locked_folder_holds_no_table(cache: Path) -> None:
    path = tuning.user_table_path("cpu")
    tuning.write_table(path, "cpu", {KEY: tuned(DOT)})
    cache.chmod(0)
    try:
        assert tuning.read_user_table("cpu") == {}
    finally:
        cache.chmod(stat.S_IRWXU)


def test_a_home_that_is_a_file_holds_no_table(
    no_variables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/null is the home of some services."""
    monkeypatch.setenv("HOME", os.devnull)
    caplog.set_level(logging.INFO)
    assert tuning.read_user_table("cpu") == {}
    assert not caplog.messages


@pytest.mark.parametrize(
    ("method", "number"),
    [("stat", errno.EIO), ("read_bytes", errno.EIO), ("read_bytes", errno.EACCES)],
)
def test_a_table_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    path = tuning.user_table_path("cpu")
    tuning.write_table(path, "cpu", {KEY: tuned(DOT)})
    fail_at(path, monkeypatch, method, number)
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*{os.strerror(number)}"):
        tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")


def test_a_folder_in_the_tables_place_is_an_error() -> None:
    path = tuning.user_table_path("cpu")
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*Is a directory"):
        tuning.choose_plans(MODEL.linears, BF16, "fma", "cpu")
    with pytest.raises(ValueError, match=f"{path} cannot be read"):
        tuning.write_table(path, "cpu", {KEY: tuned(DOT)})


def test_an_interrupted_write_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    tuning.write_table(path, "gpu", {KEY: tuned(DOT)})
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        assert path.read_bytes() == before, "nothing may be visible before the rename"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuning.write_table(path, "gpu", {KEY: tuned(DOT, 9.0)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_table_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"table\.json is not JSON"):
        tuning.write_table(path, "gpu", {KEY: tuned(DOT)})
    assert path.read_text() == "{"


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(ValueError, match=r"to be written .*block_m=3 must be a power of two"):
        tuning.write_table(path, "gpu", {KEY: tuned(DOT._replace(block_m=3))})
    with pytest.raises(ValueError, match="us is inf, not a positive number"):
        tuning.write_table(path, "gpu", {KEY: tuned(DOT, math.inf)})
    assert not list(tmp_path.iterdir())


# Every error, with the file and the entry in it.


def document(**changes: Any) -> dict[str, Any]:
    """A good file of two entries, the second of which `changes` alters."""
    good = json.loads(tuning._format_table("gpu", {KEY: tuned(DOT)}))
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
        tuning.read_table(path, "gpu")


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
        tuning.read_table(path, "gpu")


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
        tuning.read_table(path, "gpu")


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
        tuning.parse_table(json.dumps(table).encode(), "gpu", origin="some file")
    except ValueError as error:
        assert str(error).startswith("some file"), error


def test_values_nested_almost_too_deeply_are_named(tmp_path: Path) -> None:
    """Depths around what the parser can take: what it lets pass can be printed, too."""
    path = tmp_path / "table.json"
    text = json.dumps(document(kind="?"))
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 5):
        path.write_text(text.replace('"?"', "[" * depth + "]" * depth))
        with pytest.raises(ValueError, match=r"table\.json"):
            tuning.read_table(path, "gpu")


def test_a_missing_field_and_a_second_plan_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    good = document()
    del good["device"]
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match="lacks device"):
        tuning.read_table(path, "gpu")
    path.write_text(json.dumps(document(M=800)))
    with pytest.raises(
        ValueError, match=r"entry 1 .*: a second plan for dot store 800 x 72 bfloat16"
    ):
        tuning.read_table(path, "gpu")


# The choice.


def key_of(linear: str, family: RowFamily = "fma") -> TuningKey:
    return TuningKey.of(MODEL.linears[linear], family, BF16)


def test_the_users_plans_win_over_shipped_ones_over_the_heuristic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = {key_of(name): tuned(FMA) for name in ("qkv", "down")}
    monkeypatch.setattr(tuning, "shipped_table", lambda device: shipped)
    own = FMA._replace(block_m=8)
    path = tuning.user_table_path("cpu")
    tuning.write_table(path, "cpu", {key_of(name): tuned(own) for name in ("qkv", "lm_head")})
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
    path = tuning.user_table_path("NVIDIA Test")
    tuning.write_table(path, "NVIDIA Test", table)
    tuning.choose_plans(MODEL.linears, BF16, "dot", "cuda")
    (message,) = caplog.messages
    assert message.startswith(
        "no tuned plan on NVIDIA Test for dot bfloat16: qkv 800 x 72, down 72 x 100; "
        "`graphengine tune --family dot`"
    )
    caplog.clear()
    more = {key_of(name, "dot"): tuned(whole) for name in ("qkv", "down")}
    tuning.write_table(path, "NVIDIA Test", more)
    _, sources = tuning.choose_plans(MODEL.linears, BF16, "dot", "cuda")
    assert not caplog.messages
    assert str(sources) == "user"


def test_a_damaged_table_of_the_user_is_an_error() -> None:
    path = tuning.user_table_path("cpu")
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
    assert ident(DOT, {"attention_split": 256}) == "41b44f6cf28f"


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
            tuning.check_plan(plan, kind, K, dtype)
            if family == "fma":
                assert tuning.weight_registers(plan, K, dtype) <= 128, f"{M} x {K}: {plan}"


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_parts_of_a_split_product_are_in_the_workspace(rows: int) -> None:
    """Beside the logits: the parts of the widest plan that a table can hold."""
    model = model_shape("llama-8b")
    workspace = _workspace_bytes(model, rows, BucketLadder(16, (16,)), BF16, 4096)
    for kind, M, K, *_ in model.linears.values():
        plan = LinearPlan("dot", block_m=64, block_k=64, splits=tuning.MAX_SPLITS)
        if kind == "sample":
            with pytest.raises(ValueError, match="splits=16 must be 1 for sample"):
                tuning.check_plan(plan, kind, K, BF16)
        else:
            tuning.check_plan(plan, kind, K, BF16)
            parts = 4 * plan.splits * rows * -(-M // plan.block_m) * plan.block_m
            assert workspace > parts + 4 * rows * model.vocab_size


# Candidates.

SHIPPED = tuning.shipped_table("NVIDIA H200")


@settings(max_examples=150, deadline=None)
@given(key=keys())
def test_every_candidate_is_valid(key: TuningKey) -> None:
    plans = tune.candidate_plans(key)
    heuristic = heuristic_plan(key.kind, key.M, key.K, key.dtype, key.family)
    assert len(set(plans)) == len(plans) <= 100
    for plan in plans:
        tuning.check_plan(plan, key.kind, key.K, key.dtype)
        registers = tuning.weight_registers(plan, key.K, key.dtype)
        tiles = -(-key.K // plan.block_k)
        if plan == heuristic:
            continue
        if plan.family == "fma":
            assert 12 <= registers <= 96
            assert plan.block_m >= (4 if key.kind == "sample" else 1)
        else:
            assert tuning.shared_bytes(plan, key.dtype) <= tune.DOT_SHARED_BYTES
            assert plan.splits == 1 or key.K % (plan.block_k * plan.splits) == 0
            assert -(-tiles // plan.splits) >= plan.stages - 1


@pytest.mark.parametrize("key", SHIPPED, ids=str)
def test_the_grid_holds_the_plans_that_won(key: TuningKey) -> None:
    plans = tune.candidate_plans(key)
    assert SHIPPED[key].plan in plans
    assert 5 <= len(plans) <= 100


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "K"), [(2, 1), (6, 73), (330, 72), (32, 4097), (2560, 9728)])
def test_odd_shapes_have_a_plan(kind: LinearKind, M: int, K: int, family: RowFamily) -> None:
    plans = tune.candidate_plans(TuningKey(family, kind, M, K, BF16))
    assert plans[0] == heuristic_plan(kind, M, K, BF16, family)


def test_a_chain_exceeds_the_cache_and_is_no_longer_than_the_model() -> None:
    assert tune.chain_layers(model_shape("llama-1b"), BF16) == 9
    assert tune.chain_layers(model_shape("llama-8b"), BF16) == 3
    assert tune.chain_layers(MODEL, BF16) == 2
    assert tune.chain_layers(replace(MODEL, num_layers=1), BF16) == 2
    assert tune.chain_layers(replace(MODEL, num_layers=30), BF16) == 30


def test_targets_of_a_model() -> None:
    targets = tune.targets_of(MODEL, BF16, "fma")
    assert [target.names for target in targets] == [(name,) for name in tune.ORDER]
    assert [target.key for target in targets] == [key_of(name) for name in tune.ORDER]
    some = tune.targets_of(MODEL, BF16, "dot", ["qkv", "down"])
    assert [target.names for target in some] == [("down",), ("qkv",)]
    # Linears of one shape share the entry of a table.
    square = replace(MODEL, ffn_size=MODEL.attention.q_size)
    shared = tune.targets_of(square, BF16, "dot", ["output"])[0]
    assert shared.names == ("down", "output")
    plans = heuristic_plans(square.linears, BF16, "dot")
    variants = shared.variants(plans)
    assert next(iter(variants.items())) == (plans["down"], plans)
    for plan, variant in variants.items():
        assert variant == plans.replace({"down": plan, "output": plan})


# The search.


class FakeBench(ChainBench):
    """Times from a function; plans that it gives a string are refused with that."""

    def __init__(self, time_of: Callable[[LinearPlans], Times | str]) -> None:
        self.time_of = time_of
        self.prepared: list[LinearPlans] = []
        self.timed: list[tuple[LinearPlans, bool]] = []

    def prepare(self, variants: Sequence[LinearPlans], *, seconds: float) -> dict[LinearPlans, str]:
        self.prepared += variants
        answers = {plans: self.time_of(plans) for plans in variants}
        return {plans: answer for plans, answer in answers.items() if isinstance(answer, str)}

    def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
        assert set(variants) <= set(self.prepared)
        self.timed += [(plans, head) for plans in variants]
        answers = []
        for plans in variants:
            answer = self.time_of(plans)
            assert not isinstance(answer, str)
            answers.append(answer)
        return answers


LLAMA = model_shape("llama-1b")


def run_search(
    time_of: Callable[[LinearPlans], Times | str],
    family: RowFamily = "dot",
    only: Sequence[str] = tune.ORDER,
    **options: Any,
) -> tuple[LinearPlans, list[Step], FakeBench]:
    bench, steps = FakeBench(time_of), list[Step]()
    plans = tune.search(
        tune.targets_of(LLAMA, BF16, family, only),
        heuristic_plans(LLAMA.linears, BF16, family),
        bench,
        report=steps.append,
        **{"seconds": math.inf} | options,
    )
    return plans, steps, bench


def distance(plan: LinearPlan, other: LinearPlan) -> float:
    """Doublings between two plans, and one for another `overlap`."""
    sizes, other_sizes = plan._replace(overlap=True)[1:], other._replace(overlap=True)[1:]
    doublings = sum(abs(math.log2(a / b)) for a, b in zip(sizes, other_sizes, strict=True))
    return doublings + (plan.overlap != other.overlap)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_of_each_linear_is_found(family: RowFamily) -> None:
    best = LinearPlans(
        {
            name: SHIPPED[TuningKey.of(shape, family, BF16)].plan
            for name, shape in LLAMA.linears.items()
        }
    )
    rows = tune.DEFAULT_ROWS[family]

    def time_of(plans: LinearPlans) -> Times:
        return (10 + sum(map(distance, plans.values(), best.values())),) * len(rows)

    plans, steps, bench = run_search(time_of, family)
    assert plans == best
    # A second round finds nothing better; where it meets what it has seen it measures nothing.
    assert tuple(step.target.names[0] for step in steps[:5]) == tune.ORDER
    assert 6 <= len(steps) < 10
    assert {step.gain for step in steps[5:]} == {0.0}
    assert {head for _, head in bench.timed} == {False, True}
    assert bench.prepared[0] == heuristic_plans(LLAMA.linears, BF16, family)


def test_neighbours_are_in_place() -> None:
    """A plan of qkv that is good with one of down only: the second round finds the pair."""
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    qkv, output = (
        next(p for p in tune.candidate_plans(key) if p != start[name])
        for name in ("qkv", "output")
        for key in [TuningKey.of(LLAMA.linears[name], "dot", BF16)]
    )

    def time_of(plans: LinearPlans) -> Times:
        if plans["output"] == output:
            return (80.0, 80.0) if plans["qkv"] == qkv else (90.0, 90.0)
        return (120.0, 120.0) if plans["qkv"] == qkv else (100.0, 100.0)

    plans, steps, bench = run_search(time_of)
    assert plans == start.replace({"qkv": qkv, "output": output})
    gains = [(step.target.names[0], round(step.gain, 3)) for step in steps if step.gain]
    assert gains == [("output", 0.1), ("qkv", 0.111)]
    # One linear differs from those in use, in everything that is measured.
    for timed, _ in bench.timed:
        assert any(
            sum(a != b for a, b in zip(timed, used, strict=True)) <= 1
            for used in (start, start.replace({"output": output}), plans)
        )


def test_rounds_are_limited() -> None:
    """Each step finds something: there is no third round."""
    clock = iter(range(10_000))
    _, steps, _ = run_search(lambda plans: (1000.0 / (1 + next(clock)),) * 2)
    assert len(steps) == 10


@pytest.mark.parametrize(("gain", "kept"), [(0.05, False), (0.15, False), (0.3, True), (5, True)])
def test_a_plan_stays_unless_it_is_clearly_beaten(gain: float, kept: bool) -> None:
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    better = tune.candidate_plans(key_of_llama("down"))[3]

    def time_of(plans: LinearPlans) -> Times:
        return (100.0 - gain,) * 2 if plans["down"] == better else (100.0,) * 2

    plans, steps, _ = run_search(time_of, only=["down"])
    assert plans["down"] == (better if kept else start["down"])
    assert len(steps) == 1, "with the same neighbours a second round finds nothing new"
    table = steps[0].table((8, 32))
    starred = [line for line in table.splitlines() if line.startswith("* ")]
    assert len(starred) == 1
    assert f"{-gain if kept else 0:+.2f}%" in starred[0]
    assert "us at 8" in table
    assert "us at 32" in table


def key_of_llama(linear: str) -> TuningKey:
    return TuningKey.of(LLAMA.linears[linear], "dot", BF16)


def test_every_number_of_rows_counts_the_same() -> None:
    first, second = tune.candidate_plans(key_of_llama("down"))[3:5]
    times = {first: (9.0, 111.0), second: (11.0, 80.0)}
    plans, _, _ = run_search(lambda p: times.get(p["down"], (10.0, 100.0)), only=["down"])
    assert plans["down"] == second


def test_plans_that_are_refused_do_not_win() -> None:
    fast = tune.candidate_plans(key_of_llama("gate_up"))[2:6]

    def time_of(plans: LinearPlans) -> Times | str:
        return "gate_up is off by 7\nand so on" if plans["gate_up"] in fast else (5.0, 5.0)

    plans, steps, bench = run_search(time_of, only=["gate_up"])
    assert plans == heuristic_plans(LLAMA.linears, BF16, "dot")
    assert not {timed["gate_up"] for timed, _ in bench.timed} & set(fast)
    assert set(steps[0].refused) == set(fast)
    assert "4 refused, 0 not tried" in steps[0].table((8, 32))
    assert steps[0].table((8, 32)).endswith("  refused: gate_up is off by 7")


def test_plans_to_start_from_must_work() -> None:
    with pytest.raises(RuntimeError, match=r"LinearPlans\(.* cannot be measured: down: broken"):
        run_search(lambda plans: "down: broken")


def test_the_time_is_bounded() -> None:
    clock: Iterator[int] = iter(range(1000))
    _, steps, bench = run_search(
        lambda plans: (float(plans["down"].block_m),) * 2, seconds=5, clock=lambda: next(clock)
    )
    # Until 5: what begins a search, what begins a step, one batch, and no more.
    (step,) = steps
    assert step.target.names == ("down",)
    assert len(bench.timed) == len(step.times) == 17
    assert step.untried == len(tune.candidate_plans(step.target.key)) - 17
    assert f"{step.untried} not tried" in step.table((8, 32))


def test_without_time_nothing_changes() -> None:
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    plans, steps, _ = run_search(lambda plans: (1.0, 1.0), seconds=0.0)
    assert (plans, steps) == (start, [])


def test_a_step_without_time_has_a_table() -> None:
    clock = iter([0, 0, 0, 0, 9, 9, 9, 9, 9, 9])
    start = heuristic_plans(LLAMA.linears, BF16, "dot")
    plans, (step,), bench = run_search(lambda p: (1.0, 1.0), seconds=5, clock=lambda: next(clock))
    assert plans == start
    assert not bench.timed
    assert "0 plans measured" in step.table((8, 32))


# The chain, and the checks, on references.


def bench_of(rows: tuple[int, ...] = (1, 20), processes: int = 0, **changes: Any) -> ChainBench:
    config, dtype = replace(MODEL, **changes), torch.float32
    model = tune.chain_model(config, dtype, torch.device("cpu"), layers=2)
    return ChainBench(model, rows, processes=processes)


PLANS = LinearPlans(dict.fromkeys(LLAMA.linears, DOT))


@pytest.mark.parametrize("biases", [False, True])
def test_a_chain_is_a_decode_step_without_attention(
    biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(attention_bias=biases, mlp_bias=biases)
    config = bench.model.config
    results = list(bench.launches(PLANS, 20, layers=2, head=True))
    assert [name for name, _ in results] == ["qkv", "output", "gate_up", "down"] * 2 + ["lm_head"]
    q_size = config.attention.q_size
    monkeypatch.setattr(gqa, "decode_attention", lambda qkv, *_, **__: qkv[:, :q_size])
    slot = torch.arange(20, dtype=torch.int32)
    x = bench._x.clone()
    start = Residual(x, x.clone(), x.square().sum(dim=1)[None])
    out = bench.model.decode(
        DecodeLanes(**dict.fromkeys(DecodeLanes._fields, slot)),
        start,
        StateTensors(
            torch.empty(2, 1, 2, 1, config.num_kv_heads, config.head_dim),
            torch.zeros((20, 1), dtype=torch.int32),
        ),
        DecodeLaunch(plans=PLANS, split_tokens=64, arrivals=slot),
    )
    chain = results[7][1]
    torch.testing.assert_close(chain.x, out.x)
    torch.testing.assert_close(chain.scaled, out.scaled)
    # And again the same: replays start where the first one did.
    *_, (_, again), _ = bench.launches(PLANS, 20, layers=2, head=True)
    assert torch.equal(again.x, chain.x)


def test_right_results_pass() -> None:
    bench = bench_of()
    other = PLANS.replace({"down": DOT._replace(block_m=16)})
    assert bench.prepare([PLANS, other], seconds=1) == {}


@pytest.mark.parametrize(
    ("function", "kind", "named"),
    [
        ("linear", "store", "qkv"),
        ("linear", "swiglu", "gate_up"),
        ("linear_residual", "output", "output"),
        ("linear_residual", "down", "down"),
        ("linear_sample", "sample", "lm_head"),
    ],
)
@pytest.mark.parametrize("spoil", ["value", "nan"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_wrong_results_are_refused(
    function: str, kind: str, named: str, part: int, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong row of 20 in one plan of two."""
    bench = bench_of()
    right, changed = getattr(tune, function), DOT._replace(block_m=16)

    def wrong(x: torch.Tensor, *operands: Any, plan: LinearPlan, **options: Any) -> Any:
        result = right(x, *operands, plan=plan, **options)
        if plan != changed or len(x) < 20:
            return result
        if kind == "sample":
            # Another token of the row, or none.
            best, health = result
            best[-1] = best[-1] ^ 5 if spoil == "value" else best[-1]
            health[-1] = 1 if spoil == "value" else 2
            return best, health
        target = result[part] if isinstance(result, Residual) else result
        target[..., -1] += 0.25 * target.abs().max() if spoil == "value" else math.nan
        return result

    monkeypatch.setattr(tune, function, wrong)
    variant = PLANS.replace({named: changed})
    refused = bench.prepare([PLANS, variant], seconds=1)
    assert list(refused) == [variant]
    assert refused[variant].startswith(f"{named} of 20 rows is off by ")


def test_a_plan_that_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*operands: Any, **options: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(tune, "linear", fail)
    assert bench_of().prepare([PLANS], seconds=1) == {PLANS: "PassManager::run failed"}


@pytest.mark.slow
def test_plans_are_compiled_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(processes=1)
    try:
        assert bench.prepare([PLANS], seconds=math.inf) == {}
        # What is not begun in time is not used, and not held against the plan later on.
        many = [PLANS.replace({"down": DOT._replace(stages=n)}) for n in range(1, 9)]
        late = bench.prepare(many, seconds=0)
        assert set(late.values()) == {"not compiled in time"}
        assert many[-1] in late
        assert bench.prepare(many, seconds=math.inf) == {}
    finally:
        bench.close()


# The command.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows='0' must be positive integers"),
        (["--rows", "1,x"], "rows='1,x' must be positive integers"),
        (["--rows", "65", "--family", "dot"], "--rows 65: dot serves up to 64"),
        (["--rows", "8"], "--rows 8: fma serves up to 2"),
        (["--seconds", "0"], "--seconds 0.0 must be positive"),
        (["--device", "cpu"], "tuning measures on an NVIDIA GPU, and --device is 'cpu'"),
    ],
)
def test_options_are_checked(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--checkpoint", "demo", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--family", "gemm"], ["--only", "qkv", "head"], ["--dtype", "int8"]]
)
def test_names_are_checked(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", "--checkpoint", "demo", *options])
    assert exit_.value.code == 2
    assert f"invalid choice: '{options[-1]}'" in capsys.readouterr().err


def test_help_comes_through_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["tune", "--help"])
    assert exit_.value.code == 0
    assert "--seconds" in capsys.readouterr().out


def test_a_command_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the measurement."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(tune, "compile_processes", lambda model: 3)
    monkeypatch.setattr(tune, "chain_model", lambda *setting, layers: setting)

    class Timer(FakeBench):
        def __init__(self, model: Any, rows: tuple[int, ...], *, processes: int) -> None:
            assert processes == 3
            super().__init__(lambda plans: tuple(float(r + plans["down"].block_m) for r in rows))

        def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
            found = super().times(variants, head=head)
            return [tuple(us + 7 * head for us in times) for times in found]

        def close(self) -> None:
            closed.append(self)

    closed: list[Timer] = []
    monkeypatch.setattr(tune, "ChainBench", Timer)
    path = tuning.user_table_path("NVIDIA Test")
    assert cli.main(["tune", "--shape", "llama-1b", "--dtype", "float16"]) == 0
    table = tuning.read_table(path, "NVIDIA Test")
    assert table.keys() == {
        TuningKey.of(shape, family, torch.float16)
        for family in FAMILIES
        for shape in LLAMA.linears.values()
    }
    assert len(closed) == 2
    down, lm_head = (LLAMA.linears[name] for name in ("down", "lm_head"))
    entry = table[TuningKey.of(down, "dot", torch.float16)]
    assert entry.plan.block_m == 32
    # At 8 rows, and shared among 9 layers.
    assert entry.us == round((8 + 32) / 9, 1)
    assert table[TuningKey.of(lm_head, "dot", torch.float16)].us == 7.0
    assert entry.torch == torch.__version__
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "dot, 32 rows: 7.1 us a layer, 7.0 us lm_head" in printed

    out = tmp_path / "more" / "table.json"
    options = ["--only", "down", "--family", "fma", "--rows", "2,1", "--out", str(out)]
    assert cli.main(["tune", "--shape", "llama-1b", *options]) == 0
    ((key, entry),) = tuning.read_table(out, "NVIDIA Test").items()
    assert key == TuningKey.of(down, "fma", BF16)
    assert entry.us == round((2 + entry.plan.block_m) / 9, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--checkpoint", "demo"]) == 2
    assert "tuning measures on an NVIDIA GPU, and torch finds none" in capsys.readouterr().err


@pytest.mark.gpu
def test_tunes_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search in each family writes what an engine then takes."""
    out = tmp_path / "table.json"
    options = ["--checkpoint", "demo", "--dtype", "bfloat16", "--only", "output", "lm_head"]
    assert cli.main(["tune", *options, "--seconds", "60", "--out", str(out)]) == 0
    table = tuning.read_table(out, tuning.device_name("cuda"))
    assert {key.family for key in table} == set(FAMILIES)
    assert {key.kind for key in table} == {"residual", "sample"}
    assert capsys.readouterr().out.count("plans measured") >= len(table)
    assert all(entry.us > 0 for entry in table.values())


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_heuristic_plans_agree_with_the_reference(family: RowFamily, dtype: torch.dtype) -> None:
    config = replace(MODEL, hidden_size=584, ffn_size=1026)
    model = tune.chain_model(config, dtype, torch.device("cuda"), layers=2)
    bench = ChainBench(model, tune.DEFAULT_ROWS[family])
    plans = heuristic_plans(config.linears, dtype, family)
    assert bench.prepare([plans], seconds=math.inf) == {}
    (chain,), (whole,) = (bench.times([plans], head=head) for head in (False, True))
    assert all(0 < a < b < 10_000 for a, b in zip(chain, whole, strict=True))
