"""Who is told which experts a decode step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from graphengine.kernels import Routes

Observer = Callable[[Routes, Tensor], None]
"""Gets the routes of the lanes of a layer, and their slots `[N]`, -1 for a padded lane."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_routes(observer: Observer) -> Iterator[None]:
    """Have `observer` called in each layer of the decode steps that are run eagerly meanwhile.

    A graph that was captured before does not call it.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def tell_routes(routes: Routes, slot_N: Tensor) -> None:
    """Call the observer, if there is one."""
    observer = _observer.get()
    if observer is not None:
        observer(routes, slot_N)
