"""Rings: the KV of layers with a window, which keep only a request's newest tokens.

A layer with a window reads only its window. So its KV needs as many blocks as hold a window and the
tokens of one launch, however long the request is. Block b of a sequence is number b mod R of its R
blocks, so any R * block_size consecutive tokens have places of their own. The kernels do not know
about rings: they find each block through a block table, as in the pool, and a ring's row of the
table repeats its R blocks.

A request takes a ring with its slot, and keeps it while it is paused: nothing is copied out. When a
turn of a session ends, the session keeps the ring, and its next turn continues in it. A sequence
can be rewound as far as its ring has not been overwritten; `WindowRings.reusable` says how far that
is. Features that need a whole prompt's KV cannot use rings: shared prefixes, forks and snapshots of
sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphengine.requests.context import HeldRing

IntArray = NDArray[np.int32]


class WindowRing(NamedTuple):
    """The ring in which layers with the same window keep the KV of a request.

    window  tokens that a query sees, including its own
    layers  indices of these layers among the paged layers
    blocks  R, the blocks of a ring
    """

    window: int
    layers: tuple[int, ...]
    blocks: int

    @property
    def table(self) -> str:
        """Name of the static field with the table of these layers."""
        return f"ring_table_{self.window}"

    def table_row(self, number: int, table_blocks: int) -> IntArray:
        """The block table's row for a sequence whose ring has this number; block 0 is the dummy."""
        block = np.arange(table_blocks, dtype=np.int32) % self.blocks
        return 1 + number * self.blocks + block


def layers_in_rings(rings: Sequence[WindowRing]) -> set[int]:
    """Indices of the paged layers whose KV is in these rings."""
    return {layer for ring in rings for layer in ring.layers}


def ring_blocks(window: int, launch_tokens: int, block_size: int) -> int:
    """Blocks of a ring, for launches of this many tokens of a sequence.

    A launch writes all of its tokens before the first of them reads its window, which includes
    itself.
    """
    return -(-(window - 1 + launch_tokens) // block_size)


class WindowRings:
    """Tracks which rings are taken. A ring's number stands for one ring of each window.

    shapes  the ring of each window; none for a model whose KV is all in the pool
    count   number of rings of each window
    """

    def __init__(self, shapes: Sequence[WindowRing], *, count: int, block_size: int) -> None:
        self._shapes = tuple(shapes)
        self._block_size = block_size
        self._vacant = list(range(count - 1, -1, -1)) if shapes else []

    def __bool__(self) -> bool:
        return bool(self._shapes)

    @property
    def vacant(self) -> int:
        return len(self._vacant)

    def take(self) -> HeldRing:
        """A ring without a holder, for a request that begins at position 0."""
        return HeldRing(number=self._vacant.pop())

    def give_back(self, ring: HeldRing) -> None:
        """Note that the ring's request has ended."""
        assert ring.used, f"{ring=}"
        ring.used = False
        self._free(ring)

    def let_go(self, ring: HeldRing) -> None:
        """Note that the ring's session no longer needs it."""
        assert ring.kept, f"{ring=}"
        ring.kept = False
        self._free(ring)

    def _free(self, ring: HeldRing) -> None:
        if not ring.used and not ring.kept:
            self._vacant.append(ring.number)

    def reusable(self, ring: HeldRing | None, blocks: int) -> int:
        """Number of a sequence's blocks, at most `blocks`, after which a request can continue in
        `ring`.

        0 if its windows would include tokens that have been overwritten.
        """
        if not self._shapes:
            return blocks
        if ring is None:
            return 0
        blocks = min(blocks, ring.tokens // self._block_size)
        return blocks if self._holds(ring, blocks * self._block_size) else 0

    def _holds(self, ring: HeldRing, start: int) -> bool:
        """Whether the ring still has every token that tokens from `start` on see."""
        return all(
            max(0, start - shape.window + 1) >= ring.written - shape.blocks * self._block_size
            for shape in self._shapes
        )


NO_RINGS = WindowRings((), count=0, block_size=1)
"""The rings of a model whose KV is all in the pool."""
