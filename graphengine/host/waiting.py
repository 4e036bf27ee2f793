"""The queue of requests that wait for a slot, of one scheduler or of all ranks together, and the
requests that have deadlines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from heapq import heapify, heappop, heappush

from graphengine.requests.request import QueueFull, Request


def has_room(waiting: int, vacant: int, limit: int | None, count: int = 1) -> bool:
    """Whether `count` more requests may wait. Of the `waiting` and new requests, `vacant` get a
    slot at once, and do not count.
    """
    return limit is None or waiting + count - vacant <= limit


def check_queue(waiting: int, vacant: int, limit: int | None, count: int) -> None:
    """QueueFull unless the queue `has_room` for `count` more requests."""
    if not has_room(waiting, vacant, limit, count):
        more = "another one" if count == 1 else f"{count} more"
        slots = f" and {vacant} vacant slots" if vacant else ""
        raise QueueFull(
            f"{max(0, waiting - vacant)} requests wait already: {more} would exceed "
            f"max_waiting={limit}{slots}"
        )


def enqueue(waiting: deque[Request], request: Request) -> None:
    """Add a request after those of the same or a lower priority number."""
    if waiting and waiting[-1].priority > request.priority:
        place = bisect_right(waiting, request.priority, key=lambda other: other.priority)
        waiting.insert(place, request)
    else:
        waiting.append(request)


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
