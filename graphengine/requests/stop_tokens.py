"""The tokens that end a request. Stop strings are found in its text instead: `text/stopping.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """The stop tokens of one request.

    ids        every single id that ends the request, for the device
    eos_ids    the `ids` that come from the checkpoint
    tokens     the `ids` that the caller named as single tokens
    sequences  the caller's stop sequences
    in_text    whether a stop token is part of the text that it ends; sequences always are
    """

    ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    in_text: bool = False

    def reason(self, token_ids: Sequence[int]) -> int | tuple[int, ...] | None:
        """The stop token or sequence at the end of `token_ids`, which has one; None for EOS."""
        token = token_ids[-1]
        if token in self.eos_ids:
            return None
        if token in self.tokens:
            return token
        return next(ids for ids in self.sequences if tuple(token_ids[-len(ids) :]) == ids)

    def hides(self, token: int) -> bool:
        """Whether this token's text is left out because it ends the request."""
        return not self.in_text and (token in self.eos_ids or token in self.tokens)
