"""The recorder's two types of records, and the ring that holds records of one type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("decode", "prefill")
REASONS = ("stop", "length", "cancelled", "error", "deadline")
STAMPS = ("plan", "load", "replay", "launched", "collect", "read", "delivered")
STAGES = {
    "plan": ("plan", "load"),
    "load": ("load", "replay"),
    "launch": ("replay", "launched"),
    "wait": ("collect", "read"),
    "deliver": ("read", "delivered"),
}
"""Parts of a step on the host, each between two times. All but "wait" are work.

"load" ends with the first launch of its step: `first_launches`.
"""
NEVER = -1
"""Stands for a missing time."""

REPLAY = np.dtype(
    [
        ("recording", "<i8"),
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
        ("steps", "<i4"),
        ("discarded", "<i4"),
        ("device_us", "<f8"),
        ("collect", "<i8"),
        ("read", "<i8"),
        ("delivered", "<i8"),
        ("emitted", "<i4"),
        ("drafted", "<i4"),
        ("accepted", "<i4"),
        ("lanes", "<i4"),
        ("skew_us", "<f8"),
        ("last_rank", "<i8"),
        ("cpu_ns", "<i8"),
        ("preempted", "<i4"),
        ("yielded", "<i4"),
    ]
)
"""One replay of a graph of one step, or one step of a launch of several. Times are nanoseconds of
`time.perf_counter_ns`, `NEVER` where one is missing.

recording      number of the `start()` before it, from 1
step           number of the recorder's step, from 0
sequence       the engine's number of it
prompt_tokens  tokens that a prefill fed
bucket         index into `Recorder.buckets`
rows, live     rows of the bucket, and how many of them served a request; for a prefill the tokens
               of the bucket, and how many of them were prompt tokens
width          tokens fed to a row: 1 and its drafts
kind           index into `KINDS`
steps          decode steps of its launch
discarded      tokens that were sampled and not given to requests, as these had ended
device_us      microseconds between the events around its launch, divided by `steps`; NaN if
               unknown, as on a CPU. On an idle stream it includes the launch's latency
emitted        tokens given to requests
drafted        drafts that were verified
accepted       verified drafts that were right
lanes          requests in it, once it was read; 0 until then
skew_us        microseconds from the driver's launch of it until the last other rank launched it, or
               on a CPU began it; negative where that one was earlier. NaN if unknown, as with one
               rank
last_rank      which rank that was; `NEVER` if unknown
cpu_ns         for how long the thread that read its tokens had run by then, in all; `NEVER` if
               unknown, as for the next two
preempted      how often that thread had lost its core to others by then; on a CPU all threads of
               the process
yielded        how often it had given its core away by then, to sleep or to wait
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
"""One finished request; times as in `REPLAY`, `reason` an index into `REASONS`."""


def first_launches(load: NDArray[Any], replay: NDArray[Any]) -> NDArray[Any]:
    """The `replay` time of the first replay of each replay's step, in launch order.

    Replays of one step share their `load`; the `replay` of a later one comes after earlier
    launches, which are not part of loading.
    """
    _, first, step = np.unique(load, return_index=True, return_inverse=True)
    return replay[first][step]


class Ring:
    """`capacity` records of one type; once full, the newest replaces the oldest.

    array   the records, number n at `n % capacity`; each may have `width` values
    memory  the bytes of `array`, for `struct.pack_into`, which writes neighbouring fields in one
            call
    made    records written so far; the writer counts each
    """

    def __init__(self, dtype: Any, capacity: int, width: int | None = None) -> None:
        self.capacity = capacity
        shape = (capacity,) if width is None else (capacity, width)
        self.array: NDArray[Any] = np.empty(shape, dtype)
        # Writing zeros touches every page, so that no page fault comes on the hot path.
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
        """The records: a view that further ones change, or a copy once the ring has wrapped round.

        made  number of records written; given when another ring is written in step with this one
        """
        made = self.made if made is None else made
        if made <= self.capacity:
            return self.array[:made]
        return np.roll(self.array, -(made % self.capacity), axis=0)
