"""What `decode_triton.py` takes from the QKV product: heads of a lane, and those of its siblings.

A lane's siblings are the lanes of its row that come before it; in a tree, its ancestors. Their
tokens are keys of its splits, but appended by this very launch: what other programs write cannot be
read here. So each program computes the few that its splits want, from the QKV product and by the
code that appends them.

Letters as in `decode_triton.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.paged import quantised_bits
from graphengine.kernels.norm_rope.rope import scale_head


@triton.jit
def load_angles(cos_ptr, sin_ptr, position, mask, dim, D: tl.constexpr):
    """Cosines and signed sines [D'] of the angles at `position`, for `_rotate`; 0 unless `mask`."""
    HALF: tl.constexpr = D // 2
    is_lower = dim < HALF
    angle = position.to(tl.int64) * HALF + tl.where(is_lower, dim, dim - HALF)
    angle_mask = (dim < D) & mask
    cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0)
    return cos, tl.where(is_lower, -sin, sin)


@triton.jit
def rotated(
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

    The other half of each pair is loaded a second time, which spares shuffling registers.
    """
    x = tl.load(head_ptrs + dim[None, :], mask=mask, other=0.0)
    other = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0)
    return _rotate(x, other, dim, partner, cos, signed_sin, weight_ptr, eps, D, NORMED)


@triton.jit
def _rotate(
    x,
    other,
    dim,
    partner,
    cos,
    signed_sin,
    weight_ptr,
    eps,
    D: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Heads `x` [rows, D'], `other` the other half of each pair, as `rotated` gives them.

    Rounded where `rope_append` rounds.
    """
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
def of_bytes(x, dtype: tl.constexpr):
    """What the bytes of e4m3 stand for."""
    return x.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _is_sibling_of_split(i, siblings, cached, split, SPLIT: tl.constexpr):
    """Whether lane `i` of the row is a sibling with a token in the split."""
    offset = cached + i - split * SPLIT
    return (i < siblings) & (offset >= 0) & (offset < SPLIT)


@triton.jit
def load_sibling_keys(
    sibling_ptr,
    qkv_stride,
    cos_ptr,
    sin_ptr,
    siblings,
    ancestor_ptr,
    cached,
    split,
    dim,
    partner,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    SIBLINGS: tl.constexpr,
):
    """For each sibling that a lane may have (x, other, cos, sin) for `_rotate`: x is [1, D'].

    `sibling_ptr` is the key of the row's first lane. Nothing is read of a lane that is no sibling
    of the split.
    """
    raw_keys = ()
    for i in tl.static_range(SIBLINGS):
        wanted = _is_sibling_of_split(i, siblings, cached, split, SPLIT)
        mask = ((dim < D) & wanted)[None, :]
        row_lane = i
        if ancestor_ptr is not None:
            row_lane = tl.load(ancestor_ptr + i, mask=wanted, other=0).to(tl.int64)
        head_ptrs = sibling_ptr + row_lane * qkv_stride + tl.zeros([1], tl.int32)[:, None]
        x = tl.load(head_ptrs + dim[None, :], mask=mask, other=0.0)
        other = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0)
        cos, sin = load_angles(cos_ptr, sin_ptr, cached + i, wanted, dim, D)
        raw_keys += ((x, other, cos, sin),)  # type: ignore[assignment]
    return raw_keys


@triton.jit
def insert_sibling_keys(
    keys,
    raw_keys,
    siblings,
    cached,
    split,
    dim,
    partner,
    k_norm_ptr,
    eps,
    key_scale,
    D: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    SIBLINGS: tl.constexpr,
):
    """`keys` [tokens, D'] of a split with those of the siblings in it, as they are appended.

    One by one: a norm of several rows at once would sum in another order than the own key's.
    """
    for i in tl.static_range(SIBLINGS):
        if _is_sibling_of_split(i, siblings, cached, split, SPLIT):
            x, other, cos, sin = raw_keys[i]
            key = _rotate(x, other, dim, partner, cos, sin, k_norm_ptr, eps, D, NORMED)
            if FP8:
                key = of_bytes(quantised_bits(key.to(tl.float32), key_scale), key.dtype)
            # The gather leaves `key` as it is. The compiler does not carry layouts of registers
            # through it: in the tile's layout a norm would sum in another order than the own key's.
            key = tl.gather(tl.reshape(key, [key.shape[1]]), dim, axis=0)
            is_its_token = split * SPLIT + tl.arange(0, SPLIT) == cached + i
            keys = tl.where(is_its_token[:, None], key[None, :], keys)
    return keys


@triton.jit
def insert_sibling_values(
    values,
    sibling_ptr,
    qkv_stride,
    ancestor_ptr,
    token,
    first_seen,
    cached,
    position,
    dim,
    value_scale,
    D: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """`values` [tokens, D'] with those of the siblings; `sibling_ptr` is the value of the first."""
    rows = (token - cached).to(tl.int64) * qkv_stride
    mask = ((token >= cached) & (token < position))[:, None] & (dim < D)[None, :]
    if WINDOW:
        mask &= (token >= first_seen)[:, None]
    if ancestor_ptr is not None:
        is_sibling = (token >= cached) & (token < position)
        row_lane = tl.load(ancestor_ptr + (token - cached), mask=is_sibling, other=0)
        rows = row_lane.to(tl.int64) * qkv_stride
    ptrs = sibling_ptr + rows[:, None] + dim[None, :]
    if FP8:
        new = tl.load(ptrs, mask=mask, other=0.0)
        new = of_bytes(quantised_bits(new.to(tl.float32), value_scale), values.dtype)
        return tl.where(mask, new, values)
    return tl.load(ptrs, mask=mask, other=values)
