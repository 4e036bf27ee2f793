"""How a decode linear is cut into programs: by family, and by the weight's shape, never by lanes.

`row family` names the arithmetic: `fma` multiplies and adds in float32 registers, for 1 or 2 lanes;
`dot` uses the tensor cores on tiles of 16 or 32 lanes. Within one family and one plan a lane's bits
do not depend on how many lanes there are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

RowFamily = Literal["fma", "dot"]
LinearKind = Literal["store", "swiglu", "residual", "sample"]

FMA_LANES = 2
"""Lanes up to which an engine takes the `fma` family unless told otherwise."""


class LinearPlan(NamedTuple):
    """Sizes of one linear's programs.

    The numerics depend on `family`, `block_k`, `splits` and, in `fma`, on `warps` and `block_m`,
    which place the elements of a sum in threads; on the rest only the speed.
    """

    family: RowFamily
    block_m: int
    """Weight rows a program; of a SwiGLU half of them are gates."""
    block_k: int
    """Columns of a tile: a power of two."""
    splits: int = 1
    """Parts of K that go to different programs; `dot` only."""
    stages: int = 1
    """Tiles in flight in the `dot` loop."""
    warps: int = 4
    overlap: bool = True
    """Whether the launch behind this one may start early, with programmatic dependent launch."""


def row_family(lanes: int) -> RowFamily:
    """The family of an engine whose largest launch has `lanes` rows."""
    return "fma" if lanes <= FMA_LANES else "dot"


def attention_split(family: RowFamily, head_dim: int, max_lanes: int) -> int:
    """Keys of one split of decode attention, for an engine of up to `max_lanes` rows.

    Measured on an H200: short ones where lanes are few or, up to 16 lanes, heads long; else fewer
    partials win.
    """
    return 64 if family == "fma" or (head_dim > 64 and max_lanes <= 16) else 128


def heuristic_plan(
    kind: LinearKind, M: int, K: int, dtype: torch.dtype, family: RowFamily
) -> LinearPlan:
    """A plan for a weight [M, K] that no tuning table knows; fair on a GPU with about 132 SMs."""
    check_kind(kind, family)
    if family == "fma":
        return _fma_plan(kind, M, K, dtype)
    if dtype == torch.float32:
        # No tensor cores: multiply-adds from registers. Exact rather than fast.
        return LinearPlan("dot", block_m=32, block_k=min(32, _padded(K)), stages=2)
    fills_with_64 = M >= 64 * 132
    block_m = 64 if fills_with_64 else 32
    tiles = -(-M // block_m)
    splits = 1
    while K >= 2048 and not fills_with_64 and tiles * splits < 2 * 132 and splits < 4:
        splits *= 2
    return LinearPlan(
        "dot",
        block_m=block_m,
        # An odd multiple of 64 needs no masks in tiles of 64.
        block_k=64 if K % 128 == 64 else min(128, _padded(K)),
        splits=splits,
        stages=3 if fills_with_64 else 5,
    )


def _fma_plan(kind: LinearKind, M: int, K: int, dtype: torch.dtype) -> LinearPlan:
    """Rows of up to about 32 KB a program, all of it in flight before the wait."""
    block_k = min(2048, _padded(K))
    warps = 4 if block_k >= 1024 else 2
    row_bytes = K * dtype.itemsize
    block_m = 2
    while block_m < 16 and 2 * block_m * row_bytes <= 32 * 1024 and 4 * block_m * 132 <= M:
        block_m *= 2
    if kind == "sample":
        # Each program leaves one candidate a lane: fewer of them make the reduction short.
        block_m = max(block_m, 8)
    # No more than 96 registers a thread for weights.
    while block_m > 2 and block_m * row_bytes > 96 * 1024:
        block_m //= 2
    while warps < 8 and block_m * row_bytes > 96 * 4 * 32 * warps:
        warps *= 2
    return LinearPlan("fma", block_m=block_m, block_k=block_k, warps=warps)


def check_kind(kind: str, family: str) -> None:
    """ValueError for a name that is none of the kinds or families."""
    if kind not in get_args(LinearKind):
        raise ValueError(f"kind={kind!r} is none of {', '.join(get_args(LinearKind))}")
    if family not in get_args(RowFamily):
        raise ValueError(f"row family {family!r} is none of {', '.join(get_args(RowFamily))}")


def _padded(K: int) -> int:
    """The power of two that holds K, and at least the 16 that `tl.dot` wants."""
    return max(16, 1 << (K - 1).bit_length())
