"""Lanes that ranks bring to each other's experts, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphengine.kernels import Routes
from graphengine.models.blocks.lanes_of_ranks import RoutedLanes, lanes_of_all, sum_of_own
from graphengine.models.contract import Share
from graphengine.parallel.meeting import Meeting

RANKS, LANES, HIDDEN, CHOSEN = 3, 2, 7, 3


def on_all_ranks(folder: Path, work: Callable[[int, Meeting], object]) -> None:
    def rank_of(rank: int) -> None:
        share = Share(rank, RANKS)
        meeting = Meeting(str(folder / "meeting"), share, torch.device("cpu"), 20.0)
        work(rank, meeting)
        meeting.close()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(rank_of, range(RANKS)))


def lanes_of(rank: int, dtype: torch.dtype, groups: int) -> RoutedLanes:
    """Of rows that are wider than what is read of them."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(LANES, HIDDEN + 2, generator=generator).to(dtype)[:, :HIDDEN]
    return RoutedLanes(
        x,
        torch.tensor([rank, -1], dtype=torch.int32),
        Routes(
            torch.randint(9, (LANES, CHOSEN), generator=generator, dtype=torch.int32),
            torch.rand(LANES, CHOSEN, generator=generator),
        ),
        torch.rand(groups, LANES, generator=generator) if groups else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [0, 1, 5])
def test_all_have_the_lanes_of_all(tmp_path: Path, dtype: torch.dtype, groups: int) -> None:
    parts = [lanes_of(rank, dtype, groups) for rank in range(RANKS)]

    def whole(of: Callable[[RoutedLanes], Tensor], dim: int = 0) -> Tensor:
        return torch.cat([of(part) for part in parts], dim)

    def work(rank: int, meeting: Meeting) -> None:
        found = lanes_of_all(parts[rank], meeting)
        assert torch.equal(found.x, whole(lambda part: part.x)) and found.x.dtype == dtype
        assert torch.equal(found.slot, whole(lambda part: part.slot))
        assert torch.equal(found.routes.expert, whole(lambda part: part.routes.expert))
        assert torch.equal(found.routes.weight, whole(lambda part: part.routes.weight))
        if groups:
            assert found.squares is not None and found.squares.is_contiguous()
            expected = torch.cat([part.squares for part in parts if part.squares is not None], 1)
            assert torch.equal(found.squares, expected)
        else:
            assert found.squares is None

    on_all_ranks(tmp_path, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_has_the_sum_for_its_own_lanes(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the order of the ranks, whoever has the lanes."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(RANKS, RANKS * LANES, HIDDEN, generator=generator)
    made = (made * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]).to(dtype)

    def work(rank: int, meeting: Meeting) -> None:
        found = sum_of_own(made[rank], meeting)
        own = made[:, rank * LANES : (rank + 1) * LANES].float()
        assert torch.equal(found, ((own[0] + own[1]) + own[2]).to(dtype))

    on_all_ranks(tmp_path, work)
