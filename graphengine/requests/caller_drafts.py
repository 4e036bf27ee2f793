"""Drafts that a request's caller proposes, until a step feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallerDrafts:
    """Tokens that a caller proposed and no step has fed yet.

    token_ids  the proposal; empty if there is none
    start      index in the output, from 0, of the first proposed token
    """

    token_ids: tuple[int, ...] = ()
    start: int = 0

    def after(self, said: Sequence[int]) -> tuple[int, ...]:
        """The drafts that follow the output so far, `said`.

        Tokens emitted since the proposal are skipped; if one of them differs from the proposal,
        there are no drafts.
        """
        came = len(said) - self.start
        if not came or not self.token_ids:
            return self.token_ids
        there = tuple(said[self.start : self.start + len(self.token_ids)])
        return self.token_ids[came:] if there == self.token_ids[:came] else ()


NO_DRAFTS = CallerDrafts()
