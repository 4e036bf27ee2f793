"""`config.json`: every value of every key, and what transformers makes of the same file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints.small_decoders import block_in, expert_layers
from graphengine.kernels.norm_rope.rope_config import rope_frequencies
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.composition import attention_of, experts_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import FAMILIES, read_model_config
from graphengine.models.hf.config_schema import (
    EXPERT_KEYS,
    HARMLESS,
    KEYS,
    LATENT_KEYS,
    ROPE_KEYS,
    unknown_keys,
)
from graphengine.models.hf.neutral_keys import NEUTRAL

NAN, INF = math.nan, math.inf

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "type": "longrope", "short_factor": [1 + i / 16 for i in range(32)],
    "long_factor": [2 + i / 3 for i in range(32)],
}  # fmt: skip


def small(family: str = "Llama", **changes: Any) -> dict[str, Any]:
    return SMALL | {"architectures": [f"{family}ForCausalLM"]} | changes


def refused(message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config)


# Any value.

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 64, 2**31, 10**9, 10**18, 10**400, -(10**400), 0.0, 0.5, -0.5,
    1.0, 1e308, NAN, INF, -INF, "", "1", "false", "default", [], [1], [None], ["x"], [[]], {},
    {"x": 1}, {"": None}, {"full_attention": None}, {"full_attention": {}},
]  # fmt: skip
NAMES = sorted({key.name for key in KEYS} | NEUTRAL.keys() | HARMLESS | {"nobody_knows"})
EXPERT_NAMES = [key.name for key in EXPERT_KEYS]
LATENT_NAMES = [key.name for key in LATENT_KEYS]
DEEPSEEK = {"num_experts_per_tok": 2}
ROPE_NAMES = [key.name for key in ROPE_KEYS] + ["full_attention", "nobody_knows"]


def check_read(config: dict[str, Any]) -> None:
    """The config is refused with a ValueError, or whatever is made of it is sound."""
    try:
        model = read_model_config(config)
    except ValueError as error:
        assert str(error)
        return
    assert isinstance(model, DecoderConfig) and model.architecture in FAMILIES
    attention, mlp = attention_of(model), model.mlp
    assert mlp and isinstance(model.tie_embeddings, bool) and isinstance(mlp.bias, bool)
    assert type(mlp.ffn_size) is int and 1 <= mlp.ffn_size < 2**31
    for name in ("vocab_size", "hidden_size", "num_layers", "max_positions"):
        assert type(getattr(model, name)) is int and 1 <= getattr(model, name) < 2**31, name
    assert model.num_layers <= 1024
    assert isinstance(model.norm_eps, float) and 0 <= model.norm_eps <= 1
    experts = experts_of(model)
    if experts is not None:
        experts.router.check(experts.experts)
    if isinstance(attention, LatentAttention):
        assert attention.linears and math.isfinite(attention.scale)
        assert attention.prefill_width > 0
    else:
        for name in ("qkv_bias", "output_bias", "qk_norm"):
            assert isinstance(getattr(attention, name), bool), name
    assert model.rope is not None
    frequencies, factor = rope_frequencies(model.rope, head_dim=attention.table_dim)
    assert frequencies.isfinite().all() and math.isfinite(factor)
    unknown_keys(config)


def each_odd_config() -> Iterator[dict[str, Any]]:
    for name in NAMES:
        for value in ODD:
            yield small("Qwen3", **({"head_dim": 64} | {name: value}))
    for name in EXPERT_NAMES:
        for value in [*ODD, [0], [0, 1, 7], 512, 513]:
            yield small("Qwen3Moe", **{name: value})
    for name in LATENT_NAMES:
        for value in [*ODD, "greedy", "group_limited_greedy", "noaux_tc", "sigmoid", 512, 513]:
            for family in ("DeepseekV2", "DeepseekV3", "Glm4Moe"):
                yield small(family, **DEEPSEEK | {name: value})
    for kind in ("default", "linear", "llama3", "yarn"):
        for place in ("rope_parameters", "rope_scaling"):
            for name in ROPE_NAMES:
                for value in ODD:
                    yield small(**{place: LLAMA3 | {"rope_type": kind} | {name: value}})


def test_every_key_with_every_odd_value() -> None:
    for config in each_odd_config():
        check_read(config)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4),
    st.sampled_from(["yarn", "linear", "llama3", "full_attention", "silu"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(ROPE_NAMES) | st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(
        ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "MiMo", "DeepseekV2", "DeepseekV3", "Glm4Moe"]
    ),
    changes=st.dictionaries(
        st.sampled_from(NAMES + EXPERT_NAMES + LATENT_NAMES), values, max_size=3
    ),
)
@example(family="Llama", changes={"rope_scaling": YARN | {"factor": None, "beta_slow": 0}})
def test_any_json_value_is_read_or_refused(family: str, changes: dict[str, Any]) -> None:
    check_read(small(family, **changes))


# Wrong values, by name.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be"),
        ({"rms_norm_eps": NAN}, r"rms_norm_eps=nan: must be a finite number in \[0, 1\]$"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1: must be"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True: must be"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None: must be"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: .* in \[1, 1024\]"),
        ({"vocab_size": 10**18}, r"vocab_size=10{18}: .* in \[1, 2147483647\]"),
        ({"hidden_size": None}, "hidden_size=None: must be an integer"),
        ({"architectures": 5}, "architectures=5: must be a list of strings, or null"),
        ({"architectures": [5]}, r"architectures=\[5\]: must be a list of strings"),
        ({"rope_scaling": 5}, "rope_scaling=5: must be a JSON object, or null"),
        ({"rope_theta": None}, "rope_theta=None: must be a finite number"),
        ({"rope_parameters": {"rope_theta": None}}, r"rope_parameters\.rope_theta=None: must be"),
        ({"rope_scaling": YARN | {"factor": "4"}}, r"rope_scaling\.factor='4': must be a finite"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling={'type': 'yarn'}: .* needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "'linear' needs factor"),
        ({"rope_scaling": YARN | {"rope_type": "llama3"}}, "'llama3' needs low_freq_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' needs short_factor"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
         "long_factor has 1 numbers, but 32 pairs turn in heads of 64"),
        ({"rope_scaling": LONGROPE | {"short_factor": [0]}}, r"short_factor=\[0\]: must be a list"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' needs factor"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.rope_type='mrope': .*linear"),
        ({"rope_parameters": {"sliding_attention": YARN}}, "supported: RoPE of all layers, or"),
        ({"rope_parameters": {"full_attention": YARN, "factor": 2}}, "supported: RoPE of all"),
        ({"head_dim": 73}, r"head_dim=73: supported: even numbers in \[2, 512\]"),
        ({"head_dim": 514}, r"head_dim=514: supported: even numbers in \[2, 512\]"),
        ({"num_attention_heads": 4096}, "head_dim=0: supported: even"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    refused(message, small(**changes))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"rope_scaling=\[0, 0, .*\.\.\.: must be") as caught:
        read_model_config(small(rope_scaling=[0] * 10_000))
    assert len(str(caught.value)) < 250


# Keys that change the arithmetic.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts=8: supported: null or 0"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"n_routed_experts": 8}, "n_routed_experts=8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*: 'full_"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=.*'dense' in every layer"),
        ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window=True: supported"),
        ({"sliding_window": 32}, "sliding_window=32: supported: null, or use_sliding_window=False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: supported: null"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0: supported: null or 1"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: supported: 1.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu': supported: null or 'silu'"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config="),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
            r"rope_scaling.mrope_section=\[1, 2\]: supported: null or False",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": YARN | {"attn_factor": 1.2}}, "rope_scaling.attn_factor=1.2: .* null or"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': supported: 'silu'"),
        ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config="),
        ({"position_embedding_type": "nope"}, "position_embedding_type='nope': supported: null or"),
        ({"mlp_hidden_act": "relu2"}, "mlp_hidden_act='relu2': supported: null or 'silu'"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05: supported: null, or rms_norm_eps=1e-06"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0: supported: null, or rms_norm_eps=1e-06"),
    ],
)  # fmt: skip
def test_what_is_computed_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    refused(f"config.json has {message}", small(**changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen3Moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': supported: null or 'so"),
        ("Qwen3Moe", {"n_group": 4}, "n_group=4: supported: null or 0 or 1"),
        ("Qwen3Moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5: supported: null"),
        ("Qwen3Moe", {"first_k_dense_replace": 1}, "first_k_dense_replace=1: supported: null or 0"),
        ("DeepseekV3", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]: supported: null or \[\]"),
        ("DeepseekV3", {"norm_topk_prob": None}, "norm_topk_prob=None: must be true or false"),
        ("DeepseekV3", {"rope_interleave": None}, "rope_interleave=None: must be true or false"),
        ("Glm4Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: supported: null or 1"),
        ("Qwen3Moe", {"mlp_layer_types": ["dense"] * 2}, r"mlp_layer_types=\['dense', .*: null$"),
        ("Glm4Moe", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types=.*: null$"),
        ("Qwen3Moe", {"shared_expert_intermediate_size": 64}, ".*size=64: supported: null or 0"),
    ],
)
def test_other_ways_to_route_are_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    refused(f"config.json has {message}", small(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"use_qk_norm": True}, "use_qk_norm=True: supported: null or False"),
        ("Qwen3", {"use_qk_norm": False}, "use_qk_norm=False: supported: null or True"),
        ("Qwen3Moe", {"use_qk_norm": False}, "use_qk_norm=False: supported: null or True"),
        ("Qwen3Moe", {"qkv_bias": True}, "qkv_bias=True: supported: null or False"),
        ("Qwen2", {"qkv_bias": False}, "qkv_bias=False: supported: null or True"),
        ("Qwen3", {"output_gate_type": "swish"}, "output_gate_type='swish': supported: null$"),
    ],
)
def test_what_a_family_always_computes(family: str, changes: dict[str, Any], message: str) -> None:
    refused(f"config.json has {message}", small(family, head_dim=64, **changes))


@pytest.mark.parametrize(
    "family", ["Qwen2", "Qwen3", "Qwen3Moe", "MiMo", "DeepseekV2", "DeepseekV3", "Glm4Moe"]
)
def test_biases_of_feed_forwards_are_refused_where_the_family_has_none(family: str) -> None:
    message = "config.json has mlp_bias=True: supported: null or False"
    refused(message, small(family, head_dim=64, num_experts_per_tok=2, mlp_bias=True))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "MiMo"])
def test_neutral_values_are_no_obstacle(family: str) -> None:
    plain = read_model_config(small(family, head_dim=64))
    neutral: dict[str, Any] = dict.fromkeys(NEUTRAL)
    neutral |= {name: values[-1] for name, values in NEUTRAL.items() if values}
    neutral |= {"no_rope_layers": [1, 1], "use_sliding_window": False, "sliding_window": 32}
    neutral |= {"layer_types": ["full_attention"] * 2, "partial_rotary_factor": None}
    # What a family always computes.
    normed = {"use_qk_norm": True, "qk_norm": True}
    neutral |= {"Qwen3": normed, "Llama": {}}.get(family, {"qkv_bias": True})
    assert read_model_config(small(family, head_dim=64, **neutral)) == plain
    # A window as long as any text is none.
    assert read_model_config(small(family, head_dim=64, sliding_window=512)) == plain


# Keys that well-known checkpoints have beside their sizes.
REAL: dict[str, dict[str, Any]] = {
    "Llama-3.2": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "initializer_range": 0.02, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
        "use_cache": True,
    },
    "Llama-SmolLM2": {
        "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"}, "pad_token_id": 2, "rope_theta": 130000,
    },
    "Qwen2.5": {
        "attention_dropout": 0.0, "max_window_layers": 28, "model_type": "qwen2",
        "sliding_window": 128, "use_mrope": False, "use_sliding_window": False,
    },
    "MiMo-7B": {
        "attention_bias": True, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "max_window_layers": 36, "model_type": "mimo", "num_nextn_predict_layers": 1,
        "rope_scaling": None, "rope_theta": 640000, "sliding_window": 128, "use_cache": True,
        "use_sliding_window": False,
    },
    "Qwen3": {
        "head_dim": 128, "max_window_layers": 28, "model_type": "qwen3", "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
    },
    "Qwen3Moe-Coder-30B-A3B": {
        "decoder_sparse_step": 1, "head_dim": 128, "max_window_layers": 28, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
        "qkv_bias": False, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "sliding_window": None,
        "use_qk_norm": True, "use_sliding_window": False,
    },
    "Qwen3Moe-30B-A3B": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "use_sliding_window": False,
    },
    "DeepseekV2-Lite": {
        "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 6, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
    },
    "DeepseekV3": {
        "ep_size": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "Glm4Moe-Air": {
        "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_cache": True, "use_qk_norm": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_keys_of_real_checkpoints_are_known(name: str) -> None:
    family = "Qwen2" if name == "Qwen2.5" else name.partition("-")[0]
    config = small(family, **REAL[name])
    assert read_model_config(config).num_layers == 2
    assert unknown_keys(config) == []


@pytest.mark.parametrize(
    "config",
    [
        *(LlamaConfig(), Qwen2Config(), Qwen3Config(), Qwen3MoeConfig()),
        *(DeepseekV2Config(), DeepseekV3Config(), Glm4MoeConfig()),
    ],
)
def test_transformers_own_configs_have_no_unknown_key(config: Any) -> None:
    assert unknown_keys(config.to_dict()) == []
    assert unknown_keys(SMALL | {"scale_sinks": 1, "rope_scaling": {"beta": 2}}) == [
        "rope_scaling.beta",
        "scale_sinks",
    ]


# As transformers reads it.

ROPES: dict[str, dict[str, Any]] = {
    "scaling beside parameters": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        "rope_theta": 500.0,
    },
    "parameters beside null": {"rope_scaling": None, "rope_parameters": YARN, "rope_theta": 5e5},
    "theta beside": {"rope_theta": 5e5},
    "theta inside": {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 300}},
    "yarn, factor null": {"rope_scaling": YARN | {"factor": None}},
    "yarn, original beside": {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "yarn, original twice": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn, no original": {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
    "yarn, nulls": {"rope_scaling": YARN | {"beta_fast": None, "mscale": None, "beta_slow": 0}},
    "yarn, mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    "yarn, not truncated": {"rope_scaling": YARN | {"truncate": False, "attention_factor": 1.5}},
    "llama3": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128},
    "longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 128},
    "longrope, its own factors": {
        "rope_parameters": LONGROPE | {"factor": 3, "attention_factor": 1.2},
    },
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "default, of other kinds": {"rope_parameters": LLAMA3 | {"rope_type": "default"}},
    "partial null": {"partial_rotary_factor": None, "rope_theta": 100.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_that_of_transformers(name: str) -> None:
    changes = ROPES[name]
    copy = {
        key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()
    }
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict({**SMALL, **copy}))
    ours, factor = rope_frequencies(read_model_config(small(**changes)).rope, head_dim=64)
    assert torch.equal(ours, theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_rope_of_full_attention_is_that_of_every_layer() -> None:
    nested = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    expected = read_model_config(small(rope_parameters=YARN, rope_theta=500.0))
    found = read_model_config(small(rope_parameters={"full_attention": YARN}, rope_theta=500.0))
    assert found == expected
    found = read_model_config(
        small("Qwen3", head_dim=64, rope_parameters=nested, layer_types=["full_attention"] * 2)
    )
    assert found.rope.kind == "yarn" and found.rope.factor == 4.0


DEFAULTED = {
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


@pytest.mark.parametrize(
    ("family", "theirs"),
    [
        ("Llama", LlamaConfig),
        ("Qwen2", Qwen2Config),
        ("Qwen3", Qwen3Config),
        ("Qwen3Moe", Qwen3MoeConfig),
        ("DeepseekV2", DeepseekV2Config),
        ("DeepseekV3", DeepseekV3Config),
        ("Glm4Moe", Glm4MoeConfig),
    ],
)
def test_what_is_missing_is_transformers_default(family: str, theirs: Any) -> None:
    config = small(family, **(DEEPSEEK if "Deep" in family else {}))
    del config["max_position_embeddings"]
    if family == "Qwen3":
        attention = block_in(read_model_config(config), GroupedQueryAttention)
        assert attention.head_dim == theirs.from_dict(config).head_dim == 128
    ours, oracle = read_model_config(config), theirs.from_dict(config)
    for key, name in DEFAULTED.items():
        assert getattr(ours, name) == getattr(oracle, key), key
    assert ours.rope.theta == oracle.rope_parameters["rope_theta"]
    assert ours.rope.rotated == oracle.rope_parameters.get("partial_rotary_factor", 1.0)


def test_experts_that_a_config_says_nothing_of_are_transformers_default() -> None:
    model, oracle = read_model_config(small("Qwen3Moe")), Qwen3MoeConfig.from_dict(SMALL)
    experts = block_in(model, Experts)
    assert expert_layers(model) == (0, 1)
    assert (experts.experts, experts.ffn_size, experts.router.top_k) == (
        oracle.num_experts,
        oracle.moe_intermediate_size,
        oracle.num_experts_per_tok,
    )
    assert experts.router.normalised == oracle.norm_topk_prob
    assert block_in(model, GroupedQueryAttention).head_dim == 64


def test_what_glm_says_nothing_of_is_transformers_default() -> None:
    config = small("Glm4Moe", num_hidden_layers=5, num_attention_heads=8, head_dim=64)
    del config["num_key_value_heads"]
    model, oracle = read_model_config(config), Glm4MoeConfig.from_dict(config)
    attention, experts = block_in(model, GroupedQueryAttention), block_in(model, Experts)
    router = experts.router
    assert attention.num_kv_heads == oracle.num_key_value_heads
    assert not (attention.qkv_bias or attention.output_bias or attention.qk_norm)
    assert expert_layers(model) == tuple(range(oracle.first_k_dense_replace, 5))
    assert experts.corrected and router.scores == "sigmoid"
    assert (experts.experts, experts.ffn_size, router.top_k) == (
        oracle.n_routed_experts,
        oracle.moe_intermediate_size,
        oracle.num_experts_per_tok,
    )
    assert experts.shared and experts.shared.ffn_size == (
        oracle.n_shared_experts * oracle.moe_intermediate_size
    )
    assert (router.groups, router.top_groups) == (oracle.n_group, oracle.topk_group)
    assert router.scale == oracle.routed_scaling_factor
    assert router.normalised == oracle.norm_topk_prob
    biases = read_model_config(config | {"attention_bias": True, "use_qk_norm": True})
    attention = block_in(biases, GroupedQueryAttention)
    assert attention.qk_norm and attention.qkv_bias and not attention.output_bias


@pytest.mark.parametrize("beside", [None, 0.5, 1.0, "missing"])
@pytest.mark.parametrize("inside", [None, 0.5, 1.0, "missing"])
def test_the_part_of_a_head_that_turns_is_that_of_transformers(beside: Any, inside: Any) -> None:
    config = small("Glm4Moe", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    for place, value in ((config, beside), (config["rope_parameters"], inside)):
        if value != "missing":
            place["partial_rotary_factor"] = value
    oracle = Glm4MoeConfig.from_dict(config | {"rope_parameters": {**config["rope_parameters"]}})
    told = oracle.rope_parameters.get("partial_rotary_factor")
    if inside is not None:
        # With null transformers itself fails.
        assert read_model_config(config).rope.rotated == (1.0 if told is None else told)


@pytest.mark.parametrize(
    ("family", "theirs"), [("DeepseekV2", DeepseekV2Config), ("DeepseekV3", DeepseekV3Config)]
)
def test_latents_that_a_config_says_nothing_of_are_transformers_default(
    family: str, theirs: Any
) -> None:
    layers = {"num_hidden_layers": 5}
    model = read_model_config(small(family, **DEEPSEEK, **layers))
    oracle = theirs.from_dict(SMALL | DEEPSEEK | layers)
    latent, experts = block_in(model, LatentAttention), block_in(model, Experts)
    router = experts.router
    assert (latent.kv_rank, latent.q_rank) == (oracle.kv_lora_rank, oracle.q_lora_rank)
    assert (latent.plain_dim, latent.rotated_dim, latent.value_dim) == (
        oracle.qk_nope_head_dim,
        oracle.qk_rope_head_dim,
        oracle.v_head_dim,
    )
    assert expert_layers(model) == tuple(range(oracle.first_k_dense_replace, 5))
    assert experts.shared and experts.shared.ffn_size == (
        oracle.n_shared_experts * oracle.moe_intermediate_size
    )
    assert (experts.experts, experts.ffn_size) == (
        oracle.n_routed_experts,
        oracle.moe_intermediate_size,
    )
    assert (router.groups, router.top_groups) == (oracle.n_group or 1, oracle.topk_group or 1)
    assert router.scale == oracle.routed_scaling_factor
    assert router.normalised == oracle.norm_topk_prob


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("DeepseekV2", {"num_experts_per_tok": None}, "config.json lacks 'num_experts_per_tok'"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "'greedy', 'group_limited_greedy'"),
        ("DeepseekV2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': .*'softmax'"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob=True: supported: False"),
        ("DeepseekV2", {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        ("DeepseekV2", {"kv_lora_rank": 513}, "kv_lora_rank=513: supported: at most 512"),
        ("DeepseekV2", {"q_lora_rank": 0}, "q_lora_rank=0: must be an integer"),
        ("DeepseekV2", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63: supported: even, at most"),
        ("DeepseekV2", {"n_routed_experts": 513}, "n_routed_experts=513: supported: at most 512"),
        ("DeepseekV3", {"topk_method": "greedy"}, "topk_method='greedy': supported: 'noaux_tc'"),
        ("DeepseekV3", {"rope_interleave": False}, "rope_interleave=False: supported: True"),
        ("DeepseekV3", {"n_group": 7}, "n_group=7, topk_group=4, .*: 256 experts in 7 groups"),
        ("DeepseekV3", {"num_experts_per_tok": 129}, "top_k=129 of 128 experts"),
        ("Qwen3", {"kv_lora_rank": 512}, "kv_lora_rank=512: supported: null or 0"),
        ("Glm4Moe", {"kv_lora_rank": 512}, "kv_lora_rank=512: supported: null or 0"),
        ("Glm4Moe", {"partial_rotary_factor": 0.21}, "13 of head_dim=64 values turn: must be even"),
        ("Glm4Moe", {"moe_layer_freq": 2}, "moe_layer_freq=2: supported: 1"),
        ("Glm4Moe", {"scoring_func": "softmax"}, "scoring_func='softmax': .*'sigmoid'"),
        ("Glm4Moe", {"n_routed_experts": 513}, "n_routed_experts=513: supported: at most 512"),
        ("Glm4Moe", {"n_group": 7}, "n_group=7, topk_group=1, .*: 128 experts in 7 groups"),
    ],
)
def test_latents_and_routes_that_are_not_supported(
    family: str, changes: dict[str, Any], message: str
) -> None:
    refused(message, small(family, **({"num_hidden_layers": 4} | DEEPSEEK | changes)))


def test_layers_with_experts_are_as_deepseek_counts_them() -> None:
    def layers(**changes: Any) -> tuple[int, ...]:
        model = read_model_config(small("DeepseekV3", num_hidden_layers=7, **changes))
        return expert_layers(model)

    assert layers(first_k_dense_replace=2, moe_layer_freq=2) == (2, 4, 6)
    assert layers(first_k_dense_replace=1, moe_layer_freq=3) == (3, 6)
    assert layers(first_k_dense_replace=7) == layers(n_routed_experts=0) == ()


def test_scores_are_scaled_as_yarn_wants_them() -> None:
    yarn = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}
    for family, theirs in (("DeepseekV2", DeepseekV2Config), ("DeepseekV3", DeepseekV3Config)):
        for rope in (yarn, YARN, YARN | {"factor": 0.5, "mscale_all_dim": 1.0}):
            config = small(family, **DEEPSEEK, rope_scaling=rope)
            model = read_model_config(config)
            oracle = theirs.from_dict({**config, "rope_scaling": dict(rope)})
            module = import_module(f"transformers.models.{oracle.model_type}")
            modeling = getattr(module, f"modeling_{oracle.model_type}")
            attention = getattr(modeling, f"{family}Attention")(oracle, 0)
            assert block_in(model, LatentAttention).scale == pytest.approx(
                attention.scaling, rel=1e-12
            )


def test_qwen2_has_its_biases_whatever_the_config_says() -> None:
    """transformers ignores the key: the architecture has biases on q, k and v."""
    for told in (True, False, None):
        model = read_model_config(small("Qwen2", attention_bias=told))
        attention = block_in(model, GroupedQueryAttention)
        assert attention.qkv_bias and not attention.output_bias


@pytest.mark.parametrize("architectures", [None, [], "missing", ["base"]])
@pytest.mark.parametrize(
    "family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "MiMo", "DeepseekV3", "Glm4Moe"]
)
def test_the_model_type_says_what_architectures_do_not(family: str, architectures: Any) -> None:
    types = {"Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3", "Glm4Moe": "glm4_moe"}
    model_type = types.get(family, family.lower())
    config = small(family, model_type=model_type, architectures=architectures)
    if architectures == "missing":
        del config["architectures"]
    if architectures == ["base"]:
        config["architectures"] = [f"{family}Model"]
    assert read_model_config(config) == read_model_config(small(family))


def test_neither_architecture_nor_model_type_lists_the_known() -> None:
    refused(
        "has no architectures, and model_type=None; known: Cohere2ForCausalLM, CohereFor",
        small(architectures=None),
    )
    refused(
        "model_type='gpt3'; known: Cohere2ForCausalLM, CohereFor",
        small(architectures=[], model_type="gpt3"),
    )
    refused(
        "'LlamaForTokenClassification'; known", small(architectures=["LlamaForTokenClassification"])
    )
