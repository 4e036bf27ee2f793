"""Embeddings of frames: the sum of the embeddings of a frame's codes begins a step's stream.

A model may add another embedding to each frame's, which streams in from outside: the embedding of
text to be said (`FedRows`), or the embeddings of another speaker's codes (`FedCodes`).

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook, M = K * V rows of the table, H
hidden, T groups of columns, R rows of a ring, P codes that stream in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import check_embedding, store_embedding


class FedRows(NamedTuple):
    """Embeddings that are added to frames' embeddings, by slot and position.

    The frame at position p gets row p % R of its slot where p is below the slot's bound, and the
    slot's last row, the pad, from there on.
    """

    rows: torch.Tensor
    """[S, R + 1, H] in the table's dtype, dense: a ring of R rows, then the pad."""
    bound: torch.Tensor
    """int32 [S]"""


class FedCodes(NamedTuple):
    """Codes whose embeddings are added to frames' embeddings, by slot and position like
    `FedRows`.
    """

    rows: torch.Tensor
    """int32 [S, R + 1, P], dense: a ring of R rows, then the pad."""
    bound: torch.Tensor
    """int32 [S]"""
    table: torch.Tensor
    """[P * W, H] in the frames' dtype, dense rows: row p * W + c embeds code c at place p."""


Fed = FedRows | FedCodes


def check_code(code_SK: torch.Tensor) -> tuple[int, int]:
    """S and K; ValueError unless `code_SK` is dense int32 [S, K]."""
    shape, dtype = tuple(code_SK.shape), code_SK.dtype
    if len(shape) != 2 or dtype != torch.int32 or not code_SK.is_contiguous() or 0 in shape:
        raise ValueError(f"code must be a dense int32 [S, K], not {dtype} {shape}")
    slots, places = shape
    return slots, places


def check_codes(
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    first_UH: torch.Tensor | None = None,
    book_rows: int = 0,
) -> int:
    """V; ValueError unless `code_SK` is dense int32 [S, K] and the table has K * V rows, or with
    `first_UH` (K - 1) * V.

    book_rows  V, of a table that may lack the last codebook; 0: it has all
    """
    rows, (_, books) = table_MH.shape[0], check_code(code_SK)
    if first_UH is not None:
        books -= 1
        check_rows(first=first_UH)
        if first_UH.shape[1] != table_MH.shape[1] or first_UH.dtype != table_MH.dtype:
            raise ValueError(
                f"the first codebook's {first_UH.dtype} [{first_UH.shape[0]}, {first_UH.shape[1]}] "
                f"must have the {table_MH.dtype} and {table_MH.shape[1]} columns of the others"
            )
    if book_rows and rows not in (book_rows * (books - 1), book_rows * books):
        raise ValueError(
            f"a table of {rows} rows is none of {books - 1} or {books} codebooks of {book_rows}"
        )
    if not books or (not book_rows and rows % books):
        raise ValueError(f"a table of {rows} rows is none of {books} codebooks")
    return book_rows or rows // books


def _check_fed(fed: Fed, code_SK: torch.Tensor, table_MH: torch.Tensor) -> None:
    """ValueError unless there are rows and a bound for each slot, and embeddings of fed codes."""
    slots, hidden = code_SK.shape[0], table_MH.shape[1]
    shape, dtype = tuple(fed.rows.shape), fed.rows.dtype
    width, wanted = hidden, table_MH.dtype
    if isinstance(fed, FedCodes):
        width, wanted = shape[-1], torch.int32
    fits = len(shape) == 3 and shape[::2] == (slots, width) and shape[1] >= 2 and width
    if not fits or dtype != wanted or not fed.rows.is_contiguous():
        raise ValueError(
            f"fed rows must be a dense {wanted} [{slots}, 2 or more, "
            f"{'P' if isinstance(fed, FedCodes) else hidden}], not {dtype} {shape}"
        )
    if isinstance(fed, FedCodes):
        check_rows(fed_table=fed.table)
        found = tuple(fed.table.shape)
        if fed.table.dtype != table_MH.dtype or found[1] != hidden or found[0] % width:
            raise ValueError(
                f"the table of {width} fed codes must be {table_MH.dtype} [{width} * W, {hidden}], "
                f"not {fed.table.dtype} {found}"
            )
    bound = fed.bound
    if tuple(bound.shape) != (slots,) or bound.dtype != torch.int32 or not bound.is_contiguous():
        raise ValueError(
            f"bounds of fed rows must be a dense int32 [{slots}], not {bound.dtype} "
            f"{tuple(bound.shape)}"
        )


def embed_frames(
    code_SK: torch.Tensor,
    table_MH: torch.Tensor,
    slot_N: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    first_UH: torch.Tensor | None = None,
    fed: Fed | None = None,
    position_N: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Begin each live lane's stream with the embedding of its slot's frame; one launch.

    The embedding is the sum, in float32 and in the order of the codes, of rows k * V + code k of
    the table, rounded once to the table's dtype. Rows that are fed are added to that, and the sum
    rounded again. The embeddings of fed codes come last in the first sum.

    Args:
        code_SK: int32, dense: the codes of each slot's last frame.
        table_MH: any float dtype, dense rows; may exceed 2**31 elements.
        slot_N: int32, -1 = padded lane.
        norm_weight_H: any float dtype: the weight of the first RMSNorm.
        residual: N lanes, written in place as by `gather_and_embed`. A live lane with a code
            outside 0..V-1, or a fed code outside 0..W-1, becomes NaN; padded lanes are not written.
        first_UH: the first codebook, with a number of codes of its own; the table then has the
            others. None: the table has all.
        fed: rows or codes that are added to the frames; None: nothing.
        position_N: int32: the position of each lane's frame, for `fed`.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N)
    groups = check_embedding(table_MH, norm_weight_H, residual, lanes)
    codes = check_codes(code_SK, table_MH, first_UH)
    if fed is not None:
        _check_fed(fed, code_SK, table_MH)
        if position_N is None:
            raise ValueError("fed rows go by positions: position_N must be given with them")
        check_lanes(lanes, position=position_N)
    if not use_triton(slot_N):
        embed_frames_reference(
            code_SK,
            table_MH,
            slot_N,
            norm_weight_H,
            residual,
            first_UH=first_UH,
            fed=fed,
            position_N=position_N,
        )
        return
    first = table_MH if first_UH is None else first_UH
    fed_codes = fed if isinstance(fed, FedCodes) else None
    H = table_MH.shape[1]
    block_h = triton.next_power_of_2(H)
    launcher(_embed_frames_kernel, (lanes,))(
        code_SK,
        table_MH,
        slot_N,
        norm_weight_H,
        residual,
        first,
        slot_N if fed is None else fed.rows,
        slot_N if fed is None else fed.bound,
        slot_N if position_N is None else position_N,
        table_MH if fed_codes is None else fed_codes.table,
        table_MH.stride(0),
        first.stride(0),
        0 if fed_codes is None else fed_codes.table.stride(0),
        residual.x.stride(0),
        residual.scaled.stride(0),
        lanes,
        codes,
        first.shape[0],
        0 if fed_codes is None else len(fed_codes.table) // fed_codes.rows.shape[2],
        K=code_SK.shape[1],
        OWN_FIRST=0 if first_UH is None else 1,
        RING=0 if fed is None else fed.rows.shape[1] - 1,
        P=0 if fed_codes is None else fed_codes.rows.shape[2],
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
    *,
    first_UH: torch.Tensor | None = None,
    fed: Fed | None = None,
    position_N: torch.Tensor | None = None,
) -> None:
    """Plain twin of `embed_frames`."""
    live = live_lanes(slot_N)
    slot = slot_N[live].long()
    rows = None
    if fed is not None and position_N is not None:
        position, ring = position_N[live].long(), fed.rows.shape[1] - 1
        rows = fed.rows[slot, torch.where(position < fed.bound[slot], position % ring, ring)]
    if isinstance(fed, FedCodes) and rows is not None:
        x = sum_of_codes(code_SK[slot].long(), table_MH, first_UH, rows.long(), fed.table).float()
    else:
        x = sum_of_codes(code_SK[slot].long(), table_MH, first_UH).float()
        if rows is not None:
            x = (x + rows.float()).to(table_MH.dtype).float()
    residual.x[live] = x
    residual.scaled[live] = (x * norm_weight_H.float()).to(residual.scaled.dtype)
    residual.squares[:, live] = 0
    residual.squares[0, live] = (x * x).sum(dim=1)


def sum_of_codes(
    code_FK: torch.Tensor,
    table_MH: torch.Tensor,
    first_UH: torch.Tensor | None = None,
    fed_FP: torch.Tensor | None = None,
    fed_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """New [F, H] of the table's dtype: the embeddings of whole frames, summed as `embed_frames`
    sums them. A frame with a code outside 0..V-1 is NaN.

    Args:
        code_FK: int64, on the table's device.
        first_UH: as in `embed_frames`.
        fed_FP, fed_table: int64 codes that stream in, and their embeddings, as `FedCodes` has them.
    """
    books = code_FK.shape[1] - (first_UH is not None)
    tables = [*([] if first_UH is None else [first_UH]), *table_MH.chunk(books)]
    if fed_FP is not None and fed_table is not None:
        tables += fed_table.chunk(fed_FP.shape[1])
        code_FK = torch.cat([code_FK, fed_FP], dim=1)
    total = table_MH.new_zeros(len(code_FK), table_MH.shape[1], dtype=torch.float32)
    for place, table in enumerate(tables):
        code = code_FK[:, place]
        known = (code >= 0) & (code < len(table))
        rows = table[code.where(known, 0)].float()
        total += rows.masked_fill(~known[:, None], float("nan"))
    return total.to(table_MH.dtype)


@triton.jit
def _embed_frames_kernel(
    code_ptr,
    table_ptr,
    slot_ptr,
    norm_weight_ptr,
    residual,
    first_ptr,
    fed_ptr,
    bound_ptr,
    position_ptr,
    fed_table_ptr,
    table_stride,
    first_stride,
    fed_stride,
    x_stride,
    scaled_stride,
    lanes,
    codes,
    first_codes,
    fed_codes,
    K: tl.constexpr,
    OWN_FIRST: tl.constexpr,
    RING: tl.constexpr,
    P: tl.constexpr,
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
    if OWN_FIRST:
        code = tl.load(code_ptr + slot * K, mask=live, other=-1)
        known = live & (code >= 0) & (code < first_codes)
        source = first_ptr + code.to(tl.int64) * first_stride + h
        total_H += tl.load(source, mask=known & (h < H), other=float("nan")).to(tl.float32)
    for place in range(OWN_FIRST, K):
        code = tl.load(code_ptr + slot * K + place, mask=live, other=-1)
        known = live & (code >= 0) & (code < codes)
        row = ((place - OWN_FIRST) * codes + code).to(tl.int64)
        source = table_ptr + row * table_stride + h
        total_H += tl.load(source, mask=known & (h < H), other=float("nan")).to(tl.float32)
    if RING:
        position = tl.load(position_ptr + lane, mask=live, other=0)
        bound = tl.load(bound_ptr + slot, mask=live, other=0)
        added = slot * (RING + 1) + tl.where(position < bound, position % RING, RING)
        if P:
            for place in range(P):
                code = tl.load(fed_ptr + added * P + place, mask=live, other=-1)
                known = live & (code >= 0) & (code < fed_codes)
                row = (place * fed_codes + code).to(tl.int64)
                source = fed_table_ptr + row * fed_stride + h
                total_H += tl.load(source, mask=known & (h < H), other=float("nan")).to(tl.float32)
        else:
            total_H = total_H.to(table_ptr.dtype.element_ty).to(tl.float32)
            source = fed_ptr + added * H + h
            total_H += tl.load(source, mask=live & (h < H), other=0.0).to(tl.float32)
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
