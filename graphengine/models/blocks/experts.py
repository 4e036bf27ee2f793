"""A mixture of experts: each token's feed-forward is the weighted sum of a few of many SwiGLUs.

Decode runs the router's product, the router, and two kernels over the chosen experts, or four where
pairs of lane and expert are grouped; a chunk of a prompt always groups them.

Letters: N lanes, H hidden, F ffn width of an expert, E experts, k of a lane, P = N * k pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphengine.kernels import (
    DECODE_BLOCK,
    DecodeLanes,
    Residual,
    Router,
    add_rms_norm,
    chunk_tile,
    expert_residual,
    expert_sum,
    expert_swiglu,
    group_pairs,
    groups_pairs,
    linear,
    route,
)
from graphengine.models.blocks.streams import PrefillScratch
from graphengine.models.contract import (
    DecodeLaunch,
    Linear,
    Linears,
    Reduce,
    StoredLinear,
    Weight,
    WeightForms,
)
from graphengine.models.routing import tell_routes


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Sizes of the block; `norm_eps` is of the norm that its input needs.

    ffn_size  of each expert
    """

    hidden_size: int
    ffn_size: int
    experts: int
    router: Router
    norm_eps: float

    @property
    def linears(self) -> Linears:
        """In the order of a step; every expert's weights have one shape, and one plan."""
        hidden, ffn, count = self.hidden_size, self.ffn_size, self.experts
        chosen = self.router.top_k
        return {
            "router": Linear("store", count, hidden),
            "expert_gate_up": Linear("swiglu", 2 * ffn, hidden, experts=count, chosen=chosen),
            "expert_down": Linear("residual", hidden, ffn, experts=count, chosen=chosen),
        }

    @property
    def first_linears(self) -> Mapping[str, str]:
        """None of the weights is packed."""
        return {}

    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`: of each of its pairs, what the products leave."""
        return self.router.top_k * (self.ffn_size + self.hidden_size)

    @property
    def expert_parameters(self) -> int:
        """Values of the weights of one expert."""
        return 3 * self.ffn_size * self.hidden_size

    def allocate(
        self, prefix: str, forms: WeightForms, *, device: str, dtype: torch.dtype
    ) -> ExpertsWeights:
        """Uninitialised weights; `device="meta"` allocates nothing.

        prefix  of the block's tensors in the checkpoint
        """

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        hidden, ffn = self.hidden_size, self.ffn_size
        return ExpertsWeights(
            block=self,
            prefix=prefix,
            gate=new(self.experts, hidden),
            gate_up=new(self.experts, 2 * ffn, hidden),
            down=new(self.experts, hidden, ffn),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsWeights:
    """The block's weights: the router's `[E, H]`, and `[gate F | up F]` and down of each expert.

    prefix  of the names in the checkpoint, those of Hugging Face's Qwen3-MoE
    """

    block: Experts
    prefix: str
    gate: Tensor
    gate_up: Tensor
    down: Tensor

    def linears(self) -> list[StoredLinear]:
        """None: neither the router nor, as yet, an expert is packed."""
        return []

    def stored(self) -> dict[str, Weight]:
        """Every tensor, by its name."""
        names = {f"{self.prefix}gate.weight": Weight(self.gate)}
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            expert = f"{self.prefix}experts.{index}."
            names[f"{expert}gate_proj.weight"] = Weight(gate, 0)
            names[f"{expert}up_proj.weight"] = Weight(up, 0)
            names[f"{expert}down_proj.weight"] = Weight(down, 1)
        return names

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [self.gate, self.gate_up, self.down]

    def prefill_width(self, lanes: int) -> int:
        """Values of each of so many lanes in `PrefillScratch`."""
        return self.block.prefill_width()

    def decode(
        self, row: DecodeLanes, residual: Residual, next_norm: Tensor, launch: DecodeLaunch
    ) -> Residual:
        """The block for `row`'s tokens: four kernels, or six.

        `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
        place but for its squares.
        """
        _check_one_rank(launch.reduce)
        block, slot = self.block, row.slot
        logits = linear(
            residual.scaled,
            self.gate,
            slot,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            out_dtype=torch.float32,
            plan=launch.plan("router", self.gate),
            launch=launch,
        )
        routes = route(logits, slot, block.router, pdl=launch.pdl)
        tell_routes(routes, slot)
        gate_up_plan = launch.plan("expert_gate_up", self.gate_up)
        down_plan = launch.plan("expert_down", self.down)
        # The family `fma` takes pairs one by one, and is part of the bits.
        in_dot = {gate_up_plan.family, down_plan.family} == {"dot"}
        grouping = None
        if in_dot and groups_pairs(len(slot), block.router.top_k, block.experts):
            grouping = group_pairs(
                routes.expert, slot, experts=block.experts, size=DECODE_BLOCK, pdl=launch.pdl
            )
        gated = expert_swiglu(
            residual.scaled,
            self.gate_up,
            slot,
            routes,
            tile=gate_up_plan,
            squares_TN=residual.squares,
            eps=block.norm_eps,
            grouping=grouping,
            pdl=launch.pdl,
        )
        return expert_residual(
            gated,
            self.down,
            slot,
            routes,
            residual,
            next_norm,
            plan=down_plan,
            grouping=grouping,
            pdl=launch.pdl,
        )

    def prefill(
        self, stream: Tensor, next_norm: Tensor, slot: Tensor, scratch: PrefillScratch
    ) -> None:
        """The block for a chunk, of the normed `scratch.h`.

        `stream`, float32, is updated in place, and `scratch.h` becomes it after `next_norm`.
        """
        _check_one_rank(scratch.launch.reduce)
        block, h, pdl = self.block, scratch.h, scratch.launch.pdl
        experts, top_k, ffn = block.experts, block.router.top_k, block.ffn_size
        lanes, hidden = h.shape
        tile = chunk_tile(lanes, top_k, experts, hidden, h.dtype)
        routes = route(_router_logits(h, self.gate), slot, block.router, pdl=pdl)
        grouping = group_pairs(routes.expert, slot, experts=experts, size=tile.lanes, pdl=pdl)
        gated = expert_swiglu(
            h,
            self.gate_up,
            slot,
            routes,
            tile=tile,
            grouping=grouping,
            out=scratch.take(top_k * ffn).view(-1, ffn),
            pdl=pdl,
        )
        summed = expert_sum(
            gated,
            self.down,
            slot,
            routes,
            tile=tile,
            grouping=grouping,
            products=scratch.take(top_k * hidden, after=top_k * ffn).view(-1, hidden),
            out=h,
            pdl=pdl,
        )
        eps = block.norm_eps
        add_rms_norm(stream, summed, next_norm, slot, eps=eps, out_dtype=h.dtype, out=h, pdl=pdl)


def _router_logits(h_NH: Tensor, gate_EH: Tensor) -> Tensor:
    """Float32 `[N, E]`: rounded to 16 bits they would tie."""
    if h_NH.dtype == torch.float32:
        return torch.mm(h_NH, gate_EH.t())
    if h_NH.is_cuda:
        return torch.mm(h_NH, gate_EH.t(), out_dtype=torch.float32)
    return torch.mm(h_NH.float(), gate_EH.float().t())


def _check_one_rank(reduce: Reduce | None) -> None:
    if reduce is not None:
        raise ValueError("the experts of a layer are not split among ranks")
