"""Configs of Qwen2-MoE, Gemma 1, StableLM, Cohere, OLMo 1 and InternLM 3: what is read of them, and
what is refused.
"""

from __future__ import annotations

from dataclasses import replace
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

OLMO: dict[str, Any] = {
    "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "olmo",
    "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
"""The sizes of OLMo-1B."""
INTERNLM: dict[str, Any] = {
    "architectures": ["InternLM3ForCausalLM"], "bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 10240, "max_position_embeddings": 32768, "model_type": "internlm3",
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "qkv_bias": False, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 128512,
}  # fmt: skip
"""The sizes of InternLM3-8B."""


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        *((QWEN, 14.32), (GEMMA, 2.506), (STABLELM, 1.645), (AYA, 8.028)),
        *((OLMO, 1.177), (INTERNLM, 8.804)),
    ],
    ids=["qwen2-moe", "gemma", "stablelm", "cohere", "olmo", "internlm3"],
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


def test_norms_of_olmo_have_no_weights() -> None:
    model = composed(read_model_config(OLMO | {"num_hidden_layers": 2, "vocab_size": 96}))
    weights = model.allocate(device="cpu", dtype=torch.bfloat16)
    assert not [name for name in weights.stored() if "norm" in name]
    norms = [each.norm for layer in weights.layers for each in layer.sublayers]
    assert all(bool((norm == 1).all()) for norm in (*norms, weights.final_norm))
    assert not weights.layers[0].may_split, "a LayerNorm sums over all of a lane's values"


@pytest.mark.parametrize("biased", [False, True])
def test_internlm_3_is_a_llama(biased: bool) -> None:
    told = INTERNLM | {"qkv_bias": biased, "bias": biased}
    llama = INTERNLM | {"attention_bias": biased, "mlp_bias": biased}
    llama = {name: llama[name] for name in llama if name not in ("qkv_bias", "bias")}
    model = composed(read_model_config(told))
    assert model.rope and model.rope.kind == "dynamic" and model.max_prompt == 32768
    as_llama = read_model_config(llama | {"architectures": ["LlamaForCausalLM"]})
    assert replace(model, architecture="LlamaForCausalLM") == as_llama
    narrow = composed(read_model_config(told | {"head_dim": None, "num_attention_heads": 64}))
    assert block_in(narrow, GroupedQueryAttention).head_dim == 4096 // 64


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
        (OLMO, {"clip_qkv": 8.0}, "clip_qkv=8.0: supported: null"),
        (OLMO, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06: supported: null or 1e-05"),
        (INTERNLM, {"bias": True}, "qkv_bias=False: supported: True, as bias is"),
        (AYA, {"head_dim": 64}, "head_dim=64: supported: 4096 / 32 heads"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config | changes)
