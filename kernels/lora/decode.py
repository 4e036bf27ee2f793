"""A x of each decode lane's adapter, in a launch before that of the product.

The product's own kernel multiplies the result by B and adds that before its epilogue
(`low_rank.py`). Lanes without an adapter are left alone. A lane's sums are formed in an
order that follows from the sizes of the slots alone.

The launch is short, and the product's weights are long in coming. So with `starts_early` it starts
the next launch before it waits: the product then reads its first weights while the kernel before
both still runs, as it would without adapters. The rows of A are in registers by then.

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
from graphengine.kernels.lora.low_rank import LowRank, adapter_of
from graphengine.kernels.lora.reference import shrink_reference
from graphengine.kernels.lora.slots import LoraSlots

# Columns of A of a warp, which holds them in registers.
_WARP_COLUMNS = 2048


def shrink(
    call: LinearCall, slots: LoraSlots, adapter_S: torch.Tensor, *, starts_early: bool = False
) -> LowRank:
    """scale * A x / rms for the adapter of each live lane's slot, with what it is multiplied by.

    One kernel on the current stream, without a host sync. Sums are float32. Lanes without an
    adapter and padded lanes are neither read nor written.

    call          the product: x, squares, eps, slots of lanes and launch options are read
    slots         the matrices of the product's weight
    adapter_S     int32 by slot of a request: the slot of its adapter, -1: none
    starts_early  whether the kernel starts the next launch before it waits: only if the launch
                  before does not write the slots of lanes

    ValueError for a shape or dtype that does not fit.
    """
    slots.check(call.x_NK)
    check_int32(adapter_S=adapter_S)
    (lanes, K), rows = call.x_NK.shape, slots.rows
    if rows != call.rows:
        raise ValueError(f"slots for M={rows} weight rows, and the weight has {call.rows}")
    inputs = slots.parts * slots.rank
    between = torch.empty(lanes, inputs, dtype=torch.float32, device=call.x_NK.device)
    found = LowRank(between, slots.up_ARM, slots.part_M, adapter_S)
    if not use_triton(call.x_NK):
        shrink_reference(call, slots, adapter_S, between)
        return found
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
        **launch_options(EARLY if starts_early and call.launch.pdl else call.launch.pdl),
    )
    return found


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
