"""The kernel of `short_conv.py`, whose letters it has."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.recurrent.conv_triton import conv_inputs, conv_weights


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
    weights, start = conv_weights(weight_ptr, bias_ptr, c, mask, C, D, BLOCK_C)
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
        bcx_ptrs = bcx_ptr + lane * bcx_stride + c
        g = conv_inputs(bcx_ptrs, live, C, True)
        gate = tl.load(bcx_ptrs + C, mask=live, other=0.0).to(tl.float32)
        y = start
        for tap in tl.static_range(D - 1):
            y = tl.fma(window[tap].to(tl.float32), weights[tap], y)
        y = tl.fma(g.to(tl.float32), weights[D - 1], y)
        tl.store(out_ptr + lane * C + c, (gate * y).to(out_ptr.dtype.element_ty), mask=live)
        entry = ((position + token) % entries).to(tl.int64)
        tl.store(kept_ptrs + entry * C, g, mask=live)
        window = _pushed(window, g, D)


@triton.jit
def _kept(kept_ptrs, position, mask, entries, C: tl.constexpr):
    """What is kept of the token at a position; zeros before the first."""
    entry = ((position + entries) % entries).to(tl.int64)
    return tl.load(kept_ptrs + entry * C, mask=mask & (position >= 0), other=0.0)


@triton.jit
def _pushed(window, g, D: tl.constexpr):
    """The window of the next token."""
    pushed = ()
    for tap in tl.static_range(1, D - 1):
        pushed += (window[tap],)  # type: ignore[assignment]
    pushed += (g,)  # type: ignore[assignment]
    return pushed
