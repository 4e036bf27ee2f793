"""How tiles of keys and values come to `decode_gluon.py`: copies into a ring in shared memory.

A tile's entries of the block table are loaded one tile ahead of its copy. Letters as in
`decode_gluon.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.attention.decode_gluon_units import (
    cache_offsets,
    is_seen,
    named,
    unit_after,
)


@gluon.constexpr_function
def ring_layout(columns, streams, fp8):
    """16 bytes a thread of [streams, tokens, columns]: whole rows at a time."""
    piece = 16 if fp8 else 8
    across = min(columns // piece, 32)
    return gl.BlockedLayout(
        [1, 1, piece], [1, 32 // across, across], [streams, 4 // streams, 1], [2, 1, 0]
    )


@gluon.jit
def fill_ring(schedule, source, ring, first, tiles, unit, shape, ringed: gl.constexpr):
    """Ask for the first tiles; the unit and the block table's entries of the next one."""
    TILES: gl.constexpr = shape.split // shape.tile
    ahead = unit
    # All entries first: a copy of the second tile would wait for the first tile's otherwise.
    entries = ()
    units = ()
    for i in gl.static_range(shape.stages):
        entries += (load_entries(source, ahead, i % TILES, i < tiles, shape, ringed),)  # type: ignore[assignment]
        units += (ahead,)  # type: ignore[assignment]
        if (i + 1) % TILES == 0:
            ahead = unit_after(schedule, ahead, first + (i + 1) // TILES, shape)
    for i in gl.static_range(shape.stages):
        of = named(units[i])
        copy_tile(source, ring, i, entries[i], of, i % TILES, i < tiles, shape)
        async_copy.commit_group()
    t: gl.constexpr = shape.stages % TILES
    return ahead, load_entries(source, ahead, t, tiles > shape.stages, shape, ringed)


@gluon.jit
def load_entries(source, unit, t, live, shape, ringed: gl.constexpr):
    """Entries of the block table [T] for the cached tokens of a unit's tile `t`."""
    _, block_table_ptr, _, table_stride, _ = source
    token = _tile_tokens(unit, t, shape, ringed)
    table_row_ptr = block_table_ptr + unit.slot.to(gl.int64) * table_stride
    mask = (token < unit.cached) & live
    if shape.window > 0:
        mask &= is_seen(unit, token, shape)
    return gl.load(table_row_ptr + token // shape.block_size, mask=mask, other=0)


@gluon.jit
def copy_tile(source, ring, stage, entries, unit, t, live, shape):
    """Ask for the keys and values of a unit's tile `t`; those that are not cached become 0."""
    kv_ptr, _, kv_pitch, _, _ = source
    keys, values = ring
    ringed: gl.constexpr = entries.type.layout.parent
    token = _tile_tokens(unit, t, shape, ringed)
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, gl.SliceLayout(1, ringed)))[None, None, :]
    ptrs = (kv_ptr + cache_offsets(unit, entries, token, kv_pitch, shape))[:, :, None] + dim
    mask = ((token < unit.cached) & live)[:, :, None] & (dim < shape.D)
    if shape.window > 0:
        mask &= is_seen(unit, token, shape)[:, :, None]
    async_copy.async_copy_global_to_shared(keys.index(stage), ptrs, mask)
    ptrs += shape.block_size * shape.G * shape.D
    async_copy.async_copy_global_to_shared(values.index(stage), ptrs, mask)


@gluon.jit
def stream_tokens(start, shape, layout: gl.constexpr):
    """Positions [streams, tokens] of a tile's tokens, in order."""
    TOKENS: gl.constexpr = shape.tile // shape.streams
    stream = gl.arange(0, shape.streams, gl.SliceLayout(1, layout))
    return (
        start + stream[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
    )


@gluon.jit
def _tile_tokens(unit, t, shape, ringed: gl.constexpr):
    """Positions [streams, tokens] of the tokens of a unit's tile `t`."""
    start = unit.split * shape.split + t * shape.tile
    return stream_tokens(start, shape, gl.SliceLayout(2, ringed))
