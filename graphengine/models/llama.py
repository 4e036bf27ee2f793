"""Llama 3.x: the dense decoder with optional biases and Llama 3's RoPE scaling."""

from __future__ import annotations

from graphengine.models import hf_config
from graphengine.models.dense import DenseConfig
from graphengine.models.hf_config import HfConfig


def read_config(config: HfConfig) -> DenseConfig:
    """`DenseConfig` of a `LlamaForCausalLM` checkpoint."""
    hidden_size = hf_config.positive_int(config, "hidden_size")
    return read_dense_config(
        config,
        qk_norm=False,
        mlp_bias=hf_config.flag(config, "mlp_bias"),
        default_head_dim=hidden_size // hf_config.positive_int(config, "num_attention_heads"),
    )


def read_dense_config(
    config: HfConfig, *, qk_norm: bool, mlp_bias: bool, default_head_dim: int
) -> DenseConfig:
    """The fields that every dense family of Llama's lineage spells alike."""
    hf_config.require_value(config, "hidden_act", ("silu", "swish"))
    num_heads = hf_config.positive_int(config, "num_attention_heads")
    num_kv_heads = hf_config.positive_int(config, "num_key_value_heads", num_heads)
    hf_config.check_heads(num_heads, num_kv_heads)
    max_positions = hf_config.positive_int(config, "max_position_embeddings")
    return DenseConfig(
        architecture=config["architectures"][0],
        vocab_size=hf_config.positive_int(config, "vocab_size"),
        hidden_size=hf_config.positive_int(config, "hidden_size"),
        ffn_size=hf_config.positive_int(config, "intermediate_size"),
        num_layers=hf_config.positive_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hf_config.head_dim(config, default_head_dim),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=hf_config.rope(config, max_positions=max_positions),
        tie_embeddings=hf_config.flag(config, "tie_word_embeddings"),
        attention_bias=hf_config.flag(config, "attention_bias"),
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
