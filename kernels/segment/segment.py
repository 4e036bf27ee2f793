"""A segment: up to four products of a decode step that follow each other, in one launch.

    attention's output -> O + residual -> gates and ups -> down + residual -> the next layer's QKV

The launch has one program a multiprocessor, or fewer. All of them are resident at the same time,
so they may wait for each other: each passes on its outputs through global memory. `units.py` says
how the work is dealt, `segment_gluon.py` how it is done.

A lane's sums are formed in an order that follows from the weights' shapes alone: each consumer
warp has two chains of `mma.sync` over its columns, and the warps' sums are added in order. So bits
depend neither on the number of lanes nor on that of programs.

A wait for inputs ends after about a second, and the launch's results are then garbage: `error` says
so, and remains until the host clears it.

Letters: N lanes, K input features, H hidden, T groups of columns, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphengine.kernels.core.devices import device_of
from graphengine.kernels.core.dispatch import use_wgmma
from graphengine.kernels.core.lanes import check_int32, check_rows, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.segment.reference import segment_reference
from graphengine.kernels.segment.segment_gluon import segment_kernel
from graphengine.kernels.segment.units import (
    PlacedStage,
    SegmentCut,
    Stage,
    deal_units,
    place_stages,
)

# The kernel takes 79 or fewer where there is no limit. Attention's programs fit beside it.
_MOST_REGISTERS = 80


class StageTensors(NamedTuple):
    """A tensor, or None, for each stage of a segment."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    third: torch.Tensor | None = None
    fourth: torch.Tensor | None = None


class SegmentPlan(NamedTuple):
    """How the segments of a shape are cut, for a number of lanes.

    table  int32 [stages, P, 2], on the device, by `deal_units`
    """

    stages: tuple[Stage, ...]
    placed: tuple[PlacedStage, ...]
    cut: SegmentCut
    table: torch.Tensor

    @property
    def programs(self) -> int:
        return self.table.shape[1]


class SegmentMemory:
    """Memory through which the programs of launches pass on inputs: sets of words, one in use.

    A launch uses the set of its number and clears that of the next one. Launches of a graph, two or
    more, have the numbers 0 to `launches` - 1, in this order; every graph leaves set 0 clear.

    error  int32 [1]: not 0 once a wait was in vain
    """

    def __init__(self, words: int, device: torch.device | str) -> None:
        self.sets = torch.full((3, -(-words // 4) * 4), -1, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def of_launch(self, number: int, launches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The set of this launch of a graph, and the one that it clears for the next launch.

        ValueError for a graph of one launch: it would clear the set that it uses.
        """
        if launches < 2:
            raise ValueError(f"a graph has two or more segments, not {launches}")
        return self.sets[_set_of(number, launches)], self.sets[_set_of(number + 1, launches)]


def _set_of(number: int, launches: int) -> int:
    """The first and the last launch of a graph, which follow each other, differ too."""
    number %= launches
    return 2 if number == launches - 1 and number % 2 == 0 else number % 2


def plan_segment(
    stages: Sequence[Stage],
    rows: int,
    device: torch.device | str,
    *,
    programs: int | None = None,
    consumers: int = 8,
    slots: int | None = None,
    flight: int = 3,
    x_bytes: int = 64 * 1024,
) -> SegmentPlan:
    """Plan for the GPU: a program a multiprocessor, unless there are to be fewer.

    ValueError for more programs than multiprocessors, and as `place_stages` says.
    """
    found = device_of(torch.device(device))
    processors = 1 if found is None else found.processors
    programs = programs or processors
    if found is not None and programs > processors:
        raise ValueError(f"{programs} programs cannot all be resident on {processors} processors")
    placed, cut = place_stages(
        stages,
        rows=rows,
        programs=programs,
        consumers=consumers,
        slots=slots,
        flight=flight,
        x_bytes=x_bytes,
    )
    table = deal_units(stages, programs).to(device)
    return SegmentPlan(tuple(stages), placed, cut, table)


def segment(
    x_NK: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor | None],
    plan: SegmentPlan,
    memory: SegmentMemory,
    slot_N: torch.Tensor,
    stream_NH: torch.Tensor,
    *,
    eps: float,
    number: int = 0,
    launches: int = 2,
    out: torch.Tensor | None = None,
    squares_TN: torch.Tensor | None = None,
    trace: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Run a plan's stages: all launches of a graph share `memory`.

    Args:
        x_NK: bfloat16, the input of the first stage; rows dense, at multiples of 16 bytes.
        weights: bfloat16, dense, one for each stage.
        norms: of each stage that adds to the stream, the weights [H] of the norm after it.
        slot_N: int32, -1 = padded lane: neither read nor written.
        stream_NH: float32, dense: the residual stream, updated in place.
        eps: of the norms.
        number, launches: as `SegmentMemory` says.
        out: [N, outputs of the last stage] in x's dtype: its product, or the stream times the norm
            where it adds to it. None: new memory.
        squares_TN: float32 [H / 8, N], dense: sums of squares of the stream, as a `Residual` has
            them. Wanted if the last stage adds to the stream.
        trace: int32 [P, 16]: clocks of each program at its start, after its wait, and before and
            after each stage's product; from number 12 on the time in ns at its start, after its
            wait and at its end.
        pdl: the launch may overlap the one before, and the next one this launch: that one may read
            early only what was written before the launch before this one.

    ValueError for operands that do not fit the plan.
    """
    _check(x_NK, weights, norms, plan, slot_N, stream_NH, squares_TN)
    shape = (plan.cut.rows, plan.stages[-1].outputs)
    out = output_rows(out, shape, dtype=x_NK.dtype, like=x_NK)
    if not use_wgmma(x_NK):
        segment_reference(
            x_NK, weights, norms, plan.stages, slot_N, stream_NH, out, squares_TN, eps=eps
        )
        return out
    used, cleared = memory.of_launch(number, launches)
    launcher(segment_kernel, (plan.programs,))(
        x_NK,
        StageTensors(*weights),
        StageTensors(*norms),
        plan.table,
        slot_N,
        used,
        cleared,
        stream_NH,
        out,
        squares_TN,
        memory.error,
        trace,
        x_NK.stride(0),
        out.stride(0),
        cleared.numel(),
        eps,
        STAGES=plan.placed,
        CUT=plan.cut,
        num_warps=2 * plan.cut.consumers,
        maxnreg=_MOST_REGISTERS,
        **launch_options(pdl),
    )
    return out


def _check(
    x_NK: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor | None],
    plan: SegmentPlan,
    slot_N: torch.Tensor,
    stream_NH: torch.Tensor,
    squares_TN: torch.Tensor | None,
) -> None:
    stages, rows = plan.stages, plan.cut.rows
    check_rows(x_NK=x_NK)
    check_int32(slot=slot_N)
    found = (len(weights), len(norms), *x_NK.shape, len(slot_N))
    wanted = (len(stages), len(stages), rows, stages[0].columns, rows)
    if found != wanted:
        raise ValueError(
            f"weights, norms, lanes, columns and slots are {found}, the plan has {wanted}"
        )
    if x_NK.dtype != torch.bfloat16 or x_NK.stride(0) % 8 or x_NK.data_ptr() % 16:
        raise ValueError(f"x must be bfloat16 rows of 16 bytes, not {x_NK.dtype} {x_NK.stride()}")
    for number, (stage, weight, norm) in enumerate(zip(stages, weights, norms, strict=True)):
        shape = (stage.rows, stage.columns)
        if weight.shape != shape or weight.dtype != x_NK.dtype or not weight.is_contiguous():
            raise ValueError(
                f"weight {number} must be a dense {x_NK.dtype} {list(shape)}, not {weight.dtype} "
                f"{list(weight.shape)}"
            )
        if stage.kind == "residual" and (norm is None or norm.shape != (stage.rows,)):
            found_norm = None if norm is None else list(norm.shape)
            raise ValueError(f"norm {number} must have {stage.rows} weights, not {found_norm}")
    last = stages[-1]
    if last.kind == "residual" and (
        squares_TN is None
        or squares_TN.shape != (last.units, rows)
        or not squares_TN.is_contiguous()
    ):
        shape_found = None if squares_TN is None else list(squares_TN.shape)
        raise ValueError(f"squares must be a dense {[last.units, rows]}, not {shape_found}")
    _check_stream(stream_NH, rows)


def _check_stream(stream_NH: torch.Tensor, rows: int) -> None:
    if stream_NH.dtype != torch.float32 or len(stream_NH) != rows or not stream_NH.is_contiguous():
        raise ValueError(
            f"the stream must be dense float32 of {rows} lanes, not {stream_NH.dtype} "
            f"{list(stream_NH.shape)}"
        )
