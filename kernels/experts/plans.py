"""How the products of experts are cut into programs.

In decode the plan is a `LinearPlan` chosen by the shape of an expert's weight, so that bits do not
depend on the number of lanes. A prompt chunk has a tile chosen by its number of lanes, which
depends on the prompt alone; or one tile for any number of lanes, where prompts share a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.core.devices import H200, Device
from graphengine.kernels.experts.packed.weights import step_columns
from graphengine.kernels.linear.packed_cut import (
    check_packed_plan,
    fitting_plan,
    packed_plan,
)
from graphengine.kernels.linear.plans import (
    FMA_THREAD_BYTES,
    LinearKind,
    LinearPlan,
    RowFamily,
    check_kind,
    dot_columns,
)
from graphengine.kernels.linear.quantised import WeightFormat

DECODE_BLOCK = 16
"""Most pairs of a block in decode: the least that `tl.dot` takes. A `wgmma` of more pairs would sum
in another order."""
PACKED_BLOCK = 8
"""Pairs of a block in decode with packed weights: the least that `mma.sync` takes on the right."""
ANY_PAIRS = 64
"""Pairs of a block in chunks of any number of lanes: the least that `wgmma` takes. `tl.dot` of
fewer is an `mma.sync`, which sums in another order."""
MOST_COUNTED = 128
"""Most pairs of a block for Hopper's kernels of chunks, whose products are about as wide as a block
has pairs."""
_LEAST_COUNTED = 32
_PAIRS_OF_PACKED_BLOCK = 6
# Most stages of a heuristic plan: tiles with the inputs of a block of pairs, in the shared memory
# of an SM.
_PACKED_STAGES = 3
LEAST_DOT_ROWS = 16
"""Least rows of a `dot` plan: `tl.dot` takes no fewer."""
LEAST_FMA_ROWS = 4
"""Least rows of an `fma` plan of down: each program of a lane has a counter and a sum of squares.
"""


class ProductTile(NamedTuple):
    """Sizes of a program: `lanes` pairs, `block_m` rows of an expert's weight, tiles of K."""

    lanes: int
    block_m: int
    block_k: int
    warps: int
    stages: int
    overlap: bool = True


def expert_plan(
    kind: LinearKind,
    M: int,
    K: int,
    dtype: torch.dtype,
    family: RowFamily,
    weight: WeightFormat | None = None,
    device: Device = H200,
) -> LinearPlan:
    """The decode plan for experts with weights [M, K] each, on this GPU.

    With the family `fma` the plan is still a `dot` plan in three cases: for `down`, where `tune`
    tries both; if not even two rows fit the registers of a program; and for packed
    weights, whose programs are those of a packed linear of few lanes.
    """
    check_kind(kind, family)
    if weight is not None:
        return _packed_plan(weight, M, K, family, device)
    if family == "fma" and kind != "residual":
        fma = _fma_plan(K, dtype)
        if fma is not None:
            return fma
    if dtype == torch.float32:
        return LinearPlan("dot", block_m=32, block_k=min(32, dot_columns(K)), stages=2)
    block_k = 64 if K % 128 == 64 else min(128, dot_columns(K))
    if kind != "residual":
        return LinearPlan("dot", block_m=32, block_k=block_k, stages=6)
    # Short tiles leave fewer bytes in flight.
    return LinearPlan("dot", block_m=64, block_k=block_k, stages=4 if block_k > 64 else 6)


def _packed_plan(
    weight: WeightFormat, M: int, K: int, family: RowFamily, device: Device
) -> LinearPlan:
    """For single pairs the programs of a linear of one lane. In `dot`, where blocks have several
    pairs, four times the rows, which share a block's inputs, and a quarter of the columns.
    """
    plan = packed_plan(weight, M, K, "fma", device)
    plan = plan._replace(family="dot", stages=min(plan.stages, _PACKED_STAGES))
    if family == "dot":
        plan = plan._replace(block_m=4 * plan.block_m, block_k=plan.block_k // 4)
    return fitting_plan(plan, weight, K, DECODE_BLOCK, device)


def _fma_plan(K: int, dtype: torch.dtype) -> LinearPlan | None:
    """The most rows, 4 or 2, for the fewest warps whose registers hold them; None if none do."""
    block_k = min(2048, dot_columns(K))
    while block_k > 256 and -(-K // block_k) * block_k * 4 > 5 * K:
        # Padding would exceed a quarter of the columns.
        block_k //= 2
    row_bytes = -(-K // block_k) * block_k * dtype.itemsize
    for warps in (4, 8, 16):
        for block_m in (4, 2):
            if block_m * row_bytes <= FMA_THREAD_BYTES * 32 * warps:
                return LinearPlan("fma", block_m=block_m, block_k=block_k, warps=warps)
    return None


def check_expert_plan(
    plan: LinearPlan, kind: LinearKind, weight: WeightFormat | None = None
) -> None:
    """Raise ValueError for a plan that the experts' kernels do not run."""
    if plan.splits != 1:
        raise ValueError(f"splits={plan.splits} must be 1: the products of experts do not split K")
    if plan.family == "fma" and weight is not None:
        raise ValueError(f"experts in {weight.label} want a plan of the family dot, not fma")
    least = LEAST_FMA_ROWS if plan.family == "fma" else LEAST_DOT_ROWS
    if kind != "residual" and plan.family == "fma":
        least = 2
    if plan.block_m < least:
        raise ValueError(f"block_m={plan.block_m} of {kind} of experts must be at least {least}")
    if weight is not None:
        check_packed_plan(plan, weight)


def decode_tile(plan: LinearPlan, weight: WeightFormat | None = None) -> ProductTile:
    """The tile of a `dot` plan. ValueError for a plan of another family, and for one that splits K:
    experts' sums are not split.

    With packed weights the tile has only the plan's rows: the plan's other sizes are for the kernel
    of `packed_gluon.py`, and the tile serves products that that kernel does not take.
    """
    if plan.splits != 1:
        raise ValueError(f"the products of experts do not split K: {plan}")
    if plan.family == "fma":
        raise ValueError(f"the fma family takes pairs one by one, in no tile of several: {plan}")
    if weight is not None:
        step = step_columns(weight)
        return ProductTile(DECODE_BLOCK, plan.block_m, step, warps=4, stages=3)
    return ProductTile(
        DECODE_BLOCK, plan.block_m, plan.block_k, plan.warps, plan.stages, plan.overlap
    )


def chunk_tile(
    lanes: int | None,
    top_k: int,
    experts: int,
    K: int,
    dtype: torch.dtype,
    weight: WeightFormat | None = None,
) -> ProductTile:
    """The tile of a chunk with these lanes: as many pairs as an expert has on average, or more.

    None: the tile of chunks of any number of lanes, on which no bit of a lane may depend.
    """
    pairs = ANY_PAIRS if lanes is None else -(-lanes * top_k // experts)
    if weight is not None:
        most = 32 if dtype == torch.float32 else 128
        size = min(most, max(DECODE_BLOCK, 1 << (pairs - 1).bit_length()))
        # A tile of codes is unpacked once for all lanes of a block.
        if size == 128:
            step = step_columns(weight)
            return ProductTile(size, 64, step, warps=8, stages=2 if step > 64 else 3)
        return ProductTile(size, 32, step_columns(weight), warps=4, stages=2)
    if dtype == torch.float32:
        return ProductTile(DECODE_BLOCK, 32, min(32, dot_columns(K)), warps=4, stages=2)
    size = DECODE_BLOCK
    while size < pairs and size < 128:
        size *= 2
    block_k = min(64, dot_columns(K))
    if size <= 32:
        return ProductTile(size, 64, block_k, warps=4, stages=5)
    return ProductTile(size, 128, block_k, warps=4 if size == 64 else 8, stages=4)


def counted_block(lanes: int | None, top_k: int, experts: int, *, packed: bool = False) -> int:
    """Pairs of a block for Hopper's kernels of dense or `packed` experts; it affects speed only.

    Enough for an expert with twice as many pairs as the average, or with dense weights with eight
    times as many, so that nearly all weights are read once. None: any number of lanes.
    """
    if lanes is None:
        return MOST_COUNTED
    if packed:
        return 64 if -(-lanes * top_k // experts) <= 32 else MOST_COUNTED
    pairs = -(-8 * lanes * top_k // experts)
    return min(MOST_COUNTED, max(_LEAST_COUNTED, 1 << (pairs - 1).bit_length()))


def decode_block(lanes: int, top_k: int, experts: int, weight: WeightFormat | None = None) -> int:
    """Pairs of a block in a decode step of this many lanes; it affects speed only.

    A packed expert is unpacked for each block, so experts with more pairs get the larger block.
    """
    few = lanes * top_k <= _PAIRS_OF_PACKED_BLOCK * experts
    return PACKED_BLOCK if weight is not None and few else DECODE_BLOCK


def groups_pairs(lanes: int, top_k: int, experts: int, tokens_per_row: int = 1) -> bool:
    """Whether a decode step of this many lanes groups its pairs; it affects speed only.

    Grouping costs a launch. With half as many pairs as experts, about a fifth of the pairs share an
    expert with another pair; with a quarter as many, a tenth, and more if lanes are tokens of one
    text.
    """
    share = 2 if tokens_per_row == 1 else 4
    return share * lanes * top_k >= experts and lanes > 1
