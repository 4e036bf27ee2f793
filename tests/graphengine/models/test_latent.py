"""Models with latent attention against transformers: DeepSeek-V2 and V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine import Engine, SamplingParams
from graphengine.models.checkpoint import Checkpoint
from graphengine.models.decoder import DecoderConfig
from graphengine.models.stored import read_model
from graphengine.speculative import NGram

NAMES = ("latent-lite", "latent-groups", "latent-corrected", "latent-five-experts")
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


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(
    latent_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = latent_checkpoints[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        for prompt in oracle.prompts(PROMPT_LENGTHS):
            seen = eager(engine)
            result = engine.generate(prompt, greedy())
            assert len(result.token_ids) == TOKENS
            oracle.assert_greedy(result)
            oracle.assert_logits(result, seen)


@pytest.mark.parametrize("name", NAMES[1:3])
def test_neighbours_chunks_drafts_and_pauses_change_no_token(
    latent_checkpoints: dict[str, Any], device: str, name: str
) -> None:
    oracle = latent_checkpoints[name]
    prompts = oracle.prompts((9, 30, 41, 65))
    # What n-grams find again.
    prompts[1] = prompts[0] * 4
    with open_engine(oracle, device=device, prefill_buckets=(64,)) as engine:
        alone = [engine.generate(prompt, greedy(32)) for prompt in prompts]
        together = engine.generate(prompts, greedy(32))
    for result in alone:
        oracle.assert_greedy(result)
    expected = [result.token_ids for result in alone]
    assert [result.token_ids for result in together] == expected
    with open_engine(
        oracle, device=device, prefill_buckets=(64,), speculative=NGram(k=3)
    ) as engine:
        drafted = engine.generate(prompts, greedy(32))
        assert sum(result.acceptance.accepted for result in drafted) > 0
    assert [result.token_ids for result in drafted] == expected
    options = {"kv_blocks": 20, "swap_blocks": 60, "prefill_buckets": (64,)}
    with open_engine(oracle, device=device, **options) as engine:
        paused = engine.generate(prompts, greedy(32))
        assert engine.counters["pauses"] >= 1 and engine.counters["resumes"] >= 1
    assert [result.token_ids for result in paused] == expected
    with open_engine(oracle, device=device, prefill_buckets=(8, 32)) as engine:
        for result in engine.generate(prompts, greedy(32)):
            oracle.assert_greedy(result)
