"""Ranks that meet on a CPU: all have the sum in the order of the ranks, or an error in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from graphengine.models.contract import Share
from graphengine.parallel.meeting import Meeting, MeetingFailed

Result = TypeVar("Result")
CPU = torch.device("cpu")


def on_all_ranks(
    folder: Path, ranks: int, work: Callable[[int, Meeting], Result], limit_s: float = 20.0
) -> list[Result]:
    def rank_of(rank: int) -> Result:
        meeting = Meeting(str(folder / "meeting"), Share(rank, ranks), CPU, limit_s)
        result = work(rank, meeting)
        meeting.close()
        return result

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank_of, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_have_the_sum_in_the_order_of_the_ranks(tmp_path: Path, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    parts = [torch.randn(3, 50, generator=generator) * 10**rank for rank in range(ranks)]

    def work(rank: int, meeting: Meeting) -> list[Tensor]:
        return [
            meeting.reduce(parts[rank].to(dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]

    results = on_all_ranks(tmp_path, ranks, work)
    for found, *others in zip(*results, strict=True):
        total = torch.zeros(3, 50)
        for part in parts:
            total = total + part.to(found.dtype).float()
        assert torch.equal(found, total.to(found.dtype))
        assert all(torch.equal(found, other) for other in others)
    # The host program's group is its own.
    assert not torch.distributed.is_initialized()


def test_a_rank_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    def work(rank: int, meeting: Meeting) -> str:
        if rank == 1:
            return ""
        with pytest.raises(MeetingFailed) as error:
            meeting.reduce(torch.ones(1, 4))
        return str(error.value)

    text, _ = on_all_ranks(tmp_path, 2, work, limit_s=1.0)
    assert text and "\n" not in text


def test_each_has_the_sum_of_what_all_have_for_it(tmp_path: Path) -> None:
    parts = [torch.randn(3, 2, 2) * 10**rank for rank in range(3)]
    results = on_all_ranks(tmp_path, 3, lambda rank, meeting: meeting.sum_own(parts[rank]))
    for rank, found in enumerate(results):
        assert torch.equal(found, parts[0][rank] + parts[1][rank] + parts[2][rank])


def test_a_rank_that_brings_nothing_of_its_own_is_not_waited_for(tmp_path: Path) -> None:
    def work(rank: int, meeting: Meeting) -> None:
        if rank == 0:
            assert meeting.add_own is None
            with pytest.raises(MeetingFailed):
                meeting.sum_own(torch.ones(2, 1, 4))

    on_all_ranks(tmp_path, 2, work, limit_s=1.0)


def test_a_rank_knows_for_how_long_it_has_waited(tmp_path: Path) -> None:
    def work(rank: int, meeting: Meeting) -> float:
        assert meeting.waited_s == 0.0
        meeting.reduce(torch.ones(1, 4))
        if rank == 1:
            time.sleep(0.3)
        meeting.gather(torch.ones(1, 4))
        return meeting.waited_s

    first, _ = on_all_ranks(tmp_path, 2, work)
    assert first > 0.2
