"""KV blocks and their holders: requests, idle sessions, and prefixes that may come again.

A block has *users*, the requests whose tables name it, and *keepers*: sessions, and the index of
prefixes. A block with neither is vacant. A block that is only kept is *idle*: it counts as free,
since it is evicted when its place is needed. `Reuse.evict` says what is evicted, and in which
order.

Only whole blocks are reused, and only blocks that hold, at every position, what a prefill of the
same tokens would write there. `tokens_after` is the number of tokens after a position on which its
entries depend: 0 in the target's cache, more in the cache of a drafter that looks ahead. Nothing
writes into a reused block, except a drafter of several modules, which writes the values that are
there already.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from graphengine.host.rings import NO_RINGS, WindowRings
from graphengine.requests.context import Context, HeldRing
from graphengine.requests.job import Job
from graphengine.requests.request import Request
from graphengine.routing_record import Ids


def _needs_every_token(request: Request) -> bool:
    """Whether its prompt is to be prefilled as a whole.

    The log-probabilities of a prompt need the logits after each of its tokens, and other experts
    than the router's lead to other KV.
    """
    return request.params.prompt_logprobs is not None or request.job.given_routes is not None


class BlockPool:
    """Blocks `first .. first + count - 1`; the vacant block that was freed last is taken first.

    idle      blocks without a user but with a keeper
    indexed   the blocks that the index of prefixes keeps; its owner fills this
    unwanted  the idle blocks that only the index keeps, longest idle first
    evict     called with a number of idle blocks that it must make vacant
    max_idle  more idle blocks than this are evicted at once; None: as many as there are
    routes    of kept blocks, the page with the experts of their tokens, where these are recorded
    """

    def __init__(self, count: int, *, first: int = 0, max_idle: int | None = None) -> None:
        self.count = count
        self.max_idle = max_idle
        self.idle: dict[int, None] = {}
        self.indexed: dict[int, bytes] = {}
        # Unlike a dict, it finds its first item quickly after many items before it were deleted.
        self.unwanted: OrderedDict[int, None] = OrderedDict()
        self.evict: Callable[[int], None] | None = None
        self.routes: dict[int, Ids] = {}
        self._vacant = list(range(first + count - 1, first - 1, -1))
        self._users = [0] * (first + count)
        self._keepers = [0] * (first + count)

    @property
    def free(self) -> int:
        """Blocks that can be taken: vacant and idle ones."""
        return len(self._vacant) + len(self.idle)

    @property
    def vacant(self) -> int:
        return len(self._vacant)

    def users(self, block: int) -> int:
        return self._users[block]

    def keepers(self, block: int) -> int:
        return self._keepers[block]

    def take(self, count: int) -> list[int]:
        """Blocks without other holders, each with one user; idle ones are evicted for them."""
        assert count <= self.free, f"{count=} of {self.free} free blocks"
        missing = count - len(self._vacant)
        if missing > 0:
            self._make_vacant(missing)
        blocks = [self._vacant.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
            self.routes.pop(block, None)
        return blocks

    def use(self, blocks: Sequence[int]) -> None:
        """One more user for each of these blocks, which must have a user or keeper already."""
        for block in blocks:
            assert self._users[block] or self._keepers[block], f"{block=} has no user or keeper"
            self.idle.pop(block, None)
            self.unwanted.pop(block, None)
            self._users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One user less for each, and `blocks` is emptied; the first are evicted last."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"{block=} has no user"
            if self._users[block]:
                continue
            if self._keepers[block]:
                self.idle[block] = None
                self._note_unwanted(block)
            else:
                self._vacant.append(block)
        blocks.clear()
        self._limit()

    def keep(self, blocks: Sequence[int]) -> None:
        """One more keeper for each of these blocks, which must have a user or keeper already."""
        for block in blocks:
            assert self._users[block] or self._keepers[block], f"{block=} has no user or keeper"
            self._keepers[block] += 1
            self.unwanted.pop(block, None)

    def let_go(self, blocks: Sequence[int]) -> None:
        """One keeper less for each of these blocks."""
        for block in reversed(blocks):
            self._keepers[block] -= 1
            assert self._keepers[block] >= 0, f"{block=} has no keeper"
            if self._users[block]:
                continue
            if self._keepers[block]:
                self._note_unwanted(block)
            else:
                del self.idle[block]
                self.unwanted.pop(block, None)
                self._vacant.append(block)

    def _note_unwanted(self, block: int) -> None:
        if self._keepers[block] == 1 and block in self.indexed:
            self.unwanted[block] = None

    def _limit(self) -> None:
        if self.max_idle is not None and len(self.idle) > self.max_idle:
            self._make_vacant(len(self.idle) - self.max_idle)

    def _make_vacant(self, count: int) -> None:
        enough = len(self._vacant) + count
        assert self.evict is not None, f"{len(self.idle)} idle blocks, but nothing evicts them"
        self.evict(count)
        assert len(self._vacant) >= enough, f"{len(self._vacant)} vacant of {enough} blocks"


class Reuse:
    """Decides which blocks a request begins with, and what happens to its blocks when it ends.

    pool          the blocks of the KV cache
    tokens_after  tokens after a position on which its entries depend, in the engine's caches
    prefixes      whether prompts find blocks of earlier prompts by their tokens
    counters      where `prefix/...` and `sessions/...` are counted
    rings         the KV of layers with a window that is not in the pool

    A session's blocks are of use only together with its ring, where KV is in rings: `reusable` says
    how many are. No prefix can be shared there.

    A prefix is found by a chain of SHA-256: a block's key is the hash of the previous block's key,
    the block's tokens, and the `tokens_after` tokens that follow, so that equal keys mean equal
    entries. The index has only blocks that prefill has written as a whole. The blocks of a reply
    are written by the decode kernels and may differ in their last bits, so a turn of a session that
    builds on a reply adds none.
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
    ) -> None:
        assert not (prefixes and rings), "a ring holds no prefix"
        self.prefixes = prefixes
        self.rings = rings
        self.contexts: dict[Context, None] = {}
        self._pool = pool
        self._block_size = block_size
        self._tokens_after = tokens_after
        self._counters = counters
        self._block_of: dict[bytes, int] = {}
        self._key_of = pool.indexed
        pool.evict = self.evict

    # Requests, as the scheduler sees them.

    def begin_with(self, request: Request) -> tuple[list[int], bool]:
        """Blocks of the request's first tokens, all but one of them at most.

        Also returns whether they are its session's: they are, unless the index has more of the
        prompt.
        """
        found, context = self.find(request), request.job.context
        if context is not None and not _needs_every_token(request):
            own = self.reusable(context, request.job.prompt_len)
            if own and len(own) >= len(found):
                return own, True
        return found, False

    def reusable(self, context: Context, tokens: int) -> list[int]:
        """Blocks of a session that a turn of so many tokens can begin with."""
        count = min(len(context.blocks), max(0, tokens - 1) // self._block_size)
        return context.blocks[: self.rings.reusable(context.ring, count)]

    def find(self, request: Request) -> list[int]:
        """Blocks in the index for the request's first tokens, all but one of them at most."""
        if not self.prefixes or _needs_every_token(request):
            return []
        found = []
        for key in self._keys(request)[: self._most(request.job)]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def took(self, request: Request) -> None:
        """The turn of a session was admitted with blocks that its session keeps."""
        self._counters["sessions/reused_tokens"] += request.cached_tokens
        # What it writes after a reply's blocks is not a prefill of its tokens alone.
        request.job.placed.indexed = request.job.prompt_len

    def share_routes(self, request: Request) -> None:
        """The request has just been given these blocks to begin with: it has their records, too."""
        routes = request.job.routes
        if routes is not None:
            kept = request.job.placed.blocks[: request.cached_tokens // self._block_size]
            routes.share([self._pool.routes.get(block) for block in kept])

    def _keep_routes(self, request: Request, first: int, last: int) -> None:
        """What is recorded for blocks `first .. last - 1` of the request stays with them."""
        routes = request.job.routes
        if routes is not None:
            pages = routes.pages_until(last)[first:]
            self._pool.routes |= zip(request.job.placed.blocks[first:last], pages, strict=True)

    def begun(self, request: Request) -> None:
        """The request is about to be prefilled, with the blocks the index has of its prompt."""
        cached = request.cached_tokens
        request.job.placed.indexed = cached // self._block_size
        if request.job.given_routes is not None:
            # Others would not find what the router itself leads to.
            request.job.placed.indexed = request.job.prompt_len
        if not _needs_every_token(request):
            self._counters["prefix/queries"] += 1
            self._counters["prefix/queried_tokens"] += request.job.prompt_len
            self._counters["prefix/hits"] += cached > 0
            self._counters["prefix/hit_tokens"] += cached

    def fed(self, request: Request) -> None:
        """Put the blocks into the index whose prefill replays have been launched."""
        placement = request.job.placed
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

        Replays in flight write after what is handed over. A turn that was cancelled, late or failed
        leaves the session as it was. So does a turn with nothing more to hand over: one that was
        stopped during its prefill, or that ends while it is paused and its blocks are not in the
        pool; and one that replayed a record, whose KV is not what the router itself leads to.
        """
        job, placement = request.job, request.job.placed
        context, blocks = job.context, placement.blocks
        if context is None or context.closed or request.finish_reason not in ("stop", "length"):
            return
        if job.given_routes is not None:
            return
        self.touch(context)
        fed = placement.prefilled
        known = fed if fed < job.prompt_len else job.prompt_len + len(request.token_ids)
        # The last sampled token has no KV.
        count = self.whole_blocks(known - 1 + min(1, self._tokens_after))
        if len(blocks) >= count > len(context.blocks):
            self._keep_routes(request, 0, count)
            self.give(context, blocks[:count])

    # Rings.

    def take_ring(self, request: Request, *, own: bool) -> HeldRing | None:
        """A ring for a request that is admitted: its session's, or a vacant one.

        Each request in a slot has one, and there are as many as slots. So either one is vacant or
        an idle session keeps one, and the session that was used last longest ago is evicted.

        own  whether it goes on where its session's ring has come to
        """
        if not self.rings:
            return None
        context = request.job.context
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
        """The request, which may have written positions below `written`, gives its ring back.

        A session that has blocks keeps it. They are those of the turn, or of an earlier one whose
        tokens the turn began with.
        """
        job, placement = request.job, request.job.placed
        ring, placement.ring = placement.ring, None
        if ring is None:
            return
        context = job.context
        ring.tokens = placement.prefilled
        if ring.tokens >= job.prompt_len:
            # The last sampled token has no KV.
            ring.tokens = job.prompt_len + max(0, len(request.token_ids) - 1)
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
        """Blocks whose entries depend on a sequence's first `tokens` tokens alone."""
        return max(0, tokens - self._tokens_after) // self._block_size

    def give(self, context: Context, blocks: Sequence[int]) -> None:
        """Let `context` keep these blocks in place of its own; others may hold them too.

        If they are more than may be idle, only the first are kept: all of them would evict every
        other session, and in the end this one.
        """
        kept = list(blocks[: self._pool.max_idle])
        self._pool.keep(kept)
        self._pool.let_go(context.blocks)
        context.blocks, context.evicted = kept, False
        self.touch(context)

    def touch(self, context: Context) -> None:
        """Note that `context` was used last; a context without blocks is not noted."""
        self.contexts.pop(context, None)
        if context.blocks:
            self.contexts[context] = None

    def cut(self, context: Context, tokens: int) -> None:
        """Release the blocks that depend on more than the first `tokens` tokens."""
        count = self.whole_blocks(tokens)
        self._pool.let_go(context.blocks[count:])
        del context.blocks[count:]
        if not context.blocks:
            self._drop_ring(context)
            self.contexts.pop(context, None)
        elif not self.reusable(context, tokens + 1):
            # Its ring does not reach back to there.
            self._evict_session(context, 0)

    def close(self, context: Context) -> None:
        """Release all blocks; may be called again."""
        self._pool.let_go(context.blocks)
        self._drop_ring(context)
        context.blocks = []
        context.closed = True
        self.contexts.pop(context, None)

    # Making room.

    def evict(self, count: int) -> None:
        """Make `count` idle blocks vacant.

        First go blocks that only the index of prefixes keeps: longest idle first, and within one
        request from its end. Then whole sessions without a block in use, least recently used first;
        a block that two sessions keep goes with the second of them. Last come sessions with some
        blocks in use, such as that of a running turn, from their first idle block on.
        """
        pool = self._pool
        enough = pool.vacant + count
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

    def _evict_session(self, context: Context, left: int) -> None:
        """Take all but its first `left` blocks from a session; with `left` = 0 it is evicted."""
        self._pool.let_go(context.blocks[left:])
        del context.blocks[left:]
        if not left:
            self._drop_ring(context)
            context.evicted = True
            del self.contexts[context]
            self._counters["sessions/evicted"] += 1

    def _evict_prefixes(self, enough: int) -> bool:
        """Evict until this many blocks are vacant; False if that would take a session."""
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
        """The keys of all blocks of the prompt whose entries depend on the prompt alone."""
        keys = request.job.block_keys
        if keys is None:
            size, tokens_after = self._block_size, self._tokens_after
            tokens, key = array("q", request.prompt_token_ids), b""
            keys = []
            for start in range(0, len(tokens) - size - tokens_after + 1, size):
                known = tokens[start : start + size + tokens_after]
                key = hashlib.sha256(key + known.tobytes()).digest()
                keys.append(key)
            request.job.block_keys = keys
        return keys
