"""Launches of the experts' kernels: choose the kernel, and cut its work.

`experts.py` has checked all arguments. Letters as there. Weights of 8 and 4 bits go to `packed/`,
and chunks with dense weights to `prefill/experts_chunk.py`, where these take them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from graphengine.kernels.core.launching import launcher, take_counters
from graphengine.kernels.experts.experts_triton import (
    down_kernel,
    fma_down_kernel,
    fma_product_kernel,
    product_kernel,
)
from graphengine.kernels.experts.experts_triton_sums import combine_kernel
from graphengine.kernels.experts.grouping import Grouping
from graphengine.kernels.experts.packed.packed_chunk import launch_chunk, takes_chunk
from graphengine.kernels.experts.packed.packed_decode import launch_packed, takes
from graphengine.kernels.experts.packed.weights import (
    CodeArgs,
    PackedExperts,
    code_args,
    packed_block_rows,
    step_columns,
)
from graphengine.kernels.experts.pairs import (
    NO_ACTIVATION,
    ActivationArgs,
    ExpertWeight,
    PairProduct,
)
from graphengine.kernels.experts.plans import ProductTile, decode_tile
from graphengine.kernels.experts.prefill.experts_chunk import (
    launch_experts_chunk,
    takes_experts_chunk,
)
from graphengine.kernels.linear.operands import StreamArgs, SumArgs
from graphengine.kernels.linear.plans import LinearPlan

_SUM_LANES = 4
_SUM_COLUMNS = 256


def launch_inner(
    product: PairProduct,
    activation: ActivationArgs,
    tile: LinearPlan | ProductTile,
    out: torch.Tensor,
) -> None:
    """Multiply by gates and ups, or by ups, and apply the activation, in one launch."""
    weight, grouping = product.weight_EMK, product.grouping
    if not isinstance(tile, LinearPlan):
        _launch_chunk(product, tile, out, activation)
    elif takes(weight, product.x):
        launch_packed(product, tile, out, activation)
    elif tile.family == "fma" and grouping is None and isinstance(weight, torch.Tensor):
        _launch_fma_product(product, tile, out, activation)
    else:
        _launch_product(product, tile, out, activation)


def launch_down(
    product: PairProduct,
    stream: StreamArgs | SumArgs,
    *,
    plan: LinearPlan,
    arrivals: torch.Tensor | None,
) -> None:
    """Multiply by down, and add or store the sum of each lane's experts, in one launch.

    ValueError for too few arrivals, and for a product that the plan does not serve.
    """
    weight, lanes = product.weight_EMK, product.lanes
    hidden = weight.shape[1]
    needed = lanes * triton.cdiv(hidden, plan.block_m)
    arrivals = take_counters(arrivals, needed, f"down of {lanes} lanes")
    pairs = len(product.x)
    y = torch.empty((pairs, hidden), dtype=torch.float32, device=product.x.device)
    if takes(weight, product.x):
        launch_packed(product, plan, y, stream=stream, arrivals=arrivals)
    elif plan.family == "fma":
        _launch_fma_down(product, plan, y, stream, arrivals)
    else:
        _launch_down(product, plan, y, stream, arrivals)


def launch_sum(
    product: PairProduct, tile: ProductTile, *, products: torch.Tensor, out: torch.Tensor
) -> None:
    """Multiply by down, and sum each lane's experts, in two launches."""
    _launch_chunk(product, tile, products)
    lanes, hidden = out.shape
    grid = (triton.cdiv(lanes, _SUM_LANES), triton.cdiv(hidden, _SUM_COLUMNS))
    launcher(combine_kernel, grid)(
        products,
        product.slot_N,
        product.routes.weight,
        None if product.held is None else product.routes.expert,
        out,
        lanes,
        out.stride(0),
        M=hidden,
        TOP_K=product.top_k,
        L=_SUM_LANES,
        BLOCK_M=_SUM_COLUMNS,
        num_warps=4,
        **product.options,
    )


def _launch_chunk(
    product: PairProduct,
    tile: ProductTile,
    out: torch.Tensor,
    activation: ActivationArgs | None = None,
) -> None:
    """Multiply the pairs of a chunk, as `_launch_product` does."""
    given = activation or NO_ACTIVATION
    if takes_chunk(product, given):
        launch_chunk(product, out, given)
    elif takes_experts_chunk(product, given):
        launch_experts_chunk(product, out, activation)
    else:
        _launch_product(product, tile, out, activation)


def _launch_product(
    product: PairProduct,
    tile: LinearPlan | ProductTile,
    out: torch.Tensor,
    activation: ActivationArgs | None = None,
) -> None:
    x, routes, given = product.x, product.routes, activation or NO_ACTIVATION
    _, M, K = product.weight_EMK.shape
    cut = _cut(product, tile)
    launcher(product_kernel, (product.units, triton.cdiv(M, cut.tile.block_m)))(
        x,
        given.squares_TN,
        cut.weight,
        product.bias_EM,
        product.slot_N,
        routes.expert,
        product.order,
        product.blocks,
        out,
        product.lanes,
        x.stride(0),
        given.eps,
        M=M,
        K=K,
        TOP_K=product.top_k,
        BLOCKS=product.block_count,
        SWIGLU=activation is not None and activation.gated,
        **given.options,
        **cut.options,
        **product.options,
    )


def _launch_fma_product(
    product: PairProduct, plan: LinearPlan, out: torch.Tensor, activation: ActivationArgs
) -> None:
    x, routes = product.x, product.routes
    _, M, K = product.weight_EMK.shape
    launcher(fma_product_kernel, (product.units, triton.cdiv(M, plan.block_m)))(
        x,
        activation.squares_TN,
        product.weight_EMK,
        product.bias_EM,
        product.slot_N,
        routes.expert,
        out,
        product.lanes,
        x.stride(0),
        activation.eps,
        M=M,
        K=K,
        TOP_K=product.top_k,
        **activation.options,
        **_fma_options(plan),
        **product.options,
    )


def _launch_fma_down(
    product: PairProduct,
    plan: LinearPlan,
    y: torch.Tensor,
    stream: StreamArgs | SumArgs,
    arrivals: torch.Tensor,
) -> None:
    weight, routes = product.weight_EMK, product.routes
    if product.grouping is not None or not isinstance(weight, torch.Tensor):
        raise ValueError(f"pairs in groups and packed weights want a dot plan, not {plan}")
    _, hidden, width = weight.shape
    launcher(fma_down_kernel, (product.units, triton.cdiv(hidden, plan.block_m)))(
        product.x,
        weight,
        product.bias_EM,
        product.slot_N,
        routes.expert,
        routes.weight,
        y,
        arrivals,
        stream,
        product.lanes,
        M=hidden,
        K=width,
        TOP_K=product.top_k,
        **_fma_options(plan),
        **product.options,
    )


def _launch_down(
    product: PairProduct,
    plan: LinearPlan,
    y: torch.Tensor,
    stream: StreamArgs | SumArgs,
    arrivals: torch.Tensor,
) -> None:
    routes, cut = product.routes, _cut(product, plan)
    _, hidden, width = product.weight_EMK.shape
    launcher(down_kernel, (product.units, triton.cdiv(hidden, plan.block_m)))(
        product.x,
        cut.weight,
        product.bias_EM,
        product.slot_N,
        routes.expert,
        routes.weight,
        product.order,
        product.blocks,
        y,
        arrivals,
        stream,
        product.lanes,
        M=hidden,
        K=width,
        TOP_K=product.top_k,
        BLOCKS=product.block_count,
        **cut.options,
        **product.options,
    )


def _fma_options(plan: LinearPlan) -> dict[str, Any]:
    return {
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "OVERLAP": plan.overlap,
        "num_warps": plan.warps,
    }


class _Cut(NamedTuple):
    """How the tensor-core kernels multiply a weight."""

    tile: ProductTile
    weight: torch.Tensor | CodeArgs
    options: dict[str, Any]


def _cut(product: PairProduct, tile: LinearPlan | ProductTile) -> _Cut:
    """Cut a product; ValueError unless a block of pairs fits the tile, and the tile the weight."""
    tile = _tile(tile, product.grouping, product.weight_EMK)
    given, sizes = _weight_arguments(product.weight_EMK, tile)
    options = {
        "L": tile.lanes,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "EVEN_K": product.weight_EMK.shape[2] % tile.block_k == 0,
        **sizes,
        "OVERLAP": tile.overlap,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return _Cut(tile, given, options)


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
) -> tuple[torch.Tensor | CodeArgs, dict[str, Any]]:
    """Kernel arguments of a weight: its tensors, its code, and the columns that share a scale, or
    factors on scales.
    """
    if isinstance(weight, torch.Tensor):
        return weight, {"CODE": "", "GROUP": 0, "BLOCK": 0, "MINIMUMS": False}
    packed_block_rows(tile.block_m)
    if tile.block_k != step_columns(weight.format):
        raise ValueError(
            f"experts in {weight.format.label} are multiplied {step_columns(weight.format)} "
            f"columns at a time, not {tile.block_k}"
        )
    kind = weight.format
    sizes = {"CODE": kind.code, "GROUP": kind.columns, "BLOCK": kind.block}
    return code_args(weight), {**sizes, "MINIMUMS": kind.has_minimums}
