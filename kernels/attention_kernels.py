"""The Triton kernel of `attention.py`: its programs, and the parts they are made of.

Letters: N lanes of a launch, Q query heads, G kv heads, D head_dim, D' padded to what `tl.dot`
wants. A head has a partial for the token itself and one for each split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.paged import cache_offsets
from graphengine.kernels.pdl import wait_for_inputs
from graphengine.kernels.rope import scale_head


@triton.jit(do_not_specialize=["splits", "position_limit"])
def decode_attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    kv_ptr,
    block_table_ptr,
    slot_ptr,
    position_ptr,
    q_norm_ptr,
    k_norm_ptr,
    arrivals_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    scale_log2,
    eps,
    qkv_stride,
    kv_block_stride,
    table_stride,
    splits,
    position_limit,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, kv head x GROUP_ROWS of its query heads, p): splits p, p + programs, ...

    Program 0 has the lane's own token as well.
    """
    lane = tl.program_id(0).to(tl.int64)
    first_split = tl.program_id(2)
    programs = tl.num_programs(2)
    GROUP: tl.constexpr = Q // G
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_ROWS - 1) // GROUP_ROWS
    kv_head = tl.program_id(1) // HEAD_TILES
    first_row = (tl.program_id(1) % HEAD_TILES) * GROUP_ROWS

    # Loaded together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, cache_modifier=".cg")
    live = slot >= 0
    inside = live & (position >= 0) & (position < position_limit)
    position = tl.where(inside, position, 0)
    used = (position + SPLIT - 1) // SPLIT

    # What no launch since the last but one writes: older keys and values, tables, norm weights.
    table_row_ptr = block_table_ptr + tl.maximum(slot, 0).to(tl.int64) * table_stride
    key_ptr = kv_ptr + kv_head * D
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < D
    token = first_split * SPLIT + tl.arange(0, SPLIT)
    keys, values = _load_older(
        key_ptr, table_row_ptr, token, position, kv_block_stride, dim, BLOCK_SIZE, G, D
    )
    HALF: tl.constexpr = D // 2
    is_lower = dim < HALF
    partner = tl.where(is_lower, dim + HALF, dim - HALF)
    angle = position.to(tl.int64) * HALF + tl.where(is_lower, dim, dim - HALF)
    angle_mask = dim_mask & inside
    cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.where(is_lower, -sin, sin)
    own_entry = cache_offsets(table_row_ptr, position, inside, kv_block_stride, BLOCK_SIZE, G * D)

    wait_for_inputs(PDL)

    row = first_row + tl.arange(0, GROUP_ROWS)
    head = lane * Q + kv_head * GROUP + row
    head_mask = (row < GROUP)[:, None] & dim_mask[None, :]
    if not inside:
        failed = live & (first_split == 0)
        tl.store(out_ptr + head[:, None] * D + dim[None, :], float("nan"), mask=head_mask & failed)
        return
    if first_split >= tl.maximum(used, 1):
        return

    qkv_row_ptr = qkv_ptr + lane * qkv_stride
    q = _rotated(
        qkv_row_ptr + (kv_head * GROUP + row)[:, None] * D,
        head_mask,
        dim,
        partner,
        cos,
        sin,
        q_norm_ptr,
        eps,
        D,
        NORMED,
    )
    # Partial 0 of a head is the token itself, partial i + 1 is split i.
    partial = head * (splits + 1)
    if first_split == 0:
        own_row = tl.zeros([1], tl.int32)
        own_key_ptrs = qkv_row_ptr + (Q + kv_head) * D + own_row[:, None]
        own_key = _rotated(
            own_key_ptrs, dim_mask[None, :], dim, partner, cos, sin, k_norm_ptr, eps, D, NORMED
        )
        own_value = tl.load(own_key_ptrs + G * D + dim[None, :], mask=dim_mask[None, :], other=0.0)
        append_ptrs = key_ptr + own_entry + own_row[:, None] + dim[None, :]
        append_mask = dim_mask[None, :] & (first_row == 0)
        tl.store(append_ptrs, own_key, mask=append_mask)
        tl.store(append_ptrs + BLOCK_SIZE * G * D, own_value, mask=append_mask)
        score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale_log2
        tl.store(max_ptr + partial, score, mask=row < GROUP)
        tl.store(sum_ptr + partial, 1.0, mask=row < GROUP)
        own_acc = tl.broadcast_to(own_value.to(tl.float32), [GROUP_ROWS, DIM_PADDED])
        tl.store(acc_ptr + partial[:, None] * D + dim[None, :], own_acc, mask=head_mask)

    if first_split < used:
        _attend_split(
            q,
            keys,
            values,
            token < position,
            scale_log2,
            acc_ptr,
            max_ptr,
            sum_ptr,
            partial + 1 + first_split,
            row < GROUP,
            dim,
            D,
        )
    for split in tl.range(first_split + programs, used, programs, num_stages=LOOP_STAGES):
        token = split * SPLIT + tl.arange(0, SPLIT)
        keys, values = _load_older(
            key_ptr, table_row_ptr, token, position, kv_block_stride, dim, BLOCK_SIZE, G, D
        )
        _attend_split(
            q,
            keys,
            values,
            token < position,
            scale_log2,
            acc_ptr,
            max_ptr,
            sum_ptr,
            partial + 1 + split,
            row < GROUP,
            dim,
            D,
        )

    # The barrier puts the stores of the whole program before the one thread's release.
    tl.debug_barrier()
    last = True
    shares = tl.minimum(used, programs)
    if shares > 1:
        arrival_ptr = arrivals_ptr + lane * (G * HEAD_TILES) + tl.program_id(1)
        last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == shares - 1
        if last:
            tl.store(arrival_ptr, 0)
    if last:
        _combine_splits(
            acc_ptr,
            max_ptr,
            sum_ptr,
            out_ptr,
            lane * Q + kv_head * GROUP + first_row,
            GROUP - first_row,
            used + 1,
            splits + 1,
            D,
            DIM_PADDED,
            COMBINE_ROWS,
            COMBINE_SPLITS,
        )


@triton.jit
def _load_older(
    key_ptr,
    table_row_ptr,
    token,
    position,
    kv_block_stride,
    dim,
    BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """Keys and values [tokens, D'] of the tokens before `position`; 0 for the others."""
    older = token < position
    entry = cache_offsets(table_row_ptr, token, older, kv_block_stride, BLOCK_SIZE, G * D)
    key_ptrs = key_ptr + entry[:, None] + dim[None, :]
    mask = older[:, None] & (dim < D)[None, :]
    # Values first: the keys' way into the product begins at once, and would hold these loads up.
    value_ptrs = key_ptrs + BLOCK_SIZE * G * D
    values = tl.load(value_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    keys = tl.load(key_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return keys, values


@triton.jit
def _attend_split(
    q,
    keys,
    values,
    older,
    scale_log2,
    acc_ptr,
    max_ptr,
    sum_ptr,
    partial,
    row_mask,
    dim,
    D: tl.constexpr,
):
    """Store the partial of one split: largest score (log2 units), sum of weights, sum of values.

    At least one of its tokens is `older` than the query.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    scores = tl.where(older[None, :], scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - largest[:, None])
    acc = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    tl.store(max_ptr + partial, largest, mask=row_mask)
    tl.store(sum_ptr + partial, tl.sum(weights, axis=1), mask=row_mask)
    mask = row_mask[:, None] & (dim < D)[None, :]
    tl.store(acc_ptr + partial[:, None] * D + dim[None, :], acc, mask=mask)


@triton.jit
def _rotated(
    head_ptrs,
    mask,
    dim,
    partner,
    cos,
    signed_sin,
    weight_ptr,
    eps,
    D: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Heads [rows, D'] at `head_ptrs` [rows, 1], normed if NORMED and rotated, in their own dtype.

    The other half of each pair is loaded a second time, which spares shuffling registers. Rounded
    where `rope_append` rounds.
    """
    x = tl.load(head_ptrs + dim[None, :], mask=mask, other=0.0)
    other = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    other = other.to(tl.float32)
    if NORMED:
        weight = tl.load(weight_ptr + dim, mask=dim < D, other=0.0)
        partner_weight = tl.load(weight_ptr + partner, mask=dim < D, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
        x = scale_head(x, scale[:, None], weight[None, :], dtype)
        other = scale_head(other, scale[:, None], partner_weight[None, :], dtype)
    return (x * cos[None, :] + other * signed_sin[None, :]).to(dtype)


@triton.jit
def _combine_splits(
    acc_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    first_head,
    rows,
    used,
    splits,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh the partials of `used` splits by their largest scores, in order of split.

    AT_ONCE splits share a maximum: no load of theirs waits for another.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    mask = (row < rows)[:, None] & (dim < D)[None, :]
    # Rows of padding compute what the last row computes, and are not stored.
    partial = (first_head + tl.minimum(row, rows - 1)) * splits
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for start in range(0, used, AT_ONCE):
        new_max = running_max
        for i in tl.static_range(AT_ONCE):
            new_max = tl.maximum(new_max, _load_maximum(max_ptr, partial, start + i, used))
        rescale = tl.exp2(running_max - new_max)
        running_sum *= rescale
        acc *= rescale[:, None]
        for i in tl.static_range(AT_ONCE):
            split = start + i
            weight = tl.exp2(_load_maximum(max_ptr, partial, split, used) - new_max)
            split_sum = tl.load(
                sum_ptr + partial + split, mask=split < used, other=0.0, cache_modifier=".cg"
            )
            split_acc = tl.load(
                acc_ptr + (partial + split)[:, None] * D + dim[None, :],
                mask=mask & (split < used),
                other=0.0,
                cache_modifier=".cg",
            )
            running_sum += weight * split_sum
            acc += weight[:, None] * split_acc
        running_max = new_max
    out_ptrs = out_ptr + (first_head + row)[:, None] * D + dim[None, :]
    tl.store(out_ptrs, acc / running_sum[:, None], mask=mask)


@triton.jit
def _load_maximum(max_ptr, partial, split, used):
    return tl.load(
        max_ptr + partial + split, mask=split < used, other=float("-inf"), cache_modifier=".cg"
    )
