"""What a rank gives all others in one piece of memory, and in what order."""

from __future__ import annotations

from typing import NamedTuple

from graphengine.kernels.comm.add_parts_norm import split_words
from graphengine.kernels.comm.all_reduce import all_reduce_words
from graphengine.kernels.comm.items import item_bytes


class PeerLayout(NamedTuple):
    """In int32 words, each a multiple of 16 bytes."""

    items: int
    """Of `PeerItems.items`."""
    summing: int
    """What `all_reduce` has."""
    split: int
    """What `add_parts_rms_norm` has."""

    @classmethod
    def of(cls, ranks: int, units: int, words: int) -> PeerLayout:
        """For items of so many units, and sums of parts of so many words that are too large for
        them; none with 0 words.
        """
        return cls(
            items=item_bytes(ranks, units) // 4,
            summing=all_reduce_words(words, ranks),
            split=split_words(words, ranks),
        )

    @property
    def nbytes(self) -> int:
        return 4 * sum(self)
