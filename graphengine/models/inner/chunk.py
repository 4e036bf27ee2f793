"""A chunk of a few lanes through a decoder, by the kernels with which decode steps multiply.

With few lanes a product takes as long as reading its weight, and every operation between products
costs a launch. The products of decode have norms, activations and sums folded in.

Letters: N lanes, Q query heads, D head_dim.
"""

from __future__ import annotations

from typing import cast

from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from graphengine.models.blocks.gqa import AttentionWeights, PagedMemory
from graphengine.models.blocks.swiglu import SwigluWeights
from graphengine.models.contract import Model
from graphengine.models.decoder import DecoderModel
from graphengine.models.decoder_steps import with_memory
from graphengine.models.launches import ChunkAttention, DecodeLaunch
from graphengine.models.states import StateTensors


def decode_chunk(
    model: Model,
    lanes: PrefillLanes,
    residual: Residual,
    states: StateTensors,
    attention: ChunkAttention,
    launch: DecodeLaunch,
    *,
    states_alone: bool = False,
) -> Residual:
    """The stream after all layers, scaled for the final norm: six launches a layer.

    All lanes' keys and values are in the cache before any lane attends, so `attention` may let
    them see each other.

    model      a decoder of plain grouped-query attention and gated feed-forwards
    residual   scaled for the first norm; updated in place but for its squares
    attention  of the lanes, over one layer's cache
    launch     with plans for as many lanes
    states_alone  whether only keys and values are wanted: the stream ends before the last ones
    """
    assert isinstance(model, DecoderModel), f"{type(model)=}"
    slot, rows = lanes.slot, DecodeLanes(lanes.token, lanes.slot, lanes.position)
    last = model.steps[-1].layer
    memory_of = with_memory(model.steps, states, None, residual.scaled, len(residual.x))
    for step, memory in memory_of:
        block = step.block
        if isinstance(block, SwigluWeights):
            residual = block.decode(rows, residual, step.next_norm, launch)
            continue
        assert isinstance(block, AttentionWeights), f"{type(block)=}"
        cache, table, _ = cast("PagedMemory", memory)
        heads, size = block.block.num_heads, block.block.q_size
        qkv = block.qkv_product(residual, slot, launch)
        placed = slot, lanes.position, cache, table, step.tables
        queries = block.append(qkv, heads, *placed, launch)
        if states_alone and step.layer == last:
            break
        attended = attention(
            queries,
            cache,
            block_table_SB=table,
            scale=block.block.scale,
            out=qkv.new_empty(len(qkv), size),
        )
        residual = block.add(attended, residual, step.next_norm, slot, launch)
    return residual
