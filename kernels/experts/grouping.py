"""Pairs of lane and expert, grouped by expert on the device, into blocks that programs take.

Only the device knows how many pairs an expert has: there are as many blocks as any routes may need,
and left-over blocks belong to no expert. On a rank that has only some experts, the pairs of all
other experts are grouped, too, as if of one more expert after its own: down adds up a lane once all
of its pairs have arrived.

Letters: N lanes, k experts of a lane, P = N * k pairs (pair p is that of lane p // k and of rank
p % k), E experts, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_int32, check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.experts.held import (
    check_held,
    held_options,
    place_of_expert,
    places_of,
)

# Pairs that a program of the kernel reads together: at least one for each of its threads, which
# `tl.histogram` needs.
_LEAST_CHUNK, _CHUNK = 128, 1024


class Grouping(NamedTuple):
    """The live pairs of all lanes by expert, in ascending order for each; valid as its tensors are.

    order   int32 [P]: pairs; arbitrary values follow the live ones
    blocks  int32 [3, B]: expert (the place of its weight), first place in `order`, and number of
            pairs of each block; blocks of one expert follow each other, and all but its last are
            full. Past the last block the expert is -1
    size    pairs of a full block
    """

    order: torch.Tensor
    blocks: torch.Tensor
    size: int


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """Most blocks that this many pairs need, however they are distributed."""
    return min(pairs, experts + pairs // size)


def group_pairs(
    expert_Nk: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    experts: int,
    size: int,
    held: range | None = None,
    pdl: bool = False,
) -> Grouping:
    """Group pairs in blocks of at most `size`: one kernel, without a host sync.

    Args:
        expert_Nk: int32, dense: ids as `route` leaves them. Those of padded lanes are ignored.
        slot_N: int32, -1 = padded lane.
        experts: number of experts whose weights are here.
        held: their ids; None: all ids, which are in [0, experts).
        pdl: the launch before may still run.

    ValueError for a shape or dtype that does not fit, and if there is nothing to group.
    """
    if expert_Nk.dim() != 2 or 0 in expert_Nk.shape or not expert_Nk.is_contiguous():
        raise ValueError(f"expert_Nk must be a dense matrix, not {tuple(expert_Nk.shape)}")
    check_int32(expert_Nk=expert_Nk)
    lanes, top_k = expert_Nk.shape
    check_lanes(lanes, slot_N=slot_N)
    if experts < 1 or size < 1:
        raise ValueError(f"pairs of {experts} experts in blocks of {size}")
    check_held(held, experts)
    pairs = lanes * top_k
    groups = experts if held is None else experts + 1
    count = most_blocks(pairs, groups, size)
    grouping = Grouping(slot_N.new_empty(pairs), slot_N.new_empty(3, count), size)
    if not use_triton(expert_Nk):
        return group_pairs_reference(expert_Nk, slot_N, experts=experts, held=held, out=grouping)
    launcher(_group_kernel, (groups,))(
        expert_Nk,
        slot_N,
        grouping.order,
        grouping.blocks,
        PAIRS=pairs,
        TOP_K=top_k,
        E=groups,
        # One more for pairs of padded lanes.
        BINS=triton.next_power_of_2(groups + 1),
        SIZE=size,
        BLOCKS=count,
        CHUNK=max(_LEAST_CHUNK, min(_CHUNK, triton.next_power_of_2(pairs))),
        num_warps=4,
        **held_options(held),
        **launch_options(pdl),
    )
    return grouping


@triton.jit
def _group_kernel(
    expert_ptr,
    slot_ptr,
    order_ptr,
    blocks_ptr,
    PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert. Each counts all experts' pairs, to know where its own begin."""
    wait_for_inputs(PDL)
    own = tl.program_id(0)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, PAIRS, CHUNK):
        expert = _experts(expert_ptr, slot_ptr, first, PAIRS, TOP_K, E, CHUNK, FIRST, HELD)
        counts += tl.histogram(expert, BINS)
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < E, counts, 0)
    needed = (counts + SIZE - 1) // SIZE
    count = tl.sum(tl.where(bins == own, counts, 0), axis=0)
    start = tl.sum(tl.where(bins < own, counts, 0), axis=0)
    first_block = tl.sum(tl.where(bins < own, needed, 0), axis=0)

    for block in range(0, (count + SIZE - 1) // SIZE):
        at = blocks_ptr + first_block + block
        tl.store(at, own)
        tl.store(at + BLOCKS, start + block * SIZE)
        tl.store(at + 2 * BLOCKS, tl.minimum(count - block * SIZE, SIZE))
    if own == E - 1:
        used = tl.sum(needed, axis=0)
        for first in range(0, BLOCKS, CHUNK):
            unused = first + tl.arange(0, CHUNK)
            left = (unused >= used) & (unused < BLOCKS)
            tl.store(blocks_ptr + unused, tl.full((CHUNK,), -1, tl.int32), mask=left)
    if count > 0:
        place = start
        for first in range(0, PAIRS, CHUNK):
            expert = _experts(expert_ptr, slot_ptr, first, PAIRS, TOP_K, E, CHUNK, FIRST, HELD)
            mine = expert == own
            before = tl.cumsum(mine.to(tl.int32), axis=0)
            pair = first + tl.arange(0, CHUNK)
            tl.store(order_ptr + place + before - 1, pair, mask=mine)
            place += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def _experts(
    expert_ptr,
    slot_ptr,
    first,
    PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
):
    """The expert's place of each of the CHUNK pairs from `first` on; E for pairs that do not exist
    or are padded.
    """
    pair = first + tl.arange(0, CHUNK)
    there = pair < PAIRS
    slot = tl.load(slot_ptr + pair // TOP_K, mask=there, other=-1)
    expert = tl.load(expert_ptr + pair, mask=slot >= 0, other=E)
    if HELD > 0:
        expert = tl.where(slot >= 0, place_of_expert(expert, FIRST, HELD), E)
    return expert


def group_pairs_reference(
    expert_Nk: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    experts: int,
    out: Grouping,
    held: range | None = None,
) -> Grouping:
    """`group_pairs` in plain PyTorch."""
    if held is not None:
        expert_Nk, experts = places_of(expert_Nk, held), experts + 1
    live = (slot_N >= 0).repeat_interleave(expert_Nk.shape[1])
    ids = torch.where(live, expert_Nk.flatten(), experts)
    sorted_ids, order = ids.sort(stable=True)
    there = order[sorted_ids < experts].int()
    out.order[: len(there)] = there
    counts = torch.bincount(ids, minlength=experts + 1)[:experts].tolist()
    start = 0
    blocks: list[tuple[int, int, int]] = []
    for expert, count in enumerate(counts):
        firsts = range(0, count, out.size)
        blocks += [(expert, start + first, min(out.size, count - first)) for first in firsts]
        start += count
    out.blocks[0] = -1
    if blocks:
        out.blocks[:, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32).t()
    return out
