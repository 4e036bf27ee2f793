"""The twins of `linear.py` in plain PyTorch; their order of sums is that of a CPU engine."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import (
    live_lanes,
    output_rows,
)
from graphengine.kernels.linear.residual import (
    Product,
    Residual,
    add_to_residual_reference,
    sums_of_squares,
)
from graphengine.kernels.norm_rope.activation import Activation, activated_reference

REFERENCE_ROWS = 4


def linear_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    swiglu: bool = False,
    activation: Activation = "silu",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in plain PyTorch, for any number of lanes: what a CPU engine decodes with.

    On a CPU as well a lane's bits do not depend on N, on its index, or on its neighbours.
    """
    outputs = weight_MK.shape[0] // 2 if swiglu else weight_MK.shape[0]
    out_dtype = x_NK.dtype if out_dtype is None else out_dtype
    if out is None:
        out = output_rows(None, (x_NK.shape[0], outputs), dtype=out_dtype, like=x_NK)
    weight = weight_MK.float()
    live = live_lanes(slot_N)
    for first in range(0, len(live), REFERENCE_ROWS):
        lanes = live[first : first + REFERENCE_ROWS]
        y = matmul_group(x_NK[lanes].float(), weight)
        if squares_TN is not None:
            mean = sum_in_order(squares_TN[:, lanes]) / x_NK.shape[1]
            y = y * torch.rsqrt(mean + eps)[:, None]
        if bias is not None:
            y = y + bias.float()
        if swiglu:
            gate, up = y.chunk(2, dim=1)
            y = activated_reference(gate, activation) * up
        out[lanes] = y.to(out.dtype)
    return out


def linear_residual_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_M: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
) -> Residual:
    """`linear_residual` in plain PyTorch; writes into all three tensors of `residual`."""
    y = linear_reference(
        x_NK,
        weight_MK,
        slot_N,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        out_dtype=torch.float32,
    )
    return add_to_residual_reference(y, slot_N, residual, next_norm_M)


def linear_squares_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    product: Product,
    *,
    bias: torch.Tensor | None = None,
) -> Product:
    """`linear_squares` in plain PyTorch; writes into both tensors of `product`."""
    linear_reference(x_NK, weight_MK, slot_N, bias=bias, out=product.y)
    live = live_lanes(slot_N)
    groups = product.squares.shape[0]
    product.squares[:, live] = sums_of_squares(product.y[live], groups)
    return product


def sum_in_order(squares: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, by an order that the number of lanes does not change."""
    total = squares[0]
    for group in squares[1:]:
        total = total + group
    return total


def matmul_group(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T of 1 to REFERENCE_ROWS rows, always as the same product of REFERENCE_ROWS.

    A BLAS picks another order of summation for other row counts, and may for other alignments: each
    row of the group starts on a cache line. The weight stands first because a BLAS shares the long
    side among threads, not K.
    """
    rows, K = x.shape
    aligned = (K + 15) // 16 * 16
    group = torch.zeros((REFERENCE_ROWS, aligned), dtype=x.dtype, device=x.device)[:, :K]
    group[:rows] = x
    return torch.mm(weight, group.t())[:, :rows].t()
