"""`config.json` of Granite 4's hybrids and Nemotron-H: what is read, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, NemotronHConfig

from graphengine.kernels.experts.router import Router
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Sizes
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import RING, STATE, Mamba2
from graphengine.models.blocks.mlp import Mlp
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.composition import attention_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.states import Paged, Recurrent

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 100257,
    "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536,
    "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 4096,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 4, "logits_scaling": 6,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 0,
    "num_hidden_layers": 10, "num_key_value_heads": 4, "num_local_experts": 0,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 4096, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "hidden_dropout": 0.0, "hidden_size": 4096, "hybrid_override_pattern": "M-M-M*-M-",
    "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 32, "num_hidden_layers": 9, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip

# Nemotron 3 Nano, 30B-A3B.
NANO: dict[str, Any] = NEMOTRON | {
    "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "mamba_num_heads": 64,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "max_position_embeddings": 262144, "moe_intermediate_size": 1856, "n_group": 1,
    "moe_shared_expert_intermediate_size": 3712, "moe_shared_expert_overlap": False,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "topk_group": 1, "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip


def read(config: dict[str, Any], **changes: Any) -> DecoderConfig:
    model = read_model_config(config | changes)
    assert isinstance(model, DecoderConfig)
    return model


def test_granite_as_it_is_published() -> None:
    """The stream is kept divided by the residual multiplier, and logits are scaled in a norm."""
    assert unknown_keys(GRANITE) == []
    model = read(GRANITE)
    assert model.num_layers == 10 and model.tie_embeddings and model.rope is None
    assert model.embedding_scale == 12 / 0.22 and model.stream_scale == 0.22
    assert model.norm_eps == 1e-5 / 0.22**2 and model.logits_scale == 1 / 6
    assert attention_of(model).scale == 0.0078125 and attention_of(model).head_dim == 128
    mixers = [layer[0].block for layer in model.layers]
    assert [isinstance(each, GroupedQueryAttention) for each in mixers].index(True) == 5
    mamba = mixers[0]
    assert isinstance(mamba, Mamba2) and mamba.gate_eps == 1e-5 and mamba.conv_bias
    assert mamba.norm_eps == model.norm_eps == attention_of(model).norm_eps
    assert mamba.sizes == Mamba2Sizes(heads=48, head_dim=64, groups=1, state_size=128, width=4)
    mlp = model.layers[5][1].block
    assert isinstance(mlp, Swiglu) and (mlp.ffn_size, mlp.one_linear) == (4096, True)
    ring, state = model.states[0]
    pieces = (3072, 128, 128)
    assert ring == Recurrent(RING, (sum(pieces),), None, depth=3, apart=True, pieces=pieces)
    assert state == Recurrent(STATE, (48, 64, 128))
    assert model.states[5] == (Paged(2, (4, 128)),)
    assert list(model.linears)[-1] == "lm_head"


def test_nemotron_as_it_is_published() -> None:
    assert unknown_keys(NEMOTRON) == []
    model = read(NEMOTRON)
    blocks = [part.block for (part,) in model.layers]
    kinds = {"M": Mamba2, "*": GroupedQueryAttention, "-": Mlp}
    assert [type(block) for block in blocks] == [kinds[letter] for letter in "M-M-M*-M-"]
    sizes = Mamba2Sizes(heads=128, head_dim=64, groups=8, state_size=128, width=4)
    assert isinstance(blocks[0], Mamba2) and blocks[0].sizes == sizes
    assert blocks[0].state_dtype == torch.float32
    assert attention_of(model).scale == 128**-0.5 and model.rope is None
    assert model.embedding_name == "model.embeddings" and model.final_norm_name == "model.norm_f"
    # The last layer's product is the last that adds to the stream.
    assert list(model.linears)[-3:] == ["up", "down", "lm_head"]
    assert list(read(NEMOTRON, hybrid_override_pattern="M-*M-M-*M").linears)[-3:] == [
        "mamba_in", "mamba_out", "lm_head",
    ]  # fmt: skip


def test_nemotron_with_experts_as_it_is_published() -> None:
    assert unknown_keys(NANO) == []
    model = read(NANO)
    experts = [each.block for (each,) in model.layers if isinstance(each.block, Experts)]
    assert len(experts) == 23 and len(set(experts)) == 1
    (block, *_) = experts
    assert (block.experts, block.ffn_size, block.gated, block.corrected) == (128, 1856, False, True)
    router = Router(top_k=6, scores="sigmoid", normalised=True, scale=2.5, group_best=2)
    assert block.router == router and block.shared is not None and block.shared.ffn_size == 3712
    weights = model.allocate(device="meta", dtype=torch.bfloat16)
    assert 31.5e9 < weights.parameters < 31.7e9
    routed = weights.routed
    assert routed is not None and routed.parameters == 2 * 1856 * 2688
    # What a token uses.
    assert 3.5e9 < weights.parameters - routed.idle < 3.7e9
    assert {"expert_up", "expert_down", "shared_up", "shared_down"} <= model.linears.keys()
    assert model.linears["expert_up"].kind == "store"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_latent_size": 0}, "moe_latent_size=0: must be an integer in"),
        ({"n_shared_experts": 2}, "n_shared_experts=2: supported: null or 1"),
        ({"mlp_bias": True}, "mlp_bias=True: supported: False in a model with experts"),
        ({"n_routed_experts": 513}, "n_routed_experts=513: supported: at most 512"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129: supported: 1 to n_routed_experts"),
        ({"n_group": 3}, "n_routed_experts=128, n_group=3, topk_group=1, .*: 128 experts in 3"),
        ({"norm_topk_prob": None}, "norm_topk_prob=None"),
        ({"scoring_func": "softplus"}, "scoring_func='softplus'"),
    ],
)
def test_what_experts_of_nemotron_do_not_do_is_an_error(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(NANO, **changes)


def test_other_spellings() -> None:
    """Spellings of transformers 5, and of older files."""
    types = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    listed = {
        **{name: value for name, value in NEMOTRON.items() if name != "hybrid_override_pattern"},
        "layers_block_type": [types[letter] for letter in NEMOTRON["hybrid_override_pattern"]],
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    for name in ("num_hidden_layers", "attention_head_dim"):
        del listed[name]
    assert read(listed) == read(NEMOTRON)
    assert attention_of(read(NEMOTRON, head_dim=64)).head_dim == 64
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = [names[kind] for kind in GRANITE["layer_types"]]
    assert read(GRANITE, layer_types=renamed, time_step_limit=None) == read(GRANITE)
    old = {name: value for name, value in GRANITE.items() if name != "layer_types"}
    assert read(old, layers_block_type=GRANITE["layer_types"]) == read(GRANITE)
    assert read(GRANITE, mamba_d_head="auto") == read(GRANITE)
    turned = read(GRANITE, position_embedding_type="rope").rope
    assert turned is not None and turned.theta == 10_000
    # As Nemotron 3 Ultra has infinity.
    assert read(NEMOTRON, time_step_limit=[0.0, 1e308]) == read(NEMOTRON)
    limited = read(NEMOTRON, time_step_limit=[0.1, 2]).layers[0][0].block
    assert isinstance(limited, Mamba2)
    assert (limited.sizes.dt_min, limited.sizes.dt_max) == (0.1, 2.0)


@pytest.mark.parametrize("config", [GraniteMoeHybridConfig(), NemotronHConfig()])
def test_transformers_own_configs_have_no_unknown_key(config: Any) -> None:
    assert unknown_keys(config.to_dict()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 62}, "num_experts_per_tok=0: supported: 1 to num_local_experts=62"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ({"layer_types": ["mamba"] * 10}, "layer_types.*one that attends among them"),
        ({"layer_types": ["mamba", "attention"]}, "layer_types.*supported: 10 of"),
        ({"layer_types": ["mamba"] * 9 + ["rwkv"]}, "layer_types"),
        ({"layer_types": None}, "layer_types"),
        ({"mamba_n_heads": 47}, "mamba_n_heads=47 of mamba_d_head=64.*= 3072"),
        ({"mamba_n_groups": 5}, "mamba_n_heads=48, no multiple of mamba_n_groups=5"),
        ({"mamba_d_conv": 9}, r"mamba_d_conv=9: must be an integer in \[2, 8\]"),
        ({"mamba_d_state": 512}, "mamba_d_state=512"),
        ({"residual_multiplier": 0}, "residual_multiplier=0"),
        ({"logits_scaling": "6"}, "logits_scaling='6'"),
        # transformers has no default for null.
        ({"attention_multiplier": None}, "attention_multiplier=None: must be a finite number"),
        ({"mamba_conv_bias": None}, "mamba_conv_bias=None: must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit=\[0.5, 0.1\]: supported"),
        ({"time_step_limit": [0.0, math.nan]}, "time_step_limit"),
        ({"sliding_window": 100}, "sliding_window=100"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "head_dim=768"),
    ],
)  # fmt: skip
def test_what_granite_does_not_do_here_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(GRANITE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX*-"}, r"hybrid_override_pattern='MX..'.*M, \*, -, E for"),
        ({"hybrid_override_pattern": "M-M-M-M-M"}, "one that attends among them"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern=None"),
        ({"layers_block_type": ["linear_attention", "moe"]}, "layers_block_type.*'mlp', 'moe'"),
        ({"layers_block_type": "M"}, "layers_block_type='M'"),
        ({"num_hidden_layers": 8}, "num_hidden_layers=8: supported: 9"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': supported: 'relu2'"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True: supported: False, or use_bias=True"),
        ({"n_groups": 7}, "mamba_num_heads=128, no multiple of n_groups=7"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06: supported: null, or layer_norm_epsilon"),
        ({"mamba_ssm_cache_dtype": "float8"}, "mamba_ssm_cache_dtype='float8'"),
        ({"conv_kernel": 1}, r"conv_kernel=1: must be an integer in \[2, 8\]"),
        ({"head_dim": 99}, "head_dim=99"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
    ],
)  # fmt: skip
def test_what_nemotron_does_not_do_here_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(NEMOTRON, **changes)


def test_a_llama_with_a_pattern_is_an_error() -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 128,
        "intermediate_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    read_model_config(llama)
    with pytest.raises(ValueError, match="hybrid_override_pattern='M'"):
        read_model_config(llama | {"hybrid_override_pattern": "M"})
