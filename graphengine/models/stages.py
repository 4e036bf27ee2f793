"""Pipeline parallelism: which layers of a model each stage of a pipeline has.

Stages follow each other, each with consecutive layers. The first has the embedding, the last the
final norm and lm_head. Of a model whose lm_head is its embedding both have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from graphengine.models.contract import LayerSpan, ModelConfig, Share
from graphengine.models.decoder import DecoderConfig
from graphengine.models.hybrid import HybridConfig
from graphengine.models.states import paged_states

# In which layers are weighed: what is packed is as large whatever the model's dtype.
_DTYPE = torch.bfloat16


class Place(NamedTuple):
    """Where a rank of an engine is.

    shard  its share of each of its layers, among the ranks of its stage
    pipe   which it is of the ranks that have such a share, one for each stage: see `stage_of_rank`
    """

    shard: Share
    pipe: Share


def place_of_rank(share: Share, stages: int) -> Place:
    """Ranks of one stage follow each other; rank 0 and those beside it have the last stage."""
    rank, ranks = share
    assert ranks % stages == 0, f"{share=} {stages=}"
    shards = ranks // stages
    return Place(Share(rank % shards, shards), Share(rank // shards, stages))


def stage_of_rank(share: Share) -> Share:
    """The stage that a rank has: rank 0, the process of the caller, has the last one, as what the
    host reads of a step is there; the others follow each other from the first one on.
    """
    rank, ranks = share
    return Share((rank - 1) % ranks, ranks)


def rank_of_stage(stage: int, ranks: int) -> int:
    """The rank that has it."""
    return (stage + 1) % ranks


def of_stage(
    config: ModelConfig, share: Share, *, whole: ModelConfig | None = None, embeds: bool = False
) -> ModelConfig:
    """The layers that stage `share.rank` of `share.ranks` has.

    whole   the model that is cut, of whose layers `config` has a share each; None: it has all
    embeds  whether it has the embedding, whichever it is

    ValueError, with the numbers, for a model that has too few.
    """
    span = stage_spans(whole or config, share.ranks)[share.rank]
    return _stage(config, span._replace(embeds=embeds))


def stage_spans(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """Consecutive layers for each stage, so that the bytes of the largest stage are the fewest.

    Each stage has a layer that keeps keys and values, or latents. ValueError as of `of_stage`.
    """
    if not isinstance(config, DecoderConfig | HybridConfig):
        raise ValueError(
            f"pipeline_parallel={stages} is for models of families that tell their layers apart, "
            f"which this {config.architecture} does not"
        )
    layers = config.num_layers
    if stages > layers:
        raise ValueError(
            f"pipeline_parallel={stages} is more than the {layers} layers of this "
            f"{config.architecture}"
        )
    paged = [bool(paged_states([layer])) for layer in config.states]
    if stages > sum(paged):
        raise ValueError(
            f"pipeline_parallel={stages}: each stage has a layer with attention, of which this "
            f"{config.architecture} has {sum(paged)}"
        )
    weights = [
        _stage(config, LayerSpan(layer, layer + 1, layers))
        .allocate(device="meta", dtype=_DTYPE)
        .nbytes
        for layer in range(layers)
    ]
    bounds = _bounds(weights, paged, stages)
    return [LayerSpan(first, stop, layers) for first, stop in pairwise(bounds)]


def _bounds(weights: Sequence[int], paged: Sequence[bool], stages: int) -> list[int]:
    """Where stages begin, and the end: the heaviest is as light as it can be, and of equal ways to
    cut the earlier stages have the fewer layers.
    """
    layers = len(weights)
    before = [0, *accumulate(weights)]
    kept = [0, *accumulate(map(int, paged))]
    # The weight of the heaviest stage from a layer on, and where the stage after it begins.
    best: list[tuple[float, list[int]]] = [
        (before[layers] - before[first] if kept[layers] > kept[first] else float("inf"), [layers])
        for first in range(layers)
    ]
    for _ in range(stages - 1):
        best = [
            min(
                (
                    (max(before[stop] - before[first], best[stop][0]), [stop, *best[stop][1]])
                    for stop in range(first + 1, layers)
                    if kept[stop] > kept[first]
                ),
                default=(float("inf"), [layers]),
            )
            for first in range(layers)
        ]
    return [0, *best[0][1]]


def _stage(config: ModelConfig, span: LayerSpan) -> ModelConfig:
    assert isinstance(config, DecoderConfig | HybridConfig), f"{config=}"
    return config.stage(span)
