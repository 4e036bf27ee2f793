"""A stand-in for CUDA's virtual memory management, whose device memory is the host's."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

from graphengine.buckets import pages as module
from graphengine.buckets.pages import _PROTOTYPES, DevicePages
from launches.libcuda_stand_in import driver_library

UNIT = 2**16
OUT_OF_MEMORY = 2
_UNALIGNED = 1


class PagedMemory:
    """`room` bytes of a device; `library` maps them.

    mapped   (address, bytes) of what is mapped, to its handle
    handles  bytes of each handle that is not released
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.handles: dict[int, int] = {}
        self.mapped: dict[tuple[int, int], int] = {}
        self.accessible: set[tuple[int, int]] = set()
        self.reserved: dict[int, mmap.mmap] = {}
        self._made = 0
        self.library: Any = driver_library(
            _PROTOTYPES,
            cuGetErrorName=self._name,
            cuMemGetAllocationGranularity=self._granularity,
            cuMemAddressReserve=self._reserve,
            cuMemAddressFree=self._free,
            cuMemCreate=self._create,
            cuMemMap=self._map,
            cuMemSetAccess=self._set_access,
            cuMemUnmap=self._unmap,
            cuMemRelease=self._release,
        )

    def pages(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> DevicePages:
        """Pages of this memory, whose tensors are the CPU's."""
        monkeypatch.setattr(module, "_tensor_at", self._tensor_at)
        return DevicePages(torch.device("cuda", 0), limit, self.library)

    def _tensor_at(self, owner: DevicePages, address: int, nbytes: int, _: Any) -> torch.Tensor:
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def _name(self, status: int, text: Any) -> int:
        text[0] = b"CUDA_ERROR_OUT_OF_MEMORY" if status == OUT_OF_MEMORY else b"CUDA_ERROR"
        return 0

    def _granularity(self, unit: Any, properties: Any, option: int) -> int:
        found = properties.contents
        assert (found.type, found.location.type, found.location.id, option) == (1, 1, 0, 0)
        unit[0] = UNIT
        return 0

    def _reserve(self, start: Any, nbytes: int, alignment: int, near: int, flags: int) -> int:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start[0] = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self.reserved[start[0]] = block
        return 0

    def _free(self, start: int, nbytes: int) -> int:
        return 0 if len(self.reserved.pop(start)) == nbytes else _UNALIGNED

    def _create(self, handle: Any, nbytes: int, properties: Any, flags: int) -> int:
        if nbytes % UNIT:
            return _UNALIGNED
        if sum(self.handles.values()) + nbytes > self.room:
            return OUT_OF_MEMORY
        self._made += 1
        handle[0] = self._made
        self.handles[self._made] = nbytes
        return 0

    def _map(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> int:
        (start,) = self.reserved
        inside = start <= address and address + nbytes <= start + len(self.reserved[start])
        overlaps = any(a < address + nbytes and address < a + n for a, n in self.mapped)
        aligned = address % UNIT == start % UNIT
        if not inside or overlaps or not aligned or self.handles[handle] != nbytes:
            return _UNALIGNED
        self.mapped[address, nbytes] = handle
        return 0

    def _set_access(self, address: int, nbytes: int, access: Any, count: int) -> int:
        found = access.contents
        assert (found.location.type, found.location.id, found.flags, count) == (1, 0, 3, 1)
        if (address, nbytes) not in self.mapped:
            return _UNALIGNED
        self.accessible.add((address, nbytes))
        return 0

    def _unmap(self, address: int, nbytes: int) -> int:
        del self.mapped[address, nbytes]
        self.accessible.discard((address, nbytes))
        # What was there is gone.
        (ctypes.c_uint8 * nbytes).from_address(address)[:] = b"\xff" * nbytes
        return 0

    def _release(self, handle: int) -> int:
        del self.handles[handle]
        return 0
