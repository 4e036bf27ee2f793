"""Which drafts of a chain are verified: all of them, or only those with enough confidence.

A withheld draft ends its row's chain: later runs find the row padded, and so does verification.

Letters: S slots, R rows, M lanes of a run.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters.base import FieldSizes
from graphengine.drafters.head import DraftHead, Hidden
from graphengine.kernels.core.lanes import write_rows
from graphengine.kernels.draft.confidence import follow_acceptance, withhold_drafts
from graphengine.kernels.draft.draft import DraftTiles
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.launches import DecodeLaunch


class EveryDraft:
    """All drafts of a chain are verified."""

    withholds = False
    _head: DraftHead

    def fields(self, sizes: FieldSizes) -> list[Field]:
        """The static fields that it needs."""
        return []

    def opened(self, head: DraftHead, buffers: StaticBuffers) -> Self:
        """A copy for captured steps, with the head that drafts and the static fields."""
        opened = copy(self)
        opened._head = head
        return opened

    def begin(self, lanes: DecodeLanes) -> None:
        """Called after prompts' chunks, with a lane for each. After a prompt's last chunk it has
        the slot of the new request; after others it is padded.
        """

    def follow(self, count_R: Tensor, lanes: DecodeLanes, launch: DecodeLaunch) -> None:
        """Called after a step that fed these lanes and emitted `count_R` tokens in each row."""

    def new_chain(self, rows: int) -> Tensor | None:
        """The state that each row's chain keeps from one of its drafts to the next."""
        return None

    def tiles(
        self,
        hidden: Hidden,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
        *,
        ahead: int,
        rows: DecodeLanes,
        source: Tensor | None,
        index: int,
        chain: Tensor | None,
        filtered: bool,
    ) -> DraftTiles:
        """The drafts of a run, as `commit_draft` takes them.

        hidden, lanes, ahead, filtered
                              as in `DraftHead.tiles`
        rows, source          the lanes that the drafts follow, one a row, and their indices in
                              `lanes`
        index                 the draft's place in the chain
        """
        return self._head.tiles(hidden, lanes, launch, ahead=ahead, filtered=filtered)


class SureDrafts(EveryDraft):
    """Verify only drafts that `withhold_drafts` is sure enough of, by their odds among the tokens
    that a request's filters keep.

    least  the threshold, in (0, 1]
    """

    withholds = True
    _recent: Tensor

    def __init__(self, least: float) -> None:
        self.least = least

    def fields(self, sizes: FieldSizes) -> list[Field]:
        return [
            Field(
                name="recent_acceptance",
                shape=(sizes.slots,),
                dtype=torch.float32,
                owner="device",
                meaning="share of drafts that the slot's latest steps accepted",
            )
        ]

    def opened(self, head: DraftHead, buffers: StaticBuffers) -> Self:
        opened = super().opened(head, buffers)
        opened._recent = buffers["recent_acceptance"]
        return opened

    def begin(self, lanes: DecodeLanes) -> None:
        write_rows(self._recent, lanes.slot, self._recent.new_ones(len(lanes.slot)))

    def follow(self, count_R: Tensor, lanes: DecodeLanes, launch: DecodeLaunch) -> None:
        follow_acceptance(self._recent, count_R, lanes.slot, pdl=launch.pdl)

    def new_chain(self, rows: int) -> Tensor | None:
        return self._recent.new_empty(rows)

    def tiles(
        self,
        hidden: Hidden,
        lanes: DecodeLanes,
        launch: DecodeLaunch,
        *,
        ahead: int,
        rows: DecodeLanes,
        source: Tensor | None,
        index: int,
        chain: Tensor | None,
        filtered: bool,
    ) -> DraftTiles:
        assert chain is not None, "a chain of new_chain"
        return withhold_drafts(
            self._head.top(hidden, lanes, launch, count=1, ahead=ahead, filtered=filtered),
            rows.slot,
            source,
            self._recent,
            chain,
            least=self.least,
            first=index == 0,
            pdl=launch.pdl,
        )


def drafts_from(min_confidence: float | None) -> EveryDraft:
    """The drafts that a mode's `min_confidence` asks for."""
    return EveryDraft() if min_confidence is None else SureDrafts(min_confidence)
