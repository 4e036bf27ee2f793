"""The Triton kernel of `prefill.py`: its programs, and what they leave each other."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.core.paged import (
    cache_offsets,
)
from graphengine.kernels.core.pdl import wait_for_inputs

LOG2E = tl.constexpr(1.4426950408889634)
# Below any score, and finite: -inf less itself is NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["position_limit"])
def prefill_attention_kernel(
    q_ptr,
    kv_ptr,
    block_table_ptr,
    query_start_ptr,
    slot_ptr,
    position_ptr,
    seen_ptr,
    kv_scales_ptr,
    sinks_ptr,
    out_ptr,
    part_ptr,
    arrivals_ptr,
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
    STAGES: tl.constexpr,
    SHARES: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a kv head, tile of (token, head of the group) rows, segment, and split of keys.

    The last tiles of a segment have most keys and start first, as do the first keys of all. SPLITS
    of SHARES are launched: as many as a block table, or a window, has keys for, which no token's
    bits know of.
    """
    kv_head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    segments = tl.num_programs(2) // SPLITS
    segment = tl.program_id(2) % segments
    split = tl.program_id(2) // segments
    wait_for_inputs(PDL)
    # Loaded together: one after the other would cost more trips to L2.
    slot = tl.load(slot_ptr + segment)
    first_position = tl.load(position_ptr + segment)
    first_lane = tl.load(query_start_ptr + segment)
    tokens = tl.load(query_start_ptr + segment + 1) - first_lane
    GROUP: tl.constexpr = Q // G
    if (slot < 0) | (first_row >= tokens * GROUP):
        return

    row = first_row + tl.arange(0, ROWS)
    row_token = row // GROUP
    row_position = first_position + row_token
    head = kv_head * GROUP + row % GROUP
    lane = (first_lane + row_token).to(tl.int64)
    dim = tl.arange(0, DIM_PADDED)
    mask = (row_token < tokens)[:, None] & (dim < D)[None, :]
    q = tl.load(q_ptr + (lane * q_stride + head * D)[:, None] + dim[None, :], mask=mask, other=0.0)

    if FP8:
        scale_log2 *= tl.load(kv_scales_ptr + kv_head)
    if SOFTCAP > 0:
        # The loop's scores are tangents then, and this their scale.
        inner_scale = scale_log2 * (1.0 / (SOFTCAP * LOG2E))
        scale_log2 = tl.full([], SOFTCAP * LOG2E, tl.float32)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    # One split has the sinks. Not one `if`: a kernel without them has no such comparison.
    if sinks_ptr is not None:  # noqa: SIM102
        if split == 0:
            running_max = tl.load(sinks_ptr + head) * LOG2E / scale_log2
            running_sum += 1.0
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    # No row of this tile attends to keys after the tile's last token.
    last_token = tl.minimum(tokens - 1, (first_row + ROWS - 1) // GROUP)
    end = tl.minimum(first_position + last_token + 1, position_limit)
    # Keys before this are seen by all rows, and each row sees none after its last one.
    common_end = tl.minimum(first_position + first_row // GROUP + 1, end)
    row_last = row_position
    if seen_ptr is not None:
        end = tl.minimum(tl.load(seen_ptr + segment), position_limit)
        common_end = end
        row_last = tl.zeros([ROWS], tl.int32) + (end - 1)
    key_ptr = kv_ptr + kv_head * D
    first_key = 0
    end_key = end
    if WINDOW:
        # Tiles before the window of the tile's first token are not read.
        first_seen = tl.maximum(first_position + first_row // GROUP - (WINDOW - 1), 0)
        first_key = first_seen // TILE * TILE
        # Keys from here on are in the window of its last one.
        last_seen = first_position + last_token - (WINDOW - 1)
    first_tile = first_key
    used = 1
    if SPLITS > 1:
        # The same for all tiles of the segment, however many of its lanes are live.
        reach = first_position + tl.num_programs(1) * ROWS // GROUP
        if seen_ptr is not None:
            reach = end
        elif WINDOW:
            # The most keys from the first tile's first one to the last row's token.
            reach = tl.minimum(reach, WINDOW + ROWS // GROUP + 1 + TILE)
        split_keys = tl.maximum(tl.cdiv(tl.cdiv(reach, SHARES), TILE) * TILE, LEAST_SPLIT)
        used = tl.maximum(tl.cdiv(end - first_tile, split_keys), 1)
        if split >= used:
            return
        first_key = first_tile + split * split_keys
        end_key = tl.minimum(first_key + split_keys, end)
    for start in tl.range(first_key, end_key, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        token_mask = token < end
        if WINDOW:
            token_mask &= token >= first_seen
        entry = cache_offsets(table_row_ptr, token, token_mask, kv_block_stride, BLOCK_SIZE, G * D)
        key_ptrs = key_ptr + entry[:, None] + dim[None, :]
        load_mask = token_mask[:, None] & (dim < D)[None, :]
        keys = tl.load(key_ptrs, mask=load_mask, other=0.0)
        if FP8:
            keys = keys.to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFTCAP > 0:
            scores = tanh(scores * inner_scale)
        if WINDOW:
            if (start + TILE > common_end) | (start < last_seen):
                seen = token_mask[None, :] & (token[None, :] <= row_last[:, None])
                seen &= token[None, :] > row_position[:, None] - WINDOW
                scores = tl.where(seen, scores, float("-inf"))
        elif start + TILE > common_end:
            seen = token_mask[None, :] & (token[None, :] <= row_last[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        # The maximum stays in the scores' own units: scaled and subtracted in one operation.
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        if SPLITS > 1 or WINDOW > 0:
            # A row may see no key of its split, or of a tile before its window: its weights are 0
            # then, and never NaN.
            new_max = tl.maximum(new_max, LOWEST)
        weights = tl.exp2(tl.fma(scores, scale_log2, -(new_max * scale_log2)[:, None]))
        rescale = tl.exp2((running_max - new_max) * scale_log2)
        values = tl.load(key_ptrs + BLOCK_SIZE * G * D, mask=load_mask, other=0.0)
        if FP8:
            values = values.to(q.dtype)
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max

    # Not one `if`: where nothing is split there are no parts.
    if SPLITS > 1:  # noqa: SIM102
        if used > 1:
            unit = (segment * tl.num_programs(1) + tl.program_id(1)) * G + kv_head
            part = (unit * SPLITS).to(tl.int64) * ((DIM_PADDED + 2) * ROWS)
            parts_ptr = part_ptr + part
            _store_part(parts_ptr, split, acc, running_max, running_sum, ROWS, DIM_PADDED)
            # The barrier puts the stores of the whole program before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel") < used - 1:
                return
            tl.store(arrivals_ptr + unit, 0)
            acc, running_sum = _merge_parts(parts_ptr, used, scale_log2, ROWS, DIM_PADDED)

    result = acc * (1.0 / running_sum)[:, None]
    if FP8:
        result *= tl.load(kv_scales_ptr + G + kv_head)
    inside = (row_position >= 0) & (row_position < position_limit)
    result = tl.where(inside[:, None], result, float("nan"))
    target = out_ptr + (lane * (Q * D) + head * D)[:, None] + dim[None, :]
    tl.store(target, result, mask=mask)


@triton.jit
def _store_part(
    parts_ptr, split, acc, largest, total, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """What a split found: weighted values, and for each row its largest score and its sum."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    own_ptr = parts_ptr + split * ((DIM_PADDED + 2) * ROWS)
    tl.store(own_ptr + row[:, None] * DIM_PADDED + dim[None, :], acc)
    tl.store(own_ptr + DIM_PADDED * ROWS + row, largest)
    tl.store(own_ptr + (DIM_PADDED + 1) * ROWS + row, total)


@triton.jit
def _merge_parts(parts_ptr, used, scale_log2, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Weighted values and sums of `used` splits, weighed by their largest scores, in order.

    Loads of 4 bytes go through L1 when they are pipelined, whatever is asked. It holds no part: the
    launch reads none before, and the counter's acquire comes in front.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for split in tl.range(0, used, 1, num_stages=4):
        own_ptr = parts_ptr + split * ((DIM_PADDED + 2) * ROWS)
        largest = tl.load(own_ptr + DIM_PADDED * ROWS + row, cache_modifier=".cg")
        total = tl.load(own_ptr + (DIM_PADDED + 1) * ROWS + row, cache_modifier=".cg")
        values = tl.load(own_ptr + row[:, None] * DIM_PADDED + dim[None, :], cache_modifier=".cg")
        new_max = tl.maximum(running_max, largest)
        rescale = tl.exp2((running_max - new_max) * scale_log2)
        weight = tl.exp2((largest - new_max) * scale_log2)
        acc = acc * rescale[:, None] + values * weight[:, None]
        running_sum = running_sum * rescale + total * weight
        running_max = new_max
    return acc, running_sum
