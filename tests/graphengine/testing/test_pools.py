"""no_leaked_pool: over a stand-in for torch's allocator. Natively: test_planted_faults.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.testing import GraphCheckError, no_leaked_pool


class Allocator:
    """Has one segment in each of `pools`; the next tensor goes to the segment of `current`."""

    def __init__(self) -> None:
        self.pools = {(0, 0): 2**21, (0, 1): 2**21}
        self.current = (0, 0)
        self.capturing = False
        self.error = ""

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0,
                "address": place * 2**30,
                "total_size": size,
                "segment_pool_id": pool,
                "blocks": [],
            }
            for place, (pool, size) in enumerate(self.pools.items(), 1)
        ]

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        place = list(self.pools).index(self.current) + 1

        class Tensor:
            def data_ptr(self) -> int:
                return place * 2**30

        return Tensor()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    for name, function in (
        ("is_available", lambda: True),
        ("init", lambda: None),
        ("current_device", lambda: 0),
        ("is_current_stream_capturing", lambda: allocator.capturing),
        ("empty_cache", lambda: None),
        ("memory_snapshot", allocator.snapshot),
    ):
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch, "empty", allocator.empty)
    return allocator


LEFT = "a capture of the block left something behind: "


def test_pools_from_before_pass(allocator: Allocator) -> None:
    with no_leaked_pool():
        pass


def test_a_stream_that_is_still_captured_is_told(allocator: Allocator) -> None:
    with pytest.raises(GraphCheckError, match=LEFT + "the current stream is"), no_leaked_pool():
        allocator.capturing = True


def test_a_pool_that_is_still_held_is_told(allocator: Allocator) -> None:
    message = LEFT + r"1 private pools are still held: \(0, 2\) with 2.0 MiB. Drop or reset"
    with pytest.raises(GraphCheckError, match=message), no_leaked_pool():
        allocator.pools[0, 2] = 2**21


def test_a_pool_that_grew_is_told_by_its_growth(allocator: Allocator) -> None:
    message = r"still held: \(0, 1\) with 4.0 MiB"
    with pytest.raises(GraphCheckError, match=message), no_leaked_pool():
        allocator.pools[0, 1] += 2**22


def test_an_allocator_that_still_records_is_told(allocator: Allocator) -> None:
    message = LEFT + r"a new tensor was put into the private pool \(0, 1\), and so will be those"
    with pytest.raises(GraphCheckError, match=message), no_leaked_pool():
        allocator.current = (0, 1)


def test_an_allocator_that_is_broken_is_told(allocator: Allocator) -> None:
    message = LEFT + r"torch cannot allocate any more \(captures_underway.empty\(\)\)"
    with pytest.raises(GraphCheckError, match=message), no_leaked_pool():
        allocator.error = "captures_underway.empty()\nframe 1"


def test_an_error_of_the_block_passes(allocator: Allocator) -> None:
    with pytest.raises(KeyError), no_leaked_pool():
        allocator.capturing = True
        raise KeyError


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="no_leaked_pool needs a CUDA device"), no_leaked_pool():
        pass
