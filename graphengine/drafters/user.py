"""Drafts that the caller writes before a step; here there is nothing to compute."""

from __future__ import annotations

from torch import Tensor

from graphengine.drafters.base import Drafter, DraftSetting, Prefilled, Verified


class UserDrafter(Drafter):
    """`UserProvided(k)`: `Engine.draft(request, token_ids)` names up to `length` of them a step."""

    host_drafts = True

    def __init__(self, length: int) -> None:
        self.length = length

    def open(self, setting: DraftSetting, cache: Tensor) -> None:
        pass

    def prepare(self, prefilled: Prefilled) -> None:
        pass

    def propose(self, verified: Verified) -> None:
        pass
