"""The kernels of `gated_delta.py`, whose letters they have."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.norm_rope.activation import silu
from graphengine.kernels.recurrent.conv_triton import convolve_token
from graphengine.kernels.recurrent.softplus import softplus

PIECE = 64
"""Positions of a chunk's piece."""
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["tokens", "ring_entries", "entries"])
def decode_kernel(
    projected_ptr,
    ring_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    layer,
    y_ptr,
    projected_stride,
    tokens,
    ring_entries,
    entries,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, a head and BLOCK_V of its values, through the row's tokens.

    Each convolves its values, and its group's queries and keys, of which the group's first program
    keeps the inputs. How many tokens a row has is no constant: one program text serves all, and
    sums alike.
    """
    C: tl.constexpr = 2 * G * K + H * V
    head = tl.program_id(1)
    group = head // (H // G)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < K, v < V
    of_q = group * K + k
    of_k = of_q + G * K
    of_v = 2 * G * K + head * V + v
    rate = -tl.exp(tl.load(layer.a_log + head))
    dt_bias = tl.load(layer.dt_bias + head)
    wait_for_inputs(PDL)
    first = tl.program_id(0) * tokens
    slot = tl.load(slot_ptr + first).to(tl.int64)
    if slot < 0:
        return
    start = tl.load(position_ptr + first)
    cells = state_ptr + (slot * entries * H + head) * (K * V) + k[:, None] * V + v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    before = ((start + entries - 1) % entries).to(tl.int64)
    s = tl.load(cells + before * (H * K * V), mask=mask & (start > 0), other=0.0).to(tl.float32)
    ring = ring_ptr + slot * ring_entries * C
    keeps = (head % (H // G) == 0) & (tl.program_id(2) == 0)
    for token in range(tokens):
        lane = (first + token).to(tl.int64)
        # The draft tokens that are not there come last.
        live = tl.load(slot_ptr + lane) >= 0
        row = projected_ptr + lane * projected_stride
        here = start + token
        conv = (row, projected_stride, ring, ring_entries, token, here)
        weights = (layer.conv_weight, None)
        x_q = convolve_token(conv, weights, of_q, live & in_k, keeps, C, D)
        x_k = convolve_token(conv, weights, of_k, live & in_k, keeps, C, D)
        x_v = convolve_token(conv, weights, of_v, live & in_v, True, C, D)
        x_k = x_k / tl.sqrt_rn(tl.sum(x_k * x_k, 0) + _NORM_EPS)
        x_q = x_q / tl.sqrt_rn(tl.sum(x_q * x_q, 0) + _NORM_EPS) * (1.0 / K**0.5)
        gates = row + C + H * V + head
        b = tl.load(gates, mask=live, other=0.0).to(tl.float32)
        a = tl.load(gates + H, mask=live, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b))
        s = s * tl.exp(rate * softplus(a + dt_bias))
        delta = (x_v - tl.sum(s * x_k[:, None], 0)) * beta
        stored = tl.fma(
            tl.broadcast_to(x_k[:, None], s.shape), tl.broadcast_to(delta[None, :], s.shape), s
        ).to(state_ptr.dtype.element_ty)
        s = stored.to(tl.float32)
        entry = (here % entries).to(tl.int64)
        tl.store(cells + entry * (H * K * V), stored, mask=mask & live)
        y = tl.sum(s * x_q[:, None], 0)
        tl.store(y_ptr + lane * (H * V) + head * V + v, y, mask=live & in_v)


@triton.jit(do_not_specialize=["lanes"])
def pieces_kernel(
    qkv_ptr,
    projected_ptr,
    slot_ptr,
    position_ptr,
    layer,
    q_ptr,
    k_ptr,
    u_ptr,
    w_ptr,
    sums_ptr,
    qkv_stride,
    projected_stride,
    lanes,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece and head of values: what of a piece does not depend on the state.

    With A[i, j] = beta[i] k[i].k[j] exp(sums[i] - sums[j]) below the diagonal and T = (I + A)^-1:
    u = T (beta v) and w = T (beta exp(sums) k), of which the state's part of u is w @ state.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (H // G)
    rate = -tl.exp(tl.load(layer.a_log + head))
    dt_bias = tl.load(layer.dt_bias + head)
    wait_for_inputs(PDL)
    live = _live_lanes(slot_ptr, lanes, BLOCK_T)
    i = tl.arange(0, PIECE)
    lane = (piece * PIECE - tl.load(position_ptr) % PIECE + i).to(tl.int64)
    if tl.load(slot_ptr) < 0:
        return
    there = (lane >= 0) & (lane < live)
    if tl.max(there.to(tl.int32), 0) == 0:
        return
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = there[:, None] & (k < K)[None, :]
    in_v = there[:, None] & (v < V)[None, :]
    row = qkv_ptr + lane[:, None] * qkv_stride
    x_q = tl.load(row + (group * K + k)[None, :], mask=in_k, other=0.0).to(tl.float32)
    x_k = tl.load(row + ((G + group) * K + k)[None, :], mask=in_k, other=0.0).to(tl.float32)
    x_v = tl.load(row + (2 * G * K + head * V + v)[None, :], mask=in_v, other=0.0).to(tl.float32)
    x_q = x_q / tl.sqrt_rn(tl.sum(x_q * x_q, 1) + _NORM_EPS)[:, None] * (1.0 / K**0.5)
    x_k = x_k / tl.sqrt_rn(tl.sum(x_k * x_k, 1) + _NORM_EPS)[:, None]
    gates = projected_ptr + lane * projected_stride + (2 * G * K + 2 * H * V + head)
    b = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    a = tl.load(gates + H, mask=there, other=0.0).to(tl.float32)
    beta = tl.where(there, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    sums = tl.cumsum(tl.where(there, rate * softplus(a + dt_bias), 0.0), 0)
    met = tl.dot(x_k, tl.trans(x_k), input_precision=PRECISION)
    # Above the diagonal some powers would be infinite.
    met *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * beta[:, None]
    met = tl.where(i[:, None] > i[None, :], met, 0.0)
    inverse = _unit_lower_inverse(met, PIECE)
    u = tl.dot(inverse, x_v * beta[:, None], input_precision=PRECISION)
    w = tl.dot(inverse, x_k * (beta * tl.exp(sums))[:, None], input_precision=PRECISION)
    at = (head * lanes + lane)[:, None]
    tl.store(q_ptr + at * K + k[None, :], x_q.to(q_ptr.dtype.element_ty), mask=in_k)
    tl.store(k_ptr + at * K + k[None, :], x_k.to(k_ptr.dtype.element_ty), mask=in_k)
    tl.store(u_ptr + at * V + v[None, :], u.to(u_ptr.dtype.element_ty), mask=in_v)
    tl.store(w_ptr + at * K + k[None, :], w.to(w_ptr.dtype.element_ty), mask=in_k)
    tl.store(sums_ptr + head * lanes + lane, sums, mask=there)


@triton.jit
def _unit_lower_inverse(a, SIZE: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a, a row after the other."""
    i = tl.arange(0, SIZE)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for row in range(1, SIZE):
        of_row = tl.sum(tl.where(i[:, None] == row, a, 0.0), 0)
        known = tl.sum(of_row[:, None] * inverse, 0)
        new = tl.where(i == row, 1.0, -known)
        inverse = tl.where(i[:, None] == row, new[None, :], inverse)
    return inverse


@triton.jit
def _live_lanes(slot_ptr, lanes, BLOCK_T: tl.constexpr):
    t = tl.arange(0, BLOCK_T)
    slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
    return tl.sum((slots >= 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=["lanes", "entries"])
def scan_kernel(
    q_ptr,
    k_ptr,
    u_ptr,
    w_ptr,
    sums_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    y_ptr,
    lanes,
    entries,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head and BLOCK_V of its values, through all pieces of the chunk."""
    head = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot < 0:
        return
    live = _live_lanes(slot_ptr, lanes, BLOCK_T)
    position = tl.load(position_ptr)
    mask = (k < K)[:, None] & (v < V)[None, :]
    cells = state_ptr + (slot * entries * H + head) * (K * V) + k[:, None] * V + v[None, :]
    before = ((position + entries - 1) % entries).to(tl.int64)
    s = tl.load(cells + before * (H * K * V), mask=mask & (position > 0), other=0.0).to(tl.float32)
    i = tl.arange(0, PIECE)
    for start in range(-(position % PIECE), live, PIECE):
        lane = (start + i).to(tl.int64)
        there = (lane >= 0) & (lane < live)
        in_k = there[:, None] & (k < K)[None, :]
        in_v = there[:, None] & (v < V)[None, :]
        at = (head * lanes + lane)[:, None]
        x_q = tl.load(q_ptr + at * K + k[None, :], mask=in_k, other=0.0).to(tl.float32)
        x_k = tl.load(k_ptr + at * K + k[None, :], mask=in_k, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + at * K + k[None, :], mask=in_k, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + at * V + v[None, :], mask=in_v, other=0.0).to(tl.float32)
        # Past the last lane the sums stay as they are.
        sums = tl.load(sums_ptr + head * lanes + lane, mask=there, other=0.0)
        whole = tl.min(sums, 0)
        delta = u - tl.dot(w, s, input_precision=PRECISION)
        y = tl.dot(x_q * tl.exp(sums)[:, None], s, input_precision=PRECISION)
        met = tl.dot(x_q, tl.trans(x_k), input_precision=PRECISION)
        met *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        met = tl.where(i[:, None] >= i[None, :], met, 0.0)
        y = tl.dot(met, delta, acc=y, input_precision=PRECISION)
        tl.store(y_ptr + lane[:, None] * (H * V) + head * V + v[None, :], y, mask=in_v)
        kept = x_k * tl.exp(whole - sums)[:, None]
        s = tl.dot(tl.trans(kept), delta, acc=s * tl.exp(whole), input_precision=PRECISION)
    last = ((position + live - 1) % entries).to(tl.int64)
    tl.store(cells + last * (H * K * V), s.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def gated_norm_kernel(
    y_ptr,
    projected_ptr,
    slot_ptr,
    norm_ptr,
    out_ptr,
    projected_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and head: the norm of what it read, times silu(z)."""
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    v = tl.arange(0, BLOCK_V)
    mask = v < V
    norm = tl.load(norm_ptr + v, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if tl.load(slot_ptr + lane) < 0:
        return
    y = tl.load(y_ptr + lane * (H * V) + head * V + v, mask=mask, other=0.0)
    y = y / tl.sqrt_rn(tl.sum(y * y, 0) / V + eps) * norm
    z_ptrs = projected_ptr + lane * projected_stride + C + head * V + v
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + lane * out_stride + head * V + v
    tl.store(target, (y * silu(z)).to(out_ptr.dtype.element_ty), mask=mask)
