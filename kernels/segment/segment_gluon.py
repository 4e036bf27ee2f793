"""The kernel of `segment.py`: a run of products in one launch, of one program a multiprocessor.

The warps of a program have different tasks:

- The producer copies the weights of all stages into a ring, tile by tile and in the order in which
  the program multiplies them. It never waits for an input.
- The consumers share each tile by columns. A thread has the inputs of one lane, and multiplies 32
  columns at a time, by two `mma.sync` of 16 lanes and 8 weight rows. A unit's sums meet in shared
  memory: one of the warps, another for each unit, adds them up and does what the stage's kind
  says, while the others go on.
- The cleaner prepares the inputs' memory for the next launch.

Programs pass on inputs through global memory, as words that are all ones until they are there:
there are no fences, counters or tags. Sets of these words take turns, and a launch clears the set
of the next one.

Letters: N lanes, P programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.pdl import start_next, wait_for_inputs
from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.segment.inputs import gather_inputs, norm_factor
from graphengine.kernels.segment.places import (
    MOVED,
    Memory,
    Place,
    count_of,
    stage_at,
    stamp,
    units_of_program,
)
from graphengine.kernels.segment.producer import produce
from graphengine.kernels.segment.product import multiply_part
from graphengine.kernels.segment.ptx_barriers import (
    init_barrier,
    show_barriers,
    thread_number,
)
from graphengine.kernels.segment.ptx_global_memory import (
    store_ones,
    store_word,
)
from graphengine.kernels.segment.ptx_shared import (
    load_shared,
    shared_base,
)

# Gluon and Triton compile the same text, but a function belongs to one of them.
_start_next = gluon.jit(start_next.fn)
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


@gluon.jit(do_not_specialize=["x_stride", "out_stride", "cleared_words", "eps"])
def segment_kernel(
    x_ptr,
    weights,
    norms,
    table_ptr,
    slot_ptr,
    words_ptr,
    cleared_ptr,
    stream_ptr,
    out_ptr,
    squares_ptr,
    error_ptr,
    trace_ptr,
    x_stride,
    out_stride,
    cleared_words,
    eps,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program a multiprocessor, all of them resident, for all stages.

    Before it waits for its inputs a program loads weights, norms, slots and its units alone.
    """
    WARPS: gl.constexpr = 2 * CUT.consumers
    SLOTS: gl.constexpr = CUT.slots
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # The kernel's only shared memory, so that it lies where `shared_base` says.
    PIECE: gl.constexpr = 32 * WARPS
    PIECES: gl.constexpr = CUT.shared_bytes // (4 * PIECE)
    shared = gl.allocate_shared_memory(gl.int32, [PIECES, PIECE], flat)
    shared.index(0).store(gl.arange(0, PIECE, threads))
    sync_threads()
    thread = thread_number()
    lane = thread % 32
    warp = thread // 32
    base = shared_base()
    barriers = base + CUT.barriers_at
    moved = load_shared(base + 4 * thread) != thread
    store_word(error_ptr, MOVED, moved.to(gl.int32))
    for slot in gl.static_range(SLOTS):
        init_barrier(barriers + 8 * slot, 1, thread)
        init_barrier(barriers + 8 * (CUT.slots + slot), CUT.consumers, thread)
    show_barriers()
    sync_threads()
    _start_next(PDL)
    place = Place(base, barriers, lane, warp)
    if warp < CUT.consumers:
        memory = Memory(
            x_ptr,
            slot_ptr,
            words_ptr,
            stream_ptr,
            out_ptr,
            squares_ptr,
            error_ptr,
            trace_ptr,
            x_stride,
            out_stride,
            eps,
        )
        _consume(memory, norms, table_ptr, place, STAGES, CUT, PDL)
    elif warp == CUT.consumers:
        produce(weights, table_ptr, place, STAGES, CUT)
    elif warp == CUT.consumers + 1:
        _wait_for_inputs(PDL, False)
        for piece in range(
            gl.program_id(0) * 32 + lane, cleared_words // 4, gl.num_programs(0) * 32
        ):
            store_ones(cleared_ptr + 4 * piece)


@gluon.jit
def _consume(
    memory,
    norms,
    table_ptr,
    place,
    STAGES: gl.constexpr,
    CUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply the program's units of all stages."""
    COUNT: gl.constexpr = count_of(STAGES)
    ROWS: gl.constexpr = CUT.rows
    live = place.lane * 0
    for row in gl.static_range(ROWS):
        live |= (gl.load(memory.slot + row) >= 0).to(gl.int32) << row
    first, count = units_of_program(table_ptr, COUNT)
    stamp(memory.trace, 0, place)
    stamp(memory.trace, 12, place)
    _wait_for_inputs(PDL, False)
    stamp(memory.trace, 1, place)
    stamp(memory.trace, 13, place)
    slot = place.lane * 0
    ring = (slot, slot, slot)
    for s in gl.static_range(COUNT):
        ring = _consume_stage(
            memory, norms[s], first[s], count[s], place, live, ring, s, stage_at(STAGES, s), CUT
        )
    stamp(memory.trace, 14, place)


@gluon.jit
def _consume_stage(
    memory,
    norm_ptr,
    first,
    count,
    place,
    live,
    ring,
    s: gl.constexpr,
    stage: gl.constexpr,
    CUT: gl.constexpr,
):
    """Multiply the program's units of a stage, one part of the columns after the other."""
    PARTS: gl.constexpr = stage.parts
    NORMED: gl.constexpr = stage.normed
    factor = (place.lane * 0 + 1).to(gl.float32)
    for part in gl.static_range(PARTS):
        gather_inputs(memory, place, live, part, stage, CUT)
        if part == 0:
            if NORMED:
                factor = norm_factor(memory, place, live, stage, CUT)
            stamp(memory.trace, 2 + 2 * s, place)
        ring = multiply_part(
            memory, norm_ptr, place, live, factor, first, count, ring, part, stage, CUT
        )
    stamp(memory.trace, 3 + 2 * s, place)
    return ring
