"""One module, run K times: each run is fed the previous run's draft and output.

EAGLE drafts this way (arXiv:2401.15077), and so does DeepSeek-V3's single module where K > 1. The
module keeps its own KV: an entry for each token but the newest. After a verified step its first run
takes in the emitted tokens, with the target's hidden states; each later one extends the chain by a
draft, at positions that the next step's first run overwrites.

Letters: R rows, W lanes of a row, N = R * W lanes, K drafts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import DraftSetting, FieldSizes, PathLanes, Prefilled, Verified
from graphengine.drafters.confidence import EveryDraft
from graphengine.drafters.head import Hidden
from graphengine.drafters.modules.base import DraftModules, ModuleDrafter, ModuleOutput
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels.draft.draft import advance_module_draft, commit_draft
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch


class EagleDrafter(ModuleDrafter):
    """`MTP(k, style="eagle")` and `Eagle3(path, k)`.

    modules  one module
    length   K
    choice   which of its drafts are verified
    """

    def __init__(
        self, modules: DraftModules, length: int, choice: EveryDraft | None = None
    ) -> None:
        # The chain's last run is K - 1 positions after the last verified token. A KV entry pairs a
        # hidden state with the token after it.
        self._choice = choice or EveryDraft()
        needs = DraftNeeds(reserve=length - 1, tokens_after=1, withholds=self._choice.withholds)
        super().__init__(modules, length, needs)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return super().fields(sizes) + self._choice.fields(sizes)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        self._drafts = self._choice.opened(self._opened.head, setting.buffers)

    def prepare(self, prefilled: Prefilled) -> None:
        opened = self._opened
        following = prefilled.following
        output = opened.take_in_chunk(prefilled, following)
        last = prefilled.last_lane(following)
        self._drafts.begin(last)
        # No PDL for the launches that write decode's inputs: torch's own kernels run in between.
        self._chain(
            last,
            output.at(prefilled.chunk.last),
            replace(opened.launch, pdl=False),
            length=self.length,
            filtered=True,
        )

    def propose(self, verified: Verified) -> None:
        step = verified.step
        self._take_in(
            step.token_N,
            step.count_R,
            verified.lanes,
            verified.hidden,
            verified.drafts,
            verified.of_tree,
            filtered=verified.filtered,
        )

    def _take_in(
        self,
        token_N: Tensor,
        count_R: Tensor,
        lanes: DecodeLanes,
        hidden: Hidden | None,
        drafts: int,
        of_tree: PathLanes | None = None,
        *,
        filtered: bool,
    ) -> None:
        """Implement `propose`; `hidden` and `of_tree` as in `OpenModules.take_in`."""
        opened = self._opened
        first, output = opened.take_in(token_N, count_R, lanes, hidden, drafts, of_tree)
        if drafts:
            self._drafts.follow(count_R, lanes, opened.launch)
            self._chain(
                first.rows,
                output,
                opened.launch,
                length=drafts,
                fed=first.lanes,
                source=first.source,
                filtered=filtered,
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
        """Draft from a run with this output, then `length` - 1 times from the previous draft.

        launch  of the first draft
        rows    the lanes that the drafts follow, one a row
        fed     the lanes of that run, where they are more than `rows`
        source  int32 [R]: the index of each row's lane in `fed`
        """
        lanes, opened = fed or rows, self._opened
        chain = self._drafts.new_chain(rows.slot.numel())
        for index in range(length):
            # A lane has the position of its hidden state, one before the token it is fed.
            tiles = self._drafts.tiles(
                output.normed,
                lanes,
                launch,
                ahead=2,
                rows=rows,
                source=source,
                index=index,
                chain=chain,
                filtered=filtered,
            )
            if index + 1 == length:
                commit_draft(
                    tiles,
                    rows,
                    self._draft_tokens,
                    index=index,
                    limit=self._limit,
                    source_R=source,
                    pdl=launch.pdl,
                )
                return
            launch = replace(self._chain_launch, pdl=launch.pdl)
            residual = opened.new_stream(rows.slot.numel())
            following = advance_module_draft(
                tiles,
                rows,
                output.recycled,
                opened.fusions[0],
                self._draft_tokens,
                index=index,
                limit=self._limit,
                source_R=source,
                hidden_eps=opened.config.output_eps,
                residual=residual,
                pdl=launch.pdl,
            )
            lanes, source = following.lanes, None
            rows = lanes
            output = opened.run(0, following.combined, residual, rows, launch)
