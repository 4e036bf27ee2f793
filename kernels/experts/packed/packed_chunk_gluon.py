"""The kernel of `packed_chunk.py`: products of many pairs with packed experts, on Hopper.

It is the kernel of a packed linear (`linear/gluon/packed_chunk_gluon.py`) whose tiles are blocks of
pairs of one expert. Inputs lie in the order of the grouping, so that a block's are adjacent;
outputs go to their pairs.

Letters: E experts, P pairs, L pairs of a tile, K input features, M weight rows of an expert.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.linear.gluon.packed_chunk_codes import UNIT
from graphengine.kernels.linear.gluon.packed_chunk_gluon import (
    REGISTERS,
    bring_tile,
    multiply_tile,
    new_rings,
)
from graphengine.kernels.norm_rope.activation import gated, squared

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_gated = gluon.jit(gated.fn)
_squared = gluon.jit(squared.fn)

_UNIT = gl.constexpr(UNIT)


@gluon.jit
def packed_experts_chunk_kernel(
    inputs,
    codes,
    factors,
    order_ptr,
    blocks_ptr,
    out_ptr,
    M: gl.constexpr,
    K: gl.constexpr,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    FOLD: gl.constexpr,
    SWIGLU: gl.constexpr,
    LIMIT: gl.constexpr,
    SLOPE: gl.constexpr,
    BLOCKS: gl.constexpr,
    EXPERTS: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles of rows alternately, all tiles of a block of pairs before the next, so
    that running programs share inputs, and blocks of one expert its weights.

    BLOCKS blocks of pairs at most, of which those of the first EXPERTS experts are multiplied. The
    other constants are as in `packed_chunk_kernel` and `product_kernel`.
    """
    L: gl.constexpr = inputs.block_shape[0]
    PIECES: gl.constexpr = _UNIT // inputs.block_shape[1]
    R: gl.constexpr = codes.block_shape[0]
    ROWS: gl.constexpr = 32 if SWIGLU else 64
    gl.static_assert(R == 4 * WARP_GROUPS and STAGES > 2)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, ROWS], inputs.dtype)
    rings = new_rings(inputs, codes, WARP_GROUPS, DEPTH, STAGES)
    y = gl.allocate_shared_memory(inputs.dtype, [WARP_GROUPS, L, ROWS], y_layout)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    # Blocks of 16 rows of an expert's weight.
    HELD_ROWS: gl.constexpr = (M // 2 + 7) // 8 if SWIGLU else (M + 15) // 16
    SUMS: gl.constexpr = DEPTH // PART * PIECES if GROUP > 0 and not FOLD else 0
    form: gl.constexpr = (M, K, CODE, GROUP, FOLD, SWIGLU, ROWS, HELD_ROWS, DEPTH, PART, SUMS)
    cut: gl.constexpr = (BLOCKS, EXPERTS, HELD_ROWS, LIMIT, SLOPE)
    brought = (rings, blocks_ptr, inputs, codes)
    rows = (rings, y, blocks_ptr, order_ptr, factors, out_ptr)
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form, cut)),
                (_multiply_rows, (rows, gl.constexpr(1), form, cut)),
                (_bring_tiles, (brought, form, cut)),
            ],
            [4, 1],
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form, cut)),
                (_bring_tiles, (brought, form, cut)),
            ],
            [1],
            [REGISTERS[1]],
        )


@gluon.jit
def _bring_tiles(brought, form: gl.constexpr, cut: gl.constexpr):
    """In one warp, load the codes and inputs of each step as soon as there is room for them."""
    rings, blocks_ptr, inputs, codes = brought
    BLOCKS: gl.constexpr = cut[0]
    EXPERTS: gl.constexpr = cut[1]
    HELD_ROWS: gl.constexpr = cut[2]
    R: gl.constexpr = codes.block_shape[0]
    ROW_TILES: gl.constexpr = (HELD_ROWS + R - 1) // R
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert = gl.load(blocks_ptr + tile // ROW_TILES)
        if (expert >= 0) & (expert < EXPERTS):
            first = gl.load(blocks_ptr + BLOCKS + tile // ROW_TILES)
            block = expert * HELD_ROWS + tile % ROW_TILES * R
            count = bring_tile(rings, inputs, codes, first, block, count, form[1], form[8])


@gluon.jit
def _multiply_rows(rows, WHICH: gl.constexpr, form: gl.constexpr, cut: gl.constexpr):
    """In one warp group, multiply and store its 64 rows of each of the program's tiles."""
    rings, y, blocks_ptr, order_ptr, factors, out_ptr = rows
    BLOCKS: gl.constexpr = cut[0]
    EXPERTS: gl.constexpr = cut[1]
    HELD_ROWS: gl.constexpr = cut[2]
    R: gl.constexpr = rings[1].shape[1]
    ROW_TILES: gl.constexpr = (HELD_ROWS + R - 1) // R
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert = gl.load(blocks_ptr + tile // ROW_TILES)
        if (expert >= 0) & (expert < EXPERTS):
            at = order_ptr + gl.load(blocks_ptr + BLOCKS + tile // ROW_TILES)
            pairs = gl.load(blocks_ptr + 2 * BLOCKS + tile // ROW_TILES)
            first_block = tile % ROW_TILES * R + WHICH * 4
            blocks = (expert * HELD_ROWS, first_block)
            total, count = multiply_tile(rings, factors, blocks, count, WHICH, form)
            place = (expert, first_block, at, pairs)
            _store_pairs(total, y.index(WHICH), factors, out_ptr, place, form, cut)


@gluon.jit
def _store_pairs(total, y, factors, out_ptr, place, form: gl.constexpr, cut: gl.constexpr):
    """Store the outputs of sums [64, L]: times the factors of rows, plus the bias, activated.

    `place` has the expert, the rows' first block, where the order of the pairs begins, and how many
    pairs there are.
    """
    expert, first_block, order_ptrs, pairs = place
    M: gl.constexpr = form[0]
    ROWS: gl.constexpr = form[6]
    HELD_ROWS: gl.constexpr = cut[2]
    LIMIT: gl.constexpr = cut[3]
    SLOPE: gl.constexpr = cut[4]
    L: gl.constexpr = total.shape[1]
    OUTPUTS: gl.constexpr = M // 2 if ROWS == 32 else M
    row = gl.arange(0, 64, gl.SliceLayout(1, total.type.layout))
    if factors.row_scales is not None:
        held = first_block * 16 + row
        scales = factors.row_scales + expert * (HELD_ROWS * 16) + held
        total = total * gl.load(scales, mask=held < HELD_ROWS * 16, other=0.0)[:, None]
    if factors.bias is not None:
        output = first_block * 16 + row
        inside = output < M
        if ROWS == 32:
            output = first_block * 8 + row // 16 * 8 + row % 8
            inside = output < OUTPUTS
            output += row // 8 % 2 * OUTPUTS
        bias = gl.load(factors.bias + expert * M + output, mask=inside, other=0.0)
        total = total + bias.to(gl.float32)[:, None]
    if ROWS == 32:
        gate, up = gl.split(total.reshape([4, 2, 8, L]).permute((0, 2, 3, 1)))
        values = _gated(gate.reshape([32, L]), up.reshape([32, L]), LIMIT, SLOPE)
    elif LIMIT < 0:
        values = _squared(total)
    else:
        values = total
    dense: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0])
    sync_threads()
    y.store(values.to(y.dtype).permute((1, 0)))
    sync_threads()
    lane = gl.arange(0, L, gl.SliceLayout(1, dense))
    pair = gl.load(order_ptrs + lane, mask=lane < pairs, other=0)
    output = first_block * (ROWS // 4) + gl.arange(0, ROWS, gl.SliceLayout(0, dense))
    stored = (lane < pairs)[:, None] & (output < OUTPUTS)[None, :]
    at = pair.to(gl.int64)[:, None] * OUTPUTS + output[None, :]
    gl.store(out_ptr + at, y.load(dense), mask=stored)
