"""The sum of two products after a norm of each: experts beside a feed-forward, as Gemma 4 has them.

Letters: N lanes, H hidden.
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
from graphengine.kernels.linear.residual import Product
from graphengine.kernels.norm_rope.norm import row_options


def normed_sum(
    a_NH: torch.Tensor,
    b_NH: torch.Tensor,
    a_norm_H: torch.Tensor,
    b_norm_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> Product:
    """y = a_norm * a / rms(a) + b_norm * b / rms(b) of each live lane, in one launch.

    rms(x) is sqrt(mean(x**2) + eps).

    Args:
        a_NH, b_NH: one dtype of float32, float16, bfloat16; dense rows, any stride between them.
        a_norm_H, b_norm_H: any float dtype.
        slot_N: int32, -1 = padded lane.
        out: [N, H] in their dtype; may be `a` or `b` itself, and must not overlap them otherwise.
        pdl: the launch before, whatever it is, may still run; it does not write the norms.

    Returns:
        y, [N, H] in the inputs' dtype, computed in float32 and rounded once, and float32 [1, N] the
        sums of its squares before rounding, for `add_normed`. Padded lanes are neither read nor
        written. ValueError for a shape or dtype that does not fit.
    """
    check_rows(a_NH=a_NH, b_NH=b_NH)
    lanes, H = a_NH.shape
    if b_NH.shape != a_NH.shape or b_NH.dtype != a_NH.dtype:
        raise ValueError(
            f"a_NH is {a_NH.dtype} {list(a_NH.shape)}, b_NH {b_NH.dtype} {list(b_NH.shape)}"
        )
    for name, weight in (("a_norm_H", a_norm_H), ("b_norm_H", b_norm_H)):
        check_weight(name, weight, H)
    check_lanes(lanes, slot_N=slot_N)
    out = output_rows(out, (lanes, H), dtype=a_NH.dtype, like=a_NH)
    if not use_triton(a_NH):
        return normed_sum_reference(a_NH, b_NH, a_norm_H, b_norm_H, slot_N, eps=eps, out=out)
    squares = torch.empty((1, lanes), dtype=torch.float32, device=a_NH.device)
    launcher(_normed_sum_kernel, (lanes,))(
        a_NH,
        b_NH,
        a_norm_H,
        b_norm_H,
        slot_N,
        out,
        squares,
        a_NH.stride(0),
        b_NH.stride(0),
        out.stride(0),
        eps,
        **row_options(H),
        **launch_options(pdl),
    )
    return Product(out, squares)


@triton.jit
def _normed_sum_kernel(
    a_ptr,
    b_ptr,
    a_norm_ptr,
    b_norm_ptr,
    slot_ptr,
    out_ptr,
    squares_ptr,
    a_stride,
    b_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane, in two passes: squares of both rows, then their sum."""
    lane = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    a_norm = tl.load(a_norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    b_norm = tl.load(b_norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    a_row_ptr, b_row_ptr = a_ptr + lane * a_stride, b_ptr + lane * b_stride
    target = out_ptr + lane * out_stride

    a = tl.load(a_row_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    b = tl.load(b_row_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    a_squares, b_squares = a * a, b * b
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(a_row_ptr + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        a_squares += more * more
        more = tl.load(b_row_ptr + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        b_squares += more * more
    a_scale = tl.rsqrt(tl.sum(a_squares) / H + eps)
    b_scale = tl.rsqrt(tl.sum(b_squares) / H + eps)

    y = a * a_scale * a_norm + b * b_scale * b_norm
    tl.store(target + h, y.to(out_ptr.dtype.element_ty), mask=h < H)
    squares = y * y
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = start + h
        a = tl.load(a_row_ptr + more, mask=more < H, other=0.0).to(tl.float32)
        b = tl.load(b_row_ptr + more, mask=more < H, other=0.0).to(tl.float32)
        a_norm = tl.load(a_norm_ptr + more, mask=more < H, other=0.0).to(tl.float32)
        b_norm = tl.load(b_norm_ptr + more, mask=more < H, other=0.0).to(tl.float32)
        y = a * a_scale * a_norm + b * b_scale * b_norm
        tl.store(target + more, y.to(out_ptr.dtype.element_ty), mask=more < H)
        squares += y * y
    tl.store(squares_ptr + lane, tl.sum(squares))


def normed_sum_reference(
    a_NH: torch.Tensor,
    b_NH: torch.Tensor,
    a_norm_H: torch.Tensor,
    b_norm_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor | None = None,
) -> Product:
    """`normed_sum` in plain PyTorch."""
    lanes, H = a_NH.shape
    out = output_rows(out, (lanes, H), dtype=a_NH.dtype, like=a_NH)
    squares = torch.empty((1, lanes), dtype=torch.float32, device=a_NH.device)
    live = live_lanes(slot_N)
    y = torch.zeros((len(live), H), dtype=torch.float32, device=a_NH.device)
    for x_NH, norm_H in ((a_NH, a_norm_H), (b_NH, b_norm_H)):
        x = x_NH[live].float()
        mean = sum_rows(x.square()) / H
        y += x * torch.rsqrt(mean + eps)[:, None] * norm_H.float()
    squares[0, live] = sum_rows(y.square())
    out[live] = y.to(out.dtype)
    return Product(out, squares)
