"""The version of an engine's weights, and whether its drafter's are older than the model's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class WeightState:
    """The version of an engine's weights.

    version      0 as opened; each update raises it, or gives it
    given        names of the tensors that updates of this version brought
    given_drafts the same of tensors of the drafter's own checkpoint
    stale_drafts why the drafter's weights are older than the model's; None while they are not
    drafts_off   whether steps feed no drafts for that reason
    """

    version: int = 0
    given: set[str] = field(default_factory=set)
    given_drafts: set[str] = field(default_factory=set)
    stale_drafts: str | None = None
    drafts_off: bool = False

    def updated(self, names: Collection[str], version: int | None) -> None:
        """Note an update; without a number it is a version of its own."""
        if version is None or version != self.version:
            self.given.clear()
            self.given_drafts.clear()
        self.version = self.version + 1 if version is None else version
        self.given.update(names)
