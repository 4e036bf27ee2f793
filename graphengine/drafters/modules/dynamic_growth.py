"""Grows a module's drafts into the most probable tree, which differs from step to step.

Each run of the module is over the `top_k` best nodes of a depth, whatever their parents are; after
the last one the best nodes of all depths are kept (`kernels/draft/trees/dynamic_tree.py`). Each run
has its own entries in the module's cache; they are not numbered as the kept nodes are.

Letters: S slots, R rows, W nodes with the root, K = W - 1, D depth, T `top_k`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import FieldSizes
from graphengine.drafters.modules.base import ModuleOutput
from graphengine.drafters.modules.tree_growth import GrowingModule, Tensors, TreeGrowth
from graphengine.kernels.core.tree import TreeLanes, TreeTables
from graphengine.kernels.draft.trees.dynamic_tree import DraftedTrees, expand_tree, keep_best
from graphengine.kernels.draft.trees.tree_candidates import Candidates, Children
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch
from graphengine.options.drafts.draft_trees import DynamicTree

_PARENT, _DEPTH, _ANCESTOR = "tree_parent", "tree_depth", "tree_ancestor"


class DynamicGrowth(TreeGrowth):
    """The growth of trees of one size.

    tree  their size
    rows  drafted for at once, at most
    """

    tree: DynamicTree

    def __init__(self, tree: DynamicTree, rows: int) -> None:
        self.tree = tree
        self._rows = rows

    @property
    def reserve(self) -> int:
        # The next step writes the entries of a tree's nodes. The runs' lanes have other entries.
        return max(self.tree.nodes - 1, (self.tree.depth - 1) * self.tree.top_k)

    @property
    def lanes(self) -> int:
        return self.tree.top_k if self.tree.depth > 1 else 1

    @property
    def table_bytes(self) -> int:
        return 4 * 2 * (self.tree.depth - 1) * self._rows * self.tree.top_k

    def fields(self, sizes: FieldSizes) -> list[Field]:
        nodes, most = self.tree.nodes, self.tree.depth

        def field(name: str, *shape: int, meaning: str) -> Field:
            return Field(
                name=name,
                shape=(sizes.slots, *shape),
                dtype=torch.int32,
                owner="device",
                meaning=f"of the tree that the slot's next step verifies: {meaning}",
            )

        return [
            field(_PARENT, nodes, meaning="the number of each node's parent, from node 1 on"),
            field(_DEPTH, 1 + nodes, meaning="the depth of each node"),
            field(_ANCESTOR, 1 + nodes, most, meaning="each node's ancestors, the root first"),
        ]

    def open(self, buffers: Tensors) -> None:
        self.parents = buffers[_PARENT]
        self.trees = TreeTables(buffers[_DEPTH], buffers[_ANCESTOR])
        self._drafted = DraftedTrees(buffers["draft_tokens"], self.parents, self.trees)
        top_k, rows, device = self.tree.top_k, self._rows, self.parents.device
        place = torch.arange(top_k, dtype=torch.int32, device=device).repeat(rows)
        self._numbers = [1 + run * top_k + place for run in range(self.tree.depth - 1)]
        self._depths = [torch.full_like(place, 1 + run) for run in range(self.tree.depth - 1)]

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
        count, top_k, most = rows.slot.numel(), self.tree.top_k, self.tree.depth
        found = Candidates.new(count, top_k, most, rows.slot.device)
        lanes, parents = fed or rows, rows
        score: Tensor | None = None
        above: TreeLanes | None = None
        for depth in range(1, most + 1):
            # A lane has the position of its hidden state, one before the token it is fed.
            top = module.head.top(
                output.normed, lanes, launch, count=top_k, ahead=2, filtered=filtered
            )
            children = Children(top, parents, score, source)
            if depth == most:
                keep_best(children, rows, found, self._drafted, pdl=launch.pdl)
                return
            tree = self._lanes_of(depth, count)
            residual = module.new_stream(count * top_k)
            expanded = expand_tree(
                children,
                output.recycled,
                rows,
                found,
                tree,
                module.fusion,
                depth=depth,
                limit=limit,
                residual=residual,
                above=above,
                hidden_eps=module.output_eps,
                pdl=launch.pdl,
            )
            lanes = parents = expanded.lanes
            score, source, above = expanded.score, None, tree
            in_trees = replace(launch, tree=tree)
            output = module.run(expanded.combined, residual, lanes, in_trees)

    def _lanes_of(self, depth: int, rows: int) -> TreeLanes:
        """The lanes of a depth's run, whose ancestors are written in each step."""
        number, of_depth = (
            table[depth - 1][: rows * self.tree.top_k] for table in (self._numbers, self._depths)
        )
        ancestor = number.new_empty(number.numel(), self.tree.depth)
        return TreeLanes(number, of_depth, ancestor)
