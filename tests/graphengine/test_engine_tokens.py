"""Which tokens and which text a request gets: how it ends, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.few_layers import few_layers
from engines.small_engine import (
    LONG,
    MAX_SEQ_LEN,
    OTHER,
    PROMPT,
    assert_idle,
    greedy,
    open_engine,
    run,
    sampled,
    step_until,
)
from graphengine import Engine, Result, SamplingParams


def first_new(tokens: tuple[int, ...], start: int) -> int:
    """The first index from `start` on whose token did not come before."""
    return next(index for index in range(start, len(tokens)) if tokens[index] not in tokens[:index])


# Ends of a request.


def test_a_stop_token_id_ends_the_request(engine: Engine) -> None:
    whole = engine.generate(PROMPT, greedy(30)).token_ids
    end = first_new(whole, 4)
    result = engine.generate(PROMPT, greedy(30, stop_token_ids=[4095, whole[end]]))
    assert result.finish_reason == "stop"
    assert result.token_ids == whole[: end + 1]
    # The last token may be both: a stop counts for more than the length.
    result = engine.generate(PROMPT, greedy(end + 1, stop_token_ids=[whole[end]]))
    assert result.finish_reason == "stop" and result.token_ids == whole[: end + 1]
    result = engine.generate(PROMPT, greedy(end, stop_token_ids=[whole[end]]))
    assert result.finish_reason == "length" and result.token_ids == whole[:end]


def test_end_of_sequence_ends_the_request(edited: Callable[..., Path], engine: Engine) -> None:
    whole = engine.generate(PROMPT, greedy(40)).token_ids
    end = first_new(whole, 4)
    # `generation_config.json` goes before `config.json`, and may name several ids.
    path = edited(few_layers(), generation_config={"eos_token_id": [4095, whole[end]]})
    with open_engine(path, device=engine.config.device) as other:
        result = other.generate(PROMPT, greedy(40))
        assert result.finish_reason == "stop" and result.token_ids == whole[: end + 1]
        assert other.generate(PROMPT, greedy(40, ignore_eos=True)).token_ids == whole
        # `ignore_eos` leaves the request's own stop ids alone.
        later = first_new(whole, end + 1)
        params = greedy(40, ignore_eos=True, stop_token_ids=[whole[later]])
        assert other.generate(PROMPT, params).token_ids == whole[: later + 1]


@pytest.mark.parametrize("sampled", [False, True])
def test_no_stop_id_comes_before_min_tokens(engine: Engine, sampled: bool) -> None:
    def params(**options: Any) -> SamplingParams:
        if sampled:
            return SamplingParams(seed=3, max_tokens=12, **options)
        return greedy(12, **options)

    stop = engine.generate(PROMPT, params()).token_ids[0]
    assert engine.generate(PROMPT, params(stop_token_ids=[stop])).token_ids == (stop,)
    for min_tokens in (1, 5):
        result = engine.generate(PROMPT, params(stop_token_ids=[stop], min_tokens=min_tokens))
        assert len(result.token_ids) > min_tokens
        assert stop not in result.token_ids[:min_tokens]
        assert stop not in result.token_ids[:-1]
    result = engine.generate(PROMPT, params(stop_token_ids=[stop], min_tokens=12))
    assert len(result.token_ids) == 12 and result.finish_reason == "length"


def pieces_of(engine: Engine, result: Result) -> list[str]:
    """The text of each token; the demo's greedy text is ASCII, so a token is whole characters."""
    pieces = [engine.tokenizer.decode([token]) for token in result.token_ids]
    assert "".join(pieces) == result.text
    return pieces


def test_a_stop_string_may_lie_across_two_tokens(engine: Engine) -> None:
    whole = engine.generate(PROMPT, greedy(30))
    pieces = pieces_of(engine, whole)
    # A pair of tokens whose joint first appears where they meet: the last character of one, and
    # the first of the next.
    index, stop = next(
        (index, pieces[index][-1] + pieces[index + 1][0])
        for index in range(3, len(pieces) - 1)
        if len(pieces[index]) > 1
        and whole.text.find(pieces[index][-1] + pieces[index + 1][0])
        == len("".join(pieces[: index + 1])) - 1
    )
    request = engine.submit(PROMPT, greedy(30, stop=stop))
    events = run(engine)
    result = request.result()
    assert result.finish_reason == "stop"
    assert result.token_ids == whole.token_ids[: index + 2]
    assert result.text == whole.text[: whole.text.find(stop)]
    assert "".join(event.text for event in events) == result.text
    # What could begin the stop string is held back, and no more than that.
    assert events[index].text == pieces[index][:-1]
    assert events[-1].text == "" and events[-1].token_ids == whole.token_ids[index + 1 : index + 2]


def test_text_held_back_for_a_stop_string_comes_once_it_cannot_match(engine: Engine) -> None:
    whole = engine.generate(PROMPT, greedy(12))
    pieces = pieces_of(engine, whole)
    # It agrees with the text of tokens 2 to 4, and then no more.
    stop = "".join(pieces[2:5]) + "\N{SNOWMAN}"
    request = engine.submit(PROMPT, greedy(12, stop=["never in the text", stop]))
    deltas = [event.text for event in run(engine)]
    assert "".join(deltas) == request.text == whole.text
    assert request.finish_reason == "length"
    assert "".join(deltas[:2]) == "".join(pieces[:2])
    assert deltas[2:5] == ["", "", ""], "the tokens that agree are held back"
    assert deltas[5].startswith("".join(pieces[2:5])), "and come with the one that does not"


def test_text_held_back_at_the_end_is_not_lost(engine: Engine) -> None:
    whole = engine.generate(PROMPT, greedy(12))
    stop = whole.text[-4:] + "\N{SNOWMAN}"
    request = engine.submit(PROMPT, greedy(12, stop=stop))
    events = run(engine)
    assert request.text == whole.text == "".join(event.text for event in events)
    # The same for a request that is cancelled while text is held back.
    request = engine.submit(PROMPT, greedy(30, stop=whole.text + "\N{SNOWMAN}"))
    events = step_until(engine, lambda: len(request.token_ids) == 12)
    assert request.text == ""
    request.cancel()
    events += run(engine)
    assert request.text == whole.text == "".join(event.text for event in events)


def test_requests_end_by_length(engine: Engine) -> None:
    for max_tokens in (1, 2, 7):
        result = engine.generate(PROMPT, greedy(max_tokens))
        assert len(result.token_ids) == max_tokens and result.finish_reason == "length"
    # No request grows beyond max_seq_len, whatever it asks for.
    for prompt_len, max_tokens in ((64, None), (97, 2**40), (MAX_SEQ_LEN - 1, None)):
        result = engine.generate([7] * prompt_len, greedy(max_tokens, ignore_eos=True))
        assert len(result.token_ids) == MAX_SEQ_LEN - prompt_len
        assert result.finish_reason == "length"
    assert_idle(engine)


# Sampling.


def test_a_seed_settles_the_tokens_whatever_runs_beside(engine: Engine) -> None:
    alone = engine.generate(PROMPT, sampled(seed=11))
    assert alone.seed == 11
    prompts = [OTHER, PROMPT, LONG, PROMPT, PROMPT]
    params = [sampled(30), sampled(seed=11), greedy(9), sampled(seed=12), sampled(seed=11)]
    batch = engine.generate(prompts, params)
    assert batch[1].token_ids == batch[4].token_ids == alone.token_ids
    assert batch[3].token_ids != alone.token_ids


def test_the_engine_draws_and_reports_seeds(device: str, engine: Engine) -> None:
    results = engine.generate([PROMPT] * 5, sampled())
    assert len({result.seed for result in results}) == 5
    assert len({result.token_ids for result in results}) == 5
    for result in results[:2]:
        assert engine.generate(PROMPT, sampled(seed=result.seed)).token_ids == result.token_ids

    # They come from the engine's own seed, in the order of submission.
    first = []
    for seed in (0, 0, 2**62):
        with open_engine(device="cpu", seed=seed) as fresh:
            first.append([fresh.submit(PROMPT, sampled()).seed for _ in range(3)])
    assert first[0] == first[1]
    assert not set(first[0]) & set(first[2])


def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy()).token_ids
    for seed in range(3):
        result = engine.generate(PROMPT, SamplingParams(max_tokens=12, top_k=1, seed=seed))
        assert result.token_ids == expected
    assert engine.generate(PROMPT, SamplingParams(max_tokens=12, top_p=1e-6)).token_ids == expected
    assert engine.generate(PROMPT, SamplingParams(max_tokens=12, min_p=1.0)).token_ids == expected


def test_greedy_tokens_depend_on_no_other_field(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy()).token_ids
    for options in ({"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.5}, {"seed": 2**63 - 1}):
        assert engine.generate(PROMPT, greedy(**options)).token_ids == expected


def test_filters_bound_what_is_sampled(engine: Engine) -> None:
    """A hot request keeps to the filters' candidates: those of greedy's first position here."""
    counts = []
    for options in ({}, {"top_k": 4}, {"top_p": 0.5, "top_k": 4}, {"min_p": 0.9, "top_k": 4}):
        results = engine.generate(
            [PROMPT] * 40, SamplingParams(temperature=3.0, max_tokens=1, **options)
        )
        counts.append(len({result.token_ids for result in results}))
    assert counts[0] > 10 and 1 < counts[1] <= 4 and counts[2] <= 4 and counts[3] <= 4


@pytest.mark.parametrize("wait", ["spin", "yield", "block"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_do_not_depend_on_lookahead_or_wait(
    engine: Engine, lookahead: int, wait: str
) -> None:
    prompts = [PROMPT, LONG, OTHER, PROMPT, OTHER]
    stop = engine.generate(PROMPT, greedy()).text[3:6]
    params = [greedy(15), greedy(9), sampled(seed=1), sampled(seed=2), greedy(20, stop=stop)]
    expected = engine.generate(prompts, params)
    device = engine.config.device
    with open_engine(device=device, lookahead=lookahead, wait=wait) as other:
        results = other.generate(prompts, params)
        assert lookahead or not other.counters["discarded_tokens"]
        run(other)
        assert_idle(other)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert [result.text for result in results] == [result.text for result in expected]
