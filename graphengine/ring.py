"""What the recorder keeps: two types of records, and the ring that holds one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("decode", "prefill", "draft")
REASONS = ("stop", "length", "cancelled", "error")
STAMPS = ("plan", "load", "replay", "launched", "collect", "read", "delivered")
STAGES = {
    "plan": ("plan", "load"),
    "load": ("load", "replay"),
    "launch": ("replay", "launched"),
    "wait": ("collect", "read"),
    "deliver": ("read", "delivered"),
}
"""Parts of a step on the host, each between two times. "wait" is the one that is no work."""
NEVER = -1
"""A time that did not come."""

REPLAY = np.dtype(
    [
        ("step", "<i8"),
        ("sequence", "<i8"),
        ("plan", "<i8"),
        ("load", "<i8"),
        ("replay", "<i8"),
        ("launched", "<i8"),
        ("prompt_tokens", "<i4"),
        ("bucket", "<i4"),
        ("rows", "<i4"),
        ("live", "<i4"),
        ("width", "<i4"),
        ("kind", "<i4"),
        ("device_us", "<f8"),
        ("collect", "<i8"),
        ("read", "<i8"),
        ("delivered", "<i8"),
        ("emitted", "<i4"),
        ("drafted", "<i4"),
        ("accepted", "<i4"),
        ("lanes", "<i4"),
    ]
)
"""One replay. Times are nanoseconds of `time.perf_counter_ns`, `NEVER` where one did not come.

step           which of the recorder's steps launched it, from 0
sequence       the engine's number of the replay; of a draft graph, of the decode replay before it
prompt_tokens  fed by a prefill
bucket         index into `Recorder.buckets`
rows, live     rows of the bucket, and those of them that served a request; of a prefill the tokens
               of the bucket, and the prompt tokens among them
width          tokens that a row was fed: 1 and its drafts
kind           index into `KINDS`
device_us      microseconds between the events around it; NaN if unknown, as on a CPU. On a stream
               that was idle the launch's way to the device is in it
emitted        tokens that requests were given
drafted        drafts that were verified
accepted       those of them that were right
lanes          requests that were read; 0 until then
"""

FINISHED = np.dtype(
    [
        ("id", "<i8"),
        ("submitted", "<i8"),
        ("first", "<i8"),
        ("finished", "<i8"),
        ("prompt_tokens", "<i4"),
        ("new_tokens", "<i4"),
        ("reason", "<i4"),
        ("pauses", "<i4"),
    ]
)
"""One finished request; times as of `REPLAY`, `reason` an index into `REASONS`."""


class Ring:
    """`capacity` records of one type, the newest in place of the oldest once it is full.

    array   the records, number n at `n % capacity`; each may have `width` values
    memory  its bytes, for `struct.pack_into`, which writes neighbouring fields in one call
    made    records written so far; whoever writes one counts it
    """

    def __init__(self, dtype: Any, capacity: int, width: int | None = None) -> None:
        self.capacity = capacity
        shape = (capacity,) if width is None else (capacity, width)
        self.array: NDArray[Any] = np.empty(shape, dtype)
        # Zeros are written, which touches every page: none is missing on the hot path.
        every_byte = self.array.reshape(-1).view(np.uint8)
        every_byte.fill(0)
        self.memory = every_byte.data
        self.stride = self.array.strides[0]
        self.made = 0

    def __len__(self) -> int:
        return min(self.made, self.capacity)

    @property
    def dropped(self) -> int:
        """Records that were overwritten."""
        return self.made - len(self)

    def oldest_first(self, made: int | None = None) -> NDArray[Any]:
        """Its records: a view that further ones change, or a copy once the ring has come round.

        made  to be told where another ring is written beside this one
        """
        made = self.made if made is None else made
        if made <= self.capacity:
            return self.array[:made]
        return np.roll(self.array, -(made % self.capacity), axis=0)
