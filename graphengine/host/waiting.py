"""The queue of requests that wait for a slot, of one scheduler or of all ranks together."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

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
