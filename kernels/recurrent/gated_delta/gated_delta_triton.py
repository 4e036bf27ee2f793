"""The kernels of `gated_delta.py`; letters as there."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.chunks import lanes_of_chunk
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.norm_rope.activation import silu
from graphengine.kernels.recurrent.conv_triton import (
    conv_weights,
    convolved,
    pushed,
    token_input,
    window_before,
)
from graphengine.kernels.recurrent.pieces import (
    first_piece,
    lanes_of_piece,
    live_lanes,
)
from graphengine.kernels.recurrent.softplus import softplus

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

    Each program convolves its values, and its group's queries and keys, whose inputs the group's
    first program keeps. The number of tokens a row is no constant: one compiled kernel serves all,
    and always sums in the same way.
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
    q_taps = conv_weights(layer.conv_weight, None, of_q, in_k, D, BLOCK_K)
    k_taps = conv_weights(layer.conv_weight, None, of_k, in_k, D, BLOCK_K)
    v_taps = conv_weights(layer.conv_weight, None, of_v, in_v, D, BLOCK_V)
    # Load what earlier steps left; the lanes are older than the launch before, too.
    first = tl.program_id(0) * tokens
    slot = tl.load(slot_ptr + first, cache_modifier=".cg").to(tl.int64)
    start = tl.load(position_ptr + first, cache_modifier=".cg")
    row_lives = slot >= 0
    slot = tl.maximum(slot, 0)
    cells = state_ptr + (slot * entries * H + head) * (K * V) + k[:, None] * V + v[None, :]
    mask = in_k[:, None] & in_v[None, :]
    before = ((start + entries - 1) % entries).to(tl.int64)
    there = mask & row_lives & (start > 0)
    s = tl.load(cells + before * (H * K * V), mask=there, other=0.0, cache_modifier=".cg")
    s = s.to(tl.float32)
    ring_ptr += slot * ring_entries * C
    ring = (start, ring_entries)
    q_window = window_before(ring_ptr + of_q, *ring, row_lives & in_k, C, D)
    k_window = window_before(ring_ptr + of_k, *ring, row_lives & in_k, C, D)
    v_window = window_before(ring_ptr + of_v, *ring, row_lives & in_v, C, D)
    wait_for_inputs(PDL)
    if not row_lives:
        return
    keeps = (head % (H // G) == 0) & (tl.program_id(2) == 0)
    for token in range(tokens):
        lane = (first + token).to(tl.int64)
        # Draft tokens that do not exist come last.
        live = tl.load(slot_ptr + lane) >= 0
        row_ptr = projected_ptr + lane * projected_stride
        here = start + token
        entry_ptr = ring_ptr + (here % ring_entries).to(tl.int64) * C
        own = token_input(row_ptr + of_q, entry_ptr + of_q, live & in_k, keeps)
        x_q = silu(convolved(q_window, own, q_taps, D))
        q_window = pushed(q_window, own, D)
        own = token_input(row_ptr + of_k, entry_ptr + of_k, live & in_k, keeps)
        x_k = silu(convolved(k_window, own, k_taps, D))
        k_window = pushed(k_window, own, D)
        own = token_input(row_ptr + of_v, entry_ptr + of_v, live & in_v, True)
        x_v = silu(convolved(v_window, own, v_taps, D))
        v_window = pushed(v_window, own, D)
        x_k = x_k / tl.sqrt_rn(tl.sum(x_k * x_k, 0) + _NORM_EPS)
        x_q = x_q / tl.sqrt_rn(tl.sum(x_q * x_q, 0) + _NORM_EPS) * (1.0 / K**0.5)
        gates = row_ptr + C + H * V + head
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
    query_start_ptr,
    layer,
    q_ptr,
    k_ptr,
    u_ptr,
    w_ptr,
    met_ptr,
    decay_ptr,
    qkv_stride,
    projected_stride,
    lanes,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece and head of values: the part of a piece that does not need the state.

    With `sums` of the logarithms of the decays from the piece's first token on, A[i, j] =
    beta[i] k[i].k[j] exp(sums[i] - sums[j]) below the diagonal, and T = (I + A)^-1:

    q, k   exp(sums) q, and exp(sums of the last token - sums) k
    u, w   T (beta v) and T (beta exp(sums) k): the state's part of u is w @ state
    met    q[i].k[j] exp(sums[i] - sums[j]) up to the diagonal
    decay  the decay over the whole piece
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (H // G)
    rate = -tl.exp(tl.load(layer.a_log + head))
    dt_bias = tl.load(layer.dt_bias + head)
    wait_for_inputs(PDL)
    lane, there = lanes_of_piece(
        slot_ptr, position_ptr, query_start_ptr, lanes, piece, PROMPTS, BLOCK_T, PIECE
    )
    if tl.max(there.to(tl.int32), 0) == 0:
        return
    i = tl.arange(0, PIECE)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = there[:, None] & (k < K)[None, :]
    in_v = there[:, None] & (v < V)[None, :]
    at = (head * lanes + lane)[:, None]
    gates = projected_ptr + lane * projected_stride + (2 * G * K + 2 * H * V + head)
    b = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    a = tl.load(gates + H, mask=there, other=0.0).to(tl.float32)
    beta = tl.where(there, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    steps = tl.where(there, rate * softplus(a + dt_bias), 0.0)
    sums = tl.cumsum(steps, 0)
    whole = tl.sum(steps, 0)
    tl.store(decay_ptr + piece * H + head, tl.exp(whole))
    # Above the diagonal some exponentials would be infinite.
    powers = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    # One matrix after the other: all at once would not fit a program's registers.
    row = qkv_ptr + lane[:, None] * qkv_stride
    x_k = _unit_rows(row + ((G + group) * K + k)[None, :], in_k)
    tl.store(k_ptr + at * K + k[None, :], x_k * tl.exp(whole - sums)[:, None], mask=in_k)
    x_q = _unit_rows(row + (group * K + k)[None, :], in_k) * (1.0 / K**0.5)
    tl.store(q_ptr + at * K + k[None, :], x_q * tl.exp(sums)[:, None], mask=in_k)
    met = tl.dot(x_q, tl.trans(x_k), input_precision=PRECISION) * powers
    met = tl.where(i[:, None] >= i[None, :], met, 0.0)
    tl.store(met_ptr + at * PIECE + i[None, :], met, mask=there[:, None])
    of_keys = tl.dot(x_k, tl.trans(x_k), input_precision=PRECISION) * powers * beta[:, None]
    of_keys = tl.where(i[:, None] > i[None, :], of_keys, 0.0)
    inverse = _unit_lower_inverse(of_keys, PIECE, PRECISION)
    x_k *= (beta * tl.exp(sums))[:, None]
    w = tl.dot(inverse, x_k, input_precision=PRECISION)
    tl.store(w_ptr + at * K + k[None, :], w, mask=in_k)
    x_v = tl.load(row + (2 * G * K + head * V + v)[None, :], mask=in_v, other=0.0).to(tl.float32)
    u = tl.dot(inverse, x_v * beta[:, None], input_precision=PRECISION)
    tl.store(u_ptr + at * V + v[None, :], u, mask=in_v)


@triton.jit
def _unit_rows(ptrs, mask):
    """Rows divided by their lengths, in float32."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return x / tl.sqrt_rn(tl.sum(x * x, 1) + _NORM_EPS)[:, None]


@triton.jit
def _unit_lower_inverse(a, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [SIZE, SIZE] of four blocks of rows.

    The four blocks of the diagonal are inverted at once, row after row. With D these inverses and L
    the part of `a` below them, I + a is D^-1 (I + D L), and (D L)^4 is zero.
    """
    BLOCK: tl.constexpr = SIZE // 4
    i = tl.arange(0, SIZE)
    own = i[:, None] // BLOCK == i[None, :] // BLOCK
    diagonal = tl.sum(tl.reshape(tl.where(own, a, 0.0), (4, BLOCK, 4, BLOCK)), 2)
    r = tl.arange(0, BLOCK)
    inverses = (r[:, None] == r[None, :]).to(tl.float32)[None, :, :] + tl.zeros_like(diagonal)
    for row in range(1, BLOCK):
        at = (r == row)[None, :, None]
        of_row = tl.sum(tl.where(at, diagonal, 0.0), 1)
        known = tl.sum(of_row[:, :, None] * inverses, 1)
        new = tl.where((r == row)[None, :], 1.0, -known)
        inverses = tl.where(at, new[:, None, :], inverses)
    spread = tl.broadcast_to(inverses[:, :, None, :], (4, BLOCK, 4, BLOCK))
    inverses = tl.where(own, tl.reshape(spread, (SIZE, SIZE)), 0.0)
    below = tl.dot(inverses, tl.where(own, 0.0, a), input_precision=PRECISION)
    squared = tl.dot(below, below, input_precision=PRECISION)
    # I - N + N^2 - N^3
    series = (i[:, None] == i[None, :]).to(tl.float32) - below
    series = tl.dot(series, squared, acc=series, input_precision=PRECISION)
    return tl.dot(series, inverses, input_precision=PRECISION)


@triton.jit(do_not_specialize=["lanes", "entries"])
def scan_kernel(
    k_ptr,
    u_ptr,
    w_ptr,
    decay_ptr,
    states_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    lanes,
    entries,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, BLOCK_V of its values and a chunk, through all pieces of the chunk: it
    stores the state before each piece, and subtracts from u, in place, what the state predicted.
    """
    head = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    first = 0
    count = lanes
    if query_start_ptr is not None:
        chunk = tl.program_id(2)
        first, count = lanes_of_chunk(query_start_ptr, chunk)
        if count == 0:
            return
        piece = first_piece(first, chunk, PIECE)
        decay_ptr += piece * H
        states_ptr += piece * (H * K * V)
    slot = tl.load(slot_ptr + first).to(tl.int64)
    if slot < 0:
        return
    live = live_lanes(slot_ptr + first, count, BLOCK_T)
    position = tl.load(position_ptr + first)
    mask = (k < K)[:, None] & (v < V)[None, :]
    of_head = head * (K * V) + k[:, None] * V + v[None, :]
    cells = state_ptr + slot * entries * (H * K * V) + of_head
    before = ((position + entries - 1) % entries).to(tl.int64)
    s = tl.load(cells + before * (H * K * V), mask=mask & (position > 0), other=0.0).to(tl.float32)
    i = tl.arange(0, PIECE)
    states_ptrs = states_ptr + of_head
    # The piece's tokens; the first ones may lie before the chunk.
    for start in range(-(position % PIECE), live, PIECE):
        lane = (start + i).to(tl.int64)
        there = (lane >= 0) & (lane < live)
        lane += first
        in_k = there[:, None] & (k < K)[None, :]
        in_v = there[:, None] & (v < V)[None, :]
        at = (head * lanes + lane)[:, None]
        x_k = tl.load(k_ptr + at * K + k[None, :], mask=in_k, other=0.0)
        w = tl.load(w_ptr + at * K + k[None, :], mask=in_k, other=0.0)
        u_ptrs = u_ptr + at * V + v[None, :]
        u = tl.load(u_ptrs, mask=in_v, other=0.0)
        decay = tl.load(decay_ptr + head)
        tl.store(states_ptrs, s, mask=mask)
        delta = u - tl.dot(w, s, input_precision=PRECISION)
        tl.store(u_ptrs, delta, mask=in_v)
        s = tl.dot(tl.trans(x_k), delta, acc=s * decay, input_precision=PRECISION)
        decay_ptr += H
        states_ptrs += H * K * V
    last = ((position + live - 1) % entries).to(tl.int64)
    tl.store(cells + last * (H * K * V), s.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lanes", "eps"])
def outputs_kernel(
    q_ptr,
    u_ptr,
    met_ptr,
    states_ptr,
    projected_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    norm_ptr,
    out_ptr,
    projected_stride,
    out_stride,
    lanes,
    eps,
    C: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece and head: what its tokens read from the state before it and from each
    other, normed, times silu(z).
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    i = tl.arange(0, PIECE)
    norm = tl.load(norm_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    lane, there = lanes_of_piece(
        slot_ptr, position_ptr, query_start_ptr, lanes, piece, PROMPTS, BLOCK_T, PIECE
    )
    if tl.max(there.to(tl.int32), 0) == 0:
        return
    in_v = there[:, None] & (v < V)[None, :]
    at = (head * lanes + lane)[:, None]
    q = tl.load(q_ptr + at * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
    s_ptrs = states_ptr + (piece * H + head).to(tl.int64) * (K * V) + k[:, None] * V + v[None, :]
    s = tl.load(s_ptrs, mask=(k < K)[:, None] & (v < V)[None, :], other=0.0)
    y = tl.dot(q, s, input_precision=PRECISION)
    met = tl.load(met_ptr + at * PIECE + i[None, :], mask=there[:, None], other=0.0)
    delta = tl.load(u_ptr + at * V + v[None, :], mask=in_v, other=0.0)
    y = tl.dot(met, delta, acc=y, input_precision=PRECISION)
    z_ptrs = projected_ptr + lane[:, None] * projected_stride + (C + head * V + v)[None, :]
    z = tl.load(z_ptrs, mask=in_v, other=0.0).to(tl.float32)
    y = y / tl.sqrt_rn(tl.sum(y * y, 1) / V + eps)[:, None] * norm[None, :] * silu(z)
    target = out_ptr + lane[:, None] * out_stride + (head * V + v)[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=in_v)


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
    # The launch before writes only y.
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    z_ptrs = projected_ptr + lane * projected_stride + C + head * V + v
    z = tl.load(z_ptrs, mask=mask & live, other=0.0, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs(PDL)
    if not live:
        return
    y = tl.load(y_ptr + lane * (H * V) + head * V + v, mask=mask, other=0.0)
    y = y / tl.sqrt_rn(tl.sum(y * y, 0) / V + eps) * norm
    target = out_ptr + lane * out_stride + head * V + v
    tl.store(target, (y * silu(z)).to(out_ptr.dtype.element_ty), mask=mask)
