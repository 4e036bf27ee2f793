"""Pushes: sums and gathers of all ranks to the bit, in whatever order ranks come.

In one process ranks run one after the other (`World`). In several processes they wait for each
other.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.comm.items import (
    UNIT,
    PeerItems,
    Peers,
    item_bytes,
)
from graphengine.kernels.comm.push import push_gather, push_own_sum, push_sum
from graphengine.kernels.comm.push_lanes import (
    ExpertLanes,
    lane_units,
    push_lanes,
    push_lanes_reference,
)
from graphengine.kernels.comm.push_residual import (
    push_own_to_residual,
    push_to_residual,
    push_units,
)
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.residual import (
    Residual,
    StreamCopy,
    add_to_residual_reference,
    new_residual,
)
from launches.forked_ranks import fork_ranks
from launches.push_world import Launch, World, units_of

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="ranks of one process need TRITON_INTERPRET=1"
)


def random_parts(ranks: int, lanes: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    parts = torch.randn(ranks, lanes, columns) * 3 ** torch.arange(ranks)[:, None, None]
    return list(parts.to(dtype))


TAGS = st.sampled_from([0, 1, 2**31 - 2, 2**31 - 1, -3, -2, -1])


@interpreted
@settings(deadline=None, max_examples=extent(12, 60))
@given(
    ranks=st.integers(1, 4),
    lanes=st.integers(1, 4),
    columns=st.sampled_from([2, 6, 130, 256, 514]),
    units=st.integers(1, 6),
    half=st.booleans(),
    tag=TAGS,
    seed=st.integers(0, 99),
)
def test_all_have_the_sum_and_the_parts(ranks, lanes, columns, units, half, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    world = World(ranks, units, tag)
    dtype = torch.float16 if half else torch.float32
    for _ in range(3):
        parts = random_parts(ranks, lanes, columns, dtype)
        words = parts[0].nbytes // 4
        launch = dice.choice([push_sum, push_gather])
        if words > units * UNIT:
            # The plain twin stores one launch.
            continue
        order = dice.sample(range(ranks), ranks)
        found = world.run(launch, parts, words, order)
        stacked = torch.stack(parts)
        expected = stacked if launch is push_gather else sum_parts_reference(stacked)
        assert all(torch.equal(each, expected) for each in found)
        tags = [peers.tensors.tags for peers in world.peers]
        assert all(torch.equal(each, tags[0]) for each in tags)
    assert not any(peers.tensors.over.item() for peers in world.peers)


@interpreted
@settings(deadline=None, max_examples=extent(8, 40))
@given(
    ranks=st.integers(1, 4),
    columns=st.sampled_from([2, 130, 514]),
    half=st.booleans(),
    tag=TAGS,
    seed=st.integers(0, 99),
)
def test_each_has_the_sum_of_what_all_have_for_it(ranks, columns, half, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    world = World(ranks, 9, tag)
    dtype = torch.float16 if half else torch.float32
    for _ in range(3):
        parts = [torch.stack(random_parts(ranks, 2, columns, dtype)) for _ in range(ranks)]
        order = dice.sample(range(ranks), ranks)
        found = world.run(push_own_sum, parts, parts[0][0].nbytes // 4, order, world.store_own)
        for rank, each in enumerate(found):
            assert torch.equal(each, sum_parts_reference(torch.stack([p[rank] for p in parts])))
    assert not any(peers.tensors.over.item() for peers in world.peers)


def random_lanes(lanes: int, H: int, top_k: int, groups: int, dtype: torch.dtype) -> ExpertLanes:
    return ExpertLanes(
        torch.randn(lanes, H).to(dtype),
        torch.randint(-1, 9, (lanes,), dtype=torch.int32),
        torch.randint(0, 60, (lanes, top_k), dtype=torch.int32),
        torch.rand(lanes, top_k),
        torch.rand(groups, lanes) if groups else None,
    )


@interpreted
@settings(deadline=None, max_examples=extent(10, 40))
@given(
    ranks=st.integers(1, 3),
    lanes=st.integers(1, 5),
    H=st.sampled_from([2, 72, 256, 516]),
    top_k=st.sampled_from([1, 3, 60]),
    groups=st.sampled_from([0, 1, 7, 130]),
    half=st.booleans(),
    tag=TAGS,
    seed=st.integers(0, 99),
)
def test_lanes_are_those_of_all_ranks(ranks, lanes, H, top_k, groups, half, tag, seed):
    torch.manual_seed(seed)
    dtype = torch.float16 if half else torch.float32
    world = World(ranks, lane_units(lanes, H, dtype, top_k, groups), tag)

    def store(rank: int, part: ExpertLanes, row: int) -> None:
        tensors = [each for each in part if each is not None]
        words = torch.cat([units_of(each, each.nbytes // 4) for each in tensors])
        world.store_words(world.items, rank, words)

    for _ in range(2):
        parts = [random_lanes(lanes, H, top_k, groups, dtype) for _ in range(ranks)]
        order = random.Random(seed).sample(range(ranks), ranks)
        expected = push_lanes_reference(parts)
        for found in world.run(push_lanes, parts, 0, order, store):
            for name, one, other in zip(found._fields, found, expected, strict=True):
                assert (one is None and other is None) or torch.equal(one, other), name
    # All units were used, and no others asked for.
    tags = torch.stack([peers.tensors.tags for peers in world.peers])
    assert torch.equal(tags - 2, torch.full_like(tags, tag))


@interpreted
@pytest.mark.parametrize("launch", [push_sum, push_gather])
def test_large_parts_take_several_launches(launch: Launch):
    world = World(1, 2)
    part = torch.randn(3, 500)
    assert torch.equal(launch(world.peers[0], part).view(3, 500), part)
    assert world.peers[0].tensors.tags.eq(3).all()


@interpreted
def test_large_parts_of_each_take_several_launches():
    """A wait that is over leaves this rank what it has for itself."""
    world = World(2, 1)
    world.peers[1].tensors.watch[0] = 1
    parts = torch.randn(2, 3, 128)
    assert torch.equal(push_own_sum(world.peers[1], parts), 2 * parts[1])
    assert world.peers[1].tensors.tags.eq(2).all()


@interpreted
def test_gathers_take_any_dtype():
    world = World(2, 1)
    parts = [torch.randint(-(2**62), 2**62, (3, 5)) for _ in range(2)]
    for found in world.run(push_gather, parts, 30, [1, 0]):
        assert torch.equal(found, torch.stack(parts))


@interpreted
def test_a_rank_may_be_a_launch_behind():
    """Its peer's next items do not touch those that it has not taken yet."""
    world = World(2, 1, tag=-1)
    parts, later = (random_parts(2, 1, 40, torch.float32) for _ in range(2))
    world.store(0, parts[0], 40)
    assert torch.equal(push_sum(world.peers[1], parts[1]), parts[0] + parts[1])
    world.store(1, later[1], 40)
    assert torch.equal(push_sum(world.peers[0], parts[0]), parts[0] + parts[1])
    for found in world.run(push_sum, later, 40, [0, 1]):
        assert torch.equal(found, later[0] + later[1])


@interpreted
@pytest.mark.parametrize("by", ["limit", "host"])
def test_a_wait_ends_and_its_rank_gives_nothing_any_more(by: str):
    world = World(2, 3)
    first, second = world.peers
    before = world.items[1].clone()
    if by == "limit":
        first.tensors.watch[1] = 300
    else:
        first.tensors.watch[0] = 1
    part = torch.randn(1, 600)
    assert torch.equal(push_gather(first, part), torch.stack([part, part]))
    assert first.tensors.watch[0] == 1 and first.tensors.over.item() == 1
    # The first program has polled until the second look at the host's words, or the first.
    assert first.tensors.waited.item() == (512 if by == "limit" else 256)
    # What it had stored before the wait is right; after it there is nothing.
    pushed = world.items[1].clone()
    assert not torch.equal(pushed, before)
    assert torch.equal(push_gather(first, part * 2), torch.stack([part, part]) * 2)
    assert torch.equal(world.items[1], pushed)
    assert not second.tensors.over.item()


def random_residual(lanes: int, H: int, kept: bool) -> Residual:
    residual = new_residual(lanes, H, 1, dtype=torch.float16, device="cpu")
    residual.x.normal_()
    residual.scaled.fill_(7.0)
    rows = torch.full((lanes, H + 2), 7.0, dtype=torch.float16)[:, :H]
    return residual._replace(kept=StreamCopy(rows, 0.5) if kept else None)


def copy_of(residual: Residual) -> Residual:
    kept = residual.kept and StreamCopy(residual.kept.rows.clone(), residual.kept.scale)
    return Residual(residual.x.clone(), residual.scaled.clone(), residual.squares, kept)


@interpreted
@settings(deadline=None, max_examples=extent(10, 40))
@given(
    ranks=st.integers(1, 3),
    lanes=st.integers(1, 5),
    H=st.sampled_from([32, 256, 300, 516]),
    half=st.booleans(),
    bias=st.booleans(),
    kept=st.booleans(),
    tag=TAGS,
    seed=st.integers(0, 99),
)
def test_the_stream_is_what_the_sum_makes_of_it(ranks, lanes, H, half, bias, kept, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    dtype = torch.float16 if half else torch.float32
    units = push_units(lanes, H, dtype)
    world = World(ranks, units, tag)
    slot = torch.arange(lanes, dtype=torch.int32)
    padded = dice.randrange(lanes + 1)
    slot[padded:] = -1
    parts = random_parts(ranks, lanes, H, dtype)
    for part in parts:
        part[padded:] = float("nan")
    norm, bias_H = torch.randn(H).half(), torch.randn(H).half() if bias else None
    start = random_residual(lanes, H, kept)

    def launch(peers: Peers, part: torch.Tensor) -> Residual:
        return push_to_residual(peers, part, slot, copy_of(start), norm, bias_H=bias_H)

    order = dice.sample(range(ranks), ranks)
    found = world.run(launch, parts, H * dtype.itemsize // 4, order)
    y = sum_parts_reference(torch.stack([part.float() for part in parts]))
    expected = copy_of(start)._replace(squares=torch.zeros(units // lanes, lanes))
    add_to_residual_reference(y if bias_H is None else y + bias_H.float(), slot, expected, norm)
    for each in found:
        assert torch.equal(each.x, expected.x) and torch.equal(each.scaled, expected.scaled)
        sums = each.squares[:, :padded].sum(0)
        torch.testing.assert_close(sums, expected.x[:padded].square().sum(1))
        assert torch.equal(each.squares[:, :padded], found[0].squares[:, :padded])
        if kept:
            assert torch.equal(each.kept.rows, expected.kept.rows)


@interpreted
@settings(deadline=None, max_examples=extent(10, 40))
@given(
    ranks=st.integers(1, 3),
    lanes=st.integers(1, 4),
    H=st.sampled_from([32, 300, 516]),
    own=st.booleans(),
    kept=st.booleans(),
    tag=TAGS,
    seed=st.integers(0, 99),
)
def test_the_stream_is_what_all_have_for_a_rank(ranks, lanes, H, own, kept, tag, seed):
    """Each rank has lanes of its own, and pads others than its peers."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    units = push_units(lanes, H, torch.float32)
    world = World(ranks, units, tag)
    parts = [torch.stack(random_parts(ranks, lanes, H, torch.float32)) for _ in range(ranks)]
    slots = torch.arange(lanes, dtype=torch.int32).repeat(ranks, 1)
    for rank in range(ranks):
        padded = dice.randrange(lanes + 1)
        slots[rank, padded:] = -1
        for part in parts:
            part[rank, padded:] = float("nan")
    norm, start = torch.randn(H).half(), random_residual(lanes, H, kept)
    more = torch.randn(ranks, lanes, H) if own else None

    def launch(peers: Peers, part: torch.Tensor) -> Residual:
        own_NH = None if more is None else more[peers.rank]
        slot = slots[peers.rank]
        return push_own_to_residual(peers, part, slot, copy_of(start), norm, own_NH=own_NH)

    order = dice.sample(range(ranks), ranks)
    for rank, each in enumerate(world.run(launch, parts, H, order, world.store_own)):
        y = sum_parts_reference(torch.stack([part[rank] for part in parts]))
        expected = copy_of(start)._replace(squares=torch.zeros(units // lanes, lanes))
        y = y if more is None else y + more[rank]
        add_to_residual_reference(y, slots[rank], expected, norm)
        assert torch.equal(each.x, expected.x) and torch.equal(each.scaled, expected.scaled)
        live = int((slots[rank] >= 0).sum())
        sums = each.squares[:, :live].sum(0)
        torch.testing.assert_close(sums, expected.x[:live].square().sum(1))
        if kept:
            assert torch.equal(each.kept.rows, expected.kept.rows)


def wait_for_each_other(rank: int, tensors: list[PeerItems], found: Any) -> None:
    peers = Peers(rank, tensors[rank])
    dice, generator = random.Random(rank), torch.Generator().manual_seed(9)
    sizes = random.Random(5)
    for _ in range(12):
        parts = torch.randn(2, sizes.randrange(1, 4), 100, generator=generator)
        if dice.random() < 0.5:
            time.sleep(dice.random() * 0.02)
        assert torch.equal(push_sum(peers, parts[rank]), parts[0] + parts[1])
    found.put(rank)


@interpreted
def test_ranks_that_are_processes_wait_for_each_other():
    items = [torch.zeros(2, 2, 2, UNIT, dtype=torch.int64).share_memory_() for _ in range(2)]
    # At the same addresses in both processes.
    addresses = [item.data_ptr() for item in items]
    tensors = [PeerItems.over_items(rank, each, addresses) for rank, each in enumerate(items)]
    for each in tensors:
        each.watch[1] = 2**40
    fork_ranks(wait_for_each_other, 2, tensors)


FLOAT = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("launch", "part", "message"),
    [
        (push_sum, torch.zeros(3, 4, dtype=torch.int32), "parts are torch.int32, not one of"),
        (
            push_sum,
            FLOAT.mT,
            r"a part must be a dense \[N, C\] of a multiple of 4 bytes",
        ),
        (push_gather, FLOAT[0], r"a part must be a dense .* not torch.float32 \[4\] of 16 bytes"),
        (push_sum, torch.zeros(1, 3, dtype=torch.float16), r"float16 \[1, 3\] of 6 bytes"),
        (push_own_sum, FLOAT[None].int(), "parts are torch.int32, not one of"),
        (
            push_own_sum,
            torch.zeros(2, 3, 4),
            r"parts for 1 ranks must be a dense \[1, N, C\], not \[2, 3, 4\]",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(launch: Launch, part: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        launch(World(1, 1).peers[0], part)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (torch.zeros(2, 600), r"takes 1536 words: there are 1280 in 5 units"),
        (torch.zeros(2, 8, dtype=torch.int32), r"dense float \[2, 8\], not torch.int32 \[2, 8\]"),
        (torch.zeros(2, 7, dtype=torch.float16), "7 values in torch.float16 is no multiple of 4"),
    ],
)
def test_what_no_stream_takes_is_an_error(part: torch.Tensor, message: str):
    lanes, H = part.shape
    residual = new_residual(lanes, H, 1, dtype=torch.float16, device="cpu")
    slot = torch.zeros(lanes, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        push_to_residual(World(1, 5).peers[0], part, slot, residual, torch.ones(H))


@pytest.mark.parametrize(
    ("parts", "own", "message"),
    [
        (torch.zeros(2, 2, 8), None, r"parts for 1 ranks must be a dense \[1, N, H\], not \[2, 2"),
        (torch.zeros(1, 3, 8), None, r"a part must be a dense float \[2, 8\], not .* \[3, 8\]"),
        (torch.zeros(1, 2, 8), torch.zeros(2, 7), r"own must be a dense torch.float32 \[16\]"),
    ],
)
def test_what_no_stream_takes_of_each_is_an_error(parts, own, message: str):
    residual = new_residual(2, 8, 1, dtype=torch.float16, device="cpu")
    slot = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        push_own_to_residual(World(1, 5).peers[0], parts, slot, residual, torch.ones(8), own_NH=own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": torch.zeros(2, 8).mT},
            r"x must be a dense float \[N, H\], not .* \[8, 2",
        ),
        ({"x": torch.zeros(2, 7).half()}, "7 values in torch.float16 is no multiple of 4 bytes"),
        ({"slot": torch.zeros(3, dtype=torch.int32)}, r"slot must be a dense \[2\], not \(3,\)"),
        ({"expert": torch.zeros(2, 3)}, r"expert must be a dense torch.int32 \[2, 3\], not"),
        ({"weight": torch.zeros(2, 4)}, r"weight must be a dense .* \[2, 3\], not .* \[2, 4\]"),
        ({"squares": torch.zeros(1, 3)}, r"squares must be a dense float32 \[T, 2\]"),
        (
            {"x": torch.zeros(2, 300)},
            r"2 lanes of 300 values in torch.float32, 3 experts and 1 sums take 7 units of 256 "
            r"words: there are 6",
        ),
    ],
)
def test_lanes_that_do_not_fit_are_an_error(changes, message: str):
    lanes = random_lanes(2, 8, 3, 1, torch.float32)._replace(**changes)
    with pytest.raises(ValueError, match=message):
        push_lanes(World(1, 6).peers[0], lanes)


def test_bytes_are_those_of_the_items():
    assert World(3, 4).items[0].nbytes == item_bytes(3, 4)
