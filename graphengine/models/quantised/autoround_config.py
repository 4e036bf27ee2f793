"""Reads configs of AutoRound's own format, whose tensors are packed as GPTQ's or AWQ's.

Scales may be negative: AutoRound's symmetric rounding takes the sign that fits the largest number
of a group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from graphengine.models.hf.config_schema import unsupported
from graphengine.models.quantised.gptq_config import awq_scheme, gptq_scheme
from graphengine.models.quantised.schemes import (
    ABOUT_MAKING,
    Quantisation,
    Rule,
    WeightScheme,
    among_names,
    check_keys,
    is_head,
    read_choice,
    read_names,
)

METHODS = ("auto-round", "intel/auto-round")
"""Names of the method in `quant_method`, the second of older files."""
_INSIDE = "quantization_config"
_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "auto_gptq")
_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
_LAYER_KEYS = """
    bits group_size sym data_type act_bits act_group_size act_sym act_data_type act_dynamic
"""
_KEYS = f"""
    {_LAYER_KEYS} packing_format extra_config desc_act modules_to_not_convert model_free
"""
_PLAIN_BITS = (16, 32)
# Part of the names in a model with a vision tower; configs and files may put it in two places.
_TEXT = "language_model."


def read_autoround(config: Mapping[str, Any]) -> Quantisation:
    """Read weights of 4 and 8 bits in GPTQ's packing, and of 4 in AWQ's.

    ValueError, with key and value, for other packings.
    """
    check_keys(config, ABOUT_MAKING + _KEYS, _INSIDE)
    skipped = read_names(config, "modules_to_not_convert", _INSIDE)
    rules = [Rule(among_names(skipped, f"{_INSIDE}.modules_to_not_convert"), None)]
    rules += _layer_rules(config)
    in_blocks = _in_blocks(config)
    rules.append(Rule(in_blocks, _scheme(config, _INSIDE)))
    return Quantisation("auto-round", tuple(rules))


def _scheme(config: Mapping[str, Any], inside: str) -> WeightScheme:
    read_choice(config, "data_type", ["int", None], inside)
    read_choice(config, "act_bits", [*_PLAIN_BITS, None], inside)
    # Files from before `packing_format` name the packing as a backend.
    key = "packing_format" if config.get("packing_format") else "backend"
    packing = read_choice(config, key, [*_GPTQ, *_AWQ, "auto", None], inside)
    if packing in _AWQ:
        # Zero points are stored even where all are the middle.
        return awq_scheme({**config, "zero_point": True}, inside)
    return gptq_scheme(config, inside)


def _layer_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Rules of layers whose settings differ, whole names first, then regular expressions."""
    inside = f"{_INSIDE}.extra_config"
    layers = config.get("extra_config") or {}
    if not isinstance(layers, dict):
        raise unsupported(inside, layers, "a JSON object, null")
    whole, patterns = [], []
    for name, changes in layers.items():
        here = f"{inside}.{name}"
        if not isinstance(changes, dict):
            raise unsupported(here, changes, "a JSON object")
        check_keys(changes, _LAYER_KEYS, here)
        is_plain = changes.get("bits") in _PLAIN_BITS
        scheme = None if is_plain else _scheme({**config, **changes}, here)
        whole.append(Rule(_named(name), scheme))
        if re.search(r"[^\w.]", name):
            patterns.append(Rule(_matching(name, inside), scheme))
    return whole + patterns


def _named(name: str) -> Callable[[str], bool]:
    """Whether a linear has this name, or is inside the module of this name."""
    inside = f".{name.replace(_TEXT, '', 1)}."
    return lambda linear: inside in f".{linear.replace(_TEXT, '', 1)}."


def _matching(text: str, inside: str) -> Callable[[str], bool]:
    """Whether a regular expression matches anywhere in a linear's name."""
    try:
        expression = re.compile(text)
    except re.error as error:
        raise unsupported(inside, text, f"regular expressions: {error}") from error
    return lambda linear: expression.search(linear) is not None


def _in_blocks(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a linear is in a block that is quantised: all are where the config lists none.

    A block is the start of a name.
    """
    keys = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")
    key = next((key for key in keys if config.get(key)), None)
    if key is None:
        return lambda linear: not is_head(linear)
    given = config[key]
    listed = given.split(",") if isinstance(given, str) else given
    listed = listed if isinstance(listed, list) else [None]
    flat = [name for each in listed for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in flat):
        raise unsupported(f"{_INSIDE}.{key}", given, "names of blocks, null")
    starts = tuple(name.strip().replace(_TEXT, "", 1) for name in flat)
    return lambda linear: linear.replace(_TEXT, "", 1).startswith(starts)
