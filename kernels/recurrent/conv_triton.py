"""The kernel of `conv.py`, whose letters it has, and what convolutions of decode share with it."""

from __future__ import annotations

import triton
import triton.language as tl

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
    out_ptr,
    x_stride,
    out_stride,
    lanes,
    entries,
    C: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_T lanes and BLOCK_C channels.

    The first of them reads the ring, as BLOCK_T exceeds D, and then writes it.
    """
    block = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    weights, start = conv_weights(weight_ptr, bias_ptr, c, mask, C, D, BLOCK_C)
    wait_for_inputs(PDL)
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
    """A lane's entry of the ring, if there is such a lane."""
    there = mask & (lane >= 0)
    x = conv_inputs(x_ptr + lane.to(tl.int64) * x_stride + c, there, C, GATED)
    entry = ((position + lane) % entries).to(tl.int64)
    tl.store(ring_ptrs + entry * C, x, mask=there)


@triton.jit
def conv_weights(
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
def conv_inputs(x_ptrs, mask, C: tl.constexpr, GATED: tl.constexpr):
    """The inputs of channels, as they are kept; with GATED b * x of [b | c | x], rounded."""
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    if GATED:
        other = tl.load(x_ptrs + 2 * C, mask=mask, other=0.0)
        x = (x.to(tl.float32) * other.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def token_weights(weight_ptr, bias_ptr, channel, mask, D: tl.constexpr):
    """For `convolve_token`: weights [N, D] of some channels, D padded to a power of two, and what
    their sums begin with, in float32.
    """
    tap = tl.arange(0, triton.next_power_of_2(D))
    there = mask[:, None] & (tap < D)[None, :]
    weights = tl.load(weight_ptr + channel[:, None] * D + tap[None, :], mask=there, other=0.0)
    start = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        start += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return weights.to(tl.float32), start


@triton.jit
def convolve_token(conv, weights, channel, mask, keeps, C: tl.constexpr, D: tl.constexpr):
    """silu of the convolution of some channels for one token of a row in decode, in float32.

    Inputs of the row's earlier tokens are in the product, and those before them in the ring. It
    gets the token's own where the program `keeps` them: of channels that several programs read, one
    does. All are one matrix [N, D], so that a thread asks for few of them.

    conv     the token's inputs, the distance of tokens, the slot's ring, its entries, the token's
             place in its row, and its position
    weights  `token_weights` of these channels
    """
    inputs_ptr, stride, ring_ptr, entries, token, position = conv
    of_taps, start = weights
    tap = tl.arange(0, triton.next_power_of_2(D))
    back = D - 1 - tap
    in_row = (token >= back) & (back >= 0)
    in_ring = (token < back) & (position >= back)
    row_ptrs = inputs_ptr + channel[:, None] - (back * stride)[None, :]
    from_row = tl.load(row_ptrs, mask=mask[:, None] & in_row[None, :], other=0.0)
    entry = ((position - back + entries) % entries).to(tl.int64)
    ring_ptrs = ring_ptr + channel[:, None] + (entry * C)[None, :]
    from_ring = tl.load(ring_ptrs, mask=mask[:, None] & in_ring[None, :], other=0.0)
    own = mask[:, None] & (back == 0)[None, :] & keeps
    tl.store(ring_ptrs, from_row.to(ring_ptr.dtype.element_ty), mask=own)
    x = from_row.to(tl.float32) + from_ring.to(tl.float32)
    return silu(start + tl.sum(x * of_taps, 1))
