"""Tensor parallelism: the part of a model that one of several ranks has.

Ranks split heads and the width of feed-forwards, and of recurrent layers heads or channels with all
that they keep. A rank has all rows of its heads' queries, keys and values and of its gates and ups,
and the columns of the products after them: a part of every sum, which `Reduce` completes.
Embedding, norms and lm_head are on every rank. With fewer KV heads than ranks a KV head is on all
ranks whose query heads share it. Codes of packed weights are split like other values, and scales
with them.
The scheme is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphengine.models.blocks.gated_delta import GatedDelta
from graphengine.models.blocks.gqa import GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2
from graphengine.models.blocks.short_conv import ShortConv
from graphengine.models.blocks.squared_relu import SquaredRelu
from graphengine.models.blocks.swiglu import Swiglu
from graphengine.models.checkpoint import Checkpoint, Cut
from graphengine.models.contract import ModelConfig, Share, StoredLinear, StoredWeights, Weight
from graphengine.models.decoder import DecoderConfig
from graphengine.models.eagle3 import Eagle3Config
from graphengine.models.hybrid import Block, HybridConfig
from graphengine.models.linears import WeightForms
from graphengine.models.mtp import MtpConfig, allocate_mtp_weights
from graphengine.models.quantised.cutting import check_columns, keeps_groups_of_rows


def of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model with as many heads, and as wide feed-forwards, as each of `ranks` has.

    ValueError, with the numbers, for a model that these ranks cannot split.
    """
    if ranks == 1:
        return config
    part = _layers_of_rank(config, ranks)
    return part.stored_as(_forms_of_rank(part.forms, _meta(config), _meta(part), ranks))


def modules_of_rank(modules: MtpConfig, ranks: int) -> MtpConfig:
    """The draft modules whose layers are split as the model's; each rank has whole projections.

    ValueError as of `of_rank`.
    """
    if ranks == 1:
        return modules
    layer = _layers_of_rank(modules.layer, ranks)
    assert isinstance(layer, DecoderConfig), f"{layer=}"
    part = replace(modules, layer=layer)
    whole, own = (
        allocate_mtp_weights(each, device="meta", dtype=torch.float32) for each in (modules, part)
    )
    return part.stored_as(_forms_of_rank(part.forms, whole, own, ranks))


def eagle3_of_rank(config: Eagle3Config, ranks: int) -> Eagle3Config:
    """EAGLE3's layer, split as the model's are; each rank has all of fc and lm_head.

    ValueError as of `of_rank`.
    """
    if ranks == 1:
        return config
    layer = _layers_of_rank(config.layer, ranks)
    assert isinstance(layer, DecoderConfig), f"{layer=}"
    return replace(config, layer=layer)


def _layers_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model with the sizes of each rank's layers; weights are stored as they were."""
    if isinstance(config, DecoderConfig) and not config.latent and not config.expert_layers:
        return _decoder_of_rank(config, ranks)
    if isinstance(config, HybridConfig):
        return _hybrid_of_rank(config, ranks)
    raise ValueError(
        f"tensor_parallel={ranks} is for models whose layers have grouped-query attention or "
        f"recurrent heads, and dense feed-forwards, which this {config.architecture} has not"
    )


def _decoder_of_rank(config: DecoderConfig, ranks: int) -> DecoderConfig:
    return replace(
        config,
        num_heads=divided(config.num_heads, ranks, "attention heads"),
        num_kv_heads=shared(config.num_kv_heads, ranks, "KV heads"),
        ffn_size=divided(config.ffn_size, ranks, "ffn columns"),
    )


def _hybrid_of_rank(config: HybridConfig, ranks: int) -> HybridConfig:
    layers = tuple(
        tuple(part._replace(block=_block_of_rank(part.block, ranks)) for part in layer)
        for layer in config.layers
    )
    return replace(config, layers=layers, attention=_attention_of_rank(config.attention, ranks))


def _block_of_rank(block: Block, ranks: int) -> Block:
    match block:
        case GroupedQueryAttention():
            return _attention_of_rank(block, ranks)
        case Mamba2():
            return _mamba_of_rank(block, ranks)
        case GatedDelta():
            return _delta_of_rank(block, ranks)
        case ShortConv():
            return replace(block, channels=divided(block.channels, ranks, "channels"))
        case Swiglu() | SquaredRelu():
            return replace(block, ffn_size=divided(block.ffn_size, ranks, "ffn columns"))


def _attention_of_rank(block: GroupedQueryAttention, ranks: int) -> GroupedQueryAttention:
    return replace(
        block,
        num_heads=divided(block.num_heads, ranks, "attention heads"),
        num_kv_heads=shared(block.num_kv_heads, ranks, "KV heads"),
    )


def _mamba_of_rank(block: Mamba2, ranks: int) -> Mamba2:
    """One group of heads is on all ranks, and so is the norm of them; of several each is whole."""
    sizes = block.sizes
    heads, groups = divided(sizes.heads, ranks, "Mamba2 heads"), 1
    if sizes.groups > 1:
        groups = divided(sizes.groups, ranks, "groups of Mamba2 heads")
    sizes_of_rank = replace(sizes, heads=heads, groups=groups)
    return replace(block, sizes=sizes_of_rank, norm_ranks=ranks if sizes.groups == 1 else 1)


def _delta_of_rank(block: GatedDelta, ranks: int) -> GatedDelta:
    sizes = replace(
        block.sizes,
        key_heads=shared(block.sizes.key_heads, ranks, "heads of keys"),
        value_heads=divided(block.sizes.value_heads, ranks, "heads of values"),
    )
    return replace(block, sizes=sizes)


def divided(count: int, ranks: int, name: str) -> int:
    """What each of the ranks has of so many. ValueError where they do not divide them."""
    if count % ranks:
        raise ValueError(f"tensor_parallel={ranks} does not divide the {count} {name}")
    return count // ranks


def shared(count: int, ranks: int, name: str) -> int:
    """The same where ranks beside each other have the same one if there are fewer than ranks."""
    if count % ranks and ranks % count:
        raise ValueError(
            f"tensor_parallel={ranks} neither divides the {count} {name} nor is a multiple of them"
        )
    return max(1, count // ranks)


def _meta(config: ModelConfig) -> StoredWeights:
    """The model's weights, of which only names, shapes and kinds are asked."""
    return config.allocate(device="meta", dtype=torch.float32)


def _forms_of_rank(
    forms: WeightForms, whole: StoredWeights, part: StoredWeights, ranks: int
) -> WeightForms:
    """How each rank stores its parts of packed weights.

    Where rows that share a scale are on two ranks, each row gets a scale of its own. ValueError
    for columns that do.
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


# What a rank reads.


def cut_to(
    checkpoint: Checkpoint, whole: StoredWeights, part: StoredWeights, share: Share
) -> Checkpoint:
    """The checkpoint with what one rank has of each tensor that goes into its `part`.

    whole  the weights of all ranks, of which shapes are asked
    """
    wholes = whole.stored()
    return checkpoint.cut(
        {
            name: _cut(checkpoint.tensors[name].shape, wholes[name], weight, share)
            for name, weight in part.stored().items()
            if weight.axis is not None
        }
    )


def _cut(shape: tuple[int, ...], whole: Weight, part: Weight, share: Share) -> Cut:
    """The part of a tensor of this shape that a rank has."""
    axis = part.axis
    assert axis is not None, f"{part=}"
    if not part.pieces:
        # The views may have the tensor's values in other dimensions.
        length = part.tensor.numel() * shape[axis] // whole.tensor.numel()
        return Cut(axis, spans_of([shape[axis]], [length], *share), shape[axis])
    return Cut(axis, spans_of(whole.pieces, part.pieces, *share), shape[axis])


def cut_linears(whole: StoredWeights, part: StoredWeights, share: Share) -> list[StoredLinear]:
    """The linears of a rank's part, which say what of the checkpoint's linears they are."""
    return [
        linear if linear.axis is None else linear._replace(cuts=_cuts(one, linear, share))
        for one, linear in zip(whole.linears(), part.linears(), strict=True)
    ]


def _cuts(whole: StoredLinear, part: StoredLinear, share: Share) -> tuple[Cut, ...]:
    if part.axis == 1:
        columns = whole.shape[1]
        spans = spans_of([columns], [part.shape[1]], *share)
        return tuple(Cut(1, spans, columns) for _ in part.parts)
    return tuple(
        Cut(
            0,
            spans_of(whole.pieces.get(name, (rows,)), part.pieces.get(name, (own,)), *share),
            rows,
        )
        for (name, rows), (_, own) in zip(whole.parts, part.parts, strict=True)
    )


def spans_of(
    whole: Sequence[int], part: Sequence[int], rank: int, ranks: int
) -> tuple[tuple[int, int], ...]:
    """Of pieces that follow each other, (start, length) of what a rank has of each; ranks beside
    each other may have the same.
    """
    spans, start = [], 0
    for length, own in zip(whole, part, strict=True):
        spans.append((start + rank * (length // own) // ranks * own, own))
        start += length
    return tuple(spans)
