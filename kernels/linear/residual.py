"""The residual stream of decode, as one fused kernel hands it to the next.

A linear that reads the stream needs it normalised: y = W (g * x / rms(x)). The kernel that writes
`x` also writes `g * x`, rounded once to the model's dtype, and partial sums of squares for the mean
square; the kernel that reads it multiplies its product by 1 / rms(x). So no kernel reads float32
activations, and a norm costs no launch. Where the stream itself is read after a layer, the kernel
that writes `x` there leaves a rounded copy too.

Letters: N lanes, H hidden, T groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from graphengine.kernels.core.lanes import live_rows, output_rows, sum_rows


class StreamCopy(NamedTuple):
    """Where the stream is also stored, for a reader other than the next block."""

    rows: torch.Tensor
    """model dtype [N, H], dense rows, any stride between them"""
    scale: float = 1.0
    """Factor of the stream before it is rounded."""


class Residual(NamedTuple):
    """The stream that decode kernels pass on; valid until the next replay. Padded lanes hold
    anything.
    """

    x: torch.Tensor
    """float32 [N, H]"""
    scaled: torch.Tensor
    """model dtype [N, H]: x times the weight of the RMSNorm that reads it next."""
    squares: torch.Tensor
    """float32 [T, N]: partial sums of x * x; the whole is their sum in order of T."""
    kept: StreamCopy | None = None
    """Where each kernel that changes x also stores it; None: nowhere."""


class Product(NamedTuple):
    """A product with a norm of its own; valid until the next replay. Padded lanes hold anything."""

    y: torch.Tensor
    """float32 [N, H]"""
    squares: torch.Tensor
    """float32 [T, N]: partial sums of y * y, as a `Residual` has them."""


def check_residual(residual: Residual, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Raise ValueError unless products in `dtype` can be added to this stream of `shape`."""
    for name, tensor, wanted in (
        ("x", residual.x, torch.float32),
        ("scaled", residual.scaled, dtype),
    ):
        if tensor.shape != shape or tensor.dtype != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"residual.{name} must be a dense {wanted} {list(shape)}, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    check_kept(residual)


def check_kept(residual: Residual) -> None:
    """Raise ValueError unless the rows that are kept have the stream's lanes, width and dtype."""
    if residual.kept is not None:
        shape, dtype = residual.x.shape, residual.scaled.dtype
        output_rows(residual.kept.rows, shape, dtype=dtype, like=residual.x)


def check_squares(squares_TN: torch.Tensor, lanes: int) -> None:
    """Raise ValueError unless these are sums of one or more groups for this many lanes."""
    shape, dtype = tuple(squares_TN.shape), squares_TN.dtype
    dense = dtype == torch.float32 and squares_TN.is_contiguous()
    if len(shape) != 2 or shape[0] < 1 or shape[1] != lanes or not dense:
        raise ValueError(f"squares must be a dense float32 [T, {lanes}], not {dtype} {shape}")


def add_to_residual_reference(
    y_NH: torch.Tensor, slot_N: torch.Tensor, residual: Residual, next_norm_H: torch.Tensor
) -> Residual:
    """Add y, float32 [N, H], to residual.x, and write the inputs of the next norm, in plain
    PyTorch.

    All three tensors are written, and `kept` if there is one, except in padded lanes.
    """
    live = live_rows(slot_N)
    return add_live_rows(y_NH[live], live, residual, next_norm_H)


def add_live_rows(
    y_LH: torch.Tensor, live: slice | torch.Tensor, residual: Residual, next_norm_H: torch.Tensor
) -> Residual:
    """`add_to_residual_reference` of a product that has rows only for the L live lanes."""
    check_kept(residual)
    x = residual.x[live] + y_LH
    residual.x[live] = x
    residual.scaled[live] = (x * next_norm_H.float()).to(residual.scaled.dtype)
    residual.squares[:, live] = sums_of_squares(x, residual.squares.shape[0])
    if residual.kept is not None:
        rows, scale = residual.kept
        rows[live] = (x * scale).to(rows.dtype)
    return residual


def sums_of_squares(x_NH: torch.Tensor, groups: int) -> torch.Tensor:
    """[T, N]: the sum of squares of each of T groups of columns, in plain PyTorch."""
    lanes, H = x_NH.shape
    columns = -(-H // groups)
    padded = x_NH.square()
    if groups * columns != H:
        padded = functional.pad(padded, (0, groups * columns - H))
    return sum_rows(padded.view(lanes * groups, columns)).view(lanes, groups).t()


def new_product(x_NK: torch.Tensor, H: int, groups: int) -> Product:
    """An uninitialised product [N, H] of these inputs with `groups` partial sums a lane."""
    lanes = x_NK.shape[0]
    return Product(
        y=x_NK.new_empty((lanes, H), dtype=torch.float32),
        squares=x_NK.new_empty((groups, lanes), dtype=torch.float32),
    )


def new_residual(
    lanes: int, hidden: int, groups: int, *, dtype: torch.dtype, device: torch.device | str
) -> Residual:
    """An uninitialised stream of `lanes` x `hidden` with `groups` partial sums a lane."""
    return Residual(
        x=torch.empty((lanes, hidden), dtype=torch.float32, device=device),
        scaled=torch.empty((lanes, hidden), dtype=dtype, device=device),
        squares=torch.empty((groups, lanes), dtype=torch.float32, device=device),
    )
