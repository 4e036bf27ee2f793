"""Pipeline parallelism: which layers of a model each stage of a pipeline has.

Stages follow each other, each with consecutive layers. The first has the embedding, the last the
final norm and lm_head. If lm_head is tied to the embedding, both stages have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from graphengine.models.contract import LayerSpan, ModelConfig
from graphengine.models.launches import WHOLE, Share
from graphengine.models.states import paged_states

# The dtype in which layers' bytes are counted; packed weights have the same size for any dtype.
_DTYPE = torch.bfloat16


class Place(NamedTuple):
    """A rank's place in an engine.

    shard  its share of each of its layers, among the ranks of its stage
    pipe   its rank among the ranks with the same share, one per stage: see `stage_of_rank`
    """

    shard: Share
    pipe: Share


ALONE = Place(WHOLE, WHOLE)
"""The place of the only rank."""


def place_of_rank(share: Share, stages: int) -> Place:
    """The ranks of a stage are consecutive; rank 0 and the others of its group have the last
    stage.
    """
    rank, ranks = share
    assert ranks % stages == 0, f"{share=} {stages=}"
    shards = ranks // stages
    return Place(Share(rank % shards, shards), Share(rank // shards, stages))


def stage_of_rank(share: Share) -> Share:
    """The stage of a rank. Rank 0, the caller's process, has the last stage, because the step's
    results that the host reads are there; ranks 1, 2, ... have the first, second, ... stage.
    """
    rank, ranks = share
    return Share((rank - 1) % ranks, ranks)


def rank_of_stage(stage: int, ranks: int) -> int:
    """The rank that has this stage."""
    return (stage + 1) % ranks


def of_stage(
    config: ModelConfig, share: Share, *, whole: ModelConfig | None = None, embeds: bool = False
) -> ModelConfig:
    """The layers that stage `share.rank` of `share.ranks` has.

    whole   the whole model, if `config` has only a rank's share of each layer; None: it is whole
    embeds  whether the stage has the embedding even if it is not the first

    ValueError, with the numbers, for a model that has too few layers.
    """
    span = stage_spans(whole or config, share.ranks)[share.rank]
    return config.stage(span._replace(embeds=embeds))


def stage_spans(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """Give each stage consecutive layers, so that the largest stage has as few bytes as possible.

    Each stage has a layer that keeps keys and values, or latents. ValueError as in `of_stage`.
    """
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
        config.stage(LayerSpan(layer, layer + 1, layers))
        .allocate(device="meta", dtype=_DTYPE)
        .nbytes
        for layer in range(layers)
    ]
    bounds = _bounds(weights, paged, stages)
    return [LayerSpan(first, stop, layers) for first, stop in pairwise(bounds)]


def _bounds(weights: Sequence[int], paged: Sequence[bool], stages: int) -> list[int]:
    """The first layer of each stage, then the number of layers. The heaviest stage is as light as
    possible; among equal cuts, earlier stages have fewer layers.
    """
    layers = len(weights)
    before = [0, *accumulate(weights)]
    kept = [0, *accumulate(map(int, paged))]
    # For each first layer: the weight of the heaviest stage from there on, and where stages end.
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
