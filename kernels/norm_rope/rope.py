"""Rotary position embedding, with the per-head norm before or after it, and then the KV append.

Chunks of prompts and draft modules use this kernel; decode attention rotates in its own
(`attention/decode.py`), with the same tables and roundings.

Letters: N lanes of a launch, S slots, B blocks of a slot's table, Q query heads, G kv heads,
D head_dim, P positions of the tables, X = (Q + 2G) * D. `paged.py` has the cache's layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_int32, check_lanes, live_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import (
    append_to_cache,
    cache_offsets,
    check_cache,
    check_cache_dtype,
    checked_output,
    quantised_bits,
    token_capacity,
)
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs


class RopeRows(NamedTuple):
    """Rows of the tables that rotate lanes, where these are not the lanes' positions: M-RoPE.

    A picture's tokens have three positions each, in time, height and width, and a head's pairs
    rotate by one of the three (Wang et al. 2024, "Qwen2-VL"). The tokens after it rotate as if it
    were shorter.

    of_axis     int32 [N, 3]: the row of each lane along each axis
    axis_of     int32 [D/2]: the axis by which a pair rotates, 0..2
    """

    of_axis: torch.Tensor
    axis_of: torch.Tensor


NORMED_AFTER = tl.constexpr(2)
"""A kernel's NORMED where it norms queries and keys after it rotates them; True: before."""


def head_norms(weight: torch.Tensor | None, *, after: bool) -> int:
    """A kernel's NORMED for norms with this weight."""
    return int(NORMED_AFTER.value) if weight is not None and after else weight is not None


# Pairs of a program: 16 bytes of each half for every thread of 4 warps, where values have 16 bits.
_BLOCK_PAIRS = 1024


def rope_append(
    qkv_NX: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    kv_scales: torch.Tensor | None = None,
    rows: RopeRows | None = None,
    shift_S: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Rotate the queries and keys of N lanes and append keys and values to the paged cache.

    Args:
        qkv_NX: [N, (Q + 2G) * D], a lane is [queries | keys | values]; rows dense, any row stride.
            Q may be 0, if only keys and values are wanted, and G may be 0, if only queries are:
            then the cache stays as it is.
        cos, sin: float32 [P, D/2] from `rope_tables`.
        kv: one layer's cache, in qkv's dtype or in FP8_KV. Written in place.
        block_table_SB: int32. slot_N: int32, -1 = padded lane. position_N: int32, absolute.
        q_norm_weight, k_norm_weight: [D] each in qkv's dtype, or neither: RMSNorm of each head
            before the rotation, rounded where Qwen3's reference rounds. Weights may also be in
            float32, as in Gemma 3, whose reference rounds once.
        norm_after: norm heads after the rotation, which is rounded, as Hunyuan's reference does.
        kv_scales: float32 [2, G], all positive, for a cache of FP8_KV.
        rows: the rows of the tables that rotate each lane. None: its position, plus its slot's
            entry of `shift_S`, int32 [S], where given.
        out: [N, Q, D] in qkv's dtype; any memory that is not qkv's.
        pdl: the launch before, whatever it is, may still run.

    Returns:
        The rotated queries [N, Q, D]. Rotation is rotate-half (pairs i, i + D/2; Su et al. 2021) in
        float32, rounded once. A padded lane reads and writes nothing. A live lane past the tables
        or past its block table appends nothing and its queries are NaN.
    """
    head_dim = check_rope(qkv_NX, cos, sin, kv, num_heads, num_kv_heads, kv_scales)
    check_rope_rows(rows, shift_S, lanes=qkv_NX.shape[0], head_dim=head_dim)
    kv_heads = num_kv_heads or kv.shape[3]
    check_cache(kv, block_table_SB, heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
    check_norm_weights(q_norm_weight, k_norm_weight, qkv_NX, head_dim)
    lanes = qkv_NX.shape[0]
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    out = checked_output(out, (lanes, num_heads, head_dim), like=qkv_NX)
    if not use_triton(qkv_NX):
        return rope_append_reference(
            qkv_NX,
            cos,
            sin,
            kv,
            block_table_SB,
            slot_N,
            position_N,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight,
            eps=eps,
            norm_after=norm_after,
            kv_scales=kv_scales,
            rows=rows,
            shift_S=shift_S,
            out=out,
        )
    all_heads = num_heads + 2 * num_kv_heads
    half_padded = triton.next_power_of_2(head_dim // 2)
    block_heads = max(1, min(triton.next_power_of_2(all_heads), _BLOCK_PAIRS // half_padded))
    launcher(_rope_append_kernel, (lanes, triton.cdiv(all_heads, block_heads)))(
        qkv_NX,
        cos,
        sin,
        kv if kv_scales is None else kv.view(torch.uint8),
        block_table_SB,
        slot_N,
        position_N,
        q_norm_weight,
        k_norm_weight,
        kv_scales,
        None if rows is None else rows.of_axis,
        None if rows is None else rows.axis_of,
        shift_S,
        out,
        qkv_NX.stride(0),
        kv.stride(0),
        block_table_SB.stride(0),
        min(cos.shape[0], token_capacity(kv, block_table_SB)),
        eps,
        Q=num_heads,
        G=num_kv_heads,
        D=head_dim,
        HALF_PADDED=half_padded,
        BLOCK_HEADS=block_heads,
        BLOCK_SIZE=kv.shape[2],
        NORMED=head_norms(q_norm_weight, after=norm_after),
        FP8=kv_scales is not None,
        TABLE_ROWS=0 if rows is None and shift_S is None else cos.shape[0],
        num_warps=4,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["position_limit"])
def _rope_append_kernel(
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
    row_ptr,
    axis_ptr,
    shift_ptr,
    out_ptr,
    qkv_stride,
    kv_block_stride,
    table_stride,
    position_limit,
    eps,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and BLOCK_HEADS heads, counted through queries, then keys, then values."""
    wait_for_inputs(PDL)
    lane = tl.program_id(0).to(tl.int64)
    # Load both together: one after the other would cost another trip to L2.
    slot = tl.load(slot_ptr + lane)
    position = tl.load(position_ptr + lane)
    if slot < 0:
        return
    inside = (position >= 0) & (position < position_limit)

    HALF: tl.constexpr = D // 2
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, HALF_PADDED)
    pair_mask = pair < HALF
    mask = (head < Q + 2 * G)[:, None] & pair_mask[None, :]
    source = qkv_ptr + lane * qkv_stride + head[:, None] * D + pair[None, :]
    lower = tl.load(source, mask=mask, other=0.0)
    upper = tl.load(source + HALF, mask=mask, other=0.0)
    # A position without an angle gives NaN queries: an error that shows, not a read out of bounds.
    angle = position.to(tl.int64) * HALF + pair
    if TABLE_ROWS:
        if row_ptr is not None:
            axis = tl.load(axis_ptr + pair, mask=pair_mask, other=0)
            row = tl.load(row_ptr + lane * 3 + axis, mask=pair_mask, other=0)
        else:
            row = position + tl.load(shift_ptr + slot) + tl.zeros_like(pair)
        angle = row.to(tl.int64) * HALF + pair
        row = tl.where(pair_mask, row, 0)
        inside = inside & (tl.min(row, axis=0) >= 0) & (tl.max(row, axis=0) < TABLE_ROWS)
    known = pair_mask & inside
    cos = tl.load(cos_ptr + angle, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + angle, mask=known, other=float("nan"))[None, :]
    table_row_ptr = block_table_ptr + slot.to(tl.int64) * table_stride
    entry = cache_offsets(table_row_ptr, position, inside, kv_block_stride, BLOCK_SIZE, G * D)

    dtype = qkv_ptr.dtype.element_ty
    x = lower.to(tl.float32)
    y = upper.to(tl.float32)
    if NORMED:
        if NORMED != NORMED_AFTER:
            scale = _head_scale(x, y, eps, D)
        lower_weight = _norm_weight(q_norm_ptr, k_norm_ptr, head < Q, pair, HALF)
        upper_weight = _norm_weight(q_norm_ptr, k_norm_ptr, head < Q, pair + HALF, D)
        if NORMED != NORMED_AFTER:
            x = scale_head(x, scale, lower_weight, dtype)
            y = scale_head(y, scale, upper_weight, dtype)
    # Values pass as they are.
    is_value = (head >= Q + G)[:, None]
    if NORMED == NORMED_AFTER:
        # Past the head there are no angles.
        turned_lower = tl.where(mask, (x * cos - y * sin).to(dtype).to(tl.float32), 0.0)
        turned_upper = tl.where(mask, (y * cos + x * sin).to(dtype).to(tl.float32), 0.0)
        scale = _head_scale(turned_lower, turned_upper, eps, D)
        x = scale_head(turned_lower, scale, lower_weight, dtype)
        y = scale_head(turned_upper, scale, upper_weight, dtype)
        lower = tl.where(is_value, lower, x.to(dtype))
        upper = tl.where(is_value, upper, y.to(dtype))
    else:
        lower = tl.where(is_value, lower, (x * cos - y * sin).to(dtype))
        upper = tl.where(is_value, upper, (y * cos + x * sin).to(dtype))

    is_query = (head < Q)[:, None]
    target = out_ptr + lane * (Q * D) + head[:, None] * D + pair[None, :]
    tl.store(target, lower, mask=mask & is_query)
    tl.store(target + HALF, upper, mask=mask & is_query)
    # Keys of all heads come first, values BLOCK_SIZE tokens after them.
    kv_head = (head - Q)[:, None]
    offset = tl.where(is_value, (kv_head - G) * D + BLOCK_SIZE * G * D, kv_head * D)
    target = kv_ptr + entry + offset + pair[None, :]
    append_mask = mask & inside & (head >= Q)[:, None]
    if FP8:
        # The scales of the values follow those of the keys, as the heads do.
        is_kv_head = (head >= Q) & (head < Q + 2 * G)
        scale = tl.load(kv_scales_ptr + head - Q, mask=is_kv_head, other=1.0)[:, None]
        lower = quantised_bits(lower.to(tl.float32), scale)
        upper = quantised_bits(upper.to(tl.float32), scale)
    tl.store(target, lower, mask=append_mask)
    tl.store(target + HALF, upper, mask=append_mask)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_query, column, END: tl.constexpr):
    """Norm weights [heads, columns] of query and key heads."""
    mask = column < END
    q_weight = tl.load(q_norm_ptr + column, mask=mask, other=0.0)
    k_weight = tl.load(k_norm_ptr + column, mask=mask, other=0.0)
    return tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def _head_scale(x, y, eps, D: tl.constexpr):
    """1 / rms of heads, [heads, 1], of both halves, float32."""
    mean_square = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / D
    return (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]


@triton.jit
def scale_head(x, scale, weight, dtype: tl.constexpr):
    """Float32 `x` times norm scale and weight, rounded to `dtype` after each, as float32.

    With a weight in float32 it is rounded once, after the weight.
    """
    normed = x * scale
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)


def rope_append_reference(
    qkv_NX: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    kv_scales: torch.Tensor | None = None,
    rows: RopeRows | None = None,
    shift_S: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    entry_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_append` in plain PyTorch, in place on the cache as well.

    entry_N  where in the cache keys and values go, if not to their positions; all lie inside it
    """
    head_dim = kv.shape[4]
    out = checked_output(out, (qkv_NX.shape[0], num_heads, head_dim), like=qkv_NX)
    live = live_rows(slot_N)
    position = position_N[live].long()
    inside = (position >= 0) & (position < min(cos.shape[0], token_capacity(kv, block_table_SB)))
    row_NA = _table_rows(position, slot_N[live], live, rows, shift_S)
    inside &= ((row_NA >= 0) & (row_NA < cos.shape[0])).all(1)
    # The usual case, for each layer of each lane of a CPU engine, has nothing to mask.
    all_inside = bool(inside.all())
    if not all_inside:
        position, row_NA = torch.where(inside, position, 0), torch.where(inside[:, None], row_NA, 0)

    heads = qkv_NX[live].view(len(position), num_heads + 2 * num_kv_heads, head_dim)
    turned, v = heads.tensor_split([num_heads + num_kv_heads], dim=1)
    norms = (
        None if q_norm_weight is None or k_norm_weight is None else (q_norm_weight, k_norm_weight)
    )
    if norms is not None and not norm_after:
        turned = _norm_heads_reference(turned, *norms, num_heads, eps)
    axis = None if rows is None else rows.axis_of.long()
    cos_live, sin_live = (_angles_of(each, row_NA, axis)[:, None] for each in (cos, sin))
    if not all_inside:
        unknown = ~inside[:, None, None]
        cos_live = cos_live.masked_fill(unknown, math.nan)
        sin_live = sin_live.masked_fill(unknown, math.nan)
    turned = _rotate_reference(turned, cos_live, sin_live).to(qkv_NX.dtype)
    if norms is not None and norm_after:
        turned = _norm_heads_reference(turned, *norms, num_heads, eps)
    out[live] = turned[:, :num_heads]
    if not num_kv_heads:
        return out
    k = turned[:, num_heads:]

    block_size = kv.shape[2]
    token = position if entry_N is None else entry_N[live].long()
    block = block_table_SB[slot_N[live].long(), token // block_size].long()
    entry = token % block_size
    if not all_inside:
        block, entry, k, v = (each[inside] for each in (block, entry, k, v))
    append_to_cache(kv, block, entry, k, v, kv_scales)
    return out


def _table_rows(
    position: torch.Tensor,
    slot: torch.Tensor,
    live: torch.Tensor | slice,
    rows: RopeRows | None,
    shift_S: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of the tables of live lanes: int64 [lanes, 3], or [lanes, 1] if all axes agree."""
    if rows is not None:
        return rows.of_axis[live].long()
    return (position if shift_S is None else position + shift_S[slot.long()])[:, None]


def _angles_of(
    table: torch.Tensor, row_NA: torch.Tensor, axis: torch.Tensor | None
) -> torch.Tensor:
    """A table's rows for lanes [lanes, D/2], each pair's along its own axis."""
    if axis is None:
        return table[row_NA[:, 0]]
    return table[row_NA[:, axis], torch.arange(len(axis), device=table.device)]


def _norm_heads_reference(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, eps: float
) -> torch.Tensor:
    """RMSNorm of heads [N, Q + G, D]: queries, then keys."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    parts = zip(normed.tensor_split([num_heads], dim=1), (q_weight, k_weight), strict=True)
    # With a weight in float32 the result is rounded once, after the weight.
    return torch.cat(
        [
            (part if weight.dtype == torch.float32 else part.to(x.dtype)).mul(weight).to(x.dtype)
            for part, weight in parts
        ],
        dim=1,
    )


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lower, upper = x.float().chunk(2, dim=-1)
    return torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1)


def check_rope_rows(
    rows: RopeRows | None, shift_S: torch.Tensor | None, *, lanes: int, head_dim: int
) -> None:
    """Raise ValueError unless rows and shifts fit this many lanes of heads of this size."""
    if rows is not None:
        check_int32(of_axis=rows.of_axis, axis_of=rows.axis_of)
        if rows.of_axis.shape != (lanes, 3) or not rows.of_axis.is_contiguous():
            raise ValueError(f"of_axis must be dense [{lanes}, 3], not {tuple(rows.of_axis.shape)}")
        if rows.axis_of.shape != (head_dim // 2,) or not rows.axis_of.is_contiguous():
            raise ValueError(
                f"axis_of must be dense [{head_dim // 2}], not {tuple(rows.axis_of.shape)}"
            )
    if shift_S is not None:
        check_int32(shift_S=shift_S)
        if shift_S.dim() != 1 or not shift_S.is_contiguous():
            raise ValueError(f"shift_S must be a dense vector, not {tuple(shift_S.shape)}")


def check_rope(
    qkv_NX: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    kv_scales: torch.Tensor | None = None,
) -> int:
    """Raise ValueError for a shape or dtype that does not fit; return head_dim."""
    width = num_heads + 2 * num_kv_heads
    if qkv_NX.dim() != 2 or qkv_NX.shape[1] % width or qkv_NX.stride(1) != 1:
        raise ValueError(
            f"qkv must be [N, D * {width}] with dense rows, not {tuple(qkv_NX.shape)} "
            f"with strides {qkv_NX.stride()}"
        )
    head_dim = qkv_NX.shape[1] // width
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even to be rotated")
    check_cache_dtype(kv, kv_scales, "qkv", qkv_NX.dtype, num_kv_heads or kv.shape[3])
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape != (cos.shape[0], head_dim // 2):
            raise ValueError(
                f"{name} must be float32 [P, {head_dim // 2}], "
                f"not {table.dtype} {tuple(table.shape)}"
            )
        if not table.is_contiguous():
            raise ValueError(f"{name} must be dense, not strided by {table.stride()}")
    return head_dim


def check_norm_weights(
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    qkv_NX: torch.Tensor,
    head_dim: int,
) -> None:
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight come together or not at all")
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None and (
            weight.shape != (head_dim,)
            or weight.dtype not in (qkv_NX.dtype, torch.float32)
            or not weight.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be a dense {qkv_NX.dtype} [{head_dim}], or one of float32, "
                f"not {weight.dtype} {tuple(weight.shape)}"
            )
