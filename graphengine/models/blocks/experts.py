"""A mixture of experts: each token's feed-forward is the weighted sum of a few of many SwiGLUs, or
of feed-forwards without gates, which have a squared ReLU.

Experts may read and write a latent: one linear maps the stream to it, and another maps the experts'
sum back.

With several ranks, each has a part of every expert's width, or some whole experts, and all of the
router, so all ranks choose alike, and one all-reduce sums the chosen and the shared experts. Or
each rank has lanes of its own and shares its experts with all others (`lanes_of_ranks.py`). The
programs are in `expert_steps.py`.

Letters: H hidden, L latent, F ffn width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from graphengine.kernels.experts.packed.weights import PackedExperts, empty_experts
from graphengine.kernels.experts.router import Router
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedForm
from graphengine.kernels.norm_rope.activation import Gating
from graphengine.models.blocks.expert_names import QWEN_NAMES, ExpertNames
from graphengine.models.blocks.mlp import Mlp, MlpWeights
from graphengine.models.blocks.norms import ExpertNorms
from graphengine.models.blocks.streams import new_weights, tensors_of
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.linears import Linear, Linears, WeightForms
from graphengine.models.weights import Stack, StoredLinear, Weight

ExpertWeight = Tensor | PackedExperts
"""A weight of all experts: `[E, M, K]` in the model's dtype, or in 8 or 4 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Sizes of the block; `norm_eps` is the epsilon of the norm of its input.

    ffn_size   of each expert
    gated      whether experts are SwiGLUs; else down(relu(up x)**2)
    shared     a feed-forward that every token takes; its output is added after the chosen experts'
    shared_gate  whether that output is multiplied by the sigmoid of a gate, one per token
    held       experts that this rank has whole; None: ranks split the width of all experts
    sharing    ranks with lanes of their own that share these experts
    corrected  whether experts are chosen by scores with a correction
    bias       whether the products of the router and of the experts have biases
    gating     function in place of silu(gate) * up in experts
    latent     values of the latent that experts read and write; 0: they read and write the stream
    own_norms  whether router, experts and the shared feed-forward, which there is then, each have
               norms of their own (`norms.py`)
    names      of the checkpoint's tensors
    """

    hidden_size: int
    ffn_size: int
    experts: int
    router: Router
    norm_eps: float
    gated: bool = True
    shared: Swiglu | Mlp | None = None
    shared_gate: bool = False
    held: range | None = None
    sharing: int = 1
    corrected: bool = False
    bias: bool = False
    gating: Gating = "silu"
    latent: int = 0
    own_norms: bool = False
    names: ExpertNames = QWEN_NAMES

    @property
    def linears(self) -> Linears:
        """Linears in the order of a step, without the router; all experts share a shape and a plan.

        Ranks split the width of each expert, or have whole experts. They split the width of the
        shared feed-forward. Each rank has the whole router.
        """
        hidden, width, count = self.hidden_size, self.width, len(self.own)
        inner = Linear("swiglu" if self.gated else "store", self.rows, width, experts=count)
        down = Linear("residual", width, self.ffn_size, experts=count)
        if self.held is None:
            inner, down = inner._replace(shard="rows"), down._replace(shard="columns")
        of_experts = {self.inner_name: inner, "expert_down": down}
        if self.latent:
            # Every rank has all of both.
            enter, leave = Linear("store", width, hidden), Linear("residual", hidden, width)
            of_experts = {"latent_enter": enter, **of_experts, "latent_leave": leave}
        if self.shared is None:
            return of_experts
        (first, inner), (last, down) = self.shared.linears.items()
        return {first: inner, **of_experts, last: down}

    @property
    def inner_name(self) -> str:
        """The name of the experts' first linear."""
        return "expert_gate_up" if self.gated else "expert_up"

    @property
    def width(self) -> int:
        """Values that an expert reads, and writes."""
        return self.latent or self.hidden_size

    @property
    def rows(self) -> int:
        """Rows of the first linear of an expert: of gates and ups, or of ups."""
        return 2 * self.ffn_size if self.gated else self.ffn_size

    @property
    def activation(self) -> Literal["swiglu", "squared_relu"]:
        """The function applied to the first linear's outputs."""
        return "swiglu" if self.gated else "squared_relu"

    @property
    def own(self) -> range:
        """The experts whose weights this rank has."""
        return range(self.experts) if self.held is None else self.held

    def axis(self, split: int) -> int | None:
        """The dimension along which ranks split a tensor of one expert; None: they do not."""
        return split if self.held is None else None

    @property
    def first_linears(self) -> Mapping[str, str]:
        """First checkpoint linear fused into each weight; for experts, the first expert's linear,
        or the tensor that has all experts.
        """
        shared = {} if self.shared is None else self.shared.first_linears
        names = {name: self.names.shared + first for name, first in shared.items()}
        names[self.inner_name], names["expert_down"] = self.expert_names(self.own[0])
        if self.latent:
            names["latent_enter"], names["latent_leave"] = self.names.latents
        return names

    def expert_names(self, index: int) -> tuple[str, str]:
        """Names of an expert's weights below the block's prefix: the first one's and down's."""
        first, *_, last = self.names.of_expert(index)
        return first, last

    @property
    def stacked(self) -> bool:
        """Whether a checkpoint has all experts of a layer in one tensor."""
        return self.names.stacked

    @property
    def prefill_width(self) -> int:
        """Values of a lane in `PrefillScratch`: the products' results for each of its pairs."""
        if self.shared is None:
            return self.routed_width
        return self.routed_width + self.hidden_size + self.shared.prefill_width

    @property
    def routed_width(self) -> int:
        """`prefill_width` without the shared feed-forward, whose place comes after it."""
        return self.pairs_width + 2 * self.latent

    @property
    def pairs_width(self) -> int:
        """`routed_width` without the latents that experts read and write."""
        return self.sharing * self.router.top_k * (self.ffn_size + self.width)

    @property
    def expert_parameters(self) -> int:
        """Values of the weights of one expert."""
        biases = self.rows + self.width if self.bias else 0
        return (self.rows + self.ffn_size) * self.width + biases

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

        hidden, ffn, width = self.hidden_size, self.ffn_size, self.width
        latents = None
        if self.latent:
            weight = new_weights(forms, prefix, self.first_linears, device=device, dtype=dtype)
            latents = (weight("latent_enter", width, hidden), weight("latent_leave", hidden, width))
        firsts, downs = zip(*map(self.expert_names, self.own), strict=True)
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
            latents=latents,
            gate_up=of_all(firsts, self.rows, width, swiglu=self.gated),
            down=of_all(downs, width, ffn, swiglu=False),
            shared_gate=new(1, hidden) if self.shared_gate else None,
            gate_bias=new(self.experts) if self.bias else None,
            gate_up_bias=new(len(self.own), self.rows) if self.bias else None,
            down_bias=new(len(self.own), width) if self.bias else None,
            norms=(
                ExpertNorms.empty(hidden, self.experts, device=device, dtype=dtype)
                if self.own_norms
                else None
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsWeights:
    """The block's weights: the router's `[E, H]`, and `[gate F | up F]` and down of each expert.
    Without gates `gate_up` has only ups.

    prefix      of the names in the checkpoint, which are `block.names`
    correction  float32 `[E]`
    shared_gate  `[1, H]`
    gate_bias   of the router's product
    norms       of experts beside a feed-forward; None: all read the stream after one norm
    latents     `[L, H]` before experts that read and write a latent, `[H, L]` after them; None:
                experts read and write the stream
    """

    block: Experts
    prefix: str
    gate: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    correction: Tensor | None = None
    shared: SwigluWeights | MlpWeights | None = None
    shared_gate: Tensor | None = None
    gate_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    norms: ExpertNorms | None = None
    latents: tuple[AnyWeight, AnyWeight] | None = None

    def linears(self) -> list[StoredLinear]:
        """Linears of each expert, of latents and of the shared feed-forward; a router is never
        packed.
        """
        others = [] if self.shared is None else self.shared.linears()
        if self.latents is not None:
            others += self._latent_linears(*self.latents)
        return (self._stacked_linears() if self.block.stacked else self._expert_linears()) + others

    def _latent_linears(self, *weights: AnyWeight) -> list[StoredLinear]:
        return [
            StoredLinear(weight, ((self.prefix + name, weight.shape[0]),))
            for weight, name in zip(weights, self.block.names.latents, strict=True)
        ]

    def _stacked_linears(self) -> list[StoredLinear]:
        block, ffn = self.block, self.block.ffn_size
        gate_up, down = (self.prefix + name for name in block.expert_names(0))
        order, pieces = None, {gate_up: (ffn, ffn) if block.gated else (ffn,)}
        if block.names.alternating:
            order, pieces = torch.arange(2 * ffn).view(-1, 2).t().flatten(), {}
        found = []
        for index, expert in enumerate(block.own):
            transposed = block.names.alternating or block.names.transposed
            stack = Stack(expert, block.experts, block.names.ending, transposed=transposed)
            up_weight, down_weight = (_of_expert(w, index) for w in (self.gate_up, self.down))
            found += [
                StoredLinear(
                    up_weight,
                    ((gate_up, block.rows),),
                    swiglu=block.gated,
                    axis=block.axis(0),
                    order=order,
                    pieces=pieces,
                    expert=True,
                    stack=stack,
                ),
                StoredLinear(
                    down_weight,
                    ((down, block.width),),
                    axis=block.axis(1),
                    expert=True,
                    stack=stack,
                ),
            ]
        return found

    def _expert_linears(self) -> list[StoredLinear]:
        block, ffn, width = self.block, self.block.ffn_size, self.block.width
        found = []
        for index, expert in enumerate(block.own):
            *firsts, down = (self.prefix + name for name in block.names.of_expert(expert))
            found += [
                StoredLinear(
                    _of_expert(self.gate_up, index),
                    tuple((name, ffn) for name in firsts),
                    swiglu=block.gated,
                    axis=block.axis(0),
                    expert=True,
                ),
                StoredLinear(
                    _of_expert(self.down, index),
                    ((down, width),),
                    axis=block.axis(1),
                    expert=True,
                ),
            ]
        return found

    def stored(self) -> dict[str, Weight]:
        """The tensors that are not packed, by name."""
        if self.block.stacked:
            return self._stacked() | self._beside()
        names = {f"{self.prefix}{self.block.names.router}.weight": Weight(self.gate)}
        for linear in self._expert_linears():
            names |= linear.views()
        if self.block.bias:
            names |= self._expert_biases()
        if self.correction is not None:
            names[f"{self.prefix}{self.block.names.correction}"] = Weight(self.correction)
        return names | self._beside()

    def _expert_biases(self) -> dict[str, Weight]:
        """Biases of the router, and of each expert's linears."""
        gate, first, last = self.gate_bias, self.gate_up_bias, self.down_bias
        assert gate is not None and first is not None and last is not None, f"{self.block=}"
        names = {f"{self.block.names.router}.bias": Weight(gate)}
        axis = self.block.axis(0)
        for index, expert in enumerate(self.block.own):
            *firsts, down = self.block.names.of_expert(expert)
            for name, bias in zip(firsts, first[index].chunk(len(firsts)), strict=True):
                names[f"{name}.bias"] = Weight(bias, axis)
            names[f"{down}.bias"] = Weight(last[index])
        return {self.prefix + name: weight for name, weight in names.items()}

    def _beside(self) -> dict[str, Weight]:
        """Tensors of the shared feed-forward, latents and norms."""
        names = {} if self.shared is None else self.shared.stored()
        if self.latents is not None:
            for linear in self._latent_linears(*self.latents):
                names |= linear.views()
        if self.norms is not None:
            names |= self.norms.stored(self.prefix)
        if self.shared_gate is not None:
            names[f"{self.prefix}{self.block.names.shared_gate}.weight"] = Weight(self.shared_gate)
        return names

    def _stacked(self) -> dict[str, Weight]:
        names = {f"{self.block.names.router}.weight": Weight(self.gate)}
        if self.correction is not None:
            names[self.block.names.correction] = Weight(self.correction)
        if self.gate_bias is not None:
            names[f"{self.block.names.router}.bias"] = Weight(self.gate_bias)
        names |= self._alternating() if self.block.names.alternating else self._gates_first()
        return {self.prefix + name: weight for name, weight in names.items()}

    def _gates_first(self) -> dict[str, Weight]:
        assert self.gate_up_bias is None, "no checkpoint has such experts with biases"
        block, ffn = self.block, self.block.ffn_size
        gate_up, down = (name + block.names.ending for name in block.expert_names(0))
        names = {}
        # Ranks split the experts, or the ffn width.
        rows, columns = (0, 0) if block.held is not None else (1, 2)
        if isinstance(self.gate_up, Tensor):
            pieces = (ffn, ffn) if block.gated and rows else ()
            names[gate_up] = Weight(self.gate_up, rows, pieces)
        if isinstance(self.down, Tensor):
            names[down] = Weight(self.down, columns)
        if not block.names.transposed:
            return names
        other = (0, 2, 1)
        return {
            name: Weight(each.tensor.transpose(1, 2), other[each.axis or 0], each.pieces)
            for name, each in names.items()
        }

    def _alternating(self) -> dict[str, Weight]:
        gate_up, down = (name + self.block.names.ending for name in self.block.expert_names(0))
        names, experts = {}, len(self.block.own)
        # Ranks split the experts, or the ffn width.
        axes = (0, 0, 0, 0) if self.block.held is not None else (2, 1, 1, None)
        gates, downs, gate_biases, down_biases = axes
        if isinstance(self.gate_up, Tensor):
            pairs = self.gate_up.view(experts, 2, -1, self.block.width)
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
        others = (self.gate_bias, self.gate_up_bias, self.down_bias, self.shared_gate)
        routed = tensors_of(self.gate, self.gate_up, self.down, self.correction, *others)
        routed += [] if self.norms is None else self.norms.tensors()
        routed += [] if self.latents is None else tensors_of(*self.latents)
        return routed + ([] if self.shared is None else self.shared.tensors())

    def to_compute_with(self) -> ExpertsWeights:
        """These weights, with norms that are computed from those of the checkpoint."""
        if self.norms is None:
            return self
        return replace(self, norms=self.norms.to_compute_with())

    @property
    def experts_bytes(self) -> int:
        """Bytes of all experts except the shared ones."""
        weights = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors_of(*weights))


def _same_form(names: Sequence[str], forms: WeightForms) -> PackedForm | None:
    """The format of the weights with these first linears; ValueError unless all are stored
    alike.
    """
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
