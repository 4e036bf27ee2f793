"""The interface of a scheduler to the rest of the engine, for one rank or for several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from graphengine.host.block_pool import BlockPool
from graphengine.host.scheduler import Move, Scheduler
from graphengine.requests.context import Context
from graphengine.requests.request import Request


class Scheduling(Protocol):
    """The interface of a scheduler; `Scheduler` documents each member."""

    counters: Counter[str]
    moves: list[tuple[Move, int]]

    @property
    def active(self) -> Sequence[Request]: ...
    @property
    def waiting(self) -> Collection[Request]: ...
    @property
    def busy(self) -> bool: ...
    @property
    def guided(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def width(self) -> int: ...
    @width.setter
    def width(self, width: int) -> None: ...
    @property
    def pools(self) -> Sequence[BlockPool]:
        """The pool of each rank's KV blocks."""
        ...

    def home(self, context: Context) -> Scheduler:
        """The scheduler of the rank whose blocks the context keeps."""
        ...

    def check_queue(self, count: int = 1) -> None: ...
    def submit(self, request: Request) -> None: ...
    def collected(self, request: Request, width: int, count: int) -> None: ...
    def retire(self, request: Request) -> None: ...
    def close(self) -> None: ...
