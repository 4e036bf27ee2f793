"""`decode.py` and `chunk.py` in plain PyTorch; a CPU engine computes with it.

Letters as in `slots.py`, and: T lanes of a chunk.
"""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.reference import matmul_groups, sum_in_order
from graphengine.kernels.lora.slots import LoraSlots

NOTHING = -0.0
"""The addition of lanes without an adapter. -0.0 changes no bit; 0.0 would change -0.0."""


def lora_delta_reference(
    call: LinearCall, slots: LoraSlots, adapter_S: torch.Tensor, out_NM: torch.Tensor
) -> torch.Tensor:
    """`lora_delta` in plain PyTorch: a lane's bits depend neither on N nor on its neighbours."""
    live = live_lanes(call.slot_N)
    adapter_L = adapter_S[call.slot_N[live].long()]
    out_NM[live] = NOTHING
    for adapter in adapter_L.unique().tolist():
        if adapter < 0:
            continue
        lanes = live[adapter_L == adapter]
        between = matmul_groups(call.x_NK[lanes].float(), slots.down_AQK[adapter].float())
        if call.squares_TN is not None:
            mean = sum_in_order(call.squares_TN[:, lanes]) / call.x_NK.shape[1]
            between = between * torch.rsqrt(mean + call.eps)[:, None]
        out_NM[lanes] = _up(between, slots, adapter)
    return out_NM


def chunk_delta_reference(
    out_TM: torch.Tensor, x_TK: torch.Tensor, slots: LoraSlots, adapter: int, *, adds: bool
) -> None:
    """One chunk of `add_chunk_delta`, or else of `chunk_delta`, in plain PyTorch: a lane's bits
    depend neither on T nor on its neighbours.
    """
    if adapter < 0:
        if not adds:
            out_TM.fill_(NOTHING)
        return
    between = matmul_groups(x_TK.float(), slots.down_AQK[adapter].float())
    delta = _up(between, slots, adapter, dtype=x_TK.dtype)
    out_TM.copy_(out_TM.float() + delta if adds else delta)


def _up(
    between_LQ: torch.Tensor, slots: LoraSlots, adapter: int, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Float32 `[L, M]`: scale * B of A x, which is rounded to `dtype` once it is scaled."""
    scale = slots.scale_AP[adapter].repeat_interleave(slots.rank)
    return _product_of_parts((between_LQ * scale).to(dtype).float(), slots, adapter)


def _product_of_parts(between_LQ: torch.Tensor, slots: LoraSlots, adapter: int) -> torch.Tensor:
    """`[L, M]`: each row of B times the values of its part."""
    found = between_LQ.new_empty(len(between_LQ), slots.rows)
    for part, values in enumerate(between_LQ.split(slots.rank, dim=1)):
        rows = slots.part_M == part
        found[:, rows] = matmul_groups(values, slots.up_AMR[adapter, rows].float())
    return found
