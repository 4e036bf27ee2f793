"""Mamba2: a state for each head that decays and sums up outer products, and the norm after it.

    dt = softplus(dt + dt_bias), within limits
    h  = exp(-exp(A_log) dt) h + dt x B^T
    y  = C.h + D x
    mamba2_norm: weight * u / rms(u) of u = y * silu(z), a group of heads at a time

x, B and C have been through their convolution and its activation before. Heads of a group share B
and C. Everything is computed in float32.

In decode a program owns some rows of one head's state: it reads those of the token before, walks
through the row's tokens in registers, and stores them after each one. So a token's bits do not
depend on how many tokens its row has. In prefill a program walks through the chunk in pieces of
64 tokens, cut at absolute multiples of 64 positions: within a piece tokens meet in products of
matrices, and the state goes from piece to piece (the state space duality of Dao & Gu 2024).

Letters: N lanes, T lanes of a chunk, R rows, S slots, E entries of a slot's state, H heads,
P values of a head, K values of the state for each of them, G groups, I = H * P, C = I + 2 * G * K.
"""

from __future__ import annotations

import torch
import triton

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_rows,
    check_vector,
    check_weight,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.recurrent.mamba2_reference import (
    mamba2_decode_reference,
    mamba2_norm_reference,
    mamba2_prefill_reference,
)
from graphengine.kernels.recurrent.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.recurrent.mamba2_triton import (
    PIECE,
    decode_kernel,
    norm_kernel,
    prefill_kernel,
)

# Values of a head that a program has: of 128 float32 of state each, 8 KB.
_DECODE_BLOCK_P = 16
_PREFILL_BLOCK_P = 64


def mamba2_decode(
    xbc_NC: torch.Tensor,
    dt_NH: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """Advance each row's state by its tokens, in place, and return what they read of it.

    Args:
        xbc_NC: x, B and C after their activation; any float dtype, dense rows.
        dt_NH: before bias and softplus; any float dtype, dense rows, any stride between them.
        state_SEHPK: dense; any float dtype. Entry `p % E` of a slot is that of its token at p. A
            row reads the entry of the token before its first (zeros at position 0), and writes one
            for each token; it is rounded after every token.
        slot_N, position_N: int32; -1 = padded lane. Each `tokens_per_row` lanes are tokens of one
            slot at consecutive positions, live ones first.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`.

    Returns:
        y, float32 `[N, I]`; padded lanes are not written. ValueError for what does not fit, or more
        tokens than entries.
    """
    lanes = _check(xbc_NC, dt_NH, state_SEHPK, slot_N, position_N, params, sizes)
    entries = state_SEHPK.shape[1]
    if tokens_per_row < 1 or lanes % tokens_per_row or tokens_per_row > entries:
        raise ValueError(
            f"{lanes} lanes of a state with {entries} entries cannot be rows of {tokens_per_row}"
        )
    y = torch.empty((lanes, sizes.inner), dtype=torch.float32, device=xbc_NC.device)
    if not use_triton(xbc_NC):
        mamba2_decode_reference(
            xbc_NC, dt_NH, state_SEHPK, slot_N, position_N, params, sizes, tokens_per_row, y
        )
        return y
    block_p = min(_DECODE_BLOCK_P, triton.next_power_of_2(sizes.head_dim))
    grid = (lanes // tokens_per_row, sizes.heads, triton.cdiv(sizes.head_dim, block_p))
    launcher(decode_kernel, grid)(
        xbc_NC,
        dt_NH,
        state_SEHPK,
        slot_N,
        position_N,
        *params,
        y,
        xbc_NC.stride(0),
        dt_NH.stride(0),
        tokens_per_row,
        entries,
        sizes.dt_min,
        sizes.dt_max,
        **_constants(sizes, block_p),
        num_warps=4,
        **launch_options(pdl),
    )
    return y


def mamba2_prefill(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    state_SEHPK: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The same for one slot's chunk, whose live lanes come first, at consecutive positions.

    Reads the entry of the token before the chunk (zeros at position 0), and writes that of its last
    token alone, rounded once.

    Args:
        out: `[T, I]` of any float dtype, dense rows; default in xbc's.
        The others as of `mamba2_decode`.

    Returns:
        y `[T, I]`, rounded once; padded lanes are not written. ValueError for what does not fit.
    """
    lanes = _check(xbc_TC, dt_TH, state_SEHPK, slot_T, position_T, params, sizes)
    dtype = xbc_TC.dtype if out is None else out.dtype
    out = output_rows(out, (lanes, sizes.inner), dtype=dtype, like=xbc_TC)
    if not use_triton(xbc_TC):
        mamba2_prefill_reference(xbc_TC, dt_TH, state_SEHPK, slot_T, position_T, params, sizes, out)
        return out
    # Matrices of less than 16 values are no products of a tensor core's.
    block_p = max(16, min(_PREFILL_BLOCK_P, triton.next_power_of_2(sizes.head_dim)))
    if sizes.state_size > 128:
        # Shared memory holds B and C of a piece, and the state.
        block_p = min(block_p, 32)
    launcher(prefill_kernel, (sizes.heads, triton.cdiv(sizes.head_dim, block_p)))(
        xbc_TC,
        dt_TH,
        state_SEHPK,
        slot_T,
        position_T,
        *params,
        out,
        xbc_TC.stride(0),
        dt_TH.stride(0),
        out.stride(0),
        lanes,
        state_SEHPK.shape[1],
        sizes.dt_min,
        sizes.dt_max,
        **_constants(sizes, block_p, least=16),
        BLOCK_T=triton.next_power_of_2(lanes),
        PIECE=PIECE,
        PRECISION="ieee" if xbc_TC.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=1,
        **launch_options(pdl),
    )
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
    """weight * u / sqrt(mean(u**2) + eps) of u = y * silu(z), each of `groups` parts by itself.

    Args:
        y_NI, z_NI: any float dtypes; dense rows, any stride between them.
        weight_I: any float dtype.
        out: `[N, I]` of `out_dtype`, dense rows; may be y.
        pdl: as of `mamba2_decode`.

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


def _constants(sizes: Mamba2Sizes, block_p: int, least: int = 1) -> dict[str, int]:
    return {
        "H": sizes.heads,
        "P": sizes.head_dim,
        "K": sizes.state_size,
        "G": sizes.groups,
        "BLOCK_P": block_p,
        "BLOCK_K": max(least, triton.next_power_of_2(sizes.state_size)),
    }


def _check(
    xbc_NC: torch.Tensor,
    dt_NH: torch.Tensor,
    state: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: Mamba2Params,
    sizes: Mamba2Sizes,
) -> int:
    """Raise ValueError for operands that do not fit each other; return the number of lanes."""
    check_rows(xbc=xbc_NC, dt=dt_NH)
    lanes = xbc_NC.shape[0]
    for name, tensor, columns in (("xbc", xbc_NC, sizes.channels), ("dt", dt_NH, sizes.heads)):
        if tensor.shape != (lanes, columns):
            raise ValueError(f"{name} must be [{lanes}, {columns}], not {list(tensor.shape)}")
    fits = state.dim() == 5 and state.shape[2:] == sizes.state_shape and state.shape[1] > 0
    if not fits or state.dtype not in FLOAT_DTYPES or not state.is_contiguous():
        raise ValueError(
            f"the state must be a dense [S, E, {', '.join(map(str, sizes.state_shape))}] of one of "
            f"{FLOAT_DTYPES}, not {state.dtype} {list(state.shape)}"
        )
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    for name, vector in zip(Mamba2Params._fields, params, strict=True):
        check_vector(name, vector, sizes.heads, torch.float32)
    return lanes
