"""How long replays take on the device: pairs of CUDA events around them, in a ring.

A timing event costs a call into CUDA and a timestamp on the device, and never a wait: a time is
read when a later replay shows that it is there. Events are made once. When the ring wraps round, an
event is recorded again and its old time is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import math

import torch

from graphengine.buckets.runtime import runtime


class ReplayTimer:
    """`pairs` pairs of events on `stream`, numbered from 0.

    Recording one is a call into CUDA's runtime, as for a replay, or uses torch's events where
    torch's runtime library was not found. The constructor records every event once, as CUDA creates
    an event when it is first recorded.
    """

    def __init__(self, stream: torch.cuda.Stream, pairs: int) -> None:
        self.pairs = pairs
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2 * pairs)
        ]
        for event in self._events:
            event.record(stream)
        self._library = runtime()
        self._handles = [ctypes.c_void_p(event.cuda_event) for event in self._events]
        self._stream = stream
        self._stream_handle = ctypes.c_void_p(stream.cuda_stream)
        self._milliseconds = ctypes.c_float()
        self._result = ctypes.byref(self._milliseconds)

    def begin(self, pair: int) -> None:
        """Record the first event: `pair` times the next replay on the stream."""
        self._record(2 * pair)

    def end(self, pair: int) -> None:
        """Record the second event: `pair` timed the latest replay on the stream."""
        self._record(2 * pair + 1)

    def _record(self, index: int) -> None:
        if self._library is None:
            self._events[index].record(self._stream)
        elif self._library.cudaEventRecord(self._handles[index], self._stream_handle):
            self._library.cudaGetLastError()

    def microseconds(self, pair: int) -> float:
        """Time between the events of `pair`; NaN where the device has not passed both."""
        before, after = 2 * pair, 2 * pair + 1
        if self._library is None:
            return _by_torch(self._events[before], self._events[after])
        handles = self._handles[before], self._handles[after]
        if self._library.cudaEventElapsedTime(self._result, *handles):
            self._library.cudaGetLastError()
            return math.nan
        return 1e3 * self._milliseconds.value


def _by_torch(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    with contextlib.suppress(RuntimeError):
        if after.query():  # type: ignore[no-untyped-call]
            milliseconds: float = before.elapsed_time(after)
            return 1e3 * milliseconds
    return math.nan
