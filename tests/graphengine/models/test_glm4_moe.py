"""GLM-4-MoE against transformers: half of a head turns, and experts are routed as DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine import Engine, SamplingParams
from graphengine.models.checkpoint import Checkpoint
from graphengine.models.decoder import DecoderConfig
from graphengine.models.stored import read_model

NAMES = ("glm-norms-biases", "glm-plain-yarn")
PROMPT_LENGTHS = (1, 75)
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
    glm_checkpoints: dict[str, Any],
    device: str,
    eager: Callable[[Engine], dict[tuple[int, int], torch.Tensor]],
    name: str,
) -> None:
    oracle = glm_checkpoints[name]
    with open_engine(oracle, device=device, prefill_buckets=(16, 64), lookahead=0) as engine:
        for prompt in oracle.prompts(PROMPT_LENGTHS):
            seen = eager(engine)
            result = engine.generate(prompt, greedy())
            assert len(result.token_ids) == TOKENS
            oracle.assert_greedy(result)
            oracle.assert_logits(result, seen)
