"""Queries and new tokens that `decode_gluon.py` takes from the QKV product.

Letters as in `decode_gluon.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.attention.gluon.decode_gluon_units import cache_offsets, heads_of
from graphengine.kernels.core.paged import quantised_bits
from graphengine.kernels.core.triton_versions import reinterpret, sync_threads
from graphengine.kernels.norm_rope.rope import NORMED_AFTER, scale_head

BLOCK = gl.constexpr(16)
"""New tokens are written into a tile this many at a time."""

# Gluon and Triton compile the same text, but a function belongs to one of them.
_scale_head = gluon.jit(scale_head.fn)
_quantised_bits = gluon.jit(quantised_bits.fn)


@gluon.constexpr_function
def shared_layout(columns, rank, fp8):
    """Rows with swizzled 16-byte pieces, so that 8 rows of one column share no bank."""
    piece = 16 if fp8 else 8
    rows_of_128_bytes = max(1, 8 * piece // columns)
    phases = max(1, 8 // rows_of_128_bytes)
    return gl.SwizzledSharedLayout(piece, rows_of_128_bytes, phases, list(range(rank - 1, -1, -1)))


@gluon.jit
def new_queries(dtype: gl.constexpr, shape):
    """Shared memory for the queries [M, D'] of a unit: in float16 for a cache of e4m3."""
    q_dtype: gl.constexpr = gl.float16 if shape.fp8 else dtype
    layout: gl.constexpr = shared_layout(shape.padded, 2, False)
    return gl.allocate_shared_memory(q_dtype, [shape.rows, shape.padded], layout)


@gluon.jit
def load_heads(qkv, source, unit, start, shape, copied: gl.constexpr):
    """Load queries [M, D'] of a unit, and keys and values of its first block of new tokens."""
    row = gl.arange(0, shape.rows, gl.SliceLayout(1, copied))
    head, position, live = heads_of(unit, row, shape)
    queries = _raw_heads(qkv, head // shape.Q, head % shape.Q, live, shape, copied)
    angles = _angles(qkv, unit, position, live, shape, copied)
    first = gl.maximum(unit.cached, start) // BLOCK * BLOCK
    end = start + shape.split
    keys = gl.zeros([BLOCK, shape.padded], source[0].dtype.element_ty, copied)
    values = keys
    if end > unit.cached:
        keys, values = _append_block(qkv, source, unit, first, end, angles, shape, copied)
    return _rotate(queries, angles, qkv[3], qkv[6], shape), keys, values


@gluon.jit
def _append_block(qkv, source, unit, first, end, angles, shape, copied: gl.constexpr):
    """Append the new tokens before `end` in a block to the cache; return their keys and values
    [16, D'].

    `angles` are used for a row with one lane.
    """
    kv_ptr, block_table_ptr, kv_pitch, table_stride, _ = source
    token = first + gl.arange(0, BLOCK, gl.SliceLayout(1, copied))
    live = (token >= unit.cached) & (token < gl.minimum(unit.length, end))
    lane = unit.row * shape.row_lanes + token - unit.base
    head = gl.full_like(token, shape.Q) + unit.head // shape.row_tiles
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, copied))
    mask = live[:, None] & (dim < shape.D)[None, :]
    raw_keys = _raw_heads(qkv, lane, head, live, shape, copied)
    value_ptrs = qkv[0] + lane.to(gl.int64) * qkv[5] + (head + shape.G) * shape.D
    values = gl.load(value_ptrs[:, None] + dim[None, :], mask=mask, other=0.0)
    table_row_ptr = block_table_ptr + unit.slot.to(gl.int64) * table_stride
    entries = gl.load(table_row_ptr + token // shape.block_size, mask=live, other=0)
    if shape.row_lanes > 1:
        angles = _angles(qkv, unit, token, live, shape, copied)
    keys = _rotate(raw_keys, angles, qkv[4], qkv[6], shape)
    if shape.fp8:
        key_scale, value_scale = kv_scales_of(source, unit, shape)
        keys = _stored(keys, key_scale)
        values = _stored(values, value_scale)
    # Only one of the tiles of rows stores: the others have the same keys.
    mask = mask & (unit.head % shape.row_tiles == 0)
    ptrs = (kv_ptr + cache_offsets(unit, entries, token, kv_pitch, shape))[:, None] + dim[None, :]
    gl.store(ptrs, keys, mask=mask)
    gl.store(ptrs + shape.block_size * shape.G * shape.D, values, mask=mask)
    return keys, values


@gluon.jit
def kv_scales_of(source, unit, shape):
    """Scales of the keys and values of a unit's head, in a cache of e4m3."""
    scale_ptr = source[4] + unit.head // shape.row_tiles
    return gl.load(scale_ptr), gl.load(scale_ptr + shape.G)


@gluon.jit
def _stored(x, scale):
    """Keys or values as an e4m3 cache stores them."""
    return _quantised_bits(x.to(gl.float32), scale).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def half_precision(queries):
    """Queries [M, D'] in float16, and the power of two [M] by which each row was divided.

    Only numbers below 2**-14 of a row's largest lose bits. Float16 represents e4m3 exactly, and the
    conversion takes a quarter of the time of one to bfloat16.
    """
    x = queries.to(gl.float32)
    largest = gl.max(gl.abs(x), axis=1)
    # Only the exponent, from 2**-126 to 2**126, whose inverses are normal numbers too.
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    return (x * inverse[:, None]).to(gl.float16), bits.to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _alignment(half):
    """Consecutive elements that lie in one half of a head, for any thread."""
    return min(8, half & -half)


@gluon.jit
def _halves(shape, copied: gl.constexpr):
    """Dimensions [D'], and for each: whether it is in the first half, its pair, and its partner."""
    HALF: gl.constexpr = shape.D // 2
    dim = gl.arange(0, shape.padded, gl.SliceLayout(0, copied))
    is_lower = dim < HALF
    pair = gl.where(is_lower, dim, dim - HALF)
    partner = gl.where(is_lower, dim + HALF, dim - HALF)
    # The compiler does not see the alignment through `where`, and would load them one by one.
    ALIGNMENT: gl.constexpr = _alignment(HALF)
    pair = gl.max_contiguous(gl.multiple_of(pair, ALIGNMENT), ALIGNMENT)
    partner = gl.max_contiguous(gl.multiple_of(partner, ALIGNMENT), ALIGNMENT)
    return dim, is_lower, pair, partner


@gluon.jit
def _raw_heads(qkv, lane, head, live, shape, copied: gl.constexpr):
    """Load heads of lanes [rows, D'], and the other half of each pair.

    The other half is loaded a second time, which avoids shuffling registers.
    """
    dim, _, _, partner = _halves(shape, copied)
    ptrs = (qkv[0] + lane.to(gl.int64) * qkv[5] + head * shape.D)[:, None]
    mask = live[:, None] & (dim < shape.D)[None, :]
    x = gl.load(ptrs + dim[None, :], mask=mask, other=0.0)
    other = gl.load(ptrs + partner[None, :], mask=mask, other=0.0)
    return x, other


@gluon.jit
def _angles(qkv, unit, position, live, shape, copied: gl.constexpr):
    """Cosines and signed sines at positions [rows, D'], or [1, D'] where a row has one lane."""
    HALF: gl.constexpr = shape.D // 2
    dim, is_lower, pair, _ = _halves(shape, copied)
    mask = (dim < shape.D)[None, :]
    base = unit.base
    if shape.table_rows > 0:
        shift = gl.load(qkv[7] + unit.slot)
        base += shift
        position += shift
        live = live & (position >= 0)
    if shape.row_lanes == 1:
        at = base.to(gl.int64) * HALF + pair[None, :]
    else:
        at = (position.to(gl.int64) * HALF)[:, None] + pair[None, :]
        mask = mask & live[:, None]
    cos = gl.load(qkv[1] + at, mask=mask, other=0.0)
    sin = gl.load(qkv[2] + at, mask=mask, other=0.0)
    return cos, gl.where(is_lower[None, :], -sin, sin)


@gluon.jit
def _rotate(raw, angles, weight_ptr, eps, shape):
    """Norm heads [rows, D'] if asked for, and rotate them; rounded where `rope_append` rounds."""
    x, other = raw
    cos, signed_sin = angles
    dtype: gl.constexpr = x.dtype
    copied: gl.constexpr = x.type.layout
    x = x.to(gl.float32)
    other = other.to(gl.float32)
    if shape.normed == NORMED_AFTER:
        x = (x * cos + other * signed_sin).to(dtype).to(gl.float32)
        dim, _, _, _ = _halves(shape, copied)
        weight = gl.load(weight_ptr + dim, mask=dim < shape.D, other=0.0)
        scale = 1.0 / gl.sqrt_rn(gl.sum(x * x, axis=1) / shape.D + eps)
        return _scale_head(x, scale[:, None], weight[None, :], dtype).to(dtype)
    if shape.normed:
        dim, _, _, partner = _halves(shape, copied)
        weight = gl.load(weight_ptr + dim, mask=dim < shape.D, other=0.0)
        partner_weight = gl.load(weight_ptr + partner, mask=dim < shape.D, other=0.0)
        scale = 1.0 / gl.sqrt_rn(gl.sum(x * x, axis=1) / shape.D + eps)
        x = _scale_head(x, scale[:, None], weight[None, :], dtype)
        other = _scale_head(other, scale[:, None], partner_weight[None, :], dtype)
    return (x * cos + other * signed_sin).to(dtype)


@gluon.jit
def insert_new_tokens(qkv, source, ring, stage, unit, start, first_block, shape):
    """Put the new tokens of the tile that begins at `start` into its stage.

    `first_block` comes from `load_heads`; later blocks of a long row are appended here.
    """
    keys, values = first_block
    copied: gl.constexpr = keys.type.layout
    BLOCKS: gl.constexpr = shape.tile // BLOCK
    pieces: gl.constexpr = [shape.stages * BLOCKS, BLOCK, shape.padded]
    piece_layout: gl.constexpr = shared_layout(shape.padded, 2, shape.fp8)
    key_pieces = reinterpret(ring[0], keys.dtype, pieces, piece_layout)
    value_pieces = reinterpret(ring[1], keys.dtype, pieces, piece_layout)
    held = gl.maximum(unit.cached, start // shape.split * shape.split) // BLOCK
    end = gl.minimum(unit.length, start + shape.tile)
    for block in range(gl.maximum(unit.cached, start) // BLOCK, (end + BLOCK - 1) // BLOCK):
        # A row with one lane has one new token.
        if shape.row_lanes > 1 and block != held:
            split_end = (start // shape.split + 1) * shape.split
            keys, values = _append_block(
                qkv, source, unit, block * BLOCK, split_end, (keys, keys), shape, copied
            )
        token = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, copied))
        new = ((token >= unit.cached) & (token < end))[:, None]
        key_piece = key_pieces.index(stage * BLOCKS + block - start // BLOCK)
        key_piece.store(gl.where(new, keys, key_piece.load(copied)))
        value_piece = value_pieces.index(stage * BLOCKS + block - start // BLOCK)
        value_piece.store(gl.where(new, values, value_piece.load(copied)))
    sync_threads()
