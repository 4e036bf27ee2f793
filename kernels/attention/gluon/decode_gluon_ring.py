"""Copies of key and value tiles into a ring in shared memory, for `decode_gluon.py`.

A tile's block table entries are loaded one tile ahead of its copy. Letters as in `decode_gluon.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.attention.gluon.decode_gluon_heads import shared_layout
from graphengine.kernels.attention.gluon.decode_gluon_units import (
    cache_offsets,
    is_seen,
    named,
    unit_after,
)
from graphengine.kernels.core.triton_versions import load_async, sync_threads


@gluon.constexpr_function
def _ring_layout(columns, streams, fp8):
    """Layout of [streams, tokens, columns] with 16 bytes per thread, whole rows at a time."""
    piece = 16 if fp8 else 8
    across = min(columns // piece, 32)
    return gl.BlockedLayout(
        [1, 1, piece], [1, 32 // across, across], [streams, 4 // streams, 1], [2, 1, 0]
    )


@gluon.jit
def new_ring(dtype: gl.constexpr, shape):
    """Shared memory for the keys of `stages` tiles, and for their values."""
    shared: gl.constexpr = shared_layout(shape.padded, 3, shape.fp8)
    tokens: gl.constexpr = shape.tile // shape.streams
    ring_shape: gl.constexpr = [shape.stages, shape.streams, tokens, shape.padded]
    keys = gl.allocate_shared_memory(dtype, ring_shape, shared)
    values = gl.allocate_shared_memory(dtype, ring_shape, shared)
    return keys, values


@gluon.jit
def fill_ring(schedule, source, ring, first, tiles, unit, shape):
    """Begin to copy the first tiles; return the unit and block table entries of the next one."""
    TILES: gl.constexpr = shape.split // shape.tile
    ahead = unit
    # All entries first: otherwise a copy of the second tile would wait for the first tile's.
    entries = ()
    units = ()
    for i in gl.static_range(shape.stages):
        entries += (_load_entries(source, ahead, i % TILES, i < tiles, shape),)  # type: ignore[assignment]
        units += (ahead,)  # type: ignore[assignment]
        if (i + 1) % TILES == 0:
            ahead = unit_after(schedule, ahead, first + (i + 1) // TILES, shape)
    for i in gl.static_range(shape.stages):
        of = named(units[i])
        _copy_tile(source, ring, i, entries[i], of, i % TILES, i < tiles, shape)
        async_copy.commit_group()
    t: gl.constexpr = shape.stages % TILES
    return ahead, _load_entries(source, ahead, t, tiles > shape.stages, shape)


@gluon.jit
def refill_ring(schedule, source, ring, stage, ahead, entries, step, first, tiles, shape):
    """Begin to copy tile number `step` of the program, if it exists, over the one in a stage.

    `ahead` and `entries` are its unit and its block table entries; returns those of the next tile.
    """
    TILES: gl.constexpr = shape.split // shape.tile
    if step < tiles:
        # After this no thread reads the old tile.
        sync_threads()
        _copy_tile(source, ring, stage, entries, ahead, step % TILES, True, shape)
        if (step + 1) % TILES == 0:
            ahead = unit_after(schedule, ahead, first + (step + 1) // TILES, shape)
        entries = _load_entries(source, ahead, (step + 1) % TILES, step + 1 < tiles, shape)
    async_copy.commit_group()
    return ahead, entries


@gluon.jit
def _load_entries(source, unit, t, live, shape):
    """Load the block table entries [T] of the cached tokens of a unit's tile `t`."""
    ringed: gl.constexpr = _ring_layout(shape.padded, shape.streams, shape.fp8)
    _, block_table_ptr, _, table_stride, _ = source
    token = _tile_tokens(unit, t, shape, ringed)
    table_row_ptr = block_table_ptr + unit.slot.to(gl.int64) * table_stride
    mask = (token < unit.cached) & live
    if shape.window > 0:
        mask &= is_seen(unit, token, shape)
    return gl.load(table_row_ptr + token // shape.block_size, mask=mask, other=0)


@gluon.jit
def _copy_tile(source, ring, stage, entries, unit, t, live, shape):
    """Begin to copy the keys and values of a unit's tile `t`; uncached ones become 0."""
    kv_ptr, _, kv_pitch, _, _ = source
    keys, values = ring
    ringed: gl.constexpr = entries.type.layout.parent
    token = _tile_tokens(unit, t, shape, ringed)
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, gl.SliceLayout(1, ringed)))[None, None, :]
    ptrs = (kv_ptr + cache_offsets(unit, entries, token, kv_pitch, shape))[:, :, None] + dim
    mask = ((token < unit.cached) & live)[:, :, None] & (dim < shape.D)
    if shape.window > 0:
        mask &= is_seen(unit, token, shape)[:, :, None]
    load_async(keys.index(stage), ptrs, mask)
    ptrs += shape.block_size * shape.G * shape.D
    load_async(values.index(stage), ptrs, mask)


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
