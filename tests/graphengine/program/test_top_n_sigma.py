"""`top_n_sigma` through an engine: what is drawn, what it leaves alone, and in which order it acts.

A request of a dozen allowed ids reports the log-probabilities of all of them, which are its logits
but for a constant: so what may be drawn can be told from its own results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from graphengine import Engine, Result, SamplingParams
from graphengine.demo import checkpoint_path

PROMPT = "def fib(n):"
ALLOWED = tuple(range(300, 312))
# Hot, so that all that is kept is drawn.
PARAMS = SamplingParams(
    temperature=4.0, seed=11, max_tokens=40, ignore_eos=True, allowed_token_ids=ALLOWED, logprobs=12
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def sigma_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.from_pretrained(
        checkpoint_path(),
        device=request.param,
        dtype="float32",
        max_batch=4,
        buckets=(1, 4),
        max_seq_len=96,
        logprobs_mode="processed_logprobs",
    ) as engine:
        yield engine


def keeps(logits: dict[int, float], params: SamplingParams, slack: float) -> set[int]:
    """What is kept of these logits, in the order that is documented; by `slack` more or less."""
    order = sorted(logits, key=lambda token: -logits[token])
    values = np.array([logits[token] for token in order])
    count = len(order)
    if params.top_n_sigma:
        floor = values[0] - params.top_n_sigma * values.std() - slack
        count = int((values >= floor).sum())
    if params.top_k > 0:
        count = min(count, params.top_k)
    if params.top_p < 1:
        mass = np.exp((values[:count] - values[0]) / params.temperature)
        reached = np.cumsum(mass) / mass.sum()
        count = int((reached < params.top_p + slack).sum()) + 1
    if params.min_p > 0:
        shares = np.exp((values[:count] - values[0]) / params.temperature)
        count = int((shares >= params.min_p - slack).sum())
    return {*order[:count]}


def drawn(result: Result) -> Iterator[tuple[int, dict[int, float]]]:
    """Each token and the logits that it was drawn from, up to a constant."""
    assert result.logprobs is not None
    for token, found in zip(result.token_ids, result.logprobs, strict=True):
        logits = {each: entry.logprob for each, entry in found.items()}
        assert logits.keys() == {*ALLOWED}
        yield token, logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.6},
        {"top_p": 0.9, "min_p": 0.3},
        {"top_k": 2},
        {"top_k": 9, "top_p": 0.8},
        {"presence_penalty": 1.5},
        {"temperature": 40.0},
    ],
    ids=str,
)
def test_draws_stay_within_what_is_kept(sigma_engine: Engine, options: dict[str, float]) -> None:
    params = replace(PARAMS, top_n_sigma=1.0, **options)  # type: ignore[arg-type]
    results = sigma_engine.generate([PROMPT] * 3, [replace(params, seed=seed) for seed in range(3)])
    without = replace(params, top_n_sigma=0.0)
    left_out, repeated = 0, 0
    for token, logits in (each for result in results for each in drawn(result)):
        assert token in keeps(logits, params, 1e-4)
        left_out += len(keeps(logits, without, 0.0)) > len(keeps(logits, params, 0.0))
        repeated += token != max(logits, key=lambda each: logits[each])
    assert repeated > 10, "not the best token alone"
    # At top_k=2 the filter before may have left as few.
    assert left_out > 5 or options == {"top_k": 2}


def test_what_is_kept_does_not_depend_on_the_temperature(sigma_engine: Engine) -> None:
    """Unlike top-p's: of one step's logits the same ids are drawn, hot or cold."""
    found = {}
    for temperature in (3.0, 60.0):
        params = replace(PARAMS, max_tokens=1, top_n_sigma=0.8, temperature=temperature)
        many = [replace(params, seed=seed) for seed in range(60)]
        found[temperature] = {
            each.token_ids[0] for each in sigma_engine.generate([PROMPT] * len(many), many)
        }
    (_, logits), *_ = drawn(sigma_engine.generate(PROMPT, replace(PARAMS, max_tokens=1)))
    kept = keeps(logits, replace(PARAMS, top_n_sigma=0.8), 0.0)
    assert found[60.0] == kept and found[3.0] <= kept
    assert 1 < len(kept) < len(ALLOWED)


def test_greedy_and_zero_change_nothing(sigma_engine: Engine) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    hot = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    before = {**sigma_engine.counters}
    for plain, sigma in ((greedy, 0.3), (hot, 0.0)):
        same = sigma_engine.generate(PROMPT, replace(plain, top_n_sigma=sigma))
        assert same.token_ids == sigma_engine.generate(PROMPT, plain).token_ids
    replays = {name for name, count in sigma_engine.counters.items() if count > before.get(name, 0)}
    # Neither takes the sampler that knows filters.
    assert "replays/decode/1/fast" in replays and "replays/decode/1/full" not in replays


def test_a_filter_that_keeps_one_token_is_greedy(sigma_engine: Engine) -> None:
    hot = SamplingParams(temperature=1.5, seed=5, max_tokens=12, top_n_sigma=1e-6)
    best = SamplingParams(temperature=0.0, max_tokens=12)
    found = sigma_engine.generate(PROMPT, hot)
    assert found.token_ids == sigma_engine.generate(PROMPT, best).token_ids


def test_neighbours_and_buckets_do_not_show(sigma_engine: Engine) -> None:
    params = [
        SamplingParams(temperature=1.3, seed=1, max_tokens=16, top_n_sigma=1.0),
        SamplingParams(temperature=1.3, seed=2, max_tokens=16, top_n_sigma=2.0, top_p=0.8),
        SamplingParams(temperature=1.3, seed=3, max_tokens=16),
    ]
    alone = [sigma_engine.generate(PROMPT, each).token_ids for each in params]
    together = sigma_engine.generate([PROMPT] * 3, params)
    assert [result.token_ids for result in together] == alone
    assert len({*alone}) == 3
