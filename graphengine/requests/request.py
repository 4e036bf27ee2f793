"""A request as its caller sees it: the handle, and the events of a step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from graphengine.requests.acceptance import Acceptance
from graphengine.requests.result import FinishReason, Result, Timings, TokenLogprobs
from graphengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from graphengine.requests.context import Context
    from graphengine.requests.guided import Guide
    from graphengine.requests.processing import Processing
    from graphengine.text.tokenizer import TextStream


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
    text           text that they made final; it may come later than its tokens
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
class Placement:
    """What the scheduler has allocated to a request. Only the scheduler changes it.

    slot           its row in every per-slot tensor, for the request's whole life
    epoch          identifies this use of the slot; a record with another epoch is ignored
    reach          positions that it and its drafter can write at most
    blocks         pool blocks of positions 0, block_size, ...; empty while paused. Others may hold
                   the first of them, too
    swap_blocks    host blocks while paused
    prefilled      prompt tokens whose prefill was launched or not needed
    noted          prompt tokens whose prefill was not needed, and that were noted on the device or
                   need not be
    begun          whether a chunk of its prompt has been launched
    indexed        blocks of the prompt that are in the index of prefixes, or must not be
    least          fewest tokens sampled once all launches have run: one for each launch
    in_doubt       drafts in flight; up to as many more tokens may have been sampled
    """

    slot: int
    epoch: int
    reach: int
    blocks: list[int] = field(default_factory=list)
    swap_blocks: list[int] = field(default_factory=list)
    prefilled: int = 0
    noted: int = 0
    begun: bool = False
    indexed: int = 0
    least: int = 0
    in_doubt: int = 0

    @property
    def most(self) -> int:
        """Most tokens sampled once all launches have run; may exceed the number asked for."""
        return self.least + self.in_doubt


class Request:
    """Handle of a submitted request, valid after the engine is closed.

    Attributes to read: `id`, `prompt_token_ids`, `params`, `seed`, `priority`, `phase`, `token_ids`
    and `text` so far, `logprobs` of them, `prompt_logprobs`, `cached_tokens`, `finish_reason`,
    `stop_reason`, `timings`, `pauses`, `acceptance`.

    id           its number in its engine, from 1; used by `StepReport`, the recorder,
                 `Engine.requests` and the argument of `Engine.stop_callback`
    priority     of the waiting requests the lowest starts first; arrival decides among equals
    deadline     `time.perf_counter()` after which it is late; None: never
    cached_tokens  prompt tokens that were not prefilled, as their KV was there; 0 until it starts
    context      KV of its session, if it is a turn of one
    block_keys   keys of the prompt's blocks, by which prefixes are found
    eos_ids      the stop ids that come from the checkpoint
    private      whether only its callback gets its events: no step returns them
    pieces       the text in pieces, so that a step adds to it without a copy
    guide        state of its output in its grammar; None without one
    drafts       tokens that its caller proposed and no step has fed yet; `next_drafts` are those of
                 its next step
    drafts_from  the output token that the first of them stands for, counted from 0
    """

    __slots__ = (
        "_cancelled",
        "acceptance",
        "block_keys",
        "cached_tokens",
        "callback",
        "context",
        "deadline",
        "drafts",
        "drafts_from",
        "eos_ids",
        "finish_reason",
        "full",
        "guide",
        "id",
        "logprobs",
        "max_len",
        "max_new_tokens",
        "params",
        "pauses",
        "phase",
        "pieces",
        "placement",
        "priority",
        "private",
        "processing",
        "prompt_len",
        "prompt_logprobs",
        "prompt_token_ids",
        "seed",
        "stop_ids",
        "stop_reason",
        "stream",
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
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        processing: Processing | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.eos_ids = eos_ids
        self.priority = priority
        self.deadline = None if deadline_s is None else submitted + deadline_s
        self.prompt_len = len(self.prompt_token_ids)
        self.max_len = max_len
        self.max_new_tokens = max_len - self.prompt_len
        self.processing = processing
        self.guide = guide
        # Whether its steps need the full sampler's graphs.
        self.full = params.filtered or processing is not None
        self.stream = stream
        self.callback = callback
        self.private = False
        self.phase = Phase.WAITING
        self.placement: Placement | None = None
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_len
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | tuple[int, ...] | None = None
        self.timings = Timings(submitted=submitted)
        self.pauses = 0
        self.acceptance = Acceptance()
        self.cached_tokens = 0
        self.context: Context | None = None
        self.block_keys: list[bytes] | None = None
        self.drafts: tuple[int, ...] = ()
        self.drafts_from = 0
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
    def text(self) -> str:
        """The text so far. The pieces are joined when this is read, if a step has added any."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def reason_to_stop(self) -> int | tuple[int, ...] | None:
        """The stop token or sequence that ends with its last token; None for EOS."""
        token = self.token_ids[-1]
        if token in self.eos_ids:
            return None
        if token in self.params.stop_tokens:
            return token
        sequences = self.params.stop_token_sequences
        ended = (ids for ids in sequences if self.token_ids[-len(ids) :] == list(ids))
        return next(map(tuple, ended))

    def hides(self, stop_token: int) -> bool:
        """Whether this token has no text as it ends the request. Stop sequences keep theirs."""
        if stop_token not in self.eos_ids and stop_token not in self.params.stop_tokens:
            return False
        return not self.params.include_stop_str_in_output

    @property
    def placed(self) -> Placement:
        """The placement of a request that holds a slot."""
        assert self.placement is not None, f"{self!r} holds no slot"
        return self.placement

    @property
    def min_len(self) -> int:
        """Length of the sequence, prompt included, below which no stop id may come."""
        return self.prompt_len + self.params.min_tokens

    @property
    def next_drafts(self) -> tuple[int, ...]:
        """Drafts for the tokens that its next step samples.

        Tokens that came since the proposal are skipped; if one of them differs from the proposal,
        there are no drafts.
        """
        came = len(self.token_ids) - self.drafts_from
        if not came or not self.drafts:
            return self.drafts
        said = tuple(self.token_ids[self.drafts_from : self.drafts_from + len(self.drafts)])
        return self.drafts[came:] if said == self.drafts[:came] else ()

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
        text = self.text
        ends = () if self.stream is None else accumulate(self.stream.lengths)
        return Result(
            request_id=self.id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=text,
            text_ends=tuple(min(end, len(text)) for end in ends),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            timings=self.timings,
            acceptance=self.acceptance,
            cached_tokens=self.cached_tokens,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
