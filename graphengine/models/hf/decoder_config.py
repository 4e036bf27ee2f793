"""Makes a decoder's config of the keys that nearly all decoders spell alike."""

from __future__ import annotations

from typing import Any, cast

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config


def decoder_config(settings: dict[str, Any], architecture: str, **switches: bool) -> DecoderConfig:
    """`DecoderConfig` of the keys that nearly all decoders spell alike, and of `switches`."""
    switches = {"attention_bias": settings["attention_bias"], **switches}
    return DecoderConfig(
        architecture=architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        norm_eps=settings["rms_norm_eps"],
        max_positions=settings["max_position_embeddings"],
        rope=hf_config.rope(settings),
        windows=settings["windows"],
        local_rope=hf_config.local_rope(settings),
        tie_embeddings=settings["tie_word_embeddings"],
        **cast("dict[str, Any]", switches),
    )
