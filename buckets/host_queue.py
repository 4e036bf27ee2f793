"""A stream of a CPU: work that is queued in an order, and done once somebody waits for it.

On a CPU a copy or a replay is done where it is called. Who has to go on without a wait, as one who
tells other processes what to do meanwhile, queues it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Work = Callable[[], object]


class HostQueue:
    """Work in its order. After an error nothing more is done, as what follows would need it.

    done    calls so far
    queued  and those that are still to be made
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
        """Do the first `until` of all calls that were ever queued; None: all.

        RuntimeError where one of them has failed before, with what it was.
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
