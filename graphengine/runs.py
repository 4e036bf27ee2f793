"""Ways to run requests to their end, each a thin shell over `Engine.step`.

They hear of their own requests through callbacks, so that any number of them, and a loop of plain
steps, may go on side by side: whoever steps brings everybody's requests forward, and no event goes
to the wrong one. What another request's callback raises in a step ends the run that stepped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, Unpack, cast

from graphengine.core import EngineCore
from graphengine.intake import QueueOptions
from graphengine.prompts import Prompt, is_batch
from graphengine.request import Event, Request
from graphengine.result import Result
from graphengine.sampling_params import SamplingParams

Progress = Callable[[int, int], None]


class Submit(Protocol):
    """Queues a request, whose events go to `on_event`."""

    def __call__(self, *, on_event: Callable[[Event], None]) -> Request: ...


def generate(
    core: EngineCore,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: Progress | None,
    **options: Unpack[QueueOptions],
) -> Any:
    """What `Engine.generate` says."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress={progress!r} cannot be called")
    intake, submitted = core.intake, time.perf_counter()
    batch = is_batch(prompts)
    prompt_list: Sequence[Any] = prompts if batch else [prompts]  # type: ignore[assignment]
    if not isinstance(params, Sequence):
        params = [intake.usual_params if params is None else params] * len(prompt_list)
    if len(params) != len(prompt_list):
        raise ValueError(f"{len(params)} SamplingParams for {len(prompt_list)} prompts")
    done = 0

    def heard(event: Event) -> None:
        nonlocal done
        done += event.finish_reason is not None

    ids = [intake.prompt_ids(*pair) for pair in zip(prompt_list, params, strict=True)]
    made = [
        intake.request(*pair, heard, submitted=submitted, **options)
        for pair in zip(ids, params, strict=True)
    ]
    core.scheduler.check_queue(len(made))
    queued: list[Request] = []
    try:
        for request in made:
            request.private = True
            core.queue(request)
            queued.append(request)
        told = 0
        while done < len(made):
            _step(core)
            if progress is not None and done > told:
                told = done
                progress(done, len(made))
    except BaseException:
        for request in queued:
            request.cancel()
        raise
    results = [request.result() for request in made]
    return results if batch else results[0]


def finish(core: EngineCore, submit: Submit) -> Result:
    """Submit a request and run it to its end."""
    request = submit(on_event=_ignore)
    request.private = True
    try:
        while not request.finished:
            _step(core)
    except BaseException:
        request.cancel()
        raise
    return request.result()


def stream(core: EngineCore, submit: Submit) -> Iterator[Event]:
    """What `Engine.stream` says, of the request that `submit` makes."""
    request, events = _submit(submit)
    generator = _events(core, request, events)
    # To its first yield, so that closing an untouched iterator cancels the request too.
    next(generator)
    return cast(Iterator[Event], generator)


def astream(core: EngineCore, submit: Submit) -> AsyncIterator[Event]:
    """What `Engine.astream` says, of the request that `submit` makes."""
    request, events = _submit(submit)
    generator = _events_async(core, request, events)
    # To its first yield, in front of which it awaits nothing.
    with suppress(StopIteration):
        generator.__anext__().__await__().__next__()
    return cast(AsyncIterator[Event], generator)


def _ignore(event: Event) -> None:
    """The event of a private request that nobody asks for."""


def _submit(submit: Submit) -> tuple[Request, deque[Event]]:
    """A request whose events go into a queue, and that queue."""
    events: deque[Event] = deque()
    request = submit(on_event=events.append)
    request.private = True
    return request, events


def _step(core: EngineCore, timeout: float | None = None) -> None:
    """A step for those who hear by callbacks.

    The next plain one returns the events of those who have none; others have heard of theirs, and
    there may never be a plain one.
    """
    events = core.step(timeout)
    core.delivery.keep([event for event in events if event.request.callback is None])


def _events(core: EngineCore, request: Request, events: deque[Event]) -> Iterator[Event | None]:
    last: Event | None = None
    try:
        yield None
        while events or not request.finished:
            if not events:
                _step(core)
            while events:
                last = events.popleft()
                yield last
        _check_ended(core, last)
    finally:
        request.cancel()


async def _events_async(
    core: EngineCore, request: Request, events: deque[Event]
) -> AsyncIterator[Event | None]:
    last: Event | None = None
    try:
        yield None
        while events or not request.finished:
            if not events:
                await asyncio.sleep(0)
            if not events and not request.finished:
                _step(core, timeout=0)
            while events:
                last = events.popleft()
                yield last
        _check_ended(core, last)
    finally:
        request.cancel()


def _check_ended(core: EngineCore, last: Event | None) -> None:
    """ValueError where the engine was closed before the request's last event."""
    if last is None or last.finish_reason is None:
        core.check_open()
