"""Draft lengths by live requests: many requests fill a step by themselves, few leave room for
drafts.

As TensorRT-LLM's `draft_len_schedule`. Pure Python: no tensor, no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from graphengine.options.checks import INT32_MAX, is_int, shown


@dataclass(frozen=True, slots=True)
class DraftSchedule:
    """Drafts a row for each number of live requests.

    `steps` are pairs (live, drafts) in ascending order: a step with up to `live` requests has
    `drafts` drafts a row. With more requests than the last pair has, there are none.

    ValueError unless live requests ascend and drafts fall.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise self._wrong("must have at least one pair (live requests, drafts)")
        for live, drafts in self.steps:
            if not 1 <= live <= INT32_MAX or drafts < 0:
                raise self._wrong(
                    f"must have live requests from 1 to {INT32_MAX} and drafts from 0 up, not "
                    f"{drafts} drafts for up to {live}"
                )
        for (few, before), (many, after) in pairwise(self.steps):
            if many <= few:
                raise self._wrong(f"must have ascending live requests, not {many} after {few}")
            if after >= before:
                raise self._wrong(
                    f"must have fewer drafts for more requests, not {after} after {before}"
                )

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"draft_len_schedule={shown(dict(self.steps))} {why}")

    @classmethod
    def read(cls, value: object) -> Self:
        """Read a mapping, or pairs in tuples or lists. ValueError for anything else."""
        given = list(value.items()) if isinstance(value, Mapping) else value
        pairs: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        for pair in pairs:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_int, pair))):
                raise ValueError(
                    f"draft_len_schedule={shown(value)} must map live requests to drafts, such as "
                    f"{{1: 5, 4: 3}}: {shown(pair)} is no pair of integers"
                )
        if isinstance(value, Mapping):
            # The order of a mapping means nothing.
            pairs.sort()
        return cls(tuple((int(live), int(drafts)) for live, drafts in pairs))

    def check_mode(self, k: int, *, every_length: bool) -> None:
        """ValueError unless the first length is the mode's `k` and the mode can draft the others.

        every_length  whether the mode can draft fewer than k, and not only none
        """
        if self.steps[0][1] != k:
            raise self._wrong(f"must begin with the drafter's k={k} drafts")
        between = [drafts for _, drafts in self.steps if 0 < drafts < k]
        if between and not every_length:
            raise self._wrong(
                f"has {between[0]} drafts, but trees and vanilla modules draft all of k={k} or none"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """All draft lengths, ascending, with 0."""
        return tuple(sorted({0, *(drafts for _, drafts in self.steps)}))

    def drafts(self, live: int) -> int:
        """Drafts a row in a step with `live` requests."""
        step = bisect_left(self.steps, live, key=lambda pair: pair[0])
        return self.steps[step][1] if step < len(self.steps) else 0
