"""Finds requests that are past their deadlines."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from graphengine.requests.request import Request


class Deadlines:
    """Requests that have a deadline, the next one first.

    `heap` is empty if no request has one, so callers can skip all calls. Requests that end in time
    are dropped when their deadlines pass, or earlier, once they are more than half of the heap.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Request]] = []
        self._crowd = 64

    def watch(self, request: Request) -> None:
        """Remember a request that has a deadline."""
        deadline = request.job.deadline
        assert deadline is not None, f"{request!r} has no deadline"
        heappush(self.heap, (deadline, request.id, request))
        if len(self.heap) > self._crowd:
            self.heap = [entry for entry in self.heap if entry[-1].finish_reason is None]
            heapify(self.heap)
            self._crowd = 64 + 2 * len(self.heap)

    def late(self, now: float) -> list[Request]:
        """Remove and return unfinished requests past their deadlines, earliest deadline first."""
        late = []
        while self.heap and self.heap[0][0] <= now:
            request = heappop(self.heap)[-1]
            if request.finish_reason is None:
                late.append(request)
        return late
