"""The engine's interface: what callers may do, in which order, and what they are told.

Which tokens a request gets is in `test_engine_tokens.py`, opening in `test_engine_opening.py`, slow
and failing devices and closing in `test_engine_failures.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.small_engine import (
    LIMIT,
    LONG,
    OTHER,
    PROMPT,
    assert_idle,
    events_of,
    greedy,
    open_engine,
    run,
    sampled,
    step_until,
    tokens_of,
)
from graphengine import Engine, Event, Request, Result, SamplingParams
from graphengine.requests.request import Phase

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


def test_without_parameters_a_request_has_the_defaults(engine: Engine) -> None:
    result = engine.generate([1, 2, 3])
    room = min(256, engine.memory.max_seq_len - 3)
    assert len(result.token_ids) == room or result.finish_reason == "stop"
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
    assert request.finished and request.job.placement is None
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
    "id beyond all": (lambda e: e.submit([10**5000]), "token id an integer of 16610 bits is outs"),
    "a list with an id beyond all": (lambda e: e.submit([[10**5000]]), "id a list with an integer"),
    "huge id": (lambda e: e.submit([2**40]), f"{2**40} .*vocabulary of 4096"),
    "id that is no integer": (lambda e: e.submit([1.5]), r"1\.5 is not an integer"),
    "id that is text": (lambda e: e.submit([1, "a"]), "'a' is not an integer"),
    "a message that is no list": (lambda e: e.submit({"role": "user"}), "'role'"),
    "lone surrogate": (lambda e: e.submit("a\ud800"), "surrogate"),
    "NaN temperature": (lambda e: e.submit(PROMPT, SamplingParams(temperature=NAN)), "nan"),
    "temperature": (lambda e: e.submit(PROMPT, SamplingParams(temperature=-0.1)), "-0.1 .*0"),
    "infinite temperature": (
        lambda e: e.submit(PROMPT, SamplingParams(temperature=float("inf"))),
        "temperature=inf",
    ),
    "top_p below 0": (lambda e: e.submit(PROMPT, SamplingParams(top_p=-0.01)), r"-0.01 .*\[0, 1\]"),
    "top_p over 1": (lambda e: e.submit(PROMPT, SamplingParams(top_p=1.01)), r"1.01 .*\[0, 1\]"),
    "NaN top_p": (lambda e: e.submit(PROMPT, SamplingParams(top_p=NAN)), r"nan .*\[0, 1\]"),
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


@pytest.mark.parametrize(
    "prompt", [None, 5, b"def", {"role": "user"}, ["a", 5], [[1], 2]], ids=repr
)
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(ValueError, match="a prompt is text, token ids or chat messages, not"):
        engine.generate(prompt, greedy())
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


# Steady steps.


def test_a_steady_step_only_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream changes for a load, and for nothing else; a load is for a change."""
    changes: list[int] = []
    on_stream = engine.runtime.on_stream

    def counted() -> Any:
        changes.append(engine.runtime.launched)
        return on_stream()

    requests = [engine.submit(prompt, greedy(40)) for prompt in (PROMPT, OTHER)]
    step_until(engine, lambda: all(request.token_ids for request in requests))
    engine.step()
    loads, launched = engine.counters["loads"], engine.runtime.launched
    monkeypatch.setattr(engine.runtime, "on_stream", counted)
    for _ in range(16):
        engine.step()
    assert engine.runtime.launched - launched == 16
    # Each request enters a new block of 8 every 8 steps.
    assert len(changes) == engine.counters["loads"] - loads <= 4


# Events of others.


def test_events_of_others_wait_for_the_next_step(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy(4)).token_ids
    request = engine.submit(PROMPT, greedy(4))
    engine.generate(OTHER, greedy(20))
    assert request.finished and engine.busy
    events = engine.step()
    assert tokens_of(events_of(request, events)) == expected
    assert events[-1].finish_reason is not None and not engine.busy


# Tools.


@pytest.mark.parametrize("name", ["scheduler", "counters", "gate", "recorder"])
def test_what_the_core_owns_is_read_and_not_replaced(engine: Engine, name: str) -> None:
    owned = getattr(engine, name)
    assert owned is getattr(engine.core, name)
    with pytest.raises(AttributeError):
        setattr(engine, name, None)
    assert getattr(engine, name) is owned


@pytest.mark.parametrize("method", ["submit", "generate", "stream", "astream"])
def test_a_keyword_that_a_method_does_not_have_is_a_type_error(engine: Engine, method: str) -> None:
    """Python's own message, with the name of the method that was called; nothing is queued."""
    wrong = {"foo": 1, "submitted": 3.0, "callback": print}
    if method != "submit":
        wrong["on_event"] = print
    for owner in (engine, engine.session()):
        arguments = ("x",) if owner is engine else ()
        for name, value in wrong.items():
            message = rf"^{method}\(\) got an unexpected keyword argument '{name}'"
            with pytest.raises(TypeError, match=message):
                getattr(owner, method)(*arguments, **{name: value})
    assert not engine.busy


def test_a_progress_that_cannot_be_called_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="progress=5 cannot be called"):
        Engine.from_pretrained("/absent/checkpoint", device="cpu", progress=5)  # type: ignore[arg-type]
