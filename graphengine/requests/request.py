"""The caller's view of a request: the handle, and the events of a step."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from graphengine.requests.acceptance import Acceptance
from graphengine.requests.job import Job
from graphengine.requests.result import FinishReason, Result, Timings, TokenLogprobs
from graphengine.sampling_params import SamplingParams

Number = TypeVar("Number", np.int32, np.float32)


class QueueFull(RuntimeError):
    """`max_waiting` requests wait already. Not the caller's error, so not a ValueError."""


class Phase(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    FINISHED = "finished"


class Event(NamedTuple):
    """The news of one request from one step. (A tuple, because a step makes one for every row.)

    token_ids      new tokens, in order; empty if only the state changed
    text           text that became final; it may come later than its tokens
    finish_reason  set on the request's last event
    time           `time.perf_counter()` when the host read the tokens
    logprobs       log-probabilities of each new token, if the request asks for them
    codes          the codes of the new frame, of a model whose steps emit frames; else None
    codes_logprobs  the log-probability of each of these codes, if the request asks for them
    """

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    time: float
    logprobs: tuple[TokenLogprobs, ...] | None = None
    codes: tuple[int, ...] | None = None
    codes_logprobs: tuple[float, ...] | None = None

    @property
    def request_id(self) -> int:
        """`request.id`, under the name that it has in a `Result`."""
        return self.request.id

    @property
    def weight_version(self) -> int:
        """The version of the weights that its tokens came from, as `Engine.weight_version`."""
        return self.request.weight_version

    @property
    def stop_reason(self) -> str | int | tuple[int, ...] | None:
        """What ended the request, as `Result.stop_reason`; None before its last event."""
        return None if self.finish_reason is None else self.request.stop_reason


class Request:
    """Handle of a submitted request, valid after the engine is closed.

    Attributes to read: `id`, `prompt_token_ids`, `params`, `seed`, `priority`, `callback`, `phase`,
    `token_ids` and `text` so far, `logprobs` of them, `prompt_logprobs`, `cached_tokens`,
    `finish_reason`, `stop_reason`, `timings`, `pauses`, `acceptance`, `weight_version`.

    id           its number in its engine, from 1; used by `StepReport`, the recorder,
                 `Engine.requests` and the argument of `Engine.stop_callback`
    priority     the waiting request with the lowest starts first; arrival decides among equals
    callback     gets its events: `on_event` of `Engine.submit`
    cached_tokens  prompt tokens that were not prefilled, as their KV was kept; 0 until it starts
    weight_version  the version of the weights that all its tokens come from: they do not change
                 while it is unfinished
    job          the engine's internal record of it
    """

    __slots__ = (
        "_cancelled",
        "acceptance",
        "cached_tokens",
        "callback",
        "finish_reason",
        "id",
        "job",
        "logprobs",
        "params",
        "pauses",
        "phase",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "seed",
        "stop_reason",
        "timings",
        "weight_version",
    )

    def __init__(
        self,
        *,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        submitted: float,
        cancelled: list[Request],
        job: Job,
        callback: Callable[[Event], None] | None = None,
        priority: int = 0,
        weight_version: int = 0,
    ) -> None:
        """Make a request; `cancel` appends it to `cancelled`, which the engine reads."""
        self.id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.priority = priority
        self.weight_version = weight_version
        self.callback = callback
        self.job = job
        self.phase = Phase.WAITING
        self.logprobs: list[TokenLogprobs] | None = None
        if params.logprobs is not None and job.codes is None:
            self.logprobs = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | tuple[int, ...] | None = None
        self.timings = Timings(submitted=submitted)
        self.pauses = 0
        self.acceptance = Acceptance()
        self.cached_tokens = 0
        self._cancelled = cancelled

    def __repr__(self) -> str:
        return (
            f"Request(id={self.id}, phase={self.phase.value}, prompt={len(self.prompt_token_ids)}, "
            f"tokens={len(self.job.tokens)}, finish_reason={self.finish_reason!r})"
        )

    @property
    def request_id(self) -> int:
        """`id`, under the name that it has in a `Result`."""
        return self.id

    @property
    def grammar(self) -> str | None:
        """Who follows its grammar: "device", or "host", which then reads each of its tokens before
        its next step is launched; None without a grammar. Known once it is queued.
        """
        guide = self.job.guide
        return None if guide is None else guide.where

    @property
    def grammar_reason(self) -> str:
        """Why its grammar is followed on the host; empty if it is not."""
        guide = self.job.guide
        return "" if guide is None else guide.reason

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that its tokens go through; None: the base model alone."""
        adapter = self.job.adapter
        return None if adapter is None else adapter.name

    def identity(self) -> array[int]:
        """A number for each position of the prompt: two requests whose numbers are equal up to a
        position have the same KV there.
        """
        made, adapter = self.job.embeds.identity(self.prompt_token_ids), self.job.adapter
        if adapter is None:
            return made
        # Token ids and digests have 62 bits or fewer.
        salt = adapter.generation << 32
        return array("q", (number ^ salt for number in made))

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def token_ids(self) -> list[int]:
        """The tokens of output so far; a copy."""
        return self.job.tokens.copy()

    @property
    def text(self) -> str:
        """The text so far; empty without a tokenizer."""
        stream = self.job.stream
        return "" if stream is None else stream.text

    @property
    def fed_frames(self) -> tuple[int, ...]:
        """The frame of each row of its `feed`, counted from 0, past its end too."""
        streamed = self.job.streamed
        return () if streamed is None else tuple(streamed.frames)

    @property
    def padded_frames(self) -> int:
        """How many of its frames so far were followed by a step that read the pad of its `feed`."""
        streamed = self.job.streamed
        return 0 if streamed is None else streamed.padded(max(0, len(self.job.tokens) - 1))

    def cancel(self) -> None:
        """End the request: the next `step()` frees its slot and reports it as "cancelled".

        Tokens in flight are discarded and counted. A finished request is left as it is.
        """
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self._cancelled.append(self)

    def result(self) -> Result:
        """What the request produced. ValueError while it is not finished."""
        if not self.finished or self.finish_reason is None:
            raise ValueError(f"request {self.id} is not finished: it is in {self.phase.value}")
        stream = self.job.stream
        return Result(
            request_id=self.id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.job.tokens),
            text=self.text,
            text_ends=() if stream is None else stream.ends(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            timings=self.timings,
            acceptance=self.acceptance,
            cached_tokens=self.cached_tokens,
            weight_version=self.weight_version,
            adapter=self.adapter,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            routing=self._routing(),
            codes=self._of_frames(self.job.codes, np.int32),
            codes_logprobs=self._of_frames(self.job.codes_logprobs, np.float32),
        )

    def _of_frames(
        self, rows: Sequence[tuple[float, ...]] | None, dtype: type[Number]
    ) -> NDArray[Number] | None:
        """What the codes of all frames have, [frames, K]; None where that is not known."""
        shape = len(self.job.tokens), self.job.frame_size
        return None if rows is None else np.array(rows[: shape[0]], dtype=dtype).reshape(shape)

    def _routing(self) -> NDArray[np.int16] | None:
        """The experts of every token that was fed; None if they are not recorded."""
        routes = self.job.routes
        if routes is None:
            return None
        said = len(self.job.tokens)
        return routes.array(len(self.prompt_token_ids) + said - 1 if said else routes.fed)
