"""Expert layers of data-parallel ranks: each rank has requests of its own, and experts are spread.

Each rank routes its own lanes and sends them, with all that experts read of them, to all ranks.
Every rank runs its experts on the lanes of all ranks, and returns to each rank the results for that
rank's lanes. There the results are summed in rank order. So the bits of a lane depend on which
ranks have its experts, not on the lane's own rank. All ranks have the graph's number of lanes, as
the lanes of a rank without requests are padded: no count is exchanged. On GPUs a decode step has
one kernel for each direction. This is the data flow of attention data parallelism with expert
parallelism in SGLang and TensorRT-LLM, with padded in place of counted lanes.

Letters: R ranks, N lanes of a rank, M = R * N lanes, H hidden, k experts of a lane, T partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.comm.push_lanes import ExpertLanes
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.linear.residual_sum import add_to_residual
from graphengine.models.launches import DecodeLaunch, RankGroup

_ALIGNMENT = 16


class RoutedLanes(NamedTuple):
    """The data of each lane that experts read.

    x        `[N, H]` in the model's dtype, dense rows
    slot     int32 `[N]`, -1 for a padded lane
    routes   the experts of each lane
    squares  float32 `[T, N]` of a norm that x still needs; None: x is normed
    """

    x: Tensor
    slot: Tensor
    routes: Routes
    squares: Tensor | None = None


def lanes_of_all(lanes: RoutedLanes, group: RankGroup) -> RoutedLanes:
    """The M lanes of all ranks, in rank order: one collective."""
    own = ExpertLanes(lanes.x.contiguous(), lanes.slot, *lanes.routes, lanes.squares)
    found = group.push_lanes(own)
    if found is None:
        found = _gathered_lanes(own, group)
    return RoutedLanes(found.x, found.slot, Routes(found.expert, found.weight), found.squares)


def sum_of_own(part_MH: Tensor, group: RankGroup) -> Tensor:
    """`[N, H]`: the sum of all ranks' expert results for this rank's lanes: one collective."""
    return group.sum_own(_by_rank(part_MH, group))


def add_sum_of_own(
    part_MH: Tensor,
    own_NH: Tensor | None,
    slot_N: Tensor,
    residual: Residual,
    next_norm_H: Tensor,
    launch: DecodeLaunch,
) -> Residual:
    """Add `sum_of_own` and this rank's `own_NH`, both float32, to `residual`: one collective."""
    group, pdl = launch.experts, launch.pdl
    assert group is not None, "experts of one rank alone"
    if group.add_own is not None:
        parts = _by_rank(part_MH, group)
        return group.add_own(parts, slot_N, residual, next_norm_H, own_NH=own_NH, pdl=pdl)
    whole = sum_of_own(part_MH, group)
    if own_NH is not None:
        whole += own_NH
    return add_to_residual(whole, slot_N, residual, next_norm_H, pdl=pdl)


def _by_rank(part_MH: Tensor, group: RankGroup) -> Tensor:
    return part_MH.view(group.share.ranks, -1, part_MH.shape[1])


def _gathered_lanes(lanes: ExpertLanes, group: RankGroup) -> ExpertLanes:
    """The lanes of all ranks, packed into bytes for one gather and unpacked after it."""
    x, slot, expert, weight, squares = lanes
    summed = [] if squares is None else [squares.t()]
    x, slot, expert, weight, *summed = _gathered([x, slot[:, None], expert, weight, *summed], group)
    of_all = summed[0].t().contiguous() if summed else None
    return ExpertLanes(x, slot.view(-1), expert, weight, of_all)


def _gathered(parts: Sequence[Tensor], group: RankGroup) -> list[Tensor]:
    """Each part, `[N, columns]`, of all ranks: dense `[M, columns]`."""
    # Flattened first: a dimension of size 1 may have any stride, and then a view as bytes fails.
    rows = [part.reshape(-1).view(torch.uint8).view(len(part), -1) for part in parts]
    starts, end = [], 0
    for row in rows:
        starts.append(end)
        end += -(-row.shape[1] // _ALIGNMENT) * _ALIGNMENT
    sent = rows[0].new_empty((len(rows[0]), end))
    for start, row in zip(starts, rows, strict=True):
        sent[:, start : start + row.shape[1]] = row
    received = group.gather(sent).flatten(0, 1)
    return [
        received[:, start : start + row.shape[1]].contiguous().view(part.dtype)
        for start, row, part in zip(starts, rows, parts, strict=True)
    ]
