"""Drafts of the text that grammars force, and no others.

The step writes them whatever the drafter (`LogitsStep.draft_forced`): here a slot only begins
without drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.drafters.base import Drafter, DraftSetting, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds
from graphengine.drafters.target import Target
from graphengine.options.drafts.jump_forward import JumpForward


class JumpForwardDrafter(Drafter):
    """`JumpForward(k)`."""

    def __init__(self, length: int) -> None:
        # Where nothing is forced there are no drafts: a gate learns from these steps, too.
        self.needs = DraftNeeds(length=length, guided=True, withholds=True)

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        self._draft_tokens = setting.buffers["draft_tokens"]

    def prepare(self, prefilled: Prefilled) -> None:
        chunk, table = prefilled.chunk, self._draft_tokens
        live = chunk.slot.index_select(0, chunk.last)
        slot = live.clamp(min=0).long()
        before = table.index_select(0, slot)
        table.index_copy_(0, slot, torch.where(live[:, None] >= 0, -1, before))

    def propose(self, verified: Verified) -> None:
        # Verification has cleared the drafts that it used.
        pass


def make_jump_forward(options: JumpForward, target: Target) -> Drafter:
    """The drafter of these options. ValueError for an engine whose device follows no grammars."""
    if not target.config.grammar_pool_mib:
        raise ValueError(
            f"speculative={options!r} drafts text of grammars that the device follows: that takes "
            f"grammar_pool_mib, which is 0"
        )
    return JumpForwardDrafter(options.k)
