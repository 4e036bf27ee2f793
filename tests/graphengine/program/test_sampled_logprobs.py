"""`logprobs_mode` of a request: what its log-probabilities are of, in each engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.small_engine import LONG, OTHER, PROMPT, open_engine
from engines.speculation import open_speculating, run_with
from graphengine import Engine, Result, SamplingParams
from graphengine.speculative import MTP, NGram

ALLOWED = tuple(range(300, 312))
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 4.0},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 3.0, "min_p": 0.3, "top_n_sigma": 1.5},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.0, "top_k": 2},
    {"temperature": 2.0, "min_tokens": 20, "stop_token_ids": [303, 305], "max_tokens": 20},
)


def ask(**options: Any) -> SamplingParams:
    given = {"seed": 11, "max_tokens": 12, "ignore_eos": True, "logprobs": 12}
    return SamplingParams(**{**given, "allowed_token_ids": ALLOWED, **options})


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(
        device=request.param, dtype="float32", logprobs_mode="sampled_logprobs"
    ) as opened:
        yield opened


def rows_of(result: Result) -> list[dict[int, float]]:
    assert result.logprobs is not None
    return [{token: each.logprob for token, each in row.items()} for row in result.logprobs]


def expected_row(processed: dict[int, float], asked: SamplingParams) -> dict[int, float]:
    """Log-probabilities of the draw, from processed ones: these are the logits but for a number."""
    stops = asked.stop_tokens if asked.min_tokens else ()
    left = {token: value for token, value in processed.items() if token not in stops}
    if asked.temperature:
        order = sorted(left, key=lambda token: -left[token])
        values = np.array([left[token] for token in order])
        count = len(order)
        if asked.top_n_sigma:
            count = int((values >= values[0] - asked.top_n_sigma * values.std()).sum())
        if asked.top_k:
            count = min(count, asked.top_k)
        mass = np.exp((values - values[0]) / asked.temperature)
        if asked.top_p < 1:
            share = np.cumsum(mass[:count]) / mass[:count].sum()
            count = int((share < asked.top_p).sum()) + 1
        if asked.min_p:
            count = min(count, int((mass >= asked.min_p).sum()))
        left = {token: left[token] / asked.temperature for token in order[:count]}
    total = np.logaddexp.reduce(list(left.values()))
    return {token: float(value - total) for token, value in left.items()}


@pytest.mark.parametrize("options", ASKED, ids=str)
def test_logprobs_are_those_of_the_draw(engine: Engine, options: dict[str, Any]) -> None:
    asked = ask(**options)
    found = engine.generate(PROMPT, asked)
    processed = engine.generate(PROMPT, ask(**options, logprobs_mode="processed_logprobs"))
    assert found.token_ids == processed.token_ids
    kept = 0
    for token, row, other in zip(found.token_ids, rows_of(found), rows_of(processed), strict=True):
        expected = expected_row(other, asked)
        assert row == pytest.approx(expected, abs=2e-5) and token in row
        assert sum(np.exp(list(row.values()))) == pytest.approx(1, abs=1e-4)
        kept += len(row)
    assert (kept < len(ALLOWED) * len(found.token_ids)) == (asked.filtered or asked.min_tokens > 0)


def test_the_engines_mode_is_the_default_and_serves_all(engine: Engine) -> None:
    options = {"temperature": 0.6, "frequency_penalty": 0.5, "allowed_token_ids": None}
    rows = {
        mode: engine.generate(PROMPT, ask(**options, logprobs_mode=mode)).logprobs
        for mode in ("sampled_logprobs", "processed_logprobs", "raw_logprobs")
    }
    assert engine.generate(PROMPT, ask(**options)).logprobs == rows["sampled_logprobs"]
    with open_engine(device=str(engine.memory.device), dtype="float32") as raw:
        plain = raw.generate(PROMPT, ask(**options))
        processed = raw.generate(PROMPT, ask(**options, logprobs_mode="processed_logprobs"))
        with pytest.raises(ValueError, match="logprobs_mode='raw_logprobs', which serves raw_"):
            raw.submit(PROMPT, ask(logprobs_mode="sampled_logprobs"))
    assert plain.logprobs == rows["raw_logprobs"] != rows["processed_logprobs"]
    assert processed.logprobs == rows["processed_logprobs"] != rows["sampled_logprobs"]
    with (
        open_engine(
            device=str(engine.memory.device), logprobs_mode="processed_logprobs"
        ) as without,
        pytest.raises(ValueError, match=r"which serves processed_logprobs$"),
    ):
        without.submit(PROMPT, ask(logprobs_mode="raw_logprobs"))
    with pytest.raises(ValueError, match="logprobs_mode='all' must be 'raw_logprobs', "):
        SamplingParams(logprobs_mode="all")  # type: ignore[arg-type]


PAIRS = [
    (prompt, ask(**options, allowed_token_ids=None))
    for options in ASKED
    for prompt in (PROMPT, OTHER, LONG)
]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Result]:
    """What each of `PAIRS` says alone, without drafts."""
    return [engine.generate(prompt, asked) for prompt, asked in PAIRS]


@pytest.mark.parametrize("speculative", [NGram(3), MTP(k=2), MTP(tree=[[0], [1], [0, 0]])], ids=str)
def test_neighbours_and_drafts_change_nothing(
    engine: Engine, alone: list[Result], speculative: Any
) -> None:
    with open_speculating(
        speculative,
        device=str(engine.memory.device),
        dtype="float32",
        logprobs_mode="sampled_logprobs",
    ) as other:
        requests = [other.submit(prompt, asked) for prompt, asked in PAIRS]
        run_with(other)
    for request, result in zip(requests, alone, strict=True):
        assert request.result().token_ids == result.token_ids
        for row, expected in zip(rows_of(request.result()), rows_of(result), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
