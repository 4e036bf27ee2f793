"""Measured plans for decode's linears: tables on disk, and which plan an engine takes from where.

A table is a JSON file for one device. The user's own, which `graphengine tune` writes to the cache
directory, wins over the one that is shipped in `tuned/`; what neither knows gets
`heuristic_plan`. Nothing is measured here, and nothing in a table is executed.

Plans are part of the numerics: another plan may round otherwise and so, now and then, give other
tokens. `numerics_id` names all that the bits depend on, and a damaged table is an error rather than
a reason to fall back in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton

from graphengine.config import DTYPES
from graphengine.kernels import FMA_LANES, LinearKind, LinearPlan, RowFamily, WeightFormat
from graphengine.kernels.experts.plans import check_expert_plan
from graphengine.kernels.linear.packed_linear import check_packed_plan, streams
from graphengine.models.contract import (
    ByLinear,
    Linear,
    LinearPlans,
    Linears,
    heuristic_linear_plan,
)

log = logging.getLogger(__name__)

PlanSource = Literal["user", "shipped", "heuristic"]

NUMERICS_VERSION = 5
"""Raise it with every change to a kernel, of prefill too, that may change the bits of a result
while all plans stay the same: another order of summation, another rounding, another formula or
constant, such as those of `kernels/attention/prefill.py`."""

FORMAT_VERSION = 1
"""Of the files; raise it when an older reader would misread a newer file."""

MAX_WEIGHT_REGISTERS = 255
"""Registers that a thread has at most; an `fma` program keeps its weights in them."""

SM_REGISTERS = 64 * 1024
"""Of all threads on an SM: with 16 warps a thread has half of the above."""

MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of a program on sm_90."""

MAX_SPLITS = 16
"""Parts of K. Each is a float32 [N, M] in the workspace, which is budgeted for this many."""

_BLOCK_M = {"fma": (1, 16), "dot": (16, 256), "packed": (16, 256)}
_BLOCK_K = (16, 8192)
_WARPS = (1, 16)
_STAGES = (1, 8)
# Lanes of a program, which share memory with the weights.
_LANES = 32
# Of a group's scale, at most.
_SCALE_BYTES = 4

# The family is part of the key.
_PLAN_FIELDS = LinearPlan._fields[1:]
_KEY_FIELDS = ("family", "kind", "M", "K", "dtype")
# Of a key; absent where a weight is in the model's dtype, and of weights that are no experts.
_WEIGHT_FIELD, _EXPERT_FIELD = "weight", "expert"
# Of a plan; absent where it is the key's.
_FAMILY_FIELD = "family"
_MEASURED_FIELDS = ("us", "torch", "triton", "date")
_FILE_FIELDS = ("version", "device", "entries")
# Kernels count rows and columns in int32.
_MAX_INTEGER = 2**31 - 1


class TuningKey(NamedTuple):
    """What a plan was measured for: a weight [M, K], its epilogue, and a family.

    dtype   of the model
    weight  how the weight is stored; None: in that dtype
    expert  whether it is that of one of several experts. Its plan may be of another family than the
            engine's, which is `family`
    """

    family: RowFamily
    kind: LinearKind
    M: int
    K: int
    dtype: torch.dtype
    weight: WeightFormat | None = None
    expert: bool = False

    @classmethod
    def of(cls, linear: Linear, family: RowFamily, dtype: torch.dtype) -> TuningKey:
        """That of a model's linear."""
        expert = linear.experts > 0
        return cls(family, linear.kind, linear.rows, linear.columns, dtype, linear.weight, expert)

    @property
    def linear(self) -> Linear:
        """One that has this key."""
        return Linear(self.kind, self.M, self.K, self.weight, experts=int(self.expert))

    def __str__(self) -> str:
        stored = "" if self.weight is None else f" in {self.weight.label}"
        expert = " of experts" if self.expert else ""
        shape = f"{self.M} x {self.K}"
        return f"{self.family} {self.kind} {shape} {dtype_name(self.dtype)}{stored}{expert}"


class TunedPlan(NamedTuple):
    """A plan, and for information how fast it was, with what, and when.

    What one linear costs depends on its neighbours, so `us` is not only the linear's. It is the
    time of qkv, output, gate_up and down of one layer, in a chain of such layers in which this plan
    and those found with it are in use; of lm_head it is what lm_head adds to the end of that chain.
    """

    plan: LinearPlan
    us: float
    """Microseconds at the first number of rows that was measured: 1 for `fma`, 8 for `dot` unless
    asked for otherwise."""
    torch: str
    triton: str
    date: str
    """ISO 8601"""


Table = dict[TuningKey, TunedPlan]


class PlanOrigins(ByLinear[PlanSource]):
    """Where each plan of a `LinearPlans` came from."""

    __slots__ = ()

    @property
    def untuned(self) -> tuple[str, ...]:
        """Linears that got the heuristic."""
        return tuple(name for name, source in self.items() if source == "heuristic")

    def __str__(self) -> str:
        different = set(self.values())
        if len(different) == 1:
            return different.pop()
        return ", ".join(f"{name} {source}" for name, source in self.items())


def choose_plans(
    linears: Linears, dtype: torch.dtype, family: RowFamily, device: torch.device | str
) -> tuple[LinearPlans, PlanOrigins]:
    """A plan for each linear of a decode step: the user's, else the shipped, else the heuristic.

    On a GPU what no table knows is logged at INFO. (On a CPU plans are carried along unused.)

    Raises:
        ValueError: a table that is not as this module writes it or that cannot be read, with its
            path in the message. It is not passed over: other plans may give other tokens. (Where
            the user has no cache directory, or none that may be entered, there is no table.)
    """
    gpu = device_name(device)
    tables: dict[PlanSource, Table] = {
        "user": read_user_table(gpu),
        "shipped": shipped_table(gpu),
    }
    plans: dict[str, LinearPlan] = {}
    sources: dict[str, PlanSource] = {}
    for name, linear in linears.items():
        plans[name], sources[name] = choose_plan(TuningKey.of(linear, family, dtype), tables)
    chosen = PlanOrigins(sources)
    if chosen.untuned and torch.device(device).type != "cpu":
        missing = (
            f"{name} {linears[name].rows} x {linears[name].columns}" for name in chosen.untuned
        )
        log.info(
            "no tuned plan on %s for %s %s: %s; `graphengine tune --family %s` with `--checkpoint` "
            "or `--shape` measures them",
            gpu,
            family,
            dtype_name(dtype),
            ", ".join(missing),
            family,
        )
    return LinearPlans(plans), chosen


def choose_plan(
    key: TuningKey, tables: Mapping[PlanSource, Table]
) -> tuple[LinearPlan, PlanSource]:
    """The plan of the first of the tables that knows the weight, else the heuristic."""
    for source, table in tables.items():
        if key in table:
            return table[key].plan, source
    return heuristic_linear_plan(key.linear, key.dtype, key.family), "heuristic"


def numerics_id(
    linears: Linears,
    plans: LinearPlans,
    *,
    dtype: torch.dtype,
    extra: Mapping[str, str | int | float | bool | None],
) -> str:
    """12 hexadecimal digits that name everything the bits of a step depend on but the model.

    Two engines with equal ids, on one kind of GPU and with one version of Triton, compute the same
    bits; what only changes the speed is left out. `extra` adds what lies outside of the linears,
    such as the length of attention's splits.
    """
    facts = {
        "version": NUMERICS_VERSION,
        "dtype": dtype_name(dtype),
        "linears": {
            name: _numerics(
                plan,
                leaves_squares=linears[name].kind == "residual",
                packed=linears[name].weight is not None,
            )
            for name, plan in plans.items()
        },
        "extra": dict(extra),
    }
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _numerics(
    plan: LinearPlan, *, leaves_squares: bool, packed: bool = False
) -> dict[str, str | int]:
    """The parts of a plan that place the elements of a sum.

    packed          whether the weight is, so that the streams of a tile follow from `block_m`
    leaves_squares  whether the programs leave sums of squares of their output, as those with a
                    residual epilogue do (`kernels/linear/residual.py`)

    Warps count in `dot` too: sums of squares are reduced over a tile that is spread over them.
    `block_m` says in `fma` how a tile is spread over threads, and in both families how many columns
    a sum of squares covers.
    """
    names = ["family", "block_k", "splits", "warps"]
    if plan.family == "fma" or leaves_squares or packed:
        names.append("block_m")
    return {name: getattr(plan, name) for name in names}


def check_plan(
    plan: LinearPlan,
    kind: LinearKind,
    K: int,
    dtype: torch.dtype,
    weight: WeightFormat | None = None,
    *,
    expert: bool = False,
) -> None:
    """ValueError for a plan that the kernels cannot run, or only by spilling registers.

    weight  how the weight is stored; None: in `dtype`
    expert  whether it is one of several, which have kernels of their own
    """
    if expert:
        check_expert_plan(plan, kind, weight)
    least_m, most_m = _BLOCK_M[plan.family if weight is None else "packed"]
    # A thread of a SwiGLU holds a gate and its up row.
    least_m = max(least_m, 2) if kind == "swiglu" else least_m
    for name, (least, most) in {
        "block_m": (least_m, most_m),
        "block_k": _BLOCK_K,
        "splits": (1, MAX_SPLITS),
        "warps": _WARPS,
    }.items():
        value = getattr(plan, name)
        if not least <= value <= most or value & (value - 1):
            raise ValueError(
                f"{name}={value} must be a power of two from {least} to {most} "
                f"for {kind} in {plan.family}"
            )
    least, most = _STAGES
    if not least <= plan.stages <= most:
        raise ValueError(f"stages={plan.stages} must be in [{least}, {most}]")
    if kind == "sample" and plan.splits > 1:
        raise ValueError(
            f"splits={plan.splits} must be 1 for sample: its M is a vocabulary, which fills a GPU "
            "by itself, and parts of that size are not in the memory budget"
        )
    if weight is not None and not expert:
        _check_packed(plan, K, weight)
    elif plan.family == "fma":
        _check_fma(plan, K, dtype)
    else:
        _check_dot(plan, K, dtype)


def _check_packed(plan: LinearPlan, K: int, weight: WeightFormat) -> None:
    check_packed_plan(plan, weight)
    if plan.family == "fma" and plan.splits > 1:
        raise ValueError(f"splits={plan.splits} must be 1 in fma")
    _check_splits(plan, K)
    lanes = FMA_LANES if plan.family == "fma" else _LANES
    shared = packed_shared_bytes(plan, K, weight, lanes)
    if shared > MAX_SHARED_BYTES:
        raise ValueError(
            f"stages={plan.stages} of block_m={plan.block_m} x block_k={plan.block_k} in "
            f"{weight.label} take {shared} bytes of shared memory with the inputs of {lanes} "
            f"lanes, at most {MAX_SHARED_BYTES} exist"
        )


def _check_fma(plan: LinearPlan, K: int, dtype: torch.dtype) -> None:
    if plan.splits > 1 or plan.stages > 1:
        raise ValueError(
            f"splits={plan.splits} and stages={plan.stages} must be 1: fma has no loop over K"
        )
    registers = weight_registers(plan, K, dtype)
    most = min(MAX_WEIGHT_REGISTERS, SM_REGISTERS // (32 * plan.warps))
    if registers > most:
        raise ValueError(
            f"block_m={plan.block_m} rows of K={K} take {registers} registers a thread with "
            f"warps={plan.warps}, at most {most} exist"
        )


def _check_splits(plan: LinearPlan, K: int) -> None:
    tiles = triton.cdiv(K, plan.block_k)
    if plan.splits > tiles:
        raise ValueError(
            f"splits={plan.splits} want more than the {tiles} tiles of block_k={plan.block_k} in "
            f"K={K}"
        )


def _check_dot(plan: LinearPlan, K: int, dtype: torch.dtype) -> None:
    _check_splits(plan, K)
    shared = shared_bytes(plan, dtype)
    if shared > MAX_SHARED_BYTES:
        raise ValueError(
            f"stages={plan.stages} of block_m={plan.block_m} x block_k={plan.block_k} take "
            f"{shared} bytes of shared memory, at most {MAX_SHARED_BYTES} exist"
        )


def weight_registers(plan: LinearPlan, K: int, dtype: torch.dtype) -> int:
    """32-bit registers of a thread that hold the rows of an `fma` program."""
    tiles = triton.cdiv(K, plan.block_k)
    held = plan.block_m * plan.block_k * tiles * dtype.itemsize
    return int(triton.cdiv(held, 4 * 32 * plan.warps))


def shared_bytes(plan: LinearPlan, dtype: torch.dtype) -> int:
    """Shared memory that the tiles of the `dot` loop take, for two tiles of 16 lanes."""
    return plan.stages * (plan.block_m + _LANES) * plan.block_k * dtype.itemsize


def packed_shared_bytes(plan: LinearPlan, K: int, weight: WeightFormat, lanes: int) -> int:
    """Shared memory of a program of so many lanes with a packed weight: codes and inputs of the
    tiles, and all scales and zero points.
    """
    tiles = triton.cdiv(K, plan.block_k * plan.splits)
    held = 1 if lanes == 1 else 8 if lanes <= 8 else 16 if lanes <= 16 else _LANES
    ring = plan.block_k * (plan.block_m * weight.bits // 8 + 2 * held)
    groups = 0
    if weight.columns:
        piece = min(weight.columns, plan.block_k // streams(plan))
        pieces = triton.next_power_of_2(triton.cdiv(K, piece * plan.splits))
        groups = pieces * plan.block_m * (_SCALE_BYTES + weight.has_zeros)
    return int(min(max(2, plan.stages), tiles) * ring + groups)


def device_name(device: torch.device | str) -> str:
    """The name that tables go by: what CUDA calls the GPU, or "cpu"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def user_table_path(device: str) -> Path:
    """The user's table for a device of this name.

    In `$GRAPHENGINE_CACHE_DIR`, else `$XDG_CACHE_HOME/graphengine`, else `~/.cache/graphengine`.
    ValueError if neither variable is set and the user has no home directory.
    """
    own, cache = os.environ.get("GRAPHENGINE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        folder = Path(own)
    else:
        folder = (Path(cache) if cache else _home() / ".cache") / "graphengine"
    return folder / f"tuned-{_slug(device)}.json"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise ValueError(
            "no place for tuned plans: this user has no home directory, and neither "
            "GRAPHENGINE_CACHE_DIR nor XDG_CACHE_HOME is set"
        ) from error


def read_user_table(device: str) -> Table:
    """The user's plans; none where there is no file, no home, or a folder that may not be entered.

    ValueError names a file that is damaged or cannot be read.
    """
    try:
        path = user_table_path(device)
    except ValueError as error:
        log.info("%s", error)
        return {}
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        # Of a folder above: a file that may not be read still shows its state. Services run with
        # the home of somebody else.
        log.info("tuned plans of the user are not looked at: %s", error)
        return {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return read_table(path, device)


def shipped_table(device: str) -> Table:
    """The plans that come with the package, for a device that has been measured."""
    file = resources.files("graphengine") / "tuned" / f"{_slug(device)}.json"
    return parse_table(file.read_bytes(), device, origin=str(file)) if file.is_file() else {}


def _slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write_table(path: Path, device: str, plans: Mapping[TuningKey, TunedPlan]) -> None:
    """Put plans into the table at `path`; others that it holds stay.

    The file is replaced at once: a reader sees the old one or the new one, and an interrupted write
    leaves the old one. Of two programs that write together one may lose what it added.

    Raises:
        ValueError: what is there is no table of this device (it is left as it is), or a plan is
            none that `check_plan` lets pass.
    """
    merged = (read_table(path, device) if path.exists() else {}) | dict(plans)
    content = _format_table(device, merged)
    parse_table(content.encode(), device, origin=f"what was to be written to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename does not cross file systems.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _format_table(device: str, plans: Mapping[TuningKey, TunedPlan]) -> str:
    """Sorted, an entry a line: a new measurement is a diff of one line."""

    def order(item: tuple[TuningKey, TunedPlan]) -> tuple[str | int, ...]:
        key = item[0]
        label = "" if key.weight is None else key.weight.label
        return (key.family, key.kind, key.M, key.K, dtype_name(key.dtype), label, key.expert)

    ordered = sorted(plans.items(), key=order)
    entries = ",".join(f"\n    {json.dumps(_entry(*item))}" for item in ordered)
    return (
        f'{{\n  "version": {FORMAT_VERSION},\n  "device": {json.dumps(device)},\n'
        f'  "entries": [{entries}\n  ]\n}}\n'
    )


def _entry(key: TuningKey, tuned: TunedPlan) -> dict[str, Any]:
    measured = {name: getattr(tuned, name) for name in _MEASURED_FIELDS}
    plan = {name: getattr(tuned.plan, name) for name in _PLAN_FIELDS}
    named = {name: getattr(key, name) for name in _KEY_FIELDS} | {"dtype": dtype_name(key.dtype)}
    if key.weight is not None:
        named[_WEIGHT_FIELD] = key.weight.label
    if key.expert:
        named[_EXPERT_FIELD] = True
    if tuned.plan.family != key.family:
        plan[_FAMILY_FIELD] = tuned.plan.family
    return {**named, "plan": plan, **measured}


def read_table(path: Path, device: str) -> Table:
    """The plans in a file. ValueError, with path and entry, for all that is not as it must be."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return parse_table(content, device, origin=str(path))


class _Object(dict[str, Any]):
    """A JSON object that knows which names it holds twice; of those a dict keeps the last."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.repeated = [name for name, count in counts.items() if count > 1]


def parse_table(content: bytes, device: str, *, origin: str) -> Table:
    """`read_table` of a file's content; `origin` is what errors call it."""
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_Object)
    except ValueError as error:
        raise ValueError(f"{origin} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{origin} is nested too deeply: {error}") from error
    if not isinstance(document, _Object):
        raise ValueError(f"{origin} must hold an object, not {_brief(document)}")
    version = document.get("version")
    # 1.0 and true are equal to 1.
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"{origin} has version {_brief(version)}, this program reads "
            f"{FORMAT_VERSION}: delete the file or run `graphengine tune` with a matching program"
        )
    try:
        _require_fields(document, _FILE_FIELDS)
        if document["device"] != device:
            raise ValueError(f"device is {_brief(document['device'])}, not {device!r}")
        if not isinstance(document["entries"], list):
            raise ValueError(f"entries must be a list, not {_brief(document['entries'])}")
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    table: Table = {}
    for index, entry in enumerate(document["entries"]):
        try:
            key, tuned = _parse_entry(entry)
            if key in table:
                raise ValueError(f"a second plan for {key}")
        except ValueError as error:
            raise ValueError(f"{origin}, entry {index} ({_label(entry)}): {error}") from error
        table[key] = tuned
    return table


def _parse_entry(entry: Any) -> tuple[TuningKey, TunedPlan]:
    if not isinstance(entry, _Object):
        raise ValueError(f"must be an object, not {_brief(entry)}")
    optional = [name for name in (_WEIGHT_FIELD, _EXPERT_FIELD) if name in entry]
    _require_fields(entry, (*_KEY_FIELDS, *optional, "plan", *_MEASURED_FIELDS))
    family = _one_of(entry, "family", get_args(RowFamily))
    kind = _one_of(entry, "kind", get_args(LinearKind))
    dtype = DTYPES[_one_of(entry, "dtype", tuple(DTYPES))]
    weight, expert = None, _EXPERT_FIELD in optional and _boolean(entry, _EXPERT_FIELD)
    if _WEIGHT_FIELD in optional:
        weight = WeightFormat.of_label(_string(entry, _WEIGHT_FIELD))
    key = TuningKey(family, kind, _integer(entry, "M"), _integer(entry, "K"), dtype, weight, expert)
    if kind == "swiglu" and key.M % 2:
        raise ValueError(f"M={key.M} must be even: as many gate rows as up rows")
    numbers = entry["plan"]
    if not isinstance(numbers, _Object):
        raise ValueError(f"plan must be an object, not {_brief(numbers)}")
    own_family = (_FAMILY_FIELD,) if expert and _FAMILY_FIELD in numbers else ()
    _require_fields(numbers, (*_PLAN_FIELDS, *own_family))
    if own_family:
        family = _one_of(numbers, _FAMILY_FIELD, get_args(RowFamily))
    sizes = {name: _integer(numbers, name, 0) for name in _PLAN_FIELDS if name != "overlap"}
    plan = LinearPlan(family, overlap=_boolean(numbers, "overlap"), **sizes)
    check_plan(plan, kind, key.K, dtype, weight, expert=expert)
    return key, TunedPlan(
        plan,
        us=_positive(entry, "us"),
        **{name: _string(entry, name) for name in ("torch", "triton", "date")},
    )


def _require_fields(values: _Object, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown or values.repeated:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        parts += [f"has more than one {', '.join(values.repeated)}"] if values.repeated else []
        raise ValueError(" and ".join(parts))


def _one_of(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Any:
    value = values[name]
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {_brief(value)}, none of {', '.join(known)}")
    return value


def _integer(values: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {_brief(value)}, not an integer of at least {least}")
    if value > _MAX_INTEGER:
        raise ValueError(f"{name} is {_brief(value)}, at most {_MAX_INTEGER} fits")
    return value


def _boolean(values: Mapping[str, Any], name: str) -> bool:
    value = values[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_brief(value)}, not true or false")
    return value


def _positive(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An integer may exceed all floats.
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {_brief(value)}, not a positive number")
    return number


def _string(values: Mapping[str, Any], name: str) -> str:
    value = values[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_brief(value)}, not a string")
    return value


def _label(entry: Any) -> str:
    """What an entry claims to be for, however damaged it is."""
    if not isinstance(entry, dict):
        return _brief(entry)
    family, kind, M, K, dtype = (_brief(entry.get(name, "?")) for name in _KEY_FIELDS)
    return f"{family} {kind} {M} x {K} {dtype}".replace("'", "")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
