"""Memory that processes of one host share, and that kernels write.

Device memory is shared by handles of CUDA's interprocess communication. A process exports memory of
its own, and sends the handle to others, which map it: on another GPU that can reach the exporter's,
or on the same GPU, which torch's symmetric memory refuses. Physical memory lives until the last
process has let it go.

Host memory, such as that of a file that several processes map, is page-locked if kernels are to
write it.

Sources: CUDA Runtime API, "Device Management", `cudaIpc*`; "Memory Management", `cudaHostRegister`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from graphengine.buckets.runtime import runtime

HANDLE_BYTES = 64
# `cudaHostRegisterPortable` and `cudaHostRegisterMapped`: for all devices, and their kernels.
_FOR_KERNELS = 1 | 2
# Lets this device reach another one's memory when that is mapped.
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class ExportedMemory:
    """Zeroed memory of `device` that other processes may map. RuntimeError where CUDA refuses.

    tensor  int64 of this shape; not to be used after `close()`
    handle  HANDLE_BYTES, for `MappedMemory` in other processes
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._device, self._address = device, ctypes.c_void_p()
        nbytes, handle = 8 * math.prod(shape), _Handle()
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(nbytes))
            try:
                _call("cudaMemset", self._address, 0, ctypes.c_size_t(nbytes))
                _call("cudaDeviceSynchronize")
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), self._address)
            except RuntimeError:
                self.close()
                raise
        self.handle = bytes(handle)
        self.tensor = _tensor_at(self.address, shape, device)

    @property
    def address(self) -> int:
        assert self._address.value is not None, "closed"
        return self._address.value

    def close(self) -> None:
        """Free the memory, once no other process has it mapped. May be called again."""
        address, self._address = self._address, ctypes.c_void_p()
        if address.value is not None:
            with torch.cuda.device(self._device):
                _call("cudaFree", address)


class MappedMemory:
    """Memory of another process, mapped for `device`. RuntimeError where it cannot be reached.

    address  of its first byte, for kernels of this process; until `close()`
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        self._device, address = device, ctypes.c_void_p()
        with torch.cuda.device(device):
            _call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        assert address.value is not None, f"{handle=}"
        self.address = address.value

    def close(self) -> None:
        """Unmap the memory, once no kernel uses it any more."""
        with torch.cuda.device(self._device):
            _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self.address))


class PageLocked:
    """Pages of the host that kernels on `device` may write until `close()`, at their own address.

    RuntimeError where CUDA refuses, as it may for pages of a disk's file.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._device, self._memory = device, memory
        nbytes = ctypes.c_size_t(memory.nbytes)
        with torch.cuda.device(device):
            _call("cudaHostRegister", self._pointer, nbytes, ctypes.c_uint(_FOR_KERNELS))

    @property
    def _pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory.data_ptr())

    def close(self) -> None:
        """Unlock the pages, once no kernel writes them any more."""
        with torch.cuda.device(self._device):
            _call("cudaHostUnregister", self._pointer)


def _call(name: str, *arguments: Any) -> None:
    library = runtime()
    if library is None:
        raise RuntimeError(f"{name}: torch's CUDA runtime library was not found")
    status = getattr(library, name)(*arguments)
    if status:
        library.cudaGetErrorName.restype = ctypes.c_char_p
        error = library.cudaGetErrorName(status).decode()
        # Clear the error, so that torch does not find it.
        library.cudaGetLastError()
        raise RuntimeError(f"{name}: {error}")


class _ArrayInterface:
    """Memory as other libraries hand it to torch."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i8",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(address: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_ArrayInterface(address, shape), device=device)
