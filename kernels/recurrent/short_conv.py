"""A short gated convolution, as LFM2 has it: of each channel a few inputs are summed up.

    g = b * x                       rounded to the inputs' dtype, as it is kept
    y = c * (bias + sum over d of weight[d] * g of the token D - 1 - d before)

What is kept of a sequence is g of its newest tokens. In decode a program owns some channels of a
row: it reads what is kept, and walks through the row's tokens in registers, so that a token's bits
do not depend on how many tokens its row has. In prefill each token's sum is computed from the
chunk's own inputs, and at its beginning from what is kept, in the same order: the bits of both are
equal, however a prompt is cut.

Letters: N lanes, T lanes of a chunk, S slots, E entries of a slot, C channels, D taps.
"""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows, output_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.recurrent.short_conv_reference import short_conv_reference
from graphengine.kernels.recurrent.short_conv_triton import chunk_kernel, decode_kernel

MAX_TAPS = 8
"""Inputs of a sum; a program holds them in registers."""
_DECODE_CHANNELS = 128
_CHUNK_CHANNELS = 64
_CHUNK_TOKENS = 16


def short_conv_decode(
    bcx_NX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    kept_SEC: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """The convolution of each row's tokens; their inputs are added to what is kept, in place.

    Args:
        bcx_NX: [N, 3 * C], a lane is [b | c | x]; rows dense, any stride between them.
        weight_CD, bias_C: dense, in the inputs' dtype.
        kept_SEC: dense, in the inputs' dtype. Entry `p % E` of a slot is of its token at p. A row
            reads those of the D - 1 tokens before its first (zeros before position 0), and writes
            one for each token. E is at least D - 2 + tokens_per_row.
        slot_N, position_N: int32; -1 = padded lane. Each `tokens_per_row` lanes are tokens of one
            slot at consecutive positions, live ones first.
        pdl: the launch before may still run; it writes neither weight nor bias.

    Returns:
        y, `[N, C]` in the inputs' dtype; padded lanes are not written. ValueError for what does not
        fit.
    """
    lanes, channels, taps = _check(bcx_NX, weight_CD, bias_C, kept_SEC, slot_N, position_N)
    entries = kept_SEC.shape[1]
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
                kept_SEC,
                slot_N[row_lanes],
                position_N[row_lanes],
                out[row_lanes],
            )
        return out
    grid = (lanes // tokens_per_row, triton.cdiv(channels, _DECODE_CHANNELS))
    launcher(decode_kernel, grid)(
        bcx_NX,
        weight_CD,
        bias_C,
        kept_SEC,
        slot_N,
        position_N,
        out,
        bcx_NX.stride(0),
        tokens_per_row,
        entries,
        C=channels,
        D=taps,
        BLOCK_C=_DECODE_CHANNELS,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def short_conv_prefill(
    bcx_TX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    kept_SEC: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The same for one slot's chunk, whose live lanes come first, at consecutive positions.

    Of what is kept the entries of the chunk's newest D - 1 tokens are written, or of all of them if
    they are fewer.

    Args:
        out: `[T, C]` in the inputs' dtype, dense.
        The others as of `short_conv_decode`; E is at least D - 1.

    Returns:
        y, `[T, C]`; padded lanes are not written. ValueError for what does not fit.
    """
    lanes, channels, taps = _check(bcx_TX, weight_CD, bias_C, kept_SEC, slot_T, position_T)
    entries = kept_SEC.shape[1]
    if entries < taps - 1:
        raise ValueError(f"{taps} taps want {taps - 1} entries, and there are {entries}")
    out = output_rows(out, (lanes, channels), dtype=bcx_TX.dtype, like=bcx_TX)
    if not use_triton(bcx_TX):
        short_conv_reference(bcx_TX, weight_CD, bias_C, kept_SEC, slot_T, position_T, out)
        return out
    grid = (triton.cdiv(lanes, _CHUNK_TOKENS), triton.cdiv(channels, _CHUNK_CHANNELS))
    launcher(chunk_kernel, grid)(
        bcx_TX,
        weight_CD,
        bias_C,
        kept_SEC,
        slot_T,
        position_T,
        out,
        bcx_TX.stride(0),
        out.stride(0),
        lanes,
        entries,
        C=channels,
        D=taps,
        BLOCK_C=_CHUNK_CHANNELS,
        BLOCK_T=_CHUNK_TOKENS,
        BLOCK_LANES=triton.next_power_of_2(lanes),
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def _check(
    bcx_NX: torch.Tensor,
    weight_CD: torch.Tensor,
    bias_C: torch.Tensor | None,
    kept_SEC: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
) -> tuple[int, int, int]:
    """ValueError for operands that do not fit each other; lanes, channels, and taps."""
    check_rows(bcx=bcx_NX)
    lanes, dtype = bcx_NX.shape[0], bcx_NX.dtype
    if weight_CD.dim() != 2 or not 2 <= weight_CD.shape[1] <= MAX_TAPS:
        raise ValueError(f"the weight must be [C, D] of 2 to {MAX_TAPS} taps, not {_of(weight_CD)}")
    channels, taps = weight_CD.shape
    if bcx_NX.shape[1] != 3 * channels:
        raise ValueError(f"inputs of {bcx_NX.shape[1]} values are not 3 of {channels} channels")
    wanted: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    wanted = {"weight": (weight_CD, (channels, taps))}
    if bias_C is not None:
        wanted["bias"] = (bias_C, (channels,))
    if kept_SEC.dim() != 3 or kept_SEC.shape[2] != channels:
        raise ValueError(f"what is kept must be [S, E, {channels}], not {_of(kept_SEC)}")
    wanted["kept"] = (kept_SEC, tuple(kept_SEC.shape))
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a dense {dtype} {list(shape)}, not {_of(tensor)}")
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    return lanes, channels, taps


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
