"""The router of a mixture of experts: it chooses each lane's experts and their weights.

Chosen experts are ranked by the values they are chosen by; on a tie the lower id comes first. NaN
ranks lowest, so that a lane's ids always differ.

Letters: N lanes, E experts, k chosen of a lane, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    check_lanes,
    check_vector,
    check_weight,
    live_lanes,
    sum_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs

RouterScores = Literal["softmax", "sigmoid", "softmax_of_chosen"]
MAX_EXPERTS = 512

# Below the key of -inf.
_LEAST = -(2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """How logits become experts and weights.

    top_k       experts of a lane
    scores      weights before anything else: probabilities among all experts, sigmoids, or
                probabilities among the chosen experts only
    normalised  whether the weights of a lane are divided by their sum
    least_sum   added to that sum, more than 0, as all sigmoids may be 0; the default is
                DeepSeek-V3's
    scale       factor of the weights
    groups      number of equal groups; only experts of the best `top_groups` can be chosen
    group_best  a group is valued by its best expert (1), or by the sum of its two best (2)
    """

    top_k: int
    scores: RouterScores = "softmax"
    normalised: bool = False
    least_sum: float = 1e-20
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2

    def check(self, experts: int) -> None:
        """Raise ValueError unless the router can choose among this many experts."""
        if self.scores not in get_args(RouterScores):
            raise ValueError(
                f"scores={self.scores!r} is none of {', '.join(get_args(RouterScores))}"
            )
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"a router has 1 to {MAX_EXPERTS} experts, not {experts}")
        if not 1 <= self.top_groups <= self.groups or experts % self.groups:
            raise ValueError(
                f"{experts} experts in {self.groups} groups, of which {self.top_groups} are taken"
            )
        size = experts // self.groups
        if self.group_best not in (1, 2):
            raise ValueError(f"group_best={self.group_best} is neither 1 nor 2")
        if self.groups > 1 and size < self.group_best:
            raise ValueError(
                f"a group needs {self.group_best} experts, and {self.groups} of {experts} have "
                f"{size}"
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ValueError(
                f"top_k={self.top_k} of {self.top_groups * size} experts that can be chosen"
            )


class Routes(NamedTuple):
    """The experts of each lane, best first. Padded lanes hold arbitrary values."""

    expert: torch.Tensor
    """int32 [N, k]: different ids in [0, E)"""
    weight: torch.Tensor
    """float32 [N, k]"""


def route(
    logits_NE: torch.Tensor,
    slot_N: torch.Tensor,
    router: Router,
    *,
    correction_E: torch.Tensor | None = None,
    factor_E: torch.Tensor | None = None,
    given_Nk: torch.Tensor | None = None,
    expert_Nk: torch.Tensor | None = None,
    pdl: bool = False,
) -> Routes:
    """Choose each live lane's experts: one kernel on the current stream, without a host sync.

    Args:
        logits_NE: float32, dense rows, any stride between them.
        slot_N: int32, -1 = padded lane.
        correction_E: float32, added to the scores for the choice, but not to the weights.
        factor_E: any float dtype, factor of each expert's weight at the end.
        given_Nk: int32, replaces the choice: a lane whose first id is not -1 takes these ids,
            different ones in [0, E), in this order. Their weights follow from the lane's own
            logits, as if they had been chosen.
        expert_Nk: int32, receives the ids; None: they go into a new tensor.
        pdl: the launch before may still run; it writes neither correction nor factors.

    Returns:
        New tensors (`expert_Nk` if given); padded lanes are not written. A lane's bits do not
        depend on others.

    Raises:
        ValueError: a shape or dtype that does not fit, or a correction with `softmax_of_chosen`,
            which has no scores of all experts.
    """
    if logits_NE.dim() != 2 or logits_NE.dtype != torch.float32 or logits_NE.stride(1) != 1:
        raise ValueError(
            f"logits_NE must be float32 with dense rows, not {logits_NE.dtype} "
            f"{tuple(logits_NE.shape)} with strides {logits_NE.stride()}"
        )
    lanes, experts = logits_NE.shape
    routes = check_route(
        lanes, experts, slot_N, router, correction_E, factor_E, given_Nk, expert_Nk
    )
    if not use_triton(logits_NE):
        return route_reference(
            logits_NE,
            slot_N,
            router,
            correction_E=correction_E,
            factor_E=factor_E,
            given_Nk=given_Nk,
            out=routes,
        )
    launcher(_route_kernel, (lanes,))(
        logits_NE,
        correction_E,
        slot_N,
        routes.expert,
        routes.weight,
        given_Nk,
        factor_E,
        logits_NE.stride(0),
        router.scale,
        BLOCK_K=triton.next_power_of_2(router.top_k),
        **choice_options(router, experts),
        num_warps=1 if experts <= 128 else 4,
        **launch_options(pdl),
    )
    return routes


def choice_options(router: Router, experts: int) -> dict[str, Any]:
    """Constexprs for a kernel that calls `choose`."""
    return {
        "E": experts,
        "BLOCK_E": triton.next_power_of_2(experts),
        "TOP_K": router.top_k,
        "SCORES": router.scores,
        "LEAST_SUM": router.least_sum if router.normalised else 0.0,
        "GROUPS": router.groups,
        "BLOCK_G": triton.next_power_of_2(router.groups),
        "TOP_GROUPS": router.top_groups,
        "GROUP_BEST": router.group_best,
    }


def check_route(
    lanes: int,
    experts: int,
    slot_N: torch.Tensor,
    router: Router,
    correction_E: torch.Tensor | None,
    factor_E: torch.Tensor | None,
    given_Nk: torch.Tensor | None,
    expert_Nk: torch.Tensor | None,
) -> Routes:
    """Return the tensors for the routes. ValueError unless the arguments fit a router of this many
    experts.
    """
    router.check(experts)
    check_lanes(lanes, slot_N=slot_N)
    if correction_E is not None:
        check_vector("correction_E", correction_E, experts, torch.float32)
        if router.scores == "softmax_of_chosen":
            raise ValueError("a correction is of scores, and softmax_of_chosen has none of all")
    if factor_E is not None:
        check_weight("factor_E", factor_E, experts)
    for name, ids in (("given", given_Nk), ("expert", expert_Nk)):
        if ids is not None:
            check_vector(name, ids.view(-1), lanes * router.top_k, torch.int32)
    if expert_Nk is None:
        expert_Nk = slot_N.new_empty(lanes, router.top_k)
    return Routes(expert_Nk, torch.empty_like(expert_Nk, dtype=torch.float32))


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    logits_ptr,
    correction_ptr,
    slot_ptr,
    expert_ptr,
    weight_ptr,
    given_ptr,
    factor_ptr,
    logits_stride,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORES: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane."""
    lane = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    there = expert < E
    if correction_ptr is not None:
        correction = tl.load(correction_ptr + expert, mask=there, other=0.0)
    else:
        correction = tl.zeros((BLOCK_E,), tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    choose(
        logits_ptr + lane * logits_stride,
        correction,
        lane,
        expert_ptr,
        weight_ptr,
        given_ptr,
        factor_ptr,
        scale,
        E,
        BLOCK_E,
        TOP_K,
        BLOCK_K,
        SCORES,
        LEAST_SUM,
        correction_ptr is not None,
        GROUPS,
        BLOCK_G,
        TOP_GROUPS,
        GROUP_BEST,
    )


@triton.jit
def choose(
    row_ptr,
    correction,
    lane,
    expert_ptr,
    weight_ptr,
    given_ptr,
    factor_ptr,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORES: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Choose a lane's experts by its logits at `row_ptr`; store them and their weights."""
    expert = tl.arange(0, BLOCK_E)
    there = expert < E
    logits = tl.load(row_ptr + expert, mask=there, other=float("-inf"))
    scores = logits
    if SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORES == "softmax":
        most = tl.max(logits, axis=0)
        powers = tl.exp(logits - most)
        power_sum = tl.sum(powers, axis=0)
        scores = powers / power_sum

    # Logits order experts as softmax and sigmoid do, except where those round to equal values.
    by = logits
    if CORRECTED or GROUPS > 1:
        by = scores + correction
    allowed = there
    if GROUPS > 1:
        allowed = there & _in_best_groups(
            by, expert, E // GROUPS, GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK_G
        )
    keys = tl.where(allowed, _sort_keys(by), _TAKEN)

    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for index in tl.static_range(TOP_K):
        best = _best(keys, expert)
        keys = tl.where(expert == best, _TAKEN, keys)
        chosen = tl.where(rank == index, best, chosen)
    if given_ptr is not None:
        given = tl.load(given_ptr + lane * TOP_K + rank, mask=rank < TOP_K, other=0)
        chosen = tl.where(tl.load(given_ptr + lane * TOP_K) >= 0, given, chosen)
    # All are loaded again at once: a sum for each would take as long as the choice.
    weights = tl.load(row_ptr + chosen, mask=rank < TOP_K, other=0.0)
    if SCORES == "sigmoid":
        weights = 1.0 / (1.0 + tl.exp(-weights))
    elif SCORES == "softmax":
        weights = tl.exp(weights - most) / power_sum
    else:
        first = tl.sum(tl.where(rank == 0, weights, 0.0), axis=0)
        if given_ptr is not None:
            # The first of given ids need not be the best.
            first = tl.max(tl.where(rank < TOP_K, weights, float("-inf")), axis=0)
        weights = tl.exp(weights - first)
    if SCORES == "softmax_of_chosen":
        weights = weights / _sum_of_weights(weights, rank, TOP_K)
    elif LEAST_SUM > 0:
        weights = weights / (_sum_of_weights(weights, rank, TOP_K) + LEAST_SUM)
    weights = weights * scale
    if factor_ptr is not None:
        factors = tl.load(factor_ptr + chosen, mask=rank < TOP_K, other=0.0)
        weights = weights * factors.to(tl.float32)
    at = lane * TOP_K + rank
    tl.store(expert_ptr + at, chosen, mask=rank < TOP_K)
    tl.store(weight_ptr + at, weights, mask=rank < TOP_K)


_TAKEN = tl.constexpr(_LEAST)


@triton.jit
def _sort_keys(by):
    """int32 keys that sort like float32 `by`; NaN counts as -inf."""
    by = tl.where(by == by, by, float("-inf"))
    # -0.0 equals 0.0, but its bits differ.
    bits = tl.where(by == 0.0, 0.0, by).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(keys, ids):
    """The lowest of the ids with the largest key."""
    return tl.min(tl.where(keys == tl.max(keys, axis=0), ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _sum_of_weights(weights, rank, TOP_K: tl.constexpr):
    """Sum of a lane's weights, in rank order from the best."""
    total = 0.0
    for index in tl.static_range(TOP_K):
        total += tl.sum(tl.where(rank == index, weights, 0.0), axis=0)
    return total


@triton.jit
def _in_best_groups(
    by,
    expert,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Which experts [BLOCK_E] are in the groups whose best GROUP_BEST have the largest sums."""
    keys = _sort_keys(by)
    group_of = expert // SIZE
    groups = tl.arange(0, BLOCK_G)
    group_keys = tl.full((BLOCK_G,), _TAKEN, tl.int32)
    for group in tl.static_range(GROUPS):
        inside = tl.where(group_of == group, keys, _TAKEN)
        first = _best(inside, expert)
        best_of = expert == first
        if GROUP_BEST == 2:
            best_of = best_of | (expert == _best(tl.where(best_of, _TAKEN, inside), expert))
        value = tl.sum(tl.where(best_of, by, 0.0), axis=0)
        group_keys = tl.where(groups == group, _sort_keys(value), group_keys)
    allowed = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = _best(group_keys, groups)
        allowed = allowed | (group_of == best)
        group_keys = tl.where(groups == best, _TAKEN, group_keys)
    return allowed


def route_reference(
    logits_NE: torch.Tensor,
    slot_N: torch.Tensor,
    router: Router,
    *,
    correction_E: torch.Tensor | None = None,
    factor_E: torch.Tensor | None = None,
    given_Nk: torch.Tensor | None = None,
    out: Routes | None = None,
) -> Routes:
    """`route` in plain PyTorch, for any number of lanes."""
    lanes, experts = logits_NE.shape
    if out is None:
        out = Routes(
            slot_N.new_empty(lanes, router.top_k), logits_NE.new_empty(lanes, router.top_k)
        )
    live = live_lanes(slot_N)
    logits = logits_NE[live]
    scores = logits
    if router.scores == "sigmoid":
        scores = 1.0 / (1.0 + _exp(-logits))
    elif router.scores == "softmax":
        powers = _exp(logits - logits.amax(dim=1, keepdim=True))
        scores = powers / sum_rows(powers)[:, None]
    by = logits
    if correction_E is not None or router.groups > 1:
        by = scores if correction_E is None else scores + correction_E
    by = torch.where(torch.isnan(by), -torch.inf, by)
    order = by.sort(dim=1, descending=True, stable=True).indices
    if router.groups > 1:
        grouped = by.unflatten(1, (router.groups, -1))
        ranked = grouped.sort(dim=2, descending=True).values
        value = ranked[:, :, 0]
        if router.group_best == 2:
            value = value + ranked[:, :, 1]
        value = torch.where(torch.isnan(value), -torch.inf, value)
        best = value.sort(dim=1, descending=True, stable=True).indices[:, : router.top_groups]
        group_of = order // (experts // router.groups)
        allowed = (group_of[:, :, None] == best[:, None, :]).any(dim=2)
        # A stable sort keeps the order among those that are allowed.
        places = allowed.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, places)
    chosen = order[:, : router.top_k]
    if given_Nk is not None:
        given = given_Nk[live].long()
        chosen = given.where(given[:, :1] >= 0, chosen)
    weights = scores.gather(1, chosen)
    if router.scores == "softmax_of_chosen":
        best = weights[:, :1] if given_Nk is None else weights.amax(dim=1, keepdim=True)
        weights = _exp(weights - best)
        weights = weights / _sum_of_ranks(weights)[:, None]
    elif router.normalised:
        weights = weights / (_sum_of_ranks(weights) + router.least_sum)[:, None]
    out.expert[live] = chosen.int()
    weights = weights * router.scale
    out.weight[live] = weights if factor_E is None else weights * factor_E.float()[chosen]
    return out


def _sum_of_ranks(weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(weights[:, 0])
    for weight in weights.unbind(1):
        total = total + weight
    return total


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e**x; on a CPU by numpy, because torch's bits depend on an element's place there."""
    if x.is_cuda:
        return torch.exp(x)
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(np.exp(np.ascontiguousarray(x.numpy())))
