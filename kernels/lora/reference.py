"""`decode.py` and `chunk.py` in plain PyTorch; a CPU engine computes with it.

Letters as in `slots.py`, and: T lanes of a chunk.
"""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_lanes
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.reference import matmul_groups, product_of_parts, sum_in_order
from graphengine.kernels.lora.slots import LoraSlots


def shrink_reference(
    call: LinearCall, slots: LoraSlots, adapter_S: torch.Tensor, out_NQ: torch.Tensor
) -> torch.Tensor:
    """scale * A x of the lanes that have an adapter, in `out`; a lane's bits depend neither on N
    nor on its neighbours.
    """
    live = live_lanes(call.slot_N)
    adapter_L = adapter_S[call.slot_N[live].long()]
    for adapter in adapter_L.unique().tolist():
        if adapter < 0:
            continue
        lanes = live[adapter_L == adapter]
        between = matmul_groups(call.x_NK[lanes].float(), slots.down_AQK[adapter].float())
        if call.squares_TN is not None:
            mean = sum_in_order(call.squares_TN[:, lanes]) / call.x_NK.shape[1]
            between = between * torch.rsqrt(mean + call.eps)[:, None]
        out_NQ[lanes] = between * _scales(slots, adapter)
    return out_NQ


def chunk_delta_reference(x_TK: torch.Tensor, slots: LoraSlots, adapter: int) -> torch.Tensor:
    """Float32 `[T, M]`: what an adapter adds to the products of a chunk's lanes."""
    between = x_TK.float() @ slots.down_AQK[adapter].float().t()
    between = (between * _scales(slots, adapter)).to(x_TK.dtype).float()
    return product_of_parts(between, slots.up_ARM[adapter], slots.part_M)


def _scales(slots: LoraSlots, adapter: int) -> torch.Tensor:
    """[Q]: the scale of each row of A."""
    return slots.scale_AP[adapter].repeat_interleave(slots.rank)
