"""The kernel of `packed_chunk.py`: products of many lanes with weights of 8 and 4 bits, on Hopper.

The weight is the left operand of `wgmma` and comes from registers, where codes become halves; lanes
are the right one and come from shared memory. A separate warp has the tensor memory accelerator
(TMA) load codes and inputs some steps ahead, across tiles as well; one or two warp groups, for
experts up to three, have 64 rows each. While `wgmma` multiplies 64 columns of a step, a warp group
converts its next 64. Source: Marlin (E. Frantar et al., 2024) and CUTLASS's mixed-input products.

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
    RAW_SHIFT,
    UNIT,
    half_layout,
    is_raw,
    scaled_halves,
    unit_halves,
)
from graphengine.kernels.linear.gluon.packed_chunk_epilogue import store_outputs
from graphengine.kernels.linear.gluon.packed_gluon_codes import scale_floats, without_zeros

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)

_UNIT = gl.constexpr(UNIT)
# Registers of a thread of the warp that loads tiles.
_LOADER = gl.constexpr(24)


class Factors(NamedTuple):
    """The factors on a product's sums or codes; tensors as in `PackedWeight`.

    delta  dense [N, M], added to the products of each lane
    """

    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None
    bias: torch.Tensor | None
    delta: torch.Tensor | None = None


class Form(NamedTuple):
    """How the rows of a tile are multiplied; `linear.prefill.packed_chunk.ChunkForm` has the terms.

    M, K    sizes of the weight
    code    name of its codes
    group   columns that share a scale; 0: all of them
    folded  scales multiply the halves instead of sums
    swiglu  the `gate_code` where gate and up make one output, else 0
    rows    outputs of a warp group: 64 adjacent ones, or 32 with as many ups
    blocks  blocks of 16 rows of the weight, or of an expert's
    depth   units of 64 columns of a step
    part    units whose sum is scaled
    sums    sums of a step that are scaled before they are added, each of `part` units or of a piece
            of one; 0: none
    own     columns come in the order in which a thread has its own codes (`unit_halves`)
    """

    M: int
    K: int
    code: str
    group: int
    folded: bool
    swiglu: int
    rows: int
    blocks: int
    depth: int
    part: int
    sums: int
    own: bool


@gluon.constexpr_function
def form_of(M, K, code, group, folded, swiglu, rows, depth, part, pieces, own):
    """The `Form` of a kernel whose inputs are loaded in this many pieces of a unit."""
    blocks = (M // 2 + 7) // 8 if rows == 32 else (M + 15) // 16
    sums = depth // part * pieces if group > 0 and not folded else 0
    return Form(M, K, code, group, folded, swiglu, rows, blocks, depth, part, sums, own)


@gluon.constexpr_function
def workers(warp_groups):
    """Warps of each worker beside the first warp group, and registers of their threads, which share
    a multiprocessor's 65,536: other warp groups, then the warp that loads tiles.
    """
    registers = {1: 0, 2: 240, 3: 160}[warp_groups]
    others = warp_groups - 1
    return [4] * others + [1], [registers] * others + [_LOADER.value]


@gluon.constexpr_function
def product_layout(lanes):
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
    R: gl.constexpr = 4 * WARP_GROUPS
    ROWS: gl.constexpr = 32 if SWIGLU or SPLIT_ROWS else 64
    gl.static_assert(codes.block_shape[0] == 4 and STAGES > 2 and WARP_GROUPS < 3)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, ROWS], inputs.dtype)
    rings = new_rings(inputs, codes, L, WARP_GROUPS, DEPTH, STAGES)
    y = gl.allocate_shared_memory(inputs.dtype, [WARP_GROUPS, L, ROWS], y_layout)
    fence_async_shared()
    _wait_for_inputs(PDL, True)

    form: gl.constexpr = form_of(M, K, CODE, GROUP, FOLD, SWIGLU, ROWS, DEPTH, PART, PIECES, False)
    lane_tiles = (lanes + L - 1) // L
    tiles = ((form.blocks + R - 1) // R * lane_tiles, lane_tiles)
    rows = (rings, y, tiles, factors, out_ptr, lanes, out_stride)
    brought = (rings, tiles, inputs, codes)
    # This is one warp group. The other warps begin after a barrier, which follows the wait.
    warps: gl.constexpr = workers(WARP_GROUPS)
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form)),
                (_multiply_rows, (rows, gl.constexpr(1), form)),
                (_bring_tiles, (brought, R, K, DEPTH)),
            ],
            warps[0],
            warps[1],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_rows, (rows, gl.constexpr(0), form)),
                (_bring_tiles, (brought, R, K, DEPTH)),
            ],
            warps[0],
            warps[1],
        )


@gluon.jit
def new_rings(
    inputs,
    codes,
    L: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Shared memory for the inputs of L lanes and the codes of STAGES steps, and the barriers at
    which they are there, and free again.
    """
    WIDTH: gl.constexpr = inputs.block_shape[1]
    PIECES: gl.constexpr = _UNIT // WIDTH
    LINES: gl.constexpr = codes.block_shape[1]
    x = gl.allocate_shared_memory(inputs.dtype, [STAGES * DEPTH * PIECES, L, WIDTH], inputs.layout)
    words = gl.allocate_shared_memory(
        gl.int16, [STAGES * DEPTH * WARP_GROUPS, 4, LINES, 64], codes.layout
    )
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(there.index(index), count=1)
        mbarrier.init(free.index(index), count=WARP_GROUPS)
    return x, words, there, free


@gluon.jit
def _bring_tiles(brought, R: gl.constexpr, K: gl.constexpr, DEPTH: gl.constexpr):
    """In one warp, load the codes and inputs of each step as soon as there is room for them."""
    rings, tiles, inputs, codes = brought
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = inputs.block_shape[0]
    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        lane = tile % lane_tiles * L
        block = tile // lane_tiles * R
        place = (lane, 1, block)
        count = bring_tile(rings, inputs, codes, place, count, K, DEPTH)


@gluon.jit
def bring_tile(rings, inputs, codes, place, count, K: gl.constexpr, DEPTH: gl.constexpr):
    """Load the codes and inputs of a tile's steps.

    `place` are the first lane, how many boxes of lanes there are, of the size that `inputs` has,
    and the first block of rows. `count` steps came before; returns how many there are then.
    """
    x, words, there, free = rings
    lane, boxes, block = place
    BOX: gl.constexpr = inputs.block_shape[0]
    MOST: gl.constexpr = x.shape[1] // BOX
    WIDTH: gl.constexpr = inputs.block_shape[1]
    PIECES: gl.constexpr = _UNIT // WIDTH
    LINES: gl.constexpr = codes.block_shape[1]
    STAGES: gl.constexpr = there.shape[0]
    GROUPS: gl.constexpr = words.shape[0] // (STAGES * DEPTH)
    STEPS: gl.constexpr = (K + DEPTH * _UNIT - 1) // (DEPTH * _UNIT)
    CODES: gl.constexpr = DEPTH * GROUPS * 4 * LINES * 128
    INPUTS: gl.constexpr = DEPTH * BOX * _UNIT * 2
    for step in range(STEPS):
        stage = count % STAGES
        # The first use of a stage does not wait: the phase before a barrier's first counts as
        # complete.
        mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
        barrier = there.index(stage)
        # How many bytes come is a constant of the instruction.
        for number in gl.static_range(1, MOST + 1):
            mbarrier.expect(barrier, CODES + number * INPUTS, pred=boxes == number)
        for depth in gl.static_range(DEPTH):
            unit = step * DEPTH + depth
            at = stage * DEPTH + depth
            for group in gl.static_range(GROUPS):
                of_group = words.index(at * GROUPS + group)
                load_tile(codes, [block + group * 4, unit * LINES, 0], barrier, of_group)
            for piece in gl.static_range(PIECES):
                column = unit * _UNIT + piece * WIDTH
                for box in gl.static_range(MOST):
                    part = x.index(at * PIECES + piece).slice(box * BOX, BOX)
                    from_lane = [lane + box * BOX, column]
                    load_tile(inputs, from_lane, barrier, part, pred=box < boxes)
        count += 1
    return count


@gluon.jit
def _multiply_rows(rows, WHICH: gl.constexpr, form: gl.constexpr):
    """In one warp group, multiply and store its 64 rows of each of the program's tiles."""
    rings, y, tiles, factors, out_ptr, lanes, out_stride = rows
    all_tiles, lane_tiles = tiles
    L: gl.constexpr = rings[0].shape[1]
    R: gl.constexpr = 4 * y.shape[0]
    count = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        first_block = tile // lane_tiles * R + WHICH * 4
        total, count = multiply_tile(rings, factors, (0, first_block), count, L, WHICH, form)
        place = (lanes, tile % lane_tiles * L, first_block)
        outputs: gl.constexpr = (form.M, form.swiglu, form.rows, form.blocks)
        store_outputs(total, y.index(WHICH), factors, out_ptr, out_stride, place, outputs)


@gluon.jit
def multiply_tile(
    rings, factors, blocks, count, L: gl.constexpr, WHICH: gl.constexpr, form: gl.constexpr
):
    """Multiply 64 rows of a tile with its first L lanes; returns the sums [64, L], and how many
    steps there have been.

    `blocks` are the first block of the weight, and the rows' first one, counted from that; `count`
    steps came before. `form` is as in `packed_chunk_kernel`. Scales are loaded two steps ahead, to
    hide the latency of memory.
    """
    x, _, there, free = rings
    K: gl.constexpr = form.K
    DEPTH: gl.constexpr = form.depth
    PART: gl.constexpr = form.part
    STAGES: gl.constexpr = there.shape[0]
    COLUMNS: gl.constexpr = DEPTH * _UNIT
    STEPS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    SUMS: gl.constexpr = DEPTH // PART if form.sums > 0 else 0
    total = gl.zeros([64, L], gl.float32, product_layout(L))
    groups = _load_groups(factors, blocks, 0, form)
    next_groups = _load_groups(factors, blocks, COLUMNS, form)
    for step in range(STEPS):
        stage = count % STAGES
        later_groups = _load_groups(factors, blocks, (step + 2) * COLUMNS, form)
        mbarrier.wait(there.index(stage), count // STAGES & 1)
        if SUMS == 0:
            total = _add_units(rings, stage, 0, DEPTH, total, True, WHICH, groups, factors, form)
        elif x.shape[2] == _UNIT:
            for part in gl.static_range(SUMS):
                sums = _add_units(
                    rings, stage, part * PART, PART, total, False, WHICH, groups, factors, form
                )
                scale = _scales_of_pieces(groups[part][0], product_layout(L))[0]
                total = _add_scaled(total, sums, scale)
        else:
            total = _add_pieces(rings, stage, total, WHICH, groups, factors, form)
        sync_threads()
        mbarrier.arrive(free.index(stage), count=1)
        groups = next_groups
        next_groups = later_groups
        count += 1
    if is_raw(form.code, x.dtype, form.folded):
        total *= 2.0**RAW_SHIFT
    return total, count


@gluon.jit
def _add_units(
    rings,
    stage,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    total,
    ADD: gl.constexpr,
    WHICH: gl.constexpr,
    groups,
    factors,
    form: gl.constexpr,
):
    """Multiply COUNT units of a step from FIRST on, and with ADD add the total. The products of a
    unit run while the next one is converted.
    """
    L: gl.constexpr = total.shape[1]
    product: gl.constexpr = total.type.layout
    begun = total
    used = ()
    for unit in gl.static_range(FIRST, FIRST + COUNT):
        halves = _convert(rings, stage, unit, WHICH, groups, product, factors, form)
        begun = warpgroup_mma(
            halves[0],
            _inputs(rings[0], stage, unit, L, form),
            begun,
            use_acc=ADD or unit > FIRST,
            is_async=True,
        )
        used += halves
    # Until the sums are there nothing overwrites the halves.
    waited = (begun,)
    waited += used
    return warpgroup_mma_wait(num_outstanding=0, deps=waited)[0]


@gluon.jit
def _add_pieces(rings, stage, total, WHICH: gl.constexpr, groups, factors, form: gl.constexpr):
    """Multiply the units of a step in pieces that each have a scale, and add their scaled sums."""
    DEPTH: gl.constexpr = form.depth
    L: gl.constexpr = total.shape[1]
    product: gl.constexpr = total.type.layout
    PIECES: gl.constexpr = _UNIT // rings[0].shape[2]
    for unit in gl.static_range(DEPTH):
        halves = _convert(rings, stage, unit, WHICH, groups, product, factors, form)
        scales = _scales_of_pieces(groups[unit][0], product)
        for piece in gl.static_range(PIECES):
            begun = warpgroup_mma(
                halves[piece],
                _inputs(rings[0], stage, unit * PIECES + piece, L, form),
                total,
                use_acc=False,
                is_async=True,
            )
            waited = (begun,)
            waited += halves
            sums = warpgroup_mma_wait(num_outstanding=0, deps=waited)[0]
            total = _add_scaled(total, sums, scales[piece])
    return total


@gluon.jit
def _inputs(x, stage, PLACE: gl.constexpr, L: gl.constexpr, form: gl.constexpr):
    """The inputs [columns, L] of a step's unit, or of a piece of one."""
    PLACES: gl.constexpr = form.depth * (_UNIT // x.shape[2])
    return x.index(stage * PLACES + PLACE).slice(0, L).permute((1, 0))


@gluon.jit
def _load_groups(factors, blocks, column, form: gl.constexpr):
    """Load a step's scales and zeros from `column` on: [64, G] for every PART units, which share
    those of their first one.
    """
    K: gl.constexpr = form.K
    GROUP: gl.constexpr = form.group
    BLOCKS: gl.constexpr = form.blocks
    DEPTH: gl.constexpr = form.depth
    PART: gl.constexpr = form.part
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
    rings,
    stage,
    INDEX: gl.constexpr,
    WHICH: gl.constexpr,
    groups,
    product: gl.constexpr,
    factors,
    form: gl.constexpr,
):
    """Halves [64, columns] of a unit of a step: one tensor, or one for each piece with a scale."""
    x, words, there, _ = rings
    CODE: gl.constexpr = form.code
    GROUP: gl.constexpr = form.group
    FOLD: gl.constexpr = form.folded
    DEPTH: gl.constexpr = form.depth
    PART: gl.constexpr = form.part
    WARP_GROUPS: gl.constexpr = words.shape[0] // (there.shape[0] * DEPTH)
    SPAN: gl.constexpr = min(GROUP, _UNIT) if GROUP else _UNIT
    ZEROS: gl.constexpr = factors.zeros is not None
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    own = words.index((stage * DEPTH + INDEX) * WARP_GROUPS + WHICH)
    RAW: gl.constexpr = is_raw(CODE, x.dtype, FOLD)
    halves = unit_halves(own, x, CODE, SPAN, ZEROS, form.own, RAW)
    if ZEROS:
        halves = without_zeros(halves, groups[INDEX // PART][1], CODE)
    if FOLD:
        halves = scaled_halves(halves, groups[INDEX // PART][0], RAW)
    found = ()
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
