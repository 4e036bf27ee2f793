"""Checks of arguments: refuse arguments that would leave a check nothing to check."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import AsyncGenerator, Coroutine, Generator


def require_callable(name: str, value: object) -> None:
    """ValueError unless `value`, the argument `name`, can be called."""
    if not callable(value):
        raise ValueError(f"{name}={value!r} is not callable: give a function without arguments")


def require_end(result: object) -> None:
    """ValueError if `result` is a generator or coroutine, whose body did not run."""
    if isinstance(result, Coroutine | Generator | AsyncGenerator):
        if not isinstance(result, AsyncGenerator):
            result.close()  # so that Python does not also warn about it
        raise ValueError(
            f"the call returned a {type(result).__name__}, so none of its body ran: give a "
            "function that runs to its end, without `yield` or `async`"
        )


def integer(name: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int; ValueError, with the number, for another type or outside of the limits."""
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is no integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r} is no integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} must be at most {most}")
    return number


def integers(
    name: str, values: object, *, least: int | None = None, most: int | None = None
) -> tuple[int, ...]:
    """All of `values`, at least one, each checked by `integer`; an iterator is consumed here."""
    try:
        found: tuple[object, ...] = tuple(values)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={values!r} is no sequence of integers") from None
    if not found:
        raise ValueError(f"{name}=() leaves nothing to check")
    return tuple(integer(f"an element of {name}", item, least=least, most=most) for item in found)


def number(
    name: str, value: object, *, least: float = 0.0, most: float = math.inf, zero: bool = True
) -> float:
    """`value` as a float; ValueError for another type and NaN, and outside of the limits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} is no number")
    if isinstance(value, int) and value > sys.float_info.max:
        raise ValueError(f"{name}={value} must be at most {sys.float_info.max:g}")
    if not least <= value <= most or (value == 0 and not zero):
        wanted = f"at least {least:g}" if zero else "greater than 0"
        raise ValueError(f"{name}={value} must be {wanted} and at most {most:g}")
    return float(value)
