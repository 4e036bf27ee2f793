"""Sums of large parts: those of items to the bit, in whatever order ranks come."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.comm.all_reduce import (
    BLOCK,
    all_reduce,
    all_reduce_words,
)
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from launches.all_reduce_world import AllReduceWorld
from launches.forked_ranks import fork_ranks

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="ranks of one process need TRITON_INTERPRET=1"
)


def random_parts(
    ranks: int, lanes: int, columns: int, dtype: torch.dtype, dice: torch.Generator | None = None
) -> list[torch.Tensor]:
    parts = (
        torch.randn(ranks, lanes, columns, generator=dice) * 3 ** torch.arange(ranks)[:, None, None]
    )
    return list(parts.to(dtype))


@interpreted
@settings(deadline=None, max_examples=extent(12, 60))
@given(
    ranks=st.integers(2, 4),
    lanes=st.integers(1, 40),
    columns=st.sampled_from([2, 130, 256, 514]),
    programs=st.integers(1, 3),
    half=st.booleans(),
    tag=st.sampled_from([0, 2**31 - 2, 2**31 - 1, -2, -1]),
    seed=st.integers(0, 99),
)
def test_all_have_the_sum(ranks, lanes, columns, programs, half, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    # The interpreter does not round to bfloat16 as a GPU does.
    dtype = torch.float16 if half else torch.float32
    world = AllReduceWorld(ranks, 40 * columns, programs, tag)
    for _ in range(3):
        # Another number of lanes, and so of words that a program has.
        parts = random_parts(ranks, dice.randrange(1, lanes + 1), columns, dtype)
        # Of padded lanes.
        for part in parts:
            part[dice.randrange(len(part)) :] = float("nan")
        expected = sum_parts_reference(torch.stack(parts))
        for found in world.sum(parts, dice.sample(range(ranks), ranks)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for memory, peers in zip(world.memories, world.peers, strict=True):
        assert torch.equal(memory.tags, world.memories[0].tags)
        assert int(memory.tags[0]) == ((tag + 3 + 2**31) % 2**32) - 2**31
        assert not peers.tensors.over.item() and peers.tensors.waited.item() == 0


@interpreted
def test_a_wait_that_is_over_leaves_each_launch_what_its_rank_has():
    world = AllReduceWorld(2, 100, 1)
    world.peers[1].tensors.watch[0] = 1
    part = torch.randn(5, BLOCK)
    found = all_reduce(world.peers[1], world.memories[1], part)
    assert torch.equal(found, 2 * part) and world.memories[1].tags.tolist() == [5]


@interpreted
def test_a_rank_may_be_a_launch_behind():
    """In one shot its peer's next words do not touch those that it has not taken yet."""
    world = AllReduceWorld(2, 3000, 1, tag=-1)
    parts, later = (random_parts(2, 3, 1000, torch.float32) for _ in range(2))
    world.store(0, 1, parts)
    found = all_reduce(world.peers[1], world.memories[1], parts[1])
    assert torch.equal(found, parts[0] + parts[1])
    world.store(1, 0, later)
    assert torch.equal(all_reduce(world.peers[0], world.memories[0], parts[0]), found)
    for found in world.sum(later, [0, 1]):
        assert torch.equal(found, later[0] + later[1])


@interpreted
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("by", ["limit", "host"])
def test_a_wait_ends_and_its_rank_gives_nothing_any_more(by: str, ranks: int):
    world = AllReduceWorld(ranks, 6 * BLOCK, 2)
    first, before = world.peers[0], world.own[1].clone()
    if by == "limit":
        first.tensors.watch[1] = 300
    else:
        first.tensors.watch[0] = 1
    part = torch.randn(6, BLOCK)
    found = all_reduce(first, world.memories[0], part)
    # Its own share as often as there are ranks, and what it has itself of those of others.
    repeated = found == sum_parts_reference(torch.stack([part] * ranks))
    assert torch.equal(found[~repeated], part[~repeated])
    assert repeated.sum() == (6 if ranks == 2 else 2) * BLOCK
    assert first.tensors.watch[0] == 1 and first.tensors.over.item() == 1
    # The first program has polled until the second look at the host's words, or the first.
    assert first.tensors.waited.item() == (512 if by == "limit" else 256)
    assert world.memories[0].tags.tolist() == [1, 1]
    # Shares were stored before the first wait; neither sums nor anything later were.
    pushed = world.own[1].clone()
    changed = (pushed != before).nonzero()
    assert len(changed) and (ranks == 2 or not torch.isin(changed, world.sums_of(1)).any())
    all_reduce(first, world.memories[0], part * 2)
    assert torch.equal(world.own[1], pushed)
    assert not world.peers[1].tensors.over.item()


def wait_for_each_other(rank: int, world: AllReduceWorld, found: Any) -> None:
    """Sums of parts, some of which take several launches."""
    generator, sizes = torch.Generator().manual_seed(9), random.Random(5)
    dice = random.Random(rank)
    for _ in range(8):
        parts = random_parts(world.ranks, sizes.randrange(1, 40), 1000, torch.float32, generator)
        if dice.random() < 0.5:
            time.sleep(dice.random() * 0.02)
        total = all_reduce(world.peers[rank], world.memories[rank], parts[rank])
        assert torch.equal(total, sum_parts_reference(torch.stack(parts)))
    assert int(world.memories[rank].tags[0]) > 8
    found.put(world.peers[rank].tensors.waited.item())


@interpreted
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_processes_wait_for_each_other(ranks: int):
    world = AllReduceWorld(ranks, 6000, 2)
    # At the same addresses in both processes.
    shared = [torch.zeros_like(own).share_memory_() for own in world.own]
    addresses = [own.data_ptr() for own in shared]
    world.memories = [
        FlaggedMemory.over(rank, own, addresses, 2) for rank, own in enumerate(shared)
    ]
    # Whoever came first has waited; one rank may be the last one each time.
    assert any(fork_ranks(wait_for_each_other, ranks, world))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), "parts are torch.int32, not one of"),
        (torch.zeros(3, 4).mT, r"a part must be a dense \[N, C\] of a multiple of 4 bytes"),
        (torch.zeros(1, 3, dtype=torch.float16), r"float16 \[1, 3\] of 6 bytes"),
    ],
)
def test_what_does_not_fit_is_an_error(part: torch.Tensor, message: str):
    world = AllReduceWorld(1, 100, 1)
    with pytest.raises(ValueError, match=message):
        all_reduce(world.peers[0], world.memories[0], part)


def test_memory_has_room_for_a_part_and_its_flags():
    assert all_reduce_words(0, 2) == 0
    # In one shot two halves, of whole blocks of each program.
    assert all_reduce_words(1, 2, 3) == 2 * (3 * BLOCK) + 2 * 2 * 3
    assert all_reduce_words(6 * BLOCK + 1, 2, 3) == 2 * (9 * BLOCK) + 12
    assert AllReduceWorld(2, 6 * BLOCK + 1, 3).size == 9 * BLOCK
    # In two shots shares and sums, of whole blocks of each share of each program.
    assert all_reduce_words(1, 4, 3) == 2 * (4 * 3 * BLOCK) + 2 * 4 * 3
    assert all_reduce_words(12 * BLOCK + 1, 4, 3) == 2 * (24 * BLOCK) + 24
    assert AllReduceWorld(4, 12 * BLOCK + 1, 3).size == 24 * BLOCK
