"""The causal convolution of a prompt chunk, each channel by itself, before a layer's state.

    y = bias + sum over d of weight[d] * x of the token D - 1 - d before; silu(y), if asked for

A ring keeps x of a sequence's newest tokens, by position. A token's sum is computed from the
chunk's own inputs, and at the chunk's beginning from the ring, always in the same order: a token's
bits do not depend on how a prompt is cut. In decode the kernels of the states do the convolution.

Letters: T lanes of a launch, P chunks, S slots, E entries of a slot, C channels, D taps.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton

from graphengine.kernels.core.chunks import check_chunks, chunks_of, tile_count
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
    query_start_P1: torch.Tensor | None = None,
    activation: Literal["silu"] | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Convolve the chunk of a slot, or of several, and add its newest inputs to the ring, in place.

    Args:
        x_TC: rows dense, any stride between them.
        weight_CD, bias_C: dense, in x's dtype.
        ring_SEC: dense, in x's dtype. Entry `p % E` of a slot is x of its token at p. Entries of
            the D - 1 tokens before the chunk are read (zeros before position 0), and those of its
            newest D - 1 tokens written, or of all its tokens if they are fewer. E is at least
            D - 1.
        slot_T, position_T: int32; -1 = padded.
        query_start_P1: int32 [P + 1], on the device: lanes query_start[p] .. query_start[p + 1] - 1
            are a chunk of a slot of its own, all live, at consecutive positions. Lanes past the
            last chunk are padded. None: live lanes come first, and are one slot's chunk.
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
    check_chunks(query_start_P1)
    out = output_rows(out, (lanes, channels), dtype=x_TC.dtype, like=x_TC)
    if not use_triton(x_TC):
        for chunk in chunks_of(query_start_P1):
            slot, live = slot_T[chunk], live_lanes(slot_T[chunk])
            x, position = x_TC[chunk][live], position_T[chunk]
            y = causal_conv_reference(x, weight_CD, bias_C, ring_SEC, slot, position)
            out[chunk][live] = (y if activation is None else silu_reference(y)).to(out.dtype)
        return out
    launch_conv_chunk(
        x_TC,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_T,
        position_T,
        query_start_P1,
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
    query_start_P1: torch.Tensor | None,
    out_TC: torch.Tensor,
    *,
    gated: bool,
    silu: bool,
    pdl: bool,
) -> None:
    """Launch the kernel with checked operands; with `gated` x is [b | c | x] of `short_conv.py`."""
    lanes, (channels, taps) = len(x_TX), weight_CD.shape
    prompts, tiles = check_chunks(query_start_P1), triton.cdiv(lanes, _TOKENS)
    if prompts is not None:
        tiles = tile_count(lanes, prompts, size=_TOKENS, spare=1)
    launcher(conv_chunk_kernel, (tiles, triton.cdiv(channels, _CHANNELS)))(
        x_TX,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_T,
        position_T,
        query_start_P1,
        out_TC,
        x_TX.stride(0),
        out_TC.stride(0),
        lanes,
        ring_SEC.shape[1],
        C=channels,
        D=taps,
        GATED=gated,
        SILU=silu,
        PROMPTS=prompts or 1,
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
