"""The blocks that layers of a hybrid are made of, each after a norm, and their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from graphengine.kernels import AnyWeight
from graphengine.models.blocks.gated_delta import GatedDelta, GatedDeltaWeights
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.mamba2 import Mamba2, Mamba2Weights
from graphengine.models.blocks.norms import plus_one
from graphengine.models.blocks.short_conv import ShortConv, ShortConvWeights
from graphengine.models.blocks.squared_relu import SquaredRelu, SquaredReluWeights
from graphengine.models.blocks.swiglu import Swiglu, SwigluWeights
from graphengine.models.states import LayerStates

Recurring = Mamba2 | GatedDelta | ShortConv
RecurringWeights = Mamba2Weights | GatedDeltaWeights | ShortConvWeights
Block = GroupedQueryAttention | Recurring | Swiglu | SquaredRelu
BlockWeights = AttentionWeights | RecurringWeights | SwigluWeights | SquaredReluWeights


class Part(NamedTuple):
    """A block of a layer; names are those in the checkpoint, below the layer's own prefix.

    norm    name of the norm before the block, without ".weight"
    prefix  prefix of the block's tensors
    """

    norm: str
    prefix: str
    block: Block


def states_of(block: Block) -> LayerStates:
    """What the block keeps of a sequence."""
    match block:
        case GroupedQueryAttention():
            return (block.state,)
        case Mamba2() | GatedDelta() | ShortConv():
            return block.states
        case _:
            return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWeights:
    """A block's weights, its layer's index, and the norm before it with its name."""

    layer: int
    norm_name: str
    norm: Tensor
    block: BlockWeights

    def tensors(self) -> list[Tensor]:
        """Every weight tensor."""
        return [self.norm, *self.block.tensors()]

    def with_norms_plus_one(self) -> PartWeights:
        """This part with 1 added to its norms, for checkpoints whose norms lack it."""
        block = self.block
        if isinstance(block, AttentionWeights):
            block = block.with_norms_plus_one()
        return replace(self, norm=plus_one(self.norm), block=block)


def products(block: BlockWeights) -> list[tuple[AnyWeight, Tensor | None]]:
    """Weight and bias of each of a block's linears, in the order of a step."""
    match block:
        case AttentionWeights():
            return [(block.qkv, block.qkv_bias), (block.output, block.output_bias)]
        case SwigluWeights():
            return [(block.gate_up, block.gate_up_bias), (block.down, block.down_bias)]
        case SquaredReluWeights():
            return [(block.up, block.up_bias), (block.down, block.down_bias)]
        case GatedDeltaWeights():
            return [(weight, None) for weight in (*block.projections, block.output)]
    return [(block.projection, block.projection_bias), (block.output, block.output_bias)]
