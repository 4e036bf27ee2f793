"""Qwen3 dense: the dense decoder with an RMSNorm on each head's query and key before RoPE."""

from __future__ import annotations

from graphengine.models import hf_config
from graphengine.models.dense import DenseConfig
from graphengine.models.hf_config import HfConfig
from graphengine.models.llama import read_dense_config


def read_config(config: HfConfig) -> DenseConfig:
    """`DenseConfig` of a `Qwen3ForCausalLM` checkpoint."""
    hf_config.require_value(config, "use_sliding_window", (False, None))
    return read_dense_config(config, qk_norm=True, mlp_bias=False, default_head_dim=128)
