"""How a packed weight and its inputs reach the Gluon kernels of decode: rings in shared memory.

Before a launch waits for its inputs, it requests the codes of the first tiles with `cp.async`, and
with the first tile the scales of all tiles, and what is beside them. The inputs of these tiles come
through registers: a copy issued after the codes would be complete only when all codes are. Later
tiles are requested when room is free, the codes and inputs of a tile in one group.

A weight's codes lie in blocks of 16 rows by `block_columns`. Letters as in `packed_cut.py`.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.core.triton_versions import load_async, reinterpret
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS

_BLOCK = gl.constexpr(BLOCK_HALFWORDS)


@gluon.constexpr_function
def code_layout(streams, warps):
    """Layout of [streams, blocks of rows, halfwords]: 16 bytes a thread, a block a warp."""
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [streams, warps // streams, 1], [2, 1, 0])


@gluon.constexpr_function
def _input_layout(columns, streams, warps):
    """Layout of [streams, lanes, columns]: 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout(
        [1, 1, 8], [1, 32 // across, across], [streams, warps // streams, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def _shared_inputs_layout(lanes):
    """Layout without bank conflicts among 4 lanes; a load reads 32 bytes of each of 8 lanes."""
    return gl.SwizzledSharedLayout(16, 1, 4 if lanes > 1 else 1, [2, 1, 0])


@gluon.constexpr_function
def _group_layout(size, warps):
    """Layout of [groups, blocks of rows, 16]: up to 16 bytes a thread."""
    piece = 16 // size
    return gl.BlockedLayout([1, 1, piece], [2 * piece, 1, 16 // piece], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def new_ring(dtype: gl.constexpr, cut):
    """Shared memory for the codes of `stages` tiles, and for their inputs in a dtype."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    halfwords: gl.constexpr = cut.stream // cut.block_columns * _BLOCK
    codes_shape: gl.constexpr = [cut.stages, cut.streams, cut.R, halfwords]
    inputs_shape: gl.constexpr = [cut.stages, cut.streams, cut.x_lanes, cut.stream]
    codes = gl.allocate_shared_memory(gl.int16, codes_shape, plain)
    inputs = gl.allocate_shared_memory(dtype, inputs_shape, _shared_inputs_layout(cut.x_lanes))
    return codes, inputs


@gluon.jit
def place_codes(codes_ptr, part, cut):
    """Where the codes of a program's first tile are, their blocks of columns, and how many blocks
    of columns there are to read.

    Past the end the last block of rows repeats; these rows are never stored.
    """
    coded: gl.constexpr = code_layout(cut.streams, cut.warps)
    HALFWORDS: gl.constexpr = cut.stream // cut.block_columns * _BLOCK
    columns = cut.column_blocks
    if cut.optional:
        columns = gl.where(part.there, columns, 0)
    codes_ptr += part.weight * (cut.row_blocks * cut.column_blocks * _BLOCK)
    first_row = part.tile * cut.R
    first_column = part.split * (cut.tiles * (cut.block_k // cut.block_columns))
    stream = gl.arange(0, cut.streams, gl.SliceLayout(1, gl.SliceLayout(2, coded)))
    block = first_row + gl.arange(0, cut.R, gl.SliceLayout(0, gl.SliceLayout(2, coded)))
    at = gl.arange(0, HALFWORDS, gl.SliceLayout(0, gl.SliceLayout(1, coded)))
    block = gl.minimum(block, cut.row_blocks - 1).to(gl.int64) * (cut.column_blocks * _BLOCK)
    column = stream[:, None, None] * (cut.stream // cut.block_columns)
    column += (at // _BLOCK)[None, None, :]
    column += first_column
    first = first_column * _BLOCK + stream * HALFWORDS
    ptrs = codes_ptr + (block[None, :, None] + first[:, None, None] + at[None, None, :])
    return ptrs, column, columns


@gluon.jit
def fill_ring(codes, places, weight, part, cut):
    """Request the codes of the first tiles, and the scales and zeros of all tiles.

    Returns scales, zeros and minimums, [pieces, streams, rows] each, and factors on the first and
    the last for each piece of `factor_piece` columns; anything where the weight has none.
    """
    scales = (codes, codes, codes, codes, codes)
    for stage in gl.static_range(cut.stages):
        ask_codes(codes, places, stage, cut)
        if stage == 0 and cut.group > 0:
            # In the group of the first tile, which needs some of them.
            scales = _ask_scales(weight, part, cut)
        # The loop closes the last group, so that it closes one for each of its tiles.
        if stage < cut.stages - 1 or cut.stages == 1:
            async_copy.commit_group()
    return scales


@gluon.jit
def ask_codes(codes, places, step, cut):
    """Request the codes of tile `step`; `places` are those of the first tile.

    Blocks that the program does not read become 0.
    """
    code_ptrs, column, columns = places
    BLOCKS: gl.constexpr = cut.block_k // cut.block_columns
    room = codes.index(step % cut.stages)
    ptrs = code_ptrs + step * (BLOCKS * _BLOCK)
    if cut.even and not cut.optional:
        load_async(room, ptrs)
    else:
        inside = column + step * BLOCKS < columns
        load_async(room, ptrs, inside)


@gluon.jit
def _ask_scales(weight, part, cut):
    """Request the values that `fill_ring` returns, for all of a program's groups."""
    PITCH: gl.constexpr = 32 if cut.minimums else 16
    scales = _ask_groups(weight.scales, 0, part, cut, cut.group, cut.piece, PITCH)
    zeros, minimums, factors, of_minimums = scales, scales, scales, scales
    if cut.zeros:
        zeros = _ask_groups(weight.zeros, 0, part, cut, cut.group, cut.piece, PITCH)
    if cut.minimums:
        minimums = _ask_groups(weight.scales, 16, part, cut, cut.group, cut.piece, PITCH)
    if cut.factor:
        PIECE: gl.constexpr = cut.factor_piece
        factors = _ask_groups(weight.factors, 0, part, cut, cut.factor, PIECE, PITCH)
        if cut.minimums:
            of_minimums = _ask_groups(weight.factors, 16, part, cut, cut.factor, PIECE, PITCH)
    return scales, zeros, minimums, factors, of_minimums


@gluon.jit
def _ask_groups(
    of_groups,
    first,
    part,
    cut,
    COLUMNS: gl.constexpr,
    PIECE: gl.constexpr,
    PITCH: gl.constexpr,
):
    """Request a value for each row of all pieces of a program's columns, in the order of their use:
    [pieces, streams, rows]. Where there is no group, or no weight to read, it becomes 0.

    For every COLUMNS columns a block of rows has PITCH values, of which the 16 from `first` on are
    taken.
    """
    dtype: gl.constexpr = of_groups.dtype.element_ty
    GROUPS: gl.constexpr = (cut.K + COLUMNS - 1) // COLUMNS
    of_groups += part.weight * (cut.row_blocks * GROUPS * PITCH) + first
    groups = GROUPS
    if cut.optional:
        groups = gl.where(part.there, groups, 0)
    PIECES: gl.constexpr = cut.stream // PIECE
    USES: gl.constexpr = triton.next_power_of_2(cut.tiles * PIECES)
    layout: gl.constexpr = _group_layout(dtype.primitive_bitwidth // 8, cut.warps)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    first_row = part.tile * cut.R
    first_column = part.split * (cut.tiles * cut.block_k)
    ring = gl.allocate_shared_memory(dtype, [USES * cut.streams, cut.R, 16], plain)
    use = gl.arange(0, USES * cut.streams, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    step = use // cut.streams
    column = step // PIECES * cut.block_k + use % cut.streams * cut.stream
    column += step % PIECES * PIECE
    group = (first_column + column) // COLUMNS
    block = first_row + gl.arange(0, cut.R, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    block = gl.minimum(block, cut.row_blocks - 1).to(gl.int64) * (GROUPS * PITCH)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    ptrs = of_groups + block[None, :, None] + group[:, None, None] * PITCH + row[None, None, :]
    load_async(ring, ptrs, (group < groups)[:, None, None])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(ring, dtype, [USES, cut.streams, cut.R * 16], rows)


@gluon.constexpr_function
def input_lanes_layout(columns, streams, warps):
    """Layout of a program's lanes, as `place_inputs` takes them."""
    return gl.SliceLayout(0, gl.SliceLayout(2, _input_layout(columns, streams, warps)))


@gluon.jit
def place_inputs(x_ptr, row, split, x_pitch, cut):
    """Where the inputs of a program's first tile are, and in which columns.

    `row` [lanes] in `input_lanes_layout` is each lane's row of x. The pitch is a stride in units of
    8 elements.
    """
    copied: gl.constexpr = _input_layout(cut.stream, cut.streams, cut.warps)
    stream = gl.arange(0, cut.streams, gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    k = gl.arange(0, cut.stream, gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    k = split * (cut.tiles * cut.block_k) + stream[:, None, None] * cut.stream + k[None, None, :]
    ptrs = x_ptr + (row.to(gl.int64) * (x_pitch.to(gl.int64) * 8))[None, :, None] + k
    return ptrs, k


@gluon.jit
def load_inputs(places, cut):
    """Load the inputs of the first tiles into registers.

    `places` is the result of `place_inputs`, and which lanes exist.
    """
    ptrs, _, _ = places
    tiles = ()
    for stage in gl.static_range(cut.stages):
        inside = _inputs_inside(places, stage, cut)
        x = gl.load(ptrs + stage * cut.block_k, mask=inside, other=0.0, cache_modifier=".cg")
        tiles += (x,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def store_inputs(inputs, tiles, cut):
    """Put the inputs that `load_inputs` returned into the ring."""
    for stage in gl.static_range(cut.stages):
        inputs.index(stage).store(tiles[stage])


@gluon.jit
def ask_inputs(inputs, places, step, cut):
    """Request the inputs of tile `step`, as `ask_codes` does its codes."""
    inside = _inputs_inside(places, step, cut)
    room = inputs.index(step % cut.stages)
    load_async(room, places[0] + step * cut.block_k, inside)


@gluon.jit
def _inputs_inside(places, step, cut):
    """Where tile `step` has an input: in lanes that exist, and not past K."""
    _, first, there = places
    k = first + step * cut.block_k
    there = there[None, :, None]
    if cut.even:
        inside = there & (k >= 0)
    else:
        inside = there & (k < cut.K)
    return inside
