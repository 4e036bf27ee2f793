"""Blocks of pairs, and outputs that go to their pairs: what Hopper's kernels of experts share.

Letters: L lanes of a tile, of which the first ones are pairs of a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.triton_versions import sync_threads


@gluon.jit
def load_block(blocks_ptr, block, BLOCKS: gl.constexpr):
    """A block's expert, its first place in the order of pairs, and how many pairs it has."""
    expert = gl.load(blocks_ptr + block)
    first = gl.load(blocks_ptr + BLOCKS + block)
    pairs = gl.load(blocks_ptr + 2 * BLOCKS + block)
    return expert, first, pairs


@gluon.constexpr_function
def _stored_layout(rows):
    """Layout of outputs [L, rows] on their way to memory."""
    return gl.BlockedLayout([1, 8], [256 // rows, rows // 8], [4, 1], [1, 0])


@gluon.jit
def load_pairs(order_ptrs, pairs, L: gl.constexpr, ROWS: gl.constexpr):
    """The pair of each lane [L], as `store_pairs` takes it for [ROWS, L] values; any past the last
    of the `pairs` that begin at `order_ptrs`.
    """
    lane = gl.arange(0, L, gl.SliceLayout(1, _stored_layout(ROWS)))
    return gl.load(order_ptrs + lane, mask=lane < pairs, other=0)


@gluon.jit
def store_pairs(values, y, out_ptr, pair, pairs, first_output, OUTPUTS: gl.constexpr):
    """Write values [ROWS, L] to the outputs of the first `pairs` lanes, through the shared memory
    `y` [L, ROWS] in the outputs' dtype.
    """
    stored_layout: gl.constexpr = _stored_layout(y.shape[1])
    sync_threads()
    y.store(values.to(y.dtype).permute((1, 0)))
    sync_threads()
    lane = gl.arange(0, y.shape[0], gl.SliceLayout(1, stored_layout))
    output = first_output + gl.arange(0, y.shape[1], gl.SliceLayout(0, stored_layout))
    stored = (lane < pairs)[:, None] & (output < OUTPUTS)[None, :]
    at = pair.to(gl.int64)[:, None] * OUTPUTS + output[None, :]
    gl.store(out_ptr + at, y.load(stored_layout), mask=stored)
