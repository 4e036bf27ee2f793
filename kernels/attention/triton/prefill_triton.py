"""The Triton kernel of `prefill.py`, including the partial results its programs leave each other.

Letters: M rows (tokens x query heads of one kv head) of a program, Q query heads, G kv heads,
D head_dim, D' padded to what `tl.dot` needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.core.paged import cache_offsets
from graphengine.kernels.core.pdl import wait_for_inputs

LOG2E = tl.constexpr(1.4426950408889634)
# Below any score, and finite because -inf minus itself is NaN.
LOWEST = tl.constexpr(-1.0e30)


class Shape(NamedTuple):
    """Compile-time constants of the kernel."""

    Q: Any
    G: Any
    D: Any
    padded: Any
    """D'"""
    block_size: Any
    group: Any
    """Query heads of a kv head."""
    rows: Any
    """M"""
    tile: Any
    """Keys of a tile."""
    stages: Any
    shares: Any
    """Most parts into which the keys of a tile of rows are split."""
    splits: Any
    """Parts that are launched: as many as there can be keys for."""
    least_split: Any
    """The fewest keys of a part."""
    fp8: Any
    """Whether the cache is of e4m3."""
    window: Any
    """0: a token sees all keys up to its own."""
    softcap: Any


class Segment(NamedTuple):
    """Consecutive tokens of one slot."""

    slot: Any
    """-1 for a padded segment."""
    first_position: Any
    first_lane: Any
    tokens: Any


class Rows(NamedTuple):
    """The M rows of a program. The mask excludes rows past the segment's last token."""

    position: Any
    """int32 [M]"""
    head: Any
    """int32 [M]: the query head."""
    lane: Any
    """int64 [M]"""
    dim: Any
    """int32 [D']"""
    mask: Any
    """bool [M, D']"""


class Keys(NamedTuple):
    """The keys that the rows of a program see, apart from their windows."""

    last_token: Any
    """The last of the segment's tokens that has a row here."""
    end: Any
    """No row sees a key from here on."""
    common_end: Any
    """All rows see the keys below this."""
    row_last: Any
    """int32 [M]: the last key that each row sees."""


class Window(NamedTuple):
    """Where the windows of a program's rows begin; all 0 without a window."""

    first_tile: Any
    """Tiles before this one are not read."""
    first: Any
    """The first key in the window of the first row's token."""
    last: Any
    """Keys from here on are in the window of the last row's token."""


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
    shape,
    PDL: tl.constexpr,
):
    """`_attend` where a segment's tokens see the keys up to their own, or as many as each other."""
    _attend(
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
        shape,
        False,
        PDL,
    )


@triton.jit(do_not_specialize=["position_limit"])
def prefill_images_kernel(
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
    shape,
    PDL: tl.constexpr,
):
    """`_attend` where each lane says how many keys it sees."""
    _attend(
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
        shape,
        True,
        PDL,
    )


@triton.jit
def _attend(
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
    shape,
    BY_LANE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per kv head, tile of (token, head of the group) rows, segment, and split of keys.

    The last tiles of a segment have the most keys and start first; so do the first splits of all
    tiles. Only as many shares are launched as a block table, or a window, has keys for; no token's
    bits depend on it. `seen_ptr` has the number of keys of each lane, or of each segment, or is
    None.
    """
    kv_head = tl.program_id(0)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * shape.rows
    segments = tl.num_programs(2) // shape.splits
    index = tl.program_id(2) % segments
    split = tl.program_id(2) // segments
    wait_for_inputs(PDL)
    segment = _load_segment(index, slot_ptr, position_ptr, query_start_ptr)
    if (segment.slot < 0) | (first_row >= segment.tokens * shape.group):
        return

    rows = _rows_of(segment, kv_head, first_row, shape)
    q_ptrs = q_ptr + (rows.lane * q_stride + rows.head * shape.D)[:, None] + rows.dim[None, :]
    q = tl.load(q_ptrs, mask=rows.mask, other=0.0)
    scale_log2, inner_scale = _score_scales(scale_log2, kv_scales_ptr, kv_head, shape)
    running_max, running_sum = _before_keys(sinks_ptr, rows, split, scale_log2, shape)
    acc = tl.zeros([shape.rows, shape.padded], tl.float32)
    table_row_ptr = block_table_ptr + segment.slot.to(tl.int64) * table_stride
    seen = _keys_of(segment, rows, first_row, index, seen_ptr, BY_LANE, position_limit, shape)
    key_ptr = kv_ptr + kv_head * shape.D
    window = _window_of(segment, seen, first_row, shape)
    first_key = window.first_tile
    end_key = seen.end
    used = 1
    if shape.splits > 1:
        split_keys = _keys_of_split(segment, seen, seen_ptr, BY_LANE, shape)
        used = tl.maximum(tl.cdiv(seen.end - window.first_tile, split_keys), 1)
        if split >= used:
            return
        first_key = window.first_tile + split * split_keys
        end_key = tl.minimum(first_key + split_keys, seen.end)
    for start in tl.range(first_key, end_key, shape.tile, num_stages=shape.stages):
        token = start + tl.arange(0, shape.tile)
        token_mask = token < seen.end
        if shape.window:
            token_mask &= token >= window.first
        entry = cache_offsets(
            table_row_ptr, token, token_mask, kv_block_stride, shape.block_size, shape.G * shape.D
        )
        key_ptrs = key_ptr + entry[:, None] + rows.dim[None, :]
        load_mask = token_mask[:, None] & (rows.dim < shape.D)[None, :]
        keys = _load_cached(key_ptrs, load_mask, q.dtype, shape)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if shape.softcap > 0:
            scores = tanh(scores * inner_scale)
        scores = _seen_scores(scores, start, token, token_mask, rows, seen, window, shape)
        new_max, weights, rescale = _weigh(scores, running_max, scale_log2, shape)
        value_ptrs = key_ptrs + shape.block_size * shape.G * shape.D
        values = _load_cached(value_ptrs, load_mask, q.dtype, shape)
        acc *= rescale[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max

    # Not one `if`: without splits there are no parts to compile for.
    if shape.splits > 1:  # noqa: SIM102
        if used > 1:
            unit = (index * tl.num_programs(1) + tl.program_id(1)) * shape.G + kv_head
            part = (unit * shape.splits).to(tl.int64) * ((shape.padded + 2) * shape.rows)
            parts_ptr = part_ptr + part
            _store_part(parts_ptr, split, acc, running_max, running_sum, shape)
            # The barrier orders the stores of the whole program before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel") < used - 1:
                return
            tl.store(arrivals_ptr + unit, 0)
            acc, running_sum = _merge_parts(parts_ptr, used, scale_log2, shape)

    result = acc * (1.0 / running_sum)[:, None]
    if shape.fp8:
        result *= tl.load(kv_scales_ptr + shape.G + kv_head)
    inside = (rows.position >= 0) & (rows.position < position_limit)
    result = tl.where(inside[:, None], result, float("nan"))
    target = rows.lane * (shape.Q * shape.D) + rows.head * shape.D
    tl.store(out_ptr + target[:, None] + rows.dim[None, :], result, mask=rows.mask)


@triton.jit
def _load_segment(index, slot_ptr, position_ptr, query_start_ptr):
    """Segment number `index` of the launch."""
    # Loaded together: one after the other would cost more trips to L2.
    slot = tl.load(slot_ptr + index)
    first_position = tl.load(position_ptr + index)
    first_lane = tl.load(query_start_ptr + index)
    tokens = tl.load(query_start_ptr + index + 1) - first_lane
    return Segment(slot, first_position, first_lane, tokens)


@triton.jit
def _rows_of(segment, kv_head, first_row, shape):
    """The segment's rows from `first_row` on: each token has a row per head of the group."""
    row = first_row + tl.arange(0, shape.rows)
    token = row // shape.group
    position = segment.first_position + token
    head = kv_head * shape.group + row % shape.group
    lane = (segment.first_lane + token).to(tl.int64)
    dim = tl.arange(0, shape.padded)
    mask = (token < segment.tokens)[:, None] & (dim < shape.D)[None, :]
    return Rows(position, head, lane, dim, mask)


@triton.jit
def _score_scales(scale_log2, kv_scales_ptr, kv_head, shape):
    """Scale of products to log2 units; with a soft cap, scales of tangents and their arguments."""
    if shape.fp8:
        scale_log2 *= tl.load(kv_scales_ptr + kv_head)
    inner_scale = scale_log2
    if shape.softcap > 0:
        inner_scale = scale_log2 * (1.0 / (shape.softcap * LOG2E))
        scale_log2 = tl.full([], shape.softcap * LOG2E, tl.float32)
    return scale_log2, inner_scale


@triton.jit
def _before_keys(sinks_ptr, rows, split, scale_log2, shape):
    """Largest scores and sums of weights [M] before any key; only split 0 has the sinks."""
    running_max = tl.full([shape.rows], float("-inf"), tl.float32)
    running_sum = tl.zeros([shape.rows], tl.float32)
    # Not one `if`: a kernel without sinks has no such comparison.
    if sinks_ptr is not None:  # noqa: SIM102
        if split == 0:
            running_max = tl.load(sinks_ptr + rows.head) * LOG2E / scale_log2
            running_sum += 1.0
    return running_max, running_sum


@triton.jit
def _keys_of(
    segment, rows, first_row, index, seen_ptr, BY_LANE: tl.constexpr, position_limit, shape
):
    """The keys that the rows from `first_row` on see."""
    # No row of this tile attends to keys after the tile's last token.
    last_token = tl.minimum(segment.tokens - 1, (first_row + shape.rows - 1) // shape.group)
    end = tl.minimum(segment.first_position + last_token + 1, position_limit)
    common_end = tl.minimum(segment.first_position + first_row // shape.group + 1, end)
    row_last = rows.position
    if BY_LANE:
        live = rows.position < segment.first_position + segment.tokens
        row_seen = tl.load(seen_ptr + rows.lane, mask=live, other=0)
        end = tl.minimum(tl.max(row_seen, 0), position_limit)
        # Rows past the last token see something, so that nothing becomes NaN.
        row_seen = tl.where(live, row_seen, end)
        common_end = tl.minimum(tl.min(row_seen, 0), end)
        row_last = row_seen - 1
    elif seen_ptr is not None:
        end = tl.minimum(tl.load(seen_ptr + index), position_limit)
        common_end = end
        row_last = tl.zeros([shape.rows], tl.int32) + (end - 1)
    return Keys(last_token, end, common_end, row_last)


@triton.jit
def _window_of(segment, seen, first_row, shape):
    """The windows of the rows from `first_row` on."""
    first_tile = 0
    first = 0
    last = 0
    if shape.window:
        first_token = first_row // shape.group
        first = tl.maximum(segment.first_position + first_token - (shape.window - 1), 0)
        first_tile = first // shape.tile * shape.tile
        last = segment.first_position + seen.last_token - (shape.window - 1)
    return Window(first_tile, first, last)


@triton.jit
def _keys_of_split(segment, seen, seen_ptr, BY_LANE: tl.constexpr, shape):
    """Keys of a split; equal in all tiles of the segment, however many of its lanes are live."""
    reach = segment.first_position + tl.num_programs(1) * shape.rows // shape.group
    if seen_ptr is not None:
        if not BY_LANE:
            reach = seen.end
    elif shape.window:
        # The most keys from the first tile's first one to the last row's token.
        reach = tl.minimum(reach, shape.window + shape.rows // shape.group + 1 + shape.tile)
    share = tl.cdiv(tl.cdiv(reach, shape.shares), shape.tile) * shape.tile
    return tl.maximum(share, shape.least_split)


@triton.jit
def _load_cached(ptrs, mask, dtype: tl.constexpr, shape):
    """Keys or values [tokens, D'] in the queries' dtype."""
    cached = tl.load(ptrs, mask=mask, other=0.0)
    if shape.fp8:
        cached = cached.to(dtype)
    return cached


@triton.jit
def _seen_scores(scores, start, token, token_mask, rows, seen, window, shape):
    """Scores [M, tokens] of a tile that begins at `start`; -inf for keys a row does not see."""
    if shape.window:
        if (start + shape.tile > seen.common_end) | (start < window.last):
            visible = token_mask[None, :] & (token[None, :] <= seen.row_last[:, None])
            visible &= token[None, :] > rows.position[:, None] - shape.window
            scores = tl.where(visible, scores, float("-inf"))
    elif start + shape.tile > seen.common_end:
        visible = token_mask[None, :] & (token[None, :] <= seen.row_last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _weigh(scores, running_max, scale_log2, shape):
    """Largest scores [M] so far, weights [M, tokens], and the factor [M] of earlier weights."""
    # The maximum stays in the scores' own units, so that one operation scales and subtracts.
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    if shape.splits > 1 or shape.window > 0:
        # A row may see no key of its split, or of a tile before its window: its weights must be 0
        # then, not NaN.
        new_max = tl.maximum(new_max, LOWEST)
    weights = tl.exp2(tl.fma(scores, scale_log2, -(new_max * scale_log2)[:, None]))
    return new_max, weights, tl.exp2((running_max - new_max) * scale_log2)


@triton.jit
def _store_part(parts_ptr, split, acc, largest, total, shape):
    """Store a split's weighted values, and for each row its largest score and its sum."""
    row = tl.arange(0, shape.rows)
    dim = tl.arange(0, shape.padded)
    own_ptr = parts_ptr + split * ((shape.padded + 2) * shape.rows)
    tl.store(own_ptr + row[:, None] * shape.padded + dim[None, :], acc)
    tl.store(own_ptr + shape.padded * shape.rows + row, largest)
    tl.store(own_ptr + (shape.padded + 1) * shape.rows + row, total)


@triton.jit
def _merge_parts(parts_ptr, used, scale_log2, shape):
    """Merge the weighted values and sums of `used` splits, weighed by their largest scores, in
    order.

    Pipelined loads of 4 bytes go through L1 despite `.cg`. L1 holds no stale part: the launch reads
    none earlier, and the counter's acquire comes first.
    """
    row = tl.arange(0, shape.rows)
    dim = tl.arange(0, shape.padded)
    running_max = tl.full([shape.rows], LOWEST, tl.float32)
    running_sum = tl.zeros([shape.rows], tl.float32)
    acc = tl.zeros([shape.rows, shape.padded], tl.float32)
    for split in tl.range(0, used, 1, num_stages=4):
        own_ptr = parts_ptr + split * ((shape.padded + 2) * shape.rows)
        largest = tl.load(own_ptr + shape.padded * shape.rows + row, cache_modifier=".cg")
        total = tl.load(own_ptr + (shape.padded + 1) * shape.rows + row, cache_modifier=".cg")
        values = tl.load(own_ptr + row[:, None] * shape.padded + dim[None, :], cache_modifier=".cg")
        new_max = tl.maximum(running_max, largest)
        rescale = tl.exp2((running_max - new_max) * scale_log2)
        weight = tl.exp2((largest - new_max) * scale_log2)
        acc = acc * rescale[:, None] + values * weight[:, None]
        running_sum = running_sum * rescale + total * weight
        running_max = new_max
    return acc, running_sum
