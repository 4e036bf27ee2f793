"""Embeddings or codes that stream into frames: a ring of rows for each slot, and how the host fills
it.

A frame's row must be on the device before its step is launched, and may be overwritten once that is
launched, as copies and replays share one stream. So a slot's ring has rows for the next frames that
are not launched; they are copied several at a time, and only where the next launch needs one that
is not there yet. Frames from the slot's bound on get the pad.

Letters: S slots, R rows of a ring, H hidden, P codes of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.buckets import Field, LaneUpdate, StaticBuffers
from graphengine.drafters import FieldSizes
from graphengine.host.step_plan import Plan
from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.frames.embed import Fed, FedCodes, FedRows
from graphengine.models.inner.drawn import FrameCoder, FrameWeights
from graphengine.models.inner.weights import InnerWeights
from graphengine.requests.frames import StreamedRows
from graphengine.requests.request import Request

FED_ROWS, FED_BOUND = "fed_rows", "fed_bound"
FED_RING = 16
"""Rows of a slot's ring, at least as many as a launch has steps."""
PADDED = "feed/padded"
"""Counter of launched frames that got the pad, including frames past a reply's end."""


def fed_fields(config: FrameCoder, sizes: FieldSizes, steps: int) -> list[Field]:
    """Fields of the rows that stream into the frames of each slot; empty for a model that takes
    none.

    steps  of a launch, at most

    The host writes bits, as NumPy does not know every dtype.
    """
    if not config.fed:
        return []
    ring, books = max(FED_RING, steps), config.fed_books
    return [
        Field(
            name=FED_ROWS,
            shape=(sizes.slots * (ring + 1), books or config.width),
            dtype=torch.int32 if books else BITS[sizes.dtype.itemsize],
            owner="host",
            pad=0,
            meaning=f"for each slot, {ring} rows to add to frames, and the pad",
            # Copied only when a launch needs rows that are not there.
            group="fed_rows",
        ),
        Field(
            name=FED_BOUND,
            shape=(sizes.slots,),
            dtype=torch.int32,
            owner="host",
            pad=0,
            meaning="frames at positions from here on get the pad",
            group="fed_bound",
        ),
    ]


def fed_rows(weights: FrameWeights, buffers: StaticBuffers) -> Fed | None:
    """The rows that stream in, as the kernel reads them."""
    config = weights.config
    if not config.fed:
        return None
    bound, rows = buffers[FED_BOUND], buffers[FED_ROWS]
    if isinstance(weights, InnerWeights) and weights.fed_codes is not None:
        return FedCodes(rows.view(len(bound), -1, config.fed_books), bound, weights.fed_codes)
    return FedRows(rows.view(weights.frames.dtype).view(len(bound), -1, config.width), bound)


class Feeds:
    """The host's side of the fields of `fed_fields`; it keeps its own copy of their rows.

    fields    the engine's fields
    slots     S
    counters  gets `PADDED`
    """

    def __init__(self, fields: Sequence[Field], slots: int, counters: Counter[str]) -> None:
        rows = next(field for field in fields if field.name == FED_ROWS)
        count, hidden = rows.shape
        self._ring = count // slots - 1
        dtype = np.dtype(f"i{rows.dtype.itemsize}")
        self._rows: NDArray[Any] = np.zeros((slots, self._ring + 1, hidden), dtype)
        self._bound = [0] * slots
        self._held: list[Request | None] = [None] * slots
        self._counters = counters
        self._changed: list[int] = []

    def updates(self, plan: Plan, slots: Sequence[Request | None]) -> dict[str, Any]:
        """The fields that a plan needs, and note that its frames are launched."""
        self._changed.clear()
        begun = False
        if plan.slots_changed:
            for slot, request in enumerate(slots):
                begun |= self._begin(slot, request)
        for request in plan.rows:
            streamed = request.job.streamed
            assert streamed is not None, f"{request!r} has no pad"
            stop = streamed.launched + plan.steps
            if streamed.loaded < min(stop, streamed.ready):
                self._load(request, streamed)
            self._counters[PADDED] += stop - max(streamed.launched, min(streamed.bound, stop))
            streamed.launched = stop
        updates: dict[str, Any] = {}
        if self._changed:
            first, last = min(self._changed), max(self._changed)
            lanes = self._rows.reshape(-1, self._rows.shape[-1])
            updates[FED_ROWS] = LaneUpdate(first, lanes[first : last + 1])
        if self._changed or begun:
            updates[FED_BOUND] = self._bound
        return updates

    def _begin(self, slot: int, request: Request | None) -> bool:
        """Forget the rows of the request that had the slot; returns whether another request has it
        now.
        """
        if request is self._held[slot]:
            return False
        self._held[slot], self._bound[slot] = request, 0
        streamed = None if request is None else request.job.streamed
        if streamed is not None:
            self._put(slot, self._ring, streamed.pad[0])
        return True

    def _load(self, request: Request, streamed: StreamedRows) -> None:
        """Fill the request's ring with the rows of its next frames."""
        slot, position = request.job.placed.slot, request.job.prompt_len
        first = max(streamed.loaded, streamed.launched)
        stop = min(streamed.ready, streamed.launched + self._ring)
        for frame, row in enumerate(streamed.between(first, stop), first):
            self._put(slot, (position + frame) % self._ring, row)
        streamed.loaded = stop
        self._bound[slot] = position + stop

    def _put(self, slot: int, place: int, row: NDArray[Any]) -> None:
        self._rows[slot, place] = row
        self._changed.append(slot * (self._ring + 1) + place)


def new_feeds(fields: Sequence[Field], slots: int, counters: Counter[str]) -> Feeds | None:
    """The host's side of rows that stream into frames; None for an engine whose frames take
    none.
    """
    if all(field.name != FED_ROWS for field in fields):
        return None
    return Feeds(fields, slots, counters)
