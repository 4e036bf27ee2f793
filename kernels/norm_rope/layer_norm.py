"""LayerNorm (Ba et al. 2016) of the residual stream, and learned positions that are added to it.

Other kernels take a stream whose norm is an RMSNorm: they divide a product by the rms that the
stream's squares give. `layer_norm_residual` hands on rows that are normed already, with squares
whose rms is 1.

Letters: N lanes, H hidden, P positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_rows,
    live_lanes,
    output_rows,
    sum_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.triton_versions import UNFUSED
from graphengine.kernels.linear.residual import Residual, check_residual
from graphengine.kernels.norm_rope.norm import check_weight, row_options

_BLOCK_H = 1024


class _Stream(NamedTuple):
    """The parts of a `Residual` that a LayerNorm reads and writes."""

    x: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


def layer_norm(
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """y = weight * (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps) + bias of each live lane.

    Args:
        x_NH: any float dtype (the residual stream is float32); dense rows, any stride between them.
        weight_H, bias_H: any float dtype; a bias of None is 0.
        slot_N: int32, -1 = padded lane.
        out: [N, H] of `out_dtype`; may be `x` itself, and must not overlap it otherwise.
        pdl: the launch before, whatever it is, may still run; it does not write the weights.

    Returns:
        [N, H] of `out_dtype`, computed in float32 and rounded once. Padded lanes are neither read
        nor written. ValueError for a shape or dtype that does not fit.
    """
    lanes, H = _check(x_NH, weight_H, bias_H, slot_N)
    out = output_rows(out, (lanes, H), dtype=out_dtype, like=x_NH)
    if not use_triton(x_NH):
        out[live_lanes(slot_N)] = _normed_rows(x_NH, weight_H, bias_H, slot_N, eps).to(out_dtype)
        return out
    _launch(x_NH, None, weight_H, bias_H, slot_N, out, eps, pdl)
    return out


def add_layer_norm(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """x += y in place, then `layer_norm` of x into `out`, in one launch.

    Args:
        x_NH: float32, the residual stream. y_NH: any float dtype. Both with dense rows, any stride
            between them; they must not overlap.
        out: [N, H] of any float dtype; must not overlap `x`; may be `y` itself.
        The others as in `layer_norm`.
    """
    lanes, H = _check(x_NH, weight_H, bias_H, slot_N)
    check_rows(y_NH=y_NH)
    if x_NH.dtype != torch.float32 or y_NH.shape != x_NH.shape:
        raise ValueError(
            f"{y_NH.dtype} {list(y_NH.shape)} cannot be added to a stream of {x_NH.dtype} "
            f"{list(x_NH.shape)}"
        )
    output_rows(out, (lanes, H), dtype=out.dtype, like=x_NH)
    if not use_triton(x_NH):
        live = live_lanes(slot_N)
        x_NH[live] += y_NH[live].float()
        out[live] = _normed_rows(x_NH, weight_H, bias_H, slot_N, eps).to(out.dtype)
        return
    _launch(x_NH, y_NH, weight_H, bias_H, slot_N, out, eps, pdl)


def layer_norm_residual(
    residual: Residual,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None,
    slot_N: torch.Tensor,
    *,
    eps: float,
    pdl: bool = False,
) -> Residual:
    """The stream with `layer_norm` of its x in `scaled`, rounded once, and new squares.

    For a reader with the same `eps` the squares, [1, N], stand for an rms of 1. Arguments are those
    of `layer_norm`; `x` is not written, and `scaled` is not read.
    """
    lanes, H = _check(residual.x, weight_H, bias_H, slot_N)
    check_residual(residual, (lanes, H), residual.scaled.dtype)
    squares = residual.x.new_empty((1, lanes))
    scaled = residual.scaled
    if use_triton(residual.x):
        launcher(_layer_norm_residual_kernel, (lanes,))(
            _Stream(residual.x, scaled, squares),
            weight_H,
            bias_H,
            slot_N,
            eps,
            **row_options(H),
            **UNFUSED,
            **launch_options(pdl),
        )
    else:
        live = live_lanes(slot_N)
        normed = _normed_rows(residual.x, weight_H, bias_H, slot_N, eps)
        scaled[live] = normed.to(scaled.dtype)
        squares[:, live] = H * (1.0 - eps)
    return residual._replace(squares=squares)


def add_positions(
    x_NH: torch.Tensor,
    table_PH: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """x += the table's row of the lane's position, in place, in live lanes.

    Args:
        x_NH: float32, dense rows. table_PH: any float dtype, dense rows.
        slot_N, position_N: int32; slot -1 = padded lane, which is neither read nor written. A live
            lane at a position outside 0..P-1 becomes NaN.
        pdl: the launch before, whatever it is, may still run; it does not write the table.

    ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NH=x_NH, table_PH=table_PH)
    (lanes, H), (P, columns) = x_NH.shape, table_PH.shape
    if columns != H:
        raise ValueError(f"positions have {columns} values, the stream {H}")
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    if not use_triton(x_NH):
        live = live_lanes(slot_N)
        position = position_N[live].long()
        rows = table_PH[position.clamp(0, P - 1)].float()
        rows[(position < 0) | (position >= P)] = float("nan")
        x_NH[live] += rows
        return
    launcher(_add_positions_kernel, (lanes, triton.cdiv(H, _BLOCK_H)))(
        x_NH,
        table_PH,
        slot_N,
        position_N,
        x_NH.stride(0),
        table_PH.stride(0),
        P=P,
        H=H,
        BLOCK_H=_BLOCK_H,
        **launch_options(pdl),
    )


def _check(
    x_NH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, slot_N: torch.Tensor
) -> tuple[int, int]:
    check_rows(x_NH=x_NH)
    lanes, H = x_NH.shape
    check_weight(weight_H, H)
    if bias_H is not None:
        check_weight(bias_H, H, "bias_H")
    check_lanes(lanes, slot_N=slot_N)
    return lanes, H


def _normed_rows(
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None,
    slot_N: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The live lanes in plain PyTorch, float32."""
    x = x_NH[live_lanes(slot_N)].float()
    x = x - (sum_rows(x) / x.shape[1])[:, None]
    variance = sum_rows(x.square()) / x.shape[1]
    normed = x * torch.rsqrt(variance + eps)[:, None] * weight_H.float()
    return normed if bias_H is None else normed + bias_H.float()


def _launch(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor | None,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None,
    slot_N: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    pdl: bool,
) -> None:
    lanes, H = x_NH.shape
    launcher(_layer_norm_kernel, (lanes,))(
        x_NH,
        y_NH,
        weight_H,
        bias_H,
        slot_N,
        out,
        x_NH.stride(0),
        0 if y_NH is None else y_NH.stride(0),
        out.stride(0),
        eps,
        **row_options(H),
        **UNFUSED,
        **launch_options(pdl),
    )


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    slot_ptr,
    out_ptr,
    x_stride,
    y_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    source = x_ptr + lane * x_stride
    if y_ptr is not None:
        for start in tl.range(0, H, BLOCK_H):
            mask = start + h < H
            y = tl.load(y_ptr + lane * y_stride + start + h, mask=mask, other=0.0)
            x = tl.load(source + start + h, mask=mask, other=0.0) + y.to(tl.float32)
            tl.store(source + start + h, x, mask=mask)
        tl.debug_barrier()
    _norm_row(source, weight_ptr, bias_ptr, out_ptr + lane * out_stride, eps, H, BLOCK_H)


@triton.jit
def _layer_norm_residual_kernel(
    stream,
    weight_ptr,
    bias_ptr,
    slot_ptr,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    target = stream.scaled + lane * H
    _norm_row(stream.x + lane * H, weight_ptr, bias_ptr, target, eps, H, BLOCK_H)
    tl.store(stream.squares + lane, H * (1.0 - eps))


@triton.jit
def _norm_row(source, weight_ptr, bias_ptr, target, eps, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Norm a row in three passes: mean, variance, output. A short one comes from the cache."""
    h = tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in tl.range(0, H, BLOCK_H):
        total += tl.load(source + start + h, mask=start + h < H, other=0.0).to(tl.float32)
    mean = tl.sum(total) / H
    squares = tl.zeros((BLOCK_H,), tl.float32)
    for start in tl.range(0, H, BLOCK_H):
        x = tl.load(source + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        x = tl.where(start + h < H, x - mean, 0.0)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / H + eps)
    # Where the target is the source, all threads have read the row.
    tl.debug_barrier()
    for start in tl.range(0, H, BLOCK_H):
        mask = start + h < H
        x = tl.load(source + start + h, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + h, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * scale * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + start + h, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + start + h, y.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _add_positions_kernel(
    x_ptr,
    table_ptr,
    slot_ptr,
    position_ptr,
    x_stride,
    table_stride,
    P: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_H columns."""
    lane = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    position = tl.load(position_ptr + lane)
    known = (position >= 0) & (position < P)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = table_ptr + position.to(tl.int64) * table_stride + h
    added = tl.load(row, mask=(h < H) & known, other=float("nan")).to(tl.float32)
    target = x_ptr + lane * x_stride + h
    tl.store(target, tl.load(target, mask=h < H, other=0.0) + added, mask=h < H)
