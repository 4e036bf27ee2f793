"""A stream for a CPU: work is queued in order, and done once somebody waits for it.

On a CPU a copy or a replay is done within its call. A caller that must not wait, such as one that
sends commands to other processes first, queues it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Work = Callable[[], object]


class HostQueue:
    """Queued calls, made in order. After an error no more are made: later ones may depend on it.

    done    calls made so far
    queued  calls made so far and still to be made
    """

    __slots__ = ("_failed", "_work", "done")

    def __init__(self) -> None:
        self._work: deque[Work] = deque()
        self._failed: BaseException | None = None
        self.done = 0

    @property
    def queued(self) -> int:
        return self.done + len(self._work)

    def add(self, work: Work) -> None:
        """Queue a call."""
        self._work.append(work)

    def run(self, until: int | None = None) -> None:
        """Make the first `until` of all calls that were ever queued; None: all.

        RuntimeError, with the earlier error, if one of them has failed before.
        """
        until = self.queued if until is None else until
        while self.done < until:
            if self._failed is not None:
                raise RuntimeError(
                    f"call {self.done} of {self.queued} has failed before: {self._failed!r}"
                ) from self._failed
            work = self._work.popleft()
            self.done += 1
            try:
                work()
            except BaseException as error:
                self._failed = error
                raise
