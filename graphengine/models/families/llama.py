"""Llama 3.x: the decoder with optional biases and Llama 3's RoPE scaling."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(max_positions=2048, biases=("attention_bias", "mlp_bias"))


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `LlamaForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    mlp = read_mlp(settings, bias=settings["mlp_bias"])
    return decoder_config(settings, architecture, read_attention(settings), mlp)
