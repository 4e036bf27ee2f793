"""`linear.py` in plain PyTorch. A CPU engine decodes with it, and so sums in its order."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_rows
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Epilogue, Live, Result
from graphengine.kernels.linear.packed import unpack
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.lora.low_rank import NOTHING, LowRank

REFERENCE_ROWS = 4


def linear_reference(call: LinearCall, epilogue: Epilogue[Result]) -> Result:
    """`linear` in plain PyTorch, for any number of lanes, whose arguments are not checked.

    On a CPU as well a lane's bits do not depend on N, on its index, or on its neighbours.
    """
    call, weight_MK = call.planned(epilogue.kind), call.weight_MK
    if not isinstance(weight_MK, torch.Tensor):
        weight_MK = dequantise(unpack(weight_MK))
    live = live_rows(call.slot_N)
    y = matmul_groups(call.x_NK[live].float(), weight_MK.float())
    if call.squares_TN is not None:
        mean = sum_in_order(call.squares_TN[:, live]) / call.x_NK.shape[1]
        y = y * torch.rsqrt(mean + call.eps)[:, None]
    if isinstance(call.delta, LowRank):
        y = y + low_rank_reference(call.delta, call.slot_N, live)
    elif call.delta is not None:
        y = y + call.delta[live].float()
    if call.bias is not None:
        y = y + call.bias.float()
    return epilogue.finish(y, live, call)


def low_rank_reference(delta: LowRank, slot_N: torch.Tensor, live: Live) -> torch.Tensor:
    """Float32 [L, M]: what the live lanes' adapters add to their products.

    A lane's bits depend neither on L nor on its neighbours.
    """
    between_LQ, adapter_L = delta.between_NQ[live], delta.adapter_S[slot_N[live].long()]
    found = between_LQ.new_full((len(between_LQ), delta.up_ARM.shape[2]), NOTHING)
    for adapter in adapter_L.unique().tolist():
        if adapter >= 0:
            lanes = adapter_L == adapter
            found[lanes] = product_of_parts(between_LQ[lanes], delta.up_ARM[adapter], delta.part_M)
    return found


def product_of_parts(
    between_LQ: torch.Tensor, up_RM: torch.Tensor, part_M: torch.Tensor
) -> torch.Tensor:
    """Float32 [L, M]: each column of `up` times the values of its part."""
    found = between_LQ.new_empty(len(between_LQ), up_RM.shape[1])
    for part, values in enumerate(between_LQ.split(len(up_RM), dim=1)):
        rows = part_M == part
        found[:, rows] = matmul_groups(values, up_RM[:, rows].t().float())
    return found


def sum_in_order(squares: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, in an order that does not depend on the number of lanes."""
    total = squares[0]
    for group in squares[1:]:
        total = total + group
    return total


def matmul_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T, dense, always as the same products of REFERENCE_ROWS rows.

    A BLAS sums in another order for other row counts, and may for other alignments, so each row
    starts on a cache line. The weight comes first because a BLAS divides the long side among
    threads, not K.
    """
    rows, K = x.shape
    whole = -(-rows // REFERENCE_ROWS) * REFERENCE_ROWS
    aligned = (K + 15) // 16 * 16
    padded = torch.zeros((whole, aligned), dtype=x.dtype, device=x.device)[:, :K]
    padded[:rows] = x
    y = x.new_empty((whole, weight.shape[0]))
    for first in range(0, whole, REFERENCE_ROWS):
        group = slice(first, first + REFERENCE_ROWS)
        y[group] = torch.mm(weight, padded[group].t()).t()
    return y[:rows]
