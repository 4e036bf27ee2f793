"""Models with experts against transformers: Qwen3-MoE, with experts in every layer or in some."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.small_decoders import block_in, composed, expert_layers
from engines.family_checks import assert_replies, assert_same_in_any_company
from extent import extent
from graphengine import Engine, SamplingParams
from graphengine.models.blocks.experts import Experts
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.destinations import read_model
from graphengine.models.composition import windows_of
from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.registry import read_model_config
from graphengine.models.hf.config_schema import unknown_keys
from graphengine.models.linears import heuristic_plans, stream_groups

NAMES = ("moe-some-layers", "moe-every-layer", "moe-every-second-layer")
MIXTRAL = "mixtral"
PROMPT_LENGTHS = (1, 17, 75)
TOKENS = 64


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


def read_config(oracle: Any) -> DecoderConfig:
    model = read_model(Checkpoint.open(oracle.path))
    assert isinstance(model, DecoderConfig)
    return model


@pytest.mark.parametrize(
    ("name", "max_batch"), [*((name, 4) for name in (*NAMES, MIXTRAL)), (NAMES[0], 1)]
)
def test_logits_and_greedy_tokens(
    expert_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
    max_batch: int,
) -> None:
    oracle = expert_checkpoints[name]
    options = {"max_batch": max_batch, "prefill_buckets": (16, 64), "lookahead": 0}
    with open_engine(oracle, device=device, **options) as engine:
        assert_replies(engine, oracle, eager, PROMPT_LENGTHS)


@pytest.mark.parametrize("name", extent((NAMES[0], MIXTRAL), (*NAMES[:2], MIXTRAL)))
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    expert_checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = expert_checkpoints[name]
    assert_same_in_any_company(partial(open_engine, oracle, device=device), oracle)


def test_experts_are_as_the_config_says(expert_checkpoints: dict[str, Any]) -> None:
    models = [read_config(expert_checkpoints[name]) for name in NAMES]
    assert [expert_layers(model) for model in models] == [(0, 2), (0, 1), (1,)]
    assert [block_in(model, Experts).router.normalised for model in models] == [
        True,
        False,
        True,
    ]
    some, every, second = (list(model.linears) for model in models)
    of_experts = ["expert_gate_up", "expert_down"]
    assert some == ["qkv", "output", "gate_up", "down", *of_experts, "lm_head"]
    assert every == ["qkv", "output", *of_experts, "lm_head"]
    # The last layer has no experts: what it leaves is what the final norm reads.
    assert second == ["qkv", "output", *of_experts, "gate_up", "down", "lm_head"]
    for model, name in zip(models, ("expert_down", "expert_down", "down"), strict=True):
        plans = heuristic_plans(model.linears, torch.bfloat16, "dot")
        assert stream_groups(model.linears, plans) == -(-model.hidden_size // plans[name].block_m)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_a_token_does_not_meet(
    expert_checkpoints: dict[str, Any], name: str
) -> None:
    oracle = expert_checkpoints[name]
    weights = read_config(oracle).allocate(device="meta", dtype=torch.float32)
    theirs = {n: p for n, p in oracle.model.named_parameters() if "mlp.experts." in n}
    experts, chosen = oracle.model.config.num_experts, oracle.model.config.num_experts_per_tok
    routed = sum(parameter.numel() for parameter in theirs.values())
    assert weights.routed is not None
    assert routed and weights.routed.idle == routed * (experts - chosen) // experts
    assert weights.parameters == oracle.model.num_parameters()


def test_mixtral_as_it_is_published() -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    }  # fmt: skip
    assert unknown_keys(config) == []
    model = read_model_config(config)
    experts = block_in(model, Experts)
    assert model.rope.theta == 1e6 and not any(windows_of(composed(model)))
    assert (experts.experts, experts.router.top_k, experts.router.normalised) == (8, 2, True)
    assert 46.7e9 < model.allocate(device="meta", dtype=torch.bfloat16).parameters < 46.8e9
    windowed = read_model_config(config | {"sliding_window": 4096})
    assert windows_of(composed(windowed)) == (4096,) * 32


def edited_config(oracle: Any, tmp_path: Path, **changes: Any) -> Checkpoint:
    """The checkpoint with other values in its config; None removes a key."""
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((oracle.path / "config.json").read_text()) | changes
    (tmp_path / "config.json").unlink()
    kept = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return Checkpoint.open(tmp_path)


def test_either_name_of_the_number_of_experts(
    expert_checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    oracle = expert_checkpoints[NAMES[0]]
    checkpoint = edited_config(oracle, tmp_path, num_local_experts=None, num_experts=5)
    assert read_model(checkpoint) == read_config(oracle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "num_local_experts=5: supported: as num_experts is"),
        ({"num_local_experts": 600}, "num_local_experts=600: supported: at most 512"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6: supported: 1 to num_local_experts=5"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1: must be a list of integers"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\]: must be a list of integers in \[0,"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1: must be true or false"),
        ({"n_shared_experts": 1}, "n_shared_experts=1: supported: null or 0"),
        ({"moe_intermediate_size": 41}, "tensors of a wrong shape: .*experts.0.gate_proj.weight"),
        # Tensors that the config does not know of, and the other way round.
        ({"num_local_experts": 4}, r"layers.0.mlp.gate.weight has shape \[5, 72\], not \[4, 72\]"),
        ({"num_local_experts": 6}, r"lacks 6 of \d+ tensors: .*experts.5.gate_proj"),
        ({"mlp_only_layers": None}, "lacks 16 of .*layers.1.mlp.gate.weight"),
    ],
)
def test_configs_that_are_wrong_or_do_not_fit(
    expert_checkpoints: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = edited_config(expert_checkpoints[NAMES[0]], tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_model(checkpoint)


def test_a_model_without_experts_in_any_layer_is_a_dense_one(
    expert_checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    oracle = expert_checkpoints[NAMES[0]]
    checkpoint = edited_config(oracle, tmp_path, decoder_sparse_step=4)
    with pytest.raises(ValueError, match=r"lacks 6 of .*layers.0.mlp.gate_proj.weight"):
        read_model(checkpoint)


def test_scales_of_experts_without_a_format_are_named(expert_checkpoints: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(expert_checkpoints[NAMES[1]].path)
    scale = "model.layers.1.mlp.experts.4.up_proj.weight_scale_inv"
    info = checkpoint.tensors["model.norm.weight"]
    checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, scale: info})
    with pytest.raises(ValueError, match=f"1 tensors of quantised weights, and its .*: {scale}"):
        read_model(checkpoint)
