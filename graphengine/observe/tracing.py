"""NVTX ranges, which a profiler shows in addition to CUDA's own calls.

One domain, `graphengine`; the first part of a range's name is its category:

    step/plan       scheduling of one step
    step/load       staging and copy of the host-owned fields that changed
    step/replay     launches of one step
    step/launch     both, where ranks have requests of their own
    step/collect    waiting for the oldest step in flight, and reading its tokens
    prefill         the launch of a prompt's chunk, inside step/replay
    compile         kernels of all graphs, compiled or read from disk
    capture/BUCKET  warm-up and capture of one graph
    load            weights onto the device

A range's payload packs two counts, `rows << 32 | live`: rows of the bucket, and how many of them
serve a request (`unpack` takes it apart). For a prefill they are the bucket's tokens and the prompt
tokens fed; for step/plan, which has no bucket yet, 0 and the requests that hold a slot. If a step
decodes nothing, its rows are 0. The payload of capture/BUCKET, compile and load is 0: a capture's
rows are in its name, and the others have none.

A range in the code of a captured step fires once, at capture: a replay runs no Python. So all of
these ranges are around launches and none is inside a graph.

Tools attach when a process first calls NVTX, so `enabled` never changes. Without a tool, without
the nvtx package or with NVTX_DISABLE=1 no range is made: `span` always returns the same object,
which does nothing. Even that costs too much four times a step, so the ranges of a step are put
around its methods (`ranged`), and only where a tool listens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])

nvtx: Any = None
with suppress(ImportError):
    nvtx = importlib.import_module("nvtx")

DOMAIN = "graphengine"
COLORS = {
    "step": 0xFF2E7D32,
    "prefill": 0xFF1565C0,
    "capture": 0xFFEF6C00,
    "load": 0xFF6A1B9A,
    "compile": 0xFF9E9D24,
}
"""Colour of each category, as ARGB."""


class Domain(Protocol):
    """The part of an NVTX domain used here. The attributes are None if no tool listens."""

    def get_event_attributes(
        self, *, message: str, color: int, category: str, payload: int
    ) -> Any: ...

    def push_range(self, attributes: Any) -> None: ...

    def pop_range(self) -> None: ...


class _Nothing:
    """The range without a tool: does nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    # Three named parameters cost less than a tuple of them.
    def __exit__(self, _kind: object, _error: object, _trace: object, /) -> None:
        pass


NOTHING = _Nothing()


class _Range:
    """A range that may be entered again and again; it holds no state of its own."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Domain, attributes: Any) -> None:
        self._domain = domain
        self._attributes = attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()


class Tracer:
    """The ranges of one domain, each made once; always `NOTHING` without a domain."""

    __slots__ = ("_domain", "_ranges")

    def __init__(self, domain: Domain | None) -> None:
        self._domain = domain
        # One for each name and pair of counts: some hundreds.
        self._ranges: dict[tuple[str, int], _Range] = {}

    @property
    def enabled(self) -> bool:
        """Whether ranges reach a tool."""
        return self._domain is not None

    def span(self, name: str, rows: int = 0, live: int = 0) -> AbstractContextManager[None]:
        """The range `name` with the payload of `rows` and `live`, for a `with` statement."""
        if self._domain is None:
            return NOTHING
        key = (name, rows << 32 | live)
        found = self._ranges.get(key)
        if found is None:
            category = name.partition("/")[0]
            attributes = self._domain.get_event_attributes(
                message=name, color=COLORS[category], category=category, payload=key[1]
            )
            found = self._ranges[key] = _Range(self._domain, attributes)
        return found


def unpack(payload: int) -> tuple[int, int]:
    """(rows, live) from a range's payload."""
    return payload >> 32, payload & 0xFFFF_FFFF


def open_domain() -> Domain | None:
    """The domain `graphengine`; None where no tool listens to it, or NVTX is off or missing."""
    if nvtx is None or not nvtx.enabled():
        return None
    domain: Domain = nvtx.get_domain(DOMAIN)
    attributes = domain.get_event_attributes(
        message="load", color=COLORS["load"], category="load", payload=0
    )
    return None if attributes is None else domain


tracer = Tracer(open_domain())
"""The tracer of this process."""
span = tracer.span


def ranged(name: str, counts: Callable[..., tuple[int, int]]) -> Callable[[Method], Method]:
    """Makes each call of a method a range `name`, whose (rows, live) `counts` returns from the
    method's arguments. Where no tool listens, the method is left unchanged and costs nothing extra.
    """

    def decorate(method: Method) -> Method:
        def traced_by(tracer: Tracer) -> Callable[..., Any]:
            @wraps(method)
            def call(*arguments: Any) -> Any:
                with tracer.span(name, *counts(*arguments)):
                    return method(*arguments)

            return call

        # For tests, which set their tracers later.
        vars(method)["traced_by"] = traced_by
        return cast(Method, traced_by(tracer)) if tracer.enabled else method

    return decorate
