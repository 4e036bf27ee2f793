"""A gated delta net: a state for each head that decays, and is corrected where it predicts wrong.

    q, k, v = silu(conv(...)), of which q and k are normed, and q divided by sqrt(K)
    S = exp(-exp(A_log) softplus(a + dt_bias)) S
    S = S + k (sigmoid(b) (v - S^T k))^T
    y = norm * rms(S^T q) * silu(z), each head by itself

Heads of values share queries and keys in groups. Everything is computed in float32. In decode a
program owns some columns of a head's state: it reads them as the token before left them, walks
through the row's tokens in registers, and stores the columns after each one. So a token's bits do
not depend on how many tokens its row has. In prefill pieces of 64 tokens, cut at absolute multiples
of 64 positions, are computed by matrix products, and the state goes from piece to piece (Yang,
Kautz, Hatamizadeh 2024, arXiv:2412.06464).

Letters: N lanes, T lanes of prefill, P chunks, R rows, S slots, E entries of a slot, G heads of
queries and keys, H heads of values, K and V values of a head, D taps, C = 2 * G * K + H * V,
I = H * V, X = C + I + 2 * H: a lane is projected to [q | k | v | z | b | a].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from graphengine.kernels.core.chunks import check_chunks, chunks_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import (
    FLOAT_DTYPES,
    check_lanes,
    check_rows,
    check_vector,
    output_rows,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.recurrent.conv import check_conv
from graphengine.kernels.recurrent.gated_delta.gated_delta_reference import (
    gated_delta_decode_reference,
    gated_delta_prefill_reference,
)
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)
from graphengine.kernels.recurrent.gated_delta.gated_delta_triton import (
    decode_kernel,
    gated_norm_kernel,
    outputs_kernel,
    pieces_kernel,
    scan_kernel,
)
from graphengine.kernels.recurrent.pieces import PIECE, piece_count

# Values of a head whose state a program holds; more would not fit its registers.
_DECODE_VALUES = 32
_SCAN_VALUES = 32
# The fastest on an H200: occupancy counts for more than registers to spare. Decode of 16 values in
# 2 warps is faster by itself (1 %), and slower in a step of eight rows (2 to 3 %).
_LAUNCHES: Mapping[str, Mapping[str, int]] = {
    "decode_kernel": {"num_warps": 4, "maxnreg": 128},
    "gated_norm_kernel": {"num_warps": 1},
    "pieces_kernel": {"num_warps": 4, "num_stages": 1, "maxnreg": 255},
    "scan_kernel": {"num_warps": 4, "num_stages": 2},
    "outputs_kernel": {"num_warps": 4, "num_stages": 1, "maxnreg": 255},
}


def gated_delta_decode(
    projected_NX: torch.Tensor,
    ring_SEC: torch.Tensor,
    state_SEHKV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    *,
    eps: float,
    tokens_per_row: int = 1,
    pdl: bool = False,
) -> torch.Tensor:
    """Advance each row's state by its tokens, in place, with two kernels.

    Args:
        projected_NX: before the convolution; rows dense, any stride between them.
        ring_SEC: dense, in projected's dtype. Entry `p % E` of a slot has the convolution's inputs
            of the token at p. E is at least D - 1 + tokens_per_row, so that nothing that is read is
            overwritten.
        state_SEHKV: dense; any float dtype. Entry `p % E` is the state after the token at p. A row
            reads the entry of the token before its first (zeros at position 0), and writes one for
            each token; the state is rounded after every token.
        slot_N, position_N: int32; -1 = padded lane. Each `tokens_per_row` lanes are tokens of one
            slot at consecutive positions, live ones first.
        eps: of the norm.
        pdl: the launch before may still run; it writes none of `params`.

    Returns:
        y, `[N, I]` in projected's dtype; padded lanes are not written. ValueError for what does not
        fit, or more tokens than entries.
    """
    lanes = _check(projected_NX, state_SEHKV, slot_N, position_N, params, sizes)
    check_conv(params.conv_weight, None, ring_SEC, sizes.channels, projected_NX.dtype)
    entries, ring_entries = state_SEHKV.shape[1], ring_SEC.shape[1]
    most = min(entries, ring_entries - sizes.taps + 1)
    if tokens_per_row < 1 or lanes % tokens_per_row or tokens_per_row > most:
        raise ValueError(
            f"{lanes} lanes of states with {entries} entries and of rings with {ring_entries} "
            f"cannot be rows of {tokens_per_row}"
        )
    out = torch.empty((lanes, sizes.inner), dtype=projected_NX.dtype, device=projected_NX.device)
    if not use_triton(projected_NX):
        return gated_delta_decode_reference(
            projected_NX,
            ring_SEC,
            state_SEHKV,
            slot_N,
            position_N,
            params,
            sizes,
            eps,
            tokens_per_row,
            out,
        )
    constants = _constants(sizes, most=_DECODE_VALUES)
    tiles = triton.cdiv(sizes.value_dim, constants["BLOCK_V"])
    y = torch.empty((lanes, sizes.inner), dtype=torch.float32, device=projected_NX.device)
    launcher(decode_kernel, (lanes // tokens_per_row, sizes.value_heads, tiles))(
        projected_NX,
        ring_SEC,
        state_SEHKV,
        slot_N,
        position_N,
        params,
        y,
        projected_NX.stride(0),
        tokens_per_row,
        ring_entries,
        entries,
        G=sizes.key_heads,
        D=sizes.taps,
        **constants,
        **_LAUNCHES["decode_kernel"],
        **launch_options(pdl),
    )
    _launch_norm(y, projected_NX, slot_N, params, sizes, eps, out, pdl)
    return out


def gated_delta_prefill(
    qkv_TC: torch.Tensor,
    projected_TX: torch.Tensor,
    state_SEHKV: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    *,
    eps: float,
    query_start_P1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Advance the state of a slot, or of several, by a chunk each.

    Reads the entry of the token before a chunk (zeros at position 0), and writes only the entry of
    its last token, rounded once. Three kernels, with `sizes.scan_bytes` between them.

    Args:
        query_start_P1: int32 [P + 1], on the device: lanes query_start[p] .. query_start[p + 1] - 1
            are a chunk of a slot of its own, all live, at consecutive positions. Lanes past the
            last chunk are padded. None: live lanes come first, and are one slot's chunk.
        qkv_TC: queries, keys and values after `causal_conv_chunk` with silu.
        out: `[T, I]` in qkv's dtype, dense rows; it is neither of the inputs.
        The others as in `gated_delta_decode`.

    Returns:
        y `[T, I]`; padded lanes are not written. ValueError for what does not fit.
    """
    lanes = _check(projected_TX, state_SEHKV, slot_T, position_T, params, sizes)
    check_rows(qkv=qkv_TC)
    if qkv_TC.shape != (lanes, sizes.channels):
        raise ValueError(f"qkv must be [{lanes}, {sizes.channels}], not {list(qkv_TC.shape)}")
    prompts = check_chunks(query_start_P1)
    out = output_rows(out, (lanes, sizes.inner), dtype=qkv_TC.dtype, like=qkv_TC)
    if not use_triton(qkv_TC):
        for lane in chunks_of(query_start_P1):
            of_chunk = (each[lane] for each in (qkv_TC, projected_TX, slot_T, position_T, out))
            qkv, projected, slot, position, y = of_chunk
            gated_delta_prefill_reference(
                qkv, projected, state_SEHKV, slot, position, params, sizes, eps, y
            )
        return out
    chunk = _Chunk(
        qkv_TC, projected_TX, slot_T, position_T, query_start_P1, prompts, params, sizes, pdl
    )
    scan = _new_scan(chunk)
    _launch_pieces(chunk, scan)
    _launch_scan(chunk, scan, state_SEHKV)
    _launch_outputs(chunk, scan, eps, out)
    return out


class _Chunk(NamedTuple):
    """What the kernels of a chunk read, or of the chunks of several prompts."""

    qkv_TC: torch.Tensor
    projected_TX: torch.Tensor
    slot_T: torch.Tensor
    position_T: torch.Tensor
    query_start_P1: torch.Tensor | None
    prompts: int | None
    params: GatedDeltaParams
    sizes: GatedDeltaSizes
    pdl: bool

    @property
    def lanes(self) -> int:
        return len(self.slot_T)

    @property
    def pieces(self) -> int:
        return piece_count(self.lanes, self.prompts)

    @property
    def options(self) -> dict[str, Any]:
        """Options of every launch."""
        return {
            "PROMPTS": self.prompts or 1,
            "BLOCK_T": triton.next_power_of_2(self.lanes),
            "PIECE": PIECE,
            "PRECISION": "ieee" if self.qkv_TC.dtype == torch.float32 else "tf32",
            **launch_options(self.pdl),
        }


class _Scan(NamedTuple):
    """What the kernels of a chunk pass to each other, in float32 and shaped by `scan_shapes`."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    met: torch.Tensor
    decay: torch.Tensor
    states: torch.Tensor


def _new_scan(chunk: _Chunk) -> _Scan:
    """Uninitialised tensors for `chunk`."""
    shapes = chunk.sizes.scan_shapes(chunk.lanes, chunk.prompts)
    device = chunk.qkv_TC.device
    return _Scan(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def _launch_pieces(chunk: _Chunk, scan: _Scan) -> None:
    """Compute what each piece does to any state, and its tokens to each other."""
    sizes = chunk.sizes
    launcher(pieces_kernel, (chunk.pieces, sizes.value_heads))(
        chunk.qkv_TC,
        chunk.projected_TX,
        chunk.slot_T,
        chunk.position_T,
        chunk.query_start_P1,
        chunk.params,
        scan.q,
        scan.k,
        scan.u,
        scan.w,
        scan.met,
        scan.decay,
        chunk.qkv_TC.stride(0),
        chunk.projected_TX.stride(0),
        chunk.lanes,
        G=sizes.key_heads,
        **_constants(sizes, least=16),
        **_LAUNCHES["pieces_kernel"],
        **chunk.options,
    )


def _launch_scan(chunk: _Chunk, scan: _Scan, state_SEHKV: torch.Tensor) -> None:
    """Compute the state before each piece, and after the last one."""
    sizes = chunk.sizes
    constants = _constants(sizes, least=16, most=_SCAN_VALUES)
    tiles = triton.cdiv(sizes.value_dim, constants["BLOCK_V"])
    chunks = () if chunk.prompts is None else (chunk.prompts,)
    launcher(scan_kernel, (sizes.value_heads, tiles, *chunks))(
        scan.k,
        scan.u,
        scan.w,
        scan.decay,
        scan.states,
        state_SEHKV,
        chunk.slot_T,
        chunk.position_T,
        chunk.query_start_P1,
        chunk.lanes,
        state_SEHKV.shape[1],
        **constants,
        **_LAUNCHES["scan_kernel"],
        **chunk.options,
    )


def _launch_outputs(chunk: _Chunk, scan: _Scan, eps: float, out: torch.Tensor) -> None:
    """Compute each token's output, from its piece's state and the tokens before it in the piece."""
    sizes = chunk.sizes
    launcher(outputs_kernel, (chunk.pieces, sizes.value_heads))(
        scan.q,
        scan.u,
        scan.met,
        scan.states,
        chunk.projected_TX,
        chunk.slot_T,
        chunk.position_T,
        chunk.query_start_P1,
        chunk.params.norm,
        out,
        chunk.projected_TX.stride(0),
        out.stride(0),
        chunk.lanes,
        eps,
        C=sizes.channels,
        **_constants(sizes, least=16),
        **_LAUNCHES["outputs_kernel"],
        **chunk.options,
    )


def _launch_norm(
    y_NI: torch.Tensor,
    projected_NX: torch.Tensor,
    slot_N: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    eps: float,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    launcher(gated_norm_kernel, (len(y_NI), sizes.value_heads))(
        y_NI,
        projected_NX,
        slot_N,
        params.norm,
        out,
        projected_NX.stride(0),
        out.stride(0),
        eps,
        C=sizes.channels,
        H=sizes.value_heads,
        V=sizes.value_dim,
        BLOCK_V=triton.next_power_of_2(sizes.value_dim),
        **_LAUNCHES["gated_norm_kernel"],
        **launch_options(pdl),
    )


def _constants(sizes: GatedDeltaSizes, *, least: int = 1, most: int = 256) -> dict[str, int]:
    """Sizes, and blocks of `least` to `most` values."""
    return {
        "H": sizes.value_heads,
        "K": sizes.key_dim,
        "V": sizes.value_dim,
        "BLOCK_K": max(least, triton.next_power_of_2(sizes.key_dim)),
        "BLOCK_V": max(least, min(most, triton.next_power_of_2(sizes.value_dim))),
    }


def _check(
    projected_NX: torch.Tensor,
    state: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
) -> int:
    """Raise ValueError for operands that do not fit each other; return the number of lanes."""
    check_rows(projected=projected_NX)
    lanes, dtype = projected_NX.shape[0], projected_NX.dtype
    if projected_NX.shape[1] != sizes.projected:
        raise ValueError(
            f"projected must be [{lanes}, {sizes.projected}], not {list(projected_NX.shape)}"
        )
    fits = state.dim() == 5 and state.shape[2:] == sizes.state_shape and state.shape[1] > 0
    if not fits or state.dtype not in FLOAT_DTYPES or not state.is_contiguous():
        raise ValueError(
            f"the state must be a dense [S, E, {', '.join(map(str, sizes.state_shape))}] of one of "
            f"{FLOAT_DTYPES}, not {state.dtype} {list(state.shape)}"
        )
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    check_vector("a_log", params.a_log, sizes.value_heads, torch.float32)
    check_vector("dt_bias", params.dt_bias, sizes.value_heads, torch.float32)
    check_vector("norm", params.norm, sizes.value_dim, dtype)
    return lanes
