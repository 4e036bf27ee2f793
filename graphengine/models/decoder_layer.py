"""The weights of a layer, and its programs: for a few rows, and for a chunk of a prompt.

Letters: G kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.expert_steps import decode_experts, prefill_experts
from graphengine.models.blocks.experts import ExpertsWeights
from graphengine.models.blocks.gqa import AttentionWeights, PagedMemory
from graphengine.models.blocks.mlp import MlpWeights
from graphengine.models.blocks.norms import LaneKinds, NextNorm, NormKind, ReadNorm
from graphengine.models.blocks.per_layer.layer_inputs import LayerInputWeights
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import PrefillScratch, coded_columns
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.launches import ChunkAttention, DecodeLaunch, PrefillLaunch
from graphengine.models.linears import WeightForms
from graphengine.models.sublayers import (
    AttendingWeights,
    BlockWeights,
    FeedForwardWeights,
    Layer,
    RecurringWeights,
    SublayerWeights,
    allocate_sublayers,
    weights_width,
)
from graphengine.models.weights import RoutedExperts, StoredLinear, Weight

Memory = PagedMemory | Mapping[str, Tensor] | Tensor | None
"""The per-sequence memory of a block: a paged cache with its block table, recurrent states by name,
its layer's input, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's sublayers, in the order in which they run."""

    sublayers: tuple[SublayerWeights, ...]

    @property
    def input_norm(self) -> Tensor:
        """Weight of the norm that reads the stream before the layer; ones where there is none."""
        return self.sublayers[0].norm

    @property
    def input_normed(self) -> bool:
        """Whether there is a norm that reads the stream before the layer."""
        return bool(self.sublayers[0].norm_name)

    @property
    def attention(self) -> AttendingWeights:
        """The block that attends. LookupError if there is none."""
        for each in self.sublayers:
            if isinstance(each.block, AttendingWeights):
                return each.block
        raise LookupError("the layer has no attention")

    @property
    def mlp(self) -> FeedForwardWeights:
        """The last block, if it is a feed-forward. LookupError if it is not."""
        block = self.sublayers[-1].block
        if isinstance(block, FeedForwardWeights):
            return block
        raise LookupError("the layer ends without a feed-forward")

    @property
    def after_attention(self) -> NextNorm:
        """The norm, or two norms, between the first sublayer and the second."""
        first, second = self.sublayers
        return first.before(second.read_norm)

    def followed(
        self, following: ReadNorm, *, normed: bool = True
    ) -> Iterator[tuple[SublayerWeights, NextNorm]]:
        """Each sublayer with the norm, or two norms, after it; `following` is the next layer's.

        Before a parallel sublayer the normed stream is not read.

        normed  whether the next layer begins with a norm; else `following` is all ones
        """
        norms = [
            (each.norm if each.parallel else each.read_norm, bool(each.norm_name))
            for each in self.sublayers[1:]
        ]
        for each, (norm, is_norm) in zip(
            self.sublayers, [*norms, (following, normed)], strict=True
        ):
            yield each, each.before(norm, normed=is_norm)

    def linears(self) -> list[StoredLinear]:
        """The layer's linears."""
        return [linear for each in self.sublayers for linear in each.block.linears()]

    def stored(self) -> dict[str, Weight]:
        """Tensors that are not packed, by name."""
        return {name: weight for each in self.sublayers for name, weight in each.stored().items()}

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [tensor for each in self.sublayers for tensor in each.tensors()]

    @property
    def may_split(self) -> bool:
        """Whether the layer's stream may be split over ranks by lanes.

        Recurrent blocks need all lanes; experts, norms after a block, and LayerNorms sum over ranks
        in their own way.
        """
        blocks = AttendingWeights | SwigluWeights
        return all(
            isinstance(each.block, blocks) and each.post_norm is None and each.kind == "rms"
            for each in self.sublayers
        )

    def with_norms_plus_one(self) -> LayerWeights:
        """This layer with 1 added to its norms, for checkpoints whose norms lack it."""
        sublayers = tuple(each.with_norms_plus_one() for each in self.sublayers)
        return replace(self, sublayers=sublayers)

    def with_expert_norms(self) -> LayerWeights:
        """This layer with the norms of its experts, if there are any, as they are computed."""
        sublayers = tuple(each.with_expert_norms() for each in self.sublayers)
        return replace(self, sublayers=sublayers)


def allocate_layer(
    prefix: str,
    layer: Layer,
    hidden: int,
    forms: WeightForms,
    *,
    device: str,
    dtype: torch.dtype,
    norms: NormKind = "rms",
) -> LayerWeights:
    """Uninitialised weights of the layer with this prefix; `device="meta"` allocates nothing."""
    sublayers = allocate_sublayers(
        prefix, layer, hidden, forms, device=device, dtype=dtype, norms=norms
    )
    return LayerWeights(sublayers=tuple(sublayers))


def routed_of(layers: Sequence[LayerWeights]) -> RoutedExperts | None:
    """The experts of the layers that have some; None: no layer has."""
    blocks = [each.block for layer in layers for each in layer.sublayers]
    held = [block for block in blocks if isinstance(block, ExpertsWeights)]
    if not held:
        return None
    block = held[0].block
    return RoutedExperts(
        layers=len(held),
        experts=block.experts,
        chosen=block.router.top_k,
        parameters=block.expert_parameters,
        nbytes=sum(each.experts_bytes for each in held),
        stacked=block.stacked,
    )


def decode_block(
    block: BlockWeights,
    next_norm: NextNorm,
    residual: Residual,
    memory: Memory,
    tables: RopeTables,
    row: DecodeLanes,
    launch: DecodeLaunch,
) -> Residual:
    """One block for `row`'s tokens.

    `residual` is scaled for the block's norm and comes back scaled for `next_norm`, updated in
    place except for its squares. Each live lane's entry of `memory` is written at its position.
    """
    if isinstance(block, AttendingWeights):
        kv, table, lent = cast("PagedMemory", memory)
        if isinstance(block, AttentionWeights):
            return block.decode(row, residual, next_norm, kv, table, tables, launch, lent=lent)
        return block.decode(row, residual, next_norm, kv, table, tables, launch)
    if isinstance(block, RecurringWeights):
        states = cast("Mapping[str, Tensor]", memory)
        return block.decode(row, residual, next_norm, states, launch)
    if isinstance(block, LayerInputWeights):
        return block.decode(row, residual, next_norm, cast("Tensor", memory), launch)
    return _decode_feed_forward(block, next_norm, row, residual, launch)


def _decode_feed_forward(
    block: BlockWeights,
    next_norm: NextNorm,
    row: DecodeLanes,
    residual: Residual,
    launch: DecodeLaunch,
) -> Residual:
    """Run `decode_block` of a feed-forward."""
    if isinstance(block, ExpertsWeights):
        return decode_experts(block, row, residual, next_norm, launch)
    assert isinstance(block, SwigluWeights | MlpWeights), f"{type(block)=}"
    return block.decode(row, residual, next_norm, launch)


def decode_layer(
    layer: LayerWeights,
    next_norm: Tensor,
    row: DecodeLanes,
    residual: Residual,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
) -> Residual:
    """A layer of attention and a feed-forward for `row`'s tokens, as `decode_block` runs each.

    `kv` is the layer's cache `[blocks, 2, block_size, G, D]`.
    """
    for each, following in layer.followed(next_norm):
        residual = decode_block(
            each.block, following, residual, PagedMemory(kv, block_table), tables, row, launch
        )
    return residual


def decode_feed_forward(
    layer: LayerWeights,
    next_norm: Tensor,
    row: DecodeLanes,
    residual: Residual,
    launch: DecodeLaunch,
) -> Residual:
    """Run the part of `decode_layer` that follows attention."""
    _, (each, following) = layer.followed(next_norm)
    return _decode_feed_forward(each.block, following, row, residual, launch)


def prefill_scratch(
    layers: Sequence[LayerWeights],
    lanes: int,
    *,
    like: Tensor,
    launch: PrefillLaunch,
    outlived: bool = False,
    may_split: bool = False,
    kinds: LaneKinds | None = None,
) -> PrefillScratch:
    """The memory in which these layers compute a chunk, in the dtype of `like`, on its device.

    may_split  whether only these layers read the chunk's stream, so that ranks may split it by
               lanes
    kinds      the lanes by kind, where that matters
    """
    hidden = len(layers[0].input_norm)
    split = None
    if may_split and launch.split is not None and all(layer.may_split for layer in layers):
        split = launch.split(lanes, hidden, like.dtype)
    blocks = [each.block for layer in layers for each in layer.sublayers]
    return PrefillScratch(
        lanes,
        hidden,
        max(weights_width(block, None if launch.any_lanes else lanes) for block in blocks),
        like=like,
        launch=launch,
        coded=0 if launch.activations is None else _coded_columns(blocks, launch.activations),
        outlived=outlived,
        split=split,
        kinds=kinds,
    )


def _coded_columns(blocks: Sequence[BlockWeights], activations: ActivationKind) -> int:
    linears = [each for block in blocks for each in block.linears() if not each.expert]
    return coded_columns((each.weight for each in linears), activations)


def prefill_block(
    block: BlockWeights,
    next_norm: NextNorm,
    memory: Memory,
    tables: RopeTables,
    lanes: PrefillLanes,
    stream: Tensor,
    attention: ChunkAttention,
    scratch: PrefillScratch,
) -> None:
    """One block for a chunk's tokens, whose normed stream is `scratch.h`.

    `stream`, float32, is updated in place, and `scratch.h` becomes `stream` after `next_norm`.
    """
    if isinstance(block, AttendingWeights):
        attended = attend(block, cast("PagedMemory", memory), tables, lanes, attention, scratch)
        block.add_output(attended, stream, next_norm, lanes.slot, scratch)
    elif isinstance(block, RecurringWeights):
        states = cast("Mapping[str, Tensor]", memory)
        block.prefill(lanes, stream, next_norm, states, scratch)
    else:
        prefill_feed_forward(block, next_norm, stream, lanes.slot, scratch, memory)


def attend(
    block: AttendingWeights,
    memory: PagedMemory,
    tables: RopeTables,
    lanes: PrefillLanes,
    attention: ChunkAttention,
    scratch: PrefillScratch,
) -> Tensor:
    """Run the first half of a block that attends, on a chunk whose normed stream is `scratch.h`."""
    kv, table, lent = memory
    if isinstance(block, AttentionWeights):
        return block.attend(lanes, kv, table, tables, attention, scratch, lent=lent)
    return block.attend(lanes, kv, table, tables, attention, scratch)


def prefill_feed_forward(
    block: BlockWeights,
    next_norm: NextNorm,
    stream: Tensor,
    slot: Tensor,
    scratch: PrefillScratch,
    memory: Memory = None,
) -> None:
    """Run `prefill_block` of a feed-forward, or of a block that takes the layer's input."""
    if isinstance(block, LayerInputWeights):
        block.prefill(stream, next_norm, cast("Tensor", memory), slot, scratch)
    elif isinstance(block, ExpertsWeights):
        prefill_experts(block, stream, next_norm, slot, scratch)
    else:
        assert isinstance(block, SwigluWeights | MlpWeights), f"{type(block)=}"
        block.prefill(stream, next_norm, slot, scratch)


def finish_prefill_layer(
    layer: LayerWeights,
    next_norm: Tensor,
    stream: Tensor,
    attended: Tensor,
    slot: Tensor,
    scratch: PrefillScratch,
) -> None:
    """Run the part of a layer that follows a chunk's attention.

    `stream`, float32, is updated in place, and `scratch.h` becomes `stream` after `next_norm`.
    `attended` is overwritten where it lies in `scratch`.
    """
    (_, after_attention), (mlp, following) = layer.followed(next_norm)
    layer.attention.add_output(attended, stream, after_attention, slot, scratch)
    prefill_feed_forward(mlp.block, following, stream, slot, scratch)
