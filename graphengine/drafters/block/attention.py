"""Attention of a block drafter's layers: the keys and values of verified positions, and the blocks.

Letters: N lanes, G kv heads, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.draft.block import BlockDraft
from graphengine.kernels.linear.call import AnyWeight
from graphengine.kernels.linear.epilogues import STORE
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.residual import Residual
from graphengine.models.blocks.gqa import AttentionWeights, GroupedQueryAttention
from graphengine.models.blocks.norms import NextNorm
from graphengine.models.blocks.rope_tables import RopeTables
from graphengine.models.blocks.streams import chunk_product
from graphengine.models.launches import DecodeLaunch, PrefillLaunch


def keep_keys(
    attention: AttentionWeights,
    fed: Tensor,
    slot: Tensor,
    position: Tensor,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch | PrefillLaunch,
) -> None:
    """Write only keys and values, of the lanes of `fed` `[N, fed_columns]`, to `kv` at their
    positions.

    launch  for decode lanes, with a plan of the linear `context`, or for a chunk
    """
    block, bias = attention.block, attention.qkv_bias
    weight = _rows_of_kv(block, attention.qkv)
    bias = None if bias is None else _rows_of_kv(block, bias)
    if isinstance(launch, DecodeLaunch):
        call = launch.call("context", fed, weight, slot, bias=bias)
        made = linear(call, STORE)
    else:
        out = fed.new_empty(len(fed), 2 * block.kv_size)
        made = chunk_product(fed, weight, bias, out=out, pdl=launch.pdl, any_lanes=launch.any_lanes)
    attention.append(made, 0, slot, position, kv, block_table, tables, launch)


def _rows_of_kv(block: GroupedQueryAttention, qkv: AnyWeight) -> Tensor:
    assert isinstance(qkv, Tensor) and not block.gated, "rows in the checkpoint's order"
    return qkv[block.q_size :]


def attend_block(
    attention: AttentionWeights,
    begun: BlockDraft,
    residual: Residual,
    next_norm: NextNorm,
    kv: Tensor,
    block_table: Tensor,
    tables: RopeTables,
    launch: DecodeLaunch,
    *,
    causal: bool,
) -> Residual:
    """Run `AttentionWeights.decode` on draft blocks, whose lanes all see each other unless
    `causal`.

    A row's lanes also see all earlier positions of its slot in `kv`. Four kernels.
    """
    block, lanes = attention.block, begun.lanes
    qkv = attention.qkv_product(residual, lanes.slot, launch)
    heads = attention.append(
        qkv,
        block.num_heads,
        lanes.slot,
        lanes.position,
        kv,
        block_table,
        tables,
        launch,
    )
    attended = paged_prefill_attention(
        heads,
        kv,
        block_table,
        query_start_P1=begun.start,
        slot_P=begun.rows.slot,
        position_P=begun.rows.position,
        seen_P=None if causal else begun.seen,
        scale=block.scale,
        kv_scales=attention.scales_of(kv),
        window=block.window,
        softcap=block.softcap,
        launch=launch,
    )
    return attention.add(attended, residual, next_norm, lanes.slot, launch)
