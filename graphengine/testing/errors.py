"""The error of a failing check, and how pytest shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


class GraphCheckError(AssertionError):
    """A check found a fault; the message says what happened and where."""


def hide_frame(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """The `__tracebackhide__` of the checks' modules: a fault is shown at the test's own line.

    Other errors keep all their frames.
    """
    return error.errisinstance(GraphCheckError)
