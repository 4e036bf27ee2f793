"""InternLM 3: Llama, with biases in all linears or in none."""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

DEFAULTS = hf_config.FamilyDefaults(max_positions=32_768, biases=("attention_bias", "mlp_bias"))
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "vocab_size": 128_512,
    "hidden_size": 4096,
    "intermediate_size": 10_240,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
_BIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of an `InternLM3ForCausalLM` checkpoint."""
    told: dict[str, Any] = _MISSING | dict(config)
    for own, usual in _BIASES.items():
        told.setdefault(usual, told.pop(own, False))
    settings = hf_config.read_settings(told, DEFAULTS)
    if settings["attention_bias"] != settings["mlp_bias"]:
        # transformers refuses it, too.
        supported = f"{settings['mlp_bias']}, as bias is"
        raise unsupported("qkv_bias", settings["attention_bias"], supported)
    mlp = read_mlp(settings, bias=settings["mlp_bias"])
    return decoder_config(settings, architecture, read_attention(settings), mlp)
