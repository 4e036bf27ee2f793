"""Tokens whose logits a request makes huge are drawn as their log-probabilities say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engines.small_engine import PROMPT, open_engine, run
from graphengine import Engine, SamplingParams, StructuredOutputsParams

DRAWS = 48
CASES: dict[str, dict[str, Any]] = {
    "equal": {"logit_bias": {65: 1e8, 66: 1e8}},
    "1 apart": {"logit_bias": {65: 1e7, 66: 1e7 + 1}},
    "8 apart": {"logit_bias": {65: 1e8, 66: 1e8 + 8}},
    "low": {
        "logit_bias": {65: -1e8, 66: -1e8, 67: -3e8},
        "allowed_token_ids": [65, 66, 67],
    },
    "lowest": {"logit_bias": {65: -1e20, 66: -1e20}, "allowed_token_ids": [65, 66]},
    "all but two": {"logit_bias": {i: -1e8 for i in range(4096) if i not in (65, 66)}},
}


def guided(engine: Engine) -> dict[str, Any]:
    """A grammar, which bans what is larger than the tokens that it allows."""
    pytest.importorskip("llguidance")
    a, b = (engine.tokenizer.token_to_id(text) for text in "ab")
    banned = [i for i in range(300) if i not in (a, b)]
    return {
        "logit_bias": {a: 1e8, b: 1e8} | dict.fromkeys(banned, 2e8),
        "structured_outputs": StructuredOutputsParams(regex="[ab]{900}"),
    }


def test_draws_follow_the_reported_log_probabilities(device: str) -> None:
    options = {"max_batch": 8, "max_logit_bias": 4096, "logprobs_mode": "processed_logprobs"}
    with open_engine(device=device, **options) as engine:
        cases = CASES | {"grammar": guided(engine)}
        requests = {}
        for name, asked in cases.items():
            ignored = {"ignore_eos": "structured_outputs" not in asked}
            params = SamplingParams(seed=11, max_tokens=DRAWS, logprobs=2, **ignored, **asked)
            requests[name] = engine.submit(PROMPT, params)
        run(engine)
        for name, request in requests.items():
            biased = cases[name]["logit_bias"]
            first, second = (65, 66) if name == "all but two" else [*biased][:2]
            assert {*request.token_ids} <= {first, second}, name
            shares = []
            for entry in request.logprobs:
                pair = [entry[i].logprob if i in entry else -math.inf for i in (first, second)]
                assert math.exp(pair[0]) + math.exp(pair[1]) == pytest.approx(1, abs=1e-5)
                shares.append(math.exp(pair[0]))
            count, expected = request.token_ids.count(first), sum(shares)
            # 4 standard deviations, and 2 where hardly any are expected.
            bound = 4 * math.sqrt(sum(share * (1 - share) for share in shares)) + 2
            assert abs(count - expected) <= bound, (name, count, expected)
            if name in ("equal", "low", "lowest", "grammar"):
                assert DRAWS / 4 < expected < DRAWS * 3 / 4
