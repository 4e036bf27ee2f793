"""Tensor parallelism: the part of a model that one of several ranks has.

Ranks split heads and the width of feed-forwards: that of each expert, or they have whole experts. A
rank has all rows of its heads' queries, keys and values and of its gates and ups, and the columns
of the products after them: a part of every sum, which `Reduce` completes. Embedding, norms,
routers, latents and lm_head are on every rank. With fewer KV heads than ranks a KV head is on all
ranks whose query heads share it.
The scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphengine.kernels import PackedWeight
from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.checkpoint import Checkpoint, Cut
from graphengine.models.contract import ModelConfig, Share, StoredLinear, Weight
from graphengine.models.decoder import DecoderConfig
from graphengine.models.linears import WeightForms
from graphengine.models.mtp import MtpConfig
from graphengine.models.quantised.filling import STACKED_ENDS


def of_rank(config: ModelConfig, share: Share, *, expert_parallel: bool = False) -> ModelConfig:
    """The model with as many heads, and as wide feed-forwards, as one of the ranks has.

    expert_parallel  whether ranks have whole experts in place of a part of each

    ValueError, with the numbers, for a model that these ranks cannot split.
    """
    ranks = share.ranks
    if ranks == 1:
        return config
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"tensor_parallel={ranks} is for models whose layers all have attention and a "
            f"feed-forward, which this {config.architecture} has not"
        )
    if expert_parallel and not config.expert_layers:
        raise ValueError(
            f"expert_parallel=True, but no layer of this {config.architecture} has experts"
        )
    return _decoder(config, config.num_layers, share, expert_parallel)


def modules_of_rank(
    modules: MtpConfig, share: Share, *, expert_parallel: bool = False
) -> MtpConfig:
    """The draft modules whose layers are split as the model's; each rank has whole projections.

    ValueError as of `of_rank`.
    """
    if share.ranks == 1:
        return modules
    layer = _decoder(modules.layer, modules.modules, share, expert_parallel)
    return replace(modules, layer=layer)


def _decoder(
    config: DecoderConfig, layers: int, share: Share, expert_parallel: bool
) -> DecoderConfig:
    """A decoder, or draft modules with so many of its layers."""
    split = replace(config, **_attention(config, share.ranks))
    if any(layer not in config.expert_layers for layer in range(layers)):
        ffn = _share_of(config.ffn_size, "ffn columns", share.ranks)
        split = replace(split, ffn_size=ffn)
    if config.experts is not None and config.expert_layers:
        split = replace(split, experts=_experts(config.experts, share, expert_parallel))
    _check_forms(split, share.ranks)
    return split


def _attention(config: DecoderConfig, ranks: int) -> dict[str, Any]:
    heads = _share_of(config.num_heads, "attention heads", ranks)
    if config.latent is not None:
        return {"num_heads": heads, "latent": _latent(config.latent, ranks)}
    kv_heads = config.num_kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"tensor_parallel={ranks} neither divides the {kv_heads} KV heads nor is a multiple of "
            f"them"
        )
    return {"num_heads": heads, "num_kv_heads": max(1, kv_heads // ranks)}


def _latent(latent: LatentAttention, ranks: int) -> LatentAttention:
    return replace(latent, num_heads=_share_of(latent.num_heads, "attention heads", ranks))


def _experts(experts: Experts, share: Share, expert_parallel: bool) -> Experts:
    """A part of each, or some of them; of the shared ones a part."""
    rank, ranks = share
    shared = experts.shared
    if shared is not None:
        width = _share_of(shared.ffn_size, "ffn columns of the shared experts", ranks)
        shared = replace(shared, ffn_size=width)
    if expert_parallel:
        count = _share_of(experts.experts, "experts of a layer", ranks)
        return replace(experts, shared=shared, held=range(rank * count, (rank + 1) * count))
    ffn = _share_of(experts.ffn_size, "ffn columns of an expert", ranks)
    return replace(experts, shared=shared, ffn_size=ffn)


def _share_of(count: int, what: str, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide the {count} {what}")
    return count // ranks


def _check_forms(split: DecoderConfig, ranks: int) -> None:
    """ValueError unless a rank's part of the model has whole groups of what is packed: of experts
    that a checkpoint has in one tensor. Nothing else may be packed.
    """
    forms = split.forms
    stacked = _stacked_forms(split)
    packed = [name for name in forms if name not in stacked]
    if packed:
        raise ValueError(
            f"tensor_parallel={ranks} is for weights of 16 or 32 bits: {len(packed)} of this "
            f"{split.architecture} are packed, {packed[0]} in {forms[packed[0]].format.label}"
        )
    for name, form in stacked.items():
        assert split.experts is not None, f"{name=}"
        width, group = split.experts.ffn_size, form.format.columns
        if group and width % group:
            raise ValueError(
                f"tensor_parallel={ranks} leaves a rank {width} ffn columns of an expert, which "
                f"are not whole groups of the {group} that share a scale in {form.format.label}"
            )


def _stacked_forms(config: DecoderConfig) -> WeightForms:
    experts = config.experts
    if experts is None or not experts.stacked:
        return WeightForms({})
    ends = experts.expert_names(0)
    return WeightForms({name: form for name, form in config.forms.items() if name.endswith(ends)})


def cut_to(
    checkpoint: Checkpoint,
    stored: Mapping[str, Weight],
    linears: Sequence[StoredLinear],
    share: Share,
) -> Checkpoint:
    """The checkpoint with what one rank has of each tensor that goes into one of `stored`, or into
    a packed one of `linears`.
    """
    plain = {
        name: _cut(checkpoint.tensors[name].shape, weight.tensor.numel(), weight.axis, share)
        for name, weight in stored.items()
        if weight.axis is not None
    }
    return checkpoint.cut(plain | _stacked_cuts(checkpoint, linears, share))


def _stacked_cuts(
    checkpoint: Checkpoint, linears: Sequence[StoredLinear], share: Share
) -> dict[str, Cut]:
    """Of tensors `[experts, rows, groups of columns, ...]` with the codes and scales of all.

    A rank has whole experts where what each of them has is not split.
    """
    cuts: dict[str, Cut] = {}
    for linear in linears:
        if linear.stack is None or not isinstance(linear.weight, PackedWeight):
            continue
        (name, _), axis = linear.parts[0], 0 if linear.axis is None else 1 + linear.axis
        for end in STACKED_ENDS:
            whole = checkpoint.tensors[name + end].shape[axis]
            length = whole // share.ranks
            cuts[name + end] = Cut(axis, share.rank * length, length, whole)
    return cuts


def _cut(shape: tuple[int, ...], values: int, axis: int, share: Share) -> Cut:
    """The part, of so many values, of a tensor that a rank has; ranks beside each other may have
    the same one.
    """
    whole = shape[axis]
    length = values * whole // math.prod(shape)
    return Cut(axis, share.rank * (whole // length) // share.ranks * length, length, whole)
