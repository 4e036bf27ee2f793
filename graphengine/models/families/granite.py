"""Granite without recurrent layers: Llama's layers, with the multipliers of Granite 4's hybrids.

The stream is kept divided by `residual_multiplier`: see `granite4.py`.
"""

from __future__ import annotations

from typing import Any

from graphengine.kernels.norm_rope.rope import RopeConfig
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import GRANITE_MULTIPLIERS, HfConfig
from graphengine.models.hybrid import HybridConfig
from graphengine.models.sublayers import Layer, usual_layer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048, keys=GRANITE_MULTIPLIERS, biases=("attention_bias", "mlp_bias")
)


def read_config(config: HfConfig, architecture: str) -> HybridConfig:
    """`HybridConfig` of a `GraniteForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    attention = attention_of(settings)
    mlp = Swiglu(
        hidden_size=settings["hidden_size"],
        ffn_size=settings["intermediate_size"],
        norm_eps=stream_eps(settings),
        bias=settings["mlp_bias"],
    )
    layer = usual_layer(attention, mlp, post_norms=False)
    layers = (layer,) * settings["num_hidden_layers"]
    return composed(settings, architecture, layers, attention, hf_config.rope(settings))


def stream_eps(settings: dict[str, Any]) -> float:
    """Epsilon of the norms that read the stream, which is stored divided."""
    eps: float = settings["rms_norm_eps"] / settings["residual_multiplier"] ** 2
    return eps


def attention_of(settings: dict[str, Any]) -> GroupedQueryAttention:
    """Attention, whose scores have a multiplier of their own."""
    return GroupedQueryAttention(
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        norm_eps=stream_eps(settings),
        qkv_bias=settings["attention_bias"],
        output_bias=settings["attention_bias"],
        scale_of=settings["attention_multiplier"] ** -2,
    )


def composed(
    settings: dict[str, Any],
    architecture: str,
    layers: tuple[Layer, ...],
    attention: GroupedQueryAttention,
    rope: RopeConfig | None,
) -> HybridConfig:
    """These layers with Granite's multipliers."""
    residual = settings["residual_multiplier"]
    return HybridConfig(
        architecture=architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        norm_eps=stream_eps(settings),
        max_positions=settings["max_position_embeddings"],
        layers=layers,
        attention=attention,
        rope=rope,
        tie_embeddings=settings["tie_word_embeddings"],
        embedding_scale=settings["embedding_multiplier"] / residual,
        stream_scale=residual,
        logits_scale=1 / settings["logits_scaling"],
    )
