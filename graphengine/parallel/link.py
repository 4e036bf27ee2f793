"""The memory that a driver and its ranks share: commands to all ranks, and each rank's answers.

Commands are in a ring. A rank takes a command only if it has the number that is due and its
checksum matches its contents, so the order in which stores arrive does not matter. The driver waits
while the slowest rank has a whole ring of commands still to do. Besides the ring, each rank has its
stage, the number of the last command that it has done, room for a text, and a small ring of the
times at which it launched its last replays. A launch time is one word that includes a tag made of
the replay's number, and is used only if the tag matches the replay asked for.

The memory is anonymous where the driver spawns ranks, else a file that all of them map.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from enum import IntEnum
from mmap import mmap
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphengine.core.commands import Command
from graphengine.opening.inventory import LinkShape
from graphengine.opening.records import make_room
from graphengine.parallel.command_codec import CommandCodec, Encoded
from graphengine.program.graph_key import GraphKey

_NUMBERS = 5
ALL = 0
"""Addresses a command to all ranks; rank 0, the driver, sends itself none."""
# Offsets in an entry's header, which has the command's number, its kind, the rank, its numbers, the
# bytes of its data, and a checksum.
_NUMBER, _KIND, _CHECK = 0, 1, 4 + _NUMBERS
_STAGE, _DONE, _WHEN, _LENGTH = range(4)
# The word of a launch has its time in ns, modulo 78 hours, and above it a tag made of the replay's
# number, never 0.
_TIME_BITS, _TAGS = 48, 0x7FFF
_TIME = (1 << _TIME_BITS) - 1


class Stage(IntEnum):
    """A rank's stage of opening, or the stage up to which the driver lets all ranks go."""

    STARTING = 0
    JOINING = 1
    LOADED = 2
    FOLLOWING = 3
    FAILED = 4
    ENDED = 5


class ReceivedCommand(NamedTuple):
    """A command as it was taken; `to` is the rank it is addressed to, or `ALL`."""

    command: Command
    to: int


class LinkMemory(NamedTuple):
    """The memory that a driver and its ranks share: stages, texts, launch times and the ring."""

    words: Any
    shape: LinkShape

    @classmethod
    def allocate(cls, context: SpawnContext, shape: LinkShape) -> LinkMemory:
        """Zeroed memory."""
        return cls(context.RawArray(ctypes.c_int64, shape.words), shape)

    @classmethod
    def of_file(cls, path: Path, shape: LinkShape) -> LinkMemory:
        """Map this file; creates it, filled with zeros, if it does not exist. OSError where there
        is no room for it.
        """
        with path.open("ab+") as file:
            if not file.tell():
                file.truncate(8 * shape.words)
                make_room(file.fileno(), path, 8 * shape.words, "commands to ranks")
            return cls(mmap(file.fileno(), 8 * shape.words), shape)


class _Views:
    """The memory as arrays. Row 0 of `stages` is the driver's, row i is rank i's."""

    def __init__(self, memory: LinkMemory) -> None:
        shape = memory.shape
        words: NDArray[np.int64] = np.frombuffer(memory.words, dtype=np.int64)
        ranks = shape.ranks
        sizes = [(1 + ranks) * shape.stages, ranks * shape.text, ranks * shape.launches]
        stages, texts, launches, ring = np.split(words, np.cumsum(sizes))
        self.entries, self.room = shape.commands, 8 * shape.data
        self.stages = stages.reshape(-1, shape.stages)
        self.texts = texts.view(np.uint8).reshape(ranks, -1)
        self.launches = launches.reshape(ranks, -1)
        self.ring = ring.reshape(shape.commands, -1)
        self.data = self.ring[:, shape.header :].view(np.uint8)

    def check_of(self, number: int, data: bytes | memoryview) -> int:
        """The checksum of the entry of this number, with these data."""
        header = self.ring[number % self.entries, _KIND:_CHECK].tobytes()
        return zlib.crc32(data, zlib.crc32(header, number & 0xFFFF_FFFF))


class DriverEnd:
    """The driver's side: writes commands, and reads the ranks' answers. Ranks count from 1."""

    def __init__(self, memory: LinkMemory, graphs: Sequence[GraphKey]) -> None:
        self._views, self._codec = _Views(memory), CommandCodec(graphs)
        self.sent = 0

    def has_room(self) -> bool:
        """Whether every rank has done the command that the next one would overwrite."""
        return self.sent - self.least_done() < self._views.entries

    def least_done(self) -> int:
        """The number of the last command that all ranks have done."""
        return int(self._views.stages[1:, _DONE].min())

    def done(self, rank: int) -> int:
        """The number of the last command that this rank has done."""
        return int(self._views.stages[rank, _DONE])

    def send(self, command: Command, *, to: int = ALL) -> int:
        """Write the next command, for which there must be room, and return its number.

        All ranks take it; ranks that it is not addressed to do nothing.
        """
        kind, numbers, data = self._codec.encode(command)
        views, number = self._views, self.sent + 1
        assert self.has_room() and len(data) <= views.room, f"{number=} of {len(data)} bytes"
        at = number % views.entries
        entry = views.ring[at]
        entry[_KIND:_CHECK] = (kind, to, *numbers, *[0] * (_NUMBERS - len(numbers)), len(data))
        views.data[at, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        entry[_CHECK] = views.check_of(number, data)
        entry[_NUMBER] = number
        self.sent = number
        return number

    def let(self, stage: Stage) -> None:
        """Let ranks go on to this stage."""
        self._views.stages[0, _STAGE] = stage

    def stage(self, rank: int) -> Stage:
        """How far a rank is."""
        return Stage(int(self._views.stages[rank, _STAGE]))

    def failed_at(self, rank: int) -> int:
        """When a rank failed, in nanoseconds of the monotonic clock."""
        return int(self._views.stages[rank, _WHEN])

    def launched_after(self, number: int, when: int) -> list[int] | None:
        """Nanoseconds from `when` until each rank launched replay `number`, rank 1 first; negative
        where a rank launched it earlier. None where a time is missing: not yet there, or
        overwritten.

        when  within 39 hours of the launches, on the ranks' clock
        """
        launches, tag = self._views.launches, _tag(number)
        words = launches[:, number % launches.shape[1]].tolist()
        if any(word >> _TIME_BITS != tag for word in words):
            return None
        half = 1 << _TIME_BITS - 1
        return [((word & _TIME) - when + half & _TIME) - half for word in words]

    def text(self, rank: int) -> str:
        """The last text that a rank has left."""
        length = int(self._views.stages[rank, _LENGTH])
        return self._views.texts[rank - 1, :length].tobytes().decode(errors="replace")


class RankEnd:
    """The side of rank `rank`, which takes commands in their order."""

    def __init__(self, memory: LinkMemory, rank: int, graphs: Sequence[GraphKey]) -> None:
        self._views, self._codec = _Views(memory), CommandCodec(graphs)
        self._own = self._views.stages[rank]
        self._text = self._views.texts[rank - 1]
        self._launches = self._views.launches[rank - 1]

    def allowed(self) -> Stage:
        """How far the driver lets ranks go."""
        return Stage(int(self._views.stages[0, _STAGE]))

    def reach(self, stage: Stage) -> None:
        """Tell the driver how far this rank is."""
        self._own[_STAGE] = stage

    def take(self) -> ReceivedCommand | None:
        """The command that is due, or None until it has arrived completely."""
        views, number = self._views, int(self._own[_DONE]) + 1
        at = number % views.entries
        entry = views.ring[at]
        if entry[_NUMBER] != number:
            return None
        kind, to, *numbers, size, check = entry[_KIND : _CHECK + 1].tolist()
        if not 0 <= size <= views.room:
            return None
        data = views.data[at, :size].tobytes()
        if views.check_of(number, data) != check:
            return None
        return ReceivedCommand(self._codec.decode(Encoded(kind, numbers, data)), to)

    def finish(self) -> None:
        """Mark the command that was taken as done."""
        self._own[_DONE] += 1

    def launched(self, number: int, when: int) -> None:
        """Note that replay `number` was launched at `when` ns of `time.perf_counter_ns`."""
        word = _tag(number) << _TIME_BITS | when & _TIME
        self._launches[number % self._launches.size] = word

    def say(self, text: str) -> None:
        """Leave a text for the driver; one that is too long is cut."""
        data = text.encode()[: self._text.size]
        self._text[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._own[_LENGTH] = len(data)

    def fail(self, text: str, when: int) -> None:
        """Say why this rank ends, at `when` nanoseconds of the monotonic clock."""
        self.say(text)
        self._own[_WHEN] = when
        self.reach(Stage.FAILED)


def _tag(number: int) -> int:
    return 1 + number % _TAGS
