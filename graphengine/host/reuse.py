"""Reuse of KV blocks: which are kept for sessions, prefixes and samples of one prompt, and which
requests begin with them.

Only whole blocks are reused, and only blocks that hold, at every position, what a prefill of the
same tokens would write there. The entries of a position may depend on tokens after it:
`tokens_after` is how many, 0 in the target's cache, more in the cache of a drafter that looks
ahead. Nothing writes into a reused block, except a drafter of several modules, which writes the
values that are there already.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from graphengine.host.block_pool import BlockPool
from graphengine.host.rings import NO_RINGS, WindowRings
from graphengine.host.state_checkpoints import StateCheckpoints
from graphengine.requests.context import Context, HeldRing, SharedPrompt, StateCheckpoint
from graphengine.requests.job import Job
from graphengine.requests.request import Request


def _needs_every_token(request: Request) -> bool:
    """Whether the request's whole prompt must be prefilled.

    The log-probabilities of a prompt need the logits after each of its tokens, and replayed experts
    lead to other KV than the router's.
    """
    return request.params.prompt_logprobs is not None or request.job.given_routes is not None


class CachedPrefix(NamedTuple):
    """The part of a prompt that a request need not compute.

    blocks  whole blocks of its first tokens, to be shared
    tokens  how many tokens it skips, all but one at most
    own     whether its session kept them
    state   the state checkpoint to copy from: the recurrent states after these tokens, and their KV
            that `blocks` do not have
    """

    blocks: list[int]
    tokens: int
    own: bool
    state: StateCheckpoint | None = None


class Reuse:
    """Decides which blocks a request begins with, and what happens to its blocks when it ends.

    pool          the blocks of the KV cache
    tokens_after  tokens after a position that its entries in the engine's caches depend on
    prefixes      whether prompts find blocks of earlier prompts by their tokens
    counters      where `prefix/...` and `sessions/...` are counted
    rings         rings with the KV of layers with a window, which is not in the pool
    state_places  most state checkpoints of recurrent layers; 0 also for a model without such layers

    If KV is in rings, a session's blocks are usable only together with its ring: `reusable` says
    how many are. No prefix can then be shared.

    A prefix is found by a chain of SHA-256: a block's key is the hash of the previous block's key,
    the block's tokens, and the `tokens_after` tokens that follow, so equal keys mean equal entries.
    The index has only blocks that prefill has written as a whole. The blocks of a reply are written
    by the decode kernels and may differ in their last bits, so a turn of a session that builds on a
    reply adds none.

    With state checkpoints (`state_checkpoints.py`), sessions and prefixes keep only the blocks of
    their checkpoints.

    Samples of one prompt begin with its whole blocks, up to `fork`. They feed the rest themselves,
    as each draws its own first token: that takes one replay, as a copy of the rest would.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        tokens_after: int,
        prefixes: bool,
        counters: Counter[str],
        rings: WindowRings = NO_RINGS,
        state_places: int = 0,
    ) -> None:
        assert not ((prefixes or state_places) and rings), "a ring holds no prefix, and no state"
        self.prefixes = prefixes
        self.rings = rings
        self.contexts: dict[Context, None] = {}
        self.states = StateCheckpoints(
            state_places,
            pool,
            block_size=block_size,
            tokens_after=tokens_after,
            prefixes=prefixes,
            counters=counters,
        )
        self._pool = pool
        self._block_size = block_size
        self._tokens_after = tokens_after
        self._counters = counters
        self._block_of: dict[bytes, int] = {}
        self._key_of = pool.indexed
        pool.evict = self.evict

    # Calls of the scheduler, in the order of a request's life.

    def begin_with(self, request: Request) -> CachedPrefix:
        """What is kept of the request's first tokens: by its session or another sample of its
        prompt, or in the prefix index if that has more of the prompt.
        """
        if self.states:
            return self._state_for(request)
        shared = self._of_samples(request)
        found, context = self.find(request), request.job.context
        if context is not None and not _needs_every_token(request):
            own = self.reusable(context, request.job.prompt_len)
            if own and len(own) >= len(found):
                return CachedPrefix(own, len(own) * self._block_size, own=True)
        if len(shared) > len(found):
            found = shared
        return CachedPrefix(found, len(found) * self._block_size, own=False)

    def _state_for(self, request: Request) -> CachedPrefix:
        if _needs_every_token(request):
            return CachedPrefix([], 0, own=False)
        own = self.states.newest(request.job.context, request.job.prompt_len)
        shared = self.states.newest(request.job.shared, request.job.prompt_len)
        found = self.states.find(request)
        if shared is not None and (found is None or shared.position > found.position):
            found = shared
        state = found
        if own is not None and (found is None or own.position >= found.position):
            state = own
        if state is None:
            return CachedPrefix([], 0, own=False)
        whole = state.position // self._block_size
        return CachedPrefix(state.blocks[:whole], state.position, state is own, state)

    def touch_cached(self, request: Request, cached: CachedPrefix) -> None:
        """Mark what a request has cached, and its session, as most recently used."""
        if request.job.context is not None:
            self.touch(request.job.context)
        if cached.state is not None:
            self.states.touch(cached.state)

    def begin(self, request: Request, cached: CachedPrefix) -> None:
        """Give a request that has just got these blocks the rest: its states and its routes."""
        if request.job.shared is not None:
            more = cached.tokens - request.cached_tokens
            self._counters["samples/shared_tokens"] += more
        request.cached_tokens = cached.tokens
        if cached.state is not None:
            self.states.go_on(request, cached.state)
        self._share_routes(request, cached)
        if cached.own:
            self._counters["sessions/reused_tokens"] += cached.tokens
            # Blocks that follow a reply's are not the prefill of their tokens alone: not indexed.
            request.job.placed.indexed = request.job.prompt_len

    def cached_tokens(self, context: Context, tokens: int) -> int:
        """Tokens that a turn of `tokens` tokens need not compute, thanks to its session."""
        if self.states:
            state = self.states.newest(context, tokens)
            return 0 if state is None else state.position
        return len(self.reusable(context, tokens)) * self._block_size

    def reusable(self, context: Context, tokens: int) -> list[int]:
        """Blocks of a session that a turn of this many tokens can begin with."""
        count = min(len(context.blocks), max(0, tokens - 1) // self._block_size)
        return context.blocks[: self.rings.reusable(context.ring, count)]

    def find(self, request: Request) -> list[int]:
        """Blocks in the index for the request's first tokens, at most all tokens but one."""
        if not self.prefixes or _needs_every_token(request):
            return []
        found = []
        for key in self._keys(request)[: self._most(request.job)]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # Samples of one prompt.

    def fork(self, job: Job) -> int:
        """Tokens of a prompt that its samples share: those of whole blocks whose entries depend
        only on the prompt, and at least one less than the prompt has.
        """
        return self._block_size * min(self.whole_blocks(job.prompt_len), self._most(job))

    def stop(self, job: Job, start: int) -> int:
        """Where the chunks of a prompt from `start` on end: at its end, or at the fork of samples
        that take over recurrent states there.
        """
        fork = 0 if job.shared is None or not self.states else self.fork(job)
        return fork if start < fork else job.prompt_len

    def _of_samples(self, request: Request) -> list[int]:
        """The blocks that another sample of the request's prompt has filled."""
        shared = request.job.shared
        if shared is None or self.rings:
            return []
        return shared.blocks[: self._most(request.job)]

    def _share(self, request: Request) -> None:
        """Let other samples begin with the prompt's blocks that are filled once `prefilled` tokens
        have been fed.
        """
        job, shared = request.job, request.job.shared
        if shared is None or shared.closed or self.rings or job.given_routes is not None:
            return
        count = self.whole_blocks(min(job.placed.prefilled, self.fork(job) + self._tokens_after))
        if count > len(shared.blocks):
            self._keep_routes(request, len(shared.blocks), count)
            self.give(shared, job.placed.blocks[:count])

    def leave(self, request: Request) -> None:
        """Note that a sample has begun or ended; the last one closes what they share."""
        shared = request.job.shared
        if shared is not None and request.id in shared.waiting:
            shared.waiting.remove(request.id)
            if not shared.waiting:
                self.close(shared)

    def _share_routes(self, request: Request, cached: CachedPrefix) -> None:
        """Give the request the recorded experts of the blocks that it begins with."""
        routes = request.job.routes
        if routes is None:
            return
        pages = [self._pool.routes.get(block) for block in cached.blocks]
        if cached.tokens > len(pages) * self._block_size:
            assert cached.state is not None, f"{cached=}"
            rest = self._pool.routes.get(cached.state.blocks[len(pages)])
            pages.append(None if rest is None else rest.copy())
        routes.share(pages)

    def _keep_routes(self, request: Request, first: int, last: int) -> None:
        """Keep the recorded experts of the request's blocks `first .. last - 1` with the blocks."""
        routes = request.job.routes
        if routes is not None:
            pages = routes.pages_until(last)[first:]
            self._pool.routes |= zip(request.job.placed.blocks[first:last], pages, strict=True)

    def begun(self, request: Request) -> None:
        """Count the prefix query of a request that is about to be prefilled, and its hit; set the
        first block that it may index.
        """
        cached = request.cached_tokens
        request.job.placed.indexed = cached // self._block_size
        if request.job.given_routes is not None:
            # Its KV is not what the router itself leads to, so none of it is indexed.
            request.job.placed.indexed = request.job.prompt_len
        if not _needs_every_token(request):
            self._counters["prefix/queries"] += 1
            self._counters["prefix/queried_tokens"] += request.job.prompt_len
            self._counters["prefix/hits"] += cached > 0
            self._counters["prefix/hit_tokens"] += cached

    def fed(self, request: Request) -> None:
        """Keep the KV of the prompt's chunks up to `prefilled`, in the index, as a state or for
        other samples. The last of these chunks is about to be launched.
        """
        placement = request.job.placed
        if self.states:
            if request.job.given_routes is None:
                indexed = placement.indexed < request.job.prompt_len
                self.states.fed(request, indexed=indexed, fork=self.fork(request.job))
                self._keep_routes(request, 0, placement.prefilled // self._block_size)
            return
        self._share(request)
        if not self.prefixes:
            return
        done = (placement.prefilled - self._tokens_after) // self._block_size
        if done <= placement.indexed:
            return
        keys = self._keys(request)
        for index in range(placement.indexed, min(done, len(keys))):
            key, block = keys[index], placement.blocks[index]
            if key not in self._block_of:
                self._block_of[key], self._key_of[block] = block, key
                self._pool.keep([block])
                self._keep_routes(request, index, index + 1)
        placement.indexed = done

    def ended(self, request: Request) -> None:
        """Hand a finished turn's blocks to its session; the request is still one of their users.

        Replays in flight write only after the part that is handed over. A turn that was cancelled,
        late or failed leaves the session as it was. So does a turn with nothing more to hand over:
        one that was stopped during its prefill, or that ends while it is paused and its blocks are
        not in the pool. So does a turn that replayed recorded experts, as its KV is not what the
        router itself leads to.
        """
        job, placement = request.job, request.job.placed
        context, blocks = job.context, placement.blocks
        if self.states:
            self._end_states(request)
            return
        if context is None or context.closed or request.finish_reason not in ("stop", "length"):
            return
        if job.given_routes is not None:
            return
        self.touch(context)
        fed = placement.prefilled
        known = fed if fed < job.prompt_len else job.prompt_len + len(request.job.tokens)
        # The last sampled token has no KV.
        count = self.whole_blocks(known - 1 + min(1, self._tokens_after))
        if len(blocks) >= count > len(context.blocks):
            self._keep_routes(request, 0, count)
            self.give(context, blocks[:count])

    def _end_states(self, request: Request) -> None:
        job, context = request.job, request.job.context
        ended_well = request.finish_reason in ("stop", "length") and job.given_routes is None
        good = context is not None and not context.closed and ended_well
        self.states.ended(request, good=good)
        if good and job.routes is not None:
            for state in context.states if context is not None else ():
                if state.blocks == job.placed.blocks[: len(state.blocks)]:
                    self._keep_routes(request, 0, len(state.blocks))

    # Rings.

    def take_ring(self, request: Request, *, own: bool) -> HeldRing | None:
        """A ring for a request that is admitted: its session's, or a vacant one.

        Each request in a slot has one, and there are as many rings as slots. So either one is
        vacant, or idle sessions keep some and the least recently used of them is evicted.
        A turn that replays recorded experts gets another ring than its session's, as its KV is not
        what the router itself leads to.

        own  whether the request continues in its session's ring; otherwise it begins there at 0
        """
        if not self.rings:
            return None
        job = request.job
        context = job.context if job.given_routes is None else None
        ring = None if context is None else context.ring
        if ring is None:
            if not self.rings.vacant:
                idle = (each for each in self.contexts if each.ring and not each.ring.used)
                self._evict_session(next(idle), 0)
            return self.rings.take()
        ring.used = True
        if not own:
            ring.tokens = ring.written = 0
        return ring

    def end_ring(self, request: Request, written: int) -> None:
        """Give back the ring of a request, which may have written positions below `written`.

        A session that has blocks keeps the ring. Its blocks are the turn's, or those of an earlier
        turn whose tokens this turn began with.
        """
        job, placement = request.job, request.job.placed
        ring, placement.ring = placement.ring, None
        if ring is None:
            return
        context = job.context if job.given_routes is None else None
        ring.tokens = placement.prefilled
        if ring.tokens >= job.prompt_len:
            # The last sampled token has no KV.
            ring.tokens = job.prompt_len + max(0, len(request.job.tokens) - 1)
        ring.written = max(ring.written, written)
        if context is not None and context.blocks and context.ring is None:
            ring.kept, context.ring = True, ring
        self.rings.give_back(ring)

    def _drop_ring(self, context: Context) -> None:
        ring, context.ring = context.ring, None
        if ring is not None:
            self.rings.let_go(ring)

    # Contexts of sessions.

    def whole_blocks(self, tokens: int) -> int:
        """Number of blocks whose entries depend only on a sequence's first `tokens` tokens."""
        return max(0, tokens - self._tokens_after) // self._block_size

    def give(self, context: Context, blocks: Sequence[int]) -> None:
        """Let `context` keep these blocks instead of those it has; others may hold them too.

        If there are more blocks than may be idle, only the first are kept: keeping all would evict
        every other session, and in the end this one.
        """
        kept = list(blocks[: self._pool.max_idle])
        self._pool.keep(kept)
        self._pool.let_go(context.blocks)
        context.blocks, context.evicted = kept, False
        self.touch(context)

    def touch(self, context: Context) -> None:
        """Mark `context` as most recently used; does nothing for a context without blocks."""
        self.contexts.pop(context, None)
        if context.blocks:
            self.contexts[context] = None

    def cut(self, context: Context, tokens: int) -> None:
        """Release the blocks and states that depend on more than the first `tokens` tokens."""
        self.states.cut(context, tokens)
        count = self.whole_blocks(tokens)
        self._pool.let_go(context.blocks[count:])
        del context.blocks[count:]
        if not context.blocks:
            self._drop_ring(context)
            self.contexts.pop(context, None)
        elif not self.reusable(context, tokens + 1):
            # Its ring does not reach back that far.
            self._evict_session(context, 0)

    def close(self, context: Context) -> None:
        """Release everything that a context keeps; may be called again."""
        self.states.close(context)
        self._pool.let_go(context.blocks)
        self._drop_ring(context)
        context.blocks = []
        context.closed = True
        self.contexts.pop(context, None)

    # Making room.

    def evict(self, count: int) -> None:
        """Make `count` idle blocks vacant.

        First it evicts blocks that only the prefix index keeps: longest idle first, and within one
        request from its end. Then it evicts whole sessions without a block in use, least recently
        used first; a block that two sessions keep becomes vacant with the second one. Last come
        sessions with some blocks in use, like that of a running turn, from their first idle block
        on. With state checkpoints, states are evicted with their blocks, least valuable first.
        """
        pool = self._pool
        enough = pool.vacant + count
        if self.states:
            self.states.evict_blocks(enough)
            return
        while not self._evict_prefixes(enough):
            unused = (
                context for context in self.contexts if not any(map(pool.users, context.blocks))
            )
            context = next(unused, None)
            if context is not None:
                self._evict_session(context, 0)
                continue
            for context in self.contexts:
                used = next((at for at, one in enumerate(context.blocks) if one in pool.idle), None)
                if used is not None:
                    break
            else:
                raise AssertionError(f"{len(pool.idle)} idle blocks have no keeper")
            self._evict_session(context, used)

    def forget(self) -> None:
        """Evict everything that is kept, because it is no longer valid; no request may use it."""
        self.states.evict_all()
        self.evict(len(self._pool.idle))

    def _evict_session(self, context: Context, left: int) -> None:
        """Take all blocks but the first `left` from a session; with `left` = 0 it is evicted."""
        self._pool.let_go(context.blocks[left:])
        del context.blocks[left:]
        if not left:
            self._drop_ring(context)
            context.evicted = True
            del self.contexts[context]
            self._counters["sessions/evicted"] += not isinstance(context, SharedPrompt)

    def _evict_prefixes(self, enough: int) -> bool:
        """Evict prefixes until this many blocks are vacant; False if there are too few prefixes."""
        pool = self._pool
        while pool.vacant < enough and pool.unwanted:
            block = next(iter(pool.unwanted))
            del self._block_of[self._key_of.pop(block)]
            pool.let_go([block])
            self._counters["prefix/evicted_blocks"] += 1
        return pool.vacant >= enough

    def _most(self, job: Job) -> int:
        """Blocks that a request may begin with: at least one token of its prompt must be fed."""
        return (job.prompt_len - 1) // self._block_size

    def _keys(self, request: Request) -> list[bytes]:
        """The keys of all blocks of the prompt whose entries depend only on the prompt."""
        keys = request.job.block_keys
        if keys is None:
            size, tokens_after = self._block_size, self._tokens_after
            tokens, key = request.identity(), b""
            keys = []
            for start in range(0, len(tokens) - size - tokens_after + 1, size):
                known = tokens[start : start + size + tokens_after]
                key = hashlib.sha256(key + known.tobytes()).digest()
                keys.append(key)
            request.job.block_keys = keys
        return keys
