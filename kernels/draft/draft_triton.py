"""The Triton kernels of `draft.py`, and functions that the other drafters' kernels share.

A kernel has one program per lane or per row. The hidden state's half of a module's input is made
before the wait; the token's half is made after it, by the program that learns the token.

Letters: W lanes of a row, C tiles of the draft vocabulary, V vocabulary, H hidden, T groups of
columns, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.sample.tiles import token_of_tiles


class FusionArgs(NamedTuple):
    """Kernel operands of `combine_hidden`; without squares the hidden states are plain rows."""

    hidden: torch.Tensor
    squares: torch.Tensor | None
    embedding: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    combined: torch.Tensor
    x: torch.Tensor | None
    hidden_lanes: int
    hidden_stride: int
    embedding_stride: int
    x_stride: int
    V: int
    eps: float
    hidden_eps: float


class StreamArgs(NamedTuple):
    """Kernel operands of `load_hidden` alone, named as in `FusionArgs`."""

    hidden: torch.Tensor
    squares: torch.Tensor | None
    hidden_lanes: int
    hidden_stride: int
    hidden_eps: float


class CommitArgs(NamedTuple):
    """Kernel operands of `commit_draft`."""

    best: torch.Tensor
    health: torch.Tensor
    source: torch.Tensor | None
    row_slot: torch.Tensor
    row_position: torch.Tensor
    draft: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    tiles: int
    columns: int


@triton.jit
def combine_kernel(
    token_ptr,
    slot_ptr,
    source_ptr,
    fusion,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane. Only the tokens may come from the launch before."""
    lane = tl.program_id(0)
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    source = lane
    if source_ptr is not None:
        source = tl.load(source_ptr + lane, mask=live, other=0, cache_modifier=".cg")
    hidden, start = normed_hidden(fusion, source, live, H, GROUPS, START, BLOCK_H, BLOCK_T)
    weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    token = tl.load(token_ptr + lane, mask=live, other=0)
    store_combined(fusion, hidden, start, weight, token, lane, live, H, HIDDEN_FIRST, BLOCK_H)


@triton.jit
def begin_kernel(
    target_ptr,
    count_ptr,
    fed_slot_ptr,
    fed_position_ptr,
    hidden_source_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    row_token_ptr,
    row_slot_ptr,
    row_position_ptr,
    source_ptr,
    fusion,
    W: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane; the program of a row's first lane also writes where the row continues.

    Only the target's tokens and the counts may come from the launch before.
    """
    lane = tl.program_id(0)
    row = lane // W
    slot = tl.load(fed_slot_ptr + lane, cache_modifier=".cg")
    fed = slot >= 0
    position = tl.load(fed_position_ptr + lane, mask=fed, other=0, cache_modifier=".cg")
    source = lane
    if hidden_source_ptr is not None:
        source = tl.load(hidden_source_ptr + lane, mask=fed, other=0, cache_modifier=".cg")
    hidden, start = normed_hidden(fusion, source, fed, H, GROUPS, START, BLOCK_H, BLOCK_T)
    weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row)
    live = fed & (lane % W < count)
    token = tl.load(target_ptr + lane, mask=live, other=0)
    store_lane(token_ptr, slot_ptr, position_ptr, lane, token, slot, position, live)
    if lane % W == 0:
        last = tl.where(live, lane + count - 1, lane)
        last_token = tl.load(target_ptr + last, mask=live, other=0)
        store_lane(
            row_token_ptr,
            row_slot_ptr,
            row_position_ptr,
            row,
            last_token,
            slot,
            position + count - 1,
            live,
        )
        tl.store(source_ptr + row, last)
    store_combined(fusion, hidden, start, weight, token, lane, live, H, HIDDEN_FIRST, BLOCK_H)


@triton.jit(do_not_specialize=["index", "limit"])
def advance_kernel(
    commit,
    index,
    limit,
    fusion,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Only the tiles may come from the launch before."""
    row = tl.program_id(0)
    slot, position, source = load_row(commit, row)
    hidden, start = normed_hidden(fusion, source, slot >= 0, H, GROUPS, START, BLOCK_H, BLOCK_T)
    weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    token, live = commit_lane(commit, row, slot, position, source, index, limit, BLOCK_C, BLOCK_K)
    store_combined(fusion, hidden, start, weight, token, row, live, H, HIDDEN_FIRST, BLOCK_H)


@triton.jit(do_not_specialize=["index", "limit"])
def commit_kernel(
    commit, index, limit, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0)
    slot, position, source = load_row(commit, row)
    wait_for_inputs(PDL)

    commit_lane(commit, row, slot, position, source, index, limit, BLOCK_C, BLOCK_K)


@triton.jit
def load_row(commit, row):
    """Load slot, position and source of a row, before the wait."""
    slot = tl.load(commit.row_slot + row, cache_modifier=".cg")
    live = slot >= 0
    position = tl.load(commit.row_position + row, mask=live, other=0, cache_modifier=".cg")
    source = row
    if commit.source is not None:
        source = tl.load(commit.source + row, mask=live, other=0, cache_modifier=".cg")
    return slot, position, source


@triton.jit
def commit_lane(
    commit,
    row,
    slot,
    position,
    source,
    index,
    limit,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a row's draft into the table, and its next lane; return the draft, and whether that
    lane is live."""
    live = slot >= 0
    draft = token_of_tiles(commit.best, commit.health, source, commit.tiles, live, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    drafts = tl.where(k == index, draft, -1)
    mask = live & (k >= index) & (k < commit.columns)
    tl.store(commit.draft + slot.to(tl.int64) * commit.columns + k, drafts, mask=mask)
    goes_on = live & (draft >= 0) & (position + 1 < limit)
    store_lane(commit.token, commit.slot, commit.position, row, draft, slot, position + 1, goes_on)
    return draft, goes_on


@triton.jit
def store_lane(token_ptr, slot_ptr, position_ptr, lane, token, slot, position, live):
    """Write a lane, padded if it is not live."""
    tl.store(slot_ptr + lane, tl.where(live, slot, -1))
    tl.store(token_ptr + lane, token, mask=live)
    tl.store(position_ptr + lane, position, mask=live)


@triton.jit
def load_weight(weight_ptr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a weight as float32 [BLOCK_H], 0 past the end."""
    h = tl.arange(0, BLOCK_H)
    return tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)


@triton.jit
def normed_hidden(
    fusion,
    lane,
    live,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute, before the wait, the hidden state's half of a combined row and the start of its
    stream; both float32 [BLOCK_H].
    """
    weight = load_weight(fusion.hidden_norm, H, BLOCK_H)
    value = load_hidden(fusion, lane, live, H, GROUPS, BLOCK_H, BLOCK_T)
    half = normed(value, weight, fusion.eps, H)
    return half, stream_start(value, half, START)


@triton.jit
def stream_start(value, half, START: tl.constexpr):
    """Start of the residual stream that START (`draft.START_CODES`) selects, given the hidden state
    and its normed half.
    """
    if START == 0:
        start = tl.zeros_like(value)
    elif START == 1:
        start = value
    else:
        start = half
    return start


@triton.jit
def load_hidden(
    stream,
    lane,
    live,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Load, before the wait, a lane's hidden state, rounded to the model's dtype: float32
    [BLOCK_H].
    """
    h = tl.arange(0, BLOCK_H)
    source = stream.hidden + lane.to(tl.int64) * stream.hidden_stride + h
    value = tl.load(source, mask=live & (h < H), other=0.0, cache_modifier=".cg").to(tl.float32)
    if GROUPS > 0:
        t = tl.arange(0, BLOCK_T)
        squares = tl.load(
            stream.squares + t * stream.hidden_lanes + lane,
            mask=live & (t < GROUPS),
            other=0.0,
            cache_modifier=".cg",
        )
        value *= 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / H + stream.hidden_eps)
        value = value.to(stream.hidden.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def normed(value, weight, eps, H: tl.constexpr):
    """value / sqrt(mean(value**2) + eps) * weight; value and weight are 0 past the end."""
    return value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / H + eps)) * weight


@triton.jit
def store_combined(
    fusion,
    hidden,
    start,
    weight,
    token,
    lane,
    live,
    H: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Embed a live lane's token, write both halves of its row, and start its residual stream."""
    h = tl.arange(0, BLOCK_H)
    mask = live & (h < H)
    known = (token >= 0) & (token < fusion.V)
    source = fusion.embedding + token.to(tl.int64) * fusion.embedding_stride + h
    value = tl.load(source, mask=mask & known, other=0.0).to(tl.float32)
    embedded = tl.where(known, normed(value, weight, fusion.eps, H), float("nan"))
    hidden = tl.where(known, hidden, float("nan"))
    wide_lane = lane.to(tl.int64)
    target = fusion.combined + wide_lane * (2 * H) + h
    dtype: tl.constexpr = fusion.combined.dtype.element_ty
    tl.store(target + (H if HIDDEN_FIRST else 0), embedded.to(dtype), mask=mask)
    tl.store(target + (0 if HIDDEN_FIRST else H), hidden.to(dtype), mask=mask)
    if fusion.x is not None:
        tl.store(fusion.x + wide_lane * fusion.x_stride + h, start, mask=mask)
