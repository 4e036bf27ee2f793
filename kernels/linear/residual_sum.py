"""Add a whole product to the residual stream, x += y, and write the inputs of the next norm.

On one rank the product's own kernel does this (`AddResidual`). Where ranks have parts of the
product, it has to wait for their sum.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_weight, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.residual import (
    Residual,
    add_to_residual_reference,
    check_kept,
)

# Columns of a program.
_BLOCK_H = 512


def add_to_residual(
    y_NH: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    *,
    bias_H: torch.Tensor | None = None,
    pdl: bool = False,
) -> Residual:
    """Add y + bias to residual.x, and write the inputs of the norm after it.

    Args:
        y_NH: dense float32.
        slot_N: int32, -1 = padded lane.
        residual: `x` is updated and `scaled` written, both in place; `squares` is not read. The new
            `x` goes to `kept` too, if there is one.
        next_norm_H, bias_H: any float dtype.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        The same `x` and `scaled`, with new `squares`. Sums are float32, `scaled` is rounded once.
        Padded lanes are not written. ValueError for a shape or dtype that does not fit.
    """
    lanes, H = residual.x.shape
    for name, tensor in (("y", y_NH), ("residual.x", residual.x)):
        if (
            tensor.dtype != torch.float32
            or tensor.shape != (lanes, H)
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be a dense float32 {[lanes, H]}, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    check_lanes(lanes, slot_N=slot_N)
    check_weight("next_norm", next_norm_H, H)
    if bias_H is not None:
        check_weight("bias", bias_H, H)
    scaled = output_rows(residual.scaled, (lanes, H), dtype=residual.scaled.dtype, like=y_NH)
    check_kept(residual)
    kept, kept_scale = (None, 1.0) if residual.kept is None else residual.kept
    tiles = triton.cdiv(H, _BLOCK_H)
    residual = residual._replace(squares=y_NH.new_empty(tiles, lanes))
    if not use_triton(y_NH):
        whole = y_NH if bias_H is None else y_NH + bias_H.float()
        return add_to_residual_reference(whole, slot_N, residual, next_norm_H)
    launcher(_add_to_residual_kernel, (lanes, tiles))(
        y_NH,
        next_norm_H if bias_H is None else bias_H,
        slot_N,
        residual.x,
        next_norm_H,
        scaled,
        residual.squares,
        kept,
        lanes,
        scaled.stride(0),
        0 if kept is None else kept.stride(0),
        kept_scale,
        H=H,
        HAS_BIAS=bias_H is not None,
        BLOCK_H=_BLOCK_H,
        num_warps=4,
        **launch_options(pdl),
    )
    return residual


@triton.jit(do_not_specialize=["lanes", "kept_scale"])
def _add_to_residual_kernel(
    y_ptr,
    bias_ptr,
    slot_ptr,
    x_ptr,
    next_ptr,
    scaled_ptr,
    squares_ptr,
    kept_ptr,
    lanes,
    scaled_stride,
    kept_stride,
    kept_scale,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_H columns."""
    lane = tl.program_id(0)
    tile = tl.program_id(1)
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < H
    following = tl.load(next_ptr + h, mask=mask, other=0.0).to(tl.float32)
    bias = tl.zeros([BLOCK_H], dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + h, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    row = lane.to(tl.int64) * H
    y = tl.load(y_ptr + row + h, mask=mask, other=0.0)
    x = tl.load(x_ptr + row + h, mask=mask, other=0.0)
    x += y + bias
    tl.store(x_ptr + row + h, x, mask=mask)
    leave_for_norm(
        x,
        h,
        mask,
        lane,
        following,
        scaled_ptr,
        scaled_stride,
        squares_ptr,
        tile,
        lanes,
        kept_ptr,
        kept_stride,
        kept_scale,
    )


@triton.jit
def leave_for_norm(
    x,
    h,
    mask,
    lane,
    following,
    scaled_ptr,
    scaled_stride,
    squares_ptr,
    tile,
    lanes,
    kept_ptr,
    kept_stride,
    kept_scale,
):
    """Store the next norm's inputs for columns `h` of a lane's stream: the columns times the norm's
    weight, and the sum of their squares. Where the stream is kept, store that copy too. A product
    with a norm of its own has only squares.
    """
    if scaled_ptr is not None:
        scaled = (x * following).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + tl.cast(lane, tl.int64) * scaled_stride + h, scaled, mask=mask)
    if kept_ptr is not None:
        kept = (x * kept_scale).to(kept_ptr.dtype.element_ty)
        tl.store(kept_ptr + tl.cast(lane, tl.int64) * kept_stride + h, kept, mask=mask)
    tl.store(squares_ptr + tile * lanes + lane, tl.sum(tl.where(mask, x * x, 0.0), 0))
