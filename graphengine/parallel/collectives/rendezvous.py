"""The rendezvous of a group's ranks when they open, through files that all of them name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from graphengine.models.launches import Share

LOOK_S = 0.2
"""Longest time between two checks whether waiting still makes sense."""
PAUSE_S = 2e-3
"""Pause between two attempts to find a rank."""


class GroupError(RuntimeError):
    """A rank is gone, did not come in time, or is at another step than the others."""


class Rendezvous:
    """Where rank `share.rank` waits for the other ranks, for at most `limit_s` seconds in all.

    file   beginning of the files' names
    check  called while this rank waits; raises where another rank will never come
    """

    def __init__(
        self,
        file: str,
        share: Share,
        limit_s: float,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.file, self.share, self.limit_s, self._check = file, share, limit_s, check
        self._deadline = time.perf_counter() + limit_s

    @cached_property
    def store(self) -> Any:
        """Torch's store in a file, for groups of torch."""
        store = torch.distributed.FileStore(self.file, self.share.ranks)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.limit_s))
        return store

    def left_s(self, missing: Sequence[int]) -> float:
        """Seconds left for these ranks to come. GroupError where none are left."""
        self._check()
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise GroupError(
                f"rank {self.share.rank} of {self.share.ranks} waited {self.limit_s:g} s for "
                f"{named(missing)} at the rendezvous"
            )
        return left

    def exchange(self, name: str, own: bytes) -> list[bytes]:
        """The value of each rank under this name, `own` for this one; waits for all ranks."""
        keys = [f"{name}/{rank}" for rank in range(self.share.ranks)]
        self.store.set(keys[self.share.rank], own)
        for rank, key in enumerate(keys):
            while not self.store.check([key]):
                self.left_s([rank])
                time.sleep(PAUSE_S)
        return [bytes(self.store.get(key)) for key in keys]


def named(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, for messages."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"
