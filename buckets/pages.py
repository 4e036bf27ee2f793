"""Memory of a device at fixed addresses, whose pages can be given back and be had again.

A captured graph has addresses in it. On a GPU these pages are therefore mapped into a range of
addresses that stays reserved (CUDA's virtual memory management): without pages the range takes no
memory, and with new ones every tensor in it is where it was. On a CPU the operating system gets the
pages back, and gets new ones when they are touched.

While pages are given back, nothing may read or write the tensors: on a GPU that is an illegal
address, which breaks the process's CUDA context.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from graphengine.buckets.driver import Functions

_ALIGNMENT = 512  # bytes, as torch's allocator has it

_POINTER = ctypes.POINTER(ctypes.c_uint64)
_ADDRESS, _SIZE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # Values of cuda.h.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(_Properties),
        ctypes.c_int,
    ),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (_POINTER, _SIZE, ctypes.POINTER(_Properties), _FLAGS),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, ctypes.c_uint64, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemRelease": (ctypes.c_uint64,),
}


class Pages(Protocol):
    """Pages of one device; `nbytes` are there now."""

    @property
    def nbytes(self) -> int: ...

    def take(self, nbytes: int) -> Tensor:
        """Uint8 [nbytes], uninitialised, aligned to 512 bytes; only while no page is given back.

        The tensor keeps these pages alive: the last one to go frees all of them. RuntimeError where
        there is too little memory.
        """
        ...

    def give_back(self) -> None:
        """Give all pages back; no work on them may be queued. Addresses stay."""
        ...

    def have_again(self) -> None:
        """Have pages at the same addresses, with any contents.

        RuntimeError, with none of them, where there is too little memory.
        """
        ...


def new_pages(device: torch.device) -> Pages:
    """No pages yet, of this device."""
    if device.type == "cpu":
        return HostPages()
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.synchronize(index)  # The driver is ready afterwards.
    total = torch.cuda.get_device_properties(index).total_memory
    return DevicePages(torch.device("cuda", index), total, ctypes.CDLL("libcuda.so.1"))


class _Chunk(NamedTuple):
    address: int
    nbytes: int


class DevicePages:
    """Pages of a GPU in a reserved range of `limit` bytes, which itself takes no memory.

    library  libcuda, or a substitute for it
    """

    def __init__(self, device: torch.device, limit: int, library: Any) -> None:
        self._device, self._driver = device, Functions(library, _PROTOTYPES)
        location = _Location(_DEVICE, device.index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        unit = ctypes.c_size_t()
        self._driver.call(
            "cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0
        )
        self._unit = unit.value
        self._limit = _rounded(limit, self._unit)
        start = ctypes.c_uint64()
        self._driver.call("cuMemAddressReserve", ctypes.byref(start), self._limit, 0, 0, 0)
        self._start, self._used = start.value, 0
        self._chunks: list[_Chunk] = []
        self._handles: dict[_Chunk, int] = {}
        free = weakref.finalize(
            self, _free, self._driver, self._handles, _Chunk(self._start, self._limit)
        )
        # When the process ends, so does its CUDA context.
        free.atexit = False

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._handles)

    def take(self, nbytes: int) -> Tensor:
        first = _rounded(self._used, _ALIGNMENT)
        mapped, end = sum(chunk.nbytes for chunk in self._chunks), first + nbytes
        if end > self._limit:
            raise RuntimeError(f"{end} bytes of pages exceed the {self._limit} that are reserved")
        if end > mapped:
            chunk = _Chunk(self._start + mapped, _rounded(end - mapped, self._unit))
            self._map(chunk)
            self._chunks.append(chunk)
        self._used = end
        return _tensor_at(self, self._start + first, nbytes, self._device)

    def give_back(self) -> None:
        _unmap(self._driver, self._handles)

    def have_again(self) -> None:
        try:
            for chunk in self._chunks:
                self._map(chunk)
        except BaseException:
            self.give_back()
            raise

    def _map(self, chunk: _Chunk) -> None:
        """Have pages for a chunk of addresses."""
        handle, nbytes = ctypes.c_uint64(), chunk.nbytes
        properties, access = ctypes.byref(self._properties), ctypes.byref(self._access)
        self._driver.call("cuMemCreate", ctypes.byref(handle), nbytes, properties, 0)
        try:
            self._driver.call("cuMemMap", chunk.address, nbytes, 0, handle.value, 0)
        except BaseException:
            self._driver.call("cuMemRelease", handle.value)
            raise
        self._handles[chunk] = handle.value
        self._driver.call("cuMemSetAccess", chunk.address, nbytes, access, 1)


def _unmap(driver: Functions, handles: dict[_Chunk, int]) -> None:
    while handles:
        chunk, handle = handles.popitem()
        driver.call("cuMemUnmap", *chunk)
        driver.call("cuMemRelease", handle)


def _free(driver: Functions, handles: dict[_Chunk, int], reserved: _Chunk) -> None:
    _unmap(driver, handles)
    driver.call("cuMemAddressFree", *reserved)


class _Exported:
    """Memory of the GPU as torch reads it; `owner` lives as long as the tensor."""

    def __init__(self, owner: DevicePages, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _tensor_at(owner: DevicePages, address: int, nbytes: int, device: torch.device) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Exported(owner, address, nbytes), device=device)


class HostPages:
    """Pages of the operating system's."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._there = True

    @property
    def nbytes(self) -> int:
        return sum(len(block) for block in self._blocks) if self._there else 0

    def take(self, nbytes: int) -> Tensor:
        # Only private pages go back when they are not needed.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = mmap.mmap(-1, max(nbytes, 1), flags=private)
        self._blocks.append(block)
        return torch.frombuffer(block, dtype=torch.uint8, count=nbytes or -1)[:nbytes]

    def give_back(self) -> None:
        for block in self._blocks:
            block.madvise(mmap.MADV_DONTNEED)
        self._there = False

    def have_again(self) -> None:
        self._there = True


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
