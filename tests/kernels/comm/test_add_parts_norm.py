"""Sum, residual and norm of a chunk, each rank for some lanes: what two kernels make of all lanes,
to the bit, in whatever order ranks come.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphengine.kernels.comm.add_parts_norm import (
    add_parts_rms_norm,
    split_has_room,
    split_lanes,
    split_normed,
    split_words,
)
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.norm import add_rms_norm
from launches.forked_ranks import fork_ranks
from launches.split_chunks import SplitChunk

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="ranks of one machine without GPUs need TRITON_INTERPRET=1"
)
WORDS = 12 * 256


def new_ranks(ranks: int, programs: int, tag: int = 0) -> list[tuple[Peers, FlaggedMemory]]:
    """Memory that processes forked from here share, with garbage in all words but flags."""
    own = [
        torch.randint(-(2**31), 2**31, (split_words(WORDS, ranks, programs),)).int()
        for _ in range(ranks)
    ]
    for each in own:
        each[2 * WORDS :] = tag
        each.share_memory_()
    addresses = [each.data_ptr() for each in own]
    items = [torch.zeros(2, ranks, 1, UNIT, dtype=torch.int64) for _ in range(ranks)]
    at = [each.data_ptr() for each in items]
    found = []
    for rank in range(ranks):
        peers = Peers(rank, PeerItems.over_items(rank, items[rank], at))
        peers.tensors.watch[1] = 2**40
        memory = FlaggedMemory.over(rank, own[rank], addresses, programs)
        memory.tags.fill_(tag)
        found.append((peers, memory))
    return found


def sum_chunks(
    rank: int, world: list[tuple[Peers, FlaggedMemory]], most: int, seed: int, found: Any
) -> None:
    """Chunks of other sizes and kinds one after the other, for which ranks come at other times."""
    (peers, memory), ranks = world[rank], len(world)
    sizes, dice = random.Random(seed), random.Random(rank)
    widest = WORDS // most
    turns = memory.tags.tolist()
    for _ in range(6):
        chunk = SplitChunk(
            ranks,
            lanes=sizes.randrange(1, most + 1),
            hidden=sizes.choice([2, widest // 2 + 2, widest]),
            # The interpreter does not round to bfloat16 as a GPU does.
            dtype=sizes.choice([torch.float32, torch.float16]),
            biased=sizes.random() < 0.5,
            seed=sizes.randrange(1000),
        )
        if dice.random() < 0.5:
            time.sleep(dice.random() * 0.02)
        chunk.assert_is_whole(peers, memory)
        # Programs after the first shift have found that it is their turn.
        programs = min(-(-len(chunk.stream) // ranks), len(turns))
        for program in range(-(-programs // 4), programs):
            turns[program] = memory.tags[program].item()
    found.put((memory.tags.tolist(), turns, peers.tensors.waited.item()))


@interpreted
@pytest.mark.parametrize(
    ("ranks", "programs", "most_lanes", "tag"),
    [(2, 2, 12, 0), (2, 24, 48, -2), (3, 1, 12, 2**31 - 2), (4, 8, 12, -3)],
)
def test_each_rank_has_its_lanes_and_all_normed_ones(
    ranks: int, programs: int, most_lanes: int, tag: int
):
    world = new_ranks(ranks, programs, tag)
    ends = fork_ranks(sum_chunks, ranks, world, most_lanes, ranks)
    # The first program is in each launch, on all ranks.
    assert all(tags == ends[0][0] for tags, *_ in ends)
    assert ends[0][0][0] == ((tag + 6 + 2**31) % 2**32) - 2**31
    assert any(waited for *_, waited in ends)
    for (_, turns, _), (_, memory) in zip(ends, world, strict=True):
        assert memory.own[2 * WORDS + (ranks - 1) * programs :][:programs].tolist() == turns


@interpreted
def test_rows_that_are_read_twice_have_the_same_bits():
    chunk = SplitChunk(1, lanes=2, hidden=8200, dtype=torch.float16, biased=True, seed=4)
    own = torch.zeros(split_words(8200, 1, 3), dtype=torch.int32)
    items = torch.zeros(2, 1, 1, UNIT, dtype=torch.int64)
    peers = Peers(0, PeerItems.over_items(0, items, [items.data_ptr()]))
    chunk.assert_is_whole(peers, FlaggedMemory.over(0, own, [own.data_ptr()], 3))


@interpreted
@pytest.mark.parametrize("by", ["limit", "host"])
def test_a_wait_ends_and_its_rank_gives_nothing_any_more(by: str):
    world = new_ranks(3, 2)
    peers, memory = world[1]
    others = [world[rank][1].own for rank in (0, 2)]
    before = [own.clone() for own in others]
    if by == "limit":
        peers.tensors.watch[1] = 300
    else:
        peers.tensors.watch[0] = 1
    part, x, weight = torch.randn(9, 6), torch.randn(9, 6), torch.randn(6)
    slot, eps = torch.zeros(9, dtype=torch.int32), 1e-5
    # Of its own lanes it takes its part for that of each rank.
    expected, own = x.clone(), split_lanes(9, 1, 3)
    whole = sum_parts_reference(torch.stack([part] * 3))
    normed = add_rms_norm(
        expected[own], whole[own], weight, slot[own], eps=eps, out_dtype=torch.float32
    )
    found = add_parts_rms_norm(peers, memory, part, x, weight, slot, eps=eps)
    assert torch.equal(x, expected) and torch.equal(found[own], normed)
    assert peers.tensors.watch[0] == 1 and peers.tensors.over.item() == 1
    # The first program has polled until the second look at the host's words, or the first.
    assert peers.tensors.waited.item() == (512 if by == "limit" else 256)
    assert memory.tags.tolist() == [1, 1]
    # Others have what its first program has given them before it waited, and nothing later.
    for other, own, was, place in zip((0, 2), others, before, (0, 1), strict=True):
        lanes = part[split_lanes(9, other, 3)]
        given = own[place * 18 : (place + 1) * 18].view(torch.float32).view(3, 6)
        assert torch.equal(given[::2], lanes[::2])
        changed = (own != was).nonzero()[:, 0].tolist()
        assert changed[-1] == 2 * WORDS + 2 * place and len(changed) == 12 + 1
    kept = [own.clone() for own in others]
    add_parts_rms_norm(peers, memory, 2 * part, x, weight, slot, eps=eps)
    assert all(torch.equal(now, was) for now, was in zip(others, kept, strict=True))


@given(lanes=st.integers(0, 40), ranks=st.integers(1, 8))
def test_each_lane_is_one_ranks(lanes: int, ranks: int):
    runs = [split_lanes(lanes, rank, ranks) for rank in range(ranks)]
    assert [lane for run in runs for lane in range(run.start, run.stop)] == list(range(lanes))
    assert max(run.stop - run.start for run in runs) == -(-lanes // ranks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(3, 4).half()}, "x_NH is torch.float16, not torch.float32"),
        ({"part": torch.zeros(3, 4).int()}, "parts are torch.int32, not one of"),
        ({"part": torch.zeros(3, 5)}, r"a part must be a dense \[3, 4\], as x_NH is, not \[3, 5\]"),
        ({"part": torch.zeros(4, 3).mT}, r"a part must be a dense \[3, 4\]"),
        ({"weight": torch.zeros(4).int()}, "weight_H is torch.int32, not one of"),
        ({"bias": torch.zeros(4).int()}, "bias_H is torch.int32, not one of"),
        ({"weight": torch.zeros(5)}, r"weight_H"),
        ({"slot": torch.zeros(2).int()}, r"slot_N"),
        (
            {"x": torch.zeros(7, 1000), "part": torch.zeros(7, 1000), "weight": torch.ones(1000)}
            | {"slot": torch.zeros(7).int()},
            f"7 lanes of 1000 values in torch.float32 take 7000 words: there are {WORDS}",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(changed: dict[str, Any], message: str):
    peers, memory = new_ranks(1, 1)[0]
    given = {"x": torch.zeros(3, 4), "weight": torch.ones(4), "slot": torch.zeros(3).int()}
    given |= {"part": torch.zeros(3, 4), "bias": None} | changed
    with pytest.raises(ValueError, match=message):
        add_parts_rms_norm(
            peers,
            memory,
            given["part"],
            given["x"],
            given["weight"],
            given["slot"],
            eps=1e-5,
            bias_H=given["bias"],
        )


def test_memory_has_room_for_a_part_its_norms_and_flags():
    assert split_words(0, 2) == 0
    assert split_words(5, 2, 3) == 2 * 8 + 2 * 2 * 3
    memory = new_ranks(2, 3)[0][1]
    assert memory.size == WORDS and len(memory.tags) == 3
    normed = split_normed(memory, 3, 5, torch.float16)
    assert normed.shape == (3, 5)
    assert normed.data_ptr() == memory.own.data_ptr() + 4 * WORDS
    assert split_has_room(memory, 12, 256, torch.float32)
    assert not split_has_room(memory, 13, 256, torch.float32)
    # Of three others two lanes each come, though there are five.
    assert not split_has_room(new_ranks(4, 1)[0][1], 5, WORDS // 5, torch.float32)
