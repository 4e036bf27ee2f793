"""State checkpoints, from which requests of a model with recurrent layers can continue.

A recurrent state depends on every token before it, so KV is usable only together with the states
after it. A checkpoint has both: a place with the states of all recurrent layers after some tokens,
and the blocks with these tokens' KV. Any number of tokens is possible, so the last block may hold
only a few; a request that continues there copies that block, and writes into the copy.

Checkpoints are made where a turn of a session ends. As long as no better one needs the place, they
are also made where a chunk of its prompt ends, for turns that rewind to there. With prefix caching
they are also made for prompts that begin with the same tokens. All are copied on the device, in the
order in which replays are launched: this file only lists the copies, in `before` and `after` the
next replays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from graphengine.host.block_pool import BlockPool
from graphengine.requests.context import Context, SharedPrompt, StateCheckpoint, StateHolder
from graphengine.requests.request import Request


class StateCopy(NamedTuple):
    """A copy of the states after `position` tokens, from a slot to a place, or `back`."""

    place: int
    slot: int
    position: int
    back: bool


class BlockCopy(NamedTuple):
    """A copy of a block in every cache."""

    source: int
    destination: int


Copy = StateCopy | BlockCopy


class StateCheckpoints:
    """All state checkpoints, and their holders.

    count         number of places
    pool          the blocks of the KV cache
    tokens_after  see `Reuse`
    prefixes      whether prompts find states of earlier prompts by their tokens
    counters      where `states/...` and `sessions/evicted` are counted
    before        copies to be queued before the next replays, in this order
    after         copies to be queued after them, in this order
    """

    def __init__(
        self,
        count: int,
        pool: BlockPool,
        *,
        block_size: int,
        tokens_after: int,
        prefixes: bool,
        counters: Counter[str],
    ) -> None:
        self.count = count
        self.before: list[Copy] = []
        self.after: list[Copy] = []
        self._pool = pool
        self._block_size = block_size
        self._tokens_after = tokens_after
        self._prefixes = prefixes
        self._counters = counters
        self._vacant = list(range(count - 1, -1, -1))
        # The most recently used states are at the end.
        self._held: dict[StateCheckpoint, None] = {}

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def held(self) -> tuple[StateCheckpoint, ...]:
        """All state checkpoints, least recently used first."""
        return tuple(self._held)

    def is_awaited(self, state: StateCheckpoint) -> bool:
        """Whether the next replays compute the state, and so nothing can be copied from it yet."""
        return any(isinstance(copy, StateCopy) and copy.place == state.place for copy in self.after)

    # Requests.

    def newest(self, context: Context | None, tokens: int) -> StateCheckpoint | None:
        """The session's newest state that a turn of `tokens` tokens can continue from, with at
        least one token left to feed.
        """
        states = () if context is None else context.states
        return next((state for state in reversed(states) if state.position < tokens), None)

    def find(self, request: Request) -> StateCheckpoint | None:
        """The state of the prompt's longest prefix in the index, with at least one token left to
        feed.
        """
        if not self._prefixes or not any(state.tokens for state in self._held):
            return None
        prompt = _as_bytes(request)
        found = [
            state
            for state in self._held
            if state.tokens is not None
            and state.position < request.job.prompt_len
            and prompt.startswith(state.tokens)
        ]
        return max(found, key=lambda state: state.position, default=None)

    def go_on(self, request: Request, state: StateCheckpoint) -> None:
        """Queue copies of the states to the slot of a request that shares the state's whole blocks,
        and of the rest of its KV to the request's next block.

        The state may have been evicted since it was found, to make room for the request's own
        blocks: these copies run before anything is written.
        """
        placement = request.job.placed
        self.before.append(
            StateCopy(place=state.place, slot=placement.slot, position=state.position, back=True)
        )
        whole, rest = divmod(state.position, self._block_size)
        if rest:
            self.before.append(BlockCopy(state.blocks[whole], placement.blocks[whole]))

    def fed(self, request: Request, *, indexed: bool, fork: int) -> None:
        """Keep a state after the prompt's chunk that ends at `prefilled` and is about to be
        launched.

        indexed  whether other prompts may find the state: it includes no tokens of a reply
        fork     tokens that samples of the prompt share
        """
        self._keep_point(request, indexed=indexed, fork=fork)
        placement = request.job.placed
        if not (indexed and self._prefixes):
            return
        for state in placement.states:
            # Until these tokens are fed, a drafter has not finished writing its entries.
            depends = state.position + self._tokens_after
            if state.tokens is None and depends <= placement.prefilled:
                tokens = _as_bytes(request)[: 8 * depends]
                if self._with_tokens(tokens) is None:
                    state.tokens = tokens

    def _keep_point(self, request: Request, *, indexed: bool, fork: int) -> None:
        job, placement = request.job, request.job.placed
        shared = job.shared
        if shared is not None and (shared.closed or placement.prefilled != fork):
            shared = None
        position = placement.prefilled
        depends = position + self._tokens_after
        for_all = indexed and self._prefixes and depends <= job.prompt_len
        if not for_all and job.context is None and shared is None:
            return
        if for_all:
            same = self._with_tokens(_as_bytes(request)[: 8 * depends])
            if same is not None:
                self.touch(same)
                self._give(same, placement)
                if shared is not None:
                    self._give(same, shared)
                return
        whole, rest = divmod(position, self._block_size)
        # A copy would lack what a drafter writes into the last entries once it sees the tokens
        # after them.
        if rest and (self._tokens_after or job.routes is not None or not self._pool.free):
            return
        place = self._place(most=1 if for_all or shared is not None else 0)
        if place is None:
            return
        self.after.append(
            StateCopy(place=place, slot=placement.slot, position=position, back=False)
        )
        blocks, copied = placement.blocks[:whole], []
        if rest:
            copied = self._pool.take(1)
            self.after.append(BlockCopy(placement.blocks[whole], copied[0]))
        state = StateCheckpoint(position=position, place=place, blocks=blocks + copied)
        self._add(state)
        self._give(state, placement)
        if shared is not None:
            self._give(state, shared)
        self._pool.give_back(copied)

    def _with_tokens(self, tokens: bytes) -> StateCheckpoint | None:
        return next((state for state in self._held if state.tokens == tokens), None)

    def ended(self, request: Request, *, good: bool) -> None:
        """Pass on a request's states before its slot and blocks are given back.

        good  whether its session gets the states that it has kept, and the one where it ended
        """
        job, placement = request.job, request.job.placed
        context = job.context
        if good and context is not None:
            # The last sampled token has not been fed.
            position = job.prompt_len + len(request.job.tokens) - 1
            if placement.prefilled == job.prompt_len and self._is_there(request):
                self._keep_end(request, context, position)
            for state in placement.states:
                if state.position + self._tokens_after <= position + 1:
                    self._give(state, context)
        for state in tuple(placement.states):
            self._take(state, placement)

    def _is_there(self, request: Request) -> bool:
        """Whether the slot still has the states after all tokens but the last.

        They are lost if only the host has ended the request, and launches ahead have continued it.
        """
        placement, known = request.job.placed, len(request.job.tokens)
        idle = placement.least == known and not placement.in_doubt
        return known > 0 and (request.job.halted or idle)

    def _keep_end(self, request: Request, context: Context, position: int) -> None:
        blocks = request.job.placed.blocks[: -(-position // self._block_size)]
        known = position + 1
        if (
            len(blocks) * self._block_size < position
            or position + self._tokens_after > known
            or any(state.position == position for state in request.job.placed.states)
            or (self._pool.max_idle is not None and len(blocks) > self._pool.max_idle)
        ):
            return
        if not self._vacant and context.states and context.states[0].holders == [context]:
            # Give up the session's own oldest state, to which it will hardly rewind, rather than
            # evict another session's.
            self._take(context.states[0], context)
        place = self._place(most=2)
        if place is not None:
            slot = request.job.placed.slot
            self.before.append(StateCopy(place=place, slot=slot, position=position, back=False))
            state = StateCheckpoint(position=position, place=place, blocks=blocks)
            self._add(state)
            self._give(state, context)

    # Sessions.

    def usable(self, context: Context, tokens: int) -> StateCheckpoint | None:
        """The session's newest state that does not depend on tokens past the first `tokens`."""
        most = tokens - self._tokens_after
        return next((state for state in reversed(context.states) if state.position <= most), None)

    def cut(self, context: Context, tokens: int) -> None:
        """Let go of states that depend on more than the first `tokens` tokens, and count the tokens
        that must be fed again, because no state is kept after the last of them.
        """
        newest = self.usable(context, tokens)
        had = bool(context.states)
        while context.states and context.states[-1] is not newest:
            self._take(context.states[-1], context)
        if had:
            kept = 0 if newest is None else newest.position
            self._counters["states/rewound_past"] += tokens - kept

    def share(self, source: Context, other: Context) -> None:
        """Let another session hold the same states."""
        for state in source.states:
            self._give(state, other)

    def adopt(self, context: Context, position: int, blocks: Sequence[int]) -> StateCheckpoint:
        """A new state of a session; the caller fills its place and blocks at once."""
        place = self._place(most=2)
        assert place is not None, f"{self.count} places"
        state = StateCheckpoint(position=position, place=place, blocks=list(blocks))
        self._add(state)
        self._give(state, context)
        return state

    def close(self, context: Context) -> None:
        """Let go of all states of the session."""
        for state in tuple(context.states):
            self._take(state, context)

    def clear(self) -> None:
        """Let go of all states."""
        for state in tuple(self._held):
            state.tokens = None
            for holder in tuple(state.holders):
                holder.states.remove(state)
            state.holders.clear()
            self._drop(state)

    # Making room.

    def evict_blocks(self, enough: int) -> None:
        """Evict states, least valuable first, until this many blocks are vacant."""
        pool = self._pool
        while pool.vacant < enough:
            idle = (each for each in self._held if any(block in pool.idle for block in each.blocks))
            self._evict(min(idle, key=_worth))

    def evict_all(self) -> None:
        """Evict all states; sessions that lose theirs are marked as evicted."""
        for state in tuple(self._held):
            self._evict(state)

    def _place(self, *, most: int) -> int | None:
        """A vacant place, or the place of the least valuable state if it is worth at most `most`;
        else None.
        """
        if not self._vacant:
            least = min(self._held, key=_worth, default=None)
            if least is None or _worth(least) > most:
                return None
            self._evict(least)
        return self._vacant.pop()

    def _evict(self, state: StateCheckpoint) -> None:
        self._counters["states/evicted"] += 1
        state.tokens = None
        for holder in tuple(state.holders):
            self._take(state, holder)
            if isinstance(holder, Context) and not holder.states:
                holder.evicted = True
                self._counters["sessions/evicted"] += not isinstance(holder, SharedPrompt)
        if state in self._held:
            self._drop(state)

    def touch(self, state: StateCheckpoint) -> None:
        """Mark the state as most recently used."""
        del self._held[state]
        self._held[state] = None

    def _add(self, state: StateCheckpoint) -> None:
        self._counters["states/kept"] += 1
        self._pool.keep(state.blocks)
        self._held[state] = None

    def _give(self, state: StateCheckpoint, holder: StateHolder) -> None:
        """Add the state to a holder's, which are sorted by position, unless it has one of the same
        position.

        A session's states all follow its tokens, so two of one position are equal.
        """
        positions = [each.position for each in holder.states]
        if state.position in positions:
            return
        at = sum(position < state.position for position in positions)
        holder.states.insert(at, state)
        state.holders.append(holder)
        if isinstance(holder, Context):
            holder.evicted = False

    def _take(self, state: StateCheckpoint, holder: StateHolder) -> None:
        holder.states.remove(state)
        state.holders = [each for each in state.holders if each is not holder]
        if not state.holders and state.tokens is None:
            self._drop(state)

    def _drop(self, state: StateCheckpoint) -> None:
        del self._held[state]
        self._vacant.append(state.place)
        self._pool.let_go(state.blocks)


def _worth(state: StateCheckpoint) -> int:
    """The value of a state: 2 at the end of a session, 1 of a prefix, 0 at a point in between."""
    if any(isinstance(each, Context) and each.states[-1] is state for each in state.holders):
        return 2
    return 0 if state.tokens is None else 1


def _as_bytes(request: Request) -> bytes:
    """The prompt as bytes; made once."""
    keys = request.job.block_keys
    if keys is None:
        keys = request.job.block_keys = [request.identity().tobytes()]
    return keys[0]
