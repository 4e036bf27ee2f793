"""Trees of tokens for launches: shapes drawn by hypothesis, and the tensors that say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from graphengine.kernels.core.tree import TreeLanes, TreeTables

POISON = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """`parents[i]` is the parent of node i + 1, and has a lower number."""

    parents: tuple[int, ...]

    @property
    def width(self) -> int:
        return 1 + len(self.parents)

    def path(self, node: int) -> list[int]:
        """From the root to the node."""
        path = [node]
        while path[0]:
            path.insert(0, self.parents[path[0] - 1])
        return path

    @property
    def depths(self) -> list[int]:
        return [len(self.path(node)) - 1 for node in range(self.width)]

    @property
    def most(self) -> int:
        return max(self.depths)

    def lanes(self, rows: int, device: str, nodes: Sequence[int] | None = None) -> TreeLanes:
        """Lanes of `rows` rows of these nodes, all of them by default; poisoned where nothing is
        read.
        """
        nodes = range(self.width) if nodes is None else nodes
        ancestors = torch.full((len(nodes), self.most), POISON, dtype=torch.int32)
        for lane, node in enumerate(nodes):
            path = self.path(node)[:-1]
            ancestors[lane, : len(path)] = torch.tensor(path, dtype=torch.int32)
        depths = [self.depths[node] for node in nodes]
        parts = (torch.tensor([*nodes]), torch.tensor(depths), ancestors)
        repeated = (part.to(torch.int32).repeat(rows, *[1] * (part.dim() - 1)) for part in parts)
        return TreeLanes(*(part.to(device) for part in repeated))

    def tables(self, slots: int, device: str) -> TreeTables:
        """One tree for all slots."""
        lanes = self.lanes(1, device)
        return TreeTables(
            lanes.depth[None].expand(slots, -1), lanes.ancestor[None].expand(slots, -1, -1)
        )


@st.composite
def shapes(draw: st.DrawFn, most_nodes: int = 9) -> Shape:
    """Trees of up to so many nodes without the root, chains and brooms among them."""
    count = draw(st.integers(1, most_nodes))
    return Shape(tuple(draw(st.integers(0, node)) for node in range(count)))
