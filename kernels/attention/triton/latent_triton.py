"""The Triton kernels of `latent.py` and `latent_prefill.py`, and functions that those of
`latent_decode.py` share.

Letters: Q heads, R values of a latent, P values of a rotated key, X values of a query.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.chunks import chunk_of_tile
from graphengine.kernels.core.paged import cache_offsets
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.norm_rope.rope import scale_head


@triton.jit(do_not_specialize=["position_limit"])
def latent_append_kernel(
    q_ptr,
    latent_ptr,
    norm_weight_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    q_stride,
    latent_stride,
    kv_block_stride,
    table_stride,
    position_limit,
    eps,
    Q: tl.constexpr,
    X: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, 0) append; programs (lane, 1 + i) rotate BLOCK_HEADS queries each."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    # Loaded together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + lane)
    position = tl.load(position_ptr + lane)
    if slot < 0:
        return
    inside = (position >= 0) & (position < position_limit)
    pair = tl.arange(0, PAIRS_PADDED)
    is_pair = pair < P // 2
    # A position without an angle gives NaN queries: a visible error, not an out-of-bounds read.
    angle = position.to(tl.int64) * (P // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=is_pair & inside, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + angle, mask=is_pair & inside, other=float("nan"))[None, :]

    if tl.program_id(1) == 0:
        if not inside:
            return
        table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
        entry = cache_offsets(table_row_ptr, position, inside, kv_block_stride, BLOCK_SIZE, R + P)
        column = tl.arange(0, RANK_PADDED)
        is_column = column < R
        source = latent_ptr + lane * latent_stride
        x = tl.load(source + column, mask=is_column, other=0.0)
        weight = tl.load(norm_weight_ptr + column, mask=is_column, other=0.0)
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / R + eps)
        normed = scale_head(wide, scale, weight, x.dtype)
        tl.store(kv_ptr + entry + column, normed.to(x.dtype), mask=is_column)
        one = tl.zeros([1], tl.int32)[:, None]
        _rotate_neighbours(
            source + R + one, kv_ptr + entry + R + one, is_pair[None, :], pair, cos, sin
        )
    else:
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate_neighbours(
            q_ptr + lane * q_stride + (head * X + X - P)[:, None],
            out_ptr + lane * (Q * (R + P)) + (head * (R + P) + R)[:, None],
            (head < Q)[:, None] & is_pair[None, :],
            pair,
            cos,
            sin,
        )


@triton.jit
def _rotate_neighbours(source_ptrs, target_ptrs, mask, pair, cos, sin):
    """Turn the pairs (2i, 2i + 1) of heads that start at `source_ptrs` [heads, 1]."""
    first = tl.load(source_ptrs + 2 * pair[None, :], mask=mask, other=0.0)
    second = tl.load(source_ptrs + 2 * pair[None, :] + 1, mask=mask, other=0.0)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    tl.store(target_ptrs + 2 * pair[None, :], (x * cos - y * sin).to(first.dtype), mask=mask)
    tl.store(target_ptrs + 2 * pair[None, :] + 1, (y * cos + x * sin).to(first.dtype), mask=mask)


@triton.jit(do_not_specialize=["lanes", "position_limit"])
def latent_attention_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    query_start_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    lanes,
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
    PROMPTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per tile of ROWS rows (tokens x heads) of a chunk.

    A chunk's last tiles have the most keys and start first.
    """
    wait_for_inputs(PDL)
    first, end_row = _rows_of_tile(query_start_ptr, lanes, Q, ROWS, PROMPTS)
    if first >= end_row:
        return
    row = first + tl.arange(0, ROWS)
    lane = row // Q
    slot = tl.load(slot_ptr + lane, mask=row < end_row, other=-1)
    position = tl.load(position_ptr + lane, mask=row < end_row, other=0)
    # A chunk's live lanes come first, and have one slot.
    chunk_slot = tl.max(slot, axis=0)
    if chunk_slot < 0:
        return
    inside = (slot >= 0) & (position >= 0) & (position < position_limit)
    # Every row sees the first key, so that no largest score is -inf.
    last_seen = tl.where(inside, position, 0)
    end = tl.max(tl.where(inside, position + 1, 0), axis=0)

    # One comparison with a scalar takes fewer registers than the slots of all rows.
    live = row < first + tl.sum((slot >= 0).to(tl.int32), axis=0)
    row = row.to(tl.int64)
    column = tl.arange(0, RANK_PADDED)
    turned = tl.arange(0, ROTATED_PADDED)
    q = load_queries(q_ptr, row, live, column, turned, R, P)
    table_row_ptr = block_table_ptr + chunk_slot.to(tl.int64) * table_stride
    state = no_keys(ROWS, RANK_PADDED)
    for start in tl.range(0, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        # In place of tokens past the end the last one is loaded: weights are 0, and masks would
        # take registers.
        last = tl.minimum(token, end - 1)
        entries = load_entries(
            kv_ptr, table_row_ptr, last, None, kv_block_stride, column, turned, R, P, BLOCK_SIZE
        )
        seen = token[None, :] <= last_seen[:, None]
        state = attend_tile(q, entries, seen, state, scale_log2)
    acc, _, total = state
    result = tl.where(inside[:, None], acc / total[:, None], float("nan"))
    out_ptrs = out_ptr + row[:, None] * R + column[None, :]
    tl.store(out_ptrs, result, mask=live[:, None] & (column < R)[None, :])


@triton.jit
def _rows_of_tile(
    query_start_ptr, lanes, Q: tl.constexpr, ROWS: tl.constexpr, PROMPTS: tl.constexpr
):
    """The first row of the program's tile, and the row where its chunk ends."""
    first, count, tile = 0, lanes * Q, tl.num_programs(0) - 1 - tl.program_id(0)
    if query_start_ptr is not None:
        _, first, count, tile = chunk_of_tile(query_start_ptr, tile, PROMPTS, ROWS, 1, ROWS=Q)
    return first + tile * ROWS, first + count


@triton.jit
def load_queries(q_ptr, row, live, column, turned, R: tl.constexpr, P: tl.constexpr):
    """Load the queries of rows (lanes x heads): [rows, R'] for latents, [rows, P'] for rotated
    keys; 0 for rows that are not live.
    """
    q_ptrs = q_ptr + row[:, None] * (R + P)
    q = tl.load(q_ptrs + column[None, :], mask=live[:, None] & (column < R)[None, :], other=0.0)
    q_turned = tl.load(
        q_ptrs + R + turned[None, :], mask=live[:, None] & (turned < P)[None, :], other=0.0
    )
    return q, q_turned


@triton.jit
def load_entries(
    kv_ptr,
    table_row_ptr,
    token,
    end,
    kv_block_stride,
    column,
    turned,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Load latents [tokens, R'] and rotated keys [tokens, P']; 0 for tokens from `end` on.

    Without an `end` every token must be one of the slot's.
    """
    seen = tl.full([token.shape[0]], 1, tl.int1)
    if end is not None:
        seen = token < end
    entry = cache_offsets(table_row_ptr, token, seen, kv_block_stride, BLOCK_SIZE, R + P)
    ptrs = kv_ptr + entry[:, None]
    latents = tl.load(
        ptrs + column[None, :],
        mask=seen[:, None] & (column < R)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    rotated = tl.load(
        ptrs + R + turned[None, :],
        mask=seen[:, None] & (turned < P)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return latents, rotated


@triton.jit
def no_keys(ROWS: tl.constexpr, RANK_PADDED: tl.constexpr):
    """The state of `attend_tile` before the first key: weighted latents, largest score, sum."""
    return (
        tl.zeros([ROWS, RANK_PADDED], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )


@triton.jit
def attend_tile(q, entries, seen, state, scale_log2):
    """Add one tile of keys to the state. Entries are keys and values; `seen`, [rows or 1, keys],
    says which keys count.

    Each row must see a key of its first tile. A tile of which it sees no key leaves its state as it
    is, bit for bit. Scores are in log2 units.
    """
    latents, rotated = entries
    acc, largest, total = state
    scores = tl.dot(q[0], tl.trans(latents), input_precision="ieee")
    scores = tl.dot(q[1], tl.trans(rotated), scores, input_precision="ieee")
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    acc *= rescale[:, None]
    acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision="ieee")
    return acc, new_largest, total * rescale + tl.sum(weights, axis=1)
