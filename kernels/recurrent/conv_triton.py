"""The kernel of `conv.py`, letters as there, and what convolutions of decode share with it."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.chunks import chunk_of_tile
from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.norm_rope.activation import silu


@triton.jit(do_not_specialize=["lanes", "entries"])
def conv_chunk_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ring_ptr,
    slot_ptr,
    position_ptr,
    query_start_ptr,
    out_ptr,
    x_stride,
    out_stride,
    lanes,
    entries,
    C: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    PROMPTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_T lanes of a chunk and BLOCK_C channels.

    Only the program of a chunk's first lanes reads its slot's ring, as BLOCK_T exceeds D, and then
    writes it.
    """
    block = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    weights, start = conv_weights(weight_ptr, bias_ptr, c, mask, D, BLOCK_C)
    wait_for_inputs(PDL)
    if query_start_ptr is not None:
        # From here on the program's chunk is all there is.
        _, first, lanes, block = chunk_of_tile(query_start_ptr, block, PROMPTS, BLOCK_T, 1)
        if block * BLOCK_T >= lanes:
            return
        slot_ptr += first
        position_ptr += first
        x_ptr += first.to(tl.int64) * x_stride
        out_ptr += first.to(tl.int64) * out_stride
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(position_ptr)
    ring_ptrs = ring_ptr + slot * entries * C + c
    lane = block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tl.load(slot_ptr + lane, mask=lane < lanes, other=-1) >= 0
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + start[None, :]
    for tap in tl.static_range(D):
        source = lane - (D - 1) + tap
        there = live & (source >= 0)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride + c[None, :]
        x = conv_inputs(x_ptrs, there[:, None] & mask[None, :], C, GATED)
        if block == 0:
            before = live & (source < 0) & (position + source >= 0)
            entry = ((position + source) % entries).to(tl.int64)
            x += tl.load(
                ring_ptrs[None, :] + entry[:, None] * C,
                mask=before[:, None] & mask[None, :],
                other=0.0,
            )
        weight = tl.broadcast_to(weights[tap][None, :], (BLOCK_T, BLOCK_C))
        y = tl.fma(x.to(tl.float32), weight, y)
    stored = live[:, None] & mask[None, :]
    if GATED:
        gate_ptrs = x_ptr + lane.to(tl.int64)[:, None] * x_stride + (C + c)[None, :]
        y = tl.load(gate_ptrs, mask=stored, other=0.0).to(tl.float32) * y
    if SILU:
        y = silu(y)
    out_ptrs = out_ptr + lane.to(tl.int64)[:, None] * out_stride + c[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=stored)
    if block == 0:
        # What was read above is overwritten below, by other threads.
        tl.debug_barrier()
        t = tl.arange(0, BLOCK_LANES)
        slots = tl.load(slot_ptr + t, mask=t < lanes, other=-1)
        count = tl.sum((slots >= 0).to(tl.int32), 0)
        for back in tl.static_range(D - 1):
            _keep_newest(
                x_ptr, ring_ptrs, position, count - 1 - back, x_stride, entries, mask, c, C, GATED
            )


@triton.jit
def _keep_newest(
    x_ptr,
    ring_ptrs,
    position,
    lane,
    x_stride,
    entries,
    mask,
    c,
    C: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store a lane's entry of the ring, if the lane exists."""
    there = mask & (lane >= 0)
    x = conv_inputs(x_ptr + lane.to(tl.int64) * x_stride + c, there, C, GATED)
    entry = ((position + lane) % entries).to(tl.int64)
    tl.store(ring_ptrs + entry * C, x, mask=there)


@triton.jit
def conv_weights(weight_ptr, bias_ptr, c, mask, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """The weights of each tap, and what a sum begins with, in float32."""
    weights = ()
    for tap in tl.static_range(D):
        weight = tl.load(weight_ptr + c * D + tap, mask=mask, other=0.0)
        weights += (weight.to(tl.float32),)  # type: ignore[assignment]
    start = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        start += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return weights, start


@triton.jit
def conv_inputs(x_ptrs, mask, C: tl.constexpr, GATED: tl.constexpr):
    """The inputs of channels, as the ring keeps them; with GATED b * x of [b | c | x], rounded."""
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    if GATED:
        other = tl.load(x_ptrs + 2 * C, mask=mask, other=0.0)
        x = (x.to(tl.float32) * other.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def window_before(ring_ptrs, position, entries, mask, C: tl.constexpr, D: tl.constexpr):
    """The ring's entries of the D - 1 tokens before a position, oldest first; 0 before position 0.

    Earlier steps wrote them, so a decode kernel may load them before its wait.
    """
    window = ()
    for tap in tl.static_range(D - 1):
        at = position - (D - 1) + tap
        ptrs = ring_ptrs + ((at + entries) % entries).to(tl.int64) * C
        window += (tl.load(ptrs, mask=mask & (at >= 0), other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return window


@triton.jit
def pushed(window, x, D: tl.constexpr):
    """The window of the next token."""
    window_after = ()
    for tap in tl.static_range(1, D - 1):
        window_after += (window[tap],)  # type: ignore[assignment]
    if D > 1:
        window_after += (x,)  # type: ignore[assignment]
    return window_after


@triton.jit
def convolved(window, x, weights, D: tl.constexpr):
    """The convolution of a token's input and those before it, in float32.

    weights  `conv_weights`
    """
    of_taps, y = weights
    for tap in tl.static_range(D - 1):
        y = tl.fma(window[tap].to(tl.float32), of_taps[tap], y)
    return tl.fma(x.to(tl.float32), of_taps[D - 1], y)


@triton.jit
def token_input(ptrs, ring_ptrs, mask, keeps):
    """A token's input as the ring has it. If the program `keeps` it, it is stored in the ring: one
    program does so for channels that several read.
    """
    x = tl.load(ptrs, mask=mask, other=0.0).to(ring_ptrs.dtype.element_ty)
    tl.store(ring_ptrs, x, mask=mask & keeps)
    return x
