"""The residual stream and the sum of all ranks' parts of a product, in one kernel: x += sum, then
what the next norm needs.

It pushes as `push` does, and then does what `add_to_residual` does with a whole product.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    PROGRAMS,
    UNIT,
    Peers,
    map_peers,
    push_options,
    push_words,
    sum_words,
    take_words,
)
from graphengine.kernels.core.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_vector,
    check_weight,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.residual import Residual, check_kept
from graphengine.kernels.linear.residual_sum import leave_for_norm


def push_units(lanes: int, hidden: int, dtype: torch.dtype) -> int:
    """Units that `push_to_residual` takes: a lane has its own."""
    return lanes * _tiles(hidden, dtype)


def push_to_residual(
    peers: Peers,
    part_NH: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    *,
    bias_H: torch.Tensor | None = None,
    pdl: bool = False,
) -> Residual:
    """residual.x += sum of all ranks' parts + bias, and what the norm after it needs.

    All ranks call it with a part of this shape and dtype, after the same calls.

    Args:
        part_NH: dense, any float dtype, in which it travels; H even where that has 16 bits. What
            padded lanes hold stays in their lanes.
        slot_N, residual, next_norm_H, bias_H, pdl: as of `add_to_residual`.

    Returns:
        What `add_to_residual` returns of `push_sum` in float32, but for the groups of `squares`.
        ValueError for a shape or dtype that does not fit, or for more than `peers` have units.
    """
    lanes, H = residual.x.shape
    dtype = part_NH.dtype
    if dtype not in FLOAT_DTYPES or part_NH.shape != (lanes, H) or not part_NH.is_contiguous():
        raise ValueError(
            f"a part must be a dense float {[lanes, H]}, not {dtype} {list(part_NH.shape)}"
        )
    if H * dtype.itemsize % 4:
        raise ValueError(f"a lane of {H} values in {dtype} is no multiple of 4 bytes")
    units, tiles = push_units(lanes, H, dtype), _tiles(H, dtype)
    if units > peers.units:
        raise ValueError(
            f"a part {[lanes, H]} in {dtype} takes {units} units of {UNIT} words: there are "
            f"{peers.units}"
        )
    check_vector("residual.x", residual.x.view(-1), lanes * H, torch.float32)
    check_lanes(lanes, slot_N=slot_N)
    check_weight("next_norm", next_norm_H, H)
    if bias_H is not None:
        check_weight("bias", bias_H, H)
    scaled = output_rows(residual.scaled, (lanes, H), dtype=residual.scaled.dtype, like=part_NH)
    check_kept(residual)
    kept, kept_scale = (None, 1.0) if residual.kept is None else residual.kept
    residual = residual._replace(squares=residual.x.new_empty(tiles, lanes))
    launcher(_push_to_residual_kernel, (min(units, PROGRAMS),))(
        part_NH.view(torch.int32),
        part_NH,
        next_norm_H if bias_H is None else bias_H,
        slot_N,
        residual.x,
        next_norm_H,
        scaled,
        residual.squares,
        kept,
        lanes,
        scaled.stride(0),
        0 if kept is None else kept.stride(0),
        kept_scale,
        H=H,
        HAS_BIAS=bias_H is not None,
        **push_options(peers),
        **launch_options(pdl),
    )
    return residual


def _tiles(hidden: int, dtype: torch.dtype) -> int:
    """Units of a lane, which are its groups of squares."""
    return -(-hidden * dtype.itemsize // (4 * UNIT))


@triton.jit(do_not_specialize=["lanes", "kept_scale", "rank", "units"])
def _push_to_residual_kernel(
    word_ptr,
    part_ptr,
    bias_ptr,
    slot_ptr,
    x_ptr,
    next_ptr,
    scaled_ptr,
    squares_ptr,
    kept_ptr,
    lanes,
    scaled_stride,
    kept_stride,
    kept_scale,
    peers,
    rank,
    units,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program so many units, all of which it stores before it waits for the first.

    A unit is a tile of a lane's columns.
    """
    DTYPE: tl.constexpr = part_ptr.dtype.element_ty
    PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    WORDS: tl.constexpr = H // PACKED
    TILES: tl.constexpr = (WORDS + UNIT - 1) // UNIT
    first, step, end = tl.program_id(0), tl.num_programs(0), lanes * TILES
    mapped = map_peers(peers, rank, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    for unit in range(first, end, step):
        word = unit % TILES * UNIT + tl.arange(0, UNIT)
        row_ptr = word_ptr + unit // TILES * WORDS
        part = tl.load(row_ptr + word, mask=word < WORDS, other=0)
        push_words(peers, mapped, part, unit, units, rank, over, RANKS, UNIT)
    for unit in range(first, end, step):
        lane, tile = unit // TILES, unit % TILES
        h = tile * UNIT * PACKED + tl.arange(0, UNIT * PACKED)
        mask = h < H
        # Before the wait, in whose shadow these loads are.
        live = tl.load(slot_ptr + lane) >= 0
        following = tl.load(next_ptr + h, mask=mask, other=0.0).to(tl.float32)
        bias = tl.zeros([UNIT * PACKED], dtype=tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + h, mask=mask, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + lane * H + h
        x = tl.load(x_ptrs, mask=mask & live, other=0.0)
        found, over = take_words(peers, unit, units, rank, over, RANKS, UNIT, TIMED)
        if live:
            x += sum_words(found, DTYPE, RANKS) + bias
            tl.store(x_ptrs, x, mask=mask)
            leave_for_norm(
                x,
                h,
                mask,
                lane,
                following,
                scaled_ptr,
                scaled_stride,
                squares_ptr,
                tile,
                lanes,
                kept_ptr,
                kept_stride,
                kept_scale,
            )
