"""Drafts that the caller writes before a step; here there is nothing to compute."""

from __future__ import annotations

from graphengine.drafters.base import Drafter, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds


class UserDrafter(Drafter):
    """`UserProvided(k)`: `Engine.draft(request, token_ids)` names up to `length` of them a step."""

    def __init__(self, length: int) -> None:
        self.needs = DraftNeeds(length=length, host_drafts=True)

    def prepare(self, prefilled: Prefilled) -> None:
        pass

    def propose(self, verified: Verified) -> None:
        pass
