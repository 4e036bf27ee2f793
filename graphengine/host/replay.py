"""A replay in flight, as the host remembers it until its record is read."""

from __future__ import annotations

from typing import NamedTuple

from graphengine.host.plan import PrefillChunk
from graphengine.requests.request import Request


class Replay(NamedTuple):
    """One replay in flight: lane i of its mailbox entry belongs to `requests[i]` in `epochs[i]`.

    A row emits up to `width` tokens: 1, and one more for each draft that was verified. A prefill
    fed `chunk`; a decode ran in a bucket of `rows`. A `full` replay may have published
    log-probabilities. The mailbox is that of `rank`.
    """

    sequence: int
    requests: tuple[Request, ...]
    epochs: tuple[int, ...]
    width: int
    rows: int = 0
    chunk: PrefillChunk | None = None
    full: bool = False
    rank: int = 0
