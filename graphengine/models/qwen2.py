"""Qwen2 dense, and MiMo, which is Qwen2 with draft modules: biases on q, k and v alone."""

from __future__ import annotations

from dataclasses import replace

from graphengine.models import hf_config
from graphengine.models.dense import DenseConfig
from graphengine.models.hf_config import HfConfig
from graphengine.models.llama import read_dense_config


def read_config(config: HfConfig) -> DenseConfig:
    """`DenseConfig` of a `Qwen2ForCausalLM` or `MiMoForCausalLM` checkpoint."""
    hf_config.require_value(config, "use_sliding_window", (False, None))
    # Qwen2's config does not name it. MiMo's does, and means Qwen2's biases.
    hf_config.require_value(config, "attention_bias", (True, None))
    hidden_size = hf_config.positive_int(config, "hidden_size")
    dense = read_dense_config(
        config,
        qk_norm=False,
        mlp_bias=False,
        default_head_dim=hidden_size // hf_config.positive_int(config, "num_attention_heads"),
    )
    return replace(dense, attention_bias=False, qkv_bias=True)
