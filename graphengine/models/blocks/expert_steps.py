"""The programs of a mixture of experts, for a few rows and for a chunk of a prompt.

Decode runs one kernel for the router and its product and two over the chosen experts; where (lane,
expert) pairs are grouped, another one before these two. A chunk of a prompt always groups them.
Experts of a latent have a product before and after them. Experts with norms of their own have
programs of their own, at the end.

Letters: N lanes, H hidden, F ffn width of an expert, E experts, k experts of a lane, P = N * k
pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.experts.experts import (
    expert_inner,
    expert_part,
    expert_residual,
    expert_sum,
)
from graphengine.kernels.experts.grouping import Grouping, group_pairs
from graphengine.kernels.experts.packed.packed_chunk import fits_packed_chunk
from graphengine.kernels.experts.plans import (
    ProductTile,
    chunk_tile,
    counted_block,
    decode_block,
    groups_pairs,
)
from graphengine.kernels.experts.prefill.experts_chunk import fits_experts_chunk
from graphengine.kernels.experts.router import Routes, route
from graphengine.kernels.experts.router_product import route_product
from graphengine.kernels.experts.shared_gate import gate_lanes
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.prefill.linear_chunk import linear_chunk_logits
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.layer_inputs import rounded
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.kernels.norm_rope.post_norm import add_normed
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.experts import ExpertsWeights, ExpertWeight
from graphengine.models.blocks.lanes_of_ranks import (
    RoutedLanes,
    add_sum_of_own,
    lanes_of_all,
    sum_of_own,
)
from graphengine.models.blocks.norms import ExpertNorms, NextNorm, Sandwich
from graphengine.models.blocks.streams import (
    PrefillScratch,
    add_chunk,
    add_part,
    add_product,
    part_product,
)
from graphengine.models.launches import DecodeLaunch, Reduce, Share
from graphengine.models.routing import layer_ids, tell_routes


class ChosenExperts(NamedTuple):
    """The first half of the chosen experts: `inner`, `[P, F]`, is the input of down."""

    inner: Tensor
    slot: Tensor
    routes: Routes
    grouping: Grouping | None


def decode_experts(
    weights: ExpertsWeights,
    row: DecodeLanes,
    residual: Residual,
    next_norm: NextNorm,
    launch: DecodeLaunch,
) -> Residual:
    """Run the block on `row`'s tokens: three or four kernels, and those of a shared feed-forward.

    `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
    place except for its squares.
    """
    block, slot = weights.block, row.slot
    if weights.norms is not None:
        return _decode_normed(weights, weights.norms, row, residual, next_norm, launch)
    assert isinstance(next_norm, Tensor), "no norm follows experts before their sum"
    # This comes first: adding the chosen experts overwrites the input of the shared ones.
    shared = None if weights.shared is None else weights.shared.inner(row, residual, launch)
    if shared is not None and weights.shared_gate is not None:
        gate_lanes(
            shared,
            residual.scaled,
            weights.shared_gate[0],
            slot,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            pdl=launch.pdl,
        )
    routes = _routes(weights, residual.scaled, residual.squares, slot, launch)
    lanes = RoutedLanes(residual.scaled, slot, routes, residual.squares)
    if weights.latents is not None:
        enter, _ = weights.latents
        call = launch.call("latent_enter", residual, enter, slot, eps=block.norm_eps)
        lanes = RoutedLanes(linear(call, STORE), slot, routes)
    if launch.experts is not None:
        lanes = lanes_of_all(lanes, launch.experts)
    chosen = _choose(weights, lanes, launch)
    if weights.latents is not None:
        return _add_latent(weights, chosen, shared, row, residual, next_norm, launch)
    if launch.reduce is None and launch.experts is None:
        return _add(weights, chosen, shared, row, residual, next_norm, launch)
    part, own = _part(weights, chosen, launch), None
    if weights.shared is not None and shared is not None:
        own = weights.shared.part(shared, row, launch)
    if launch.experts is not None:
        return add_sum_of_own(part, own, slot, residual, next_norm, launch)
    if own is not None:
        # One all-reduce for both.
        part += own
    return add_part(part, slot, residual, next_norm, launch=launch)


def _routes(
    weights: ExpertsWeights,
    x: Tensor,
    squares: Tensor | None,
    slot: Tensor,
    launch: DecodeLaunch,
) -> Routes:
    """The experts of lanes with router inputs x; without `squares`, x is already normed."""
    given, kept = layer_ids(launch.routes)
    routes = route_product(
        x,
        weights.gate,
        slot,
        weights.block.router,
        arrivals=launch.arrivals,
        squares_TN=squares,
        eps=weights.block.norm_eps,
        bias_E=weights.gate_bias,
        correction_E=weights.correction,
        factor_E=None if weights.norms is None else weights.norms.factor,
        given_Nk=given,
        expert_Nk=kept,
        pdl=launch.pdl,
    )
    tell_routes(routes, slot)
    return routes


def _choose(weights: ExpertsWeights, lanes: RoutedLanes, launch: DecodeLaunch) -> ChosenExperts:
    """Run the first half of this rank's experts on the lanes that chose them."""
    block, slot = weights.block, lanes.slot
    routes, experts = lanes.routes, len(block.own)
    inner_plan = launch.plan(block.inner_name, weights.gate_up)
    down_plan = launch.plan("expert_down", weights.down)
    # The family `fma` takes pairs one by one, and the bits depend on the family.
    in_dot = inner_plan.family == down_plan.family == "dot"
    grouping = None
    pairs = (len(slot), block.router.top_k, block.experts)
    if in_dot and groups_pairs(*pairs, launch.tokens_per_row):
        size = decode_block(*pairs, _format(weights.gate_up))
        grouping = group_pairs(
            routes.expert,
            slot,
            experts=experts,
            size=size,
            held=block.held,
            pdl=launch.pdl,
        )
    inner = expert_inner(
        lanes.x,
        weights.gate_up,
        slot,
        routes,
        tile=inner_plan,
        squares_TN=lanes.squares,
        eps=block.norm_eps,
        bias_EM=weights.gate_up_bias,
        gating=block.gating,
        gated=block.gated,
        grouping=grouping,
        held=block.held,
        pdl=launch.pdl,
    )
    return ChosenExperts(inner, slot, routes, grouping)


def _add(
    weights: ExpertsWeights,
    chosen: ChosenExperts,
    shared: Tensor | None,
    row: DecodeLanes,
    residual: Residual,
    next_norm: Tensor,
    launch: DecodeLaunch,
) -> Residual:
    """Add the chosen experts' down products to `residual`, and those of the `shared` experts."""
    residual = expert_residual(
        chosen.inner,
        weights.down,
        row.slot,
        chosen.routes,
        residual,
        next_norm,
        plan=launch.plan("expert_down", weights.down),
        arrivals=launch.arrivals,
        bias_EH=weights.down_bias,
        grouping=chosen.grouping,
        pdl=launch.pdl,
    )
    if weights.shared is None or shared is None:
        return residual
    return weights.shared.add(shared, row, residual, next_norm, launch)


def _add_latent(
    weights: ExpertsWeights,
    chosen: ChosenExperts,
    shared: Tensor | None,
    row: DecodeLanes,
    residual: Residual,
    next_norm: Tensor,
    launch: DecodeLaunch,
) -> Residual:
    """Add to `residual` the chosen experts' latent, mapped back by a linear, and the `shared`
    experts.

    Where ranks split experts, each has a part of the latent. The linear can be applied to the
    parts, so one all-reduce sums its products together with the shared experts' parts.
    """
    assert weights.latents is not None
    slot, of_all = row.slot, launch.experts
    latent = _part(weights, chosen, launch)
    if of_all is not None:
        latent = sum_of_own(latent, of_all)
    latent = rounded(latent, slot, residual.scaled.dtype, pdl=launch.pdl)
    call = launch.call("latent_leave", latent, weights.latents[1], slot)
    if launch.reduce is not None and of_all is None:
        part = part_product(call)
        if weights.shared is not None and shared is not None:
            part += weights.shared.part(shared, row, launch)
        return add_part(part, slot, residual, next_norm, launch=launch)
    residual = add_product(call, residual, next_norm, launch)
    if weights.shared is None or shared is None:
        return residual
    return weights.shared.add(shared, row, residual, next_norm, launch)


def _part(weights: ExpertsWeights, chosen: ChosenExperts, launch: DecodeLaunch) -> Tensor:
    """Float32, a row for each lane: the part of the output that this rank's experts make."""
    return expert_part(
        chosen.inner,
        weights.down,
        chosen.slot,
        chosen.routes,
        plan=launch.plan("expert_down", weights.down),
        arrivals=launch.arrivals,
        bias_EH=_own_bias(weights, launch.share),
        grouping=chosen.grouping,
        held=weights.block.held,
        pdl=launch.pdl,
    )


def _own_bias(weights: ExpertsWeights, share: Share) -> Tensor | None:
    """Down biases, added weighted for the chosen experts. Where ranks split the experts' width,
    rank 0 adds them for all; other ranks get None.
    """
    return weights.down_bias if share.rank == 0 or weights.block.held is not None else None


def prefill_experts(
    weights: ExpertsWeights,
    stream: Tensor,
    next_norm: NextNorm,
    slot: Tensor,
    scratch: PrefillScratch,
) -> None:
    """Run the block on a chunk, whose normed stream is `scratch.h`.

    `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
    """
    if weights.norms is not None:
        _prefill_normed(weights, weights.norms, stream, next_norm, slot, scratch)
        return
    assert isinstance(next_norm, Tensor), "no norm follows experts before their sum"
    h, launch = scratch.h, scratch.launch
    routes = _chunk_routes(weights, slot, scratch)
    shared = None
    if weights.shared is not None:
        shared = _shared_chunk(weights, slot, scratch)
    summed = _routed_chunk(weights, routes, slot, scratch)
    eps, pdl = weights.block.norm_eps, launch.pdl
    for y in _summands(summed, shared, launch.reduce):
        add_rms_norm(stream, y, next_norm, slot, eps=eps, out_dtype=h.dtype, out=h, pdl=pdl)


def _routed_chunk(
    weights: ExpertsWeights, routes: Routes, slot: Tensor, scratch: PrefillScratch
) -> Tensor:
    """The sum of the experts of each lane, whose input is `scratch.h`; of several ranks that split
    every expert, this rank's part. It may be `scratch.h`.
    """
    block, latents = weights.block, weights.latents
    given, summed = scratch.h, scratch.h
    if latents is not None:
        given = scratch.take(block.latent, after=block.pairs_width)
        summed = scratch.take(block.latent, after=block.pairs_width + block.latent)
        scratch.product(scratch.h, latents[0], None, out=given)
    lanes, group = RoutedLanes(given, slot, routes), scratch.launch.experts
    if group is None:
        summed = _chunk_sum(weights, lanes, scratch, out=summed)
    else:
        lanes = lanes_of_all(lanes, group)
        out = lanes.x.new_empty(lanes.x.shape)
        summed = sum_of_own(_chunk_sum(weights, lanes, scratch, out=out), group)
    if latents is None:
        return summed
    return scratch.product(summed, latents[1], None, out=scratch.h)


def _chunk_routes(weights: ExpertsWeights, slot: Tensor, scratch: PrefillScratch) -> Routes:
    """The experts of each lane of the normed `scratch.h`."""
    if scratch.launch.any_lanes:
        logits = linear_chunk_logits(scratch.h, weights.gate, slot)
    else:
        logits = _router_logits(scratch.h, weights.gate)
    if weights.gate_bias is not None:
        logits += weights.gate_bias
    given, kept = layer_ids(scratch.launch.routes)
    return route(
        logits,
        slot,
        weights.block.router,
        correction_E=weights.correction,
        factor_E=None if weights.norms is None else weights.norms.factor,
        given_Nk=given,
        expert_Nk=kept,
        pdl=scratch.launch.pdl,
    )


def _chunk_sum(
    weights: ExpertsWeights, lanes: RoutedLanes, scratch: PrefillScratch, *, out: Tensor
) -> Tensor:
    """The sum of each lane's experts that this rank has."""
    block, pdl = weights.block, scratch.launch.pdl
    ffn, width, held = block.ffn_size, block.width, block.held
    any_lanes = scratch.launch.any_lanes
    up_tile, down_tile = _chunk_tiles(weights, None if any_lanes else len(lanes.slot), out.dtype)
    pairs = block.sharing * block.router.top_k
    grouping = group_pairs(
        lanes.routes.expert,
        lanes.slot,
        experts=len(block.own),
        size=up_tile.lanes,
        held=held,
        pdl=pdl,
    )
    inner = expert_inner(
        lanes.x,
        weights.gate_up,
        lanes.slot,
        lanes.routes,
        tile=up_tile,
        bias_EM=weights.gate_up_bias,
        gating=block.gating,
        gated=block.gated,
        grouping=grouping,
        held=held,
        out=scratch.take(pairs * ffn).view(-1, ffn),
        pdl=pdl,
    )
    return expert_sum(
        inner,
        weights.down,
        lanes.slot,
        lanes.routes,
        tile=down_tile,
        grouping=grouping,
        held=held,
        bias_EH=_own_bias(weights, scratch.launch.share),
        products=scratch.take(pairs * width, after=pairs * ffn).view(-1, width),
        out=out,
        pdl=pdl,
    )


def _chunk_tiles(
    weights: ExpertsWeights, lanes: int | None, dtype: torch.dtype
) -> tuple[ProductTile, ProductTile]:
    """Tiles of the first half, and of down; both use the same grouping of pairs.

    lanes  number of lanes; None: any number, as no bit may depend on it
    """
    block = weights.block
    tiles = [
        chunk_tile(lanes, block.router.top_k, block.experts, columns, dtype, _format(weight))
        for weight, columns in (
            (weights.gate_up, block.width),
            (weights.down, block.ffn_size),
        )
    ]
    size, both = min(tile.lanes for tile in tiles), (weights.gate_up, weights.down)
    packed = all(fits_packed_chunk(weight, dtype) for weight in both)
    if packed or all(map(fits_experts_chunk, both)):
        size = counted_block(lanes, block.router.top_k, block.experts, packed=packed)
    up, down = (tile._replace(lanes=size) for tile in tiles)
    return up, down


def _shared_chunk(weights: ExpertsWeights, slot: Tensor, scratch: PrefillScratch) -> Tensor:
    """The shared feed-forward's output for the normed `scratch.h`, past the experts' scratch."""
    assert weights.shared is not None
    start, hidden = weights.block.routed_width, weights.block.hidden_size
    inner = weights.shared.inner_chunk(slot, scratch, after=start + hidden)
    if weights.shared_gate is not None:
        gate_lanes(inner, scratch.h, weights.shared_gate[0], slot, pdl=scratch.launch.pdl)
    out = scratch.take(hidden, after=start)
    return scratch.product(inner, weights.shared.down, None, out=out)


def _format(weight: ExpertWeight) -> WeightFormat | None:
    return None if isinstance(weight, Tensor) else weight.format


def _router_logits(h_NH: Tensor, gate_EH: Tensor) -> Tensor:
    """Router logits in float32, `[N, E]`: in 16 bits there would be ties."""
    if h_NH.dtype == torch.float32:
        return torch.mm(h_NH, gate_EH.t())
    if h_NH.is_cuda:
        return torch.mm(h_NH, gate_EH.t(), out_dtype=torch.float32)
    return torch.mm(h_NH.float(), gate_EH.float().t())


def _summands(routed: Tensor, shared: Tensor | None, reduce: Reduce | None) -> tuple[Tensor, ...]:
    """The terms to add to a chunk's stream; with several ranks, their sum over all ranks."""
    if reduce is None:
        return (routed,) if shared is None else (routed, shared)
    return (reduce(routed if shared is None else routed.add_(shared)),)


def _decode_normed(
    weights: ExpertsWeights,
    norms: ExpertNorms,
    row: DecodeLanes,
    residual: Residual,
    next_norm: NextNorm,
    launch: DecodeLaunch,
) -> Residual:
    """Run `decode_experts` where experts and a feed-forward beside them have norms of their own:
    nine kernels, or ten.
    """
    assert isinstance(next_norm, Sandwich) and weights.shared is not None, f"{next_norm=}"
    slot, shared = row.slot, weights.shared
    whole = shared.part(shared.inner(row, residual, launch), row, launch)
    # Both read the stream itself, which is not normed yet.
    x, like, eps, pdl = residual.x, residual.scaled, weights.block.norm_eps, launch.pdl
    read = norms.router_input(x, slot, eps=eps, out=torch.empty_like(like), pdl=pdl)
    routes = _routes(weights, read, None, slot, launch)
    given = norms.expert_input(x, slot, eps=eps, out=torch.empty_like(like), pdl=pdl)
    lanes = RoutedLanes(given, slot, routes)
    if launch.experts is not None:
        lanes = lanes_of_all(lanes, launch.experts)
    routed = _part(weights, _choose(weights, lanes, launch), launch)
    if launch.experts is not None:
        routed = sum_of_own(routed, launch.experts)
    elif launch.reduce is not None:
        routed, whole = launch.reduce(routed), launch.reduce(whole)
    product = norms.summed(routed, whole, slot, eps=eps, pdl=pdl)
    post, following, eps, _, factor = next_norm
    return add_normed(product, post, residual, following, slot, eps=eps, factor_1=factor, pdl=pdl)


def _prefill_normed(
    weights: ExpertsWeights,
    norms: ExpertNorms,
    stream: Tensor,
    next_norm: NextNorm,
    slot: Tensor,
    scratch: PrefillScratch,
) -> None:
    """Run `prefill_experts` where experts and the feed-forward beside them have norms of their
    own.
    """
    h, launch, eps = scratch.h, scratch.launch, weights.block.norm_eps
    whole = _shared_chunk(weights, slot, scratch)
    norms.router_input(stream, slot, eps=eps, out=h, pdl=launch.pdl)
    routes = _chunk_routes(weights, slot, scratch)
    norms.expert_input(stream, slot, eps=eps, out=h, pdl=launch.pdl)
    routed = _routed_chunk(weights, routes, slot, scratch)
    if launch.reduce is not None and launch.experts is None:
        routed, whole = launch.reduce(routed), launch.reduce(whole)
    summed = norms.summed(routed, whole, slot, eps=eps, out=h, pdl=launch.pdl)
    add_chunk(summed.y, stream, next_norm, slot, scratch, eps=eps)
