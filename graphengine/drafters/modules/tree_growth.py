"""Grows a module's drafts into a tree, for any module; here trees of a fixed shape.

A tree grows from its root by generations: the best tokens after each node that has children are
drafted, and the module runs once over the new nodes that have children themselves. A tree needs
only three things of the module: how its input is made, how it runs over lanes, and its head.

Letters: S slots, R rows, W nodes with the root, D depth, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import FieldSizes
from graphengine.drafters.head import DraftHead
from graphengine.drafters.modules.base import ModuleOutput
from graphengine.kernels.core.tree import TreeLanes, TreeTables
from graphengine.kernels.draft.draft import Fusion
from graphengine.kernels.draft.trees.tree import ParentRun, TreeLevel, grow_tree
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch
from graphengine.options.drafts.draft_trees import StaticTree, Tree

RunModule = Callable[[Tensor, Residual, DecodeLanes, DecodeLaunch], ModuleOutput]
"""Runs a module on its combined input and a new stream for its lanes. The lanes are tree nodes;
their ancestors are already in the module's cache."""


class GrowingModule(NamedTuple):
    """The parts of a module that a tree needs to propose nodes."""

    run: RunModule
    fusion: Fusion
    head: DraftHead
    output_eps: float
    """The epsilon of the norm after it."""
    new_stream: Callable[[int], Residual]
    """Makes a stream of this many lanes."""


class Tensors(Protocol):
    """Tensors by name, such as an engine's buffers."""

    def __getitem__(self, name: str, /) -> Tensor: ...


class TreeGrowth(ABC):
    """The growth of the trees of one drafter."""

    tree: Tree
    parents: Tensor | tuple[int, ...]
    """See `Drafter.parents`; known once it is opened."""
    trees: TreeTables
    """The trees of all slots; known once it is opened."""

    @property
    @abstractmethod
    def reserve(self) -> int:
        """How many positions past the last verified one a module or the next step writes."""

    @property
    @abstractmethod
    def lanes(self) -> int:
        """Lanes of a tree in the widest run that grows it."""

    @property
    @abstractmethod
    def table_bytes(self) -> int:
        """Bytes of the tables that `open` makes."""

    def fields(self, sizes: FieldSizes) -> list[Field]:
        """Its own static fields."""
        return []

    @abstractmethod
    def open(self, buffers: Tensors) -> None:
        """Make the tables. `buffers` are the engine's, with the drafts and its own fields."""

    @abstractmethod
    def grow(
        self,
        module: GrowingModule,
        rows: DecodeLanes,
        output: ModuleOutput,
        launch: DecodeLaunch,
        *,
        limit: int,
        fed: DecodeLanes | None = None,
        source: Tensor | None = None,
        filtered: bool,
    ) -> None:
        """Draft all nodes of the trees, after a run of the module with this output.

        rows      the lanes that are roots, one a row
        limit     positions of the module's cache
        fed       the lanes of that run, where they are more than `rows`
        source    int32 [R]: the index of each row's lane in `fed`
        filtered  as in `DraftHead.tiles`
        """


class _Generation(NamedTuple):
    """A generation on the device."""

    level: TreeLevel
    drawn: int
    lanes: TreeLanes
    """The lanes of its inner nodes, for the largest number of rows."""
    inner: int

    def lanes_of(self, rows: int) -> TreeLanes:
        """The lanes of the first `rows` rows."""
        return TreeLanes(*(part[: rows * self.inner] for part in self.lanes))


class StaticGrowth(TreeGrowth):
    """The growth of trees of one shape.

    tree  their shape
    rows  drafted for at once, at most
    """

    tree: StaticTree

    def __init__(self, tree: StaticTree, rows: int) -> None:
        self.tree = tree
        self.parents = tree.parents
        self._rows = rows

    @property
    def reserve(self) -> int:
        # If the root is the request's second-last token, some nodes have entries past the request's
        # end, but no position lies there.
        return self.tree.nodes - 1

    @property
    def lanes(self) -> int:
        return max(1, *(len(each.inner) for each in self.tree.generations))

    @property
    def table_bytes(self) -> int:
        tree, inner = self.tree, sum(len(each.inner) for each in self.tree.generations)
        of_levels = 3 * tree.nodes + inner + self._rows * inner * (2 + tree.depth)
        return 4 * (of_levels + (1 + tree.nodes) * (1 + tree.depth))

    def open(self, buffers: Tensors) -> None:
        self._draft_tokens = buffers["draft_tokens"]
        slots, device = self._draft_tokens.shape[0], self._draft_tokens.device
        nodes = range(1 + self.tree.nodes)
        of_nodes = self._lanes([*nodes], 1, device)
        self.trees = TreeTables(
            of_nodes.depth[None].expand(slots, -1), of_nodes.ancestor[None].expand(slots, -1, -1)
        )
        self._generations = [
            _Generation(
                TreeLevel(*(_ints(each, device) for each in generation)),
                generation.drawn,
                self._lanes([generation.node[i] for i in generation.inner], self._rows, device),
                len(generation.inner),
            )
            for generation in self.tree.generations
        ]

    def _lanes(self, nodes: list[int], rows: int, device: torch.device) -> TreeLanes:
        """The lanes of these nodes in each row; zeros follow a node's ancestors."""
        found = [self.tree.ancestors(node) for node in nodes]
        ancestor = torch.zeros(len(nodes), self.tree.depth, dtype=torch.int32, device=device)
        for lane, ancestors in enumerate(found):
            ancestor[lane, : len(ancestors)] = _ints(ancestors, device)
        depth = _ints([len(ancestors) for ancestors in found], device)
        return TreeLanes(
            _ints(nodes, device).repeat(rows), depth.repeat(rows), ancestor.repeat(rows, 1)
        )

    def grow(
        self,
        module: GrowingModule,
        rows: DecodeLanes,
        output: ModuleOutput,
        launch: DecodeLaunch,
        *,
        limit: int,
        fed: DecodeLanes | None = None,
        source: Tensor | None = None,
        filtered: bool,
    ) -> None:
        count = rows.slot.numel()
        lanes, parents = fed or rows, rows
        for generation in self._generations:
            # A lane has the position of its hidden state, one before the token it is fed.
            top = module.head.top(
                output.normed, lanes, launch, count=generation.drawn, ahead=2, filtered=filtered
            )
            inner = count * generation.inner
            residual = module.new_stream(inner) if inner else None
            following = grow_tree(
                ParentRun(top.token, output.recycled, module.output_eps, source),
                parents,
                rows,
                generation.level,
                self._draft_tokens,
                module.fusion,
                limit=limit,
                residual=residual,
                pdl=launch.pdl,
            )
            if following is None or residual is None:
                return
            lanes = parents = following.lanes
            source = None
            in_trees = replace(launch, tree=generation.lanes_of(count))
            output = module.run(following.combined, residual, lanes, in_trees)


def _ints(values: tuple[int, ...] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
