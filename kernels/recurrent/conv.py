"""The causal convolution of a prompt chunk, each channel by itself, before a layer's state.

    y = bias + sum over d of weight[d] * x of the token D - 1 - d before; silu(y), if asked for

A ring keeps x of a sequence's newest tokens, by position. A token's sum is computed from the
chunk's own inputs, and at the chunk's beginning from the ring, always in the same order: a token's
bits do not depend on how a prompt is cut. In decode the kernels of the states do the convolution.

Letters: T lanes of a chunk, S slots, E entries of a slot, C channels, D taps.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, live_lanes, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.norm_rope.activation import silu_reference
from graphengine.kernels.recurrent.conv_reference import causal_conv_reference
from graphengine.kernels.recurrent.conv_triton import conv_chunk_kernel

MAX_TAPS = 8
"""Most inputs of a sum, which is unrolled; fewer than the lanes of a program."""
_CHANNELS = 128
_TOKENS = 32
_WARPS = 4


def causal_conv_chunk(
    x_TC: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    *,
    activation: Literal["silu"] | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Convolve one slot's chunk, and add its newest inputs to the ring, in place.

    Args:
        x_TC: rows dense, any stride between them.
        weight_CD, bias_C: dense, in x's dtype.
        ring_SEC: dense, in x's dtype. Entry `p % E` of a slot is x of its token at p. Entries of
            the D - 1 tokens before the chunk are read (zeros before position 0), and those of its
            newest D - 1 tokens written, or of all its tokens if they are fewer. E is at least
            D - 1.
        slot_T, position_T: int32. Live lanes come first, at consecutive positions; -1 = padded.
        out: `[T, C]` in x's dtype, dense rows; not x.
        pdl: the launch before may still run; it writes neither weight nor bias.

    Returns:
        y, `[T, C]`, computed in float32 and rounded once; padded lanes are not written. ValueError
        for what does not fit.
    """
    check_rows(x=x_TC)
    lanes, channels = x_TC.shape
    check_conv(weight_CD, bias_C, ring_SEC, channels, x_TC.dtype)
    check_lanes(lanes, slot_T=slot_T, position_T=position_T)
    out = output_rows(out, (lanes, channels), dtype=x_TC.dtype, like=x_TC)
    if not use_triton(x_TC):
        live = live_lanes(slot_T)
        y = causal_conv_reference(x_TC[live], weight_CD, bias_C, ring_SEC, slot_T, position_T)
        out[live] = (y if activation is None else silu_reference(y)).to(out.dtype)
        return out
    launch_conv_chunk(
        x_TC,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_T,
        position_T,
        out,
        gated=False,
        silu=activation == "silu",
        pdl=pdl,
    )
    return out


def launch_conv_chunk(
    x_TX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    out_TC: torch.Tensor,
    *,
    gated: bool,
    silu: bool,
    pdl: bool,
) -> None:
    """Launch the kernel with checked operands; with `gated` x is [b | c | x] of `short_conv.py`."""
    lanes, (channels, taps) = len(x_TX), weight_CD.shape
    grid = (triton.cdiv(lanes, _TOKENS), triton.cdiv(channels, _CHANNELS))
    launcher(conv_chunk_kernel, grid)(
        x_TX,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_T,
        position_T,
        out_TC,
        x_TX.stride(0),
        out_TC.stride(0),
        lanes,
        ring_SEC.shape[1],
        C=channels,
        D=taps,
        GATED=gated,
        SILU=silu,
        BLOCK_C=_CHANNELS,
        BLOCK_T=_TOKENS,
        BLOCK_LANES=triton.next_power_of_2(lanes),
        num_warps=_WARPS,
        **launch_options(pdl),
    )


def check_conv(
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    channels: int,
    dtype: torch.dtype,
) -> None:
    """ValueError for a convolution that does not fit inputs of this many channels."""
    if weight_CD.dim() != 2 or not 2 <= weight_CD.shape[1] <= MAX_TAPS:
        raise ValueError(f"the weight must be [C, D] of 2 to {MAX_TAPS} taps, not {_of(weight_CD)}")
    if ring_SEC.dim() != 3 or ring_SEC.shape[2] != channels:
        raise ValueError(f"the ring must be [S, E, {channels}], not {_of(ring_SEC)}")
    taps = weight_CD.shape[1]
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
        "weight": (weight_CD, (channels, taps)),
        "ring": (ring_SEC, tuple(ring_SEC.shape)),
    }
    if bias_C is not None:
        wanted["bias"] = (bias_C, (channels,))
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a dense {dtype} {list(shape)}, not {_of(tensor)}")
    entries = ring_SEC.shape[1]
    if entries < taps - 1:
        raise ValueError(f"{taps} taps want {taps - 1} entries of the ring, which has {entries}")


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
