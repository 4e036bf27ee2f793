"""Reads a compressed-tensors config: groups of linears, each with one scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graphengine.kernels.linear.kinds import KINDS, Kind, KindName
from graphengine.kernels.linear.quantised import format_of
from graphengine.models.checkpoints.kv_scheme import check_kv
from graphengine.models.hf.config_schema import unsupported
from graphengine.models.quantised.schemes import (
    ABOUT_MAKING,
    GROUPS,
    Quantisation,
    Rule,
    WeightScheme,
    check_keys,
    from_start,
    plain_layout,
    read_choice,
    read_names,
    read_size,
)

_INSIDE = "quantization_config"
_TOP_KEYS = """
    quant_method config_groups ignore format quantization_status kv_cache_scheme
    global_compression_ratio sparsity_config transform_config version
"""
_GROUP_KEYS = "targets weights input_activations output_activations format"
_WEIGHT_KEYS = """
    num_bits type strategy group_size symmetric dynamic block_structure actorder scale_dtype
    zp_dtype observer observer_kwargs
"""
_PACKED = "pack-quantized"
# The kinds that weights of each format may have: one of each type and number of bits.
FORMATS: Mapping[str, tuple[KindName, ...]] = {
    "float-quantized": ("fp8",),
    "int-quantized": ("int8", "int4"),
    "naive-quantized": ("fp8", "int8", "int4"),
    _PACKED: ("int4", "int8"),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "mxfp8-quantized": ("mxfp8",),
}
_MIXED = "mixed-precision"
# Targets that are a linear's class instead of its name.
_CLASSES = ("Linear", "Module")
_UNREAD = (
    *("input_scale", "input_zero_point", "input_global_scale"),
    *("output_scale", "output_zero_point"),
)


class _Weights(NamedTuple):
    """The `weights` of a group, checked; `columns` 0: all columns."""

    kind: KindName
    strategy: str
    columns: int
    block: tuple[int, int] | None
    has_zeros: bool
    needs_order: bool


def read_compressed(config: Mapping[str, Any]) -> Quantisation:
    """Read the config. ValueError, with key, value and what is known, for anything unknown."""
    check_keys(config, _TOP_KEYS + ABOUT_MAKING, _INSIDE)
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        # Sparse weights may be stored dense.
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise unsupported(f"{_INSIDE}.{key}", value, "null, {}")
    check_kv(config, _INSIDE, "config.json")
    # Older versions called compressed weights "frozen"; dtypes tell if they are not compressed.
    read_choice(config, "quantization_status", ["compressed", "frozen", None], _INSIDE)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported(f"{_INSIDE}.config_groups", groups, "a JSON object of groups")
    by_target: dict[str, WeightScheme | None] = {}
    for name, group in groups.items():
        inside = f"{_INSIDE}.config_groups.{name}"
        if not isinstance(group, dict):
            raise unsupported(inside, group, "a JSON object")
        scheme = _group_scheme(group, config, inside)
        by_target |= dict.fromkeys(read_names(group, "targets", inside), scheme)
    ignored = [
        Rule(_matcher(name, f"{_INSIDE}.ignore"), None)
        for name in read_names(config, "ignore", _INSIDE)
    ]
    # Names win over expressions, and these over classes, whatever their groups.
    targets = sorted(by_target, key=lambda target: (target in _CLASSES, "re:" in target, target))
    rules = [Rule(_matcher(name, f"{_INSIDE}.targets"), by_target[name]) for name in targets]
    return Quantisation("compressed-tensors", (*ignored, *rules))


def _matcher(target: str, inside: str) -> Callable[[str], bool]:
    if target.startswith("re:"):
        return from_start(target.removeprefix("re:"), inside)
    return lambda linear: linear == target or target in _CLASSES


def _group_scheme(
    group: Mapping[str, Any], config: Mapping[str, Any], inside: str
) -> WeightScheme | None:
    check_keys(group, _GROUP_KEYS, inside)
    notes = tuple(
        f"{key} are not quantised, as {inside} says: weights alone are"
        for key in ("input_activations", "output_activations")
        if group.get(key) is not None
    )
    if group.get("weights") is None:
        return None
    where = inside if group.get("format") is not None else _INSIDE
    format = (group if group.get("format") is not None else config).get("format")
    known = [*FORMATS] if where == inside else [*FORMATS, _MIXED]
    format = read_choice({"format": format}, "format", known, where)
    if format == _MIXED:
        raise unsupported(f"{inside}.format", None, ", ".join(map(repr, FORMATS)))
    weights = _read_weights(group["weights"], format, f"{inside}.weights")
    return _scheme(weights, format)._replace(notes=notes)


def _read_weights(given: Any, format: str, inside: str) -> _Weights:
    if not isinstance(given, dict):
        raise unsupported(inside, given, "a JSON object, null")
    check_keys(given, _WEIGHT_KEYS, inside)
    name, kind = _read_kind(given, format, inside)
    read_choice(given, "dynamic", [False, None], inside)
    asymmetric = [] if kind.code.middle is None else [False]
    symmetric = read_choice(given, "symmetric", [True, *asymmetric], inside, True)
    strategy = given.get("strategy") or _usual_strategy(given.get("group_size"))
    known = _strategies(format, kind, symmetric)
    strategy = read_choice({"strategy": strategy}, "strategy", known, inside)
    columns = 0
    if strategy in ("group", "tensor_group"):
        groups = (kind.columns,) if kind.columns else GROUPS
        columns = read_choice(given, "group_size", groups, inside)
    else:
        read_size(given, "group_size", inside, [], -1) if given.get("group_size") else None
    orders = ["group", "dynamic", True, "weight", "static", False, None]
    order = read_choice(given, "actorder", orders, inside)
    block = _read_block(given, inside) if strategy == "block" else None
    return _Weights(
        kind=name,
        strategy=strategy,
        columns=columns,
        block=block,
        has_zeros=not symmetric,
        needs_order=order in ("group", "dynamic", True),
    )


def _read_kind(given: Mapping[str, Any], format: str, inside: str) -> tuple[KindName, Kind]:
    kinds: dict[KindName, Kind] = {name: KINDS[name] for name in FORMATS[format]}
    type = given.get("type", "int")
    given = {**given, "type": type.lower() if isinstance(type, str) else type}
    types = list(dict.fromkeys(kind.code.type for kind in kinds.values()))
    type = read_choice(given, "type", types, inside)
    by_bits = {kind.code.bits: name for name, kind in kinds.items() if kind.code.type == type}
    name = by_bits[read_choice(given, "num_bits", [*by_bits], inside, 8)]
    return name, kinds[name]


def _usual_strategy(group_size: Any) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _strategies(format: str, kind: Kind, symmetric: bool) -> Sequence[str]:
    if kind.columns:
        return ("tensor_group",) if kind.whole else ("group",)
    if kind.code.type == "float":
        return ("tensor", "channel", "group", "block")
    if format == _PACKED and not symmetric:
        return ("channel", "group")
    return ("tensor", "channel", "group")


def _read_block(given: Mapping[str, Any], inside: str) -> tuple[int, int]:
    value = given.get("block_structure")
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2:
        rows, columns = (int(size) if str(size).isdecimal() else 0 for size in sizes)
        if rows > 0 and columns > 0:
            return rows, columns
    raise unsupported(f"{inside}.block_structure", value, "[rows, columns]")


def _scheme(weights: _Weights, format: str) -> WeightScheme:
    rows, columns = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "block": weights.block or (0, 0),
    }.get(weights.strategy, (1, weights.columns))
    kind = KINDS[weights.kind]
    scheme = WeightScheme(
        layout=plain_layout(kind),
        kind=weights.kind,
        format=format_of(weights.kind, rows, columns, weights.has_zeros),
        zeros="weight_zero_point",
        order="weight_g_idx",
        needs_order=weights.needs_order,
        unread=_UNREAD,
    )
    if format == _PACKED:
        return scheme._replace(layout="int32_rows", codes=("weight_packed",))
    if scheme.layout == "codes":
        return scheme
    whole = "weight_global_scale" if kind.whole else None
    return scheme._replace(codes=("weight_packed",), whole=whole, inverse=kind.whole)
