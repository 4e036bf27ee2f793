"""The kernel of `packed_linear.py`: products with weights of 8 and 4 bits, in Gluon.

As in `linear_gluon.py` a ring of tiles of codes in shared memory is filled before the launch waits
for its inputs. Here the weight is the left operand of `mma.sync` (16 rows, 16 columns) and lanes
are the right one, 8 at a time: few lanes cost few instructions. Codes become halves in registers,
exactly; a group's scale multiplies the sums of its columns, a row's scale the whole sum.

Warps share a tile's rows, and where these are fewer, its columns: the columns of a tile are cut
into STREAMS, whose sums are added up in order at the end. So 4 warps of one program may read 16
rows, and a small weight has many programs.

Within a stream one `mma.sync` after the other adds up a lane's output over the columns in order,
for any number of lanes; no part of it depends on other lanes.

Letters: N lanes, L lanes of a program, K input features, M weight rows, B outputs of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.linear.linear_gluon_epilogue import (
    epilogue,
    exchange_layout,
    lanes_of,
    load_lanes,
    load_rows,
    ptrs_of_part,
    row_layout,
    sum_splits,
)
from graphengine.kernels.linear.packed import BLOCK_HALFWORDS
from graphengine.kernels.linear.packed_gluon_codes import halves_of, scale_floats, without_zeros

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_BLOCK = gl.constexpr(BLOCK_HALFWORDS)


class PackedArgs(NamedTuple):
    """The tensors of a `PackedWeight`."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None


@gluon.constexpr_function
def _code_layout(streams, warps):
    """Of [streams, blocks of rows, halfwords]: 16 bytes a thread, a block a warp at a time."""
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [streams, warps // streams, 1], [2, 1, 0])


@gluon.constexpr_function
def _input_layout(columns, streams, warps):
    """Of [streams, lanes, columns]: 16 bytes a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout(
        [1, 1, 8], [1, 32 // across, across], [streams, warps // streams, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def _shared_inputs_layout(lanes):
    """A load's threads have 32 bytes of each of 8 lanes; of every 4 lanes none share a bank."""
    return gl.SwizzledSharedLayout(16, 1, 4 if lanes > 1 else 1, [2, 1, 0])


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
    first_block, blocks, first_column = at
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
    async_copy.async_copy_global_to_shared(ring, ptrs, (group < GROUPS)[:, None, None])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring._reinterpret(dtype, [USES, STREAMS, R * 16], rows)


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "eps", "stop_ids", "ahead"])
def packed_kernel(
    x_ptr,
    squares_ptr,
    weight,
    bias_ptr,
    slot_ptr,
    out_ptr,
    residual,
    sampler,
    token_ids_ptr,
    partial_ptr,
    arrivals_ptr,
    lanes,
    x_pitch,
    out_stride,
    eps,
    stop_ids,
    ahead,
    M: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLITS: gl.constexpr,
    L: gl.constexpr,
    X_LANES: gl.constexpr,
    CODE: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    STREAMS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for L (8, 16 or 32) lanes, BLOCK_M weight rows, and a part of K.

    X_LANES are those in shared memory: L, or 1 that is the only one. COLUMNS are those of a block,
    GROUP those that share a scale (0: all, in `row_scales`). The pitch is a stride in units of 8
    elements. STAGES is what `stages` gives.
    """
    TILES: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    gl.static_assert(STAGES <= TILES and (STAGES > 1 or TILES == 1))
    OUTPUTS: gl.constexpr = M // 2 if SWIGLU else M
    B: gl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    STREAM: gl.constexpr = BLOCK_K // STREAMS
    # Columns that are multiplied at a time: of one group, and whole blocks of them are loaded.
    PIECE: gl.constexpr = min(GROUP, STREAM) if GROUP else STREAM
    LOADED: gl.constexpr = max(PIECE, COLUMNS)
    WORDS: gl.constexpr = LOADED // COLUMNS * _BLOCK
    PIECES: gl.constexpr = LOADED // PIECE
    BLOCKS_M: gl.constexpr = (OUTPUTS + 7) // 8 if SWIGLU else (OUTPUTS + 15) // 16
    BLOCKS_K: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    R: gl.constexpr = BLOCK_M // 16
    coded: gl.constexpr = _code_layout(STREAMS, WARPS)
    copied: gl.constexpr = _input_layout(STREAM, STREAMS, WARPS)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [2, 0], [STREAMS, WARPS // STREAMS, 1], [1, 16, 8]
    )
    rows: gl.constexpr = row_layout(B, WARPS)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    HALFWORDS: gl.constexpr = STREAM // COLUMNS * _BLOCK
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, STREAMS, R, HALFWORDS], plain)
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, STREAMS, X_LANES, STREAM], _shared_inputs_layout(X_LANES)
    )
    tile = gl.program_id(1)
    split = gl.program_id(2)

    # Blocks past the end repeat the last one, whose rows are never stored.
    stream = gl.arange(0, STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, coded)))
    block = tile * R + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, coded)))
    at = gl.arange(0, HALFWORDS, gl.SliceLayout(0, gl.SliceLayout(1, coded)))
    block = gl.minimum(block, BLOCKS_M - 1).to(gl.int64) * (BLOCKS_K * _BLOCK)
    column = stream[:, None, None] * (STREAM // COLUMNS) + (at // _BLOCK)[None, None, :]
    column += split * (TILES * (BLOCK_K // COLUMNS))
    first = split * (TILES * (BLOCK_K // COLUMNS) * _BLOCK) + stream * HALFWORDS
    code_ptrs = weight.codes + (block[None, :, None] + first[:, None, None] + at[None, None, :])
    for stage in gl.static_range(STAGES):
        _ask_codes(codes.index(stage), code_ptrs, column, stage, COLUMNS, BLOCK_K, K, EVEN_K)
        if stage == 0 and GROUP > 0:
            # With the first tile, which needs some of them.
            scales, zeros = _ask_scales(
                weight,
                tile * R,
                BLOCKS_M,
                split * (TILES * BLOCK_K),
                K,
                TILES,
                R,
                GROUP,
                PIECE,
                STREAM,
                STREAMS,
                ZEROS,
                WARPS,
            )
        # The last group is closed in the loop, which then has one for each of its tiles.
        if stage < STAGES - 1 or STAGES == 1:
            async_copy.commit_group()
    output = tile * B + gl.arange(0, B, gl.SliceLayout(0, rows))
    norm, bias, up_bias = load_rows(residual, bias_ptr, output, OUTPUTS, SWIGLU)
    row_scale, up_scale = _load_row_scales(weight, output, BLOCKS_M, SWIGLU)
    _wait_for_inputs(PDL, OVERLAP)

    # Padded lanes hold anything: a column of a product touches no other column.
    x_lane = gl.program_id(0) * L + gl.arange(
        0, X_LANES, gl.SliceLayout(0, gl.SliceLayout(2, copied))
    )
    x_stream = gl.arange(0, STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    k = gl.arange(0, STREAM, gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    k = split * (TILES * BLOCK_K) + x_stream[:, None, None] * STREAM + k[None, None, :]
    x_ptrs = x_ptr + (x_lane.to(gl.int64) * (x_pitch.to(gl.int64) * 8))[None, :, None] + k
    x_inside = (x_lane < lanes)[None, :, None]
    early_x = ()
    for stage in gl.static_range(STAGES):
        inside = _inside(x_inside, k + stage * BLOCK_K, K, EVEN_K)
        x = gl.load(x_ptrs + stage * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        early_x += (x,)  # type: ignore[assignment]
    lane = lanes_of(L, rows)
    # With splits only the last program needs them, along with the parts of the others.
    early = None
    if SPLITS == 1:
        early = load_lanes(
            lane, output, lanes, slot_ptr, squares_ptr, residual, GROUPS, OUTPUTS, L, B, WARPS
        )
    for stage in gl.static_range(STAGES):
        inputs.index(stage).store(early_x[stage])

    y = gl.zeros([STREAMS, BLOCK_M, L], gl.float32, product)
    for t in range(TILES):
        # Groups complete in order: those of the tiles up to this one have.
        async_copy.wait_group(max(STAGES - 2, 0))
        gl.thread_barrier()
        if TILES > STAGES:
            # The previous tile is no longer read.
            ahead = t + STAGES - 1
            if (t > 0) & (ahead < TILES):
                free = ahead % STAGES
                _ask_codes(codes.index(free), code_ptrs, column, ahead, COLUMNS, BLOCK_K, K, EVEN_K)
                inside = _inside(x_inside, k + ahead * BLOCK_K, K, EVEN_K)
                async_copy.async_copy_global_to_shared(
                    inputs.index(free), x_ptrs + ahead * BLOCK_K, inside
                )
        async_copy.commit_group()
        tile_codes = codes.index(t % STAGES)
        tile_inputs = inputs.index(t % STAGES).permute((0, 2, 1))
        for loaded in gl.static_range(STREAM // LOADED):
            words = tile_codes.slice(loaded * WORDS, WORDS, 2).load(coded)
            pieces = halves_of(words, x_ptr, CODE, GROUP, ZEROS)
            for index in gl.static_range(PIECES):
                part_x = tile_inputs.slice((loaded * PIECES + index) * PIECE, PIECE, 1)
                if GROUP > 0:
                    use = t * (STREAM // PIECE) + loaded * PIECES + index
                    of_group = scales.index(use)
                    of_zeros = zeros.index(use) if ZEROS else of_group
                    y = _multiply_group(pieces[index], part_x, y, of_group, of_zeros, CODE, ZEROS)
                else:
                    y = _multiply(pieces[index], part_x, y)

    whole, up = _sum_streams(y, B, WARPS, SWIGLU)
    if SPLITS == 1:
        epilogue(
            whole * row_scale[None, :],
            up * up_scale[None, :],
            norm,
            bias,
            up_bias,
            early,
            lane,
            output,
            tile,
            lanes,
            eps,
            bias_ptr,
            out_ptr,
            out_stride,
            residual,
            K,
            GROUPS,
            OUTPUTS,
            SWIGLU,
            sampler,
            token_ids_ptr,
            stop_ids,
            ahead,
        )
    else:
        part = gl.num_programs(1).to(gl.int64) * BLOCK_M * lanes
        part_ptrs = ptrs_of_part(partial_ptr, tile, L, B, BLOCK_M, rows)
        stored = (lane < lanes)[:, None]
        gl.store(part_ptrs + split * part, whole, mask=stored)
        if SWIGLU:
            gl.store(part_ptrs + B + split * part, up, mask=stored)
        arrival_ptr = arrivals_ptr + tile * gl.num_programs(0) + gl.program_id(0)
        gl.thread_barrier()
        if gl.atomic_add(arrival_ptr, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrival_ptr, 0)
            late = load_lanes(
                lane, output, lanes, slot_ptr, squares_ptr, residual, GROUPS, OUTPUTS, L, B, WARPS
            )
            whole = sum_splits(part_ptrs, lane, lanes, part, SPLITS, L, B, rows)
            if SWIGLU:
                up = sum_splits(part_ptrs + B, lane, lanes, part, SPLITS, L, B, rows)
            epilogue(
                whole * row_scale[None, :],
                up * up_scale[None, :],
                norm,
                bias,
                up_bias,
                late,
                lane,
                output,
                tile,
                lanes,
                eps,
                bias_ptr,
                out_ptr,
                out_stride,
                residual,
                K,
                GROUPS,
                OUTPUTS,
                SWIGLU,
                sampler,
                token_ids_ptr,
                stop_ids,
                ahead,
            )


@gluon.jit
def _ask_codes(
    ring,
    code_ptrs,
    column,
    step,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    K: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Ask for the codes of tile `step`; those past K become 0."""
    ptrs = code_ptrs + step * (BLOCK_K // COLUMNS * _BLOCK)
    if EVEN_K:
        async_copy.async_copy_global_to_shared(ring, ptrs)
    else:
        inside = column + step * (BLOCK_K // COLUMNS) < (K + COLUMNS - 1) // COLUMNS
        async_copy.async_copy_global_to_shared(ring, ptrs, inside)


@gluon.jit
def _ask_scales(
    weight,
    first_block,
    blocks,
    first_column,
    K: gl.constexpr,
    TILES: gl.constexpr,
    R: gl.constexpr,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
    STREAM: gl.constexpr,
    STREAMS: gl.constexpr,
    ZEROS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Ask for the scales and zeros of all of a program's groups: [pieces, streams, rows] each."""
    PIECES: gl.constexpr = triton.next_power_of_2(TILES * (STREAM // PIECE))
    shape: gl.constexpr = [PIECES, STREAMS, R]
    at = (first_block, blocks, first_column)
    scales = _ask_groups(weight.scales, at, shape, K, GROUP, PIECE, STREAM, WARPS)
    zeros = scales
    if ZEROS:
        zeros = _ask_groups(weight.zeros, at, shape, K, GROUP, PIECE, STREAM, WARPS)
    return scales, zeros


@gluon.jit
def _load_row_scales(weight, output, BLOCKS_M: gl.constexpr, SWIGLU: gl.constexpr):
    """The factors of outputs [B] and of their ups."""
    scale = gl.full_like(output, 1, dtype=gl.float32)
    up_scale = scale
    if weight.row_scales is not None:
        row = output // 8 * 16 + output % 8 if SWIGLU else output
        inside = row < BLOCKS_M * 16
        scale = gl.load(weight.row_scales + row, mask=inside, other=0.0)
        if SWIGLU:
            up_scale = gl.load(weight.row_scales + row + 8, mask=inside, other=0.0)
    return scale, up_scale


@gluon.jit
def _inside(x_inside, k, K: gl.constexpr, EVEN_K: gl.constexpr):
    """Where there is an input: in lanes that exist, and not past K."""
    if EVEN_K:
        inside = x_inside & (k >= 0)
    else:
        inside = x_inside & (k < K)
    return inside


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
def _sum_streams(y, B: gl.constexpr, WARPS: gl.constexpr, SWIGLU: gl.constexpr):
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
