"""The blocks of a decoder in the order in which they run, each with its memory.

Letters: N lanes, L layers, S values of a layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import AttentionWeights, Lent, PagedMemory
from graphengine.models.blocks.norms import NextNorm, ReadNorm, plus_one
from graphengine.models.blocks.per_layer.layer_inputs import (
    LayerInput,
    LayerInputsWeights,
    LayerInputWeights,
)
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.composition import Composition, blocks_of, experts_of, window_of
from graphengine.models.decoder_layer import LayerWeights, Memory
from graphengine.models.launches import DecodeLaunch, PrefillLaunch
from graphengine.models.states import StateTensors
from graphengine.models.sublayers import (
    AttendingWeights,
    BlockWeights,
    RecurringWeights,
)


class Step(NamedTuple):
    """A block as it runs.

    layer      the index of its layer
    next_norm  the norm, or two norms, between it and the next block
    ends       whether it is the last of its layer
    aside      the norm of the next block, if that reads the stream that this one reads
    """

    layer: int
    block: BlockWeights
    next_norm: NextNorm
    tables: RopeTables
    ends: bool
    aside: ReadNorm | None = None


def computed(
    config: Composition,
    layers: tuple[LayerWeights, ...],
    final_norm: Tensor,
    final_bias: Tensor | None,
) -> tuple[tuple[LayerWeights, ...], Tensor, Tensor | None]:
    """Layers, and the final norm's weight and bias, ready to compute with. Norms that get 1 added
    or are scaled, and the norms of experts' routers, are copies.

    All other tensors are the weights themselves.
    """
    if config.norms_plus_one:
        final_norm = plus_one(final_norm)
        layers = tuple(layer.with_norms_plus_one() for layer in layers)
    experts = experts_of(config)
    if experts is not None and experts.own_norms:
        layers = tuple(layer.with_expert_norms() for layer in layers)
    if config.logits_scale != 1:
        final_norm = final_norm.float() * config.logits_scale
        final_bias = None if final_bias is None else final_bias.float() * config.logits_scale
    return layers, final_norm, final_bias


def new_inputs(
    weights: LayerInputsWeights | None,
    x_NH: Tensor,
    lanes: DecodeLanes | PrefillLanes,
    launch: DecodeLaunch | PrefillLaunch,
    config: Composition,
) -> Tensor | None:
    """Inputs `[N, L, 2 * S]` of all layers, of the lanes' embeddings; None: layers have none."""
    if weights is None:
        return None
    own = next(each.size for each in blocks_of(config) if isinstance(each, LayerInput))
    return weights.made(x_NH, lanes.token, lanes.slot, launch, own)


def with_memory(
    steps: Sequence[Step],
    states: StateTensors,
    inputs: Tensor | None,
    like: Tensor,
    lanes: int | None = None,
) -> Iterator[tuple[Step, Memory]]:
    """Each block with its per-sequence memory.

    inputs  `[N, L, 2 * S]`, of layers that have some
    like    in the dtype of products, on their device
    lanes   of a decode step; None: of a chunk
    """
    caches = (PagedMemory(*pair) for pair in states.paged())
    # Keys and values that layers lend to later ones, by window.
    kept: dict[int, PagedMemory] = {}
    for step in steps:
        memory: Memory = None
        block = step.block
        if isinstance(block, AttentionWeights) and block.block.reuses:
            memory = kept[window_of(block.block)]
        elif isinstance(block, AttendingWeights):
            memory = next(caches)
            if isinstance(block, AttentionWeights) and block.block.lends:
                size = block.block.qkv_size
                made = None if lanes is None else like.new_empty(lanes, size)
                memory = memory._replace(lent=Lent(block, made))
                kept[window_of(block.block)] = memory
        elif isinstance(block, RecurringWeights):
            memory = {
                name: state
                for (layer, name), state in states.recurrent.items()
                if layer == step.layer
            }
        elif isinstance(block, LayerInputWeights):
            memory = input_of(step, inputs)
        yield step, memory


def input_of(step: Step, inputs: Tensor | None) -> Tensor:
    """`[N, 2 * S]`: the input of the step's layer after room for its gates."""
    assert inputs is not None, "layers have inputs"
    return inputs[:, step.layer]
