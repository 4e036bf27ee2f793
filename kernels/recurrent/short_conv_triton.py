"""The kernels of `short_conv.py`, whose letters they have."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs


@triton.jit(do_not_specialize=["tokens", "entries"])
def decode_kernel(
    bcx_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    bcx_stride,
    tokens,
    entries,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and BLOCK_C channels.

    How many tokens a row has is no constant: one program text serves all, and sums alike.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    weights, start = _weights(weight_ptr, bias_ptr, c, mask, C, D, BLOCK_C)
    wait_for_inputs(PDL)
    first = tl.program_id(0) * tokens
    slot = tl.load(slot_ptr + first).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(position_ptr + first)
    kept_ptrs = kept_ptr + slot * entries * C + c
    window = ()
    for tap in tl.static_range(D - 1):
        window += (_kept(kept_ptrs, position - (D - 1) + tap, mask, entries, C),)  # type: ignore[assignment]
    for token in range(tokens):
        lane = (first + token).to(tl.int64)
        # The draft tokens that are not there come last.
        live = mask & (tl.load(slot_ptr + lane) >= 0)
        g, gate = _inputs(bcx_ptr + lane * bcx_stride + c, live, C)
        y = start
        for tap in tl.static_range(D - 1):
            y = tl.fma(window[tap].to(tl.float32), weights[tap], y)
        y = tl.fma(g.to(tl.float32), weights[D - 1], y)
        tl.store(out_ptr + lane * C + c, (gate * y).to(out_ptr.dtype.element_ty), mask=live)
        entry = ((position + token) % entries).to(tl.int64)
        tl.store(kept_ptrs + entry * C, g, mask=live)
        window = _pushed(window, g, D)


@triton.jit(do_not_specialize=["lanes", "entries"])
def chunk_kernel(
    bcx_ptr,
    weight_ptr,
    bias_ptr,
    kept_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    bcx_stride,
    out_stride,
    lanes,
    entries,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_T lanes and BLOCK_C channels.

    The first of them reads what is kept, as BLOCK_T exceeds D, and then writes it.
    """
    block = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    weights, start = _weights(weight_ptr, bias_ptr, c, mask, C, D, BLOCK_C)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(position_ptr)
    kept_ptrs = kept_ptr + slot * entries * C + c
    lane = block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + start[None, :]
    for tap in tl.static_range(D):
        source = lane - (D - 1) + tap
        there = live & (source >= 0)
        g, _ = _inputs(
            bcx_ptr + source.to(tl.int64)[:, None] * bcx_stride + c[None, :],
            there[:, None] & mask[None, :],
            C,
        )
        if block == 0:
            before = live & (source < 0) & (position + source >= 0)
            entry = ((position + source) % entries).to(tl.int64)
            g += tl.load(
                kept_ptrs[None, :] + entry[:, None] * C,
                mask=before[:, None] & mask[None, :],
                other=0.0,
            )
        weight = tl.broadcast_to(weights[tap][None, :], (BLOCK_T, BLOCK_C))
        y = tl.fma(g.to(tl.float32), weight, y)
    stored = live[:, None] & mask[None, :]
    _, gate = _inputs(bcx_ptr + lane.to(tl.int64)[:, None] * bcx_stride + c[None, :], stored, C)
    out_ptrs = out_ptr + lane.to(tl.int64)[:, None] * out_stride + c[None, :]
    tl.store(out_ptrs, (gate * y).to(out_ptr.dtype.element_ty), mask=stored)
    if block == 0:
        # What was read above is overwritten below, by other threads.
        tl.debug_barrier()
        t = tl.arange(0, BLOCK_LANES)
        slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
        count = tl.sum((slots >= 0).to(tl.int32), 0)
        for back in tl.static_range(D - 1):
            _keep_newest(
                bcx_ptr, kept_ptrs, position, count - 1 - back, bcx_stride, entries, mask, c, C
            )


@triton.jit
def _keep_newest(bcx_ptr, kept_ptrs, position, lane, bcx_stride, entries, mask, c, C: tl.constexpr):
    """A lane's entry of what is kept, if there is such a lane."""
    there = mask & (lane >= 0)
    g, _ = _inputs(bcx_ptr + lane.to(tl.int64) * bcx_stride + c, there, C)
    entry = ((position + lane) % entries).to(tl.int64)
    tl.store(kept_ptrs + entry * C, g, mask=there)


@triton.jit
def _weights(
    weight_ptr, bias_ptr, c, mask, C: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Those of each tap, and what a sum begins with, in float32."""
    weights = ()
    for tap in tl.static_range(D):
        weight = tl.load(weight_ptr + c * D + tap, mask=mask, other=0.0)
        weights += (weight.to(tl.float32),)  # type: ignore[assignment]
    start = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        start += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return weights, start


@triton.jit
def _kept(kept_ptrs, position, mask, entries, C: tl.constexpr):
    """What is kept of the token at a position; zeros before the first."""
    entry = ((position + entries) % entries).to(tl.int64)
    return tl.load(kept_ptrs + entry * C, mask=mask & (position >= 0), other=0.0)


@triton.jit
def _inputs(bcx_ptrs, mask, C: tl.constexpr):
    """g, rounded as it is kept, and c in float32."""
    b = tl.load(bcx_ptrs, mask=mask, other=0.0)
    gate = tl.load(bcx_ptrs + C, mask=mask, other=0.0)
    x = tl.load(bcx_ptrs + 2 * C, mask=mask, other=0.0)
    g = (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)
    return g, gate.to(tl.float32)


@triton.jit
def _pushed(window, g, D: tl.constexpr):
    """The window of the next token."""
    pushed = ()
    for tap in tl.static_range(1, D - 1):
        pushed += (window[tap],)  # type: ignore[assignment]
    pushed += (g,)  # type: ignore[assignment]
    return pushed
