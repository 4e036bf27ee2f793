"""Families against transformers on random checkpoints; their published configs, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.random_models import MODELS
from checkpoints.small_decoders import block_in, composed, expert_layers
from engines.family_checks import assert_replies, assert_rewinds, assert_same_in_any_company
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import AttentionWeights
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import destinations
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys

NAMES = tuple(MODELS)
# One of each family.
FIRST = ("glm-lite", "minimax", "seed", "exaone", "ernie")
MORE = (
    "hunyuan",
    "hunyuan-moe",
    "qwen2-moe",
    "gemma",
    "stablelm",
    "stablelm-side-by-side",
    "cohere",
)
PROMPT_LENGTHS = extent((90,), (1, 17, 90, 300))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(path: Path, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(path, **options)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(
    random_oracles: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = random_oracles[name]
    options: dict[str, Any] = {"max_seq_len": 400, "prefill_buckets": (16, 64), "lookahead": 0}
    with open_engine(oracle.path, device=device, **options) as engine:
        results = engine.generate(oracle.prompts(PROMPT_LENGTHS), greedy(64))
        for result in results:
            oracle.assert_greedy(result)
        # Tokens that are all alike would hide a fault.
        assert len({token for result in results for token in result.token_ids}) > 8
        assert_replies(engine, oracle, eager, extent((17,), (3, 75)))


@pytest.mark.parametrize("name", extent(("minimax-whole", "hunyuan"), FIRST + MORE))
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    random_oracles: dict[str, Any], device: str, name: str
) -> None:
    oracle = random_oracles[name]
    assert_same_in_any_company(partial(open_engine, oracle.path, device=device), oracle)


@pytest.mark.parametrize("name", extent(("exaone",), FIRST + MORE))
def test_sessions_go_on_and_are_rewound(
    random_oracles: dict[str, Any], device: str, name: str
) -> None:
    oracle = random_oracles[name]
    with open_engine(oracle.path, device=device, prefill_buckets=(16, 64)) as engine:
        assert_rewinds(engine, oracle)


GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "pad_token_id": 154820, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
"""The keys of GLM-4.7-Flash."""
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608, "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "output_router_logits": False,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
"""The keys of MiniMax-M2, without those of its quantised weights."""


SEED: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
    "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 155136,
}  # fmt: skip
"""The keys of Seed-OSS-36B."""
EXAONE: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 102400,
}  # fmt: skip
"""The keys of EXAONE-4.0-32B."""
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_attention_heads": 16,
    "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_bias": False, "use_cache": False, "vocab_size": 103424,
}  # fmt: skip
"""The keys of ERNIE-4.5-0.3B."""


@pytest.mark.parametrize(
    ("config", "billions", "layers"),
    [
        (GLM_FLASH, (29.8, 30.1), range(1, 47)),
        (MINIMAX, (228.6, 228.8), range(62)),
        (SEED, (36.1, 36.2), range(0)),
        (EXAONE, (31.9, 32.1), range(0)),
        (ERNIE, (0.3606, 0.3608), range(0)),
    ],
    ids=FIRST,
)
def test_configs_as_they_are_published(
    config: dict[str, Any], billions: tuple[float, float], layers: range
) -> None:
    assert unknown_keys(config) == []
    model = composed(read_model_config(config))
    assert expert_layers(model) == tuple(layers)
    assert not layers or block_in(model, Experts).router.scores == "sigmoid"
    parameters = model.allocate(device="meta", dtype=torch.bfloat16).parameters
    least, most = billions
    assert least * 1e9 < parameters < most * 1e9


def test_layers_of_exaone_without_rope() -> None:
    """Where some have a window; a pattern says which if no list does."""

    def read(**changes: Any) -> list[tuple[int, bool]]:
        layers = composed(read_model_config(EXAONE | changes)).layers
        return [(first.block.window, first.block.nope) for first, _ in layers]  # type: ignore[union-attr]

    hybrid = [*[(4096, False)] * 3, (0, True)] * 16
    assert read() == read(layer_types=None, sliding_window_pattern=4) == hybrid
    # Of a window that hides nothing.
    short = [*[(0, False)] * 3, (0, True)] * 16
    assert read(max_position_embeddings=4096) == short
    plain = {"layer_types": None, "sliding_window": None, "sliding_window_pattern": None}
    assert read(**plain) == [(0, False)] * 64
    assert read(layer_types=["full_attention"] * 64) == [(0, True)] * 64


def test_neighbours_of_a_head_are_turned_together(random_oracles: dict[str, Any]) -> None:
    """ERNIE's rows and biases of queries and keys come in the order of the kernels."""
    oracle = random_oracles["ernie"]
    checkpoint = Checkpoint.open(oracle.path)
    weights = composed(read_model_config(checkpoint.config)).allocate(
        device="cpu", dtype=torch.float32
    )
    checkpoint.load(destinations(checkpoint, weights))
    attention = weights.layers[0].attention
    assert isinstance(attention, AttentionWeights) and attention.qkv_bias is not None
    theirs = oracle.model.model.layers[0].self_attn
    for part, found in zip("qkv", attention.qkv.split([256, 128, 128]), strict=True):
        wanted = getattr(theirs, f"{part}_proj").weight
        if part != "v":
            wanted = wanted.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(found, wanted)
    wanted = theirs.k_proj.bias.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten()
    assert torch.equal(attention.qkv_bias[256:384], wanted)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GLM_FLASH, {"first_k_dense_replace": 2}, "first_k_dense_replace=2: supported: null or 1"),
        (GLM_FLASH, {"mlp_layer_types": ["sparse"]}, "mlp_layer_types=.*: 47 times 'dense' or"),
        (GLM_FLASH, {"mlp_layer_types": "sparse"}, "mlp_layer_types='sparse'"),
        (GLM_FLASH, {"rope_interleave": False}, "rope_interleave=False"),
        (GLM_FLASH, {"attention_bias": True}, "attention_bias=True"),
        (GLM_FLASH, {"scoring_func": "softmax"}, "scoring_func='softmax': supported: 'sigmoid'"),
        (MINIMAX, {"attn_type_list": [1, 0]}, r"attn_type_list=\[1, 0\]: supported: null, or 1"),
        (MINIMAX, {"rotary_dim": 47}, "47 of head_dim=128 values turn: must be even"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm=False: supported: null or True"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
        (MINIMAX, {"layernorm_mlp_beta": 0.5}, "layernorm_mlp_beta=0.5"),
        (MINIMAX, {"num_experts_per_tok": 257}, "num_experts_per_tok=257: supported: 1 to num_loc"),
        (MINIMAX, {"sliding_window": 64}, "sliding_window=64"),
        (SEED, {"sliding_window": 64}, "sliding_window=64"),
        (SEED, {"attention_out_bias": None}, "attention_out_bias=None: must be true or false"),
        (EXAONE, {"use_sliding_window": False}, "use_sliding_window=False: supported: null or Tr"),
        (EXAONE, {"layer_types": None}, "sliding_window_pattern='LLLG': supported: 1 or more, or"),
        (EXAONE, {"layer_types": ["full"]}, r"layer_types=\['full'\]: supported: 64 times 'full_"),
        (EXAONE, {"sliding_window": None}, "layer_types=.*'full_attention', or use_sliding_wind"),
        (EXAONE, {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        (ERNIE, {"attention_bias": True}, "attention_bias=True: supported: null or False"),
        (ERNIE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: supported: 1.0"),
        (ERNIE, {"use_bias": 1}, "use_bias=1: must be true or false, or null"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(config | changes)
