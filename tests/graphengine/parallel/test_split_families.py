"""Experts, latents, windows and sinks under several ranks: against transformers, and one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from events import GENEROUS_S
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from checkpoints.mtp_chains import HAS_CHAINS, VOCAB, Chains
from engines.family_checks import assert_rewinds
from extent import extent
from graphengine import Engine, Result, SamplingParams
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.speculative import MTP, Speculative

pytestmark = pytest.mark.usefixtures("forked_ranks")

SIZES: dict[str, Any] = {
    "vocab_size": 263, "max_position_embeddings": 512, "num_hidden_layers": 2,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0,
}  # fmt: skip


def _deepseek_v2() -> PreTrainedModel:
    """Queries have no latent: their rows, of heads, lie beside those of latents, of all."""
    config = DeepseekV2Config(
        **SIZES, hidden_size=56, intermediate_size=60, moe_intermediate_size=24,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=48, q_lora_rank=None,
        qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, first_k_dense_replace=1,
        n_routed_experts=5, num_experts_per_tok=3, n_shared_experts=2, topk_method="greedy",
    )  # fmt: skip
    return DeepseekV2ForCausalLM._from_config(config, experts_implementation="eager")


def _gpt_oss(**sizes: int) -> PreTrainedModel:
    config = GptOssConfig(
        **SIZES, head_dim=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6,
        num_experts_per_tok=3, sliding_window=11, **sizes,
    )  # fmt: skip
    return GptOssForCausalLM._from_config(config, experts_implementation="eager")


WRITTEN: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek-v2": _deepseek_v2,
    "gpt-oss": lambda: _gpt_oss(hidden_size=72, intermediate_size=40),
}
FAMILIES = [
    ("expert_checkpoints", "moe-some-layers", 2, False),
    ("", "gpt-oss", 2, True),
    ("", "deepseek-v2", 2, False),
    ("latent_checkpoints", "latent-corrected", 4, False),
    ("glm_checkpoints", "glm-norms-biases", 2, True),
]
# Of each family; a few more steps leave no ranks apart, as the test with pauses shows.
TOKENS = extent(16, 64)


def open_engine(path: Path, ranks: int, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "block_size": 8, "lookahead": 0} | options
    options = {"prefill_buckets": (8, 32), "wait_limit_s": GENEROUS_S, "device": "cpu"} | options
    return Engine.from_pretrained(path, tensor_parallel=ranks, **options)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def assert_equal_ranks(engine: Engine) -> None:
    """What the device owns is the same to the bit on all ranks."""
    assert isinstance(engine.runtime, DriverRuntime)
    found = engine.runtime.digests()
    assert len(found) == engine.config.tensor_parallel and len(set(found)) == 1


def tokens_of(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def run_together(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[Result]:
    """What each prompt gets; ranks stay equal."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.busy:
        for _ in range(8):
            engine.step()
        assert_equal_ranks(engine)
    return [request.result() for request in requests]


def assert_budget(engine: Engine, path: Path) -> None:
    """A rank holds its part of what the checkpoint has, as was planned."""
    tensors, ranks = Checkpoint.open(path).tensors, engine.config.tensor_parallel
    weights = engine.model.weights
    parts = [
        tensors[name].nbytes // (1 if weight.axis is None else ranks)
        for name, weight in weights.stored().items()
    ]
    planned = [line.bytes for line in engine.memory.budget.lines if line.name == "weights"]
    assert planned == [weights.nbytes] == [sum(parts)]


@pytest.mark.parametrize(("fixture", "name", "ranks", "expert_parallel"), FAMILIES)
def test_families_are_those_of_transformers(
    request: pytest.FixtureRequest,
    write_model: Callable[..., Any],
    tmp_path: Path,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    fixture: str,
    name: str,
    ranks: int,
    expert_parallel: bool,
) -> None:
    if fixture:
        oracle = request.getfixturevalue(fixture)[name]
    else:
        oracle = write_model(WRITTEN[name], tmp_path, len(name))
    with open_engine(oracle.path, ranks, expert_parallel=expert_parallel) as engine:
        assert_budget(engine, oracle.path)
        assert_replies(engine, oracle, oracle.prompts((3, 40)), eager, TOKENS)


def assert_replies(
    engine: Engine,
    oracle: Any,
    prompts: Sequence[list[int]],
    eager: Callable[[Engine], Any],
    max_tokens: int,
) -> None:
    """Tokens together, and logits alone, are those of transformers."""
    results = run_together(engine, prompts, greedy(max_tokens))
    for result in results:
        oracle.assert_greedy(result)
    # The other ranks replay the sampler that has logits beside the driver's steps.
    seen = eager(engine)
    again = engine.generate(prompts[1], greedy(max_tokens, logprobs=0))
    assert again.token_ids == results[1].token_ids
    oracle.assert_logits(again, seen)
    assert_equal_ranks(engine)


def test_pauses_and_rewinds_change_no_token(
    write_model: Callable[..., Any],
    tmp_path: Path,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
) -> None:
    """Models with windows, sinks and experts with biases, whose widths are split."""
    oracle = write_model(WRITTEN["gpt-oss"], tmp_path, 7)
    pool = {"kv_blocks": 21, "swap_blocks": 80, "window_rings": False}
    with open_engine(oracle.path, 2, **pool) as engine:
        assert_budget(engine, oracle.path)
        assert_rewinds(engine, oracle)
        assert_replies(engine, oracle, oracle.prompts((30, 60, 40)), eager, 24)
        assert engine.counters["pauses"] and engine.counters["resumes"]


def packed_checkpoint(source: Path, target: Path) -> None:
    """The checkpoint with random MXFP4 experts in place of its own."""
    generator = torch.Generator().manual_seed(4)
    tensors = {name: each.clone() for name, each in Checkpoint.open(source).mapped().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        codes = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    told = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": told}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")


def test_packed_experts_are_those_of_one_rank(
    write_model: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = write_model(
        lambda: _gpt_oss(hidden_size=64, intermediate_size=64), tmp_path / "plain", 3
    )
    path = tmp_path / "packed"
    packed_checkpoint(oracle.path, path)
    prompts = oracle.prompts((5, 30))
    with open_engine(path, 1) as alone:
        expected = alone.generate(prompts, greedy(16, logprobs=3))
        whole = alone.model.weights.nbytes
    with open_engine(path, 2) as engine:
        found = engine.generate(prompts, greedy(16, logprobs=3))
        assert_equal_ranks(engine)
        assert engine.model.weights.nbytes < 0.8 * whole
    assert tokens_of(found) == tokens_of(expected)
    for result, wanted in zip(found, expected, strict=True):
        assert result.logprobs and wanted.logprobs
        for token, one, another in zip(
            result.token_ids, result.logprobs, wanted.logprobs, strict=True
        ):
            assert one[token].logprob == pytest.approx(another[token].logprob, abs=1e-4)
    message = r"tensor_parallel=4: .*down_proj: columns 0 to 16 of 64 part some of the 32 that"
    with pytest.raises(ValueError, match=message):
        open_engine(path, 4)


@pytest.mark.skipif(not HAS_CHAINS, reason="this version of transformers runs no module by itself")
@pytest.mark.parametrize(
    ("kind", "mode", "other"),
    [
        # Beside ranks that do not draft, and beside one rank that does.
        ("deepseek-v3", MTP(k=2, style="vanilla"), {"ranks": 2}),
        ("glm4-moe", MTP(k=2), {"ranks": 1, "speculative": MTP(k=2)}),
    ],
)
def test_modules_with_experts_change_no_token(
    tmp_path: Path, kind: str, mode: Speculative, other: dict[str, Any]
) -> None:
    path = Chains(tmp_path / kind, kind, 2).path
    dice = np.random.default_rng(1)
    prompts = [dice.integers(VOCAB, size=size).tolist() for size in (1, 9, 41)]
    params = [greedy(16), SamplingParams(seed=5, max_tokens=16, ignore_eos=True), greedy(16)]
    with open_engine(path, **other) as engine:
        expected = tokens_of(engine.generate(prompts, params))
        accepted = engine.acceptance.accepted
    # Modules of GLM, and its layers, have whole experts on each rank.
    options = {"expert_parallel": kind == "glm4-moe"}
    with open_engine(path, 2, speculative=mode, **options) as engine:
        assert tokens_of(engine.generate(prompts, params)) == expected
        assert engine.acceptance.accepted > 0
        assert accepted in (0, engine.acceptance.accepted)
        assert_equal_ranks(engine)


def test_records_of_experts(expert_checkpoints: dict[str, Any]) -> None:
    """They are those of one rank, and what is replayed is taken by all ranks."""
    oracle = expert_checkpoints["moe-some-layers"]
    prompts = oracle.prompts((9, 60, 17))
    options = {"record_routing": True, "max_seq_len": 96}
    with open_engine(oracle.path, 1, **options) as alone:
        expected = alone.generate(prompts, greedy(12))
        given = np.random.default_rng(2).permuted(
            np.tile(np.arange(5, dtype=np.int16), (80, 2, 1)), axis=2
        )[..., :3]
        replayed = alone.generate(prompts[1], greedy(12, routing=given))
    with open_engine(oracle.path, 2, **options) as engine:
        found = engine.generate(prompts, greedy(12))
        assert isinstance(engine.runtime, DriverRuntime)
        # As longer records go, in pieces that end within a token's ids.
        engine.runtime.data_room = 98
        found.append(engine.generate(prompts[1], greedy(12, routing=given)))
        assert_equal_ranks(engine)
    for result, wanted in zip(found, [*expected, replayed], strict=True):
        assert result.token_ids == wanted.token_ids
        np.testing.assert_array_equal(result.routing, wanted.routing)
    assert replayed.token_ids != expected[1].token_ids
