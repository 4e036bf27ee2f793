"""Ranks of a model whose lm_head has a bias: Phi."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine import Engine, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize("how", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_add_it_once(dense_checkpoints: dict[str, Any], how: str) -> None:
    """An odd vocabulary, of which two ranks compute one row twice; the last stage has the bias."""
    oracle = dense_checkpoints["phi-tied"]
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    plain, scored = SamplingParams(**greedy), SamplingParams(**greedy, logprobs=1)
    sizes: dict[str, Any] = {"max_batch": 2, "max_seq_len": 96, "block_size": 8, how: 2}
    with Engine.from_pretrained(oracle.path, device="cpu", dtype="float32", **sizes) as engine:
        for result in engine.generate(oracle.prompts((9, 30)), [plain, scored]):
            oracle.assert_greedy(result)
            assert len(set(result.token_ids)) > 1
