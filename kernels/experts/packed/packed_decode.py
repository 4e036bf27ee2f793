"""Launches of `packed_gluon.py`: decode products with experts in 8 and 4 bits on a GPU.

Letters: N lanes, k experts of a lane, P = N * k pairs, E experts, K input features and M rows of an
expert's weight, T groups of columns.
"""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.experts.packed.packed_gluon import packed_experts_kernel
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.pairs import NO_ACTIVATION, ActivationArgs, PairProduct
from graphengine.kernels.experts.plans import check_expert_plan
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.operands import StreamArgs, SumArgs
from graphengine.kernels.linear.packed_cut import PACKED_COLUMNS, PackedArgs, new_cut
from graphengine.kernels.linear.plans import LinearKind, LinearPlan

_DTYPES = (torch.float16, torch.bfloat16)
_BLOCKS = (8, 16, 32)


def takes(weight: torch.Tensor | PackedExperts, x: torch.Tensor) -> bool:
    """Whether the kernel takes these decode products, given that Triton kernels run at all.

    Gluon has no interpreter. The sums of `packed_triton.py` need not agree in the last bit, so
    nothing here may depend on the number of lanes or on their addresses.
    """
    return (
        isinstance(weight, PackedExperts)
        and not INTERPRETED
        and x.dtype in _DTYPES
        and weight.shape[2] % PACKED_COLUMNS == 0
    )


def launch_packed(
    product: PairProduct,
    plan: LinearPlan,
    out: torch.Tensor,
    activation: ActivationArgs = NO_ACTIVATION,
    *,
    stream: StreamArgs | SumArgs | None = None,
    arrivals: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on a product that `takes` accepts.

    out     for a SwiGLU [P, M / 2], for a squared ReLU [P, M]; for down float32 [P, M], which only
            this launch uses
    stream  for down: the stream that its sum is added to, or where the sum is stored; needs
            `arrivals`

    ValueError for a plan that does not fit the weight, and for a block size that the kernel does
    not have.
    """
    x, weight, routes, grouping = product.x, product.weight_EMK, product.routes, product.grouping
    assert isinstance(weight, PackedExperts), f"{type(weight)=}"
    (_, M, K), kind = weight.shape, weight.format
    check_expert_plan(plan, _kind(weight, stream), kind)
    if grouping is not None and grouping.size not in _BLOCKS:
        raise ValueError(f"packed experts take blocks of {_BLOCKS} pairs, not {grouping.size}")
    if not linear_gluon.is_aligned(x):
        # The address of the inputs must not change bits.
        x = x.clone(memory_format=torch.contiguous_format)
    given = PackedArgs(weight.codes, weight.scales, weight.zeros, weight.row_scales, weight.factors)
    # Blocks vary slowest, so that those without pairs come last: their programs hold a place on an
    # SM until they find out. A second block of an expert finds its codes in L2.
    launcher(packed_experts_kernel, (triton.cdiv(M, plan.block_m), product.units))(
        x,
        activation.squares_TN,
        given,
        product.bias_EM,
        product.slot_N,
        routes.expert,
        routes.weight,
        product.order,
        product.blocks,
        out,
        arrivals,
        stream,
        product.lanes,
        x.stride(0) // linear_gluon.ALIGNMENT,
        activation.eps,
        new_cut(
            given,
            kind,
            plan,
            M=M,
            K=K,
            swiglu=int(weight.swiglu),
            L=_BLOCKS[0] if grouping is None else grouping.size,
            alone=grouping is None,
            optional=True,
        ),
        TOP_K=product.top_k,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **activation.options,
        **product.options,
    )


def _kind(weight: PackedExperts, stream: StreamArgs | SumArgs | None) -> LinearKind:
    if weight.swiglu:
        return "swiglu"
    return "store" if stream is None else "residual"
