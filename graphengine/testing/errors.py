"""The error of a failing check, and how pytest shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class GraphCheckError(AssertionError):
    """A check found a fault; the message says what happened and where."""


MOST_LISTED = 10


def listed(items: Sequence[str]) -> str:
    """The first items for a message, and how many more there are."""
    more = len(items) - MOST_LISTED
    return "; ".join(items[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")


def hide_frame(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """The `__tracebackhide__` of the checks' modules: pytest shows a fault at the test's own line.

    Other errors keep all their frames.
    """
    return error.errisinstance(GraphCheckError)
