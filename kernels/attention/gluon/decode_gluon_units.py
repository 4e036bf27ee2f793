"""Units of work that `decode_gluon.py`'s programs share: the live splits of all rows and heads.

A unit is one split of one head of a row. Units are numbered and programs have consecutive ones, so
a program changes its head or row only a few times. Letters as in `decode_gluon.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Shape(NamedTuple):
    """Compile-time constants of the kernel."""

    Q: Any
    G: Any
    D: Any
    padded: Any
    """D'"""
    row_lanes: Any
    rows: Any
    """M"""
    row_tiles: Any
    """Tiles of M rows that the lanes and query heads of a kv head make."""
    block_size: Any
    split: Any
    super: Any
    """Splits that are first combined as a group."""
    tile: Any
    """T"""
    streams: Any
    """Parts of a tile that have their own sums."""
    stages: Any
    normed: Any
    """Whether queries and keys are normed before the rotation; `NORMED_AFTER`: after it."""
    fp8: Any
    """Whether the cache is of e4m3."""
    combine_rows: Any
    combine_splits: Any
    window: Any
    """0: a lane sees all tokens up to its own."""
    softcap: Any
    table_rows: Any
    """Rows of RoPE's tables, where slots have shifts; 0: positions are rows."""


class Unit(NamedTuple):
    """One split of one kv head of a row; its query heads are those of all the row's lanes."""

    row: Any
    slot: Any
    base: Any
    """Position of the row's first lane."""
    cached: Any
    """Tokens that earlier launches appended."""
    length: Any
    """Tokens of the slot, including those of this launch."""
    row_first: Any
    """Number of units of the rows before."""
    row_splits: Any
    """The number of the last split of each head of the row, plus 1."""
    head: Any
    """kv head x tile of rows."""
    split: Any


@gluon.constexpr_function
def _schedule_layout(rows):
    """Layout of one number per row; every warp has them all."""
    return gl.BlockedLayout([max(1, rows // 32)], [32], [4], [0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def is_inside(slot, position, shift_ptr, position_limit, shape):
    """Whether lanes are live, and the cache and RoPE's tables have their positions."""
    inside = (slot >= 0) & (position >= 0) & (position < position_limit)
    if shape.table_rows > 0:
        row = position + gl.load(shift_ptr + slot, mask=slot >= 0, other=0)
        inside = inside & (row >= 0) & (row < shape.table_rows)
    return inside


@gluon.jit
def schedule_of(of_lanes, rows, position_limit, ROWS_PADDED: gl.constexpr, shape):
    """For every row its index, slot, first lane's position, tokens, last unit + 1 and splits; and
    whether any live lane is at a position outside the cache."""
    slot_ptr, position_ptr, shift_ptr = of_lanes
    row = gl.arange(0, ROWS_PADDED, _schedule_layout(ROWS_PADDED))
    slot = gl.zeros_like(row)
    base = gl.zeros_like(row)
    length = gl.zeros_like(row)
    failed = gl.zeros_like(row)
    for j in gl.static_range(shape.row_lanes):
        lane = row * shape.row_lanes + j
        lane_slot = gl.load(slot_ptr + lane, mask=row < rows, other=-1, cache_modifier=".cg")
        position = gl.load(position_ptr + lane, mask=row < rows, other=0, cache_modifier=".cg")
        inside = is_inside(lane_slot, position, shift_ptr, position_limit, shape)
        failed = gl.where((lane_slot >= 0) & ~inside, 1, failed)
        slot = gl.where(inside, lane_slot, slot)
        base = gl.where(inside, position - j, base)
        length = gl.where(inside, position + 1, length)
    splits = (length + shape.split - 1) // shape.split
    if shape.window > 0:
        # `splits` counts from the first split that the row sees; `unit_at` adds that one's number.
        splits -= _first_seen(base, shape) // shape.split
    ends = gl.associative_scan(splits * (shape.G * shape.row_tiles), 0, _add)
    return (row, slot, base, length, ends, splits), gl.max(failed, axis=0)


@gluon.jit
def units_of_program(schedule):
    """The number of the program's first unit, and of the one after its last."""
    units = gl.max(schedule[4], axis=0).to(gl.int64)
    first = (gl.program_id(0) * units // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1) * units // gl.num_programs(0)).to(gl.int32)
    return first, end


@gluon.jit
def unit_at(schedule, u, shape):
    """Unit number `u`; past the last one, a unit of a slot without tokens."""
    row, slot, base, length, ends, splits = schedule
    r = gl.sum((ends <= u).to(gl.int32), axis=0)
    here = row == r
    row_base = gl.sum(gl.where(here, base, 0), axis=0)
    row_splits = gl.maximum(gl.sum(gl.where(here, splits, 0), axis=0), 1)
    row_first = gl.max(gl.where(row < r, ends, 0), axis=0)
    head = (u - row_first) // row_splits
    begin = 0
    if shape.window > 0:
        begin = _first_seen(row_base, shape) // shape.split
    return Unit(
        row=r,
        slot=gl.sum(gl.where(here, slot, 0), axis=0),
        base=row_base,
        cached=gl.maximum(row_base, 0),
        length=gl.sum(gl.where(here, length, 0), axis=0),
        row_first=row_first,
        row_splits=row_splits + begin,
        head=head,
        split=u - row_first - head * row_splits + begin,
    )


@gluon.jit
def named(unit):
    """Restore the field names, which a unit loses inside another tuple."""
    row, slot, base, cached, length, row_first, row_splits, head, split = unit
    return Unit(row, slot, base, cached, length, row_first, row_splits, head, split)


@gluon.jit
def unit_after(schedule, unit, u, shape):
    """`unit_at(schedule, u)`, given `unit` number `u` - 1."""
    row, slot, base, cached, length, row_first, row_splits, head, split = unit
    split += 1
    if split == row_splits:
        after = unit_at(schedule, u, shape)
        row, slot, base, cached, length, row_first, row_splits, head, split = after
    return named((row, slot, base, cached, length, row_first, row_splits, head, split))


@gluon.jit
def _first_seen(base, shape):
    """The first token that a row sees, given the position `base` of its first lane."""
    return gl.maximum(base - (shape.window - 1), 0)


@gluon.jit
def first_split(unit, shape):
    """The number of the first split that a unit's row sees."""
    if shape.window > 0:
        return _first_seen(unit.base, shape) // shape.split
    else:
        return 0


@gluon.jit
def is_seen(unit, token, shape):
    """Whether each token is at or after the first one that the unit's row sees."""
    return token >= _first_seen(unit.base, shape)


@gluon.jit
def heads_of(unit, row, shape):
    """For rows of a unit's product: query head within the launch, position, and whether live."""
    GROUP: gl.constexpr = shape.Q // shape.G
    of_all = unit.head % shape.row_tiles * shape.rows + row
    j = of_all // GROUP
    position = unit.base + j
    lane = unit.row * shape.row_lanes + j
    head = lane * shape.Q + unit.head // shape.row_tiles * GROUP + of_all % GROUP
    live = (j < shape.row_lanes) & (position >= 0) & (position < unit.length)
    return head, position, live


@gluon.jit
def cache_offsets(unit, entries, token, kv_pitch, shape):
    """Offsets of the keys of a unit's kv head; values lie one block of keys further."""
    at = entries.to(gl.int64) * (kv_pitch.to(gl.int64) * (16 if shape.fp8 else 8))
    head = unit.head // shape.row_tiles
    return at + token % shape.block_size * (shape.G * shape.D) + head * shape.D
