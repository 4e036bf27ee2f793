"""Sums of the products of a lane's pairs, for `experts_triton.py`, and where they are stored.

In decode the last of a lane's pairs to arrive adds up all of them, in the launch that multiplies;
for a chunk `combine_kernel` does it. Both sum by rank, whatever the order of arrival.

Letters as in `experts_triton.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.experts.held import place_of_expert
from graphengine.kernels.linear.operands import KEEPING_FIELDS, STREAM_FIELDS


@triton.jit(do_not_specialize=["lanes"])
def combine_kernel(
    y_ptr,
    slot_ptr,
    share_ptr,
    expert_ptr,
    out_ptr,
    lanes,
    out_stride,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for L lanes and BLOCK_M outputs sums the products of their pairs by rank."""
    lane = tl.program_id(0) * L + tl.arange(0, L)
    output = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    wait_for_inputs(PDL)
    live = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0
    total = _sum_of_pairs(
        y_ptr, share_ptr, expert_ptr, lane, live, output, M, TOP_K, FIRST, HELD, L, BLOCK_M
    )
    out_ptrs = out_ptr + lane.to(tl.int64)[:, None] * out_stride + output[None, :]
    stored = live[:, None] & (output < M)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def arrive(
    pair,
    there,
    tile,
    output,
    sums,
    stream,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Record that pairs [L] have stored their products, if any; the last of a lane's pairs adds up
    all of them.

    `sums` holds pointers to products, shares, experts and arrivals, and the number of lanes.
    """
    y_ptr, share_ptr, expert_ptr, arrivals_ptr, lanes = sums
    lane = pair // TOP_K
    arrival_ptrs = arrivals_ptr + lane * tl.num_programs(1) + tile
    arrived = tl.atomic_add(arrival_ptrs, tl.full((L,), 1, tl.int32), mask=there, sem="acq_rel")
    done = there & (arrived == TOP_K - 1)
    if tl.max(done.to(tl.int32), axis=0) > 0:
        tl.store(arrival_ptrs, tl.zeros((L,), tl.int32), mask=done)
        total = _sum_of_pairs(
            y_ptr, share_ptr, expert_ptr, lane, done, output, M, TOP_K, FIRST, HELD, L, BLOCK_M
        )
        _add_to_stream(total, lane, done, tile, lanes, stream, M, L, BLOCK_M)


@triton.jit
def arrive_alone(
    pair,
    tile,
    output,
    sums,
    stream,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """`arrive` for a single pair."""
    y_ptr, share_ptr, expert_ptr, arrivals_ptr, lanes = sums
    lane = pair // TOP_K
    arrival_ptr = arrivals_ptr + lane * tl.num_programs(1) + tile
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == TOP_K - 1:
        tl.store(arrival_ptr, 0)
        row = tl.full((1,), lane, tl.int32)
        there = tl.full((1,), 1, tl.int1)
        total = _sum_of_pairs(
            y_ptr, share_ptr, expert_ptr, row, there, output, M, TOP_K, FIRST, HELD, 1, BLOCK_M
        )
        _add_to_stream(total, row, there, tile, lanes, stream, M, 1, BLOCK_M)


@triton.jit
def _sum_of_pairs(
    y_ptr,
    share_ptr,
    expert_ptr,
    lane,
    live,
    output,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    L: tl.constexpr,
    B: tl.constexpr,
):
    """Sum the products [L, B] of lanes' pairs by rank, each times its share; pairs of other ranks'
    experts count as 0.
    """
    mask = live[:, None] & (output < M)[None, :]
    total = tl.zeros((L, B), dtype=tl.float32)
    for rank in range(TOP_K):
        pair = lane * TOP_K + rank
        share = tl.load(share_ptr + pair, mask=live, other=0.0)
        y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * M + output[None, :]
        if HELD > 0:
            expert = tl.load(expert_ptr + pair, mask=live, other=0)
            here = place_of_expert(expert, FIRST, HELD) < HELD
            y = tl.load(y_ptrs, mask=mask & here[:, None], other=0.0).to(tl.float32)
        else:
            y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
        total = tl.fma(tl.broadcast_to(share[:, None], (L, B)), y, total)
    return total


@triton.jit
def _add_to_stream(
    y, lane, live, tile, lanes, stream, M: tl.constexpr, L: tl.constexpr, B: tl.constexpr
):
    """Add float32 sums [L, B] to the residual stream, and write the inputs of the next norm; or
    only store them if there is no stream.

    Different kernels call this, so no operation depends on the layout of the sums.
    """
    output = tile * B + tl.arange(0, B)
    stored = live[:, None] & (output < M)[None, :]
    at = lane.to(tl.int64)[:, None] * M + output[None, :]
    if len(stream) < STREAM_FIELDS:
        tl.store(stream.x + at, y, mask=stored)
    else:
        norm = tl.load(stream.next_norm + output, mask=output < M, other=0.0).to(tl.float32)
        x = tl.load(stream.x + at, mask=stored, other=0.0) + y
        tl.store(stream.x + at, x, mask=stored)
        tl.store(
            stream.scaled + at, (x * norm[None, :]).to(stream.scaled.dtype.element_ty), mask=stored
        )
        if len(stream) == KEEPING_FIELDS:
            kept = (x * stream.kept_scale).to(stream.kept.dtype.element_ty)
            kept_rows = lane.to(tl.int64)[:, None] * stream.kept_stride
            tl.store(stream.kept + kept_rows + output[None, :], kept, mask=stored)
        squares = _sum_of_squares(tl.where(stored, x, 0.0), L, B)
        tl.store(stream.squares + tile * lanes + lane, squares, mask=live)


@triton.jit
def _sum_of_squares(x, L: tl.constexpr, B: tl.constexpr):
    """Sum of squares of each row of [L, B], without a product that the compiler could fuse with a
    sum.
    """
    even, odd = tl.split(tl.reshape(x, (L, B // 2, 2)))
    return sum_of_rows(tl.fma(even, even, odd * odd), L, B // 2)


@triton.jit
def sum_of_rows(x, L: tl.constexpr, B: tl.constexpr):
    """Sum each row of [L, B]: neighbours in pairs, then the sums of pairs, and so on.

    This order is explicit. That of `tl.sum` follows from the layout, which may differ where lanes
    are looked up.
    """
    sums = x
    for step in tl.static_range(_log2(B)):
        even, odd = tl.split(tl.reshape(sums, (L, (B // 2) >> step, 2)))
        sums = even + odd
    return tl.reshape(sums, (L,))


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1
