"""A short gated convolution, as LFM2 has it: each channel sums up a few of its inputs.

    g = b * x                       rounded to the inputs' dtype, as it is kept
    y = c * (bias + sum over d of weight[d] * g of the token D - 1 - d before)

A ring keeps g of a sequence's newest tokens, by position. In decode a program owns some channels of
a row: it reads the ring, and walks through the row's tokens in registers, so that a token's bits do
not depend on how many tokens its row has. Prefill runs the kernel of `conv.py`, which sums in the
same order: the bits of both are equal.

Letters: N lanes, T lanes of prefill, P chunks, S slots, E entries of a slot, C channels, D taps.
"""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.chunks import check_chunks, chunks_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.recurrent.conv import check_conv, launch_conv_chunk
from graphengine.kernels.recurrent.short_conv_reference import short_conv_reference
from graphengine.kernels.recurrent.short_conv_triton import decode_kernel

_CHANNELS = 128


def short_conv_decode(
    bcx_NX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """Convolve each row's tokens, and add their inputs to the ring, in place.

    Args:
        bcx_NX: [N, 3 * C], a lane is [b | c | x]; rows dense, any stride between them.
        weight_CD, bias_C: dense, in the inputs' dtype.
        ring_SEC: dense, in the inputs' dtype. Entry `p % E` of a slot is g of its token at p. A row
            reads the entries of the D - 1 tokens before its first (zeros before position 0), and
            writes one for each token. E is at least D - 2 + tokens_per_row.
        slot_N, position_N: int32; -1 = padded lane. Each `tokens_per_row` lanes are tokens of one
            slot at consecutive positions, live ones first.
        pdl: the launch before may still run; it writes neither weight nor bias.

    Returns:
        y, `[N, C]` in the inputs' dtype; padded lanes are not written. ValueError for what does not
        fit.
    """
    lanes, channels, taps = _check(bcx_NX, weight_CD, bias_C, ring_SEC, slot_N, position_N)
    entries = ring_SEC.shape[1]
    if tokens_per_row < 1 or lanes % tokens_per_row or entries < taps - 2 + tokens_per_row:
        raise ValueError(
            f"{lanes} lanes, {taps} taps and {entries} entries cannot be rows of {tokens_per_row}"
        )
    out = torch.empty((lanes, channels), dtype=bcx_NX.dtype, device=bcx_NX.device)
    if not use_triton(bcx_NX):
        for row in range(0, lanes, tokens_per_row):
            row_lanes = slice(row, row + tokens_per_row)
            short_conv_reference(
                bcx_NX[row_lanes],
                weight_CD,
                bias_C,
                ring_SEC,
                slot_N[row_lanes],
                position_N[row_lanes],
                out[row_lanes],
            )
        return out
    grid = (lanes // tokens_per_row, triton.cdiv(channels, _CHANNELS))
    launcher(decode_kernel, grid)(
        bcx_NX,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_N,
        position_N,
        out,
        bcx_NX.stride(0),
        tokens_per_row,
        entries,
        C=channels,
        D=taps,
        BLOCK_C=_CHANNELS,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def short_conv_prefill(
    bcx_TX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    *,
    query_start_P1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Convolve the chunk of a slot, or of several.

    The ring's entries of a chunk's newest D - 1 tokens are written, or those of all its tokens if
    they are fewer.

    Args:
        query_start_P1: int32 [P + 1], on the device: lanes query_start[p] .. query_start[p + 1] - 1
            are a chunk of a slot of its own, all live, at consecutive positions. Lanes past the
            last chunk are padded. None: live lanes come first, and are one slot's chunk.
        out: `[T, C]` in the inputs' dtype, dense.
        The others as in `short_conv_decode`; E is at least D - 1.

    Returns:
        y, `[T, C]`; padded lanes are not written. ValueError for what does not fit.
    """
    lanes, channels, _ = _check(bcx_TX, weight_CD, bias_C, ring_SEC, slot_T, position_T)
    check_chunks(query_start_P1)
    out = output_rows(out, (lanes, channels), dtype=bcx_TX.dtype, like=bcx_TX)
    if not use_triton(bcx_TX):
        for chunk in chunks_of(query_start_P1):
            bcx, slot, position = bcx_TX[chunk], slot_T[chunk], position_T[chunk]
            short_conv_reference(bcx, weight_CD, bias_C, ring_SEC, slot, position, out[chunk])
        return out
    launch_conv_chunk(
        bcx_TX,
        weight_CD,
        bias_C,
        ring_SEC,
        slot_T,
        position_T,
        query_start_P1,
        out,
        gated=True,
        silu=False,
        pdl=pdl,
    )
    return out


def _check(
    bcx_NX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_SEC: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
) -> tuple[int, int, int]:
    """Return (lanes, channels, taps). ValueError for operands that do not fit each other."""
    check_rows(bcx=bcx_NX)
    lanes, channels = bcx_NX.shape[0], ring_SEC.shape[-1]
    if bcx_NX.shape[1] != 3 * channels:
        raise ValueError(f"inputs of {bcx_NX.shape[1]} values are not 3 of {channels} channels")
    check_conv(weight_CD, bias_C, ring_SEC, channels, bcx_NX.dtype)
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    return lanes, channels, weight_CD.shape[1]
