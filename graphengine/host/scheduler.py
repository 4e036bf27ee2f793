"""Decides which requests run in the next step, and where their KV lives. Pure Python: no tensor, no
device.

The scheduler sees only what the host knows. A replay in flight may have stopped a row that the
scheduler still plans; such a row is a no-op on the device. All decisions take effect in stream
order, after the replays already launched, so blocks and slots may be reused as soon as they are
freed.

A step of `width` tokens a row (W: one and its drafts) samples 1 to W of them, and the host learns
how many when it reads the step (`collected`). Until then a request has two bounds: blocks are
reserved and copied for the `most` tokens that may have been sampled, and the request is planned as
long as the `least` leave one to sample. At W = 1 both bounds equal the number sampled.

A launch may run several steps in a row, for whose tokens all its rows then have blocks
(`_steps_of_launch`). It never pauses a request for them: where the pool lacks blocks, a launch is
one step. Rows that end within it are no-ops in its later steps.

Pauses always succeed: a request is admitted only while either all admitted requests fit the pool at
their greatest need, or all but the oldest fit the swap area. No bound exceeds the greatest need:
positions past the request's end are never written, except a few by its drafter, and those are part
of that need. So either the pool holds all requests, or each pause finds its swap blocks. The oldest
request is never paused and its greatest need fits the pool, so it advances by at least one token in
every plan until all its tokens are in flight; if it sits out, in the first plan after its last
token was read. It finishes, and so does every request after it.

Blocks that a request shares with others, or with a session (`reuse.py`), do not change this. Each
request is counted as if all its blocks were its own, so together they use no more than the sum.
Blocks without a user are free, as they are evicted on demand. So the pool lacks a block only while
other requests use some, and once those are paused the oldest has the whole pool. A pause copies
shared blocks as well, and the request resumes into blocks of its own. So a pause may free fewer
blocks than it copies; then the next youngest request is paused too.

In a roomy pool, which holds the longest request for every slot, no request pauses: the blocks that
a request may still need are free, whether it takes them at once or as it grows.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from graphengine.buckets import BucketLadder
from graphengine.host.block_pool import BlockPool
from graphengine.host.chunks import Chunks
from graphengine.host.reuse import Reuse
from graphengine.host.rings import WindowRing, WindowRings
from graphengine.host.step_plan import (
    NOTHING,
    Changes,
    Plan,
    count_launch,
    must_read,
    samples_guided,
    sitting_out,
)
from graphengine.host.waiting import check_queue, enqueue, has_room
from graphengine.options.prefill_cut import PrefillCut
from graphengine.requests.context import Context
from graphengine.requests.job import Job, Placement
from graphengine.requests.request import Phase, Request

Move = Literal["paused", "resumed", "finished"]


class Scheduler:
    """Admits, pauses, resumes and retires requests; first come, first served.

    The waiting request with the lowest priority number starts first, and among equal ones the one
    that came first. Priority decides only when a request starts: no request is paused for it.

    slots             requests that can hold a slot at once
    ladder            rows of the decode graphs; None: one graph with a row for every slot
    kv_blocks         pool blocks, numbered from 1 (block 0 is the dummy)
    swap_blocks       host blocks for paused requests
    max_chunk         most prompt tokens that a replay takes
    cut               where the chunks of prompts end; None: at multiples of `max_chunk`
    tokens_per_step   the greatest width of a step, and the initial one
    reserve_extra     positions that a drafter may write past those of the step or prompt it follows
    max_seq_len       positions in a block table; no drafter writes past them
    max_waiting       most requests that may wait for a slot; None: no limit
    lookahead         launches that may be made before an earlier one has been read
    steps_per_launch  most decode steps of a launch
    prompts_per_prefill
                      most prompts whose chunks a prefill replay takes
    prefix_caching    whether prompts find blocks of earlier prompts by their tokens
    kept_blocks       most blocks that idle sessions and prefixes may hold; None: all that are free
    tokens_after      tokens after a position that its entries in the caches depend on
    rings             rings of layers with a window, which keep only the newest tokens; each slot
                      has one of each
    state_places      most state checkpoints of recurrent layers
    counters          the counters to add to; None: its own
    note_all          whether the prompt tokens that a request skips are noted on the device for
                      every request; otherwise only for requests with options on their logits

    The tokens of a request whose grammar the host follows, or whose caller may force tokens, must
    be read before its next step can be launched. `guided` counts such requests with a slot. They
    sit out of launches until then, while the others go on; without others, nothing is launched.
    Callers expect each step to bring the token of a request that they may force, so `lookahead` is
    0 while one of these holds a slot.
    `followed` counts those whose grammar the device follows.
    `moves` notes which requests were paused, resumed and finished; its reader clears it.
    """

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        swap_blocks: int,
        block_size: int,
        max_chunk: int,
        cut: PrefillCut | None = None,
        tokens_per_step: int = 1,
        reserve_extra: int = 0,
        max_seq_len: int | None = None,
        ladder: BucketLadder | None = None,
        max_waiting: int | None = None,
        lookahead: int = 0,
        steps_per_launch: int = 1,
        prompts_per_prefill: int = 1,
        prefix_caching: bool = False,
        kept_blocks: int | None = None,
        tokens_after: int = 0,
        note_all: bool = False,
        rings: Sequence[WindowRing] = (),
        state_places: int = 0,
        counters: Counter[str] | None = None,
    ) -> None:
        assert tokens_per_step >= 1, f"{tokens_per_step=}"
        assert reserve_extra == 0 or max_seq_len is not None, f"{reserve_extra=} without a bound"
        self._ladder = BucketLadder(slots, (slots,)) if ladder is None else ladder
        self.block_size = block_size
        self.pool = BlockPool(kv_blocks, first=1, max_idle=kept_blocks)
        self.swap = BlockPool(swap_blocks)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.slots: list[Request | None] = [None] * slots
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.reuse = Reuse(
            self.pool,
            block_size=block_size,
            tokens_after=tokens_after,
            prefixes=prefix_caching,
            counters=self.counters,
            rings=WindowRings(rings, count=slots, block_size=block_size),
            state_places=state_places,
        )
        self._chunks = Chunks(
            cut=cut,
            largest=max_chunk,
            reuse=self.reuse,
            pool=self.pool,
            block_size=block_size,
            note_all=note_all,
            prompts=prompts_per_prefill,
            counters=self.counters,
        )
        self.moves: list[tuple[Move, int]] = []
        self.guided = self.followed = self._forcible = 0
        self.lookahead = self._usual_lookahead = lookahead
        self._max_waiting = max_waiting
        self._steps_per_launch = steps_per_launch
        self._tokens_per_step = tokens_per_step
        self._reserve_extra = reserve_extra
        self._max_seq_len = sys.maxsize if max_seq_len is None else max_seq_len
        # A pool that holds the longest request for every slot need not save blocks: a request gets
        # all its blocks at once, and the block tables do not change while it decodes. But no
        # session is evicted for tokens that the request may never sample: if too few blocks are
        # vacant, it gets those of its prompt, and more as it grows, for which there is room.
        self._roomy = slots * self.blocks_for(self._max_seq_len) <= kv_blocks
        self._width = tokens_per_step
        self._changes = Changes()
        # The previous plan; the next `_repeats` calls return it again, unless requests come or go.
        self._last = NOTHING
        self._repeats = 0
        self._epoch = 0
        self._slots_used: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.waiting or self.active)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """`pool` alone; data parallel ranks have one each."""
        return (self.pool,)

    def home(self, context: Context) -> Scheduler:
        """The scheduler whose blocks the context keeps: this one."""
        return self

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def width(self) -> int:
        """Tokens per row in the next plans, 1 .. tokens_per_step; may be set between plans."""
        return self._width

    @width.setter
    def width(self, width: int) -> None:
        assert 1 <= width <= self._tokens_per_step, f"{width=} of {self._tokens_per_step}"
        if width != self._width:
            self._width = width
            self._repeats = 0

    def _reach(self, job: Job, tokens: int) -> int:
        """Positions that target and drafter may have written once the target may have written the
        first `tokens`.

        The target writes no position past the request's end, and not that of its last token.
        """
        end = min(tokens, job.max_len - 1) + self._reserve_extra
        return min(end, self._max_seq_len)

    def _greatest_need(self, job: Job) -> int:
        """Blocks that the request takes at its greatest length."""
        return self.blocks_for(self._reach(job, job.max_len))

    def check_queue(self, count: int = 1) -> None:
        """QueueFull unless `count` more may wait, beyond those that get a slot in the next step."""
        check_queue(len(self.waiting), self.slots.count(None), self._max_waiting, count)

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait for a slot."""
        return has_room(len(self.waiting), self.slots.count(None), self._max_waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if it could not run with the whole pool to itself."""
        self.check_fits(request)
        enqueue(self.waiting, request)
        self._repeats = 0

    def check_fits(self, request: Request) -> None:
        """ValueError if the request could not run with the whole pool to itself."""
        job = request.job
        need = self._greatest_need(job)
        if need > self.pool.count:
            extra = self._reach(job, job.max_len) - (job.max_len - 1)
            drafts = f" and {extra} more of its drafter" if extra else ""
            raise ValueError(
                f"a request of {job.max_len} tokens (prompt {job.prompt_len} + "
                f"{job.max_new_tokens} new){drafts} needs {need} KV blocks of "
                f"{self.block_size} tokens; the pool has {self.pool.count}"
            )

    def retire(self, request: Request) -> None:
        """Remove a request in any phase, and free what it holds."""
        self._repeats = 0
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        job = request.job
        self.reuse.leave(request)
        placement = job.placement
        if placement is not None:
            self.active.remove(request)
            self.slots[placement.slot] = None
            self.reuse.ended(request)
            # Rejected drafts may have been written up to a step past the bound.
            written = placement.kv_len + self._tokens_per_step - 1
            self.reuse.end_ring(request, min(written, job.max_len - 1))
            self.pool.give_back(placement.blocks)
            self.swap.give_back(placement.swap_blocks)
            job.placement = None
            self._changes.slots = self._changes.tables = True
            self._changes.options |= job.processing is not None
            self._count_guided(job, -1)
        finish(request)
        self.moves.append(("finished", request.id))

    def close(self) -> None:
        """Cancel and retire all requests, and release the blocks of all sessions."""
        for request in [*self.active, *self.waiting]:
            request.cancel()
            self.retire(request)
        for context in list(self.reuse.contexts):
            self.reuse.close(context)
        self.reuse.states.clear()

    def plan(self) -> Plan | None:
        """The next step; None if nothing can be launched before something is collected.

        While the previous plan is known to hold, this only counts, and does not look at requests.
        """
        if self.guided and must_read(self.active):
            return None
        if self._repeats and not (self._last.guided and sitting_out(self._last.rows)):
            self._repeats -= 1
            count_launch(self._last)
            return self._last
        rows = self._grow_or_pause()
        sat_out = sitting_out(self.active) if self.guided else 0
        if not self._changes.swap_out:
            rows += self._resume(running=bool(rows))
            self._admit()
        chunks = self._chunks.next(self.active)
        if not rows and not chunks:
            return None
        self._changes.tables |= self._chunks.tables_changed
        self._chunks.tables_changed = False
        rows.sort(key=lambda request: request.job.placed.slot)
        steps = 1 if chunks else self._steps_of_launch(rows)
        changes, self._changes = self._changes, Changes()
        same = tuple(rows) == self._last.rows
        guided = self.guided > 0 and samples_guided(rows, chunks)
        if sat_out:
            self.counters["guided/sat_out"] += sat_out
        plan = Plan(
            rows=tuple(rows),
            bucket=self._ladder.pick(len(rows)) if rows else 0,
            # A request has one epoch, so epochs can change only with the rows.
            epochs=self._last.epochs if same else tuple(row.job.placed.epoch for row in rows),
            width=self._width,
            steps=steps,
            full=self._last.full if same else any(row.job.full for row in rows),
            prefill=chunks[0] if chunks else None,
            packed=chunks[1:],
            swap_out=tuple(changes.swap_out),
            swap_in=tuple(changes.swap_in),
            rows_changed=not same,
            slots_changed=changes.slots,
            tables_changed=changes.tables,
            options_changed=changes.options,
            masks_changed=changes.options or guided,
            guided=guided,
        )
        count_launch(plan)
        self._last = plan
        self._repeats = self._holds_for(plan)
        if self._repeats:
            self._last = replace(
                plan,
                rows_changed=False,
                slots_changed=False,
                tables_changed=False,
                options_changed=False,
                masks_changed=guided,
            )
        return plan

    def collected(self, request: Request, width: int, count: int) -> None:
        """Note that a decode row of `request`, launched at `width`, was read and sampled `count`
        tokens.

        Call it once for each row of a launch at a width above 1, before or after `retire`; `count`
        is 0 for a row that was a no-op or invalid.
        """
        assert 0 <= count <= width, f"{count=} of {width=}"
        placement = request.job.placement
        if placement is None:
            return
        placement.least += count - 1
        placement.in_doubt -= width - 1
        assert placement.in_doubt >= 0, f"{request!r} had no row of {width=} in flight"
        # Repeats were counted at one token each: with more, the row runs out of tokens sooner.
        # After a no-op, a row that had no token left may have one again.
        left = max(0, request.job.max_new_tokens - placement.least) if count else 0
        self._repeats = min(self._repeats, left)

    def _holds_for(self, plan: Plan) -> int:
        """How many later plans have the same rows and change nothing, if no request comes or goes.

        0 if a request is being prefilled, paused or stalled: the next plan decides about it. So it
        does after a launch of several steps, where planning takes little of their time. No
        waiting request can be admitted meanwhile, as nothing is freed. Results collected meanwhile
        only lower the need for blocks.
        """
        if plan.prefill is not None or plan.swap_out or plan.swap_in or plan.steps > 1:
            return 0
        width = plan.width
        steps = min(
            min(self._room(job) // width, job.max_new_tokens - job.placed.least)
            for job in (request.job for request in plan.rows)
        )
        if steps and len(plan.rows) < len(self.active):
            others = set(self.active).difference(plan.rows)
            if any(other.phase is not Phase.DECODE or other.job.can_sample for other in others):
                return 0
        return steps

    def _steps_of_launch(self, rows: Sequence[Request]) -> int:
        """The decode steps of a launch of these rows; takes the blocks that they need.

        One, if the next step depends on what the host reads, if no row would use all steps, while
        requests pause or resume, and where the pool lacks blocks for all steps.
        """
        steps, changes = self._steps_per_launch, self._changes
        if steps == 1 or self.guided or not rows or changes.swap_out or changes.swap_in:
            return 1
        jobs = [request.job for request in rows]
        if max(job.max_new_tokens - job.placed.least for job in jobs) < steps:
            return 1
        tokens = steps * self._width
        ends = (self._reach(job, job.placed.kv_len + tokens) for job in jobs)
        missing = [
            max(0, self.blocks_for(end) - len(job.placed.blocks))
            for job, end in zip(jobs, ends, strict=True)
        ]
        if sum(missing) > self.pool.free:
            return 1
        for job, count in zip(jobs, missing, strict=True):
            job.placed.blocks += self.pool.take(count)
            changes.tables |= count > 0
        return steps

    def _room(self, job: Job) -> int:
        """Tokens that the request has blocks for, beyond those that may have been written."""
        placement = job.placed
        held = len(placement.blocks) * self.block_size
        if held >= placement.reach:
            return sys.maxsize
        return held - self._reserve_extra - placement.kv_len

    def _grow_or_pause(self) -> list[Request]:
        """Rows that decode, oldest first, each with blocks for the positions of its next step.

        When the pool is short, the youngest request pauses for an older one. If all younger ones
        were not enough, a request skips the step and keeps its blocks.
        """
        rows: list[Request] = []
        for request in self.active:
            job = request.job
            if request.phase is not Phase.DECODE or not job.can_sample:
                continue
            if self.guided and job.waits:
                continue
            if self._room(job) >= self._width or self._reserve(
                request, job.placed.kv_len + self._width
            ):
                rows.append(request)
            else:
                self.counters["stalled_rows"] += 1
        return rows

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Give `request` the blocks for its first `tokens` tokens, pausing younger requests.

        False, and none is paused, if that would not be enough.
        """
        blocks = request.job.placed.blocks
        missing = self.blocks_for(self._reach(request.job, tokens)) - len(blocks)
        if missing <= 0:
            return True
        if self.pool.free < missing:
            victims = self._victims(request, missing)
            for victim in victims:
                self._pause(victim)
            if not victims:
                return False
        blocks += self.pool.take(missing)
        self._changes.tables = True
        return True

    def _victims(self, request: Request, missing: int) -> list[Request]:
        """The youngest requests whose pauses leave `missing` blocks free for an older one; [] if
        all that are younger would not be enough.
        """
        free, victims, left = self.pool.free, list[Request](), Counter[int]()
        for other in reversed(self.active):
            if free >= missing:
                return victims
            if other is request:
                break
            if other.job.placed.blocks:
                victims.append(other)
                # A shared block is free once its last user is paused.
                left.update(other.job.placed.blocks)
                free += sum(left[each] == self.pool.users(each) for each in other.job.placed.blocks)
        return []

    def _pause(self, request: Request) -> None:
        """Copy out all blocks that may have been written, including by launches in flight."""
        placement = request.job.placed
        used = self.blocks_for(self._reach(request.job, placement.kv_len))
        placement.swap_blocks = self.swap.take(used)
        self._changes.swap_out += zip(placement.blocks[:used], placement.swap_blocks, strict=True)
        self.pool.give_back(placement.blocks)
        request.phase = Phase.PAUSED
        request.pauses += 1
        self.counters["pauses"] += 1
        self.moves.append(("paused", request.id))
        self._changes.tables = True

    def _resume(self, *, running: bool) -> list[Request]:
        """Bring paused requests back, oldest first, while every running row can still grow.

        running  whether the plan has rows already

        Blocks were copied out up to a bound, which tokens collected during the pause may have
        lowered. Blocks past it hold nothing valid and are not copied back. Without anything to run
        there is no plan that copies: a request that only waits for the host then stays paused.
        """
        rows: list[Request] = []
        paused = [request for request in self.active if request.phase is Phase.PAUSED]
        headroom = self._headroom(len(self.active) - len(paused))
        for request in paused:
            job = request.job
            placement = job.placed
            prefilling = placement.prefilled < job.prompt_len
            tokens = job.prompt_len if prefilling else placement.kv_len + self._width
            need = self.blocks_for(self._reach(job, tokens))
            runs = prefilling or (job.can_sample and not job.waits)
            if self.pool.free < need + headroom or not (runs or running):
                break
            running = True
            placement.blocks = self.pool.take(need)
            used = self.blocks_for(self._reach(job, placement.kv_len))
            self._changes.swap_in += zip(
                placement.swap_blocks[:used], placement.blocks[:used], strict=True
            )
            self.swap.give_back(placement.swap_blocks)
            self._changes.tables = True
            headroom += self._headroom(1)
            self.counters["resumes"] += 1
            self.moves.append(("resumed", request.id))
            request.phase = Phase.PREFILL if prefilling else Phase.DECODE
            if runs and not prefilling:
                rows.append(request)
        return rows

    def _admit(self) -> None:
        """Give waiting requests slots and blocks; paused ones go first.

        The blocks are those of the prompt, or all that the request may ever need if the pool is
        roomy and enough are vacant. Blocks that already hold its first tokens are shared, the
        others are its own.
        """
        while self.waiting and None in self.slots:
            if any(request.phase is Phase.PAUSED for request in self.active):
                return
            request = self.waiting[0]
            job = request.job
            reused = self.reuse.begin_with(request)
            found, cached = reused.blocks, reused.tokens
            need = self._greatest_need(job) - len(found)
            if not self._roomy or need > self.pool.vacant:
                prompt = self._reach(job, job.prompt_len)
                need = self.blocks_for(prompt) - len(found)
            # Found blocks without a user counted as free until now.
            taken = need + sum(not self.pool.users(block) for block in found)
            headroom = self._headroom(len(self.active))
            if taken + headroom > self.pool.free or not self._can_always_pause(job):
                return
            self.waiting.popleft()
            slot = self.slots.index(None)
            self._epoch += 1
            # Use the found blocks first: otherwise they, and the rest of the session, might be
            # evicted to make room for the new ones.
            self.pool.use(found)
            self.reuse.touch_cached(request, reused)
            ring = self.reuse.take_ring(request, own=reused.own)
            job.placement = Placement(
                slot=slot,
                epoch=self._epoch,
                reach=self._reach(job, job.max_len),
                blocks=found + self.pool.take(need),
                ring=ring,
                prefilled=cached,
                noted=0 if self._chunks.is_noted(job) else cached,
            )
            self.reuse.begin(request, reused)
            request.phase = Phase.PREFILL
            self.slots[slot] = request
            self.active.append(request)
            self.counters["admitted"] += 1
            self.counters["slot_reuses"] += slot in self._slots_used
            self._slots_used.add(slot)
            self._changes.slots = self._changes.tables = True
            self._changes.options |= job.processing is not None
            self._count_guided(job, 1)

    def _count_guided(self, job: Job, change: int) -> None:
        self.followed += change * job.followed
        self.guided += change * job.guided
        if job.forcible:
            self._forcible += change
            self.lookahead = 0 if self._forcible else self._usual_lookahead

    def _headroom(self, rows: int) -> int:
        """Blocks that `rows` rows may take in their next step; 0 if the pool is roomy, as it always
        has them.
        """
        return 0 if self._roomy else rows * self.blocks_for(self._tokens_per_step)

    def _can_always_pause(self, newcomer: Job) -> bool:
        jobs = [*(request.job for request in self.active), newcomer]
        needs = [self._greatest_need(job) for job in jobs]
        return sum(needs) <= self.pool.count or sum(needs[1:]) <= self.swap.count


def finish(request: Request) -> None:
    """Note the end of a request that no longer holds anything."""
    request.phase = Phase.FINISHED
    request.job.end()
