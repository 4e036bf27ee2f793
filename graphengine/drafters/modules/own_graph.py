"""An eagle drafter in a separate graph, replayed after the step's.

The step's graph ends, after publishing, with one kernel that hands over what was verified; the
second graph begins there. Prompts are still taken in inside the prefill graphs.

Letters: R rows, W lanes of a row, N = R * W lanes, S slots, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import DraftSetting, FieldSizes, Verified
from graphengine.drafters.confidence import EveryDraft
from graphengine.drafters.modules.base import DraftModules
from graphengine.drafters.modules.eagle import EagleDrafter
from graphengine.kernels.step.handover import HandOver, hand_over

# Prefix of the static fields that hold the `HandOver`.
_PREFIX = "handover_"


class OwnGraphEagle(EagleDrafter):
    """The drafter for `own_graph=True`: the drafts of `EagleDrafter`, bit for bit."""

    def __init__(
        self, modules: DraftModules, length: int, choice: EveryDraft | None = None
    ) -> None:
        super().__init__(modules, length, choice)
        self.needs = replace(self.needs, own_graph=True)

    def fields(self, sizes: FieldSizes) -> list[Field]:
        lanes, int32 = sizes.slots * (1 + self.length), torch.int32

        def field(
            name: str, *shape: int, meaning: str, pad: int = 0, dtype: torch.dtype = int32
        ) -> Field:
            return Field(
                name=_PREFIX + name,
                shape=shape,
                dtype=dtype,
                owner="device",
                pad=pad,
                meaning=f"of the last step: {meaning}",
            )

        handed_over = [
            field("token", lanes, meaning="token that each lane was fed"),
            field("slot", lanes, pad=-1, meaning="slot of each lane"),
            field("position", lanes, meaning="position of each lane"),
            field("target", lanes, meaning="the target's token after each lane"),
            field("emitted", sizes.slots, meaning="tokens that each row emitted"),
        ]
        if self.modules.reads_output:
            width, meaning = self.modules.config.hidden_size, "the target's hidden states"
            handed_over.append(field("hidden", lanes, width, dtype=sizes.dtype, meaning=meaning))
        return super().fields(sizes) + handed_over

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        buffers = setting.buffers
        *ints, hidden = (_PREFIX + name for name in HandOver._fields)
        token, slot, position, target, emitted = (buffers[name] for name in ints)
        rows = buffers[hidden] if self.modules.reads_output else None
        self._handed_over = HandOver(token, slot, position, target, emitted, rows)

    def propose(self, verified: Verified) -> None:
        step, opened = verified.step, self._opened
        hand_over(
            step.token_N,
            step.count_R,
            verified.lanes,
            verified.hidden if self.modules.reads_output else None,
            self._handed_over.first(step.count_R.numel(), 1 + verified.drafts),
            hidden_eps=opened.target_eps,
            pdl=opened.launch.pdl,
        )

    def draft(self, rows: int, drafts: int, *, filtered: bool) -> None:
        step = self._handed_over.first(rows, 1 + drafts)
        self._take_in(step.target, step.emitted, step.lanes, step.hidden, drafts, filtered=filtered)
