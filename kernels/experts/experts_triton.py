"""The Triton kernels of `experts.py`, in two row families.

In the `dot` family a lane's bits depend only on its own operands: a tile of lanes goes through K in
one order of `tl.dot`, whatever the other lanes of the tile are, so it does not matter whether a
tile holds all pairs of an expert or a single one. The `fma` family takes single pairs, and has all
weights of a program in registers at once. It loads weights of down before the launch waits for its
inputs: their experts were known two launches before.

Letters: N lanes, k experts of a lane, P = N * k pairs, L lanes of a tile, K input features, M rows
of an expert's weight, B outputs of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.experts.experts_triton_sums import arrive, arrive_alone, sum_of_rows
from graphengine.kernels.experts.held import place_of_expert
from graphengine.kernels.experts.packed.packed_triton import packed_chain
from graphengine.kernels.norm_rope.activation import gated, squared


@triton.jit(do_not_specialize=["lanes", "eps"])
def product_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
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
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MINIMUMS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a block of pairs of one expert and BLOCK_M rows of its weight.

    Without BLOCKS a block is a single pair, straight from the router. A SwiGLU, or with a LIMIT
    below 0 a squared ReLU, reads rows by lane, and down rows by pair. Without CODE the weight is
    dense, otherwise it is the tensors of `packed.CodeArgs`.
    """
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    B: tl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    tile = tl.program_id(1)
    wait_for_inputs(PDL, OVERLAP)
    expert, pair, there = _pairs_of_block(
        slot_ptr, expert_ptr, order_ptr, blocks_ptr, TOP_K, BLOCKS, FIRST, HELD, L
    )
    if expert < 0:
        return
    if HELD > 0 and expert >= HELD:
        return
    lane = pair // TOP_K
    squares = load_squares(squares_ptr, lane, there, lanes, GROUPS, L)
    source = lane if SWIGLU or LIMIT < 0 else pair
    x_ptrs = x_ptr + source.to(tl.int64) * x_stride
    if CODE == "":
        row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, SWIGLU)
        y = _chain(x_ptrs, row_ptrs, there, K, L, BLOCK_M, BLOCK_K, EVEN_K)
    else:
        y = packed_chain(
            x_ptrs,
            weight_ptr,
            expert,
            tile,
            there,
            M,
            K,
            L,
            BLOCK_M,
            BLOCK_K,
            CODE,
            GROUP,
            BLOCK,
            MINIMUMS,
            SWIGLU,
        )
    if GROUPS > 0:
        total = sum_of_rows(squares, L, squares.shape[1])
        y = y * (1.0 / tl.sqrt_rn(total / K + eps))[:, None]
    if bias_ptr is not None:
        y = y + _biases(bias_ptr, expert, tile, M, BLOCK_M, SWIGLU)[None, :]
    if SWIGLU:
        gate, up = tl.split(tl.reshape(y, (L, B, 2)))
        y = gated(gate, up, LIMIT, SLOPE)
    elif LIMIT < 0:
        y = squared(y)
    output = tile * B + tl.arange(0, B)
    stored = there[:, None] & (output < OUTPUTS)[None, :]
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _pairs_of_block(
    slot_ptr,
    expert_ptr,
    order_ptr,
    blocks_ptr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    L: tl.constexpr,
):
    """The place of the program's expert (-1 for none), its pairs [L], and which of them exist."""
    block = tl.program_id(0)
    row = tl.arange(0, L)
    if BLOCKS > 0:
        expert = tl.load(blocks_ptr + block)
        start = tl.load(blocks_ptr + BLOCKS + block, mask=expert >= 0, other=0)
        count = tl.load(blocks_ptr + 2 * BLOCKS + block, mask=expert >= 0, other=0)
        there = row < count
        pair = tl.load(order_ptr + start + row, mask=there, other=0)
    else:
        live = tl.load(slot_ptr + block // TOP_K) >= 0
        expert = tl.load(expert_ptr + block, mask=live, other=-1)
        if HELD > 0:
            expert = tl.where(live, place_of_expert(expert, FIRST, HELD), -1)
        there = row == 0
        pair = tl.full((L,), block, tl.int32)
    return expert, pair, there


@triton.jit
def _chain(
    x_ptrs,
    row_ptrs,
    there,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Products [L, BLOCK_M] of lanes with weight rows, in float32."""
    k = tl.arange(0, BLOCK_K)
    y = tl.zeros((L, BLOCK_M), dtype=tl.float32)
    for _ in range((K + BLOCK_K - 1) // BLOCK_K):
        x = _lane_tile(x_ptrs, there, k, K, EVEN_K)
        weight = _weight_tile(row_ptrs, k, K, EVEN_K)
        y = tl.dot(x, weight, y, input_precision="ieee")
        k += BLOCK_K
    return y


@triton.jit(do_not_specialize=["lanes"])
def down_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    order_ptr,
    blocks_ptr,
    y_ptr,
    arrivals_ptr,
    stream,
    lanes,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    MINIMUMS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply as `product_kernel`; then the last of a lane's pairs to arrive adds all of them to
    the stream, or stores their sum if there is no stream. Pairs of other ranks' experts arrive
    without a product.

    A block has a lane at most once, as a lane's experts differ; but a block of other ranks' pairs
    may have it several times.
    """
    sums = (y_ptr, share_ptr, expert_ptr, arrivals_ptr, lanes)
    tile = tl.program_id(1)
    wait_for_inputs(PDL, OVERLAP)
    expert, pair, there = _pairs_of_block(
        slot_ptr, expert_ptr, order_ptr, blocks_ptr, TOP_K, BLOCKS, FIRST, HELD, L
    )
    if expert < 0:
        return
    if HELD > 0 and expert >= HELD:
        output = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        arrive(pair, there, tile, output, sums, stream, M, TOP_K, FIRST, HELD, L, BLOCK_M)
        return
    x_ptrs = x_ptr + pair.to(tl.int64) * K
    if CODE == "":
        row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, False)
        y = _chain(x_ptrs, row_ptrs, there, K, L, BLOCK_M, BLOCK_K, EVEN_K)
    else:
        y = packed_chain(
            x_ptrs,
            weight_ptr,
            expert,
            tile,
            there,
            M,
            K,
            L,
            BLOCK_M,
            BLOCK_K,
            CODE,
            GROUP,
            BLOCK,
            MINIMUMS,
            False,
        )
    if bias_ptr is not None:
        y = y + _biases(bias_ptr, expert, tile, M, BLOCK_M, False)[None, :]
    output = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (output < M)[None, :]
    y_ptrs = y_ptr + pair.to(tl.int64)[:, None] * M + output[None, :]
    tl.store(y_ptrs, y, mask=there[:, None] & inside)
    tl.debug_barrier()
    arrive(pair, there, tile, output, sums, stream, M, TOP_K, FIRST, HELD, L, BLOCK_M)


@triton.jit(do_not_specialize=["lanes", "eps"])
def fma_product_kernel(
    x_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
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
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a pair and BLOCK_M rows of its expert's gates and ups.

    With a LIMIT below 0 the rows are ups, which go through a squared ReLU.
    """
    GATED: tl.constexpr = LIMIT >= 0
    OUTPUTS: tl.constexpr = M // 2 if GATED else M
    B: tl.constexpr = BLOCK_M // 2 if GATED else BLOCK_M
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    wait_for_inputs(PDL, OVERLAP)
    lane = pair // TOP_K
    if tl.load(slot_ptr + lane) < 0:
        return
    expert = place_of_expert(tl.load(expert_ptr + pair), FIRST, HELD)
    if HELD > 0 and expert >= HELD:
        return
    row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, GATED)
    weights = load_rows(row_ptrs, K, BLOCK_K)
    squares = load_squares(
        squares_ptr, tl.full((1,), lane, tl.int32), tl.full((1,), 1, tl.int1), lanes, GROUPS, 1
    )
    y = tl.sum(multiply_rows(weights, x_ptr + lane.to(tl.int64) * x_stride, K, BLOCK_M, BLOCK_K), 1)
    if GROUPS > 0:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(squares) / K + eps))
    if bias_ptr is not None:
        y = y + _biases(bias_ptr, expert, tile, M, BLOCK_M, GATED)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (B, 2)))
        y = gated(gate, up, LIMIT, SLOPE)
    else:
        y = squared(y)
    output = tile * B + tl.arange(0, B)
    out_ptrs = out_ptr + pair.to(tl.int64) * OUTPUTS + output
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=output < OUTPUTS)


@triton.jit(do_not_specialize=["lanes"])
def fma_down_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    y_ptr,
    arrivals_ptr,
    stream,
    lanes,
    M: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for a pair and BLOCK_M rows of its expert's down; the last of a lane's pairs to
    arrive adds all of them to the stream, or stores their sum if there is no stream. A pair of
    another rank's expert arrives without a product.

    The launch before must not write slots or experts.
    """
    sums = (y_ptr, share_ptr, expert_ptr, arrivals_ptr, lanes)
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    lane = pair // TOP_K
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    expert = tl.load(expert_ptr + pair, mask=live, other=0, cache_modifier=".cg")
    expert = place_of_expert(expert, FIRST, HELD)
    row_ptrs = _row_ptrs(weight_ptr, expert, tile, M, K, BLOCK_M, False)
    if HELD > 0:
        weights = load_rows(row_ptrs, K, BLOCK_K, expert < HELD)
    else:
        weights = load_rows(row_ptrs, K, BLOCK_K)
    wait_for_inputs(PDL, OVERLAP)
    if not live:
        return
    if HELD > 0 and expert >= HELD:
        output = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        arrive_alone(pair, tile, output, sums, stream, M, TOP_K, FIRST, HELD, BLOCK_M)
        return
    y = tl.sum(multiply_rows(weights, x_ptr + pair.to(tl.int64) * K, K, BLOCK_M, BLOCK_K), 1)
    if bias_ptr is not None:
        y = y + _biases(bias_ptr, expert, tile, M, BLOCK_M, False)
    output = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(y_ptr + pair.to(tl.int64) * M + output, y, mask=output < M)
    tl.debug_barrier()
    arrive_alone(pair, tile, output, sums, stream, M, TOP_K, FIRST, HELD, BLOCK_M)


@triton.jit
def load_rows(row_ptrs, K: tl.constexpr, BLOCK_K: tl.constexpr, here=None):
    """Load all columns of M weight rows as tiles [M, BLOCK_K]; zeros unless `here`."""
    k = tl.arange(0, BLOCK_K)
    tiles = ()
    for step in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        weight_ptrs = row_ptrs[:, None] + (step * BLOCK_K + k)[None, :]
        in_k = (step * BLOCK_K + k < K)[None, :]
        if here is not None:
            tile = tl.load(weight_ptrs, mask=in_k & here, other=0.0, eviction_policy="evict_first")
        elif (step + 1) * BLOCK_K <= K:
            tile = tl.load(weight_ptrs, eviction_policy="evict_first")
        else:
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


@triton.constexpr_function
def _chunk(groups):
    """Number of groups whose partial sums a tile holds."""
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
    """Pointers to the BLOCK_M weight rows of a tile of an expert.

    As in `linear_triton.py` rows past the end repeat the last, and gate and up rows of a SwiGLU
    alternate.
    """
    row = _rows(tile, M, BLOCK_M, SWIGLU)
    return weight_ptr + (expert.to(tl.int64) * M + row) * K


@triton.jit
def _biases(bias_ptr, expert, tile, M: tl.constexpr, BLOCK_M: tl.constexpr, SWIGLU: tl.constexpr):
    """Load the biases of the rows of `_row_ptrs`, in float32."""
    row = _rows(tile, M, BLOCK_M, SWIGLU)
    return tl.load(bias_ptr + expert.to(tl.int64) * M + row).to(tl.float32)


@triton.jit
def _rows(tile, M: tl.constexpr, BLOCK_M: tl.constexpr, SWIGLU: tl.constexpr):
    row = tl.arange(0, BLOCK_M)
    if SWIGLU:
        row = tl.minimum(tile * (BLOCK_M // 2) + row // 2, M // 2 - 1) + row % 2 * (M // 2)
    else:
        row = tl.minimum(tile * BLOCK_M + row, M - 1)
    return row


@triton.jit
def _lane_tile(row_ptrs, there, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns `k` of lanes, as [L, BLOCK_K]; 0 past K and for rows that do not exist."""
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
