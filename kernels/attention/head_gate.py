"""Gated attention heads: each value is multiplied by the sigmoid of a gate that is projected from
the token, as in Qwen3.5.

Letters: N lanes, A = Q * D values of all heads, D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.norm_rope.activation import sigmoid_reference

_BLOCK = 1024


def gate_heads(
    x_NA: torch.Tensor,
    gate_NA: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    head_dim: int,
    parts: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute x *= sigmoid(gate) in place, in float32.

    Args:
        x_NA, gate_NA: one dtype; rows dense, any stride between them.
        slot_N: int32, -1 = padded lane, which is neither read nor written.
        head_dim: values of a head; A is a multiple.
        parts: order of a head's gates, for models whose RoPE rotates one of `parts` parts of a head
            and whose query rows were permuted for it: value (i * 2 + j) * w + k of a head has gate
            (j * parts + i) * w + k, with w = head_dim / (2 * parts). 1: the order is unchanged.
        pdl: the launch before may still run.

    Returns:
        `x_NA`. ValueError for a shape, dtype or size that does not fit.
    """
    check_rows(x_NA=x_NA, gate_NA=gate_NA)
    if x_NA.shape != gate_NA.shape or x_NA.dtype != gate_NA.dtype:
        raise ValueError(
            f"gates are {gate_NA.dtype} {list(gate_NA.shape)}, values {x_NA.dtype} "
            f"{list(x_NA.shape)}"
        )
    lanes, values = x_NA.shape
    if head_dim < 1 or values % head_dim or parts < 1 or head_dim % (2 * parts):
        raise ValueError(
            f"{values} values are no heads of head_dim={head_dim} with {2 * parts} equal pieces"
        )
    check_lanes(lanes, slot_N=slot_N)
    if not use_triton(x_NA):
        return gate_heads_reference(x_NA, gate_NA, slot_N, head_dim=head_dim, parts=parts)
    launcher(gate_kernel, (lanes, triton.cdiv(values, _BLOCK)))(
        x_NA,
        gate_NA,
        slot_N,
        x_NA.stride(0),
        gate_NA.stride(0),
        A=values,
        HEAD_DIM=head_dim,
        PARTS=parts,
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    return x_NA


def gate_heads_reference(
    x_NA: torch.Tensor,
    gate_NA: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    head_dim: int,
    parts: int = 1,
) -> torch.Tensor:
    """`gate_heads` in plain PyTorch."""
    live = live_lanes(slot_N)
    heads = gate_NA.shape[1] // head_dim
    gate = gate_NA[live].float().view(len(live), heads, 2, parts, head_dim // (2 * parts))
    gate = gate.transpose(2, 3).reshape(len(live), gate_NA.shape[1])
    x_NA[live] = (x_NA[live].float() * sigmoid_reference(gate)).to(x_NA.dtype)
    return x_NA


@triton.jit
def gate_kernel(
    x_ptr,
    gate_ptr,
    slot_ptr,
    x_stride,
    gate_stride,
    A: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane and BLOCK values."""
    WIDTH: tl.constexpr = HEAD_DIM // (2 * PARTS)
    lane = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece = a % HEAD_DIM // WIDTH
    of_gate = a // HEAD_DIM * HEAD_DIM + (piece % 2 * PARTS + piece // 2) * WIDTH + a % WIDTH
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    x_ptrs = x_ptr + lane * x_stride + a
    gate = tl.load(gate_ptr + lane * gate_stride + of_gate, mask=a < A, other=0.0).to(tl.float32)
    x = tl.load(x_ptrs, mask=a < A, other=0.0).to(tl.float32)
    tl.store(x_ptrs, (x / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty), mask=a < A)
