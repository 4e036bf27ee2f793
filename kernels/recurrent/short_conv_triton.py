"""The kernel of `short_conv.py`; letters as there."""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.recurrent.conv_triton import (
    conv_inputs,
    conv_weights,
    convolved,
    pushed,
    window_before,
)


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

    The number of tokens a row is no constant: one compiled kernel serves all, and always sums in
    the same way.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    weights = conv_weights(weight_ptr, bias_ptr, c, mask, D, BLOCK_C)
    # Load what earlier steps left; the lanes are older than the launch before, too.
    first = tl.program_id(0) * tokens
    slot = tl.load(slot_ptr + first, cache_modifier=".cg").to(tl.int64)
    position = tl.load(position_ptr + first, cache_modifier=".cg")
    row_lives = slot >= 0
    kept_ptrs = kept_ptr + tl.maximum(slot, 0) * entries * C + c
    window = window_before(kept_ptrs, position, entries, row_lives & mask, C, D)
    wait_for_inputs(PDL)
    if not row_lives:
        return
    for token in range(tokens):
        lane = (first + token).to(tl.int64)
        # Draft tokens that do not exist come last.
        live = mask & (tl.load(slot_ptr + lane) >= 0)
        bcx_ptrs = bcx_ptr + lane * bcx_stride + c
        g = conv_inputs(bcx_ptrs, live, C, True)
        gate = tl.load(bcx_ptrs + C, mask=live, other=0.0).to(tl.float32)
        y = gate * convolved(window, g, weights, D)
        tl.store(out_ptr + lane * C + c, y.to(out_ptr.dtype.element_ty), mask=live)
        entry = ((position + token) % entries).to(tl.int64)
        tl.store(kept_ptrs + entry * C, g, mask=live)
        window = pushed(window, g, D)
