"""Code shared by the tasks of a segment's warps: sizes, places, and the program's units."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.segment.ptx_barriers import (
    clock,
    time_ns,
)
from graphengine.kernels.segment.ptx_global_memory import (
    store_word,
)
from graphengine.kernels.segment.units import (
    ROW_PITCH as _ROW_PITCH,
)
from graphengine.kernels.segment.units import (
    TILE_BYTES as _TILE_BYTES,
)
from graphengine.kernels.segment.units import (
    TILE_COLUMNS as _TILE_COLUMNS,
)

ROW_PITCH = gl.constexpr(_ROW_PITCH)
TILE_BYTES = gl.constexpr(_TILE_BYTES)
TILE_COLUMNS = gl.constexpr(_TILE_COLUMNS)

# Values of the error word: a wait for inputs was in vain, or shared memory is misplaced.
LATE = gl.constexpr(1)
MOVED = gl.constexpr(2)


class Place(NamedTuple):
    """A thread's place in the program, and the program's in shared memory."""

    base: Any
    barriers: Any
    """Barriers of full slots, then those of empty ones."""
    lane: Any
    warp: Any


class Memory(NamedTuple):
    """The tensors that consumers read and write, and their numbers, as the kernel gets them."""

    x: Any
    slot: Any
    words: Any
    stream: Any
    out: Any
    squares: Any
    error: Any
    trace: Any
    x_stride: Any
    out_stride: Any
    eps: Any


@gluon.constexpr_function
def count_of(stages):
    return len(stages)


@gluon.constexpr_function
def stage_at(stages, number):
    return stages[number]


@gluon.jit
def units_of_program(table_ptr, COUNT: gl.constexpr):
    """For each stage the first unit of this program, and how many it has."""
    first = ()
    count = ()
    for s in gl.static_range(COUNT):
        at = (s * gl.num_programs(0) + gl.program_id(0)) * 2
        first += (gl.load(table_ptr + at),)  # type: ignore[assignment]
        count += (gl.load(table_ptr + at + 1),)  # type: ignore[assignment]
    return first, count


@gluon.jit
def next_slot(slot, parity, SLOTS: gl.constexpr):
    """The place of the next tile in the ring, and the parity of its phase."""
    slot = (slot + 1) % SLOTS
    return slot, parity ^ (slot == 0).to(gl.int32)


@gluon.jit
def stamp(trace_ptr, number: gl.constexpr, place):
    """The first thread notes its clock; from number 12 on, the time."""
    if trace_ptr is not None:
        first = ((place.lane == 0) & (place.warp == 0)).to(gl.int32)
        if number < 12:
            now = clock()
        else:
            now = time_ns()
        store_word(trace_ptr + (gl.program_id(0) * 16 + number), now, first)
