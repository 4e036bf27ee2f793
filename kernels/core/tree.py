"""Rows of a decode launch whose lanes are the nodes of a tree of tokens, not a chain of them.

Node 0 is a row's root, the token that is known; every other node is a draft that follows another
node, its parent, which has a lower number. A node's depth is the number of its ancestors, so the
root has depth 0. With the root at position p,

    position of node i     p + its depth: that of RoPE, of noise, of the request's limits
    entry of node i        p + i: where its keys and values are in the cache
    what it attends        the entries below p, and those of its ancestors and of itself

Siblings share a position, and never an entry.

A path must have the bits of decoding its tokens one by one, whose order of summation follows from
positions (`attention/decode.py`). A mask over the entries would leave a key where its entry is:
siblings in between would shift it, in its tile and perhaps to the next split. So nothing is masked:
a node *gathers* its ancestors in the order of their depths, and the key at each position lies where
a chain has it. Trees cost no other split, and no bit.

Verification walks from the root to the child whose token is what its parent sampled
(`step/walk.py`), and the entries of that path are moved together before anything reads them
(`step/move.py`). Sources: SpecInfer (Miao et al., arXiv:2305.09781), Medusa (Cai et al.,
arXiv:2401.10774), EAGLE-2 (Li et al., arXiv:2406.16858).

Letters: S slots, R rows, W nodes of a tree, N = R * W lanes, D the greatest depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeTables(NamedTuple):
    """The tree of each slot's next step. Slots may share one: any stride between them, also 0."""

    depth: torch.Tensor
    """int32 [S, W], dense rows."""
    ancestor: torch.Tensor
    """int32 [S, W, D], dense for a slot: the ancestor of a node at each depth below its own; then
    anything."""


class TreeLanes(NamedTuple):
    """Where each lane of a launch is in its row's tree. Padded lanes hold anything."""

    node: torch.Tensor
    """int32 [N]: its number."""
    depth: torch.Tensor
    """int32 [N]: its ancestors, 0 .. D."""
    ancestor: torch.Tensor
    """int32 [N, D], dense: the numbers of its ancestors, the root first; then anything."""

    @classmethod
    def new(cls, lanes: int, most: int, device: torch.device) -> TreeLanes:
        """Uninitialised, with a greatest depth of `most`."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(empty(lanes), empty(lanes), empty(lanes, most))


def check_tree_tables(tables: TreeTables, slots: int, width: int) -> int:
    """D; ValueError unless the tables are those of `slots` trees of `width` nodes."""
    depth, ancestor = tables
    most = ancestor.shape[-1] if ancestor.dim() == 3 else 0
    for name, table, shape in (
        ("depth", depth, (slots, width)),
        ("ancestor", ancestor, (slots, width, most)),
    ):
        dense = table.dim() > 1 and table[:1].is_contiguous()
        if table.dtype != torch.int32 or tuple(table.shape) != shape or not dense:
            raise ValueError(
                f"a tree's {name} must be int32 {[*shape[:2], 'D'][: len(shape)]} and dense for a "
                f"slot, not {table.dtype} {tuple(table.shape)} with strides {table.stride()}"
            )
    _check_depth(most, width)
    return most


def check_tree_lanes(tree: TreeLanes, lanes: int, width: int | None = None) -> int:
    """D; ValueError unless the tree is that of `lanes` lanes, in rows of `width` if it is given."""
    most = tree.ancestor.shape[-1] if tree.ancestor.dim() == 2 else 0
    shapes = (("node", (lanes,)), ("depth", (lanes,)), ("ancestor", (lanes, most)))
    for name, shape in shapes:
        part: torch.Tensor = getattr(tree, name)
        if part.dtype != torch.int32 or tuple(part.shape) != shape or not part.is_contiguous():
            raise ValueError(
                f"the tree's {name} must be a dense int32 {[lanes, 'D'][: len(shape)]}, "
                f"not {part.dtype} {tuple(part.shape)}"
            )
    _check_depth(most, width)
    return most


def _check_depth(most: int, width: int | None) -> None:
    if most < 1 or (width is not None and most >= width):
        nodes = "a tree" if width is None else f"a tree of {width} nodes"
        raise ValueError(f"{nodes} cannot have a depth of {most}")


def ancestors_of(tree: TreeLanes, lane: int) -> list[int]:
    """The numbers of a lane's ancestors, the root first; for plain twins."""
    found: list[int] = tree.ancestor[lane, : int(tree.depth[lane])].tolist()
    return found
