"""Hunyuan's configs: RoPE with an alpha, names of norms, experts as lists say; and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoints.small_decoders import block_in, composed
from graphengine.kernels.norm_rope.rope_config import rope_tables
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys

ROPE = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "type": "dynamic"}  # fmt: skip
DENSE: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.1, "attention_head_dim": 128, "bos_token_id": 1,
    "cla_share_factor": 2, "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "mlp_bias": False, "model_type": "hunyuan_v1_dense", "norm_type": "rms",
    "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pad_token_id": 127961, "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE, "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cache": True,
    "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167,
}  # fmt: skip
"""The sizes of the 7B model, with keys as other programs read them."""
MOE = {
    **DENSE, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
    "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32,
    "num_experts": 64, "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True,
}  # fmt: skip
"""The sizes of A13B."""


def test_rope_with_an_alpha_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(
        "transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense",
        reason="this transformers has no Hunyuan",
    )
    config = transformers.HunYuanDenseV1Config(**DENSE)
    embedding = modeling.HunYuanDenseV1RotaryEmbedding(config)
    theirs = embedding(torch.zeros(1), torch.arange(5000)[None])
    model = composed(read_model_config(DENSE))
    assert model.rope is not None and model.max_positions == model.max_prompt == 32768
    ours = rope_tables(model.rope, head_dim=128, max_positions=5000, device="cpu")
    for table, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(table, expected[0, :, :64], rtol=0, atol=2e-4)


def test_configs_have_one_spelling() -> None:
    """Heads by either name; RoPE under either; experts as numbers or as lists."""
    assert unknown_keys(DENSE) == unknown_keys(MOE) == []
    assert unknown_keys(MOE | {"moe_top": 8}) == ["moe_top"]
    model = read_model_config(DENSE)
    told = {"rope_scaling": None, "rope_parameters": ROPE | {"rope_theta": 1e4}, "head_dim": None}
    assert read_model_config(DENSE | told) == model
    no_name = DENSE | {"architectures": None}
    assert read_model_config(no_name) == model
    moe = composed(read_model_config(MOE))
    experts = block_in(moe, Experts)
    assert (experts.experts, experts.router.top_k, experts.ffn_size) == (64, 8, 3072)
    assert not experts.shared_gate and experts.shared and experts.shared.ffn_size == 3072
    numbers = {"moe_intermediate_size": 3072, "moe_topk": 8, "num_shared_expert": 1}
    assert read_model_config(MOE | numbers) == moe
    parameters = moe.allocate(device="meta", dtype=torch.bfloat16).parameters
    assert 79e9 < parameters < 81e9


def test_names_of_norms() -> None:
    few = {**DENSE, "num_hidden_layers": 1, "vocab_size": 96}
    model = composed(read_model_config(few))
    assert block_in(model, GroupedQueryAttention).qk_norm == "after"
    names = model.allocate(device="meta", dtype=torch.float32).stored()
    norms = [name for name in names if "self_attn" in name and "norm" in name]
    prefix = "model.layers.0.self_attn."
    assert norms == [f"{prefix}query_layernorm.weight", f"{prefix}key_layernorm.weight"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DENSE, {"use_qk_norm": False}, "use_qk_norm=False: supported: null or True"),
        (DENSE, {"use_cla": True}, "use_cla=True: supported: null or False"),
        (DENSE, {"num_experts": 2}, "num_experts=2: supported: null or 0 or 1"),
        (DENSE, {"position_embedding_xdrope": True}, "position_embedding_xdrope=True"),
        (DENSE, {"rope_scaling": ROPE | {"type": "linear"}}, "alpha=1000.0: supported: null"),
        (DENSE, {"rope_scaling": ROPE | {"alpha": "x"}}, "rope_scaling.alpha='x': must be a fin"),
        (DENSE, {"head_dim": 2}, "rope_scaling.alpha=1000.0: supported: null in heads of 2 val"),
        (MOE, {"moe_topk": [8, 4]}, r"moe_topk=\[8, 4\]: supported: the same for every layer"),
        (MOE, {"moe_topk": 65}, "num_experts_per_tok=65: supported: 1 to num_experts=64"),
        (MOE, {"num_shared_expert": 2}, "num_shared_expert=2: supported: null or 1"),
        (MOE, {"moe_intermediate_size": 64}, "moe_intermediate_size=64.*intermediate_size=3072"),
        ({**DENSE, "architectures": ["LlamaForCausalLM"]}, {}, "=1: supported|alpha=1000.0"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config | changes)
