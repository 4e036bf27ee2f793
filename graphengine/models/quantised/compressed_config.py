"""Reads a compressed-tensors config: groups of linears, each with one scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graphengine.kernels.linear.quantised import CodeKind, WeightFormat
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
_MXFP8 = "mxfp8-quantized"
# The types and bits that weights of each format may have.
FORMATS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8), ("int", 4)),
    "naive-quantized": (("float", 8), ("int", 8), ("int", 4)),
    "pack-quantized": (("int", 4), ("int", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
    _MXFP8: (("float", 8),),
}
# Columns that share a scale, for formats that fix the number.
_GROUPS_OF = {"nvfp4-pack-quantized": [16], "mxfp4-pack-quantized": [32], _MXFP8: [32]}
_CODES: Mapping[tuple[str, int], CodeKind] = {
    ("float", 8): "e4m3",
    ("float", 4): "e2m1",
    ("int", 8): "int8",
    ("int", 4): "int4",
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

    kind: str
    bits: int
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
    name = (group if group.get("format") is not None else config).get("format")
    known = [*FORMATS] if where == inside else [*FORMATS, _MIXED]
    name = read_choice({"format": name}, "format", known, where)
    if name == _MIXED:
        raise unsupported(f"{inside}.format", None, ", ".join(map(repr, FORMATS)))
    weights = _read_weights(group["weights"], name, f"{inside}.weights")
    return _scheme(weights, name, f"{inside}.weights")._replace(notes=notes)


def _read_weights(given: Any, name: str, inside: str) -> _Weights:
    if not isinstance(given, dict):
        raise unsupported(inside, given, "a JSON object, null")
    check_keys(given, _WEIGHT_KEYS, inside)
    kind = given.get("type", "int")
    given = {**given, "type": kind.lower() if isinstance(kind, str) else kind}
    kind = read_choice(
        given, "type", list(dict.fromkeys(kind for kind, _ in FORMATS[name])), inside
    )
    bits = read_choice(
        given, "num_bits", [bits for each, bits in FORMATS[name] if each == kind], inside, 8
    )
    read_choice(given, "dynamic", [False, None], inside)
    symmetric = read_choice(given, "symmetric", [True] + [False] * (kind == "int"), inside, True)
    strategy = given.get("strategy") or _usual_strategy(given.get("group_size"))
    known = _strategies(name, kind, symmetric)
    strategy = read_choice({"strategy": strategy}, "strategy", known, inside)
    columns = 0
    if strategy in ("group", "tensor_group"):
        columns = read_choice(given, "group_size", _GROUPS_OF.get(name, GROUPS), inside)
    else:
        read_size(given, "group_size", inside, [], -1) if given.get("group_size") else None
    orders = ["group", "dynamic", True, "weight", "static", False, None]
    order = read_choice(given, "actorder", orders, inside)
    block = _read_block(given, inside) if strategy == "block" else None
    return _Weights(
        kind=kind,
        bits=bits,
        strategy=strategy,
        columns=columns,
        block=block,
        has_zeros=not symmetric,
        needs_order=order in ("group", "dynamic", True),
    )


def _usual_strategy(group_size: Any) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _strategies(name: str, kind: str, symmetric: bool) -> Sequence[str]:
    if name == "nvfp4-pack-quantized":
        return ("tensor_group",)
    if name in ("mxfp4-pack-quantized", _MXFP8):
        return ("group",)
    if kind == "float":
        return ("tensor", "channel", "group", "block")
    if name == "pack-quantized" and not symmetric:
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


def _scheme(weights: _Weights, name: str, inside: str) -> WeightScheme:
    rows, columns = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "block": weights.block or (0, 0),
    }.get(weights.strategy, (1, weights.columns))
    code = _CODES[weights.kind, weights.bits]
    scheme = WeightScheme(
        layout="codes",
        format=WeightFormat(code, rows, columns, weights.has_zeros),
        powers=name == _MXFP8,
        zeros="weight_zero_point",
        order="weight_g_idx",
        needs_order=weights.needs_order,
        unread=_UNREAD,
    )
    if name == "pack-quantized":
        return scheme._replace(layout="int32_rows", codes=("weight_packed",))
    if weights.bits == 4 and weights.kind == "float":
        whole = "weight_global_scale" if name == "nvfp4-pack-quantized" else None
        return scheme._replace(
            layout="halves", codes=("weight_packed",), whole=whole, inverse=whole is not None
        )
    return scheme
