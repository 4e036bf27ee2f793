"""The sublayers that layers are made of: a block with the norms around it, and their weights.

A layer has one sublayer (Nemotron-H) or two, a mixer and a feed-forward. Each reads the residual
stream after a norm and adds to it; some have another norm before that sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.experts.packed.weights import PackedExperts
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.packed import PackedWeight
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.gated_delta import GatedDelta, GatedDeltaWeights
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2, Mamba2Weights
from graphengine.models.blocks.mla import LatentAttention, LatentAttentionWeights
from graphengine.models.blocks.mlp import Mlp, MlpWeights
from graphengine.models.blocks.norms import (
    LayerNorm,
    NextNorm,
    NormKind,
    NormsByKind,
    ReadNorm,
    Sandwich,
    plus_one,
)
from graphengine.models.blocks.per_layer.layer_inputs import LayerInput, LayerInputWeights
from graphengine.models.blocks.short_conv import ShortConv, ShortConvWeights
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.linears import WeightForms
from graphengine.models.states import LayerStates
from graphengine.models.weights import Weight

Attending = GroupedQueryAttention | LatentAttention
AttendingWeights = AttentionWeights | LatentAttentionWeights
Recurring = Mamba2 | GatedDelta | ShortConv
RecurringWeights = Mamba2Weights | GatedDeltaWeights | ShortConvWeights
FeedForward = Swiglu | Mlp | Experts
FeedForwardWeights = SwigluWeights | MlpWeights | ExpertsWeights
Block = Attending | Recurring | FeedForward | LayerInput
BlockWeights = AttendingWeights | RecurringWeights | FeedForwardWeights | LayerInputWeights

ATTENTION, MLP = "self_attn.", "mlp."
"""Prefixes of the usual blocks in the checkpoint, below their layer's own."""


def layer_prefix(index: int) -> str:
    """Prefix of a layer's tensors in the checkpoint."""
    return f"model.layers.{index}."


class Sublayer(NamedTuple):
    """A block of a layer; names are those in the checkpoint, below the layer's own prefix.

    norm       name of the norm before the block, without ".weight"; "": there is none, and the
               block, which is not `normed`, reads the stream itself
    prefix     prefix of the block's tensors
    post_norm  name of the norm between the block and the sum, without ".weight"; "": there is none
    parallel   whether the block reads the stream that the block before it reads, without that
               block's output
    factor     name of the factor of the stream after the sum; "": none. Only with a `post_norm`
    text_norm  name of the norm that reads a prompt's text, where `norm` reads sound alone; "":
               `norm` reads both
    """

    norm: str
    prefix: str
    block: Block
    post_norm: str = ""
    parallel: bool = False
    factor: str = ""
    text_norm: str = ""


Layer = tuple[Sublayer, ...]
"""The sublayers of a layer, in the order in which they run."""


def usual_layer(attention: Attending, feed_forward: FeedForward, *, post_norms: bool) -> Layer:
    """Attention and a feed-forward, with the names of Llama's lineage, or of Gemma's."""
    if not post_norms:
        return (
            Sublayer("input_layernorm", ATTENTION, attention),
            Sublayer("post_attention_layernorm", MLP, feed_forward),
        )
    return (
        Sublayer("input_layernorm", ATTENTION, attention, "post_attention_layernorm"),
        Sublayer("pre_feedforward_layernorm", MLP, feed_forward, "post_feedforward_layernorm"),
    )


def post_normed_layer(attention: GroupedQueryAttention, mlp: Swiglu) -> Layer:
    """Attention and a SwiGLU with norms only after them, as OLMo 2 has them."""
    return (
        Sublayer("", ATTENTION, replace(attention, normed=False), "post_attention_layernorm"),
        Sublayer("", MLP, replace(mlp, normed=False), "post_feedforward_layernorm"),
    )


def states_of(block: Block) -> LayerStates:
    """The state that the block keeps of a sequence."""
    match block:
        case GroupedQueryAttention() if block.reuses:
            return ()
        case GroupedQueryAttention() | LatentAttention():
            return (block.state,)
        case Mamba2() | GatedDelta() | ShortConv():
            return block.states
        case _:
            return ()


def weights_width(block: BlockWeights, lanes: int | None) -> int:
    """Values of a lane in `PrefillScratch`, in a chunk of this many lanes; None: of any."""
    if isinstance(block, SwigluWeights):
        return block.chunk_width(lanes)
    return block.block.prefill_width


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerWeights:
    """A block's weights, and those of the norms around it; names are the checkpoint's.

    norm       all ones where there is no norm before the block, whose name is "" then, or where the
               norm has no weights
    norm_bias  of a LayerNorm; None: it has none
    kind       of the norm before the block
    post_norm  of the norm between the block and the sum; None: there is none
    parallel   as `Sublayer` has it
    factor     `[1]`, factor of the stream after the sum; None: none
    text_norm  of the norm that reads text, where `norm` reads sound alone; None: `norm` reads both
    """

    block: BlockWeights
    norm_name: str
    norm: Tensor
    norm_bias: Tensor | None = None
    kind: NormKind = "rms"
    post_norm_name: str = ""
    post_norm: Tensor | None = None
    parallel: bool = False
    factor_name: str = ""
    factor: Tensor | None = None
    text_norm_name: str = ""
    text_norm: Tensor | None = None

    @property
    def read_norm(self) -> ReadNorm:
        """The norm before the block."""
        if self.text_norm is not None:
            return NormsByKind(self.norm, self.text_norm)
        if self.kind == "rms":
            return self.norm
        return LayerNorm(self.norm, self.norm_bias, self.block.block.norm_eps)

    def norms(self) -> dict[str, Tensor]:
        """The norms' weights by name."""
        found = {
            self.norm_name: self.norm,
            self.text_norm_name: self.text_norm,
            self.post_norm_name: self.post_norm,
        }
        return {name: norm for name, norm in found.items() if name and norm is not None}

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name."""
        held = {} if self.kind == "layer_plain" else self.norms()
        norms = {f"{name}.weight": Weight(norm) for name, norm in held.items()}
        if self.norm_bias is not None:
            norms[f"{self.norm_name}.bias"] = Weight(self.norm_bias)
        if self.factor is not None:
            norms[self.factor_name] = Weight(self.factor)
        return norms | self.block.stored()

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        norms = [self.norm, self.norm_bias, self.text_norm, self.post_norm, self.factor]
        return [*(each for each in norms if each is not None), *self.block.tensors()]

    def before(self, following: ReadNorm, *, normed: bool = True) -> NextNorm:
        """The norm, or two norms, between the block and the next block, whose norm is `following`.

        normed  whether the next block has a norm; else `following` is all ones
        """
        if self.post_norm is None:
            assert normed, "a norm is before each block or after it"
            return following
        assert isinstance(following, Tensor), "a norm after a block comes before an RMSNorm"
        eps = self.block.block.norm_eps
        return Sandwich(self.post_norm, following, eps, normed, self.factor)

    def with_norms_plus_one(self) -> SublayerWeights:
        """This sublayer with 1 added to its norms, for checkpoints whose norms lack it."""
        block, post = self.block, self.post_norm
        if isinstance(block, AttentionWeights):
            block = block.with_norms_plus_one()
        return replace(
            self,
            norm=plus_one(self.norm),
            post_norm=None if post is None else plus_one(post),
            block=block,
        )

    def with_expert_norms(self) -> SublayerWeights:
        """This sublayer with the norms of its experts, if there are any, as they are computed."""
        if not isinstance(self.block, ExpertsWeights):
            return self
        return replace(self, block=self.block.to_compute_with())


def allocate_sublayers(
    prefix: str,
    layer: Layer,
    hidden: int,
    forms: WeightForms,
    *,
    device: str,
    dtype: torch.dtype,
    norms: NormKind = "rms",
) -> Iterator[SublayerWeights]:
    """Uninitialised weights of the layer with this prefix; `device="meta"` allocates nothing."""

    def norm(size: int = hidden) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    # Parallel sublayers may share a norm.
    made = {each.norm: norm() for each in layer}
    if norms == "layer_plain":
        made = {name: torch.ones_like(weight) for name, weight in made.items()}
    biases = {name: norm() if norms == "layer_biased" else None for name in made}
    for each in layer:
        yield SublayerWeights(
            kind=norms,
            norm_bias=biases[each.norm],
            block=each.block.allocate(prefix + each.prefix, forms, device=device, dtype=dtype),
            norm_name=prefix + each.norm if each.norm else "",
            norm=made[each.norm] if each.norm else torch.ones_like(made[""]),
            post_norm_name=prefix + each.post_norm if each.post_norm else "",
            post_norm=norm() if each.post_norm else None,
            parallel=each.parallel,
            factor_name=prefix + each.factor if each.factor else "",
            factor=norm(1) if each.factor else None,
            text_norm_name=prefix + each.text_norm if each.text_norm else "",
            text_norm=norm() if each.text_norm else None,
        )


def packed_of(block: BlockWeights) -> Iterator[PackedWeight | PackedExperts]:
    """The weights of a block that are packed; those of all experts are one."""
    for field in fields(block):
        value = getattr(block, field.name)
        # Packed weights are tuples themselves.
        for each in value if type(value) is tuple else (value,):
            if isinstance(each, PackedWeight | PackedExperts):
                yield each
            elif isinstance(each, BlockWeights):
                yield from packed_of(each)


def products(block: BlockWeights) -> list[tuple[AnyWeight, Tensor | None]]:
    """Weight and bias of each of a block's linears, in the order of a step; without the linears of
    experts and of latents.
    """
    match block:
        case AttentionWeights():
            return [(block.qkv, block.qkv_bias), (block.output, block.output_bias)]
        case LayerInputWeights():
            return [(block.gate, None), (block.down, None)]
        case SwigluWeights():
            return [(block.gate_up, block.gate_up_bias), (block.down, block.down_bias)]
        case MlpWeights():
            return [(block.up, block.up_bias), (block.down, block.down_bias)]
        case GatedDeltaWeights():
            return [(weight, None) for weight in (*block.projections, block.output)]
        case Mamba2Weights() | ShortConvWeights():
            return [(block.projection, block.projection_bias), (block.output, block.output_bias)]
    return []
