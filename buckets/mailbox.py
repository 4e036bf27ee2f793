"""The mailbox: a pinned ring that a graph's last kernel writes and the host reads without a sync.

An item is one aligned 64-bit word: the replay's sequence number (its low 32 bits, the *tag*) in the
high half and 32 bits of payload in the low half. The device writes it with a single store, so an
item is either wholly old or wholly new. Only its own tag says that it is valid: nothing is
concluded from the order in which items arrive. Replay number `sequence`, counted from 1, writes
entry `sequence % entries`. The reader must have collected an entry before the replay that is
`entries` later is launched.
"""

from __future__ import annotations

import time
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

WaitMode = Literal["spin", "yield", "block"]
"""How the host waits: polling, yielding its core between polls, or sleeping between them."""
Payloads = list[tuple[int, ...]]
"""The payloads of each lane's items, each 0..2**32-1."""

TAG_MASK = 0xFFFF_FFFF
_MODES = get_args(WaitMode)
STREAM_CHECK_SECONDS = 2e-3
BLOCK_SECONDS = 50e-6


class MailboxBroken(RuntimeError):
    """The replay waited for will never publish: the stream failed, or finished without it."""


class Queryable(Protocol):
    """A stream as it is used here: `query()`, True when idle, raises after a sticky CUDA error."""

    def query(self) -> bool: ...


class Mailbox:
    """A ring of `entries` x `lanes` x `items_per_lane` self-tagged 64-bit items.

    `tensor` is the int64 tensor [entries, lanes, items_per_lane] that the publishing kernel is
    given; pinned host memory for a CUDA device, ordinary memory for the CPU, or `words`, which
    another process may read through a mailbox of its own. It lives, at one address, until the
    mailbox is dropped. ValueError for `words` of another shape or dtype.
    """

    def __init__(
        self,
        entries: int,
        lanes: int,
        items_per_lane: int = 2,
        *,
        device: torch.device | str,
        words: torch.Tensor | None = None,
    ) -> None:
        if min(entries, lanes, items_per_lane) < 1:
            raise ValueError(f"a mailbox of {entries} entries x {lanes} lanes x {items_per_lane}")
        self.entries = entries
        self.lanes = lanes
        self.items_per_lane = items_per_lane
        shape = (entries, lanes, items_per_lane)
        if words is None:
            on_gpu = torch.device(device).type == "cuda"
            words = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        if words.shape != shape or words.dtype != torch.int64:
            raise ValueError(
                f"words are {words.dtype} {list(words.shape)}, for a mailbox of int64 {list(shape)}"
            )
        self.tensor = words
        self._items: NDArray[np.uint64] = self.tensor.numpy().view(np.uint64)
        # Every host of a CUDA device is little-endian: a word's high half is its second.
        self._tags: NDArray[np.uint32] = self._items.view(np.uint32).reshape(
            entries, lanes, items_per_lane, 2
        )[..., 1]
        # For reading: a Python memoryview costs a third of NumPy's calls on so few items.
        self._words = self._items.reshape(-1).data
        # Where the payload of each item of a lane is among the 32-bit halves, low half first.
        self._columns = [slice(2 * i, None, 2 * items_per_lane) for i in range(items_per_lane)]
        self._stream_checked_at = time.perf_counter()

    def clear(self, sequence: int = 0) -> None:
        """Forget everything; `sequence` is the last replay launched, `sequence + 1` comes next.

        Only with no replay in flight. The tags are set to `sequence`, which no entry will wait
        for again within 2**32 replays.
        """
        self._items[...] = (sequence & TAG_MASK) << 32

    def ready(self, sequence: int, lanes: int) -> bool:
        """True if every item of the first `lanes` lanes of replay `sequence` has arrived."""
        self._check(sequence, lanes)
        return self._arrived(sequence, lanes) is not None

    def read(self, sequence: int, lanes: int) -> Payloads:
        """A copy of the payloads of replay `sequence`: for each lane the integers of its items.

        RuntimeError if an item of those lanes has not arrived.
        """
        self._check(sequence, lanes)
        payloads = self._take(sequence, lanes)
        if payloads is None:
            raise RuntimeError(
                f"replay {sequence} is not there yet: {self._found(sequence, lanes)}"
            )
        return payloads

    def wait(
        self,
        sequence: int,
        lanes: int,
        *,
        timeout: float | None = None,
        limit: float = 30.0,
        mode: WaitMode = "spin",
        stream: Queryable | None = None,
    ) -> Payloads | None:
        """The payloads of replay `sequence` as from `read`, once its first `lanes` lanes arrived.

        None if they have not within `timeout` seconds; 0 looks once, None waits without a timeout.
        No wait goes beyond `limit` seconds. "spin" polls without a pause, "yield" yields the
        processor between polls, "block" sleeps 50 us between them. Every 2 ms, across calls,
        `stream`, on which the replay was launched, is queried for errors.

        Raises TimeoutError after `limit`, with the awaited tag and the tags that were found;
        MailboxBroken when the stream reports an error (its cause), or is idle and the replay has
        not published, even if it was not launched yet.
        """
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} is none of {', '.join(_MODES)}")
        self._check(sequence, lanes)
        started = now = time.perf_counter()
        while True:
            payloads = self._take(sequence, lanes)
            if payloads is not None:
                return payloads
            if stream is not None and now - self._stream_checked_at >= STREAM_CHECK_SECONDS:
                self._check_stream(stream, sequence, lanes)
                self._stream_checked_at = now
            if timeout is not None and now - started >= timeout:
                return None
            if now - started >= limit:
                raise TimeoutError(
                    f"waited {limit:g} s for replay {sequence}: {self._found(sequence, lanes)}"
                )
            if mode == "yield":
                time.sleep(0)
            elif mode == "block":
                time.sleep(BLOCK_SECONDS)
            now = time.perf_counter()

    def _check(self, sequence: int, lanes: int) -> None:
        if sequence < 1:
            raise ValueError(f"replay {sequence}: replays are counted from 1")
        if not 1 <= lanes <= self.lanes:
            raise ValueError(f"{lanes} lanes of a mailbox of {self.lanes}")

    def _tags_of(self, sequence: int, lanes: int) -> NDArray[np.uint32]:
        self._check(sequence, lanes)
        return self._tags[sequence % self.entries, :lanes]

    def _take(self, sequence: int, lanes: int) -> Payloads | None:
        halves = self._arrived(sequence, lanes)
        if halves is None:
            return None
        return list(zip(*[halves[column].tolist() for column in self._columns], strict=True))

    def _arrived(self, sequence: int, lanes: int) -> memoryview | None:
        """A copy of the items' 32-bit halves, payloads first; None if an item has another tag."""
        count = lanes * self.items_per_lane
        start = sequence % self.entries * self.lanes * self.items_per_lane
        # Copied first, then checked: on a processor that reorders loads (Grace), a tag read before
        # its payload would prove nothing. A copy of aligned words never splits a word.
        halves = memoryview(self._words[start : start + count].tobytes()).cast("I")
        # As bytes, since each integer would be made first.
        if halves[1::2].tobytes() != (sequence & TAG_MASK).to_bytes(4, "little") * count:
            return None
        return halves

    def _check_stream(self, stream: Queryable, sequence: int, lanes: int) -> None:
        try:
            idle = stream.query()
        except Exception as cause:
            raise MailboxBroken(f"the stream failed before replay {sequence}: {cause}") from cause
        # Read again after the query: a finished kernel's stores are visible by then.
        if idle and not self.ready(sequence, lanes):
            raise MailboxBroken(
                f"replay {sequence} finished without publishing, or was never launched: the stream "
                f"is idle; {self._found(sequence, lanes)}"
            )

    def _found(self, sequence: int, lanes: int) -> str:
        tags = self._tags_of(sequence, lanes).copy()
        missing = np.flatnonzero((tags != (sequence & TAG_MASK)).any(axis=1)).tolist()
        shown = ", ".join(f"{lane}: {tags[lane].tolist()}" for lane in missing[:8])
        return (
            f"entry {sequence % self.entries} of {self.entries} expects tag {sequence & TAG_MASK}, "
            f"{len(missing)} of {lanes} lanes miss it; tags found in lane {shown}"
            f"{', ...' if len(missing) > 8 else ''}"
        )
