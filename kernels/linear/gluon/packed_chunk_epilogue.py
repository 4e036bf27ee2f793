"""The epilogue of prefill's products with packed weights, in Gluon: from sums to stored outputs.

Letters: L lanes of a tile, M weight rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.norm_rope.activation import activated

# Gluon and Triton compile the same text, but a function belongs to one of them.
_activated = gluon.jit(activated.fn)


@gluon.jit
def store_outputs(total, y, factors, out_ptr, out_stride, place, outputs: gl.constexpr):
    """Store the outputs of sums [64, L]: times the factors of rows, plus the bias and the delta.

    total    sums of the 64 rows of 4 blocks
    y        shared memory [L, ROWS] in the outputs' dtype
    factors  `row_scales` of the weight, `bias` and `delta`
    place    how many lanes there are, and the first lane and block of rows of these sums
    outputs  M, SWIGLU, ROWS, BLOCKS. M rows of the weight; SWIGLU is the `gate_code` where gate and
             up make one output, else 0; the 64 rows are ROWS adjacent outputs (a SwiGLU's 32);
             BLOCKS blocks of rows
    """
    lanes, first_lane, first_block = place
    M: gl.constexpr = outputs[0]
    SWIGLU: gl.constexpr = outputs[1]
    ROWS: gl.constexpr = outputs[2]
    BLOCKS: gl.constexpr = outputs[3]
    of_rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    row = gl.arange(0, 64, of_rows)
    output, inside = outputs_of_rows(row, first_block, M, ROWS)
    if factors.row_scales is not None:
        held = first_block * 16 + row
        scale = gl.load(factors.row_scales + held, mask=held < BLOCKS * 16, other=0.0)
        total = total * scale[:, None]
    if factors.delta is not None:
        # Added to the bias first: the last sum is the one that the compiler fuses with a factor.
        lane = first_lane + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
        at = lane.to(gl.int64)[None, :] * M + output[:, None]
        there = (lane < lanes)[None, :] & inside[:, None]
        added = gl.load(factors.delta + at, mask=there, other=0.0).to(gl.float32)
        if factors.bias is not None:
            bias = gl.load(factors.bias + output, mask=inside, other=0.0)
            added = bias.to(gl.float32)[:, None] + added
        total = total + added
    elif factors.bias is not None:
        bias = gl.load(factors.bias + output, mask=inside, other=0.0)
        total = total + bias.to(gl.float32)[:, None]
    if ROWS == 32:
        L: gl.constexpr = total.shape[1]
        gate, up = gl.split(total.reshape([4, 2, 8, L]).permute((0, 2, 3, 1)))
        gate = gate.reshape([32, L])
        up = up.reshape([32, L])
        if SWIGLU:
            gate = _activated(gate, SWIGLU) * up
        _store_rows(gate, y, out_ptr, out_stride, lanes, first_lane, first_block * 8, M // 2)
        if not SWIGLU:
            ups = out_ptr + M // 2
            _store_rows(up, y, ups, out_stride, lanes, first_lane, first_block * 8, M // 2)
    else:
        _store_rows(total, y, out_ptr, out_stride, lanes, first_lane, first_block * 16, M)


@gluon.jit
def outputs_of_rows(row, first_block, M: gl.constexpr, ROWS: gl.constexpr):
    """The outputs of the held rows `row` from a block on, and which exist. Where ROWS is 32 each
    block has 8 gates, then their ups, which are outputs from M // 2 on.
    """
    output = first_block * 16 + row
    inside = output < M
    if ROWS == 32:
        output = first_block * 8 + row // 16 * 8 + row % 8
        inside = output < M // 2
        output += row // 8 % 2 * (M // 2)
    return output, inside


@gluon.jit
def _store_rows(
    values, y, out_ptr, out_stride, lanes, first_lane, first_output, OUTPUTS: gl.constexpr
):
    """Write [rows, L] as [L, rows], through shared memory."""
    ROWS: gl.constexpr = y.shape[1]
    dense: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0])
    sync_threads()
    y.store(values.to(y.dtype).permute((1, 0)))
    sync_threads()
    lane = first_lane + gl.arange(0, y.shape[0], gl.SliceLayout(1, dense))
    output = first_output + gl.arange(0, ROWS, gl.SliceLayout(0, dense))
    at = lane.to(gl.int64)[:, None] * out_stride + output[None, :]
    inside = (lane < lanes)[:, None] & (output < OUTPUTS)[None, :]
    gl.store(out_ptr + at, y.load(dense), mask=inside)
