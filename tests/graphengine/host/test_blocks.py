"""Blocks that outlive a request: who holds them, who is evicted, and that nobody reads wrong ones.

`support/engines/simulated_blocks.py` has the device, on which a block of other tokens shows.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engines.simulated_blocks import ALPHABET, Sharing, reply
from extent import extent
from graphengine import SamplingParams
from graphengine.host.block_pool import BlockPool
from graphengine.host.reuse import Reuse
from graphengine.requests.context import Context
from graphengine.requests.request import Phase, Request


def keeping(count: int, **options: Any) -> tuple[BlockPool, Reuse, Counter[str]]:
    """A pool, and who keeps its blocks; the block size is 4."""
    pool, counters = BlockPool(count, first=1, **options), Counter[str]()
    return (
        pool,
        Reuse(pool, block_size=4, tokens_after=0, prefixes=True, counters=counters),
        counters,
    )


def kept(pool: BlockPool, reuse: Reuse, count: int) -> Context:
    """A context of so many new blocks, which nobody uses."""
    context, blocks = Context(), pool.take(count)
    reuse.give(context, blocks)
    pool.give_back(blocks)
    return context


# The pool.


def test_a_block_is_free_when_its_last_user_and_keeper_are_gone() -> None:
    pool, _, _ = keeping(3)
    blocks = pool.take(2)
    pool.use(blocks)
    pool.keep(blocks[:1])
    first = list(blocks)
    pool.give_back(list(blocks))
    assert (pool.free, pool.vacant, list(pool.idle)) == (1, 1, [])
    pool.give_back(blocks)
    assert (pool.free, pool.vacant, list(pool.idle)) == (3, 2, first[:1])
    pool.use(first[:1])
    assert (pool.free, list(pool.idle)) == (2, [])
    pool.let_go(first[:1])
    assert pool.free == 2
    pool.give_back(first[:1])
    assert pool.free == pool.vacant == 3


def test_a_block_of_the_index_is_unwanted_while_nobody_else_keeps_it() -> None:
    pool, _, _ = keeping(2)
    (block,) = blocks = pool.take(1)
    pool.indexed[block] = b"key"
    pool.keep([block])
    pool.give_back(blocks)
    assert list(pool.unwanted) == list(pool.idle) == [block]
    pool.keep([block])
    assert not pool.unwanted and list(pool.idle) == [block]
    pool.let_go([block])
    assert list(pool.unwanted) == [block]


def test_nothing_is_given_back_twice() -> None:
    pool, _, _ = keeping(2)
    blocks = pool.take(1)
    again = list(blocks)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="block=1 has no user or keeper"):
        pool.use(again)
    with pytest.raises(AssertionError, match="block=1 has no user or keeper"):
        pool.keep(again)
    with pytest.raises(AssertionError, match="block=1 has no user"):
        pool.give_back(again)
    with pytest.raises(AssertionError, match="block=2 has no keeper"):
        pool.let_go([2])


def test_idle_blocks_are_evicted_on_demand_and_count_as_free() -> None:
    pool, reuse, counters = keeping(4)
    context = kept(pool, reuse, 3)
    assert (pool.free, pool.vacant) == (4, 1) and not context.evicted
    assert pool.take(1) and not context.evicted
    taken = pool.take(1)
    assert context.evicted and context.blocks == [] and context not in reuse.contexts
    assert counters["sessions/evicted"] == 1 and pool.free == 2 and taken


def test_sessions_are_evicted_as_a_whole_the_one_used_last_at_the_end() -> None:
    pool, reuse, _ = keeping(6)
    first, second, third = (kept(pool, reuse, 2) for _ in range(3))
    reuse.touch(first)
    pool.take(1)
    assert [one.evicted for one in (first, second, third)] == [False, True, False]
    pool.take(2)
    assert [one.evicted for one in (first, second, third)] == [False, True, True]
    assert first.blocks


def test_a_session_whose_blocks_are_in_use_is_passed_over() -> None:
    pool, reuse, _ = keeping(4)
    first, second = kept(pool, reuse, 2), kept(pool, reuse, 2)
    pool.use(first.blocks)
    pool.take(1)
    assert second.evicted and not first.evicted


def test_of_a_session_in_use_the_idle_end_goes_after_all_others() -> None:
    pool, reuse, counters = keeping(8)
    first, second = kept(pool, reuse, 4), kept(pool, reuse, 3)
    used = first.blocks[:2]
    pool.use(used)
    pool.take(2)
    assert second.evicted and len(first.blocks) == 4
    pool.take(4)
    assert first.blocks == used and not first.evicted and first in reuse.contexts
    assert counters["sessions/evicted"] == 1 and pool.free == pool.vacant == 0
    pool.give_back(used)
    pool.take(1)
    assert first.evicted and counters["sessions/evicted"] == 2


def test_what_two_sessions_keep_goes_with_the_second() -> None:
    pool, reuse, counters = keeping(3)
    first = kept(pool, reuse, 2)
    fork = Context()
    reuse.give(fork, first.blocks)
    pool.take(2)
    assert first.evicted and fork.evicted and counters["sessions/evicted"] == 2
    assert pool.vacant == 1


def test_no_more_blocks_are_idle_than_the_limit() -> None:
    pool, reuse, _ = keeping(8, max_idle=3)
    first, second = kept(pool, reuse, 2), kept(pool, reuse, 1)
    assert not first.evicted and not second.evicted
    third = kept(pool, reuse, 1)
    assert first.evicted and not second.evicted and not third.evicted


def test_a_session_beyond_the_limit_keeps_its_first_blocks() -> None:
    pool, reuse, counters = keeping(8, max_idle=3)
    context, blocks = Context(), pool.take(5)
    reuse.give(context, blocks)
    first = blocks[:3]
    pool.give_back(blocks)
    assert context.blocks == first and not context.evicted and not counters
    assert (list(reversed(pool.idle)), pool.vacant) == (first, 5)
    pool, reuse, counters = keeping(8, max_idle=0)
    assert kept(pool, reuse, 4).blocks == [] and pool.vacant == 8 and not counters


def work(pool: BlockPool) -> int:
    """Lines that run while a block is taken."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        pool.take(1)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("indexed", [False, True])
def test_the_work_of_an_eviction_does_not_grow_with_the_pool(indexed: bool) -> None:
    done = []
    for count in (16, 1600):
        pool, reuse, counters = keeping(count + 4)
        session = kept(pool, reuse, 4)
        other = [kept(pool, reuse, 1) for _ in range(0 if indexed else count)]
        blocks = pool.take(count if indexed else 0)
        for block in blocks:
            key = block.to_bytes(8, "big")
            reuse._block_of[key], reuse._key_of[block] = block, key
        pool.keep(blocks)
        pool.give_back(blocks)
        assert not pool.vacant and len(pool.idle) == count + 4
        reuse.touch(other[0] if other else session)
        done.append([work(pool) for _ in range(3)])
        evicted = (counters["prefix/evicted_blocks"], counters["sessions/evicted"])
        # The session of four blocks is the one used least, and makes room for all three.
        assert evicted == ((3, 0) if indexed else (0, 1))
    assert done[0] == done[1]


def test_a_context_that_is_closed_or_cut_lets_go() -> None:
    pool, reuse, _ = keeping(4)
    context = kept(pool, reuse, 4)
    reuse.cut(context, 15)
    assert len(context.blocks) == 3 and pool.vacant == 1
    reuse.cut(context, 3)
    assert context.blocks == [] and context not in reuse.contexts and pool.vacant == 4
    other = kept(pool, reuse, 2)
    reuse.close(other)
    reuse.close(other)
    assert other.closed and pool.vacant == 4 and not reuse.contexts


@pytest.mark.parametrize(("tokens_after", "blocks"), [(0, 3), (1, 2), (4, 2), (5, 1), (13, 0)])
def test_whole_blocks_are_those_that_no_later_token_changes(tokens_after: int, blocks: int) -> None:
    reuse = Reuse(
        BlockPool(1), block_size=4, tokens_after=tokens_after, prefixes=False, counters=Counter()
    )
    assert reuse.whole_blocks(12) == blocks


# Prefixes.

LONG = [1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4, 1, 2]


def test_a_prefix_is_found_by_its_tokens_and_counted() -> None:
    world = Sharing(kv_blocks=40)
    world.submit(LONG, 3)
    world.run()
    same, longer, other = (
        world.submit(tokens, 2) for tokens in (LONG, [*LONG, 1, 2, 3], [*LONG[:6], 4, 4, 4])
    )
    world.finish()
    # Whole blocks of 4, and never all of a prompt.
    assert [one.cached_tokens for one in (same, longer, other)] == [12, 12, 4]
    counters = world.scheduler.counters
    assert (counters["prefix/queries"], counters["prefix/hits"]) == (4, 3)
    assert counters["prefix/hit_tokens"] == 28
    assert counters["prefix/queried_tokens"] == 2 * len(LONG) + 17 + 9
    assert counters["prefix/evicted_blocks"] == len(LONG) // 4 + 2


def test_all_of_a_prompt_is_never_skipped() -> None:
    world = Sharing(kv_blocks=40)
    first, again = (world.submit(LONG[:8], 1) for _ in range(2))
    world.run()
    assert (first.cached_tokens, again.cached_tokens) == (0, 4)
    world.finish()


def test_requests_share_a_prefix_while_both_run() -> None:
    world = Sharing(kv_blocks=40, slots=2)
    first = world.submit(LONG, 12)
    while not first.token_ids:
        world.step()
    second = world.submit(LONG, 12)
    world.step()
    assert second.job.placed.blocks[:3] == first.job.placed.blocks[:3]
    assert second.job.placed.blocks[3] != first.job.placed.blocks[3]
    world.finish()


def test_without_prefix_caching_nothing_is_kept() -> None:
    world = Sharing(prefix_caching=False)
    for _ in range(2):
        world.submit(LONG, 2)
        world.run()
    assert not world.scheduler.pool.idle and world.requests[1].cached_tokens == 0
    assert not any(name.startswith("prefix") for name in world.scheduler.counters)
    world.finish()


@pytest.mark.parametrize("tokens_after", [1, 2, 4, 5])
def test_a_key_covers_the_tokens_that_a_drafter_looked_at(tokens_after: int) -> None:
    """Two prompts that part right after a block do not share it where its entries differ."""
    world = Sharing(kv_blocks=40, tokens_after=tokens_after)
    head = LONG[:8]
    world.submit([*head, 1, 1, 1, 1, 1, 1, 1], 1)
    world.run()
    parted = world.submit([*head, 2, 2, 2, 2, 2, 2, 2], 1)
    same = world.submit([*head, 1, 1, 1, 1, 1, 1, 2], 1)
    world.run()
    whole = (8 - tokens_after) // 4 * 4
    assert (parted.cached_tokens, same.cached_tokens) == (whole, (14 - tokens_after) // 4 * 4)
    world.finish()


def test_the_longest_unused_prefix_goes_first_from_its_end() -> None:
    world = Sharing(kv_blocks=8, slots=1, lookahead=0)
    old, new = [1] * 13, [2] * 13
    for prompt in (old, new, old):
        world.submit(prompt, 1)
        world.run()
    # Three blocks are kept of each; five are wanted and two are vacant.
    world.submit([3] * 17, 1)
    world.run()
    assert world.scheduler.counters["prefix/evicted_blocks"] == 3
    assert world.scheduler.reuse.find(world.turn(old, world.requests[0].params)) != []
    assert world.scheduler.reuse.find(world.turn(new, world.requests[0].params)) == []
    # Of a chain the last block goes first, or the others could not be found.
    world.submit([4] * 5, 1)
    world.run()
    assert len(world.scheduler.reuse.find(world.turn([*old, 1, 1, 1], world.requests[0].params)))
    world.finish()


def test_a_prompt_whose_logprobs_are_wanted_is_prefilled_as_a_whole() -> None:
    world = Sharing(kv_blocks=40)
    world.submit(LONG, 1)
    world.run()
    request = world.turn(LONG, SamplingParams(max_tokens=1, prompt_logprobs=0))
    world.queue(request)
    world.finish()
    assert request.cached_tokens == 0 and world.scheduler.counters["prefix/queries"] == 1


def test_what_is_skipped_is_noted_in_chunks_for_those_who_need_it() -> None:
    world = Sharing(kv_blocks=40, max_seq_len=60)
    prompt = LONG * 3
    world.submit(prompt, 1)
    world.run()
    plans = world.plans
    request = world.submit(prompt, 1, processing=True)
    world.run()
    assert request.cached_tokens == 40
    # Five chunks of 8 noted, one fed.
    assert world.plans - plans == 6
    world.submit(prompt, 1)
    world.run()
    assert world.plans - plans == 7
    world.finish()


@pytest.mark.parametrize("processing", [False, True])
def test_what_is_found_late_is_noted_in_chunks_for_those_who_need_it(processing: bool) -> None:
    """The second of two prompts that are admitted together finds what the first has fed since."""
    world = Sharing(kv_blocks=40, max_seq_len=60)
    prompt = LONG * 3
    first, second = (
        world.submit(prompt, 1, processing=processing and not number) for number in (1, 0)
    )
    world.step(collect=False)
    assert second.phase is Phase.PREFILL and second.cached_tokens == 0
    world.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)
    # Six chunks of 8 fed, and one; and five noted.
    assert world.plans == 7 + 5 * processing
    world.finish()


# Sessions.


def test_a_turn_begins_with_the_blocks_of_the_last() -> None:
    world = Sharing(kv_blocks=40, prefix_caching=False)
    session = world.session()
    session.append(LONG)
    first = session.submit(params(6))
    world.run()
    known = len(LONG) + len(first.token_ids)
    assert session.token_ids == (*LONG, *first.token_ids) and len(session) == known
    assert session.cached_tokens == (known - 1) // 4 * 4
    session.append([1, 2])
    cached, second = session.cached_tokens, session.submit(params(3))
    world.run()
    assert second.cached_tokens == cached == (known - 1) // 4 * 4
    assert world.scheduler.counters["sessions/reused_tokens"] == cached
    world.finish()


def test_turns_add_no_prefixes_after_a_reply() -> None:
    """Its KV is the decode kernels', and what is prefilled after attends to that."""
    world = Sharing(kv_blocks=40)
    session = world.session()
    session.append(LONG)
    session.submit(params(4))
    world.run()
    indexed = len(world.scheduler.reuse._block_of)
    assert indexed == len(LONG) // 4
    session.append([1] * 9)
    session.submit(params(2))
    world.run()
    assert len(world.scheduler.reuse._block_of) == indexed
    world.finish()


@pytest.mark.parametrize("others", [False, True])
def test_a_turn_is_admitted_without_evicting_its_own_session(others: bool) -> None:
    """At a block's edge the last block is not used again; it may be evicted for the others."""
    world = Sharing(kv_blocks=6 if others else 4, slots=1)
    session, other = world.session(LONG[:7]), world.session([3] * 8)
    session.submit(params(10))
    world.run()
    session.rewind(len(session) - 16)
    before = list(session._context.blocks)
    assert len(before) == 4 and len(world.scheduler.reuse._block_of) == 1
    if others:
        other.submit(params(1))
        world.run()
        assert other._context.blocks
    assert not world.scheduler.pool.vacant
    turn = session.submit(params(4 if others else 1))
    world.step(collect=False)
    assert turn.cached_tokens == 12 and turn.job.placed.blocks[:3] == before[:3]
    assert session._context.blocks[:3] == before[:3] and not session.evicted
    assert world.scheduler.counters["sessions/evicted"] == other.evicted == others
    assert world.scheduler.counters["sessions/reused_tokens"] == 12
    world.run()
    assert len(world.scheduler.reuse._block_of) == 1
    world.finish()


def test_in_a_roomy_pool_no_session_makes_room_for_what_nobody_samples() -> None:
    """Turns that may take the whole pool, and end early, leave each other's blocks alone."""
    world = Sharing(kv_blocks=10, slots=1, max_seq_len=40, swap_blocks=0)
    dice = random.Random(0)
    prompts = ([dice.randrange(1, ALPHABET) for _ in range(5)] for _ in range(999))
    short = [prompt for prompt in prompts if 2 < len(reply(prompt, 12)) < 9]
    sessions = [world.session(prompt) for prompt in short[:2]]
    turns = []
    for turn in range(3):
        for session in sessions:
            if turn:
                # "Say that again."
                session.rewind(len(session) - 5)
            turns.append(session.submit(params(None)))
            world.step(collect=False)
            held = len(turns[-1].job.placed.blocks)
            assert held == 10 if len(turns) == 1 else held < 10
            world.run()
    assert [turn.cached_tokens for turn in turns] == [0, 0, 4, 4, 4, 4]
    assert world.scheduler.counters["sessions/evicted"] == 0
    world.finish()
    # And where they do sample it, they get it: nobody pauses, and the sessions go.
    world = Sharing(kv_blocks=20, slots=2, max_seq_len=40, swap_blocks=0)
    idle = [world.session([dice.randrange(1, ALPHABET) for _ in range(9)]) for _ in range(5)]
    for session in idle:
        session.submit(params(8))
        world.run()
    prompts = ([dice.randrange(1, ALPHABET) for _ in range(5)] for _ in range(9999))
    long = [prompt for prompt in prompts if len(reply(prompt, 35)) == 35]
    for prompt in long[:2]:
        world.submit(prompt, 35)
    world.finish()
    assert world.scheduler.counters["sessions/evicted"] >= 4
    assert world.scheduler.counters["pauses"] == world.scheduler.counters["stalled_rows"] == 0


def test_a_longer_prefix_of_the_index_is_taken_instead_of_the_sessions() -> None:
    world = Sharing(kv_blocks=40)
    session = world.session(LONG[:5])
    session.submit(params(1))
    world.submit(LONG, 1)
    world.run()
    session.rewind(1)
    session.append(LONG[5:])
    assert session.cached_tokens == 4
    turn = session.submit(params(3))
    world.run()
    assert turn.cached_tokens == 12 and session.cached_tokens >= 12
    assert world.scheduler.counters["sessions/reused_tokens"] == 0
    world.finish()


def test_without_prefix_caching_no_prompt_is_hashed() -> None:
    world = Sharing(prefix_caching=False)
    session = world.session(LONG)
    turn, request = session.submit(params(2)), world.submit(LONG, 2)
    while world.scheduler.busy:
        world.step(collect=bool(world.in_flight))
        assert turn.job.block_keys is request.job.block_keys is None
    world.finish()


def test_a_cancelled_turn_leaves_the_session_as_it_was() -> None:
    world = Sharing(kv_blocks=40)
    session = world.session()
    session.append(LONG)
    session.submit(params(4))
    world.run()
    session.append([1, 2, 3, 4, 1])
    before = session.token_ids, session.cached_tokens, list(session._context.blocks)
    turn = session.submit(params(20))
    while not turn.token_ids and not turn.finished:
        world.step()
    turn.cancel()
    world.run()
    assert (session.token_ids, session.cached_tokens, session._context.blocks) == before
    session.submit(params(4))
    world.finish()


@pytest.mark.parametrize(("tokens_after", "kept"), [(0, 12), (1, 12), (2, 8)])
def test_a_turn_leaves_all_whole_blocks_and_the_next_takes_them_from_the_session(
    tokens_after: int, kept: int
) -> None:
    """Also where the index has as many of them."""
    world = Sharing(kv_blocks=40, tokens_after=tokens_after)
    session = world.session([1, 2] * 6)
    session.submit(params(1))
    world.run()
    assert session.cached_tokens == kept
    session.submit(params(1))
    world.run()
    assert world.scheduler.counters["sessions/reused_tokens"] == kept
    world.finish()


def test_an_evicted_session_is_none_once_it_has_blocks_again() -> None:
    world = Sharing(kv_blocks=5, slots=1, prefix_caching=False)
    session = world.session([1] * 9)
    session.submit(params(1))
    world.run()
    world.submit([2] * 18, 1)
    world.run()
    assert session.evicted and session.cached_tokens == 0
    session.submit(params(1))
    world.run()
    assert not session.evicted and session.cached_tokens == 8
    world.finish()


def test_a_session_is_used_when_its_turn_is_admitted() -> None:
    """Even where the turn is cancelled and leaves nothing: then the other session is evicted."""
    world = Sharing(kv_blocks=8, slots=1, prefix_caching=False, lookahead=0)
    old, new = world.session([1] * 9), world.session([2] * 9)
    for session in (old, new):
        session.submit(params(1))
        world.run()
    turn = old.submit(params(3))
    world.step()
    assert turn.job.placed.blocks[:2] == old._context.blocks
    turn.cancel()
    world.run()
    world.submit([3] * 20, 1)
    world.run()
    assert (old.evicted, new.evicted) == (False, True)
    world.finish()


def test_a_pause_copies_shared_blocks_and_resumes_into_its_own() -> None:
    """Three blocks are shared and each request needs six: the pool of seven is short."""
    world = Sharing(kv_blocks=7, swap_blocks=12, slots=2, max_chunk=16)
    dice = random.Random(0)
    prompts = ([dice.randrange(1, ALPHABET) for _ in range(13)] for _ in range(99))
    prompt = next(prompt for prompt in prompts if len(reply(prompt, 12)) == 12)
    older, younger = world.submit(prompt, 12), world.submit(prompt, 12)
    shared: list[int] = []
    while younger.phase is not Phase.PAUSED:
        world.step()
        if younger.phase is Phase.DECODE:
            shared = younger.job.placed.blocks[:3]
            assert shared == older.job.placed.blocks[:3]
    assert shared and len(younger.job.placed.swap_blocks) >= 4
    while younger.phase is Phase.PAUSED:
        world.step()
    assert not any(map(world.scheduler.pool.keepers, younger.job.placed.blocks))
    world.finish()
    assert younger.pauses == 1 and younger.cached_tokens == 12


def params(new: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=new)


# Anything, in any order.


class SharingMachine(RuleBasedStateMachine):
    """Requests and sessions come, go, branch and are paused, in any order, on any small sizes."""

    @initialize(
        lookahead=st.integers(0, 2),
        steps_per_launch=st.sampled_from([1, 2, 7]),
        tokens_after=st.integers(0, 5),
        slots=st.integers(1, 4),
        kv_blocks=st.integers(4, 16),
        swap_blocks=st.integers(0, 24),
        block_size=st.integers(1, 4),
        max_chunk=st.integers(1, 9),
        prefix_caching=st.booleans(),
        kept_blocks=st.none() | st.integers(0, 10),
        max_seq_len=st.integers(8, 40),
    )
    def start(self, **sizes: Any) -> None:
        self.world = Sharing(**sizes)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), new=st.integers(1, 12),
          processing=st.booleans())  # fmt: skip
    def submit(self, tokens: list[int], new: int, processing: bool) -> None:
        limit = self.world.memory.max_seq_len
        try:
            self.world.submit(tokens[: limit - 1], new, processing=processing)
        except ValueError as error:
            assert "KV blocks" in str(error)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open(self, tokens: list[int]) -> None:
        session = self.world.session()
        session.append(tokens[: self.world.memory.max_seq_len - 1])

    @precondition(lambda self: self.world.sessions)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=6), new=st.integers(1, 9),
          processing=st.booleans())  # fmt: skip
    def turn(self, data: st.DataObject, tokens: list[int], new: int, processing: bool) -> None:
        session = data.draw(st.sampled_from(self.world.sessions))
        if session._context.closed or session.turn is not None:
            with pytest.raises(ValueError, match=r"closed|under way"):
                session.append(tokens)
            return
        try:
            session.append(tokens)
            if len(session):
                self.world.turns_process = processing
                session.submit(params(new))
        except ValueError as error:
            assert "KV blocks" in str(error) or "tokens" in str(error)
        finally:
            self.world.turns_process = False

    @precondition(lambda self: self.world.sessions)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.world.sessions))
        if not session._context.closed and session.turn is None:
            session.rewind(data.draw(st.integers(0, len(session))))

    @precondition(lambda self: 0 < len(self.world.sessions) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.world.sessions))
        if not session._context.closed and session.turn is None:
            self.world.fork(session)

    @precondition(lambda self: self.world.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.sessions)).close()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.requests)).cancel()

    @rule(count=st.integers(1, 12), collect=st.booleans())
    def steps(self, count: int, collect: bool) -> None:
        for _ in range(count):
            self.world.step(collect=collect)

    @rule()
    def run(self) -> None:
        self.world.run()

    def teardown(self) -> None:
        if hasattr(self, "world") and sys.exc_info()[0] is None:
            self.world.finish()


def test_any_order_of_calls_shares_only_right_blocks() -> None:
    machine = settings(max_examples=extent(30, 60), stateful_step_count=30, deadline=None)
    run_state_machine_as_test(SharingMachine, settings=machine)


@pytest.mark.parametrize(
    ("tokens_after", "lookahead", "steps"), [(0, 1, 1), (1, 0, 1), (3, 1, 1), (0, 1, 4), (1, 2, 7)]
)
def test_in_a_small_pool_all_of_it_happens(tokens_after: int, lookahead: int, steps: int) -> None:
    """Hits, pauses and evictions of both kinds, counted; and every token is right."""
    totals = Counter[str]()
    for seed in range(6):
        dice = random.Random(seed)
        world = Sharing(
            tokens_after=tokens_after,
            lookahead=lookahead,
            steps_per_launch=steps,
            kv_blocks=11,
            swap_blocks=30,
        )
        heads = [[dice.randrange(1, ALPHABET) for _ in range(14)] for _ in range(2)]
        for _ in range(60):
            if dice.random() < 0.4:
                tail = [dice.randrange(ALPHABET) for _ in range(dice.randrange(1, 6))]
                world.submit(
                    dice.choice(heads)[: dice.randrange(4, 15)] + tail, dice.randrange(1, 20)
                )
            idle = [s for s in world.sessions if s.turn is None and not s._context.closed]
            if dice.random() < 0.3 and len(world.sessions) < 6:
                idle.append(world.session(dice.choice(heads)[:8]))
            if idle and dice.random() < 0.6:
                session = dice.choice(idle)
                if len(session) > 24:
                    session.rewind(dice.randrange(len(session)))
                session.append([dice.randrange(ALPHABET) for _ in range(dice.randrange(1, 5))])
                session.submit(params(dice.randrange(1, 10)))
            unfinished: list[Request] = [one for one in world.requests if not one.finished]
            if unfinished and dice.random() < 0.1:
                dice.choice(unfinished).cancel()
            for _ in range(dice.randrange(8)):
                world.step()
        world.finish()
        totals.update(world.scheduler.counters)
        totals.update({f"steps/{steps}": count for steps, count in world.launched.items()})
    assert totals[f"steps/{steps}"] > 20 and totals["steps/1"] > 20, totals
    for name in ("pauses", "resumes", "prefix/hits", "prefix/evicted_blocks", "sessions/evicted"):
        assert totals[name] > 5, f"{name}: {totals[name]}"
    assert totals["sessions/reused_tokens"] > 100
