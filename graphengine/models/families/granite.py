"""Granite without recurrent layers: Llama's layers, with the multipliers of Granite 4's hybrids.

The stream is kept divided by `residual_multiplier`: see `granite4.py`.
"""

from __future__ import annotations

from typing import Any

from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import decoder_config, hf_config
from graphengine.models.hf.config_schema import GRANITE_MULTIPLIERS, HfConfig
from graphengine.models.sublayers import Layer, usual_layer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048, keys=GRANITE_MULTIPLIERS, biases=("attention_bias", "mlp_bias")
)


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `GraniteForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    mlp = decoder_config.read_mlp(
        settings, norm_eps=stream_eps(settings), bias=settings["mlp_bias"]
    )
    layer = usual_layer(read_attention(settings), mlp, post_norms=False)
    return composed(settings, architecture, (layer,) * settings["num_hidden_layers"], mlp=mlp)


def stream_eps(settings: dict[str, Any]) -> float:
    """Epsilon of the norms that read the stream, which is stored divided."""
    eps: float = settings["rms_norm_eps"] / settings["residual_multiplier"] ** 2
    return eps


def read_attention(settings: dict[str, Any]) -> GroupedQueryAttention:
    """Attention, whose scores have a multiplier of their own."""
    scale_of = settings["attention_multiplier"] ** -2
    return decoder_config.read_attention(settings, norm_eps=stream_eps(settings), scale_of=scale_of)


def composed(
    settings: dict[str, Any], architecture: str, layers: tuple[Layer, ...], **values: Any
) -> DecoderConfig:
    """These layers with Granite's multipliers."""
    residual = settings["residual_multiplier"]
    return decoder_config.composed(
        settings,
        architecture,
        layers,
        norm_eps=stream_eps(settings),
        embedding_scale=settings["embedding_multiplier"] / residual,
        stream_scale=residual,
        logits_scale=1 / settings["logits_scaling"],
        **values,
    )
