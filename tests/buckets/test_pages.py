"""Pages at fixed addresses: given back, had again, and freed with their last tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from graphengine.buckets.pages import HostPages, Pages, new_pages
from launches.paged_memory import UNIT, PagedMemory

ROOM = 8 * UNIT


@pytest.fixture(params=["host", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pages:
    if request.param == "stand-in":
        return PagedMemory(ROOM).pages(monkeypatch, ROOM)
    return HostPages() if request.param == "host" else new_pages(torch.device("cuda"))


def test_addresses_stay(pages: Pages) -> None:
    sizes = (1, 700, 3 * UNIT, 0, 5)
    blocks = [pages.take(size) for size in sizes]
    assert [block.shape for block in blocks] == [(size,) for size in sizes]
    assert all(block.dtype == torch.uint8 for block in blocks)
    places = [block.data_ptr() for block in blocks]
    assert all(place % 512 == 0 for place in places)
    held = pages.nbytes
    assert held >= sum(sizes)
    for _ in range(2):
        for value, block in enumerate(blocks):
            block.fill_(value)
        assert [int(block.sum()) for block in blocks if len(block)] == [
            value * size for value, size in enumerate(sizes) if size
        ]
        pages.give_back()
        assert pages.nbytes == 0
        pages.have_again()
        assert pages.nbytes == held
        assert [block.data_ptr() for block in blocks] == places


def test_pages_of_a_gpu_are_mapped_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PagedMemory(4 * UNIT)
    pages = memory.pages(monkeypatch, ROOM)
    assert pages.nbytes == 0 and len(memory.reserved) == 1
    first = pages.take(UNIT - 512)
    second = pages.take(UNIT)
    assert second.data_ptr() == first.data_ptr() + UNIT - 512
    assert [nbytes for _, nbytes in memory.mapped] == [UNIT, UNIT]
    assert memory.accessible == memory.mapped.keys()
    with pytest.raises(RuntimeError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        pages.take(3 * UNIT)
    assert pages.nbytes == 2 * UNIT
    message = f"{7 * UNIT + 2 * UNIT - 512} bytes of pages exceed the {ROOM} that are reserved"
    with pytest.raises(RuntimeError, match=message):
        pages.take(7 * UNIT)
    pages.give_back()
    assert not memory.mapped and not memory.handles and not memory.accessible
    # Somebody else took the memory.
    memory.room = UNIT
    with pytest.raises(RuntimeError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        pages.have_again()
    assert pages.nbytes == 0 and not memory.handles
    memory.room = 4 * UNIT
    pages.have_again()
    assert memory.accessible == memory.mapped.keys() and len(memory.handles) == 2


@pytest.mark.parametrize("given_back", [False, True])
def test_the_last_tensor_frees_them(monkeypatch: pytest.MonkeyPatch, given_back: bool) -> None:
    memory = PagedMemory(ROOM)
    pages = memory.pages(monkeypatch, ROOM)
    blocks = [pages.take(UNIT), pages.take(3)]
    if given_back:
        pages.give_back()
    del pages, blocks[0]
    gc.collect()
    assert len(memory.handles) == (0 if given_back else 2) and memory.reserved
    blocks.clear()
    gc.collect()
    assert not memory.handles and not memory.mapped and not memory.reserved


@pytest.mark.parametrize("failing", ["cuMemMap", "cuMemSetAccess"])
def test_a_failing_call_leaves_no_handle(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    memory = PagedMemory(ROOM)
    pages = memory.pages(monkeypatch, ROOM)
    pages.take(UNIT)
    pages.give_back()
    fails: Callable[..., int] = lambda *arguments: 999  # noqa: E731
    monkeypatch.setitem(pages._driver._functions, failing, fails)
    with pytest.raises(RuntimeError, match=f"{failing} failed: CUDA_ERROR"):
        pages.have_again()
    assert not memory.handles and not memory.mapped
