"""The kernel of `packed_chunk.py`: products of many lanes with weights of 8 and 4 bits, on Hopper.

The weight is the left operand of `wgmma` and comes from registers, where codes become halves; lanes
are the right one and come from shared memory. A separate warp has the tensor memory accelerator
(TMA) load codes and inputs some steps ahead, across tiles as well; one or two warp groups have 64
rows each. While `wgmma` multiplies 64 columns, a warp group converts the next 64. Source:
Marlin (E. Frantar et al., 2024) and CUTLASS's mixed-input products.

Letters: N lanes, L lanes of a tile, K input features, M weight rows, S steps in shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
from graphengine.kernels.linear.gluon.packed_chunk_codes import (
    UNIT,
    half_layout,
    ordered_halves,
    scaled_halves,
)
from graphengine.kernels.linear.gluon.packed_chunk_epilogue import store_outputs
from graphengine.kernels.linear.gluon.packed_gluon_codes import scale_floats, without_zeros

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)

_UNIT = gl.constexpr(UNIT)
# Registers of a thread: in the warp groups, and in the warp that loads tiles.
REGISTERS = gl.constexpr((240, 24))


class Factors(NamedTuple):
    """The factors on a product's sums or codes; tensors as in `PackedWeight`.

    delta  dense [N, M], added to the products of each lane
    """

    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None
    bias: torch.Tensor | None
    delta: torch.Tensor | None = None


@gluon.constexpr_function
def _product_layout(lanes):
    """Layout of sums [64, L]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, lanes, 16])


@gluon.jit(do_not_specialize=["lanes"])
def packed_chunk_kernel(
    inputs,
    codes,
    factors,
    out_ptr,
    lanes,
    out_stride,
    M: gl.constexpr,
    K: gl.constexpr,
    CODE: gl.constexpr,
    GROUP: gl.constexpr,
    FOLD: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLIT_ROWS: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs take tiles alternately, lanes first, so that running programs share weights.

    GROUP columns share a scale (0: all, in `row_scales`), which multiplies the halves with FOLD and
    the sums without. SWIGLU makes one output of gate and up; with SPLIT_ROWS these lie apart. Each
    warp group has 64 rows, and a step has DEPTH times 64 columns.
    """
    L: gl.constexpr = inputs.block_shape[0]
    PIECES: gl.constexpr = _UNIT // inputs.block_shape[1]
    R: gl.constexpr = codes.block_shape[0]
    ROWS: gl.constexpr = 32 if SWIGLU or SPLIT_ROWS else 64
    gl.static_assert(R == 4 * WARP_GROUPS and STAGES > 2)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, ROWS], inputs.dtype)
    rings = new_rings(inputs, codes, WARP_GROUPS, DEPTH, STAGES)
    y = gl.allocate_shared_memory(inputs.dtype, [WARP_GROUPS, L, ROWS], y_layout)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    BLOCKS: gl.constexpr = (M // 2 + 7) // 8 if ROWS == 32 else (M + 15) // 16
    lane_tiles = (lanes + L - 1) // L
    tiles = ((BLOCKS + R - 1) // R * lane_tiles, lane_tiles)
    rows = (rings, y, tiles, factors, out_ptr, lanes, out_stride)
    brought = (rings, tiles, inputs, codes)
    # Sums of a step that are scaled before they are added; each is of PART units, or of a piece of
    # one unit.
    SUMS: gl.constexpr = DEPTH // PART * PIECES if GROUP > 0 and not FOLD else 0
    form: gl.constexpr = (M, K, CODE, GROUP, FOLD, SWIGLU, ROWS, BLOCKS, DEPTH, PART, SUMS)
    # This is one warp group. The other warps begin after a barrier, which follows the wait.
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form)),
                (_multiply_rows, (rows, gl.constexpr(1), form)),
                (_bring_tiles, (brought, K, DEPTH)),
            ],
            [4, 1],
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form)),
                (_bring_tiles, (brought, K, DEPTH)),
            ],
            [1],
            [REGISTERS[1]],
        )


@gluon.jit
def new_rings(inputs, codes, WARP_GROUPS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for the inputs and the codes of STAGES steps, and the barriers at which they
    are there, and free again.
    """
    L: gl.constexpr = inputs.block_shape[0]
    WIDTH: gl.constexpr = inputs.block_shape[1]
    PIECES: gl.constexpr = _UNIT // WIDTH
    R: gl.constexpr = codes.block_shape[0]
    LINES: gl.constexpr = codes.block_shape[1]
    x = gl.allocate_shared_memory(inputs.dtype, [STAGES * DEPTH * PIECES, L, WIDTH], inputs.layout)
    words = gl.allocate_shared_memory(gl.int16, [STAGES * DEPTH, R, LINES, 64], codes.layout)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(there.index(index), count=1)
        mbarrier.init(free.index(index), count=WARP_GROUPS)
    return x, words, there, free


@gluon.jit
def _bring_tiles(brought, K: gl.constexpr, DEPTH: gl.constexpr):
    """In one warp, load the codes and inputs of each step as soon as there is room for them."""
    rings, tiles, inputs, codes = brought
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = inputs.block_shape[0]
    R: gl.constexpr = codes.block_shape[0]
    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        lane = tile % lane_tiles * L
        block = tile // lane_tiles * R
        count = bring_tile(rings, inputs, codes, lane, block, count, K, DEPTH)


@gluon.jit
def bring_tile(rings, inputs, codes, lane, block, count, K: gl.constexpr, DEPTH: gl.constexpr):
    """Load the codes and inputs of a tile's steps, from these lanes and blocks of rows on.

    `count` steps came before; returns how many there are then.
    """
    x, words, there, free = rings
    L: gl.constexpr = inputs.block_shape[0]
    WIDTH: gl.constexpr = inputs.block_shape[1]
    PIECES: gl.constexpr = _UNIT // WIDTH
    R: gl.constexpr = codes.block_shape[0]
    LINES: gl.constexpr = codes.block_shape[1]
    STAGES: gl.constexpr = there.shape[0]
    STEPS: gl.constexpr = (K + DEPTH * _UNIT - 1) // (DEPTH * _UNIT)
    BYTES: gl.constexpr = DEPTH * (L * _UNIT * 2 + R * LINES * 128)
    for step in range(STEPS):
        stage = count % STAGES
        # The first use of a stage does not wait: the phase before a barrier's first counts as
        # complete.
        mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
        barrier = there.index(stage)
        mbarrier.expect(barrier, BYTES)
        for depth in gl.static_range(DEPTH):
            unit = step * DEPTH + depth
            place = stage * DEPTH + depth
            line = unit * LINES
            load_tile(codes, [block, line, 0], barrier, words.index(place))
            for piece in gl.static_range(PIECES):
                at = [lane, unit * _UNIT + piece * WIDTH]
                part = x.index(place * PIECES + piece)
                load_tile(inputs, at, barrier, part)
        count += 1
    return count


@gluon.jit
def _multiply_rows(rows, WHICH: gl.constexpr, form: gl.constexpr):
    """In one warp group, multiply and store its 64 rows of each of the program's tiles."""
    rings, y, tiles, factors, out_ptr, lanes, out_stride = rows
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = rings[0].shape[1]
    R: gl.constexpr = rings[1].shape[1]
    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        first_block = tile // lane_tiles * R + WHICH * 4
        total, count = multiply_tile(rings, factors, (0, first_block), count, WHICH, form)
        place = (lanes, tile % lane_tiles * L, first_block)
        outputs: gl.constexpr = (form[0], form[5], form[6], form[7])
        store_outputs(total, y.index(WHICH), factors, out_ptr, out_stride, place, outputs)


@gluon.jit
def multiply_tile(rings, factors, blocks, count, WHICH: gl.constexpr, form: gl.constexpr):
    """Multiply 64 rows of a tile; returns the sums [64, L], and the steps that there were then.

    `blocks` are the first block of the weight, and the rows' first one, counted from that; `count`
    steps came before. `form` is as in `packed_chunk_kernel`.
    """
    x, words, there, free = rings
    K: gl.constexpr = form[1]
    DEPTH: gl.constexpr = form[8]
    L: gl.constexpr = x.shape[1]
    STAGES: gl.constexpr = there.shape[0]
    COLUMNS: gl.constexpr = DEPTH * _UNIT
    STEPS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    product: gl.constexpr = _product_layout(L)
    total = gl.zeros([64, L], gl.float32, product)
    sums = ()
    for _ in gl.static_range(_at_once(form[10], L)):
        sums += (total,)  # type: ignore[assignment]
    groups = _load_groups(factors, blocks, 0, form)
    stage = count % STAGES
    mbarrier.wait(there.index(stage), count // STAGES & 1)
    halves = _convert(words, stage, WHICH, groups, x, product, factors, form)
    mbarrier.wait(there.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=STEPS > 1)
    for step in range(STEPS):
        stage = count % STAGES
        first = stage * (DEPTH * (_UNIT // x.shape[2]))
        next_groups = _load_groups(factors, blocks, (step + 1) * COLUMNS, form)
        begun = _begin_step(halves, x, first, total, sums, form)
        # After the last step of a tile the halves converted here are not used.
        after = (count + 1) % STAGES
        ahead = _convert(words, after, WHICH, next_groups, x, product, factors, form)
        # The next iteration's wait. Waiting here keeps the compiler from converting after
        # `wgmma`.
        later = count + 2
        mbarrier.wait(there.index(later % STAGES), later // STAGES & 1, pred=step + 2 < STEPS)
        sums, halves, ahead = _wait(begun, halves, ahead)
        total, sums, ahead = _end_step(halves, x, first, total, sums, ahead, groups, form)
        sync_threads()
        mbarrier.arrive(free.index(stage), count=1)
        halves = ahead
        groups = next_groups
        count += 1
    return total, count


@gluon.constexpr_function
def _at_once(sums, lanes):
    """How many of a step's sums are begun together, as far as there are registers for them."""
    return max(sums, 1) if lanes <= 64 else 1


@gluon.jit
def _begin_step(halves, x, place, total, sums, form: gl.constexpr):
    """Begin a step's first products: they add to the total, or form sums that are scaled later."""
    DEPTH: gl.constexpr = form[8]
    PART: gl.constexpr = form[9]
    SUMS: gl.constexpr = form[10]
    begun = ()
    if SUMS > 0:
        for index in gl.static_range(_at_once(SUMS, x.shape[1])):
            begun += (_begin(halves, x, place, index * PART, PART, sums[index], False),)  # type: ignore[assignment]
    else:
        begun = (_begin(halves, x, place, 0, DEPTH, total, True),)  # type: ignore[assignment]
    return begun


@gluon.jit
def _end_step(halves, x, place, total, sums, ahead, groups, form: gl.constexpr):
    """Finish a step whose first products are there: begin the others and wait for them one by one.

    Returns the total, and `sums` and `ahead` as they are after that.
    """
    PART: gl.constexpr = form[9]
    SUMS: gl.constexpr = form[10]
    PIECES: gl.constexpr = _UNIT // x.shape[2]
    BATCH: gl.constexpr = _at_once(SUMS, x.shape[1])
    product: gl.constexpr = total.type.layout
    if SUMS > 0:
        for index in gl.static_range(SUMS):
            if index >= BATCH:
                begun = (_begin(halves, x, place, index * PART, PART, sums[0], False),)
                sums, halves, ahead = _wait(begun, halves, ahead)
            scales = _scales_of_pieces(groups[index // PIECES][0], product)
            total = _add_scaled(total, sums[index % BATCH], scales[index % PIECES])
    else:
        total = sums[0]
    return total, sums, ahead


@gluon.jit
def _begin(halves, x, place, FIRST: gl.constexpr, COUNT: gl.constexpr, total, ADD: gl.constexpr):
    """Begin products of some pieces of a step's halves with its inputs, to be waited for."""
    begun = total
    for index in gl.static_range(FIRST, FIRST + COUNT):
        inputs = x.index(place + index).permute((1, 0))
        begun = warpgroup_mma(
            halves[index], inputs, begun, use_acc=ADD or index > FIRST, is_async=True
        )
    return begun


@gluon.jit
def _load_groups(factors, blocks, column, form: gl.constexpr):
    """Load a step's scales and zeros from `column` on: [64, G] for every PART units, which share
    those of their first one.
    """
    K: gl.constexpr = form[1]
    GROUP: gl.constexpr = form[3]
    BLOCKS: gl.constexpr = form[7]
    DEPTH: gl.constexpr = form[8]
    PART: gl.constexpr = form[9]
    found = ()
    if GROUP > 0:
        SPAN: gl.constexpr = min(GROUP, _UNIT)
        GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
        layout: gl.constexpr = gl.SliceLayout(2, half_layout(SPAN))
        row = gl.arange(0, 64, gl.SliceLayout(1, layout))
        span = gl.arange(0, _UNIT // SPAN, gl.SliceLayout(0, layout)) * SPAN + column
        base, first_block = blocks
        block = base + gl.minimum(first_block + row // 16, BLOCKS - 1)
        at = (block * (GROUPS * 16) + row % 16)[:, None]
        for unit in gl.static_range(0, DEPTH, PART):
            # Past the end the last ones repeat, for columns or rows that do not exist.
            group = gl.minimum((span + unit * _UNIT) // GROUP, GROUPS - 1)
            of_unit = (gl.load(factors.scales + at + (group * 16)[None, :]),)
            if factors.zeros is not None:
                of_unit += (gl.load(factors.zeros + at + (group * 16)[None, :]),)  # type: ignore[assignment]
            found += (of_unit,)  # type: ignore[assignment]
    return found


@gluon.jit
def _convert(
    words,
    stage,
    WHICH: gl.constexpr,
    groups,
    x,
    product: gl.constexpr,
    factors,
    form: gl.constexpr,
):
    """Halves [64, columns] of a step: one for each unit, or one for each piece with a scale."""
    CODE: gl.constexpr = form[2]
    GROUP: gl.constexpr = form[3]
    FOLD: gl.constexpr = form[4]
    DEPTH: gl.constexpr = form[8]
    PART: gl.constexpr = form[9]
    SPAN: gl.constexpr = min(GROUP, _UNIT) if GROUP else _UNIT
    ZEROS: gl.constexpr = factors.zeros is not None
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    found = ()
    for unit in gl.static_range(DEPTH):
        own = words.index(stage * DEPTH + unit).slice(WHICH * 4, 4)
        halves = ordered_halves(own, x, CODE, SPAN, ZEROS)
        if ZEROS:
            halves = without_zeros(halves, groups[unit // PART][1], CODE)
        if FOLD:
            halves = scaled_halves(halves, groups[unit // PART][0])
        if FOLD or SPAN == _UNIT:
            halves = halves.reshape([64, _UNIT])
            found += (gl.convert_layout(halves, left, assert_trivial=True),)  # type: ignore[assignment]
        else:
            apart = _pieces(halves.permute((0, 2, 1)))
            for index in gl.static_range(_UNIT // SPAN):
                found += (gl.convert_layout(apart[index], left, assert_trivial=True),)  # type: ignore[assignment]
    return found


@gluon.constexpr_function
def _in_twos(shape):
    """A shape with its last axis of 4 split into 2 by 2."""
    return [*shape[:-1], 2, 2]


@gluon.jit
def _pieces(values):
    """Split values along the last axis, of size 1, 2 or 4."""
    PLACES: gl.constexpr = values.shape[len(values.shape) - 1]
    if PLACES == 1:
        pieces = (values.reshape(values.shape[:-1]),)
    elif PLACES == 2:
        pieces = gl.split(values)
    else:
        even, odd = gl.split(values.reshape(_in_twos(values.shape)))
        even, odd = gl.split(even), gl.split(odd)
        pieces = (even[0], odd[0], even[1], odd[1])  # type: ignore[assignment]
    return pieces


@gluon.jit
def _scales_of_pieces(scales, product: gl.constexpr):
    """Float32 [64] of each group of scales [64, G]."""
    apart = _pieces(scales)
    floats = ()
    for index in gl.static_range(scales.shape[1]):
        scale = gl.convert_layout(
            scale_floats(apart[index]), gl.SliceLayout(1, product), assert_trivial=True
        )
        floats += (scale,)  # type: ignore[assignment]
    return floats


@gluon.jit
def _add_scaled(total, part, scale):
    return gl.fma(part, gl.broadcast(scale[:, None], part)[0], total)


@gluon.jit
def _wait(begun, halves, ahead):
    """Wait for the sums that were begun. Until they are there nothing overwrites `halves`, and the
    conversion of `ahead` takes place.
    """
    PIECES: gl.constexpr = len(halves)
    SUMS: gl.constexpr = len(begun)
    done = warpgroup_mma_wait(num_outstanding=0, deps=begun + halves + ahead)
    sums = ()
    kept = ()
    converted = ()
    for index in gl.static_range(SUMS):
        sums += (done[index],)  # type: ignore[assignment]
    for index in gl.static_range(PIECES):
        kept += (done[SUMS + index],)  # type: ignore[assignment]
        converted += (done[SUMS + PIECES + index],)  # type: ignore[assignment]
    return sums, kept, converted
