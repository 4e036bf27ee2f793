"""One module that drafts trees: EAGLE with more than one token after a node.

EAGLE verifies static trees (arXiv:2401.15077), as Medusa does, and EAGLE-2 dynamic ones
(arXiv:2406.16858). Emitted tokens are taken in as in a chain's drafter; then a `TreeGrowth` grows
the tree, in entries of the module's cache that the next step overwrites.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import DraftSetting, FieldSizes
from graphengine.drafters.modules.base import DraftModules, ModuleOutput
from graphengine.drafters.modules.chain import EagleDrafter
from graphengine.drafters.modules.tree_growth import GrowingModule, TreeGrowth
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch


class TreeEagle(EagleDrafter):
    """`MTP(tree=...)` and `Eagle3(path, tree=...)`.

    modules  one module
    growth   grows its trees
    """

    def __init__(self, modules: DraftModules, growth: TreeGrowth) -> None:
        super().__init__(modules, growth.tree.nodes)
        self.needs = replace(
            self.needs,
            depth=growth.tree.depth,
            reserve=growth.reserve,
            prompt_lanes=growth.lanes,
        )
        self._growth = growth

    def table_bytes(self, max_seq_len: int) -> int:
        return super().table_bytes(max_seq_len) + self._growth.table_bytes

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return super().fields(sizes) + self._growth.fields(sizes)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        self._growth.open(setting.buffers)
        self.trees, self.parents = self._growth.trees, self._growth.parents
        opened = self._opened
        self._module = GrowingModule(
            run=partial(opened.run, 0),
            fusion=opened.fusions[0],
            head=opened.head,
            output_eps=opened.config.output_eps,
            new_stream=opened.new_stream,
        )

    def _chain(
        self,
        rows: DecodeLanes,
        output: ModuleOutput,
        launch: DecodeLaunch,
        *,
        length: int,
        fed: DecodeLanes | None = None,
        source: Tensor | None = None,
        filtered: bool,
    ) -> None:
        self._growth.grow(
            self._module,
            rows,
            output,
            launch,
            limit=self._limit,
            fed=fed,
            source=source,
            filtered=filtered,
        )
