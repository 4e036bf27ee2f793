"""The parts of the Gluon kernels of linears other than the product: other loads, the epilogue, and
partial sums.

SWIGLU is 0, or the `gate_code` of a SwiGLU.

Letters: N lanes, L lanes of a program, K input features, M weight rows, B outputs of a program.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.comm.items import begin_sum, sum_of_ranks
from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.linear.linear_triton import load_delta
from graphengine.kernels.linear.operands import KEEPING_FIELDS, SAMPLER_FIELDS, STREAM_FIELDS
from graphengine.kernels.norm_rope.activation import activated, soft_capped
from graphengine.kernels.sample.tiles import best_of_tile

# Gluon and Triton compile the same text, but a function belongs to one of them.
_activated = gluon.jit(activated.fn)
_soft_capped = gluon.jit(soft_capped.fn)
_best_of_tile = gluon.jit(best_of_tile.fn)
_begin_sum = gluon.jit(begin_sum.fn)
_sum_of_ranks = gluon.jit(sum_of_ranks.fn)
_load_delta = gluon.jit(load_delta.fn)


@gluon.constexpr_function
def row_layout(outputs, warps):
    """Layout of the epilogue [L, B]: 4 outputs a thread; one warp has, and sums, a whole row."""
    across = min(outputs // 4, 32)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def exchange_layout(outputs):
    """Shared layout of float32 [L, B] on the way from the product's layout to `row_layout`."""
    rows_of_128_bytes = max(1, 32 // outputs)
    phases = min(8 // min(rows_of_128_bytes, 8), outputs // 4)
    return gl.SwizzledSharedLayout(4, rows_of_128_bytes, phases, [1, 0])


@gluon.constexpr_function
def squares_layout(warps):
    """Layout of [groups, L]: 16 lanes at a time; a thread adds up its groups."""
    return gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def _chunk(groups):
    """Groups whose partial sums one tile holds."""
    return max(2, min(triton.next_power_of_2(groups), 128))


@gluon.jit
def epilogue(
    y,
    up,
    norm,
    bias,
    up_bias,
    of_lanes,
    lane,
    output,
    tile,
    lanes,
    eps,
    bias_ptr,
    delta_ptr,
    out_ptr,
    out_stride,
    residual,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SWIGLU: gl.constexpr,
    sampler=None,
    token_ids_ptr=None,
    stop_ids=0,
    ahead=1,
    peers=None,
    RANKS: gl.constexpr = 0,
    SIZE: gl.constexpr = 0,
    TIMED: gl.constexpr = True,
):
    """Apply the epilogue to float32 sums [L, B], as `linear_triton._epilogue` does."""
    slot, squares, base, begun = of_lanes
    if GROUPS > 0:
        scale = rms_factor(squares, lane, K, eps)
        y = y * scale[:, None]
        up = up * scale[:, None]
    if RANKS > 0:
        word, there = _words(lane, output, lanes, OUTPUTS)
        if delta_ptr is not None:
            y += gl.load(delta_ptr + word, mask=there, other=0.0).to(gl.float32)
        y = _sum_of_ranks(peers, begun, y, word, there, RANKS, SIZE, TIMED)
    if bias_ptr is not None:
        y += bias[None, :]
        up += up_bias[None, :]
    live = slot >= 0
    in_row = (output < OUTPUTS)[None, :]
    stored = live[:, None] & in_row
    if delta_ptr is not None and residual is None:
        y += _load_delta(delta_ptr, lane, output, stored, 2 * OUTPUTS if SWIGLU else OUTPUTS)
        if SWIGLU:
            up += _load_delta(delta_ptr, lane, OUTPUTS + output, stored, 2 * OUTPUTS)
    if SWIGLU:
        y = _activated(y, SWIGLU) * up
    wide_lane = lane.to(gl.int64)[:, None]
    if sampler is not None and len(sampler) != SAMPLER_FIELDS:
        y = _soft_capped(y, sampler.cap)
    if sampler is not None and len(sampler) >= SAMPLER_FIELDS:
        position = gl.load(sampler.position + lane, mask=live, other=0) + ahead
        ids = output
        if token_ids_ptr is not None:
            ids = gl.load(token_ids_ptr + output, mask=output < OUTPUTS, other=0)
        best, health = _best_of_tile(
            y,
            ids[None, :],
            in_row,
            slot[:, None],
            position[:, None],
            live[:, None],
            sampler.temperature,
            sampler.seed,
            sampler.stop_ids,
            sampler.min_len,
            stop_ids,
        )
        B: gl.constexpr = output.shape[0]
        at = lane * ((OUTPUTS + B - 1) // B) + tile
        gl.store(sampler.best + at, best, mask=live)
        gl.store(sampler.health + at, health, mask=live)
    elif residual is not None:
        at = wide_lane * OUTPUTS + output[None, :]
        x = base + y
        gl.store(residual.x + at, x, mask=stored)
        if len(residual) >= STREAM_FIELDS:
            scaled = (x * norm[None, :]).to(residual.scaled.dtype.element_ty)
            gl.store(residual.scaled + at, scaled, mask=stored)
        if len(residual) == KEEPING_FIELDS:
            kept = (x * residual.kept_scale).to(residual.kept.dtype.element_ty)
            kept_ptrs = residual.kept + wide_lane * residual.kept_stride + output[None, :]
            gl.store(kept_ptrs, kept, mask=stored)
        sums = gl.sum(gl.where(in_row, x * x, 0.0), axis=1)
        gl.store(residual.squares + tile * lanes + lane, sums, mask=live)
    else:
        out_ptrs = out_ptr + wide_lane * out_stride + output[None, :]
        gl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)


@gluon.jit
def lanes_of(L: gl.constexpr, layout: gl.constexpr):
    """This program's lanes [L], as the rows of a tile with this layout."""
    return gl.program_id(0) * L + gl.arange(0, L, gl.SliceLayout(1, layout))


@gluon.jit
def load_rows(residual, bias_ptr, output, OUTPUTS: gl.constexpr, SWIGLU: gl.constexpr):
    """Load the operands that depend only on the outputs [B], as float32: next norm, bias, bias of
    the ups.
    """
    inside = output < OUTPUTS
    norm = gl.zeros_like(output, dtype=gl.float32)
    bias = norm
    up_bias = norm
    if residual is not None and len(residual) >= STREAM_FIELDS:
        norm = gl.load(residual.next_norm + output, mask=inside, other=0.0).to(gl.float32)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + output, mask=inside, other=0.0).to(gl.float32)
        if SWIGLU:
            up_bias = gl.load(bias_ptr + OUTPUTS + output, mask=inside, other=0.0).to(gl.float32)
    return norm, bias, up_bias


@gluon.jit
def load_lanes(
    lane,
    output,
    lanes,
    slot_ptr,
    squares_ptr,
    residual,
    delta_ptr,
    peers,
    GROUPS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    WARPS: gl.constexpr,
    RANKS: gl.constexpr,
):
    """Load what the epilogue needs of its lanes: slot [L], `load_squares`, the residual stream
    [L, B] with the delta (as `linear_triton._load_lanes` says), and what a sum over ranks begins
    with.
    """
    L: gl.constexpr = lane.shape[0]
    B: gl.constexpr = output.shape[0]
    inside = lane < lanes
    slot = gl.load(slot_ptr + lane, mask=inside, other=-1)
    column = gl.program_id(0) * L + gl.arange(0, L, gl.SliceLayout(0, squares_layout(WARPS)))
    squares = load_squares(squares_ptr, column, column < lanes, lanes, GROUPS, WARPS)
    base = gl.zeros([L, B], gl.float32, row_layout(B, WARPS))
    if residual is not None and len(residual) >= STREAM_FIELDS:
        base = gl.load(
            residual.x + lane.to(gl.int64)[:, None] * OUTPUTS + output[None, :],
            mask=inside[:, None] & (output < OUTPUTS)[None, :],
            other=0.0,
        )
    if delta_ptr is not None and residual is not None and RANKS == 0:
        there = inside[:, None] & (output < OUTPUTS)[None, :]
        base += _load_delta(delta_ptr, lane, output, there, OUTPUTS)
    begun = ()
    if RANKS > 0:
        word, there = _words(lane, output, lanes, OUTPUTS)
        begun = _begin_sum(peers, word, there, RANKS)
    return slot, squares, base, begun


@gluon.jit
def _words(lane, output, lanes, OUTPUTS: gl.constexpr):
    """The words of a tile [L, B] in the ranks' memory, and which of them exist."""
    word = lane[:, None] * OUTPUTS + output[None, :]
    return word, (lane < lanes)[:, None] & (output < OUTPUTS)[None, :]


@gluon.jit
def load_squares(squares_ptr, lane, there, lanes, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Partial sums of squares [chunk, L] of lanes, later chunks added to the first."""
    CHUNK: gl.constexpr = _chunk(GROUPS)
    layout: gl.constexpr = squares_layout(WARPS)
    squares = gl.zeros([CHUNK, lane.shape[0]], gl.float32, layout)
    for chunk in gl.static_range((GROUPS + CHUNK - 1) // CHUNK):
        group = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        squares += gl.load(
            squares_ptr + group[:, None] * lanes + lane[None, :],
            mask=(group < GROUPS)[:, None] & there[None, :],
            other=0.0,
        )
    return squares


@gluon.jit
def rms_factor(squares, lane, K: gl.constexpr, eps):
    """1 / rms of lanes [L], in the layout of `lane`, from what `load_squares` returns."""
    total = gl.convert_layout(gl.sum(squares, axis=0), lane.type.layout)
    return 1.0 / gl.sqrt_rn(total / K + eps)


@gluon.jit
def ptrs_of_part(
    partial_ptr,
    tile,
    L: gl.constexpr,
    B: gl.constexpr,
    BLOCK_M: gl.constexpr,
    layout: gl.constexpr,
):
    """Where a split's part [L, B] of a product lies: in a SwiGLU the gates, with the ups after."""
    lane = lanes_of(L, layout)
    column = tile * BLOCK_M + gl.arange(0, B, gl.SliceLayout(0, layout))
    row_ptrs = partial_ptr + lane.to(gl.int64) * (gl.num_programs(1) * BLOCK_M)
    return row_ptrs[:, None] + column[None, :]


@gluon.jit
def is_last(arrivals_ptr, tile, SPLITS: gl.constexpr):
    """Whether this is the last split of a tile to arrive; its counter is then reset."""
    arrival_ptr = arrivals_ptr + tile * gl.num_programs(0) + gl.program_id(0)
    sync_threads()
    last = gl.atomic_add(arrival_ptr, 1, sem="acq_rel") == SPLITS - 1
    if last:
        gl.store(arrival_ptr, 0)
    return last


@gluon.jit
def sum_splits(
    part_ptrs,
    lane,
    lanes,
    part,
    SPLITS: gl.constexpr,
    L: gl.constexpr,
    B: gl.constexpr,
    layout: gl.constexpr,
):
    """Add up the parts [L, B] of a product that all splits stored, in order."""
    inside = (lane < lanes)[:, None]
    y = gl.zeros([L, B], gl.float32, layout)
    for split in gl.static_range(SPLITS):
        y += gl.load(part_ptrs + split * part, mask=inside, other=0.0, cache_modifier=".cg")
    return y
