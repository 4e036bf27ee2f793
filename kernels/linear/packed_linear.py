"""`linear` and `linear_residual` of weights of 8 and 4 bits, laid out by `packed.pack`.

The contract is that of `linear.py`, with these differences. A plan's columns of a tile are shared
by its streams (`streams`), which are part of the numerics too: they follow from `block_m` and
`warps`. Both row families run the kernel of `packed_gluon.py`, with plans of their own; neither
splits K for one and not for the other.

Letters: N lanes, K input features, M weight rows, F ffn width, T groups of columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.lanes import check_lanes, check_rows, check_vector, output_rows
from graphengine.kernels.core.launching import ALONE, Launch, launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.linear import MAX_LANES, arrivals_needed, residual_groups
from graphengine.kernels.linear.linear_gluon import ALIGNMENT, is_aligned, stages
from graphengine.kernels.linear.linear_triton import ResidualArgs
from graphengine.kernels.linear.packed import (
    BLOCK_ROWS,
    PackedWeight,
    block_columns,
    unpack,
)
from graphengine.kernels.linear.packed_gluon import PackedArgs, packed_kernel
from graphengine.kernels.linear.plans import FMA_LANES, LinearPlan
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.linear.reference import linear_reference, linear_residual_reference
from graphengine.kernels.linear.residual import Residual


def _launch(
    x_NK: torch.Tensor,
    weight: PackedWeight,
    slot_N: torch.Tensor,
    plan: LinearPlan,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: ResidualArgs | None = None,
    launch: Launch = ALONE,
) -> None:
    """Launch the kernel on operands that were checked; one of `out` and `residual` is given."""
    (lanes, K), (M, _) = x_NK.shape, weight.shape
    if not is_aligned(x_NK):
        # Where the inputs lie is not to decide about their bits.
        x_NK = x_NK.clone(memory_format=torch.contiguous_format)
    tiles = triton.cdiv(M, plan.block_m)
    splits = min(plan.splits, triton.cdiv(K, plan.block_k))
    partial = counters = None
    if splits > 1:
        needed, counters = arrivals_needed(plan, M), launch.arrivals
        if counters is None or counters.dtype != torch.int32 or counters.numel() < needed:
            raise ValueError(f"{plan} wants {needed} int32 arrivals")
        partial = x_NK.new_empty((splits, lanes, tiles * plan.block_m), dtype=torch.float32)
    L = 8 if lanes <= 8 else 16 if lanes <= 16 else 32
    kind = weight.format
    grouped = weight.scales is not None
    launcher(packed_kernel, (triton.cdiv(lanes, L), tiles, splits))(
        x_NK,
        squares_TN,
        PackedArgs(weight.codes, weight.scales, weight.zeros, weight.row_scales),
        bias,
        slot_N,
        out,
        residual,
        partial,
        counters,
        lanes,
        x_NK.stride(0) // ALIGNMENT,
        0 if out is None else out.stride(0),
        eps,
        M=M,
        K=K,
        GROUPS=0 if squares_TN is None else squares_TN.shape[0],
        SWIGLU=weight.swiglu,
        SPLITS=splits,
        L=L,
        X_LANES=1 if lanes == 1 else L,
        CODE=kind.code,
        COLUMNS=block_columns(kind),
        GROUP=(kind.columns or triton.next_power_of_2(K)) if grouped else 0,
        ZEROS=weight.zeros is not None,
        STREAMS=streams(plan),
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        STAGES=stages(plan, splits, K),
        EVEN_K=K % (plan.block_k * splits) == 0,
        WARPS=plan.warps,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **launch_options(launch.pdl),
    )


def streams(plan: LinearPlan) -> int:
    """Parts of a tile's columns, each for the warps that have no rows of their own."""
    return max(1, plan.warps * BLOCK_ROWS // plan.block_m)
