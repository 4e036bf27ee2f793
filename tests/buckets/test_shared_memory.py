"""Memory that processes share, with a library that stands in for CUDA's."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from graphengine.buckets import shared_memory
from graphengine.buckets.shared_memory import HANDLE_BYTES, ExportedMemory, MappedMemory, PageLocked

DEVICE = torch.device("cuda:0")


class Library:
    """Does what CUDA's functions do, or fails in the one that is named."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []
        self.cudaGetErrorName = lambda status: b"cudaErrorInvalidValue"
        self.cudaGetLastError = lambda: self.calls.append("cudaGetLastError")

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.failing:
                return 1
            if name in ("cudaMalloc", "cudaIpcOpenMemHandle"):
                arguments[0]._obj.value = 4096
            if name == "cudaIpcGetMemHandle":
                ctypes.memmove(arguments[0], bytes(range(HANDLE_BYTES)), HANDLE_BYTES)
            if name == "cudaIpcOpenMemHandle":
                assert bytes(arguments[1]) == bytes(range(HANDLE_BYTES))
            return 0

        return call


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(library: Library | None) -> Library | None:
        monkeypatch.setattr(shared_memory, "runtime", lambda: library)
        return library

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(shared_memory, "_tensor_at", lambda *of: of)
    return use


def test_memory_is_exported_mapped_and_freed(use: Any) -> None:
    library = use(Library())
    own = ExportedMemory((2, 8), DEVICE)
    assert own.address == 4096 and own.handle == bytes(range(HANDLE_BYTES))
    assert own.tensor == (4096, (2, 8), DEVICE)
    mapped = MappedMemory(own.handle, DEVICE)
    assert mapped.address == 4096
    mapped.close()
    own.close()
    own.close()
    assert library.calls == [
        "cudaMalloc", "cudaMemset", "cudaDeviceSynchronize", "cudaIpcGetMemHandle",
        "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaFree",
    ]  # fmt: skip


@pytest.mark.parametrize("failing", ["cudaMalloc", "cudaMemset", "cudaIpcGetMemHandle"])
def test_what_cuda_refuses_is_an_error(use: Any, failing: str) -> None:
    library = use(Library(failing))
    with pytest.raises(RuntimeError, match=f"{failing}: cudaErrorInvalidValue"):
        ExportedMemory((2, 8), DEVICE)
    assert "cudaGetLastError" in library.calls, "or torch would find the error"
    assert ("cudaFree" in library.calls) == (failing != "cudaMalloc")


def test_what_cannot_be_mapped_is_an_error(use: Any) -> None:
    use(Library("cudaIpcOpenMemHandle"))
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle: cudaErrorInvalidValue"):
        MappedMemory(bytes(range(HANDLE_BYTES)), DEVICE)
    with pytest.raises(RuntimeError, match="a handle has 64 bytes, not 4"):
        MappedMemory(b"none", DEVICE)
    use(None)
    with pytest.raises(RuntimeError, match="cudaMalloc: torch's CUDA runtime library was not"):
        ExportedMemory((2, 8), DEVICE)


def test_pages_of_the_host_are_locked_and_let_go(use: Any) -> None:
    library = use(Library())
    PageLocked(torch.zeros(8, dtype=torch.int64), DEVICE).close()
    assert library.calls == ["cudaHostRegister", "cudaHostUnregister"]


def test_pages_that_cuda_refuses_are_an_error(use: Any) -> None:
    use(Library("cudaHostRegister"))
    with pytest.raises(RuntimeError, match="cudaHostRegister: cudaErrorInvalidValue"):
        PageLocked(torch.zeros(8, dtype=torch.int64), DEVICE)
