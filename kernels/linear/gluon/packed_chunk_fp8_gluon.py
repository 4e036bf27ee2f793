"""The kernel of `packed_chunk_fp8.py`: products of e4m3 lanes with e4m3 weights, on Hopper.

As in `packed_chunk_gluon.py` the weight is the left operand of `wgmma` and comes from registers,
lanes are the right one and come from shared memory, and a separate warp has the TMA load both some
steps ahead, across tiles. Codes are multiplied as they are.

The tensor cores add up products of 8-bit floats with about 14 bits of mantissa, and sums of many
columns would lose some of these. So the tensor cores sum 128 columns at a time, and those sums are
added up in float32 registers: the idea of DeepSeek-V3's products (2024), where the scales of blocks
are applied, too.

Letters: N lanes, L lanes of a tile, K input features, M weight rows, S steps in shared memory.
"""

from __future__ import annotations

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
from graphengine.kernels.linear.gluon.packed_chunk_epilogue import store_outputs
from graphengine.kernels.linear.gluon.packed_gluon_codes import scale_floats

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)

STEP = 128
"""Columns that are multiplied at a time, and whose sums are scaled and added up in float32."""

LINES = 16
"""Lines of 128 bytes that hold the codes of one step and one block of rows."""

_STEP = gl.constexpr(STEP)
_LINES = gl.constexpr(LINES)
# Registers of a thread: in the warp groups, and in the warp that loads tiles.
_REGISTERS = gl.constexpr((240, 24))


@gluon.constexpr_function
def _word_layout():
    """Layout of words [4, 16, 32] of 64 rows: a thread has 4 of each block of 32 columns."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 4, 0], [0, 8, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, _LINES.value, 32],
    )


@gluon.jit(do_not_specialize=["lanes"])
def packed_chunk_fp8_kernel(
    inputs,
    codes,
    lane_scales,
    factors,
    out_ptr,
    lanes,
    out_stride,
    M: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLIT_ROWS: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles alternately, lanes first, so that running programs share weights.

    GROUP columns share a scale (0: all, in `row_scales`); it is a multiple of a step's columns.
    SWIGLU makes one output of gate and up; with SPLIT_ROWS these lie apart. A tile has the lanes of
    PARTS boxes of `inputs`, which a warp group multiplies one after the other.
    """
    L: gl.constexpr = inputs.block_shape[0]
    R: gl.constexpr = codes.block_shape[0]
    ROWS: gl.constexpr = 32 if SWIGLU or SPLIT_ROWS else 64
    gl.static_assert(R == 4 * WARP_GROUPS and STAGES > 1)
    gl.static_assert(inputs.block_shape[1] == _STEP and codes.block_shape[1] == _LINES)
    gl.static_assert(GROUP % _STEP == 0)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, ROWS], dtype)
    x = gl.allocate_shared_memory(inputs.dtype, [STAGES * PARTS, L, _STEP], inputs.layout)
    words = gl.allocate_shared_memory(codes.dtype, [STAGES, R, _LINES, 32], codes.layout)
    y = gl.allocate_shared_memory(dtype, [WARP_GROUPS, L, ROWS], y_layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(there.index(index), count=1)
        mbarrier.init(free.index(index), count=WARP_GROUPS)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    BLOCKS: gl.constexpr = (M // 2 + 7) // 8 if ROWS == 32 else (M + 15) // 16
    lane_tiles = (lanes + L * PARTS - 1) // (L * PARTS)
    tiles = ((BLOCKS + R - 1) // R * lane_tiles, lane_tiles)
    rings = (x, words, there, free)
    rows = (rings, y, tiles, lane_scales, factors, out_ptr, lanes, out_stride)
    brought = (rings, tiles, inputs, codes)
    outputs: gl.constexpr = (M, SWIGLU, ROWS, BLOCKS)
    # This is one warp group. The other warps begin after a barrier, which follows the wait.
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), K, GROUP, PARTS, outputs)),
                (_multiply_rows, (rows, gl.constexpr(1), K, GROUP, PARTS, outputs)),
                (_bring_tiles, (brought, K, PARTS)),
            ],
            [4, 1],
            _REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), K, GROUP, PARTS, outputs)),
                (_bring_tiles, (brought, K, PARTS)),
            ],
            [1],
            [_REGISTERS[1]],
        )


@gluon.jit
def _bring_tiles(brought, K: gl.constexpr, PARTS: gl.constexpr):
    """In one warp, load the codes and inputs of each step as soon as there is room for them."""
    rings, tiles, inputs, codes = brought
    x, words, there, free = rings
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = inputs.block_shape[0]
    R: gl.constexpr = codes.block_shape[0]
    STAGES: gl.constexpr = there.shape[0]
    STEPS: gl.constexpr = (K + _STEP - 1) // _STEP
    BYTES: gl.constexpr = L * PARTS * _STEP + R * _LINES * 128
    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        lane = tile % lane_tiles * (L * PARTS)
        block = tile // lane_tiles * R
        for step in range(STEPS):
            stage = count % STAGES
            # The first use of a stage does not wait: the phase before a barrier's first counts as
            # complete.
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            barrier = there.index(stage)
            mbarrier.expect(barrier, BYTES)
            line = step * _LINES
            load_tile(codes, [block, line, 0], barrier, words.index(stage))
            for part in gl.static_range(PARTS):
                at = [lane + part * L, step * _STEP]
                own = x.index(stage * PARTS + part)
                load_tile(inputs, at, barrier, own)
            count += 1


@gluon.jit
def _multiply_rows(
    rows,
    WHICH: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    outputs: gl.constexpr,
):
    """In one warp group, multiply and store its 64 rows of each of the program's tiles."""
    rings, y, tiles, lane_scales, factors, out_ptr, lanes, out_stride = rows
    x, words, there, free = rings
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = x.shape[1]
    R: gl.constexpr = words.shape[1]
    STAGES: gl.constexpr = there.shape[0]
    STEPS: gl.constexpr = (K + _STEP - 1) // _STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 32])

    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        first_block = tile // lane_tiles * R + WHICH * 4
        sums = gl.zeros([64, L], gl.float32, product)
        totals = ()
        for _ in gl.static_range(PARTS):
            totals += (sums,)  # type: ignore[assignment]
        scale = _load_scales(factors, first_block, 0, K, GROUP, outputs, product)
        mbarrier.wait(there.index(count % STAGES), count // STAGES & 1)
        codes = _load_words(words, count % STAGES, WHICH)
        for step in range(STEPS):
            stage = count % STAGES
            left = _left_operand(codes, product)
            next_scale = _load_scales(factors, first_block, step + 1, K, GROUP, outputs, product)
            added = ()
            for part in gl.static_range(PARTS):
                inputs = x.index(stage * PARTS + part).permute((1, 0))
                begun = warpgroup_mma(left, inputs, sums, use_acc=False, is_async=True)
                if part == PARTS - 1:
                    count += 1
                    after, phase = count % STAGES, count // STAGES & 1
                    mbarrier.wait(there.index(after), phase, pred=step + 1 < STEPS)
                sums = warpgroup_mma_wait(num_outstanding=0, deps=(begun,))
                if part == PARTS - 1:
                    # After the last step of a tile the codes loaded here are not used.
                    codes = _load_words(words, count % STAGES, WHICH)
                    sync_threads()
                    mbarrier.arrive(free.index(stage), count=1)
                added += (_add(totals[part], sums, scale),)  # type: ignore[assignment]
            totals = added
            scale = next_scale
        for part in gl.static_range(PARTS):
            first_lane = tile % lane_tiles * (L * PARTS) + part * L
            lane = first_lane + gl.arange(0, L, gl.SliceLayout(0, product))
            # Every lane of a tile has a scale in memory, even past the last lane.
            total = totals[part] * gl.load(lane_scales + lane)[None, :]
            place = (lanes, first_lane, first_block)
            store_outputs(total, y.index(WHICH), factors, out_ptr, out_stride, place, outputs)


@gluon.jit
def _load_words(words, stage, WHICH: gl.constexpr):
    """Load the codes of 64 rows for a step, 4 in a word, which is how a loop can carry them."""
    return words.index(stage).slice(WHICH * 4, 4).load(_word_layout())


@gluon.jit
def _left_operand(words, product: gl.constexpr):
    """View words as codes [64, columns], in the same registers.

    A thread's 4 words are of two rows and two groups of 16 columns; each word has 4 columns.
    """
    e4m3 = gl.float8e4nv
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        "mov.b32 $0, $4;\nmov.b32 $1, $5;\nmov.b32 $2, $6;\nmov.b32 $3, $7;",
        "=r,=r,=r,=r,r,r,r,r",
        [words],
        dtype=(e4m3, e4m3, e4m3, e4m3),
        is_pure=True,
        pack=4,
    )
    codes = gl.join(gl.join(w0, w1), gl.join(w2, w3))
    # Block of rows, 32 columns, row of 8, thread, byte, 16 columns, upper or lower row.
    codes = codes.reshape([4, 4, 8, 4, 4, 2, 2]).permute((0, 6, 2, 1, 5, 3, 4))
    left: gl.constexpr = gl.DotOperandLayout(0, product, 4)
    return gl.convert_layout(codes.reshape([64, _STEP]), left, assert_trivial=True)


@gluon.jit
def _load_scales(
    factors,
    first_block,
    step,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    outputs: gl.constexpr,
    product: gl.constexpr,
):
    """Load the scales [64] of the rows for a step, if groups of columns have any."""
    found = ()
    if GROUP > 0:
        GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
        BLOCKS: gl.constexpr = outputs[3]
        row = gl.arange(0, 64, gl.SliceLayout(1, product))
        # Past the end the last ones repeat, for columns or rows that do not exist.
        block = gl.minimum(first_block + row // 16, BLOCKS - 1)
        group = gl.minimum(step * _STEP // GROUP, GROUPS - 1)
        found = (gl.load(factors.scales + (block * GROUPS + group) * 16 + row % 16),)  # type: ignore[assignment]
    return found


@gluon.jit
def _add(total, sums, scale):
    if len(scale) > 0:
        factor = gl.broadcast(scale_floats(scale[0])[:, None], sums)[0]
        total = gl.fma(sums, factor, total)
    else:
        total = total + sums
    return total
