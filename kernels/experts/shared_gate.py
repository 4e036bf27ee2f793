"""A gate for each token on its shared experts, as in Qwen3.5: sigmoid(h . w) times their output.

Letters: N lanes, H hidden, F ffn width of the shared experts, T groups of columns.
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
    sum_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.reference import sum_in_order
from graphengine.kernels.linear.residual import check_squares
from graphengine.kernels.norm_rope.activation import sigmoid_reference

_BLOCK = 1024


def gate_lanes(
    x_NF: torch.Tensor,
    h_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute x *= sigmoid(h @ weight / rms) in place, one gate per lane, in float32.

    Args:
        x_NF, h_NH: rows dense, any stride between them.
        weight_H: any float dtype.
        slot_N: int32, -1 = padded lane, which is neither read nor written.
        squares_TN, eps: as in `linear`; without them h is already normed.
        pdl: the launch before may still run; it does not write the weight.

    Returns:
        `x_NF`. ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NF=x_NF, h_NH=h_NH)
    (lanes, hidden), values = h_NH.shape, x_NF.shape[1]
    check_weight("weight_H", weight_H, hidden)
    check_lanes(lanes, slot_N=slot_N)
    if len(x_NF) != lanes:
        raise ValueError(f"{len(x_NF)} rows of x_NF, {lanes} of h_NH")
    if squares_TN is not None:
        check_squares(squares_TN, lanes)
    if not use_triton(x_NF):
        return gate_lanes_reference(x_NF, h_NH, weight_H, slot_N, squares_TN=squares_TN, eps=eps)
    groups = 0 if squares_TN is None else len(squares_TN)
    launcher(_gate_lanes_kernel, (lanes,))(
        x_NF,
        h_NH,
        weight_H,
        squares_TN,
        slot_N,
        lanes,
        x_NF.stride(0),
        h_NH.stride(0),
        eps,
        F=values,
        H=hidden,
        T=groups,
        BLOCK_T=triton.next_power_of_2(max(groups, 1)),
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    return x_NF


def gate_lanes_reference(
    x_NF: torch.Tensor,
    h_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`gate_lanes` in plain PyTorch."""
    live = live_lanes(slot_N)
    gate = sum_rows(h_NH[live].float() * weight_H.float())
    if squares_TN is not None:
        gate = gate * torch.rsqrt(sum_in_order(squares_TN[:, live]) / h_NH.shape[1] + eps)
    x_NF[live] = (x_NF[live].float() * sigmoid_reference(gate)[:, None]).to(x_NF.dtype)
    return x_NF


@triton.jit(do_not_specialize=["lanes", "eps"])
def _gate_lanes_kernel(
    x_ptr,
    h_ptr,
    weight_ptr,
    squares_ptr,
    slot_ptr,
    lanes,
    x_stride,
    h_stride,
    eps,
    F: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, H, BLOCK):
        mask = start + columns < H
        h = tl.load(h_ptr + lane * h_stride + start + columns, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + start + columns, mask=mask, other=0.0)
        products += h.to(tl.float32) * weight.to(tl.float32)
    gate = tl.sum(products, 0)
    if T > 0:
        t = tl.arange(0, BLOCK_T)
        squares = tl.load(squares_ptr + t * lanes + lane, mask=t < T, other=0.0)
        gate *= tl.rsqrt(tl.sum(squares, 0) / H + eps)
    for start in tl.range(0, F, BLOCK):
        mask = start + columns < F
        x_ptrs = x_ptr + lane * x_stride + start + columns
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptrs, (x / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty), mask=mask)
