"""RMSNorm (Zhang and Sennrich 2019), rounded where Hugging Face's models round.

Letters: N lanes, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_rows,
    check_vector,
    live_lanes,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.triton_versions import UNFUSED

# Longer rows are read twice, in tiles; a row of this length stays in the registers of 16 warps.
_MAX_BLOCK_H = 8192


def rms_norm(
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """y = weight * x / sqrt(mean(x**2) + eps) of each live lane.

    Args:
        x_NH: any float dtype (the residual stream is float32); dense rows, any stride between them.
        weight_H: any float dtype.
        slot_N: int32, -1 = padded lane.
        out: [N, H] of `out_dtype`; may be `x` itself, and must not overlap it otherwise.
        pdl: the launch before, whatever it is, may still run; it does not write the weight.

    Returns:
        [N, H] of `out_dtype`. Statistics are float32; the normalised value is rounded to
        `out_dtype`, then multiplied by the weight and rounded again, as `LlamaRMSNorm` does. With a
        weight in float32 it is rounded once, after the weight, as `Gemma3RMSNorm` does. Padded
        lanes are neither read nor written. ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NH=x_NH)
    lanes, H = x_NH.shape
    check_weight(weight_H, H)
    check_lanes(lanes, slot_N=slot_N)
    out = output_rows(out, (lanes, H), dtype=out_dtype, like=x_NH)
    if not use_triton(x_NH):
        return rms_norm_reference(x_NH, weight_H, slot_N, eps=eps, out_dtype=out_dtype, out=out)
    launcher(_rms_norm_kernel, (lanes,))(
        x_NH,
        weight_H,
        slot_N,
        out,
        x_NH.stride(0),
        out.stride(0),
        eps,
        **row_options(H),
        **UNFUSED,
        **launch_options(pdl),
    )
    return out


def check_weight(weight_H: torch.Tensor, H: int, name: str = "weight_H") -> None:
    """Raise ValueError for anything but a dense vector of H values of a float dtype."""
    if weight_H.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} is {weight_H.dtype}, not one of {FLOAT_DTYPES}")
    check_vector(name, weight_H, H, weight_H.dtype)


def row_options(H: int) -> dict[str, int]:
    """How a program goes through its row: in all kernels alike, because their bits must agree."""
    block = min(triton.next_power_of_2(H), _MAX_BLOCK_H)
    return {"H": H, "BLOCK_H": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    slot_ptr,
    out_ptr,
    x_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    # Loaded early: after the sum of squares its latency would be added.
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    source = x_ptr + lane * x_stride
    target = out_ptr + lane * out_stride

    x = tl.load(source + h, mask=h < H, other=0.0).to(tl.float32)
    squares = x * x
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(source + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        squares += more * more
    scale = tl.rsqrt(tl.sum(squares) / H + eps)

    store_normed(x, scale, weight, target, h, H)
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = tl.load(source + start + h, mask=start + h < H, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + h, mask=start + h < H, other=0.0)
        store_normed(more, scale, weight, target, start + h, H)


@triton.jit
def store_normed(x, scale, weight, target, h, H: tl.constexpr):
    """Store columns `h` of a lane: rounded after the norm, and again after the weight.

    With a weight in float32 they are rounded once, after the weight.
    """
    dtype = target.dtype.element_ty
    normed = x * scale
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(target + h, (normed * weight.to(tl.float32)).to(dtype), mask=h < H)


def add_rms_norm(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x += y in place, then `rms_norm` of x, in one launch that reads both of them once.

    Args:
        x_NH: float32, the residual stream. y_NH: any float dtype. Both with dense rows, any stride
            between them; they must not overlap.
        weight_H, slot_N, out_dtype: as in `rms_norm`.
        out: [N, H] of `out_dtype`; must not overlap `x`; may be `y` itself.
        pdl: the launch before, whatever it is, may still run; it does not write the weight.

    Returns:
        [N, H] of `out_dtype`, rounded where `rms_norm` rounds; the sum is float32. Padded lanes are
        neither read nor written. ValueError for a shape or dtype that does not fit.
    """
    check_rows(x_NH=x_NH, y_NH=y_NH)
    lanes, H = x_NH.shape
    if x_NH.dtype != torch.float32:
        raise ValueError(f"x_NH is {x_NH.dtype}, not torch.float32")
    if y_NH.shape != x_NH.shape:
        raise ValueError(f"y_NH is {tuple(y_NH.shape)}, x_NH {tuple(x_NH.shape)}")
    check_weight(weight_H, H)
    check_lanes(lanes, slot_N=slot_N)
    out = output_rows(out, (lanes, H), dtype=out_dtype, like=x_NH)
    if not use_triton(x_NH):
        return add_rms_norm_reference(
            x_NH, y_NH, weight_H, slot_N, eps=eps, out_dtype=out_dtype, out=out
        )
    launcher(_add_rms_norm_kernel, (lanes,))(
        x_NH,
        y_NH,
        weight_H,
        slot_N,
        out,
        x_NH.stride(0),
        y_NH.stride(0),
        out.stride(0),
        eps,
        **row_options(H),
        **UNFUSED,
        **launch_options(pdl),
    )
    return out


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    y_ptr,
    weight_ptr,
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
    # Loaded early: after the sum of squares its latency would be added.
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    x_row_ptr = x_ptr + lane * x_stride
    y_row_ptr = y_ptr + lane * y_stride
    target = out_ptr + lane * out_stride

    x = _add_columns(x_row_ptr, y_row_ptr, h, H)
    squares = x * x
    for start in tl.range(BLOCK_H, H, BLOCK_H):
        more = _add_columns(x_row_ptr, y_row_ptr, start + h, H)
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
def _add_columns(x_ptr, y_ptr, h, H: tl.constexpr):
    """Add columns `h` of y to x in place and return the sums; 0 past the end."""
    x = tl.load(x_ptr + h, mask=h < H, other=0.0)
    x += tl.load(y_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(x_ptr + h, x, mask=h < H)
    return x


def rms_norm_reference(
    x_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rms_norm` in plain PyTorch."""
    out = output_rows(out, x_NH.shape, dtype=out_dtype, like=x_NH)
    live = live_lanes(slot_N)
    # torch splits the sum of a single long row among threads, which changes its bits, but never
    # those of two rows.
    x = x_NH[live.repeat(2) if len(live) == 1 else live].float()
    normed = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)
    if weight_H.dtype != torch.float32:
        normed = normed.to(out_dtype)
    out[live] = (normed.float() * weight_H.float()).to(out_dtype)[: len(live)]
    return out


def add_rms_norm_reference(
    x_NH: torch.Tensor,
    y_NH: torch.Tensor,
    weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`add_rms_norm` in plain PyTorch."""
    live = live_lanes(slot_N)
    x_NH[live] += y_NH[live].float()
    return rms_norm_reference(x_NH, weight_H, slot_N, eps=eps, out_dtype=out_dtype, out=out)
