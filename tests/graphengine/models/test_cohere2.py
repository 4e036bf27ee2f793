"""Cohere 2's config: as it is published, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoints.small_decoders import block_in, composed
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.composition import blocks_of, windows_of
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys

COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
    "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "float16", "use_cache": True, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
    "vocab_size": 256000,
}  # fmt: skip
"""The keys of Command R7B."""


def test_a_config_as_it_is_published() -> None:
    assert unknown_keys(COMMAND_R7B) == []
    model = composed(read_model_config(COMMAND_R7B))
    assert windows_of(model) == (4096, 4096, 4096, 0) * 8
    attending = [each for each in blocks_of(model) if isinstance(each, GroupedQueryAttention)]
    assert [each.nope for each in attending] == [False, False, False, True] * 8
    assert model.norms == "layer" and model.logits_scale == 0.25 and model.tie_embeddings
    assert model.rope and model.rope.theta == 5e4 and block_in(model, GroupedQueryAttention)


def test_sublayers_side_by_side_share_a_norm() -> None:
    few = {**COMMAND_R7B, "num_hidden_layers": 2, "vocab_size": 96}
    weights = composed(read_model_config(few)).allocate(device="meta", dtype=torch.float32)
    first, second = weights.layers[0].sublayers
    assert first.norm is second.norm and first.norm_bias is None
    names = [name for name in weights.stored() if "layernorm" in name]
    assert names == [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_parallel_block": False}, "use_parallel_block=False: supported: null or True"),
        ({"order_of_interleaved_layers": "global"}, "order_of_interleaved_layers='global'"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"head_dim": 64}, "head_dim=64: supported: 4096 / 32 heads"),
        ({"use_sliding_window": False}, "use_sliding_window=False: supported: null or True"),
        ({"rotary_pct": 0.5}, "rotary_pct=0.5"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(COMMAND_R7B | changes)
