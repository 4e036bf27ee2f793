"""Who waits, in which order, and for how long: priorities, deadlines, the queue's limit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from extent import extent
from graphengine import Engine, QueueFull, Request, SamplingParams
from graphengine.host.scheduler import Scheduler
from graphengine.host.waiting import Deadlines
from graphengine.requests.job import Job
from graphengine.requests.request import Phase

# Seconds: the tests say who is late, so that a slow machine changes nothing.
FAR = 1e6

# Priorities.


def make_request(number: int, priority: int = 0, deadline: float | None = None) -> Request:
    return Request(
        request_id=number,
        prompt_token_ids=[1],
        params=SamplingParams(),
        seed=0,
        submitted=0.0,
        cancelled=[],
        priority=priority,
        job=Job(prompt_len=1, max_len=2, deadline=deadline),
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_queue_is_ordered_by_priority_then_arrival(data: st.DataObject) -> None:
    scheduler = Scheduler(slots=1, kv_blocks=8, swap_blocks=0, block_size=4, max_chunk=8)
    alive: list[Request] = []
    for number in range(data.draw(st.integers(0, 20))):
        if alive and data.draw(st.booleans()):
            scheduler.retire(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        alive.append(make_request(number, data.draw(st.integers(-2, 2))))
        scheduler.submit(alive[-1])
    assert list(scheduler.waiting) == sorted(alive, key=lambda other: (other.priority, other.id))


def test_the_lowest_priority_starts_first(engine: Engine) -> None:
    fillers = [engine.submit(LONG, greedy(4)) for _ in range(engine.config.max_batch)]
    engine.step()
    priorities = [0, 5, -1, 0, -1, 5, 2**70]
    waiting = [engine.submit(PROMPT, greedy(2), priority=number) for number in priorities]
    started: list[Request] = []
    while engine.busy:
        engine.step()
        started += [r for r in waiting if r.phase is not Phase.WAITING and r not in started]
        started.sort(key=lambda r: r.timings.tokens[:1] or [math.inf])
    assert [priorities[waiting.index(request)] for request in started] == sorted(priorities)
    firsts = [request.timings.tokens[0] for request in started]
    assert firsts == sorted(firsts)
    assert all(max(f.timings.tokens[:1]) < firsts[0] for f in fillers), "who has started goes on"


# Deadlines.


@pytest.mark.parametrize("seed", range(5))
def test_deadlines_come_in_order_and_leave_no_finished_request_behind(seed: int) -> None:
    dice = random.Random(seed)
    deadlines = Deadlines()
    alive: dict[int, Request] = {}
    now, most = 0.0, 0
    for number in range(3000):
        request = make_request(number, deadline=now + dice.randrange(1, 1000))
        deadlines.watch(request)
        alive[number] = request
        if dice.random() < 0.95:
            alive.pop(dice.choice(list(alive))).finish_reason = "stop"
        if number % 16 == 0:
            now += 4
            expected = [
                r for r in alive.values() if r.job.deadline is not None and r.job.deadline <= now
            ]
            expected.sort(key=lambda r: (r.job.deadline, r.id))
            assert deadlines.late(now) == expected
            for request in expected:
                del alive[request.id]
        most = max(most, len(alive))
        assert len(deadlines.heap) <= 70 + 2 * most
    assert len(deadlines.heap) < 1500


def make_late(engine: Engine, request: Request) -> None:
    """Its deadline, the only one, is now."""
    ((_, number, watched),) = engine.core.delivery.deadlines.heap
    assert watched is request
    engine.core.delivery.deadlines.heap[0] = (time.perf_counter(), number, request)


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE])
def test_a_late_request_is_ended_wherever_it_stands(engine: Engine, phase: Phase) -> None:
    engine.core.delivery.deadlines.heap.clear()
    expected = engine.generate(OTHER, greedy(30))
    count = engine.config.max_batch - (phase is not Phase.WAITING)
    others = [engine.submit(OTHER, greedy(30)) for _ in range(count)]
    if phase is Phase.WAITING:
        engine.step()
    prompt = LONG if phase is Phase.PREFILL else PROMPT
    request = engine.submit(prompt, greedy(90), deadline_s=FAR)
    assert request.job.deadline == request.timings.submitted + FAR
    step_until(engine, lambda: request.phase is phase)
    if phase is Phase.DECODE:
        step_until(engine, lambda: len(request.token_ids) == 3)
    had = list(request.token_ids)
    discarded = engine.counters["discarded_tokens"]
    make_late(engine, request)
    (event,) = events_of(request, engine.step())
    assert (event.finish_reason, event.token_ids) == ("deadline", ())
    result = request.result()
    assert (result.finish_reason, result.stop_reason) == ("deadline", None)
    assert list(result.token_ids) == had and result.text == engine.tokenizer.decode(had)
    assert request.id in engine.last_step().finished
    run(engine)
    assert engine.counters["discarded_tokens"] == discarded + (phase is Phase.DECODE)
    assert all(other.result().token_ids == expected.token_ids for other in others)
    assert_idle(engine)


def test_a_late_request_is_ended_while_it_is_paused(device: str) -> None:
    with open_engine(device=device, kv_blocks=15, swap_blocks=15) as engine:
        expected = engine.generate(PROMPT, greedy(80, ignore_eos=True))
        first = engine.submit(PROMPT, greedy(80, ignore_eos=True))
        second = engine.submit(OTHER, greedy(80, ignore_eos=True), deadline_s=FAR)
        step_until(engine, lambda: second.phase is Phase.PAUSED)
        make_late(engine, second)
        (event,) = events_of(second, engine.step())
        assert event.finish_reason == "deadline"
        run(engine)
        assert first.result().token_ids == expected.token_ids
        assert_idle(engine)


def test_a_request_in_time_is_as_without_a_deadline(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy(8))
    assert engine.generate(PROMPT, greedy(8), deadline_s=FAR).token_ids == expected.token_ids
    engine.core.delivery.deadlines.heap.clear()
    request = engine.submit(PROMPT, greedy(50), deadline_s=FAR)
    make_late(engine, request)
    request.cancel()
    run(engine)
    assert request.finish_reason == "cancelled", "what came first counts"


def test_recordings_know_late_requests(engine: Engine) -> None:
    engine.recorder.start(capacity=64)
    engine.generate(PROMPT, greedy(4), deadline_s=1e-9)
    engine.recorder.stop()
    from graphengine.observe.ring import REASONS

    assert REASONS[engine.recorder.requests()["reason"][-1]] == "deadline"


# The limit of the queue.


def test_a_full_queue_is_an_error(device: str) -> None:
    with open_engine(device=device, max_waiting=4) as engine:
        # Three slots are vacant: who takes one at the next step does not wait.
        requests = [engine.submit(PROMPT, greedy(3)) for _ in range(7)]
        message = (
            "4 requests wait already: another one would exceed max_waiting=4 and 3 vacant slots"
        )
        for call in (engine.submit, engine.stream, engine.astream):
            with pytest.raises(QueueFull, match=message):
                call(OTHER, greedy(3))
        assert list(engine.scheduler.waiting) == requests
        engine.step()
        assert len(engine.scheduler.waiting) == 4, "three have slots"
        with pytest.raises(QueueFull, match="4 requests wait already: 3 more would exceed max_w"):
            engine.submit_many(PROMPT, greedy(3), n=3)
        assert len(engine.scheduler.waiting) == 4, "nobody was queued"
        run(engine)
        assert all(request.finished for request in requests)
        assert issubclass(QueueFull, RuntimeError) and not issubclass(QueueFull, ValueError)
        assert_idle(engine)


def test_a_batch_larger_than_the_queue_is_fed_as_others_start(device: str) -> None:
    with open_engine(device=device, max_waiting=1) as engine:
        counts = [2, 5, 3, 4, 1, 6, 2, 3, 7]
        most = 0

        def watch(done: int, total: int) -> None:
            nonlocal most
            most = max(most, len(engine.scheduler.waiting))

        # Others fill the queue when the call begins.
        others = [engine.submit(OTHER, greedy(9)) for _ in range(4)]
        results = engine.generate([PROMPT] * 9, [greedy(n) for n in counts], progress=watch)
        assert [len(result.token_ids) for result in results] == counts
        assert most == 1
        run(engine)
        assert all(request.finished for request in others)
        alone = [engine.generate(OTHER, sampled(4, seed=5 + i)).token_ids for i in range(6)]
        prompts = [PROMPT, OTHER]
        rows = engine.generate_many(prompts, sampled(4, seed=5), n=6)
        assert [result.token_ids for result in rows[1]] == alone and len(rows[0]) == 6
        assert_idle(engine)


def test_a_batch_that_fails_also_ends_requests_that_were_never_queued(device: str) -> None:
    with open_engine(device=device, max_waiting=1) as engine:

        def fail(done: int, total: int) -> None:
            raise KeyError(done)

        with pytest.raises(KeyError):
            engine.generate_many([LONG, PROMPT], greedy(3), n=5, progress=fail)
        run(engine)
        assert engine.counters["finished/cancelled"] + engine.counters["finished/length"] == 10
        assert_idle(engine)  # also no KV that samples would still share


def test_a_batch_of_late_requests_ends_without_room_in_the_queue(device: str) -> None:
    with open_engine(device=device, max_waiting=1) as engine:
        results = engine.generate([PROMPT] * 8, greedy(3), deadline_s=1e-9)
        assert {result.finish_reason for result in results} == {"deadline"}
        assert_idle(engine)


def test_a_batch_that_cannot_fit_starts_nothing(device: str) -> None:
    with open_engine(device=device, kv_blocks=6, max_waiting=1) as engine:
        with pytest.raises(ValueError, match="KV blocks"):
            engine.generate([PROMPT] * 6 + [LONG], greedy(60))
        assert not engine.busy and not engine.requests


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "priority of a float": ({"priority": 1.0}, r"priority=1\.0 must be an integer"),
    "priority of a bool": ({"priority": True}, "priority=True must be an integer"),
    "no time": ({"deadline_s": 0}, "deadline_s=0 must be positive, finite seconds"),
    "the past": ({"deadline_s": -0.5}, r"deadline_s=-0\.5 must be positive"),
    "NaN": ({"deadline_s": math.nan}, "deadline_s=nan must be positive"),
    "never": ({"deadline_s": math.inf}, "deadline_s=inf must be positive"),
    "a word": ({"deadline_s": "soon"}, "deadline_s='soon' must be positive"),
    "yes": ({"deadline_s": True}, "deadline_s=True must be positive"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_wrong_options_are_named(engine: Engine, case: str) -> None:
    options, message = BAD_OPTIONS[case]
    ways: list[Callable[..., object]] = [
        engine.submit, engine.generate, engine.stream, engine.astream
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(ValueError, match=message):
            way(PROMPT, greedy(), **options)
    assert_idle(engine)


# A churn of all of it.


@pytest.mark.parametrize("lookahead", extent([1], [0, 1]))
def test_a_churn_leaks_nothing_and_mixes_nothing_up(device: str, lookahead: int) -> None:
    """Priorities, deadlines, cancels, a stop callback and pauses; the tokens are those of each
    request alone, or the first of them, and those that wait start in order.
    """
    dice = random.Random(lookahead)
    prompts = [PROMPT, OTHER, LONG]
    options: dict[str, Any] = {"kv_blocks": 10, "swap_blocks": 40, "max_waiting": 6}
    with open_engine(device=device, lookahead=lookahead, **options) as engine:
        keys = [(which, seed) for which in range(len(prompts)) for seed in range(2)]
        alone = {
            (which, seed): engine.generate(prompts[which], sampled(40, seed=seed)).token_ids
            for which, seed in keys
        }
        engine.stop_callback = lambda active: [n for n in active if dice.random() < 0.02]
        requests: dict[Request, tuple[int, int]] = {}
        refused = 0
        for turn in range(1_000):
            # A step that does not wait may bring nothing, so that turns are no measure of steps.
            if turn >= 110 and engine.counters["resumes"]:
                break
            for _ in range(dice.randrange(3) if turn % 50 < 25 else 0):
                which, seed = dice.choice(keys)
                try:
                    request = engine.submit(
                        prompts[which],
                        sampled(dice.randrange(10, 41), seed=seed),
                        priority=dice.randrange(-1, 2),
                        deadline_s=dice.choice([None, FAR]),
                    )
                except QueueFull:
                    refused += 1
                else:
                    requests[request] = which, seed
            was_waiting = list(engine.scheduler.waiting)
            assert was_waiting == sorted(was_waiting, key=lambda r: (r.priority, r.id))
            engine.step(timeout=dice.choice([None, None, 0]))
            waits = [r.phase is Phase.WAITING for r in was_waiting if not r.finished]
            assert waits == sorted(waits), "somebody was overtaken"
            if (heap := engine.core.delivery.deadlines.heap) and turn % 12 == 11:
                heap[0] = (time.perf_counter(), *heap[0][1:])
            running = [r for r in requests if not r.finished]
            if running and turn % 20 == 13:
                dice.choice(running).cancel()
        run(engine)
        reasons = {r.finish_reason for r in requests}
        assert reasons == {"length", "stop", "cancelled", "deadline"} and refused
        assert engine.counters["pauses"] and engine.counters["resumes"]
        for request, key in requests.items():
            assert tuple(request.token_ids) == alone[key][: len(request.token_ids)]
            if request.finish_reason == "length":
                assert len(request.token_ids) == request.params.max_tokens
        assert_idle(engine)
