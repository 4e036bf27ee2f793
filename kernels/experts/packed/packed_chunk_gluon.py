"""The kernel of `packed_chunk.py`: products of many pairs with packed experts, on Hopper.

It is the kernel of a packed linear (`linear/gluon/packed_chunk_gluon.py`) whose tiles are blocks of
pairs of one expert. Inputs lie in the order of the grouping, so that a block's are adjacent;
outputs go to their pairs.

Letters: E experts, P pairs, L pairs of a tile, K input features, M weight rows of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.experts.prefill.pair_rows import load_block, load_pairs, store_pairs
from graphengine.kernels.linear.gluon.packed_chunk_codes import UNIT
from graphengine.kernels.linear.gluon.packed_chunk_epilogue import outputs_of_rows
from graphengine.kernels.linear.gluon.packed_chunk_gluon import (
    bring_tile,
    form_of,
    multiply_tile,
    new_rings,
    product_layout,
    workers,
)
from graphengine.kernels.norm_rope.activation import gated, squared

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_gated = gluon.jit(gated.fn)
_squared = gluon.jit(squared.fn)

_UNIT = gl.constexpr(UNIT)


class _Cut(NamedTuple):
    """How the pairs are cut, and the activation.

    blocks   blocks of pairs at most
    experts  those whose blocks are multiplied: the first ones
    limit    and `slope`: as in `product_kernel`
    box      pairs that are loaded at a time, and the least that are multiplied
    """

    blocks: int
    experts: int
    limit: float
    slope: float
    box: int


@gluon.constexpr_function
def _cut_of(*values):
    return _Cut(*values)


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
    L: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles of rows alternately, all tiles of a block of pairs before the next, so
    that running programs share inputs, and blocks of one expert its weights.

    BLOCKS blocks of at most L pairs, of which those of the first EXPERTS experts are multiplied. A
    block with fewer pairs loads only the boxes of `inputs` that hold them, and multiplies as many,
    rounded up to a power of two: lanes past the loaded boxes have inputs of an earlier step, and
    their sums are not stored. The other constants are as in `packed_chunk_kernel` and
    `product_kernel`.
    """
    PIECES: gl.constexpr = _UNIT // inputs.block_shape[1]
    ROWS: gl.constexpr = 32 if SWIGLU else 64
    gl.static_assert(codes.block_shape[0] == 4 and STAGES > 2 and WARP_GROUPS > 1)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, ROWS], inputs.dtype)
    rings = new_rings(inputs, codes, L, WARP_GROUPS, DEPTH, STAGES)
    y = gl.allocate_shared_memory(inputs.dtype, [WARP_GROUPS, L, ROWS], y_layout)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    form: gl.constexpr = form_of(M, K, CODE, GROUP, FOLD, SWIGLU, ROWS, DEPTH, PART, PIECES, True)
    cut: gl.constexpr = _cut_of(BLOCKS, EXPERTS, LIMIT, SLOPE, inputs.block_shape[0])
    brought = (rings, blocks_ptr, inputs, codes)
    rows = (rings, y, blocks_ptr, order_ptr, factors, out_ptr)
    warps: gl.constexpr = workers(WARP_GROUPS)
    if WARP_GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form, cut)),
                (_multiply_rows, (rows, gl.constexpr(1), form, cut)),
                (_multiply_rows, (rows, gl.constexpr(2), form, cut)),
                (_bring_tiles, (brought, 4 * WARP_GROUPS, form, cut)),
            ],
            warps[0],
            warps[1],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form, cut)),
                (_multiply_rows, (rows, gl.constexpr(1), form, cut)),
                (_bring_tiles, (brought, 4 * WARP_GROUPS, form, cut)),
            ],
            warps[0],
            warps[1],
        )


@gluon.jit
def _bring_tiles(brought, R: gl.constexpr, form: gl.constexpr, cut: gl.constexpr):
    """In one warp, load the codes and inputs of each step as soon as there is room for them."""
    rings, blocks_ptr, inputs, codes = brought
    BLOCKS: gl.constexpr = cut.blocks
    EXPERTS: gl.constexpr = cut.experts
    HELD_ROWS: gl.constexpr = form.blocks
    ROW_TILES: gl.constexpr = (HELD_ROWS + R - 1) // R
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert, first, pairs = load_block(blocks_ptr, tile // ROW_TILES, BLOCKS)
        if (expert >= 0) & (expert < EXPERTS):
            boxes = (pairs + inputs.block_shape[0] - 1) // inputs.block_shape[0]
            place = (first, boxes, expert * HELD_ROWS + tile % ROW_TILES * R)
            count = bring_tile(rings, inputs, codes, place, count, form.K, form.depth)


@gluon.constexpr_function
def _doublings(least, most):
    """How many sizes there are from the least to the most, each twice the one before."""
    return (most // least).bit_length()


@gluon.jit
def _multiply_rows(rows, WHICH: gl.constexpr, form: gl.constexpr, cut: gl.constexpr):
    """In one warp group, multiply and store its 64 rows of each of the program's tiles."""
    rings, y, blocks_ptr, order_ptr, _, _ = rows
    BLOCKS: gl.constexpr = cut.blocks
    EXPERTS: gl.constexpr = cut.experts
    HELD_ROWS: gl.constexpr = form.blocks
    BOX: gl.constexpr = cut.box
    DOUBLINGS: gl.constexpr = _doublings(BOX, rings[0].shape[1])
    R: gl.constexpr = 4 * y.shape[0]
    ROW_TILES: gl.constexpr = (HELD_ROWS + R - 1) // R
    count = 0
    for tile in range(gl.program_id(0), BLOCKS * ROW_TILES, gl.num_programs(0)):
        expert, first, pairs = load_block(blocks_ptr, tile // ROW_TILES, BLOCKS)
        if (expert >= 0) & (expert < EXPERTS):
            place = (expert, tile % ROW_TILES * R + WHICH * 4, order_ptr + first, pairs)
            for doubling in gl.static_range(DOUBLINGS):
                if _fits(pairs, BOX, doubling):
                    count = _multiply_pairs(rows, place, count, BOX << doubling, WHICH, form, cut)


@gluon.jit
def _fits(pairs, BOX: gl.constexpr, DOUBLING: gl.constexpr):
    """Whether this size is the least that holds the pairs."""
    LEAST: gl.constexpr = (BOX << DOUBLING) // 2 if DOUBLING > 0 else 0
    return (pairs > LEAST) & (pairs <= BOX << DOUBLING)


@gluon.jit
def _multiply_pairs(
    rows,
    place,
    count,
    L: gl.constexpr,
    WHICH: gl.constexpr,
    form: gl.constexpr,
    cut: gl.constexpr,
):
    """Multiply and store 64 rows of a tile of at most L pairs; returns how many steps there have
    been.

    `place` has the expert, the rows' first block, where the order of the pairs begins, and how many
    pairs there are. What the outputs need is loaded before the products, which hide its latency.
    """
    rings, y, _, _, factors, out_ptr = rows
    needed = _load_outputs(factors, place, L, form)
    blocks = (place[0] * form.blocks, place[1])
    total, count = multiply_tile(rings, factors, blocks, count, L, WHICH, form)
    y = y.index(WHICH).slice(0, L)
    _store_pairs(total, needed, y, factors, out_ptr, place, form, cut)
    return count


@gluon.jit
def _load_outputs(factors, place, L: gl.constexpr, form: gl.constexpr):
    """Load the pair of each lane [L], then the factors and the biases of rows [64], if any."""
    expert, first_block, order_ptrs, pairs = place
    M: gl.constexpr = form.M
    ROWS: gl.constexpr = form.rows
    HELD_ROWS: gl.constexpr = form.blocks
    needed = (load_pairs(order_ptrs, pairs, L, ROWS),)
    row = gl.arange(0, 64, gl.SliceLayout(1, product_layout(L)))
    if factors.row_scales is not None:
        held = first_block * 16 + row
        scales = factors.row_scales + expert * (HELD_ROWS * 16) + held
        needed += (gl.load(scales, mask=held < HELD_ROWS * 16, other=0.0),)  # type: ignore[assignment]
    if factors.bias is not None:
        output, inside = outputs_of_rows(row, first_block, M, ROWS)
        needed += (gl.load(factors.bias + expert * M + output, mask=inside, other=0.0),)  # type: ignore[assignment]
    return needed


@gluon.jit
def _store_pairs(total, needed, y, factors, out_ptr, place, form: gl.constexpr, cut: gl.constexpr):
    """Store the outputs of sums [64, L]: times the factors of rows, plus the bias, activated."""
    _, first_block, _, pairs = place
    M: gl.constexpr = form.M
    ROWS: gl.constexpr = form.rows
    LIMIT: gl.constexpr = cut.limit
    SLOPE: gl.constexpr = cut.slope
    L: gl.constexpr = total.shape[1]
    OUTPUTS: gl.constexpr = M // 2 if ROWS == 32 else M
    if factors.row_scales is not None:
        total = total * needed[1][:, None]
    if factors.bias is not None:
        total = total + needed[len(needed) - 1].to(gl.float32)[:, None]
    if ROWS == 32:
        gate, up = gl.split(total.reshape([4, 2, 8, L]).permute((0, 2, 3, 1)))
        values = _gated(gate.reshape([32, L]), up.reshape([32, L]), LIMIT, SLOPE)
    elif LIMIT < 0:
        values = _squared(total)
    else:
        values = total
    store_pairs(values, y, out_ptr, needed[0], pairs, first_block * (ROWS // 4), OUTPUTS)
