"""Qwen3: the decoder with an RMSNorm on each head's query and key before RoPE."""

from __future__ import annotations

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

NORMED = {"use_qk_norm": (True,), "qk_norm": (True,)}
"""Keys about the norms of queries and keys, with their one value: these norms always exist."""
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=32768, head_dim=128, windows="switched", fixed=NORMED
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `Qwen3ForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    attention = read_attention(settings, qk_norm=True)
    return decoder_config(settings, architecture, attention, read_mlp(settings))
