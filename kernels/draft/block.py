"""Kernels around the one run of a block drafter: begin a block of masks, and commit its drafts.

A block is B lanes at consecutive positions: the row's newest token, and masks after it. They attend
verified tokens and each other. Drafts are read off the last K lanes, all at once: where B is K + 1,
a mask lane drafts the token at its own position (DFlash, arXiv:2602.06036); where B is K, each lane
drafts the token after it (DSpark, deepseek-ai/DeepSpec).

    begin_block_draft -> (layers, lm_head) -> commit_block_draft

Letters: S slots, R rows, W target lanes of a row, N = R * W, B lanes of a block, K drafts,
V vocabulary, H hidden, T groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import (
    DraftTiles,
    check_draft_table,
    check_steps,
    new_lanes,
)
from graphengine.kernels.draft.draft_triton import load_weight, store_lane
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import (
    check_embedding,
    embed_residual_reference,
    load_embedding,
    store_embedding,
)
from graphengine.kernels.sample.sampling import check_tiles, token_of_tiles_reference
from graphengine.kernels.sample.tiles import token_of_tiles
from graphengine.kernels.step.state import DecodeLanes


class BlockDraft(NamedTuple):
    """The lanes of a block drafter's run, in new tensors."""

    context_slot: torch.Tensor
    """int32 [N]: the slot of each lane that the target was fed, if its token stays; else -1."""
    lanes: DecodeLanes
    """R * B: lane r * B is row r's newest token, at the position after the verified tokens."""
    rows: DecodeLanes
    """R: the first lane of each row."""
    start: torch.Tensor
    """int32 [R + 1]: where each row's lanes begin, as in `paged_prefill_attention`."""
    seen: torch.Tensor
    """int32 [R]: the position after the block's last one, at most the limit."""


def begin_block_draft(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    width: int,
    mask_token: int,
    limit: int,
    pdl: bool = False,
) -> BlockDraft:
    """Make the lanes of a run after a verified step, and their residual stream; one launch.

    Args:
        token_N: int32, the target's token after each lane. The newest token of a row that emitted
            `count` tokens is that of its lane count - 1.
        count_R: int32, tokens that each row emitted, at most its live lanes. A row without any has
            no block.
        lanes: the lanes that the target was fed.
        embedding_VH: any float dtype, dense rows. norm_weight_H: weight of the first RMSNorm.
        residual: R * B lanes, written in place as by `gather_and_embed`.
        width: B. mask_token: the token that all lanes but a row's first embed.
        limit: positions that the cache has; lanes at or past it are padded.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. That one may
            write `token_N` and `count_R`; the lanes must be older.

    ValueError for a shape, dtype or number that does not fit.
    """
    N, rows = check_steps(token_N, count_R, lanes), count_R.numel()
    if width < 1:
        raise ValueError(f"a block of {width} lanes must have 1 or more")
    groups = check_embedding(embedding_VH, norm_weight_H, residual, rows * width)
    V, H = embedding_VH.shape
    if not 0 <= mask_token < V:
        raise ValueError(f"mask_token={mask_token} is none of the embedding's {V} tokens")
    if not use_triton(token_N):
        return begin_block_draft_reference(
            token_N,
            count_R,
            lanes,
            embedding_VH,
            norm_weight_H,
            residual,
            width=width,
            mask_token=mask_token,
            limit=limit,
        )
    begun = BlockDraft(
        context_slot=torch.empty_like(lanes.slot),
        lanes=new_lanes(rows * width, token_N),
        rows=new_lanes(rows, token_N),
        start=token_N.new_empty(rows + 1),
        seen=torch.empty_like(count_R),
    )
    block_h = triton.next_power_of_2(H)
    fed = N // rows
    launcher(_begin_block_kernel, (rows * (fed + width),))(
        token_N,
        count_R,
        lanes.slot,
        lanes.position,
        embedding_VH,
        norm_weight_H,
        residual,
        begun,
        embedding_VH.stride(0),
        residual.x.stride(0),
        residual.scaled.stride(0),
        rows,
        V,
        mask_token,
        limit,
        W=fed,
        B=width,
        H=H,
        T=groups,
        BLOCK_H=block_h,
        BLOCK_T=triton.next_power_of_2(groups),
        num_warps=min(max(block_h // 512, 4), 16),
        **launch_options(pdl),
    )
    return begun


def begin_block_draft_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    width: int,
    mask_token: int,
    limit: int,
) -> BlockDraft:
    """`begin_block_draft` in plain PyTorch."""
    rows = count_R.numel()
    slot_RW, position_RW = lanes.slot.view(rows, -1), lanes.position.view(rows, -1)
    fed = torch.arange(slot_RW.shape[1], dtype=torch.int32, device=token_N.device)
    slot_R, live_R = slot_RW[:, 0], (slot_RW[:, 0] >= 0) & (count_R > 0)
    count_R = count_R.where(live_R, 0)
    context_slot = slot_R[:, None].where(fed < count_R[:, None], -1)
    start_R = position_RW[:, 0] + count_R
    newest = (count_R - 1).clamp(min=0).long()
    token_RB = token_N.new_full((rows, width), mask_token)
    token_RB[:, 0] = token_N.view(rows, -1).gather(1, newest[:, None])[:, 0]
    ahead = torch.arange(width, dtype=torch.int32, device=token_N.device)
    position_RB = start_R[:, None] + ahead
    slot_RB = slot_R[:, None].where(live_R[:, None] & (position_RB < limit), -1)
    block = DecodeLanes(token_RB.flatten(), slot_RB.flatten(), position_RB.flatten())
    embed_residual_reference(block.token, embedding_VH, norm_weight_H, block.slot, residual)
    return BlockDraft(
        context_slot=context_slot.flatten(),
        lanes=block,
        rows=DecodeLanes(*(field.view(rows, width)[:, 0].contiguous() for field in block)),
        start=torch.arange(rows + 1, dtype=torch.int32, device=token_N.device) * width,
        seen=(start_R + width).clamp(max=limit),
    )


def commit_block_draft(
    tiles: DraftTiles,
    lanes: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    rows: int,
    pdl: bool = False,
) -> None:
    """Write the drafts of each live row's last K lanes into the table; one launch.

    A draft is -1 (none) where its lane is padded or had no valid logits.

    Args:
        tiles: those of the R * B lanes of the blocks.
        lanes: these lanes; a row is live if its first lane is. Their tokens are not read.
        draft_SK: int32 [S, K], updated in place; K is at most B.
        rows: R.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Of the inputs,
            that one may write only the tiles.

    ValueError for a shape or dtype that does not fit.
    """
    count = lanes.slot.numel()
    check_lanes(count, slot=lanes.slot)
    check_tiles(tiles.best, tiles.health, count)
    drafts = check_draft_table(draft_SK)
    if rows < 1 or count % rows or count // rows < drafts:
        raise ValueError(f"{count} lanes of {rows} rows are no blocks with {drafts} drafts each")
    if not use_triton(lanes.slot):
        commit_block_draft_reference(tiles, lanes, draft_SK, rows=rows)
        return
    columns = tiles.best.shape[1]
    warps = min(max(triton.next_power_of_2(columns) // 256, 1), 16)
    launcher(_commit_block_kernel, (rows, drafts))(
        tiles.best,
        tiles.health,
        lanes.slot,
        draft_SK,
        columns,
        B=count // rows,
        K=drafts,
        BLOCK_C=min(triton.next_power_of_2(columns), 512 * warps),
        num_warps=warps,
        **launch_options(pdl),
    )


def commit_block_draft_reference(
    tiles: DraftTiles, lanes: DecodeLanes, draft_SK: torch.Tensor, *, rows: int
) -> None:
    """`commit_block_draft` in plain PyTorch."""
    drafts, slot_RB = draft_SK.shape[1], lanes.slot.view(rows, -1)
    token_RB = token_of_tiles_reference(tiles.best, tiles.health).view(slot_RB.shape)
    draft_RK = token_RB.where(slot_RB >= 0, -1)[:, -drafts:]
    live = slot_RB[:, 0] >= 0
    draft_SK[slot_RB[live, 0].long()] = draft_RK[live]


@triton.jit(do_not_specialize=["mask_token", "limit"])
def _begin_block_kernel(
    target_ptr,
    count_ptr,
    fed_slot_ptr,
    fed_position_ptr,
    embedding_ptr,
    norm_ptr,
    stream,
    begun,
    embedding_stride,
    x_stride,
    scaled_stride,
    rows,
    V,
    mask_token,
    limit,
    W: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane that the target was fed, and one per lane of a block.

    Only the target's tokens and the counts may come from the launch before.
    """
    row = tl.program_id(0) // (W + B)
    number = tl.program_id(0) % (W + B)
    slot = tl.load(fed_slot_ptr + row * W, cache_modifier=".cg")
    known = slot >= 0
    position = tl.load(fed_position_ptr + row * W, mask=known, other=0, cache_modifier=".cg")
    weight = load_weight(norm_ptr, H, BLOCK_H)
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=known, other=0)
    if number < W:
        tl.store(begun.context_slot + row * W + number, tl.where(number < count, slot, -1))
        return
    number -= W
    lane = row * B + number
    first = position + count
    live = known & (count > 0) & (first + number < limit)
    newest = tl.load(target_ptr + row * W + count - 1, mask=live & (number == 0), other=0)
    token = tl.where(number == 0, newest, mask_token)
    into = begun.lanes
    store_lane(into.token, into.slot, into.position, lane, token, slot, first + number, live)
    if number == 0:
        into = begun.rows
        store_lane(into.token, into.slot, into.position, row, token, slot, first, live)
        tl.store(begun.seen + row, tl.minimum(first + B, limit))
        tl.store(begun.start + row, row * B)
        tl.store(begun.start + rows, rows * B, mask=row == 0)
    embedded = load_embedding(embedding_ptr, token, live, embedding_stride, V, H, BLOCK_H)
    store_embedding(
        embedded,
        weight,
        lane,
        live,
        stream,
        x_stride,
        scaled_stride,
        rows * B,
        H,
        T,
        BLOCK_H,
        BLOCK_T,
        1.0,
    )


@triton.jit
def _commit_block_kernel(
    best_ptr,
    health_ptr,
    slot_ptr,
    draft_ptr,
    tiles,
    B: tl.constexpr,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and draft."""
    row = tl.program_id(0)
    number = tl.program_id(1)
    lane = row * B + (B - K) + number
    slot = tl.load(slot_ptr + row * B, cache_modifier=".cg")
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    wait_for_inputs(PDL)

    draft = token_of_tiles(best_ptr, health_ptr, lane, tiles, live, BLOCK_C)
    draft = tl.where(live, draft, -1)
    tl.store(draft_ptr + slot.to(tl.int64) * K + number, draft, mask=slot >= 0)
