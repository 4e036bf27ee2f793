"""Each decode lane's adapter's addition to a product: two launches before the product's own.

`_shrink_lanes_kernel` computes A x of the lanes that have an adapter, `_expand_lanes_kernel`
scale * B of that. The product's own kernel adds the result before its epilogue
(`LinearCall.delta_NM`). Lanes without an adapter add -0.0: their bits are those of a product
without adapters. A lane's sums are formed in an order that follows from the sizes of the slots
alone.

Both launches are short, and the product's weights are long in coming. So with `starts_early` both
start the next launch before they wait: the product then reads its first weights while the kernel
before all three still runs, as it would without adapters. They have A and B in registers by then.

Letters as in `slots.py`, and: T groups of squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_int32
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import (
    EARLY,
    STARTS_EARLY,
    launch_options,
    start_next,
    wait_for_inputs,
)
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.lora.reference import lora_delta_reference
from graphengine.kernels.lora.slots import LoraSlots

# Columns of A of a warp, which holds them in registers.
_WARP_COLUMNS = 2048
# Weight rows of a program that expands.
_BLOCK_M = 128


def lora_delta(
    call: LinearCall, slots: LoraSlots, adapter_S: torch.Tensor, *, starts_early: bool = False
) -> torch.Tensor:
    """New float32 `[N, M]`: scale * B (A x / rms) for the adapter of each live lane's slot.

    Two kernels on the current stream, without a host sync. Sums are float32. Lanes without an
    adapter get -0.0; padded lanes are neither read nor written.

    call          the product: x, squares, eps, slots of lanes and launch options are read
    slots         the matrices of the product's weight
    adapter_S     int32 by slot of a request: the slot of its adapter, -1: none
    starts_early  whether the kernels start the next launch before they wait: only if the launch
                  before does not write the slots of lanes

    ValueError for a shape or dtype that does not fit.
    """
    slots.check(call.x_NK)
    check_int32(adapter_S=adapter_S)
    lanes, rows = call.lanes, slots.rows
    if rows != call.rows:
        raise ValueError(f"slots for M={rows} weight rows, and the weight has {call.rows}")
    delta = torch.empty(lanes, rows, dtype=torch.float32, device=call.x_NK.device)
    if not use_triton(call.x_NK):
        return lora_delta_reference(call, slots, adapter_S, delta)
    inputs, K = slots.parts * slots.rank, call.x_NK.shape[1]
    between = delta.new_empty(lanes, inputs)
    options = launch_options(EARLY if starts_early and call.launch.pdl else call.launch.pdl)
    columns = triton.next_power_of_2(K)
    launcher(_shrink_lanes_kernel, (lanes, inputs))(
        call.x_NK,
        call.squares_TN,
        call.slot_N,
        adapter_S,
        slots.down_AQK,
        slots.scale_AP,
        between,
        lanes,
        call.x_NK.stride(0),
        call.eps,
        K=K,
        GROUPS=call.groups,
        RANK=slots.rank,
        PARTS=slots.parts,
        BLOCK_K=columns,
        num_warps=min(16, max(4, columns // _WARP_COLUMNS)),
        **options,
    )
    launcher(_expand_lanes_kernel, (lanes, triton.cdiv(rows, _BLOCK_M)))(
        between,
        call.slot_N,
        adapter_S,
        slots.up_AMR,
        slots.part_M,
        delta,
        M=rows,
        RANK=slots.rank,
        PARTS=slots.parts,
        BLOCK_M=_BLOCK_M,
        BLOCK_R=triton.next_power_of_2(slots.rank),
        num_warps=4,
        **options,
    )
    return delta


@triton.jit
def adapter_of(slot_ptr, adapter_ptr, lane):
    """The slot of a lane's adapter; -1: it has none; -2: the lane is padded."""
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    adapter = tl.load(adapter_ptr + slot, mask=slot >= 0, other=-1)
    return tl.where(slot >= 0, adapter, -2)


@triton.jit(do_not_specialize=["lanes", "eps"])
def _shrink_lanes_kernel(
    x_ptr,
    squares_ptr,
    slot_ptr,
    adapter_ptr,
    down_ptr,
    scale_ptr,
    between_ptr,
    lanes,
    x_stride,
    eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and row of A."""
    ROWS: tl.constexpr = PARTS * RANK
    lane, row = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    if PDL == STARTS_EARLY:
        start_next(PDL)
    else:
        wait_for_inputs(PDL)
    adapter = adapter_of(slot_ptr, adapter_ptr, lane)
    adapted = adapter >= 0
    matrix_ptr = down_ptr + (adapter.to(tl.int64) * ROWS + row) * K
    down = tl.load(matrix_ptr + k, mask=(k < K) & adapted, other=0.0)
    scale_ptrs = scale_ptr + adapter * PARTS + row // RANK
    scale = tl.load(scale_ptrs, mask=adapted, other=0.0)
    if PDL == STARTS_EARLY:
        wait_for_inputs(True, OVERLAP=False)
    if adapted:
        lane_ptr = x_ptr + lane.to(tl.int64) * x_stride
        x = tl.load(lane_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        y = tl.sum(down.to(tl.float32) * x, axis=0)
        if GROUPS > 0:
            group = tl.arange(0, triton.next_power_of_2(GROUPS))
            squares = tl.load(squares_ptr + group * lanes + lane, mask=group < GROUPS, other=0.0)
            y *= 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / K + eps)
        tl.store(between_ptr + lane * ROWS + row, y * scale)


@triton.jit
def _expand_lanes_kernel(
    between_ptr,
    slot_ptr,
    adapter_ptr,
    up_ptr,
    part_ptr,
    delta_ptr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_M weight rows."""
    lane = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    if PDL == STARTS_EARLY:
        start_next(PDL)
    else:
        wait_for_inputs(PDL)
    part = tl.load(part_ptr + m, mask=m < M, other=0)
    adapter = adapter_of(slot_ptr, adapter_ptr, lane)
    there = ((m < M) & (adapter >= 0))[:, None] & (r < RANK)[None, :]
    row_ptrs = up_ptr + (adapter.to(tl.int64) * M + m) * RANK
    up = tl.load(row_ptrs[:, None] + r[None, :], mask=there, other=0.0)
    if PDL == STARTS_EARLY:
        wait_for_inputs(True, OVERLAP=False)
    of_part = between_ptr + lane * (PARTS * RANK) + part * RANK
    between = tl.load(of_part[:, None] + r[None, :], mask=there, other=0.0)
    y = tl.sum(up.to(tl.float32) * between, axis=1)
    # A constant -0.0 would become 0.0.
    nothing = tl.full((BLOCK_M,), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    delta_ptrs = delta_ptr + lane.to(tl.int64) * M + m
    tl.store(delta_ptrs, tl.where(adapter >= 0, y, nothing), mask=(m < M) & (adapter != -2))
