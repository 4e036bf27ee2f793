"""Layout of the one piece of memory that a rank shares with all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphengine.kernels.comm.add_parts_norm import LANE_PROGRAMS, split_words
from graphengine.kernels.comm.all_reduce import all_reduce_words
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import PROGRAMS, UNIT, PeerItems, Peers, item_bytes


class PeerLayout(NamedTuple):
    """Sizes of the parts, in order, in int32 words; each is a multiple of 16 bytes."""

    items: int
    """Size of `PeerItems.items`."""
    summing: int
    """Size of the memory of `all_reduce`."""
    split: int
    """Size of the memory of `add_parts_rms_norm`."""

    @classmethod
    def of(cls, ranks: int, units: int, words: int) -> PeerLayout:
        """Layout for items of `units` units, and for sums of parts of `words` words, which are too
        large to be pushed as items; with 0 words there is no memory for sums.
        """
        return cls(
            items=item_bytes(ranks, units) // 4,
            summing=all_reduce_words(words, ranks),
            split=split_words(words, ranks),
        )

    @property
    def nbytes(self) -> int:
        return 4 * sum(self)


class PeerTensors(NamedTuple):
    """The parts of the memory that ranks push into, on one of them."""

    peers: Peers
    """Memory of items."""
    summing: FlaggedMemory | None
    """Memory of the all-reduce of parts that are too large for items; None: there is none."""
    split: FlaggedMemory | None
    """Memory of the kernel that sums and norms a chunk's lanes; None where `summing` is."""

    @classmethod
    def over(
        cls,
        rank: int,
        layout: PeerLayout,
        words: torch.Tensor,
        addresses: Sequence[int],
        watch: torch.Tensor | None = None,
    ) -> PeerTensors:
        """Memory of ranks that have pushed nothing yet: `words`, int32 [layout.nbytes / 4] zeros,
        are mapped for this rank at `addresses`, one for each rank.

        `watch` is passed to `PeerItems.over_items`.
        """
        items, sums, split = torch.split(words, list(layout))
        items = items.view(torch.int64).view(2, len(addresses), -1, UNIT)
        peers = Peers(rank, PeerItems.over_items(rank, items, addresses, watch))
        if not layout.summing:
            return cls(peers, None, None)
        after_items = [address + items.nbytes for address in addresses]
        after_sums = [address + sums.nbytes for address in after_items]
        return cls(
            peers,
            FlaggedMemory.over(rank, sums, after_items, PROGRAMS),
            FlaggedMemory.over(rank, split, after_sums, LANE_PROGRAMS),
        )
