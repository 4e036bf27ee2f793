"""`gated_delta.py` in plain PyTorch, one token after the other; letters as there.

A row's bits do not depend on other rows: each row is summed by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphengine.kernels.core.lanes import live_lanes, sum_rows
from graphengine.kernels.norm_rope.activation import silu_reference
from graphengine.kernels.recurrent.conv_reference import causal_conv_reference
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)
from graphengine.kernels.recurrent.softplus import exp_reference, softplus_reference

_NORM_EPS = 1e-6


class Heads(NamedTuple):
    """The inputs of some tokens' heads, in float32; queries and keys are normed.

    q, k [L, H, K], v [L, H, V], decay and beta [L, H]
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def gated_delta_decode_reference(
    projected_NX: torch.Tensor,
    ring_SEC: torch.Tensor,
    state_SEHKV: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    eps: float,
    tokens_per_row: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`gated_delta_decode` into `out`: a row is a short chunk that stores each of its states."""
    for row in range(0, len(slot_N), tokens_per_row):
        lanes = slice(row, row + tokens_per_row)
        live = row + live_lanes(slot_N[lanes])
        if not len(live):
            continue
        projected, slot, position = projected_NX[live], slot_N[live], position_N[live]
        x = causal_conv_reference(
            projected[:, : sizes.channels],
            params.conv_weight,
            None,
            ring_SEC,
            slot,
            position,
        )
        heads = heads_of(silu_reference(x), projected, params, sizes)
        states = _walk(heads, state_SEHKV, slot[:1].long(), position.long(), every=True)
        out[live] = _gated(states, projected, params, sizes, eps).to(out.dtype)
    return out


def gated_delta_prefill_reference(
    qkv_TC: torch.Tensor,
    projected_TX: torch.Tensor,
    state_SEHKV: torch.Tensor,
    slot_T: torch.Tensor,
    position_T: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """`gated_delta_prefill` into `out`."""
    live = live_lanes(slot_T)
    if not len(live):
        return out
    projected = projected_TX[live]
    heads = heads_of(qkv_TC[live].float(), projected, params, sizes)
    slot, position = slot_T[live[:1]].long(), position_T[live].long()
    y = _walk(heads, state_SEHKV, slot, position, every=False)
    out[live] = _gated(y, projected, params, sizes, eps).to(out.dtype)
    return out


def heads_of(
    qkv_LC: torch.Tensor,
    projected_LX: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
) -> Heads:
    """The heads' inputs, from convolved queries, keys and values."""
    of_keys, share = sizes.key_heads * sizes.key_dim, sizes.value_heads // sizes.key_heads
    q, k, v = qkv_LC.split((of_keys, of_keys, sizes.inner), dim=1)
    q, k = (
        _normed(part.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(share, dim=1)
        for part in (q, k)
    )
    b, a = projected_LX[:, -2 * sizes.value_heads :].float().chunk(2, dim=1)
    dt = softplus_reference(a + params.dt_bias)
    decay = exp_reference(-exp_reference(params.a_log) * dt)
    beta = 1.0 / (1.0 + exp_reference(-b))
    return Heads(q * sizes.key_dim**-0.5, k, v.unflatten(1, (sizes.value_heads, -1)), decay, beta)


def _normed(x_LGK: torch.Tensor) -> torch.Tensor:
    squares = sum_rows(x_LGK.square().flatten(0, 1)).view(x_LGK.shape[:2])
    return x_LGK * torch.rsqrt(squares + _NORM_EPS)[..., None]


def _walk(
    heads: Heads,
    state_SEHKV: torch.Tensor,
    slot_1: torch.Tensor,
    position_L: torch.Tensor,
    *,
    every: bool,
) -> torch.Tensor:
    """Float32 [L, H, V]: what the tokens of one slot read from the state.

    The state after the last token is stored; with `every` the state after each token is stored,
    and continues as it was rounded.
    """
    entries, dtype = state_SEHKV.shape[1], state_SEHKV.dtype
    before = state_SEHKV[slot_1, (position_L[:1] - 1) % entries][0].float()
    s = torch.where(position_L[0] > 0, before, torch.zeros_like(before))
    read = []
    for index, position in enumerate(position_L):
        q, k, v, decay, beta = (part[index] for part in heads)
        s = s * decay[:, None, None]
        delta = (v - _sum_keys(s, k)) * beta[:, None]
        s = s + k[:, :, None] * delta[:, None]
        if every or index + 1 == len(position_L):
            stored = s.to(dtype)
            state_SEHKV[slot_1, position % entries] = stored
            s = stored.float() if every else s
        read.append(_sum_keys(s, q))
    return torch.stack(read)


def _sum_keys(s_HKV: torch.Tensor, k_HK: torch.Tensor) -> torch.Tensor:
    """[H, V]"""
    products = (s_HKV * k_HK[:, :, None]).transpose(1, 2)
    return sum_rows(products.flatten(0, 1).contiguous()).view(products.shape[:2])


def _gated(
    y_LHV: torch.Tensor,
    projected_LX: torch.Tensor,
    params: GatedDeltaParams,
    sizes: GatedDeltaSizes,
    eps: float,
) -> torch.Tensor:
    """Float32 [L, I]: the norm of each head, times silu(z)."""
    mean = sum_rows(y_LHV.square().flatten(0, 1)).view(y_LHV.shape[:2]) / sizes.value_dim
    normed = y_LHV * torch.rsqrt(mean + eps)[..., None] * params.norm.float()
    z = projected_LX[:, sizes.channels : sizes.channels + sizes.inner].float()
    return normed.flatten(1) * silu_reference(z)
