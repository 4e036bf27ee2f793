"""The linears of a few layers in a row, to measure which plan is best for each.

A chain is a decoder with one block per layer, which repeats one block of each kind of the model's
in turn. Its decode step can be run without the work between linears, such as attention and
recurrences. Where only some layers of a model have experts, the other layers are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphengine.kernels.experts.reference import (
    expert_product_reference,
    expert_sum_reference,
)
from graphengine.kernels.experts.router import route_reference
from graphengine.kernels.linear.call import AnyWeight, LinearCall
from graphengine.kernels.linear.epilogues import LOGITS, StoreSwiglu
from graphengine.kernels.linear.packed import PackedForm
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual, add_to_residual_reference
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.expert_steps import decode_experts
from graphengine.models.blocks.experts import Experts, ExpertsWeights
from graphengine.models.blocks.mla import LatentAttention, LatentAttentionWeights
from graphengine.models.blocks.norms import LayerNorm, NormsByKind, Sandwich
from graphengine.models.blocks.per_layer.layer_inputs import LayerInput
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.composition import experts_of, named_layers
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig, DecoderModel
from graphengine.models.decoder_steps import Step
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import WeightForms, linear_name
from graphengine.models.quantised.schemes import HEAD
from graphengine.models.sublayers import (
    Block,
    BlockWeights,
    Layer,
    Recurring,
    Sublayer,
    layer_prefix,
    products,
)

Chain = DecoderModel
"""A decoder that `new_chain` has made."""


def new_chain(
    config: ModelConfig, *, layers: int, dtype: torch.dtype, device: torch.device
) -> Chain:
    """A chain of `layers` links with uninitialised weights, stored as the model's first ones are.

    A link is one block of each kind. lm_head is tied to the embedding unless it is packed.
    ValueError for a model whose blocks of one kind differ from each other.
    """
    weights = _chain_of(config, layers).allocate(device=str(device), dtype=dtype)
    return weights.open(max_seq_len=1)


def inner_model(config: ModelConfig) -> ModelConfig | None:
    """The inner decoder of a model whose steps emit frames, as a model of its own. Its linears have
    the shapes of those that draw a frame's codes; it has no projection.

    None: there is no inner decoder.
    """
    if not isinstance(config, DecoderConfig) or not isinstance(config.inner, InnerDecoder):
        return None
    inner = config.inner
    return replace(
        config,
        inner=None,
        vocab_size=inner.codes,
        hidden_size=inner.hidden_size,
        layers=inner.layers,
        rope=inner.rope,
        local_rope=None,
        forms=WeightForms({}),
    )


def _chain_of(config: ModelConfig, links: int) -> DecoderConfig:
    """A decoder of `links` times one block of each kind, a layer each.

    Norms and the scale of the logits are the plain ones, as they do not affect the linears.
    """
    kinds = _kinds(config)
    if not isinstance(config, DecoderConfig) or not kinds:
        raise ValueError(
            f"the blocks of a {config.architecture} with the linears {', '.join(config.linears)} "
            f"are not stored alike, or have inputs of layers, heads of latents whose values are "
            f"longer than their keys, experts of latents or with norms of their own, or experts "
            f"beside recurrent blocks or shared ones without gates: there is no chain of them"
        )
    forms = {HEAD: config.forms[HEAD]} if HEAD in config.forms else {}
    layers: list[Layer] = []
    for _ in range(links):
        for prefix, sublayer in kinds:
            for name, form in _below(config.forms, prefix + sublayer.prefix).items():
                forms[layer_prefix(len(layers)) + sublayer.prefix + name] = form
            layers.append((sublayer,))
    return replace(
        config,
        layers=tuple(layers),
        tie_embeddings=True,
        norms_plus_one=False,
        logits_scale=1.0,
        forms=WeightForms(forms),
    )


def _kinds(config: ModelConfig) -> Sequence[tuple[str, Sublayer]]:
    """The last block of each kind with its layer's prefix, in their order; empty: no chain."""
    if not isinstance(config, DecoderConfig):
        return ()
    layers, experts = named_layers(config), experts_of(config)
    if experts is not None:
        layers = [(prefix, layer) for prefix, layer in layers if _have_experts(layer)]
    blocks = [each.block for _, layer in layers for each in layer]
    if any(isinstance(block, LayerInput) or _is_long(block) for block in blocks):
        return ()
    if experts is not None and (
        not (experts.shared is None or isinstance(experts.shared, Swiglu))
        or experts.latent
        or experts.own_norms
        or any(isinstance(block, Recurring) for block in blocks)
    ):
        return ()
    counted = replace(config, layers=tuple(layer for _, layer in layers))
    linears = counted.linears_of([prefix for prefix, _ in layers])
    if len({name.partition(".")[0] for name in linears}) < len(linears):
        return ()
    last: dict[tuple[str, ...], tuple[str, Sublayer]] = {}
    for prefix, layer in layers:
        for each in layer:
            last.pop(_kind(each), None)
            last[_kind(each)] = prefix, each
    return tuple(last.values())


def _is_long(block: Block) -> bool:
    """Whether a block's last product reads more values than the one before it has."""
    if not isinstance(block, LatentAttention):
        return False
    before = block.q_size if block.q_rank is not None else block.first_size + block.entry
    return before < block.value_size


def _kind(sublayer: Sublayer) -> tuple[str, ...]:
    return tuple(sublayer.block.linears)


def _have_experts(layer: Layer) -> bool:
    return any(isinstance(each.block, Experts) for each in layer)


def chain_length(config: ModelConfig) -> int:
    """Number of links of a chain with this config."""
    assert isinstance(config, DecoderConfig), f"{config.architecture} is no chain"
    return config.num_layers // len({_kind(each) for layer in config.layers for each in layer})


def link_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a link's linears except experts, which a step reads only in part.

    ValueError as for `new_chain`.
    """
    weights = _chain_of(config, 1).allocate(device="meta", dtype=dtype)
    linears = [each for each in weights.linears() if each.weight is not weights.lm_head]
    return sum(each.weight.nbytes for each in linears if not (each.expert or each.plain))


def _below(forms: WeightForms, prefix: str) -> dict[str, PackedForm]:
    return {
        name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)
    }


def chain_linear(
    chain: Chain, link: int, name: str
) -> tuple[AnyWeight, Tensor | None, Tensor | None]:
    """Weight, bias and next norm of one of a chain's linears; only residuals have a norm.

    KeyError for a linear that does not exist, and for linears of experts.
    """
    if linear_name(HEAD, chain.lm_head) == name:
        return chain.lm_head, None, None
    found = []
    for step in chain.steps:
        linears = step.block.block.linears.items()
        # Experts have linears and no products.
        for (base, each), (weight, bias) in zip(linears, _products(step.block), strict=False):
            if linear_name(base, weight) == name:
                norm = _norm_after(step) if each.kind == "residual" else None
                found.append((weight, bias, None if norm is None else norm.to(chain.dtype)))
    if link >= len(found):
        raise KeyError(f"no linear {name} in {link=}: {', '.join(chain.config.linears)}")
    return found[link]


def _products(block: BlockWeights) -> list[tuple[AnyWeight, Tensor | None]]:
    """Weight and bias of each of a block's linears, except experts'."""
    if not isinstance(block, LatentAttentionWeights):
        return products(block)
    weights = (block.q_kv_a, block.q_b, block.output)
    return [(weight, None) for weight in weights if weight is not None]


def shared_linears(chain: Chain) -> frozenset[str]:
    """Names of linears that every token takes besides the experts; the experts' code launches
    them.
    """
    blocks = [each for each in chain.weights.blocks() if isinstance(each, ExpertsWeights)]
    return frozenset(
        linear_name(base, weight)
        for block in blocks
        if block.shared is not None
        for base, (weight, _) in zip(
            block.shared.block.linears, products(block.shared), strict=True
        )
    )


def _norm_after(step: Step) -> Tensor:
    """Weight of the norm that reads the stream after a block."""
    norm = step.next_norm.following if isinstance(step.next_norm, Sandwich) else step.next_norm
    norm = norm.sound if isinstance(norm, NormsByKind) else norm
    return norm.weight if isinstance(norm, LayerNorm) else norm


def chain_experts(
    chain: Chain, link: int, slot_N: Tensor, residual: Residual, launch: DecodeLaunch
) -> Residual:
    """Router, gates and ups, and down of a link's experts, and of the shared ones, as a decode step
    launches them.
    """
    weights, norm = _experts(chain, link)
    lanes = DecodeLanes(slot_N, slot_N, slot_N)
    return decode_experts(weights, lanes, residual, norm, launch)


def chain_experts_reference(
    chain: Chain, link: int, slot_N: Tensor, residual: Residual, chosen_Nk: Tensor
) -> Residual:
    """`chain_experts` in plain PyTorch; `chosen_Nk`, int32, replaces the router's choice."""
    weights, norm = _experts(chain, link)
    block, x = weights.block, residual.scaled
    of_stream: dict[str, Any] = {"squares_TN": residual.squares, "eps": block.norm_eps}
    call = LinearCall(x, weights.gate, slot_N, bias=weights.gate_bias, **of_stream)
    logits = linear_reference(call, LOGITS)
    routes = route_reference(
        logits, slot_N, block.router, correction_E=weights.correction, given_Nk=chosen_Nk
    )
    gated = expert_product_reference(
        x,
        weights.gate_up,
        slot_N,
        routes,
        activation=block.activation,
        bias_EM=weights.gate_up_bias,
        gating=block.gating,
        out=x.new_empty(chosen_Nk.numel(), block.ffn_size),
        **of_stream,
    )
    y = expert_sum_reference(
        gated, weights.down, slot_N, routes, bias_EH=weights.down_bias, out_dtype=torch.float32
    )
    if isinstance(weights.shared, SwigluWeights):
        y += _shared_reference(weights, weights.shared, call)
    return add_to_residual_reference(y, slot_N, residual, norm)


def _shared_reference(weights: ExpertsWeights, shared: SwigluWeights, call: LinearCall) -> Tensor:
    """The shared experts' output, float32; `call` is the router's product."""
    gated = linear_reference(
        call._replace(weight_MK=shared.gate_up, bias=shared.gate_up_bias),
        StoreSwiglu(activation=shared.block.activation),
    )
    if weights.shared_gate is not None:
        gate = linear_reference(call._replace(weight_MK=weights.shared_gate, bias=None), LOGITS)
        gated *= gate.float().sigmoid()
    down = LinearCall(gated, shared.down, call.slot_N, bias=shared.down_bias)
    return linear_reference(down, LOGITS).float()


def _experts(chain: Chain, link: int) -> tuple[ExpertsWeights, Tensor]:
    """Experts of a link, and the weight of the norm after them."""
    step = [each for each in chain.steps if isinstance(each.block, ExpertsWeights)][link]
    assert isinstance(step.block, ExpertsWeights) and isinstance(step.next_norm, Tensor), f"{link=}"
    return step.block, step.next_norm
