"""The engine's interface: what callers may do, in which order, and what they are told."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphengine import Engine, EngineConfig, Event, Request, Result, SamplingParams
from graphengine.buckets import OutOfBudget
from graphengine.checkpoint import Checkpoint
from graphengine.demo import checkpoint_path
from graphengine.memory import plan_memory
from graphengine.models.families import read_model_config
from graphengine.request import Phase

# Prompts of the demo model, and what becomes of the long one: prefilled in several chunks of 32.
PROMPT = "def fib(n):"
OTHER = "class Tree:\n"
LONG = "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n" * 2
MAX_SEQ_LEN = 128
LIMIT = 500


def open_engine(path: Path | str | None = None, **options: Any) -> Engine:
    """A small engine, of the demo model unless another checkpoint is named."""
    sizes = {"max_batch": 3, "max_seq_len": MAX_SEQ_LEN, "block_size": 8}
    options = sizes | {"prefill_buckets": (8, 32)} | options
    return Engine.from_pretrained(path or checkpoint_path(), **options)


def greedy(max_tokens: int | None = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(engine: Engine) -> list[Event]:
    """Step until nothing is left to do; all events."""
    events = []
    for _ in range(LIMIT):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError(f"busy after {LIMIT} steps: {engine.scheduler.active}")


def step_until(engine: Engine, condition: Callable[[], bool]) -> list[Event]:
    events = []
    for _ in range(LIMIT):
        if condition():
            return events
        events += engine.step()
    raise AssertionError(f"not after {LIMIT} steps: {engine.scheduler.active}")


def events_of(request: Request, events: list[Event]) -> list[Event]:
    return [event for event in events if event.request is request]


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(event.token_ids for event in events))


def assert_idle(engine: Engine) -> None:
    """Nothing of any request is left."""
    assert not engine.busy
    scheduler = engine.scheduler
    assert scheduler.pool.free == scheduler.pool.count
    assert scheduler.swap.free == scheduler.swap.count
    assert not any(scheduler.slots) and not scheduler.active and not scheduler.waiting


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Engine]]:
    """One engine of the demo model a device, opened when it is first asked for."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine(device: str, shared: dict[str, Engine]) -> Iterator[Engine]:
    """The shared engine, idle; what a failed test leaves behind is cancelled."""
    if device not in shared:
        shared[device] = open_engine(device=device)
    engine = shared[device]
    yield engine
    try:
        for request in [*engine.scheduler.active, *engine.scheduler.waiting]:
            request.cancel()
        run(engine)
    except Exception:
        shared.pop(device).close()
        raise


# Requests, events and results.


def test_a_step_brings_each_token_once(engine: Engine) -> None:
    before = time.perf_counter()
    request = engine.submit(PROMPT, greedy(20))
    assert engine.busy and request.phase is Phase.WAITING
    events = run(engine)
    assert all(event.request is request for event in events)
    assert tokens_of(events) == tuple(request.token_ids)
    assert "".join(event.text for event in events) == request.text
    assert [event.finish_reason for event in events] == [None] * 19 + ["length"]
    times = [event.time for event in events]
    assert before <= times[0] and times == sorted(times) and times[-1] <= time.perf_counter()

    result = request.result()
    assert isinstance(result, Result) and result.request_id == request.id
    assert result.prompt_token_ids == tuple(engine.tokenizer.encode(PROMPT))
    assert result.token_ids == tuple(request.token_ids) and len(result.token_ids) == 20
    assert result.text == engine.tokenizer.decode(result.token_ids)
    assert result.finish_reason == "length"
    assert result.timings.tokens == times and result.timings.finished == times[-1]
    assert before <= result.timings.submitted <= times[0]
    assert result.timings.time_to_first_token == times[0] - result.timings.submitted
    assert result.timings.inter_token == [after - before for before, after in pairwise(times)]
    assert_idle(engine)


def test_an_idle_engine_steps_without_effect(engine: Engine) -> None:
    assert not engine.busy
    assert engine.step() == [] == engine.step(timeout=0)


def test_text_lags_behind_tokens_but_never_splits_a_character(engine: Engine) -> None:
    # Bytes of characters outside the vocabulary's merges: the model repeats them if it repeats.
    text = "# naïve café — 日本語 ½ 😀\n"
    results = []
    for seed in range(3):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=60)
        request = engine.submit(text, params)
        deltas = [event.text for event in run(engine)]
        results.append(request.result())
        assert "".join(deltas) == request.text == engine.tokenizer.decode(request.token_ids)
    tokens = [token for result in results for token in result.token_ids]
    pieces = [engine.tokenizer.token_bytes(token) or b"" for token in tokens]
    assert any(piece and piece[0] >= 0x80 for piece in pieces), "no character of several tokens"


def test_generate_takes_text_and_token_ids(engine: Engine) -> None:
    result = engine.generate(PROMPT, greedy())
    ids = engine.tokenizer.encode(PROMPT)
    for prompt in (ids, tuple(ids), torch.tensor(ids)):
        assert engine.generate(prompt, greedy()).token_ids == result.token_ids


def test_generate_takes_chat_messages(chat_checkpoint: Path, device: str) -> None:
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "A function, please."},
    ]
    text = "# system: You write Python.\n# user: A function, please.\n# assistant:"
    with open_engine(chat_checkpoint, device=device) as engine:
        expected = engine.generate(text, greedy())
        result = engine.generate(messages, greedy())
        assert result.prompt_token_ids == expected.prompt_token_ids
        assert result.token_ids == expected.token_ids
        batch = engine.generate([messages, messages[1:], PROMPT], greedy())
        assert batch[0].token_ids == result.token_ids
        assert batch[1].prompt_token_ids < result.prompt_token_ids
        assert batch[2].prompt_token_ids == tuple(engine.tokenizer.encode(PROMPT))
        assert next(iter(engine.stream(messages, greedy()))).token_ids == result.token_ids[:1]


def test_generate_takes_batches(engine: Engine) -> None:
    prompts = [PROMPT, LONG, OTHER, PROMPT, engine.tokenizer.encode(OTHER)]
    singles = [engine.generate(prompt, greedy()) for prompt in prompts]
    batch = engine.generate(prompts, greedy())
    assert [result.token_ids for result in batch] == [result.token_ids for result in singles]
    assert [result.text for result in batch] == [result.text for result in singles]
    assert isinstance(engine.generate([PROMPT], greedy(1)), list)
    ids = [list(result.prompt_token_ids) for result in singles]
    assert [result.token_ids for result in engine.generate(ids, greedy())] == [
        result.token_ids for result in singles
    ]


def test_each_prompt_of_a_batch_may_have_its_own_parameters(engine: Engine) -> None:
    params = [greedy(3), SamplingParams(seed=5, max_tokens=7), greedy(5)]
    batch = engine.generate([PROMPT, OTHER, LONG], params)
    assert [len(result.token_ids) for result in batch] == [3, 7, 5]
    assert batch[1].seed == 5
    assert batch[1].token_ids == engine.generate(OTHER, params[1]).token_ids
    assert engine.generate(PROMPT, [greedy(3)]).token_ids == batch[0].token_ids


def test_a_wrong_number_of_parameters_is_an_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        engine.generate([PROMPT, OTHER, LONG], [greedy(), greedy()])
    with pytest.raises(ValueError, match="0 SamplingParams for 1 prompts"):
        engine.generate(PROMPT, [])
    assert_idle(engine)


def test_defaults_are_vllms(engine: Engine) -> None:
    result = engine.generate([1, 2, 3])
    assert len(result.token_ids) == 16 or result.finish_reason == "stop"
    request = engine.submit([1, 2, 3])
    assert request.params == SamplingParams()
    run(engine)


def test_other_requests_go_on_while_one_is_generated(engine: Engine) -> None:
    expected = engine.generate(OTHER, greedy(30))
    request = engine.submit(OTHER, greedy(30))
    engine.generate(PROMPT, greedy(40))
    assert request.finished and request.result().token_ids == expected.token_ids


def test_more_requests_than_slots_wait_their_turn(engine: Engine) -> None:
    slots = engine.config.max_batch
    prompts = [PROMPT, OTHER, LONG] * 3
    expected = [engine.generate(prompt, greedy(6)) for prompt in prompts[:3]] * 3
    requests = [engine.submit(prompt, greedy(6)) for prompt in prompts]
    assert len(requests) > slots
    first_tokens: list[int] = []
    while engine.busy:
        started = [event.request for event in engine.step() if event.token_ids]
        first_tokens += [request.id for request in started if len(request.token_ids) == 1]
        assert len(engine.scheduler.active) <= slots
        waiting = [request for request in requests if request.phase is Phase.WAITING]
        assert list(engine.scheduler.waiting) == waiting
    assert first_tokens == [request.id for request in requests], "first come, first served"
    for request, result in zip(requests, expected, strict=True):
        assert request.result().token_ids == result.token_ids


# Streams.


def test_a_stream_brings_the_same_as_generate(engine: Engine) -> None:
    result = engine.generate(PROMPT, greedy())
    events = list(engine.stream(PROMPT, greedy()))
    assert tokens_of(events) == result.token_ids
    assert "".join(event.text for event in events) == result.text
    assert events[-1].finish_reason == "length"


def test_streams_may_be_read_in_turns(engine: Engine) -> None:
    prompts = [PROMPT, OTHER, LONG, OTHER]
    expected = [engine.generate(prompt, greedy()).token_ids for prompt in prompts]
    streams = [engine.stream(prompt, greedy()) for prompt in prompts]
    tokens: list[tuple[int, ...]] = [()] * len(streams)
    for turn in range(12):
        for index in range(turn % 2, len(streams)):
            event = next(streams[index], None)
            tokens[index] += event.token_ids if event else ()
    rests = [tokens_of(list(stream)) for stream in streams]
    assert [had + rest for had, rest in zip(tokens, rests, strict=True)] == expected
    run(engine)
    assert_idle(engine)


def test_closing_a_stream_early_cancels_its_request(engine: Engine) -> None:
    expected = engine.generate(OTHER, greedy(20))
    other = engine.submit(OTHER, greedy(20))
    stream = engine.stream(PROMPT, greedy(60))
    events = [next(stream) for _ in range(3)]
    stream.close()  # type: ignore[attr-defined]
    run(engine)
    request = events[0].request
    assert request.finish_reason == "cancelled" and len(request.token_ids) == 3
    assert other.result().token_ids == expected.token_ids
    assert_idle(engine)


def test_closing_a_stream_before_its_first_event_cancels_its_request(engine: Engine) -> None:
    stream = engine.stream(PROMPT, greedy(60))
    (request,) = engine.scheduler.waiting
    stream.close()  # type: ignore[attr-defined]
    run(engine)
    assert request.finish_reason == "cancelled"


def test_a_stream_checks_its_prompt_at_once(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.stream("", greedy())
    with pytest.raises(ValueError, match="not finished"):
        engine.submit(PROMPT, greedy()).result()


# Cancelling.


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE])
def test_cancel_takes_effect_at_the_next_step(engine: Engine, phase: Phase) -> None:
    expected = engine.generate(OTHER, greedy(30))
    others = [engine.submit(OTHER, greedy(30))]
    if phase is Phase.WAITING:
        others += [engine.submit(OTHER, greedy(30)) for _ in range(engine.config.max_batch - 1)]
    request = engine.submit(LONG if phase is Phase.PREFILL else PROMPT, greedy(50))
    if phase is Phase.WAITING:
        engine.step()
    else:
        step_until(engine, lambda: request.phase is phase)
    if phase is Phase.DECODE:
        step_until(engine, lambda: len(request.token_ids) == 5)
    cancelled = engine.counters["finished/cancelled"]
    assert request.phase is phase

    request.cancel()
    request.cancel()
    had = list(request.token_ids)
    assert engine.busy and not request.finished
    (event,) = events_of(request, engine.step())
    assert event.finish_reason == "cancelled" and event.token_ids == ()
    assert request.finished and request.placement is None
    result = request.result()
    assert result.finish_reason == "cancelled" and list(result.token_ids) == had
    assert result.text == engine.tokenizer.decode(had)
    assert result.timings.finished == event.time
    assert engine.counters["finished/cancelled"] == cancelled + 1

    assert not events_of(request, run(engine))
    assert list(request.token_ids) == had
    for other in others:
        assert other.result().token_ids == expected.token_ids
    assert_idle(engine)


def test_tokens_in_flight_of_a_cancelled_request_are_counted(engine: Engine) -> None:
    request = engine.submit(PROMPT, greedy(50))
    step_until(engine, lambda: len(request.token_ids) == 3)
    discarded = engine.counters["discarded_tokens"]
    request.cancel()
    run(engine)
    assert engine.counters["discarded_tokens"] == discarded + 1


def test_cancel_while_paused(device: str) -> None:
    # Two requests of 96 tokens in a pool of 15 blocks of 8: one of them has to pause.
    with open_engine(device=device, kv_blocks=15, swap_blocks=15) as engine:
        expected = engine.generate(PROMPT, greedy(80, ignore_eos=True))
        first = engine.submit(PROMPT, greedy(80, ignore_eos=True))
        second = engine.submit(OTHER, greedy(80, ignore_eos=True))
        step_until(engine, lambda: second.phase is Phase.PAUSED)
        had = list(second.token_ids)
        assert had and second.pauses == 1
        second.cancel()
        (event,) = events_of(second, engine.step())
        assert event.finish_reason == "cancelled" and event.token_ids == ()
        assert second.finished and list(second.token_ids) == had
        run(engine)
        assert first.result().token_ids == expected.token_ids
        assert engine.counters["pauses"] == 1 and engine.counters["resumes"] == 0
        assert_idle(engine)


def test_cancelling_a_finished_request_changes_nothing(engine: Engine) -> None:
    request = engine.submit(PROMPT, greedy(3))
    run(engine)
    request.cancel()
    assert not engine.busy
    assert request.result().finish_reason == "length" and len(request.token_ids) == 3


# Ends of a request.


def first_new(tokens: tuple[int, ...], start: int) -> int:
    """The first index from `start` on whose token did not come before."""
    return next(index for index in range(start, len(tokens)) if tokens[index] not in tokens[:index])


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
    path = edited(checkpoint_path(), generation_config={"eos_token_id": [4095, whole[end]]})
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


def sampled(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


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


# Bad input.

NAN = float("nan")
BAD_INPUT: dict[str, tuple[Callable[[Engine], object], str]] = {
    "empty text": (lambda e: e.submit("", greedy()), "prompt is empty"),
    "no ids": (lambda e: e.submit([], greedy()), "prompt is empty"),
    "a batch with an empty prompt": (lambda e: e.generate([PROMPT, ""]), "prompt is empty"),
    "an empty batch member": (lambda e: e.generate([[1, 2], []]), "prompt is empty"),
    "long prompt": (lambda e: e.submit([1] * 128), r"128 tokens .*max_seq_len=128"),
    "longer prompt": (lambda e: e.generate("x = 1\n" * 99), r"\d{3} tokens .*max_seq_len=128"),
    "id past the vocabulary": (lambda e: e.submit([1, 4096]), "4096 .*vocabulary of 4096"),
    "negative id": (lambda e: e.submit([-1]), "-1 .*vocabulary of 4096"),
    "huge id": (lambda e: e.submit([2**40]), f"{2**40} .*vocabulary of 4096"),
    "id that is no integer": (lambda e: e.submit([1.5]), r"1\.5 .*vocabulary of 4096"),
    "id that is text": (lambda e: e.submit([1, "a"]), "'a' .*vocabulary of 4096"),
    "a message that is no list": (lambda e: e.submit({"role": "user"}), "'role'"),
    "lone surrogate": (lambda e: e.submit("a\ud800"), "surrogate"),
    "no chat template": (lambda e: e.submit([{"role": "user", "content": "a"}]), "chat template"),
    "NaN temperature": (lambda e: e.submit(PROMPT, SamplingParams(temperature=NAN)), "nan"),
    "temperature": (lambda e: e.submit(PROMPT, SamplingParams(temperature=-0.1)), "-0.1 .*0"),
    "infinite temperature": (
        lambda e: e.submit(PROMPT, SamplingParams(temperature=float("inf"))),
        "temperature=inf",
    ),
    "top_p of 0": (lambda e: e.submit(PROMPT, SamplingParams(top_p=0.0)), r"0.0 .*\(0, 1\]"),
    "top_p over 1": (lambda e: e.submit(PROMPT, SamplingParams(top_p=1.01)), r"1.01 .*\(0, 1\]"),
    "NaN top_p": (lambda e: e.submit(PROMPT, SamplingParams(top_p=NAN)), r"nan .*\(0, 1\]"),
    "top_k": (lambda e: e.submit(PROMPT, SamplingParams(top_k=-2)), "top_k=-2"),
    "top_k past int32": (lambda e: e.submit(PROMPT, SamplingParams(top_k=2**31)), "top_k=2147"),
    "min_p": (lambda e: e.submit(PROMPT, SamplingParams(min_p=1.5)), r"1.5 .*\[0, 1\]"),
    "seed": (lambda e: e.submit(PROMPT, SamplingParams(seed=2**63)), r"seed=9223.*2\*\*63"),
    "max_tokens": (lambda e: e.submit(PROMPT, SamplingParams(max_tokens=0)), "max_tokens=0 .*1"),
    "fractional max_tokens": (
        lambda e: e.submit(PROMPT, SamplingParams(max_tokens=2.5)),
        r"max_tokens=2\.5",
    ),
    "min_tokens": (
        lambda e: e.submit(PROMPT, SamplingParams(min_tokens=5, max_tokens=4)),
        "min_tokens=5 exceeds max_tokens=4",
    ),
    "huge min_tokens": (
        lambda e: e.submit(PROMPT, SamplingParams(min_tokens=2**31, max_tokens=None)),
        "min_tokens=2147",
    ),
    "empty stop string": (lambda e: e.submit(PROMPT, SamplingParams(stop=["a", ""])), "stop="),
    "stop id": (
        lambda e: e.submit(PROMPT, SamplingParams(stop_token_ids=[4096])),
        "4096 .*vocabulary of 4096",
    ),
    "too many stop ids": (
        lambda e: e.submit(PROMPT, SamplingParams(stop_token_ids=range(1, 17))),
        "17 .*max_stop_ids=16",
    ),
    "parameters of a batch": (
        lambda e: e.generate([PROMPT, OTHER], [SamplingParams()]),
        "1 SamplingParams for 2 prompts",
    ),
    "a good prompt and a bad one": (lambda e: e.generate([PROMPT, [5000]]), "5000 .*4096"),
    "a stream of nothing": (lambda e: e.stream([]), "prompt is empty"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_names_the_value_and_disturbs_nobody(engine: Engine, case: str) -> None:
    call, message = BAD_INPUT[case]
    expected = engine.generate(OTHER, sampled(12, seed=1))
    request = engine.submit(OTHER, sampled(12, seed=1))
    events = step_until(engine, lambda: len(request.token_ids) == 4)
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert engine.scheduler.active == [request] and not engine.scheduler.waiting
    events += run(engine)
    assert tokens_of(events) == request.result().token_ids == expected.token_ids
    assert request.text == expected.text
    assert_idle(engine)


@pytest.mark.parametrize("prompt", [None, 5, object(), ["a", 5], [[1], 2]], ids=repr)
def test_what_is_no_prompt_at_all_is_refused(engine: Engine, prompt: Any) -> None:
    """A ValueError or, as for a wrong call of any Python function, a TypeError."""
    with pytest.raises((ValueError, TypeError)):
        engine.generate(prompt)
    assert_idle(engine)


# Event callbacks.


def test_callbacks_get_each_event_in_order(engine: Engine) -> None:
    heard: list[Event] = []
    requests = [
        engine.submit(prompt, greedy(5), on_event=heard.append) for prompt in (PROMPT, LONG)
    ]
    silent = engine.submit(OTHER, greedy(5))
    events = run(engine)
    assert heard == [event for event in events if event.request is not silent]
    assert {event.request for event in heard} == set(requests)


def test_a_callback_may_submit(engine: Engine) -> None:
    expected = engine.generate(OTHER, greedy(6)).token_ids
    follow_ups: list[Request] = []

    def follow_up(event: Event) -> None:
        if event.finish_reason:
            follow_ups.append(engine.submit(OTHER, greedy(6)))

    engine.submit(PROMPT, greedy(4), on_event=follow_up)
    run(engine)
    (request,) = follow_ups
    assert request.result().token_ids == expected


def test_a_callback_may_cancel_itself_and_others(engine: Engine) -> None:
    expected = engine.generate(LONG, greedy(30)).token_ids
    heard: list[Event] = []

    def stop_after_three(event: Event) -> None:
        heard.append(event)
        if len(event.request.token_ids) == 3:
            event.request.cancel()
            other.cancel()

    request = engine.submit(PROMPT, greedy(30), on_event=stop_after_three)
    other = engine.submit(OTHER, greedy(30))
    untouched = engine.submit(LONG, greedy(30))
    run(engine)
    assert [event.finish_reason for event in heard] == [None] * 3 + ["cancelled"]
    assert len(request.token_ids) == 3 and request.result().finish_reason == "cancelled"
    assert other.result().finish_reason == "cancelled"
    assert untouched.result().token_ids == expected
    assert_idle(engine)


def test_a_callback_may_close_the_engine() -> None:
    engine = open_engine(device="cpu")
    request = engine.submit(PROMPT, greedy(30), on_event=lambda event: engine.close())
    other = engine.submit(OTHER, greedy(30))
    step_until(engine, lambda: request.finished)
    assert request.result().finish_reason == other.result().finish_reason == "cancelled"
    assert len(request.token_ids) == 1 and not engine.busy


@pytest.mark.parametrize(
    "again",
    [
        lambda engine: engine.step(),
        lambda engine: engine.generate(OTHER, greedy(2)),
        lambda engine: list(engine.stream(OTHER, greedy(2))),
    ],
    ids=["step", "generate", "stream"],
)
def test_a_callback_may_not_step(engine: Engine, again: Callable[[Engine], object]) -> None:
    expected = engine.generate(PROMPT, greedy(8)).token_ids
    errors: list[ValueError] = []

    def step_again(event: Event) -> None:
        if len(event.request.token_ids) == 3:
            with pytest.raises(ValueError, match="inside step") as caught:
                again(engine)
            errors.append(caught.value)

    request = engine.submit(PROMPT, greedy(8), on_event=step_again)
    events = run(engine)
    assert len(errors) == 1
    assert tokens_of(events_of(request, events)) == request.result().token_ids == expected
    assert_idle(engine)


class Deliberate(Exception):
    """Raised by callbacks."""


def run_through_failures(engine: Engine) -> tuple[list[Event], int]:
    """All events that steps have returned, and the number of steps that raised Deliberate."""
    events: list[Event] = []
    failures = 0
    for _ in range(LIMIT):
        if not engine.busy:
            return events, failures
        try:
            events += engine.step()
        except Deliberate:
            failures += 1
    raise AssertionError(f"busy after {LIMIT} steps: {engine.scheduler.active}")


def test_an_exception_in_a_callback_goes_on_once_all_have_run(engine: Engine) -> None:
    prompts = [OTHER, PROMPT, OTHER]
    expected = [engine.generate(prompt, greedy(8)).token_ids for prompt in prompts]
    heard: list[list[Event]] = [[], [], []]

    def fail(event: Event) -> None:
        heard[1].append(event)
        if len(event.request.token_ids) % 2:
            raise Deliberate(f"token {len(event.request.token_ids)}")

    callbacks = [heard[0].append, fail, heard[2].append]
    requests = [
        engine.submit(prompt, greedy(8), on_event=callback)
        for prompt, callback in zip(prompts, callbacks, strict=True)
    ]
    _, failures = run_through_failures(engine)
    assert failures == 4
    for request, events, tokens in zip(requests, heard, expected, strict=True):
        assert request.result().token_ids == tokens == tokens_of(events)
    assert_idle(engine)


def test_an_exception_in_a_callback_loses_no_event_of_others(engine: Engine) -> None:
    """Somebody reads the events that `step` returns: those of a step that raised come later."""

    def fail(event: Event) -> None:
        if len(event.request.token_ids) == 3:
            raise Deliberate

    engine.submit(PROMPT, greedy(8), on_event=fail)
    other = engine.submit(OTHER, greedy(8))
    events, failures = run_through_failures(engine)
    assert failures == 1
    assert tokens_of(events_of(other, events)) == other.result().token_ids


# Steps that do not wait.


class Late:
    """Stands in for a captured graph whose device is slow: it runs when it is told to."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.close, self.report = graph.close, graph.report
        self.pending = 0

    def replay(self) -> None:
        self.pending += 1

    def finish(self) -> None:
        for _ in range(self.pending):
            self.graph.replay()
        self.pending = 0


def test_steps_with_a_timeout_bring_the_same_tokens(engine: Engine) -> None:
    expected = engine.generate([PROMPT, LONG], greedy(10))
    requests = [engine.submit(prompt, greedy(10)) for prompt in (PROMPT, LONG)]
    events: list[Event] = []
    deadline = time.perf_counter() + 30
    while engine.busy and time.perf_counter() < deadline:
        events += engine.step(timeout=0)
        events += engine.step(timeout=0.001)
    for request, result in zip(requests, expected, strict=True):
        assert tokens_of(events_of(request, events)) == result.token_ids
    assert_idle(engine)


def test_a_step_does_not_wait_beyond_its_timeout() -> None:
    with open_engine(device="cpu", lookahead=0) as engine:
        late = {name: Late(graph) for name, graph in engine._graphs.items()}
        engine._graphs.update(late)  # type: ignore[arg-type]
        request = engine.submit(PROMPT, greedy(2))
        prefill = late["prefill/8"]
        for timeout in (0, 0, 0.05, -1):
            started = time.perf_counter()
            assert engine.step(timeout=timeout) == []
            assert time.perf_counter() - started < max(timeout, 0) + 0.5
            assert prefill.pending == 1, "one replay is in flight, and no other is launched"
        assert engine.busy
        # A request that is cancelled meanwhile need not wait for its replay.
        request.cancel()
        (event,) = engine.step(timeout=0)
        assert event.finish_reason == "cancelled"
        assert engine.busy, "the replay is still in flight"
        prefill.finish()
        assert engine.step(timeout=0) == []
        assert_idle(engine)

        request = engine.submit(PROMPT, greedy(2))
        assert engine.step(timeout=0) == []
        prefill.finish()
        (event,) = engine.step(timeout=0)
        assert len(event.token_ids) == 1
        assert engine.step(timeout=0) == []
        late["decode/1"].finish()
        (event,) = engine.step(timeout=0)
        assert event.finish_reason == "length"


# Failures.


class Failing:
    """Stands in for a captured graph; its replay number `at` raises `error`."""

    def __init__(self, graph: Any, error: BaseException, *, at: int = 1) -> None:
        self.graph, self.error, self.left = graph, error, at
        self.close, self.report = graph.close, graph.report

    def replay(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        self.graph.replay()


def assert_broken(engine: Engine, cause: str) -> None:
    calls: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.submit(PROMPT),
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"broken.*{cause}"):
            call()


def test_a_failing_replay_breaks_the_engine(device: str) -> None:
    engine = open_engine(device=device)
    error = RuntimeError("the graph is gone")
    failing = Failing(engine._graphs["decode/2"], error, at=3)
    engine._graphs["decode/2"] = failing  # type: ignore[assignment]
    request = engine.submit(PROMPT, greedy())
    stream = engine.stream(PROMPT, greedy())
    waiting = [engine.submit(LONG, greedy()) for _ in range(engine.config.max_batch)]
    waiting[0].cancel()
    with pytest.raises(RuntimeError, match="the graph is gone"):
        run(engine)
    assert_broken(engine, "the graph is gone")
    with pytest.raises(RuntimeError, match="broken"):
        list(stream)
    had = list(request.token_ids)
    engine.close()
    engine.close()
    assert request.result().finish_reason == "cancelled"
    assert list(request.token_ids) == had
    assert all(other.finished for other in waiting)
    with pytest.raises(ValueError, match="closed"):
        engine.step()


def test_generate_passes_a_failure_on() -> None:
    with open_engine(device="cpu") as engine:
        graph = engine._graphs["prefill/8"]
        engine._graphs["prefill/8"] = Failing(graph, RuntimeError("no such kernel"))  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="no such kernel"):
            engine.generate([PROMPT, OTHER], greedy())
        assert_broken(engine, "no such kernel")


def test_a_replay_that_publishes_nothing_breaks_the_engine() -> None:
    with open_engine(device="cpu", wait_limit_s=0.05) as engine:
        engine._graphs["decode/1"] = Late(engine._graphs["decode/1"])  # type: ignore[assignment]
        engine.submit(PROMPT, greedy())
        with pytest.raises((RuntimeError, TimeoutError), match="replay 2"):
            run(engine)
        assert_broken(engine, "replay 2")


def test_an_interrupted_replay_does_not_leave_the_engine_spinning() -> None:
    """Ctrl-C in a launch: afterwards all goes on, or the engine says that it is broken."""
    with open_engine(device="cpu") as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        graph = engine._graphs["decode/1"]
        engine._graphs["decode/1"] = Failing(graph, KeyboardInterrupt(), at=4)  # type: ignore[assignment]
        request = engine.submit(PROMPT, greedy())
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        try:
            run(engine)
        except RuntimeError as error:
            assert "broken" in str(error)
        else:
            assert request.result().token_ids == expected


def test_not_a_number_ends_only_the_request_that_meets_it(
    checkpoints: dict[str, Any], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned = 300
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], list(range(20, 60))]
    with open_engine(checkpoints["qwen3-biases"].path, device=device) as engine:
        params = greedy(30, ignore_eos=True)
        whole = engine.generate([1, 2, 300, 4], params)
        expected = engine.generate(prompts, params)
        others = {token for result in expected for token in result.token_ids}
        met = first_new(whole.token_ids, 3)
        weight = engine.model.weights.embedding
        assert weight.data_ptr() != engine.model.weights.lm_head.data_ptr()

        # In the prompt of one request, then among what one request generates.
        for row, prompt, tokens in (
            (poisoned, [1, 2, poisoned, 4], ()),
            (whole.token_ids[met], [1, 2, 300, 4], whole.token_ids[: met + 1]),
        ):
            assert row not in others and not any(row in other for other in prompts)
            kept = weight[row].clone()
            weight[row] = float("nan")
            if device == "cuda":
                torch.cuda.synchronize()
            failed = engine.counters["finished/error"]
            request = engine.submit(prompt, params)
            requests = [engine.submit(other, params) for other in prompts]
            events = run(engine)
            result = request.result()
            assert result.finish_reason == "error" and result.token_ids == tokens
            assert events_of(request, events)[-1].finish_reason == "error"
            assert tokens_of(events_of(request, events)) == tokens
            assert engine.counters["finished/error"] == failed + 1
            for other, undisturbed in zip(requests, expected, strict=True):
                assert other.result().token_ids == undisturbed.token_ids
            weight[row] = kept
            if device == "cuda":
                torch.cuda.synchronize()
            # Whoever gets its blocks next, NaN in their tails, sees nothing of it.
            again = engine.generate(prompts, params)
            assert [r.token_ids for r in again] == [r.token_ids for r in expected]
        assert_idle(engine)
    assert "no finite" in caplog.text


# Opening and closing.


def test_nothing_works_after_close(device: str) -> None:
    engine = open_engine(device=device)
    finished = engine.submit(PROMPT, greedy(2))
    run(engine)
    running = engine.submit(PROMPT, greedy(50))
    step_until(engine, lambda: len(running.token_ids) == 3)
    waiting = engine.submit(OTHER, greedy())
    stream = engine.stream(OTHER, greedy())
    engine.close()
    engine.close()
    assert not engine.busy
    for call in (
        engine.step,
        lambda: engine.submit(PROMPT),
        lambda: engine.generate(PROMPT),
        lambda: engine.generate([PROMPT], [greedy()]),
        lambda: engine.stream(PROMPT),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    # Handles outlive the engine.
    assert finished.result().finish_reason == "length"
    for request in (running, waiting):
        request.cancel()
        assert request.result().finish_reason == "cancelled"
    assert len(running.token_ids) == 3
    stream.close()  # type: ignore[attr-defined]


def test_a_with_block_closes(device: str) -> None:
    with open_engine(device=device) as engine:
        engine.generate(PROMPT, greedy(2))
    with pytest.raises(ValueError, match="closed"):
        engine.step()
    with pytest.raises(Deliberate), open_engine(device=device) as engine:
        engine.submit(PROMPT, greedy())
        engine.step()
        raise Deliberate
    with pytest.raises(ValueError, match="closed"):
        engine.step()


def test_close_frees_what_is_large() -> None:
    engine = open_engine(device="cpu")
    engine.generate(PROMPT, greedy(2))
    model = engine.model
    tensors = [engine.cache, engine.swap_area, *model.weights.tensors(), engine.mailbox.tensor]
    tensors += [engine.buffers["block_table"]]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors, model
    engine.close()
    gc.collect()
    assert not [reference() for reference in alive if reference() is not None]


@pytest.mark.gpu
def test_close_frees_the_devices_memory() -> None:
    def open_and_close() -> int:
        with open_engine(device="cuda") as engine:
            engine.generate([PROMPT, LONG], greedy(4))
            held = torch.cuda.memory_allocated()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < held
        return torch.cuda.memory_allocated()

    open_and_close()
    assert open_and_close() == open_and_close(), "each engine leaves something behind"


def test_two_engines_in_turns(engine: Engine, checkpoints: dict[str, Any]) -> None:
    device = engine.config.device
    ids = [5, 6, 7]
    with (
        open_engine(checkpoints["llama-biases"].path, device=device, lookahead=0) as other,
        open_engine(device=device, max_batch=2) as twin,
    ):
        engines = [engine, other, twin]
        alone = [each.generate(ids, sampled(20, seed=4)).token_ids for each in engines]
        requests = [each.submit(ids, sampled(20, seed=4)) for each in engines]
        while any(each.busy for each in engines):
            for each in engines:
                each.step()
        assert [request.result().token_ids for request in requests] == alone
        assert alone[0] == alone[2] != alone[1]
        other.close()
        assert engine.generate(ids, sampled(20, seed=4)).token_ids == alone[0]


# Reports.


def test_the_report_holds_budget_ladder_and_captures(device: str) -> None:
    with open_engine(device=device, max_batch=4) as engine:
        engine.generate([PROMPT] * 4, greedy(6))
        report = engine.report()
        text = str(report)
        held = engine.cache.nbytes
        weights = engine.model.weights.nbytes
    assert report.memory.ladder.sizes == (1, 2, 4)
    lines = {line.name.split(" (")[0]: line for line in report.memory.budget.lines}
    assert lines["KV cache"].bytes == held
    assert lines["weights"].bytes == weights
    assert {capture.name for capture in report.captures} == {
        "decode/4", "decode/2", "decode/1", "prefill/32", "prefill/8"
    }  # fmt: skip
    for capture in report.captures:
        assert (capture.nodes is None) == (device == "cpu")
        assert capture.nodes != 0
    counters = report.counters
    assert counters["admitted"] == counters["finished/length"] == 4
    assert counters["tokens"] == 24
    assert counters["replays/decode/4"] >= 2 and counters["replays/prefill/8"] == 4
    for part in ("weights", "KV cache", "swap", "total", "decode/4", "prefill/32", "counters"):
        assert part in text
    assert "decode buckets  1, 2, 4" in text and "prefill buckets 8, 32" in text
    assert f"max_seq_len {MAX_SEQ_LEN}" in text and device in text
    # It is a picture of its moment.
    assert dict(counters) == dict(report.counters)


def test_weights_of_the_demo_are_in_the_budget() -> None:
    """Decided on tensors without storage, and still the truth."""
    checkpoint = Checkpoint.open(checkpoint_path())
    wanted = sum(
        info.nbytes for name, info in checkpoint.tensors.items() if not name.startswith("mtp.")
    )
    plan = plan_memory(
        read_model_config(checkpoint.config),
        EngineConfig(device="cpu", dtype="bfloat16"),
        checkpoint_dtype=torch.bfloat16,
    )
    assert plan.budget.lines[0].name == "weights" and plan.budget.lines[0].bytes == wanted


# Memory.


def test_too_little_memory_is_an_error_with_the_table(device: str) -> None:
    with pytest.raises(OutOfBudget) as caught:
        open_engine(device=device, memory_fraction=1e-9)
    message = str(caught.value)
    for part in ("weights", "KV cache", "workspace", "total", "planned", "available", "short"):
        assert part in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("option", ["kv_blocks", "swap_blocks"])
def test_blocks_beyond_the_memory_are_refused(option: str) -> None:
    """Before anything is allocated: 10^9 blocks would be 100 TB."""
    model = read_model_config(Checkpoint.open(checkpoint_path()).config)
    config = EngineConfig(device="cpu", **{option: 10**9})
    with pytest.raises(OutOfBudget, match="1000000000 blocks"):
        plan_memory(model, config, checkpoint_dtype=torch.bfloat16)


def test_a_request_beyond_the_pool_is_refused(device: str) -> None:
    with open_engine(device=device, kv_blocks=4, swap_blocks=0) as engine:
        expected = engine.generate(PROMPT, greedy(20))
        request = engine.submit(PROMPT, greedy(20))
        engine.step()
        # The last token's keys and values are never needed: 33 of 34 tokens take a place.
        with pytest.raises(ValueError, match=r"34 tokens .*needs 5 KV blocks of 8.*pool has 4"):
            engine.submit([1] * 20, greedy(14))
        with pytest.raises(ValueError, match=r"128 tokens .*16 KV blocks.*pool has 4"):
            engine.generate([[2, 3], [1] * 20], [greedy(2), greedy(None)])
        run(engine)
        assert request.result().token_ids == expected.token_ids
        assert len(engine.generate([1] * 20, greedy(13, ignore_eos=True)).token_ids) == 13
        assert_idle(engine)


# Opening a checkpoint.


@pytest.fixture
def source(checkpoints: dict[str, Any]) -> Path:
    """A sharded Qwen3 checkpoint."""
    path: Path = checkpoints["qwen3-biases"].path
    return path


def assert_refused(path: str | Path, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(path, device="cpu", **options)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Llama.*, Qwen3ForCausalLM"),
        ({"architectures": None}, "none.*Llama.*, Qwen3ForCausalLM"),
        ({"rope_parameters": ROPE | {"rope_type": "longrope"}}, "longrope.*linear.*yarn"),
        ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, "dynamic.*linear.*yarn"),
        ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({"head_dim": 72}, "head_dim=72.*64"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .*num_key_value_heads=3"),
        ({"num_hidden_layers": 3}, r"lacks \d+ of \d+ .*model\.layers\.2\."),
        ({"intermediate_size": 121}, r"mlp\.\w+\.weight has shape \[\d+, \d+\], not \[.*121"),
        ({"vocab_size": 400}, r"embed_tokens\.weight has shape \[307, 80\], not \[400, 80\]"),
        ({"attention_bias": False, "architectures": ["LlamaForCausalLM"], "mlp_bias": True},
         r"lacks .*mlp\..*bias"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_served_is_refused(
    edited: Callable[..., Path], source: Path, config: dict[str, Any], message: str
) -> None:
    changes = {"config": config}
    if "eos_token_id" in config:
        changes["generation_config"] = config
    assert_refused(edited(source, **changes), message)


def test_options_that_the_model_cannot_serve_are_refused(source: Path) -> None:
    assert_refused(source, "max_seq_len=513 .*max_position_embeddings=512", max_seq_len=513)
    assert_refused(source, "dtype=int8.*bfloat16", dtype="int8")
    assert_refused(source, r"dtype=torch\.int8.*bfloat16", dtype=torch.int8)


def test_a_missing_or_damaged_shard_is_named(edited: Callable[..., Path], source: Path) -> None:
    shard = sorted(source.glob("*.safetensors"))[1].name
    path = edited(source)
    (path / shard).unlink()
    assert_refused(path, shard)
    data = (source / shard).read_bytes()
    for size in (0, 5, len(data) // 2, len(data) - 1):
        (path / shard).write_bytes(data[:size])
        assert_refused(path, f"{shard}.*truncated")
    (path / shard).write_bytes(data)
    open_engine(path, device="cpu").close()


def test_a_missing_or_wrong_tensor_is_named(edited: Callable[..., Path], source: Path) -> None:
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.k_proj.weight"
    shard = weight_map[name]
    tensors = load_file(source / shard)
    wrong: dict[str, tuple[torch.Tensor | None, str]] = {
        "missing": (None, name),
        "shape": (tensors[name][:-1], f"{name} has shape .127, 80., not .128, 80."),
        "dtype": (torch.zeros(128, 80, dtype=torch.int64), f"{name} in I64"),
    }
    for tensor, message in wrong.values():
        path = edited(source)
        (path / shard).unlink()
        rest = {key: value for key, value in tensors.items() if key != name}
        changed = rest if tensor is None else rest | {name: tensor.contiguous()}
        save_file(changed, path / shard)
        assert_refused(path, message)


def test_places_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    assert_refused(tmp_path, "config.json")
    assert_refused(tmp_path / "absent", "absent")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "is a file")


def test_a_hub_id_that_is_not_cached_is_a_clear_error_offline() -> None:
    # conftest.py has set HF_HUB_OFFLINE.
    assert_refused("graphengine/there-is-no-such-model", "graphengine/there-is-no-such-model.*hub")


def test_tensors_that_the_model_does_not_use_are_logged(
    edited: Callable[..., Path], source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="graphengine")
    path = edited(source, config={"num_hidden_layers": 1})
    open_engine(path, device="cpu").close()
    assert "model.layers.1." in caplog.text
    assert "KV cache" in caplog.text, "and the budget, before anything is captured"


def test_progress_reaches_the_total(device: str, source: Path) -> None:
    calls: list[tuple[int, int]] = []
    with open_engine(source, device=device, progress=lambda *call: calls.append(call)):
        checkpoint = Checkpoint.open(source)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert len(calls) > len(checkpoint.tensors) // 2
    done = [call[0] for call in calls]
    assert done == sorted(done) and {call[1] for call in calls} == {total}


def test_without_a_tokenizer_only_token_ids_work(source: Path, device: str) -> None:
    with open_engine(source, device=device) as engine:
        request = engine.submit([1, 2, 3], greedy(6, ignore_eos=True))
        assert all(event.text == "" for event in run(engine))
        assert len(request.token_ids) == 6 and request.text == ""
        for prompt in ("text", [{"role": "user", "content": "text"}], ["text", "text"]):
            with pytest.raises(ValueError, match=r"no tokenizer.*token ids"):
                engine.generate(prompt, greedy(2))
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            engine.submit([1, 2, 3], greedy(6, stop="\n"))
        stop = request.token_ids[0]
        result = engine.generate([1, 2, 3], greedy(6, stop_token_ids=[stop]))
        assert result.token_ids == (stop,) and result.finish_reason == "stop"


MEASURE_LOADING = """
import sys
from graphengine import Engine

class Loaded(Exception): pass

def kilobytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

readings = []
def progress(done, total):
    readings.append(kilobytes("VmRSS:"))
    if done == total:
        raise Loaded

try:
    Engine.from_pretrained(sys.argv[1], device=sys.argv[2], max_seq_len=16, progress=progress)
except Loaded:
    print(readings[0], max(readings))
"""


def test_loading_holds_one_shard_at_a_time(tmp_path: Path, device: str) -> None:
    """Peak host memory: one shard and a little, beside the weights where the device is the host."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc/self/status")
    mebibyte, layers, hidden = 2**20, 12, 512
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": hidden,
        "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrices = {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512),
                "self_attn.v_proj": (512, 512), "self_attn.o_proj": (512, 512),
                "mlp.gate_proj": (2048, 512), "mlp.up_proj": (2048, 512),
                "mlp.down_proj": (512, 2048)}  # fmt: skip
    weight_map = {}
    for index in range(layers):
        shard = {f"{name}.weight": torch.ones(shape) for name, shape in matrices.items()}
        shard |= {f"{name}.weight": torch.ones(hidden) for name in
                  ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
        shard = {f"model.layers.{index}.{name}": tensor for name, tensor in shard.items()}
        if index == 0:
            shard["model.embed_tokens.weight"] = torch.ones(64, hidden)
            shard["model.norm.weight"] = torch.ones(hidden)
        save_file(shard, tmp_path / f"{index}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{index}.safetensors")
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))

    command = [sys.executable, "-c", textwrap.dedent(MEASURE_LOADING), str(tmp_path), device]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    before, peak = (int(number) * 1024 for number in done.stdout.split())
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    weights = sum(sizes) if device == "cpu" else 0
    assert sum(sizes) > 190 * mebibyte and max(sizes) < 20 * mebibyte
    assert peak - before - weights < max(sizes) + 64 * mebibyte


@pytest.mark.parametrize("prompt", [None, 5, b"def", {"role": "user"}, ["a", 5]])
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(ValueError, match="a prompt is text, token ids or chat messages, not"):
        engine.generate(prompt, greedy())
    assert_idle(engine)


def test_events_of_others_wait_for_the_next_step(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy(4)).token_ids
    request = engine.submit(PROMPT, greedy(4))
    engine.generate(OTHER, greedy(20))
    assert request.finished and engine.busy
    events = engine.step()
    assert tokens_of(events_of(request, events)) == expected
    assert events[-1].finish_reason is not None and not engine.busy


def test_a_cancellation_outlives_an_interrupted_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, other = engine.submit(PROMPT, greedy()), engine.submit(OTHER, greedy())
    engine.step()
    request.cancel()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.mailbox, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert [event.finish_reason for event in events_of(request, run(engine))] == ["cancelled"]
    assert other.finished


@pytest.mark.parametrize("timeout", [NAN, "x"])
def test_a_timeout_that_is_no_time_is_refused(engine: Engine, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout="):
        engine.step(timeout)
