"""Layout of the one piece of memory that a rank shares with all others."""

from __future__ import annotations

from typing import NamedTuple

from graphengine.kernels.comm.add_parts_norm import split_words
from graphengine.kernels.comm.all_reduce import all_reduce_words
from graphengine.kernels.comm.items import item_bytes


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
