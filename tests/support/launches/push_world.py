"""Ranks that push in one process: several buffers, which run one after the other. Those that have
not run yet have stored their items by the plain twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphengine.kernels.comm.items import (
    UNIT,
    PeerItems,
    Peers,
    push_words_reference,
)

Launch = Callable[[Peers, Any], Any]


class World:
    """Ranks after as many launches as `tag` says, with garbage in all items."""

    def __init__(self, ranks: int, units: int, tag: int = 0) -> None:
        garbage = torch.randint(0, 2**32, (ranks, 2, ranks, units, UNIT))
        for half in range(2):
            # Each has the last of its own tags.
            last = tag if tag % 2 == half else tag - 1
            garbage[:, half] |= last << 32
        self.items = list(garbage)
        addresses = [items.data_ptr() for items in self.items]
        self.peers = [
            Peers(rank, PeerItems.over_items(rank, items, addresses))
            for rank, items in enumerate(self.items)
        ]
        for peers in self.peers:
            peers.tensors.tags.fill_(tag)
            peers.tensors.watch[1] = 2**40

    def store(self, rank: int, part: torch.Tensor, row: int) -> None:
        """What a rank stores of this part, whose every `row` words begin a unit: whole units."""
        self._push(self.items, rank, part, row)

    def store_own(self, rank: int, parts: torch.Tensor, row: int) -> None:
        """Store the parts for each rank."""
        for items, part in zip(self.items, parts, strict=True):
            self._push([items], rank, part, row)

    def _push(self, items: list[torch.Tensor], rank: int, part: torch.Tensor, row: int) -> None:
        self.store_words(items, rank, units_of(part, row))

    def store_words(self, items: list[torch.Tensor], rank: int, words: torch.Tensor) -> None:
        """What it stores of int32 words, the first of the memory."""
        at = torch.arange(words.numel()).view(words.shape)
        push_words_reference(items, rank, words, at, self.peers[rank].tensors.tags)

    def run(
        self,
        launch: Launch,
        parts: Sequence[Any],
        row: int,
        order: list[int],
        store: Callable[..., None] | None = None,
    ) -> list[Any]:
        """What each rank gets, when they come in this order."""
        store, found = store or self.store, dict[int, Any]()
        for done, rank in enumerate(order):
            for other in order[done + 1 :]:
                store(other, parts[other], row)
            # So that it must store what it takes from itself.
            self.items[rank][:, rank] = -1 << 40
            found[rank] = launch(self.peers[rank], parts[rank])
        return [found[rank] for rank in range(len(parts))]


def units_of(part: torch.Tensor, row: int) -> torch.Tensor:
    """The words of a part, whose every `row` of them begin a unit: int32, UNIT columns."""
    rows = part.contiguous().view(torch.int32).reshape(-1, row)
    return torch.nn.functional.pad(rows, (0, -row % UNIT)).reshape(-1, UNIT)
