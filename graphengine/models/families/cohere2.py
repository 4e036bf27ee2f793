"""Cohere 2 (Command R7B): Cohere with windows.

Three layers of four have a window, and only these have RoPE, of pairs of neighbouring values.
"""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.cohere import MISSING, side_by_side
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    COHERE2_KEYS,
    KEYS,
    LAYER_TYPES,
    HfConfig,
    read_keys,
)

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=8192,
    windows="switched",
    keys=COHERE2_KEYS,
    fixed={
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
        **dict.fromkeys(("use_gated_activation", "use_parallel_block"), (True,)),
    },
)
_SLIDING = LAYER_TYPES[1]


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Cohere2ForCausalLM` checkpoint."""
    told = MISSING | dict(config)
    hf_config.check_windows_on(told)
    given, own = read_keys(told, KEYS), read_keys(told, COHERE2_KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], own["sliding_window_pattern"])
    told |= {"layer_types": types, "use_sliding_window": _SLIDING in types}
    settings = hf_config.read_settings(told, DEFAULTS)
    windows = settings["windows"] or (0,) * settings["num_hidden_layers"]
    return side_by_side(settings, architecture, windows, nope=True)
