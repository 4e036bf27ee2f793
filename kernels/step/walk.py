"""The walk that finds the accepted nodes of a row's tree, from the root along the sampled tokens.

At each node a token was sampled with the row's parameters and the noise of its position. The walk
goes to the child that was fed the token sampled at its parent, until there is none. So the tokens
along it equal plain decoding's samples: siblings' samples share their noise, but at most one
sibling is on the path.

Letters: R rows, W nodes of a tree, N = R * W lanes, D the greatest depth, P = D + 1 tokens of a
path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.tree import TreeLanes
from graphengine.kernels.step.state import DecodeLanes


class AcceptedPath(NamedTuple):
    """The lanes of each row's emitted tokens, laid out as a chain: P a row, consecutive positions.

    With it kernels after a step need not know about trees. Padded past the row's count.
    """

    lanes: DecodeLanes
    """R * P lanes."""
    source: torch.Tensor
    """int32 [R * P]: which of the step's N lanes each is; the row's first lane where padded."""

    @classmethod
    def new(cls, lanes: int, like: torch.Tensor) -> AcceptedPath:
        """Uninitialised, on `like`'s device."""
        fields = (like.new_empty(lanes, dtype=torch.int32) for _ in range(4))
        return cls(DecodeLanes(next(fields), next(fields), next(fields)), next(fields))


def walk_reference(
    token_RW: torch.Tensor, lanes: DecodeLanes, tree: TreeLanes, forced: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `walk_tree`, for all rows: (tokens along the path [R, P], -1 past its end;
    nodes of the path, int64 [R, P], 0 past its end)."""
    rows, width = token_RW.shape
    walked_RP = token_RW.new_full((rows, 1 + tree.ancestor.shape[1]), -1)
    path_RP = torch.zeros_like(walked_RP, dtype=torch.int64)
    slots, fed = lanes.slot.view(rows, width).tolist(), lanes.token.view(rows, width).tolist()
    depths, parents = tree.depth.view(rows, width).tolist(), _parents_reference(tree, width)
    for row, sampled in enumerate(token_RW.tolist()):
        if slots[row][0] < 0:
            continue
        node: int | None = 0
        while node is not None:
            depth = depths[row][node]
            path_RP[row, depth], walked_RP[row, depth] = node, sampled[node]
            children = (
                child
                for child in range(1, width)
                if slots[row][child] >= 0 and parents[row][child] == node
                if (fed[row][child] == sampled[node] if forced is None else depth < forced)
            )
            node = next(children, None)
    return walked_RP, path_RP


def _parents_reference(tree: TreeLanes, width: int) -> list[list[int]]:
    """The parent of each node of each row; for padded lanes and roots any number."""
    last = (tree.depth.long() - 1).clamp(0, tree.ancestor.shape[1] - 1)
    parents: list[list[int]] = tree.ancestor.gather(1, last[:, None]).view(-1, width).tolist()
    return parents


def fed_depths_reference(lanes: DecodeLanes, tree: TreeLanes, width: int) -> torch.Tensor:
    """int64 [R]: tokens of the longest path that was fed to each row; 0 for a padded row."""
    return (tree.depth.long() + 1).where(lanes.slot >= 0, 0).view(-1, width).amax(dim=1)


@triton.jit
def walk_tree(
    token_W,
    fed_W,
    parent_W,
    live_W,
    FORCED: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """(tokens along the path [BLOCK_W], its nodes [BLOCK_W], accepted drafts) of a row.

    With FORCED the first child is accepted, whatever was sampled, for at most that many drafts.
    """
    j = tl.arange(0, BLOCK_W)
    token = tl.sum(tl.where(j == 0, token_W, 0), 0)
    node = token * 0
    accepted = node
    walked_W = tl.where(j == 0, token, -1)
    path_W = tl.zeros([BLOCK_W], tl.int32)
    for depth in tl.static_range(1, DEPTH + 1):
        is_next = live_W & (j > 0) & (parent_W == node) & (accepted == depth - 1)
        if FORCED is None:
            is_next &= fed_W == token
        else:
            is_next &= depth <= FORCED
        child = tl.min(tl.where(is_next, j, BLOCK_W), 0)
        found = child < BLOCK_W
        accepted += found.to(tl.int32)
        node = tl.where(found, child, node)
        token = tl.where(found, tl.sum(tl.where(j == child, token_W, 0), 0), token)
        walked_W = tl.where((j == depth) & found, token, walked_W)
        path_W = tl.where((j == depth) & found, node, path_W)
    return walked_W, path_W, accepted
