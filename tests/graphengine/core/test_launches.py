"""Launches of several decode steps: nothing that a request gets depends on how many."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated_device import naps, simulated
from engines.small_engine import (
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
from extent import extent
from graphengine import Engine, Event, Request, Result, SamplingParams
from graphengine.requests.request import Phase
from graphengine.structured_outputs import StructuredOutputsParams

STEPS = (1, 2, 7, 16)
POOL = {"kv_blocks": 18, "swap_blocks": 64}
"""A pool that holds the longest request and little more."""


class Engines:
    """Engines by their steps a launch and lookahead, opened once; `calm` never pauses."""

    def __init__(self) -> None:
        self.calm = open_engine(device="cpu", lookahead=0)
        self._opened: dict[tuple[int, int], Engine] = {}

    def __call__(self, steps: int, lookahead: int) -> Engine:
        key = (steps, lookahead)
        if key not in self._opened:
            self._opened[key] = open_engine(
                device="cpu", steps_per_launch=steps, lookahead=lookahead, **POOL
            )
        return self._opened[key]

    def close(self) -> None:
        for engine in (self.calm, *self._opened.values()):
            engine.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


# Tokens, text, log-probabilities and finish reasons.

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, 1]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([None, "e", "self", "("]),
    stop_token_ids=st.sampled_from([None, [13], [198, 220]]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
SUBMIT = st.tuples(st.just("submit"), st.sampled_from([PROMPT, OTHER, LONG]), PARAMS)
STEP = st.tuples(st.just("step"), st.integers(1, 12), st.sampled_from([None, 0]))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 5), st.none())


@settings(max_examples=extent(8, 300))
@given(
    steps=st.sampled_from(STEPS[1:]),
    lookahead=st.integers(0, 2),
    actions=st.lists(SUBMIT | STEP | CANCEL, min_size=3, max_size=14),
)
def test_results_do_not_depend_on_the_steps_of_a_launch(
    engines: Engines, steps: int, lookahead: int, actions: list[tuple[Any, ...]]
) -> None:
    engine, requests, events = engines(steps, lookahead), list[Request](), list[Event]()
    for action, *values in actions:
        if action == "submit":
            requests.append(engine.submit(*values))
        elif action == "cancel" and requests:
            requests[values[0] % len(requests)].cancel()
        elif action == "step":
            for _ in range(values[0]):
                events += engine.step(timeout=values[1])
    events += run(engine)
    assert_idle(engine)
    assert engine.core.launches == 0
    prompts = [list(request.prompt_token_ids) for request in requests]
    params = [request.params for request in requests]
    alone = engines.calm.generate(prompts, params) if requests else []
    for request, expected in zip(requests, alone, strict=True):
        check(request, events_of(request, events), expected)


def check(request: Request, events: list[Event], expected: Result) -> None:
    """The request has what it gets alone, or the beginning if it was cancelled."""
    assert list(tokens_of(events)) == request.token_ids
    assert "".join(event.text for event in events) == request.text
    count = len(request.token_ids)
    assert tuple(request.token_ids) == expected.token_ids[:count]
    if expected.logprobs is not None:
        assert request.logprobs == list(expected.logprobs[:count])
    if request.finish_reason == "cancelled":
        return
    for name in ("text", "finish_reason", "stop_reason"):
        assert getattr(request, name) == getattr(expected, name), name
    assert count == len(expected.token_ids)


def test_a_short_pool_has_requests_pause_between_launches(engines: Engines) -> None:
    engine = engines(7, 1)
    before = engine.counters.copy()
    many = [PROMPT, LONG, OTHER] * 2
    params = [sampled(60, seed=seed) for seed in range(len(many))]
    found = engine.generate(many, params)
    assert [each.token_ids for each in found] == [
        each.token_ids for each in engines.calm.generate(many, params)
    ]
    for name in ("pauses", "resumes", "replays/decode/2/x7/fast"):
        assert engine.counters[name] > before[name], name
    assert_idle(engine)


# What a call of `step` returns, and how far a device may be ahead.


class Seen(NamedTuple):
    """How a simulated device fared: its idle ticks, and most steps queued at a time."""

    idle: int
    ahead: int
    results: list[tuple[Any, ...]]


def decode_late(steps: int, lookahead: int, naps_of: Iterator[int]) -> Seen:
    """Decode three requests with `step(timeout=0)`, by a host that sleeps between the calls."""
    with open_engine(device="cpu", steps_per_launch=steps, lookahead=lookahead) as engine:
        params = [sampled(100, seed=seed, logprobs=1) for seed in range(3)]
        with simulated(engine) as device:
            requests = [
                engine.submit(*each) for each in zip((PROMPT, OTHER, PROMPT), params, strict=True)
            ]
            events = step_until(engine, lambda: all(each.token_ids for each in requests))
            started = device.idle
            # The last launches have fewer steps, so the host must keep up with them.
            while min(len(each.token_ids) for each in requests) < 64:
                events += engine.step(timeout=0)
                assert engine.core.launches <= lookahead + 1
                device.sleep(next(naps_of))
            idle = device.idle - started
            events += run(engine)
        for request in requests:
            assert list(tokens_of(events_of(request, events))) == request.token_ids
            times = [event.time for event in events_of(request, events)]
            assert times == sorted(times)
        results = [(r.token_ids, r.text, r.logprobs, r.finish_reason) for r in requests]
        return Seen(idle, device.ahead, results)


@pytest.mark.parametrize("lookahead", extent([1], [0, 1, 2]))
def test_a_late_host_stalls_no_device_that_has_steps_ahead(lookahead: int) -> None:
    found = {
        steps: decode_late(steps, lookahead, naps(random.Random(5), most=14)) for steps in (1, 16)
    }
    assert found[16].results == found[1].results
    for steps, seen in found.items():
        assert seen.ahead == (lookahead + 1) * steps, "no more launches than the lookahead allows"
    assert found[1].idle > 50
    # Without a lookahead the device waits once a launch.
    assert found[16].idle == 0 if lookahead else found[16].idle < found[1].idle / 2


def test_a_step_returns_what_is_done_in_the_order_of_the_device() -> None:
    with open_engine(device="cpu", steps_per_launch=7, lookahead=1) as engine:
        with simulated(engine) as device:
            requests = [engine.submit(prompt, sampled(60)) for prompt in (PROMPT, OTHER)]
            step_until(engine, lambda: all(len(each.token_ids) > 1 for each in requests))
            # A host that waits gets each decode step as it comes, not each launch.
            for _ in range(9):
                assert [event.request for event in engine.step()] == requests
            # A host that is late gets all that is done by then, and never waits for more.
            device.sleep(4)
            assert [event.request for event in engine.step(timeout=0)] == requests * 4
            assert engine.step(timeout=0) == []
            assert engine.step(timeout=1e-9) == []
            # Two launches are done here; once it has read the first it gives the device another.
            done = len(engine.core.in_flight)
            device.sleep(50)
            before = engine.counters["replays/decode/2/x7/fast"]
            assert len(engine.step(timeout=0)) == 2 * done and engine.core.launches == 1
            assert engine.counters["replays/decode/2/x7/fast"] == before + 1
            run(engine)
        assert_idle(engine)


def test_cancels_and_stops_leave_tokens_of_a_launch_that_nobody_sees() -> None:
    with open_engine(device="cpu", steps_per_launch=16, lookahead=0, max_batch=2) as engine:
        whole = engine.generate(PROMPT, greedy(60, ignore_eos=True))
        text = whole.text
        places = range(len(text) * 3 // 4, len(text))
        stop = next(text[i : i + 4] for i in places if text.index(text[i : i + 4]) == i)
        with simulated(engine):
            stopped = engine.submit(PROMPT, greedy(60, ignore_eos=True, stop=[stop]))
            other = engine.submit(OTHER, sampled(60))
            waiting = engine.submit(PROMPT, greedy(3))
            events = step_until(engine, lambda: len(other.token_ids) == 3)
            launches = engine.counters["replays/decode/2/x16/fast"]
            other.cancel()
            events += engine.step(timeout=0)
            # The cancel is seen at once, but the next request waits for the launch to end.
            assert other.finish_reason == "cancelled" and waiting.phase is Phase.WAITING
            ended = len(stopped.token_ids) + len(engine.core.in_flight)
            events += step_until(engine, lambda: waiting.phase is not Phase.WAITING)
            assert len(stopped.token_ids) in (ended, ended + 1)
            assert engine.counters["replays/decode/2/x16/fast"] == launches
            # The launch had 16 tokens for it, of which two were read.
            assert engine.counters["discarded_tokens"] == 16 - 2
            events += run(engine)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.text == text[: text.index(stop)]
        assert "".join(event.text for event in events_of(stopped, events)) == stopped.text
        assert 16 - 2 < engine.counters["discarded_tokens"] < 2 * 16 + 4
        assert waiting.token_ids == list(whole.token_ids[:3])
        assert_idle(engine)


def test_no_launch_has_more_steps_than_a_request_has_tokens_left() -> None:
    with open_engine(device="cpu", steps_per_launch=7, lookahead=1) as engine:
        engine.generate(PROMPT, sampled(1 + 7 + 7 + 3))
        counters = engine.counters
        assert counters["replays/decode/1/x7/fast"] == 2 and counters["replays/decode/1/fast"] == 3
        # The longest request decides; the others end within a launch.
        engine.generate([PROMPT, OTHER], [sampled(16), sampled(4)])
        assert counters["replays/decode/2/x7/fast"] + counters["replays/decode/1/x7/fast"] == 4
        assert counters["discarded_tokens"] == 0


def test_a_prompt_is_fed_between_launches_of_one_step() -> None:
    with open_engine(device="cpu", steps_per_launch=7, lookahead=0) as engine:
        first = engine.submit(PROMPT, sampled(60))
        step_until(engine, lambda: len(first.token_ids) > 8)
        before = engine.counters["replays/decode/1/fast"]
        second = engine.submit(LONG, sampled(20))
        step_until(engine, lambda: bool(second.token_ids))
        chunks = -(-len(second.prompt_token_ids) // 32)
        assert chunks > 1
        assert engine.counters["replays/decode/1/fast"] == before + chunks
        run(engine)


@pytest.mark.parametrize("forced", [False, True])
def test_steps_that_the_host_decides_are_launched_one_by_one(forced: bool) -> None:
    """As with a grammar whose masks the host makes; its neighbours then have one step, too."""
    with open_engine(device="cpu", steps_per_launch=7, lookahead=1) as engine:
        expected = engine.generate(OTHER, sampled(40, seed=1)).token_ids
        launched = engine.counters["replays/decode/1/x7/fast"]
        assert launched
        other = engine.submit(OTHER, sampled(40, seed=1))
        if forced:
            guided = engine.submit(PROMPT, sampled(20, forced_tokens=True))
            step_until(engine, lambda: bool(guided.token_ids))
            engine.force(guided, 65)
            step_until(engine, lambda: len(guided.token_ids) > 1)
            assert guided.token_ids[1] == 65
        else:
            pytest.importorskip("llguidance")
            asked = StructuredOutputsParams(regex="[0-9]{12}")
            guided = engine.submit(PROMPT, SamplingParams(structured_outputs=asked, max_tokens=40))
        step_until(engine, lambda: guided.finished)
        assert forced or (len(guided.text) == 12 and guided.text.isdecimal())
        assert not any(count for name, count in engine.counters.items() if "/2/x7/" in name)
        run(engine)
        assert tuple(other.token_ids) == expected
        assert engine.counters["replays/decode/1/x7/fast"] > launched
