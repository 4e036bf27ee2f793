"""Qwen2, and MiMo, which is Qwen2 with draft modules: biases only on q, k and v."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=32768, windows="switched", fixed={"qkv_bias": (True,)}
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen2ForCausalLM` or `MiMoForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    # The architecture fixes its biases. transformers ignores a config that names `attention_bias`.
    attention = read_attention(settings, qkv_bias=True, output_bias=False)
    return decoder_config(settings, architecture, attention, read_mlp(settings))
