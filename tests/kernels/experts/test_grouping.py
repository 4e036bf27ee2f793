"""Pairs by expert: against the reference, with padded lanes, idle experts, and all to one."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.grouping import (
    Grouping,
    group_pairs,
    group_pairs_reference,
    most_blocks,
)
from launches.compilation import launches_handed_to
from launches.emulation import run_launch


def random_experts(lanes, top_k, experts, seed, *, used=None):
    """Different experts of each lane, of the first `used`."""
    generator = torch.Generator().manual_seed(seed)
    used = experts if used is None else used
    drawn = [torch.randperm(used, generator=generator)[:top_k] for _ in range(lanes)]
    return torch.stack(drawn).int()


def blocks_of(grouping):
    """(expert, pairs) of each block that is used."""
    used = grouping.blocks[:, grouping.blocks[0] >= 0].t().tolist()
    order = grouping.order.tolist()
    return [(expert, order[start : start + count]) for expert, start, count in used]


@settings(deadline=None, max_examples=extent(12, 50))
@given(
    lanes=st.integers(1, 70),
    experts=st.sampled_from([1, 2, 5, 16, 65]),
    top_k=st.integers(1, 8),
    size=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@example(lanes=700, experts=3, top_k=2, size=16, seed=0, data=None)
def test_matches_reference(device, lanes, experts, top_k, size, seed, data):
    top_k = min(top_k, experts)
    used = experts if data is None else data.draw(st.integers(top_k, experts))
    padded = [5, 699] if data is None else sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    chosen = random_experts(lanes, top_k, experts, seed, used=used)
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[padded] = -1
    # The ids of padded lanes are no ids.
    chosen[padded] = 2**31 - 1
    chosen, slot = chosen.to(device), slot.to(device)
    actual = group_pairs(chosen, slot, experts=experts, size=size)
    assert len(actual.blocks[0]) == most_blocks(lanes * top_k, experts, size)
    empty = Grouping(torch.empty_like(actual.order), torch.empty_like(actual.blocks), size)
    expected = group_pairs_reference(chosen, slot, experts=experts, out=empty)
    assert blocks_of(actual) == blocks_of(expected)
    unused = len(blocks_of(expected))
    assert (actual.blocks[0, unused:] == -1).all()
    # What the reference is to do, in other words.
    pairs = [pair for _, of_block in blocks_of(actual) for pair in of_block]
    live = (slot >= 0).repeat_interleave(top_k).nonzero().flatten().tolist()
    assert sorted(pairs) == live
    for expert, of_block in blocks_of(actual):
        assert 1 <= len(of_block) <= size and of_block == sorted(of_block)
        assert (chosen.flatten()[of_block] == expert).all()


def test_all_pairs_of_one_expert_fill_blocks(device):
    chosen = torch.full((33, 1), 3, dtype=torch.int32, device=device)
    slot = torch.arange(33, dtype=torch.int32, device=device)
    grouping = group_pairs(chosen, slot, experts=5, size=16)
    assert [len(pairs) for _, pairs in blocks_of(grouping)] == [16, 16, 1]
    assert {expert for expert, _ in blocks_of(grouping)} == {3}


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(("lanes", "experts", "top_k"), [(4, 5, 3), (300, 3, 2)])
def test_compiled_kernel_matches_reference(lanes, experts, top_k):
    """Its code for sm_90, run in numpy; the second case has more than a pair for each thread."""
    chosen = random_experts(lanes, top_k, experts, 0)
    slot = torch.arange(lanes, dtype=torch.int32)
    chosen[1], slot[1] = 2**31 - 1, -1
    module = importlib.import_module("graphengine.kernels.experts.grouping")
    with launches_handed_to(run_launch, module):
        actual = group_pairs(chosen, slot, experts=experts, size=16, pdl=True)
    empty = Grouping(torch.empty_like(actual.order), torch.empty_like(actual.blocks), 16)
    expected = group_pairs_reference(chosen, slot, experts=experts, out=empty)
    assert blocks_of(actual) == blocks_of(expected)
    assert (actual.blocks[0, len(blocks_of(expected)) :] == -1).all()


@pytest.mark.parametrize(("pairs", "experts", "size"), [(64, 5, 16), (7, 128, 16), (33, 2, 4)])
def test_no_spread_needs_more_blocks(pairs, experts, size):
    """All but one pair to one expert, and one to each: the bound holds, and is met or near."""
    most = most_blocks(pairs, experts, size)
    for spread in range(1, min(pairs, experts) + 1):
        counts = [1] * (spread - 1) + [pairs - spread + 1]
        assert sum(-(-count // size) for count in counts) <= most
    assert most <= pairs


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("expert", "slot", "experts", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2).int(), 4, "expert_Nk must be int32"),
        (torch.zeros(3).int(), torch.zeros(3).int(), 4, r"dense matrix, not \(3,\)"),
        (torch.zeros(2, 3).int(), torch.zeros(3).int(), 4, r"\[2\], not \(3,\)"),
        (torch.zeros(2, 3).int(), torch.zeros(2).int(), 0, "0 experts in blocks of 16"),
    ],
)
def test_what_does_not_fit_is_an_error(expert, slot, experts, message):
    with pytest.raises(ValueError, match=message):
        group_pairs(expert, slot, experts=experts, size=16)
