"""A scheduler whose requests share blocks, and a device on which a wrong block shows as a token.

The simulated device knows requests only from `host_updates`. A KV entry is a checksum of the tokens
up to its position; an entry of its drafter's cache is a checksum of the tokens up to `tokens_after`
positions later. The next token follows from the last entry, and every step compares all entries of
the row with the request's actual tokens. An entry that a decode step wrote, or that follows from
such an entry, is marked: none of these may be in the index of prefixes.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from graphengine import SamplingParams
from graphengine.host.rings import WindowRing
from graphengine.host.scheduler import Scheduler
from graphengine.host.step_plan import Plan, PrefillChunk
from graphengine.options.prefill_cut import PrefillCut
from graphengine.program.fields import host_updates
from graphengine.prompt_embeds import PromptTokens
from graphengine.requests.adapters import Adapters
from graphengine.requests.context import Context
from graphengine.requests.job import Job
from graphengine.requests.processing import Processing
from graphengine.requests.request import Event, Request
from graphengine.requests.stop_tokens import Stops
from graphengine.sessions import Session

ALPHABET = 24
STOP = 0
DECODED = 1 << 32


def checksum(before: int, token: int) -> int:
    return zlib.crc32(f"{before}/{token}".encode())


def entries(tokens: Sequence[int]) -> list[int]:
    """The KV entry of each of these tokens."""
    found, last = [], 1
    for token in tokens:
        last = checksum(last, token)
        found.append(last)
    return found


def reply(prompt: Sequence[int], new: int) -> list[int]:
    """The tokens of a request that runs alone."""
    last, said = entries(prompt)[-1], list[int]()
    while len(said) < new and (not said or said[-1] != STOP):
        said.append(last % ALPHABET)
        last = checksum(last, said[-1])
    return said


Step = list[tuple[Request, int, int | None]]
"""What a step published: requests, their epochs and tokens."""


class Sharing:
    """`Engine.step` without the engine, for requests and sessions; every invariant is checked.

    It is also the stand-in for the sessions' engine. Launches are executed at once, which is
    equivalent to stream order, and read `lookahead` launches later, a step at a time.
    """

    def __init__(
        self,
        *,
        lookahead: int = 1,
        steps_per_launch: int = 1,
        tokens_after: int = 0,
        slots: int = 3,
        kv_blocks: int = 12,
        swap_blocks: int = 16,
        block_size: int = 4,
        max_chunk: int = 8,
        cut: PrefillCut | None = None,
        max_seq_len: int = 40,
        prefix_caching: bool = True,
        kept_blocks: int | None = None,
        rings: Sequence[WindowRing] = (),
    ) -> None:
        self.lookahead, self.tokens_after = lookahead, tokens_after
        self.scheduler = Scheduler(
            slots=slots,
            kv_blocks=kv_blocks,
            swap_blocks=swap_blocks,
            block_size=block_size,
            max_chunk=max_chunk,
            cut=cut,
            max_seq_len=max_seq_len,
            prefix_caching=prefix_caching,
            kept_blocks=kept_blocks,
            tokens_after=tokens_after,
            rings=rings,
            lookahead=lookahead,
            steps_per_launch=steps_per_launch,
        )
        self.kept_blocks, self.max_chunk = kept_blocks, max_chunk
        self.has_cut = cut is not None
        self.chunks: list[PrefillChunk] = []
        self.memory = SimpleNamespace(block_size=block_size, max_seq_len=max_seq_len)
        self.adapters = Adapters(0)
        self.intake = self
        self.requests: list[Request] = []
        self.sessions: list[Session] = []
        self.cancelled: list[Request] = []
        # The steps of each launch that are still to be read.
        self.in_flight: deque[deque[Step]] = deque()
        self.launched: Counter[int] = Counter()
        self.fields: dict[str, Any] = {}
        self.caches = [[[None] * block_size for _ in range(kv_blocks + 1)] for _ in range(2)]
        self.areas = [[[None] * block_size for _ in range(swap_blocks)] for _ in range(2)]
        self.epoch, self.kv_len = [0] * slots, [0] * slots
        self.next_token: list[int | None] = [None] * slots
        self.noted: list[list[int]] = [[] for _ in range(slots)]
        self.plans = 0
        # Whether the turns of sessions have options on logits.
        self.turns_process = False

    # The part of an engine that a session uses.

    def check_open(self) -> None:
        pass

    def check_thread(self) -> None:
        pass

    def session_prompt(
        self, prompt: Sequence[int], before: Sequence[int], add_bos: bool | None = None
    ) -> PromptTokens:
        if len(before) + len(prompt) >= self.memory.max_seq_len:
            raise ValueError(f"{len(before) + len(prompt)} tokens")
        return PromptTokens(tuple(prompt))

    def turn(
        self,
        prompt: PromptTokens | Sequence[int],
        params: SamplingParams,
        callback: Callable[[Event], None] | None = None,
        *,
        submitted: float = 0.0,
        processing: bool = False,
        adapter: None = None,
    ) -> Request:
        ids = prompt.ids if isinstance(prompt, PromptTokens) else prompt
        most = self.memory.max_seq_len - len(ids)
        processing = processing or self.turns_process
        return Request(
            request_id=len(self.requests),
            prompt_token_ids=ids,
            params=params,
            seed=0,
            submitted=submitted,
            cancelled=self.cancelled,
            job=Job(
                prompt_len=len(ids),
                max_len=len(ids) + min(most, params.max_tokens or most),
                stops=Stops(ids=(STOP,)),
                processing=Processing(flags=0, values={}) if processing else None,
                full=params.filtered or processing,
            ),
        )

    def queue(self, request: Request) -> None:
        self.scheduler.submit(request)
        self.requests.append(request)

    # Actions of its users.

    def submit(self, prompt: Sequence[int], new: int, **options: Any) -> Request:
        request = self.turn(tuple(prompt), SamplingParams(max_tokens=new), **options)
        self.queue(request)
        return request

    def session(self, prompt: Sequence[int] = ()) -> Session:
        session = Session(self, list(prompt), Context())  # type: ignore[arg-type]
        self.sessions.append(session)
        return session

    def fork(self, session: Session) -> Session:
        self.sessions.append(session.fork())
        return self.sessions[-1]

    # Steps.

    def step(self, *, collect: bool = True) -> None:
        for request in self.cancelled:
            self.scheduler.retire(request)
        self.cancelled.clear()
        while len(self.in_flight) <= self.lookahead:
            oldest = next(iter(self.scheduler.active), None)
            plan = self.scheduler.plan()
            self.check()
            if plan is None:
                assert self.in_flight or not self.scheduler.busy, self.scheduler.active
                break
            if oldest is not None and oldest.job.placement is not None:
                fed = plan.prefill is not None and plan.prefill.request is oldest
                done = oldest.job.placed.least == oldest.job.max_new_tokens
                assert oldest in plan.rows or fed or done, f"{oldest!r} does not advance"
            self.plans += 1
            self.in_flight.append(self.execute(plan))
            self.check_index()
        if collect and self.in_flight:
            for request, epoch, token in self.in_flight[0].popleft():
                self.read(request, epoch, token)
            if not self.in_flight[0]:
                self.in_flight.popleft()
        self.check()

    def run(self, *, limit: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not (self.scheduler.busy or self.in_flight or self.cancelled):
                return
            self.step()
        raise AssertionError(f"busy after {limit} steps: {self.scheduler.active}")

    def read(self, request: Request, epoch: int, token: int | None) -> None:
        if token is None or request.finish_reason is not None:
            return
        request.job.tokens.append(token)
        length = request.job.prompt_len + len(request.token_ids)
        if token == STOP or length >= request.job.max_len:
            request.finish_reason = "stop" if token == STOP else "length"
            self.scheduler.retire(request)

    # The device.

    def execute(self, plan: Plan) -> deque[Step]:
        self.fields |= host_updates(plan, self.scheduler.slots, speculative=True)
        for cache, area in zip(self.caches, self.areas, strict=True):
            _copy(cache, area, plan.swap_out)
            _copy(area, cache, plan.swap_in)
        for slot, epoch in enumerate(self.fields.get("command_epoch", ())):
            if self.epoch[slot] != (epoch or 0):
                self.epoch[slot], self.kv_len[slot] = epoch or 0, 0
                self.next_token[slot] = None
        found = []
        if plan.prefill is not None:
            self.chunks.append(plan.prefill)
            request = plan.prefill.request
            found.append(
                (request, request.job.placed.epoch, self.feed(plan.prefill.noted, request))
            )
        steps = deque([found])
        assert plan.steps == 1 or plan.prefill is None, "a chunk waits for several steps"
        self.launched[plan.steps] += 1
        for number in range(plan.steps):
            if number:
                steps.append([])
            for request, epoch in zip(plan.rows, plan.epochs, strict=True):
                steps[-1].append((request, epoch, self.decode(request)))
        return steps

    def feed(self, noted: bool, request: Request) -> int | None:
        slot, start, count, final = (
            self.fields[f"prefill_{name}"][0] for name in ("slot", "start", "count", "final")
        )
        tokens, end = self.fields["prefill_tokens"], start + count
        assert slot == request.job.placed.slot and tokens == request.prompt_token_ids[start:end]
        assert 1 <= count <= self.max_chunk
        if noted or not self.has_cut:
            assert start // self.max_chunk == (end - 1) // self.max_chunk
        if noted:
            self.noted[slot] = self.noted[slot][:start] + list(tokens)
            assert not final and end <= request.cached_tokens
            return None
        if start == 0:
            self.noted[slot] = []
        if request.job.processing is not None:
            self.noted[slot] += tokens
            assert self.noted[slot] == list(request.prompt_token_ids[:end]), "not all was noted"
        if self.kv_len[slot] == 0:
            assert start == request.cached_tokens
        else:
            assert start == self.kv_len[slot], f"{start=} after {self.kv_len[slot]} tokens"
        said = None
        for position, token in enumerate(tokens, start):
            said = self.write(slot, position, token, decoded=False)
        self.kv_len[slot] = end
        following = said if final else self.fields["prefill_next"][0]
        self.draft(request, start, [*request.prompt_token_ids[:end], following])
        self.compare(request, [*request.prompt_token_ids[:end], following])
        self.next_token[slot] = said if final and self.goes_on(request, end, said) else None
        return said if final else None

    def decode(self, request: Request) -> int | None:
        slot = request.job.placed.slot
        assert slot in self.fields["slot_of_row"]
        token = self.next_token[slot]
        if token is None:
            return None
        position = self.kv_len[slot]
        said = self.write(slot, position, token, decoded=True)
        self.kv_len[slot] = position + 1
        known = [
            *request.prompt_token_ids,
            *reply(request.prompt_token_ids, request.job.max_new_tokens),
        ]
        known = known[: position + 2]
        assert known[-1] == said, f"{said=} at {position + 1}, alone it says {known[-1]}"
        self.draft(request, position, known)
        self.compare(request, known)
        self.next_token[slot] = said if self.goes_on(request, position + 1, said) else None
        return said

    def goes_on(self, request: Request, position: int, token: int | None) -> bool:
        return token != STOP and position + 1 < request.job.max_len

    def write(self, slot: int, position: int, token: int, *, decoded: bool) -> int:
        """Write a fed token's entry, from the previous one in the cache; returns the next token."""
        before = self.entry(0, slot, position - 1) if position else 1
        assert before is not None
        made = checksum(before % DECODED, token)
        self.put(0, slot, position, made | (DECODED if decoded else before & DECODED))
        return made % ALPHABET

    def draft(self, request: Request, start: int, known: Sequence[int]) -> None:
        """The drafter's entries that the tokens from `start` on complete."""
        if self.tokens_after:
            truth = entries(known)
            for position in range(
                max(0, start + 1 - self.tokens_after), len(known) - self.tokens_after
            ):
                last = self.entry(0, request.job.placed.slot, position + self.tokens_after - 1)
                assert last is not None
                made = truth[position + self.tokens_after] | (last & DECODED)
                there = self.entry(1, request.job.placed.slot, position)
                if there is not None and there % DECODED == made % DECODED:
                    # With several modules each writes what is there already.
                    made &= there
                self.put(1, request.job.placed.slot, position, made)

    def compare(self, request: Request, known: Sequence[int]) -> None:
        """All entries before the last known token follow from its tokens."""
        slot, truth = request.job.placed.slot, entries(known)
        for position in range(len(known) - 1):
            found = self.entry(0, slot, position)
            assert found is not None and found % DECODED == truth[position], (
                f"{request!r} reads {found} at {position}"
            )
        for position in range(len(known) - self.tokens_after if self.tokens_after else 0):
            found = self.entry(1, slot, position)
            assert found is not None and found % DECODED == truth[position + self.tokens_after], (
                f"{request!r}: drafter at {position}"
            )

    def put(self, cache: int, slot: int, position: int, value: int) -> None:
        size = self.memory.block_size
        table = self.fields["block_table"][slot]
        self.caches[cache][table[position // size]][position % size] = value  # type: ignore[call-overload]

    def entry(self, cache: int, slot: int, position: int) -> int | None:
        size = self.memory.block_size
        table = self.fields["block_table"][slot]
        return self.caches[cache][table[position // size]][position % size]

    # What must hold.

    def check(self) -> None:
        """The users and keepers of every block are its holders."""
        scheduler, pool, reuse = self.scheduler, self.scheduler.pool, self.scheduler.reuse
        users = Counter(block for one in scheduler.active for block in one.job.placed.blocks)
        keepers = Counter(reuse._block_of.values())
        for session in self.sessions:
            keepers.update(session._context.blocks)
            kept = len(session._context.blocks)
            assert self.kept_blocks is None or kept <= self.kept_blocks
            assert bool(kept) == (session._context in reuse.contexts)
        assert set(reuse.contexts) <= {session._context for session in self.sessions}
        assert {block: key for key, block in reuse._block_of.items()} == reuse._key_of
        for block in range(1, pool.count + 1):
            assert pool.users(block) == users[block], block
            assert pool.keepers(block) == keepers[block], block
            assert (block in pool.idle) == (not users[block] and bool(keepers[block])), block
            unwanted = block in pool.idle and block in reuse._key_of and keepers[block] == 1
            assert (block in pool.unwanted) == unwanted, block
            assert (block in pool._vacant) == (not users[block] and not keepers[block]), block
        assert len(pool._vacant) == len(set(pool._vacant))
        assert pool.free == pool.count - len(users)
        assert self.kept_blocks is None or len(pool.idle) <= self.kept_blocks
        for request in scheduler.active:
            assert len(set(request.job.placed.blocks)) == len(request.job.placed.blocks)
        swapped = [block for one in scheduler.active for block in one.job.placed.swap_blocks]
        assert len(set(swapped)) == len(swapped)
        assert len(swapped) + scheduler.swap.free == scheduler.swap.count

    def check_index(self) -> None:
        """Only prefill has written what the index has; call it after all replays."""
        for block in self.scheduler.reuse._key_of:
            for cache in self.caches[: 2 if self.tokens_after else 1]:
                assert None not in cache[block], f"{block=} of the index is not written"
                decoded = [entry >= DECODED for entry in cache[block]]
                assert not any(decoded), f"{block=} of the index has a reply's entries: {decoded}"

    def finish(self) -> None:
        """Run to the end: every token is right, and nothing is held that is not kept."""
        self.run()
        assert self.scheduler.pool.free == self.scheduler.pool.count
        for request in self.requests:
            assert request.finished and request.job.placement is None
            alone = reply(request.prompt_token_ids, request.job.max_new_tokens)
            if request.finish_reason == "cancelled":
                alone = alone[: len(request.token_ids)]
            assert request.token_ids == alone, f"{request!r}"
        for session in self.sessions:
            session.close()
        self.check()
        pool = self.scheduler.pool
        pool.evict(len(pool.idle))  # type: ignore[misc]
        self.check()
        assert pool.vacant == pool.count


def _copy(
    source: list[list[Any]], destination: list[list[Any]], pairs: Sequence[tuple[int, int]]
) -> None:
    """All at once, as the kernel does: no order among the pairs."""
    copies = [(to, list(source[origin])) for origin, to in pairs]
    assert len({to for to, _ in copies}) == len(copies), f"a block is written twice: {pairs}"
    for to, block in copies:
        destination[to] = block
