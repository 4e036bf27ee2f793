"""One MTP module that drafts trees: EAGLE with more than one token after a node.

EAGLE verifies static trees (arXiv:2401.15077), as Medusa does. What was emitted is taken in as by a
chain's drafter; `tree_growth.py` grows the tree after it, in entries of the module's cache that the
next step overwrites.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from graphengine.drafters.base import DraftSetting
from graphengine.drafters.eagle import EagleDrafter
from graphengine.drafters.modules import ModuleOutput
from graphengine.drafters.mtp import MtpModules
from graphengine.drafters.tree_growth import GrowingModule, StaticGrowth
from graphengine.kernels import DecodeLanes
from graphengine.models.contract import DecodeLaunch


class TreeEagle(EagleDrafter):
    """`MTP(tree=[...])`.

    modules  one module
    growth   the shape of its trees
    """

    def __init__(self, modules: MtpModules, growth: StaticGrowth) -> None:
        tree = growth.tree
        super().__init__(modules, tree.nodes)
        self.needs = replace(
            self.needs,
            depth=tree.depth,
            parents=tree.parents,
            # A root that is the request's last token but one has nodes with entries after its end;
            # no position is.
            reserve=tree.nodes - 1,
        )
        self._growth = growth

    def table_bytes(self, max_seq_len: int) -> int:
        return super().table_bytes(max_seq_len) + self._growth.table_bytes

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        slots, device = self._draft_tokens.shape[0], self._draft_tokens.device
        self.trees = self._growth.open(device, slots)
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
        # A tree's children are drawn without filters: what one token fails another may pass.
        self._growth.grow(
            self._module,
            rows,
            output,
            self._draft_tokens,
            launch,
            limit=self._limit,
            fed=fed,
            source=source,
        )
