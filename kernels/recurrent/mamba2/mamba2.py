"""Mamba2: a state for each head that decays and sums up outer products, and the norm after it.

    dt = softplus(dt + dt_bias), within limits
    h  = exp(-exp(A_log) dt) h + dt x B^T
    y  = C.h + skip x
    mamba2_norm: weight * u / rms(u) of u = y * silu(z), a group of heads at a time

x, B and C come from a causal convolution of a few tokens, and silu. Heads of a group share B and C.
Everything is computed in float32. Where all heads are one group, decode leaves the norm to the
product that reads it, as the residual stream does (`linear/residual.py`): it stores u times the
norm's weight, and sums of squares.

In decode a program owns some rows of one head's state: it reads them as the token before left them,
walks through the row's tokens in registers, and stores the rows after each one. So a token's bits
do not depend on how many tokens its row has. In prefill a chunk is cut into pieces of 64 tokens, at
absolute multiples of 64 positions. Within pieces tokens interact through matrix products, in two
kernels that handle all pieces at once; between the two the state goes from piece to piece (the
state space duality of Dao & Gu 2024).

Letters: N lanes, T lanes of prefill, R rows, S slots, E entries of a slot's state, F of its inputs,
H heads, P values of a head, K values of the state for each of them, G groups, I = H * P,
C = I + 2 * G * K channels of the convolution, X = I + C + H, D tokens that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton

from graphengine.kernels.core.chunks import check_chunks, chunks_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_rows,
    check_weight,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.recurrent.mamba2.mamba2_reference import (
    mamba2_decode_reference,
    mamba2_gate_reference,
    mamba2_norm_reference,
    mamba2_prefill_reference,
)
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.recurrent.mamba2.mamba2_triton import (
    decode_kernel,
    norm_kernel,
    outputs_kernel,
    pass_kernel,
    pieces_kernel,
)
from graphengine.kernels.recurrent.pieces import PIECE, piece_count

# Values of a head that a program holds: with 128 float32 of state each, 16 KB.
_DECODE_BLOCK_P = 32
_PREFILL_BLOCK_P = 64
# Numbers of a head's state that a program carries through a chunk.
_PASS_BLOCK = 1024
# The fastest on an H200: occupancy counts for more than registers to spare.
_LAUNCHES: Mapping[str, Mapping[str, int]] = {
    "decode_kernel": {"num_warps": 4, "maxnreg": 168},
    "pieces_kernel": {"num_warps": 4, "num_stages": 1},
    "pass_kernel": {"num_warps": 4},
    "outputs_kernel": {"num_warps": 4, "num_stages": 1, "maxnreg": 168},
}


class Gated(NamedTuple):
    """Inputs that a product normalises; valid until the next replay. Padded lanes hold anything."""

    scaled: torch.Tensor
    """[N, I] in the product's dtype: u times the norm's weight."""
    squares: torch.Tensor
    """float32 [T, N]: partial sums of u * u, as a `Residual` has them."""


def mamba2_decode(
    projected_NX: torch.Tensor,
    ring_SFC: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """Convolve each row's tokens and advance its state by them; return what they read from it.

    Args:
        projected_NX: a product with z, which is not read, the convolution's inputs, and dt; any
            float dtype, dense rows.
        ring_SFC: inputs of the convolution, dense; any float dtype. Entry `p % F` of a slot is that
            of its token at p. A row reads the entries of the `width - 1` tokens before it (zeros
            before position 0), and writes one for each token.
        state_SEHPK: dense; any float dtype. Entry `p % E` of a slot is the state after its token at
            p. A row reads the entry of the token before its first (zeros at position 0), and writes
            one for each token; the state is rounded after every token.
        slot_N, position_N: int32; -1 = padded lane. Each `tokens_per_row` lanes are tokens of one
            slot at consecutive positions, live ones first.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        y, float32 `[N, I]`; padded lanes are not written. ValueError for what does not fit, and for
        rows of more tokens than there are entries for.
    """
    y = projected_NX.new_empty((projected_NX.shape[0], sizes.inner), dtype=torch.float32)
    _decode(
        projected_NX, ring_SFC, state_SEHPK, slot_N, position_N, params, sizes, y,
        tokens_per_row=tokens_per_row, pdl=pdl,
    )  # fmt: skip
    return y


def mamba2_decode_gated(
    projected_NX: torch.Tensor,
    ring_SFC: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    norm_I: torch.Tensor,
    sizes: Mamba2Sizes,
    *,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> Gated:
    """`mamba2_decode`, its gate, and what a norm of one group needs; `linear` does the rest of it.

    Args:
        projected_NX: z is read, too.
        norm_I: the norm's weight, of any float dtype.
        The others as in `mamba2_decode`.

    Returns:
        `scaled` in projected's dtype, and a sum of squares for each program's values. ValueError as
        in `mamba2_decode`, and where there are several groups, which have norms of their own.
    """
    if sizes.groups != 1:
        raise ValueError(f"one norm of all values is that of 1 group, not of {sizes.groups}")
    check_weight("norm_I", norm_I, sizes.inner)
    lanes = projected_NX.shape[0]
    tiles = triton.cdiv(sizes.head_dim, _decode_block(sizes))
    gated = Gated(
        projected_NX.new_empty((lanes, sizes.inner)),
        projected_NX.new_empty((sizes.heads * tiles, lanes), dtype=torch.float32),
    )
    _decode(
        projected_NX, ring_SFC, state_SEHPK, slot_N, position_N, params, sizes, gated.scaled,
        norm_I=norm_I, squares_TN=gated.squares, tokens_per_row=tokens_per_row, pdl=pdl,
    )  # fmt: skip
    return gated


def _decode(
    projected_NX: torch.Tensor,
    ring_SFC: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    out_NI: torch.Tensor,
    *,
    norm_I: torch.Tensor | None = None,
    squares_TN: torch.Tensor | None = None,
    tokens_per_row: int,
    pdl: bool,
) -> None:
    check_rows(projected_NX=projected_NX)
    lanes = projected_NX.shape[0]
    _check_columns("projected", projected_NX, lanes, sizes.projected)
    _check_state("state", state_SEHPK, sizes.state_shape)
    _check_state("ring", ring_SFC, (sizes.channels,))
    _check_params(params, sizes)
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    ring_entries, entries = ring_SFC.shape[1], state_SEHPK.shape[1]
    most = min(entries, ring_entries - sizes.width + 1)
    if tokens_per_row < 1 or lanes % tokens_per_row or tokens_per_row > most:
        raise ValueError(
            f"{lanes} lanes cannot be rows of {tokens_per_row} tokens with {entries} entries of "
            f"the state and {ring_entries} of a convolution of {sizes.width}"
        )
    if not use_triton(projected_NX):
        y_NI = out_NI if norm_I is None else out_NI.new_empty(out_NI.shape, dtype=torch.float32)
        mamba2_decode_reference(
            projected_NX,
            ring_SFC,
            state_SEHPK,
            slot_N,
            position_N,
            params,
            sizes,
            tokens_per_row=tokens_per_row,
            out=y_NI,
        )
        if norm_I is not None and squares_TN is not None:
            z_NI = projected_NX[:, : sizes.inner]
            mamba2_gate_reference(y_NI, z_NI, norm_I, slot_N, out=out_NI, squares_TN=squares_TN)
        return
    block_p = _decode_block(sizes)
    grid = (lanes // tokens_per_row, sizes.heads, triton.cdiv(sizes.head_dim, block_p))
    launcher(decode_kernel, grid)(
        projected_NX,
        ring_SFC,
        state_SEHPK,
        slot_N,
        position_N,
        params,
        norm_I,
        out_NI,
        squares_TN,
        projected_NX.stride(0),
        lanes,
        tokens_per_row,
        ring_entries,
        entries,
        sizes.dt_min,
        sizes.dt_max,
        **_constants(sizes, block_p),
        D=sizes.width,
        **_LAUNCHES["decode_kernel"],
        **launch_options(pdl),
    )


def mamba2_prefill(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    query_start: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Advance the state of a slot, or of several, by a chunk each.

    Reads the entry of the token before a chunk (zeros at position 0), and writes only the entry of
    its last token, rounded once. Three kernels, with `sizes.scan_bytes` between them.

    Args:
        xbc_TC: x, B and C after the convolution; any float dtype, dense rows.
        dt_TH: before bias and softplus; any float dtype, dense rows, any stride between them.
        query_start: int32 [chunks + 1], on the device: lanes query_start[i] .. query_start[i + 1]
            - 1 are a chunk of a slot of its own, all live, at consecutive positions. Lanes past the
            last chunk are padded. None: live lanes come first, and are one slot's chunk.
        out: `[T, I]` of any float dtype, dense rows; default in xbc's.
        The others as in `mamba2_decode`.

    Returns:
        y `[T, I]`, rounded once; padded lanes are not written. ValueError for what does not fit.
    """
    check_rows(xbc_TC=xbc_TC, dt_TH=dt_TH)
    lanes = xbc_TC.shape[0]
    _check_columns("xbc", xbc_TC, lanes, sizes.channels)
    _check_columns("dt", dt_TH, lanes, sizes.heads)
    _check_state("state", state_SEHPK, sizes.state_shape)
    _check_params(params, sizes)
    check_lanes(lanes, slot_T=slot_T, position_T=position_T)
    prompts = check_chunks(query_start)
    dtype = xbc_TC.dtype if out is None else out.dtype
    out = output_rows(out, (lanes, sizes.inner), dtype=dtype, like=xbc_TC)
    if not use_triton(xbc_TC):
        for lane in chunks_of(query_start):
            xbc, dt, slot, position = (each[lane] for each in (xbc_TC, dt_TH, slot_T, position_T))
            mamba2_prefill_reference(
                xbc, dt, state_SEHPK, slot, position, params, sizes, out=out[lane]
            )
        return out
    # Tensor cores do not multiply matrices of fewer than 16 values.
    block_p = max(16, min(_PREFILL_BLOCK_P, triton.next_power_of_2(sizes.head_dim)))
    H, P, K = sizes.state_shape
    states, decay = (
        torch.empty(shape, dtype=torch.float32, device=xbc_TC.device)
        for shape in sizes.scan_shapes(lanes, prompts)
    )
    strides, limits = (xbc_TC.stride(0), dt_TH.stride(0)), (sizes.dt_min, sizes.dt_max)
    of_chunk = {
        "PROMPTS": prompts or 1,
        "BLOCK_T": triton.next_power_of_2(lanes),
        "PIECE": PIECE,
        **launch_options(pdl),
    }
    of_piece = of_chunk | {
        **_constants(sizes, block_p, least=16),
        "PRECISION": "ieee" if xbc_TC.dtype == torch.float32 else "tf32",
    }
    grid = (piece_count(lanes, prompts), H, triton.cdiv(P, block_p))
    launcher(pieces_kernel, grid)(
        xbc_TC, dt_TH, slot_T, position_T, query_start, params, states, decay, *strides, lanes,
        *limits, **of_piece, **_LAUNCHES["pieces_kernel"],
    )  # fmt: skip
    chunks = () if prompts is None else (prompts,)
    launcher(pass_kernel, (H, triton.cdiv(P * K, _PASS_BLOCK), *chunks))(
        states,
        decay,
        state_SEHPK,
        slot_T,
        position_T,
        query_start,
        lanes,
        state_SEHPK.shape[1],
        H=H,
        P=P,
        K=K,
        BLOCK=_PASS_BLOCK,
        **_LAUNCHES["pass_kernel"],
        **of_chunk,
    )
    launcher(outputs_kernel, grid)(
        xbc_TC, dt_TH, states, slot_T, position_T, query_start, params, out, *strides,
        out.stride(0), lanes, *limits, **of_piece, **_LAUNCHES["outputs_kernel"],
    )  # fmt: skip
    return out


def mamba2_norm(
    y_NI: torch.Tensor,
    z_NI: torch.Tensor,
    weight_I: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    groups: int,
    eps: float,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """weight * u / sqrt(mean(u**2) + eps) for u = y * silu(z), each of `groups` parts by itself.

    Args:
        y_NI, z_NI: any float dtypes; dense rows, any stride between them.
        weight_I: any float dtype.
        out: `[N, I]` of `out_dtype`, dense rows; may be y.
        pdl: as in `mamba2_decode`.

    Returns:
        `[N, I]`, computed in float32 and rounded once; padded lanes are neither read nor written.
        ValueError for what does not fit.
    """
    check_rows(y_NI=y_NI, z_NI=z_NI)
    lanes, inner = y_NI.shape
    if z_NI.shape != y_NI.shape:
        raise ValueError(f"z_NI is {tuple(z_NI.shape)}, y_NI {tuple(y_NI.shape)}")
    if groups < 1 or inner % groups:
        raise ValueError(f"{inner} values are not {groups} equal groups")
    check_weight("weight_I", weight_I, inner)
    check_lanes(lanes, slot_N=slot_N)
    out = output_rows(out, (lanes, inner), dtype=out_dtype, like=y_NI)
    if not use_triton(y_NI):
        mamba2_norm_reference(y_NI, z_NI, weight_I, slot_N, groups=groups, eps=eps, out=out)
        return out
    width = inner // groups
    launcher(norm_kernel, (lanes, groups))(
        y_NI,
        z_NI,
        weight_I,
        slot_N,
        out,
        y_NI.stride(0),
        z_NI.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=min(16, max(4, triton.next_power_of_2(width) // 512)),
        **launch_options(pdl),
    )
    return out


def _decode_block(sizes: Mamba2Sizes) -> int:
    """Values of a head that a decode program holds."""
    return min(_DECODE_BLOCK_P, int(triton.next_power_of_2(sizes.head_dim)))


def _constants(sizes: Mamba2Sizes, block_p: int, least: int = 1) -> dict[str, int]:
    return {
        "H": sizes.heads,
        "P": sizes.head_dim,
        "K": sizes.state_size,
        "G": sizes.groups,
        "BLOCK_P": block_p,
        "BLOCK_K": max(least, triton.next_power_of_2(sizes.state_size)),
    }


def _check_columns(name: str, tensor: torch.Tensor, lanes: int, columns: int) -> None:
    if tensor.shape != (lanes, columns):
        raise ValueError(f"{name} must be [{lanes}, {columns}], not {list(tensor.shape)}")


def _check_state(name: str, state: torch.Tensor, shape: tuple[int, ...]) -> None:
    fits = state.dim() == len(shape) + 2 and state.shape[2:] == shape and state.shape[1] > 0
    if not fits or state.dtype not in FLOAT_DTYPES or not state.is_contiguous():
        raise ValueError(
            f"the {name} must be a dense [slots, entries, {', '.join(map(str, shape))}] of one of "
            f"{FLOAT_DTYPES}, not {state.dtype} {list(state.shape)}"
        )


def _check_params(params: Mamba2Params, sizes: Mamba2Sizes) -> None:
    weight, bias, *of_heads = params
    if weight.shape != (sizes.channels, sizes.width) or not weight.is_contiguous():
        raise ValueError(
            f"conv_weight must be a dense [{sizes.channels}, {sizes.width}], not "
            f"{list(weight.shape)}"
        )
    if bias is not None:
        check_weight("conv_bias", bias, sizes.channels)
    for name, vector in zip(Mamba2Params._fields[2:], of_heads, strict=True):
        check_weight(name, vector, sizes.heads)
