"""Tensor parallelism: the part of a model that one of several ranks has.

Ranks split heads and the width of feed-forwards. A rank has all rows of its heads' queries, keys
and values and of its gates and ups, and the columns of the products after them: a part of every
sum, which `Reduce` completes. Embedding, norms and lm_head are on every rank. With fewer KV heads
than ranks a KV head is on all ranks whose query heads share it.
The scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from graphengine.models.checkpoint import Checkpoint, Cut
from graphengine.models.contract import ModelConfig, Share, Weight
from graphengine.models.decoder import DecoderConfig
from graphengine.models.mtp import MtpConfig


def of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model with as many heads, and as wide feed-forwards, as each of `ranks` has.

    ValueError, with the numbers, for a model that these ranks cannot split.
    """
    if ranks == 1:
        return config
    if not isinstance(config, DecoderConfig) or config.latent or config.expert_layers:
        raise ValueError(
            f"tensor_parallel={ranks} is for models whose layers all have grouped-query attention "
            f"and one dense feed-forward, which this {config.architecture} has not"
        )
    if config.forms:
        first = next(iter(config.forms))
        raise ValueError(
            f"tensor_parallel={ranks} is for weights of 16 or 32 bits: {len(config.forms)} of this "
            f"{config.architecture} are packed, {first} in {config.forms[first].format.label}"
        )
    kv_heads = config.num_kv_heads
    for name, count in (("attention heads", config.num_heads), ("ffn columns", config.ffn_size)):
        if count % ranks:
            raise ValueError(f"tensor_parallel={ranks} does not divide the {count} {name}")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"tensor_parallel={ranks} neither divides the {kv_heads} KV heads nor is a multiple of "
            f"them"
        )
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=max(1, kv_heads // ranks),
        ffn_size=config.ffn_size // ranks,
    )


def modules_of_rank(modules: MtpConfig, ranks: int) -> MtpConfig:
    """The draft modules whose layers are split as the model's; each rank has whole projections.

    ValueError as of `of_rank`.
    """
    layer = of_rank(modules.layer, ranks)
    assert isinstance(layer, DecoderConfig), f"{layer=}"
    return replace(modules, layer=layer)


def cut_to(checkpoint: Checkpoint, stored: Mapping[str, Weight], share: Share) -> Checkpoint:
    """The checkpoint with what one rank has of each tensor that goes into one of `stored`."""
    return checkpoint.cut(
        {
            name: _cut(checkpoint.tensors[name].shape, weight.tensor.numel(), weight.axis, share)
            for name, weight in stored.items()
            if weight.axis is not None
        }
    )


def _cut(shape: tuple[int, ...], values: int, axis: int, share: Share) -> Cut:
    """The part, of so many values, of a tensor that a rank has; ranks beside each other may have
    the same one.
    """
    whole = shape[axis]
    length = values * whole // math.prod(shape)
    return Cut(axis, share.rank * (whole // length) // share.ranks * length, length, whole)
