"""Which requests are late."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from graphengine.request import Request


class Deadlines:
    """Requests that have a deadline, the next one first.

    `heap` is empty where nobody has one: then there is nothing to ask. Requests that end in time
    are let go as their deadlines pass, or before, once they are the larger part of the heap.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Request]] = []
        self._crowd = 64

    def watch(self, request: Request) -> None:
        """Remember a request that has a deadline."""
        assert request.deadline is not None, f"{request!r} has no deadline"
        heappush(self.heap, (request.deadline, request.id, request))
        if len(self.heap) > self._crowd:
            self.heap = [entry for entry in self.heap if entry[-1].finish_reason is None]
            heapify(self.heap)
            self._crowd = 64 + 2 * len(self.heap)

    def late(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline has come, in the order of deadlines; forgotten now."""
        late = []
        while self.heap and self.heap[0][0] <= now:
            request = heappop(self.heap)[-1]
            if request.finish_reason is None:
                late.append(request)
        return late
