"""What an adapter of low rank adds to a linear's product: B (A x), of each lane's own adapter.

`decode.py` computes A x in a launch of its own. The product's kernel multiplies that by its
rows of B, and adds the result before its epilogue. A lane without an adapter adds -0.0, which
changes no bit, as 0.0 would change -0.0. The order of a sum over the rank follows from the plan of
the weight alone.

Letters: N lanes, L lanes of a tile, K input features, M weight rows, B outputs of a program, A
slots of adapters, P parts of a weight, R rank of a slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.lanes import FLOAT_DTYPES, check_int32, check_vector

NOTHING = -0.0
"""What lanes without an adapter add to a product."""


class LowRank(NamedTuple):
    """What adapters add to the products of a weight, as two factors.

    A lane adds `up[a, :, m] @ between[n, p * R : p * R + R]` to its output m, where a is its
    adapter and p the part that row m belongs to.

    between_NQ  float32 [N, P * R], dense: scale * A x; anything in lanes without an adapter
    up_ARM      [A, R, M] of any float dtype, dense: rows of B are columns
    part_M      int32: the part that each weight row belongs to
    adapter_S   int32 by slot of a request: its adapter, -1: none
    """

    between_NQ: torch.Tensor
    up_ARM: torch.Tensor
    part_M: torch.Tensor
    adapter_S: torch.Tensor

    @property
    def rank(self) -> int:
        """R"""
        return self.up_ARM.shape[1]

    @property
    def parts(self) -> int:
        """P"""
        return self.between_NQ.shape[1] // self.rank

    def check(self, lanes: int, rows: int) -> None:
        """ValueError, with both shapes, unless the factors fit each other and a product [N, M]."""
        between, up = self.between_NQ, self.up_ARM
        fits = up.dim() == 3 and up.shape[2] == rows and between.dim() == 2 and 0 not in up.shape
        if not fits or len(between) != lanes or between.shape[1] % up.shape[1]:
            raise ValueError(
                f"between {list(between.shape)} and up {list(up.shape)} do not fit the products of "
                f"{lanes} lanes and {rows} rows"
            )
        dtypes = between.dtype == torch.float32 and up.dtype in FLOAT_DTYPES
        if not dtypes or not between.is_contiguous() or not up.is_contiguous():
            raise ValueError(
                f"between must be dense float32 and up a dense float, not {between.dtype} and "
                f"{up.dtype} with strides {between.stride()} and {up.stride()}"
            )
        check_vector("part_M", self.part_M, rows, torch.int32)
        check_int32(adapter_S=self.adapter_S)


Delta = torch.Tensor | LowRank
"""What is added to the products of lanes: dense [N, M], or two factors."""


class DeltaArgs(NamedTuple):
    """A kernel's operand for a dense delta, in any float dtype."""

    rows: torch.Tensor


class LowRankArgs(NamedTuple):
    """A kernel's operand for a `LowRank`; the last two are constants."""

    between: torch.Tensor
    up: torch.Tensor
    part: torch.Tensor
    adapter: torch.Tensor
    rank: Any
    parts: Any


# A kernel tells them apart by their number of fields.
LOW_RANK_FIELDS = tl.constexpr(len(LowRankArgs._fields))
# Steps of a sum over the rank whose loads are under way at the same time: 16 take up to 255
# registers a thread in products of 8B models for sm_90.
_STEPS = tl.constexpr(8)


def delta_args(delta: Delta | None) -> DeltaArgs | LowRankArgs | None:
    """A delta as a kernel's operand."""
    if delta is None:
        return None
    if isinstance(delta, torch.Tensor):
        return DeltaArgs(delta)
    return LowRankArgs(*delta, tl.constexpr(delta.rank), tl.constexpr(delta.parts))


@triton.jit
def adapter_of(slot_ptr, adapter_ptr, lane):
    """The adapter of a lane; -1: it has none; -2: the lane is padded."""
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    adapter = tl.load(adapter_ptr + slot, mask=slot >= 0, other=-1)
    return tl.where(slot >= 0, adapter, -2)


@triton.jit
def load_delta(rows_ptr, lane, column, there, COLUMNS: tl.constexpr):
    """A dense delta of these lanes and columns, as float32 [L, B]."""
    at = lane.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(rows_ptr + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def delta_tile(delta, slot, lane, column, there, nothing, COLUMNS: tl.constexpr):
    """What is added to these lanes and columns, float32 [L, B], after the launch has waited.

    slot     of each lane [L]
    there    the lanes and columns that exist
    nothing  -0.0 in the layout of the result
    """
    if len(delta) == LOW_RANK_FIELDS:
        y = _low_rank_tile(delta, slot, lane, column, there, nothing, COLUMNS)
    else:
        y = load_delta(delta.rows, lane, column, there, COLUMNS)
    return y


@triton.jit
def _low_rank_tile(delta, slot, lane, column, there, nothing, COLUMNS: tl.constexpr):
    """Multiply the lanes' values between the factors by their adapters' rows of B, in order."""
    RANK: tl.constexpr = delta.rank
    STEPS: tl.constexpr = RANK if RANK < _STEPS else _STEPS
    adapter = tl.load(delta.adapter + slot, mask=slot >= 0, other=-1)
    adapted = adapter >= 0
    there = there & adapted[:, None]
    between_ptrs = delta.between + lane.to(tl.int64) * (delta.parts * RANK)
    up_ptrs = delta.up + (adapter.to(tl.int64) * (RANK * COLUMNS))[:, None] + column[None, :]
    part = column * 0
    if delta.parts > 1:
        part = tl.load(delta.part + column, mask=column < COLUMNS, other=0)
    y = nothing
    for first in range(0, RANK, STEPS):
        for offset in tl.static_range(STEPS):
            r = first + offset
            between = tl.load(between_ptrs + r, mask=adapted & (r < RANK), other=0.0)[:, None]
            for each in tl.static_range(1, delta.parts):
                other_ptrs = between_ptrs + (each * RANK + r)
                other = tl.load(other_ptrs, mask=adapted & (r < RANK), other=0.0)[:, None]
                between = tl.where((part == each)[None, :], other, between)
            up = tl.load(up_ptrs + r.to(tl.int64) * COLUMNS, mask=there & (r < RANK), other=0.0)
            y += between * up.to(tl.float32)
    return tl.where(adapted[:, None], y, nothing)


@triton.jit
def load_up(delta, slot_ptr, lane, column, there, COLUMNS: tl.constexpr):
    """A lane's adapter, its rows of B [R, B] for these columns, and the columns' parts [B].

    Before the wait of the launch: the launches that may still run write none of these.
    """
    r = tl.arange(0, triton.next_power_of_2(delta.rank))
    adapter = adapter_of(slot_ptr, delta.adapter, lane)
    inside = (r < delta.rank)[:, None] & (there & (adapter >= 0))[None, :]
    row = adapter.to(tl.int64) * delta.rank + r
    up = tl.load(delta.up + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
    return adapter, up, tl.load(delta.part + column, mask=there, other=0)


@triton.jit
def delta_of_lane(delta, early, lane):
    """What the adapter of a lane [1] adds to some columns [1, B], once `load_up` has loaded."""
    adapter, up, part = early
    r = tl.arange(0, triton.next_power_of_2(delta.rank))
    at = lane[:, None] * (delta.parts * delta.rank) + part[None, :] * delta.rank + r[:, None]
    inside = ((r < delta.rank) & (adapter >= 0))[:, None]
    between = tl.load(delta.between + at, mask=inside, other=0.0)
    y = tl.sum(up.to(tl.float32) * between, axis=0)
    return tl.where(adapter >= 0, y[None, :], negative_zeros(1, y.shape[0]))


@triton.jit
def negative_zeros(L: tl.constexpr, B: tl.constexpr):
    """-0.0 [L, B]; a constant -0.0 would become 0.0."""
    return tl.full((L, B), -(2**31), tl.int32).to(tl.float32, bitcast=True)
