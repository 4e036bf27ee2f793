"""How a decode product with a packed weight is cut among programs, for its Gluon kernels.

Letters: L lanes of a program, K input features, M weight rows, R blocks of 16 rows and B outputs of
a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import H200, Device, stages_that_fit
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.packed import BLOCK_ROWS, block_columns
from graphengine.kernels.linear.plans import (
    DOT_LANES,
    FMA_LANES,
    LinearPlan,
    RowFamily,
    least_programs,
)
from graphengine.kernels.linear.quantised import WeightFormat

PACKED_COLUMNS = linear_gluon.ALIGNMENT
"""On a GPU the number of a weight's columns must be a multiple of this."""

LEAST_STREAM = 64
"""Fewest columns of a tile that a stream takes."""

# Bytes of a program's ring: two programs fit an SM, and with `fma` their successors do too.
_RING_BYTES: Mapping[RowFamily, int] = {"fma": 48 * 1024, "dot": 96 * 1024}


class PackedArgs(NamedTuple):
    """The tensors of a `PackedWeight`, or of all weights of `PackedExperts`."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None
    factors: torch.Tensor | None = None


class PackedSizes(NamedTuple):
    """The sizes that are fixed when a kernel is compiled."""

    M: Any
    K: Any
    swiglu: Any
    """0, or the `gate_code` of a SwiGLU, whose blocks of rows are 8 gates and their ups."""
    outputs: Any
    """M, or half of it in a SwiGLU."""
    code: Any
    """A `CodeKind`."""
    zeros: Any
    """Whether groups have zeros."""
    group: Any
    """Columns that share a scale; 0: all, so that only rows have scales."""
    piece: Any
    """Columns that are multiplied at a time, all of one group."""
    block_columns: Any
    """Columns of a block of codes."""
    row_blocks: Any
    column_blocks: Any
    """Blocks of the weight, along its rows and along its columns."""
    L: Any
    x_lanes: Any
    """Lanes in shared memory: L, or 1 if there is only one."""
    R: Any
    B: Any
    block_k: Any
    """Columns of a tile."""
    streams: Any
    stream: Any
    """Columns of a stream of a tile."""
    tiles: Any
    """Tiles of a program, along the columns."""
    stages: Any
    """Tiles in shared memory."""
    even: Any
    """Whether all columns of the tiles are below K."""
    optional: Any
    """Whether a program may have no weight to read."""
    warps: Any
    minimums: Any
    """Whether groups have minimums beside their scales; None: they do not."""
    factor: Any
    """Columns that share a factor on scales; None: there are no factors."""
    factor_piece: Any
    """Columns for which a factor lies in shared memory."""


class ProgramPart(NamedTuple):
    """The part of a product that a program computes."""

    weight: Any
    """Which one of several weights it takes."""
    there: Any
    """Whether it reads that weight at all, if it is `optional`."""
    tile: Any
    """Which R blocks of its rows."""
    split: Any
    """Which `tiles` of its columns."""


def streams(plan: LinearPlan) -> int:
    """Parts of a tile's columns: warps that outnumber the blocks of rows divide the columns."""
    return max(1, plan.warps * BLOCK_ROWS // plan.block_m)


def check_packed_plan(plan: LinearPlan, kind: WeightFormat) -> None:
    """ValueError for a plan that the kernel cannot run with a weight of this format."""
    rows, parts = plan.block_m, streams(plan)
    if rows < BLOCK_ROWS or rows & (rows - 1) or plan.warps & (plan.warps - 1):
        raise ValueError(
            f"{plan}: packed weights take a power of two of at least {BLOCK_ROWS} rows a program "
            "and of warps"
        )
    least = max(LEAST_STREAM, block_columns(kind))
    if plan.block_k & (plan.block_k - 1) or plan.block_k < parts * least:
        raise ValueError(
            f"{plan}: {parts} streams of packed {kind.code} want a power of two of at least "
            f"{parts * least} columns a tile"
        )


def packed_plan(
    kind: WeightFormat, M: int, K: int, family: RowFamily, device: Device = H200
) -> LinearPlan:
    """A plan for a weight that no tuning table knows, on this GPU.

    Tiles and scales fit the GPU's shared memory (`fitting_plan`).
    """
    if family == "fma":
        block_m = BLOCK_ROWS
    else:
        block_m = 64 if least_programs(device.processors) <= -(-M // 64) else 32
    plan = _plan_of_rows(kind, K, family, block_m)
    while _beside(plan, kind, K) > _RING_BYTES[family] // 2 and plan.block_m > BLOCK_ROWS:
        plan = _plan_of_rows(kind, K, family, plan.block_m // 2)
    lanes = FMA_LANES if family == "fma" else DOT_LANES
    return fitting_plan(plan, kind, K, lanes, device)


def fitting_plan(
    plan: LinearPlan, kind: WeightFormat, K: int, lanes: int, device: Device
) -> LinearPlan:
    """The plan itself, or a smaller one that fits a program of these lanes.

    It has fewer stages, and where not even two fit, fewer rows, then warps, then columns. If none
    fits, it is the smallest: its launch is an error.
    """

    def fits(plan: LinearPlan) -> bool:
        taken = packed_bytes(plan, kind, K, lanes, kind.usual_scale_bytes)
        return taken <= device.shared_bytes

    for smaller in _smaller_plans(plan, kind):
        plan = smaller
        if fits(plan._replace(stages=2)):
            break
    while plan.stages > 2 and not fits(plan):
        plan = plan._replace(stages=plan.stages - 1)
    return plan


def _smaller_plans(plan: LinearPlan, kind: WeightFormat) -> Iterator[LinearPlan]:
    """The plan, then others of which each takes less shared memory."""
    least = max(LEAST_STREAM, block_columns(kind))
    while True:
        yield plan
        parts = streams(plan)
        if plan.block_m > BLOCK_ROWS:
            fewer = plan._replace(block_m=plan.block_m // 2)
            plan = fewer._replace(block_k=plan.block_k * streams(fewer) // parts)
        elif plan.warps > 1:
            # Shorter streams first would repeat factors more often.
            plan = plan._replace(warps=plan.warps // 2, block_k=plan.block_k // 2)
        elif plan.block_k > parts * least:
            plan = plan._replace(block_k=plan.block_k // 2)
        else:
            return


def _plan_of_rows(kind: WeightFormat, K: int, family: RowFamily, block_m: int) -> LinearPlan:
    warps, lanes = 4, 1 if family == "fma" else 32
    parts = warps * BLOCK_ROWS // block_m
    column_bytes = block_m * kind.bits // 8
    # With one lane a stream needs enough columns to hide the other costs of a tile.
    block_k = parts * (max(LEAST_STREAM, 2048 // column_bytes) if lanes == 1 else 128)
    while block_k > LEAST_STREAM * parts and block_k >= 2 * K:
        block_k //= 2
    plan = LinearPlan(family, block_m, block_k, warps=warps)
    room = _RING_BYTES[family] - _beside(plan, kind, K)
    stages = room // (block_k * (column_bytes + 2 * lanes))
    if stages < 2 and not kind.is_common:
        # With one lane an inner product needs more columns, as above.
        plan = plan._replace(block_k=min(block_k, LEAST_STREAM * parts * (2 if lanes == 1 else 1)))
    return plan._replace(stages=max(2, min(8, stages)))


def _beside(plan: LinearPlan, kind: WeightFormat, K: int) -> int:
    """Bytes of a program's ring that scales take, where these are large: those with minimums or
    factors.
    """
    return 0 if kind.is_common else group_bytes(plan, kind, K)


def group_bytes(plan: LinearPlan, kind: WeightFormat, K: int, scale: int = 0) -> int:
    """Bytes of shared memory for a program's scales, with their minimums and factors.

    scale  bytes of a scale that is no integer; 0: 2
    """
    if not kind.columns:
        return 0
    stream, parts = plan.block_k // streams(plan), streams(plan)
    tiles = triton.cdiv(K, plan.block_k * plan.splits)

    def values(columns: int) -> int:
        # Sizes of Triton's tensors are powers of two.
        uses: int = triton.next_power_of_2(tiles * (stream // min(columns, stream)))
        return parts * uses * plan.block_m

    scale = 1 if kind.block else scale or 2
    of_groups = values(kind.columns) * (scale * (1 + kind.has_minimums) + kind.has_zeros)
    factors = values(kind.block) * 2 * (1 + kind.has_minimums) if kind.block else 0
    return of_groups + factors


def packed_bytes(plan: LinearPlan, kind: WeightFormat, K: int, lanes: int, scale: int) -> int:
    """Bytes of shared memory of a program with a packed weight: the tiles' codes, their inputs for
    `lanes` lanes, and all scales, of `scale` bytes, with what is beside them.
    """
    tiles = -(-K // (plan.block_k * plan.splits))
    held = 1 if lanes == 1 else 8 if lanes <= 8 else 16 if lanes <= 16 else DOT_LANES
    ring = plan.block_k * (plan.block_m * kind.bits // 8 + 2 * held)
    return int(min(max(2, plan.stages), tiles) * ring + group_bytes(plan, kind, K, scale))


def new_cut(
    weight: PackedArgs,
    kind: WeightFormat,
    plan: LinearPlan,
    *,
    M: int,
    K: int,
    swiglu: int,
    L: int,
    alone: bool,
    optional: bool = False,
    splits: int = 1,
) -> PackedSizes:
    """The cut of a weight [M, K] by a plan that is checked, as a kernel's operand.

    L         lanes of a program: 8, 16 or 32
    alone     only the first of these lanes exists
    optional  a program may have no weight to read
    splits    programs that share the columns
    """
    outputs = M // 2 if swiglu else M
    parts = streams(plan)
    stream = plan.block_k // parts
    group = 0
    if weight.scales is not None:
        # Whole blocks are loaded, so a scale for all columns covers whole blocks of them.
        group = kind.columns or max(block_columns(kind), triton.next_power_of_2(K))
    piece = min(group, stream) if group else stream
    tiles, x_lanes = triton.cdiv(K, plan.block_k * splits), 1 if alone else L
    beside = 0
    if weight.scales is not None and kind.is_common:
        uses = parts * triton.next_power_of_2(tiles * (stream // piece))
        beside = uses * plan.block_m * (weight.scales.itemsize + (weight.zeros is not None))
    elif weight.scales is not None:
        beside = group_bytes(plan._replace(splits=splits), kind, K, weight.scales.itemsize)
    cut = PackedSizes(
        M=M,
        K=K,
        swiglu=swiglu,
        outputs=outputs,
        code=kind.code,
        zeros=weight.zeros is not None,
        group=group,
        piece=piece,
        block_columns=block_columns(kind),
        row_blocks=triton.cdiv(outputs, BLOCK_ROWS // 2 if swiglu else BLOCK_ROWS),
        column_blocks=triton.cdiv(K, block_columns(kind)),
        L=L,
        x_lanes=x_lanes,
        R=plan.block_m // BLOCK_ROWS,
        B=plan.block_m // 2 if swiglu else plan.block_m,
        block_k=plan.block_k,
        streams=parts,
        stream=stream,
        tiles=tiles,
        stages=_stages(weight, kind, plan, linear_gluon.stages(plan, splits, K), x_lanes, beside),
        even=K % (plan.block_k * splits) == 0,
        optional=optional,
        warps=plan.warps,
        minimums=kind.has_minimums or None,
        factor=kind.block or None,
        factor_piece=min(kind.block, stream) or None,
    )
    return PackedSizes(*(None if value is None else gl.constexpr(value) for value in cut))


def _stages(
    weight: PackedArgs, kind: WeightFormat, plan: LinearPlan, wanted: int, lanes: int, beside: int
) -> int:
    """Tiles, at most `wanted`, of codes and of `lanes` inputs that fit shared memory.

    Scales, with what belongs to them, take `beside` bytes of it.
    """
    tile = plan.block_k * (plan.block_m * kind.bits // 8 + 2 * lanes)
    return stages_that_fit(wanted, tile, beside, weight.codes, plan)
