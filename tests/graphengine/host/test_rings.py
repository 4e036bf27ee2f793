"""Rings: how long they must be, who has them, and how far a session can go back in them."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from engines.simulated_blocks import ALPHABET, DECODED, Sharing, Step, entries
from graphengine import Request, SamplingParams
from graphengine.host.rings import WindowRing, WindowRings, ring_blocks
from graphengine.host.scheduler import Scheduler
from graphengine.host.step_plan import Plan
from graphengine.program.fields import ring_updates
from graphengine.requests.context import Context, HeldRing
from graphengine.requests.job import Job

SIZE = 4


@pytest.mark.parametrize(("window", "tokens"), [*product((1, 2, 3, 4, 5, 8, 13), (1, 2, 4, 7, 16))])
def test_a_ring_has_room_for_a_launch_and_its_windows_and_no_more(window: int, tokens: int) -> None:
    """Whatever the launch begins at, no two of the tokens that must be there share a place."""
    blocks = ring_blocks(window, tokens, SIZE)
    for count in (blocks - 1, blocks):
        row = WindowRing(window, (0,), max(1, count)).table_row(0, 40)
        for start in range(window - 1, window - 1 + 2 * SIZE):
            there = range(start - window + 1, start + tokens)
            places = {(row[position // SIZE], position % SIZE) for position in there}
            assert (len(places) == len(there)) == (count == blocks or len(there) <= SIZE)


def test_a_row_of_the_table_repeats_the_blocks_of_its_ring() -> None:
    ring = WindowRing(5, (0, 2), 3)
    assert ring.table_row(0, 7).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert ring.table_row(2, 4).tolist() == [7, 8, 9, 7]


@pytest.mark.parametrize(
    ("tokens", "written", "blocks", "found"),
    [
        # All that was ever written is still there.
        (20, 20, 5, 5),
        # Those from 15 on are: a window of 3 at 20 sees 18 and 19, at 16 also 14.
        (27, 27, 5, 5),
        (27, 27, 4, 0),
        # Drafts may have overwritten those up to 18.
        (27, 30, 5, 5),
        (27, 31, 5, 0),
        # Only what was written in turn counts.
        (19, 20, 5, 4),
        (3, 20, 5, 0),
    ],
)
def test_a_ring_is_reusable_as_far_as_its_windows_are_there(
    tokens: int, written: int, blocks: int, found: int
) -> None:
    rings = WindowRings([WindowRing(3, (0,), 3)], count=1, block_size=SIZE)
    held = HeldRing(number=0, tokens=tokens, written=written)
    assert rings.reusable(held, blocks) == found
    # Another window of 11 tokens sees those from 10 on, too.
    longer = [WindowRing(3, (0,), 3), WindowRing(11, (1,), 3)]
    assert not WindowRings(longer, count=1, block_size=SIZE).reusable(held, 5) or written == 20
    assert rings.reusable(None, blocks) == 0
    assert WindowRings([], count=1, block_size=SIZE).reusable(None, blocks) == blocks


class Ringed(Sharing):
    """A device with rings as well: each launch finds all entries that its tokens' windows see."""

    def __init__(self, windows: Sequence[int], **options: Any) -> None:
        chunk = options.setdefault("max_chunk", 8)
        options = {"prefix_caching": False, "block_size": SIZE, "slots": 3} | options
        self.rings = [
            WindowRing(window, (at,), ring_blocks(window, chunk, SIZE))
            for at, window in enumerate(windows)
        ]
        self.start = 0
        super().__init__(rings=self.rings, **options)
        slots = options["slots"]
        self.of_rings = {
            ring.table: [[None] * SIZE for _ in range(1 + slots * ring.blocks)]
            for ring in self.rings
        }

    def execute(self, plan: Plan) -> deque[Step]:
        if plan.slots_changed:
            table_blocks = self.memory.max_seq_len // SIZE
            self.fields |= ring_updates(self.scheduler.slots, self.rings, table_blocks)
        return super().execute(plan)

    def feed(self, noted: bool, request: Request) -> int | None:
        self.start = self.fields["prefill_start"][0]
        return super().feed(noted, request)

    def decode(self, request: Request) -> int | None:
        self.start = self.kv_len[request.job.placed.slot]
        return super().decode(request)

    def put(self, cache: int, slot: int, position: int, value: int) -> None:
        super().put(cache, slot, position, value)
        # A drafter's entries are all in the pool.
        for ring in self.rings if cache == 0 else ():
            block = self.fields[ring.table][slot][position // SIZE]
            assert block > 0, f"{slot=} has no ring"
            self.of_rings[ring.table][block][position % SIZE] = value  # type: ignore[call-overload]

    def compare(self, request: Request, known: Sequence[int]) -> None:
        super().compare(request, known)
        slot, truth = request.job.placed.slot, entries(known)
        for ring in self.rings:
            for position in range(max(0, self.start - ring.window + 1), len(known) - 1):
                block = self.fields[ring.table][slot][position // SIZE]
                found = self.of_rings[ring.table][block][position % SIZE]
                assert found is not None and found % DECODED == truth[position], (
                    f"{request!r} reads {found} at {position} of window {ring.window}"
                )

    def check(self) -> None:
        super().check()
        scheduler, rings = self.scheduler, self.scheduler.reuse.rings
        used = [one.job.placed.ring for one in scheduler.active]
        kept = [one._context.ring for one in self.sessions if one._context.ring is not None]
        assert all(one is not None and one.used for one in used)
        assert all(one.kept and one.used == (one in used) for one in kept)
        # Whoever keeps a ring keeps blocks, and the other way about but for a turn's.
        for session in self.sessions:
            assert session._context.ring is None or session._context.blocks
        held = {one.number for one in (*used, *kept) if one is not None}
        assert len(held) == len({*used, *kept}), "a ring has two holders"
        vacant = rings._vacant
        assert Counter([*held, *vacant]) == Counter(range(len(scheduler.slots)))


def test_what_an_earlier_turn_has_overwritten_stays_lost() -> None:
    """A turn that is rewound leaves its entries, which a shorter turn after it does not undo."""
    world = Ringed((5,), slots=1, kv_blocks=20, max_seq_len=80)
    session = world.session([1 + index % 7 for index in range(40)])
    session.submit(SamplingParams(max_tokens=1))
    world.run()
    # Tokens from 28 on are there. A turn goes on at 32 and writes no more than that.
    session.rewind(len(session) - 33)
    assert session.cached_tokens == 32
    turn = session.submit(SamplingParams(max_tokens=4))
    world.step(collect=False)
    assert turn.cached_tokens == 32
    turn.cancel()
    world.run()
    assert len(session) == 33 and session.cached_tokens == 32
    # A token at 28 sees 24, in whose place 36 was.
    session.rewind(3)
    assert session.cached_tokens == 0 and session.evicted
    turn = session.submit(SamplingParams(max_tokens=4))
    world.finish()
    assert turn.cached_tokens == 0


def test_a_ring_that_is_begun_again_can_be_gone_back_in() -> None:
    """A turn that needs every token begins its session's ring at 0."""
    world = Ringed((5,), slots=1, kv_blocks=20, max_seq_len=80)
    session = world.session([1 + index % 7 for index in range(40)])
    session.submit(SamplingParams(max_tokens=1))
    world.run()
    session.rewind(len(session) - 33)
    turn = session.submit(SamplingParams(max_tokens=1, prompt_logprobs=0))
    world.run()
    assert turn.cached_tokens == 0
    session.rewind(len(session) - 29)
    assert session.cached_tokens == 28
    turn = session.submit(SamplingParams(max_tokens=4))
    world.finish()
    assert turn.cached_tokens == 28


@pytest.mark.parametrize(("max_len", "written"), [(40, 14), (13, 12)])
def test_rejected_drafts_count_as_written(max_len: int, written: int) -> None:
    """A step of 4 tokens after a prompt of 10 has one accepted: positions 10 to 13 were written,
    but none past the request's end.
    """
    scheduler = Scheduler(
        slots=1, kv_blocks=10, swap_blocks=0, block_size=SIZE, max_chunk=16, tokens_per_step=4,
        max_seq_len=40, rings=[WindowRing(5, (0,), 6)],
    )  # fmt: skip
    context = Context()
    job = Job(prompt_len=10, max_len=max_len, context=context)
    request = Request(
        request_id=0,
        prompt_token_ids=range(10),
        params=SamplingParams(),
        seed=0,
        submitted=0.0,
        cancelled=[],
        job=job,
    )
    scheduler.submit(request)
    prefill = scheduler.plan()
    assert prefill is not None and prefill.prefill is not None
    step = scheduler.plan()
    assert step is not None and step.rows == (request,)
    scheduler.collected(request, 4, 1)
    request.job.tokens += [1, 2]
    request.finish_reason = "stop"
    scheduler.retire(request)
    assert context.ring is not None and not context.ring.used
    assert (context.ring.tokens, context.ring.written) == (11, written)


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((5,), {}),
        ((3, 6), {"lookahead": 0, "slots": 2, "kv_blocks": 10}),
        ((5,), {"kv_blocks": 30, "slots": 2, "tokens_after": 1}),
        ((1, 7), {"max_chunk": 4}),
        ((5,), {"steps_per_launch": 3}),
        ((3, 6), {"steps_per_launch": 4, "lookahead": 2, "kv_blocks": 10}),
    ],
    ids=str,
)
def test_any_order_of_calls_finds_what_its_windows_see(
    windows: tuple[int, ...], options: dict[str, Any]
) -> None:
    happened = Counter[str]()
    for seed in range(8):
        world = Ringed(windows, **options)
        dice = random.Random(f"{windows}/{options}/{seed}")
        for _ in range(120):
            _act(world, dice, happened)
            for _ in range(dice.randrange(4)):
                world.step(collect=dice.random() < 0.8)
        happened += world.scheduler.counters
        world.finish()
    wanted = ["sessions/reused_tokens", "sessions/evicted", "rewound", "reached", "cancelled"]
    if options.get("kv_blocks", 12) < 20:
        wanted.append("pauses")
    assert all(happened[each] for each in wanted), happened


def _act(world: Ringed, dice: random.Random, happened: Counter[str]) -> None:
    def draw(most: int) -> list[int]:
        return [dice.randrange(ALPHABET) for _ in range(dice.randrange(1, most))]

    idle = [one for one in world.sessions if one.turn is None]
    action = dice.choice(["submit", "open", "turn", "turn", "rewind", "fork", "close", "cancel"])
    if action == "submit":
        world.submit(draw(20), dice.randrange(1, 16))
    elif action == "open" and len(world.sessions) < 5:
        world.session(draw(20))
    elif action == "cancel" and world.requests and dice.random() < 0.5:
        request = dice.choice(world.requests[-4:])
        happened["cancelled"] += not request.finished
        request.cancel()
    elif not idle:
        return
    elif action == "turn":
        session = dice.choice(idle)
        if len(session) > 24:
            session.rewind(dice.randrange(len(session)))
        session.append(draw(6))
        session.submit(_few(dice))
    elif action == "rewind":
        session = dice.choice(idle)
        count, cached = dice.randrange(min(12, len(session)) + 1), session.cached_tokens
        session.rewind(count)
        happened["rewound"] += count > 0 and cached > 0
        happened["reached"] += count > 3 and session.cached_tokens > 0
    elif action == "fork" and len(world.sessions) < 5:
        assert world.fork(dice.choice(idle)).cached_tokens == 0
    elif action == "close":
        session = dice.choice(idle)
        session.close()
        world.sessions.remove(session)


def _few(dice: random.Random) -> SamplingParams:
    return SamplingParams(max_tokens=dice.randrange(1, 12))
