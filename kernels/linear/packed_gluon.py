"""The kernel of `packed_linear.py`: products with weights of 8 and 4 bits, in Gluon.

As in `linear_gluon.py` a ring of tiles of codes in shared memory is filled before the launch waits
for its inputs. `packed_gluon_product.py` says how they are multiplied.

Letters: N lanes, L lanes of a program, K input features, M weight rows, B outputs of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.linear.linear_gluon_epilogue import (
    epilogue,
    lanes_of,
    load_lanes,
    load_rows,
    ptrs_of_part,
    row_layout,
    sum_splits,
)
from graphengine.kernels.linear.packed_gluon_product import (
    ask_codes,
    ask_scales,
    code_places,
    input_layout,
    inputs_inside,
    load_row_scales,
    multiply_tile,
    new_ring,
    product_layout,
    shared_inputs_layout,
    sum_streams,
)

# Gluon and Triton compile the same text, but a function belongs to one of them.
_wait_for_inputs = gluon.jit(wait_for_inputs.fn)


class PackedArgs(NamedTuple):
    """The tensors of a `PackedWeight`."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None


@gluon.jit(do_not_specialize=["lanes", "x_pitch", "eps", "stop_ids", "ahead"])
def packed_kernel(
    x_ptr,
    squares_ptr,
    weight,
    bias_ptr,
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
    M: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLITS: gl.constexpr,
    L: gl.constexpr,
    X_LANES: gl.constexpr,
    CODE: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    STREAMS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN_K: gl.constexpr,
    WARPS: gl.constexpr,
    RANKS: gl.constexpr,
    SIZE: gl.constexpr,
    TIMED: gl.constexpr,
    PDL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One program for L (8, 16 or 32) lanes, BLOCK_M weight rows, and a part of K.

    X_LANES are those in shared memory: L, or 1 that is the only one. COLUMNS are those of a block,
    GROUP those that share a scale (0: all, in `row_scales`). The pitch is a stride in units of 8
    elements. STAGES is what `stages` gives.
    """
    TILES: gl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    gl.static_assert(STAGES <= TILES and (STAGES > 1 or TILES == 1))
    OUTPUTS: gl.constexpr = M // 2 if SWIGLU else M
    B: gl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    STREAM: gl.constexpr = BLOCK_K // STREAMS
    BLOCKS_M: gl.constexpr = (OUTPUTS + 7) // 8 if SWIGLU else (OUTPUTS + 15) // 16
    BLOCKS_K: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    R: gl.constexpr = BLOCK_M // 16
    copied: gl.constexpr = input_layout(STREAM, STREAMS, WARPS)
    rows: gl.constexpr = row_layout(B, WARPS)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    codes = new_ring(STAGES, STREAMS, R, STREAM, COLUMNS)
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, STREAMS, X_LANES, STREAM], shared_inputs_layout(X_LANES)
    )
    tile = gl.program_id(1)
    split = gl.program_id(2)

    places = code_places(
        weight.codes,
        tile * R,
        BLOCKS_M,
        split * (TILES * (BLOCK_K // COLUMNS)),
        BLOCKS_K,
        STREAMS,
        R,
        STREAM,
        COLUMNS,
        WARPS,
    )
    # In the place of scales that there are not.
    scales, zeros = codes, codes
    for stage in gl.static_range(STAGES):
        ask_codes(codes.index(stage), places, stage, BLOCKS_K, COLUMNS, BLOCK_K, EVEN_K)
        if stage == 0 and GROUP > 0:
            # With the first tile, which needs some of them.
            scales, zeros = ask_scales(
                weight.scales,
                weight.zeros,
                tile * R,
                BLOCKS_M,
                split * (TILES * BLOCK_K),
                (K + GROUP - 1) // GROUP,
                K,
                TILES,
                STREAMS,
                R,
                STREAM,
                GROUP,
                ZEROS,
                WARPS,
            )
        # The last group is closed in the loop, which then has one for each of its tiles.
        if stage < STAGES - 1 or STAGES == 1:
            async_copy.commit_group()
    output = tile * B + gl.arange(0, B, gl.SliceLayout(0, rows))
    norm, bias, up_bias = load_rows(residual, bias_ptr, output, OUTPUTS, SWIGLU)
    row_scale, up_scale = load_row_scales(weight.row_scales, output, BLOCKS_M, SWIGLU)
    _wait_for_inputs(PDL, OVERLAP)

    # Padded lanes hold anything: a column of a product touches no other column.
    x_lane = gl.program_id(0) * L + gl.arange(
        0, X_LANES, gl.SliceLayout(0, gl.SliceLayout(2, copied))
    )
    x_stream = gl.arange(0, STREAMS, gl.SliceLayout(1, gl.SliceLayout(2, copied)))
    k = gl.arange(0, STREAM, gl.SliceLayout(0, gl.SliceLayout(1, copied)))
    k = split * (TILES * BLOCK_K) + x_stream[:, None, None] * STREAM + k[None, None, :]
    x_ptrs = x_ptr + (x_lane.to(gl.int64) * (x_pitch.to(gl.int64) * 8))[None, :, None] + k
    x_inside = (x_lane < lanes)[None, :, None]
    early_x = ()
    for stage in gl.static_range(STAGES):
        inside = inputs_inside(x_inside, k + stage * BLOCK_K, K, EVEN_K)
        x = gl.load(x_ptrs + stage * BLOCK_K, mask=inside, other=0.0, cache_modifier=".cg")
        early_x += (x,)  # type: ignore[assignment]
    lane = lanes_of(L, rows)
    # With splits only the last program needs them, along with the parts of the others.
    early = None
    if SPLITS == 1:
        early = load_lanes(
            lane,
            output,
            lanes,
            slot_ptr,
            squares_ptr,
            residual,
            GROUPS,
            OUTPUTS,
            L,
            B,
            WARPS,
            peers,
            RANKS,
        )
    for stage in gl.static_range(STAGES):
        inputs.index(stage).store(early_x[stage])

    y = gl.zeros([STREAMS, BLOCK_M, L], gl.float32, product_layout(STREAMS, WARPS))
    for t in range(TILES):
        # Groups complete in order: those of the tiles up to this one have.
        async_copy.wait_group(max(STAGES - 2, 0))
        gl.thread_barrier()
        if TILES > STAGES:
            # The previous tile is no longer read.
            coming = t + STAGES - 1
            if (t > 0) & (coming < TILES):
                free = coming % STAGES
                ask_codes(codes.index(free), places, coming, BLOCKS_K, COLUMNS, BLOCK_K, EVEN_K)
                inside = inputs_inside(x_inside, k + coming * BLOCK_K, K, EVEN_K)
                async_copy.async_copy_global_to_shared(
                    inputs.index(free), x_ptrs + coming * BLOCK_K, inside
                )
        async_copy.commit_group()
        y = multiply_tile(
            codes.index(t % STAGES),
            inputs.index(t % STAGES),
            scales,
            zeros,
            t,
            y,
            x_ptr,
            CODE,
            COLUMNS,
            GROUP,
            ZEROS,
            WARPS,
        )

    whole, up = sum_streams(y, B, WARPS, SWIGLU)
    if SPLITS == 1:
        epilogue(
            whole * row_scale[None, :],
            up * up_scale[None, :],
            norm,
            bias,
            up_bias,
            early,
            lane,
            output,
            tile,
            lanes,
            eps,
            bias_ptr,
            out_ptr,
            out_stride,
            residual,
            K,
            GROUPS,
            OUTPUTS,
            SWIGLU,
            sampler,
            token_ids_ptr,
            stop_ids,
            ahead,
            peers,
            RANKS,
            SIZE,
            TIMED,
        )
    else:
        part = gl.num_programs(1).to(gl.int64) * BLOCK_M * lanes
        part_ptrs = ptrs_of_part(partial_ptr, tile, L, B, BLOCK_M, rows)
        stored = (lane < lanes)[:, None]
        gl.store(part_ptrs + split * part, whole, mask=stored)
        if SWIGLU:
            gl.store(part_ptrs + B + split * part, up, mask=stored)
        arrival_ptr = arrivals_ptr + tile * gl.num_programs(0) + gl.program_id(0)
        gl.thread_barrier()
        if gl.atomic_add(arrival_ptr, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(arrival_ptr, 0)
            late = load_lanes(
                lane,
                output,
                lanes,
                slot_ptr,
                squares_ptr,
                residual,
                GROUPS,
                OUTPUTS,
                L,
                B,
                WARPS,
                peers,
                RANKS,
            )
            whole = sum_splits(part_ptrs, lane, lanes, part, SPLITS, L, B, rows)
            if SWIGLU:
                up = sum_splits(part_ptrs + B, lane, lanes, part, SPLITS, L, B, rows)
            epilogue(
                whole * row_scale[None, :],
                up * up_scale[None, :],
                norm,
                bias,
                up_bias,
                late,
                lane,
                output,
                tile,
                lanes,
                eps,
                bias_ptr,
                out_ptr,
                out_stride,
                residual,
                K,
                GROUPS,
                OUTPUTS,
                SWIGLU,
                sampler,
                token_ids_ptr,
                stop_ids,
                ahead,
                peers,
                RANKS,
                SIZE,
                TIMED,
            )
