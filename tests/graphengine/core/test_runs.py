"""Ways to run requests: batches with progress, streams, asyncio's without a thread; reports."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

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
from graphengine import Engine, Event, Request, SamplingParams
from graphengine.core.report import StepReport
from graphengine.requests.request import Phase

# Batches.


def test_generate_tells_its_progress(engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    params = [greedy(n) for n in (9, 3, 6, 6, 2)]
    results = engine.generate([PROMPT] * 5, params, progress=lambda *numbers: told.append(numbers))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (5, 5) and len(told) >= 3 and all(total == 5 for _, total in told)
    assert [len(result.token_ids) for result in results] == [9, 3, 6, 6, 2]
    engine.generate(PROMPT, greedy(2), progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (1, 1)


def test_what_progress_raises_cancels_the_batch(engine: Engine) -> None:
    other = engine.submit(OTHER, greedy(20))

    def fail(done: int, total: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        engine.generate([PROMPT, LONG], [greedy(2), greedy(60)], progress=fail)
    events = run(engine)
    assert {event.request for event in events} == {other}, "the batch's are nobody else's"
    assert engine.counters["finished/cancelled"] >= 1
    assert_idle(engine)
    with pytest.raises(ValueError, match="progress=7 cannot be called"):
        engine.generate(PROMPT, progress=7)  # type: ignore[arg-type]


# Drains.


def test_drain_runs_everything_and_returns_its_events(engine: Engine) -> None:
    heard: list[Event] = []

    def again(event: Event) -> None:
        heard.append(event)
        if event.finish_reason and len(requests) == 2:
            requests.append(engine.submit(OTHER, greedy(3)))

    requests = [engine.submit(PROMPT, greedy(9)), engine.submit(LONG, greedy(4), on_event=again)]
    events = engine.drain()
    assert not engine.busy and all(request.finished for request in requests)
    for request in requests:
        own = [event for event in events if event.request is request]
        assert [*tokens_of(own)] == request.token_ids and own[-1].finish_reason == "length"
    assert heard == [event for event in events if event.request is requests[1]]
    assert len(requests) == 3 and engine.drain() == []
    assert_idle(engine)


def test_drain_returns_when_its_time_is_over(engine: Engine) -> None:
    request = engine.submit(PROMPT, greedy(40))
    events = engine.drain(timeout=0)
    assert engine.busy and not request.finished
    events += engine.drain(timeout=1e-9)
    assert engine.busy and not request.finished
    events += engine.drain(timeout=600)
    assert not engine.busy and [*tokens_of(events)] == request.token_ids
    with pytest.raises(ValueError, match="timeout='a'"):
        engine.drain("a")  # type: ignore[arg-type]
    assert_idle(engine)


def test_drain_loses_no_event_of_the_steps_before_an_exception(engine: Engine) -> None:
    def fail(event: Event) -> None:
        if event.finish_reason:
            raise KeyError(event.request_id)

    other = engine.submit(OTHER, greedy(8))
    failing = engine.submit(PROMPT, greedy(4), on_event=fail)
    with pytest.raises(KeyError):
        engine.drain()
    events = engine.drain()
    for request in (other, failing):
        own = [event for event in events if event.request is request]
        assert [*tokens_of(own)] == request.token_ids and request.finished
    assert_idle(engine)


def test_runs_keep_the_events_of_others_for_the_next_step(engine: Engine) -> None:
    request = engine.submit(OTHER, greedy(12))
    engine.generate(PROMPT, greedy(4))
    stream = engine.stream(PROMPT, greedy(4))
    list(stream)
    had = len(request.token_ids)
    assert had >= 6
    events = engine.step()
    assert tokens_of(events)[:had] == tuple(request.token_ids[:had])
    assert tokens_of([*events, *run(engine)]) == tuple(request.token_ids)
    assert all(event.request is request for event in events)


def test_a_step_does_not_return_the_events_of_a_stream(engine: Engine) -> None:
    stream = engine.stream(PROMPT, greedy(5))
    assert run(engine) == [], "they are the stream's"
    assert len(tokens_of(list(stream))) == 5


# Streams of asyncio.


async def read(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def test_an_async_stream_brings_the_same_as_generate(engine: Engine) -> None:
    result = engine.generate(PROMPT, greedy())

    async def main() -> list[Event]:
        return await read(engine.astream(PROMPT, greedy()))

    events = asyncio.run(main())
    assert tokens_of(events) == result.token_ids
    assert "".join(event.text for event in events) == result.text
    assert events[-1].finish_reason == "length"
    assert_idle(engine)


def test_async_streams_and_a_step_loop_lose_no_event(engine: Engine) -> None:
    prompts = [PROMPT, OTHER, LONG, OTHER, PROMPT]
    params = [greedy(20), sampled(20, seed=1), greedy(7), sampled(9, seed=2), greedy(13)]
    expected = engine.generate(prompts, params)
    plain_params = [greedy(11), sampled(23, seed=3)]
    plain_expected = engine.generate(prompts[:2], plain_params)
    returned: list[Event] = []

    async def step() -> None:
        requests = [engine.submit(*pair) for pair in zip(prompts[:2], plain_params, strict=True)]
        while not all(request.finished for request in requests):
            returned.extend(engine.step(timeout=0))
            await asyncio.sleep(0)
        returned.extend(engine.step(timeout=0))
        for request, result in zip(requests, plain_expected, strict=True):
            assert tokens_of(events_of(request, returned)) == result.token_ids
            assert "".join(event.text for event in events_of(request, returned)) == result.text
        assert {event.request for event in returned} == set(requests)

    async def main() -> list[list[Event]]:
        streams = [engine.astream(*pair) for pair in zip(prompts, params, strict=True)]
        *events, _ = await asyncio.gather(*map(read, streams), step())
        return events

    for events, result in zip(asyncio.run(main()), expected, strict=True):
        assert tokens_of(events) == result.token_ids
        assert "".join(event.text for event in events) == result.text
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    run(engine)
    assert_idle(engine)


def test_the_loop_runs_between_the_steps_of_an_async_stream(engine: Engine) -> None:
    async def main() -> tuple[int, int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        events = await read(engine.astream(PROMPT, greedy(20)))
        counting.cancel()
        return turns, len(events)

    turns, events = asyncio.run(main())
    assert turns >= events == 20


def test_a_cancelled_task_cancels_its_request(engine: Engine) -> None:
    expected = engine.generate(OTHER, greedy(30))
    seen: list[Event] = []

    follow_up = seen.append

    async def follow() -> None:
        async with aclosing(engine.astream(PROMPT, greedy(100))) as stream:  # type: ignore[type-var]
            async for event in stream:
                follow_up(event)

    async def main() -> list[Event]:
        task = asyncio.create_task(follow())
        other = asyncio.create_task(read(engine.astream(OTHER, greedy(30))))
        while len(seen) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        request = seen[0].request
        assert request.finish_reason == "cancelled"
        events = await other
        assert request.finished, "the other's next step freed its slot"
        return events

    assert tokens_of(asyncio.run(main())) == expected.token_ids
    run(engine)
    assert_idle(engine)


def test_a_task_cancelled_while_the_stream_waits_cancels_its_request(engine: Engine) -> None:
    """The cancellation arrives inside the stream, which nobody closes by hand."""

    async def main() -> Request:
        stream = engine.astream(PROMPT, greedy(100))
        (request,) = engine.scheduler.waiting
        task = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert request.finish_reason == "cancelled"
        return request

    request = asyncio.run(main())
    run(engine)
    assert request.finished
    assert_idle(engine)


@pytest.mark.parametrize("read_events", [0, 2])
def test_an_async_stream_that_is_dropped_cancels_its_request(
    engine: Engine, read_events: int
) -> None:
    async def main() -> Request:
        stream = engine.astream(PROMPT, greedy(100))
        (request,) = engine.scheduler.waiting
        for _ in range(read_events):
            await anext(stream)
        del stream
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)
        return request

    request = asyncio.run(main())
    assert request.finish_reason == "cancelled"
    run(engine)
    assert_idle(engine)


def test_an_async_stream_made_before_the_loop_runs(engine: Engine) -> None:
    expected = engine.generate(PROMPT, greedy(5)).token_ids
    stream = engine.astream(PROMPT, greedy(5))
    assert tokens_of(asyncio.run(read(stream))) == expected


def test_an_exception_ends_an_async_stream_and_cancels_its_request(engine: Engine) -> None:
    def fail(event: Event) -> None:
        raise KeyError("mine")

    async def main() -> Request:
        stream = engine.astream(PROMPT, greedy(50))
        (request,) = engine.scheduler.waiting
        engine.submit(OTHER, greedy(1), on_event=fail)
        with pytest.raises(KeyError, match="mine"):
            await read(stream)
        return request

    request = asyncio.run(main())
    assert request.finish_reason == "cancelled"
    assert [event.finish_reason for event in run(engine)] == ["length"]
    assert_idle(engine)


def test_an_async_stream_checks_its_prompt_at_once(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.astream("", greedy())
    assert_idle(engine)


# Step reports.


def test_each_step_reports_who_is_active_and_who_finished(engine: Engine) -> None:
    assert engine.config.max_batch == 3
    lengths = (4, 2, 6, 3)
    requests = [engine.submit(PROMPT, greedy(n, ignore_eos=True)) for n in lengths]
    ids = [request.id for request in requests]
    finished: list[int] = []
    engine.step()
    report = engine.last_step()
    assert replace(report, bucket=0, graph_request_count=0) == StepReport(
        active=tuple(ids[:3]), paused=(), resumed=(), finished=()
    )
    decoded = []
    while engine.busy:
        ended = [event.request.id for event in engine.step() if event.finish_reason]
        report = engine.last_step()
        assert report.graph_request_count <= report.bucket <= 3
        assert bool(report.bucket) == bool(report.graph_request_count)
        decoded.append(report.graph_request_count)
        assert list(report.finished) == ended
        finished += ended
        assert set(report.active) == {request.id for request in engine.scheduler.active}
    assert sorted(finished) == ids and finished[0] == ids[1]
    assert max(decoded) >= 2
    engine.step()
    assert engine.last_step() == StepReport(active=(), paused=(), resumed=(), finished=())


def test_steps_report_pauses_and_resumes(device: str) -> None:
    with open_engine(device=device, kv_blocks=15, swap_blocks=15) as engine:
        first, second = (
            engine.submit(text, greedy(80, ignore_eos=True)) for text in (PROMPT, OTHER)
        )
        step_until(engine, lambda: second.phase is Phase.PAUSED)
        report = engine.last_step()
        assert (report.paused, report.active) == ((second.id,), (first.id,))
        step_until(engine, lambda: second.phase is not Phase.PAUSED)
        report = engine.last_step()
        assert (report.resumed, report.paused) == ((second.id,), ())
        second.cancel()
        engine.step()
        assert second.id in engine.last_step().finished
        run(engine)


# The options of runs.


@pytest.mark.parametrize("way", ["generate", "stream", "astream"])
def test_each_way_takes_priority_and_deadline(engine: Engine, way: str) -> None:
    options: dict[str, Any] = {"priority": -3, "deadline_s": 1e-9}
    params = SamplingParams(max_tokens=4)
    if way == "generate":
        reason = engine.generate(PROMPT, params, **options).finish_reason
    elif way == "stream":
        (event,) = engine.stream(PROMPT, params, **options)
        reason = event.finish_reason
    else:
        (event,) = asyncio.run(read(engine.astream(PROMPT, params, **options)))
        assert event.request.priority == -3
        reason = event.finish_reason
    assert reason == "deadline"
    assert_idle(engine)


def test_events_that_were_heard_do_not_pile_up(engine: Engine) -> None:
    """There may never be a plain step to return them."""
    heard: list[Event] = []
    for _ in range(3):
        engine.submit(PROMPT, greedy(6), on_event=heard.append)
        list(engine.stream(OTHER, greedy(9)))
    assert sum(event.finish_reason is not None for event in heard) == 3
    assert not engine.busy and engine.step() == []


@pytest.mark.parametrize("way", ["stream", "astream"])
def test_a_stream_of_an_engine_that_closes_says_so(way: str) -> None:
    with open_engine(device="cpu") as engine:
        if way == "stream":
            events = engine.stream(PROMPT, greedy(20))
            next(events)
            engine.close()
            with pytest.raises(ValueError, match="the engine is closed"):
                list(events)
            return

        async def read() -> None:
            stream = engine.astream(PROMPT, greedy(20))
            await anext(stream)
            engine.close()
            with pytest.raises(ValueError, match="the engine is closed"):
                async for _ in stream:
                    pass

        asyncio.run(read())


def test_a_list_of_no_prompts_has_no_results(engine: Engine) -> None:
    assert engine.generate([]) == []
