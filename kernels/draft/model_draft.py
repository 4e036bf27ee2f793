"""Kernels around the runs of a draft model: a smaller model with its own KV cache.

    decode    begin_model_draft -> (model, lm_head) -> advance_model_draft -> (model, lm_head)
              -> ... -> commit_draft

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, V vocabulary, H hidden, T groups of
columns, K drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import (
    DraftTiles,
    check_commit,
    check_steps,
    commit_args,
    commit_blocks,
    commit_draft_reference,
    new_lanes,
)
from graphengine.kernels.draft.draft_triton import commit_lane, load_row, load_weight, store_lane
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import (
    check_embedding,
    embed_residual_reference,
    load_embedding,
    store_embedding,
)
from graphengine.kernels.step.state import DecodeLanes


class ModelDraft(NamedTuple):
    """The first run of a draft model after a verified step; valid until the next replay."""

    lanes: DecodeLanes
    """2 * R lanes: for row r, lane 2r takes the last token but one, lane 2r + 1 the last."""
    rows: DecodeLanes
    """R lanes: the second lane of each row; padded where the row is, or emitted nothing."""
    source: torch.Tensor
    """int32 [R]: 2r + 1."""


def begin_model_draft(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    limit: int,
    embedding_scale: float = 1.0,
    pdl: bool = False,
) -> ModelDraft:
    """Fetch and embed the last two tokens of each row after a verified step; one launch.

    A draft model has not been fed the last draft. So if all drafts were accepted, two tokens are
    new to its cache, otherwise one; the other is then fed again at its own position, so that the
    launch has one shape. With L the row's kv_len before the step, the two are at L + count - 1, the
    token that the target was fed there, and at L + count, the target's answer.

    Args:
        token_N: int32, the target's token after each lane; read where the lane emitted it.
        count_R: int32, tokens that each row emitted, at most its live lanes; N is W * R.
        lanes: the lanes that the target was fed.
        embedding_VH, norm_weight_H, residual: the draft model's, as for `gather_and_embed`, for
            2 * R lanes.
        limit: positions that its cache has: no lane is put at or past it.
        embedding_scale: as for `gather_and_embed`.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Of the inputs,
            that one may write only `token_N` and `count_R`.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit.
    """
    N, rows = check_steps(token_N, count_R, lanes), count_R.numel()
    check_embedding(embedding_VH, norm_weight_H, residual, 2 * rows)
    if not use_triton(token_N):
        return begin_model_draft_reference(
            token_N,
            count_R,
            lanes,
            embedding_VH,
            norm_weight_H,
            residual,
            limit=limit,
            embedding_scale=embedding_scale,
        )
    draft = ModelDraft(
        lanes=new_lanes(2 * rows, token_N),
        rows=new_lanes(rows, token_N),
        source=torch.empty_like(count_R),
    )
    args, options = _embed_args(embedding_VH, norm_weight_H, residual, embedding_scale)
    launcher(_begin_kernel, (2 * rows,))(
        token_N,
        count_R,
        *lanes,
        *draft.lanes,
        *draft.rows,
        draft.source,
        limit,
        args,
        W=N // rows,
        **options,
        **launch_options(pdl),
    )
    return draft


def begin_model_draft_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    limit: int,
    embedding_scale: float = 1.0,
) -> ModelDraft:
    """`begin_model_draft` in plain PyTorch."""
    rows = count_R.numel()
    W = token_N.numel() // rows
    row_R = torch.arange(rows, dtype=torch.int32, device=token_N.device)
    slot_R, position_R = lanes.slot[::W], lanes.position[::W]
    live_R = (slot_R >= 0) & (count_R > 0)
    last = (row_R * W + count_R - 1).where(live_R, row_R * W).long()
    position = position_R[:, None] + torch.stack([count_R - 1, count_R], dim=1)
    fed = DecodeLanes(
        token=torch.stack([lanes.token[last], token_N[last]], dim=1).flatten(),
        slot=slot_R[:, None].where(live_R[:, None] & (position < limit), -1).flatten(),
        position=position.flatten(),
    )
    embed_residual_reference(
        fed.token, embedding_VH, norm_weight_H, fed.slot, residual, scale=embedding_scale
    )
    return ModelDraft(fed, DecodeLanes(*(field[1::2].clone() for field in fed)), 2 * row_R + 1)


def advance_model_draft(
    tiles: DraftTiles,
    rows: DecodeLanes,
    draft_SK: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    index: int,
    limit: int,
    source_R: torch.Tensor | None = None,
    embedding_scale: float = 1.0,
    pdl: bool = False,
) -> DecodeLanes:
    """Run `commit_draft`, then embed each new lane's token, in one launch.

    Args:
        tiles, rows, draft_SK, index, limit, source_R, pdl: as in `commit_draft`.
        embedding_VH, norm_weight_H, residual, embedding_scale: the draft model's, as for
            `gather_and_embed`, for R lanes.

    Returns:
        New lanes, as in `commit_draft`. ValueError for a shape or dtype that does not fit.
    """
    count = check_commit(tiles, rows, draft_SK, index, source_R)
    check_embedding(embedding_VH, norm_weight_H, residual, count)
    if not use_triton(rows.slot):
        lanes = commit_draft_reference(
            tiles, rows, draft_SK, index=index, limit=limit, source_R=source_R
        )
        embed_residual_reference(
            lanes.token, embedding_VH, norm_weight_H, lanes.slot, residual, scale=embedding_scale
        )
        return lanes
    lanes = new_lanes(count, rows.slot)
    args, options = _embed_args(embedding_VH, norm_weight_H, residual, embedding_scale)
    launcher(_advance_kernel, (count,))(
        commit_args(tiles, rows, draft_SK, source_R, lanes),
        index,
        limit,
        args,
        **commit_blocks(tiles, draft_SK, options["num_warps"]),
        **options,
        **launch_options(pdl),
    )
    return lanes


class EmbedArgs(NamedTuple):
    """Kernel operands for the embedding of a lane."""

    embedding: torch.Tensor
    norm: torch.Tensor
    x: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor
    embedding_stride: int
    x_stride: int
    scaled_stride: int
    lanes: int
    V: int


def _embed_args(
    embedding_VH: torch.Tensor, norm_weight_H: torch.Tensor, residual: Residual, scale: float
) -> tuple[EmbedArgs, dict[str, Any]]:
    """Operands, and sizes and warps of a launch, which follow from H and T."""
    V, H = embedding_VH.shape
    groups, lanes = residual.squares.shape
    args = EmbedArgs(
        embedding=embedding_VH,
        norm=norm_weight_H,
        x=residual.x,
        scaled=residual.scaled,
        squares=residual.squares,
        embedding_stride=embedding_VH.stride(0),
        x_stride=residual.x.stride(0),
        scaled_stride=residual.scaled.stride(0),
        lanes=lanes,
        V=V,
    )
    block_h = triton.next_power_of_2(H)
    options = {
        "H": H,
        "T": groups,
        "BLOCK_H": block_h,
        "BLOCK_T": triton.next_power_of_2(groups),
        "SCALE": float(scale),
        "num_warps": min(max(block_h // 256, 4), 16),
    }
    return args, options


@triton.jit(do_not_specialize=["limit"])
def _begin_kernel(
    target_ptr,
    count_ptr,
    fed_token_ptr,
    fed_slot_ptr,
    fed_position_ptr,
    token_ptr,
    slot_ptr,
    position_ptr,
    row_token_ptr,
    row_slot_ptr,
    row_position_ptr,
    source_ptr,
    limit,
    stream,
    W: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane. Only target tokens and counts may come from the launch before."""
    lane = tl.program_id(0)
    row = lane // 2
    second = lane % 2
    slot = tl.load(fed_slot_ptr + row * W, cache_modifier=".cg")
    live = slot >= 0
    start = tl.load(fed_position_ptr + row * W, mask=live, other=0, cache_modifier=".cg")
    weight = load_weight(stream.norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row)
    live = live & (count > 0)
    position = start + count - 1 + second
    last = row * W + count - 1
    fed = tl.load(fed_token_ptr + last, mask=live & (second == 0), other=0)
    said = tl.load(target_ptr + last, mask=live & (second == 1), other=0)
    token = tl.where(second == 0, fed, said)
    live = live & (position < limit)
    store_lane(token_ptr, slot_ptr, position_ptr, lane, token, slot, position, live)
    if second == 1:
        store_lane(row_token_ptr, row_slot_ptr, row_position_ptr, row, token, slot, position, live)
        tl.store(source_ptr + row, lane)
    _embed_lane(stream, weight, token, lane, live, H, T, BLOCK_H, BLOCK_T, SCALE)


@triton.jit(do_not_specialize=["index", "limit"])
def _advance_kernel(
    commit,
    index,
    limit,
    stream,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Only the tiles may come from the launch before."""
    row = tl.program_id(0)
    slot, position, source = load_row(commit, row)
    weight = load_weight(stream.norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    token, live = commit_lane(commit, row, slot, position, source, index, limit, BLOCK_C, BLOCK_K)
    _embed_lane(stream, weight, token, row, live, H, T, BLOCK_H, BLOCK_T, SCALE)


@triton.jit
def _embed_lane(
    stream,
    weight,
    token,
    lane,
    live,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the stream of a live lane's token, as `gather_and_embed`; NaN for unknown tokens."""
    x = load_embedding(stream.embedding, token, live, stream.embedding_stride, stream.V, H, BLOCK_H)
    store_embedding(
        x,
        weight,
        lane,
        live,
        stream,
        stream.x_stride,
        stream.scaled_stride,
        stream.lanes,
        H,
        T,
        BLOCK_H,
        BLOCK_T,
        SCALE,
    )
