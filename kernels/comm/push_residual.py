"""The residual stream plus the sum of all ranks' parts of a product, in one kernel: x += sum, then
the inputs of the next norm.

It pushes as `push` does, and then adds the sum as `add_to_residual` adds a whole product. A rank
has one part for all ranks, or a part for each rank where every rank has lanes of its own.

Letters: R ranks, N lanes, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    PROGRAMS,
    UNIT,
    Peers,
    check_words,
    map_peers,
    next_tags,
    own_for_each,
    push_options,
    push_words,
    same_for_all,
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
    """Units that `push_to_residual` and `push_own_to_residual` take; lanes share no unit."""
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
    """Compute residual.x += sum of all ranks' parts + bias, and the inputs of the norm after it.

    All ranks call it with parts of one shape and dtype, after the same calls.

    Args:
        part_NH: dense, any float dtype, in which it is sent; H even where that has 16 bits.
            Contents of padded lanes do not affect other lanes.
        slot_N, residual, next_norm_H, bias_H, pdl: as in `add_to_residual`.

    Returns:
        The result of `add_to_residual` for `push_sum` in float32, except for the groups of
        `squares`. ValueError for a shape or dtype that does not fit, or for more than `peers` have
        units.
    """
    return _push(peers, part_NH[None], slot_N, residual, next_norm_H, bias_H=bias_H, pdl=pdl)


def push_own_to_residual(
    peers: Peers,
    parts_RNH: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    *,
    own_NH: torch.Tensor | None = None,
    pdl: bool = False,
) -> Residual:
    """Compute residual.x += sum of all ranks' parts for this one + own, and the inputs of the norm.

    Args:
        parts_RNH: this rank's part for each rank, in rank order; otherwise like `part_NH` of
            `push_to_residual`. The lanes of each part are those of the rank that it is for.
        own_NH: dense float32, added after the sum; None: nothing is added.
        slot_N, residual, next_norm_H, pdl: as in `push_to_residual`, for this rank's own lanes.

    Returns:
        The result of `add_to_residual` for `push_own_sum` in float32, plus own, except for the
        groups of `squares`. ValueError as in `push_to_residual`, and for another number of parts.
    """
    if parts_RNH.dim() != 3 or len(parts_RNH) != peers.ranks:
        raise ValueError(
            f"parts for {peers.ranks} ranks must be a dense [{peers.ranks}, N, H], not "
            f"{list(parts_RNH.shape)}"
        )
    if own_NH is not None:
        check_vector("own", own_NH.view(-1), residual.x.numel(), torch.float32)
    return _push(peers, parts_RNH, slot_N, residual, next_norm_H, own_NH=own_NH, pdl=pdl)


def _push(
    peers: Peers,
    parts_DNH: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    *,
    bias_H: torch.Tensor | None = None,
    own_NH: torch.Tensor | None = None,
    pdl: bool,
) -> Residual:
    """Push one part for all ranks (D = 1), or one for each of them."""
    lanes, H = residual.x.shape
    dtype, shape = parts_DNH.dtype, list(parts_DNH.shape[1:])
    if dtype not in FLOAT_DTYPES or shape != [lanes, H] or not parts_DNH.is_contiguous():
        raise ValueError(f"a part must be a dense float {[lanes, H]}, not {dtype} {shape}")
    if H * dtype.itemsize % 4:
        raise ValueError(f"a lane of {H} values in {dtype} is no multiple of 4 bytes")
    units, tiles = push_units(lanes, H, dtype), _tiles(H, dtype)
    check_words(peers, units * UNIT, f"a part {[lanes, H]} in {dtype}")
    check_vector("residual.x", residual.x.view(-1), lanes * H, torch.float32)
    check_lanes(lanes, slot_N=slot_N)
    check_weight("next_norm", next_norm_H, H)
    if bias_H is not None:
        check_weight("bias", bias_H, H)
    scaled = output_rows(residual.scaled, (lanes, H), dtype=residual.scaled.dtype, like=parts_DNH)
    check_kept(residual)
    kept, kept_scale = (None, 1.0) if residual.kept is None else residual.kept
    residual = residual._replace(squares=residual.x.new_empty(tiles, lanes))
    launcher(_push_to_residual_kernel, (min(units, PROGRAMS),))(
        parts_DNH.view(torch.int32),
        parts_DNH,
        next_norm_H if bias_H is None else bias_H,
        own_NH,
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
        peers.rank,
        peers.tensors,
        H=H,
        HAS_BIAS=bias_H is not None,
        OWN=len(parts_DNH) > 1,
        UNIT=UNIT,
        num_warps=4,
        **push_options(peers),
        **launch_options(pdl),
    )
    return residual


def _tiles(hidden: int, dtype: torch.dtype) -> int:
    """Units of a lane, which are also its groups of squares."""
    return -(-hidden * dtype.itemsize // (4 * UNIT))


@triton.jit(do_not_specialize=["lanes", "kept_scale", "rank"])
def _push_to_residual_kernel(
    word_ptr,
    part_ptr,
    bias_ptr,
    own_ptr,
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
    rank,
    peers,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OWN: tl.constexpr,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program stores several units, all of them before it waits for the first.

    A unit is a tile of a lane's columns. With OWN there is a part for each rank, else one for all.
    """
    DTYPE: tl.constexpr = part_ptr.dtype.element_ty
    PACKED: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    WORDS: tl.constexpr = H // PACKED
    TILES: tl.constexpr = (WORDS + UNIT - 1) // UNIT
    first, step, end = tl.program_id(0), tl.num_programs(0), lanes * TILES
    mapped = map_peers(peers, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    for unit in range(first, end, step):
        word, column = unit * UNIT + tl.arange(0, UNIT), unit % TILES * UNIT + tl.arange(0, UNIT)
        inside, row_ptr = column < WORDS, word_ptr + unit // TILES * WORDS
        if OWN:
            pushed = own_for_each(row_ptr + column, inside, lanes * WORDS, rank, RANKS)
        else:
            pushed = same_for_all(tl.load(row_ptr + column, mask=inside, other=0), RANKS)
        push_words(mapped, pushed, word, next_tags(peers, word, None), None, over, RANKS, SIZE)
    for unit in range(first, end, step):
        lane, tile = unit // TILES, unit % TILES
        h = tile * UNIT * PACKED + tl.arange(0, UNIT * PACKED)
        mask = h < H
        # Before the wait, which hides the latency of these loads.
        live = tl.load(slot_ptr + lane) >= 0
        following = tl.load(next_ptr + h, mask=mask, other=0.0).to(tl.float32)
        bias = tl.zeros([UNIT * PACKED], dtype=tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + h, mask=mask, other=0.0).to(tl.float32)
        if own_ptr is not None:
            bias += tl.load(own_ptr + lane * H + h, mask=mask & live, other=0.0)
        x_ptrs = x_ptr + lane * H + h
        x = tl.load(x_ptrs, mask=mask & live, other=0.0)
        word = unit * UNIT + tl.arange(0, UNIT)
        tag = next_tags(peers, word, None)
        found, over = take_words(peers, mapped, word, tag, None, over, RANKS, SIZE, TIMED)
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
