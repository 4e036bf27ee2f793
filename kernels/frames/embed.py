"""Embeddings of frames: the sum of the embeddings of a frame's codes begins a step's stream.

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook, M = K * V rows of the table, H
hidden, T groups of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import check_embedding, store_embedding


def check_codes(code_SK: torch.Tensor, table_MH: torch.Tensor) -> int:
    """V; ValueError unless `code_SK` is dense int32 [S, K] and the table has K * V rows."""
    shape, dtype = tuple(code_SK.shape), code_SK.dtype
    if len(shape) != 2 or dtype != torch.int32 or not code_SK.is_contiguous() or 0 in shape:
        raise ValueError(f"code must be a dense int32 [S, K], not {dtype} {shape}")
    rows = table_MH.shape[0]
    if rows % shape[1]:
        raise ValueError(f"a table of {rows} rows is none of {shape[1]} codebooks")
    return rows // shape[1]


def embed_frames(
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    slot_N: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    pdl: bool = False,
) -> None:
    """Begin each live lane's stream with the embedding of its slot's frame; one launch.

    The embedding is the sum, in float32 and in the order of the codes, of rows k * V + code k of
    the table, rounded once to the table's dtype.

    Args:
        code_SK: int32, dense: the codes of each slot's last frame.
        table_MH: any float dtype, dense rows; may exceed 2**31 elements.
        slot_N: int32, -1 = padded lane.
        norm_weight_H: any float dtype: the weight of the first RMSNorm.
        residual: N lanes, written in place as by `gather_and_embed`. A live lane with a code
            outside 0..V-1 becomes NaN; padded lanes are not written.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N)
    groups = check_embedding(table_MH, norm_weight_H, residual, lanes)
    codes = check_codes(code_SK, table_MH)
    if not use_triton(slot_N):
        embed_frames_reference(code_SK, table_MH, slot_N, norm_weight_H, residual)
        return
    H = table_MH.shape[1]
    block_h = triton.next_power_of_2(H)
    launcher(_embed_frames_kernel, (lanes,))(
        code_SK,
        table_MH,
        slot_N,
        norm_weight_H,
        residual,
        table_MH.stride(0),
        residual.x.stride(0),
        residual.scaled.stride(0),
        lanes,
        codes,
        K=code_SK.shape[1],
        H=H,
        T=groups,
        BLOCK_H=block_h,
        BLOCK_T=triton.next_power_of_2(groups),
        num_warps=min(max(block_h // 512, 4), 16),
        **launch_options(pdl),
    )


def embed_frames_reference(
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    slot_N: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
) -> None:
    """Plain twin of `embed_frames`."""
    live = live_lanes(slot_N)
    x = sum_of_codes(code_SK[slot_N[live].long()].long(), table_MH).float()
    residual.x[live] = x
    residual.scaled[live] = (x * norm_weight_H.float()).to(residual.scaled.dtype)
    residual.squares[:, live] = 0
    residual.squares[0, live] = (x * x).sum(dim=1)


def sum_of_codes(code_FK: torch.Tensor, table_MH: torch.Tensor) -> torch.Tensor:
    """New [F, H] of the table's dtype: the embeddings of whole frames, summed as `embed_frames`
    sums them. A frame with a code outside 0..V-1 is NaN.

    Args:
        code_FK: int64, on the table's device.
    """
    places = code_FK.shape[1]
    codes = table_MH.shape[0] // places
    total = table_MH.new_zeros(len(code_FK), table_MH.shape[1], dtype=torch.float32)
    for place in range(places):
        code = code_FK[:, place]
        known = (code >= 0) & (code < codes)
        rows = table_MH[place * codes + code.where(known, 0)].float()
        total += rows.masked_fill(~known[:, None], float("nan"))
    return total.to(table_MH.dtype)


@triton.jit
def _embed_frames_kernel(
    code_ptr,
    table_ptr,
    slot_ptr,
    norm_weight_ptr,
    residual,
    table_stride,
    x_stride,
    scaled_stride,
    lanes,
    codes,
    K: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    weight_H = tl.load(norm_weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    total_H = tl.zeros([BLOCK_H], tl.float32)
    for place in range(K):
        code = tl.load(code_ptr + slot * K + place, mask=live, other=-1)
        known = live & (code >= 0) & (code < codes)
        row = (place * codes + code).to(tl.int64)
        source = table_ptr + row * table_stride + h
        total_H += tl.load(source, mask=known & (h < H), other=float("nan")).to(tl.float32)
    store_embedding(
        total_H.to(table_ptr.dtype.element_ty),
        weight_H,
        lane,
        live,
        residual,
        x_stride,
        scaled_stride,
        lanes,
        H,
        T,
        BLOCK_H,
        BLOCK_T,
        1.0,
    )
