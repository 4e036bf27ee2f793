"""Turns a replay's record into the caller's results: tokens and text, events, callbacks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from graphengine.buckets.mailbox import Payloads
from graphengine.host.gate import Gate
from graphengine.host.scheduling import Scheduling
from graphengine.host.step_plan import Replay
from graphengine.host.waiting import Deadlines
from graphengine.kernels.step.record import (
    EPOCH_MASK,
    EPOCH_SHIFT,
    FLAGS_AND_COUNT,
    FLAGS_AND_COUNT_MASK,
    fed_of,
    pack_state,
    unpack_state,
)
from graphengine.kernels.step.state import EMITTED, INVALID, LENGTH, STOP
from graphengine.observe.recorder import Recorder
from graphengine.options.checks import is_int
from graphengine.requests.acceptance import Acceptance
from graphengine.requests.caller_drafts import NO_DRAFTS
from graphengine.requests.grammars import AnyGuide
from graphengine.requests.job import NO_FRAME, Frame, Job
from graphengine.requests.request import Event, Phase, Request
from graphengine.requests.result import FinishReason, TokenLogprobs
from graphengine.text.tokenizer import IncrementalDecoder, TextStream

log = logging.getLogger(__name__)

StopCallback = Callable[[tuple[int, ...]], Iterable[int]]

# Makes an event from a tuple. Calling the class runs a Python function and takes twice as long.
_make = tuple.__new__
_HALTED = STOP | LENGTH
_NEVER = -1
"""A state word that no lane has."""


class PlainLane(NamedTuple):
    """What a plain token of a decode row goes to: one that ends nothing, and whose text its decoder
    knows. It is looked up once for many steps of the same rows.

    state    the lane's state word where the row emitted one token in its epoch and goes on; a word
             that no lane has for requests whose tokens are never plain
    tokens   the request's tokens, and their `times`
    made     their text; not used without a `decoder`
    decoder  None without a tokenizer
    """

    request: Request
    epoch: int
    state: int
    tokens: list[int]
    times: list[float]
    made: list[str]
    decoder: IncrementalDecoder | None

    @classmethod
    def of(cls, request: Request, epoch: int) -> PlainLane:
        """The lane of a request with this epoch."""
        job, stream = request.job, request.job.stream
        plain = job.guide is None and job.codes is None and not job.scores
        if stream is not None:
            plain = plain and stream.plain
        return cls(
            request,
            epoch,
            pack_state(epoch, 1, 1, EMITTED) if plain else _NEVER,
            job.tokens,
            request.timings.tokens,
            [] if stream is None else stream.made,
            None if stream is None else stream.decoder,
        )


class Delivery:
    """Reads mailbox lanes, finishes requests, and keeps events until a step returns them.

    scheduler  retires finished requests, and gets the number of tokens of each speculative row
    gate       gets the number of accepted drafts
    recorder   gets the finished requests while it records
    forced     whether acceptance is forced, so that no draft is judged
    withholds  whether the drafter withholds drafts: a row without any then counts as judged

    `cancelled` collects requests that their callers cancel, `deadlines` requests that have one;
    `acceptance` counts all requests. A wait or a callback that raises, or a `generate` in between,
    delays events but loses none.
    """

    def __init__(
        self,
        scheduler: Scheduling,
        gate: Gate | None,
        recorder: Recorder,
        *,
        forced: bool,
        withholds: bool,
    ) -> None:
        self.counters = scheduler.counters
        self.acceptance = Acceptance()
        self.cancelled: list[Request] = []
        self.deadlines = Deadlines()
        self.stop_callback: StopCallback | None = None
        self._scheduler = scheduler
        self._gate = gate
        self._recorder = recorder
        self._forced, self._withholds = forced, withholds
        # Events whose callbacks have yet to run, and events that no step has returned yet, in
        # order.
        self._undelivered: list[Event] = []
        self._unreturned: list[Event] = []
        # The lanes of the rows that were decoded last.
        self._rows: tuple[Request, ...] = ()
        self._lanes: list[PlainLane] = []

    @property
    def pending(self) -> bool:
        """Whether a cancelled request is unfinished, or an event undelivered or unreturned."""
        return bool(self.cancelled or self._undelivered or self._unreturned)

    def clear(self) -> None:
        """Drop all pending requests and events, as the engine closes."""
        for left in (self.cancelled, self._undelivered, self._unreturned, self.deadlines.heap):
            left.clear()
        self._rows, self._lanes = (), []

    def keep(self, events: list[Event]) -> None:
        """Take back the list that a step returned: the next step adds its events and returns it."""
        self._unreturned = events

    def read_replay(
        self,
        replay: Replay,
        record: Payloads,
        logprobs: Sequence[tuple[TokenLogprobs, ...] | None] | None,
        now: float,
    ) -> None:
        """Deliver all lanes of a replay's mailbox entry and log-probabilities, read at `now`."""
        none = logprobs is None or logprobs.count(None) == len(logprobs)
        if none and replay.width == 1 and replay.chunk is None:
            given = self._read_rows(replay, record, now)
        else:
            given = self._read_lanes(replay, record, logprobs, now)
        if tokens := sum(given):
            self.counters["tokens"] += tokens
        if self._recorder.recording:
            drafted, accepted = drafts_of(record) if replay.width > 1 else (0, 0)
            sampled = sum(FLAGS_AND_COUNT[lane[-1] & FLAGS_AND_COUNT_MASK][1] for lane in record)
            self._recorder.collected(
                replay.sequence, replay.requests, given, now, drafted, accepted, sampled
            )

    def _read_lanes(
        self,
        replay: Replay,
        record: Payloads,
        logprobs: Sequence[tuple[TokenLogprobs, ...] | None] | None,
        now: float,
    ) -> list[int]:
        """`read` each lane of a replay; returns how many tokens each request got."""
        if logprobs is None:
            logprobs = [None] * len(record)
        lanes = zip(replay.requests, replay.epochs, record, logprobs, strict=True)
        return [
            self.read(request, epoch, items, replay.width, now, found)
            for request, epoch, items, found in lanes
        ]

    def _read_rows(self, replay: Replay, record: Payloads, now: float) -> list[int]:
        """Like `_read_lanes`, of a decode replay without drafts and log-probabilities. It delivers
        plain tokens itself, without a call for each.
        """
        if replay.requests != self._rows:
            self._rows = replay.requests
            self._lanes = list(map(PlainLane.of, replay.requests, replay.epochs))
        given = []
        for lane, items in zip(self._lanes, record, strict=True):
            request, epoch, state, tokens, times, made, decoder = lane
            text: str | None = ""
            if decoder is not None:
                text = decoder.known.get(items[0]) if decoder.settled else None
            if items[-1] != state or text is None or request.finish_reason is not None:
                given.append(self.read(request, epoch, items, 1, now))
                continue
            tokens.append(items[0])
            times.append(now)
            made.append(text)
            event = _make(Event, (request, items[:1], text, None, now, None, None, None))
            if request.callback is None:
                self._unreturned.append(event)
            else:
                self._announce(event)
            given.append(1)
        return given

    def read(
        self,
        request: Request,
        epoch: int,
        items: tuple[int, ...],
        width: int,
        now: float,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> int:
        """Deliver one lane of a mailbox entry, from a graph that feeds `width` tokens a row.

        logprobs  of the lane's tokens, if the request asks for them

        The tokens go to the request, unless it has ended; the event waits for its callback. Returns
        how many tokens the request got.
        """
        state = items[-1]
        flags, count = FLAGS_AND_COUNT[state & FLAGS_AND_COUNT_MASK]
        if width > 1:
            self._account(request, epoch, width, state)
        if not flags & (EMITTED | INVALID):
            return 0
        if request.finish_reason is not None or state >> EPOCH_SHIFT != epoch & EPOCH_MASK:
            self.counters["discarded_tokens"] += count
            return 0
        job, halted = request.job, flags & _HALTED
        if flags & INVALID or job.scores:
            self._finish_without(request, flags, count, now)
            return 0
        tokens, text, stopped = items[:count], "", None
        ended: FinishReason | None = None
        if job.guide is not None:
            tokens, ended = self._follow(request, job.guide, tokens, flags)
            if len(tokens) < count:
                count, flags = len(tokens), EMITTED
        stream = job.stream
        if stream is not None:
            if count == 1 and not flags & STOP:
                text, stopped = stream.push(tokens[0])
            else:
                tokens, text, stopped = self._take(job, stream, tokens, flags)
            if stream.failure is not None:
                tokens = self._before_failure(request, stream, tokens)
                stopped, ended = None, "error"
        request.job.tokens += tokens
        if logprobs is not None and request.logprobs is not None:
            logprobs = logprobs[: len(tokens)]
            request.logprobs += logprobs
        given, frame = len(tokens), NO_FRAME
        if job.codes is not None and given:
            frame = job.last_frame
        # If the host takes none of this step's tokens, the sequence stays where the previous step
        # ended.
        job.halted = bool(halted) and given > 0
        request.timings.tokens += [now] * given
        if stopped is None and ended is None and not flags & _HALTED:
            event = _make(Event, (request, tokens, text, None, now, logprobs, *frame))
            if request.callback is None:
                self._unreturned.append(event)
            else:
                self._announce(event)
            return given
        if stopped is not None:
            request.stop_reason, ended = stopped, "stop"
        elif ended is None and flags & STOP:
            request.stop_reason, ended = job.stops.reason(request.job.tokens), "stop"
        self._finish(request, ended or "length", tokens, text, now, logprobs, frame)
        return given

    def _finish_without(self, request: Request, flags: int, count: int, now: float) -> None:
        """Finish a request that gets no token: none could be sampled, or it asked for none."""
        if flags & INVALID:
            self._log_invalid(request)
            self._finish(request, "error", (), "", now)
        else:
            self.counters["discarded_tokens"] += count
            self._finish(request, "length", (), "", now)

    def _take(
        self, job: Job, stream: TextStream, tokens: tuple[int, ...], flags: int
    ) -> tuple[tuple[int, ...], str, str | None]:
        """The tokens that the caller gets, their text, and the stop string that ended the text."""
        silent = bool(flags & STOP) and job.stops.hides(tokens[-1])
        text, taken, stopped = stream.take(tokens, silent)
        if taken < len(tokens):
            # Tokens after a stop string are not given to the caller.
            self.counters["discarded_tokens"] += len(tokens) - taken
            tokens = tokens[:taken]
        return tokens, text, stopped

    def _before_failure(
        self, request: Request, stream: TextStream, tokens: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Tokens before the one whose text failed; the caller gets neither it nor later ones."""
        taken = len(stream.made) - len(request.job.tokens)
        self.counters["discarded_tokens"] += len(tokens) - taken
        log.error("request %d: %s", request.id, stream.failure)
        return tokens[:taken]

    def _announce(self, event: Event) -> None:
        """Queue the event for the next step to return, and for its request's callback, if any."""
        if event.request.callback is not None:
            self._undelivered.append(event)
        if not event.request.job.private:
            self._unreturned.append(event)

    def _log_invalid(self, request: Request) -> None:
        """Log that no token could be sampled, and what the request bans: it may ban everything that
        its grammar allows, as masks ignore bans.
        """
        params, bans, where = request.params, [], ""
        if params.bad_words:
            bans.append("bad_words")
        if -math.inf in (params.logit_bias or {}).values():
            bans.append("logit_bias")
        if bans and request.job.guide is not None:
            self.counters["guided/errors"] += 1
            bans.insert(0, "structured_outputs")
        if bans:
            where = f" where {' and '.join(bans)} allow a token"
        # The device reports only that it sampled none.
        log.error("request %d: the logits hold a NaN, or no finite value%s", request.id, where)

    def _follow(
        self, request: Request, guide: AnyGuide, tokens: tuple[int, ...], flags: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The step's tokens that the grammar accepts, and why the request ends, if it does."""
        taken, ended = guide.take(tokens, more=flags == EMITTED)
        self.counters["discarded_tokens"] += len(tokens) - taken
        if ended == "error":
            self.counters["guided/errors"] += 1
            log.error("request %d: its grammar allows nothing: %s", request.id, guide.trouble)
        return tokens[:taken], ended

    def _account(self, request: Request, epoch: int, width: int, state: int) -> None:
        """Tell the scheduler, the statistics and the gate the outcome of a speculative row."""
        placement = request.job.placement
        if placement is None or placement.epoch != epoch:
            return
        flags, count = FLAGS_AND_COUNT[state & FLAGS_AND_COUNT_MASK]
        self._scheduler.collected(request, width, count)
        if count and request.finish_reason is None:
            # Missing drafts do not count, and drafts fed past a stop were not judged.
            verified = count if flags & STOP else fed_of(state)
            # Whether the row tells something about the drafter: a row without drafts may just have
            # no lanes for them, because the request ends there.
            judged = verified > 1 or (self._withholds and not flags & LENGTH)
            for acceptance in (request.acceptance, self.acceptance):
                acceptance.record(verified, count, None if self._forced else count - 1)
            if self._gate is not None and judged:
                self._gate.record(count - 1, 1)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...],
        text: str,
        now: float,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        frame: Frame = NO_FRAME,
    ) -> None:
        """Retire the request; its last event has the text that was still held back."""
        job, tail = request.job, ""
        stream = job.stream
        if stream is not None:
            known = stream.failure
            tail = stream.flush()
            if stream.failure is not known:
                log.error("request %d: %s", request.id, stream.failure)
                if reason in ("stop", "length"):
                    reason, request.stop_reason = "error", None
        request.finish_reason = reason
        request.timings.finished = now
        if stale := len(job.drafts.token_ids):
            self.counters["drafts/stale"] += stale
            job.drafts = NO_DRAFTS
        self._scheduler.retire(request)
        self.counters[f"finished/{reason}"] += 1
        if self._recorder.recording:
            self._recorder.finished(request)
        self._announce(Event(request, token_ids, text + tail, reason, now, logprobs, *frame))

    def stop(self, request: Request) -> None:
        """Finish an unfinished request at once, by "stop": it keeps the tokens that were read."""
        self._finish(request, "stop", (), "", time.perf_counter())

    def end_due(self) -> None:
        """Finish requests that were cancelled since the last call, or are past their deadlines."""
        while self.cancelled:
            request = self.cancelled.pop(0)
            self._finish(request, "cancelled", (), "", time.perf_counter())
        if self.deadlines.heap:
            now = time.perf_counter()
            for request in self.deadlines.late(now):
                self._finish(request, "deadline", (), "", now)

    def drop(self, requests: Sequence[Request]) -> None:
        """Drop the events of private requests whose callbacks have not run yet."""
        self._undelivered = [event for event in self._undelivered if event.request not in requests]

    def _ask(self, callback: StopCallback) -> BaseException | None:
        """Finish the requests that `stop_callback` names. Returns what it raised, or a ValueError
        for an invalid result; None if all is well.
        """
        active = {
            request.id: request
            for request in self._scheduler.active
            if request.phase is not Phase.PAUSED and request.finish_reason is None
        }
        if not active:
            return None
        try:
            asked = callback(tuple(active))
            ended = list(asked) if isinstance(asked, Iterable) else [None]
            if not all(is_int(number) and number in active for number in ended):
                raise ValueError(
                    f"stop_callback returned {asked!r}: it must be ids of {tuple(active)}"
                )
        except BaseException as error:
            return error
        for number in ended:
            # The callback itself may have cancelled the request.
            if active[number].finish_reason is None:
                self.stop(active[number])
        return None

    def owes(self, request: Request) -> bool:
        """Whether an event of the request waits for its callback."""
        return any(event.request is request for event in self._undelivered)

    def run_callbacks(self) -> None:
        """Run the callbacks of new events.

        The first exception of a callback is raised after the last callback; `stop_callback` runs
        first.
        """
        failure = None if self.stop_callback is None else self._ask(self.stop_callback)
        while self._undelivered:
            event = self._undelivered.pop(0)
            callback = event.request.callback
            assert callback is not None, f"{event.request!r} has no callback"
            try:
                callback(event)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def take(self) -> list[Event]:
        """The events that no step has returned yet, oldest first."""
        events, self._unreturned = self._unreturned, []
        return events


def drafts_of(record: Payloads) -> tuple[int, int]:
    """Drafts that the lanes of a speculative step verified, and how many were accepted."""
    drafted = accepted = 0
    for items in record:
        lane = unpack_state(items[-1])
        if lane.emitted:
            # As in `_account`: drafts fed past a stop were not judged.
            drafted += (lane.emitted if lane.flags & STOP else lane.fed) - 1
            accepted += lane.emitted - 1
    return drafted, accepted
