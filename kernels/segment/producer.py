"""The producer of a segment: it streams the program's weights through the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.segment.places import (
    ROW_PITCH,
    TILE_BYTES,
    TILE_COLUMNS,
    count_of,
    next_slot,
    stage_at,
    units_of_program,
)
from graphengine.kernels.segment.ptx_barriers import load_rows, read_once, wait_barrier


@gluon.jit
def produce(weights, table_ptr, place, STAGES: gl.constexpr, CUT: gl.constexpr):
    """Stream the program's weights."""
    COUNT: gl.constexpr = count_of(STAGES)
    first, count = units_of_program(table_ptr, COUNT)
    slot = place.lane * 0
    ring = (read_once(), slot, slot, slot)
    for s in gl.static_range(COUNT):
        ring = _produce_stage(weights[s], first[s], count[s], place, ring, stage_at(STAGES, s), CUT)


@gluon.jit
def _produce_stage(weight_ptr, first, count, place, ring, stage: gl.constexpr, CUT: gl.constexpr):
    """Stream the program's units of a stage, one part of the columns after the other."""
    PARTS: gl.constexpr = stage.parts
    for part in gl.static_range(PARTS):
        ring = _produce_part(weight_ptr, first, count, place, ring, part, stage, CUT)
    return ring


@gluon.jit
def _produce_part(
    weight_ptr,
    first,
    count,
    place,
    ring,
    part: gl.constexpr,
    stage: gl.constexpr,
    CUT: gl.constexpr,
):
    """Stream a part of the columns of a program's units. At most CUT.flight tiles are on their way:
    more of them would queue before the inputs that programs pass on.
    """
    policy, slot, parity, issued = ring
    KIND: gl.constexpr = stage.kind
    # Columns that the last tile lacks.
    MISSING: gl.constexpr = stage.tiles * TILE_COLUMNS - stage.columns
    START: gl.constexpr = part * stage.part_tiles
    END: gl.constexpr = min(START + stage.part_tiles, stage.tiles)
    for u in range(count):
        if KIND == "swiglu":
            # Gates and their ups in turn.
            row = (first + u) * 4 + place.lane % 8 // 2 + place.lane % 2 * (stage.rows // 2)
        else:
            row = (first + u) * 8 + place.lane % 8
        row_ptr = weight_ptr + row.to(gl.int64) * stage.columns
        for t in range(START, END):
            wait_barrier(place.barriers + 8 * (CUT.slots + slot), parity ^ 1)
            before = slot - CUT.flight
            early = (before < 0).to(gl.int32)
            if issued >= CUT.flight:
                wait_barrier(place.barriers + 8 * (before + early * CUT.slots), parity ^ early)
            size = 2 * TILE_COLUMNS - (t == stage.tiles - 1).to(gl.int32) * (2 * MISSING)
            to = place.base + slot * TILE_BYTES + place.lane * ROW_PITCH
            tile_ptr = row_ptr + t * TILE_COLUMNS
            load_rows(place.barriers + 8 * slot, to, tile_ptr, size, place.lane, policy)
            issued += 1
            slot, parity = next_slot(slot, parity, CUT.slots)
    return policy, slot, parity, issued
