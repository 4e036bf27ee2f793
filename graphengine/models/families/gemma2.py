"""Gemma 2: Gemma 3's layers without norms of heads, with soft caps of scores and of logits.

Every other layer has a window, beginning with the first. RoPE is the same in all layers.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.gemma3 import check_switches, read_gemma
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    GEMMA2_KEYS,
    KEYS,
    LAYER_TYPES,
    HfConfig,
    read_keys,
)

# transformers' defaults for missing keys; null means no cap.
_MISSING: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_SLIDING = LAYER_TYPES[1]
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=8192, head_dim=256, windows="switched", keys=GEMMA2_KEYS
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Gemma2ForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    check_switches(told, read_keys(told, GEMMA2_KEYS))
    given = read_keys(told, KEYS)
    types = given["layer_types"]
    if types is None:
        types = hf_config.periodic_types(given["num_hidden_layers"], 2)
    told.pop("hidden_act", None)
    told |= {"layer_types": types, "use_sliding_window": _SLIDING in types}
    settings = hf_config.read_settings(told, DEFAULTS)
    return read_gemma(
        settings,
        architecture,
        softcap=settings["attn_logit_softcapping"],
        logits_cap=settings["final_logit_softcapping"],
    )
