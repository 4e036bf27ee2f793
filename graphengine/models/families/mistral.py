"""Mistral: Llama 3's decoder without biases; all layers may have one window."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(max_positions=131072, windows="all", biases=())


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `MistralForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    return decoder_config(settings, architecture, read_attention(settings), read_mlp(settings))
