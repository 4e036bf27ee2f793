"""Times in a unit of their magnitude, and counts of things, for people."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of time, and its microseconds."""

    name: str
    us: float


US, MS, S = UNITS = (Unit("us", 1.0), Unit("ms", 1e3), Unit("s", 1e6))
MOST = 10_000
"""A table has one unit for all its times: the smallest in which they are fewer than this."""


def unit_for(us: float, least: Unit = US) -> Unit:
    """The unit of a table whose largest time is `us`, `least` or larger."""
    allowed = UNITS[UNITS.index(least) :]
    return next((unit for unit in allowed if us < MOST * unit.us), S)


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun: 1 replay, 1,200 replays. `many` is where an s is not enough."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def duration(us: float, least: Unit = US) -> str:
    """A time in the largest unit in which it is at least 1: 0.45 us, 12.1 us, 902 us, 3.04 ms.

    With `least` milliseconds one decimal more: 0.090 ms, 3.035 ms, 18.20 ms, 319.7 ms.
    """
    unit = next((unit for unit in UNITS[:0:-1] if abs(us) >= unit.us), least)
    value = us / unit.us
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    digits += unit is least is MS
    return f"{value:,.{digits}f} {unit.name}"
