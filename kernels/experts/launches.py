"""Launches of the experts' kernels: which one multiplies, and how its work is cut.

What is given here `experts.py` has let pass, whose letters these are. Weights of 8 and 4 bits go to
`packed_decode.py` where that takes them.
"""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.experts.experts_triton import (
    down_kernel,
    fma_down_kernel,
    fma_product_kernel,
    product_kernel,
)
from graphengine.kernels.experts.experts_triton_sums import combine_kernel
from graphengine.kernels.experts.grouping import Grouping
from graphengine.kernels.experts.held import held_options
from graphengine.kernels.experts.packed import (
    CodeArgs,
    PackedExperts,
    code_args,
    packed_block_rows,
    step_columns,
)
from graphengine.kernels.experts.packed_decode import launch_packed, takes
from graphengine.kernels.experts.plans import ProductTile, decode_tile
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.linear_triton import StreamArgs, SumArgs
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.norm_rope.activation import ClampedSwiglu

ExpertWeight = torch.Tensor | PackedExperts

_SUM_LANES = 4
_SUM_COLUMNS = 256


def launch_swiglu(
    x_NH: torch.Tensor,
    weight_E2FH: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    tile: LinearPlan | ProductTile,
    grouping: Grouping | None,
    *,
    squares_TN: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    clamped: ClampedSwiglu | None,
    held: range | None,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """The product of gates and ups, and what becomes of them, in one launch."""
    if isinstance(tile, LinearPlan) and takes(weight_E2FH, x_NH):
        launch_packed(
            x_NH,
            weight_E2FH,
            slot_N,
            routes,
            tile,
            grouping,
            squares_TN=squares_TN,
            eps=eps,
            bias_EM=bias,
            clamped=clamped,
            held=held,
            out=out,
            pdl=pdl,
        )
        return
    one_by_one = isinstance(tile, LinearPlan) and tile.family == "fma" and grouping is None
    if one_by_one and isinstance(weight_E2FH, torch.Tensor):
        assert isinstance(tile, LinearPlan)
        _launch_fma_product(
            x_NH,
            weight_E2FH,
            bias,
            clamped,
            slot_N,
            routes,
            tile,
            squares_TN,
            eps,
            held,
            out,
            pdl,
        )
        return
    _launch_product(
        x_NH,
        weight_E2FH,
        slot_N,
        routes,
        _tile(tile, grouping, weight_E2FH),
        grouping,
        squares_TN=squares_TN,
        eps=eps,
        swiglu=True,
        bias=bias,
        clamped=clamped,
        held=held,
        out=out,
        pdl=pdl,
    )


def launch_down(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    stream: StreamArgs | SumArgs,
    *,
    plan: LinearPlan,
    arrivals: torch.Tensor | None,
    bias: torch.Tensor | None,
    grouping: Grouping | None,
    held: range | None,
    pdl: bool,
) -> None:
    """The product of down, and what becomes of the sum of each lane's experts, in one launch.

    ValueError for too few arrivals, and for what a plan is not for.
    """
    lanes, (_, hidden, width) = len(slot_N), weight_EHF.shape
    tiles = triton.cdiv(hidden, plan.block_m)
    if arrivals is None or arrivals.dtype != torch.int32 or arrivals.numel() < lanes * tiles:
        found = None if arrivals is None else f"{arrivals.numel()} of {arrivals.dtype}"
        raise ValueError(f"{lanes} lanes want {lanes * tiles} int32 arrivals, not {found}")
    y = torch.empty((len(a_PF), hidden), dtype=torch.float32, device=a_PF.device)
    if takes(weight_EHF, a_PF):
        launch_packed(
            a_PF,
            weight_EHF,
            slot_N,
            routes,
            plan,
            grouping,
            bias_EM=bias,
            held=held,
            out=y,
            stream=stream,
            arrivals=arrivals,
            pdl=pdl,
        )
        return
    if plan.family == "fma":
        if grouping is not None or not isinstance(weight_EHF, torch.Tensor):
            raise ValueError(f"pairs in groups and packed weights want a dot plan, not {plan}")
        launcher(fma_down_kernel, (len(a_PF), tiles))(
            a_PF,
            weight_EHF,
            bias,
            slot_N,
            routes.expert,
            routes.weight,
            y,
            arrivals,
            stream,
            lanes,
            M=hidden,
            K=width,
            TOP_K=routes.expert.shape[1],
            BLOCK_M=plan.block_m,
            BLOCK_K=plan.block_k,
            OVERLAP=plan.overlap,
            num_warps=plan.warps,
            **held_options(held),
            **launch_options(pdl),
        )
        return
    tile = _tile(plan, grouping, weight_EHF)
    given, code, group = _weight_arguments(weight_EHF, tile)
    order, blocks = (None, None) if grouping is None else (grouping.order, grouping.blocks)
    count = len(a_PF) if blocks is None else blocks.shape[1]
    launcher(down_kernel, (count, tiles))(
        a_PF,
        given,
        bias,
        slot_N,
        routes.expert,
        routes.weight,
        order,
        blocks,
        y,
        arrivals,
        stream,
        lanes,
        M=hidden,
        K=width,
        TOP_K=routes.expert.shape[1],
        BLOCKS=0 if blocks is None else count,
        L=tile.lanes,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        EVEN_K=width % tile.block_k == 0,
        CODE=code,
        GROUP=group,
        OVERLAP=tile.overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **held_options(held),
        **launch_options(pdl),
    )


def launch_sum(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    tile: ProductTile,
    grouping: Grouping,
    *,
    bias: torch.Tensor | None,
    held: range | None,
    products: torch.Tensor,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """The product of down, and the sum of each lane's experts: two launches."""
    lanes, hidden = out.shape
    _launch_product(
        a_PF,
        weight_EHF,
        slot_N,
        routes,
        _tile(tile, grouping, weight_EHF),
        grouping,
        bias=bias,
        held=held,
        out=products,
        pdl=pdl,
    )
    grid = (triton.cdiv(lanes, _SUM_LANES), triton.cdiv(hidden, _SUM_COLUMNS))
    launcher(combine_kernel, grid)(
        products,
        slot_N,
        routes.weight,
        None if held is None else routes.expert,
        out,
        lanes,
        out.stride(0),
        M=hidden,
        TOP_K=routes.expert.shape[1],
        **held_options(held),
        L=_SUM_LANES,
        BLOCK_M=_SUM_COLUMNS,
        num_warps=4,
        **launch_options(pdl),
    )


def _launch_product(
    x: torch.Tensor,
    weight_EMK: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    tile: ProductTile,
    grouping: Grouping | None,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    bias: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
    held: range | None,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    _, M, K = weight_EMK.shape
    given, code, group = _weight_arguments(weight_EMK, tile)
    order, blocks = (None, None) if grouping is None else (grouping.order, grouping.blocks)
    count = routes.expert.numel() if blocks is None else blocks.shape[1]
    launcher(product_kernel, (count, triton.cdiv(M, tile.block_m)))(
        x,
        squares_TN,
        given,
        bias,
        slot_N,
        routes.expert,
        order,
        blocks,
        out,
        len(slot_N),
        x.stride(0),
        eps,
        M=M,
        K=K,
        TOP_K=routes.expert.shape[1],
        BLOCKS=0 if blocks is None else count,
        GROUPS=0 if squares_TN is None else len(squares_TN),
        SWIGLU=swiglu,
        LIMIT=0.0 if clamped is None else clamped.limit,
        SLOPE=0.0 if clamped is None else clamped.slope,
        L=tile.lanes,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        EVEN_K=K % tile.block_k == 0,
        CODE=code,
        GROUP=group,
        OVERLAP=tile.overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **held_options(held),
        **launch_options(pdl),
    )


def _launch_fma_product(
    x_NH: torch.Tensor,
    weight_E2FH: torch.Tensor,
    bias_E2F: torch.Tensor | None,
    clamped: ClampedSwiglu | None,
    slot_N: torch.Tensor,
    routes: Routes,
    plan: LinearPlan,
    squares_TN: torch.Tensor | None,
    eps: float,
    held: range | None,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    _, M, K = weight_E2FH.shape
    launcher(fma_product_kernel, (routes.expert.numel(), triton.cdiv(M, plan.block_m)))(
        x_NH,
        squares_TN,
        weight_E2FH,
        bias_E2F,
        slot_N,
        routes.expert,
        out,
        len(slot_N),
        x_NH.stride(0),
        eps,
        M=M,
        K=K,
        TOP_K=routes.expert.shape[1],
        GROUPS=0 if squares_TN is None else len(squares_TN),
        LIMIT=0.0 if clamped is None else clamped.limit,
        SLOPE=0.0 if clamped is None else clamped.slope,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        OVERLAP=plan.overlap,
        num_warps=plan.warps,
        **held_options(held),
        **launch_options(pdl),
    )


def _tile(
    tile: LinearPlan | ProductTile, grouping: Grouping | None, weight: ExpertWeight
) -> ProductTile:
    """The tile of a plan. ValueError unless a block of pairs fits it."""
    if isinstance(tile, LinearPlan):
        tile = decode_tile(tile, weight.format if isinstance(weight, PackedExperts) else None)
    if grouping is not None and grouping.size > tile.lanes:
        raise ValueError(f"blocks of {grouping.size} pairs, and a tile of {tile.lanes}")
    return tile


def _weight_arguments(
    weight: ExpertWeight, tile: ProductTile
) -> tuple[torch.Tensor | CodeArgs, str, int]:
    """What a kernel gets of a weight: its tensors, its code, and the columns that share a scale."""
    if isinstance(weight, torch.Tensor):
        return weight, "", 0
    packed_block_rows(tile.block_m)
    if tile.block_k != step_columns(weight.format):
        raise ValueError(
            f"experts in {weight.format.label} are multiplied {step_columns(weight.format)} "
            f"columns at a time, not {tile.block_k}"
        )
    return code_args(weight), weight.format.code, weight.format.columns
