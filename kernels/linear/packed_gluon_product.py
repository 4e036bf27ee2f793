"""Products with weights of 8 and 4 bits, in Gluon: the part that linears and experts share.

A ring of tiles of codes lies in shared memory. The weight is the left operand of `mma.sync` (16
rows, 16 columns) and lanes are the right one, 8 at a time: few lanes cost few instructions. Codes
become halves in registers, exactly; a group's scale multiplies the sums of its columns, a row's
scale the whole sum.

Warps share a tile's rows, and where these are fewer, its columns: the columns of a tile are cut
into STREAMS, whose sums are added up in order at the end. So 4 warps of one program may read 16
rows, and a small weight has many programs.

Within a stream one `mma.sync` after the other adds up a lane's output over the columns in order,
for any number of lanes; no part of it depends on other lanes.

Letters: L lanes of a program, K input features, R blocks of 16 rows and B outputs of a program.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphengine.kernels.linear.linear_gluon_epilogue import exchange_layout, row_layout
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS
from graphengine.kernels.linear.packed_gluon_codes import halves_of, scale_floats, without_zeros

_BLOCK = gl.constexpr(BLOCK_HALFWORDS)


@gluon.constexpr_function
def _code_layout(streams, warps):
    """Of [streams, blocks of rows, halfwords]: 16 bytes a thread, a block a warp at a time."""
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [streams, warps // streams, 1], [2, 1, 0])


@gluon.constexpr_function
def input_layout(columns, streams, warps):
    """Of [streams, lanes, columns]: 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout(
        [1, 1, 8], [1, 32 // across, across], [streams, warps // streams, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def shared_inputs_layout(lanes):
    """A load's threads have 32 bytes of each of 8 lanes; of every 4 lanes none share a bank."""
    return gl.SwizzledSharedLayout(16, 1, 4 if lanes > 1 else 1, [2, 1, 0])


@gluon.constexpr_function
def product_layout(streams, warps):
    """Of sums [streams, rows, L]."""
    return gl.NVMMADistributedLayout([2, 0], [streams, warps // streams, 1], [1, 16, 8])


@gluon.constexpr_function
def _group_layout(size, warps):
    """Of [groups, blocks of rows, 16]: up to 16 bytes a thread."""
    piece = 16 // size
    return gl.BlockedLayout([1, 1, piece], [2 * piece, 1, 16 // piece], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _stream_sum_layout(outputs, warps, streams):
    """`row_layout` of [streams, L, B]: a thread has an output's sums of all streams."""
    across = min(outputs // 4, 32)
    return gl.BlockedLayout([streams, 1, 4], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _stream_exchange_layout(outputs):
    of_rows = exchange_layout(outputs)
    return gl.SwizzledSharedLayout(4, of_rows.per_phase, of_rows.max_phase, [2, 1, 0])


@gluon.constexpr_function
def _piece_columns(group, stream):
    """Columns that are multiplied at a time: of one group."""
    return min(group, stream) if group else stream


@gluon.jit
def new_ring(
    STAGES: gl.constexpr,
    STREAMS: gl.constexpr,
    R: gl.constexpr,
    STREAM: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Shared memory for the codes of STAGES tiles."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shape: gl.constexpr = [STAGES, STREAMS, R, STREAM // COLUMNS * _BLOCK]
    return gl.allocate_shared_memory(gl.int16, shape, plain)


@gluon.jit
def code_places(
    codes_ptr,
    first_row,
    rows: gl.constexpr,
    first_column,
    columns: gl.constexpr,
    STREAMS: gl.constexpr,
    R: gl.constexpr,
    STREAM: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Where the codes of a program's first tile are, and in which blocks of columns.

    Rows and columns count in blocks, `rows` by `columns` in all. Past the last block of rows it
    repeats, and these rows are never stored.
    """
    coded: gl.constexpr = _code_layout(STREAMS, WARPS)
    HALFWORDS: gl.constexpr = STREAM // COLUMNS * _BLOCK
    stream = gl.arange(0, STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, coded)))
    block = first_row + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, coded)))
    at = gl.arange(0, HALFWORDS, gl.SliceLayout(0, gl.SliceLayout(1, coded)))
    block = gl.minimum(block, rows - 1).to(gl.int64) * (columns * _BLOCK)
    column = stream[:, None, None] * (STREAM // COLUMNS) + (at // _BLOCK)[None, None, :]
    column += first_column
    first = first_column * _BLOCK + stream * HALFWORDS
    ptrs = codes_ptr + (block[None, :, None] + first[:, None, None] + at[None, None, :])
    return ptrs, column


@gluon.jit
def ask_codes(
    ring,
    places,
    step,
    columns,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Ask for the codes of tile `step`, whose first one's `places` are given.

    Of blocks of columns from `columns` on they become 0; EVEN_K says that there are none.
    """
    code_ptrs, column = places
    ptrs = code_ptrs + step * (BLOCK_K // COLUMNS * _BLOCK)
    if EVEN_K:
        async_copy.async_copy_global_to_shared(ring, ptrs)
    else:
        inside = column + step * (BLOCK_K // COLUMNS) < columns
        async_copy.async_copy_global_to_shared(ring, ptrs, inside)


@gluon.jit
def ask_scales(
    scales_ptr,
    zeros_ptr,
    first_row,
    rows: gl.constexpr,
    first_column,
    groups,
    K: gl.constexpr,
    TILES: gl.constexpr,
    STREAMS: gl.constexpr,
    R: gl.constexpr,
    STREAM: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Ask for the scales and zeros of all of a program's groups: [pieces, streams, rows] each.

    Rows count in blocks, as in `code_places`. From `groups` on they become 0.
    """
    PIECE: gl.constexpr = _piece_columns(GROUP, STREAM)
    PIECES: gl.constexpr = triton.next_power_of_2(TILES * (STREAM // PIECE))
    shape: gl.constexpr = [PIECES, STREAMS, R]
    at = (first_row, rows, first_column, groups)
    scales = _ask_groups(scales_ptr, at, shape, K, GROUP, PIECE, STREAM, WARPS)
    zeros = scales
    if ZEROS:
        zeros = _ask_groups(zeros_ptr, at, shape, K, GROUP, PIECE, STREAM, WARPS)
    return scales, zeros


@gluon.jit
def _ask_groups(
    of_groups,
    at,
    shape: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
    STREAM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Ask for the scales or zeros of all pieces of a program's columns, in the order of their use:
    [pieces, streams, rows].
    """
    first_block, blocks, first_column, groups = at
    USES: gl.constexpr = shape[0]
    STREAMS: gl.constexpr = shape[1]
    R: gl.constexpr = shape[2]
    dtype: gl.constexpr = of_groups.dtype.element_ty
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    PIECES: gl.constexpr = STREAM // PIECE
    layout: gl.constexpr = _group_layout(dtype.primitive_bitwidth // 8, WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring = gl.allocate_shared_memory(dtype, [USES * STREAMS, R, 16], plain)
    use = gl.arange(0, USES * STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    step = use // STREAMS
    column = step // PIECES * (STREAM * STREAMS) + use % STREAMS * STREAM + step % PIECES * PIECE
    group = (first_column + column) // GROUP
    block = first_block + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    block = gl.minimum(block, blocks - 1).to(gl.int64) * (GROUPS * 16)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    ptrs = of_groups + block[None, :, None] + group[:, None, None] * 16 + row[None, None, :]
    async_copy.async_copy_global_to_shared(ring, ptrs, (group < groups)[:, None, None])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring._reinterpret(dtype, [USES, STREAMS, R * 16], rows)


@gluon.jit
def load_row_scales(row_scales_ptr, output, BLOCKS_M: gl.constexpr, SWIGLU: gl.constexpr):
    """The factors of outputs [B] and of their ups."""
    scale = gl.full_like(output, 1, dtype=gl.float32)
    up_scale = scale
    if row_scales_ptr is not None:
        row = output // 8 * 16 + output % 8 if SWIGLU else output
        inside = row < BLOCKS_M * 16
        scale = gl.load(row_scales_ptr + row, mask=inside, other=0.0)
        if SWIGLU:
            up_scale = gl.load(row_scales_ptr + row + 8, mask=inside, other=0.0)
    return scale, up_scale


@gluon.jit
def inputs_inside(x_inside, k, K: gl.constexpr, EVEN_K: gl.constexpr):
    """Where there is an input: in lanes that exist, and not past K."""
    if EVEN_K:
        inside = x_inside & (k >= 0)
    else:
        inside = x_inside & (k < K)
    return inside


@gluon.jit
def multiply_tile(
    codes,
    inputs,
    scales,
    zeros,
    tile,
    y,
    x_ptr,
    CODE: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """y [streams, rows, L] + codes [streams, R, halfwords] @ inputs [streams, lanes, columns]^T

    `tile` says where its scales are among all.
    """
    STREAM: gl.constexpr = inputs.shape[2]
    PIECE: gl.constexpr = _piece_columns(GROUP, STREAM)
    # Whole blocks are loaded.
    LOADED: gl.constexpr = max(PIECE, COLUMNS)
    WORDS: gl.constexpr = LOADED // COLUMNS * _BLOCK
    PIECES: gl.constexpr = LOADED // PIECE
    coded: gl.constexpr = _code_layout(codes.shape[0], WARPS)
    inputs = inputs.permute((0, 2, 1))
    for loaded in gl.static_range(STREAM // LOADED):
        words = codes.slice(loaded * WORDS, WORDS, 2).load(coded)
        pieces = halves_of(words, x_ptr, CODE, GROUP, ZEROS)
        for index in gl.static_range(PIECES):
            part_x = inputs.slice((loaded * PIECES + index) * PIECE, PIECE, 1)
            if GROUP > 0:
                use = tile * (STREAM // PIECE) + loaded * PIECES + index
                of_group = scales.index(use)
                of_zeros = zeros.index(use) if ZEROS else of_group
                y = _multiply_group(pieces[index], part_x, y, of_group, of_zeros, CODE, ZEROS)
            else:
                y = _multiply(pieces[index], part_x, y)
    return y


@gluon.jit
def _multiply(halves, inputs, y):
    """y [streams, rows, L] + halves [streams, rows, columns] @ inputs [streams, columns, lanes]

    Of an only lane every column of the product is made.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, y.type.layout, 4)
    x = inputs.load(right)
    if inputs.shape[1] > 16:
        x = gl.convert_layout(_in_pairs(x), right, assert_trivial=True)
    if inputs.shape[2] < y.shape[2]:
        all: gl.constexpr = [inputs.shape[0], inputs.shape[1], y.shape[2]]
        x, _ = gl.broadcast(x, gl.zeros(all, x.dtype, right))
    return mma_v2(gl.convert_layout(halves, left, assert_trivial=True), x, y)


@gluon.jit
def _in_pairs(x):
    """Inputs [streams, columns, lanes] in the order of `halves_of`, 32 columns at a time.

    In registers it is the one of a load: the compiler would have an `mma.sync` multiply the first
    2 of a thread's 4 columns in two groups of 16; so it gets the 4 of one group.
    """
    S: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    N: gl.constexpr = x.shape[2]
    pairs = x.reshape([S, K // 32, 2, 4, 2, 2, N]).permute((0, 1, 4, 3, 2, 5, 6))
    return pairs.reshape([S, K, N])


@gluon.jit
def _multiply_group(
    halves,
    inputs,
    y,
    scales,
    zeros,
    CODE: gl.constexpr,
    ZEROS: gl.constexpr,
):
    """`_multiply` of columns that share the scales and zeros [streams, rows]."""
    left: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 4)
    halves = gl.convert_layout(halves, left, assert_trivial=True)
    if ZEROS:
        halves = without_zeros(halves, zeros.load(gl.SliceLayout(2, left)), CODE)
    part = _multiply(halves, inputs, gl.zeros_like(y))
    scale = scale_floats(scales.load(gl.SliceLayout(2, y.type.layout)))
    return gl.fma(part, gl.broadcast(scale[:, :, None], part)[0], y)


@gluon.jit
def sum_streams(y, B: gl.constexpr, WARPS: gl.constexpr, SWIGLU: gl.constexpr):
    """Sums [L, B] of all streams in order, and of a SwiGLU those of the ups."""
    if SWIGLU:
        S: gl.constexpr = y.shape[0]
        halves = y.reshape([S, B // 8, 2, 8, y.shape[2]]).permute((0, 1, 3, 4, 2))
        gate, up = gl.split(halves)
        shape: gl.constexpr = [S, B, y.shape[2]]
        gate, up = _exchange(gate.reshape(shape), B, WARPS), _exchange(up.reshape(shape), B, WARPS)
    else:
        gate = _exchange(y, B, WARPS)
        up = gate
    rows: gl.constexpr = row_layout(B, WARPS)
    layout: gl.constexpr = _stream_sum_layout(B, WARPS, y.shape[0])
    whole = gl.convert_layout(gl.sum(gate.load(layout), axis=0), rows, assert_trivial=True)
    whole_up = whole
    if SWIGLU:
        whole_up = gl.convert_layout(gl.sum(up.load(layout), axis=0), rows, assert_trivial=True)
    return whole, whole_up


@gluon.jit
def _exchange(y, B: gl.constexpr, WARPS: gl.constexpr):
    """[streams, B, L] in shared memory as [streams, L, B]."""
    shape: gl.constexpr = [y.shape[0], y.shape[2], B]
    return gl.allocate_shared_memory(
        gl.float32, shape, _stream_exchange_layout(B), y.permute((0, 2, 1))
    )
