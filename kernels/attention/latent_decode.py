"""Decode attention over latents, and the product that turns its sums into values.

It takes two launches. In the first one programs attend splits of a lane's keys and leave partial
results (FlashDecoding; Dao, Haziza, Massa, Sizov 2023). In the second one a program combines a
head's partial results and multiplies by rows of its weight. No program waits for another, and all
programs share the product.

Slots, positions, cache entries and weights are loaded before the launch waits. A split's length
follows from the lane's own position; tiles of keys are counted from position 0.

Letters as in `latent.py`, and: C splits, V values of a head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.attention.head_product import head_product_reference
from graphengine.kernels.attention.latent import (
    LATENT_TILE,
    LatentTiles,
    check_latent_query,
    latent_shape,
)
from graphengine.kernels.attention.latent_reference import latent_attention_reference
from graphengine.kernels.attention.triton.latent_triton import (
    attend_tile,
    load_entries,
    load_queries,
    no_keys,
)
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import checked_output, token_capacity
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.linear.plans import dot_columns

# Splits of a lane's keys; each head has as many partial results.
_SPLITS = 32
# Partial results of a head that are loaded at once.
_PARTS = 8
_BLOCK_V = 32
# Heads of a program, at most.
_MAX_ROWS = 64


def latent_values(
    q_NQE: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    weight_QVR: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Run `latent_attention`, then multiply each head's sums [R] by its weight [V, R].

    Args:
        q_NQE: [N, Q, R + P], dense.
        kv: one layer's cache, in q's dtype, which holds the lanes' own entries.
        block_table_SB: int32. slot_N: int32, -1 = padded lane. position_N: int32, absolute.
        weight_QVR: in q's dtype, R dense, any stride on heads and values.
        scale: factor on the scores, above 0.
        out: [N, Q, V] in q's dtype; may share no memory with any other argument.
        pdl: the launch before, whatever it is, may still run. Slots, positions and the cache must
            have been written at least two launches earlier.

    Returns:
        [N, Q, V] in q's dtype, rounded once: sums of attention stay in float32. Only the slot of a
        padded lane is read, and nothing is written for it. A live lane whose position is negative
        or past its block table is NaN. A lane's bits depend neither on other lanes nor on N.
    """
    values, rank = _check_weight(q_NQE, weight_QVR)
    lanes, heads = check_latent_query(
        q_NQE, kv, block_table_SB, slot_N, position_N, rank=rank, scale=scale
    )
    out = checked_output(out, (lanes, heads, values), like=q_NQE)
    if not use_triton(q_NQE):
        attended = q_NQE.new_empty((lanes, heads, rank))
        latent_attention_reference(
            q_NQE, kv, block_table_SB, slot_N, position_N, rank=rank, scale=scale, out=attended
        )
        return head_product_reference(attended, weight_QVR.transpose(1, 2), slot_N, out=out)
    tiles = _tiles_of(q_NQE.dtype, heads)
    limit = token_capacity(kv, block_table_SB)
    # Uninitialised: programs read only what programs of the same lane wrote.
    acc_NQCR = q_NQE.new_empty((lanes, heads, _SPLITS, rank), dtype=torch.float32)
    largest_NQC = q_NQE.new_empty((lanes, heads, _SPLITS), dtype=torch.float32)
    total_NQC = torch.empty_like(largest_NQC)
    launcher(latent_split_kernel, (lanes, triton.cdiv(heads, tiles.rows), _SPLITS))(
        q_NQE,
        kv,
        block_table_SB,
        slot_N,
        position_N,
        acc_NQCR,
        largest_NQC,
        total_NQC,
        scale * math.log2(math.e),
        kv.stride(0),
        block_table_SB.stride(0),
        limit,
        SPLITS=_SPLITS,
        **latent_shape(q_NQE, kv, rank, tiles),
        **launch_options(pdl),
    )
    block_v = min(_BLOCK_V, triton.next_power_of_2(values))
    launcher(latent_merge_kernel, (heads, triton.cdiv(values, block_v), lanes))(
        acc_NQCR,
        largest_NQC,
        total_NQC,
        weight_QVR,
        slot_N,
        position_N,
        out,
        limit,
        *weight_QVR.stride()[:2],
        Q=heads,
        R=rank,
        V=values,
        RANK_PADDED=dot_columns(rank),
        TILE=tiles.keys,
        SPLITS=_SPLITS,
        PARTS=_PARTS,
        BLOCK_V=block_v,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def latent_values_workspace_bytes(lanes: int, *, num_heads: int, rank: int) -> int:
    """Bytes of workspace of a launch of `lanes` lanes."""
    return lanes * num_heads * _SPLITS * (rank + 2) * 4


def _tiles_of(dtype: torch.dtype, heads: int) -> LatentTiles:
    """The tiles, which fix the order of summation; they depend only on dtype and heads."""
    if dtype.itemsize > 2:
        return LatentTiles(rows=16, keys=LATENT_TILE // 2, warps=8, stages=1)
    rows = min(dot_columns(heads), _MAX_ROWS)
    return LatentTiles(rows=rows, keys=LATENT_TILE, warps=8 if rows == _MAX_ROWS else 4, stages=2)


def _check_weight(q_NQE: torch.Tensor, weight_QVR: torch.Tensor) -> tuple[int, int]:
    """Raise ValueError unless there is a weight for each head; return (V, R)."""
    if weight_QVR.dim() != 3 or len(weight_QVR) != q_NQE.shape[1] or weight_QVR.stride(2) != 1:
        raise ValueError(
            f"the weight must be [Q, V, R] with R dense, for q {tuple(q_NQE.shape)}, not "
            f"{tuple(weight_QVR.shape)} with strides {weight_QVR.stride()}"
        )
    if weight_QVR.dtype != q_NQE.dtype:
        raise ValueError(f"weight is {weight_QVR.dtype}, q {q_NQE.dtype}")
    return weight_QVR.shape[1], weight_QVR.shape[2]


@triton.jit
def _share_of(position, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of each split of a lane, in whole tiles, and how many splits have any."""
    keys = position + 1
    share = tl.cdiv(tl.cdiv(keys, SPLITS), TILE) * TILE
    return share, tl.cdiv(keys, share)


@triton.jit(do_not_specialize=["position_limit"])
def latent_split_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    acc_ptr,
    largest_ptr,
    total_ptr,
    scale_log2,
    kv_block_stride,
    table_stride,
    position_limit,
    Q: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, tile of ROWS heads, split) attend one split each."""
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    # Loaded together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, cache_modifier=".cg")
    inside = (slot >= 0) & (position >= 0) & (position < position_limit)
    position = tl.where(inside, position, 0)
    share, used = _share_of(position, TILE, SPLITS)
    first = split * share
    end = tl.where(inside & (split < used), tl.minimum(first + share, position + 1), 0)
    column = tl.arange(0, RANK_PADDED)
    turned = tl.arange(0, ROTATED_PADDED)
    table_row_ptr = block_table_ptr + tl.maximum(slot, 0).to(tl.int64) * table_stride
    token = first + tl.arange(0, TILE)
    entries = load_entries(
        kv_ptr, table_row_ptr, token, end, kv_block_stride, column, turned, R, P, BLOCK_SIZE
    )

    wait_for_inputs(PDL)
    if end == 0:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q = load_queries(q_ptr, lane * Q + row, row < Q, column, turned, R, P)
    state = attend_tile(q, entries, (token < end)[None, :], no_keys(ROWS, RANK_PADDED), scale_log2)
    for start in tl.range(first + TILE, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        entries = load_entries(
            kv_ptr, table_row_ptr, token, end, kv_block_stride, column, turned, R, P, BLOCK_SIZE
        )
        state = attend_tile(q, entries, (token < end)[None, :], state, scale_log2)
    acc, largest, total = state
    part = (lane * Q + row) * SPLITS + split
    mask = (row < Q)[:, None] & (column < R)[None, :]
    tl.store(acc_ptr + part[:, None] * R + column[None, :], acc, mask=mask)
    tl.store(largest_ptr + part, largest, mask=row < Q)
    tl.store(total_ptr + part, total, mask=row < Q)


@triton.jit(do_not_specialize=["position_limit"])
def latent_merge_kernel(
    acc_ptr,
    largest_ptr,
    total_ptr,
    weight_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    position_limit,
    weight_head_stride,
    weight_value_stride,
    Q: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (head, tile of values, lane) combine partial results in order, PARTS at a time."""
    head = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    lane = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, RANK_PADDED)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, cache_modifier=".cg")
    weight_ptrs = weight_ptr + head * weight_head_stride + value[:, None] * weight_value_stride
    weight_mask = (value < V)[:, None] & (column < R)[None, :]
    weight = tl.load(weight_ptrs + column[None, :], mask=weight_mask, other=0.0)

    wait_for_inputs(PDL)
    if slot < 0:
        return
    out_ptrs = out_ptr + (lane * Q + head) * V + value
    if (position < 0) | (position >= position_limit):
        tl.store(out_ptrs, float("nan"), mask=value < V)
        return
    _, used = _share_of(position, TILE, SPLITS)
    first = (lane * Q + head) * SPLITS
    split = tl.arange(0, SPLITS)
    largest = tl.load(largest_ptr + first + split, mask=split < used, other=float("-inf"))
    total = tl.load(total_ptr + first + split, mask=split < used, other=0.0)
    of_all = tl.max(largest, axis=0)
    sum_of_all = tl.sum(total * tl.exp2(largest - of_all), axis=0)
    sums = tl.zeros([RANK_PADDED], tl.float32)
    for start in range(0, used, PARTS):
        part = start + tl.arange(0, PARTS)
        of_part = tl.load(largest_ptr + first + part, mask=part < used, other=float("-inf"))
        acc = tl.load(
            acc_ptr + (first + part)[:, None] * R + column[None, :],
            mask=(part < used)[:, None] & (column < R)[None, :],
            other=0.0,
        )
        sums += tl.sum(acc * tl.exp2(of_part - of_all)[:, None], axis=0)
    sums /= sum_of_all
    y = tl.sum(weight.to(tl.float32) * sums[None, :], axis=1)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=value < V)
