"""Skinny linear layer for decode: a few lanes times a weight matrix that is streamed once.

Letters: N lanes, K input features, M weight rows, F ffn width (a SwiGLU weight is F gate rows, then
F up rows).

The order in which a lane's sums are formed follows from the weight's shape and dtype, never from N,
from the lane's index, or from its neighbours: each output is one chain of `tl.dot` over the K tiles
in order (one chain a split, splits summed in order), and `tile_plan` does not know N. Lane tiles
are 16 or 32 rows, which is `mma.sync` in both cases and the same bits on each row; at 64 rows sm_90
would use `wgmma`, which sums in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.activation import silu, silu_reference
from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.lanes import (
    check_lanes,
    check_rows,
    check_vector,
    live_lanes,
    output_rows,
)

MAX_LANES = 64
REFERENCE_ROWS = 4

_REDUCE_BLOCK = 256


class TilePlan(NamedTuple):
    """How a weight is cut: numerics depend on `block_k` and `splits`, only speed on the others."""

    block_m: int
    block_k: int
    splits: int
    stages: int


def tile_plan(M: int, K: int, dtype: torch.dtype) -> TilePlan:
    """Tiles for a weight [M, K].

    The numbers come from an H200: 132 SMs that want about 33 KB in flight each. 64 weight rows a
    program pay as soon as they still fill every SM; else 32 rows and a deeper pipeline. Splitting K
    costs a second kernel of about 1 us, which only a long K over few tiles repays.
    """
    if dtype == torch.float32:
        # No tensor cores: multiply-adds from registers. Exact rather than fast.
        return TilePlan(block_m=32, block_k=min(32, _padded(K)), splits=1, stages=2)
    fills_with_64 = M >= 64 * 132
    block_m = 64 if fills_with_64 else 32
    tiles = triton.cdiv(M, block_m)
    splits = 1
    while K >= 8192 and tiles * splits < 2 * 128 and splits < 4:
        splits *= 2
    return TilePlan(
        block_m=block_m,
        # An odd multiple of 64 needs no masks in tiles of 64.
        block_k=64 if K % 128 == 64 else min(128, _padded(K)),
        splits=splits,
        stages=3 if fills_with_64 else 5,
    )


def _padded(K: int) -> int:
    """The power of two that holds K, and at least the 16 that `tl.dot` wants."""
    return max(16, 1 << (K - 1).bit_length())


def linear(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ weight^T (+ bias), then `residual + y` or `silu(gate) * up`, for 1 to 64 lanes.

    Args:
        x_NK, weight_MK: one dtype of float32, float16, bfloat16; dense rows, any stride between
            them. The weight may exceed 2**31 elements.
        slot_N: int32, -1 = padded lane.
        bias: [M] in the weight's dtype.
        residual: float32 [N, M], dense rows. The output is then float32.
        swiglu: weight rows are F gates, then F ups; the output is [N, F]. Not with `residual`.
        out_dtype: of the output; default x's dtype, or float32 with `residual`.
        out: [N, M] ([N, F]), dense rows. May be `residual`; must not overlap `x`.

    Returns:
        [N, M] ([N, F]); accumulated and finished in float32, rounded once. Padded lanes are neither
        read nor written. On the current stream, without a host sync; with split K it allocates a
        float32 [splits, N, M] workspace.

    Raises:
        ValueError: a shape, stride or dtype that does not fit, or more than 64 lanes.
    """
    outputs = _check_linear(x_NK, weight_MK, slot_N, bias, residual, swiglu)
    if out_dtype is None:
        out_dtype = x_NK.dtype if residual is None else torch.float32
    elif residual is not None and out_dtype != torch.float32:
        raise ValueError(f"with a residual the output is float32, not {out_dtype}")
    out = output_rows(out, (x_NK.shape[0], outputs), dtype=out_dtype, like=x_NK)
    if use_triton(x_NK):
        M, K = weight_MK.shape
        plan = tile_plan(M, K, weight_MK.dtype)
        _launch(x_NK, weight_MK, slot_N, bias, residual, swiglu, out, plan)
        return out
    return linear_reference(
        x_NK, weight_MK, slot_N, bias=bias, residual=residual, swiglu=swiglu, out=out
    )


def _check_linear(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    swiglu: bool,
) -> int:
    """Raise ValueError for operands that do not fit each other; return the outputs a lane."""
    check_rows(x_NK=x_NK, weight_MK=weight_MK)
    (lanes, K), (M, weight_K) = x_NK.shape, weight_MK.shape
    if lanes > MAX_LANES:
        raise ValueError(f"linear takes 1 to {MAX_LANES} lanes, not {lanes}")
    if weight_K != K:
        raise ValueError(f"x has K={K} input features, the weight {weight_K}")
    if x_NK.dtype != weight_MK.dtype:
        raise ValueError(f"x is {x_NK.dtype}, the weight {weight_MK.dtype}")
    check_lanes(lanes, slot_N=slot_N)
    if bias is not None:
        check_vector("bias", bias, M, weight_MK.dtype)
    if swiglu and M % 2:
        raise ValueError(f"swiglu needs as many gate rows as up rows, not {M} rows in all")
    if residual is not None:
        if swiglu:
            raise ValueError("swiglu and residual do not go together")
        if residual.dtype != torch.float32:
            raise ValueError(f"residual must be float32, not {residual.dtype}")
        if residual.shape != (lanes, M) or residual.stride(1) != 1:
            raise ValueError(
                f"residual must be [{lanes}, {M}] with dense rows, not {tuple(residual.shape)} "
                f"with strides {residual.stride()}"
            )
    return M // 2 if swiglu else M


def _launch(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    swiglu: bool,
    out: torch.Tensor,
    plan: TilePlan,
) -> None:
    lanes, K = x_NK.shape
    M, outputs = weight_MK.shape[0], out.shape[1]
    block_outputs = plan.block_m // 2 if swiglu else plan.block_m
    lane_tile = 16 if lanes <= 16 else 32
    splits = min(plan.splits, triton.cdiv(K, plan.block_k))
    residual_stride = 0 if residual is None else residual.stride(0)
    partial = None
    if splits > 1:
        partial = torch.empty((splits, lanes, M), dtype=torch.float32, device=x_NK.device)
    # Lane tiles count fastest, so that programs on the same weights run together and share L2.
    grid = (triton.cdiv(lanes, lane_tile), triton.cdiv(outputs, block_outputs), splits)
    _linear_kernel[grid](
        x_NK,
        weight_MK,
        slot_N,
        bias,
        residual,
        out,
        partial,
        lanes,
        x_NK.stride(0),
        weight_MK.stride(0),
        residual_stride,
        out.stride(0),
        M=M,
        K=K,
        SWIGLU=swiglu,
        SPLITS=splits,
        LANE_TILE=lane_tile,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        EVEN_K=K % (plan.block_k * splits) == 0,
        num_warps=4,
        num_stages=plan.stages,
    )
    if partial is not None:
        _reduce_kernel[(lanes, triton.cdiv(outputs, _REDUCE_BLOCK))](
            partial,
            slot_N,
            bias,
            residual,
            out,
            lanes,
            residual_stride,
            out.stride(0),
            M=M,
            SWIGLU=swiglu,
            SPLITS=splits,
            BLOCK_OUTPUTS=_REDUCE_BLOCK,
            num_warps=2,
        )


@triton.jit(do_not_specialize=["lanes"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    slot_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    lanes,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    M: tl.constexpr,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLITS: tl.constexpr,
    LANE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program a lane tile, BLOCK_M weight rows, and K split."""
    SPLIT_TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    BLOCK_OUTPUTS: tl.constexpr = BLOCK_M // 2 if SWIGLU else BLOCK_M
    lane = tl.program_id(0) * LANE_TILE + tl.arange(0, LANE_TILE)
    live = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0
    first_output = tl.program_id(1) * BLOCK_OUTPUTS
    split = tl.program_id(2)

    # Outputs past the end repeat the last one: cheaper than a mask on the loads, and never stored.
    tile_row = tl.arange(0, BLOCK_M)
    last = OUTPUTS - 1 - first_output
    if SWIGLU:
        # Gate and up rows alternate: one product serves both, and a thread holds the pair.
        row = tl.minimum(tile_row // 2, last).to(tl.int64) + tile_row % 2 * OUTPUTS
    else:
        row = tl.minimum(tile_row, last).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + lane.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + (first_output + row)[None, :] * weight_stride + k[:, None]
    y = tl.zeros((LANE_TILE, BLOCK_M), dtype=tl.float32)
    for tile in range(SPLIT_TILES):
        offset = (split * SPLIT_TILES + tile) * BLOCK_K
        if EVEN_K:
            x = tl.load(x_ptrs + offset, mask=live[:, None], other=0.0)
            weight = tl.load(weight_ptrs + offset)
        else:
            inside = offset + k < K
            x = tl.load(x_ptrs + offset, mask=live[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + offset, mask=inside[:, None], other=0.0)
        y = tl.dot(x, weight, y, input_precision="ieee")

    if SPLITS > 1:
        partial_ptrs = partial_ptr + (split * lanes + lane).to(tl.int64)[:, None] * M
        # The repeats write what the last output's own column writes.
        tl.store(partial_ptrs + (first_output + row)[None, :], y, mask=live[:, None])
        return
    output = first_output + tl.arange(0, BLOCK_OUTPUTS)
    gate = y
    up = y
    if SWIGLU:
        gate, up = tl.split(tl.reshape(y, (LANE_TILE, BLOCK_OUTPUTS, 2)))
    _finish(
        gate,
        up,
        lane[:, None],
        output[None, :],
        live[:, None] & (output < OUTPUTS)[None, :],
        bias_ptr,
        residual_ptr,
        out_ptr,
        residual_stride,
        out_stride,
        OUTPUTS,
        SWIGLU,
    )


@triton.jit(do_not_specialize=["lanes"])
def _reduce_kernel(
    partial_ptr,
    slot_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    lanes,
    residual_stride,
    out_stride,
    M: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """One program a lane and BLOCK_OUTPUTS outputs: sums the splits in order and finishes them."""
    lane = tl.program_id(0)
    if tl.load(slot_ptr + lane) < 0:
        return
    OUTPUTS: tl.constexpr = M // 2 if SWIGLU else M
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    stored = output < OUTPUTS
    gate = tl.zeros((BLOCK_OUTPUTS,), dtype=tl.float32)
    up = tl.zeros((BLOCK_OUTPUTS,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        source = partial_ptr + (split * lanes + lane).to(tl.int64) * M + output
        gate += tl.load(source, mask=stored, other=0.0)
        if SWIGLU:
            up += tl.load(source + OUTPUTS, mask=stored, other=0.0)
    _finish(
        gate,
        up,
        lane,
        output,
        stored,
        bias_ptr,
        residual_ptr,
        out_ptr,
        residual_stride,
        out_stride,
        OUTPUTS,
        SWIGLU,
    )


@triton.jit
def _finish(
    gate,
    up,
    lane,
    output,
    stored,
    bias_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    out_stride,
    OUTPUTS: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """The epilogue: from float32 sums to stored outputs; `lane` and `output` broadcast to them."""
    y = gate
    if bias_ptr is not None:
        y += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
        if SWIGLU:
            up += tl.load(bias_ptr + OUTPUTS + output, mask=output < OUTPUTS, other=0.0).to(
                tl.float32
            )
    if SWIGLU:
        y = silu(y) * up
    wide_lane = lane.to(tl.int64)
    if residual_ptr is not None:
        y = tl.load(residual_ptr + wide_lane * residual_stride + output, mask=stored, other=0.0) + y
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + wide_lane * out_stride + output, y, mask=stored)


def linear_reference(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in plain PyTorch, for any number of lanes: what a CPU engine decodes with.

    On a CPU as well a lane's bits do not depend on N, on its index, or on its neighbours.
    """
    outputs = weight_MK.shape[0] // 2 if swiglu else weight_MK.shape[0]
    if out_dtype is None:
        out_dtype = x_NK.dtype if residual is None else torch.float32
    if out is None:
        out = output_rows(None, (x_NK.shape[0], outputs), dtype=out_dtype, like=x_NK)
    weight = weight_MK.float()
    for lanes in live_lanes(slot_N).split(REFERENCE_ROWS):
        y = _matmul_group(x_NK[lanes].float(), weight)
        if bias is not None:
            y = y + bias.float()
        if swiglu:
            gate, up = y.chunk(2, dim=1)
            y = silu_reference(gate) * up
        if residual is not None:
            y = residual[lanes] + y
        out[lanes] = y.to(out.dtype)
    return out


def _matmul_group(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T of 1 to REFERENCE_ROWS rows, always as the same product of REFERENCE_ROWS.

    A BLAS picks another order of summation for other row counts, and may for other alignments: each
    row of the group starts on a cache line. The weight stands first because a BLAS shares the long
    side among threads, not K.
    """
    rows, K = x.shape
    aligned = triton.cdiv(K, 16) * 16
    group = torch.zeros((REFERENCE_ROWS, aligned), dtype=x.dtype, device=x.device)[:, :K]
    group[:rows] = x
    return torch.mm(weight, group.t())[:, :rows].t()
