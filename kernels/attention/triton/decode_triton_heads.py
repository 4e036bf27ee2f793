"""Heads that `decode_triton.py` takes from the QKV product: a lane's own and its siblings'.

A lane's siblings are the lanes of its row that come before it; in a tree, its ancestors. Their
tokens are keys of its splits, but this same launch appends them, and a program cannot read what
other programs write. So each program computes the few that its splits need from the QKV product,
with the code that appends them.

Letters as in `decode_triton.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from graphengine.kernels.core.paged import quantised_bits
from graphengine.kernels.norm_rope.rope import NORMED_AFTER, scale_head


class Rotation(NamedTuple):
    """How a head is rotated to a position: x * cos + x[partner] * sin, each [D']."""

    partner: Any
    cos: Any
    sin: Any
    """The sine with its sign: negative in the lower half."""


@triton.jit
def _partner_of(dim, shape):
    """int32 [D']: the other dimension of each dimension's pair."""
    HALF: tl.constexpr = shape.D // 2
    return tl.where(dim.number < HALF, dim.number + HALF, dim.number - HALF)


@triton.jit
def load_rotation(cos_ptr, sin_ptr, row, mask, dim, shape):
    """Load the rotation of a `row` of the tables; its cosines and sines are 0 unless `mask`."""
    HALF: tl.constexpr = shape.D // 2
    partner = _partner_of(dim, shape)
    is_lower = dim.number < HALF
    angle = row.to(tl.int64) * HALF + tl.where(is_lower, dim.number, dim.number - HALF)
    angle_mask = dim.mask & mask
    cos = tl.load(cos_ptr + angle, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=angle_mask, other=0.0)
    return Rotation(partner, cos, tl.where(is_lower, -sin, sin))


@triton.jit
def rotated(head_ptrs, mask, rotation, norm_ptr, eps, dim, shape):
    """Load heads [rows, D'] at `head_ptrs` [rows, 1], and norm and rotate them as the shape says.

    The other half of each pair is loaded a second time, which avoids shuffling registers.
    """
    x = tl.load(head_ptrs + dim.number[None, :], mask=mask, other=0.0)
    other = tl.load(head_ptrs + rotation.partner[None, :], mask=mask, other=0.0)
    return _rotate(x, other, rotation, norm_ptr, eps, dim, shape)


@triton.jit
def _rotate(x, other, rotation, norm_ptr, eps, dim, shape):
    """Norm and rotate heads `x` [rows, D'] as `rotated` does; `other` is the other half of each
    pair.

    Rounded where `rope_append` rounds.
    """
    partner, cos, sin = rotation
    dtype = x.dtype
    x = x.to(tl.float32)
    other = other.to(tl.float32)
    if shape.normed == NORMED_AFTER:
        x = (x * cos[None, :] + other * sin[None, :]).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + dim.number, mask=dim.mask, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / shape.D + eps)
        return scale_head(x, scale[:, None], weight[None, :], dtype).to(dtype)
    if shape.normed:
        weight = tl.load(norm_ptr + dim.number, mask=dim.mask, other=0.0)
        partner_weight = tl.load(norm_ptr + partner, mask=dim.mask, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / shape.D + eps)
        x = scale_head(x, scale[:, None], weight[None, :], dtype)
        other = scale_head(other, scale[:, None], partner_weight[None, :], dtype)
    return (x * cos[None, :] + other * sin[None, :]).to(dtype)


@triton.jit
def of_bytes(x, dtype: tl.constexpr):
    """Convert e4m3 bytes to `dtype`."""
    return x.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _is_sibling_of_split(i, lane, first_token, shape):
    """Whether lane `i` of the row is a sibling with a token in the split."""
    offset = lane.cached + i - first_token
    return (i < lane.siblings) & (offset >= 0) & (offset < shape.split)


@triton.jit
def load_sibling_keys(first_ptr, qkv_stride, cos_ptr, sin_ptr, lane, split, dim, shape):
    """Load (x, other, rotation) for `_rotate`, x [1, D'], of each sibling that a lane may have.

    `first_ptr` points to the key of the row's first lane. Lanes that are no sibling in the split
    are not read.
    """
    first_token = (lane.skipped + split) * shape.split
    partner = _partner_of(dim, shape)
    raw_keys = ()
    for i in tl.static_range(shape.siblings):
        wanted = _is_sibling_of_split(i, lane, first_token, shape)
        mask = (dim.mask & wanted)[None, :]
        row_lane = i
        if shape.depth > 0:
            row_lane = tl.load(lane.ancestors + i, mask=wanted, other=0).to(tl.int64)
        head_ptrs = first_ptr + row_lane * qkv_stride + tl.zeros([1], tl.int32)[:, None]
        x = tl.load(head_ptrs + dim.number[None, :], mask=mask, other=0.0)
        other = tl.load(head_ptrs + partner[None, :], mask=mask, other=0.0)
        row = lane.cached + i + lane.shift
        turned = wanted & (row >= 0) if shape.table_rows > 0 else wanted
        rotation = load_rotation(cos_ptr, sin_ptr, row, turned, dim, shape)
        raw_keys += ((x, other, rotation),)  # type: ignore[assignment]
    return raw_keys


@triton.jit
def insert_sibling_keys(keys, raw_keys, lane, split, k_norm_ptr, eps, scales, dim, shape):
    """Put the siblings' keys, as they are appended, into `keys` [tokens, D'] of a split.

    One by one: a norm of several rows at once would sum in a different order from the own key's.
    """
    first_token = (lane.skipped + split) * shape.split
    for i in tl.static_range(shape.siblings):
        if _is_sibling_of_split(i, lane, first_token, shape):
            x, other, rotation = raw_keys[i]
            key = _rotate(x, other, rotation, k_norm_ptr, eps, dim, shape)
            if shape.fp8:
                key = of_bytes(quantised_bits(key.to(tl.float32), scales[0]), key.dtype)
            # The gather does not change `key`, but the compiler carries no register layout through
            # it. In the tile's layout a norm would sum in a different order from the own key's.
            key = tl.gather(tl.reshape(key, [key.shape[1]]), dim.number, axis=0)
            is_its_token = first_token + tl.arange(0, shape.split) == lane.cached + i
            keys = tl.where(is_its_token[:, None], key[None, :], keys)
    return keys


@triton.jit
def insert_sibling_values(values, first_ptr, qkv_stride, lane, token, scales, dim, shape):
    """Put the siblings' values into `values` [tokens, D']; `first_ptr` is the row's first value."""
    rows = (token - lane.cached).to(tl.int64) * qkv_stride
    mask = ((token >= lane.cached) & (token < lane.position))[:, None] & dim.mask[None, :]
    if shape.window:
        mask &= (token >= lane.first_seen)[:, None]
    if shape.depth > 0:
        is_sibling = (token >= lane.cached) & (token < lane.position)
        row_lane = tl.load(lane.ancestors + (token - lane.cached), mask=is_sibling, other=0)
        rows = row_lane.to(tl.int64) * qkv_stride
    ptrs = first_ptr + rows[:, None] + dim.number[None, :]
    if shape.fp8:
        new = tl.load(ptrs, mask=mask, other=0.0)
        new = of_bytes(quantised_bits(new.to(tl.float32), scales[1]), values.dtype)
        return tl.where(mask, new, values)
    return tl.load(ptrs, mask=mask, other=values)
