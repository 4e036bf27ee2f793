"""Attention over a paged cache of latents: DeepSeek's multi-head latent attention (MLA), absorbed.

    kv[blocks, 1, block_size, R + P]    every token's normed latent, then its rotated key

All heads share both. A head's keys and values are products of the latent with the head's own
weights, so these weights move to the other side (DeepSeek-AI 2024, section 2.1): queries are
multiplied into the latent space before attention, and the sums out of it afterwards
(`head_product`). In between there is one kv head: its key is the whole entry, and its value is the
latent in it.

    latent_append       rotates queries and keys, norms latents, appends to the cache
    latent_attention    attention of prompt chunks: `latent_prefill.py`
    latent_values       decode, with the product out of the latent space: `latent_decode.py`

A launch attends only to entries that an earlier launch appended. So the lanes of a row of
speculative decoding, and those of a chunk, find their siblings in the cache and are independent.
Tiles of keys are counted from position 0, and their size does not depend on lanes.

Letters: N lanes of a launch, S slots, B blocks of a slot's table, Q heads, R values of a latent,
P values of a rotated key, E = R + P, C values of a query that are not rotated, T positions of the
tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from graphengine.kernels.attention.latent_reference import latent_append_reference
from graphengine.kernels.attention.triton.latent_triton import latent_append_kernel
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_int32, check_lanes, check_rows, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import BLOCK_SIZES, checked_output, token_capacity
from graphengine.kernels.core.pdl import launch_options
from graphengine.kernels.linear.plans import dot_columns

MAX_LATENT = 512
MAX_ROTATED = 128
LATENT_TILE = 32
"""Keys of a tile of decode, for 16-bit dtypes."""

_BLOCK_PAIRS = 1024


class LatentTiles(NamedTuple):
    """Tile sizes of a program's products (rows and keys), warps and stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def latent_append(
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
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Rotate the queries' last P values and the key, norm the latent, append both to the cache.

    Args:
        q_NX: [N, Q * (C + P)], a head is [not rotated | rotated]; rows dense, any row stride.
        latent_NE: [N, R + P] in q's dtype, [latent | key]; rows dense, any row stride.
        norm_weight_R: in q's dtype, weight of the RMSNorm with `eps`, rounded where `rms_norm`
            rounds.
        cos, sin: float32 [T, P/2] from `rope_tables`.
        kv: one layer's cache, in q's dtype. Written in place.
        block_table_SB: int32. slot_N: int32, -1 = padded lane. position_N: int32, absolute.
        out: [N, Q, R + P] in q's dtype, dense. Only the last P values are written: the first R are
            for the `head_product` of the queries' other values.
        pdl: the launch before, whatever it is, may still run.

    Rotation turns neighbours (2i, 2i + 1), as DeepSeek's weights expect, in float32, rounded once.
    A padded lane reads and writes nothing. A live lane past the tables or past its block table
    appends nothing, and the values written for its queries are NaN.
    """
    lanes, rank, rotated = _check_append(q_NX, latent_NE, norm_weight_R, cos, sin, kv, num_heads)
    check_latent_cache(kv, block_table_SB, rank + rotated)
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    checked_output(out, (lanes, num_heads, rank + rotated), like=q_NX)
    limit = min(cos.shape[0], token_capacity(kv, block_table_SB))
    if not use_triton(q_NX):
        latent_append_reference(
            q_NX,
            latent_NE,
            norm_weight_R,
            cos,
            sin,
            kv,
            block_table_SB,
            slot_N,
            position_N,
            num_heads=num_heads,
            eps=eps,
            limit=limit,
            out=out,
        )
        return
    pairs = triton.next_power_of_2(rotated // 2)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _BLOCK_PAIRS // pairs))
    launcher(latent_append_kernel, (lanes, 1 + triton.cdiv(num_heads, block_heads)))(
        q_NX,
        latent_NE,
        norm_weight_R,
        cos,
        sin,
        kv,
        block_table_SB,
        slot_N,
        position_N,
        out,
        q_NX.stride(0),
        latent_NE.stride(0),
        kv.stride(0),
        block_table_SB.stride(0),
        limit,
        eps,
        Q=num_heads,
        X=q_NX.shape[1] // num_heads,
        R=rank,
        P=rotated,
        RANK_PADDED=triton.next_power_of_2(rank),
        PAIRS_PADDED=pairs,
        BLOCK_HEADS=block_heads,
        BLOCK_SIZE=kv.shape[2],
        num_warps=4,
        **launch_options(pdl),
    )


def latent_shape(
    q_NQE: torch.Tensor, kv: torch.Tensor, rank: int, tiles: LatentTiles
) -> dict[str, int]:
    """Constexprs and warps shared by all kernels that attend to latents with these tiles."""
    heads, rotated = q_NQE.shape[1], q_NQE.shape[2] - rank
    return {
        "Q": heads,
        "R": rank,
        "P": rotated,
        "RANK_PADDED": dot_columns(rank),
        "ROTATED_PADDED": dot_columns(rotated),
        "BLOCK_SIZE": kv.shape[2],
        "ROWS": tiles.rows,
        "TILE": tiles.keys,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }


def check_latent_cache(kv: torch.Tensor, block_table_SB: torch.Tensor, entry: int) -> None:
    """Raise ValueError unless `kv` and `block_table_SB` can hold entries of this size."""
    if kv.dim() != 4 or kv.shape[1] != 1:
        raise ValueError(f"kv must be [blocks, 1, block_size, R + P], not {tuple(kv.shape)}")
    block_size = kv.shape[2]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {BLOCK_SIZES}")
    if kv.shape[3] != entry:
        raise ValueError(f"kv holds entries of {kv.shape[3]}, expected {entry}")
    dense = (block_size * entry, entry, 1)
    if kv.stride()[1:] != dense:
        raise ValueError(f"kv must be dense within a block: strides {kv.stride()[1:]} != {dense}")
    check_int32(block_table_SB=block_table_SB)
    if block_table_SB.dim() != 2 or block_table_SB.stride(1) != 1:
        raise ValueError(
            f"block_table must be [S, B] with dense rows, not {tuple(block_table_SB.shape)} "
            f"with strides {block_table_SB.stride()}"
        )


def check_latent_sizes(rank: int, rotated: int) -> None:
    """Raise ValueError for latents or rotated keys that the kernels cannot hold."""
    if not 1 <= rank <= MAX_LATENT:
        raise ValueError(f"a latent of {rank} values is outside 1..{MAX_LATENT}")
    if rotated % 2 or not 2 <= rotated <= MAX_ROTATED:
        raise ValueError(f"a rotated key of {rotated} values must be even and in 2..{MAX_ROTATED}")


def _check_append(
    q_NX: torch.Tensor,
    latent_NE: torch.Tensor,
    norm_weight_R: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    heads: int,
) -> tuple[int, int, int]:
    """Raise ValueError for a shape or dtype that does not fit; return (N, R, P)."""
    check_rows(q_NX=q_NX, latent_NE=latent_NE)
    lanes, rank = len(q_NX), len(norm_weight_R)
    rotated = latent_NE.shape[1] - rank
    check_latent_sizes(rank, rotated)
    if len(latent_NE) != lanes or q_NX.shape[1] % heads or q_NX.shape[1] < heads * rotated:
        raise ValueError(
            f"q {tuple(q_NX.shape)} and latent {tuple(latent_NE.shape)} are not of {heads} heads "
            f"with {rotated} rotated values each"
        )
    for name, tensor in (("latent", latent_NE), ("kv", kv)):
        if tensor.dtype != q_NX.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, q {q_NX.dtype}")
    check_vector("norm_weight_R", norm_weight_R, rank, q_NX.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        shape = (cos.shape[0], rotated // 2)
        if table.dtype != torch.float32 or table.shape != shape or not table.is_contiguous():
            raise ValueError(
                f"{name} must be a dense float32 [T, {rotated // 2}], "
                f"not {table.dtype} {tuple(table.shape)}"
            )
    return lanes, rank, rotated


def check_latent_query(
    q_NQE: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> tuple[int, int]:
    """Raise ValueError unless the queries fit cache and lanes; return (N, Q)."""
    if q_NQE.dim() != 3 or not q_NQE.is_contiguous():
        raise ValueError(
            f"q must be a dense [N, Q, R + P], not {tuple(q_NQE.shape)} with strides "
            f"{q_NQE.stride()}"
        )
    lanes, heads, entry = q_NQE.shape
    check_latent_sizes(rank, entry - rank)
    if kv.dtype != q_NQE.dtype:
        raise ValueError(f"kv is {kv.dtype}, q {q_NQE.dtype}")
    check_latent_cache(kv, block_table_SB, entry)
    check_lanes(lanes, slot_N=slot_N, position_N=position_N)
    if not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
    return lanes, heads
