"""Token embedding: rows of the table become the float32 residual stream.

Letters: N lanes, V vocabulary, H hidden.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.lanes import check_lanes, check_rows, live_lanes, output_rows

_BLOCK_H = 1024


def embed(
    token_N: torch.Tensor,
    table_VH: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The embedding of each live lane's token, widened to float32.

    Args:
        token_N: int32. table_VH: float32, float16 or bfloat16; may exceed 2**31 elements.
        slot_N: int32, -1 = padded lane.
        out: float32 [N, H].

    Returns:
        float32 [N, H]. A live lane whose id is outside 0..V-1 becomes NaN, so that the mistake is
        seen; no memory beyond the table is read. Padded lanes are neither read nor written.
        ValueError for a shape or dtype that does not fit.
    """
    check_rows(table_VH=table_VH)
    lanes = slot_N.shape[0]
    check_lanes(lanes, slot_N=slot_N, token_N=token_N)
    V, H = table_VH.shape
    out = output_rows(out, (lanes, H), dtype=torch.float32, like=table_VH)
    if not use_triton(table_VH):
        return embed_reference(token_N, table_VH, slot_N, out=out)
    _embed_kernel[(lanes, triton.cdiv(H, _BLOCK_H))](
        token_N, table_VH, slot_N, out, table_VH.stride(0), out.stride(0), V, H=H, BLOCK_H=_BLOCK_H
    )
    return out


@triton.jit
def _embed_kernel(
    token_ptr,
    table_ptr,
    slot_ptr,
    out_ptr,
    table_stride,
    out_stride,
    V,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program a lane and BLOCK_H columns."""
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    token = tl.load(token_ptr + lane)
    known = (token >= 0) & (token < V)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = h < H
    source = table_ptr + token.to(tl.int64) * table_stride + h
    x = tl.load(source, mask=mask & known, other=float("nan")).to(tl.float32)
    tl.store(out_ptr + lane * out_stride + h, x, mask=mask)


def embed_reference(
    token_N: torch.Tensor,
    table_VH: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`embed` in plain PyTorch."""
    V, H = table_VH.shape
    out = output_rows(out, (slot_N.shape[0], H), dtype=torch.float32, like=table_VH)
    live = live_lanes(slot_N)
    token = token_N[live]
    unknown = (token < 0) | (token >= V)
    rows = table_VH[token.masked_fill(unknown, 0).long()].float()
    out[live] = rows.masked_fill(unknown[:, None], math.nan)
    return out
