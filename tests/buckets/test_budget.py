"""MemoryBudget: sums by place, the check, the table."""

import pytest

from graphengine.buckets import MemoryBudget, OutOfBudget, format_bytes

GIB = 2**30


@pytest.fixture
def budget() -> MemoryBudget:
    budget = MemoryBudget()
    budget.add("weights", 3 * GIB)
    budget.add("KV cache", 512 * 2**20)
    budget.add("swap", GIB, "pinned")
    return budget


def test_totals_are_kept_apart(budget: MemoryBudget) -> None:
    assert budget.total() == 3 * GIB + 512 * 2**20
    assert budget.total("pinned") == GIB
    assert budget.total("host") == 0


def test_table(budget: MemoryBudget) -> None:
    assert budget.table().splitlines() == [
        "memory    where        size",
        "---------------------------",
        "weights   device   3.00 GiB",
        "KV cache  device  512.0 MiB",
        "swap      pinned   1.00 GiB",
        "---------------------------",
        "total     device   3.50 GiB",
        "total     pinned   1.00 GiB",
    ]


def test_check(budget: MemoryBudget) -> None:
    budget.check(budget.total())
    budget.check(0, "host")
    with pytest.raises(OutOfBudget) as caught:
        budget.check(budget.total() - 1)
    message = str(caught.value)
    assert "3.50 GiB (3758096384 bytes) planned" in message
    assert "(3758096383 bytes) available, 1 B short" in message
    assert message.endswith(budget.table())
    assert isinstance(caught.value, ValueError)


def test_lines_that_make_no_sense(budget: MemoryBudget) -> None:
    with pytest.raises(ValueError, match="where='disk' is none of device, pinned, host"):
        budget.add("cache", 1, "disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graphs: -1 bytes"):
        budget.add("graphs", -1)
    assert len(budget.lines) == 3


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 2**10, "1.5 MiB"),
        (141 * GIB, "141.00 GiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
