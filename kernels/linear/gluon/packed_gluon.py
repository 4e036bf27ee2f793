"""Decode products with weights of 8 and 4 bits, in Gluon.

As in `linear_gluon.py` a ring of tiles of codes in shared memory is filled before the launch waits
for its inputs. `packed_gluon_product.py` describes how tiles are multiplied.

Letters as in `packed_cut.py`, and: N lanes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.linear.gluon.linear_gluon_epilogue import (
    epilogue,
    is_last,
    lanes_of,
    load_lanes,
    load_rows,
    ptrs_of_part,
    row_layout,
    sum_splits,
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
from graphengine.kernels.linear.packed_cut import ProgramPart

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "eps", "stop_ids", "ahead"])
def packed_kernel(
    x_ptr,
    squares_ptr,
    weight,
    bias_ptr,
    delta_ptr,
    slot_ptr,
    out_ptr,
    residual,
    sampler,
    token_ids_ptr,
    peers,
    partial_ptr,
    arrivals_ptr,
    lanes,
    x_pitch,
    out_stride,
    eps,
    stop_ids,
    ahead,
    cut,
    GROUPS: gl.constexpr,
    SPLITS: gl.constexpr,
    RANKS: gl.constexpr,
    SIZE: gl.constexpr,
    TIMED: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for L (8, 16 or 32) lanes, R blocks of weight rows, and a part of K.

    `weight` is `PackedArgs`, `cut` `PackedSizes`. The pitch is a stride in units of 8 elements.
    """
    gl.static_assert(cut.stages <= cut.tiles and (cut.stages > 1 or cut.tiles == 1))
    rows: gl.constexpr = row_layout(cut.B, cut.warps)
    codes, inputs = new_ring(x_ptr.dtype.element_ty, cut)
    tile = gl.program_id(1)
    split = gl.program_id(2)

    part = ProgramPart(weight=0, there=True, tile=tile, split=split)
    code_places = place_codes(weight.codes, part, cut)
    scales = fill_ring(codes, code_places, weight, part, cut)
    output = tile * cut.B + gl.arange(0, cut.B, gl.SliceLayout(0, rows))
    norm, bias, up_bias = load_rows(residual, bias_ptr, output, cut.outputs, cut.swiglu)
    row_scale, up_scale = load_row_scales(weight.row_scales, output, cut)
    _wait_for_inputs(PDL, OVERLAP)

    # Padded lanes hold anything: a column of a product touches no other column.
    x_lanes: gl.constexpr = input_lanes_layout(cut.stream, cut.streams, cut.warps)
    x_lane = gl.program_id(0) * cut.L + gl.arange(0, cut.x_lanes, x_lanes)
    x_ptrs, k = place_inputs(x_ptr, x_lane, split, x_pitch, cut)
    input_places = (x_ptrs, k, x_lane < lanes)
    early_inputs = load_inputs(input_places, cut)
    lane = lanes_of(cut.L, rows)
    # With splits only the last program to arrive needs them, along with the others' parts.
    of_lanes = None
    if SPLITS == 1:
        of_lanes = load_lanes(
            lane,
            output,
            lanes,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            cut.outputs,
            cut.warps,
            RANKS,
        )
    store_inputs(inputs, early_inputs, cut)

    y = multiply_tiles((codes, inputs), (code_places, input_places), scales, cut)
    whole, up = sum_streams(y, cut)
    if SPLITS > 1:
        partials = _place_partials(partial_ptr, tile, lanes, cut)
        _store_partial(partials, whole, up, split, lane, lanes, cut)
        if not is_last(arrivals_ptr, tile, SPLITS):
            return
        of_lanes = load_lanes(
            lane,
            output,
            lanes,
            slot_ptr,
            squares_ptr,
            residual,
            delta_ptr,
            peers,
            GROUPS,
            cut.outputs,
            cut.warps,
            RANKS,
        )
        whole, up = _sum_partials(partials, up, lane, lanes, SPLITS, cut)
    epilogue(
        whole * row_scale[None, :],
        up * up_scale[None, :],
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
        cut.K,
        GROUPS,
        cut.outputs,
        cut.swiglu,
        sampler,
        token_ids_ptr,
        stop_ids,
        ahead,
        peers,
        RANKS,
        SIZE,
        TIMED,
    )


@gluon.jit
def _place_partials(partial_ptr, tile, lanes, cut):
    """Where the first split stores its sums [L, B], and the distance to the next split's."""
    rows: gl.constexpr = row_layout(cut.B, cut.warps)
    BLOCK_M: gl.constexpr = 16 * cut.R
    pitch = gl.num_programs(1).to(gl.int64) * BLOCK_M * lanes
    return ptrs_of_part(partial_ptr, tile, cut.L, cut.B, BLOCK_M, rows), pitch


@gluon.jit
def _store_partial(partials, whole, up, split, lane, lanes, cut):
    """Store a split's sums [L, B], and in a SwiGLU those of the ups too."""
    ptrs, pitch = partials
    stored = (lane < lanes)[:, None]
    gl.store(ptrs + split * pitch, whole, mask=stored)
    if cut.swiglu:
        gl.store(ptrs + cut.B + split * pitch, up, mask=stored)


@gluon.jit
def _sum_partials(partials, up, lane, lanes, SPLITS: gl.constexpr, cut):
    """Add up the sums [L, B] of all splits in order, and in a SwiGLU those of the ups as `up`."""
    ptrs, pitch = partials
    rows: gl.constexpr = row_layout(cut.B, cut.warps)
    whole = sum_splits(ptrs, lane, lanes, pitch, SPLITS, cut.L, cut.B, rows)
    if cut.swiglu:
        up = sum_splits(ptrs + cut.B, lane, lanes, pitch, SPLITS, cut.L, cut.B, rows)
    return whole, up
