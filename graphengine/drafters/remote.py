"""Drafts that another pipeline stage makes: this stage feeds them, and makes none."""

from __future__ import annotations

from dataclasses import replace

from graphengine.buckets import Field
from graphengine.drafters.base import Drafter, FieldSizes, Prefilled, Verified
from graphengine.drafters.needs import DraftNeeds


class RemoteDrafter(Drafter):
    """A stage's part of `other`, the drafter on the stage that has the target's last layer."""

    def __init__(self, other: Drafter) -> None:
        needs, whole = DraftNeeds(), other.needs
        self.needs = replace(needs, length=whole.length, host_drafts=whole.host_drafts)
        self._other = other

    def fields(self, sizes: FieldSizes) -> list[Field]:
        # The host's fields have the same layout on all stages.
        return [field for field in self._other.fields(sizes) if field.owner == "host"]

    def prepare(self, prefilled: Prefilled) -> None:
        pass

    def propose(self, verified: Verified) -> None:
        pass
