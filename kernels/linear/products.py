"""Products with a weight as it is stored: in 16 or 32 bits, or packed in 8 or 4.

The functions of `linear.py` and of `packed_linear.py` have one contract; these choose by the
weight. If a packed weight's columns have an order of their own, the inputs are put in it first.

Letters: N lanes, K input features, M weight rows, V weight rows of lm_head, T groups of columns.
"""

from __future__ import annotations

import torch

from graphengine.kernels.comm.items import Peers
from graphengine.kernels.core.launching import ALONE, Launch
from graphengine.kernels.linear import linear as plain
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.kernels.linear.packed_linear import (
    packed_linear,
    packed_linear_residual,
    packed_linear_sample,
    packed_linear_squares,
)
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import Product, Residual
from graphengine.kernels.norm_rope.activation import Activation
from graphengine.kernels.sample.candidates import SamplingTensors

AnyWeight = torch.Tensor | PackedWeight
"""A linear's weight [M, K]."""


def linear(
    x_NK: torch.Tensor,
    weight_MK: AnyWeight,
    slot_N: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    swiglu: bool = False,
    activation: Activation = "silu",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> torch.Tensor:
    """y = x @ weight^T / rms (+ bias), and SwiGLU.

    Arguments, results and errors as in `linear.linear`. A packed weight knows whether it is a
    SwiGLU: ValueError if `swiglu` differs.
    """
    if isinstance(weight_MK, torch.Tensor):
        return plain.linear(
            x_NK,
            weight_MK,
            slot_N,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
            swiglu=swiglu,
            activation=activation,
            out_dtype=out_dtype,
            out=out,
            plan=plan,
            launch=launch,
        )
    if weight_MK.swiglu != swiglu:
        raise ValueError(
            f"swiglu={swiglu}, but the packed weight of {weight_MK.shape[0]} rows was laid out "
            f"with swiglu={weight_MK.swiglu}"
        )
    x_NK, weight_MK = in_order(x_NK, weight_MK)
    return packed_linear(
        x_NK,
        weight_MK,
        slot_N,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        activation=activation,
        out_dtype=out_dtype,
        out=out,
        plan=plan,
        launch=launch,
    )


def linear_residual(
    x_NK: torch.Tensor,
    weight_MK: AnyWeight,
    slot_N: torch.Tensor,
    residual: Residual,
    next_norm_M: torch.Tensor,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    peers: Peers | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> Residual:
    """Add x @ weight^T / rms (+ bias) to residual.x, and write what the norm after it needs.

    Arguments, results and errors as in `linear.linear_residual`.
    """
    if isinstance(weight_MK, torch.Tensor):
        return plain.linear_residual(
            x_NK,
            weight_MK,
            slot_N,
            residual,
            next_norm_M,
            squares_TN=squares_TN,
            eps=eps,
            bias=bias,
            peers=peers,
            plan=plan,
            launch=launch,
        )
    x_NK, weight_MK = in_order(x_NK, weight_MK)
    return packed_linear_residual(
        x_NK,
        weight_MK,
        slot_N,
        residual,
        next_norm_M,
        squares_TN=squares_TN,
        eps=eps,
        bias=bias,
        peers=peers,
        plan=plan,
        launch=launch,
    )


def linear_squares(
    x_NK: torch.Tensor,
    weight_MK: AnyWeight,
    slot_N: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    peers: Peers | None = None,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> Product:
    """Compute x @ weight^T (+ bias) in float32, and what an RMSNorm of it needs.

    Arguments, results and errors as in `linear.linear_squares`.
    """
    if isinstance(weight_MK, torch.Tensor):
        return plain.linear_squares(
            x_NK, weight_MK, slot_N, bias=bias, peers=peers, plan=plan, launch=launch
        )
    x_NK, weight_MK = in_order(x_NK, weight_MK)
    return packed_linear_squares(
        x_NK, weight_MK, slot_N, bias=bias, peers=peers, plan=plan, launch=launch
    )


def linear_sample(
    x_NK: torch.Tensor,
    weight_VK: AnyWeight,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int = 1,
    token_ids: torch.Tensor | None = None,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    plan: LinearPlan | None = None,
    launch: Launch = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fast sampler folded into lm_head.

    Arguments, results and errors as in `linear.linear_sample`.
    """
    if isinstance(weight_VK, torch.Tensor):
        return plain.linear_sample(
            x_NK,
            weight_VK,
            slot_N,
            position_N,
            params,
            ahead=ahead,
            token_ids=token_ids,
            squares_TN=squares_TN,
            eps=eps,
            plan=plan,
            launch=launch,
        )
    x_NK, weight_VK = in_order(x_NK, weight_VK)
    return packed_linear_sample(
        x_NK,
        weight_VK,
        slot_N,
        position_N,
        params,
        ahead=ahead,
        token_ids=token_ids,
        squares_TN=squares_TN,
        eps=eps,
        plan=plan,
        launch=launch,
    )


def in_order(x_NK: torch.Tensor, weight_MK: PackedWeight) -> tuple[torch.Tensor, PackedWeight]:
    """The inputs in the order of the weight's columns, and the weight without its `order`."""
    if weight_MK.order is None:
        return x_NK, weight_MK
    return x_NK.index_select(1, weight_MK.order), weight_MK._replace(order=None)
