"""The last kernel of a decode step's target: it verifies, commits and publishes tokens.

Letters: S slots, R rows, K drafts a row, W = K + 1 tokens a row, N lanes (R * W), C tiles of the
vocabulary, E stop ids a slot, I items of a mailbox lane. With trees: D depth, P = D + 1 tokens of a
path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import Launch, launcher, take_counters
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.tree import TreeLanes, check_tree_lanes
from graphengine.kernels.sample.sampling import check_tiles
from graphengine.kernels.sample.tiles import tokens_of_tiles
from graphengine.kernels.step.finish_reference import (
    FinishedStep,
    verify_commit_publish_reference,
)
from graphengine.kernels.step.publish import check_mailbox
from graphengine.kernels.step.record import state_payload, tag_of
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    STOP,
    DecodeLanes,
    SlotState,
    StopSequences,
    StopTensors,
    check_draft_count,
    check_draft_table,
    check_limits,
    check_state,
    commit_flags,
    load_limits,
    stop_ids_block,
)
from graphengine.kernels.step.stop_sequences import (
    History,
    check_stop_sequences,
    stop_sequence_of_tokens,
)
from graphengine.kernels.step.walk import (
    AcceptedPath,
    walk_tree,
)

_EMITTED = tl.constexpr(EMITTED)
_INVALID = tl.constexpr(INVALID)
_STOP = tl.constexpr(STOP)

# Entries of the tiles that a program holds at once: for one lane, and for several lanes together.
_MAX_BLOCK_C = 16384
_MAX_BLOCK_WC = 8192


def verify_commit_publish(
    best_NC: torch.Tensor,
    health_NC: torch.Tensor,
    lanes: DecodeLanes,
    state: SlotState,
    limits: StopTensors,
    mailbox_items: torch.Tensor,
    launch: Launch,
    *,
    num_speculative_tokens: int = 0,
    relaxed_N: torch.Tensor | None = None,
    forced: int | None = None,
    draft_SK: torch.Tensor | None = None,
    sequences: StopSequences | None = None,
    history_SP: torch.Tensor | None = None,
    tree: TreeLanes | None = None,
) -> FinishedStep:
    """Take each live row's tokens out of their tiles and into its slot's state; publish them.

    A row has W = K + 1 lanes, of which lanes 1.. were fed drafts. Drafts are accepted up to the
    first one that differs from the sample of the lane before it; d is their number. Then tokens
    0..d are walked in order. The walk ends at a token that ends the request: a stop id, the last
    token of a stop sequence, or one with which the sequence reaches max_len. It also ends *before*
    a lane without valid logits. If that is the row's first lane, the request ends with only the
    flag INVALID and its next_token stays; otherwise it continues, and its next step finds out.
    `count` tokens are walked. The last of them is the next query, and the K and V before it are in
    the cache by now: kv_len grows by `count`, or by one without a valid token.

    Example with W = 4: tokens t0 t1 t2 t3 and drafts d1 = t0, d2 = t1, d3 != t2 (lanes 1..3) emit
    t0 t1 t2; kv_len + 3, next_token t2.

    Where a row is a tree, its accepted drafts are those of the path that `walk.py` finds, and the
    walked tokens are those sampled along it. `move_path` then has to move their entries together.

    Then all items of the row's mailbox lane are written as by `publish`, for the lanes of the R
    rows only; state.sequence counts the replay once all rows are written.

    Args:
        best_NC, health_NC: from `sample_tiles` or from an lm_head with the sampler folded in.
        lanes: from `gather_and_embed`.
        state: next_token, kv_len, running and sequence are updated in place; epoch is read.
        limits: host-owned.
        mailbox_items: int64 [entries, lanes, items], lanes >= R, items > W; the device's memory
            or pinned host memory. The entry is overwritten: its reader must be done with it.
        launch: must have a counter. With PDL at least one launch must lie between this one and
            `gather_and_embed`.
        num_speculative_tokens: K, 0..MAX_DRAFTS.
        relaxed_N: int32, not 0 where the draft fed to the *next* lane is accepted whatever this
            lane sampled; if it is among the first d, this lane's token becomes the draft itself.
        forced: accept this many drafts, or all that were fed if fewer, whatever they are; the
            emitted tokens are the sampled ones, and `relaxed_N` is ignored. For benchmarks.
        draft_SK: int32 [S, any], dense rows; the rows of live slots are set to -1, because these
            drafts are used now.
        sequences: stop sequences by slot, host-owned; given together with `history_SP`.
        history_SP: int32, dense rows: the token at each position up to the row's first lane; only
            read, and older than the launch before.
        tree: given where the rows are trees of W nodes; older than the launch before. Not with
            relaxed_N.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit.
    """
    call = _Call(
        best_NC,
        health_NC,
        lanes,
        state,
        limits,
        mailbox_items,
        num_speculative_tokens,
        relaxed_N,
        forced,
        draft_SK,
        sequences,
        history_SP,
        tree,
    )
    _check(call)
    if not use_triton(best_NC):
        return verify_commit_publish_reference(**call._asdict())
    return _finish(call, launch)


class _Call(NamedTuple):
    """The arguments of `verify_commit_publish`; its reference takes them by the same names."""

    best_NC: torch.Tensor
    health_NC: torch.Tensor
    lanes: DecodeLanes
    state: SlotState
    limits: StopTensors
    mailbox_items: torch.Tensor
    num_speculative_tokens: int
    relaxed_N: torch.Tensor | None
    forced: int | None
    draft_SK: torch.Tensor | None
    sequences: StopSequences | None
    history_SP: torch.Tensor | None
    tree: TreeLanes | None

    @property
    def width(self) -> int:
        return self.num_speculative_tokens + 1

    @property
    def rows(self) -> int:
        return self.lanes.slot.numel() // self.width

    @property
    def depth(self) -> int:
        """D; 0 for chains."""
        return 0 if self.tree is None else self.tree.ancestor.shape[-1]


def _check(call: _Call) -> None:
    """ValueError for a shape or dtype that does not fit, and for options that exclude others."""
    slots = check_state(call.state)
    check_limits(call.limits, slots)
    width = check_draft_count(call.num_speculative_tokens)
    total = call.lanes.slot.numel()
    check_lanes(total, **call.lanes._asdict())
    if total % width:
        raise ValueError(f"{total} lanes must be rows of {width}")
    check_tiles(call.best_NC, call.health_NC, total)
    check_mailbox(call.mailbox_items, total // width, width)
    if call.relaxed_N is not None:
        check_lanes(total, relaxed=call.relaxed_N)
    if call.forced is not None and call.forced < 0:
        raise ValueError(f"forced={call.forced} must be 0 or more, or None")
    if call.draft_SK is not None:
        check_draft_table(call.draft_SK, slots)
    _check_sequences(call, slots)
    if call.tree is not None:
        check_tree_lanes(call.tree, total, width)
        if call.relaxed_N is not None:
            raise ValueError("relaxed_N is for chains of drafts, not for trees")


def _check_sequences(call: _Call, slots: int) -> None:
    sequences, history = call.sequences, call.history_SP
    if (sequences is None) != (history is None):
        raise ValueError("sequences and history_SP are wanted together or not at all")
    if sequences is not None and history is not None:
        listed = check_stop_sequences(sequences, history)
        if listed != slots:
            raise ValueError(f"stop sequences of {listed} slots do not fit {slots} slots")


def _new_step(call: _Call) -> FinishedStep:
    """Uninitialised results."""
    slot = call.lanes.slot
    flags_R = slot.new_empty(call.rows)
    length = call.rows * (call.width if call.tree is None else call.depth + 1)
    path = None if call.tree is None else AcceptedPath.new(length, flags_R)
    token_N = slot.new_empty(length)
    return FinishedStep(token_N, flags_R, torch.empty_like(flags_R), path)


def _finish(call: _Call, launch: Launch) -> FinishedStep:
    """`verify_commit_publish` for a checked call, on a GPU."""
    limits, width, step = call.limits, call.width, _new_step(call)
    draft, history, sequences = call.draft_SK, call.history_SP, call.sequences
    tiles, stop_ids = call.best_NC.shape[1], limits.stop_ids.shape[1]
    entries, mailbox_lanes, items = call.mailbox_items.shape
    columns = 0 if draft is None else draft.shape[1]
    Q, L = (0, 1) if sequences is None else sequences.tokens.shape[1:]
    block_w = triton.next_power_of_2(width)
    most = _MAX_BLOCK_C if width == 1 else _MAX_BLOCK_WC // block_w
    block_c = min(triton.next_power_of_2(tiles), most)
    launcher(_finish_decode_kernel, (call.rows,))(
        call.best_NC,
        call.health_NC,
        None if call.forced is not None or width == 1 else call.relaxed_N,
        call.lanes.slot,
        call.lanes.token,
        call.state,
        limits,
        draft,
        call.mailbox_items,
        take_counters(launch.arrivals, 1, f"the end of a step of {call.rows} rows"),
        *step[:3],
        history,
        sequences,
        *((None, None) if call.tree is None else call.tree[1:]),
        *(step.path or (None, None)),
        tiles,
        stop_ids,
        0 if draft is None else draft.stride(0),
        0 if history is None else history.stride(0),
        0 if history is None else history.shape[1],
        entries,
        mailbox_lanes,
        W=width,
        DEPTH=call.depth,
        FORCED=call.forced,
        COLUMNS=columns,
        ITEMS=items,
        Q=Q,
        L=L,
        BLOCK_Q=triton.next_power_of_2(max(Q, 1)),
        BLOCK_L=triton.next_power_of_2(L),
        BLOCK_W=block_w,
        BLOCK_C=block_c,
        BLOCK_E=stop_ids_block(stop_ids),
        BLOCK_K=triton.next_power_of_2(max(columns, 1)),
        BLOCK_I=triton.next_power_of_2(items),
        num_warps=min(max(block_w * block_c // 256, 1), 32),
        **launch_options(launch.pdl),
    )
    return step


class _Row(NamedTuple):
    """A row of the step, and its slot's state as it was before."""

    index: Any
    slot: Any
    live: Any
    kv_len: Any
    epoch: Any


class _Emitted(NamedTuple):
    """The tokens that a row emits."""

    token_W: Any
    """int32 [BLOCK_W]: the tokens after its lanes, or along its path."""
    live_W: Any
    count: Any
    """How many tokens are emitted: the first ones."""
    flags: Any


@triton.jit
def _finish_decode_kernel(
    best_ptr,
    health_ptr,
    relaxed_ptr,
    lane_slot_ptr,
    lane_token_ptr,
    state,
    limits,
    draft_ptr,
    items_ptr,
    arrivals_ptr,
    token_ptr,
    flags_ptr,
    count_ptr,
    history_ptr,
    sequences,
    depth_ptr,
    ancestor_ptr,
    path,
    path_source_ptr,
    tiles,
    stop_ids,
    draft_stride,
    history_stride,
    positions,
    entries,
    mailbox_lanes,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    FORCED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ITEMS: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. Only tiles and `relaxed` may be written by the launch before.

    It has BLOCK_W lanes; those past W count as padded. After a tree's walk they are the lanes of
    its path.
    """
    index = tl.program_id(0)
    j = tl.arange(0, BLOCK_W)
    lane = index * W + j
    slot = tl.load(lane_slot_ptr + index * W, cache_modifier=".cg")
    live = slot >= 0
    live_W = tl.load(lane_slot_ptr + lane, mask=j < W, other=-1, cache_modifier=".cg") >= 0
    if DEPTH == 0:
        draft_W, fed_W = _load_chain(lane_slot_ptr, lane_token_ptr, lane, W, BLOCK_W)
    else:
        draft_W, depth_W, parent_W = _load_tree(
            lane_token_ptr, depth_ptr, ancestor_ptr, lane, live_W, DEPTH
        )
    stop_ids_E, max_len = load_limits(
        limits.stop_ids, limits.max_len, slot, live, stop_ids, BLOCK_E
    )
    kv_len = tl.load(state.kv_len + slot, mask=live, other=0, cache_modifier=".cg")
    epoch = tl.load(state.epoch + slot, mask=live, other=0, cache_modifier=".cg")
    sequence = tl.load(state.sequence, cache_modifier=".cg") + 1
    wait_for_inputs(PDL)

    token_W = tokens_of_tiles(best_ptr, health_ptr, lane, tiles, live_W, BLOCK_W, BLOCK_C)
    if DEPTH == 0:
        token_W, accepted = _verify_chain(
            token_W, draft_W, fed_W, relaxed_ptr, lane, FORCED, BLOCK_W
        )
        fed = None
    else:
        token_W, path_W, accepted = walk_tree(
            token_W, draft_W, parent_W, live_W, FORCED, DEPTH, BLOCK_W
        )
        fed = tl.max(depth_W, 0) + 1
        live_W = live & (j <= accepted)
    flags_W = commit_flags(token_W, kv_len + 1 + j, live_W, stop_ids_E, max_len)
    if sequences is not None:
        history = History(history_ptr, history_stride, positions)
        completed_W = stop_sequence_of_tokens(
            token_W, kv_len, slot, live, sequences, history, W, Q, L, BLOCK_W, BLOCK_Q, BLOCK_L
        )
        stops_W = (completed_W >= 0) & ((flags_W & _EMITTED) != 0)
        flags_W = tl.where(stops_W, flags_W | _STOP, flags_W)
    count, flags = _end_of_row(flags_W, accepted, BLOCK_W)

    row = _Row(index, slot, live, kv_len, epoch)
    emitted = _Emitted(token_W, live_W, count, flags)
    _commit_row(state, row, emitted, BLOCK_W)
    if draft_ptr is not None:
        _forget_drafts(draft_ptr, row, draft_stride, COLUMNS, BLOCK_K)
    tag = tag_of(sequence)
    item_ptr = items_ptr + ((sequence % entries) * mailbox_lanes + index) * ITEMS
    _publish_row(item_ptr, tag, row, emitted, fed, W, ITEMS, BLOCK_W, BLOCK_I)
    if DEPTH == 0:
        tl.store(token_ptr + lane, token_W, mask=live_W)
    else:
        _store_path(
            token_ptr,
            path,
            path_source_ptr,
            lane_token_ptr,
            row,
            emitted,
            path_W,
            W,
            DEPTH,
            BLOCK_W,
        )
    tl.store(flags_ptr + index, flags)
    tl.store(count_ptr + index, count)

    # The sequence moves on only after every program has read it.
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state.sequence, sequence)
        tl.store(arrivals_ptr, 0)


@triton.jit
def _load_chain(lane_slot_ptr, lane_token_ptr, lane, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """The token fed to the next lane, to compare with this lane's token, and whether the next lane
    is live.
    """
    j = tl.arange(0, BLOCK_W)
    next_slot_ptr = lane_slot_ptr + lane + 1
    fed_W = tl.load(next_slot_ptr, mask=j + 1 < W, other=-1, cache_modifier=".cg") >= 0
    draft_W = tl.load(lane_token_ptr + lane + 1, mask=fed_W, other=-1, cache_modifier=".cg")
    return draft_W, fed_W


@triton.jit
def _load_tree(lane_token_ptr, depth_ptr, ancestor_ptr, lane, live_W, DEPTH: tl.constexpr):
    """The token fed to each lane, its depth and its parent; -1 for none."""
    draft_W = tl.load(lane_token_ptr + lane, mask=live_W, other=-1, cache_modifier=".cg")
    depth_W = tl.load(depth_ptr + lane, mask=live_W, other=-1, cache_modifier=".cg")
    parent_ptr = ancestor_ptr + (lane * DEPTH + depth_W - 1)
    parent_W = tl.load(parent_ptr, mask=depth_W > 0, other=-1, cache_modifier=".cg")
    return draft_W, depth_W, parent_W


@triton.jit
def _verify_chain(
    token_W, draft_W, fed_W, relaxed_ptr, lane, FORCED: tl.constexpr, BLOCK_W: tl.constexpr
):
    """(tokens [BLOCK_W], accepted drafts) of a row."""
    j = tl.arange(0, BLOCK_W)
    if FORCED is not None:
        return token_W, tl.minimum(tl.min(tl.where(fed_W, BLOCK_W, j), 0), FORCED)
    elif relaxed_ptr is None:
        return token_W, tl.min(tl.where(fed_W & (token_W == draft_W), BLOCK_W, j), 0)
    else:
        relaxed_W = tl.load(relaxed_ptr + lane, mask=fed_W, other=0) != 0
        relaxed_W = relaxed_W & (token_W >= 0)
        matched_W = fed_W & (relaxed_W | (token_W == draft_W))
        accepted = tl.min(tl.where(matched_W, BLOCK_W, j), 0)
        return tl.where(relaxed_W & (j < accepted), draft_W, token_W), accepted


@triton.jit
def _end_of_row(flags_W, accepted, BLOCK_W: tl.constexpr):
    """(tokens that are emitted, the flags of the last one) of a row."""
    j = tl.arange(0, BLOCK_W)
    end = tl.min(tl.where((flags_W == _EMITTED) & (j < accepted), BLOCK_W, j), 0)
    flags = tl.sum(tl.where(j == end, flags_W, 0), 0)
    count = tl.where((flags & _EMITTED) != 0, end + 1, end)
    # The row is cut before a lane without valid logits; it ends only if nothing is left.
    return count, tl.where(end > 0, (flags & ~_INVALID) | _EMITTED, flags)


@triton.jit
def _commit_row(state, row, emitted, BLOCK_W: tl.constexpr):
    """Take the emitted tokens into the slot's state."""
    j = tl.arange(0, BLOCK_W)
    # Every warp has read the slot's state before one of them overwrites it.
    tl.debug_barrier()
    next_token = tl.sum(tl.where(j == emitted.count - 1, emitted.token_W, 0), 0)
    tl.store(state.next_token + row.slot, next_token, mask=emitted.count > 0)
    tl.store(state.kv_len + row.slot, row.kv_len + tl.maximum(emitted.count, 1), mask=row.live)
    tl.store(state.running + row.slot, 0, mask=row.live & (emitted.flags != _EMITTED))


@triton.jit
def _forget_drafts(draft_ptr, row, draft_stride, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Set the slot's drafts to -1: they are used now."""
    k = tl.arange(0, BLOCK_K)
    used = draft_ptr + row.slot.to(tl.int64) * draft_stride + k
    tl.store(used, tl.full([BLOCK_K], -1, tl.int32), mask=row.live & (k < COLUMNS))


@triton.jit
def _publish_row(
    item_ptr,
    tag,
    row,
    emitted,
    fed,
    W: tl.constexpr,
    ITEMS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Write the row's mailbox lane: W items of tokens, then zeros, then the state word.

    `fed` is None for a chain, which was fed as many lanes as are live.
    """
    j = tl.arange(0, BLOCK_W)
    token_ptrs = item_ptr + j
    token_W = tl.where(j < emitted.count, emitted.token_W, 0)
    tl.store(token_ptrs, tag | token_W.to(tl.int64), mask=j < W)
    i = tl.arange(0, BLOCK_I)
    if fed is None:
        fed = tl.sum(emitted.live_W.to(tl.int32), 0)
    is_last = i == ITEMS - 1
    word = state_payload(row.epoch, fed, emitted.count, emitted.flags)
    payload = tl.where(is_last, word, 0)
    tl.store(item_ptr + i, tag | payload, mask=(i >= W) & (i < ITEMS))


@triton.jit
def _store_path(
    token_ptr,
    path,
    source_ptr,
    lane_token_ptr,
    row,
    emitted,
    path_W,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Store the tokens along the path, and the `AcceptedPath` of the emitted ones."""
    j = tl.arange(0, BLOCK_W)
    emitted_W = j < emitted.count
    source_W = row.index * W + tl.where(emitted_W, path_W, 0)
    lane = row.index * (DEPTH + 1) + j
    in_path = j <= DEPTH
    fed_token_W = tl.load(lane_token_ptr + source_W, mask=emitted_W, other=-1)
    tl.store(token_ptr + lane, emitted.token_W, mask=emitted.live_W)
    tl.store(path.token + lane, fed_token_W, mask=emitted_W)
    tl.store(path.slot + lane, tl.where(emitted_W, row.slot, -1), mask=in_path)
    tl.store(path.position + lane, row.kv_len + j, mask=emitted_W)
    tl.store(source_ptr + lane, source_W, mask=in_path)
