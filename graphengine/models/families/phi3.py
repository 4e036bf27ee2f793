"""Phi-3 and Phi-4: Llama's layers, stored with fused linears; all have one window, or none."""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(max_positions=4096, windows="all", biases=(), rotated=None)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "original_max_position_embeddings": 4096,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Phi3ForCausalLM` checkpoint."""
    settings = hf_config.read_settings({**_MISSING, **config}, DEFAULTS)
    for name in ("rope_parameters", "rope_scaling"):
        # The first versions for long texts have another name for longrope.
        settings[name] = _renamed(settings[name])
    rope = hf_config.rope(settings)
    attention = read_attention(settings, one_linear="qkv_proj", rotated=rope.rotated)
    mlp = read_mlp(settings, names=("gate_up_proj", "", "down_proj"), one_linear=True)
    return decoder_config(settings, architecture, attention, mlp, rope=rope)


def _renamed(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    return rope and {key: "longrope" if value == "su" else value for key, value in rope.items()}
