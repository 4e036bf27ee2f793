"""Launches of `packed_gluon.py`: the products of decode with experts in 8 and 4 bits on a GPU.

Letters: N lanes, k experts of a lane, P = N * k pairs, E experts, K input features and M rows of an
expert's weight, T groups of columns.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.experts.grouping import Grouping
from graphengine.kernels.experts.held import held_options
from graphengine.kernels.experts.packed import PackedExperts
from graphengine.kernels.experts.packed_gluon import packed_experts_kernel
from graphengine.kernels.experts.plans import check_expert_plan
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear import linear_gluon
from graphengine.kernels.linear.linear_triton import StreamArgs, SumArgs
from graphengine.kernels.linear.packed_cut import PackedArgs, new_cut
from graphengine.kernels.linear.packed_linear import PACKED_COLUMNS
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.norm_rope.activation import ClampedSwiglu

_DTYPES = (torch.float16, torch.bfloat16)
_BLOCKS = (8, 16, 32)


def takes(weight: torch.Tensor | PackedExperts, x: torch.Tensor) -> TypeGuard[PackedExperts]:
    """Whether products of decode are for the kernel, where Triton's kernels run at all.

    Gluon has no interpreter. The sums of `packed_triton.py` need not agree in the last bit, so
    nothing here may depend on the number of lanes or on where they lie.
    """
    return (
        isinstance(weight, PackedExperts)
        and not INTERPRETED
        and x.dtype in _DTYPES
        and weight.shape[2] % PACKED_COLUMNS == 0
    )


def launch_packed(
    x: torch.Tensor,
    weight_EMK: PackedExperts,
    slot_N: torch.Tensor,
    routes: Routes,
    plan: LinearPlan,
    grouping: Grouping | None,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias_EM: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
    held: range | None = None,
    out: torch.Tensor,
    stream: StreamArgs | SumArgs | None = None,
    arrivals: torch.Tensor | None = None,
    pdl: bool,
) -> None:
    """Launch the kernel on operands that `expert_swiglu` or those of down let pass.

    out     [P, M / 2] of a SwiGLU; of down float32 [P, M], which is for the launch alone
    stream  of down, or what its sum is stored in; with its `arrivals`

    ValueError for a plan that the weight does not fit, and for pairs in blocks that the kernel does
    not have.
    """
    (_, M, K), kind = weight_EMK.shape, weight_EMK.format
    check_expert_plan(plan, "swiglu" if weight_EMK.swiglu else "residual", kind)
    if grouping is not None and grouping.size not in _BLOCKS:
        raise ValueError(f"packed experts take blocks of {_BLOCKS} pairs, not {grouping.size}")
    if not linear_gluon.is_aligned(x):
        # Where the inputs lie is not to decide about their bits.
        x = x.clone(memory_format=torch.contiguous_format)
    order, blocks = (None, None) if grouping is None else (grouping.order, grouping.blocks)
    count = routes.expert.numel() if blocks is None else blocks.shape[1]
    given = PackedArgs(weight_EMK.codes, weight_EMK.scales, weight_EMK.zeros, weight_EMK.row_scales)
    # Blocks count slowest, since those without pairs are the last: their programs hold a place on
    # an SM until they know. A second block of an expert finds its codes in L2.
    launcher(packed_experts_kernel, (triton.cdiv(M, plan.block_m), count))(
        x,
        squares_TN,
        given,
        bias_EM,
        slot_N,
        routes.expert,
        routes.weight,
        order,
        blocks,
        out,
        arrivals,
        stream,
        len(slot_N),
        x.stride(0) // linear_gluon.ALIGNMENT,
        eps,
        new_cut(
            given,
            kind,
            plan,
            M=M,
            K=K,
            swiglu=int(weight_EMK.swiglu),
            L=_BLOCKS[0] if grouping is None else grouping.size,
            alone=grouping is None,
            optional=True,
        ),
        TOP_K=routes.expert.shape[1],
        GROUPS=0 if squares_TN is None else len(squares_TN),
        LIMIT=0.0 if clamped is None else clamped.limit,
        SLOPE=0.0 if clamped is None else clamped.slope,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **held_options(held),
        **launch_options(pdl),
    )
