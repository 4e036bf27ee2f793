"""The Triton kernels of `latent.py`.

Letters: Q heads, R values of a latent, P values of a rotated key, X values of a query.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    # A position without an angle gives NaN queries: an error that shows, not a read beyond.
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


@triton.jit(do_not_specialize=["position_limit"])
def latent_attention_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    arrivals_ptr,
    part_ptr,
    out_ptr,
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
    LEAST_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, tile of ROWS heads, split). Key and value are one read of an entry."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(slot_ptr + lane)
    position = tl.load(position_ptr + lane)
    if slot < 0:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (row < Q)[:, None]
    column = tl.arange(0, RANK_PADDED)
    turned = tl.arange(0, ROTATED_PADDED)
    out_ptrs = out_ptr + lane * (Q * R) + row[:, None] * R + column[None, :]
    out_mask = is_row & (column < R)[None, :]
    if (position < 0) | (position >= position_limit):
        tl.store(out_ptrs, float("nan"), mask=out_mask & (split == 0))
        return

    keys = position + 1
    first = 0
    end = keys
    used = 1
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), TILE) * TILE, LEAST_SPLIT)
        used = tl.cdiv(keys, share)
        if split >= used:
            return
        first = split * share
        end = tl.minimum(first + share, keys)

    q_ptrs = q_ptr + lane * (Q * (R + P)) + row[:, None] * (R + P)
    q = tl.load(q_ptrs + column[None, :], mask=out_mask, other=0.0)
    q_turned_mask = is_row & (turned < P)[None, :]
    q_turned = tl.load(q_ptrs + R + turned[None, :], mask=q_turned_mask, other=0.0)
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    # The first key of a tile is never past the end: no maximum is -inf.
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        seen = token < end
        entry = cache_offsets(table_row_ptr, token, seen, kv_block_stride, BLOCK_SIZE, R + P)
        entry_ptrs = kv_ptr + entry[:, None]
        latents = tl.load(
            entry_ptrs + column[None, :], mask=seen[:, None] & (column < R)[None, :], other=0.0
        )
        rotated = tl.load(
            entry_ptrs + R + turned[None, :], mask=seen[:, None] & (turned < P)[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(rotated), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision="ieee")
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max

    # Not one `if`: where nothing is split there are no parts.
    if SPLITS > 1:  # noqa: SIM102
        if used > 1:
            unit = lane * tl.num_programs(1) + tl.program_id(1)
            parts_ptr = part_ptr + unit * (SPLITS * (RANK_PADDED + 2) * ROWS)
            _store_part(parts_ptr, split, acc, running_max, running_sum, ROWS, RANK_PADDED)
            # The barrier puts the stores of the whole program before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel") < used - 1:
                return
            tl.store(arrivals_ptr + unit, 0)
            acc, running_sum = _merge_parts(parts_ptr, used, ROWS, RANK_PADDED)
    tl.store(out_ptrs, acc / running_sum[:, None], mask=out_mask)


@triton.jit
def _store_part(
    parts_ptr, split, acc, largest, total, ROWS: tl.constexpr, RANK_PADDED: tl.constexpr
):
    """What a split found: weighted latents, and for each head its largest score and its sum."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, RANK_PADDED)
    own_ptr = parts_ptr + split * ((RANK_PADDED + 2) * ROWS)
    tl.store(own_ptr + row[:, None] * RANK_PADDED + column[None, :], acc)
    tl.store(own_ptr + RANK_PADDED * ROWS + row, largest)
    tl.store(own_ptr + (RANK_PADDED + 1) * ROWS + row, total)


@triton.jit
def _merge_parts(parts_ptr, used, ROWS: tl.constexpr, RANK_PADDED: tl.constexpr):
    """Weighted latents and sums of `used` splits, weighed by their largest scores, in order."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, RANK_PADDED)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    for split in tl.range(0, used, 1):
        own_ptr = parts_ptr + split * ((RANK_PADDED + 2) * ROWS)
        largest = tl.load(own_ptr + RANK_PADDED * ROWS + row, cache_modifier=".cg")
        total = tl.load(own_ptr + (RANK_PADDED + 1) * ROWS + row, cache_modifier=".cg")
        latents = tl.load(
            own_ptr + row[:, None] * RANK_PADDED + column[None, :], cache_modifier=".cg"
        )
        new_max = tl.maximum(running_max, largest)
        rescale = tl.exp2(running_max - new_max)
        weight = tl.exp2(largest - new_max)
        acc = acc * rescale[:, None] + latents * weight[:, None]
        running_sum = running_sum * rescale + total * weight
        running_max = new_max
    return acc, running_sum
