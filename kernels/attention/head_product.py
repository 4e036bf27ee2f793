"""Per-head products: each head of a lane is multiplied by a weight of its own.

Letters: N lanes, Q heads, K input features of a head, M outputs of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import FLOAT_DTYPES, check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.plans import dot_columns

_LANES = 16
CHUNK_LANES = 64
"""Lanes of a program for a chunk: a weight is read by a quarter of the programs."""
# Columns of a weight that a program loads before it waits: all columns of a DeepSeek query.
_COLUMNS = 128
# Columns of a step for a chunk. Steps are pipelined, and two programs fit a multiprocessor.
_CHUNK_COLUMNS = 64


def head_product(
    x_NQK: torch.Tensor,
    weight_QKM: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    out: torch.Tensor,
    block_lanes: int = _LANES,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute out[n, q] = x[n, q] @ weight[q] for each live lane.

    Args:
        x_NQK: the last dimension dense, any stride on lanes and heads.
        weight_QKM: in x's dtype, any strides.
        slot_N: int32, -1 = padded lane.
        out: [N, Q, M] in x's dtype, the last dimension dense, any stride on lanes and heads; may
            share no memory with x.
        block_lanes: lanes of a program, a power of two from 16 on. It decides the instruction and
            the columns of a step, and so the bits.
        pdl: the launch before, whatever it is, may still run.

    Returns:
        `out`; sums in float32, rounded once. Padded lanes are not written. A lane's bits depend
        neither on other lanes nor on N. ValueError for what does not fit.
    """
    lanes, heads, columns = _check(x_NQK, weight_QKM, out)
    if block_lanes < _LANES or block_lanes & (block_lanes - 1):
        raise ValueError(f"block_lanes={block_lanes} must be a power of two from {_LANES} on")
    check_lanes(lanes, slot_N=slot_N)
    if not use_triton(x_NQK):
        return head_product_reference(x_NQK, weight_QKM, slot_N, out=out)
    outputs = weight_QKM.shape[2]
    block_m = min(64, dot_columns(outputs))
    block_k = _COLUMNS if block_lanes == _LANES else _CHUNK_COLUMNS
    grid = (heads, triton.cdiv(outputs, block_m), triton.cdiv(lanes, block_lanes))
    launcher(_head_product_kernel, grid)(
        x_NQK,
        weight_QKM,
        slot_N,
        out,
        lanes,
        *x_NQK.stride()[:2],
        *weight_QKM.stride(),
        *out.stride()[:2],
        K=columns,
        M=outputs,
        LANES=block_lanes,
        BLOCK_K=min(block_k, dot_columns(columns)),
        BLOCK_M=block_m,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def _check(
    x_NQK: torch.Tensor, weight_QKM: torch.Tensor, out: torch.Tensor
) -> tuple[int, int, int]:
    """Raise ValueError for a shape or dtype that does not fit; return (N, Q, K)."""
    if x_NQK.dim() != 3 or weight_QKM.dim() != 3 or x_NQK.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"x must be a float [N, Q, K], and the weight [Q, K, M]: not {x_NQK.dtype} "
            f"{tuple(x_NQK.shape)} and {tuple(weight_QKM.shape)}"
        )
    lanes, heads, columns = x_NQK.shape
    outputs = weight_QKM.shape[2]
    if weight_QKM.shape[:2] != (heads, columns) or out.shape != (lanes, heads, outputs):
        raise ValueError(
            f"x {tuple(x_NQK.shape)} by weight {tuple(weight_QKM.shape)} into {tuple(out.shape)}"
        )
    for name, tensor in (("weight", weight_QKM), ("out", out)):
        if tensor.dtype != x_NQK.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, x {x_NQK.dtype}")
    for name, tensor in (("x", x_NQK), ("out", out)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} must have dense heads, not strides {tensor.stride()}")
    return lanes, heads, columns


@triton.jit(do_not_specialize=["lanes"])
def _head_product_kernel(
    x_ptr,
    weight_ptr,
    slot_ptr,
    out_ptr,
    lanes,
    x_lane_stride,
    x_head_stride,
    weight_head_stride,
    weight_k_stride,
    weight_m_stride,
    out_lane_stride,
    out_head_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (head, tile of outputs, LANES lanes); rows of a product are independent."""
    head = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + head * weight_head_stride + m[None, :] * weight_m_stride
    weight = _weight_tile(weight_ptrs, k, m, weight_k_stride, K, M)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1)
    live = slot >= 0
    x_ptrs = x_ptr + head * x_head_stride + lane.to(tl.int64)[:, None] * x_lane_stride
    x = tl.load(x_ptrs + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
    y = tl.dot(x, weight, tl.zeros([LANES, BLOCK_M], tl.float32), input_precision="ieee")
    for start in range(BLOCK_K, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptrs + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        weight = _weight_tile(weight_ptrs, k, m, weight_k_stride, K, M)
        y = tl.dot(x, weight, y, input_precision="ieee")
    out_ptrs = out_ptr + head * out_head_stride + lane.to(tl.int64)[:, None] * out_lane_stride
    tl.store(out_ptrs + m[None, :], y, mask=live[:, None] & (m < M)[None, :])


@triton.jit
def _weight_tile(weight_ptrs, k, m, weight_k_stride, K: tl.constexpr, M: tl.constexpr):
    mask = (k < K)[:, None] & (m < M)[None, :]
    return tl.load(weight_ptrs + k[:, None] * weight_k_stride, mask=mask, other=0.0)


def head_product_reference(
    x_NQK: torch.Tensor, weight_QKM: torch.Tensor, slot_N: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """`head_product` in plain PyTorch, lane by lane so that no lane's bits depend on others."""
    weight = weight_QKM.float()
    for lane in live_lanes(slot_N).tolist():
        out[lane] = torch.bmm(x_NQK[lane, :, None].float(), weight)[:, 0].to(out.dtype)
    return out
