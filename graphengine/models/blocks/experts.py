"""A mixture of experts: each token's feed-forward is the weighted sum of a few of many SwiGLUs.

Decode runs one kernel for the router and its product and two over the chosen experts; where (lane,
expert) pairs are grouped, another one before these two. A chunk of a prompt always groups them.
With several ranks, each has a part of every expert's width, or some whole experts, and all of the
router, so all ranks choose alike, and one all-reduce sums the chosen and the shared experts. Or
each rank has lanes of its own and shares its experts with all others (`lanes_of_ranks.py`).

Letters: N lanes, H hidden, F ffn width of an expert, E experts, k experts of a lane, P = N * k
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.experts.experts import (
    expert_part,
    expert_residual,
    expert_sum,
    expert_swiglu,
)
from graphengine.kernels.experts.grouping import Grouping, group_pairs
from graphengine.kernels.experts.packed.weights import PackedExperts, empty_experts
from graphengine.kernels.experts.plans import ProductTile, chunk_tile, decode_block, groups_pairs
from graphengine.kernels.experts.router import Router, Routes, route
from graphengine.kernels.experts.router_product import route_product
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedForm
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.activation import ClampedSwiglu
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.expert_names import QWEN_NAMES, ExpertNames
from graphengine.models.blocks.lanes_of_ranks import (
    RoutedLanes,
    add_sum_of_own,
    lanes_of_all,
    sum_of_own,
)
from graphengine.models.blocks.streams import PrefillScratch, add_part, tensors_of
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.contract import DecodeLaunch, Reduce, Share
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.routing import layer_ids, tell_routes
from graphengine.models.weights import Stack, StoredLinear, Weight

ExpertWeight = Tensor | PackedExperts
"""A weight of all experts: `[E, M, K]` in the model's dtype, or in 8 or 4 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Sizes of the block; `norm_eps` is the epsilon of the norm of its input.

    ffn_size   of each expert
    shared     a SwiGLU that every token takes; its output is added after the chosen experts'
    held       experts that this rank has whole; None: ranks split the width of all experts
    sharing    ranks with lanes of their own that share these experts
    corrected  whether experts are chosen by scores with a correction
    bias       whether the products of the router and of the experts have biases
    clamped    the experts' activation in place of silu(gate) * up
    names      of the checkpoint's tensors
    """

    hidden_size: int
    ffn_size: int
    experts: int
    router: Router
    norm_eps: float
    shared: Swiglu | None = None
    held: range | None = None
    sharing: int = 1
    corrected: bool = False
    bias: bool = False
    clamped: ClampedSwiglu | None = None
    names: ExpertNames = QWEN_NAMES

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step, without the router; all experts share a shape and a plan.

        Ranks split the width of each expert, or have whole ones; they split the width of the shared
        SwiGLU. Each rank has the whole router.
        """
        hidden, ffn, count = self.hidden_size, self.ffn_size, len(self.own)
        gate_up = Linear("swiglu", 2 * ffn, hidden, experts=count)
        down = Linear("residual", hidden, ffn, experts=count)
        if self.held is None:
            gate_up, down = gate_up._replace(shard="rows"), down._replace(shard="columns")
        of_experts = {"expert_gate_up": gate_up, "expert_down": down}
        if self.shared is None:
            return of_experts
        (first, gate_up), (last, down) = self.shared.linears.items()
        return {first: gate_up, **of_experts, last: down}

    @property
    def own(self) -> range:
        """The experts whose weights this rank has."""
        return range(self.experts) if self.held is None else self.held

    def axis(self, split: int) -> int | None:
        """The dimension along which ranks split a tensor of one expert; None: they do not."""
        return split if self.held is None else None

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight; for experts, the first one's, or the
        tensor that has all experts.
        """
        shared = {} if self.shared is None else self.shared.first_linears
        names = {name: self.names.shared + first for name, first in shared.items()}
        names["expert_gate_up"], names["expert_down"] = self.expert_names(self.own[0])
        return names

    def expert_names(self, index: int) -> tuple[str, str]:
        """Names of an expert's weights below the block's prefix: the gates' and down's."""
        first, *_, last = self.names.of_expert(index)
        return first, last

    @property
    def stacked(self) -> bool:
        """Whether a checkpoint has all experts of a layer in one tensor."""
        return self.names.stacked

    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`: what the products leave for each of its pairs."""
        if self.shared is None:
            return self.routed_width
        return self.routed_width + self.hidden_size + self.shared.prefill_width()

    @property
    def routed_width(self) -> int:
        """`prefill_width` without the shared SwiGLU, whose place comes after it."""
        return self.sharing * self.router.top_k * (self.ffn_size + self.hidden_size)

    @property
    def expert_parameters(self) -> int:
        """Values of the weights of one expert."""
        biases = 2 * self.ffn_size + self.hidden_size if self.bias else 0
        return 3 * self.ffn_size * self.hidden_size + biases

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> ExpertsWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint

        ValueError for experts of a layer that are stored in different ways.
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def of_all(names: Sequence[str], rows: int, columns: int, *, swiglu: bool) -> ExpertWeight:
            form = _same_form([prefix + name for name in names], forms)
            shape = (len(self.own), rows, columns)
            if form is None:
                return new(*shape)
            return empty_experts(form, shape, swiglu=swiglu, device=device)

        hidden, ffn = self.hidden_size, self.ffn_size
        gates, downs = zip(*map(self.expert_names, self.own), strict=True)
        return ExpertsWeights(
            block=self,
            prefix=prefix,
            gate=new(self.experts, hidden),
            correction=(
                torch.empty(self.experts, device=device, dtype=torch.float32)
                if self.corrected
                else None
            ),
            shared=(
                None
                if self.shared is None
                else self.shared.allocate(
                    prefix + self.names.shared, forms, device=device, dtype=dtype
                )
            ),
            gate_up=of_all(gates, 2 * ffn, hidden, swiglu=True),
            down=of_all(downs, hidden, ffn, swiglu=False),
            gate_bias=new(self.experts) if self.bias else None,
            gate_up_bias=new(len(self.own), 2 * ffn) if self.bias else None,
            down_bias=new(len(self.own), hidden) if self.bias else None,
        )


class Chosen(NamedTuple):
    """The first half of the chosen experts: `gated`, `[P, F]`, is what down multiplies."""

    gated: Tensor
    slot: Tensor
    routes: Routes
    grouping: Grouping | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsWeights:
    """The block's weights: the router's `[E, H]`, and `[gate F | up F]` and down of each expert.

    prefix      of the names in the checkpoint, which are `block.names`
    correction  float32 `[E]`
    gate_bias   of the router's product
    """

    block: Experts
    prefix: str
    gate: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    correction: Tensor | None = None
    shared: SwigluWeights | None = None
    gate_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def linears(self) -> list[StoredLinear]:
        """Linears of each expert and of the shared SwiGLU; a router is never packed."""
        shared = [] if self.shared is None else self.shared.linears()
        return (self._stacked_linears() if self.block.stacked else self._expert_linears()) + shared

    def _stacked_linears(self) -> list[StoredLinear]:
        block, ffn = self.block, self.block.ffn_size
        gate_up, down = (self.prefix + name for name in block.expert_names(0))
        order, pieces = None, {gate_up: (ffn, ffn)}
        if block.names.alternating:
            order, pieces = torch.arange(2 * ffn).view(-1, 2).t().flatten(), {}
        found = []
        for index, expert in enumerate(block.own):
            stack = Stack(
                expert, block.experts, block.names.ending, transposed=block.names.alternating
            )
            up_weight, down_weight = (_of_expert(w, index) for w in (self.gate_up, self.down))
            found += [
                StoredLinear(
                    up_weight,
                    ((gate_up, 2 * ffn),),
                    swiglu=True,
                    axis=block.axis(0),
                    order=order,
                    pieces=pieces,
                    expert=True,
                    stack=stack,
                ),
                StoredLinear(
                    down_weight,
                    ((down, block.hidden_size),),
                    axis=block.axis(1),
                    expert=True,
                    stack=stack,
                ),
            ]
        return found

    def _expert_linears(self) -> list[StoredLinear]:
        block, ffn, hidden = self.block, self.block.ffn_size, self.block.hidden_size
        found = []
        for index, expert in enumerate(block.own):
            gates, ups, downs = (self.prefix + name for name in block.names.of_expert(expert))
            gate_up, down = ((gates, ffn), (ups, ffn)), ((downs, hidden),)
            found += [
                StoredLinear(
                    _of_expert(self.gate_up, index),
                    gate_up,
                    swiglu=True,
                    axis=block.axis(0),
                    expert=True,
                ),
                StoredLinear(_of_expert(self.down, index), down, axis=block.axis(1), expert=True),
            ]
        return found

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        if self.block.stacked:
            return self._stacked()
        names = {f"{self.prefix}{self.block.names.router}.weight": Weight(self.gate)}
        for linear in self._expert_linears():
            names |= linear.views()
        if self.correction is not None:
            names[f"{self.prefix}{self.block.names.correction}"] = Weight(self.correction)
        if self.shared is not None:
            names |= self.shared.stored()
        return names

    def _stacked(self) -> dict[str, Weight]:
        assert self.correction is None, "no checkpoint has corrections beside stacked experts"
        names = {f"{self.block.names.router}.weight": Weight(self.gate)}
        if self.gate_bias is not None:
            names[f"{self.block.names.router}.bias"] = Weight(self.gate_bias)
        names |= self._alternating() if self.block.names.alternating else self._gates_first()
        named = {self.prefix + name: weight for name, weight in names.items()}
        return named if self.shared is None else named | self.shared.stored()

    def _gates_first(self) -> dict[str, Weight]:
        assert self.gate_up_bias is None, "no checkpoint has such experts with biases"
        block, ffn = self.block, self.block.ffn_size
        gate_up, down = (name + block.names.ending for name in block.expert_names(0))
        names = {}
        # Ranks split the experts, or the ffn width.
        whole = block.held is not None
        if isinstance(self.gate_up, Tensor):
            names[gate_up] = Weight(self.gate_up, 0 if whole else 1, () if whole else (ffn, ffn))
        if isinstance(self.down, Tensor):
            names[down] = Weight(self.down, 0 if whole else 2)
        return names

    def _alternating(self) -> dict[str, Weight]:
        gate_up, down = (name + self.block.names.ending for name in self.block.expert_names(0))
        names, experts = {}, len(self.block.own)
        # Ranks split the experts, or the ffn width.
        axes = (0, 0, 0, 0) if self.block.held is not None else (2, 1, 1, None)
        gates, downs, gate_biases, down_biases = axes
        if isinstance(self.gate_up, Tensor):
            pairs = self.gate_up.view(experts, 2, -1, self.block.hidden_size)
            # The layout of a checkpoint: [E, H, F, 2] is its [E, H, 2F].
            names[gate_up] = Weight(pairs.permute(0, 3, 2, 1), gates)
        if isinstance(self.down, Tensor):
            names[down] = Weight(self.down.transpose(1, 2), downs)
        if self.gate_up_bias is not None:
            assert self.down_bias is not None, "both have biases, or neither has"
            pairs = self.gate_up_bias.view(experts, 2, -1)
            names[f"{gate_up}_bias"] = Weight(pairs.transpose(1, 2), gate_biases)
            names[f"{down}_bias"] = Weight(self.down_bias, down_biases)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        biases = (self.gate_bias, self.gate_up_bias, self.down_bias)
        routed = tensors_of(self.gate, self.gate_up, self.down, self.correction, *biases)
        return routed + ([] if self.shared is None else self.shared.tensors())

    @property
    def experts_bytes(self) -> int:
        """Bytes of all experts except the shared ones."""
        weights = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors_of(*weights))

    def prefill_width(self, lanes: int) -> int:
        """Values of a lane in `PrefillScratch`, in a chunk of so many lanes."""
        return self.block.prefill_width()

    def decode(
        self, row: DecodeLanes, residual: Residual, next_norm: Tensor, launch: DecodeLaunch
    ) -> Residual:
        """Run the block on `row`'s tokens: three or four kernels, two more with a shared SwiGLU.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place except for its squares.
        """
        block, slot = self.block, row.slot
        # This comes first: adding the chosen experts overwrites the input of the shared ones.
        shared = None if self.shared is None else self.shared.gate(row, residual, launch)
        given, kept = layer_ids(launch.routes)
        routes = route_product(
            residual.scaled,
            self.gate,
            slot,
            block.router,
            arrivals=launch.arrivals,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            bias_E=self.gate_bias,
            correction_E=self.correction,
            given_Nk=given,
            expert_Nk=kept,
            pdl=launch.pdl,
        )
        tell_routes(routes, slot)
        lanes = RoutedLanes(residual.scaled, slot, routes, residual.squares)
        if launch.experts is not None:
            lanes = lanes_of_all(lanes, launch.experts)
        chosen = self._choose(lanes, launch)
        if launch.reduce is None and launch.experts is None:
            return self._add(chosen, shared, row, residual, next_norm, launch)
        part, own = self._part(chosen, launch), None
        if self.shared is not None and shared is not None:
            own = self.shared.part(shared, row, launch)
        if launch.experts is not None:
            return add_sum_of_own(part, own, slot, residual, next_norm, launch)
        if own is not None:
            # One all-reduce for both.
            part += own
        return add_part(part, slot, residual, next_norm, launch=launch)

    def _choose(self, lanes: RoutedLanes, launch: DecodeLaunch) -> Chosen:
        """Run the first half of this rank's experts on the lanes that chose them."""
        block, slot = self.block, lanes.slot
        routes, experts = lanes.routes, len(block.own)
        gate_up_plan = launch.plan("expert_gate_up", self.gate_up)
        down_plan = launch.plan("expert_down", self.down)
        # The family `fma` takes pairs one by one, and the bits depend on the family.
        in_dot = gate_up_plan.family == down_plan.family == "dot"
        grouping = None
        pairs = (len(slot), block.router.top_k, block.experts)
        if in_dot and groups_pairs(*pairs, launch.tokens_per_row):
            size = decode_block(*pairs, _format(self.gate_up))
            grouping = group_pairs(
                routes.expert,
                slot,
                experts=experts,
                size=size,
                held=block.held,
                pdl=launch.pdl,
            )
        gated = expert_swiglu(
            lanes.x,
            self.gate_up,
            slot,
            routes,
            tile=gate_up_plan,
            squares_TN=lanes.squares,
            eps=block.norm_eps,
            bias_E2F=self.gate_up_bias,
            clamped=block.clamped,
            grouping=grouping,
            held=block.held,
            pdl=launch.pdl,
        )
        return Chosen(gated, slot, routes, grouping)

    def _add(
        self,
        chosen: Chosen,
        shared: Tensor | None,
        row: DecodeLanes,
        residual: Residual,
        next_norm: Tensor,
        launch: DecodeLaunch,
    ) -> Residual:
        """`residual` plus what down makes of the chosen experts, and of the `shared` ones."""
        residual = expert_residual(
            chosen.gated,
            self.down,
            row.slot,
            chosen.routes,
            residual,
            next_norm,
            plan=launch.plan("expert_down", self.down),
            arrivals=launch.arrivals,
            bias_EH=self.down_bias,
            grouping=chosen.grouping,
            pdl=launch.pdl,
        )
        if self.shared is None or shared is None:
            return residual
        return self.shared.add(shared, row, residual, next_norm, launch)

    def _part(self, chosen: Chosen, launch: DecodeLaunch) -> Tensor:
        """Float32, a row for each lane: the part of the output that this rank's experts make."""
        return expert_part(
            chosen.gated,
            self.down,
            chosen.slot,
            chosen.routes,
            plan=launch.plan("expert_down", self.down),
            arrivals=launch.arrivals,
            bias_EH=self._own_bias(launch.share),
            grouping=chosen.grouping,
            held=self.block.held,
            pdl=launch.pdl,
        )

    def _own_bias(self, share: Share) -> Tensor | None:
        """Down biases, added weighted for the chosen experts. Where ranks split the experts' width,
        rank 0 adds them for all; other ranks get None.
        """
        return self.down_bias if share.rank == 0 or self.block.held is not None else None

    def prefill(
        self, stream: Tensor, next_norm: Tensor, slot: Tensor, scratch: PrefillScratch
    ) -> None:
        """Run the block on a chunk, whose normed stream is `scratch.h`.

        `stream`, float32, is updated in place, and written to `scratch.h`, normed by `next_norm`.
        """
        h, launch = scratch.h, scratch.launch
        routes = self._chunk_routes(slot, scratch)
        shared = None
        if self.shared is not None:
            shared = self._shared_chunk(slot, scratch)
        lanes = RoutedLanes(h, slot, routes)
        if launch.experts is None:
            summed = self._chunk_sum(lanes, scratch, out=h)
        else:
            lanes = lanes_of_all(lanes, launch.experts)
            out = lanes.x.new_empty(lanes.x.shape)
            summed = sum_of_own(self._chunk_sum(lanes, scratch, out=out), launch.experts)
        eps, pdl = self.block.norm_eps, launch.pdl
        for y in _summands(summed, shared, launch.reduce):
            add_rms_norm(stream, y, next_norm, slot, eps=eps, out_dtype=h.dtype, out=h, pdl=pdl)

    def _chunk_routes(self, slot: Tensor, scratch: PrefillScratch) -> Routes:
        """The experts of each lane of the normed `scratch.h`."""
        logits = _router_logits(scratch.h, self.gate)
        if self.gate_bias is not None:
            logits += self.gate_bias
        given, kept = layer_ids(scratch.launch.routes)
        return route(
            logits,
            slot,
            self.block.router,
            correction_E=self.correction,
            given_Nk=given,
            expert_Nk=kept,
            pdl=scratch.launch.pdl,
        )

    def _chunk_sum(self, lanes: RoutedLanes, scratch: PrefillScratch, *, out: Tensor) -> Tensor:
        """The sum of each lane's experts that this rank has."""
        block, pdl = self.block, scratch.launch.pdl
        ffn, hidden, held = block.ffn_size, block.hidden_size, block.held
        up_tile, down_tile = self._chunk_tiles(len(lanes.slot), out.dtype)
        pairs = block.sharing * block.router.top_k
        grouping = group_pairs(
            lanes.routes.expert,
            lanes.slot,
            experts=len(block.own),
            size=up_tile.lanes,
            held=held,
            pdl=pdl,
        )
        gated = expert_swiglu(
            lanes.x,
            self.gate_up,
            lanes.slot,
            lanes.routes,
            tile=up_tile,
            bias_E2F=self.gate_up_bias,
            clamped=block.clamped,
            grouping=grouping,
            held=held,
            out=scratch.take(pairs * ffn).view(-1, ffn),
            pdl=pdl,
        )
        return expert_sum(
            gated,
            self.down,
            lanes.slot,
            lanes.routes,
            tile=down_tile,
            grouping=grouping,
            held=held,
            bias_EH=self._own_bias(scratch.launch.share),
            products=scratch.take(pairs * hidden, after=pairs * ffn).view(-1, hidden),
            out=out,
            pdl=pdl,
        )

    def _chunk_tiles(self, lanes: int, dtype: torch.dtype) -> tuple[ProductTile, ProductTile]:
        """Tiles of gates and ups, and of down; both take the pairs of one grouping."""
        block = self.block
        tiles = [
            chunk_tile(lanes, block.router.top_k, block.experts, columns, dtype, _format(weight))
            for weight, columns in ((self.gate_up, block.hidden_size), (self.down, block.ffn_size))
        ]
        least = min(tile.lanes for tile in tiles)
        up, down = (tile._replace(lanes=least) for tile in tiles)
        return up, down

    def _shared_chunk(self, slot: Tensor, scratch: PrefillScratch) -> Tensor:
        """The shared SwiGLU's output for the normed `scratch.h`, in `scratch` past the experts'."""
        assert self.shared is not None
        start, hidden = self.block.routed_width, self.block.hidden_size
        gated = self.shared.gate_chunk(slot, scratch, after=start + hidden)
        out = scratch.take(hidden, after=start)
        return scratch.product(gated, self.shared.down, None, out=out)


def _same_form(names: Sequence[str], forms: WeightForms) -> PackedForm | None:
    """How the weights with these first linears are stored; ValueError unless all are alike."""
    first = forms.get(names[0])
    for name in names:
        other = forms.get(name)
        if other != first:
            one, another = (
                "the model's dtype" if form is None else form.format.label
                for form in (first, other)
            )
            raise ValueError(
                f"the experts of a layer are computed as one, and stored in different ways: "
                f"{names[0]} as {one}, {name} as {another}"
            )
    return first


def _of_expert(weight: ExpertWeight, index: int) -> AnyWeight:
    return weight[index] if isinstance(weight, Tensor) else weight.expert(index)


def _format(weight: ExpertWeight) -> WeightFormat | None:
    return None if isinstance(weight, Tensor) else weight.format


def _router_logits(h_NH: Tensor, gate_EH: Tensor) -> Tensor:
    """Router logits in float32, `[N, E]`: rounded to 16 bits they would tie."""
    if h_NH.dtype == torch.float32:
        return torch.mm(h_NH, gate_EH.t())
    if h_NH.is_cuda:
        return torch.mm(h_NH, gate_EH.t(), out_dtype=torch.float32)
    return torch.mm(h_NH.float(), gate_EH.float().t())


def _summands(routed: Tensor, shared: Tensor | None, reduce: Reduce | None) -> tuple[Tensor, ...]:
    """What is added to the stream of a chunk; with several ranks, one sum over all of them."""
    if reduce is None:
        return (routed,) if shared is None else (routed, shared)
    return (reduce(routed if shared is None else routed.add_(shared)),)
