"""Inputs of a segment's products, and the factor of a norm, brought into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.segment.places import (
    LATE,
    TILE_COLUMNS,
)
from graphengine.kernels.segment.ptx_barriers import (
    sync_named,
)
from graphengine.kernels.segment.ptx_global_memory import (
    load_pieces,
    store_word,
)
from graphengine.kernels.segment.ptx_product import (
    of_neighbour,
)
from graphengine.kernels.segment.ptx_shared import (
    put_float,
    take_float,
    take_four_of,
)


@gluon.jit
def gather_inputs(memory, place, live, part: gl.constexpr, stage: gl.constexpr, CUT: gl.constexpr):
    """Bring a place.warp's inputs of a part into its shared memory: [tiles, groups, lanes, 32]."""
    FLAGGED: gl.constexpr = stage.in_at >= 0
    ACROSS: gl.constexpr = TILE_COLUMNS // CUT.consumers
    # Threads of a row of a tile, and rows of tiles that a place.warp loads at once.
    THREADS: gl.constexpr = ACROSS // 8
    AT_ONCE: gl.constexpr = 32 // THREADS
    start: gl.constexpr = part * stage.part_tiles
    TILES: gl.constexpr = min(stage.part_tiles, stage.tiles - start)
    PAIRS: gl.constexpr = TILES * CUT.rows
    room = place.base + CUT.x_at + place.warp * CUT.x_bytes
    piece = place.lane % THREADS
    for pair in range(0, PAIRS, 4 * AT_ONCE):
        from_ptrs = ()
        to = ()
        there = ()
        for k in gl.static_range(4):
            index = pair + k * AT_ONCE + place.lane // THREADS
            row = index % CUT.rows
            tile = index // CUT.rows
            column = (start + tile) * TILE_COLUMNS + place.warp * ACROSS + piece * 8
            exists = (index < PAIRS) & (column < stage.columns) & (((live >> row) & 1) == 1)
            if FLAGGED:
                at = stage.in_at + (row * stage.columns + column) // 2
                from_ptrs += (memory.words + at,)  # type: ignore[assignment]
            else:
                from_ptrs += (memory.x + (row.to(gl.int64) * memory.x_stride + column),)  # type: ignore[assignment]
            group = tile * CUT.groups + piece // 4
            to += (room + (group * CUT.rows + row) * 64 + piece % 4 * 16,)  # type: ignore[assignment]
            there += (exists.to(gl.int32),)  # type: ignore[assignment]
        late = load_pieces(from_ptrs, to, there, memory.error, FLAGGED)
        store_word(memory.error, LATE, late)


@gluon.jit
def norm_factor(memory, place, live, stage: gl.constexpr, CUT: gl.constexpr):
    """1 / rms of the stream of this thread's place.lane.

    Each place.warp adds up the squares of some lanes, always in the same order.
    """
    UNITS: gl.constexpr = stage.columns // 8
    PIECES: gl.constexpr = UNITS // 4
    room = place.base + CUT.squares_at + place.warp * 2048 + place.lane * 16
    for row in range(place.warp, CUT.rows, CUT.consumers):
        mine = (live >> row) & 1
        total = (place.lane * 0).to(gl.float32)
        for piece in range(0, PIECES, 128):
            from_ptrs = ()
            to = ()
            there = ()
            for k in gl.static_range(4):
                index = piece + k * 32 + place.lane
                from_ptrs += (memory.words + (stage.squares_at + row * UNITS + index * 4),)  # type: ignore[assignment]
                to += (room + k * 512,)  # type: ignore[assignment]
                there += ((index < PIECES).to(gl.int32) & mine,)  # type: ignore[assignment]
            late = load_pieces(from_ptrs, to, there, memory.error, True)
            store_word(memory.error, LATE, late)
            for k in gl.static_range(4):
                four = take_four_of(room + k * 512, there[k])
                total += (four[0] + four[1]) + (four[2] + four[3])
        total += of_neighbour(total, 16)
        total += of_neighbour(total, 8)
        total += of_neighbour(total, 4)
        total += of_neighbour(total, 2)
        total += of_neighbour(total, 1)
        found = 1.0 / gl.sqrt_rn(total / stage.columns + memory.eps)
        put_float(place.base + CUT.factors_at + 4 * row, found, (place.lane == 0).to(gl.int32))
    sync_named(15, 32 * CUT.consumers)
    return take_float(place.base + CUT.factors_at + 4 * (place.lane // 4 % CUT.rows))
