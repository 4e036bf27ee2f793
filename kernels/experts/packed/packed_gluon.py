"""Decode products with experts in 8 and 4 bits, in Gluon.

That is `linear/gluon/packed_gluon_product.py` with an expert's codes, and with pairs as lanes.

A program takes one pair, or a block of pairs of one expert, whose codes are then read once. A
pair's sum is a column of every `mma.sync`, independent of the other columns. So both forms give it
the same bits, in blocks of any size.

For down the experts are known two launches earlier, so its codes are loaded before the launch waits
for its inputs. Gates and ups come right after the router and wait for it.

Letters: N lanes, k experts of a lane, P = N * k pairs, L pairs of a program, K input features, M
rows of an expert's weight, R blocks of 16 of them and B outputs of a program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.core.triton_versions import sync_threads
from graphengine.kernels.experts.held import place_of_expert
from graphengine.kernels.linear.gluon.linear_gluon_epilogue import (
    load_rows,
    load_squares,
    rms_factor,
    row_layout,
    squares_layout,
)
from graphengine.kernels.linear.gluon.packed_gluon_product import (
    load_row_scales,
    multiply_tiles,
    sum_streams,
)
from graphengine.kernels.linear.gluon.packed_gluon_ring import (
    fill_ring,
    input_lanes_layout,
    load_inputs,
    new_ring,
    place_codes,
    place_inputs,
    store_inputs,
)
from graphengine.kernels.linear.operands import KEEPING_FIELDS, STREAM_FIELDS
from graphengine.kernels.linear.packed_cut import ProgramPart
from graphengine.kernels.norm_rope.activation import gated, squared

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)
_gated = gluon.jit(gated.fn)
_squared = gluon.jit(squared.fn)
_place_of_expert = gluon.jit(place_of_expert.fn)


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "eps"])
def packed_experts_kernel(
    x_ptr,
    squares_ptr,
    weight,
    bias_ptr,
    slot_ptr,
    expert_ptr,
    share_ptr,
    order_ptr,
    blocks_ptr,
    out_ptr,
    arrivals_ptr,
    stream,
    lanes,
    x_pitch,
    eps,
    cut,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    LIMIT: gl.constexpr,
    SLOPE: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for a block of L (8, 16 or 32) pairs and R blocks of rows of their expert.

    Without blocks a program takes a single pair, straight from the router. A SwiGLU, or with a
    LIMIT below 0 a squared ReLU, reads rows by lane and stores its outputs. Down, which has a
    stream, reads rows by pair; the last of a lane's pairs to arrive adds all of them to the stream,
    or stores their sum if there is no stream. Pairs of other ranks' experts arrive without a
    product. The other arguments are those of `packed_gluon.packed_kernel` and
    `experts_triton.down_kernel`.
    """
    gl.static_assert(cut.stages <= cut.tiles and (cut.stages > 1 or cut.tiles == 1))
    rows: gl.constexpr = row_layout(cut.B, cut.warps)
    by_lane: gl.constexpr = cut.swiglu or LIMIT < 0
    codes, inputs = new_ring(x_ptr.dtype.element_ty, cut)
    tile = gl.program_id(0)

    if by_lane:
        _wait_for_inputs(PDL, OVERLAP)
    block = _block(slot_ptr, expert_ptr, blocks_ptr, TOP_K, FIRST, HELD)
    expert = block[0]
    if by_lane and expert < 0:
        return
    # For down a program without an expert loads nothing, and waits.
    some = expert >= 0
    index = gl.maximum(expert, 0).to(gl.int64)
    if HELD > 0:
        if by_lane and expert >= HELD:
            return
        some = some & (expert < HELD)
        index = gl.where(some, expert, 0).to(gl.int64)
    part = ProgramPart(weight=index, there=some, tile=tile, split=0)
    code_places = place_codes(weight.codes, part, cut)
    scales = fill_ring(codes, code_places, weight, part, cut)
    output = tile * cut.B + gl.arange(0, cut.B, gl.SliceLayout(0, rows))
    row_scales_ptr = weight.row_scales
    if row_scales_ptr is not None:
        row_scales_ptr += index * (cut.row_blocks * 16)
    row_scale, up_scale = load_row_scales(row_scales_ptr, output, cut)
    if bias_ptr is not None:
        bias_ptr += index * cut.M
    norm, bias, up_bias = load_rows(stream, bias_ptr, output, cut.outputs, cut.swiglu)
    x_lanes: gl.constexpr = input_lanes_layout(cut.stream, cut.streams, cut.warps)
    x_pair, x_there = _pairs(order_ptr, block, cut.x_lanes, x_lanes)
    pair, there = _pairs(order_ptr, block, cut.L, gl.SliceLayout(1, rows))
    outputs = (tile, output, norm)
    sums = (out_ptr, share_ptr, expert_ptr, arrivals_ptr, lanes)
    if not by_lane:
        _wait_for_inputs(PDL, OVERLAP)
        if expert < 0:
            return
        if HELD > 0 and expert >= HELD:
            _arrive(pair, there, outputs, sums, stream, cut.M, TOP_K, FIRST, HELD)
            return

    x_row = x_pair // TOP_K if by_lane else x_pair
    x_ptrs, k = place_inputs(x_ptr, x_row, 0, x_pitch, cut)
    input_places = (x_ptrs, k, x_there)
    early_inputs = load_inputs(input_places, cut)
    squares_at: gl.constexpr = gl.SliceLayout(0, squares_layout(cut.warps))
    squares_pair, squares_there = _pairs(order_ptr, block, cut.L, squares_at)
    squares_lane = squares_pair // TOP_K
    squares = load_squares(squares_ptr, squares_lane, squares_there, lanes, GROUPS, cut.warps)
    store_inputs(inputs, early_inputs, cut)

    y = multiply_tiles((codes, inputs), (code_places, input_places), scales, cut)
    whole, up = sum_streams(y, cut)
    whole *= row_scale[None, :]
    up *= up_scale[None, :]
    if GROUPS > 0:
        factor = rms_factor(squares, pair, cut.K, eps)
        whole *= factor[:, None]
        up *= factor[:, None]
    whole += bias[None, :]
    up += up_bias[None, :]
    stored = there[:, None] & (output < cut.outputs)[None, :]
    out_ptrs = out_ptr + pair.to(gl.int64)[:, None] * cut.outputs + output[None, :]
    if by_lane:
        a = _gated(whole, up, LIMIT, SLOPE) if cut.swiglu else _squared(whole)
        gl.store(out_ptrs, a.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        gl.store(out_ptrs, whole, mask=stored)
        sync_threads()
        _arrive(pair, there, outputs, sums, stream, cut.M, TOP_K, FIRST, HELD)


@gluon.jit
def _arrive(
    pair,
    there,
    outputs,
    sums,
    stream,
    M: gl.constexpr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """Record that pairs have stored their products, if any; the last of a lane's pairs adds up all
    of them.
    """
    tile, _, _ = outputs
    _, _, _, arrivals_ptr, _ = sums
    lane = pair // TOP_K
    arrival_ptrs = arrivals_ptr + lane * gl.num_programs(0) + tile
    one = gl.full_like(pair, 1)
    arrived = gl.atomic_add(arrival_ptrs, one, mask=there, sem="acq_rel")
    done = there & (arrived == TOP_K - 1)
    if gl.max(done.to(gl.int32), axis=0) > 0:
        gl.store(arrival_ptrs, gl.zeros_like(pair), mask=done)
        _add_pairs(lane, done, outputs, sums, stream, M, TOP_K, FIRST, HELD)


@gluon.jit
def _block(
    slot_ptr,
    expert_ptr,
    blocks_ptr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """The place of the program's expert (-1 for none), the first place of its pairs, and their
    number.
    """
    start = gl.program_id(1)
    if blocks_ptr is not None:
        at = blocks_ptr + start
        expert = gl.load(at, cache_modifier=".cg")
        start = gl.load(at + gl.num_programs(1), cache_modifier=".cg")
        count = gl.load(at + 2 * gl.num_programs(1), cache_modifier=".cg")
        # Without an expert, start and count are arbitrary.
        count = gl.where(expert >= 0, count, 0)
    else:
        # Both loads at once. The expert of a padded lane is arbitrary.
        slot = gl.load(slot_ptr + start // TOP_K, cache_modifier=".cg")
        expert = _place_of_expert(gl.load(expert_ptr + start, cache_modifier=".cg"), FIRST, HELD)
        expert = gl.where(slot >= 0, expert, -1)
        count = 1
    return expert, start, count


@gluon.jit
def _pairs(order_ptr, block, L: gl.constexpr, layout: gl.constexpr):
    """The pairs [L] of a program, and which of them exist."""
    _, start, count = block
    row = gl.arange(0, L, layout)
    there = row < count
    pair = start + row
    if order_ptr is not None:
        pair = gl.load(order_ptr + pair, mask=there, other=0, cache_modifier=".cg")
    return pair, there


@gluon.jit
def _add_pairs(
    lane,
    live,
    outputs,
    sums,
    stream,
    M: gl.constexpr,
    TOP_K: gl.constexpr,
    FIRST: gl.constexpr,
    HELD: gl.constexpr,
):
    """Add the products of lanes' pairs, each times its share and in rank order, to the residual
    stream, and leave what the next norm needs; or only store their sum if there is no stream. Pairs
    of other ranks' experts add nothing.
    """
    tile, output, norm = outputs
    y_ptr, share_ptr, expert_ptr, _, lanes = sums
    stored = live[:, None] & (output < M)[None, :]
    at = lane.to(gl.int64)[:, None] * M + output[None, :]
    base = gl.zeros_like(at, dtype=gl.float32)
    if len(stream) >= STREAM_FIELDS:
        base = gl.load(stream.x + at, mask=stored, other=0.0)
    products, shares = (), ()
    for rank in gl.static_range(TOP_K):
        pair = lane * TOP_K + rank
        shares += (gl.load(share_ptr + pair, mask=live, other=0.0),)  # type: ignore[assignment]
        y_ptrs = y_ptr + pair.to(gl.int64)[:, None] * M + output[None, :]
        if HELD > 0:
            expert = gl.load(expert_ptr + pair, mask=live, other=0)
            here = _place_of_expert(expert, FIRST, HELD) < HELD
            mask = stored & here[:, None]
            y = gl.load(y_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        else:
            y = gl.load(y_ptrs, mask=stored, other=0.0, cache_modifier=".cg")
        products += (y,)  # type: ignore[assignment]
    total = gl.zeros_like(base)
    for rank in gl.static_range(TOP_K):
        share = gl.broadcast(shares[rank][:, None], total)[0]
        total = gl.fma(share, products[rank], total)
    x = base + total
    gl.store(stream.x + at, x, mask=stored)
    if len(stream) >= STREAM_FIELDS:
        scaled = (x * norm[None, :]).to(stream.scaled.dtype.element_ty)
        gl.store(stream.scaled + at, scaled, mask=stored)
        if len(stream) == KEEPING_FIELDS:
            kept = (x * stream.kept_scale).to(stream.kept.dtype.element_ty)
            kept_rows = lane.to(gl.int64)[:, None] * stream.kept_stride
            gl.store(stream.kept + kept_rows + output[None, :], kept, mask=stored)
        squares = gl.sum(gl.where(stored, x * x, 0.0), axis=1)
        gl.store(stream.squares + tile * lanes + lane, squares, mask=live)
