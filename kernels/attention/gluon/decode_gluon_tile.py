"""Attention of `decode_gluon.py` to a tile of keys and values, on `mma.sync`.

A tile's tokens are cut into streams, one or two for each warp. Each stream has its own sums, which
are joined at the end of a split. Letters as in `decode_gluon.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from graphengine.kernels.attention.gluon.decode_gluon_combine import LOG2E, LOWEST
from graphengine.kernels.attention.gluon.decode_gluon_heads import shared_layout
from graphengine.kernels.attention.gluon.decode_gluon_ring import stream_tokens
from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.core.triton_versions import reinterpret

# Gluon and Triton compile the same text, but a function belongs to one of them.
_tanh = gluon.jit(tanh.fn)


@gluon.constexpr_function
def product_layout(streams):
    """Layout of scores and sums [streams, rows, ...]."""
    return gl.NVMMADistributedLayout([2, 0], [streams, 1, 4 // streams], [1, 16, 8])


@gluon.constexpr_function
def _join_layout(columns, streams):
    """Layout of [streams, rows, D'] like `sums_layout`."""
    across = min(columns // 4, 32)
    return gl.BlockedLayout([streams, 1, 4], [1, 32 // across, across], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def joined_rows_layout(columns, streams):
    """Layout of rows [M] after `join_streams`."""
    return gl.SliceLayout(1, gl.SliceLayout(0, _join_layout(columns, streams)))


@gluon.jit
def no_tiles(layout: gl.constexpr, shape):
    """The state of each stream before any tile.

    It consists of the largest score [M] in log2 units, weights [M, T] summed over tiles column by
    column, and sums of values [M, D'] (with e4m3: even dimensions first).
    """
    per_row: gl.constexpr = gl.SliceLayout(2, layout)
    largest = gl.full([shape.streams, shape.rows], LOWEST, gl.float32, per_row)
    weights: gl.constexpr = [shape.streams, shape.rows, shape.tile // shape.streams]
    total = gl.zeros(weights, gl.float32, layout)
    acc = gl.zeros([shape.streams, shape.rows, shape.padded], gl.float32, layout)
    return largest, total, acc


@gluon.jit
def attend_tile(queries, ring, stage, start, position, state, factor, shape):
    """Update `state` with the tile in a stage of the ring, which begins at token `start`.

    `factor` [M] turns products into scores.
    """
    largest, total, acc = state
    queries = queries.reshape([1, shape.rows, shape.padded])
    keys = ring[0].index(stage)
    values = ring[1].index(stage)
    layout: gl.constexpr = acc.type.layout
    # With e4m3 a thread loads 4 dimensions of a key at a time.
    wide: gl.constexpr = 4 if shape.fp8 else 2
    q_layout: gl.constexpr = gl.DotOperandLayout(0, layout, wide)
    all_streams: gl.constexpr = [shape.streams, shape.rows, shape.padded]
    q, _ = gl.broadcast(queries.load(q_layout), gl.zeros(all_streams, queries.dtype, q_layout))
    right = keys.permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, wide)).to(q.dtype)
    per_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    factor = gl.convert_layout(factor, per_row)[None, :, None]
    scores = mma_v2(q, right, gl.zeros_like(total)) * factor
    if shape.softcap > 0:
        scores = _capped(scores, shape.softcap)
    token = stream_tokens(start, shape, gl.SliceLayout(1, layout))
    position = gl.convert_layout(position, per_row)
    scores = gl.where(token[:, None, :] <= position[None, :, None], scores, float("-inf"))
    if shape.window > 0:
        outside = token[:, None, :] <= position[None, :, None] - shape.window
        scores = gl.where(outside, float("-inf"), scores)
    new_largest = gl.maximum(largest, gl.max(scores, axis=2))
    weights = gl.exp2(scores - new_largest[:, :, None])
    rescale = gl.exp2(largest - new_largest)[:, :, None]
    left = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, layout, 2))
    operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    if shape.fp8:
        right = _even_and_odd(values, operand)
    else:
        right = values.load(operand)
    acc = mma_v2(left, right, acc * rescale)
    return new_largest, total * rescale + weights, acc


@gluon.jit
def _capped(scores, softcap: gl.constexpr):
    """Apply the soft cap, given in the scores' own units, to scores in log2 units."""
    cap_log2: gl.constexpr = softcap * LOG2E
    return _tanh(scores * (1.0 / cap_log2)) * cap_log2


@gluon.jit
def _even_and_odd(values, operand: gl.constexpr):
    """Convert e4m3 values [streams, tokens, D'] to float16: even dimensions, then odd ones.

    `ldmatrix` transposes 16 bits at a time, so two dimensions of a token arrive as one element. The
    assembly takes two tokens' elements and returns what `mma.sync` needs: two tokens of each
    dimension.
    """
    STREAMS: gl.constexpr = values.shape[0]
    TOKENS: gl.constexpr = values.shape[1]
    PAIRS: gl.constexpr = values.shape[2] // 2
    pairs = reinterpret(values, gl.int16, [STREAMS, TOKENS, PAIRS], shared_layout(PAIRS, 3, False))
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs.load(operand)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    both = gl.join(even, odd).permute((0, 1, 3, 2)).reshape([STREAMS, TOKENS, 2 * PAIRS])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def join_streams(state, value_scale, shape):
    """Join all streams to sums of values [M, D'], largest scores [M] and sums of weights [M].

    `value_scale` is the scale of e4m3 values.
    """
    largest, total, acc = state
    whole = gl.max(largest, axis=0)
    rescale = gl.exp2(largest - whole[None, :])
    weight = gl.sum(gl.sum(total, axis=2) * rescale, axis=0)
    acc *= rescale[:, :, None]
    all_streams: gl.constexpr = acc.shape
    if shape.fp8:
        halves = acc.reshape([shape.streams, shape.rows, 2, shape.padded // 2])
        acc = halves.permute((0, 1, 3, 2)).reshape(all_streams)
    # A thread has all streams' parts of a sum, so that it adds them without a shuffle.
    joined: gl.constexpr = _join_layout(shape.padded, shape.streams)
    acc = gl.sum(gl.convert_layout(acc, joined), axis=0)
    per_row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    whole = gl.convert_layout(whole, per_row)
    weight = gl.convert_layout(weight, per_row)
    if shape.fp8:
        acc *= value_scale
    return acc, whole, weight
