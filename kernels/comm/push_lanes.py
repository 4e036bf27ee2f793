"""All-gather of lanes by pushes: one kernel gathers everything that experts read of them.

All ranks have the same number of lanes, and their tensors travel as the words of `items`. Every
tensor begins a new unit, so a unit holds words of one tensor only.

Letters: R ranks, N lanes of a rank, M = R * N lanes, H hidden, k experts of a lane, T partial sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    PROGRAMS,
    UNIT,
    Peers,
    map_peers,
    next_tags,
    push_options,
    push_words,
    same_for_all,
    take_words,
)
from graphengine.kernels.core.lanes import FLOAT_DTYPES, check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.residual import check_squares


class ExpertLanes(NamedTuple):
    """The tensors that experts read of N lanes, all dense."""

    x: torch.Tensor
    """[N, H], any float dtype"""
    slot: torch.Tensor
    """int32 [N], -1 = padded lane"""
    expert: torch.Tensor
    """int32 [N, k]"""
    weight: torch.Tensor
    """float32 [N, k]"""
    squares: torch.Tensor | None = None
    """float32 [T, N] sums of squares for a norm that x still needs; None: x is normed."""

    @property
    def units(self) -> int:
        """Units that `push_lanes` takes."""
        (lanes, hidden), top_k = self.x.shape, self.expert.shape[1]
        groups = 0 if self.squares is None else len(self.squares)
        return lane_units(lanes, hidden, self.x.dtype, top_k, groups)


def lane_units(lanes: int, hidden: int, dtype: torch.dtype, top_k: int, groups: int) -> int:
    """Units that `push_lanes` takes for lanes of these sizes, with `groups` groups of squares."""
    widths = (-(-hidden * dtype.itemsize // 4), 1, top_k, top_k, groups)
    return sum(-(-lanes * width // UNIT) for width in widths)


def push_lanes(peers: Peers, lanes: ExpertLanes, *, pdl: bool = False) -> ExpertLanes:
    """Gather the M lanes of all ranks, in rank order, as new tensors.

    All ranks call it with tensors of the same shapes and dtypes, after the same calls.

    Args:
        lanes: this rank's, on the device of `peers`; H even where x has 16 bits.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit, or for more than `peers` have units.
    """
    _check(lanes)
    x, slot, expert, weight, squares = lanes
    (N, H), top_k = x.shape, expert.shape[1]
    groups = 0 if squares is None else len(squares)
    units = lanes.units
    if units > peers.units:
        raise ValueError(
            f"{N} lanes of {H} values in {x.dtype}, {top_k} experts and {groups} sums take {units} "
            f"units of {UNIT} words: there are {peers.units}"
        )
    M = peers.ranks * N
    gathered = ExpertLanes(
        x.new_empty(M, H),
        slot.new_empty(M),
        expert.new_empty(M, top_k),
        weight.new_empty(M, top_k),
        None if squares is None else squares.new_empty(groups, M),
    )
    pairs = [
        None if each is None else each.view(torch.int32)
        for part in zip(lanes, gathered, strict=True)
        for each in part
    ]
    launcher(_push_lanes_kernel, (min(units, PROGRAMS),))(
        *pairs,
        N,
        peers.tensors,
        X_WORDS=H * x.dtype.itemsize // 4,
        TOP_K=top_k,
        GROUPS=groups,
        UNIT=UNIT,
        num_warps=4,
        **push_options(peers),
        **launch_options(pdl),
    )
    return gathered


def _check(lanes: ExpertLanes) -> None:
    x, slot, expert, weight, squares = lanes
    if x.dim() != 2 or 0 in x.shape or x.dtype not in FLOAT_DTYPES or not x.is_contiguous():
        raise ValueError(f"x must be a dense float [N, H], not {x.dtype} {list(x.shape)}")
    N, H = x.shape
    if H * x.dtype.itemsize % 4:
        raise ValueError(f"a lane of {H} values in {x.dtype} is no multiple of 4 bytes")
    check_lanes(N, slot=slot)
    for name, tensor, dtype in (("expert", expert, torch.int32), ("weight", weight, torch.float32)):
        shape = [N, expert.shape[-1]]
        if tensor.dtype != dtype or list(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a dense {dtype} {shape}, not {tensor.dtype} {list(tensor.shape)}"
            )
    if squares is not None:
        check_squares(squares, N)


def push_lanes_reference(lanes_of_ranks: list[ExpertLanes]) -> ExpertLanes:
    """Plain PyTorch twin of `push_lanes`: its result on each rank."""
    squares = [each.squares for each in lanes_of_ranks if each.squares is not None]
    return ExpertLanes(
        torch.cat([each.x for each in lanes_of_ranks]),
        torch.cat([each.slot for each in lanes_of_ranks]),
        torch.cat([each.expert for each in lanes_of_ranks]),
        torch.cat([each.weight for each in lanes_of_ranks]),
        torch.cat(squares, dim=1) if squares else None,
    )


@triton.jit(do_not_specialize=["lanes"])
def _push_lanes_kernel(
    x_ptr,
    out_x_ptr,
    slot_ptr,
    out_slot_ptr,
    expert_ptr,
    out_expert_ptr,
    weight_ptr,
    out_weight_ptr,
    squares_ptr,
    out_squares_ptr,
    lanes,
    peers,
    X_WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program stores several units, all of them before it waits for the first.

    Pointers are to words. A unit belongs to one tensor: all other loads and stores are masked.
    """
    slots = tl.cdiv(lanes * X_WORDS, UNIT)
    experts = slots + tl.cdiv(lanes, UNIT)
    weights = experts + tl.cdiv(lanes * TOP_K, UNIT)
    squares = weights + tl.cdiv(lanes * TOP_K, UNIT)
    end = squares + tl.cdiv(lanes * GROUPS, UNIT)
    first, step = tl.program_id(0), tl.num_programs(0)
    mapped = map_peers(peers, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    for unit in range(first, end, step):
        words = _load(x_ptr, unit, lanes * X_WORDS, UNIT)
        words |= _load(slot_ptr, unit - slots, lanes, UNIT)
        words |= _load(expert_ptr, unit - experts, lanes * TOP_K, UNIT)
        words |= _load(weight_ptr, unit - weights, lanes * TOP_K, UNIT)
        if GROUPS > 0:
            words |= _load(squares_ptr, unit - squares, lanes * GROUPS, UNIT)
        word = unit * UNIT + tl.arange(0, UNIT)
        tag, pushed = next_tags(peers, word, None), same_for_all(words, RANKS)
        push_words(mapped, pushed, word, tag, None, over, RANKS, SIZE)
    for unit in range(first, end, step):
        word = unit * UNIT + tl.arange(0, UNIT)
        tag = next_tags(peers, word, None)
        found, over = take_words(peers, mapped, word, tag, None, over, RANKS, SIZE, TIMED)
        _store(out_x_ptr, found, unit, lanes * X_WORDS, RANKS, UNIT)
        _store(out_slot_ptr, found, unit - slots, lanes, RANKS, UNIT)
        _store(out_expert_ptr, found, unit - experts, lanes * TOP_K, RANKS, UNIT)
        _store(out_weight_ptr, found, unit - weights, lanes * TOP_K, RANKS, UNIT)
        if GROUPS > 0:
            at = (unit - squares) * UNIT + tl.arange(0, UNIT)
            mask = (at >= 0) & (at < lanes * GROUPS)
            # Groups are the outer dimension; each has the lanes of all ranks.
            out_ptrs = out_squares_ptr + at // lanes * (RANKS * lanes) + at % lanes
            for each in tl.static_range(RANKS):
                tl.store(out_ptrs + each * lanes, found[each], mask=mask)


@triton.jit
def _load(part_ptr, unit, words, UNIT: tl.constexpr):
    """Load a unit's words of a tensor of `words` words; 0 past its end and in others' units."""
    at = unit * UNIT + tl.arange(0, UNIT)
    return tl.load(part_ptr + at, mask=(at >= 0) & (at < words), other=0)


@triton.jit
def _store(out_ptr, found, unit, words, RANKS: tl.constexpr, UNIT: tl.constexpr):
    """Store the words of all ranks, rank after rank, if the unit is the tensor's."""
    at = unit * UNIT + tl.arange(0, UNIT)
    mask = (at >= 0) & (at < words)
    for each in tl.static_range(RANKS):
        tl.store(out_ptr + each * words + at, found[each], mask=mask)
