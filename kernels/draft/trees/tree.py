"""Trees of a fixed shape, grown one level per launch: place drafts, and feed the next run.

    top_drafts -> grow_tree -> (module, lm_head) -> top_drafts -> grow_tree -> ...

Each level's nodes are children of the level before, by rank: the second best token after a node is
its child of rank 1. Inner nodes, which have children themselves, are the lanes of the module's next
run. In the module's cache, as in the target's (`core/tree.py`), node i has its entry i after the
root's; the root's entry is the module's last one of a true token.

Letters: S slots, R rows, K drafts, T drafts of a lane, M lanes of the run before, n of them per
row, C children of a level in a row, I inner nodes among them, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import (
    Fusion,
    Hidden,
    NextDraft,
    check_draft_table,
    check_hidden,
    check_stream,
    combine_hidden_reference,
    fusion_args,
    new_lanes,
)
from graphengine.kernels.draft.draft_triton import (
    load_weight,
    normed_hidden,
    store_combined,
    store_lane,
)
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes


class TreeLevel(NamedTuple):
    """The children of one depth's nodes, equal in all rows; on the device."""

    parent: torch.Tensor
    """int32 [C]: each child's parent, as a number among a row's lanes of the run before."""
    rank: torch.Tensor
    """int32 [C]: each child's rank among its parent's tokens, 0 for the best."""
    node: torch.Tensor
    """int32 [C]: each child's node number."""
    inner: torch.Tensor
    """int32 [I]: which of the C have children; I may be 0."""


class ParentRun(NamedTuple):
    """The run over the children's parents."""

    token: torch.Tensor
    """int32 [M, T], the drafts after each lane, from `top_drafts`."""
    hidden: Hidden
    """Output of the M lanes."""
    hidden_eps: float
    """Epsilon of the norm after the run."""
    source: torch.Tensor | None = None
    """int32 [R * n]: the lane of the run that each parent is; None: M is R * n."""


def grow_tree(
    run: ParentRun,
    parents: DecodeLanes,
    rows: DecodeLanes,
    level: TreeLevel,
    draft_SK: torch.Tensor,
    fusion: Fusion,
    *,
    limit: int,
    residual: Residual | None,
    pdl: bool = False,
) -> NextDraft | None:
    """Write the drafts of a level, and make the input of the module's run over its inner nodes.

    A child has no draft (-1) if its parent's lane is padded. A child's lane is padded if it has no
    draft, or if its position or its entry, the root's position + its number, would reach the limit.
    One launch.

    Args:
        run: the launch before may write only its tokens.
        parents: R * n lanes; their tokens are not read.
        rows: R lanes, the roots.
        draft_SK: int32 [S, K], updated in place for the level's nodes, which are numbered from 1,
            in the rows of live slots.
        fusion: how the module's input is made.
        limit: positions that the cache has.
        residual: R * I lanes, as in `combine_hidden`; None with I = 0.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        R * I new lanes at the positions after their parents', and their input; None with I = 0.
        ValueError for a shape or dtype that does not fit.
    """
    count, inner = rows.slot.numel(), level.inner.numel()
    _check_growth(run, parents, rows, level, draft_SK, fusion)
    if (residual is None) != (inner == 0):
        raise ValueError(f"a level of {inner} inner nodes wants a stream exactly if it has some")
    check_stream(residual, count * inner, fusion)
    if not use_triton(rows.slot):
        return grow_tree_reference(
            run, parents, rows, level, draft_SK, fusion, limit=limit, residual=residual
        )
    lanes = new_lanes(count * inner, rows.slot)
    args, options = fusion_args(run.hidden, fusion, run.hidden_eps, count * inner, residual)
    launcher(_grow_kernel, (count * max(inner, 1),))(
        _GrowArgs(
            token=run.token,
            source=run.source,
            parent_slot=parents.slot,
            parent_position=parents.position,
            row_slot=rows.slot,
            row_position=rows.position,
            draft=draft_SK,
            lane_token=lanes.token,
            lane_slot=lanes.slot,
            lane_position=lanes.position,
        ),
        level,
        args,
        limit,
        parents.slot.numel() // count,
        run.token.shape[1],
        draft_SK.shape[1],
        C=level.node.numel(),
        I=inner,
        BLOCK_C=triton.next_power_of_2(level.node.numel()),
        **options,
        **launch_options(pdl),
    )
    return NextDraft(lanes, args.combined) if inner else None


def grow_tree_reference(
    run: ParentRun,
    parents: DecodeLanes,
    rows: DecodeLanes,
    level: TreeLevel,
    draft_SK: torch.Tensor,
    fusion: Fusion,
    *,
    limit: int,
    residual: Residual | None,
) -> NextDraft | None:
    """Plain twin of `grow_tree`."""
    count = rows.slot.numel()
    parent_RC = (
        torch.arange(count, device=rows.slot.device)[:, None] * (parents.slot.numel() // count)
        + level.parent
    )
    source_RC = parent_RC if run.source is None else run.source[parent_RC].long()
    has_parent = parents.slot[parent_RC] >= 0
    drawn = run.token[source_RC.where(has_parent, 0), level.rank.long()]
    draft_RC = drawn.where(has_parent, -1)
    live = rows.slot >= 0
    draft_SK[rows.slot[live].long()[:, None], level.node.long() - 1] = draft_RC[live]
    inner = level.inner.long()
    if not inner.numel():
        return None
    token, position = draft_RC[:, inner], parents.position[parent_RC[:, inner]] + 1
    entry = rows.position[:, None] + level.node[inner]
    goes_on = (token >= 0) & (position < limit) & (entry < limit)
    slot = rows.slot[:, None].where(goes_on, -1)
    lanes = DecodeLanes(token.flatten(), slot.flatten(), position.flatten())
    combined = combine_hidden_reference(
        lanes.token,
        lanes.slot,
        run.hidden,
        source_RC[:, inner].flatten(),
        fusion,
        hidden_eps=run.hidden_eps,
        residual=residual,
    )
    return NextDraft(lanes, combined)


def _check_growth(
    run: ParentRun,
    parents: DecodeLanes,
    rows: DecodeLanes,
    level: TreeLevel,
    draft_SK: torch.Tensor,
    fusion: Fusion,
) -> None:
    """Raise ValueError unless the operands fit each other; a level's numbers are not checked."""
    count, lanes = rows.slot.numel(), parents.slot.numel()
    check_lanes(count, **{f"rows.{name}": field for name, field in rows._asdict().items()})
    check_lanes(lanes, **{f"parents.{name}": field for name, field in parents._asdict().items()})
    if count < 1 or lanes < 1 or lanes % count:
        raise ValueError(f"{lanes} parents are no whole number of lanes for each of {count} rows")
    check_draft_table(draft_SK)
    token, children = run.token, level.node.numel()
    if token.dtype != torch.int32 or token.dim() != 2 or not token.is_contiguous():
        raise ValueError(
            f"drafts must be a dense int32 [M, T], not {token.dtype} {tuple(token.shape)}"
        )
    if run.source is not None:
        check_lanes(lanes, source=run.source)
    elif token.shape[0] != lanes:
        raise ValueError(f"drafts of {token.shape[0]} lanes are not those of {lanes} parents")
    check_hidden(run.hidden, fusion, token.shape[0])
    if children < 1:
        raise ValueError("a level without children")
    for name in ("parent", "rank", "node"):
        check_vector(name, getattr(level, name), children, torch.int32)
    check_vector("inner", level.inner, level.inner.numel(), torch.int32)


class _GrowArgs(NamedTuple):
    token: torch.Tensor
    source: torch.Tensor | None
    parent_slot: torch.Tensor
    parent_position: torch.Tensor
    row_slot: torch.Tensor
    row_position: torch.Tensor
    draft: torch.Tensor
    lane_token: torch.Tensor
    lane_slot: torch.Tensor
    lane_position: torch.Tensor


@triton.jit(do_not_specialize=["limit"])
def _grow_kernel(
    grow,
    level,
    fusion,
    limit,
    parents,
    drawn,
    columns,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_C: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per inner node of a row; a row's first one writes all drafts of its level."""
    PROGRAMS: tl.constexpr = I if I > 0 else 1
    row = tl.program_id(0) // PROGRAMS
    i = tl.program_id(0) % PROGRAMS
    row_slot = tl.load(grow.row_slot + row, cache_modifier=".cg")
    live = row_slot >= 0
    if I > 0:
        child = tl.load(level.inner + i)
        parent = row * parents + tl.load(level.parent + child)
        rank = tl.load(level.rank + child)
        node = tl.load(level.node + child)
        slot = tl.load(grow.parent_slot + parent, cache_modifier=".cg")
        has_parent = live & (slot >= 0)
        position = tl.load(
            grow.parent_position + parent, mask=has_parent, other=0, cache_modifier=".cg"
        )
        root = tl.load(grow.row_position + row, mask=live, other=0, cache_modifier=".cg")
        source = parent
        if grow.source is not None:
            source = tl.load(grow.source + parent, mask=has_parent, other=0, cache_modifier=".cg")
        hidden, start = normed_hidden(
            fusion, source, has_parent, H, GROUPS, START, BLOCK_H, BLOCK_T
        )
        weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    if I > 0:
        token = tl.load(grow.token + source * drawn + rank, mask=has_parent, other=-1)
        goes_on = has_parent & (token >= 0) & (position + 1 < limit) & (root + node < limit)
        lane = row * I + i
        store_lane(
            grow.lane_token,
            grow.lane_slot,
            grow.lane_position,
            lane,
            token,
            row_slot,
            position + 1,
            goes_on,
        )
        store_combined(
            fusion, hidden, start, weight, token, lane, goes_on, H, HIDDEN_FIRST, BLOCK_H
        )
    if i == 0:
        c = tl.arange(0, BLOCK_C)
        in_level = c < C
        parent_C = row * parents + tl.load(level.parent + c, mask=in_level, other=0)
        rank_C = tl.load(level.rank + c, mask=in_level, other=0)
        node_C = tl.load(level.node + c, mask=in_level, other=1)
        slot_C = tl.load(grow.parent_slot + parent_C, mask=in_level, other=-1)
        drafted = live & (slot_C >= 0)
        source_C = parent_C
        if grow.source is not None:
            source_C = tl.load(grow.source + parent_C, mask=drafted, other=0)
        token_C = tl.load(grow.token + source_C * drawn + rank_C, mask=drafted, other=-1)
        at = grow.draft + (row_slot.to(tl.int64) * columns + node_C - 1)
        tl.store(at, token_C, mask=live & in_level)
