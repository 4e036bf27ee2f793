"""The kernel of `experts_chunk.py`: products of many pairs with experts in 16 bits, on Hopper.

A tile has the pairs of one block and some rows of their expert's weight. The rows are the left
operand of `wgmma` and the pairs the right one, so that a product can be as wide as the block has
pairs: the width is chosen for each tile. A separate warp has the tensor memory accelerator (TMA)
load weights and inputs some steps ahead, across tiles as well, while one or two warp groups
multiply 128 rows each. Inputs lie in the order of the grouping, so that a block's are adjacent;
outputs go to their pairs. Source: the persistent matmuls of Triton's and Gluon's tutorials, which
are CUTLASS's.

A pair's sums do not depend on the width: all `wgmma` add up 16 columns at a time, in order.

Letters: E experts, P pairs, L most pairs of a block, K input features, M weight rows of an expert,
R weight rows of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.core.triton_versions import load_tile, sync_threads
from graphengine.kernels.experts.prefill.pair_rows import load_block, load_pairs, store_pairs
from graphengine.kernels.linear.gluon.packed_chunk_gluon import workers
from graphengine.kernels.norm_rope.activation import gated, squared

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_gated = gluon.jit(gated.fn)
_squared = gluon.jit(squared.fn)

GROUP_ROWS = 128
"""Weight rows that a warp group multiplies: 64 gates and their ups, or any adjacent 128."""
BOX_ROWS = 64
"""Weight rows that the TMA loads at once; also the outputs that a warp group stores at once."""
COLUMNS = 64
"""Columns of a step."""
LEAST_WIDTH = 32
"""Least width of a product: narrower ones are bound by shared memory, and take as long."""


class _Cut(NamedTuple):
    """Constants of the kernel, as in `experts_chunk_kernel`."""

    M: int
    K: int
    swiglu: bool
    limit: float
    slope: float
    blocks: int
    experts: int
    lanes: int


@gluon.constexpr_function
def _cut_of(*values):
    return _Cut(*values)


_GROUP_ROWS = gl.constexpr(GROUP_ROWS)
_BOX_ROWS = gl.constexpr(BOX_ROWS)
_LEAST_WIDTH = gl.constexpr(LEAST_WIDTH)


@gluon.jit
def experts_chunk_kernel(
    inputs,
    weights,
    bias_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    M: gl.constexpr,
    K: gl.constexpr,
    SWIGLU: gl.constexpr,
    LIMIT: gl.constexpr,
    SLOPE: gl.constexpr,
    BLOCKS: gl.constexpr,
    EXPERTS: gl.constexpr,
    L: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles alternately, all tiles of a block of pairs before the next, so that
    running programs share inputs, and blocks of one expert its weights.

    BLOCKS blocks of pairs at most, of which those of the first EXPERTS experts are multiplied. With
    SWIGLU a weight has gates, then ups. LIMIT and SLOPE are as in `product_kernel`.
    """
    BLOCK_K: gl.constexpr = inputs.block_shape[1]
    R: gl.constexpr = WARP_GROUPS * _GROUP_ROWS
    gl.static_assert(weights.block_shape[0] == _BOX_ROWS and weights.block_shape[1] == BLOCK_K)
    gl.static_assert(inputs.block_shape[0] == _LEAST_WIDTH and STAGES > 2)
    x = gl.allocate_shared_memory(inputs.dtype, [STAGES, L, BLOCK_K], inputs.layout)
    w = gl.allocate_shared_memory(inputs.dtype, [STAGES, R, BLOCK_K], weights.layout)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, _BOX_ROWS], inputs.dtype)
    y = gl.allocate_shared_memory(inputs.dtype, [WARP_GROUPS, L, _BOX_ROWS], y_layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(there.index(index), count=1)
        mbarrier.init(free.index(index), count=WARP_GROUPS)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    rings = (x, w, there, free)
    cut: gl.constexpr = _cut_of(M, K, SWIGLU, LIMIT, SLOPE, BLOCKS, EXPERTS, L)
    brought = (rings, blocks_ptr, inputs, weights)
    rows = (rings, y, blocks_ptr, order_ptr, bias_ptr, out_ptr)
    # This is one warp group. The other warps begin after a barrier, which follows the wait.
    warps: gl.constexpr = workers(WARP_GROUPS)
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), cut)),
                (_multiply_rows, (rows, gl.constexpr(1), cut)),
                (_bring_tiles, (brought, cut)),
            ],
            warps[0],
            warps[1],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), cut)),
                (_bring_tiles, (brought, cut)),
            ],
            warps[0],
            warps[1],
        )


@gluon.constexpr_function
def _outputs(cut):
    """Outputs of an expert."""
    return cut.M // 2 if cut.swiglu else cut.M


@gluon.constexpr_function
def _tile_outputs(rows, cut):
    """Outputs of this many weight rows of a tile."""
    return rows // 2 if cut.swiglu else rows


@gluon.constexpr_function
def _row_tiles(rows, cut):
    """Tiles of this many rows that an expert's weight has."""
    return -(-_outputs(cut) // _tile_outputs(rows, cut))


@gluon.jit
def _bring_tiles(brought, cut: gl.constexpr):
    """In one warp, load the weights and inputs of each step as soon as there is room for them."""
    rings, blocks_ptr, inputs, weights = brought
    M: gl.constexpr = cut.M
    BLOCKS: gl.constexpr = cut.blocks
    EXPERTS: gl.constexpr = cut.experts
    L: gl.constexpr = cut.lanes
    R: gl.constexpr = rings[1].shape[1]
    ROW_TILES: gl.constexpr = _row_tiles(R, cut)
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert, first, pairs = load_block(blocks_ptr, tile // ROW_TILES, BLOCKS)
        if (expert >= 0) & (expert < EXPERTS):
            row = expert * M + tile % ROW_TILES * _tile_outputs(R, cut)
            count = _bring_pairs(rings, inputs, weights, (first, row, pairs), count, cut, L)


@gluon.jit
def _bring_pairs(rings, inputs, weights, place, count, cut: gl.constexpr, ROWS: gl.constexpr):
    """Load a tile's steps with the fewest boxes of inputs that have all pairs, at most ROWS rows.

    `count` steps came before; returns how many there are then.
    """
    FEWER: gl.constexpr = ROWS - _LEAST_WIDTH
    if FEWER > 0:
        if place[2] > FEWER:
            count = _bring_steps(rings, inputs, weights, place, count, cut, ROWS)
        else:
            count = _bring_pairs(rings, inputs, weights, place, count, cut, FEWER)
    else:
        count = _bring_steps(rings, inputs, weights, place, count, cut, ROWS)
    return count


@gluon.jit
def _bring_steps(rings, inputs, weights, place, count, cut: gl.constexpr, ROWS: gl.constexpr):
    """Load a tile's steps, each with ROWS rows of inputs, from these rows on.

    The rows of a SwiGLU's warp group are gates and as many ups. Boxes may reach past an expert's
    rows or past its pairs: what is computed from that is not stored.
    """
    x, w, there, free = rings
    first, row, _ = place
    BOX: gl.constexpr = inputs.block_shape[0]
    BLOCK_K: gl.constexpr = inputs.block_shape[1]
    R: gl.constexpr = w.shape[1]
    STAGES: gl.constexpr = there.shape[0]
    SWIGLU: gl.constexpr = cut.swiglu
    for step in range((cut.K + BLOCK_K - 1) // BLOCK_K):
        stage = count % STAGES
        # The first use of a stage does not wait: the phase before a barrier's first counts as
        # complete.
        mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
        barrier = there.index(stage)
        mbarrier.expect(barrier, (R + ROWS) * BLOCK_K * 2)
        k = step * BLOCK_K
        for box in gl.static_range(R // _BOX_ROWS):
            at = row + box * _BOX_ROWS
            if SWIGLU:
                at = row + box // 2 * _BOX_ROWS + box % 2 * (cut.M // 2)
            load_tile(weights, [at, k], barrier, w.index(stage).slice(box * _BOX_ROWS, _BOX_ROWS))
        for box in gl.static_range(ROWS // BOX):
            load_tile(inputs, [first + box * BOX, k], barrier, x.index(stage).slice(box * BOX, BOX))
        count += 1
    return count


@gluon.jit
def _multiply_rows(rows, WHICH: gl.constexpr, cut: gl.constexpr):
    """In one warp group, multiply and store its rows of each of the program's tiles."""
    rings, _, blocks_ptr, _, _, _ = rows
    BLOCKS: gl.constexpr = cut.blocks
    EXPERTS: gl.constexpr = cut.experts
    L: gl.constexpr = cut.lanes
    R: gl.constexpr = rings[1].shape[1]
    ROW_TILES: gl.constexpr = _row_tiles(R, cut)
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert, first, pairs = load_block(blocks_ptr, tile // ROW_TILES, BLOCKS)
        if (expert >= 0) & (expert < EXPERTS):
            output = tile % ROW_TILES * _tile_outputs(R, cut)
            output += WHICH * _tile_outputs(_GROUP_ROWS, cut)
            place = (expert, output, first, pairs)
            count = _multiply_pairs(rows, place, count, WHICH, cut, L)


@gluon.jit
def _multiply_pairs(rows, place, count, WHICH: gl.constexpr, cut: gl.constexpr, N: gl.constexpr):
    """Multiply and store a block's pairs by products of the least width that has all of them, at
    most N.

    `count` steps came before; returns how many there are then.
    """
    if N > _LEAST_WIDTH:
        if place[3] > N // 2:
            count = _multiply_block(rows, place, count, WHICH, cut, N)
        else:
            count = _multiply_pairs(rows, place, count, WHICH, cut, N // 2)
    else:
        count = _multiply_block(rows, place, count, WHICH, cut, N)
    return count


@gluon.jit
def _multiply_block(rows, place, count, WHICH: gl.constexpr, cut: gl.constexpr, N: gl.constexpr):
    """Multiply and store a block's pairs by products of width N; returns the steps so far."""
    rings, y, _, order_ptr, bias_ptr, out_ptr = rows
    sums, count = _multiply_steps(rings, count, WHICH, cut, N)
    _store_block(sums, y.index(WHICH).slice(0, N), bias_ptr, order_ptr, out_ptr, place, cut)
    return count


@gluon.jit
def _multiply_steps(rings, count, WHICH: gl.constexpr, cut: gl.constexpr, N: gl.constexpr):
    """Multiply a warp group's rows of a tile with N pairs; returns the sums [128, N], and the steps
    that there were then. Its stages are free again.
    """
    x, w, there, free = rings
    BLOCK_K: gl.constexpr = x.shape[2]
    STAGES: gl.constexpr = there.shape[0]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums = gl.zeros([_GROUP_ROWS, N], gl.float32, product)
    for step in range((cut.K + BLOCK_K - 1) // BLOCK_K):
        stage = count % STAGES
        mbarrier.wait(there.index(stage), count // STAGES & 1)
        left = w.index(stage).slice(WHICH * _GROUP_ROWS, _GROUP_ROWS)
        right = x.index(stage).slice(0, N).permute((1, 0))
        sums = warpgroup_mma(left, right, sums, is_async=True)
        # The `wgmma` of the step before is done in all four warps: its stage is free.
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        sync_threads()
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    sync_threads()
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    return sums, count


@gluon.jit
def _store_block(sums, y, bias_ptr, order_ptr, out_ptr, place, cut: gl.constexpr):
    """Store the outputs of a warp group's sums [128, N]: plus the bias, activated.

    y      shared memory [N, 64] in the outputs' dtype
    place  the expert, the first output, where the block's pairs begin in the order of all, and how
           many pairs there are
    """
    expert, first_output, first, pairs = place
    M: gl.constexpr = cut.M
    SWIGLU: gl.constexpr = cut.swiglu
    LIMIT: gl.constexpr = cut.limit
    SLOPE: gl.constexpr = cut.slope
    N: gl.constexpr = sums.shape[1]
    OUTPUTS: gl.constexpr = _outputs(cut)
    if bias_ptr is not None:
        row = gl.arange(0, _GROUP_ROWS, gl.SliceLayout(1, sums.type.layout))
        output = first_output + (row % _BOX_ROWS if SWIGLU else row)
        at = output + (row // _BOX_ROWS * OUTPUTS if SWIGLU else 0)
        bias = gl.load(bias_ptr + expert * M + at, mask=output < OUTPUTS, other=0.0)
        sums = sums + bias.to(gl.float32)[:, None]
    halves = sums.reshape([2, _BOX_ROWS, N]).permute((1, 2, 0))
    low, high = gl.split(halves)
    pair = load_pairs(order_ptr + first, pairs, N, _BOX_ROWS)
    if SWIGLU:
        values = _gated(low, high, LIMIT, SLOPE)
        store_pairs(values, y, out_ptr, pair, pairs, first_output, OUTPUTS)
    else:
        if LIMIT < 0:
            low, high = _squared(low), _squared(high)
        store_pairs(low, y, out_ptr, pair, pairs, first_output, OUTPUTS)
        store_pairs(high, y, out_ptr, pair, pairs, first_output + _BOX_ROWS, OUTPUTS)
