"""A grammar as a tree: characters, sequences, choices and repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Sorted, disjoint ranges of code points, both ends included."""

LAST_CHAR = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


class Unsupported(Exception):
    """A grammar that has no automaton, or none within the limits; the message says why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """All parts, one after the other; without parts the empty text."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the options; without options no text at all."""

    options: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The part, `least` to `most` times; None for any number."""

    part: Pattern
    least: int
    most: int | None


Pattern: TypeAlias = Chars | Concat | Either | Repeat

EMPTY = Concat(())


def literal(text: str) -> Pattern:
    """The pattern of one text. Unsupported for a lone surrogate, which UTF-8 does not have."""
    points = [ord(char) for char in text]
    if any(_SURROGATES[0] <= point <= _SURROGATES[1] for point in points):
        raise Unsupported(f"the text {text!r} has a lone surrogate")
    return Concat(tuple(Chars(((point, point),)) for point in points))


def optional(part: Pattern) -> Pattern:
    return Repeat(part, 0, 1)


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    """A set of characters from ranges in any order; surrogates are left out."""
    return Chars(_without(_merged(ranges), (_SURROGATES,)))


def inverted(ranges: Ranges) -> Ranges:
    """All characters that the ranges do not have."""
    return _without(((0, LAST_CHAR),), (*ranges, _SURROGATES))


def common(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters that both have."""
    return _without(ranges, inverted(others))


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The characters of `ranges` that the others do not have."""
    return _without(ranges, others)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without(ranges: Ranges, removed: Sequence[tuple[int, int]]) -> Ranges:
    left = list(ranges)
    for low, high in _merged(removed):
        kept: list[tuple[int, int]] = []
        for first, last in left:
            if last < low or first > high:
                kept.append((first, last))
                continue
            if first < low:
                kept.append((first, low - 1))
            if last > high:
                kept.append((high + 1, last))
        left = kept
    return tuple(left)


# Ends of the code points that UTF-8 writes in 1, 2, 3 and 4 bytes.
_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, LAST_CHAR)


def utf8_sequences(ranges: Ranges) -> list[tuple[tuple[int, int], ...]]:
    """The characters' UTF-8, as sequences of byte ranges. A sequence stands for all combinations of
    its bytes; no combination is in two sequences."""
    found: list[tuple[tuple[int, int], ...]] = []
    for first, last in ranges:
        start = first
        for end in _LENGTH_ENDS:
            if start <= min(last, end):
                _split(chr(start).encode(), chr(min(last, end)).encode(), (), found)
                start = min(last, end) + 1
    return found


def _split(
    low: bytes,
    high: bytes,
    before: tuple[tuple[int, int], ...],
    found: list[tuple[tuple[int, int], ...]],
) -> None:
    """Add the sequences from `low` to `high`, which have the same length."""
    if len(low) == 1:
        found.append((*before, (low[0], high[0])))
        return
    rest = len(low) - 1
    least, most = b"\x80" * rest, b"\xbf" * rest
    if low[0] == high[0]:
        _split(low[1:], high[1:], (*before, (low[0], low[0])), found)
        return
    first, last = low[0], high[0]
    if low[1:] != least:
        _split(low[1:], most, (*before, (first, first)), found)
        first += 1
    if high[1:] != most:
        last -= 1
    if first <= last:
        found.append((*before, (first, last), *((0x80, 0xBF) for _ in range(rest))))
    if high[1:] != most:
        _split(least, high[1:], (*before, (high[0], high[0])), found)
