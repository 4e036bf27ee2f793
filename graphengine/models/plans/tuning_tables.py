"""Tables of measured plans: one JSON file per device, with a plan for each weight that was tuned.

`graphengine tune` writes the user's own table to the cache directory; shipped tables are in
`tuned/`. Nothing in a table is executed, and a damaged one is an error with its path and entry.
"""

from __future__ import annotations

import contextlib
import functools
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
from typing import Any, NamedTuple, get_args

import torch

from graphengine.kernels.core.devices import device_of
from graphengine.kernels.linear.plans import LinearKind, LinearPlan, RowFamily
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.linears import Linear
from graphengine.models.plans.plan_limits import check_plan
from graphengine.options.devices import DTYPES

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Version of the files; raise it when an older reader would misread a newer file."""

# The family is part of the key.
_PLAN_FIELDS = LinearPlan._fields[1:]
_KEY_FIELDS = ("family", "kind", "M", "K", "dtype")
# Optional fields of a key: the first is absent for weights in the model's dtype, the second for all
# weights but experts'.
_WEIGHT_FIELD, _EXPERT_FIELD = "weight", "expert"
# Optional field of a plan; absent if it is the key's family.
_FAMILY_FIELD = "family"
_MEASURED_FIELDS = ("us", "torch", "triton", "date")
_FILE_FIELDS = ("version", "device", "entries")
# Kernels count rows and columns in int32.
_MAX_INTEGER = 2**31 - 1


class TuningKey(NamedTuple):
    """The key of a measured plan: a weight [M, K], its epilogue, and a family.

    dtype   the model's
    weight  how the weight is stored; None: in that dtype
    expert  whether it is an expert's weight. Its plan may be of another family than `family`, which
            is the engine's
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
        """The key of a model's linear."""
        expert = linear.experts > 0
        return cls(family, linear.kind, linear.rows, linear.columns, dtype, linear.weight, expert)

    @property
    def linear(self) -> Linear:
        """A linear that has this key."""
        return Linear(self.kind, self.M, self.K, self.weight, experts=int(self.expert))

    def __str__(self) -> str:
        stored = "" if self.weight is None else f" in {self.weight.label}"
        expert = " of experts" if self.expert else ""
        shape = f"{self.M} x {self.K}"
        return f"{self.family} {self.kind} {shape} {dtype_name(self.dtype)}{stored}{expert}"


class TunedPlan(NamedTuple):
    """A plan and, for information, how fast it was, with which versions, and when.

    The cost of a linear depends on its neighbours, so `us` is not the linear's alone. It is the
    time of one layer's qkv, output, gate_up and down, in a chain of such layers that use this plan
    and the plans found with it. For lm_head it is the time that lm_head adds at the end of that
    chain.
    """

    plan: LinearPlan
    us: float
    """Microseconds at the first number of rows that was measured: 1 for `fma`, 8 for `dot` unless
    set otherwise."""
    torch: str
    triton: str
    date: str
    """ISO 8601"""


Table = dict[TuningKey, TunedPlan]


def device_name(device: torch.device | str) -> str:
    """The name of a device in tables: CUDA's name of the GPU, or "cpu". For the meta device it is
    the name of the assumed GPU.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = device_of(device) if device.type == "meta" else None
    return device.type if found is None else found.name


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
    """The user's plans; empty if there is no file or no home, or its folder may not be entered.

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
        # The error means that a folder above may not be entered, as `stat` also works on unreadable
        # files. Services may run with another user's home.
        log.info("tuned plans of the user are not looked at: %s", error)
        return {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return read_table(path, device)


@functools.cache
def shipped_table(device: str) -> Table:
    """The plans shipped for this device; empty if it has not been measured. Not to be changed."""
    file = resources.files("graphengine") / "tuned" / f"{_slug(device)}.json"
    return parse_table(file.read_bytes(), device, origin=str(file)) if file.is_file() else {}


def _slug(device: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write_table(path: Path, device: str, plans: Mapping[TuningKey, TunedPlan]) -> None:
    """Put plans into the table at `path`; its other plans stay.

    The file is replaced atomically: a reader sees the old one or the new one, and an interrupted
    write leaves the old one. If two programs write at the same time, one may lose what it added.

    Raises:
        ValueError: the file is not a table of this device (it is left as it is), or `check_plan`
            refuses a plan.
    """
    merged = (read_table(path, device) if path.exists() else {}) | dict(plans)
    content = _format_table(device, merged)
    parse_table(content.encode(), device, origin=f"what was to be written to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the target's folder: a rename cannot cross file systems.
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
    """Format a table, sorted, one entry per line: a new measurement is a diff of one line."""

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
    """The plans in a file. ValueError, with path and entry, for anything malformed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return parse_table(content, device, origin=str(path))


class _Object(dict[str, Any]):
    """A JSON object that records repeated names; a dict keeps only the last value of each."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs)
        self.repeated = [name for name, count in counts.items() if count > 1]


def parse_table(content: bytes, device: str, *, origin: str) -> Table:
    """`read_table` of a file's content; `origin` names it in errors."""
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
        # An integer may be too large for a float.
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
    """The weight that an entry says it is for, however damaged the entry is."""
    if not isinstance(entry, dict):
        return _brief(entry)
    family, kind, M, K, dtype = (_brief(entry.get(name, "?")) for name in _KEY_FIELDS)
    return f"{family} {kind} {M} x {K} {dtype}".replace("'", "")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
