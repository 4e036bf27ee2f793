"""A step of flow matching (Lipman et al. 2023): x moves along the velocity that a network predicts.

Time goes from 1, where x is noise, to 0, where it is the actions. Rows that the caller fixes are
put where the straight path from their noise to their values is at that time, so that the other
rows are denoised beside them (inpainting; Lugmayr et al. 2022, "RePaint").

Letters: M rows, D values of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.flow.noise import check_dense

_BLOCK = 256


def euler_step(
    x_MD: torch.Tensor,
    velocity_MD: torch.Tensor,
    *,
    dt: float,
    time: float,
    noise_MD: torch.Tensor,
    fixed_MD: torch.Tensor,
    fixed_1: torch.Tensor,
    out_MD: torch.Tensor,
) -> None:
    """x += dt * velocity in place, except in fixed rows; `out` gets x in its own dtype.

    Args:
        x_MD: float32, dense. velocity_MD: any float dtype, dense rows.
        dt: the step, below 0. time: the time after it, 0 .. 1.
        noise_MD: float32, dense: where the path of a fixed row began.
        fixed_MD: float32, dense: the values of fixed rows; other rows are not read.
        fixed_1: int32 [1]: how many rows are fixed, from the first on. They become
            time * noise + (1 - time) * fixed.
        out_MD: any float dtype, dense.

    ValueError for a shape or dtype that does not fit.
    """
    check_dense(x=x_MD, noise=noise_MD, fixed=fixed_MD)
    check_lanes(1, fixed=fixed_1)
    check_rows(velocity=velocity_MD, out=out_MD)
    if velocity_MD.shape != x_MD.shape or out_MD.shape != x_MD.shape or not out_MD.is_contiguous():
        raise ValueError(
            f"velocity {list(velocity_MD.shape)} and out {list(out_MD.shape)}, which must be "
            f"dense, do not fit x {list(x_MD.shape)}"
        )
    if not use_triton(x_MD):
        tensors = {"noise_MD": noise_MD, "fixed_MD": fixed_MD, "fixed_1": fixed_1}
        euler_step_reference(x_MD, velocity_MD, dt=dt, time=time, **tensors, out_MD=out_MD)
        return
    count, D = x_MD.numel(), x_MD.shape[1]
    launcher(_euler_kernel, (triton.cdiv(count, _BLOCK),))(
        x_MD,
        velocity_MD,
        noise_MD,
        fixed_MD,
        fixed_1,
        out_MD,
        velocity_MD.stride(0),
        count,
        float(dt),
        float(time),
        D=D,
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["dt", "time"])
def _euler_kernel(
    x_ptr,
    velocity_ptr,
    noise_ptr,
    fixed_ptr,
    fixed_rows_ptr,
    out_ptr,
    stride,
    count,
    dt,
    time,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK elements."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < count
    row = index // D
    is_fixed = there & (row < tl.load(fixed_rows_ptr))
    moves = there & (row >= tl.load(fixed_rows_ptr))
    x = tl.load(x_ptr + index, mask=moves, other=0.0)
    at = velocity_ptr + row.to(tl.int64) * stride + index % D
    x += dt * tl.load(at, mask=moves, other=0.0).to(tl.float32)
    noise = tl.load(noise_ptr + index, mask=is_fixed, other=0.0)
    fixed = tl.load(fixed_ptr + index, mask=is_fixed, other=0.0)
    x = tl.where(is_fixed, time * noise + (1.0 - time) * fixed, x)
    tl.store(x_ptr + index, x, mask=there)
    tl.store(out_ptr + index, x.to(out_ptr.dtype.element_ty), mask=there)


def euler_step_reference(
    x_MD: torch.Tensor,
    velocity_MD: torch.Tensor,
    *,
    dt: float,
    time: float,
    noise_MD: torch.Tensor,
    fixed_MD: torch.Tensor,
    fixed_1: torch.Tensor,
    out_MD: torch.Tensor,
) -> None:
    """`euler_step` in plain PyTorch."""
    is_fixed = torch.arange(len(x_MD), device=x_MD.device)[:, None] < fixed_1
    x_MD += dt * velocity_MD.float()
    x_MD.copy_(torch.where(is_fixed, time * noise_MD + (1.0 - time) * fixed_MD, x_MD))
    out_MD.copy_(x_MD)
