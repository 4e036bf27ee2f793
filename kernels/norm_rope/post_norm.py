"""A norm between a product and the residual stream: x += post * y / rms(y), then the next norm.

Gemma 2 and 3 have one after each block, besides the one before it. Gemma 4 multiplies the sum that
ends a layer by a learned factor. In decode the product also writes the sums of its squares, so that
a program need not read a whole lane; in prefill a program does.

Letters: N lanes, H hidden, T groups of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_rows,
    check_weight,
    live_lanes,
    output_rows,
    sum_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.reference import sum_in_order
from graphengine.kernels.linear.residual import (
    Product,
    Residual,
    add_to_residual_reference,
    check_kept,
    check_squares,
)
from graphengine.kernels.linear.residual_sum import leave_for_norm
from graphengine.kernels.norm_rope.norm import rms_norm_reference, row_options, store_normed

# Columns of a program in decode: a lane of 2,560 takes 5 programs.
_BLOCK_H = 512


def add_normed(
    product: Product,
    post_norm_H: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    factor_1: torch.Tensor | None = None,
    pdl: bool = False,
) -> Residual:
    """residual.x += post_norm * y / sqrt(mean(y**2) + eps), and the inputs of the norm after it.

    Args:
        product: as the epilogue `StoreSquares` leaves it.
        post_norm_H, next_norm_H: any float dtype.
        residual: `x` is updated and `scaled` written, both in place; `squares` is not read. The new
            `x` goes to `kept` too, if there is one.
        slot_N: int32, -1 = padded lane.
        factor_1: of any float dtype: the sum is multiplied by it. None: it stays.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        The same `x` and `scaled`, with new `squares`. The sum is float32, `scaled` is rounded once.
        Padded lanes are not written. ValueError for a shape or dtype that does not fit.
    """
    y, squares_TN = product
    check_rows(y=y)
    lanes, H = y.shape
    check_lanes(lanes, slot_N=slot_N)
    check_squares(squares_TN, lanes)
    for name, weight in (("post_norm", post_norm_H), ("next_norm", next_norm_H)):
        check_weight(name, weight, H)
    for name, tensor in (("y", y), ("residual.x", residual.x)):
        if tensor.dtype != torch.float32 or tensor.shape != y.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a dense float32 {[lanes, H]}, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    _check_factor(factor_1)
    scaled = output_rows(residual.scaled, (lanes, H), dtype=residual.scaled.dtype, like=y)
    check_kept(residual)
    kept, kept_scale = (None, 1.0) if residual.kept is None else residual.kept
    tiles = triton.cdiv(H, _BLOCK_H)
    residual = residual._replace(squares=y.new_empty(tiles, lanes))
    if not use_triton(y):
        return add_normed_reference(
            product, post_norm_H, residual, next_norm_H, slot_N, eps=eps, factor_1=factor_1
        )
    groups = squares_TN.shape[0]
    launcher(_add_normed_kernel, (lanes, tiles))(
        y,
        squares_TN,
        post_norm_H,
        slot_N,
        residual.x,
        next_norm_H,
        scaled,
        residual.squares,
        kept,
        factor_1,
        lanes,
        scaled.stride(0),
        0 if kept is None else kept.stride(0),
        kept_scale,
        eps,
        H=H,
        T=groups,
        BLOCK_H=_BLOCK_H,
        BLOCK_T=triton.next_power_of_2(groups),
        num_warps=4,
        **launch_options(pdl),
    )
    return residual


@triton.jit(do_not_specialize=["lanes", "kept_scale", "eps"])
def _add_normed_kernel(
    y_ptr,
    squares_ptr,
    post_ptr,
    slot_ptr,
    x_ptr,
    next_ptr,
    scaled_ptr,
    new_squares_ptr,
    kept_ptr,
    factor_ptr,
    lanes,
    scaled_stride,
    kept_stride,
    kept_scale,
    eps,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_H columns; all add up their lane's squares in the same order."""
    lane = tl.program_id(0)
    tile = tl.program_id(1)
    h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < H
    post = tl.load(post_ptr + h, mask=mask, other=0.0).to(tl.float32)
    following = tl.load(next_ptr + h, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    t = tl.arange(0, BLOCK_T)
    squares = tl.load(squares_ptr + t * lanes + lane, mask=t < T, other=0.0)
    row = lane.to(tl.int64) * H
    y = tl.load(y_ptr + row + h, mask=mask, other=0.0)
    x = tl.load(x_ptr + row + h, mask=mask, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / H + eps)
    x += y * scale * post
    if factor_ptr is not None:
        x *= tl.load(factor_ptr).to(tl.float32)
    tl.store(x_ptr + row + h, x, mask=mask)
    leave_for_norm(
        x,
        h,
        mask,
        lane,
        following,
        scaled_ptr,
        scaled_stride,
        new_squares_ptr,
        tile,
        lanes,
        kept_ptr,
        kept_stride,
        kept_scale,
    )


def add_normed_reference(
    product: Product,
    post_norm_H: torch.Tensor,
    residual: Residual,
    next_norm_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    factor_1: torch.Tensor | None = None,
) -> Residual:
    """`add_normed` in plain PyTorch; all three tensors of `residual` are written."""
    live = live_lanes(slot_N)
    mean = sum_in_order(product.squares[:, live]) / product.y.shape[1]
    normed = torch.zeros_like(product.y)
    normed[live] = product.y[live] * torch.rsqrt(mean + eps)[:, None] * post_norm_H.float()
    if factor_1 is not None:
        residual.x[live] = (residual.x[live] + normed[live]) * factor_1.float()
        normed.zero_()
    return add_to_residual_reference(normed, slot_N, residual, next_norm_H)


def add_normed_rms_norm(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor,
    post_norm_H: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    factor_1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x += post_norm * y / sqrt(mean(y**2) + eps) in place, then `rms_norm` of x, in one launch.

    Args:
        post_norm_H: any float dtype.
        factor_1: as in `add_normed`.
        The others as in `add_rms_norm`.

    Returns:
        [N, H] of `out_dtype`, rounded where `rms_norm` rounds; norm and sum are float32. Padded
        lanes are neither read nor written. ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NH=x_NH, y_NH=y_NH)
    lanes, H = x_NH.shape
    if x_NH.dtype != torch.float32:
        raise ValueError(f"x_NH is {x_NH.dtype}, not torch.float32")
    if y_NH.shape != x_NH.shape:
        raise ValueError(f"y_NH is {tuple(y_NH.shape)}, x_NH {tuple(x_NH.shape)}")
    for name, weight in (("post_norm_H", post_norm_H), ("weight_H", weight_H)):
        check_weight(name, weight, H)
    check_lanes(lanes, slot_N=slot_N)
    _check_factor(factor_1)
    out = output_rows(out, (lanes, H), dtype=out_dtype, like=x_NH)
    if not use_triton(x_NH):
        return add_normed_rms_norm_reference(
            x_NH,
            y_NH,
            post_norm_H,
            weight_H,
            slot_N,
            eps=eps,
            out_dtype=out_dtype,
            factor_1=factor_1,
            out=out,
        )
    launcher(_add_normed_rms_norm_kernel, (lanes,))(
        x_NH,
        y_NH,
        post_norm_H,
        weight_H,
        slot_N,
        factor_1,
        out,
        x_NH.stride(0),
        y_NH.stride(0),
        out.stride(0),
        eps,
        **row_options(H),
        **launch_options(pdl),
    )
    return out


@triton.jit
def _add_normed_rms_norm_kernel(
    x_ptr,
    y_ptr,
    post_ptr,
    weight_ptr,
    slot_ptr,
    factor_ptr,
    out_ptr,
    x_stride,
    y_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane, in three passes: y for its norm, both for the sum, x for its norm.

    A row of one block stays in registers.
    """
    lane = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    post = tl.load(post_ptr + h, mask=h < H, other=0.0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    x_row_ptr = x_ptr + lane * x_stride
    y_row_ptr = y_ptr + lane * y_stride
    target = out_ptr + lane * out_stride

    y = tl.load(y_row_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    squares = y * y
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(y_row_ptr + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        squares += more * more
    y_scale = tl.rsqrt(tl.sum(squares) / H + eps)

    x = _add_scaled(x_row_ptr, y, y_scale, post, factor_ptr, h, H)
    squares = x * x
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(y_row_ptr + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        post = tl.load(post_ptr + start + h, mask=start + h < H, other=0.0)
        more = _add_scaled(x_row_ptr, more, y_scale, post, factor_ptr, start + h, H)
        squares += more * more
    scale = tl.rsqrt(tl.sum(squares) / H + eps)

    store_normed(x, scale, weight, target, h, H)
    if H > BLOCK_H:
        # The sums above are read again, maybe by threads that did not store them.
        tl.debug_barrier()
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(x_row_ptr + start + h, mask=start + h < H, other=0.0)
        weight = tl.load(weight_ptr + start + h, mask=start + h < H, other=0.0)
        store_normed(more, scale, weight, target, start + h, H)


@triton.jit
def _add_scaled(x_row_ptr, y, scale, post, factor_ptr, h, H: tl.constexpr):
    """Add columns `h` of a normed y to x in place and return the sums; 0 past the end."""
    x = tl.load(x_row_ptr + h, mask=h < H, other=0.0)
    x += y * scale * post.to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr).to(tl.float32)
    tl.store(x_row_ptr + h, x, mask=h < H)
    return x


def add_normed_rms_norm_reference(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor,
    post_norm_H: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    factor_1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`add_normed_rms_norm` in plain PyTorch."""
    live = live_lanes(slot_N)
    y = y_NH[live].float()
    mean = sum_rows(y.square()) / y.shape[1]
    x = x_NH[live] + y * torch.rsqrt(mean + eps)[:, None] * post_norm_H.float()
    x_NH[live] = x if factor_1 is None else x * factor_1.float()
    return rms_norm_reference(x_NH, weight_H, slot_N, eps=eps, out_dtype=out_dtype, out=out)


def _check_factor(factor_1: torch.Tensor | None) -> None:
    """Raise ValueError for anything but one value of a float dtype, or None."""
    if factor_1 is not None:
        check_weight("factor_1", factor_1, 1)
