"""The Triton kernels of `experts.py`, in two row families.

In the `dot` family a product has a lane's bits from its own operands alone: a tile of lanes goes
through K in one order of `tl.dot`, whatever the other lanes of the tile are, so it does not matter
whether a tile holds all pairs of an expert or a single one. The `fma` family takes single pairs,
and has all weights of a program in registers at once.

Letters: N lanes, k experts of a lane, P = N * k pairs, L lanes of a tile, K input features, M rows
of an expert's weight, B outputs of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.norm_rope.activation import silu


class StreamArgs(NamedTuple):
    """The residual stream that experts are added to, and what it becomes (`linear/residual.py`)."""

    x: torch.Tensor
    next_norm: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


@triton.jit(do_not_specialize=["lanes", "eps"])
def product_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    slot_ptr,
    expert_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    lanes,
    x_stride,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    SWIGLU: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a block of pairs of one expert and BLOCK_M rows of its weight.

    Without BLOCKS a block is a single pair, straight from the router. A SwiGLU reads the rows of
    lanes, any other product those of pairs.
    """
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    B: tl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    block = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.arange(0, L)
    wait_for_inputs(PDL, OVERLAP)
    if BLOCKS > 0:
        expert = tl.load(blocks_ptr + block)
        if expert < 0:
            return
        start = tl.load(blocks_ptr + BLOCKS + block)
        there = row < tl.load(blocks_ptr + 2 * BLOCKS + block)
        pair = tl.load(order_ptr + start + row, mask=there, other=0)
    else:
        if tl.load(slot_ptr + block // TOP_K) < 0:
            return
        expert = tl.load(expert_ptr + block)
        there = row == 0
        pair = tl.full((L,), block, tl.int32)
    lane = pair // TOP_K
    squares = load_squares(squares_ptr, lane, there, lanes, GROUPS, L)
    source = lane if SWIGLU else pair
    x_ptrs = x_ptr + source.to(tl.int64) * x_stride
    row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, SWIGLU)
    k = tl.arange(0, BLOCK_K)
    y = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    for _ in range((K + BLOCK_K - 1) // BLOCK_K):
        x = _lane_tile(x_ptrs, there, k, K, EVEN_K)
        weight = _weight_tile(row_ptrs, k, K, EVEN_K)
        y = tl.dot(x, weight, y, input_precision="ieee")
        k += BLOCK_K
    if GROUPS > 0:
        total = _sum_of_rows(squares, L, squares.shape[1])
        y = y * (1.0 / tl.sqrt_rn(total / K + eps))[:, None]
    if SWIGLU:
        gate, up = tl.split(tl.reshape(y, (L, B, 2)))
        y = silu(gate) * up
    output = tile * B + tl.arange(0, B)
    stored = there[:, None] & (output < OUTPUTS)[None, :]
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["lanes"])
def down_kernel(
    x_ptr,
    weight_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    stream,
    lanes,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a lane and BLOCK_M outputs: its experts by rank, one after the other.

    All of them are one loop over tiles of K, so that an expert's weights are on the way while the
    one before is multiplied.
    """
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    lane = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.arange(0, L)
    there = row == 0
    wait_for_inputs(PDL, OVERLAP)
    if tl.load(slot_ptr + lane) < 0:
        return
    first_pair = lane * TOP_K
    ids = _load_ids(expert_ptr + first_pair, TOP_K)
    total = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    y = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    for step in range(TOP_K * TILES):
        rank = step // TILES
        pair = first_pair + rank
        expert = _id_of_rank(ids, rank, TOP_K)
        share = tl.load(share_ptr + pair)
        k = step % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + tl.full((L,), pair, tl.int64) * K
        x = _lane_tile(x_ptrs, there, k, K, EVEN_K)
        row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, False)
        weight = _weight_tile(row_ptrs, k, K, EVEN_K)
        y = tl.dot(x, weight, y, input_precision="ieee")
        done = step % TILES == TILES - 1
        total = tl.where(done, tl.fma(tl.full(y.shape, share, tl.float32), y, total), total)
        y = tl.where(done, 0.0, y)
    _add_to_stream(total, tl.full((L,), lane, tl.int32), there, tile, lanes, stream, M, L, BLOCK_M)


@triton.jit
def _load_ids(expert_ptr, TOP_K: tl.constexpr):
    """The experts of a lane, 4 of them in an int64.

    A loop that loaded one of them for its next weights would have half as many tiles on the way.
    """
    words = ()
    for first in tl.static_range(0, TOP_K, 4):
        word = tl.zeros((), tl.int64)
        for rank in tl.static_range(first, min(first + 4, TOP_K)):
            expert = tl.load(expert_ptr + rank).to(tl.int64)
            word = word | (expert << (16 * (rank - first)))
        words += (word,)  # type: ignore[assignment]
    return words


@triton.jit
def _id_of_rank(words, rank, TOP_K: tl.constexpr):
    """The expert of a rank."""
    word = words[0]
    for index in tl.static_range(1, (TOP_K + 3) // 4):
        word = tl.where(rank // 4 == index, words[index], word)
    return (word >> (rank % 4 * 16)) & 0xFFFF


@triton.jit(do_not_specialize=["lanes"])
def combine_kernel(
    y_ptr,
    slot_ptr,
    share_ptr,
    stream,
    out_ptr,
    lanes,
    out_stride,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for L lanes and BLOCK_M outputs: the products of their pairs, summed by rank.

    The sum goes to the residual stream, or without one to `out`.
    """
    lane = tl.program_id(0) * L + tl.arange(0, L)
    tile = tl.program_id(1)
    output = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (output < M)[None, :]
    wait_for_inputs(PDL)
    live = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0
    total = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    for rank in range(TOP_K):
        pair = lane * TOP_K + rank
        share = tl.load(share_ptr + pair, mask=live, other=0.0)
        y = tl.load(
            y_ptr + pair.to(tl.int64)[:, None] * M + output[None, :],
            mask=live[:, None] & inside,
            other=0.0,
        ).to(tl.float32)
        total = tl.fma(tl.broadcast_to(share[:, None], (L, BLOCK_M)), y, total)
    if stream is not None:
        _add_to_stream(total, lane, live, tile, lanes, stream, M, L, BLOCK_M)
    else:
        out_ptrs = out_ptr + lane.to(tl.int64)[:, None] * out_stride + output[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside)


@triton.jit(do_not_specialize=["lanes", "eps"])
def fma_product_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    slot_ptr,
    expert_ptr,
    out_ptr,
    lanes,
    x_stride,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a pair and BLOCK_M rows of its expert's gates and ups."""
    OUTPUTS: tl.constexpr = M // 2
    B: tl.constexpr = BLOCK_M // 2
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs(PDL, OVERLAP)
    lane = pair // TOP_K
    if tl.load(slot_ptr + lane) < 0:
        return
    row_ptrs = _row_ptrs(weight_ptr, tl.load(expert_ptr + pair), tile, M, K, BLOCK_M, True)
    weights = load_rows(row_ptrs, K, BLOCK_M, BLOCK_K)
    squares = load_squares(
        squares_ptr, tl.full((1,), lane, tl.int32), tl.full((1,), 1, tl.int1), lanes, GROUPS, 1
    )
    y = tl.sum(multiply_rows(weights, x_ptr + lane.to(tl.int64) * x_stride, K, BLOCK_M, BLOCK_K), 1)
    if GROUPS > 0:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(squares) / K + eps))
    gate, up = tl.split(tl.reshape(y, (B, 2)))
    output = tile * B + tl.arange(0, B)
    out_ptrs = out_ptr + pair.to(tl.int64) * OUTPUTS + output
    tl.store(out_ptrs, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


@triton.jit(do_not_specialize=["lanes"])
def fma_down_kernel(
    x_ptr,
    weight_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    stream,
    lanes,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a lane and BLOCK_M outputs, with the weights of all its experts.

    The launch before leaves the inputs, and the one before that, or an earlier one, the ids: so
    weights are on the way before it ends.
    """
    lane = tl.program_id(0)
    tile = tl.program_id(1)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    weights = ()
    for rank in tl.static_range(TOP_K):
        expert = tl.load(expert_ptr + lane * TOP_K + rank, cache_modifier=".cg")
        # The ids of a padded lane are no ids, and nothing may end before the wait.
        expert = tl.where(slot < 0, 0, expert)
        row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, False)
        weights += load_rows(row_ptrs, K, BLOCK_M, BLOCK_K)
    wait_for_inputs(PDL, OVERLAP)
    if slot < 0:
        return
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    sums = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = lane * TOP_K + rank
        own = weights[rank * TILES : (rank + 1) * TILES]
        part = multiply_rows(own, x_ptr + pair.to(tl.int64) * K, K, BLOCK_M, BLOCK_K)
        sums += part * tl.load(share_ptr + pair)
    y = tl.sum(sums, axis=1)[None, :]
    live = tl.full((1,), 1, tl.int1)
    lane_1 = tl.full((1,), lane, tl.int32)
    _add_to_stream(y, lane_1, live, tile, lanes, stream, M, 1, BLOCK_M)


@triton.jit
def load_rows(row_ptrs, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """All columns of weight rows, as tiles [BLOCK_M, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)
    tiles = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        weight_ptrs = row_ptrs[:, None] + (step * BLOCK_K + k)[None, :]
        if (step + 1) * BLOCK_K <= K:
            tile = tl.load(weight_ptrs, eviction_policy="evict_first")
        else:
            in_k = (step * BLOCK_K + k < K)[None, :]
            tile = tl.load(weight_ptrs, mask=in_k, other=0.0, eviction_policy="evict_first")
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def multiply_rows(tiles, x_row_ptr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of the tiles of weight rows with a row of inputs, summed over the tiles."""
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        x = tl.load(x_row_ptr + step * BLOCK_K + k, mask=step * BLOCK_K + k < K, other=0.0)
        sums += tiles[step].to(tl.float32) * x.to(tl.float32)[None, :]
    return sums


@triton.jit
def _add_to_stream(
    y, lane, live, tile, lanes, stream, M: tl.constexpr, L: tl.constexpr, B: tl.constexpr
):
    """Add float32 sums [L, B] to the residual stream, and leave what the next norm needs.

    Every operation is the same in whatever layout the sums come, as different kernels call this.
    """
    output = tile * B + tl.arange(0, B)
    stored = live[:, None] & (output < M)[None, :]
    norm = tl.load(stream.next_norm + output, mask=output < M, other=0.0).to(tl.float32)
    at = lane.to(tl.int64)[:, None] * M + output[None, :]
    x = tl.load(stream.x + at, mask=stored, other=0.0) + y
    tl.store(stream.x + at, x, mask=stored)
    tl.store(
        stream.scaled + at, (x * norm[None, :]).to(stream.scaled.dtype.element_ty), mask=stored
    )
    squares = _sum_of_squares(tl.where(stored, x, 0.0), L, B)
    tl.store(stream.squares + tile * lanes + lane, squares, mask=live)


@triton.jit
def _sum_of_squares(x, L: tl.constexpr, B: tl.constexpr):
    """Of each row of [L, B]; the compiler is left no product to fuse with a sum."""
    even, odd = tl.split(tl.reshape(x, (L, B // 2, 2)))
    return _sum_of_rows(tl.fma(even, even, odd * odd), L, B // 2)


@triton.jit
def _sum_of_rows(x, L: tl.constexpr, B: tl.constexpr):
    """Of each row of [L, B]: pairs of neighbours, and pairs of these again.

    This order is written down; that of `tl.sum` follows from the layout, which may be another one
    where lanes are looked up.
    """
    sums = x
    for step in tl.static_range(_log2(B)):
        even, odd = tl.split(tl.reshape(sums, (L, (B // 2) >> step, 2)))
        sums = even + odd
    return tl.reshape(sums, (L,))


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.constexpr_function
def _chunk(groups):
    """Groups whose partial sums a tile holds."""
    return max(1, min(triton.next_power_of_2(groups), 128))


@triton.jit
def load_squares(squares_ptr, lane, there, lanes, GROUPS: tl.constexpr, L: tl.constexpr):
    """Partial sums of squares of each lane [L, chunk], later chunks added to the first."""
    CHUNK: tl.constexpr = _chunk(GROUPS)
    squares = tl.zeros((L, CHUNK), tl.float32)
    for chunk in tl.static_range((GROUPS + CHUNK - 1) // CHUNK):
        group = chunk * CHUNK + tl.arange(0, CHUNK)
        squares += tl.load(
            squares_ptr + group[None, :] * lanes + lane[:, None],
            mask=there[:, None] & (group < GROUPS)[None, :],
            other=0.0,
        )
    return squares


@triton.jit
def _row_ptrs(
    weight_ptr,
    expert,
    tile,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Where the BLOCK_M weight rows of a tile of an expert start.

    As in `linear_triton.py` rows past the end repeat the last, and of a SwiGLU gate and up rows
    alternate.
    """
    row = tl.arange(0, BLOCK_M)
    if SWIGLU:
        row = tl.minimum(tile * (BLOCK_M // 2) + row // 2, M // 2 - 1) + row % 2 * (M // 2)
    else:
        row = tl.minimum(tile * BLOCK_M + row, M - 1)
    return weight_ptr + (expert.to(tl.int64) * M + row) * K


@triton.jit
def _lane_tile(row_ptrs, there, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns `k` of lanes, as [L, BLOCK_K]; 0 past K and for rows that are not there."""
    mask = there[:, None]
    if not EVEN_K:
        mask = mask & (k < K)[None, :]
    return tl.load(row_ptrs[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _weight_tile(row_ptrs, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns `k` of weight rows, as [BLOCK_K, BLOCK_M]; 0 past K."""
    if EVEN_K:
        return tl.load(row_ptrs[None, :] + k[:, None])
    else:
        return tl.load(row_ptrs[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
