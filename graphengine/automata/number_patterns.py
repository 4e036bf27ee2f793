"""Patterns of JSON's numbers within bounds, as llguidance has them.

A bounded number has no exponent, and its digits are compared as text: the whole part first, then
the digits after the point. Bounds that are no whole numbers come as decimals.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import NamedTuple

from graphengine.automata.patterns import (
    EMPTY,
    Chars,
    Concat,
    Either,
    Pattern,
    Repeat,
    Unsupported,
    literal,
    optional,
)

_MOST_DIGITS = 18
"""llguidance reads whole parts in 64 bits."""


class Bounds(NamedTuple):
    """Bounds of a number; None for none."""

    low: float | None = None
    high: float | None = None
    includes_low: bool = True
    includes_high: bool = True


def _digits(first: int, last: int) -> Pattern:
    return Chars(((48 + first, 48 + last),))


_DIGIT = _digits(0, 9)
_SOME_DIGITS = Repeat(_DIGIT, 1, None)
_ANY_DIGITS = Repeat(_DIGIT, 0, None)
_MINUS, _POINT, _ZERO = literal("-"), literal("."), literal("0")
_FRACTION = optional(Concat((_POINT, _SOME_DIGITS)))
_WHOLE = Either((_ZERO, Concat((_digits(1, 9), _ANY_DIGITS))))
_SIGN = Chars(((43, 43), (45, 45)))
_EXPONENT = optional(Concat((Chars(((69, 69), (101, 101))), optional(_SIGN), _SOME_DIGITS)))


def whole_number(bounds: Bounds) -> Pattern:
    """The pattern of integers within bounds."""
    low, high = bounds.low, bounds.high
    if low is not None:
        low = math.floor(low) + 1 if not bounds.includes_low else math.ceil(low)
    if high is not None:
        high = math.ceil(high) - 1 if not bounds.includes_high else math.floor(high)
    if low is not None and high is not None and low > high:
        raise Unsupported(f"no integer is from {low} to {high}")
    return _integers(low, high)


def _integers(low: int | None, high: int | None) -> Pattern:
    if low is None and high is None:
        return Concat((optional(_MINUS), _WHOLE))
    if low is not None and low >= 0:
        return _naturals(low, high)
    if high is not None and high < 0:
        return Concat((_MINUS, _naturals(-high, None if low is None else -low)))
    # Only between two bounds may zero have a sign.
    least = 0 if low is not None and high is not None else 1
    below = Concat((_MINUS, _naturals(least, None if low is None else -low)))
    return Either((below, _naturals(0, high)))


def _naturals(low: int, high: int | None) -> Pattern:
    """Numbers from `low` up, 0 or more, without a sign."""
    if max(low, high or 0) >= 10**_MOST_DIGITS:
        raise Unsupported(f"it bounds a number by more than {_MOST_DIGITS} digits")
    options: list[Pattern] = []
    length = len(str(low))
    last = length if high is None else len(str(high))
    for digits in range(length, last + 1):
        least = low if digits == length else 10 ** (digits - 1)
        most = high if high is not None and digits == last else 10**digits - 1
        options.append(_between(str(least), str(most)))
    if high is None:
        options.append(Concat((_digits(1, 9), Repeat(_DIGIT, length, None))))
    return options[0] if len(options) == 1 else Either(tuple(options))


def _between(low: str, high: str) -> Pattern:
    """Digits from `low` to `high`, two texts of the same length."""
    if not low:
        return EMPTY
    first, last = int(low[0]), int(high[0])
    if first == last:
        return Concat((literal(low[0]), _between(low[1:], high[1:])))
    rest = len(low) - 1
    options: list[Pattern] = [Concat((literal(low[0]), _between(low[1:], "9" * rest)))]
    if first + 1 < last:
        options.append(Concat((_digits(first + 1, last - 1), Repeat(_DIGIT, rest, rest))))
    options.append(Concat((literal(high[0]), _between("0" * rest, high[1:]))))
    return Either(tuple(options))


def any_number(bounds: Bounds) -> Pattern:
    """The pattern of numbers within bounds."""
    low, high, includes_low, includes_high = bounds
    if low is None and high is None:
        return Concat((optional(_MINUS), _WHOLE, _FRACTION, _EXPONENT))
    if low is not None and high is None:
        if low < 0:
            below = any_number(Bounds(low, 0.0, includes_low, False))
            return Either((below, any_number(Bounds(0.0, None))))
        length = len(str(int(low)))
        near = any_number(Bounds(low, float(10**length), includes_low, False))
        far = Concat((_digits(1, 9), Repeat(_DIGIT, length, None), _FRACTION))
        return Either((near, far))
    assert high is not None, f"{bounds=}"
    if low is None:
        if high < 0:
            return _negative(Bounds(-high, None, includes_high))
        options = [_negative(Bounds(0.0, None, False))]
        if high > 0:
            options.append(any_number(Bounds(0.0, high, True, includes_high)))
        elif includes_high:
            options.append(_ZERO)
        return Either(tuple(options))
    if low == high:
        return literal(_text(low))
    if low >= 0:
        return _positive(_text(low), _text(high), includes_low, includes_high)
    if high < 0:
        return _negative(Bounds(-high, -low, includes_high, includes_low))
    options = [_negative(Bounds(0.0, -low, False, includes_low))]
    if high > 0:
        options.append(any_number(Bounds(0.0, high, True, includes_high)))
    elif includes_high:
        # llguidance reads a bound of zero as the digit alone.
        options.append(literal(_text(high)))
    return Either(tuple(options))


def _negative(bounds: Bounds) -> Pattern:
    return Concat((_MINUS, any_number(bounds)))


def _text(number: float) -> str:
    """The number's shortest digits, without an exponent."""
    text = format(Decimal(repr(float(number))), "f")
    return text.removesuffix(".0")


def _positive(low: str, high: str, includes_low: bool, includes_high: bool) -> Pattern:
    """Numbers between two that differ, neither below zero."""
    low_part, _, low_rest = low.partition(".")
    high_part, _, high_rest = high.partition(".")
    first, last = int(low_part), int(high_part)
    if max(first, last) >= 10**_MOST_DIGITS:
        raise Unsupported(f"it bounds a number by more than {_MOST_DIGITS} digits")
    if first == last:
        length = max(len(low_rest), len(high_rest))
        low_rest, high_rest = low_rest.ljust(length, "0"), high_rest.ljust(length, "0")
        inner = Concat((_POINT, _fractions(low_rest, high_rest, includes_low, includes_high)))
        starts_at_zero = not low_rest.strip("0")
        return Concat((literal(low_part), optional(inner) if starts_at_zero else inner))
    options: list[Pattern] = []
    if low_rest or not includes_low:
        above = _fraction_from(low_rest, includes_low)
        options.append(Concat((literal(low_part), _POINT, above)))
        first += 1
    if last > first:
        options.append(Concat((_naturals(first, last - 1), _FRACTION)))
    if high_rest:
        below = Concat((_POINT, _fraction_to(high_rest, includes_high)))
        options.append(Concat((literal(high_part), optional(below))))
    elif includes_high:
        zeros = Concat((_POINT, Repeat(_ZERO, 1, None)))
        options.append(Concat((literal(high_part), optional(zeros))))
    return Either(tuple(options))


def _fraction_from(low: str, includes: bool) -> Pattern:
    """Digits after a point that are not below `low`."""
    if not low:
        return _ANY_DIGITS if includes else Concat((_ANY_DIGITS, _digits(1, 9)))
    if includes and len(low) == 1:
        return Concat((_digits(int(low), 9), _ANY_DIGITS))
    options: list[Pattern] = [Concat((literal(low[0]), _fraction_from(low[1:], includes)))]
    if low[0] != "9":
        options.append(Concat((_digits(int(low[0]) + 1, 9), _ANY_DIGITS)))
    return Either(tuple(options))


def _fraction_to(high: str, includes: bool) -> Pattern:
    """Digits after a point that are not above `high`."""
    if not high:
        return EMPTY
    first = int(high[0])
    lower = Concat((_digits(0, max(first - 1, 0)), _ANY_DIGITS))
    if not includes and len(high) == 1:
        assert first, f"{high=} ends in zero"
        return lower
    same = Concat((literal(high[0]), _fraction_to(high[1:], includes)))
    return Either((same, lower)) if first else same


def _fractions(low: str, high: str, includes_low: bool, includes_high: bool) -> Pattern:
    """Digits after a point, between two texts of digits of the same length."""
    assert low != high, f"{low=}"
    if low[0] == high[0]:
        rest = _fractions(low[1:], high[1:], includes_low, includes_high)
        return Concat((literal(low[0]), rest))
    first, last = int(low[0]), int(high[0])
    above = _fraction_from(low[1:].rstrip("0"), includes_low)
    options: list[Pattern] = [Concat((literal(low[0]), above))]
    if first + 1 < last:
        options.append(Concat((_digits(first + 1, last - 1), _ANY_DIGITS)))
    digits = high[1:].rstrip("0")
    if digits or includes_high:
        options.append(Concat((literal(high[0]), _fraction_to(digits, includes_high))))
    return Either(tuple(options))
