"""One MTP module, run K times: each run is fed the previous run's draft and output.

EAGLE drafts this way (arXiv:2401.15077), and so does DeepSeek-V3's single module where K > 1. The
module keeps its own KV: an entry for each token but the newest. After a verified step its first
run takes in what was emitted, with the target's hidden states; each later one extends the chain by
a draft, at positions that the next step's first run overwrites.

Letters: R rows, W lanes of a row, N = R * W lanes, T tokens of a chunk, H hidden, K drafts,
D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from graphengine.drafters.base import Prefilled, Verified
from graphengine.drafters.modules import ModuleDrafter
from graphengine.drafters.needs import DraftNeeds
from graphengine.kernels import (
    DecodeLanes,
    Residual,
    advance_module_draft,
    begin_module_draft,
    combine_hidden,
    commit_draft,
)
from graphengine.models.contract import DecodeLaunch
from graphengine.models.mtp import MtpConfig


class EagleDrafter(ModuleDrafter):
    """`MTP(k, style="eagle")`: the checkpoint's first module.

    config      of the checkpoint's modules
    length      K
    vocabulary  int64 [D], ascending: the target ids that may be drafted; None: all
    """

    def __init__(self, config: MtpConfig, length: int, vocabulary: Tensor | None = None) -> None:
        # The chain's last run is K - 1 positions after the last verified token. A row pairs a
        # hidden state with the token after it.
        needs = DraftNeeds(reserve=length - 1, tokens_after=1)
        super().__init__(config.first(1), length, vocabulary, needs)

    def prepare(self, prefilled: Prefilled) -> None:
        assert prefilled.hidden is not None, "a module reads hidden states"
        chunk, token = prefilled.chunk, prefilled.following
        combined = combine_hidden(token, chunk.slot, prefilled.hidden, None, self._fusions[0])
        hidden = self._run_chunk(0, combined, chunk, prefilled.attention)
        # No PDL for what is written for decode: torch's own kernels run in between.
        self._chain(
            prefilled.last_lane(token),
            hidden.index_select(0, chunk.last),
            replace(self._launch, pdl=False),
        )

    def propose(self, verified: Verified) -> None:
        step = verified.step
        self._take_in(
            step.token_N,
            step.count_R,
            verified.lanes,
            verified.hidden,
            verified.drafts,
            verified.source,
        )

    def _take_in(
        self,
        token_N: Tensor,
        count_R: Tensor,
        lanes: DecodeLanes,
        hidden: Residual | Tensor,
        drafts: int,
        source: Tensor | None = None,
    ) -> None:
        """`propose`; `hidden`: the stream scaled for the final norm, or plain after it."""
        launch = self._launch
        residual = self._new_stream(lanes.slot.numel())
        first = begin_module_draft(
            token_N,
            count_R,
            lanes,
            hidden,
            self._fusions[0],
            source_N=source,
            hidden_eps=self._target_eps,
            residual=residual,
            pdl=launch.pdl,
        )
        several = replace(launch, tokens_per_row=1 + drafts)
        output = self._run(0, first.combined, residual, first.lanes, several)
        if drafts:
            self._chain(first.rows, output, launch, fed=first.lanes, source=first.source)

    def _chain(
        self,
        rows: DecodeLanes,
        hidden: Residual | Tensor,
        launch: DecodeLaunch,
        *,
        fed: DecodeLanes | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Draft from a run whose output is `hidden`, and K - 1 times from what was drafted.

        rows    the lanes that the drafts follow, one a row
        fed     the lanes of that run, where they are more than `rows`
        source  int32 [R]: which of these lanes is each row's
        """
        lanes = fed or rows
        for index in range(self.length):
            # A lane has the position of its hidden state, one before the token it is fed.
            tiles = self._head.tiles(hidden, lanes, launch, ahead=2)
            if index + 1 == self.length:
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
            residual = self._new_stream(rows.slot.numel())
            following = advance_module_draft(
                tiles,
                rows,
                hidden,
                self._fusions[0],
                self._draft_tokens,
                index=index,
                limit=self._limit,
                source_R=source,
                hidden_eps=self.config.output_eps,
                residual=residual,
                pdl=launch.pdl,
            )
            lanes, source = following.lanes, None
            rows = lanes
            hidden = self._run(0, following.combined, residual, rows, launch)
