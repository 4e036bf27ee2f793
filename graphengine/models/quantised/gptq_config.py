"""Reads configs of AWQ and GPTQ: integers of 4 or 8 bits in groups, packed for a kernel.

Scales may be negative: AutoRound writes such files in both formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphengine.kernels.linear.kinds import KindName
from graphengine.kernels.linear.quantised import format_of
from graphengine.models.hf.config_schema import unsupported
from graphengine.models.quantised.schemes import (
    ABOUT_MAKING,
    GROUPS,
    Quantisation,
    Rule,
    WeightScheme,
    always,
    among_names,
    check_keys,
    from_start,
    is_head,
    read_choice,
    read_names,
    read_size,
)

_INSIDE = "quantization_config"
_KINDS: Mapping[int, KindName] = {4: "int4", 8: "int8"}
_AWQ_KEYS = """
    bits w_bit group_size q_group_size zero_point version format modules_to_not_convert desc_act sym
    pack_dtype
"""
_GPTQ_KEYS = """
    bits group_size sym desc_act checkpoint_format format pack_dtype lm_head dynamic
    modules_in_block_to_quantize modules_to_not_convert
"""


def read_awq(config: Mapping[str, Any]) -> Quantisation:
    """Read AWQ's gemm layout of 4 bits. ValueError, with key and value, for other layouts."""
    check_keys(config, ABOUT_MAKING + _AWQ_KEYS, _INSIDE)
    config = {"bits": config.get("w_bit", 4), "group_size": config.get("q_group_size"), **config}
    for key in ("version", "format"):
        read_choice(config, key, ["gemm", "GEMM"], _INSIDE, "gemm")
    read_choice(config, "pack_dtype", ["int32"], _INSIDE, "int32")
    scheme = awq_scheme(config, _INSIDE)
    skipped = read_names(config, "modules_to_not_convert", _INSIDE)
    listed = among_names(skipped, f"{_INSIDE}.modules_to_not_convert")
    inside_name = [f".{name}." for name in skipped]

    def is_skipped(linear: str) -> bool:
        # AWQ's own tools match an entry anywhere in a name.
        return listed(linear) or any(part in f".{linear}." for part in inside_name)

    return Quantisation("awq", (Rule(is_head, None), Rule(is_skipped, None), Rule(always, scheme)))


def awq_scheme(config: Mapping[str, Any], inside: str) -> WeightScheme:
    """The gemm layout with these settings. ValueError for others, with the key below `inside`."""
    read_choice(config, "bits", [4], inside)
    columns = read_size(config, "group_size", inside, GROUPS)
    has_zeros = read_choice(config, "zero_point", [True, False], inside, True)
    return WeightScheme(
        layout="awq",
        kind="int4",
        format=format_of("int4", 1, columns, has_zeros),
        codes=("qweight",),
        scales=("scales",),
        signed=True,
        zeros="qzeros" if has_zeros else None,
        unread=(),
    )


def read_gptq(config: Mapping[str, Any]) -> Quantisation:
    """Read GPTQ, with both kinds of zero points and `dynamic`.

    ValueError, with key and value, for anything else.
    """
    check_keys(config, ABOUT_MAKING + _GPTQ_KEYS, _INSIDE)
    rules = []
    if not read_choice(config, "lm_head", [True, False, None], _INSIDE):
        rules.append(Rule(is_head, None))
    skipped = read_names(config, "modules_to_not_convert", _INSIDE)
    rules.append(Rule(among_names(skipped, f"{_INSIDE}.modules_to_not_convert"), None))
    rules += _dynamic_rules(config)
    scheme = gptq_scheme(config, _INSIDE)
    blocks = _listed_modules(config)
    if blocks:
        ends = tuple(f".{name}" for name in blocks)
        rules.append(Rule(lambda linear: f".{linear}".endswith(ends) or is_head(linear), scheme))
    else:
        rules.append(Rule(always, scheme))
    return Quantisation("gptq", tuple(rules))


def gptq_scheme(config: Mapping[str, Any], inside: str) -> WeightScheme:
    """GPTQ's packing with these settings. ValueError for others, with the key below `inside`."""
    bits = read_choice(config, "bits", [*_KINDS], inside)
    columns = read_size(config, "group_size", inside, GROUPS)
    symmetric = read_choice(config, "sym", [True, False], inside, True)
    kind = config.get("checkpoint_format") or config.get("format")
    read_choice({"checkpoint_format": kind}, "checkpoint_format", ["gptq", "gptq_v2", None], inside)
    read_choice(config, "pack_dtype", ["int32"], inside, "int32")
    name = _KINDS[bits]
    return WeightScheme(
        layout="gptq",
        kind=name,
        format=format_of(name, 1, columns, not symmetric),
        codes=("qweight",),
        scales=("scales",),
        signed=True,
        zeros="qzeros",
        zero_shift=0 if kind == "gptq_v2" else 1,
        order="g_idx",
        needs_order=bool(read_choice(config, "desc_act", [True, False, None], inside)),
        unread=(),
    )


def _dynamic_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Rules by regular expressions, which leave linears as they are ("-:") or change settings."""
    inside = f"{_INSIDE}.dynamic"
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise unsupported(inside, dynamic, "a JSON object, null")
    rules = []
    for key, changes in dynamic.items():
        sign, text = (key[:2], key[2:]) if key[:2] in ("-:", "+:") else ("+:", key)
        matches = from_start(text, inside)
        if sign == "-:":
            rules.append(Rule(matches, None))
            continue
        if not isinstance(changes, dict):
            raise unsupported(f"{inside}.{key}", changes, "a JSON object")
        check_keys(changes, "bits group_size sym desc_act mse", f"{inside}.{key}")
        rules.append(Rule(matches, gptq_scheme({**config, **changes}, f"{inside}.{key}")))
    return rules


def _listed_modules(config: Mapping[str, Any]) -> Sequence[str]:
    """The linears of a block that are quantised; empty: all of them."""
    found = config.get("modules_in_block_to_quantize") or []
    listed = found if isinstance(found, list) else [None]
    flat = [name for each in listed for name in (each if isinstance(each, list) else [each])]
    names = [name for name in flat if isinstance(name, str)]
    if len(names) < len(flat):
        known = "lists of strings, null"
        raise unsupported(f"{_INSIDE}.modules_in_block_to_quantize", found, known)
    return names
