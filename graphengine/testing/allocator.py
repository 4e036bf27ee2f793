"""The memory that torch's allocator holds on the current device: segments, pools and blocks."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Pool = tuple[int, int]
"""The id of a memory pool."""

DEFAULT_POOL: Pool = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory that was given out as one tensor's storage, or is cached for another."""

    address: int
    size: int
    in_use: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Memory that the allocator has from the driver."""

    address: int
    size: int
    pool: Pool
    blocks: tuple[Block, ...]

    def block_at(self, address: int) -> Block | None:
        return find(self.blocks, address)


class _Range(Protocol):
    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...


Memory = TypeVar("Memory", bound=_Range)


def find(ranges: Sequence[Memory], address: int) -> Memory | None:
    """The range that `address` lies in; `ranges` are sorted by address and do not overlap."""
    place = bisect_right(ranges, address, key=lambda each: each.address) - 1
    if place < 0 or address >= ranges[place].address + ranges[place].size:
        return None
    return ranges[place]


def read_segments() -> list[Segment]:
    """All segments of the current device, sorted by address."""
    device = torch.cuda.current_device()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    found = [_segment(each) for each in segments if each["device"] == device]
    return sorted(found, key=lambda segment: segment.address)


def _segment(found: Mapping[str, Any]) -> Segment:
    first, second = found.get("segment_pool_id", DEFAULT_POOL)
    blocks, address = [], int(found["address"])
    for block in found["blocks"]:
        in_use = block["state"] == "active_allocated"
        blocks.append(Block(address=address, size=int(block["size"]), in_use=in_use))
        address += int(block["size"])
    return Segment(
        address=int(found["address"]),
        size=int(found["total_size"]),
        pool=(int(first), int(second)),
        blocks=tuple(blocks),
    )


_MOST_EVENTS = 100_000


class Frees:
    """Blocks that were freed while `recording`: {address: where, as "file.py:12 in function"}."""

    def __init__(self) -> None:
        self.places: dict[int, str] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the blocks freed in the `with` block. This ends a recording of the program's own.

        Nothing is recorded in a process that does not use CUDA.
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            yield
            return
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=_MOST_EVENTS
        )
        earlier = len(_events())
        try:
            yield
        finally:
            events = _events()[earlier:]
            torch.cuda.memory._record_memory_history(None)
            for event in events:
                if event["action"] == "free_requested":
                    self.places[int(event["addr"])] = _place(event.get("frames", ()))


def _events() -> list[dict[str, Any]]:
    """The events that the allocator of the current device has recorded."""
    traces = torch.cuda.memory._snapshot()["device_traces"]
    return list(traces[torch.cuda.current_device()])


def _place(frames: Any) -> str:
    """The innermost frame of a Python program that is not torch's own; "" if there is none."""
    for frame in frames:
        if frame["filename"].endswith(".py") and "/torch/" not in frame["filename"]:
            return f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return ""
