"""`linear.py` in plain PyTorch. A CPU engine decodes with it, and so sums in its order."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import live_rows
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import Epilogue, Result
from graphengine.kernels.linear.packed import unpack
from graphengine.kernels.linear.quantised import dequantise

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
    if call.delta_NM is not None:
        y = y + call.delta_NM[live].float()
    if call.bias is not None:
        y = y + call.bias.float()
    return epilogue.finish(y, live, call)


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
    padded = x.new_zeros((whole, aligned))[:, :K]
    padded[:rows] = x
    if whole == REFERENCE_ROWS:
        # Most decode steps: only rows that are asked for are copied.
        return torch.mm(weight, padded.t()).t()[:rows].contiguous()
    y = x.new_empty((whole, weight.shape[0]))
    for first in range(0, whole, REFERENCE_ROWS):
        group = slice(first, first + REFERENCE_ROWS)
        y[group] = torch.mm(weight, padded[group].t()).t()
    return y[:rows]
