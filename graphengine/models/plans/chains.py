"""The linears of a few layers in a row, to measure which plan suits each of them best.

A chain is a model of identical layers whose decode step can be run without attention. Where only
some layers of the model have experts, the chain consists of layers with experts. A hybrid's chain
repeats one block of each kind in turn, without the recurrence itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from graphengine.kernels.experts.reference import (
    expert_product_reference,
    expert_sum_reference,
)
from graphengine.kernels.experts.router import route_reference
from graphengine.kernels.linear.packed import PackedForm
from graphengine.kernels.linear.products import AnyWeight
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual, add_to_residual_reference
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.blocks.expert_steps import decode_experts
from graphengine.models.blocks.experts import ExpertsWeights
from graphengine.models.composition import HEAD, DecoderModel, experts_of, named_sublayers
from graphengine.models.contract import DecodeLaunch, Model, ModelConfig
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hybrid import HybridConfig
from graphengine.models.linears import WeightForms
from graphengine.models.sublayers import Block, Layer, Sublayer, layer_prefix


class Chain(Model, Protocol):
    """A model whose links all have the same linears, which can be looked up."""

    def linear(self, link: int, name: str) -> tuple[AnyWeight, Tensor | None, Tensor | None]:
        """Weight, bias and next norm of one of `config.linears`; only residuals have a norm.

        The linears of a layer's experts cannot be looked up.
        """
        ...


def new_chain(
    config: ModelConfig, *, layers: int, dtype: torch.dtype, device: torch.device
) -> Chain:
    """A chain of `layers` links with uninitialised weights, stored as the model's first ones are.

    A link is a layer, or in a hybrid one block of each kind. lm_head is tied to the embedding
    unless it is packed. ValueError for a model whose layers, or blocks of one kind, differ from
    each other.
    """
    weights = _chain_of(config, layers).allocate(device=str(device), dtype=dtype)
    return weights.open(max_seq_len=1)


def _chain_of(config: ModelConfig, links: int) -> DecoderConfig | HybridConfig:
    if isinstance(config, HybridConfig):
        return _of_kinds(config, links)
    return _of_layers(config, links)


def chain_length(config: ModelConfig) -> int:
    """Number of links of a chain with this config."""
    if isinstance(config, HybridConfig):
        return config.num_layers // len({each.block for _, _, each in named_sublayers(config)})
    return config.num_layers


def link_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a link's linears except experts, which a step reads only in part.

    ValueError as for `new_chain`.
    """
    weights = _chain_of(config, 1).allocate(device="meta", dtype=dtype)
    linears = [each for each in weights.linears() if each.weight is not weights.lm_head]
    return sum(each.weight.nbytes for each in linears if not (each.expert or each.plain))


def _of_layers(found: ModelConfig, layers: int) -> DecoderConfig:
    config = found
    if isinstance(config, DecoderConfig) and config.expert_layers:
        config = _of_experts(config)
    if (
        not isinstance(config, DecoderConfig)
        or config.latent
        or (config.experts is not None and config.experts.shared is not None)
        or not _has_one_of_each(config)
    ):
        raise ValueError(
            f"the layers of a {found.architecture} with the linears {', '.join(found.linears)} "
            f"are not all alike, or have latents, or shared experts: there is no chain of them"
        )
    first = _below(config.forms, layer_prefix(0))
    forms = {
        layer_prefix(layer) + name: form for layer in range(layers) for name, form in first.items()
    }
    if HEAD in config.forms:
        forms[HEAD] = config.forms[HEAD]
    config = replace(config, num_layers=layers, tie_embeddings=True, forms=WeightForms(forms))
    if config.expert_layers:
        config = replace(config, expert_layers=tuple(range(layers)))
    return config


def _of_kinds(config: HybridConfig, links: int) -> HybridConfig:
    """A hybrid with one block per layer: `links` times one block of each kind.

    Within a link, kinds follow the order in which the last block of each kind runs.
    `norms_plus_one` and `logits_scale` are left out: they do not affect the linears.
    """
    if experts_of(config) is not None or not _has_one_of_each(config):
        raise ValueError(
            f"the blocks of a {config.architecture} with the linears {', '.join(config.linears)} "
            f"are not stored alike, or have experts: there is no chain of them"
        )
    last: dict[Block, tuple[str, Sublayer]] = {}
    for _, prefix, sublayer in named_sublayers(config):
        last.pop(sublayer.block, None)
        last[sublayer.block] = prefix + sublayer.prefix, sublayer
    forms = {HEAD: config.forms[HEAD]} if HEAD in config.forms else {}
    layers: list[Layer] = []
    for _ in range(links):
        for prefix, sublayer in last.values():
            for name, form in _below(config.forms, prefix).items():
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


def _has_one_of_each(config: ModelConfig) -> bool:
    """Whether all layers store the weight of each linear in the same way."""
    return len({name.partition(".")[0] for name in config.linears}) == len(config.linears)


def _below(forms: WeightForms, prefix: str) -> dict[str, PackedForm]:
    return {
        name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)
    }


def chain_experts(
    chain: Chain, layer: int, slot_N: Tensor, residual: Residual, launch: DecodeLaunch
) -> Residual:
    """Router, gates and ups, and down of a layer's experts, as a decode step launches them."""
    weights, norm = _experts(chain, layer)
    lanes = DecodeLanes(slot_N, slot_N, slot_N)
    return decode_experts(weights, lanes, residual, norm, launch)


def chain_experts_reference(
    chain: Chain, layer: int, slot_N: Tensor, residual: Residual, chosen_Nk: Tensor
) -> Residual:
    """`chain_experts` in plain PyTorch; `chosen_Nk`, int32, replaces the router's choice."""
    weights, norm = _experts(chain, layer)
    block, x = weights.block, residual.scaled
    of_stream: dict[str, Any] = {"squares_TN": residual.squares, "eps": block.norm_eps}
    logits = linear_reference(
        x, weights.gate, slot_N, bias=weights.gate_bias, out_dtype=torch.float32, **of_stream
    )
    routes = route_reference(
        logits, slot_N, block.router, correction_E=weights.correction, given_Nk=chosen_Nk
    )
    gated = expert_product_reference(
        x,
        weights.gate_up,
        slot_N,
        routes,
        swiglu=True,
        bias_EM=weights.gate_up_bias,
        clamped=block.clamped,
        out=x.new_empty(chosen_Nk.numel(), block.ffn_size),
        **of_stream,
    )
    y = expert_sum_reference(
        gated, weights.down, slot_N, routes, bias_EH=weights.down_bias, out_dtype=torch.float32
    )
    return add_to_residual_reference(y, slot_N, residual, norm)


def _experts(chain: Chain, layer: int) -> tuple[ExpertsWeights, Tensor]:
    assert isinstance(chain, DecoderModel), f"{type(chain)} has no experts"
    return chain.experts(layer)


def _of_experts(config: DecoderConfig) -> DecoderConfig:
    """Keep only the layers with experts, renamed as if they were the first layers."""
    layers = config.expert_layers
    names = {layer_prefix(layer): layer_prefix(index) for index, layer in enumerate(layers)}
    forms = {HEAD: config.forms[HEAD]} if HEAD in config.forms else {}
    for name, form in config.forms.items():
        for prefix, other in names.items():
            if name.startswith(prefix):
                forms[other + name.removeprefix(prefix)] = form
    count = len(layers)
    windows = tuple(config.window_of(layer) for layer in layers) if config.windows else ()
    return replace(
        config,
        num_layers=count,
        expert_layers=tuple(range(count)),
        windows=windows,
        forms=WeightForms(forms),
    )
