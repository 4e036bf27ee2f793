"""The options of jump-forward: drafts of the text that grammars force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphengine.options.checks import keep_plain_numbers
from graphengine.options.drafts.mode import Mode, check_drafts


@dataclass(frozen=True, slots=True)
class JumpForward(Mode):
    """Drafts are the text that a request's grammar forces, as the tokenizer spells it.

    k  most drafts per step

    For an engine with `grammar_pool_mib`, and for requests whose grammar the device follows. While
    there are none, steps have no drafts.
    """

    k: int = 4

    guided: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_drafts(self.k)
        keep_plain_numbers(self)

    def describe(self) -> str:
        return f"jump-forward, k={self.k}"
