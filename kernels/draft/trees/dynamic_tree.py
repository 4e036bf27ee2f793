"""Trees whose shape follows from the drafts' probabilities, as in EAGLE-2, built on the device.

    top_drafts -> expand_tree -> (module, lm_head) -> top_drafts -> expand_tree -> ... -> keep_best

Each depth's candidates are the T best drafts after each lane of the run before. The T candidates
with the best scores are expanded: they are the lanes of the next run. At the end the K best
candidates of all depths are kept. Source: EAGLE-2 (Li et al., arXiv:2406.16858), section 4.

`tree_candidates.py` defines the scores, numbers and order of candidates. A candidate's score is at
most its parent's, and its number is higher, so its ancestors are kept before it. In the order of
their scores the kept candidates are the nodes 1, 2, ... of a tree (`core/tree.py`).

In the module's cache lane b of the run at depth g has entry 1 + (g - 1) * T + b after its root's.

Letters: S slots, R rows, W = K + 1 nodes, T drafts of a lane, D depth of the tree, C candidates of
a row above the greatest depth, M lanes of the run before, P of them per row (1 after the roots,
then T), H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.tree import TreeLanes, TreeTables, check_tree_lanes, check_tree_tables
from graphengine.kernels.draft.draft import (
    Fusion,
    Hidden,
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
from graphengine.kernels.draft.trees.tree_candidates import (
    NOTHING,
    Candidates,
    Children,
    check_children,
    check_found,
    child_args,
    children_reference,
    first_candidate,
    load_children,
    load_parents,
    next_best,
    number_of,
    ranked,
)
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.candidates import value_of_key
from graphengine.kernels.step.state import DecodeLanes

_EVERYTHING = tl.constexpr(2**63 - 1)


class Expanded(NamedTuple):
    """The next run's R * T lanes; valid until the next replay."""

    lanes: DecodeLanes
    score: torch.Tensor
    """float32 [R * T]; -inf for a padded lane."""
    combined: torch.Tensor
    """[R * T, 2H]: the module's input."""


class DraftedTrees(NamedTuple):
    """The tree that each slot's next step verifies."""

    draft: torch.Tensor
    """int32 [S, K]: tokens of all nodes except the root; -1 where there are fewer."""
    parent: torch.Tensor
    """int32 [S, K]: the number of each node's parent."""
    tables: TreeTables


def expand_tree(
    children: Children,
    hidden: Hidden,
    rows: DecodeLanes,
    found: Candidates,
    tree: TreeLanes,
    fusion: Fusion,
    *,
    depth: int,
    limit: int,
    residual: Residual,
    above: TreeLanes | None = None,
    hidden_eps: float = 0.0,
    pdl: bool = False,
) -> Expanded:
    """Record a depth's candidates, and make the input of a run over the best of them; one launch.

    A lane is padded where there are fewer candidates, and where its position or its entry would
    reach the limit.

    Args:
        children: drafts after the roots at depth 1, later after the lanes of the run above.
        hidden: output of the run's M lanes; hidden_eps: epsilon of the norm after it.
        rows: R lanes, the roots.
        found: updated in place.
        tree: places of the R * T new lanes in their trees; only the ancestors are written here.
        fusion: how the module's input is made.
        depth: depth of the candidates, 1 .. D - 1.
        limit: positions that the cache has.
        residual: R * T lanes, as in `combine_hidden`.
        above: places of the parents in their trees; None at depth 1.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        New lanes at the positions after their parents'. ValueError for a shape or dtype that does
        not fit.
    """
    count, parents = check_children(children, rows)
    top_k = children.top_k
    most = check_found(found, count, top_k)
    if not 1 <= depth <= most:
        raise ValueError(f"depth {depth} is not above the last of trees that are {most + 1} deep")
    if parents != (1 if depth == 1 else top_k) or (above is None) != (depth == 1):
        raise ValueError(f"{parents} parents a row are not those of candidates at depth {depth}")
    deepest = check_tree_lanes(tree, count * top_k)
    if depth > deepest:
        raise ValueError(f"the lanes' trees have a depth of {deepest}, not of {depth}")
    if above is not None and check_tree_lanes(above, count * top_k) != deepest:
        raise ValueError(f"the lanes above are in trees of another depth than {deepest}")
    check_hidden(hidden, fusion, children.drafts.token.shape[0])
    check_stream(residual, count * top_k, fusion)
    if not use_triton(rows.slot):
        return expand_tree_reference(
            children, hidden, rows, found, tree, fusion, depth=depth, limit=limit,
            residual=residual, above=above, hidden_eps=hidden_eps,
        )  # fmt: skip
    lanes = new_lanes(count * top_k, rows.slot)
    score = torch.empty_like(lanes.slot, dtype=torch.float32)
    args, options = fusion_args(hidden, fusion, hidden_eps, count * top_k, residual)
    launcher(_expand_kernel, (count * top_k,))(
        child_args(children),
        _ExpandArgs(
            row_slot=rows.slot,
            row_position=rows.position,
            parent_position=children.parents.position,
            parent_ancestor=None if above is None else above.ancestor,
            **found._asdict(),
            lane_token=lanes.token,
            lane_slot=lanes.slot,
            lane_position=lanes.position,
            lane_score=score,
            lane_ancestor=tree.ancestor,
        ),
        args,
        depth,
        first_candidate(depth, top_k),
        found.score.shape[1],
        most,
        limit,
        P=parents,
        T=top_k,
        DEPTH=deepest,
        BLOCK_C=triton.next_power_of_2(parents * top_k),
        BLOCK_D=triton.next_power_of_2(deepest),
        **options,
        **launch_options(pdl),
    )
    return Expanded(lanes, score, args.combined)


def expand_tree_reference(
    children: Children,
    hidden: Hidden,
    rows: DecodeLanes,
    found: Candidates,
    tree: TreeLanes,
    fusion: Fusion,
    *,
    depth: int,
    limit: int,
    residual: Residual,
    above: TreeLanes | None = None,
    hidden_eps: float = 0.0,
) -> Expanded:
    """Plain twin of `expand_tree`."""
    count, top_k = rows.slot.numel(), children.top_k
    score_RC, token_RC = children_reference(children, count)
    parents, of_depth = score_RC.shape[1] // top_k, first_candidate(depth, top_k)
    there = slice(of_depth, of_depth + score_RC.shape[1])
    found.score[:, there], found.token[:, there] = score_RC, token_RC
    best_RT = score_RC.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    score_RT = score_RC.gather(1, best_RT)
    is_found = score_RT > -torch.inf
    found.expanded[:, depth - 1] = (of_depth + best_RT).where(is_found, -1)

    first_lane = torch.arange(count, device=rows.slot.device)[:, None] * parents
    parent_RT = first_lane + best_RT // top_k
    number = 1 + (depth - 1) * top_k
    entry_RT = rows.position[:, None] + number + torch.arange(top_k, device=rows.slot.device)
    position_RT = children.parents.position[parent_RT] + 1
    live_RT = is_found & (position_RT < limit) & (entry_RT < limit)
    slot_RT = rows.slot[:, None].expand_as(live_RT).where(live_RT, -1)
    token_RT = token_RC.gather(1, best_RT)
    lanes = DecodeLanes(token_RT.flatten(), slot_RT.flatten(), position_RT.flatten())
    live = live_RT.flatten()
    if above is not None:
        tree.ancestor[live, : depth - 1] = above.ancestor[parent_RT.flatten()[live], : depth - 1]
    of_parent = (number - parents + best_RT // top_k).flatten().int()
    tree.ancestor[live, depth - 1] = of_parent[live]
    source = parent_RT if children.source is None else children.source[parent_RT].long()
    combined = combine_hidden_reference(
        lanes.token,
        lanes.slot,
        hidden,
        source.flatten(),
        fusion,
        hidden_eps=hidden_eps,
        residual=residual,
    )
    return Expanded(lanes, score_RT.where(live_RT, -torch.inf).flatten(), combined)


def keep_best(
    children: Children,
    rows: DecodeLanes,
    found: Candidates,
    trees: DraftedTrees,
    *,
    pdl: bool = False,
) -> None:
    """Write the trees of the best candidates, including those at the greatest depth; one launch.

    Args:
        children: drafts after the lanes of the last run.
        rows: R lanes, the roots.
        found: candidates of the depths above.
        trees: updated in place in the rows of live slots; zeros follow a node's ancestors.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    count, parents = check_children(children, rows)
    top_k = children.top_k
    depth = 1 + check_found(found, count, top_k)
    if parents != top_k:
        raise ValueError(f"{parents} parents a row are not the {top_k} lanes of the last run")
    slots, nodes = trees.draft.shape[0], check_draft_table(trees.draft)
    if trees.parent.shape != trees.draft.shape:
        raise ValueError(
            f"parents must be {[slots, nodes]} as the drafts, not {list(trees.parent.shape)}"
        )
    check_draft_table(trees.parent)
    most = check_tree_tables(trees.tables, slots, 1 + nodes)
    if most != depth:
        raise ValueError(f"tables of trees that are {most} deep are not for a depth of {depth}")
    if not use_triton(rows.slot):
        keep_best_reference(children, rows, found, trees)
        return
    older = first_candidate(depth, top_k)
    block_c = triton.next_power_of_2(older + top_k * top_k)
    launcher(_keep_kernel, (count,))(
        child_args(children),
        found,
        rows.slot,
        trees.draft,
        trees.parent,
        *trees.tables,
        trees.tables.depth.stride(0),
        trees.tables.ancestor.stride(0),
        OLDER=older,
        T=top_k,
        NODES=nodes,
        DEPTH=depth,
        BLOCK_C=block_c,
        BLOCK_W=triton.next_power_of_2(1 + nodes),
        num_warps=min(max(block_c // 256, 1), 8),
        **launch_options(pdl),
    )


def keep_best_reference(
    children: Children, rows: DecodeLanes, found: Candidates, trees: DraftedTrees
) -> None:
    """Plain twin of `keep_best`: row by row and node by node."""
    score_RC, token_RC = children_reference(children, rows.slot.numel())
    score_RC = torch.cat([found.score, score_RC], dim=1)
    token_RC = torch.cat([found.token, token_RC], dim=1)
    nodes, T = trees.draft.shape[1], children.top_k
    for row, slot in enumerate(rows.slot.tolist()):
        if slot < 0:
            continue
        order = score_RC[row].sort(descending=True, stable=True).indices[:nodes].tolist()
        kept = [each for each in order if score_RC[row, each] > -torch.inf]
        trees.draft[slot], trees.parent[slot] = -1, 0
        for table in trees.tables:
            table[slot] = 0
        paths: dict[int, list[int]] = {}
        for node, each in enumerate(kept, start=1):
            path = [0]
            if each >= T:
                level, within = divmod(each - T, T * T)
                parent = int(found.expanded[row, level, within // T])
                path = [*paths[parent], 1 + kept.index(parent)]
            paths[each] = path
            trees.draft[slot, node - 1], trees.parent[slot, node - 1] = (
                token_RC[row, each],
                path[-1],
            )
            trees.tables.depth[slot, node] = len(path)
            trees.tables.ancestor[slot, node, : len(path)] = torch.tensor(path, dtype=torch.int32)


class _ExpandArgs(NamedTuple):
    row_slot: torch.Tensor
    row_position: torch.Tensor
    parent_position: torch.Tensor
    parent_ancestor: torch.Tensor | None
    score: torch.Tensor
    token: torch.Tensor
    expanded: torch.Tensor
    lane_token: torch.Tensor
    lane_slot: torch.Tensor
    lane_position: torch.Tensor
    lane_score: torch.Tensor
    lane_ancestor: torch.Tensor


@triton.jit(do_not_specialize=["depth", "of_depth", "limit"])
def _expand_kernel(
    children,
    expand,
    fusion,
    depth,
    of_depth,
    columns,
    runs,
    limit,
    P: tl.constexpr,
    T: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    START: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane of the next run; each ranks its row's candidates, and the first of a row
    also stores them. Only the drafts may come from the launch before."""
    lane = tl.program_id(0)
    row = lane // T
    place = lane % T
    row_slot = tl.load(expand.row_slot + row, cache_modifier=".cg")
    live = row_slot >= 0
    root = tl.load(expand.row_position + row, mask=live, other=0, cache_modifier=".cg")
    c = tl.arange(0, BLOCK_C)
    inside = live & (c < P * T)
    has_parent, score, source = load_parents(children, row, c, inside, P, T)
    weight = load_weight(fusion.embedding_norm, H, BLOCK_H)
    wait_for_inputs(PDL)

    score, token = load_children(children, c, has_parent, score, source, T)
    if place == 0:
        at = row * columns + of_depth + c
        tl.store(expand.score + at, score, mask=inside)
        tl.store(expand.token + at, token, mask=inside)
    packed = ranked(score, c)
    best = tl.max(packed, 0)
    for _ in range(place):
        best = next_best(packed, best)
    found = best != NOTHING
    chosen = tl.where(found, number_of(best), 0)
    tl.store(
        expand.expanded + (row * runs + depth - 1) * T + place,
        tl.where(found, of_depth + chosen, -1),
        mask=live,
    )

    # Each sum has one term.
    is_chosen = c == chosen
    token_of = tl.sum(tl.where(is_chosen, token, 0), 0)
    source_of = tl.sum(tl.where(is_chosen, source, 0), 0)
    parent = row * P + chosen // T
    position = 1 + tl.load(expand.parent_position + parent, mask=found, other=0)
    number = 1 + (depth - 1) * T
    goes_on = found & (position < limit) & (root + number + place < limit)
    store_lane(
        expand.lane_token,
        expand.lane_slot,
        expand.lane_position,
        lane,
        token_of,
        row_slot,
        position,
        goes_on,
    )
    score_of = value_of_key((best >> 32).to(tl.int32))
    tl.store(expand.lane_score + lane, tl.where(goes_on, score_of, float("-inf")))
    d = tl.arange(0, BLOCK_D)
    ancestor = d * 0
    if expand.parent_ancestor is not None:
        older = goes_on & (d < depth - 1)
        ancestor = tl.load(expand.parent_ancestor + parent * DEPTH + d, mask=older, other=0)
    ancestor = tl.where(d == depth - 1, number - P + chosen // T, ancestor)
    tl.store(expand.lane_ancestor + lane * DEPTH + d, ancestor, mask=goes_on & (d < depth))
    hidden, start = normed_hidden(fusion, source_of, goes_on, H, GROUPS, START, BLOCK_H, BLOCK_T)
    store_combined(fusion, hidden, start, weight, token_of, lane, goes_on, H, HIDDEN_FIRST, BLOCK_H)


@triton.jit
def _keep_kernel(
    children,
    found,
    row_slot_ptr,
    draft_ptr,
    parent_ptr,
    depth_ptr,
    ancestor_ptr,
    depth_stride,
    ancestor_stride,
    OLDER: tl.constexpr,
    T: tl.constexpr,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Only the drafts may come from the launch before."""
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row, cache_modifier=".cg")
    live = slot >= 0
    c = tl.arange(0, BLOCK_C)
    is_older = live & (c < OLDER)
    older = tl.load(
        found.score + row * OLDER + c, mask=is_older, other=float("-inf"), cache_modifier=".cg"
    )
    child = tl.maximum(c - OLDER, 0)
    fresh = live & (c >= OLDER) & (c < OLDER + T * T)
    has_parent, score, source = load_parents(children, row, child, fresh, T, T)
    wait_for_inputs(PDL)

    score, token = load_children(children, child, has_parent, score, source, T)
    packed = ranked(tl.where(is_older, older, score), c)
    w = tl.arange(0, BLOCK_W)
    best = tl.full([], _EVERYTHING, tl.int64)
    # Each node's candidate, and the candidate's token.
    of_W = tl.full([BLOCK_W], -1, tl.int32)
    token_W = tl.full([BLOCK_W], -1, tl.int32)
    for node in range(1, NODES + 1):
        best = next_best(packed, best)
        number = tl.where(best != NOTHING, number_of(best), -1)
        of_W = tl.where(w == node, number, of_W)
        fresh_token = tl.sum(tl.where(c == number, token, 0), 0)
        token_W = tl.where((w == node) & (number >= OLDER), fresh_token, token_W)
    there = of_W >= 0
    noted = there & (of_W < OLDER)
    noted_token = tl.load(found.token + row * OLDER + of_W, mask=noted, other=-1)
    token_W = tl.where(noted, noted_token, token_W)

    # The parent of a candidate at depth 1 is the root, which is no candidate.
    below = tl.maximum(of_W - T, 0)
    run = below // (T * T)
    has_candidate = there & (of_W >= T)
    depth_W = tl.where(has_candidate, run + 2, there.to(tl.int32))
    at = found.expanded + (row * (DEPTH - 1) + run) * T + below % (T * T) // T
    parent_of_W = tl.load(at, mask=has_candidate, other=-2)
    is_parent = parent_of_W[:, None] == of_W[None, :]
    parent_W = tl.sum(tl.where(is_parent, w[None, :], 0), 1)

    wide_slot = slot.to(tl.int64)
    is_node = live & (w > 0) & (w <= NODES)
    tl.store(draft_ptr + wide_slot * NODES + w - 1, token_W, mask=is_node)
    tl.store(parent_ptr + wide_slot * NODES + w - 1, parent_W, mask=is_node)
    is_node = live & (w <= NODES)
    tl.store(depth_ptr + wide_slot * depth_stride + w, depth_W, mask=is_node)
    ancestor_W = w
    for step in tl.static_range(DEPTH):
        is_next = ancestor_W[:, None] == w[None, :]
        ancestor_W = tl.sum(tl.where(is_next, parent_W[None, :], 0), 1)
        # The ancestor's depth, `step` + 1 above the node; past the ancestors, zeros go in from the
        # end of the row.
        above = depth_W - 1 - step
        column = tl.where(above >= 0, above, DEPTH + above)
        value = tl.where(above >= 0, ancestor_W, 0)
        at_W = wide_slot * ancestor_stride + w * DEPTH + column
        tl.store(ancestor_ptr + at_W, value, mask=is_node)
