"""The base of all drafters' options: a mode says what its drafter can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from graphengine.kernels.step.record import MAX_DRAFTS
from graphengine.options.checks import is_int
from graphengine.options.drafts.draft_trees import Tree


@dataclass(frozen=True, slots=True)
class Mode(ABC):
    """A drafter's options: a frozen, slotted dataclass derives from this.

    It states what the configuration must know before the drafter is made. The drafter's `needs`
    have the rest, and must agree. No other code asks which mode it is.
    """

    lockstep: ClassVar[bool] = False
    """Whether each step is read before the next is launched: `lookahead` is then 0."""
    whole_prompts: ClassVar[bool] = False
    """Whether every prompt is prefilled from its first token, and has one new token."""
    in_stages: ClassVar[bool] = True
    """Whether it drafts where the stages of a pipeline split the target's layers."""
    trims_vocabulary: ClassVar[bool] = False
    """Whether it can draft from a part of the target's vocabulary."""
    guided: ClassVar[bool] = False
    """Whether it drafts only for requests whose grammar the device follows."""
    own_drafts: ClassVar[bool] = False
    """Whether every draft must be its own, as the host writes them, or its KV is right only after
    its own drafts.
    """

    packs_prompts: ClassVar[bool] = True
    """Whether `prepare` takes the chunks of several prompts at once."""

    @property
    @abstractmethod
    def k(self) -> int:
        """Most drafts a step; for a tree, its number of nodes."""

    @property
    def shape(self) -> Tree | None:
        """The shape of the drafts' tree; None: chains."""
        return None

    @property
    def any_length(self) -> bool:
        """Whether a step may make any number of drafts up to k, not only k or none."""
        return self.shape is None

    @property
    def jumps(self) -> bool:
        """Whether text that a grammar forces may replace its drafts."""
        return self.k > 0 and self.shape is None and not self.own_drafts

    @property
    def on_data_ranks(self) -> bool:
        """Whether it drafts on ranks that have requests of their own."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """One line for reports, such as "mtp eagle, k=3"."""

    def describe_state(self) -> str:
        """One line for snapshots with the drafter's KV: they fit only an engine with the same one.

        Paths are left out: snapshots compare the weights themselves.
        """
        return self.describe()

    def takes(self, option: str) -> bool:
        """Whether it has an option of this name."""
        return any(field.name == option for field in fields(self))

    def with_options(self, **changes: Any) -> Self:
        """A copy with these options. ValueError for values that it does not take."""
        return replace(self, **changes)


def check_drafts(k: int) -> None:
    """Raise ValueError unless a step may have `k` drafts a row."""
    if not is_int(k) or not 1 <= k <= MAX_DRAFTS:
        raise ValueError(f"k={k!r} drafts a step must be an integer in [1, {MAX_DRAFTS}]")
