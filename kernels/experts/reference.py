"""Plain PyTorch twins of `experts.py`; their order of summation is that of a CPU engine.

They do not use blocks: a pair is always one row of a product of `REFERENCE_ROWS` rows, so its bits
do not depend on other pairs.
"""

from __future__ import annotations

from typing import Literal

import torch

from graphengine.kernels.core.lanes import live_lanes
from graphengine.kernels.experts.held import places_of
from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.reference import matmul_groups, sum_in_order
from graphengine.kernels.norm_rope.activation import Gating, gated_reference


def expert_product_reference(
    x: torch.Tensor,
    weight_EMK: torch.Tensor | PackedExperts,
    slot_N: torch.Tensor,
    routes: Routes,
    *,
    squares_TN: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: Literal["swiglu", "squared_relu"] | None = None,
    bias_EM: torch.Tensor | None = None,
    gating: Gating = "silu",
    held: range | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Multiply each live pair by its expert's weight, into rows of `out` [P, M or F].

    With an activation `x` has a row per lane, for down one per pair. Pairs of experts that are
    not `held` are left out.
    """
    top_k = routes.expert.shape[1]
    lanes = live_lanes(slot_N)
    pairs = (lanes[:, None] * top_k + torch.arange(top_k, device=lanes.device)).flatten()
    chosen = places_of(routes.expert.flatten()[pairs], held)
    for expert in chosen[chosen < weight_EMK.shape[0]].unique().tolist():
        weight = _floats(weight_EMK, expert)
        part = pairs[chosen == expert]
        lane = part // top_k
        y = matmul_groups(x[part if activation is None else lane].float(), weight)
        if squares_TN is not None:
            mean = sum_in_order(squares_TN[:, lane]) / x.shape[1]
            y = y * torch.rsqrt(mean + eps)[:, None]
        if bias_EM is not None:
            y = y + bias_EM[expert].float()
        if activation == "swiglu":
            gate, up = y.chunk(2, dim=1)
            y = gated_reference(gate, up, gating)
        elif activation is not None:
            y = y.relu().square()
        out[part] = y.to(out.dtype)
    return out


def expert_sum_reference(
    a_PF: torch.Tensor,
    weight_EHF: torch.Tensor | PackedExperts,
    slot_N: torch.Tensor,
    routes: Routes,
    *,
    out_dtype: torch.dtype,
    bias_EH: torch.Tensor | None = None,
    held: range | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each live lane's experts by rank, [N, H]; other lanes are arbitrary."""
    lanes, top_k = routes.expert.shape
    hidden = weight_EHF.shape[1]
    y = torch.empty((lanes * top_k, hidden), dtype=out_dtype, device=a_PF.device)
    expert_product_reference(a_PF, weight_EHF, slot_N, routes, bias_EM=bias_EH, held=held, out=y)
    live = live_lanes(slot_N)
    if out is None:
        out = torch.empty((lanes, hidden), dtype=out_dtype, device=a_PF.device)
    elsewhere = places_of(routes.expert[live], held) >= weight_EHF.shape[0]
    products = y.view(lanes, top_k, hidden)[live].float().masked_fill(elsewhere[..., None], 0.0)
    total = torch.zeros_like(products[:, 0])
    for rank in range(top_k):
        total = total + routes.weight[live, rank, None] * products[:, rank]
    out[live] = total.to(out_dtype)
    return out


def _floats(weight_EMK: torch.Tensor | PackedExperts, expert: int) -> torch.Tensor:
    """An expert's weight, float32 [M, K]."""
    if isinstance(weight_EMK, PackedExperts):
        return weight_EMK.floats(expert)
    return weight_EMK[expert].float()
