"""Products with weights of 8 and 4 bits, in Gluon: the part that linears and experts share.

A ring of tiles of codes lies in shared memory (`packed_gluon_ring.py`). The weight is the left
operand of `mma.sync` (16 rows, 16 columns) and lanes are the right one, 8 at a time: few lanes cost
few instructions. Codes become halves in registers, exactly; a group's scale multiplies the sums of
its columns, a row's scale the whole sum. A group's minimum multiplies the sum of its inputs, which
a product with ones gives to each row.

Warps divide a tile's rows, and where there are more warps than blocks of rows, its columns too: the
columns of a tile are cut into streams, whose sums are added up in order at the end. So 4 warps of
one program may read 16 rows, and a small weight has many programs.

Within a stream one `mma.sync` after the other adds up a lane's output over the columns in order,
for any number of lanes; no part of it depends on other lanes.

Letters as in `packed_cut.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.linear.gluon.linear_gluon_epilogue import exchange_layout, row_layout
from graphengine.kernels.linear.gluon.packed_gluon_codes import (
    halves_of,
    scale_floats,
    without_zeros,
)
from graphengine.kernels.linear.gluon.packed_gluon_ring import ask_codes, ask_inputs, code_layout
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS

_BLOCK = gl.constexpr(BLOCK_HALFWORDS)


@gluon.constexpr_function
def _product_layout(streams, warps):
    """Layout of sums [streams, rows, L]."""
    return gl.NVMMADistributedLayout([2, 0], [streams, warps // streams, 1], [1, 16, 8])


@gluon.constexpr_function
def _stream_sum_layout(outputs, warps, streams):
    """`row_layout` of [streams, L, B]: a thread has an output's sums of all streams."""
    across = min(outputs // 4, 32)
    return gl.BlockedLayout([streams, 1, 4], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _stream_exchange_layout(outputs):
    of_rows = exchange_layout(outputs)
    return gl.SwizzledSharedLayout(4, of_rows.per_phase, of_rows.max_phase, [2, 1, 0])


@gluon.jit
def load_row_scales(row_scales_ptr, output, cut):
    """The factors of outputs [B] and of their ups."""
    scale = gl.full_like(output, 1, dtype=gl.float32)
    up_scale = scale
    if row_scales_ptr is not None:
        row = output // 8 * 16 + output % 8 if cut.swiglu else output
        inside = row < cut.row_blocks * 16
        scale = gl.load(row_scales_ptr + row, mask=inside, other=0.0)
        if cut.swiglu:
            up_scale = gl.load(row_scales_ptr + row + 8, mask=inside, other=0.0)
    return scale, up_scale


@gluon.jit
def multiply_tiles(ring, places, scales, cut):
    """Sums [streams, rows, L] over all of a program's tiles; the ring already has the first ones.

    `places` are those of codes and of inputs; `scales` is what `fill_ring` returns.
    """
    codes, inputs = ring
    code_places, input_places = places
    rows: gl.constexpr = 16 * cut.R
    y = gl.zeros([cut.streams, rows, cut.L], gl.float32, _product_layout(cut.streams, cut.warps))
    for t in range(cut.tiles):
        # Groups complete in order: those of the tiles up to this one are complete.
        async_copy.wait_group(max(cut.stages - 2, 0))
        sync_threads()
        if cut.tiles > cut.stages:
            # The previous tile is no longer read.
            ahead = t + cut.stages - 1
            if (t > 0) & (ahead < cut.tiles):
                ask_codes(codes, code_places, ahead, cut)
                ask_inputs(inputs, input_places, ahead, cut)
        async_copy.commit_group()
        stage = t % cut.stages
        y = _multiply_tile(codes.index(stage), inputs.index(stage), scales, t, y, cut)
    return y


@gluon.jit
def _multiply_tile(codes, inputs, scales, tile, y, cut):
    """y [streams, rows, L] + codes [streams, R, halfwords] @ inputs [streams, lanes, columns]^T

    `tile` says which of all scales are the tile's.
    """
    # Whole blocks are loaded.
    LOADED: gl.constexpr = max(cut.piece, cut.block_columns)
    WORDS: gl.constexpr = LOADED // cut.block_columns * _BLOCK
    PIECES: gl.constexpr = LOADED // cut.piece
    coded: gl.constexpr = code_layout(cut.streams, cut.warps)
    inputs = inputs.permute((0, 2, 1))
    for loaded in gl.static_range(cut.stream // LOADED):
        words = codes.slice(loaded * WORDS, WORDS, 2).load(coded)
        pieces = halves_of(words, inputs, cut)
        for index in gl.static_range(PIECES):
            part_x = inputs.slice((loaded * PIECES + index) * cut.piece, cut.piece, 1)
            if cut.group > 0:
                use = tile * (cut.stream // cut.piece) + loaded * PIECES + index
                of_factors = use
                if cut.factor:
                    of_factors = use // (cut.factor_piece // cut.piece)
                y = _multiply_group(pieces[index], part_x, y, scales, use, of_factors, cut)
            else:
                y = _multiply(pieces[index], part_x, y)
    return y


@gluon.jit
def _multiply(halves, inputs, y):
    """y [streams, rows, L] + halves [streams, rows, columns] @ inputs [streams, columns, lanes]"""
    left: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 4)
    x = _load_right(inputs, y)
    return mma_v2(gl.convert_layout(halves, left, assert_trivial=True), x, y)


@gluon.jit
def _load_right(inputs, y):
    """Load inputs [streams, columns, lanes] as the right operand of a product like y.

    A single lane is copied to every column of the product.
    """
    right: gl.constexpr = gl.DotOperandLayout(1, y.type.layout, 4)
    x = inputs.load(right)
    if inputs.shape[1] > 16:
        x = gl.convert_layout(_in_pairs(x), right, assert_trivial=True)
    if inputs.shape[2] < y.shape[2]:
        all: gl.constexpr = [inputs.shape[0], inputs.shape[1], y.shape[2]]
        x, _ = gl.broadcast(x, gl.zeros(all, x.dtype, right))
    return x


@gluon.jit
def _in_pairs(x):
    """Inputs [streams, columns, lanes] in the order of `halves_of`, 32 columns at a time.

    The registers stay as they were loaded. Without this the compiler would have an `mma.sync`
    multiply the first 2 of a thread's 4 columns in two groups of 16; now it gets the 4 of one
    group.
    """
    S: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    N: gl.constexpr = x.shape[2]
    pairs = x.reshape([S, K // 32, 2, 4, 2, 2, N]).permute((0, 1, 4, 3, 2, 5, 6))
    return pairs.reshape([S, K, N])


@gluon.jit
def _multiply_group(halves, inputs, y, scales, use, of_factors, cut):
    """`_multiply` for columns of one group.

    Its scales, as from `fill_ring`, are at `use`, the factors on them at `of_factors`.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, y.type.layout, 4)
    of_groups, zeros, minimums, factors, more_factors = scales
    halves = gl.convert_layout(halves, left, assert_trivial=True)
    if cut.zeros:
        of_zeros = zeros.index(use)
        halves = without_zeros(halves, of_zeros.load(gl.SliceLayout(2, left)), cut.code)
    x = _load_right(inputs, y)
    part = mma_v2(halves, x, gl.zeros_like(y))
    scale = _load_floats(of_groups, use, factors, of_factors, y, cut)
    y = gl.fma(part, gl.broadcast(scale[:, :, None], part)[0], y)
    if cut.minimums:
        ones = gl.full(halves.shape, 1, halves.dtype, left)
        sums = mma_v2(ones, x, gl.zeros_like(y))
        minimum = _load_floats(minimums, use, more_factors, of_factors, y, cut)
        y = gl.fma(sums, -gl.broadcast(minimum[:, :, None], sums)[0], y)
    return y


@gluon.jit
def _load_floats(of_groups, use, factors, of_factors, y, cut):
    """The values [streams, rows] of a group, times their factors: float32."""
    rows: gl.constexpr = gl.SliceLayout(2, y.type.layout)
    floats = scale_floats(of_groups.index(use).load(rows))
    if cut.factor:
        floats *= factors.index(of_factors).load(rows).to(gl.float32)
    return floats


@gluon.jit
def sum_streams(y, cut):
    """Add up the sums [L, B] of all streams in order, and in a SwiGLU those of the ups."""
    if cut.swiglu:
        S: gl.constexpr = cut.streams
        halves = y.reshape([S, cut.B // 8, 2, 8, cut.L]).permute((0, 1, 3, 4, 2))
        gate, up = gl.split(halves)
        shape: gl.constexpr = [S, cut.B, cut.L]
        gate, up = _exchange(gate.reshape(shape), cut), _exchange(up.reshape(shape), cut)
    else:
        gate = _exchange(y, cut)
        up = gate
    rows: gl.constexpr = row_layout(cut.B, cut.warps)
    layout: gl.constexpr = _stream_sum_layout(cut.B, cut.warps, cut.streams)
    whole = gl.convert_layout(gl.sum(gate.load(layout), axis=0), rows, assert_trivial=True)
    whole_up = whole
    if cut.swiglu:
        whole_up = gl.convert_layout(gl.sum(up.load(layout), axis=0), rows, assert_trivial=True)
    return whole, whole_up


@gluon.jit
def _exchange(y, cut):
    """Put [streams, B, L] into shared memory as [streams, L, B]."""
    shape: gl.constexpr = [cut.streams, cut.L, cut.B]
    return gl.allocate_shared_memory(
        gl.float32, shape, _stream_exchange_layout(cut.B), y.permute((0, 2, 1))
    )
