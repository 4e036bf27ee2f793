"""Configs of small decoders, made of their blocks; and what the layers of any config have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphengine.kernels.norm_rope.rope_config import RopeConfig
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.composition import blocks_of
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig
from graphengine.models.sublayers import Attending, FeedForward, usual_layer


def small_decoder(
    attention: Attending,
    feed_forwards: Sequence[FeedForward],
    *,
    post_norms: bool = False,
    **values: Any,
) -> DecoderConfig:
    """A Llama, by its name, with this attention and one of `feed_forwards` in each layer."""
    layers = tuple(usual_layer(attention, each, post_norms=post_norms) for each in feed_forwards)
    usual = {"norm_eps": attention.norm_eps, "rope": RopeConfig()}
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        hidden_size=attention.hidden_size,
        layers=layers,
        **usual | values,
    )


def composed(config: ModelConfig) -> DecoderConfig:
    """The config, which is that of a decoder."""
    assert isinstance(config, DecoderConfig)
    return config


def with_windows(config: ModelConfig, windows: Sequence[int]) -> DecoderConfig:
    """The model whose attention has these windows, layer by layer, or none if they are empty."""
    model = composed(config)
    layers = []
    for layer, window in zip(model.layers, windows or (0,) * model.num_layers, strict=True):
        attention, *rest = layer
        assert isinstance(attention.block, GroupedQueryAttention)
        layers.append((attention._replace(block=replace(attention.block, window=window)), *rest))
    return replace(model, layers=tuple(layers))


def expert_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers that have experts."""
    layers = composed(config).layers
    return tuple(
        index
        for index, layer in enumerate(layers)
        if any(isinstance(each.block, Experts) for each in layer)
    )


def block_in(config: ModelConfig, kind: Any) -> Any:
    """The first block of this kind; StopIteration if there is none."""
    return next(each for each in blocks_of(composed(config)) if isinstance(each, kind))
