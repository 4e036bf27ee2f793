"""Granite without recurrent layers: Llama's layers, with the multipliers of Granite 4's hybrids.

The stream is kept divided by `residual_multiplier`: see `granite4.py`.
"""

from __future__ import annotations

from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import GRANITE_MULTIPLIERS, HfConfig
from graphengine.models.hybrid import HybridConfig
from graphengine.models.sublayers import usual_layer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=2048, keys=GRANITE_MULTIPLIERS, biases=("attention_bias", "mlp_bias")
)


def read_config(config: HfConfig, architecture: str) -> HybridConfig:
    """`HybridConfig` of a `GraniteForCausalLM` checkpoint."""
    settings = hf_config.read_settings(config, DEFAULTS)
    residual, hidden = settings["residual_multiplier"], settings["hidden_size"]
    eps = settings["rms_norm_eps"] / residual**2
    attention = GroupedQueryAttention(
        hidden_size=hidden,
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        norm_eps=eps,
        qkv_bias=settings["attention_bias"],
        output_bias=settings["attention_bias"],
        scale_of=settings["attention_multiplier"] ** -2,
    )
    mlp = Swiglu(
        hidden_size=hidden,
        ffn_size=settings["intermediate_size"],
        norm_eps=eps,
        bias=settings["mlp_bias"],
    )
    layer = usual_layer(attention, mlp, post_norms=False)
    return HybridConfig(
        architecture=architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=hidden,
        norm_eps=eps,
        max_positions=settings["max_position_embeddings"],
        layers=(layer,) * settings["num_hidden_layers"],
        attention=attention,
        rope=hf_config.rope(settings),
        tie_embeddings=settings["tie_word_embeddings"],
        embedding_scale=settings["embedding_multiplier"] / residual,
        stream_scale=residual,
        logits_scale=1 / settings["logits_scaling"],
    )
