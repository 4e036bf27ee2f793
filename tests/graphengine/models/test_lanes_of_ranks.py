"""Lanes that ranks bring to each other's experts, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.kernels.linear.residual_sum import add_to_residual
from graphengine.models.blocks.lanes_of_ranks import (
    RoutedLanes,
    add_sum_of_own,
    lanes_of_all,
    sum_of_own,
)
from graphengine.models.launches import DecodeLaunch, RankGroup, Share
from graphengine.models.linears import LinearPlans
from graphengine.parallel.collectives.process_group import ProcessGroup

RANKS, LANES, HIDDEN, CHOSEN = 3, 2, 7, 3


def on_all_ranks(folder: Path, work: Callable[[int, ProcessGroup], object]) -> None:
    def rank_of(rank: int) -> None:
        share = Share(rank, RANKS)
        group = ProcessGroup(str(folder / "rendezvous"), share, torch.device("cpu"), 20.0)
        work(rank, group)
        group.close()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(rank_of, range(RANKS)))


def lanes_of(rank: int, dtype: torch.dtype, groups: int) -> RoutedLanes:
    """Lanes in rows that are wider than what is read of them."""
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

    def work(rank: int, group: ProcessGroup) -> None:
        found = lanes_of_all(parts[rank], group)
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

    def work(rank: int, group: ProcessGroup) -> None:
        found = sum_of_own(made[rank], group)
        own = made[:, rank * LANES : (rank + 1) * LANES].float()
        assert torch.equal(found, ((own[0] + own[1]) + own[2]).to(dtype))

    on_all_ranks(tmp_path, work)


def launch_of(group: object) -> DecodeLaunch:
    plans = LinearPlans({})
    return DecodeLaunch(plans=plans, split_tokens=64, experts=cast(RankGroup, group))


@pytest.mark.parametrize("more", [False, True])
def test_the_sum_for_own_lanes_is_added_to_the_stream(tmp_path: Path, more: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(RANKS, RANKS * LANES, HIDDEN, generator=generator)
    slot, norm = torch.tensor([0, -1], dtype=torch.int32), torch.ones(HIDDEN)
    own = torch.randn(LANES, HIDDEN, generator=generator) if more else None

    def stream() -> Residual:
        residual = new_residual(LANES, HIDDEN, 1, dtype=torch.float32, device="cpu")
        residual.x.fill_(3.0)
        return residual

    def work(rank: int, group: ProcessGroup) -> None:
        y = made[:, rank * LANES : (rank + 1) * LANES].sum(0)
        expected = add_to_residual(y if own is None else y + own, slot, stream(), norm)
        launch = launch_of(group)
        found = add_sum_of_own(made[rank], own, slot, stream(), norm, launch)
        torch.testing.assert_close(found.x, expected.x)
        torch.testing.assert_close(found.scaled[:1], expected.scaled[:1])

    on_all_ranks(tmp_path, work)


class Pushing:
    """A group that has kernels for both ways, which note what they get."""

    share = Share(1, RANKS)

    def __init__(self) -> None:
        self.lanes: list[ExpertLanes] = []
        self.parts: list[tuple[Tensor, Tensor | None]] = []

    def push_lanes(self, lanes: ExpertLanes) -> ExpertLanes:
        self.lanes.append(lanes)
        return lanes

    def add_own(
        self,
        parts: Tensor,
        slot: Tensor,
        residual: Residual,
        norm: Tensor,
        *,
        own_NH: Tensor | None,
        pdl: bool,
    ) -> Residual:
        self.parts.append((parts, own_NH))
        return residual


def test_kernels_of_the_group_take_dense_lanes_and_parts_by_rank() -> None:
    group = Pushing()
    lanes = lanes_of(0, torch.float16, 5)
    found = lanes_of_all(lanes, cast(RankGroup, group))
    assert torch.equal(found.x, lanes.x) and found.routes.expert is lanes.routes.expert
    assert found.squares is lanes.squares and group.lanes[0].x.is_contiguous()
    made, own = torch.randn(RANKS * LANES, HIDDEN), torch.randn(LANES, HIDDEN)
    residual = new_residual(LANES, HIDDEN, 1, dtype=torch.float32, device="cpu")
    slot = torch.zeros(LANES, dtype=torch.int32)
    launch = launch_of(group)
    assert add_sum_of_own(made, own, slot, residual, torch.ones(HIDDEN), launch) is residual
    ((parts, given),) = group.parts
    assert parts.shape == (RANKS, LANES, HIDDEN) and given is own
    assert torch.equal(parts[1], made[LANES : 2 * LANES])
