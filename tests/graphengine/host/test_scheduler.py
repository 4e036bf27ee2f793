"""The scheduler: what it plans, and that a device which obeys its plans always has the right KV.

The simulated device knows no request. It sees what `host_updates` makes of each plan, as the real
one does: slots, block tables, epochs, swap pairs. Its KV entries are (epoch, position), and the
token at position p is p. A request's `stop_ids` name the position where it stops, which the
scheduler does not read; so it plans rows that have stopped until their tokens are collected.

With drafts a step writes W positions, of which it keeps as many as it accepts, and its drafter
writes some more after them. What a drafter wrote must still be there in the next step.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from extent import extent
from graphengine.host.block_pool import BlockPool
from graphengine.host.scheduler import Scheduler
from graphengine.host.step_plan import Plan, must_read
from graphengine.program.fields import host_updates
from graphengine.requests.grammars import Guide
from graphengine.requests.job import Job
from graphengine.requests.processing import Processing
from graphengine.requests.request import Phase, Request
from graphengine.requests.stop_tokens import Stops
from graphengine.sampling_params import SamplingParams

Entry = tuple[int, int]
# How many of up to `width` tokens the step of a stay at a position gets: (epoch, position, width).
Accept = Callable[[int, int, int], int]


def make_request(
    prompt: int,
    new: int,
    *,
    stop_at: int | None = None,
    request_id: int = 0,
    top_k: int = 0,
    cancelled: list[Request] | None = None,
) -> Request:
    """A request of `prompt` tokens and at most `new` more; it stops at position `stop_at`."""
    params = SamplingParams(top_k=top_k)
    return Request(
        request_id=request_id,
        prompt_token_ids=range(prompt),
        params=params,
        seed=0,
        submitted=0.0,
        cancelled=[] if cancelled is None else cancelled,
        job=Job(
            prompt_len=prompt,
            max_len=prompt + new,
            stops=Stops(ids=() if stop_at is None else (stop_at,)),
            full=params.filtered,
        ),
    )


def make_scheduler(**sizes: int) -> Scheduler:
    defaults = {"slots": 4, "kv_blocks": 16, "swap_blocks": 16, "block_size": 4, "max_chunk": 8}
    return Scheduler(**(defaults | sizes))


def submit(scheduler: Scheduler, prompt: int, new: int) -> Request:
    request = make_request(prompt, new)
    scheduler.submit(request)
    return request


def plan_of(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def run_until(scheduler: Scheduler, request: Request, phase: Phase, *, limit: int = 99) -> Plan:
    """Plan steps until one leaves `request` in `phase`; returns that plan."""
    for _ in range(limit):
        plan = plan_of(scheduler)
        if request.phase is phase:
            return plan
    raise AssertionError(f"{request!r} is not in {phase} after {limit} plans")


def assert_all_free(scheduler: Scheduler) -> None:
    assert not scheduler.busy
    assert scheduler.pool.free == scheduler.pool.count
    assert scheduler.swap.free == scheduler.swap.count
    assert scheduler.slots == [None] * len(scheduler.slots)


# The simulated device.


@dataclasses.dataclass(kw_only=True, slots=True)
class Launch:
    """What one plan puts on the stream: the field updates, then swaps, prefill and decode.

    `width` is 0 where nothing decodes.
    """

    updates: dict[str, Any]
    swapped_out: int
    swapped_in: int
    prefill: bool
    width: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A published token; `last` where the device has stopped the request with it."""

    epoch: int
    position: int
    last: bool


def accepting(seed: int) -> Accept:
    """Reproducible counts: the least where `seed` is 0, the most where it is 1, else mixed."""

    def accept(epoch: int, position: int, width: int) -> int:
        mixed = zlib.crc32(f"{seed}/{epoch}/{position}".encode()) % width + 1
        return {0: 1, 1: width}.get(seed, mixed)

    return accept


ALL = accepting(1)


class Device:
    """Obeys launches in order. Checks that each token attends to its own request's whole past."""

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        swap_blocks: int,
        block_size: int,
        extra: int,
        max_seq_len: int,
        accept: Accept,
    ) -> None:
        self.block_size = block_size
        self.extra, self.max_seq_len, self.accept = extra, max_seq_len, accept
        self.cache: list[list[Entry | None]] = [[None] * block_size for _ in range(kv_blocks + 1)]
        self.swap_area: list[list[Entry | None]] = [[None] * block_size for _ in range(swap_blocks)]
        self.fields: dict[str, Any] = {}
        self.kv_len = [0] * slots
        self.running = [False] * slots
        self.epoch = [0] * slots
        # Positions after `kv_len` that the slot's drafter has written.
        self.drafted = [0] * slots
        self.counters: Counter[str] = Counter()

    def execute(self, launch: Launch) -> list[list[list[Token]]]:
        """Run one launch; for each replay the tokens of each lane, none where it emitted none."""
        self.fields |= launch.updates
        pairs = self.fields.get("swap_pairs", ())
        _copy_blocks(self.cache, self.swap_area, pairs[: launch.swapped_out])
        _copy_blocks(self.swap_area, self.cache, pairs[: launch.swapped_in])
        replays = []
        if launch.prefill:
            self._command()
            replays.append([self._prefill()])
        if launch.width:
            self._command()
            slots = self.fields["slot_of_row"]
            replays.append([self._decode(slot, launch.width) for slot in slots])
        return replays

    def _command(self) -> None:
        """A slot whose epoch is new starts from nothing."""
        for slot, epoch in enumerate(self.fields["command_epoch"]):
            if self.epoch[slot] != (epoch or 0):
                self.epoch[slot] = epoch or 0
                self.kv_len[slot], self.running[slot], self.drafted[slot] = 0, False, 0

    def _prefill(self) -> list[Token]:
        slot, start, count, final = (
            self.fields[f"prefill_{name}"][0] for name in ("slot", "start", "count", "final")
        )
        tokens = self.fields["prefill_tokens"]
        assert tokens == tuple(range(start, start + count))
        assert start == self.kv_len[slot], f"chunk at {start} after {self.kv_len[slot]} tokens"
        for position in range(start, start + count):
            self._append(slot, position)
        end = start + count
        return self._emit(slot, [end], drafting=True) if final else []

    def _decode(self, slot: int, width: int) -> list[Token]:
        if not self.running[slot]:
            self.counters["stopped_rows"] += 1
            return []
        start, max_len = self.kv_len[slot], self.fields["max_len"][slot]
        for position in range(start, start + self.drafted[slot]):
            found = self._entry(slot, position)
            assert found == self._draft(slot, position), f"{slot=} lost its draft at {position}"
        # Lanes past the first are padded where what they would sample lies past the end.
        live = min(width, max_len - 1 - start)
        count = self.accept(self.epoch[slot], start, live)
        for position in range(start + count, start + live):
            self._write(slot, position, self._draft(slot, position))
        for position in range(start, start + count):
            self._append(slot, position)
        self.counters["drafts"] += live - 1
        return self._emit(slot, range(start + 1, start + 1 + count), drafting=width > 1)

    def _append(self, slot: int, position: int) -> None:
        """Write the KV of `position`, then attend from there to everything before it."""
        epoch = self.epoch[slot]
        self._write(slot, position, (epoch, position))
        self.kv_len[slot] = position + 1
        for past in range(position + 1):
            found = self._entry(slot, past)
            assert found == (epoch, past), f"{slot=} {epoch=} reads {found} for position {past}"

    def _draft(self, slot: int, position: int) -> Entry:
        """What is written where no accepted token's KV lies."""
        return self.epoch[slot], -1 - position

    def _write(self, slot: int, position: int, entry: Entry) -> None:
        self._block(slot, position)[position % self.block_size] = entry

    def _entry(self, slot: int, position: int) -> Entry | None:
        return self._block(slot, position)[position % self.block_size]

    def _block(self, slot: int, position: int) -> list[Entry | None]:
        """The cache block of `position`: there is one in the slot's table."""
        table, index = self.fields["block_table"][slot], position // self.block_size
        assert index < len(table), f"position {position} lies in the dummy block"
        return self.cache[table[index]]

    def _emit(self, slot: int, positions: Iterable[int], *, drafting: bool) -> list[Token]:
        """Commit and publish the tokens at `positions` up to a stop, as `verify_commit_publish`.

        The step's drafter, where it has one, writes after them.
        """
        tokens: list[Token] = []
        for position in positions:
            if tokens and tokens[-1].last:
                self.counters["cut_tokens"] += 1
                continue
            stopped = position in self.fields["stop_ids"][slot]
            last = stopped or position + 1 >= self.fields["max_len"][slot]
            tokens.append(Token(epoch=self.epoch[slot], position=position, last=last))
            self.counters["stops"] += stopped
        self.running[slot] = not tokens[-1].last
        self.kv_len[slot] = start = tokens[-1].position
        end = min(start + self.extra, self.max_seq_len) if drafting else start
        for position in range(start, end):
            self._write(slot, position, self._draft(slot, position))
        self.drafted[slot] = end - start
        return tokens


def _copy_blocks(
    source: list[list[Entry | None]],
    destination: list[list[Entry | None]],
    pairs: Sequence[tuple[int, int]],
) -> None:
    """All at once, as the kernel does: no order among the pairs."""
    copies = [(to, list(source[origin])) for origin, to in pairs]
    for to, block in copies:
        destination[to] = block


# The host's loop around a scheduler and the device.


class Simulation:
    """`Engine.step` without the engine, with every invariant checked at every plan."""

    def __init__(
        self,
        *,
        lookahead: int,
        kind: type[Scheduler] = Scheduler,
        width: int = 1,
        extra: int = 0,
        max_seq_len: int = 64,
        accept: Accept = ALL,
        **sizes: int,
    ) -> None:
        self.lookahead = lookahead
        self.scheduler = kind(
            **sizes, tokens_per_step=width, reserve_extra=extra, max_seq_len=max_seq_len
        )
        self.max_chunk = sizes.pop("max_chunk")
        self.widest, self.extra, self.max_seq_len = width, extra, max_seq_len
        self.device = Device(**sizes, extra=extra, max_seq_len=max_seq_len, accept=accept)
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        # Of each launch its replays: the width (0 for a prefill) and the requests of the lanes.
        self.in_flight: deque[list[tuple[int, list[tuple[Request, int]]]]] = deque()
        self.unexecuted: deque[Launch] = deque()
        self.published: deque[list[list[list[Token]]]] = deque()
        self.picture: dict[str, Any] = {"slot_of_row": []}
        self.plans = 0
        self.repeated = 0
        self.last_plan: Plan | None = None
        self.counters: Counter[str] = Counter()

    def submit(
        self, prompt: int, new: int, stop_at: int | None = None, *, guided: bool = False
    ) -> Request | None:
        """Queue a request; None where the pool is too small for it.

        guided  whether the host follows its grammar
        """
        request = make_request(
            prompt,
            new,
            stop_at=stop_at,
            request_id=len(self.requests),
            # Every third request has a filter.
            top_k=5 if len(self.requests) % 3 == 2 else 0,
            cancelled=self.cancelled,
        )
        request.job.guide = Guide.__new__(Guide) if guided else None
        if self.need(request) > self.scheduler.pool.count:
            with pytest.raises(ValueError, match=f"the pool has {self.scheduler.pool.count}"):
                self.scheduler.submit(request)
            return None
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def need(self, request: Request) -> int:
        """Blocks of the request and its drafter at its greatest length."""
        end = min(request.job.max_len - 1 + self.extra, self.max_seq_len)
        return self.scheduler.blocks_for(end)

    def set_width(self, width: int) -> None:
        """What a gate does between steps."""
        self.scheduler.width = min(width, self.widest)

    def step(self, *, collect: bool = True) -> None:
        """One engine step; without `collect` it times out, so that nothing new is known."""
        for request in self.cancelled:
            self.scheduler.retire(request)
        self.cancelled.clear()
        while len(self.in_flight) <= self.lookahead:
            oldest = self.scheduler.active[0] if self.scheduler.active else None
            plan = self.scheduler.plan()
            self.check_ownership()
            if plan is None:
                self.check_idle()
                break
            self.check_plan(plan, oldest)
            self.launch(plan)
            self.check_bounds()
        if collect and self.in_flight:
            self.collect()
            self.check_bounds()

    def launch(self, plan: Plan) -> None:
        updates = copy.deepcopy(host_updates(plan, self.scheduler.slots))
        self.check_picture(plan, updates)
        self.plans += 1
        self.repeated += plan is self.last_plan
        self.last_plan = plan
        self.unexecuted.append(
            Launch(
                updates=updates,
                swapped_out=len(plan.swap_out),
                swapped_in=len(plan.swap_in),
                prefill=plan.prefill is not None,
                width=plan.width if plan.rows else 0,
            )
        )
        replays = [(0, (plan.prefill.request,))] if plan.prefill is not None else []
        replays += [(plan.width, plan.rows)] if plan.rows else []
        self.in_flight.append(
            [
                (width, [(request, request.job.placed.epoch) for request in rows])
                for width, rows in replays
            ]
        )

    def execute(self) -> None:
        """Let the device run the oldest launch that it has not run yet."""
        if self.unexecuted:
            self.published.append(self.device.execute(self.unexecuted.popleft()))

    def collect(self) -> None:
        """Read the oldest launch, waiting for the device; tokens of ended requests are dropped."""
        if not self.published:
            self.execute()
        replays = zip(self.in_flight.popleft(), self.published.popleft(), strict=True)
        for (width, lanes), published in replays:
            for (request, epoch), tokens in zip(lanes, published, strict=True):
                if width > 1:
                    self.scheduler.collected(request, width, len(tokens))
                self.read(request, epoch, tokens)

    def read(self, request: Request, epoch: int, tokens: list[Token]) -> None:
        assert all(token.epoch == epoch for token in tokens)
        if request.finish_reason is not None:
            self.counters["discarded_tokens"] += len(tokens)
            return
        request.job.tokens += [token.position for token in tokens]
        if tokens and tokens[-1].last:
            request.finish_reason = "stop"
            self.scheduler.retire(request)

    # What must hold.

    def check_ownership(self) -> None:
        """Every block of pool and swap has one owner, which holds no more than it can need."""
        scheduler = self.scheduler
        held = [block for request in scheduler.active for block in request.job.placed.blocks]
        assert len(set(held)) == len(held), f"a block is owned twice: {held}"
        assert all(1 <= block <= scheduler.pool.count for block in held), held
        assert len(held) + scheduler.pool.free == scheduler.pool.count
        swapped = [
            block for request in scheduler.active for block in request.job.placed.swap_blocks
        ]
        assert len(set(swapped)) == len(swapped), f"a swap block is owned twice: {swapped}"
        assert all(0 <= block < scheduler.swap.count for block in swapped), swapped
        assert len(swapped) + scheduler.swap.free == scheduler.swap.count
        for request in scheduler.active:
            placement = request.job.placed
            assert scheduler.slots[placement.slot] is request
            assert len(placement.blocks) <= self.need(request)
            assert len(placement.swap_blocks) <= self.need(request)
            assert not (placement.blocks and placement.swap_blocks), "both in the pool and swapped"
            assert request.phase is not Phase.PAUSED or not placement.blocks
        assert sum(slot is not None for slot in scheduler.slots) == len(scheduler.active)

    def check_bounds(self) -> None:
        """What the host has read and what the launches in flight may bring bound the truth."""
        for request in self.scheduler.active:
            placement, in_flight = request.job.placed, self.rows_in_flight(request)
            if placement.least == 0 or request.finish_reason is not None:
                continue
            assert placement.least <= request.job.max_new_tokens, placement
            known = max(1, len(request.token_ids))
            assert placement.least == known + len(in_flight), placement
            assert placement.most == known + sum(in_flight), placement
            if not self.unexecuted:
                slot = placement.slot
                sampled = self.device.kv_len[slot] - request.job.prompt_len + 1
                assert sampled <= min(placement.most, request.job.max_new_tokens)
                assert placement.least <= sampled or not self.device.running[slot]

    def rows_in_flight(self, request: Request) -> list[int]:
        """Widths of the decode rows of `request` that were launched and not collected."""
        launches = [replay for replays in self.in_flight for replay in replays if replay[0]]
        return [width for width, lanes in launches if any(request is lane for lane, _ in lanes)]

    def check_idle(self) -> None:
        """No plan: nobody is left, or the oldest only waits for tokens in flight. No copy waits for
        a plan: what it reads or writes might be given to others before.
        """
        changes = self.scheduler._changes
        assert not changes.swap_out and not changes.swap_in
        if self.scheduler.busy:
            assert self.in_flight, f"nothing runs, but {self.scheduler.active} wait"
            oldest = self.scheduler.active[0]
            if any(self.is_ahead(each) for each in self.scheduler.active if each.job.guided):
                return
            assert oldest.job.placed.least == oldest.job.max_new_tokens, oldest

    def is_ahead(self, request: Request) -> bool:
        """Whether a launch that was not read samples for the request, or feeds its prompt."""
        launches = [lanes for replays in self.in_flight for _, lanes in replays]
        return any(request is lane for lanes in launches for lane, _ in lanes)

    def check_plan(self, plan: Plan, oldest: Request | None) -> None:
        rows = plan.rows
        slots = [request.job.placed.slot for request in rows]
        assert slots == sorted(set(slots)) and len(slots) <= len(self.scheduler.slots)
        assert all(request.phase is Phase.DECODE for request in rows)
        assert plan.epochs == tuple(request.job.placed.epoch for request in rows)
        assert plan.width == self.scheduler.width
        assert plan.full == any(request.job.full for request in rows)
        assert not (plan.swap_out and plan.swap_in), "a plan swaps one way"
        pairs = plan.swap_out or plan.swap_in
        for side in zip(*pairs, strict=True):
            assert len(set(side)) == len(side), f"a block is copied twice: {pairs}"
        assert len(pairs) <= min(self.scheduler.pool.count, self.scheduler.swap.count)
        if plan.prefill is not None:
            chunk = plan.prefill
            assert chunk.request not in rows
            assert chunk.start % self.max_chunk == 0 and 1 <= chunk.count <= self.max_chunk
            assert chunk.count == self.max_chunk or chunk.final
        if oldest is not None:
            progress = oldest in rows or (plan.prefill and plan.prefill.request is oldest)
            all_sampled = oldest.job.placed.least == oldest.job.max_new_tokens
            waits = oldest.job.guided and self.is_ahead(oldest)
            assert progress or all_sampled or waits, f"the oldest does not advance: {oldest!r}"
        assert not any(self.is_ahead(row) for row in rows if row.job.guided), "it was not read"
        sampling = [*rows, *(chunk.request for chunk in plan.chunks if chunk.final)]
        assert plan.guided == any(row.job.guided for row in sampling)
        assert plan.masks_changed == (plan.options_changed or plan.guided)

    def check_picture(self, plan: Plan, updates: dict[str, Any]) -> None:
        """The flagged updates alone leave the fields as a full one would."""
        everything = dataclasses.replace(
            plan, rows_changed=True, slots_changed=True, tables_changed=True
        )
        full = copy.deepcopy(host_updates(everything, self.scheduler.slots))
        self.picture |= updates
        stale = [name for name in full if self.picture.get(name) != full[name]]
        assert not stale, f"changed without a flag: {stale}"

    @property
    def plan_bound(self) -> int:
        """Plans that suffice: in each the oldest advances, or its last tokens are in flight."""
        return sum(
            -(-request.job.prompt_len // self.max_chunk)
            + request.job.max_new_tokens * (1 + request.job.guided * self.lookahead)
            + self.lookahead
            + 1
            for request in self.requests
        )

    def drain(self) -> None:
        """Run to the end; everything finishes in bounded time and gives back what it held."""
        for _ in range(self.plan_bound + 1):
            if not (self.scheduler.busy or self.in_flight or self.cancelled):
                break
            self.step()
        assert self.plans <= self.plan_bound
        assert_all_free(self.scheduler)
        assert not self.in_flight
        for request in self.requests:
            assert request.finished and request.job.placement is None
            stop_at = next(iter(request.job.stops.ids), request.job.max_len)
            tokens = list(range(request.job.prompt_len, min(stop_at + 1, request.job.max_len)))
            if request.finish_reason == "cancelled":
                tokens = tokens[: len(request.token_ids)]
            assert request.token_ids == tokens
        counters = self.scheduler.counters
        assert counters["pauses"] == sum(request.pauses for request in self.requests)
        assert counters["resumes"] <= counters["pauses"]


# Blocks.


def test_a_pool_hands_out_each_block_once_and_reuses_the_last_freed_first() -> None:
    pool = BlockPool(4, first=1)
    first, second = pool.take(2), pool.take(1)
    assert (first, second, pool.free) == ([1, 2], [3], 1)
    pool.give_back(first)
    assert first == [] and pool.free == 3
    assert pool.take(3) == [1, 2, 4]


def test_a_pool_never_hands_out_more_than_it_has() -> None:
    with pytest.raises(AssertionError, match="count=3 of 2 free blocks"):
        BlockPool(2).take(3)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert make_scheduler(block_size=4).blocks_for(tokens) == blocks


# Submitting.


def test_a_request_that_no_pool_can_hold_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(kv_blocks=3, block_size=4)
    with pytest.raises(ValueError) as refused:
        submit(scheduler, 7, 7)
    assert str(refused.value) == (
        "a request of 14 tokens (prompt 7 + 7 new) needs 4 KV blocks of 4 tokens; the pool has 3"
    )
    assert not scheduler.busy
    submit(scheduler, 7, 6)
    assert scheduler.busy


def test_nothing_submitted_plans_nothing() -> None:
    assert make_scheduler().plan() is None


# Prefill and decode.


def test_a_prompt_is_cut_at_multiples_of_the_chunk_and_then_decodes() -> None:
    scheduler = make_scheduler(max_chunk=8)
    request = submit(scheduler, 19, 3)
    chunks = []
    for _ in range(3):
        plan = plan_of(scheduler)
        assert plan.prefill is not None and plan.rows == ()
        chunks.append((plan.prefill.start, plan.prefill.count, plan.prefill.final))
    assert chunks == [(0, 8, False), (8, 8, False), (16, 3, True)]
    for _ in range(2):
        plan = plan_of(scheduler)
        assert plan.rows == (request,) and plan.prefill is None
    assert request.job.placed.least == request.job.placed.most == 3
    assert scheduler.plan() is None, "all its tokens are in flight"


def test_a_request_of_one_new_token_needs_no_decode_row() -> None:
    scheduler = make_scheduler()
    submit(scheduler, 8, 1)
    plan = plan_of(scheduler)
    assert plan.prefill is not None and plan.prefill.final
    assert scheduler.plan() is None


def test_one_prompt_is_fed_at_a_time_while_others_decode() -> None:
    scheduler = make_scheduler(max_chunk=4)
    first, second = submit(scheduler, 4, 9), submit(scheduler, 8, 9)
    plans = [plan_of(scheduler) for _ in range(4)]
    fed = [plan.prefill.request if plan.prefill else None for plan in plans]
    assert fed == [first, second, second, None]
    assert [plan.rows for plan in plans] == [(), (first,), (first,), (first, second)]


def test_a_row_gets_its_next_block_when_it_enters_it() -> None:
    scheduler = make_scheduler(block_size=4)
    request = submit(scheduler, 3, 9)
    plans = [plan_of(scheduler) for _ in range(8)]
    changed = [plan.tables_changed for plan in plans]
    # Positions 3, 4, ... 9 are decoded by plans 1, 2, ... 7: blocks begin at 4 and 8.
    assert changed == [True, False, True, False, False, False, True, False]
    assert len(request.job.placed.blocks) == 3


def test_in_steady_state_nothing_changes() -> None:
    scheduler = make_scheduler(block_size=16, kv_blocks=4)
    submit(scheduler, 2, 12), submit(scheduler, 2, 12)
    for _ in range(3):
        plan_of(scheduler)
    for _ in range(9):
        plan = plan_of(scheduler)
        assert len(plan.rows) == 2
        assert not (plan.rows_changed or plan.slots_changed or plan.tables_changed)
        assert host_updates(plan, scheduler.slots) == {}


def test_in_steady_state_a_plan_is_the_one_before() -> None:
    scheduler = make_scheduler(block_size=8, kv_blocks=4)
    first = submit(scheduler, 2, 12)
    # Positions 2 .. 12 are decoded by plans 1 .. 11; a block begins at 8, plan 7.
    plans = [plan_of(scheduler) for _ in range(12)]
    repeated = [after is before for before, after in pairwise(plans)]
    assert repeated == [False, *[False, *[True] * 4], *[False, False, *[True] * 3]]
    assert first.job.placed.least == first.job.placed.most == 12 and scheduler.plan() is None


@pytest.mark.parametrize("slots", [1, 2])
def test_whoever_waits_in_vain_does_not_end_the_steady_state(slots: int) -> None:
    """For a slot or for blocks: nothing is freed before somebody is retired."""
    scheduler = make_scheduler(slots=slots, block_size=8, kv_blocks=2)
    running = submit(scheduler, 2, 12)
    waiting = submit(scheduler, 2, 12)
    plans = [plan_of(scheduler) for _ in range(6)]
    assert plans[-1] is plans[-2] and waiting.phase is Phase.WAITING
    scheduler.retire(running)
    plan = plan_of(scheduler)
    assert plan.prefill is not None and plan.prefill.request is waiting


def test_a_plan_says_whether_a_row_is_filtered() -> None:
    scheduler = make_scheduler(block_size=16)
    plain, filtered = make_request(2, 12), make_request(2, 8, top_k=5)
    for request in (plain, filtered):
        scheduler.submit(request)
    plans = [plan_of(scheduler) for _ in range(9)]
    # Prefill of the one, prefill of the other beside it, then seven steps of both.
    assert [len(plan.rows) for plan in plans] == [0, 1, *[2] * 7]
    assert [plan.full for plan in plans] == [False, False, *[True] * 7]
    assert plans[5] is plans[4], "repeated plans say so too"
    scheduler.retire(filtered)
    plan = plan_of(scheduler)
    assert plan.rows == (plain,) and not plan.full


def test_a_newcomer_ends_the_steady_state() -> None:
    scheduler = make_scheduler(block_size=16)
    submit(scheduler, 2, 12)
    plans = [plan_of(scheduler) for _ in range(5)]
    assert plans[-1] is plans[-2]
    second = submit(scheduler, 2, 12)
    plan = plan_of(scheduler)
    assert plan.prefill is not None and plan.prefill.request is second
    assert plan_of(scheduler).rows_changed


class Forgetful(Scheduler):
    """Plans each step from the beginning."""

    def _holds_for(self, plan: Plan) -> int:
        return 0


Call = tuple[str, tuple[Any, ...]]
CALLS: st.SearchStrategy[list[Call]] = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.tuples(
                st.integers(1, 12),
                st.integers(1, 16),
                st.none() | st.integers(0, 8),
                st.booleans(),
            ),
        ),
        st.tuples(st.just("cancel"), st.tuples(st.integers(0, 20))),
        st.tuples(st.just("step"), st.tuples(st.booleans())),
        st.tuples(st.just("steps"), st.tuples(st.integers(2, 12))),
        st.tuples(st.just("execute"), st.just(())),
        st.tuples(st.just("width"), st.tuples(st.integers(1, 6))),
    ),
    max_size=40,
)
# A width, positions of a drafter after it, and how the device accepts.
DRAFTS = {
    "width": st.just(1) | st.integers(2, 6),
    "extra": st.integers(0, 5),
    "max_seq_len": st.integers(28, 36),
    "accept": st.integers(0, 9).map(accepting),
}


@settings(max_examples=300, deadline=None)
@given(
    calls=CALLS,
    sizes=st.fixed_dictionaries(
        {
            "lookahead": st.integers(0, 1),
            "slots": st.integers(1, 4),
            "kv_blocks": st.integers(1, 12),
            "swap_blocks": st.integers(0, 20),
            "block_size": st.integers(1, 8),
            "max_chunk": st.integers(1, 6),
        }
        | DRAFTS
    ),
)
def test_repeated_plans_are_what_planning_from_the_beginning_gives(
    calls: list[Call], sizes: dict[str, Any]
) -> None:
    runs = [
        plans_of_a_run(calls, Simulation(kind=kind, **sizes)) for kind in (Scheduler, Forgetful)
    ]
    assert runs[0] == runs[1]


def plans_of_a_run(calls: list[Call], simulation: Simulation) -> list[Any]:
    """Every plan that the calls lead to, and what the requests hold after each call."""
    seen: list[Any] = []
    launch = simulation.launch

    def record(plan: Plan) -> None:
        chunk = plan.prefill
        seen.append(
            (
                [request.id for request in plan.rows],
                plan.epochs,
                plan.width,
                chunk and (chunk.request.id, chunk.start, chunk.count),
                (plan.swap_out, plan.swap_in),
                (plan.rows_changed, plan.slots_changed, plan.tables_changed),
            )
        )
        launch(plan)

    simulation.launch = record  # type: ignore[method-assign]
    for name, arguments in calls:
        if name == "submit":
            prompt, new, stop, guided = arguments
            simulation.submit(prompt, new, None if stop is None else prompt + stop, guided=guided)
        elif name == "cancel":
            for request in simulation.requests[arguments[0] : arguments[0] + 1]:
                request.cancel()
        elif name == "step":
            simulation.step(collect=arguments[0])
        elif name == "steps":
            for _ in range(arguments[0]):
                simulation.step()
        elif name == "width":
            simulation.set_width(arguments[0])
        else:
            simulation.execute()
        seen.append(
            [(request.phase, repr(request.job.placement)) for request in simulation.requests]
        )
    simulation.drain()
    return [*seen, simulation.scheduler.counters]


# Drafts.


def drafting(width: int = 4, extra: int = 2, **sizes: int) -> Scheduler:
    defaults = {"tokens_per_step": width, "reserve_extra": extra, "max_seq_len": 64}
    return make_scheduler(**(defaults | sizes))


def bounds(request: Request) -> tuple[int, int]:
    return request.job.placed.least, request.job.placed.most


def test_a_step_samples_between_one_token_and_its_width_until_it_is_read() -> None:
    scheduler = drafting(width=4)
    request = submit(scheduler, 5, 20)
    seen = []
    for _ in range(3):
        assert plan_of(scheduler).width == 4
        seen.append(bounds(request))
    assert seen == [(1, 1), (2, 5), (3, 9)]
    scheduler.collected(request, 4, 3)
    assert bounds(request) == (5, 8)
    scheduler.collected(request, 4, 1)
    assert bounds(request) == (5, 5)


def test_a_row_that_was_a_no_op_has_sampled_nothing() -> None:
    scheduler = drafting(width=4)
    request = submit(scheduler, 5, 20)
    plan_of(scheduler), plan_of(scheduler)
    scheduler.collected(request, 4, 0)
    assert bounds(request) == (1, 1)


def test_a_no_op_ends_the_steady_state_of_others() -> None:
    """The row had no token left to sample; now it has one again."""
    scheduler = drafting(width=4, block_size=32)
    first, second = submit(scheduler, 5, 2), submit(scheduler, 5, 20)
    plans = [plan_of(scheduler) for _ in range(4)]
    assert plans[-1].rows == plans[-2].rows == (second,) and scheduler._repeats
    scheduler.collected(first, 4, 0)
    assert plan_of(scheduler).rows == (first, second)


def test_what_is_collected_of_a_retired_request_changes_nothing() -> None:
    scheduler = drafting(width=4)
    request = submit(scheduler, 5, 20)
    plan_of(scheduler), plan_of(scheduler)
    scheduler.retire(request)
    scheduler.collected(request, 4, 2)
    assert_all_free(scheduler)


def test_nothing_is_collected_that_cannot_have_been_sampled() -> None:
    scheduler = drafting(width=4)
    request = submit(scheduler, 5, 20)
    plan_of(scheduler), plan_of(scheduler)
    with pytest.raises(AssertionError, match="count=5 of width=4"):
        scheduler.collected(request, 4, 5)
    scheduler.collected(request, 4, 4)
    with pytest.raises(AssertionError, match="no row of width=4 in flight"):
        scheduler.collected(request, 4, 1)


def test_a_row_has_blocks_for_all_that_its_step_and_its_drafter_may_write() -> None:
    scheduler = drafting(width=4, extra=2, block_size=1, kv_blocks=40, max_chunk=16)
    request = submit(scheduler, 5, 20)
    held = []
    for _ in range(4):
        plan_of(scheduler)
        held.append(len(request.job.placed.blocks))
    # The prompt and its drafter; 4 more a step while none is read.
    assert held == [5 + 2, 5 + 4 + 2, 9 + 4 + 2, 13 + 4 + 2]
    for _ in range(3):
        scheduler.collected(request, 4, 1)
    plan_of(scheduler)
    assert len(request.job.placed.blocks) == 19, "8 tokens, 4 more and 2: what it had suffices"
    assert bounds(request) == (5, 8)


@pytest.mark.parametrize(("max_seq_len", "blocks"), [(64, 16), (15, 15), (14, 14)])
def test_no_row_has_blocks_past_its_end(max_seq_len: int, blocks: int) -> None:
    """13 positions of the target's and 3 of the drafter's, which no table may exceed."""
    scheduler = drafting(width=4, extra=3, block_size=1, kv_blocks=16, max_seq_len=max_seq_len)
    request = submit(scheduler, 5, 9)
    while scheduler.plan() is not None:
        pass
    assert bounds(request) == (9, 33), "a token a step at least: 8 steps in flight"
    assert len(request.job.placed.blocks) == blocks


def test_the_drafter_counts_where_a_request_is_refused() -> None:
    scheduler = drafting(width=4, extra=3, block_size=4, kv_blocks=3, max_seq_len=15)
    submit(scheduler, 7, 3)
    with pytest.raises(ValueError) as refused:
        submit(scheduler, 7, 4)
    assert str(refused.value) == (
        "a request of 11 tokens (prompt 7 + 4 new) and 3 more of its drafter needs 4 KV blocks of "
        "4 tokens; the pool has 3"
    )
    with pytest.raises(ValueError, match=r"new\) and 1 more of its drafter needs 4 KV blocks"):
        submit(scheduler, 7, 8)


def test_a_row_runs_on_until_all_its_tokens_are_surely_in_flight() -> None:
    scheduler = drafting(width=4, block_size=16)
    request = submit(scheduler, 5, 6)
    for _ in range(4):
        plan_of(scheduler)
    assert bounds(request) == (4, 13)
    scheduler.collected(request, 4, 3)
    assert bounds(request) == (6, 12), "3 read, and one each of 2 steps in flight"
    assert scheduler.plan() is None


def test_plans_repeat_while_the_widest_steps_have_blocks() -> None:
    # A pool that could hold all slots at their longest would give the request all its blocks.
    scheduler = drafting(width=4, extra=2, block_size=16, max_chunk=16, slots=8)
    request = submit(scheduler, 5, 30)
    plans = [plan_of(scheduler) for _ in range(6)]
    # 5 + 2 positions at first; 4 more in each of two steps; the third takes a block: 13 + 4 + 2.
    assert [plan.tables_changed for plan in plans] == [True, False, False, True, False, False]
    # The first plan that holds is made anew with its flags down; three more fit the two blocks.
    assert [after is before for before, after in pairwise(plans)] == [False] * 4 + [True]
    assert bounds(request) == (6, 21)


def test_a_row_that_is_soon_done_ends_the_steady_state() -> None:
    """The plans to repeat were counted at a token each; the third one has nothing to sample."""
    scheduler = drafting(width=4, block_size=32)
    request = submit(scheduler, 5, 6)
    plans = [plan_of(scheduler) for _ in range(3)]
    assert scheduler._repeats == 3
    scheduler.collected(request, 4, 4)
    assert bounds(request) == (6, 9) and scheduler.plan() is None
    assert plans[-1].rows == (request,)


def test_a_row_that_is_done_sooner_shortens_the_steady_state() -> None:
    """The steps at width 1 that follow are never collected, so that nothing else would end it."""
    scheduler = drafting(width=4, block_size=32)
    request = submit(scheduler, 5, 9)
    plan_of(scheduler), plan_of(scheduler)
    scheduler.width = 1
    plans = [plan_of(scheduler), plan_of(scheduler)]
    scheduler.collected(request, 4, 4)
    assert bounds(request) == (7, 7)
    plans += [plan_of(scheduler), plan_of(scheduler)]
    assert bounds(request) == (9, 9) and scheduler.plan() is None
    assert all(plan.rows == (request,) for plan in plans)


def test_another_width_ends_the_steady_state() -> None:
    scheduler = drafting(width=4, block_size=64)
    request = submit(scheduler, 5, 30)
    plans = [plan_of(scheduler) for _ in range(5)]
    assert plans[-1] is plans[-2]
    scheduler.width = 4
    assert scheduler.plan() is plans[-1]
    scheduler.width = 1
    before = bounds(request)
    plan = plan_of(scheduler)
    assert plan.width == 1 and not (plan.rows_changed or plan.tables_changed)
    assert bounds(request) == (before[0] + 1, before[1] + 1)
    assert host_updates(plan, scheduler.slots) == {}


@pytest.mark.parametrize("width", [0, 5])
def test_a_width_that_is_not_captured_is_refused(width: int) -> None:
    scheduler = drafting(width=4)
    with pytest.raises(AssertionError, match=f"width={width} of 4"):
        scheduler.width = width


def test_drafters_need_to_know_where_tables_end() -> None:
    with pytest.raises(AssertionError, match="reserve_extra=1 without a bound"):
        make_scheduler(tokens_per_step=2, reserve_extra=1)


def paused_in_flight() -> tuple[Scheduler, Request, Request]:
    """The younger request pauses after three rows of its own that nobody has read."""
    scheduler = drafting(width=4, extra=2, block_size=2, kv_blocks=24, swap_blocks=24, max_chunk=8)
    older, younger = submit(scheduler, 4, 30), submit(scheduler, 4, 30)
    for _ in range(5):
        plan_of(scheduler)
    assert bounds(younger) == (4, 13)
    return scheduler, older, younger


def test_a_pause_copies_all_that_the_rows_in_flight_may_write() -> None:
    scheduler, older, younger = paused_in_flight()
    held = list(younger.job.placed.blocks)
    scheduler.pool.take(scheduler.pool.free)
    plan = plan_of(scheduler)
    assert younger.phase is Phase.PAUSED and plan.rows == (older,)
    # 4 + 12 positions and 2 of the drafter's.
    assert [origin for origin, _ in plan.swap_out] == held[:9]


def test_a_resume_copies_only_what_was_written_after_all() -> None:
    scheduler, older, younger = paused_in_flight()
    scheduler.pool.take(scheduler.pool.free)
    plan_of(scheduler)
    saved = list(younger.job.placed.swap_blocks)
    for count in (1, 2, 1):
        scheduler.collected(younger, 4, count)
    assert bounds(younger) == (5, 5)
    scheduler.retire(older)
    plan = plan_of(scheduler)
    # 4 + 4 positions and 2 of the drafter's; the next step may write 4 more.
    assert [origin for origin, _ in plan.swap_in] == saved[:5]
    assert [to for _, to in plan.swap_in] == younger.job.placed.blocks[:5]
    assert len(younger.job.placed.blocks) == 7 and plan.rows == (younger,)
    assert scheduler.swap.free == scheduler.swap.count


@pytest.mark.parametrize(("spare", "resumed"), [(3, 1), (4, 2)])
def test_a_resumed_row_leaves_the_blocks_of_a_step_before_the_next(
    spare: int, resumed: int
) -> None:
    sizes = {"kv_blocks": 99, "swap_blocks": 99, "block_size": 1}
    scheduler = drafting(width=4, extra=0, **sizes)
    oldest, *younger = (submit(scheduler, 4, new) for new in (40, 14, 14))
    run_until(scheduler, younger[-1], Phase.DECODE)
    for victim in reversed(younger):
        while victim.phase is not Phase.PAUSED:
            scheduler.pool.take(scheduler.pool.free)
            plan_of(scheduler)
    scheduler.retire(oldest)
    needs = [len(request.job.placed.swap_blocks) + 4 for request in younger]
    scheduler.pool.take(scheduler.pool.free - sum(needs) - spare)
    assert plan_of(scheduler).rows == tuple(younger[:resumed])


@pytest.mark.parametrize(("kv_blocks", "admitted"), [(19, 1), (20, 2)])
def test_a_newcomer_leaves_each_row_the_blocks_of_a_step(kv_blocks: int, admitted: int) -> None:
    """Prompts of 8 tokens and a drafter's 3 at a token a block, or less."""
    scheduler = drafting(
        width=5, extra=3, block_size=2, kv_blocks=kv_blocks, swap_blocks=99, max_seq_len=16
    )
    scheduler.pool.take(5)
    submit(scheduler, 8, 2), submit(scheduler, 8, 2)
    plan_of(scheduler)
    assert len(scheduler.active) == admitted


# Slots.


def test_first_come_first_served_even_where_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(kv_blocks=8, block_size=4)
    running = submit(scheduler, 20, 4)
    large, small = submit(scheduler, 16, 4), submit(scheduler, 1, 1)
    plan_of(scheduler)
    assert [running.phase, large.phase, small.phase] == [
        Phase.PREFILL,
        Phase.WAITING,
        Phase.WAITING,
    ]
    scheduler.retire(running)
    plan_of(scheduler)
    assert scheduler.active == [large, small]


def test_a_freed_slot_is_reused_in_a_new_epoch() -> None:
    scheduler = make_scheduler(slots=2)
    first, second, third = (submit(scheduler, 4, 4) for _ in range(3))
    assert plan_of(scheduler).slots_changed
    assert third.phase is Phase.WAITING
    old = first.job.placed.epoch
    scheduler.retire(first)
    plan = plan_of(scheduler)
    assert plan.slots_changed and plan.tables_changed
    assert third.job.placed.slot == 0 and third.job.placed.epoch > second.job.placed.epoch > old > 0
    assert (scheduler.counters["admitted"], scheduler.counters["slot_reuses"]) == (3, 1)


def test_rows_are_ordered_by_slot_not_by_age() -> None:
    scheduler = make_scheduler(slots=2)
    first, second, third = (submit(scheduler, 4, 9) for _ in range(3))
    run_until(scheduler, second, Phase.DECODE)
    scheduler.retire(first)
    run_until(scheduler, third, Phase.DECODE)
    plan = plan_of(scheduler)
    assert scheduler.active == [second, third]
    assert plan.rows == (third, second) and plan.rows_changed


def test_changes_outlive_a_step_without_a_plan() -> None:
    scheduler = make_scheduler(slots=1)
    request = submit(scheduler, 4, 4)
    plan_of(scheduler)
    scheduler.retire(request)
    assert scheduler.plan() is None
    submit(scheduler, 4, 4)
    plan = plan_of(scheduler)
    assert plan.slots_changed and plan.tables_changed


def test_the_options_of_a_retired_request_are_taken_back() -> None:
    """Its successor in the slot may have none, and must not get these."""
    scheduler = make_scheduler(slots=1)
    request = submit(scheduler, 4, 4)
    request.job.processing = cast(Processing, object())
    assert plan_of(scheduler).options_changed and not plan_of(scheduler).options_changed
    scheduler.retire(request)
    plain = submit(scheduler, 4, 4)
    plan = plan_of(scheduler)
    assert plan.options_changed and plan.masks_changed
    scheduler.retire(plain)
    submit(scheduler, 4, 4)
    assert not plan_of(scheduler).options_changed


# A short pool.


def short_pool(others: int = 0) -> tuple[Scheduler, Request, Request]:
    """An older request of two blocks and a younger one of two: the pool of four is full.

    others  blocks that it has besides, the last ones, and that somebody holds
    """
    scheduler = make_scheduler(kv_blocks=4 + others, swap_blocks=3, block_size=4, max_chunk=8)
    scheduler.pool.give_back(scheduler.pool.take(4 + others)[:4])
    older, younger = submit(scheduler, 5, 11), submit(scheduler, 4, 8)
    for _ in range(4):
        plan = plan_of(scheduler)
    assert plan.rows == (older, younger) and scheduler.pool.free == 0
    return scheduler, older, younger


def short_pool_with_a_pause() -> tuple[Scheduler, Request, Request]:
    """The older request entered its third block, for which the younger one paused."""
    scheduler, older, younger = short_pool()
    run_until(scheduler, younger, Phase.PAUSED, limit=1)
    return scheduler, older, younger


def test_the_youngest_pauses_for_an_older_one() -> None:
    scheduler, older, younger = short_pool()
    held = list(younger.job.placed.blocks)
    plan = plan_of(scheduler)
    assert younger.phase is Phase.PAUSED
    assert plan.rows == (older,) and plan.rows_changed and plan.tables_changed
    assert [origin for origin, _ in plan.swap_out] == held
    assert [to for _, to in plan.swap_out] == younger.job.placed.swap_blocks
    assert plan.swap_in == () and younger.job.placed.blocks == []
    assert (younger.pauses, older.pauses, scheduler.counters["pauses"]) == (1, 0, 1)


def test_nobody_pauses_for_a_row_that_would_lack_blocks_all_the_same() -> None:
    """It skips the step; copies out would have no plan where it is the only one."""
    scheduler = drafting(width=4, extra=0, block_size=2, kv_blocks=40, swap_blocks=40)
    oldest, middle, youngest = (submit(scheduler, *size) for size in ((5, 6), (5, 20), (1, 20)))
    run_until(scheduler, youngest, Phase.DECODE, limit=3)
    taken = scheduler.pool.take(scheduler.pool.free)
    plan = plan_of(scheduler)
    assert plan.rows == (oldest,) and scheduler.counters["stalled_rows"] == 2
    assert not scheduler.counters["pauses"] and not plan.swap_out
    # With what the youngest has, one more is enough.
    scheduler.pool.give_back(taken[:1])
    plan = plan_of(scheduler)
    assert youngest.phase is Phase.PAUSED and plan.rows == (oldest, middle)
    assert len(plan.swap_out) == 1 and plan.tables_changed


def test_a_paused_request_resumes_where_it_was_and_runs_at_once() -> None:
    scheduler, older, younger = short_pool_with_a_pause()
    saved, sampled = list(younger.job.placed.swap_blocks), younger.job.placed.least
    scheduler.retire(older)
    plan = plan_of(scheduler)
    assert [origin for origin, _ in plan.swap_in] == saved
    assert [to for _, to in plan.swap_in] == younger.job.placed.blocks[: len(saved)]
    assert plan.rows == (younger,) and plan.swap_out == () and plan.tables_changed
    assert younger.job.placed.least == sampled + 1 and younger.job.placed.swap_blocks == []
    assert scheduler.counters["resumes"] == 1 and scheduler.swap.free == scheduler.swap.count


def test_a_paused_request_waits_until_the_running_rows_can_still_grow() -> None:
    # Two blocks stand for a third request's.
    scheduler, older, younger = short_pool(others=2)
    run_until(scheduler, younger, Phase.PAUSED, limit=1)
    assert scheduler.pool.free == 1 and scheduler.blocks_for(younger.job.placed.least + 4) == 2
    # It takes two, and one for the row that runs.
    scheduler.pool.give_back([5])
    assert plan_of(scheduler).rows == (older,)
    scheduler.pool.give_back([6])
    assert plan_of(scheduler).rows == (older, younger)


def test_a_paused_request_may_take_the_whole_pool_when_nobody_runs() -> None:
    scheduler, older, younger = short_pool_with_a_pause()
    scheduler.retire(older)
    scheduler.pool.take(2)
    assert plan_of(scheduler).rows == (younger,) and scheduler.pool.free == 0


def test_paused_requests_resume_in_order_even_where_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(block_size=4, max_chunk=8)
    oldest, large = submit(scheduler, 5, 15), submit(scheduler, 8, 8)
    small = submit(scheduler, 1, 7)
    run_until(scheduler, small, Phase.DECODE)
    assert plan_of(scheduler).rows == (oldest, large, small)
    others = scheduler.pool.take(scheduler.pool.free)
    run_until(scheduler, large, Phase.PAUSED)
    assert small.phase is Phase.PAUSED and scheduler.pool.free == 2
    assert len(small.job.placed.swap_blocks) == 1, "it would fit beside the oldest"
    assert plan_of(scheduler).rows == (oldest,)
    scheduler.pool.give_back(others[:3])
    assert plan_of(scheduler).rows == (oldest, large)


def test_nobody_is_admitted_past_a_paused_request() -> None:
    scheduler = make_scheduler(kv_blocks=7, swap_blocks=6, block_size=4, max_chunk=16)
    older, younger = submit(scheduler, 5, 11), submit(scheduler, 13, 5)
    run_until(scheduler, younger, Phase.PAUSED)
    late = submit(scheduler, 1, 1)
    assert scheduler.pool.free == 3, "a block for each row and one for the newcomer"
    plan_of(scheduler)
    assert (younger.phase, late.phase) == (Phase.PAUSED, Phase.WAITING)
    scheduler.retire(older)
    plan_of(scheduler)
    assert scheduler.active == [younger, late]


@pytest.mark.parametrize(("kv_blocks", "admitted"), [(4, 1), (5, 2)])
def test_a_newcomer_leaves_a_block_for_each_row_that_runs(kv_blocks: int, admitted: int) -> None:
    scheduler = make_scheduler(kv_blocks=kv_blocks, block_size=4)
    submit(scheduler, 8, 8), submit(scheduler, 8, 8)
    plan_of(scheduler)
    assert len(scheduler.active) == admitted


def test_only_blocks_with_tokens_are_swapped() -> None:
    scheduler = make_scheduler(kv_blocks=6, swap_blocks=6, block_size=4, max_chunk=4)
    older, younger = submit(scheduler, 3, 9), submit(scheduler, 16, 4)
    assert plan_of(scheduler).prefill is not None
    plan = plan_of(scheduler)
    assert plan.prefill is not None and plan.prefill.request is younger
    held = list(younger.job.placed.blocks)
    assert (len(held), younger.job.placed.prefilled) == (4, 4)
    scheduler.pool.take(scheduler.pool.free)
    plan = plan_of(scheduler)
    assert plan.rows == (older,) and plan.prefill is None
    assert [origin for origin, _ in plan.swap_out] == held[:1]


def test_a_request_paused_within_its_prompt_is_fed_on_after_its_resume() -> None:
    scheduler = make_scheduler(kv_blocks=6, swap_blocks=6, block_size=4, max_chunk=4)
    older, younger = submit(scheduler, 3, 9), submit(scheduler, 16, 4)
    plan_of(scheduler), plan_of(scheduler)
    scheduler.pool.take(scheduler.pool.free)
    run_until(scheduler, younger, Phase.PAUSED, limit=1)
    scheduler.retire(older)
    plan = plan_of(scheduler)
    assert len(plan.swap_in) == 1 and len(younger.job.placed.blocks) == 4
    assert plan.prefill is not None and (plan.prefill.start, plan.prefill.count) == (4, 4)


def test_a_row_with_nobody_younger_stalls_and_keeps_its_blocks() -> None:
    scheduler = make_scheduler(kv_blocks=5, swap_blocks=3, block_size=4, max_chunk=8)
    older, younger = submit(scheduler, 7, 9), submit(scheduler, 5, 7)
    run_until(scheduler, younger, Phase.DECODE)
    assert plan_of(scheduler).rows == (older, younger)
    held = list(younger.job.placed.blocks)
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [plan.rows for plan in plans] == [(older, younger), (older, younger), (older,)]
    assert plans[-1].rows_changed
    assert younger.phase is Phase.DECODE and younger.job.placed.blocks == held
    assert scheduler.counters["pauses"] == 0
    scheduler.retire(older)
    assert plan_of(scheduler).rows == (younger,)


def test_without_swap_a_request_waits_until_all_fit_at_their_greatest_lengths() -> None:
    scheduler = make_scheduler(kv_blocks=5, swap_blocks=0, block_size=4)
    first, second = submit(scheduler, 4, 8), submit(scheduler, 4, 8)
    third = submit(scheduler, 4, 4)
    plan_of(scheduler)
    assert scheduler.active == [first], "3 + 3 blocks exceed the pool of 5"
    scheduler.retire(first)
    plan_of(scheduler)
    assert scheduler.active == [second, third], "3 + 2 blocks fit"


def test_swap_must_hold_everyone_but_the_oldest() -> None:
    for swap_blocks, admitted in ((5, 2), (6, 3)):
        scheduler = make_scheduler(kv_blocks=7, swap_blocks=swap_blocks, block_size=4)
        for _ in range(3):
            submit(scheduler, 4, 8)
        plan_of(scheduler)
        assert len(scheduler.active) == admitted


# Retiring.


def test_a_waiting_request_leaves_the_queue() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, 4, 4)
    scheduler.retire(request)
    assert request.finished
    assert_all_free(scheduler)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_running_request_frees_what_it_holds(phase: Phase) -> None:
    scheduler = make_scheduler(max_chunk=4)
    request = submit(scheduler, 8, 4)
    run_until(scheduler, request, phase)
    scheduler.retire(request)
    assert request.finished and request.job.placement is None
    assert_all_free(scheduler)


def test_a_paused_request_frees_its_swap_blocks() -> None:
    scheduler, older, younger = short_pool_with_a_pause()
    scheduler.retire(younger)
    assert scheduler.swap.free == scheduler.swap.count
    scheduler.retire(older)
    assert_all_free(scheduler)


def test_a_request_left_alone_resumes_after_others_lacked_blocks() -> None:
    """The oldest has all its tokens in flight, so that nothing runs when the next one stalls."""
    scheduler = drafting(width=4, extra=0, block_size=2, kv_blocks=40, swap_blocks=40)
    oldest, middle, youngest = (submit(scheduler, *size) for size in ((5, 1), (5, 20), (1, 20)))
    run_until(scheduler, youngest, Phase.DECODE, limit=3)
    taken = scheduler.pool.take(scheduler.pool.free)
    assert scheduler.plan() is None
    for request in (oldest, middle):
        scheduler.retire(request)
    scheduler.pool.give_back(taken)
    assert plan_of(scheduler).rows == (youngest,)


# The simulation.


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, cancels and steps in any order, on any small sizes."""

    @initialize(
        lookahead=st.integers(0, 1),
        slots=st.integers(1, 4),
        kv_blocks=st.integers(1, 12),
        swap_blocks=st.integers(0, 20),
        block_size=st.integers(1, 4),
        max_chunk=st.integers(1, 6),
        **DRAFTS,
    )
    def start(self, **sizes: Any) -> None:
        self.simulation = Simulation(**sizes)

    @rule(
        prompt=st.integers(1, 12),
        new=st.integers(1, 16),
        stop=st.none() | st.integers(0, 8),
        guided=st.booleans(),
    )
    def submit(self, prompt: int, new: int, stop: int | None, guided: bool) -> None:
        self.simulation.submit(prompt, new, None if stop is None else prompt + stop, guided=guided)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.simulation.requests)).cancel()

    @rule()
    def step(self) -> None:
        self.simulation.step()

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @rule()
    def step_that_times_out(self) -> None:
        self.simulation.step(collect=False)

    @rule()
    def execute(self) -> None:
        self.simulation.execute()

    @rule(width=st.integers(1, 6))
    def set_width(self, width: int) -> None:
        self.simulation.set_width(width)

    @invariant()
    def owned_once(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check_ownership()
            self.simulation.check_bounds()

    def teardown(self) -> None:
        # Not after a failure: what the wreck does next would hide it.
        if hasattr(self, "simulation") and sys.exc_info()[0] is None:
            self.simulation.drain()


def test_any_order_of_calls_keeps_the_invariants() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        SchedulerMachine,
        settings=settings(max_examples=extent(80, 200), stateful_step_count=40, deadline=None),
    )


def random_run(
    seed: int,
    *,
    requests: int,
    lookahead: int,
    width: int = 1,
    extra: int = 0,
    guided: float = 0.0,
) -> Simulation:
    """A pool that cannot hold the slots' requests together, beside swap that can.

    guided  part of the requests whose grammars the host follows
    """
    rng = random.Random(seed)
    block_size, slots = rng.choice([1, 2, 4, 8]), rng.randint(2, 5)
    longest = rng.randint(3, 8)  # in blocks
    simulation = Simulation(
        lookahead=lookahead,
        slots=slots,
        kv_blocks=rng.randint(longest, longest * 3 // 2),
        swap_blocks=(slots - 1) * longest,
        block_size=block_size,
        max_chunk=rng.choice([1, 3, 8, 16]),
        width=width,
        extra=extra,
        max_seq_len=longest * block_size,
        accept=accepting(seed),
    )
    left = requests
    while left:
        if rng.random() < 0.6:
            left -= 1
            length = rng.randint(longest, longest * block_size)
            prompt = rng.randint(1, length // 3)
            stop = prompt + rng.randrange(length) if rng.random() < 0.4 else None
            reads = guided > 0 and rng.random() < guided
            assert simulation.submit(prompt, length - prompt, stop, guided=reads) is not None
        if rng.random() < 0.05:
            rng.choice(simulation.requests or [make_request(1, 1)]).cancel()
        if rng.random() < 0.3:
            simulation.execute()
        if width > 1 and rng.random() < 0.05:
            simulation.set_width(rng.choice([1, width]))
        simulation.step(collect=rng.random() < 0.9)
    simulation.drain()
    return simulation


@pytest.mark.parametrize("lookahead", [0, 1])
def test_small_pools_pause_and_resume_and_everything_finishes(lookahead: int) -> None:
    runs = [random_run(seed, requests=20, lookahead=lookahead) for seed in range(60)]
    scheduler = _total(run.scheduler.counters for run in runs)
    device = _total(run.device.counters for run in runs)
    assert scheduler["admitted"] > 1000 and scheduler["slot_reuses"] > 500
    assert scheduler["pauses"] > 100 and scheduler["resumes"] > 100
    assert scheduler["stalled_rows"] > 0
    assert sum(run.repeated for run in runs) > 100
    assert device["stops"] > 100
    if lookahead:
        assert device["stopped_rows"] > 0, "no row ran on after its stop token"
        assert sum(run.counters["discarded_tokens"] for run in runs) > 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("width", "extra"), [(2, 0), (4, 2), (6, 5)])
def test_small_pools_serve_drafts_too(lookahead: int, width: int, extra: int) -> None:
    sizes = {"lookahead": lookahead, "width": width, "extra": extra}
    runs = [random_run(seed, requests=20, **sizes) for seed in range(40)]
    scheduler = _total(run.scheduler.counters for run in runs)
    device = _total(run.device.counters for run in runs)
    assert scheduler["admitted"] > 700 and scheduler["slot_reuses"] > 300
    assert scheduler["pauses"] > 50 and scheduler["resumes"] > 50
    assert scheduler["stalled_rows"] > 0
    assert sum(run.repeated for run in runs) > 100
    assert device["drafts"] > 1000 and device["stops"] > 50 and device["cut_tokens"] > 0
    if lookahead:
        assert device["stopped_rows"] > 0


def _total(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())


@pytest.mark.parametrize("width", [1, 3])
def test_pauses_do_not_change_the_tokens(width: int) -> None:
    """Equal requests run in a roomy pool and in a tight one."""
    sizes = {"lookahead": 1, "slots": 4, "swap_blocks": 12, "block_size": 4, "max_chunk": 4}
    lengths = [(5, 11), (3, 13), (9, 7), (2, 14), (7, 9)]
    tokens = []
    for kv_blocks in (32, 5):
        simulation = Simulation(
            kv_blocks=kv_blocks, width=width, extra=width - 1, accept=accepting(2), **sizes
        )
        for prompt, new in lengths:
            simulation.submit(prompt, new)
        simulation.drain()
        tokens.append([request.token_ids for request in simulation.requests])
        assert (simulation.scheduler.counters["pauses"] > 0) == (kv_blocks == 5)
    assert tokens[0] == tokens[1]


def test_a_roomy_pool_gives_a_request_all_its_blocks_at_once() -> None:
    """Then its tables stay as they are, and a full house is admitted without one more block."""
    sizes = {"slots": 3, "kv_blocks": 24, "swap_blocks": 0, "block_size": 8, "max_chunk": 64}
    scheduler = Scheduler(**sizes, max_seq_len=64)
    requests = [submit(scheduler, 5, 59) for _ in range(3)]
    plans = [plan_of(scheduler) for _ in range(40)]
    assert [len(request.job.placed.blocks) for request in requests] == [8, 8, 8]
    assert scheduler.pool.free == 0
    assert not any(plan.tables_changed for plan in plans[4:])
    # Of a pool that is one block short each takes what it needs.
    scheduler = Scheduler(**(sizes | {"kv_blocks": 23, "swap_blocks": 24}), max_seq_len=64)
    request = submit(scheduler, 5, 59)
    plan_of(scheduler)
    assert len(request.job.placed.blocks) == 1


# Grammars.


def test_only_a_request_that_the_host_reads_first_sits_out() -> None:
    scheduler = make_scheduler(slots=3, kv_blocks=64, swap_blocks=0, lookahead=1)

    def submit_guided() -> Request:
        request = submit(scheduler, 5, 9)
        request.job.guide = Guide.__new__(Guide)
        return request

    def rows() -> tuple[list[Request], bool]:
        plan = plan_of(scheduler)
        assert plan.masks_changed == plan.guided
        return [*plan.rows], plan.guided

    def read(*requests: Request) -> None:
        for request in requests:
            request.job.tokens += [7] * (request.job.placed.most - len(request.token_ids))

    plain = submit(scheduler, 5, 9)
    run_until(scheduler, plain, Phase.DECODE)
    assert rows() == ([plain], False)
    first = submit_guided()
    plan = plan_of(scheduler)
    # Its prompt samples a token, with a mask.
    assert plan.rows == (plain,) and plan.guided and plan.masks_changed
    assert rows() == rows() == ([plain], False)
    read(first)
    assert rows() == ([plain, first], True)
    assert rows() == ([plain], False)
    read(plain)
    assert rows() == ([plain], False)
    read(first)
    second = submit_guided()
    assert rows() == ([plain, first], True)
    assert scheduler.counters["guided/sat_out"] == 4
    # Without others, both stay in step: each waits for the other's token, too.
    scheduler.retire(plain)
    read(second)
    assert scheduler.plan() is None
    read(first)
    assert rows() == ([first, second], True)
    assert scheduler.plan() is None
    read(first, second)
    assert rows() == ([first, second], True)
    scheduler.retire(first)
    scheduler.retire(second)
    assert (scheduler.guided, scheduler.lookahead) == (0, 1)


def test_those_that_sit_out_stay_in_step_beside_a_paused_request() -> None:
    scheduler = make_scheduler(slots=3, kv_blocks=64, swap_blocks=0, lookahead=1)
    first, second, plain = (submit(scheduler, 5, 9) for _ in range(3))
    for request in (first, second):
        request.job.guide = Guide.__new__(Guide)
    run_until(scheduler, plain, Phase.DECODE)
    first.job.tokens += [7] * first.job.placed.most
    assert second.job.waits and not first.job.waits
    assert not must_read(scheduler.active)
    plain.phase = Phase.PAUSED
    assert must_read(scheduler.active)
    second.job.tokens += [7] * second.job.placed.most
    assert not must_read(scheduler.active)


def test_a_request_that_resumes_before_its_token_is_read_sits_out() -> None:
    scheduler = make_scheduler(slots=2, kv_blocks=64, lookahead=1)
    plain, guided = submit(scheduler, 5, 9), submit(scheduler, 5, 9)
    guided.job.guide = Guide.__new__(Guide)
    run_until(scheduler, guided, Phase.DECODE)
    scheduler._pause(guided)
    assert plan_of(scheduler).swap_out
    plan = plan_of(scheduler)
    assert plan.swap_in and guided.phase is Phase.DECODE and plan.rows == (plain,)
    guided.job.tokens.append(7)
    assert plan_of(scheduler).rows == (plain, guided)


def test_launches_have_one_step_beside_a_request_that_sits_out() -> None:
    scheduler = make_scheduler(slots=2, kv_blocks=64, lookahead=1, steps_per_launch=3)
    plain = submit(scheduler, 5, 40)
    run_until(scheduler, plain, Phase.DECODE)
    assert plan_of(scheduler).steps == 3
    guided = submit(scheduler, 5, 9)
    guided.job.guide = Guide.__new__(Guide)
    run_until(scheduler, guided, Phase.DECODE)
    plan = plan_of(scheduler)
    assert (plan.rows, plan.steps) == ((plain,), 1)
    scheduler.retire(guided)
    assert plan_of(scheduler).steps == 3


@pytest.mark.parametrize(("lookahead", "width", "guided"), [(1, 1, 0.5), (2, 1, 0.3), (1, 4, 0.5)])
def test_small_pools_serve_requests_that_sit_out(lookahead: int, width: int, guided: float) -> None:
    sizes: dict[str, Any] = {"lookahead": lookahead, "width": width, "guided": guided}
    runs = [random_run(seed, requests=20, **sizes) for seed in range(extent(30, 200))]
    counters = _total(run.scheduler.counters for run in runs)
    assert counters["guided/sat_out"] > 300 and counters["pauses"] > 50


def test_nothing_is_launched_ahead_while_a_caller_may_force_tokens() -> None:
    scheduler = make_scheduler(slots=2, kv_blocks=64, swap_blocks=0, lookahead=1)
    plain = submit(scheduler, 5, 9)
    run_until(scheduler, plain, Phase.DECODE)
    assert scheduler.lookahead == 1
    first, waits = submit(scheduler, 5, 9), submit(scheduler, 5, 9)
    first.job.forcible = waits.job.forcible = True
    plan_of(scheduler)
    # The second one holds no slot.
    assert (scheduler.guided, scheduler.lookahead) == (1, 0)
    scheduler.retire(waits)
    scheduler.retire(first)
    assert (scheduler.guided, scheduler.lookahead) == (0, 1)
