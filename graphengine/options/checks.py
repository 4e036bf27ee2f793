"""Checks of the numbers that options take: one set of rules for all options.

Integers are Python's and NumPy's; numbers are integers, floats and fractions. True and a Decimal
are neither. Checked values are stored as Python's own numbers, as NumPy's overflow.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeGuard

INT32_MAX = 2**31 - 1
_SHOWN_CHARACTERS = 100


def shown(value: object) -> str:
    """A value in an error message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes integers of more than 4,300 digits only if it is told to.
        if is_int(value):
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} with an integer too long to print"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to print"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer, NumPy's included; True and 1.0 are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number, NumPy's and fractions included; True is not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_number(name: str, value: object) -> None:
    """ValueError unless `value` is a real number as for `is_number`."""
    if not is_number(value):
        raise ValueError(f"{name}={shown(value)} must be a number")


def check_callable(name: str, value: object) -> None:
    """ValueError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r} cannot be called")


def is_finite(value: float) -> bool:
    """Whether `value` is a finite number that a float can hold: an integer may be too large."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def seconds(name: str, value: object) -> float:
    """A time as a float, infinite if it is too large for one; ValueError for NaN or no number."""
    if not is_number(value) or value != value:
        raise ValueError(f"{name}={value!r} must be seconds, or None")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def keep_plain_numbers(options: Any) -> None:
    """Store Python's own numbers in the fields of a frozen dataclass that was checked."""
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        if is_int(value):
            object.__setattr__(options, name, int(value))
        elif is_number(value):
            object.__setattr__(options, name, float(value))


def check_path(name: str, value: object) -> None:
    """ValueError unless `value` is a path that is not empty."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{name}={value!r} must be a path")


def check_at_least(name: str, value: object, least: int, most: int = INT32_MAX) -> None:
    """ValueError unless `value` is an integer from `least` to `most`."""
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} must be an integer in [{least}, {most}]")


def some(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names and how many more there are, as text for messages."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
