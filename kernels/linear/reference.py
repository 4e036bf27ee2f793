"""`linear.py` in plain PyTorch. A CPU engine decodes with it, and so sums in its order."""

from __future__ import annotations

import torch

from graphengine.kernels.core.lanes import (
    live_rows,
    output_rows,
)
from graphengine.kernels.linear.residual import (
    Product,
    Residual,
    add_live_rows,
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
    live = live_rows(slot_N)
    y = _product_of_rows(x_NK, weight_MK, live, squares_TN=squares_TN, eps=eps, bias=bias)
    if swiglu:
        gate, up = y.chunk(2, dim=1)
        y = activated_reference(gate, activation) * up
    out[live] = y.to(out.dtype)
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
    live = live_rows(slot_N)
    y = _product_of_rows(x_NK, weight_MK, live, squares_TN=squares_TN, eps=eps, bias=bias)
    return add_live_rows(y, live, residual, next_norm_M)


def linear_squares_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    product: Product,
    *,
    bias: torch.Tensor | None = None,
) -> Product:
    """`linear_squares` in plain PyTorch; writes into both tensors of `product`."""
    live = live_rows(slot_N)
    y = _product_of_rows(x_NK, weight_MK, live, bias=bias)
    product.y[live] = y
    product.squares[:, live] = sums_of_squares(y, product.squares.shape[0])
    return product


def _product_of_rows(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    live: slice | torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 [L, M], dense, of the L lanes that `live` picks."""
    y = matmul_groups(x_NK[live].float(), weight_MK.float())
    if squares_TN is not None:
        mean = sum_in_order(squares_TN[:, live]) / x_NK.shape[1]
        y = y * torch.rsqrt(mean + eps)[:, None]
    return y if bias is None else y + bias.float()


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
