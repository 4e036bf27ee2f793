"""The eagle module in a separate graph, replayed after the step's.

The step's graph ends after publishing with one kernel that hands over what it verified; its second
graph begins there. Prompts are taken in inside the prefill graphs, as without.

Letters: R rows, W lanes of a row, N = R * W lanes, S slots, H hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphengine.buckets import Field
from graphengine.drafters.base import DraftSetting, FieldSizes, Verified
from graphengine.drafters.eagle import EagleDrafter
from graphengine.kernels import HandOver, hand_over
from graphengine.models.mtp import MtpConfig

# Prefix of the static fields that hold the `HandOver`.
_PREFIX = "handover_"


class OwnGraphEagle(EagleDrafter):
    """`MTP(k, own_graph=True)`: the drafts of `EagleDrafter`, bit for bit."""

    def __init__(self, config: MtpConfig, length: int, vocabulary: Tensor | None = None) -> None:
        super().__init__(config, length, vocabulary)
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

        width = self.config.hidden_size
        return [
            field("token", lanes, meaning="token that each lane was fed"),
            field("slot", lanes, pad=-1, meaning="slot of each lane"),
            field("position", lanes, meaning="position of each lane"),
            field("target", lanes, meaning="the target's token after each lane"),
            field("emitted", sizes.slots, meaning="tokens that each row emitted"),
            field("hidden", lanes, width, dtype=sizes.dtype, meaning="the target's hidden states"),
        ]

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        super().open(setting, cache)
        fields = (setting.buffers[_PREFIX + name] for name in HandOver._fields)
        self._handed_over = HandOver(*fields)

    def propose(self, verified: Verified) -> None:
        step = verified.step
        hand_over(
            step.token_N,
            step.count_R,
            verified.lanes,
            verified.hidden,
            self._handed_over.first(step.count_R.numel(), 1 + verified.drafts),
            hidden_eps=self._target_eps,
            pdl=self._launch.pdl,
        )

    def draft(self, rows: int, drafts: int) -> None:
        step = self._handed_over.first(rows, 1 + drafts)
        self._take_in(step.target, step.emitted, step.lanes, step.hidden, drafts)
