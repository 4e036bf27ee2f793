"""KV blocks and their holders: requests, idle sessions, and prefixes that may come again.

A block has *users*, the requests whose block tables name it, and *keepers*: sessions and the index
of prefixes, or states that either keeps. A block with neither is vacant. A block that is only kept
is *idle*: it counts as free, since it is evicted when its place is needed. `Reuse.evict` says what
is evicted, and in which order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from graphengine.routing_record import Ids


class BlockPool:
    """Blocks `first .. first + count - 1`; the vacant block that was freed last is taken first.

    idle      blocks without a user but with a keeper
    indexed   the blocks that the index of prefixes keeps; its owner fills this
    unwanted  the idle blocks that only the index keeps, longest idle first
    evict     called with a number of idle blocks that it must make vacant
    max_idle  most blocks that may be idle: any more are evicted at once; None: no limit
    routes    the page with the experts of a kept block's tokens, by block, if they are recorded
    """

    def __init__(self, count: int, *, first: int = 0, max_idle: int | None = None) -> None:
        self.count = count
        self.max_idle = max_idle
        self.idle: dict[int, None] = {}
        self.indexed: dict[int, bytes] = {}
        # Unlike a dict, it finds its first item quickly after many deletions at the front.
        self.unwanted: OrderedDict[int, None] = OrderedDict()
        self.evict: Callable[[int], None] | None = None
        self.routes: dict[int, Ids] = {}
        self._vacant = list(range(first + count - 1, first - 1, -1))
        self._users = [0] * (first + count)
        self._keepers = [0] * (first + count)

    @property
    def free(self) -> int:
        """Blocks that can be taken: vacant and idle ones."""
        return len(self._vacant) + len(self.idle)

    @property
    def vacant(self) -> int:
        return len(self._vacant)

    def users(self, block: int) -> int:
        return self._users[block]

    def keepers(self, block: int) -> int:
        return self._keepers[block]

    def take(self, count: int) -> list[int]:
        """Take blocks, each then with one user and no other holder; evicts idle ones if needed."""
        assert count <= self.free, f"{count=} of {self.free} free blocks"
        missing = count - len(self._vacant)
        if missing > 0:
            self._make_vacant(missing)
        blocks = [self._vacant.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
            self.routes.pop(block, None)
        return blocks

    def use(self, blocks: Sequence[int]) -> None:
        """Add a user to each of these blocks, which must have a user or keeper already."""
        for block in blocks:
            assert self._users[block] or self._keepers[block], f"{block=} has no user or keeper"
            self.idle.pop(block, None)
            self.unwanted.pop(block, None)
            self._users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Remove a user from each block, and empty `blocks`; the first blocks are evicted last."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"{block=} has no user"
            if self._users[block]:
                continue
            if self._keepers[block]:
                self.idle[block] = None
                self._note_unwanted(block)
            else:
                self._vacant.append(block)
        blocks.clear()
        self._limit()

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a keeper to each of these blocks, which must have a user or keeper already."""
        for block in blocks:
            assert self._users[block] or self._keepers[block], f"{block=} has no user or keeper"
            self._keepers[block] += 1
            self.unwanted.pop(block, None)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Remove a keeper from each of these blocks."""
        for block in reversed(blocks):
            self._keepers[block] -= 1
            assert self._keepers[block] >= 0, f"{block=} has no keeper"
            if self._users[block]:
                continue
            if self._keepers[block]:
                self._note_unwanted(block)
            else:
                del self.idle[block]
                self.unwanted.pop(block, None)
                self._vacant.append(block)

    def _note_unwanted(self, block: int) -> None:
        if self._keepers[block] == 1 and block in self.indexed:
            self.unwanted[block] = None

    def _limit(self) -> None:
        if self.max_idle is not None and len(self.idle) > self.max_idle:
            self._make_vacant(len(self.idle) - self.max_idle)

    def _make_vacant(self, count: int) -> None:
        enough = len(self._vacant) + count
        assert self.evict is not None, f"{len(self.idle)} idle blocks, but nothing evicts them"
        self.evict(count)
        assert len(self._vacant) >= enough, f"{len(self._vacant)} vacant of {enough} blocks"
