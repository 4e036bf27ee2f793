"""A conversation whose KV stays on the device from one turn to the next.

    with engine.session() as session:
        session.append("def fib(n):")
        first = session.generate(params)
        session.append("\\n\\ndef fact(n):")
        second = session.generate(params)  # prefills what was appended, and a block's rest

A session is its tokens, and blocks of KV for the first of them. A turn is a request whose prompt is
all of the tokens; it starts with the session's blocks, prefills the rest, and leaves its own blocks
to the session. So a turn's output is that of a request with the whole conversation as its prompt,
except for last bits: the KV of earlier replies was written by the decode kernels, and on a GPU a
prompt's last bits depend on where its chunks begin and how long they are.

Layers with windows may keep only their newest tokens (`host/rings.py`). A session then keeps the
ring of its last turn, and has no blocks without it. Its next turn prefills everything if another
request has taken the ring, or if a rewind goes back further than the ring reaches.

The states of recurrent layers depend on every token, and a session goes on only where they have
been kept (`host/state_checkpoints.py`): at the ends of its turns, and at some points on the way;
`session_states` limits how many all sessions have together. When the host alone ends a turn, as at
a stop string, the device has passed the end before the host notices it, and the reply is prefilled
again; with `lookahead` 0 it has not. No states are kept with window rings, or with a draft model
that has recurrent layers itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from torch import Tensor

from graphengine.core import runs
from graphengine.core.engine_core import EngineCore
from graphengine.core.intake import QueueOptions, check_queue_options
from graphengine.core.snapshots import SessionSnapshot, copy_out
from graphengine.host.reuse import Reuse
from graphengine.models.inner.given_frames import embed_frames
from graphengine.options.checks import is_int
from graphengine.prompt_embeds import (
    EMBEDDED,
    NO_EMBEDS,
    Embeds,
    PromptTokens,
    Run,
)
from graphengine.prompts import Prompt, token_ids_of
from graphengine.requests.context import Context
from graphengine.requests.request import Event, Request
from graphengine.requests.result import Result
from graphengine.sampling_params import SamplingParams


class Session:
    """Tokens that grow turn by turn, and the KV of the first of them. `Engine.session` makes one.

    Between turns its blocks are idle: when other requests need them they are taken (`Reuse.evict`
    says in which order). Then the session is `evicted`, and its next turn prefills everything
    again. Its tokens are never lost. A session with more than `session_blocks` blocks keeps only
    the first ones.

    One turn runs at a time. Until it ends, every call that would change the session or read its KV
    is a ValueError, and `token_ids` and `len` are as they were when the turn began. Once the
    session or its engine is closed, every such call is a ValueError, too.
    """

    def __init__(
        self,
        core: EngineCore,
        tokens: list[int],
        context: Context,
        embeds: Embeds = NO_EMBEDS,
        adapter: str | None = None,
    ) -> None:
        self._adapter = adapter
        # Which load of the adapter the kept KV is of; 0: of the base model alone.
        self._generation = 0
        self._core = core
        self._tokens = tokens
        self._embeds = embeds
        self._context = context
        self._turn: Request | None = None

    def __len__(self) -> int:
        """Tokens of the conversation."""
        self._settle()
        return len(self._tokens)

    def __repr__(self) -> str:
        return (
            f"Session(tokens={len(self)}, cached_tokens={self.cached_tokens}, "
            f"evicted={self.evicted}, turn={self._turn!r})"
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of appended prompts and of replies, in order; a copy.

        A reply is included as in `Result.token_ids`, with the token that stopped it: after an
        end-of-sequence token a chat template continues with the next message. A token that a stop
        string ends in the middle is included, too. -1 stands for an embedding, or a frame of codes.
        """
        self._settle()
        return tuple(self._tokens)

    @property
    def adapter(self) -> str | None:
        """The adapter of all turns; None: the base model alone."""
        return self._adapter

    @property
    def turn(self) -> Request | None:
        """The running turn."""
        self._settle()
        return self._turn

    @property
    def _reuse(self) -> Reuse:
        """Manages the kept blocks of the session's rank."""
        return self._core.scheduler.home(self._context).reuse

    @property
    def cached_tokens(self) -> int:
        """Tokens that the next turn need not prefill, as the session has their KV; 0 once closed.

        With `prefix_caching` the turn may find more, if others have prefilled the same tokens.
        """
        return self._reuse.cached_tokens(self._context, len(self))

    @property
    def evicted(self) -> bool:
        """Whether its blocks were evicted, so that the next turn prefills everything.

        `prefix_caching` may still find some of it. False again once a turn has left new blocks.
        """
        return self._context.evicted

    # The conversation.

    def append(self, prompt: Prompt, *, add_bos: bool | None = None) -> None:
        """Add to the end: text, token ids, embeddings, or, to an empty session, chat messages.

        The first text gets the special tokens of a prompt (or those that `add_bos` says). Later
        texts get none, and no leading space from a tokenizer that puts one before a first text.
        Each text is tokenised by itself: a token never spans two pieces. ValueError for an invalid
        prompt, and if the conversation would leave no room in `max_seq_len`.
        """
        self._check_idle()
        self._extend(self._core.intake.session_prompt(prompt, self._tokens, add_bos))

    def update(self, prompt: Prompt) -> None:
        """Make this the conversation: keep the common beginning, rewind to its end, add the rest.

        For chat templates, which tokenise a conversation from all its messages: pass all messages
        so far. Tokens at the beginning that the template did not change are not prefilled again.
        """
        self._check_idle()
        read = self._core.intake.session_prompt(prompt, ())
        same = 0
        held, given = self._embeds.identity(self._tokens), read.embeds.identity(read.ids)
        for known, wanted in zip(held, given, strict=False):
            if known != wanted:
                break
            same += 1
        self.rewind(len(self._tokens) - same)
        self._extend(PromptTokens(read.ids[same:], read.embeds.within(same, len(read.ids))))

    def rewind(self, n_tokens: int) -> None:
        """Remove the last `n_tokens`, of prompts or replies; their KV is dropped by whole blocks.

        Where KV is in rings, it is all dropped if they do not reach back that far. With recurrent
        layers the next turn goes on from the last state checkpoint before that point; the counter
        `states/rewound_past` has the tokens between. To return to a point, remember `len(session)`
        there and rewind by the difference. ValueError unless 0 <= n_tokens <= len(session), and for
        a point inside an image whose embeddings see each other.
        """
        self._check_idle()
        if not is_int(n_tokens) or not 0 <= n_tokens <= len(self._tokens):
            raise ValueError(f"n_tokens={n_tokens!r} must be in [0, {len(self._tokens)}]")
        left = len(self._tokens) - n_tokens
        for first, stop in self._embeds.images():
            if first < left < stop:
                raise ValueError(
                    f"n_tokens={n_tokens} leaves {left} tokens, which end inside an image: its "
                    f"embeddings from {first} to {stop - 1} see each other"
                )
        if n_tokens:
            del self._tokens[-n_tokens:]
            self._embeds = self._embeds.within(0, len(self._tokens))
            self._reuse.cut(self._context, len(self._tokens))

    def fork(self) -> Session:
        """Another session with the same tokens, which shares the blocks: nothing is copied.

        Where KV is in rings (`EngineConfig.window_rings`), the new session has no blocks, as a ring
        has one user: its first turn prefills everything.
        """
        self._check_idle()
        reuse = self._reuse
        context = Context(evicted=self._context.evicted, rank=self._context.rank)
        if self._context.blocks and reuse.rings:
            context.evicted = True
        elif self._context.blocks:
            reuse.give(context, self._context.blocks)
        reuse.states.share(self._context, context)
        other = Session(self._core, list(self._tokens), context, self._embeds, self._adapter)
        other._generation = self._generation
        return other

    # Turns.

    def submit(
        self,
        params: SamplingParams | None = None,
        *,
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[QueueOptions],
    ) -> Request:
        """Queue a turn; arguments and errors as in `Engine.submit`.

        Once it has finished by "stop" or "length", the session includes its tokens. A turn that was
        cancelled, missed its deadline or failed leaves the session as it was: to cut a reply short
        and keep its tokens, call `interrupt`, or end it through `Engine.stop_callback`. ValueError
        for an empty session.
        """
        submitted = time.perf_counter()
        check_queue_options("submit", options)
        self._check_idle()
        if not self._tokens:
            raise ValueError("the session is empty: append a prompt")
        core, limit = self._core, self._core.memory.max_seq_len
        room = params.room if isinstance(params, SamplingParams) else 1
        if len(self._tokens) > limit - room:
            raise ValueError(
                f"a session of {len(self._tokens)} tokens leaves no room for a new one in "
                f"max_seq_len={limit}"
            )
        core.scheduler.check_queue()
        self._settle_adapter(options)
        prompt = PromptTokens(tuple(self._tokens), self._embeds)
        request = core.intake.turn(prompt, params, on_event, submitted=submitted, **options)
        request.job.context = self._context
        core.queue(request)
        self._turn = request
        return request

    def _settle_adapter(self, options: QueueOptions) -> None:
        """Have the turn use the session's adapter; drop KV of another load of it.

        ValueError for another adapter.
        """
        asked = options.setdefault("adapter", self._adapter)
        if asked != self._adapter:
            raise ValueError(
                f"adapter={asked!r}, but the session's KV belongs to adapter {self._adapter!r}: "
                f"open a session for each adapter"
            )
        loaded = self._core.intake.adapters.find(asked)
        generation = 0 if loaded is None else loaded.generation
        if generation != self._generation and (self._context.blocks or self._context.states):
            self._reuse.cut(self._context, 0)
            self._context.evicted = True
        self._generation = generation

    def generate(
        self, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> Result:
        """Run a turn to its end; other requests continue meanwhile, as with `Engine.generate`.

        `QueueFull`, as in `submit`, while the queue is full.
        """
        check_queue_options("generate", options)
        return runs.finish(self._core, partial(self.submit, params, **options))

    def stream(
        self, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> Iterator[Event]:
        """Submit a turn now and yield its events; closing the iterator early cancels it."""
        check_queue_options("stream", options)
        return runs.stream(self._core, partial(self.submit, params, **options))

    def astream(
        self, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> AsyncIterator[Event]:
        """Submit a turn now; `async for` brings its events, as with `Engine.astream`."""
        check_queue_options("astream", options)
        return runs.astream(self._core, partial(self.submit, params, **options))

    def interrupt(self) -> None:
        """End the turn under way at once, by "stop", and keep the part of its reply that was read.

        For a listener who interrupts: the turn's last event comes with the next `step`, its tokens
        in flight are discarded, and the session takes its next `append` and turn right away. If the
        listener heard only a part of the reply, `rewind` removes the rest. `interrupt` does nothing
        if no turn is under way, or if that is cancelled.
        """
        self._core.check_open()
        self._settle()
        if self._turn is not None and self._turn.finish_reason is None:
            self._core.delivery.stop(self._turn)
            self._settle()

    # Life.

    def snapshot(self, path: str | os.PathLike[str] | None = None) -> SessionSnapshot:
        """Copy the whole session to the host, and to a safetensors file if `path` is given.

        Waits for the device. `Engine.restore_session` makes a session from either, in this process
        or another. No KV is copied where layers keep theirs in rings (`EngineConfig.window_rings`):
        the first turn of the restored session prefills everything. OSError where the file cannot be
        written; it appears whole or not at all. ValueError with `data_parallel`, and if the
        session's adapter is not loaded.
        """
        self._check_idle()
        _check_snapshots(self._core)
        # KV of another load of the adapter goes.
        self._settle_adapter({})
        adapter = self._core.intake.adapters.find(self._adapter)
        reuse, context = self._reuse, self._context
        blocks = [] if reuse.rings else context.blocks
        state = context.states[-1] if context.states else None
        made = copy_out(self._core, self._tokens, self._embeds, blocks, state, adapter)
        if path is not None:
            made.save(path)
        return made

    def close(self) -> None:
        """Cancel the turn, if one runs, and release the blocks. May be called again."""
        self._core.check_thread()
        self._settle()
        if self._turn is not None:
            self._turn.cancel()
        self._reuse.close(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _extend(self, prompt: PromptTokens) -> None:
        self._tokens += prompt.ids
        self._embeds = self._embeds.then(prompt.embeds)

    def _settle(self) -> None:
        """Add the tokens of a turn that has finished since."""
        turn = self._turn
        if turn is not None and turn.finished:
            self._turn = None
            if turn.finish_reason in ("stop", "length"):
                self._take(turn)

    def _take(self, turn: Request) -> None:
        """Add a finished turn's tokens; frames are kept as embeddings.

        The frame that ended a turn becomes the frame of end codes, as transformers' processor puts
        it after sound: no step has read its codes.
        """
        said, codes = turn.token_ids, turn.job.codes
        if codes is None:
            self._tokens += said
            return
        inner = self._core.intake.inner
        assert inner is not None, f"{turn!r} has frames"
        frames = codes[: len(said)]
        if not frames:
            return
        if said[-1] == inner.end_token and not turn.params.ignore_eos:
            frames[-1] = (inner.end_code,) * inner.steps
        rows = embed_frames(self._core.runtime.model, frames).cpu()
        self._embeds = self._embeds.then(Embeds((Run(len(self._tokens), rows),)))
        self._tokens += [EMBEDDED] * len(said)

    def _check_idle(self) -> None:
        self._core.check_open()
        if self._context.closed:
            raise ValueError("the session is closed")
        self._settle()
        if self._turn is not None:
            cancelled = self._turn.finish_reason == "cancelled"
            raise ValueError(
                f"a turn of the session is under way, request {self._turn.id}: "
                + ("it is cancelled at the next step()" if cancelled else "it must finish first")
            )


def open_session(core: EngineCore, adapter: str | None = None) -> Session:
    """Implement `Engine.session`."""
    _check_sessions(core)
    core.intake.adapters.find(adapter)
    return Session(core, [], Context(), adapter=adapter)


def restore_session(core: EngineCore, source: SessionSnapshot | str | os.PathLike[str]) -> Session:
    """Implement `Engine.restore_session`."""
    _check_sessions(core)
    _check_snapshots(core)
    if isinstance(source, str | os.PathLike):
        source = SessionSnapshot.load(source)
    if not isinstance(source, SessionSnapshot):
        raise ValueError(f"source={source!r} must be a SessionSnapshot, or the path of one")
    source.check(core)
    vocab_size, limit = core.runtime.model.config.vocab_size, core.memory.max_seq_len
    embeds = source.embeddings(core.intake.embeds)
    tokens = token_ids_of(
        # A position with an embedding is not checked as a token.
        [0 if embeds and token == EMBEDDED else token for token in source.token_ids],
        vocab_size,
        "a session is token ids",
        limit=limit,
        too_many=lambda count: f"a session of {count} tokens exceeds max_seq_len={limit}",
    )
    return session_of(
        core,
        source.token_ids if embeds else tokens,
        source.blocks,
        lambda blocks: core.runtime.write_blocks(blocks, source.caches),
        position=source.position,
        states=source.states,
        embeds=embeds,
        adapter=None if source.adapter is None else source.adapter[0],
    )


def session_of(
    core: EngineCore,
    token_ids: Sequence[int],
    count: int,
    write: Callable[[list[int]], None],
    *,
    position: int = 0,
    states: Sequence[Tensor] = (),
    embeds: Embeds = NO_EMBEDS,
    adapter: str | None = None,
) -> Session:
    """A session of these tokens; `write` fills the `count` blocks that hold its first tokens' KV.

    For a model with recurrent layers the blocks have the KV of the first `position` tokens, and
    `states` are the states after them. ValueError, with both numbers, for more blocks than the pool
    has free or `session_blocks` allows, and for blocks without states.
    """
    loaded, context = core.intake.adapters.find(adapter), Context()
    scheduler = core.scheduler.home(context)
    pool, most, reuse = scheduler.pool, core.config.session_blocks, scheduler.reuse
    if count and reuse.rings:
        raise ValueError(
            f"a session of {count} KV blocks, but layers with windows keep their KV in rings, "
            f"which cannot be filled: open the engine with window_rings=False"
        )
    if count and reuse.states and not position:
        raise ValueError(f"a session of {count} KV blocks has no states of recurrent layers")
    if count > pool.free:
        raise ValueError(
            f"a session of {count} KV blocks, but {pool.free} of the pool's {pool.count} are free"
        )
    if most is not None and count > most:
        raise ValueError(f"a session of {count} KV blocks exceeds session_blocks={most}")
    if count:
        blocks = pool.take(count)
        try:
            # Pending copies may read the old contents of these blocks or places.
            core.runtime.copy_states(reuse.states.before)
            write(blocks)
            if position:
                state = reuse.states.adopt(context, position, blocks)
                core.runtime.write_states(state.place, states)
            else:
                reuse.give(context, blocks)
        finally:
            pool.give_back(blocks)
    made = Session(core, list(token_ids), context, embeds, adapter)
    made._generation = 0 if loaded is None else loaded.generation
    return made


def _check_sessions(core: EngineCore) -> None:
    core.check_open()
    if core.needs.prompts_only:
        raise ValueError(
            f"speculative={core.config.speculative!r} needs whole prompts: it has no sessions"
        )
    if core.intake.inner is not None and core.intake.inner.fed:
        raise ValueError(
            "embeddings stream into the frames of this model: it has no sessions, give earlier "
            "turns as embeddings in the prompt"
        )
    if core.intake.inner is not None and core.intake.embeds is None:
        raise ValueError(
            f"each step of this model emits a frame of {core.intake.inner.steps} codes, which "
            f"sessions keep as embeddings: open the engine with prompt_embeds=True"
        )


def _check_snapshots(core: EngineCore) -> None:
    ranks = core.config.data_parallel
    if ranks > 1:
        raise ValueError(f"data_parallel={ranks}: sessions stay on their ranks, without snapshots")
