"""A request's life as its owner sees it: the handle, the events of a step, the result."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from graphengine.acceptance import Acceptance
from graphengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from graphengine.processing import Processing
    from graphengine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Logprob(NamedTuple):
    """Of a token: its log-probability, and its rank, of which 1 is the most probable."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""Of a position, by token id: the token that came first, then the most probable ones in order."""


class Phase(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    FINISHED = "finished"


class Event(NamedTuple):
    """What one step brought one request. (A tuple, because a step makes one for every row.)

    token_ids      new tokens, in order; empty where only the state changed
    text           text that became final with them; it may lag behind the tokens
    finish_reason  set on the request's last event
    time           `time.perf_counter()` when the host read the tokens
    logprobs       of each new token, where the request asks for them
    """

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    time: float
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(kw_only=True, slots=True)
class Timings:
    """Host times in seconds of `time.perf_counter()`, as tokens reached the host."""

    submitted: float
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return self.tokens[0] - self.submitted if self.tokens else None

    @property
    def inter_token(self) -> list[float]:
        """Gaps between consecutive tokens."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished request. `token_ids` end with the stop token where one ended the request.

    `acceptance` counts what became of its drafts; without speculation it is empty. `logprobs` are
    there if it asked for them, an entry for each of `token_ids`, and `prompt_logprobs` with one for
    each of the prompt's, of which the first, that follows from nothing, is None.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    timings: Timings
    acceptance: Acceptance = field(default_factory=Acceptance)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(kw_only=True, slots=True)
class Placement:
    """What the scheduler has granted a request. Only the scheduler changes it.

    slot           row of every per-slot tensor, for the request's whole life
    epoch          names this stay in the slot; a record that carries another one is dead
    reach          positions that it and its drafter can ever write
    blocks         pool blocks of positions 0, block_size, ...; empty while paused
    swap_blocks    host blocks while paused
    prefilled      prompt tokens whose prefill has been launched
    least          tokens sampled at least, once all launches have run: each one counts for one
    in_doubt       drafts in flight; as many more may have been sampled
    """

    slot: int
    epoch: int
    reach: int
    blocks: list[int] = field(default_factory=list)
    swap_blocks: list[int] = field(default_factory=list)
    prefilled: int = 0
    least: int = 0
    in_doubt: int = 0

    @property
    def most(self) -> int:
        """Tokens sampled at most, once all launches have run; it may exceed what was asked for."""
        return self.least + self.in_doubt


class Request:
    """Handle of a submitted request, valid after the engine is closed.

    Attributes to read: `id`, `prompt_token_ids`, `params`, `seed`, `phase`, `token_ids` and `text`
    so far, `logprobs` of them, `prompt_logprobs`, `finish_reason`, `timings`, `pauses`,
    `acceptance`.
    """

    __slots__ = (
        "_cancelled",
        "acceptance",
        "callback",
        "drafts",
        "finish_reason",
        "full",
        "id",
        "logprobs",
        "max_len",
        "max_new_tokens",
        "params",
        "pauses",
        "phase",
        "placement",
        "processing",
        "prompt_len",
        "prompt_logprobs",
        "prompt_token_ids",
        "seed",
        "stop_ids",
        "stream",
        "text",
        "timings",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        max_len: int,
        submitted: float,
        cancelled: list[Request],
        stream: TextStream | None = None,
        callback: Callable[[Event], None] | None = None,
        processing: Processing | None = None,
    ) -> None:
        self.id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.prompt_len = len(self.prompt_token_ids)
        self.max_len = max_len
        self.max_new_tokens = max_len - self.prompt_len
        self.processing = processing
        # Whether its steps need the full sampler's graphs.
        self.full = params.filtered or processing is not None
        self.stream = stream
        self.callback = callback
        self.phase = Phase.WAITING
        self.placement: Placement | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_len
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.timings = Timings(submitted=submitted)
        self.pauses = 0
        self.acceptance = Acceptance()
        self.drafts: tuple[int, ...] = ()
        self._cancelled = cancelled

    def __repr__(self) -> str:
        return (
            f"Request(id={self.id}, phase={self.phase.value}, prompt={len(self.prompt_token_ids)}, "
            f"tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r})"
        )

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def placed(self) -> Placement:
        """The placement of a request that holds a slot."""
        assert self.placement is not None, f"{self!r} holds no slot"
        return self.placement

    @property
    def min_len(self) -> int:
        """Tokens of the sequence, prompt included, before which no stop id may come."""
        return self.prompt_len + self.params.min_tokens

    def belongs_to(self, cancelled: list[Request]) -> bool:
        """Whether this list, which each engine has one of, is where it goes when cancelled."""
        return self._cancelled is cancelled

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
        return Result(
            request_id=self.id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=self.finish_reason,
            seed=self.seed,
            timings=self.timings,
            acceptance=self.acceptance,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
