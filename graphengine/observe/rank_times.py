"""A recorder's facts about an engine's ranks: which launched last, and how long the driver
waited.
"""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from graphengine.observe.ring import NEVER

UNKNOWN_LAUNCH = (math.nan, NEVER)


class RankTimes(Protocol):
    """Facts about an engine's ranks, which its runtime provides.

    count   number of ranks, including the driver's
    option  the engine's option that asks for them, as `tensor_parallel=2`
    """

    @property
    def count(self) -> int: ...

    @property
    def option(self) -> str: ...

    def last_launch(self, sequence: int, when: int) -> tuple[float, int]:
        """Microseconds from `when`, the driver's launch of replay `sequence`, until the last other
        rank launched it, and which rank that was; `UNKNOWN_LAUNCH` where a time is not there.
        """
        ...

    def waited_s(self) -> float | None:
        """Seconds that the driver's rank has waited for the others' parts since the engine opened.

        On a GPU it reads the device. None where nothing counts it.
        """
        ...


class OneRank:
    """A `RankTimes` of an engine that has no other ranks."""

    count, option = 1, ""

    def last_launch(self, sequence: int, when: int) -> tuple[float, int]:
        return UNKNOWN_LAUNCH

    def waited_s(self) -> float | None:
        return None


class WaitMeter:
    """Adds up the waits of `ranks` between starts and stops; it reads the time only at these."""

    def __init__(self, ranks: RankTimes) -> None:
        self._ranks = ranks
        # When the recorder began, the seconds waited until then, and the step before.
        self._began: tuple[float, float | None, int] | None = None
        self._waited: float | None = 0.0
        self._seconds, self._steps = 0.0, 0

    def start(self, step: int) -> None:
        """The recorder begins, after its step of this number."""
        self._began = time.perf_counter(), self._ranks.waited_s(), step

    def stop(self, step: int) -> None:
        """The recorder ends, after this step; does nothing if it had not begun."""
        if self._began is None:
            return
        began, waited, first = self._began
        now = self._ranks.waited_s()
        more = None if now is None or waited is None else now - waited
        self._waited = None if self._waited is None or more is None else self._waited + more
        self._seconds += time.perf_counter() - began
        self._steps += step - first
        self._began = None

    def clear(self) -> None:
        """Forget the sums; a recorder that has begun begins again, before step 0."""
        self._waited, self._seconds, self._steps = 0.0, 0.0, 0
        if self._began is not None:
            self.start(NEVER)

    def described(self) -> dict[str, Any]:
        """`waited_s`, and the `seconds` and `steps` that it covers. `waited_s` is None where it is
        unknown, as between a start and its stop.
        """
        known = self._began is None
        return {
            "waited_s": self._waited if known else None,
            "seconds": self._seconds,
            "steps": self._steps,
        }
