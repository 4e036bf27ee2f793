"""The engine's record of a request, next to the handle that the caller holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphengine.options.code_sampling import DrawnCode
from graphengine.prompt_embeds import NO_EMBEDS, Embeds
from graphengine.requests.caller_drafts import NO_DRAFTS, CallerDrafts
from graphengine.requests.stop_tokens import Stops

if TYPE_CHECKING:
    from torch import Tensor

    from graphengine.requests.adapters import LoadedAdapter
    from graphengine.requests.context import Context, HeldRing, SharedPrompt, StateCheckpoint
    from graphengine.requests.frames import StreamedRows
    from graphengine.requests.grammars import AnyGuide
    from graphengine.requests.processing import Processing
    from graphengine.requests.routes import RecordedRoutes
    from graphengine.routing_record import Ids
    from graphengine.text.tokenizer import TextStream

Frame = tuple[tuple[int, ...] | None, tuple[float, ...] | None]
"""The codes of a frame and their log-probabilities; None where there are none."""
NO_FRAME: Frame = (None, None)


@dataclass(kw_only=True, slots=True)
class Placement:
    """The resources that the scheduler has allocated to a request. Only the scheduler changes them.

    slot           its row in every per-slot tensor, for the request's whole life
    epoch          identifies this use of the slot; a record with another epoch is ignored
    reach          most positions that it and its drafter can write
    blocks         pool blocks of positions 0, block_size, ...; empty while paused. Other requests
                   may share the first of them
    swap_blocks    host blocks while paused
    ring           the ring with its KV, paused or not; None if there are no rings
    states         states of recurrent layers that were kept while its prompt was fed; its session
                   gets them
    prefilled      prompt tokens whose prefill was launched or not needed
    noted          prompt tokens whose prefill was not needed, and that were noted on the device or
                   need not be
    begun          whether a chunk of its prompt has been launched
    indexed        blocks of the prompt that are in the index of prefixes, or must not be
    least          fewest tokens sampled once all launches have run: one for each step
    in_doubt       drafts in flight; up to as many more tokens may have been sampled
    """

    slot: int
    epoch: int
    reach: int
    blocks: list[int] = field(default_factory=list)
    swap_blocks: list[int] = field(default_factory=list)
    ring: HeldRing | None = None
    states: list[StateCheckpoint] = field(default_factory=list)
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

    @property
    def kv_len(self) -> int:
        """Most tokens whose KV is written once all launches have run. It may exceed the request's
        length, which the scheduler's `_reach` takes into account.
        """
        if not self.least:
            return self.prefilled
        # The last sampled token has no KV.
        return self.prefilled + self.least + self.in_doubt - 1


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """The scheduler's record of a request, with the objects that track its output.

    For the scheduler, and for the fields that it loads to the device:

    prompt_len   tokens of the prompt
    embeds       embeddings of the prompt, at positions without a token
    rope_shift   row of RoPE's tables minus position, past the prompt
    adapter      the adapter that all its tokens go through; None: the base model alone
    max_len      most tokens of prompt and output; `max_new_tokens` of output alone
    min_tokens   tokens of output before any stop token may end it; `min_len` includes the prompt
    stops        its stop tokens
    processing   its options on logits; None without any
    full         whether its steps need the full sampler's graphs
    deadline     `time.perf_counter()` after which it is late; None: never
    context      the KV that its session keeps, if it is a turn of one
    shared       the KV of its prompt, if it is one of several samples of it
    placement    the resources allocated to it; None while it holds no slot
    halted       whether the device has ended it: no later launch feeds a token of it
    block_keys   keys of the prompt's blocks, for finding prefixes; None until they are made
    prompt_rows  its caller's float32 [prompt_len, vocabulary], which gets log-probabilities
    given_routes ids [T, L, k] of experts that its tokens take; None: the router's choice
    scores       whether only its prompt is scored: the one token that its prefill samples is
                 dropped

    For its output:

    stream       turns tokens into text and finds stop strings; None without a tokenizer
    guide        its state in a grammar; None without one
    forcible     whether its caller may choose its next token
    forced       the token that its next step emits, whatever the model says; None: none
    drafts       draft tokens that its caller proposes
    routes       the experts that its tokens took; None if they are not recorded
    private      whether only its callback gets its events: no step returns them
    tokens       the tokens of output so far
    codes        the codes of each token's frame; None where a step emits tokens
    codes_logprobs
                 their log-probabilities; None where the caller asks for none
    frame_size   codes of a frame; 0 where a step emits tokens
    given_codes  int16 [F, K]: codes of its first frames, -1 for those that are drawn; None: all are
    drawn_codes  how each code after a frame's first is drawn
    streamed     the embeddings that stream into its frames; None: the model takes none
    """

    prompt_len: int
    max_len: int
    max_new_tokens: int = field(init=False)
    min_tokens: int = 0
    stops: Stops = field(default_factory=Stops)
    embeds: Embeds = NO_EMBEDS
    rope_shift: int = 0
    adapter: LoadedAdapter | None = None
    processing: Processing | None = None
    full: bool = False
    deadline: float | None = None
    context: Context | None = None
    shared: SharedPrompt | None = None
    placement: Placement | None = None
    halted: bool = False
    block_keys: list[bytes] | None = None
    prompt_rows: Tensor | None = None
    given_routes: Ids | None = None
    scores: bool = False
    stream: TextStream | None = None
    guide: AnyGuide | None = None
    forcible: bool = False
    forced: int | None = None
    drafts: CallerDrafts = NO_DRAFTS
    routes: RecordedRoutes | None = None
    private: bool = False
    tokens: list[int] = field(default_factory=list)
    codes: list[tuple[int, ...]] | None = None
    codes_logprobs: list[tuple[float, ...]] | None = None
    frame_size: int = 0
    given_codes: NDArray[np.int16] | None = None
    drawn_codes: tuple[DrawnCode, ...] = ()
    streamed: StreamedRows | None = None

    def __post_init__(self) -> None:
        self.max_new_tokens = self.max_len - self.prompt_len

    @property
    def placed(self) -> Placement:
        """The placement of a request that holds a slot."""
        assert self.placement is not None, f"a request of {self.prompt_len=} holds no slot"
        return self.placement

    @property
    def last_frame(self) -> Frame:
        """The frame of the newest token."""
        last, codes, logprobs = len(self.tokens) - 1, self.codes, self.codes_logprobs
        return (
            None if codes is None else codes[last],
            None if logprobs is None else logprobs[last],
        )

    def end(self) -> None:
        """Give back what a finished request no longer uses: its handle may live long."""
        self.block_keys = None
        self.embeds = NO_EMBEDS
        if self.streamed is not None:
            self.streamed.forget()
        if self.guide is not None:
            self.guide.release()

    @property
    def guided(self) -> bool:
        """Whether the host must read each of its tokens before it launches its next step."""
        return self.forcible or (self.guide is not None and self.guide.where == "host")

    @property
    def waits(self) -> bool:
        """Whether its next step depends on a token that the host has not read yet."""
        return self.guided and self.placed.most > len(self.tokens)

    @property
    def followed(self) -> bool:
        """Whether the device follows its grammar."""
        return self.guide is not None and self.guide.where == "device"

    @property
    def can_sample(self) -> bool:
        """Whether the request may get another token, as far as the host can tell."""
        return self.placed.least < self.max_new_tokens

    @property
    def min_len(self) -> int:
        """Length of the sequence, prompt included, before which no stop id may be sampled."""
        return self.prompt_len + self.min_tokens
