"""Token embedding: rows of the table become the float32 residual stream.

Some positions of a prompt may have no token but an embedding of their own (`GivenRows`), which
replaces the table's. `add_given` adds more such rows to the stream between two layers (DeepStack).

`embed` is a separate launch. Kernels that start a decode step's `Residual` with the embedding of
a token share `load_embedding` and `store_embedding`, with their checks and twin.

Letters: N lanes, V vocabulary, H hidden, T groups of columns, M given rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_rows,
    check_weight,
    live_lanes,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.linear.residual import Residual, check_squares

_BLOCK_H = 1024

GIVEN = -2
"""The token of a position p that has an embedding of its own is GIVEN - p: no two positions of a
sequence have the same, and none is a token's id or -1, which stands for no token."""

_GIVEN = tl.constexpr(GIVEN)


class GivenRows(NamedTuple):
    """Embeddings of positions that have no token."""

    rows: torch.Tensor
    """[M, H] in the table's dtype, dense rows; row i belongs to position `first` + i."""
    first: torch.Tensor
    """int32 [1]: the position of row 0. Or [N]: the position that row 0 would have in each lane's
    own sequence, where the rows of several follow one another."""
    scale: float
    """Factor on the rows; the product is rounded to their dtype."""


def embed(
    token_N: torch.Tensor,
    table_VH: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    scale: float = 1.0,
    given: GivenRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The embedding of each live lane's token, widened to float32.

    Args:
        token_N: int32. table_VH: float32, float16 or bfloat16; may exceed 2**31 elements.
        slot_N: int32, -1 = padded lane.
        scale: factor on the embedding; the product is rounded to the table's dtype.
        given: the embeddings of tokens GIVEN and below; None: there are none.
        out: float32 [N, H].

    Returns:
        float32 [N, H]. A live lane whose id is outside 0..V-1, and names no given row, becomes NaN,
        so that the mistake shows; no memory outside the table and the given rows is read. Padded
        lanes are neither read nor written.
        ValueError for a shape or dtype that does not fit.
    """
    check_rows(table_VH=table_VH)
    lanes = slot_N.shape[0]
    check_lanes(lanes, slot_N=slot_N, token_N=token_N)
    V, H = table_VH.shape
    out = output_rows(out, (lanes, H), dtype=torch.float32, like=table_VH)
    first_stride = 0 if given is None else _check_given(given, table_VH, lanes)
    if not use_triton(table_VH):
        return embed_reference(token_N, table_VH, slot_N, scale=scale, given=given, out=out)
    launcher(_embed_kernel, (lanes, triton.cdiv(H, _BLOCK_H)))(
        token_N,
        table_VH,
        slot_N,
        out,
        table_VH.stride(0),
        out.stride(0),
        V,
        None if given is None else given.rows,
        None if given is None else given.first,
        None if given is None else given.rows.stride(0),
        None if given is None else given.rows.shape[0],
        H=H,
        FIRST_STRIDE=first_stride,
        SCALE=float(scale),
        GIVEN_SCALE=1.0 if given is None else float(given.scale),
        BLOCK_H=_BLOCK_H,
    )
    return out


def add_given(
    x_NH: torch.Tensor, token_N: torch.Tensor, slot_N: torch.Tensor, given: GivenRows
) -> None:
    """Add its given row to each live lane that has one, in place; other lanes are not touched.

    Args:
        x_NH: float32, dense rows. token_N: int32, as in `embed`. slot_N: int32, -1 = padded lane.
        given: rows of H values.

    A live lane below GIVEN that names no given row becomes NaN.
    """
    lanes, H = x_NH.shape
    check_lanes(lanes, slot_N=slot_N, token_N=token_N)
    output_rows(x_NH, (lanes, H), dtype=torch.float32, like=x_NH)
    check_rows(given_rows=given.rows)
    stride = _first_stride(given, lanes)
    if given.rows.shape[1] != H:
        raise ValueError(f"given rows of {given.rows.shape[1]} values, the stream has {H}")
    if not use_triton(x_NH):
        add_given_reference(x_NH, token_N, slot_N, given)
        return
    launcher(_add_given_kernel, (lanes, triton.cdiv(H, _BLOCK_H)))(
        x_NH,
        token_N,
        slot_N,
        given.rows,
        given.first,
        x_NH.stride(0),
        given.rows.stride(0),
        given.rows.shape[0],
        H=H,
        FIRST_STRIDE=stride,
        SCALE=float(given.scale),
        BLOCK_H=_BLOCK_H,
    )


@triton.jit
def _add_given_kernel(
    x_ptr,
    token_ptr,
    slot_ptr,
    given_ptr,
    first_ptr,
    x_stride,
    given_stride,
    M,
    H: tl.constexpr,
    FIRST_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program a lane and BLOCK_H columns."""
    lane = tl.program_id(0).to(tl.int64)
    if tl.load(slot_ptr + lane) < 0:
        return
    token = tl.load(token_ptr + lane)
    if token > _GIVEN:
        return
    row = _GIVEN - token - tl.load(first_ptr + lane * FIRST_STRIDE)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (row >= 0) & (row < M)
    source = given_ptr + row.to(tl.int64) * given_stride + h
    added = tl.load(source, mask=(h < H) & inside, other=float("nan"))
    at = x_ptr + lane * x_stride + h
    x = tl.load(at, mask=h < H)
    tl.store(at, x + scaled_embedding(added, SCALE), mask=h < H)


def add_given_reference(
    x_NH: torch.Tensor, token_N: torch.Tensor, slot_N: torch.Tensor, given: GivenRows
) -> None:
    """`add_given` in plain PyTorch."""
    lane = torch.nonzero((slot_N >= 0) & (token_N <= GIVEN)).flatten()
    row = GIVEN - token_N[lane] - _first_of(given, lane)
    missing = (row < 0) | (row >= given.rows.shape[0])
    x_NH[lane] += _scaled_rows(given.rows, row, missing, given.scale)


def _first_of(given: GivenRows, lane_L: torch.Tensor) -> torch.Tensor:
    """`given.first` of these lanes."""
    return given.first if given.first.numel() == 1 else given.first[lane_L]


def _first_stride(given: GivenRows, lanes: int) -> int:
    """Entries of `given.first` from lane to lane; ValueError unless there is one, or one a lane."""
    entries = given.first.numel()
    check_lanes(1 if entries == 1 else lanes, first=given.first)
    return int(entries > 1)


def _check_given(given: GivenRows, table_VH: torch.Tensor, lanes: int) -> int:
    """`_first_stride`; ValueError unless the rows have the table's width and dtype."""
    check_rows(given_rows=given.rows)
    stride = _first_stride(given, lanes)
    found, wanted = (given.rows.shape[1], given.rows.dtype), (table_VH.shape[1], table_VH.dtype)
    if found != wanted:
        raise ValueError(
            f"given rows of {found[0]} values of {found[1]}, the table has {wanted[0]} of "
            f"{wanted[1]}"
        )
    return stride


@triton.jit
def _embed_kernel(
    token_ptr,
    table_ptr,
    slot_ptr,
    out_ptr,
    table_stride,
    out_stride,
    V,
    given_ptr,
    first_ptr,
    given_stride,
    M,
    H: tl.constexpr,
    FIRST_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    GIVEN_SCALE: tl.constexpr,
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
    x = scaled_embedding(tl.load(source, mask=mask & known, other=float("nan")), SCALE)
    if given_ptr is not None:
        row = _GIVEN - token - tl.load(first_ptr + lane * FIRST_STRIDE)
        given = (token <= _GIVEN) & (row >= 0) & (row < M)
        source = given_ptr + row.to(tl.int64) * given_stride + h
        there = tl.load(source, mask=mask & given, other=float("nan"))
        x = tl.where(given, scaled_embedding(there, GIVEN_SCALE), x)
    tl.store(out_ptr + lane * out_stride + h, x, mask=mask)


@triton.jit
def scaled_embedding(x, SCALE: tl.constexpr):
    """An embedding times SCALE, rounded to its dtype, as float32."""
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if SCALE != 1.0:
        x = (x * SCALE).to(dtype).to(tl.float32)
    return x


def embed_reference(
    token_N: torch.Tensor,
    table_VH: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    scale: float = 1.0,
    given: GivenRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`embed` in plain PyTorch."""
    V, H = table_VH.shape
    out = output_rows(out, (slot_N.shape[0], H), dtype=torch.float32, like=table_VH)
    live = live_lanes(slot_N)
    token = token_N[live]
    unknown = (token < 0) | (token >= V)
    x = _scaled_rows(table_VH, token, unknown, scale)
    if given is not None:
        row = GIVEN - token - _first_of(given, live)
        missing = (token > GIVEN) | (row < 0) | (row >= given.rows.shape[0])
        x = torch.where(missing[:, None], x, _scaled_rows(given.rows, row, missing, given.scale))
    out[live] = x
    return out


def _scaled_rows(
    table_VH: torch.Tensor, row_N: torch.Tensor, unknown_N: torch.Tensor, scale: float
) -> torch.Tensor:
    """Rows of the table times `scale`, rounded to its dtype, as float32; NaN where unknown."""
    rows = table_VH[row_N.masked_fill(unknown_N, 0).long()]
    x = rows.float() if scale == 1.0 else (rows.float() * scale).to(rows.dtype).float()
    return x.masked_fill(unknown_N[:, None], math.nan)


def check_embedding(
    embedding_VH: torch.Tensor, norm_weight_H: torch.Tensor, residual: Residual, lanes: int
) -> int:
    """T; ValueError unless the embedding, the norm and a stream of `lanes` lanes fit each other."""
    check_rows(embedding=embedding_VH)
    H = embedding_VH.shape[1]
    check_weight("norm_weight", norm_weight_H, H)
    x, scaled, squares, _ = residual
    output_rows(x, (lanes, H), dtype=torch.float32, like=x)
    output_rows(scaled, (lanes, H), dtype=scaled.dtype, like=scaled)
    check_squares(squares, lanes)
    return squares.shape[0]


def embed_residual_reference(
    token_N: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    slot_N: torch.Tensor,
    residual: Residual,
    *,
    scale: float = 1.0,
) -> None:
    """`load_embedding` and `store_embedding` of every live lane, in plain PyTorch."""
    embed_reference(token_N, embedding_VH, slot_N, scale=scale, out=residual.x)
    live = live_lanes(slot_N)
    x = residual.x[live]
    residual.scaled[live] = (x * norm_weight_H.float()).to(residual.scaled.dtype)
    residual.squares[:, live] = 0
    residual.squares[0, live] = (x * x).sum(dim=1)


@triton.jit
def load_embedding(embedding_ptr, token, live, stride, V, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """The row [BLOCK_H] of a live lane's token, NaN past its end; all NaN for an unknown token."""
    h = tl.arange(0, BLOCK_H)
    mask = live & (token >= 0) & (token < V) & (h < H)
    source = embedding_ptr + token.to(tl.int64) * stride + h
    return tl.load(source, mask=mask, other=float("nan"))


@triton.jit
def store_embedding(
    embedding_H,
    weight_H,
    lane,
    live,
    stream,
    x_stride,
    scaled_stride,
    lanes,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Start a live lane's residual stream, which has `lanes` lanes, with its token's embedding.

    `stream` has the fields of `Residual`; `weight_H` is the next norm's, float32.
    """
    h = tl.arange(0, BLOCK_H)
    mask = live & (h < H)
    wide_lane = lane.to(tl.int64)
    x = scaled_embedding(embedding_H, SCALE)
    tl.store(stream.x + wide_lane * x_stride + h, x, mask=mask)
    scaled = (x * weight_H).to(stream.scaled.dtype.element_ty)
    tl.store(stream.scaled + wide_lane * scaled_stride + h, scaled, mask=mask)
    square = tl.sum(tl.where(h < H, x * x, 0.0), 0)
    t = tl.arange(0, BLOCK_T)
    tl.store(stream.squares + t * lanes + lane, tl.where(t == 0, square, 0.0), mask=live & (t < T))
