"""The kernels of `mamba2.py`; letters as there."""

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


@triton.jit(do_not_specialize=["lanes", "tokens", "ring_entries", "entries", "dt_min", "dt_max"])
def decode_kernel(
    projected_ptr,
    ring_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    layer,
    gate_ptr,
    y_ptr,
    squares_ptr,
    projected_stride,
    lanes,
    tokens,
    ring_entries,
    entries,
    dt_min,
    dt_max,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row, head, and BLOCK_P values of the head.

    Each program convolves its x, and its group's B and C, whose inputs the group's first program
    keeps. The number of tokens a row is no constant: one compiled kernel serves all, and always
    sums in the same way. With `squares_ptr`, y becomes u = y * silu(z) times the gate's weight, and
    squares get the sum of u**2.
    """
    INNER: tl.constexpr = H * P
    CHANNELS: tl.constexpr = INNER + 2 * G * K
    WIDE: tl.constexpr = max(BLOCK_P, 128)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.arange(0, BLOCK_K)
    dt_bias = tl.load(layer.dt_bias + head).to(tl.float32)
    rate = -tl.exp(tl.load(layer.a_log + head).to(tl.float32))
    skip = tl.load(layer.skip + head).to(tl.float32)
    of_x = head * P + p
    of_b = INNER + head // (H // G) * K + k
    of_c = of_b + G * K
    weights = (layer.conv_weight, layer.conv_bias)
    # A thread has one value at most; in the layout of the state's rows it would have many.
    wide = tl.arange(0, WIDE)
    of_wide = head * P + tile * BLOCK_P + wide
    in_wide = (wide < BLOCK_P) & (tile * BLOCK_P + wide < P)
    x_taps = conv_weights(*weights, of_wide, in_wide, D, WIDE)
    b_taps = conv_weights(*weights, of_b, k < K, D, BLOCK_K)
    c_taps = conv_weights(*weights, of_c, k < K, D, BLOCK_K)
    if squares_ptr is not None:
        gate = tl.load(gate_ptr + of_x, mask=p < P, other=0.0).to(tl.float32)
    # Load what earlier steps left; the lanes are older than the launch before, too.
    first = tl.program_id(0) * tokens
    slot = tl.load(slot_ptr + first, cache_modifier=".cg").to(tl.int64)
    position = tl.load(position_ptr + first, cache_modifier=".cg")
    row_lives = slot >= 0
    slot = tl.maximum(slot, 0)
    mask = (p < P)[:, None] & (k < K)[None, :]
    cells = state_ptr + slot * entries * (INNER * K) + head * (P * K)
    cells = cells + p[:, None] * K + k[None, :]
    before = ((position + entries - 1) % entries).to(tl.int64)
    there = mask & row_lives & (position > 0)
    h = tl.load(cells + before * (INNER * K), mask=there, other=0.0, cache_modifier=".cg")
    h = h.to(tl.float32)
    ring_ptr += slot * ring_entries * CHANNELS
    ring = (position, ring_entries)
    x_window = window_before(ring_ptr + of_wide, *ring, row_lives & in_wide, CHANNELS, D)
    b_window = window_before(ring_ptr + of_b, *ring, row_lives & (k < K), CHANNELS, D)
    c_window = window_before(ring_ptr + of_c, *ring, row_lives & (k < K), CHANNELS, D)
    wait_for_inputs(PDL)
    if not row_lives:
        return
    keeps = (head % (H // G) == 0) & (tile == 0)
    for token in range(tokens):
        lane = (first + token).to(tl.int64)
        # Draft tokens that do not exist come last.
        live = tl.load(slot_ptr + lane) >= 0
        row_ptr = projected_ptr + lane * projected_stride
        here = position + token
        entry_ptr = ring_ptr + (here % ring_entries).to(tl.int64) * CHANNELS
        in_x, in_k = live & (p < P), live & (k < K)
        inputs_ptr = row_ptr + INNER
        own = token_input(inputs_ptr + of_wide, entry_ptr + of_wide, live & in_wide, True)
        x = silu(convolved(x_window, own, x_taps, D))
        x_window = pushed(x_window, own, D)
        x = tl.gather(x, tl.arange(0, BLOCK_P), 0)
        own = token_input(inputs_ptr + of_b, entry_ptr + of_b, in_k, keeps)
        b = silu(convolved(b_window, own, b_taps, D))
        b_window = pushed(b_window, own, D)
        own = token_input(inputs_ptr + of_c, entry_ptr + of_c, in_k, keeps)
        c = silu(convolved(c_window, own, c_taps, D))
        c_window = pushed(c_window, own, D)
        dt = tl.load(row_ptr + INNER + CHANNELS + head, mask=live, other=0.0).to(tl.float32)
        dt = _time_step(dt + dt_bias, dt_min, dt_max)
        h = tl.exp(dt * rate) * h + (dt * x)[:, None] * b[None, :]
        stored = h.to(state_ptr.dtype.element_ty)
        h = stored.to(tl.float32)
        tl.store(cells + (here % entries).to(tl.int64) * (INNER * K), stored, mask=mask & live)
        y = tl.sum(h * c[None, :], 1) + skip * x
        if squares_ptr is not None:
            z = tl.load(row_ptr + of_x, mask=in_x, other=0.0).to(tl.float32)
            y *= silu(z)
            group = head * tl.num_programs(2) + tile
            tl.store(squares_ptr + group * lanes + lane, tl.sum(y * y, 0), mask=live)
            y *= gate
        tl.store(y_ptr + lane * INNER + of_x, y.to(y_ptr.dtype.element_ty), mask=in_x)


@triton.jit
def _time_step(x, dt_min, dt_max):
    """softplus(x) within its limits."""
    return tl.minimum(tl.maximum(softplus(x), dt_min), dt_max)


@triton.jit(do_not_specialize=["lanes", "dt_min", "dt_max"])
def pieces_kernel(
    xbc_ptr,
    dt_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    layer,
    states_ptr,
    decay_ptr,
    xbc_stride,
    dt_stride,
    lanes,
    dt_min,
    dt_max,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece, head, and BLOCK_P values of it: what the tokens have added to the state
    by the piece's end, and how much the state has decayed until then.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.arange(0, BLOCK_K)
    dt_bias = tl.load(layer.dt_bias + head).to(tl.float32)
    rate = -tl.exp(tl.load(layer.a_log + head).to(tl.float32))
    wait_for_inputs(PDL)
    lane, there = lanes_of_piece(
        slot_ptr, position_ptr, query_start_ptr, lanes, piece, PROMPTS, BLOCK_T, PIECE
    )
    if tl.max(there.to(tl.int32), 0) == 0:
        return
    dt = tl.load(dt_ptr + lane * dt_stride + head, mask=there, other=0.0).to(tl.float32)
    dt = tl.where(there, _time_step(dt + dt_bias, dt_min, dt_max), 0.0)
    decayed = tl.cumsum(dt * rate, 0)
    whole = tl.sum(dt * rate, 0)
    row_ptr = xbc_ptr + lane[:, None] * xbc_stride
    narrow = there[:, None] & (p < P)[None, :]
    x = tl.load(row_ptr + head * P + p[None, :], mask=narrow, other=0.0).to(tl.float32)
    b_ptrs = row_ptr + H * P + head // (H // G) * K + k[None, :]
    b = tl.load(b_ptrs, mask=there[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    kept = x * (dt * tl.exp(whole - decayed))[:, None]
    added = tl.dot(tl.trans(kept), b, input_precision=PRECISION)
    at = (piece * H + head).to(tl.int64)
    cells = states_ptr + at * (P * K) + p[:, None] * K + k[None, :]
    tl.store(cells, added, mask=(p < P)[:, None] & (k < K)[None, :])
    if tl.program_id(2) == 0:
        tl.store(decay_ptr + at, tl.exp(whole))


@triton.jit(do_not_specialize=["lanes", "entries"])
def pass_kernel(
    states_ptr,
    decay_ptr,
    state_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    lanes,
    entries,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, BLOCK numbers of its state and a chunk, through all pieces of the chunk:
    it replaces what each piece adds by the state before the piece.
    """
    head = tl.program_id(0)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cell < P * K
    wait_for_inputs(PDL)
    first = 0
    count = lanes
    if query_start_ptr is not None:
        chunk = tl.program_id(2)
        first, count = lanes_of_chunk(query_start_ptr, chunk)
        if count == 0:
            return
        first_of_chunk = first_piece(first, chunk, PIECE)
        decay_ptr += first_of_chunk * H
        states_ptr += first_of_chunk * (H * P * K)
    slot = tl.load(slot_ptr + first).to(tl.int64)
    if slot < 0:
        return
    live = live_lanes(slot_ptr + first, count, BLOCK_T)
    position = tl.load(position_ptr + first)
    cells = state_ptr + (slot * entries * H + head) * (P * K) + cell
    before = ((position + entries - 1) % entries).to(tl.int64)
    h = tl.load(cells + before * (H * P * K), mask=mask & (position > 0), other=0.0)
    h = h.to(tl.float32)
    pieces = (position % PIECE + live + PIECE - 1) // PIECE
    ptrs = states_ptr + head * (P * K) + cell
    decay_ptr += head
    # Load a piece ahead, so that no load is waited for.
    added = tl.load(ptrs, mask=mask)
    decay = tl.load(decay_ptr)
    for piece in range(pieces):
        decay_ptr += H
        follows = piece + 1 < pieces
        next_added = tl.load(ptrs + H * P * K, mask=mask & follows, other=0.0)
        next_decay = tl.load(decay_ptr, mask=follows, other=0.0)
        tl.store(ptrs, h, mask=mask)
        h = h * decay + added
        added, decay = next_added, next_decay
        ptrs += H * P * K
    last = ((position + live - 1) % entries).to(tl.int64)
    tl.store(cells + last * (H * P * K), h.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["lanes", "dt_min", "dt_max"])
def outputs_kernel(
    xbc_ptr,
    dt_ptr,
    states_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    layer,
    y_ptr,
    xbc_stride,
    dt_stride,
    y_stride,
    lanes,
    dt_min,
    dt_max,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece, head, and BLOCK_P values of it: what tokens read from the state before
    the piece, and from each other.
    """
    piece = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.arange(0, BLOCK_K)
    i = tl.arange(0, PIECE)
    dt_bias = tl.load(layer.dt_bias + head).to(tl.float32)
    rate = -tl.exp(tl.load(layer.a_log + head).to(tl.float32))
    skip = tl.load(layer.skip + head).to(tl.float32)
    wait_for_inputs(PDL)
    lane, there = lanes_of_piece(
        slot_ptr, position_ptr, query_start_ptr, lanes, piece, PROMPTS, BLOCK_T, PIECE
    )
    if tl.max(there.to(tl.int32), 0) == 0:
        return
    dt = tl.load(dt_ptr + lane * dt_stride + head, mask=there, other=0.0).to(tl.float32)
    dt = tl.where(there, _time_step(dt + dt_bias, dt_min, dt_max), 0.0)
    decayed = tl.cumsum(dt * rate, 0)
    row_ptr = xbc_ptr + lane[:, None] * xbc_stride
    of_group = row_ptr + H * P + head // (H // G) * K + k[None, :]
    wide = there[:, None] & (k < K)[None, :]
    narrow = there[:, None] & (p < P)[None, :]
    b = tl.load(of_group, mask=wide, other=0.0).to(tl.float32)
    c = tl.load(of_group + G * K, mask=wide, other=0.0).to(tl.float32)
    # What token i reads of what token j <= i has written.
    met = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    # Above the diagonal, where none is needed, some exponentials would be infinite.
    decay = tl.exp(tl.minimum(decayed[:, None] - decayed[None, :], 0.0))
    met = tl.where(i[:, None] >= i[None, :], met * decay * dt[None, :], 0.0)
    at = (piece * H + head).to(tl.int64)
    cells = states_ptr + at * (P * K) + p[:, None] * K + k[None, :]
    h = tl.load(cells, mask=(p < P)[:, None] & (k < K)[None, :], other=0.0)
    y = tl.dot(c, tl.trans(h), input_precision=PRECISION) * tl.exp(decayed)[:, None]
    x = tl.load(row_ptr + head * P + p[None, :], mask=narrow, other=0.0).to(tl.float32)
    y = tl.dot(met, x, acc=y, input_precision=PRECISION)
    y += skip * x
    target = y_ptr + lane[:, None] * y_stride + head * P + p[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=narrow)


@triton.jit
def norm_kernel(
    y_ptr,
    z_ptr,
    weight_ptr,
    slot_ptr,
    out_ptr,
    y_stride,
    z_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and group."""
    lane = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    mask = w < WIDTH
    w += tl.program_id(1) * WIDTH
    weight = tl.load(weight_ptr + w, mask=mask, other=0.0).to(tl.float32)
    # The launch before writes only y.
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    z_ptrs = z_ptr + lane * z_stride + w
    z = tl.load(z_ptrs, mask=mask & live, other=0.0, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs(PDL)
    if not live:
        return
    y = tl.load(y_ptr + lane * y_stride + w, mask=mask, other=0.0).to(tl.float32)
    u = y * silu(z)
    scale = 1.0 / tl.sqrt_rn(tl.sum(u * u, 0) / WIDTH + eps)
    out = (u * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + lane * out_stride + w, out, mask=mask)
