"""Prefill attention over the paged cache: the query tokens of prompt chunks, causal.

FlashAttention-2 (Dao 2023) on a paged cache, as vLLM's and FlashInfer's prefill kernels do. The
rows of a tile are tokens x the query heads of one kv head (GQA), so that short chunks fill a tile
and keys are read once for the whole group. Key tiles start at position 0 and have a size fixed by
dtype and head_dim: a token's bits are a function of its position and its keys, not of how its
prompt was cut into chunks, nor of the other segments.

Letters: N lanes (tokens) of a launch, P segments, S slots, B blocks of a slot's table,
Q query heads, G kv heads, D head_dim. `paged.py` has the cache's layout.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.attention import attend_tile, check_query, key_tile, padded_dim
from graphengine.kernels.dispatch import use_triton
from graphengine.kernels.lanes import check_lanes
from graphengine.kernels.paged import (
    cache_offsets,
    checked_output,
    gather_cache,
    token_capacity,
)


def paged_prefill_attention(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token of each segment attends its slot's keys 0..its own position.

    Segment p is lanes query_start[p] .. query_start[p + 1] - 1, consecutive tokens of slot_P[p],
    the first of them at position_P[p]. Keys and values of the segment itself were appended before.

    Args:
        q_NQD: [N, Q, D], heads dense, any stride on lanes. Q is a multiple of the cache's G.
        kv: one layer's cache, in q's dtype. block_table_SB: int32.
        query_start_P1: int32 [P + 1], each at most N. slot_P: int32 [P], -1 = padded segment, whose
            other numbers are not read. position_P: int32 [P]. All on the device.
        scale: factor on the scores, 1/sqrt(D) as a rule.
        out: [N, Q * D] in q's dtype; may not share memory with q or kv.

    Returns:
        [N, Q * D] in q's dtype; softmax and sums in float32. Lanes in no segment are not written.
        Tokens past their block table are NaN.
    """
    lanes, heads, head_dim = check_query(q_NQD, kv, block_table_SB)
    segments = slot_P.shape[0]
    check_lanes(segments, slot_P=slot_P, position_P=position_P)
    check_lanes(segments + 1, query_start_P1=query_start_P1)
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    if not use_triton(q_NQD):
        return paged_prefill_attention_reference(
            q_NQD,
            kv,
            block_table_SB,
            query_start_P1=query_start_P1,
            slot_P=slot_P,
            position_P=position_P,
            scale=scale,
            out=out,
        )
    block_size, kv_heads = kv.shape[2:4]
    dim_padded = padded_dim(head_dim)
    rows = _query_rows(q_NQD.dtype)
    _prefill_kernel[(triton.cdiv(lanes * (heads // kv_heads), rows), segments, kv_heads)](
        q_NQD,
        kv,
        block_table_SB,
        query_start_P1,
        slot_P,
        position_P,
        out,
        scale * math.log2(math.e),
        q_NQD.stride(0),
        kv.stride(0),
        block_table_SB.stride(0),
        token_capacity(kv, block_table_SB),
        Q=heads,
        G=kv_heads,
        D=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=key_tile(q_NQD.dtype, dim_padded),
        num_warps=4,
        num_stages=2,
    )
    return out


def _query_rows(dtype: torch.dtype) -> int:
    """Rows (tokens x heads) of a tile. float32 runs on plain FMA units and spills beyond 32."""
    return 32 if dtype == torch.float32 else 64


@triton.jit(do_not_specialize=["position_limit"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    query_start_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    scale_log2,
    q_stride,
    kv_block_stride,
    table_stride,
    position_limit,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a tile of (token, head of the group) rows, segment and kv head."""
    segment = tl.program_id(1)
    kv_head = tl.program_id(2)
    slot = tl.load(slot_ptr + segment)
    if slot < 0:
        return
    first_lane = tl.load(query_start_ptr + segment)
    tokens = tl.load(query_start_ptr + segment + 1) - first_lane
    GROUP: tl.constexpr = Q // G
    first_row = tl.program_id(0) * ROWS
    if first_row >= tokens * GROUP:
        return
    first_position = tl.load(position_ptr + segment)

    row = first_row + tl.arange(0, ROWS)
    row_token = row // GROUP
    row_mask = row_token < tokens
    row_position = first_position + row_token
    head = kv_head * GROUP + row % GROUP
    lane = (first_lane + row_token).to(tl.int64)
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < D
    mask = row_mask[:, None] & dim_mask[None, :]
    q = tl.load(q_ptr + (lane * q_stride + head * D)[:, None] + dim[None, :], mask=mask, other=0.0)

    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    # Keys behind the last token of this tile are of no use to any of its rows.
    last_token = tl.minimum(tokens - 1, (first_row + ROWS - 1) // GROUP)
    end = tl.minimum(first_position + last_token + 1, position_limit)
    for start in range(0, end, TILE):
        token = start + tl.arange(0, TILE)
        token_mask = token < end
        entry = cache_offsets(table_row_ptr, token, token_mask, kv_block_stride, BLOCK_SIZE, G * D)
        running_max, running_sum, acc = attend_tile(
            q,
            kv_ptr + (entry + kv_head * D)[:, None] + dim[None, :],
            token_mask[:, None] & dim_mask[None, :],
            token_mask[None, :] & (token[None, :] <= row_position[:, None]),
            scale_log2,
            running_max,
            running_sum,
            acc,
            BLOCK_SIZE * G * D,
        )

    result = acc / running_sum[:, None]
    inside = (row_position >= 0) & (row_position < position_limit)
    result = tl.where(inside[:, None], result, float("nan"))
    target = out_ptr + (lane * (Q * D) + head * D)[:, None] + dim[None, :]
    tl.store(target, result, mask=mask)


def paged_prefill_attention_reference(
    q_NQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    *,
    query_start_P1: torch.Tensor,
    slot_P: torch.Tensor,
    position_P: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_prefill_attention` in plain PyTorch, a segment at a time."""
    lanes, heads, head_dim = q_NQD.shape
    out = checked_output(out, (lanes, heads * head_dim), like=q_NQD)
    starts = query_start_P1.tolist()
    for segment, (slot, first_position) in enumerate(
        zip(slot_P.tolist(), position_P.tolist(), strict=True)
    ):
        first, last = starts[segment], starts[segment + 1]
        if slot < 0 or last <= first:
            continue
        out[first:last] = _segment_reference(
            q_NQD[first:last], kv, block_table_SB, slot, first_position, scale
        ).to(out.dtype)
    return out


def _segment_reference(
    q_TQD: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot: int,
    first_position: int,
    scale: float,
) -> torch.Tensor:
    """Float32 [T, Q * D] for the T tokens of one segment."""
    tokens, heads, head_dim = q_TQD.shape
    capacity = token_capacity(kv, block_table_SB)
    position_T = first_position + torch.arange(tokens, device=q_TQD.device)
    length = min(first_position + tokens, capacity)
    keys, values = gather_cache(kv, block_table_SB, slot, max(length, 0))
    group = heads // keys.shape[1]
    key_position = torch.arange(len(keys), device=q_TQD.device)
    hidden = key_position[None, :] > position_T[:, None]

    q = q_TQD.float().transpose(0, 1)
    keys = keys.transpose(0, 1).repeat_interleave(group, dim=0)
    values = values.transpose(0, 1).repeat_interleave(group, dim=0)
    scores = (q @ keys.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
    result = (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)
    outside = (position_T < 0) | (position_T >= capacity)
    return result.masked_fill(outside[:, None, None], math.nan).reshape(tokens, heads * head_dim)
