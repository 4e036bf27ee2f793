"""No drafts: the drafter of an engine that does not speculate, so no code asks whether it does."""

from __future__ import annotations

from graphengine.drafters.base import Drafter, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds


class NoDrafter(Drafter):
    """`speculative=None`: it needs nothing, and its share of each graph is empty."""

    needs = DraftNeeds()

    def prepare(self, prefilled: Prefilled) -> None:
        pass

    def propose(self, verified: Verified) -> None:
        pass
