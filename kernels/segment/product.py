"""The product of a unit by a segment's consumers, and its epilogue."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.segment.places import (
    ROW_PITCH,
    TILE_BYTES,
    TILE_COLUMNS,
    next_slot,
)
from graphengine.kernels.segment.ptx_barriers import (
    arrive,
    arrive_named,
    sync_named,
    wait_barrier,
)
from graphengine.kernels.segment.ptx_global_memory import (
    load_pair,
    store_halves,
    store_pair,
    store_word,
)
from graphengine.kernels.segment.ptx_product import (
    multiply,
    of_neighbour,
)
from graphengine.kernels.segment.ptx_shared import (
    put_four,
    put_pair_of,
    sum_pairs,
    take_four,
)


@gluon.jit
def multiply_part(
    memory,
    norm_ptr,
    place,
    live,
    factor,
    first,
    count,
    ring,
    part: gl.constexpr,
    stage: gl.constexpr,
    CUT: gl.constexpr,
):
    """Multiply one part of the columns of all units."""
    for u in range(count):
        ring = _multiply_unit(
            memory, norm_ptr, place, live, factor, first + u, u, ring, part, stage, CUT
        )
    return ring


@gluon.jit
def _multiply_unit(
    memory,
    norm_ptr,
    place,
    live,
    factor,
    unit,
    u,
    ring,
    part: gl.constexpr,
    stage: gl.constexpr,
    CUT: gl.constexpr,
):
    """Multiply one part of the columns of a unit, the program's `u`-th of the stage; finish it
    after the last part.
    """
    slot, parity, done = ring
    GROUPS: gl.constexpr = CUT.groups
    ACROSS: gl.constexpr = TILE_COLUMNS // CUT.consumers
    start: gl.constexpr = part * stage.part_tiles
    TILES: gl.constexpr = min(stage.part_tiles, stage.tiles - start)
    EVEN: gl.constexpr = stage.columns % TILE_COLUMNS == 0
    LAST: gl.constexpr = part == stage.parts - 1
    KIND: gl.constexpr = stage.kind
    row = place.lane // 4
    q = place.lane % 4
    has_row = (row < CUT.rows).to(gl.int32)
    mine = (live >> row) & has_row
    weights_at = place.base + row * ROW_PITCH + place.warp * (2 * ACROSS) + q * 16
    room = place.base + CUT.x_at + place.warp * CUT.x_bytes + (row % CUT.rows) * 64 + q * 16
    held = place.base + CUT.held_at + place.warp * (CUT.held * 512) + place.lane * 16
    finishes = u % CUT.consumers == place.warp
    x = (0.0, 0.0)
    norm = (0.0, 0.0)
    if LAST and KIND == "residual":
        # On its way while the unit is multiplied.
        output = unit * 8 + q * 2
        loads = mine & finishes.to(gl.int32)
        x = load_pair(memory.stream + (row * stage.rows + output), loads)
        norm = (
            gl.load(norm_ptr + output, mask=finishes, other=0.0).to(gl.float32),
            gl.load(norm_ptr + output + 1, mask=finishes, other=0.0).to(gl.float32),
        )
    if part > 0:
        sums = take_four(held + u * 512)
    else:
        zero = (place.lane * 0).to(gl.float32)
        sums = (zero, zero, zero, zero)
    for t in range(TILES):
        wait_barrier(place.barriers + 8 * slot, parity)
        left = stage.columns - (start + t) * TILE_COLUMNS - place.warp * ACROSS
        sums = multiply(
            weights_at + slot * TILE_BYTES,
            room + t * (GROUPS * CUT.rows * 64),
            has_row,
            left // 32,
            sums,
            GROUPS,
            CUT.rows * 64,
            EVEN,
        )
        arrive(place.barriers + 8 * (CUT.slots + slot), place.lane)
        slot, parity = next_slot(slot, parity, CUT.slots)
    if LAST:
        number = done % CUT.sums
        done += 1
        at = place.base + CUT.sums_at + place.lane * 8 + number * (CUT.consumers * CUT.sum_bytes)
        put_pair_of(at + place.warp * CUT.sum_bytes, sums[0] + sums[2], sums[1] + sums[3], has_row)
        if finishes:
            sync_named(number + 1, 32 * CUT.consumers)
            one, two = sum_pairs(at, CUT.consumers, CUT.sum_bytes)
            _finish(memory, one * factor, two * factor, x, norm, unit, row, q, mine, stage, CUT)
        else:
            arrive_named(number + 1, 32 * CUT.consumers)
    else:
        put_four(held + u * 512, sums)
    return slot, parity, done


@gluon.jit
def _finish(memory, one, two, x, norm, unit, row, q, mine, stage: gl.constexpr, CUT: gl.constexpr):
    """Pass on two outputs of a lane."""
    INSIDE: gl.constexpr = stage.out_at >= 0
    KIND: gl.constexpr = stage.kind
    OUTPUTS: gl.constexpr = stage.rows // 2 if KIND == "swiglu" else stage.rows
    if KIND == "swiglu":
        value = one / (1.0 + gl.exp(-one)) * two
        other = of_neighbour(value, 1)
        mine = mine & (q % 2 == 0).to(gl.int32)
        output = unit * 4 + q
    else:
        value = one
        other = two
        output = unit * 8 + q * 2
    if KIND == "residual":
        one = x[0] + one
        two = x[1] + two
        store_pair(memory.stream + (row * stage.rows + output), one, two, mine)
        value = one * norm[0]
        other = two * norm[1]
    if INSIDE:
        store_halves(
            memory.words + (stage.out_at + (row * OUTPUTS + output) // 2), value, other, mine
        )
    else:
        store_halves(
            memory.out + (row.to(gl.int64) * memory.out_stride + output), value, other, mine
        )
    if KIND == "residual":
        squares = one * one + two * two
        squares += of_neighbour(squares, 1)
        squares += of_neighbour(squares, 2)
        first = mine & (q == 0).to(gl.int32)
        bits = squares.to(gl.int32, bitcast=True)
        if INSIDE:
            store_word(
                memory.words + (stage.out_squares_at + row * stage.units + unit), bits, first
            )
        else:
            store_word(memory.squares + (unit * CUT.rows + row), bits, first)
