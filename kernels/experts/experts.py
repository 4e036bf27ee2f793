"""Products of a mixture of experts with the experts that `router.route` has chosen.

    expert_inner       a = silu(gate x) * up x of each pair of lane and expert, or with another
                       `Gating`, or max(up x, 0)**2 for experts without gates
    expert_residual    residual += sum over a lane's experts of weight * down a; for decode
    expert_part        that sum alone; for decode where it is a part of a larger one
    expert_sum         that sum alone; for prefill

A pair's products are summed over K in one order, and a lane's experts by rank, so that no bit of a
lane depends on its neighbours. Without grouping, each program takes one pair straight from the
router's ids. With grouping (`grouping.group_pairs`), one program takes the pairs of a block, whose
weights are read once. In blocks of `decode_block` pairs both forms have the same bits; which is
faster depends on the number of pairs. Dense gates and ups of the row family `fma` take pairs one by
one, with weights in registers; all other products use the tensor cores in both families. Experts
that no live lane has chosen are not read.

The weights of all experts are one dense tensor [E, M, K], or `PackedExperts` in 8 or 4 bits; for a
SwiGLU M is F gates, then F ups. Biases, if there are any, are [E, M]: they are added before the
activation and before the expert's routing weight is applied. With several ranks, a rank may have
the weights of only some experts: those whose ids are `held`. Products of other experts are not
computed, and add nothing to a sum.

Letters: N lanes, k experts of a lane, P = N * k pairs, E experts, H hidden, F ffn width of an
expert, K input features and M rows of an expert's weight, T groups of columns.
"""

from __future__ import annotations

import torch

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, check_weight
from graphengine.kernels.experts.grouping import Grouping
from graphengine.kernels.experts.held import check_held
from graphengine.kernels.experts.launches import launch_down, launch_inner, launch_sum
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.pairs import ActivationArgs, ExpertWeight, PairProduct
from graphengine.kernels.experts.plans import LEAST_FMA_ROWS, ProductTile
from graphengine.kernels.experts.reference import (
    expert_product_reference,
    expert_sum_reference,
)
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.operands import SumArgs, stream_args
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import (
    Residual,
    add_to_residual_reference,
    check_residual,
    check_squares,
)
from graphengine.kernels.norm_rope.activation import Gating


def expert_inner(
    x_NH: torch.Tensor,
    weight_EMH: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    *,
    tile: LinearPlan | ProductTile,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias_EM: torch.Tensor | None = None,
    gating: Gating = "silu",
    gated: bool = True,
    grouping: Grouping | None = None,
    held: range | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute silu(gate) * up for each live pair, where [gate F | up F] = x @ weight^T / rms.

    Without gates it is max(up, 0)**2, where up [F] is that product.

    Args:
        x_NH, weight_EMH: one dtype of float32, float16, bfloat16; dense rows of x, any stride
            between them; a dense weight.
        slot_N: int32, -1 = padded lane.
        tile: how the weights are cut; in decode a `LinearPlan`.
        squares_TN, eps: as in `linear`; without them x is already normed.
        bias_EM: dense, in the weight's dtype, added after the division by rms.
        gating: replaces silu(gate) * up.
        gated: whether the weight has gates, then ups; False: it has ups alone.
        grouping: that of `routes`, in blocks that fit the tile; None: pair by pair, in decode.
        held: the ids of the experts whose weights and biases these are, in order; None: all.
        out: dense [P, F] in x's dtype.
        pdl: the launch before may still run; it does not write the weight.

    Returns:
        [P, F] in x's dtype: pair p is that of lane p // k and rank p % k. Computed in float32,
        rounded once. Pairs of padded lanes and of experts that are not held are not written.
        ValueError for a shape, dtype or number that does not fit.
    """
    check_rows(x_NH=x_NH)
    lanes, hidden = x_NH.shape
    rows = _check_weight(weight_EMH, x_NH, hidden, swiglu=gated)
    if gating != "silu" and not gated:
        raise ValueError(f"experts without gates have no {gating=}")
    if gated and rows % 2:
        raise ValueError(f"experts need as many gate rows as up rows, not {rows} rows in all")
    _check_bias(bias_EM, weight_EMH, x_NH.dtype)
    check_held(held, weight_EMH.shape[0])
    _check_routes(routes, slot_N, lanes)
    if squares_TN is not None:
        check_squares(squares_TN, lanes)
    out = _output(out, (routes.expert.numel(), rows // 2 if gated else rows), x_NH.dtype, x_NH)
    if not use_triton(x_NH):
        return expert_product_reference(
            x_NH,
            weight_EMH,
            slot_N,
            routes,
            squares_TN=squares_TN,
            eps=eps,
            activation="swiglu" if gated else "squared_relu",
            bias_EM=bias_EM,
            gating=gating,
            held=held,
            out=out,
        )
    product = PairProduct(x_NH, weight_EMH, bias_EM, slot_N, routes, grouping, held, pdl)
    launch_inner(product, ActivationArgs(squares_TN, eps, gating, gated), tile, out)
    return out


def expert_residual(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    residual: Residual,
    next_norm_H: torch.Tensor,
    *,
    plan: LinearPlan,
    arrivals: torch.Tensor | None,
    bias_EH: torch.Tensor | None = None,
    grouping: Grouping | None = None,
    pdl: bool = False,
) -> Residual:
    """Compute residual.x += the weighted sum of each lane's experts, and the inputs of the next
    norm.

    One kernel: the last of a lane's experts to finish adds them up.

    Args:
        a_PF: as `expert_inner` leaves it.
        residual: `x` is updated and `scaled` written, both in place; `squares` is ignored. If
            `residual.kept` is set, the new `x` is stored there, too.
        next_norm_H: weight of the RMSNorm that reads the stream next, of any float dtype.
        plan: an `fma` plan takes pairs one by one, with a dense weight. With `fma` or a packed
            weight, and PDL, slots, routes and the grouping must have been written at least two
            launches earlier.
        arrivals: int32, at least `residual_arrivals(N, H)` zeros, which are zeros again afterwards.
            None: only on a CPU.
        bias_EH: dense, in the weight's dtype.
        grouping: in blocks of `decode_block`; None: pair by pair.
        The others as in `expert_inner`.

    Returns:
        The same `x` and `scaled`, with new `squares` of `residual_groups(plan, H)`. None of them is
        written for padded lanes. ValueError for a shape, dtype or plan that does not fit.
    """
    lanes, hidden = residual.x.shape
    _check_products(a_PF, weight_EHF, slot_N, routes, lanes, hidden)
    _check_bias(bias_EH, weight_EHF, a_PF.dtype)
    check_weight("next_norm", next_norm_H, hidden)
    check_residual(residual, (lanes, hidden), a_PF.dtype)
    squares = residual.x.new_empty(-(-hidden // plan.block_m), lanes)
    residual = residual._replace(squares=squares)
    if not use_triton(a_PF):
        y = expert_sum_reference(
            a_PF, weight_EHF, slot_N, routes, bias_EH=bias_EH, out_dtype=torch.float32
        )
        return add_to_residual_reference(y, slot_N, residual, next_norm_H)
    product = PairProduct(a_PF, weight_EHF, bias_EH, slot_N, routes, grouping, None, pdl)
    launch_down(product, stream_args(residual, next_norm_H), plan=plan, arrivals=arrivals)
    return residual


def expert_part(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    *,
    plan: LinearPlan,
    arrivals: torch.Tensor | None,
    bias_EH: torch.Tensor | None = None,
    grouping: Grouping | None = None,
    held: range | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute only the sum that `expert_residual` adds to the stream: new float32 [N, H].

    It is for ranks that have a part of every sum: that of the `held` experts. Padded lanes hold
    arbitrary values. Arguments and errors as in `expert_residual` and `expert_inner`.
    """
    lanes, hidden = len(slot_N), weight_EHF.shape[1]
    _check_products(a_PF, weight_EHF, slot_N, routes, lanes, hidden)
    _check_bias(bias_EH, weight_EHF, a_PF.dtype)
    check_held(held, weight_EHF.shape[0])
    if not use_triton(a_PF):
        return expert_sum_reference(
            a_PF, weight_EHF, slot_N, routes, bias_EH=bias_EH, held=held, out_dtype=torch.float32
        )
    part = torch.empty((lanes, hidden), dtype=torch.float32, device=a_PF.device)
    product = PairProduct(a_PF, weight_EHF, bias_EH, slot_N, routes, grouping, held, pdl)
    launch_down(product, SumArgs(part), plan=plan, arrivals=arrivals)
    return part


def residual_arrivals(lanes: int, hidden: int) -> int:
    """Most counters that `expert_residual` uses with any plan."""
    return lanes * -(-hidden // LEAST_FMA_ROWS)


def expert_sum(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    *,
    tile: ProductTile,
    grouping: Grouping,
    held: range | None = None,
    bias_EH: torch.Tensor | None = None,
    products: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute the weighted sum of each lane's experts, in two kernels.

    Args:
        products: dense [P, H] in a's dtype, to which the products of pairs are rounded; they are
            summed in float32.
        out: [N, H] in a's dtype, dense.
        The others as in `expert_inner`.

    Returns:
        [N, H] in a's dtype; padded lanes are not written. ValueError for a shape, dtype or tile
        that does not fit.
    """
    lanes, hidden = len(slot_N), weight_EHF.shape[1]
    _check_products(a_PF, weight_EHF, slot_N, routes, lanes, hidden)
    _check_bias(bias_EH, weight_EHF, a_PF.dtype)
    check_held(held, weight_EHF.shape[0])
    out = _output(out, (lanes, hidden), a_PF.dtype, a_PF)
    if not use_triton(a_PF):
        return expert_sum_reference(
            a_PF,
            weight_EHF,
            slot_N,
            routes,
            bias_EH=bias_EH,
            held=held,
            out_dtype=a_PF.dtype,
            out=out,
        )
    y = _output(products, (len(a_PF), hidden), a_PF.dtype, a_PF)
    product = PairProduct(a_PF, weight_EHF, bias_EH, slot_N, routes, grouping, held, pdl)
    launch_sum(product, tile, products=y, out=out)
    return out


def _check_weight(
    weight_EMK: ExpertWeight, x: torch.Tensor, columns: int, *, swiglu: bool = False
) -> int:
    """Return the rows of an expert. ValueError unless the weight is dense and fits its inputs."""
    shape = tuple(weight_EMK.shape)
    if isinstance(weight_EMK, PackedExperts):
        if shape[2] != columns:
            raise ValueError(f"inputs of {columns} features, and experts of {shape[2]}")
        if weight_EMK.swiglu != swiglu:
            raise ValueError(f"experts of {shape[1]} rows: swiglu={weight_EMK.swiglu}")
        return shape[1]
    if len(shape) != 3 or 0 in shape or not weight_EMK.is_contiguous():
        raise ValueError(f"experts' weights must be a dense [E, M, K], not {shape}")
    if weight_EMK.dtype != x.dtype or shape[2] != columns:
        raise ValueError(
            f"inputs of {columns} features in {x.dtype}, and experts of {shape[2]} in "
            f"{weight_EMK.dtype}"
        )
    return shape[1]


def _check_bias(bias_EM: torch.Tensor | None, weight_EMK: ExpertWeight, dtype: torch.dtype) -> None:
    if bias_EM is None:
        return
    shape = tuple(weight_EMK.shape[:2])
    if bias_EM.shape != shape or bias_EM.dtype != dtype or not bias_EM.is_contiguous():
        raise ValueError(
            f"experts' biases must be a dense {dtype} {list(shape)}, not {bias_EM.dtype} "
            f"{list(bias_EM.shape)}"
        )


def _check_routes(routes: Routes, slot_N: torch.Tensor, lanes: int) -> None:
    check_lanes(lanes, slot_N=slot_N)
    for name, tensor, dtype in (
        ("expert", routes.expert, torch.int32),
        ("weight", routes.weight, torch.float32),
    ):
        shape = tuple(tensor.shape)
        dense = len(shape) == 2 and shape[0] == lanes and shape[1] > 0 and tensor.is_contiguous()
        if not dense or tensor.dtype != dtype or shape != tuple(routes.expert.shape):
            raise ValueError(
                f"routes.{name} must be a dense {dtype} [{lanes}, k], not {tensor.dtype} {shape}"
            )


def _check_products(
    a_PF: torch.Tensor,
    weight_EHF: ExpertWeight,
    slot_N: torch.Tensor,
    routes: Routes,
    lanes: int,
    hidden: int,
) -> None:
    check_rows(a_PF=a_PF)
    _check_routes(routes, slot_N, lanes)
    pairs, width = a_PF.shape
    if pairs != routes.expert.numel() or not a_PF.is_contiguous():
        raise ValueError(
            f"a_PF must be dense, a row for each of {routes.expert.numel()} pairs, not "
            f"{tuple(a_PF.shape)}"
        )
    rows = _check_weight(weight_EHF, a_PF, width)
    if rows != hidden:
        raise ValueError(f"a stream of {hidden} columns, and experts of {rows} rows")


def _output(
    out: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a dense {dtype} {list(shape)}, not {out.dtype} {list(out.shape)}"
        )
    return out
