"""Static buffers: every tensor that a replay can see, described by one field table.

Each field has an owner. The host changes its fields with `load`; kernels read them and never write
them. Device-owned fields are written by kernels alone and are no part of any copy. A field's first
dimension counts its *lanes* (rows, slots or tokens); lanes that a load does not fill get the
field's pad value, so that a padded lane never holds an earlier load's values.

The host-owned fields of a *group* share one block of bytes: a load edits the host's image of it,
copies that into the next *staging block* (pinned on CUDA), and queues a single copy to the device;
groups that it does not name are left alone. So large fields that seldom change have a group of
their own. A staging block may be overwritten only when the copy out of it is known to be done.
Nothing waits for that copy: it is done once the replay after it has published, and `acknowledge`
says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from graphengine.buckets.budget import format_bytes
from graphengine.buckets.fields import NUMPY_DTYPES, Field, Owner, field_groups, layout
from graphengine.buckets.host_queue import HostQueue
from graphengine.buckets.lane_values import LaneValues
from graphengine.buckets.runtime import HOST_TO_DEVICE, runtime


@dataclass(frozen=True, slots=True)
class LaneUpdate:
    """A load's `values` for a field's lanes from `first` on; the other lanes stay as they are.

    If a load changes nothing else in a group, only the bytes of these lanes are copied.
    """

    first: int
    values: Any


class CopiedRange(NamedTuple):
    """A copy that a load made to the device: bytes start .. stop - 1 of the image of a group."""

    group: int
    start: int
    stop: int


class StaticBuffers:
    """The tensors of a field table, on `device`, with `staging_blocks` staging blocks.

    `buffers["name"]` and `buffers.name` are the device tensor of a field, at one address until
    `close()`; read it, pass it to kernels, but do not write to a host-owned one. All fields start
    at their pad value. `nbytes` counts device bytes and `staging_nbytes` those of the staging ring.
    ValueError for a table that cannot be laid out.

    Not thread-safe; copies go to the caller's current stream, which must be the replays' stream.
    """

    # Slots, so that a field that would hide an attribute is caught (`_check_table`).
    __slots__ = (
        "_acknowledged",
        "_closed",
        "_groups",
        "_lanes",
        "_pointers",
        "_recorded",
        "_staging_blocks",
        "_tensors",
        "device",
        "fields",
        "nbytes",
        "staging_nbytes",
    )

    def __init__(
        self, fields: Iterable[Field], device: torch.device | str, staging_blocks: int = 3
    ) -> None:
        self.fields = tuple(fields)
        self.device = torch.device(device)
        if staging_blocks < 1:
            raise ValueError(f"staging_blocks={staging_blocks}")
        _check_table(self.fields)

        self._staging_blocks = staging_blocks
        self._acknowledged = 0
        self._groups: list[_Group] = []
        self._lanes: dict[str, _Lanes] = {}
        tensors: dict[str, torch.Tensor] = {}
        for fields_of_group in field_groups(self.fields):
            offsets, size = layout(fields_of_group)
            group = _Group(len(self._groups), size, self.device, staging_blocks)
            self._groups.append(group)
            for field in fields_of_group:
                part = slice(offsets[field.name], offsets[field.name] + field.nbytes)
                self._lanes[field.name] = _Lanes(field, group, part)
                tensors[field.name] = group.block[part].view(field.dtype).view(field.shape)
        self._tensors = {
            field.name: tensors[field.name]
            if field.owner == "host"
            else torch.empty(field.shape, dtype=field.dtype, device=self.device)
            for field in self.fields
        }
        size = sum(group.nbytes for group in self._groups)
        self.nbytes = size + sum(f.nbytes for f in self.fields if f.owner == "device")
        self.staging_nbytes = size * staging_blocks
        self._pointers = [tensor.data_ptr for tensor in self._tensors.values()]
        self._recorded: list[int] = []
        self._closed = False
        self.reset()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            self._require_open()
            raise KeyError(f"no field {name!r}: the fields are {', '.join(self._tensors)}")
        return self._tensors[name]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._tensors:
            self._require_open()
            raise AttributeError(f"static buffers have no field or attribute {name!r}")
        return self._tensors[name]

    def load(
        self,
        updates: Mapping[str, Any],
        *,
        sequence: int,
        stream: torch.cuda.Stream | HostQueue | None = None,
    ) -> list[CopiedRange]:
        """Replace the contents of the named host-owned fields and copy their groups to the device.

        A value holds one item for each of the field's first lanes; the lanes after them are
        padded. It is an array, or a list in which None stands for a padded lane; an item shorter
        than its lane is filled up with the pad value (ragged block tables). A field of one lane
        takes a plain number too. A `LaneUpdate` changes some lanes and pads none. Fields that are
        not named keep their contents. Values are copied: nothing of `updates` is kept. The copy is
        queued on `stream`, or on the current one; on a CPU it is made at once, unless `stream` is a
        `HostQueue`. torch does not know of a copy on `stream`: wait for it before these buffers are
        closed or dropped.

        `sequence` is the number of the first replay that will be launched after this copy. The
        staging block is used again only after `acknowledge(n)` with n >= `sequence`.

        Returns the copied range: `image` has its bytes, and other buffers may `repeat` it.

        Raises ValueError, with the field and the numbers, for a field that is unknown or
        device-owned, too many lanes, a lane too long, values that are not numbers of the field's
        kind or are out of its dtype's range, and a `sequence` that goes back. RuntimeError if every
        staging block is still in flight. After an error nothing has changed.
        """
        self._require_open()
        prepared = {name: self._lanes_of(name).prepare(value) for name, value in updates.items()}
        groups = self._groups if len(self._groups) < 2 else self._groups_of(updates)
        self._check_staging(groups, sequence)
        for name, (first, values) in prepared.items():
            self._lanes[name].store(first, values)
        return [group.send(sequence, stream) for group in groups]

    def image(self, copied: CopiedRange) -> memoryview:
        """The bytes that were copied; valid until the next load."""
        return self._groups[copied.group].image[copied.start : copied.stop].data

    def repeat(
        self,
        copied: CopiedRange,
        data: bytes | memoryview,
        *,
        sequence: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Repeat a load of other buffers with the same table: `data` is their `image` of it.

        `sequence`, `stream` and the rules for staging blocks are those of `load`.
        """
        self._require_open()
        group = self._groups[copied.group]
        self._check_staging([group], sequence)
        group.image[copied.start : copied.stop] = np.frombuffer(data, dtype=np.uint8)
        group.change(copied.start, copied.stop)
        group.send(sequence, stream)

    def _check_staging(self, groups: Sequence[_Group], sequence: int) -> None:
        """ValueError for a `sequence` that goes back, RuntimeError if a group has no block left."""
        earliest = max(self._acknowledged + 1, *(group.last for group in self._groups), 1)
        if sequence < earliest:
            raise ValueError(
                f"sequence={sequence}: the next replay to be launched is {earliest} or later"
            )
        for group in groups:
            if group.oldest > self._acknowledged:
                raise RuntimeError(
                    f"all {self._staging_blocks} staging blocks are in flight: the oldest waits "
                    f"for replay {group.oldest}, acknowledged are those up to {self._acknowledged}"
                )

    def _groups_of(self, names: Iterable[str]) -> list[_Group]:
        """The groups of these fields; the first group where no field is named."""
        return list(dict.fromkeys(self._lanes[name].group for name in names)) or self._groups[:1]

    @property
    def acknowledged(self) -> int:
        """The last replay that is known to have published; 0: none."""
        return self._acknowledged

    def acknowledge(self, sequence: int) -> None:
        """Replays up to number `sequence` have published: their staging blocks are free again."""
        self._acknowledged = max(self._acknowledged, sequence)

    def reset(self) -> None:
        """Set every field, the device-owned ones too, to its pad value; replays count from 1 again.

        Only with no replay in flight. Waits for the copies before it on the current stream.
        """
        self._require_open()
        for lanes in self._lanes.values():
            lanes.array[...] = lanes.field.pad
        for group in self._groups:
            group.reset()
        for field in self.fields:
            if field.owner == "device":
                self._tensors[field.name].fill_(field.pad)
        self._acknowledged = 0

    def addresses(self) -> dict[str, int]:
        """The device address of each field."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def record_addresses(self) -> None:
        """Remember the addresses that a graph captures; later calls check them instead.

        RuntimeError if a field has moved since the first call: the graphs captured before would
        use its old memory.
        """
        self._require_open()
        if self._recorded:
            self.check_addresses()
        self._recorded = [pointer() for pointer in self._pointers]

    def check_addresses(self) -> None:
        """RuntimeError, naming the field, if one is not where `record_addresses` saw it.

        Called before every 64th replay: one pass over the fields, about a microsecond for twenty.
        """
        if [pointer() for pointer in self._pointers] == self._recorded:
            return
        self._require_open()
        if not self._recorded:
            raise RuntimeError("the addresses of the static buffers were not recorded yet")
        for (name, now), then in zip(self.addresses().items(), self._recorded, strict=True):
            if now != then:
                raise RuntimeError(
                    f"static buffer {name!r} moved from {then:#x} to {now:#x} after capture: the "
                    "captured graphs still use its old memory"
                )

    def describe(self) -> str:
        """The field table as aligned text, without a trailing newline."""
        rows = [("field", "owner", "type", "pad", "size", "meaning")]
        for field in self.fields:
            dtype = str(field.dtype).removeprefix("torch.")
            shape = ", ".join(map(str, field.shape))
            size = format_bytes(field.nbytes)
            rows.append(
                (field.name, field.owner, f"{dtype}[{shape}]", str(field.pad), size, field.meaning)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def close(self) -> None:
        """Drop all tensors, after the graphs that use them were closed. May be called again."""
        self._closed = True
        self._tensors = {}
        self._lanes = {}
        self._groups = []
        self._pointers = []
        self._recorded = [0]  # equals no list of addresses, so that `check_addresses` raises

    def _lanes_of(self, name: str) -> _Lanes:
        lanes = self._lanes.get(name)
        if lanes is not None:
            return lanes
        if name in self._tensors:
            raise ValueError(f"field {name!r} is device-owned: only a replay changes it")
        raise ValueError(f"no field {name!r}: the host owns {', '.join(self._lanes)}")

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the static buffers are closed")


class _Group:
    """The block of bytes that one load copies: the host's image, its staging blocks, the device's.

    number  among the groups
    last    the replay after the newest copy; 0 when there was none
    """

    __slots__ = (
        "_address",
        "_changed",
        "_in_flight",
        "_next",
        "_staging",
        "_staging_addresses",
        "_staging_arrays",
        "block",
        "image",
        "last",
        "number",
    )

    def __init__(self, number: int, size: int, device: torch.device, staging_blocks: int) -> None:
        self.number = number
        self.image: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self.block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(staging_blocks)
        ]
        self._staging_arrays = [block.numpy() for block in self._staging]
        self._address = self.block.data_ptr()
        self._staging_addresses = [block.data_ptr() for block in self._staging]
        # The replay after the copy out of each staging block; 0 when there was none.
        self._in_flight = [0] * staging_blocks
        self._next = 0
        self._changed = (size, 0)
        self.last = 0

    @property
    def nbytes(self) -> int:
        return self.image.nbytes

    @property
    def oldest(self) -> int:
        """The replay after the copy out of the next staging block."""
        return self._in_flight[self._next]

    def change(self, start: int, stop: int) -> None:
        """Put these bytes of the image, and all between them and earlier ones, in the next copy."""
        self._changed = (min(self._changed[0], start), max(self._changed[1], stop))

    def send(self, sequence: int, stream: torch.cuda.Stream | HostQueue | None) -> CopiedRange:
        """Queue the copy before replay `sequence`: of the whole image if no bytes changed."""
        index = self._next
        start, stop = self._changed
        if start >= stop:
            start, stop = 0, self.nbytes
        part = slice(start, stop)
        np.copyto(self._staging_arrays[index][part], self.image[part])
        if isinstance(stream, HostQueue):
            stream.add(partial(self.block[part].copy_, self._staging[index][part]))
        elif stream is None or not self._copy_directly(index, start, stop - start, stream):
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                self.block[part].copy_(self._staging[index][part], non_blocking=True)
        self._changed = (self.nbytes, 0)
        self._in_flight[index] = self.last = sequence
        self._next = (index + 1) % len(self._staging)
        return CopiedRange(self.number, start, stop)

    def _copy_directly(self, index: int, start: int, size: int, stream: torch.cuda.Stream) -> bool:
        """Copy by one call into CUDA that leaves torch's current stream alone; False if it cannot.

        torch would also note that the staging block is in use; here the owner's sequence says so.
        """
        library = runtime()
        if library is None:
            return False
        failed = library.cudaMemcpyAsync(
            self._address + start,
            self._staging_addresses[index] + start,
            size,
            HOST_TO_DEVICE,
            stream.cuda_stream,
        )
        if failed:
            library.cudaGetLastError()
        return not failed

    def reset(self) -> None:
        """Copy the image at once, with nothing in flight."""
        # A copy from pageable memory: it returns when it and the copies before it are done.
        self.block.copy_(torch.from_numpy(self.image))
        self._in_flight = [0] * len(self._staging)
        self.last = 0


class _Lanes:
    """A host-owned field in the host's image: takes the values of a load, once they are checked."""

    __slots__ = ("array", "field", "group", "offset", "values")

    def __init__(self, field: Field, group: _Group, part: slice) -> None:
        self.field = field
        self.group = group
        self.offset = part.start
        self.values = LaneValues(field)
        image = group.image[part]
        self.array: NDArray[Any] = image.view(self.values.dtype).reshape(field.shape)

    def store(self, first: int | None, values: NDArray[Any]) -> None:
        if first is None:
            self.array[: len(values)] = values
            self.array[len(values) :] = self.field.pad
            self.group.change(0, self.group.nbytes)
            return
        self.array[first : first + len(values)] = values
        lane_bytes = self.array.nbytes // len(self.array)
        start = self.offset + first * lane_bytes
        self.group.change(start, start + len(values) * lane_bytes)

    def prepare(self, value: Any) -> tuple[int | None, NDArray[Any]]:
        """The first lane of a `LaneUpdate` or None, and the values; ValueError if they misfit."""
        if not isinstance(value, LaneUpdate):
            return None, self.values.read(value)
        values = self.values.read(value.values)
        if not 0 <= value.first <= len(self.array) - len(values):
            raise self.values.error(
                f"has {len(self.array)} lanes, got {len(values)} from lane {value.first} on"
            )
        return value.first, values


def _check_table(fields: tuple[Field, ...]) -> None:
    names = [field.name for field in fields]
    for field in fields:
        name = field.name
        if names.count(name) > 1:
            raise ValueError(f"field {name!r} is in the table {names.count(name)} times")
        if not name.isidentifier() or name.startswith("_") or hasattr(StaticBuffers, name):
            raise ValueError(f"{name!r} cannot name a field: it must be a free, public identifier")
        if field.owner not in get_args(Owner):
            raise ValueError(f"field {name!r}: owner={field.owner!r} is neither host nor device")
        if not field.shape or min(field.shape) < 1:
            raise ValueError(f"field {name!r}: shape {field.shape} has no lanes")
        if field.owner == "host" and field.dtype not in NUMPY_DTYPES:
            raise ValueError(f"field {name!r}: the host cannot write {field.dtype}")
