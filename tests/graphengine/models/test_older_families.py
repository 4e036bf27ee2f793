"""Configs of Qwen2-MoE, Gemma 1, StableLM and Cohere: what is read of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoints.published import PUBLISHED
from checkpoints.small_decoders import block_in, composed, expert_layers
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.families.registry import read_model_config

QWEN = PUBLISHED["Qwen/Qwen1.5-MoE-A2.7B"].config
GEMMA = PUBLISHED["google/gemma-2b"].config
STABLELM = PUBLISHED["stabilityai/stablelm-2-zephyr-1_6b"].config
AYA = PUBLISHED["CohereForAI/aya-23-8B"].config


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN, 14.32), (GEMMA, 2.506), (STABLELM, 1.645), (AYA, 8.028)],
    ids=["qwen2-moe", "gemma", "stablelm", "cohere"],
)
def test_parameters_are_as_many_as_published(config: dict[str, Any], billions: float) -> None:
    weights = composed(read_model_config(config)).allocate(device="meta", dtype=torch.bfloat16)
    assert weights.parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_experts_of_qwen2() -> None:
    model = composed(read_model_config(QWEN))
    experts = block_in(model, Experts)
    assert (experts.experts, experts.router.top_k, experts.router.normalised) == (60, 4, False)
    assert experts.shared_gate and experts.shared and experts.shared.ffn_size == 5632
    attention = block_in(model, GroupedQueryAttention)
    assert attention.qkv_bias and not attention.output_bias
    every = composed(read_model_config(QWEN | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}))
    assert expert_layers(every) == (2, 8, 11, 14, 17, 20, 23)
    assert not expert_layers(read_model_config(QWEN | {"num_experts": 0}))


def test_gemma_means_the_approximate_gelu() -> None:
    model = composed(read_model_config(GEMMA))
    assert model.norms_plus_one and model.tie_embeddings and model.embedding_scale == 2048**0.5
    assert block_in(model, Swiglu).activation == "gelu_tanh"
    newer = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    assert read_model_config(GEMMA | newer) == model


def test_blocks_of_stablelm() -> None:
    model = composed(read_model_config(STABLELM))
    attention = block_in(model, GroupedQueryAttention)
    assert attention.qkv_bias and not attention.output_bias and model.norms == "layer_biased"
    assert model.rope and model.rope.rotated == 0.25
    first, second = model.layers[0]
    assert not second.parallel and first.norm != second.norm
    beside = composed(read_model_config(STABLELM | {"use_parallel_residual": True}))
    first, second = beside.layers[0]
    assert second.parallel and first.norm == second.norm


def test_cohere_has_rope_in_all_layers() -> None:
    model = composed(read_model_config(AYA))
    attention = block_in(model, GroupedQueryAttention)
    assert attention.interleaved and not (attention.nope or attention.window)
    assert model.logits_scale == 0.0625 and model.tie_embeddings
    told = {name: value for name, value in AYA.items() if name != "rope_theta"}
    missing = composed(read_model_config(told))
    assert missing.rope and missing.rope.theta == 5e5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN, {"use_sliding_window": True}, "use_sliding_window=True: supported: False"),
        (QWEN, {"num_experts_per_tok": 61}, "num_experts_per_tok=61: supported: 1 to num_exper"),
        (QWEN, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        (QWEN, {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        (GEMMA, {"hidden_act": "silu"}, "hidden_act='silu': supported: 'gelu', 'gelu_pytorch_t"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation='gelu': supported: null or 'g"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (STABLELM, {"qk_layernorm": True}, "qk_layernorm=True: supported: null or False"),
        (STABLELM, {"partial_rotary_factor": 0.3}, "19 of head_dim=64 values turn: must be even"),
        (STABLELM, {"hidden_act": "gelu"}, "hidden_act='gelu': supported: 'silu', 'swish'"),
        (AYA, {"use_qk_norm": True}, "use_qk_norm=True: supported: null or False"),
        (AYA, {"head_dim": 64}, "head_dim=64: supported: 4096 / 32 heads"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config | changes)
