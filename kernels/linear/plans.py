"""How a decode linear is cut into programs: by family, and by the weight's shape, never by lanes.

`row family` names the arithmetic: `fma` multiplies and adds in float32 registers, for 1 or 2 lanes;
`dot` uses the tensor cores on tiles of 16 or 32 lanes. Within one family and one plan a lane's bits
do not depend on how many lanes there are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from graphengine.kernels.core.devices import H200, Device

RowFamily = Literal["fma", "dot"]
LinearKind = Literal["store", "swiglu", "residual", "sample"]
_KINDS, _FAMILIES = get_args(LinearKind), get_args(RowFamily)

LONG_SPLIT_BYTES = 512
"""Most bytes of a key for which a split of 128 still fits an SM's shared memory."""

FMA_LANES = 2
"""Most lanes that the kernels of the `fma` family take."""

DOT_LANES = 32
"""Most lanes of a program of the `dot` family."""

FMA_TOKENS = 4096
"""The longest requests, in tokens, for which attention beside `fma` has short splits. Engines for
longer ones do not compute chains of drafts in `fma`."""

FMA_THREAD_BYTES = 96 * 4
"""Most bytes of weights that an `fma` plan gives a thread: they fill 96 of its registers."""


class LinearPlan(NamedTuple):
    """Sizes of one linear's programs.

    The numerics depend on `family`, `block_k`, `splits` and, in `fma`, on `warps` and `block_m`,
    which place the elements of a sum in threads; on the rest only the speed.
    """

    family: RowFamily
    block_m: int
    """Weight rows a program; in a SwiGLU half of them are gates, the others their ups."""
    block_k: int
    """Columns of a tile: a power of two."""
    splits: int = 1
    """Parts of K that go to different programs; `dot` only."""
    stages: int = 1
    """Tiles of the `dot` loop in shared memory, each with its inputs: one is read while the others
    are in flight. `linear_gluon.py` requests them before the launch waits for its inputs."""
    warps: int = 4
    overlap: bool = True
    """Whether the launch after this one may start early, with programmatic dependent launch."""


def row_family(lanes: int) -> RowFamily:
    """The family of an engine whose largest launch has `lanes` lanes.

    With `fma` two lanes cost half as much again as one, because the loads of the weights no longer
    hide products made in registers. One lane of an 8B model on an H200 costs 4 % more in `dot` than
    in `fma` at 40 tokens, and 2 and 1 % more at 8,192 and 32,768; one of Gemma 3 4B, most of whose
    layers see a window, 22 % more at 8,192. That needs kernels that ask for cache: `prefer_cache`.
    """
    return "fma" if lanes == 1 else "dot"


def dot_columns(columns: int) -> int:
    """Columns of a tile that holds `columns`: `tl.dot` wants a power of two of at least 16."""
    return max(16, 1 << (columns - 1).bit_length())


def attention_split(family: RowFamily, head_dim: int, dtype: torch.dtype, tokens: int) -> int:
    """Keys of one split of decode attention, in a layer that sees `tokens` tokens at most.

    Measured on an H200: short splits win where lanes and tokens are few; with many, fewer partials
    do. With the longest heads in float32 a split of 128 does not fit an SM.
    """
    few = family == "fma" and tokens <= FMA_TOKENS
    if few or head_dim * dtype.itemsize > LONG_SPLIT_BYTES:
        return 64
    return 256 if dtype.itemsize == 2 else 128


def least_programs(processors: int) -> int:
    """Fewest programs of a `dot` plan on this many multiprocessors, if K can be split: 90 of 132.

    More programs cost more, in inputs and partial sums, than the idle multiprocessors would bring.
    """
    return processors * 15 // 22


def heuristic_plan(
    kind: LinearKind,
    M: int,
    K: int,
    dtype: torch.dtype,
    family: RowFamily,
    device: Device = H200,
) -> LinearPlan:
    """A plan for a weight [M, K] that no tuning table knows, on this GPU.

    Where its tiles do not fit the GPU's shared memory it has fewer stages, which change no bit.
    """
    check_kind(kind, family)
    processors = device.processors
    if family == "fma":
        return _fma_plan(kind, M, K, dtype, processors)
    if dtype == torch.float32:
        # No tensor cores: multiply-adds from registers. Exact rather than fast.
        return LinearPlan("dot", block_m=32, block_k=min(32, dot_columns(K)), stages=2)
    # An odd multiple of 64 needs no masks in tiles of 64.
    block_k = 64 if K % 128 == 64 else min(128, dot_columns(K))
    if kind == "sample":
        return _fitting(_dot_sample_plan(M, block_k, processors), dtype, device)
    least, rows = least_programs(processors), 2 if kind == "swiglu" else 1
    most_splits = 4 if K >= 2048 else 1
    # Each program reads all inputs: the more outputs it has, the less that costs.
    outputs = 64 if -(-M // (rows * 64)) * most_splits >= least else 32
    tiles = -(-M // (rows * outputs))
    splits = 1
    while splits < most_splits and tiles * splits < least:
        splits *= 2
    return _fitting(LinearPlan("dot", rows * outputs, block_k, splits, stages=5), dtype, device)


def dot_bytes(plan: LinearPlan, dtype: torch.dtype) -> int:
    """Bytes of shared memory of the `dot` loop's tiles, with the inputs of two tiles of lanes."""
    return plan.stages * (plan.block_m + DOT_LANES) * plan.block_k * dtype.itemsize


def _fitting(plan: LinearPlan, dtype: torch.dtype, device: Device) -> LinearPlan:
    """The plan with as many stages as fit, and at least two."""
    while plan.stages > 2 and dot_bytes(plan, dtype) > device.shared_bytes:
        plan = plan._replace(stages=plan.stages - 1)
    return plan


def _dot_sample_plan(M: int, block_k: int, processors: int) -> LinearPlan:
    """K is never split for a vocabulary: the partial sums are not in the memory budget."""
    if 64 * processors <= M:
        return LinearPlan("dot", block_m=64, block_k=block_k, stages=3)
    return LinearPlan("dot", block_m=32, block_k=block_k, stages=5)


def _fma_plan(kind: LinearKind, M: int, K: int, dtype: torch.dtype, processors: int) -> LinearPlan:
    """Rows of up to about 32 KB a program, all of them in flight before the wait.

    Up to K = 65,536 in float32, and half of that in a SwiGLU, no thread holds more than 128
    registers of weights: 8 warps have room for twice as many, 16 warps for just these.
    """
    block_k = min(2048, dot_columns(K))
    warps = 4 if block_k >= 1024 else 2
    row_bytes = K * dtype.itemsize
    block_m = 2
    while block_m < 16 and 2 * block_m * row_bytes <= 32 * 1024 and 4 * block_m * processors <= M:
        block_m *= 2
    if kind == "sample":
        # Each program leaves one candidate a lane: fewer programs make the reduction short.
        block_m = max(block_m, 8)
    # Columns past K take registers as well.
    held = -(-K // block_k) * block_k * dtype.itemsize
    least = 2 if kind == "swiglu" else 1
    while block_m > least and block_m * held > FMA_THREAD_BYTES * 32 * 8:
        block_m //= 2
    while warps < 16 and block_m * held > FMA_THREAD_BYTES * 32 * warps:
        warps *= 2
    return LinearPlan("fma", block_m=block_m, block_k=block_k, warps=warps)


def residual_groups(plan: LinearPlan, M: int) -> int:
    """T of the squares that a product leaves: one sum for each program's rows."""
    return -(-M // plan.block_m)


def arrivals_needed(plan: LinearPlan, M: int) -> int:
    """Counters that a launch with this plan uses, for any number of lanes."""
    return 2 * -(-M // plan.block_m) if plan.splits > 1 else 0


def check_kind(kind: str, family: str) -> None:
    """ValueError for a name that is none of the kinds or families."""
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(_KINDS)}")
    if family not in _FAMILIES:
        raise ValueError(f"row family {family!r} is none of {', '.join(_FAMILIES)}")
