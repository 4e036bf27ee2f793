"""The Triton kernel of `decode.py`: its programs, and the parts they are made of.

Letters: N lanes of a launch, W lanes of a row, Q query heads, G kv heads, D head_dim, D' padded to
what `tl.dot` wants. A head has a partial for the token itself and one for each split.
`decode_triton_heads.py` says what a lane's siblings are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.attention.decode_triton_heads import (
    insert_sibling_keys,
    insert_sibling_values,
    load_angles,
    load_sibling_keys,
    of_bytes,
    rotated,
)
from graphengine.kernels.attention.scores import tanh
from graphengine.kernels.core.paged import cache_offsets, quantised_bits
from graphengine.kernels.core.pdl import wait_for_inputs

LOG2E = tl.constexpr(1.4426950408889634)


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
    kv_scales_ptr,
    kv_bytes_ptr,
    sinks_ptr,
    arrivals_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    node_ptr,
    depth_ptr,
    ancestor_ptr,
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
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROW_LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, kv head x GROUP_ROWS of its query heads, p): splits p, p + programs, ...

    They are counted from the first one that the lane sees; where they begin does not depend on it.
    Program 0 has the lane's own token as well. Keys and values of a cache of e4m3 are multiplied as
    they are stored: their scales go into those of the scores and into the result.

    A tree's siblings are the lane's ancestors, or none in a launch of one token a row: then the
    entries of those are loaded as older ones, from where they are.
    """
    lane = tl.program_id(0).to(tl.int64)
    first_split = tl.program_id(2)
    programs = tl.num_programs(2)
    GROUP: tl.constexpr = Q // G
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_ROWS - 1) // GROUP_ROWS
    SIBLINGS: tl.constexpr = DEPTH if DEPTH > 0 else ROW_LANES - 1
    kv_head = tl.program_id(1) // HEAD_TILES
    first_row = (tl.program_id(1) % HEAD_TILES) * GROUP_ROWS

    # Loaded together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    position = tl.load(position_ptr + lane, cache_modifier=".cg")
    live = slot >= 0
    inside = live & (position >= 0) & (position < position_limit)
    depth = 0
    ancestor_row_ptr = None
    if DEPTH > 0:
        depth = tl.load(depth_ptr + lane, mask=live, other=0, cache_modifier=".cg")
        node = tl.load(node_ptr + lane, mask=live, other=0, cache_modifier=".cg")
        ancestor_row_ptr = ancestor_ptr + lane * DEPTH
        own_token = position - depth + node
        inside = inside & (own_token < position_limit)
        depth = tl.where(inside, depth, 0)
        own_token = tl.where(inside, own_token, 0)
    position = tl.where(inside, position, 0)
    used = (position + SPLIT - 1) // SPLIT
    first_seen = 0
    skipped = 0
    if WINDOW:
        first_seen = tl.maximum(position - (WINDOW - 1), 0)
        skipped = tl.minimum(first_seen // SPLIT, used)
        # A window of one token has no older keys.
        used = tl.where(first_seen < position, used - skipped, 0)
    # Tokens below `cached` were appended by earlier launches, those from there on by siblings.
    siblings = 0
    cached = position
    # The entries that are not at their positions, and are in the cache, begin here.
    root = position
    if DEPTH > 0 and ROW_LANES == 1:
        root = position - depth
    # The split whose loads do not wait, as they are counted here; `early_split` is from position 0.
    early = first_split
    if ROW_LANES > 1:
        siblings = (lane % ROW_LANES).to(tl.int32)
        if DEPTH > 0:
            siblings = depth
        cached = position - siblings
        # Siblings are in the last two splits at most, which are the last of two programs.
        early += tl.maximum(used - 1 - first_split, 0) // programs * programs

    # Neither of the last two launches writes these: older keys and values, tables, norm weights.
    table_row_ptr = block_table_ptr + tl.maximum(slot, 0).to(tl.int64) * table_stride
    key_ptr = kv_ptr + kv_head * D
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < D
    early_split = skipped + early
    token = early_split * SPLIT + tl.arange(0, SPLIT)
    key_scale = 1.0
    value_scale = 1.0
    if FP8:
        key_scale = tl.load(kv_scales_ptr + kv_head)
        value_scale = tl.load(kv_scales_ptr + G + kv_head)
        scale_log2 *= key_scale
    keys, values = _load_older(
        key_ptr,
        table_row_ptr,
        token,
        first_seen,
        cached,
        root,
        ancestor_row_ptr,
        kv_block_stride,
        dim,
        BLOCK_SIZE,
        G,
        D,
        dtype,
        WINDOW,
        DEPTH if ROW_LANES == 1 else 0,
    )
    partner = tl.where(dim < D // 2, dim + D // 2, dim - D // 2)
    cos, sin = load_angles(cos_ptr, sin_ptr, position, inside, dim, D)
    appended = position if DEPTH == 0 else own_token
    own_entry = cache_offsets(table_row_ptr, appended, inside, kv_block_stride, BLOCK_SIZE, G * D)

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
    if ROW_LANES > 1:
        # All at once, before the first use of any: a trip to L2 each would be a long way.
        row_lane = siblings if DEPTH == 0 else (lane % ROW_LANES).to(tl.int32)
        sibling_ptr = qkv_row_ptr - row_lane * qkv_stride + (Q + kv_head) * D
        raw_keys = load_sibling_keys(
            sibling_ptr,
            qkv_stride,
            cos_ptr,
            sin_ptr,
            siblings,
            ancestor_row_ptr,
            cached,
            early_split,
            dim,
            partner,
            D,
            SPLIT,
            SIBLINGS,
        )
        values = insert_sibling_values(
            values,
            sibling_ptr + G * D,
            qkv_stride,
            ancestor_row_ptr,
            token,
            first_seen,
            cached,
            position,
            dim,
            value_scale,
            D,
            FP8,
            WINDOW,
        )
    q = rotated(
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
        own_key = rotated(
            own_key_ptrs, dim_mask[None, :], dim, partner, cos, sin, k_norm_ptr, eps, D, NORMED
        )
        own_value = tl.load(own_key_ptrs + G * D + dim[None, :], mask=dim_mask[None, :], other=0.0)
        append_mask = dim_mask[None, :] & (first_row == 0)
        append_at = kv_head * D + own_entry + own_row[:, None] + dim[None, :]
        value_at = append_at + BLOCK_SIZE * G * D
        if FP8:
            key_bytes = quantised_bits(own_key.to(tl.float32), key_scale)
            value_bytes = quantised_bits(own_value.to(tl.float32), value_scale)
            tl.store(kv_bytes_ptr + append_at, key_bytes, mask=append_mask)
            tl.store(kv_bytes_ptr + value_at, value_bytes, mask=append_mask)
            own_key = of_bytes(key_bytes, q.dtype)
            own_value = of_bytes(value_bytes, q.dtype)
        else:
            tl.store(kv_ptr + append_at, own_key, mask=append_mask)
            tl.store(kv_ptr + value_at, own_value, mask=append_mask)
        score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale_log2
        if SOFTCAP > 0:
            score = _capped(score, SOFTCAP)
        tl.store(max_ptr + partial, score, mask=row < GROUP)
        tl.store(sum_ptr + partial, 1.0, mask=row < GROUP)
        own_acc = tl.broadcast_to(own_value.to(tl.float32), [GROUP_ROWS, DIM_PADDED])
        tl.store(acc_ptr + partial[:, None] * D + dim[None, :], own_acc, mask=head_mask)

    if first_split < used:
        if ROW_LANES > 1:
            keys = insert_sibling_keys(
                keys,
                raw_keys,
                siblings,
                cached,
                early_split,
                dim,
                partner,
                k_norm_ptr,
                eps,
                key_scale,
                D,
                NORMED,
                FP8,
                SPLIT,
                SIBLINGS,
            )
        _attend_split(
            q,
            keys,
            values,
            token < position if WINDOW == 0 else (token < position) & (token >= first_seen),
            scale_log2,
            acc_ptr,
            max_ptr,
            sum_ptr,
            partial + 1 + early,
            row < GROUP,
            dim,
            D,
            SOFTCAP,
        )
    start = first_split + programs if ROW_LANES == 1 else first_split
    end = used if ROW_LANES == 1 else early
    for split in tl.range(start, end, programs, num_stages=LOOP_STAGES):
        token = (skipped + split) * SPLIT + tl.arange(0, SPLIT)
        keys, values = _load_older(
            key_ptr,
            table_row_ptr,
            token,
            first_seen,
            cached,
            root,
            ancestor_row_ptr,
            kv_block_stride,
            dim,
            BLOCK_SIZE,
            G,
            D,
            dtype,
            WINDOW,
            DEPTH if ROW_LANES == 1 else 0,
        )
        _attend_split(
            q,
            keys,
            values,
            token < position if WINDOW == 0 else (token < position) & (token >= first_seen),
            scale_log2,
            acc_ptr,
            max_ptr,
            sum_ptr,
            partial + 1 + split,
            row < GROUP,
            dim,
            D,
            SOFTCAP,
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
            sinks_ptr,
            kv_head * GROUP + first_row,
            lane * Q + kv_head * GROUP + first_row,
            GROUP - first_row,
            used + 1,
            splits + 1,
            value_scale,
            D,
            DIM_PADDED,
            FP8,
            COMBINE_ROWS,
            COMBINE_SPLITS,
        )


@triton.jit
def _load_older(
    key_ptr,
    table_row_ptr,
    token,
    first_seen,
    cached,
    root,
    ancestor_ptr,
    kv_block_stride,
    dim,
    BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    dtype: tl.constexpr,
    WINDOW: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Keys and values [tokens, D'] of the tokens below `cached` that are seen; 0 for the others.

    Those from `root` on are where the lane's ancestors are, if DEPTH is above 0.
    """
    older = token < cached
    if WINDOW:
        older &= token >= first_seen
    if DEPTH > 0:
        in_tree = older & (token >= root)
        node = tl.load(ancestor_ptr + (token - root), mask=in_tree, other=0)
        token = tl.where(in_tree, root + node, token)
    entry = cache_offsets(table_row_ptr, token, older, kv_block_stride, BLOCK_SIZE, G * D)
    key_ptrs = key_ptr + entry[:, None] + dim[None, :]
    mask = older[:, None] & (dim < D)[None, :]
    # Values first: the keys' way into the product begins at once, and would hold these loads up.
    value_ptrs = key_ptrs + BLOCK_SIZE * G * D
    values = tl.load(value_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    keys = tl.load(key_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return keys.to(dtype), values.to(dtype)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """Scores in log2 units after the soft cap, which is in the scores' own."""
    cap_log2: tl.constexpr = SOFTCAP * LOG2E
    return tanh(scores * (1.0 / cap_log2)) * cap_log2


@triton.jit
def _attend_split(
    q,
    keys,
    values,
    seen,
    scale_log2,
    acc_ptr,
    max_ptr,
    sum_ptr,
    partial,
    row_mask,
    dim,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Store the partial of one split: largest score (log2 units), sum of weights, sum of values.

    At least one of its tokens is `seen`.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    if SOFTCAP > 0:
        scores = _capped(scores, SOFTCAP)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    weights = tl.exp2(scores - largest[:, None])
    acc = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    tl.store(max_ptr + partial, largest, mask=row_mask)
    tl.store(sum_ptr + partial, tl.sum(weights, axis=1), mask=row_mask)
    mask = row_mask[:, None] & (dim < D)[None, :]
    tl.store(acc_ptr + partial[:, None] * D + dim[None, :], acc, mask=mask)


@triton.jit
def _combine_splits(
    acc_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    sinks_ptr,
    first_sink,
    first_head,
    rows,
    used,
    splits,
    value_scale,
    D: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Weigh the partials of `used` splits by their largest scores, in order of split.

    AT_ONCE splits share a maximum: no load of theirs waits for another. A sink comes before them.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    mask = (row < rows)[:, None] & (dim < D)[None, :]
    # Rows of padding compute what the last row computes, and are not stored.
    partial = (first_head + tl.minimum(row, rows - 1)) * splits
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + first_sink + tl.minimum(row, rows - 1))
        running_max = sink * LOG2E
        running_sum = tl.full([ROWS], 1.0, tl.float32)
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
    result = acc / running_sum[:, None]
    if FP8:
        result *= value_scale
    tl.store(out_ptrs, result, mask=mask)


@triton.jit
def _load_maximum(max_ptr, partial, split, used):
    return tl.load(
        max_ptr + partial + split, mask=split < used, other=float("-inf"), cache_modifier=".cg"
    )
