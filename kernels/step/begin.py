"""The first kernel of a decode step: it applies commands, and gathers and embeds rows' tokens.

Letters: S slots, R rows, K drafts a row, W = K + 1 tokens a row, N lanes (R * W), V vocabulary,
H hidden, T groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.tree import (
    TreeLanes,
    TreeTables,
    check_tree_lanes,
    check_tree_tables,
)
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.embedding import (
    check_embedding,
    embed_residual_reference,
    load_embedding,
    store_embedding,
)
from graphengine.kernels.step.state import (
    CommandedState,
    DecodeLanes,
    SlotState,
    apply_commands_reference,
    check_draft_count,
    check_draft_table,
    check_state,
    start_afresh,
)

_BLOCK_S = 64


class RowTrees(NamedTuple):
    """Inputs of `gather_and_embed` for rows that are trees, and the lanes' places in trees, which
    it writes."""

    tables: TreeTables
    lanes: TreeLanes
    """N lanes, written."""
    limit: int
    """Entries that a slot has in the cache."""


def gather_and_embed(
    state: SlotState,
    command_epoch_S: torch.Tensor,
    slot_of_row_R: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    draft_SK: torch.Tensor | None = None,
    max_len_S: torch.Tensor | None = None,
    num_speculative_tokens: int = 0,
    trees: RowTrees | None = None,
    embedding_scale: float = 1.0,
    pdl: bool = False,
) -> DecodeLanes:
    """Apply every pending command, then fetch and embed each row's tokens; one launch.

    As in `apply_commands`, a slot whose epoch differs from the commanded one is started afresh.
    Whether a row names it or not, it has no query in this step. A row is live if `slot_of_row`
    names a running slot; it is padded for -1, for a number past the last slot, and for a slot that
    stopped or starts afresh. No slot may be named twice.

    Lane r * W + j of a live row is at position kv_len + j: lane 0 has the slot's next token, lane j
    draft j - 1 of the table. Lane j > 0 is padded if one of the drafts up to its own is absent, or
    if the sequence up to it, position + 1 tokens, reaches max_len: its sample would lie past the
    request's end.

    With `trees` lane j is node j of its slot's tree, at position kv_len + its depth, and has draft
    j - 1 of the table. It is padded if that draft is absent, if its position is too great as above,
    or if its entry in the cache, kv_len + j, reaches the limit. The writer of the drafts ensures
    that a node's parent has one.

    Args:
        state: updated in place.
        command_epoch_S, slot_of_row_R: int32, host-owned.
        embedding_VH: any float dtype, dense rows; may exceed 2**31 elements.
        norm_weight_H: any float dtype: the weight of the first RMSNorm.
        residual: N lanes, written in place: x the embedding, scaled = x * norm_weight rounded once,
            squares the sum of x * x and then zeros. A live lane whose token is outside 0..V-1
            becomes NaN; padded lanes are not written. A lane's bits do not depend on K.
        draft_SK: int32 [S, K or more], dense rows: the drafts of each slot's next step; below 0 for
            absent. Read after the wait, like state, so a kernel may write it.
        max_len_S: int32, host-owned. Both are required with drafts, and not read without.
        num_speculative_tokens: K, 0..MAX_DRAFTS.
        trees: given where the drafts are those of trees of W nodes. The tables are read as drafts
            are; `lanes` is written except for padded lanes.
        embedding_scale: factor on the embedding; the product is rounded to its dtype.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        New tensors of N lanes. ValueError for a shape or dtype that does not fit.
    """
    call = _Call(
        state,
        command_epoch_S,
        slot_of_row_R,
        embedding_VH,
        norm_weight_H,
        residual,
        # Not read without drafts.
        draft_SK if num_speculative_tokens else None,
        max_len_S if num_speculative_tokens else None,
        num_speculative_tokens,
        trees,
        embedding_scale,
    )
    _check(call)
    if not use_triton(slot_of_row_R):
        return gather_and_embed_reference(**call._asdict())
    return _begin(call, pdl)


class _Call(NamedTuple):
    """The arguments of `gather_and_embed`; its reference takes them by the same names."""

    state: SlotState
    command_epoch_S: torch.Tensor
    slot_of_row_R: torch.Tensor
    embedding_VH: torch.Tensor
    norm_weight_H: torch.Tensor
    residual: Residual
    draft_SK: torch.Tensor | None
    max_len_S: torch.Tensor | None
    num_speculative_tokens: int
    trees: RowTrees | None
    embedding_scale: float

    @property
    def width(self) -> int:
        return self.num_speculative_tokens + 1


def _check(call: _Call) -> None:
    """ValueError for a shape or dtype that does not fit."""
    slots = check_state(call.state)
    check_lanes(slots, command_epoch=call.command_epoch_S)
    rows = call.slot_of_row_R.numel()
    check_lanes(rows, slot_of_row=call.slot_of_row_R)
    drafts = call.num_speculative_tokens
    width = check_draft_count(drafts)
    check_embedding(call.embedding_VH, call.norm_weight_H, call.residual, rows * width)
    if drafts:
        if call.draft_SK is None or call.max_len_S is None:
            raise ValueError(f"{drafts} drafts a row want draft_SK and max_len_S")
        check_draft_table(call.draft_SK, slots, drafts)
        check_lanes(slots, max_len=call.max_len_S)
    if call.trees is not None:
        _check_trees(call.trees, slots, width, rows)


def _begin(call: _Call, pdl: bool) -> DecodeLanes:
    """`gather_and_embed` for a checked call, on a GPU."""
    state, residual, trees, draft = call.state, call.residual, call.trees, call.draft_SK
    rows, slots = call.slot_of_row_R.numel(), state.next_token.numel()
    lanes = DecodeLanes(
        *(call.slot_of_row_R.new_empty(rows * call.width) for _ in DecodeLanes._fields)
    )
    (V, H), groups = call.embedding_VH.shape, residual.squares.shape[0]
    depth = 0 if trees is None else trees.lanes.ancestor.shape[1]
    block_h = triton.next_power_of_2(H)
    launcher(_begin_decode_kernel, (rows + triton.cdiv(slots, _BLOCK_S),))(
        call.command_epoch_S,
        call.slot_of_row_R,
        CommandedState.of(state),
        draft,
        call.max_len_S,
        lanes,
        call.embedding_VH,
        call.norm_weight_H,
        residual,
        *((None, None) if trees is None else trees[:2]),
        0 if trees is None else trees.limit,
        0 if trees is None else trees.tables.depth.stride(0),
        0 if trees is None else trees.tables.ancestor.stride(0),
        0 if draft is None else draft.stride(0),
        call.embedding_VH.stride(0),
        residual.x.stride(0),
        residual.scaled.stride(0),
        rows,
        slots,
        V,
        W=call.width,
        DEPTH=depth,
        H=H,
        T=groups,
        BLOCK_D=triton.next_power_of_2(max(depth, 1)),
        BLOCK_H=block_h,
        BLOCK_T=triton.next_power_of_2(groups),
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_S=_BLOCK_S,
        SCALE=float(call.embedding_scale),
        num_warps=min(max(block_h // 512, 4), 16),
        **launch_options(pdl),
    )
    return lanes


def gather_and_embed_reference(
    state: SlotState,
    command_epoch_S: torch.Tensor,
    slot_of_row_R: torch.Tensor,
    embedding_VH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    residual: Residual,
    *,
    draft_SK: torch.Tensor | None = None,
    max_len_S: torch.Tensor | None = None,
    num_speculative_tokens: int = 0,
    trees: RowTrees | None = None,
    embedding_scale: float = 1.0,
) -> DecodeLanes:
    """Plain twin of `gather_and_embed`."""
    apply_commands_reference(state, command_epoch_S)
    lanes = _gather_reference(state, slot_of_row_R)
    if num_speculative_tokens:
        assert draft_SK is not None and max_len_S is not None
        drafts = draft_SK[:, :num_speculative_tokens]
        if trees is None:
            lanes = _widen_reference(lanes, drafts, max_len_S)
        else:
            lanes = _grow_reference(lanes, drafts, max_len_S, trees)
    embed_residual_reference(
        lanes.token, embedding_VH, norm_weight_H, lanes.slot, residual, scale=embedding_scale
    )
    return lanes


def _gather_reference(state: SlotState, slot_of_row_R: torch.Tensor) -> DecodeLanes:
    """The query of each row's slot."""
    slots = state.running.shape[0]
    named = (slot_of_row_R >= 0) & (slot_of_row_R < slots)
    slot = slot_of_row_R.where(named, 0).long()
    live = named & (state.running[slot] != 0)
    return DecodeLanes(
        token=state.next_token[slot],
        slot=slot_of_row_R.where(live, -1),
        position=state.kv_len[slot],
    )


def _widen_reference(
    query: DecodeLanes, draft_SK: torch.Tensor, max_len_S: torch.Tensor
) -> DecodeLanes:
    """Each row's query with its drafts after it, K + 1 lanes a row."""
    drafts = draft_SK.shape[1]
    slot = query.slot.clamp(min=0).long()
    draft_RK = draft_SK[slot]
    ahead_K = torch.arange(1, drafts + 1, dtype=torch.int32, device=draft_SK.device)
    position_RK = query.position[:, None] + ahead_K
    inside_RK = position_RK + 1 < max_len_S[slot][:, None]
    live_RK = ((draft_RK >= 0) & inside_RK).cummin(dim=1).values
    slot_RK = query.slot[:, None].where(live_RK, -1)
    return DecodeLanes(
        token=torch.cat([query.token[:, None], draft_RK], dim=1).flatten(),
        slot=torch.cat([query.slot[:, None], slot_RK], dim=1).flatten(),
        position=torch.cat([query.position[:, None], position_RK], dim=1).flatten(),
    )


def _grow_reference(
    query: DecodeLanes, draft_SK: torch.Tensor, max_len_S: torch.Tensor, trees: RowTrees
) -> DecodeLanes:
    """Each row's query with the other nodes of its slot's tree after it."""
    slot = query.slot.clamp(min=0).long()
    draft_RK, depth_RW = draft_SK[slot], trees.tables.depth[slot]
    node_W = torch.arange(depth_RW.shape[1], dtype=torch.int32, device=draft_SK.device)
    position_RW = query.position[:, None] + depth_RW
    live_RW = position_RW + 1 < max_len_S[slot][:, None]
    live_RW &= query.position[:, None] + node_W < trees.limit
    live_RW[:, 1:] &= draft_RK >= 0
    live_RW[:, 0] = True
    slot_N = query.slot[:, None].where(live_RW, -1).flatten()
    found = (node_W.expand_as(depth_RW), depth_RW, trees.tables.ancestor[slot])
    live = live_lanes(slot_N)
    for part, values in zip(trees.lanes, found, strict=True):
        part[live] = values.flatten(0, 1)[live]
    token_RW = torch.cat([query.token[:, None], draft_RK], dim=1)
    return DecodeLanes(token_RW.flatten(), slot_N, position_RW.flatten())


def _check_trees(trees: RowTrees, slots: int, width: int, rows: int) -> None:
    """ValueError unless there are drafts and the trees fit these slots and rows."""
    if width == 1:
        raise ValueError("trees are wanted for 0 drafts a row: a root alone is no tree")
    most = check_tree_tables(trees.tables, slots, width)
    if check_tree_lanes(trees.lanes, rows * width, width) != most:
        raise ValueError(
            f"the lanes' trees have a depth of {trees.lanes.ancestor.shape[1]}, the tables' {most}"
        )


@triton.jit
def _begin_decode_kernel(
    command_ptr,
    slot_of_row_ptr,
    state,
    draft_ptr,
    max_len_ptr,
    lanes,
    embedding_ptr,
    norm_weight_ptr,
    residual,
    trees,
    tree_lanes,
    limit,
    depth_stride,
    ancestor_stride,
    draft_stride,
    embedding_stride,
    x_stride,
    scaled_stride,
    rows,
    slots,
    V,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: only it may write the row's slot, and it handles all W lanes;
    then one for every BLOCK_S slots, which handles those that no row names."""
    row = tl.program_id(0)
    if row >= rows:
        _command_unnamed_slots(
            row - rows, command_ptr, slot_of_row_ptr, state, rows, slots, BLOCK_R, BLOCK_S, PDL
        )
    else:
        slot = tl.load(slot_of_row_ptr + row)
        named = (slot >= 0) & (slot < slots)
        command = tl.load(command_ptr + slot, mask=named, other=0)
        max_len = 0
        if W > 1:
            max_len = tl.load(max_len_ptr + slot, mask=named, other=0)
        h = tl.arange(0, BLOCK_H)
        weight = tl.load(norm_weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        wait_for_inputs(PDL)

        pending = named & (command != tl.load(state.epoch + slot, mask=named, other=0))
        running = tl.load(state.running + slot, mask=named, other=0)
        tokens = _load_tokens(state, draft_ptr, slot, named, draft_stride, W)
        position = tl.load(state.kv_len + slot, mask=named, other=0)
        row_lives = named & (running != 0) & (pending == 0)
        # Every warp has read the slot's state before one of them overwrites it.
        tl.debug_barrier()
        start_afresh(state, slot, command, pending)

        # All embeddings are requested before the first of them is used.
        live = row_lives
        lives = ()
        xs = ()
        for j in tl.static_range(W):
            depth = j
            if DEPTH > 0:
                depth_of = trees.depth + slot.to(tl.int64) * depth_stride + j
                depth = tl.load(depth_of, mask=row_lives, other=0)
                live = row_lives & (position + j < limit)
            if j > 0:
                live = live & (tokens[j] >= 0) & (position + depth + 1 < max_len)
            lane = row * W + j
            if DEPTH > 0:
                _store_node(
                    trees, tree_lanes, slot, ancestor_stride, lane, j, depth, live, DEPTH, BLOCK_D
                )
            tl.store(lanes.slot + lane, tl.where(live, slot, -1))
            tl.store(lanes.token + lane, tokens[j], mask=live)
            tl.store(lanes.position + lane, position + depth, mask=live)
            x = load_embedding(embedding_ptr, tokens[j], live, embedding_stride, V, H, BLOCK_H)
            xs += (x,)  # type: ignore[assignment]
            lives += (live,)  # type: ignore[assignment]
        for j in tl.static_range(W):
            store_embedding(
                xs[j],
                weight,
                row * W + j,
                lives[j],
                residual,
                x_stride,
                scaled_stride,
                rows * W,
                H,
                T,
                BLOCK_H,
                BLOCK_T,
                SCALE,
            )


@triton.jit
def _load_tokens(state, draft_ptr, slot, named, draft_stride, W: tl.constexpr):
    """The tokens of a slot's W lanes: its next one, then its drafts, -1 for none."""
    tokens = (tl.load(state.next_token + slot, mask=named, other=0),)
    for k in tl.static_range(W - 1):
        draft = draft_ptr + slot.to(tl.int64) * draft_stride + k
        tokens += (tl.load(draft, mask=named, other=-1),)  # type: ignore[assignment]
    return tokens


@triton.jit
def _store_node(
    trees,
    tree_lanes,
    slot,
    ancestor_stride,
    lane,
    node,
    depth,
    live,
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store where a live lane is in its row's tree, as the slot's tables have it."""
    d = tl.arange(0, BLOCK_D)
    ancestor_ptr = trees.ancestor + slot.to(tl.int64) * ancestor_stride + node * DEPTH + d
    ancestor = tl.load(ancestor_ptr, mask=live & (d < DEPTH), other=0)
    tl.store(tree_lanes.ancestor + lane * DEPTH + d, ancestor, mask=live & (d < DEPTH))
    tl.store(tree_lanes.node + lane, node, mask=live)
    tl.store(tree_lanes.depth + lane, depth, mask=live)


@triton.jit
def _command_unnamed_slots(
    part,
    command_ptr,
    slot_of_row_ptr,
    state,
    rows,
    slots,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Start afresh the slots of a part that have a pending command and no row."""
    slot = part * BLOCK_S + tl.arange(0, BLOCK_S)
    r = tl.arange(0, BLOCK_R)
    slot_of_row = tl.load(slot_of_row_ptr + r, mask=r < rows, other=-1)
    named = tl.max((slot[:, None] == slot_of_row[None, :]).to(tl.int32), 1) != 0
    ours = (slot < slots) & (named == 0)
    command = tl.load(command_ptr + slot, mask=ours, other=0)
    wait_for_inputs(PDL)

    pending = ours & (command != tl.load(state.epoch + slot, mask=ours, other=0))
    # Several threads may hold a slot: all of them must have read its epoch before one writes it.
    tl.debug_barrier()
    start_afresh(state, slot, command, pending)
