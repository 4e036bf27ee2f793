"""Plain PyTorch twins of the kernels in `latent.py`."""

from __future__ import annotations

import math

import torch

from graphengine.kernels.core.lanes import live_lanes
from graphengine.kernels.core.paged import token_capacity
from graphengine.kernels.norm_rope.norm import rms_norm_reference


def latent_append_reference(
    q_NX: torch.Tensor,
    latent_NE: torch.Tensor,
    norm_weight_R: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    num_heads: int,
    eps: float,
    limit: int,
    out: torch.Tensor,
) -> None:
    """`latent_append`, in place on `out` and on the cache; positions must be below `limit`."""
    rank = len(norm_weight_R)
    rotated = latent_NE.shape[1] - rank
    live = live_lanes(slot_N)
    position = position_N[live].long()
    inside = (position >= 0) & (position < limit)
    position = torch.where(inside, position, 0)
    angles = [
        table[position].masked_fill(~inside[:, None], math.nan)[:, None] for table in (cos, sin)
    ]
    q = q_NX[live].unflatten(1, (num_heads, q_NX.shape[1] // num_heads))[:, :, -rotated:]
    out[live, :, rank:] = _rotate_neighbours(q, *angles)

    latent, key = latent_NE[live].split([rank, rotated], dim=1)
    normed = rms_norm_reference(
        latent, norm_weight_R, slot_N[live], eps=eps, out_dtype=latent.dtype
    )
    key = _rotate_neighbours(key[:, None], *angles)[:, 0]
    entry = torch.cat((normed, key), dim=1)[inside]
    position = position[inside]
    block_size = kv.shape[2]
    block = block_table_SB[slot_N[live][inside].long(), position // block_size].long()
    kv[block, 0, position % block_size] = entry


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def latent_attention_reference(
    q_NQE: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    rank: int,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """`latent_attention`, lane by lane so that no lane's bits depend on others."""
    limit, block_size = token_capacity(kv, block_table_SB), kv.shape[2]
    for lane, (slot, position) in enumerate(zip(slot_N.tolist(), position_N.tolist(), strict=True)):
        if slot < 0:
            continue
        if not 0 <= position < limit:
            out[lane] = math.nan
            continue
        token = torch.arange(position + 1, device=kv.device)
        block = block_table_SB[slot, token // block_size].long()
        entries = kv[block, 0, token % block_size].float()
        weights = torch.softmax(q_NQE[lane].float() @ entries.t() * scale, dim=-1)
        out[lane] = (weights @ entries[:, :rank]).to(out.dtype)
    return out
