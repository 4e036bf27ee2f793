"""Tensor parallelism: the sizes of one rank's part of a model.

Ranks split heads and the width of feed-forwards. They split the width of each expert too, or each
rank has some experts whole. In recurrent layers they split heads or channels, and the states of
these. A rank has all rows of its heads' queries, keys and values and of its gates and ups, and the
matching columns of the linears after them. These compute a part of every sum, which `Reduce`
completes. Embedding, norms, routers, latents and lm_head are on every rank. Where each rank has its
own requests, only experts are split. With fewer KV heads than ranks, a KV head is on all ranks
whose query heads share it. Codes of packed weights are split like other values, and scales with
them. `rank_cuts.py` finds the parts in a checkpoint. The scheme is Megatron-LM's (Shoeybi et al.,
2019).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from graphengine.models.blocks.experts import Experts
from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.mla import LatentAttention
from graphengine.models.blocks.mlp import Mlp
from graphengine.models.blocks.per_layer.layer_inputs import LayerInput
from graphengine.models.blocks.short_conv import ShortConv
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.composition import experts_of
from graphengine.models.contract import ModelConfig
from graphengine.models.decoder import DecoderConfig
from graphengine.models.launches import Share
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.cutting import check_columns, keeps_groups_of_rows
from graphengine.models.splitting.rank_cuts import cut_linears
from graphengine.models.sublayers import Block
from graphengine.models.weights import StoredWeights


def of_rank(
    config: ModelConfig,
    share: Share,
    *,
    expert_parallel: bool = False,
    data_parallel: bool = False,
) -> ModelConfig:
    """The model with the heads and the feed-forward widths of one rank.

    expert_parallel  whether ranks have whole experts instead of a part of each
    data_parallel    whether ranks split only the experts, each having some of them whole

    ValueError, with the numbers, for a model that these ranks cannot split.
    """
    if share.ranks == 1:
        return config
    if data_parallel:
        return _data_parallel(config, share)
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"tensor_parallel={share.ranks} is for models whose layers have attention, recurrent "
            f"heads or channels, and feed-forwards, which this {config.architecture} has not"
        )
    if expert_parallel and experts_of(config) is None:
        raise ValueError(
            f"expert_parallel=True, but no layer of this {config.architecture} has experts"
        )
    part = split_layers(config, share, expert_parallel)
    return part.stored_as(forms_of_rank(part.forms, _meta(config), _meta(part), share.ranks))


def _data_parallel(config: ModelConfig, share: Share) -> ModelConfig:
    """The whole model, with only this rank's experts. ValueError if it has none."""
    if isinstance(config, DecoderConfig) and experts_of(config) is not None:
        return spread_experts(config, share)
    raise ValueError(
        f"data_parallel={share.ranks} spreads the experts of a model over ranks, and this "
        f"{config.architecture} has none: {share.ranks} engines, each in a process of its own, "
        f"serve it as well"
    )


# Blocks.


def split_layers(
    config: DecoderConfig, share: Share, expert_parallel: bool = False
) -> DecoderConfig:
    """A rank's part of each block; weights are stored as they were."""
    part = partial(_block_of_rank, share=share, expert_parallel=expert_parallel)
    return config.with_blocks(part)


def spread_experts(config: DecoderConfig, share: Share) -> DecoderConfig:
    """All blocks, with only this rank's experts, among ranks with lanes of their own."""

    def own(block: Block) -> Block:
        if not isinstance(block, Experts):
            return block
        held = _whole_experts(block.experts, share, "data_parallel")
        return replace(block, held=held, sharing=share.ranks)

    return config.with_blocks(own)


def _block_of_rank(block: Block, share: Share, expert_parallel: bool) -> Block:
    ranks = share.ranks
    match block:
        case Experts():
            return _experts_of_rank(block, share, expert_parallel)
        case LatentAttention():
            return replace(block, num_heads=_divided(block.num_heads, ranks, "attention heads"))
        case GroupedQueryAttention():
            return _attention_of_rank(block, ranks)
        case Mamba2():
            return _mamba_of_rank(block, ranks)
        case GatedDelta():
            return _delta_of_rank(block, ranks)
        case ShortConv():
            return replace(block, channels=_divided(block.channels, ranks, "channels"))
        case LayerInput():
            return replace(block, size=_divided(block.size, ranks, "values of a layer's input"))
        case Swiglu() | Mlp():
            return replace(block, ffn_size=_divided(block.ffn_size, ranks, "ffn columns"))


def _attention_of_rank(block: GroupedQueryAttention, ranks: int) -> GroupedQueryAttention:
    if block.row_norm:
        raise ValueError(
            f"tensor_parallel={ranks} does not split the norms of all {block.num_heads} heads' "
            f"queries together"
        )
    return replace(
        block,
        num_heads=_divided(block.num_heads, ranks, "attention heads"),
        num_kv_heads=_shared(block.num_kv_heads, ranks, "KV heads"),
    )


def _mamba_of_rank(block: Mamba2, ranks: int) -> Mamba2:
    """A single group of heads, and its norm, spans all ranks. If there are several groups, no group
    is split.
    """
    sizes = block.sizes
    heads, groups = _divided(sizes.heads, ranks, "Mamba2 heads"), 1
    if sizes.groups > 1:
        groups = _divided(sizes.groups, ranks, "groups of Mamba2 heads")
    sizes_of_rank = replace(sizes, heads=heads, groups=groups)
    return replace(block, sizes=sizes_of_rank, norm_ranks=ranks if sizes.groups == 1 else 1)


def _delta_of_rank(block: GatedDelta, ranks: int) -> GatedDelta:
    sizes = replace(
        block.sizes,
        key_heads=_shared(block.sizes.key_heads, ranks, "heads of keys"),
        value_heads=_divided(block.sizes.value_heads, ranks, "heads of values"),
    )
    return replace(block, sizes=sizes)


def _experts_of_rank(experts: Experts, share: Share, expert_parallel: bool) -> Experts:
    """A part of each expert, or some whole experts; shared experts are always split."""
    ranks, shared = share.ranks, experts.shared
    if shared is not None:
        width = _divided(shared.ffn_size, ranks, "ffn columns of the shared experts")
        shared = replace(shared, ffn_size=width)
    if expert_parallel:
        held = _whole_experts(experts.experts, share, "tensor_parallel")
        return replace(experts, shared=shared, held=held)
    ffn = _divided(experts.ffn_size, ranks, "ffn columns of an expert")
    return replace(experts, shared=shared, ffn_size=ffn)


def _whole_experts(count: int, share: Share, option: str) -> range:
    """The experts that this rank has, of `count`."""
    of_each = _divided(count, share.ranks, "experts of a layer", option)
    return range(share.rank * of_each, (share.rank + 1) * of_each)


# Common helpers.


def _divided(count: int, ranks: int, name: str, option: str = "tensor_parallel") -> int:
    """Each rank's share of `count`. ValueError, naming `option`, unless `ranks` divides it."""
    if count % ranks:
        raise ValueError(f"{option}={ranks} does not divide the {count} {name}")
    return count // ranks


def _shared(count: int, ranks: int, name: str) -> int:
    """Heads per rank; where there are fewer than ranks, neighbouring ranks share one."""
    if count % ranks and ranks % count:
        raise ValueError(
            f"tensor_parallel={ranks} neither divides the {count} {name} nor is a multiple of them"
        )
    return max(1, count // ranks)


def _meta(config: ModelConfig) -> StoredWeights:
    """The model's weights on the meta device, for their names, shapes and kinds."""
    return config.allocate(device="meta", dtype=torch.float32)


def forms_of_rank(
    forms: WeightForms, whole: StoredWeights, part: StoredWeights, ranks: int
) -> WeightForms:
    """The formats in which a rank stores its parts of packed weights.

    If rows that share a scale are on two ranks, each row gets its own scale. ValueError if columns
    that share a scale are on two ranks.
    """
    changes = {}
    for rank in range(ranks if forms else 0):
        for linear in cut_linears(whole, part, Share(rank, ranks)):
            first = linear.parts[0][0]
            form = forms.get(first)
            if form is None:
                continue
            for cut in linear.cuts:
                try:
                    check_columns(form.format, cut, ordered=form.ordered)
                except ValueError as error:
                    raise ValueError(f"tensor_parallel={ranks}: {first}: {error}") from error
                if not keeps_groups_of_rows(form.format, cut):
                    changes[first] = form._replace(format=form.format._replace(rows=1))
    return forms.replace(changes)
