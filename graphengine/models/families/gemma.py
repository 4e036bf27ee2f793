"""Gemma 1: Llama's layers with GeGLU, norms that multiply by 1 + w, and scaled embeddings."""

from __future__ import annotations

import math

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import HfConfig, unsupported
from graphengine.models.hf.decoder_config import decoder_config, read_attention, read_mlp

_GELU = "gelu_pytorch_tanh"
DEFAULTS = hf_config.FamilyDefaults(
    max_positions=8192, head_dim=256, fixed={"hidden_activation": (_GELU,)}
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GemmaForCausalLM` checkpoint."""
    told = _MISSING | dict(config)
    # Older files say gelu, and mean its approximation.
    activation = told.pop("hidden_act", _GELU)
    if activation not in ("gelu", _GELU):
        raise unsupported("hidden_act", activation, f"'gelu', {_GELU!r}")
    settings = hf_config.read_settings(told, DEFAULTS)
    return decoder_config(
        settings,
        architecture,
        read_attention(settings),
        read_mlp(settings, activation="gelu_tanh"),
        norms_plus_one=True,
        embedding_scale=math.sqrt(settings["hidden_size"]),
        scales_in_embedding=True,
    )
