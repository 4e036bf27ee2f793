"""Drafts that a request's caller proposes, until a step feeds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallerDrafts:
    """Tokens that a caller proposed and no step has fed yet.

    token_ids  the proposal; empty for none
    start      the output token that the first of them stands for, counted from 0
    """

    token_ids: tuple[int, ...] = ()
    start: int = 0

    def after(self, said: Sequence[int]) -> tuple[int, ...]:
        """Drafts for the tokens after the output so far, `said`.

        Tokens that came since the proposal are skipped; if one of them differs from the proposal,
        there are no drafts.
        """
        came = len(said) - self.start
        if not came or not self.token_ids:
            return self.token_ids
        there = tuple(said[self.start : self.start + len(self.token_ids)])
        return self.token_ids[came:] if there == self.token_ids[:came] else ()


NO_DRAFTS = CallerDrafts()
