"""Ways to run requests to their end, each a thin shell over `Engine.step`.

A run gets the events of its own requests through callbacks, so any number of runs, and a loop of
plain steps, may be active at the same time: every step advances all requests, and no event goes to
the wrong run. An exception in another request's callback ends the run whose step called it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, Unpack, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from graphengine.core.engine_core import EngineCore
from graphengine.core.intake import QueueOptions, check_one_prompt, check_samples
from graphengine.core.interrupts import HeldInterrupts
from graphengine.models.inner.given_frames import delay_frames, embed_frames, undelay_frames
from graphengine.options.checks import check_callable, shown
from graphengine.options.frames import Rows
from graphengine.prompts import Prompt, is_batch
from graphengine.requests.frames import bits_of
from graphengine.requests.request import Event, Request
from graphengine.requests.result import Result
from graphengine.sampling_params import SamplingParams

Progress = Callable[[int, int], None]
LATE = "feed/late"
"""Counter of frames that got the pad although a row came later."""


class Submit(Protocol):
    """Queues a request whose events go to `on_event`."""

    def __call__(self, *, on_event: Callable[[Event], None]) -> Request: ...


def generate(
    core: EngineCore,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: Progress | None,
    n: int | None = None,
    **options: Unpack[QueueOptions],
) -> Any:
    """Implements `Engine.generate`, and with `n` samples of each prompt `generate_many`."""
    check_callable("progress", progress)
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

    count = 1 if n is None else n
    check_one_prompt(len(prompt_list) * count, options)
    read = [intake.prompt(*pair) for pair in zip(prompt_list, params, strict=True)]
    made = [
        request
        for pair in zip(read, params, strict=True)
        for request in intake.samples(*pair, heard, count, submitted=submitted, **options)
    ]
    for request in made:
        request.job.private = True
        core.scheduler.check_fits(request)
    unqueued = deque(made)
    with _cancelling(core, made, unqueued):
        reported = 0
        while done < len(made):
            _queue_some(core, unqueued)
            _step(core)
            if progress is not None and done > reported:
                reported = done
                progress(done, len(made))
    results: list[Any] = [request.result() for request in made]
    if n is not None:
        results = [results[first : first + n] for first in range(0, len(results), n)]
    return results if batch else results[0]


def generate_many(
    core: EngineCore,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: Progress | None,
    n: int,
    **options: Unpack[QueueOptions],
) -> Any:
    """Implements `Engine.generate_many`."""
    check_samples(n)
    return generate(core, prompts, params, progress, n, **options)


def finish(core: EngineCore, submit: Submit) -> Result:
    """Submit a request and run it to its end."""
    request = submit(on_event=_ignore)
    request.job.private = True
    with _cancelling(core, [request]):
        while not request.finished:
            _step(core)
    return request.result()


def drain(core: EngineCore, timeout: float | None) -> list[Event]:
    """Implements `Engine.drain`."""
    end = None if timeout is None else time.perf_counter() + timeout
    while True:
        left = None if end is None else max(0.0, end - time.perf_counter())
        events = core.step(left)
        if not core.busy or left == 0.0:
            return events
        # The next step returns them, too: an exception in it loses none.
        core.delivery.keep(events)


def stream(core: EngineCore, submit: Submit) -> Iterator[Event]:
    """Implements `Engine.stream` for the request that `submit` makes."""
    request, events = _submit(submit)
    generator = _events(core, request, events)
    # Run it to its first yield, so that closing an unused iterator cancels the request too.
    next(generator)
    return cast(Iterator[Event], generator)


def astream(core: EngineCore, submit: Submit) -> AsyncIterator[Event]:
    """Implements `Engine.astream` for the request that `submit` makes."""
    request, events = _submit(submit)
    generator = _events_async(core, request, events)
    # Run it to its first yield, as above; it awaits nothing before.
    with suppress(StopIteration):
        generator.__anext__().__await__().__next__()
    return cast(AsyncIterator[Event], generator)


def _queue_some(core: EngineCore, unqueued: deque[Request]) -> None:
    """Queue the first requests, as many as may wait; those past their deadline end in the next
    step, so they need no room.
    """
    with HeldInterrupts():
        while unqueued and (core.scheduler.has_room or _late(unqueued[0])):
            core.queue(unqueued.popleft())


def _late(request: Request) -> bool:
    deadline = request.job.deadline
    return deadline is not None and deadline <= time.perf_counter()


@contextmanager
def _cancelling(
    core: EngineCore, requests: Sequence[Request], unqueued: deque[Request] | None = None
) -> Iterator[None]:
    """Cancel the requests if the block raises; those that were not queued yet were never started.

    After Ctrl-C there may be no other step for a while, so the requests end here, and free what
    they hold.
    """
    try:
        yield
    except BaseException as error:
        while unqueued and not core.closed:
            # They end like the others: samples of one prompt wait for each other to end.
            core.queue(unqueued.popleft())
        for request in requests:
            request.cancel()
        if isinstance(error, KeyboardInterrupt):
            core.end_interrupted(requests)
        raise


def _ignore(event: Event) -> None:
    """Ignores the events of a private request."""


def _submit(submit: Submit) -> tuple[Request, deque[Event]]:
    """Submit a request whose events go into a queue; returns it and the queue."""
    events: deque[Event] = deque()
    request = submit(on_event=events.append)
    request.job.private = True
    return request, events


def _step(core: EngineCore, timeout: float | None = None) -> None:
    """Step for runs that get their events through callbacks.

    The next plain step returns the events of requests without a callback. Events of requests with a
    callback are dropped: they were delivered, and there may never be a plain step.
    """
    events = core.step(timeout)
    core.delivery.keep([event for event in events if event.request.callback is None])


def _events(core: EngineCore, request: Request, events: deque[Event]) -> Iterator[Event | None]:
    last: Event | None = None
    with _cancelling(core, [request]):
        yield None
        while events or _goes_on(core, request):
            if not events:
                _step(core)
            while events:
                last = events.popleft()
                yield last
        _check_ended(core, last)


async def _events_async(
    core: EngineCore, request: Request, events: deque[Event]
) -> AsyncIterator[Event | None]:
    last: Event | None = None
    with _cancelling(core, [request]):
        yield None
        while events or _goes_on(core, request):
            if not events:
                await asyncio.sleep(0)
            if not events and _goes_on(core, request):
                _step(core, timeout=0)
            while events:
                last = events.popleft()
                yield last
        _check_ended(core, last)


def _goes_on(core: EngineCore, request: Request) -> bool:
    """Whether a step may bring the request an event: its last one, if its session ended it."""
    return not request.finished or core.delivery.owes(request)


def _check_ended(core: EngineCore, last: Event | None) -> None:
    """ValueError if the engine was closed before the request's last event."""
    if last is None or last.finish_reason is None:
        core.check_open()


def _feed(core: EngineCore, request: object, embeds: Rows) -> int:
    """Implements `Engine.feed`."""
    core.check_open()
    if not isinstance(request, Request):
        raise ValueError(f"request={shown(request)} must be a Request")
    inner = core.intake.inner
    if inner is None or not inner.fed:
        raise ValueError(
            f"feed is for models that add an embedding to each frame while they speak: a "
            f"{core.runtime.model.config.architecture} does not"
        )
    scheduler = core.scheduler
    if request.finish_reason is not None:
        raise ValueError(
            f"request {request.id} has ended ({request.finish_reason!r}): nothing streams into it"
        )
    if not any(request is each for each in (*scheduler.active, *scheduler.waiting)):
        raise ValueError(f"request {request.id} is of another engine")
    streamed = request.job.streamed
    assert streamed is not None, f"{request!r} takes rows"
    late = streamed.late
    first = streamed.add(bits_of("embeds", embeds, inner, core.memory.dtype))
    core.counters[LATE] += streamed.late - late
    return first


class FrameCalls:
    """The calls of an engine about frames of codes."""

    core: EngineCore

    def embed_frames(self, codes: npt.ArrayLike | Tensor) -> Tensor:
        """The embeddings of frames of codes, for prompts of a model whose steps emit frames.

        codes  integers [frames, K], such as the `codes` of a `Result`; for a model that hears codes
               beside its own, these may follow, [frames, K + P], delayed like its own

        Returns [frames, hidden size] in the model's dtype on its device: what a step reads of such
        a frame. In an engine opened with `prompt_embeds`, it is a part of `PromptParts`.

        ValueError for other models, for another shape, and for a code outside its codebook.
        """
        self.core.check_open()
        return embed_frames(self.core.runtime.model, codes)

    def delay_frames(self, codes: npt.ArrayLike | Tensor) -> npt.NDArray[np.int32]:
        """Frames as prompts have them, of frames of sound as a codec has them.

        codes  integers [frames, K]

        Returns int32 [n, K], for `embed_frames`. For a model whose codes are delayed there are
        K + 1 frames more: the first has begin codes, code k of the others lags k frames behind,
        and the last ones have end codes. For Moshi, [frames, K + P] gives one frame more: all codes
        of sound of a frame but its first come one frame late, and what is not known is -1. Other
        models have no delays, and `codes` comes back.

        ValueError as for `embed_frames`.
        """
        self.core.check_open()
        return delay_frames(self.core.runtime.model, codes)

    def undelay_frames(self, codes: npt.ArrayLike | Tensor) -> npt.NDArray[np.int32]:
        """Whole frames of sound for a codec, of the `codes` of a `Result` or of several events.

        codes  integers [frames, K], in the order in which they came

        Returns int32 [n, K], with the codes of each frame of sound together. For a model whose
        codes are delayed these are the frames whose codes have all come, after the last frame of
        begin codes alone and before the first one of end codes alone; K frames in a row give one.
        For Moshi, two give one, without its text. Other models have no delays, and `codes` comes
        back.

        ValueError as for `embed_frames`.
        """
        self.core.check_open()
        return undelay_frames(self.core.runtime.model, codes)

    def feed(self, request: Request, embeds: Rows) -> int:
        """Have embeddings, or a user's codes, stream into the frames of a reply while it is spoken;
        see `Feed`.

        embeds  [n, hidden size] of floating point on any device, or codes, integers [n, P], copied
                at once: those of the frames after the last one that has a row

        Where all rows that came before are used up, the first of these is for the first frame whose
        step is not launched: frames that were launched keep the pad. They are launched only by
        `step()`: when it has returned frame i, those up to i + (lookahead + 1) x steps_per_launch
        at most.

        Returns the number of the frame that the first of these rows is added to, counted from 0.

        ValueError for other models, for a request that has ended or is of another engine, for
        another shape, and for numbers that are not finite.
        """
        return _feed(self.core, request, embeds)
