"""The engine against transformers: logits, and the greedy tokens of mixed prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engines.device_cases import pairwise_here
from engines.family_checks import assert_replies
from extent import extent
from graphengine import Engine, SamplingParams

PROMPT_LENGTHS = (1, 3, 16, 17, 40, 75)
MODELS = (
    "llama-biases",
    "llama-tied-yarn",
    "llama-linear-96",
    "qwen3-biases",
    "qwen3-tied-128",
)
# Several blocks of 8, and past position 64 after a prompt of 40.
TOKENS = 26


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_engine(oracle: Any, **options: Any) -> Engine:
    options = {"max_batch": 4, "max_seq_len": 160, "dtype": "float32", "block_size": 8} | options
    return Engine.from_pretrained(oracle.path, **options)


CHOICES = [(4, None, "dot"), (1, None, "fma"), (1, "dot", "dot"), (2, "fma", "fma")]
"""max_batch, the row family that is asked for, and the one that is taken."""


@pytest.mark.parametrize(
    ("name", "choice"),
    # Of a few, each model has both families.
    [
        (name, choice)
        for turn, name in enumerate(MODELS)
        for choice in extent(CHOICES[turn % 2 * 2 :][:2], CHOICES)
    ],
)
def test_logits_and_greedy_tokens(
    checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
    choice: tuple[int, str | None, str],
) -> None:
    oracle, (max_batch, asked, family) = checkpoints[name], choice
    options = {"max_batch": max_batch, "row_family": asked, "prefill_buckets": (16, 64)}
    with open_engine(oracle, device=device, lookahead=0, **options) as engine:
        assert engine.row_family == family
        for result in assert_replies(engine, oracle, eager, PROMPT_LENGTHS, TOKENS):
            assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("device", "max_batch", "lookahead"),
    pairwise_here({1: (1,), 2: (0,), 3: (1,), 8: (0, 1)}, (0, 1)),
)
@pytest.mark.parametrize("name", extent(["qwen3-biases"], ["qwen3-biases", "demo"]))
def test_batches_of_mixed_prompts(
    checkpoints: dict[str, Any], device: str, name: str, max_batch: int, lookahead: int
) -> None:
    oracle = checkpoints[name]
    with open_engine(oracle, device=device, max_batch=max_batch, lookahead=lookahead) as engine:
        results = engine.generate(oracle.prompts(PROMPT_LENGTHS), greedy(12))
        for result in results:
            assert len(result.token_ids) == 12
            oracle.assert_greedy(result)
        for size in engine.memory.ladder.sizes:
            replays = engine.counters[f"replays/decode/{size}/fast"]
            assert replays > 0, f"bucket {size} was never used"


@pytest.mark.parametrize("name", extent(["llama-biases"], ["llama-biases", "demo"]))
def test_chunked_prefill_matches_unchunked(
    checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = checkpoints[name]
    prompts = oracle.prompts((5, 63, 64, 65, 130))
    results = []
    for buckets in ((16,), (8, 32), (256,)):
        with open_engine(oracle, device=device, prefill_buckets=buckets) as engine:
            results += engine.generate(prompts, greedy(8))
    for result in results:
        oracle.assert_greedy(result)


@pytest.mark.parametrize(
    "name", extent(["llama-linear-96"], ["llama-linear-96", "qwen3-biases", "demo"])
)
def test_paused_requests_resume_with_the_same_tokens(
    checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = checkpoints[name]
    prompts = oracle.prompts((9, 30, 41, 17, 25))
    with open_engine(oracle, device=device) as engine:
        expected = [engine.generate(prompt, greedy(40)).token_ids for prompt in prompts]
    options = {"max_seq_len": 88, "kv_blocks": 14, "swap_blocks": 60}
    with open_engine(oracle, device=device, **options) as engine:
        results = engine.generate(prompts, greedy(40))
        assert engine.counters["pauses"] >= 2 and engine.counters["resumes"] >= 2
    assert [result.token_ids for result in results] == expected
    for result in results:
        oracle.assert_greedy(result)
