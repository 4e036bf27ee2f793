"""The Triton kernel of `decode.py`, and the functions it is made of.

Letters: N lanes of a launch, W lanes of a row, Q query heads, G kv heads, D head_dim, D' padded to
what `tl.dot` needs, M query heads of a program. A head has a partial for the token itself and one
for each split. `decode_triton_lanes.py` defines what a lane sees, `decode_triton_heads.py` its
siblings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.attention.triton.decode_triton_heads import (
    insert_sibling_keys,
    insert_sibling_values,
    load_rotation,
    load_sibling_keys,
    of_bytes,
    rotated,
)
from graphengine.kernels.attention.triton.decode_triton_lanes import (
    HeadCache,
    dimensions_of,
    early_split,
    is_seen,
    lane_of_row,
    load_lane,
    load_older,
    tokens_of,
)
from graphengine.kernels.core.paged import cache_offsets, quantised_bits
from graphengine.kernels.core.pdl import wait_for_inputs

LOG2E = tl.constexpr(1.4426950408889634)


class Partials(NamedTuple):
    """Results of a lane's own token and of its splits, float32."""

    acc: Any
    """[N, Q, splits + 1, D]: sums of weighted values."""
    max: Any
    """[N, Q, splits + 1]: largest scores in log2 units."""
    sum: Any
    """[N, Q, splits + 1]: sums of weights."""


class Heads(NamedTuple):
    """The M query heads of a program."""

    row: Any
    """int32 [M]: their numbers in the kv head's group."""
    number: Any
    """int64 [M]: their numbers in the launch, lane by lane."""
    mask: Any
    """bool [M, D']: the values that exist."""


@triton.jit(do_not_specialize=["splits", "position_limit"])
def decode_attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    shift_ptr,
    q_norm_ptr,
    k_norm_ptr,
    kv_scales_ptr,
    kv_bytes_ptr,
    sinks_ptr,
    arrivals_ptr,
    partials,
    out_ptr,
    tree,
    scale_log2,
    eps,
    qkv_stride,
    kv_block_stride,
    table_stride,
    splits,
    position_limit,
    shape,
    PDL: tl.constexpr,
):
    """Programs (lane, kv head x tile of its query heads, p): splits p, p + programs, ...

    Splits are counted from the first one that the lane sees; where they begin does not depend on
    it. Program 0 also handles the lane's own token. Keys and values of an e4m3 cache are multiplied
    as stored: their scales are applied to the scores and to the result.

    In a tree a lane's siblings are its ancestors. A launch of one token per row has no siblings:
    it loads the ancestors' entries as older ones, from where they are.
    """
    index = tl.program_id(0).to(tl.int64)
    first_split = tl.program_id(2)
    programs = tl.num_programs(2)
    kv_head = tl.program_id(1) // shape.head_tiles
    first_row = (tl.program_id(1) % shape.head_tiles) * shape.group_rows
    lane = load_lane(index, slot_ptr, position_ptr, shift_ptr, tree, position_limit, shape)
    early = early_split(lane, first_split, programs, shape)

    # Neither of the last two launches writes these: older keys and values, tables, norm weights.
    table_row_ptr = block_table_ptr + tl.maximum(lane.slot, 0).to(tl.int64) * table_stride
    cache = HeadCache(kv_ptr + kv_head * shape.D, table_row_ptr, kv_block_stride)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    dim = dimensions_of(shape)
    token = tokens_of(lane, early, shape)
    scales = _load_scales(kv_scales_ptr, kv_head, shape)
    if shape.fp8:
        scale_log2 *= scales[0]
    keys, values = load_older(cache, lane, token, dim, dtype, shape)
    row = lane.position + lane.shift
    rotation = load_rotation(cos_ptr, sin_ptr, row, lane.inside, dim, shape)
    own_entry = cache_offsets(
        table_row_ptr, lane.entry, lane.inside, kv_block_stride, shape.block_size, shape.G * shape.D
    )

    wait_for_inputs(PDL)

    heads = _heads_of(index, kv_head, first_row, dim, shape)
    if not lane.inside:
        failed = lane.live & (first_split == 0)
        _store_nan(out_ptr, heads, failed, dim, shape)
        return
    if first_split >= tl.maximum(lane.used, 1):
        return

    qkv_row_ptr = qkv_ptr + index * qkv_stride
    if shape.row_lanes > 1:
        # All are loaded at once, before the first use of any: a trip to L2 for each would be slow.
        first_lane_ptr = qkv_row_ptr - lane_of_row(lane, shape) * qkv_stride
        first_key_ptr = first_lane_ptr + (shape.Q + kv_head) * shape.D
        raw_keys = load_sibling_keys(
            first_key_ptr, qkv_stride, cos_ptr, sin_ptr, lane, early, dim, shape
        )
        values = insert_sibling_values(
            values, first_key_ptr + shape.G * shape.D, qkv_stride, lane, token, scales, dim, shape
        )
    query_ptrs = qkv_row_ptr + (kv_head * shape.group + heads.row)[:, None] * shape.D
    q = rotated(query_ptrs, heads.mask, rotation, q_norm_ptr, eps, dim, shape)
    # Partial 0 of a head is the token itself, partial i + 1 is split i.
    partial = heads.number * (splits + 1)
    if first_split == 0:
        key_ptrs = qkv_row_ptr + (shape.Q + kv_head) * shape.D + tl.zeros([1], tl.int32)[:, None]
        key = rotated(key_ptrs, dim.mask[None, :], rotation, k_norm_ptr, eps, dim, shape)
        value_ptrs = key_ptrs + shape.G * shape.D + dim.number[None, :]
        value = tl.load(value_ptrs, mask=dim.mask[None, :], other=0.0)
        mask = dim.mask[None, :] & (first_row == 0)
        at = kv_head * shape.D + own_entry
        key, value = _append(key, value, mask, kv_ptr, kv_bytes_ptr, at, scales, dim, shape)
        _attend_own(q, key, value, scale_log2, partials, partial, heads, dim, shape)

    if first_split < lane.used:
        if shape.row_lanes > 1:
            keys = insert_sibling_keys(
                keys, raw_keys, lane, early, k_norm_ptr, eps, scales, dim, shape
            )
        seen = is_seen(lane, token, shape)
        at = partial + 1 + early
        _attend_split(q, keys, values, seen, scale_log2, partials, at, heads, dim, shape)
    start = first_split + programs if shape.row_lanes == 1 else first_split
    end = lane.used if shape.row_lanes == 1 else early
    for split in tl.range(start, end, programs, num_stages=shape.loop_stages):
        token = tokens_of(lane, split, shape)
        keys, values = load_older(cache, lane, token, dim, dtype, shape)
        seen = is_seen(lane, token, shape)
        at = partial + 1 + split
        _attend_split(q, keys, values, seen, scale_log2, partials, at, heads, dim, shape)

    if _is_last(arrivals_ptr, lane, programs, shape):
        _combine_splits(
            partials, out_ptr, sinks_ptr, lane, kv_head, first_row, splits, scales, shape
        )


@triton.jit
def _load_scales(kv_scales_ptr, kv_head, shape):
    """Scales (of a kv head's keys, of its values); both 1 if the cache has the queries' dtype."""
    key_scale = 1.0
    value_scale = 1.0
    if shape.fp8:
        key_scale = tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + shape.G + kv_head)
    return key_scale, value_scale


@triton.jit
def _heads_of(index, kv_head, first_row, dim, shape):
    """The query heads of lane `index`, from row `first_row` of the kv head's group on."""
    row = first_row + tl.arange(0, shape.group_rows)
    return Heads(
        row=row,
        number=index * shape.Q + kv_head * shape.group + row,
        mask=(row < shape.group)[:, None] & dim.mask[None, :],
    )


@triton.jit
def _store_nan(out_ptr, heads, failed, dim, shape):
    """Store NaN as the result of a lane that is not inside, if it `failed`."""
    tl.store(
        out_ptr + heads.number[:, None] * shape.D + dim.number[None, :],
        float("nan"),
        mask=heads.mask & failed,
    )


@triton.jit
def _append(key, value, mask, kv_ptr, kv_bytes_ptr, offset, scales, dim, shape):
    """Store a key and value [1, D'] in the cache, and return them as the cache holds them."""
    key_at = offset + tl.zeros([1], tl.int32)[:, None] + dim.number[None, :]
    value_at = key_at + shape.block_size * shape.G * shape.D
    if shape.fp8:
        key_bytes = quantised_bits(key.to(tl.float32), scales[0])
        value_bytes = quantised_bits(value.to(tl.float32), scales[1])
        tl.store(kv_bytes_ptr + key_at, key_bytes, mask=mask)
        tl.store(kv_bytes_ptr + value_at, value_bytes, mask=mask)
        return of_bytes(key_bytes, key.dtype), of_bytes(value_bytes, value.dtype)
    else:
        tl.store(kv_ptr + key_at, key, mask=mask)
        tl.store(kv_ptr + value_at, value, mask=mask)
        return key, value


@triton.jit
def _attend_own(q, key, value, scale_log2, partials, partial, heads, dim, shape):
    """Store the partial of the lane's own token."""
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1) * scale_log2
    if shape.softcap > 0:
        score = _capped(score, shape.softcap)
    tl.store(partials.max + partial, score, mask=heads.row < shape.group)
    tl.store(partials.sum + partial, 1.0, mask=heads.row < shape.group)
    acc = tl.broadcast_to(value.to(tl.float32), [shape.group_rows, shape.padded])
    tl.store(partials.acc + partial[:, None] * shape.D + dim.number[None, :], acc, mask=heads.mask)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """Apply the soft cap, given in the scores' own units, to scores in log2 units."""
    cap_log2: tl.constexpr = SOFTCAP * LOG2E
    return tanh(scores * (1.0 / cap_log2)) * cap_log2


@triton.jit
def _attend_split(q, keys, values, seen, scale_log2, partials, partial, heads, dim, shape):
    """Store the partial of one split; at least one of its tokens must be `seen`."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    if shape.softcap > 0:
        scores = _capped(scores, shape.softcap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - largest[:, None])
    acc = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    row_mask = heads.row < shape.group
    tl.store(partials.max + partial, largest, mask=row_mask)
    tl.store(partials.sum + partial, tl.sum(weights, axis=1), mask=row_mask)
    tl.store(partials.acc + partial[:, None] * shape.D + dim.number[None, :], acc, mask=heads.mask)


@triton.jit
def _is_last(arrivals_ptr, lane, programs, shape):
    """Whether this is the last program of the lane and its heads to arrive, which resets the
    counter to 0.
    """
    # The barrier orders the stores of the whole program before the one thread's release.
    tl.debug_barrier()
    last = True
    shares = tl.minimum(lane.used, programs)
    if shares > 1:
        arrival_ptr = arrivals_ptr + lane.index * (shape.G * shape.head_tiles) + tl.program_id(1)
        last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == shares - 1
        if last:
            tl.store(arrival_ptr, 0)
    return last


@triton.jit
def _combine_splits(partials, out_ptr, sinks_ptr, lane, kv_head, first_row, splits, scales, shape):
    """Weigh the partials of the lane's splits by their largest scores, in order of split.

    AT_ONCE splits share a maximum, so their loads do not wait for each other. A sink comes first.
    """
    ROWS: tl.constexpr = shape.combine_rows
    AT_ONCE: tl.constexpr = shape.combine_splits
    first_sink = kv_head * shape.group + first_row
    first_head = lane.index * shape.Q + kv_head * shape.group + first_row
    rows = shape.group - first_row
    used = lane.used + 1
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, shape.padded)
    mask = (row < rows)[:, None] & (dim < shape.D)[None, :]
    # Padding rows repeat the last row, and are not stored.
    partial = (first_head + tl.minimum(row, rows - 1)) * (splits + 1)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + first_sink + tl.minimum(row, rows - 1))
        running_max = sink * LOG2E
        running_sum = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, shape.padded], tl.float32)
    for start in range(0, used, AT_ONCE):
        new_max = running_max
        for i in tl.static_range(AT_ONCE):
            new_max = tl.maximum(new_max, _load_maximum(partials.max, partial, start + i, used))
        rescale = tl.exp2(running_max - new_max)
        running_sum *= rescale
        acc *= rescale[:, None]
        for i in tl.static_range(AT_ONCE):
            split = start + i
            weight = tl.exp2(_load_maximum(partials.max, partial, split, used) - new_max)
            split_sum = tl.load(
                partials.sum + partial + split, mask=split < used, other=0.0, cache_modifier=".cg"
            )
            split_acc = tl.load(
                partials.acc + (partial + split)[:, None] * shape.D + dim[None, :],
                mask=mask & (split < used),
                other=0.0,
                cache_modifier=".cg",
            )
            running_sum += weight * split_sum
            acc += weight[:, None] * split_acc
        running_max = new_max
    out_ptrs = out_ptr + (first_head + row)[:, None] * shape.D + dim[None, :]
    result = acc / running_sum[:, None]
    if shape.fp8:
        result *= scales[1]
    tl.store(out_ptrs, result, mask=mask)


@triton.jit
def _load_maximum(max_ptr, partial, split, used):
    return tl.load(
        max_ptr + partial + split, mask=split < used, other=float("-inf"), cache_modifier=".cg"
    )
