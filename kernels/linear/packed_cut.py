"""How a decode product with a packed weight is cut among programs, for its Gluon kernels.

Letters: L lanes of a program, K input features, M weight rows, R blocks of 16 rows and B outputs of
a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from graphengine.kernels.core.devices import stages_that_fit
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.packed import BLOCK_ROWS, block_columns
from graphengine.kernels.linear.plans import (
    USUAL_PROCESSORS,
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
    kind: WeightFormat, M: int, K: int, family: RowFamily, processors: int = USUAL_PROCESSORS
) -> LinearPlan:
    """A plan for a weight that no tuning table knows, on this many multiprocessors."""
    warps, lanes = 4, 1 if family == "fma" else 32
    if family == "fma":
        block_m = BLOCK_ROWS
    else:
        block_m = 64 if least_programs(processors) <= -(-M // 64) else 32
    parts = warps * BLOCK_ROWS // block_m
    column_bytes = block_m * kind.bits // 8
    # With one lane a stream needs enough columns to hide the other costs of a tile.
    block_k = parts * (max(LEAST_STREAM, 2048 // column_bytes) if lanes == 1 else 128)
    while block_k > LEAST_STREAM * parts and block_k >= 2 * K:
        block_k //= 2
    stages = max(2, min(8, _RING_BYTES[family] // (block_k * (column_bytes + 2 * lanes))))
    return LinearPlan(family, block_m, block_k, stages=stages, warps=warps)


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
    uses = parts * triton.next_power_of_2(tiles * (stream // piece))
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
        stages=_stages(weight, kind, plan, linear_gluon.stages(plan, splits, K), x_lanes, uses),
        even=K % (plan.block_k * splits) == 0,
        optional=optional,
        warps=plan.warps,
    )
    return PackedSizes(*(gl.constexpr(value) for value in cut))


def _stages(
    weight: PackedArgs, kind: WeightFormat, plan: LinearPlan, wanted: int, lanes: int, uses: int
) -> int:
    """Tiles, at most `wanted`, of codes and of `lanes` inputs that fit shared memory.

    A program's scales and zeros lie there too: `uses` times those of all its rows.
    """
    groups = 0
    if weight.scales is not None:
        of_row = weight.scales.itemsize + (weight.zeros is not None)
        groups = uses * plan.block_m * of_row
    tile = plan.block_k * (plan.block_m * kind.bits // 8 + 2 * lanes)
    return stages_that_fit(wanted, tile, groups, weight.codes, plan)
