"""The experts that a request's tokens took.

Letters: T tokens, L layers with experts, k chosen of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphengine.routing_record import UNKNOWN, Ids


class RecordedRoutes:
    """The experts of each token that was fed, in pages of as many tokens as a KV block has.

    A page belongs to the holders of its block: requests and sessions with the same blocks share it,
    and see later writes to it.

    pages  int16 [block_size, L, k] each, UNKNOWN where nothing has been recorded
    fed    number of tokens up to the last one whose record was read
    """

    def __init__(self, block_size: int, layers: int, top_k: int) -> None:
        self.pages: list[Ids] = []
        self.fed = 0
        self._shape = (block_size, layers, top_k)

    def share(self, pages: Sequence[Ids | None]) -> None:
        """Begin with the pages of kept blocks; None for a block whose experts are not known."""
        self.pages = [self._new_page() if page is None else page for page in pages]

    def pages_until(self, count: int) -> list[Ids]:
        """The first `count` pages; makes those that do not exist yet."""
        while len(self.pages) < count:
            self.pages.append(self._new_page())
        return self.pages[:count]

    def put(self, start: int, ids: Ids) -> None:
        """Note the ids [T, L, k] of the tokens from position `start` on."""
        size, done = self._shape[0], 0
        while done < len(ids):
            index, offset = divmod(start + done, size)
            page = self.pages_until(index + 1)[index]
            part = ids[done : done + size - offset]
            page[offset : offset + len(part)] = part
            done += len(part)
        self.fed = start + done

    def array(self, tokens: int) -> Ids:
        """A copy of the experts of the first `tokens` tokens."""
        size, layers, top_k = self._shape
        used = self.pages[: -(-tokens // size)]
        assert len(used) * size >= tokens, f"{tokens=} of {len(self.pages)} pages"
        if not used:
            return np.zeros((0, layers, top_k), np.int16)
        return np.concatenate(used)[:tokens]

    def _new_page(self) -> Ids:
        return np.full(self._shape, UNKNOWN, np.int16)
