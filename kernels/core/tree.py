"""Rows of a decode launch whose lanes are the nodes of a tree of tokens, not a chain of them.

Node 0 is a row's root, the known token; every other node is a draft token that follows its parent,
a node with a lower number. A node's depth is the number of its ancestors, so the root has depth 0.
With the root at position p,

    position of node i     p + its depth: for RoPE, noise and the request's limits
    entry of node i        p + i: where its keys and values are in the cache
    attended by node i     the entries below p, its ancestors' entries, and its own

Siblings share a position, but never an entry.

A path must give the same bits as decoding its tokens one by one, where the order of summation
follows from positions (`attention/decode.py`). A mask over the entries would leave each key at its
entry: siblings in between would shift it within its tile, perhaps even into the next split. So
nothing is masked. A node *gathers* its ancestors in order of depth, and the key at each position
lies where a chain has it. Trees therefore need no extra split and change no bit.

Verification walks from the root, each time to the child whose token its parent sampled
(`step/walk.py`), and the entries of that path are moved together before anything reads them
(`step/move.py`). Sources: SpecInfer (Miao et al., arXiv:2305.09781), Medusa (Cai et al.,
arXiv:2401.10774), EAGLE-2 (Li et al., arXiv:2406.16858).

Letters: S slots, R rows, W nodes of a tree, N = R * W lanes, D the greatest depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeTables(NamedTuple):
    """The tree of each slot's next step. The stride between slots is arbitrary; with 0 they share
    one tree."""

    depth: torch.Tensor
    """int32 [S, W], dense rows."""
    ancestor: torch.Tensor
    """int32 [S, W, D], dense within a slot: a node's ancestors at depths 0, 1, ... below its own;
    the rest is arbitrary."""


class TreeLanes(NamedTuple):
    """Where each lane of a launch is in its row's tree. Padded lanes hold arbitrary values."""

    node: torch.Tensor
    """int32 [N]: the node's number."""
    depth: torch.Tensor
    """int32 [N]: the node's number of ancestors, 0 .. D."""
    ancestor: torch.Tensor
    """int32 [N, D], dense: numbers of the node's ancestors, root first; the rest is arbitrary."""

    @classmethod
    def new(cls, lanes: int, most: int, device: torch.device) -> TreeLanes:
        """Uninitialised tensors for trees with a greatest depth of `most`."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(empty(lanes), empty(lanes), empty(lanes, most))


def check_tree_tables(tables: TreeTables, slots: int, width: int) -> int:
    """Return D; ValueError unless the tables hold `slots` trees of `width` nodes."""
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
    """Return D; ValueError unless `tree` holds `lanes` lanes, in rows of `width` if given."""
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
    """The numbers of a lane's ancestors, root first; for the plain PyTorch twins."""
    found: list[int] = tree.ancestor[lane, : int(tree.depth[lane])].tolist()
    return found
