"""The version of an engine's weights, whether its drafter's are older than the model's, and which
memory is released.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from graphengine.options.checks import some


@dataclass(kw_only=True, slots=True)
class WeightState:
    """The version of an engine's weights.

    version      0 as opened; each update raises it, or gives it
    given        names of the tensors that updates of this version brought
    given_drafts the same of tensors of the drafter's own checkpoint
    stale_drafts why the drafter's weights are older than the model's; None while they are not
    drafts_off   whether steps feed no drafts for that reason
    released     what `release_memory` has released: the weights, the KV cache
    missing      names of the tensors that were dropped with the weights and not updated since
    """

    version: int = 0
    given: set[str] = field(default_factory=set)
    given_drafts: set[str] = field(default_factory=set)
    stale_drafts: str | None = None
    drafts_off: bool = False
    released: tuple[str, ...] = ()
    missing: set[str] = field(default_factory=set)

    def check_there(self) -> None:
        """ValueError while memory is released, or dropped weights have not been updated."""
        if self.released:
            what = " and ".join(self.released)
            raise ValueError(f"{what} of the engine are released: restore_memory() first")
        if self.missing:
            raise ValueError(
                f"the weights were dropped, and {len(self.missing)} tensors have not come with "
                f"update_weights() since: {some(sorted(self.missing))}"
            )

    def updated(self, names: Collection[str], version: int | None) -> None:
        """Note an update; without a number it is a version of its own."""
        if version is None or version != self.version:
            self.given.clear()
            self.given_drafts.clear()
        self.version = self.version + 1 if version is None else version
        self.given.update(names)
