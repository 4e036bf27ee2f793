"""The sum of all ranks' parts of a product, in rank order.

All ranks add the same parts in the same order, so all of them get the same bits, however the parts
were gathered. Sums are float32, rounded once.

Letters: R ranks, N lanes, H columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import FLOAT_DTYPES
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

_BLOCK = 1024


def sum_parts(parts_RNH: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Sum the parts over R, from rank 0 on: `[N, H]`.

    Args:
        parts_RNH: dense, any float dtype. Contents of padded lanes do not affect other lanes.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        A new tensor of the same dtype. ValueError for another shape or dtype.
    """
    if parts_RNH.dim() != 3 or 0 in parts_RNH.shape or not parts_RNH.is_contiguous():
        raise ValueError(f"parts must be a dense [R, N, H], not {list(parts_RNH.shape)}")
    if parts_RNH.dtype not in FLOAT_DTYPES:
        raise ValueError(f"parts are {parts_RNH.dtype}, not one of {FLOAT_DTYPES}")
    if not use_triton(parts_RNH):
        return sum_parts_reference(parts_RNH)
    out = torch.empty_like(parts_RNH[0])
    launcher(_sum_parts_kernel, (triton.cdiv(out.numel(), _BLOCK),))(
        parts_RNH,
        out,
        out.numel(),
        RANKS=len(parts_RNH),
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["values"])
def _sum_parts_kernel(
    parts_ptr, out_ptr, values, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Each program computes BLOCK values of the sum."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = at < values
    wait_for_inputs(PDL)
    total = tl.load(parts_ptr + at, mask=mask, other=0.0).to(tl.float32)
    part_ptr = parts_ptr
    for _ in tl.static_range(1, RANKS):
        part_ptr += values
        total += tl.load(part_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_parts_reference(parts_RNH: torch.Tensor) -> torch.Tensor:
    """`sum_parts` in plain PyTorch."""
    total = parts_RNH[0].to(torch.float32, copy=True)
    for part in parts_RNH[1:]:
        total += part
    return total.to(parts_RNH.dtype)
