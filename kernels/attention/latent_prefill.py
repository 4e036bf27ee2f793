"""Prefill attention over latents: FlashAttention-2 (Dao 2023) in MLA's absorbed form.

All heads of all tokens share keys and values, so the rows of a program's tile are any consecutive
(token, head) pairs of a chunk: queries lie in memory in just this order. A tile of 64 rows compiles
to `wgmma` on Hopper, and an entry is read once for all of them. It is loaded into shared memory
once, as key and as value.

Key tiles start at position 0 and have a size fixed by dtype and GPU. A tile of keys that a row does
not see leaves its result as it is. So a token's bits depend on its position and its keys, but not
on the tokens that share its program, nor on the other chunks.

Letters as in `latent.py`, and: P chunks, where sizes are of `query_start`.
"""

from __future__ import annotations

import math

import torch
import triton

from graphengine.kernels.attention.latent import LatentTiles, check_latent_query, latent_shape
from graphengine.kernels.attention.latent_reference import latent_attention_reference
from graphengine.kernels.attention.triton.latent_triton import latent_attention_kernel
from graphengine.kernels.core.chunks import check_chunks, tile_count
from graphengine.kernels.core.devices import device_of
from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.paged import checked_output, token_capacity
from graphengine.kernels.core.pdl import launch_options

WGMMA_TILES = LatentTiles(rows=64, keys=64, warps=8, stages=3)
"""16-bit types on Hopper. Each of two warp groups sums up half of the columns of all rows."""
SMALL_TILES = LatentTiles(rows=32, keys=32, warps=8, stages=2)
"""16-bit types on other GPUs; not timed on any. They fit the 99 KB that most of those have."""
TILES_32_BIT = LatentTiles(rows=16, keys=16, warps=8, stages=1)


def latent_attention(
    q_NQE: torch.Tensor,
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    rank: int,
    scale: float,
    query_start_P1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attend entries 0..position of each lane's slot with all its heads, and sum the latents.

    Args:
        q_NQE: [N, Q, R + P], dense.
        kv: one layer's cache, in q's dtype, which holds the lanes' own entries.
        block_table_SB: int32. slot_N: int32, -1 = padded lane. position_N: int32, absolute.
        rank: R. scale: factor on the scores, above 0.
        query_start_P1: int32 [P + 1], see `core.chunks`. The live lanes of a chunk come first and
            have one slot; lanes after the last chunk are padded. None: all lanes are one chunk.
        out: [N, Q, R] in q's dtype; may not share memory with q or kv.
        pdl: the launch before, whatever it is, may still run.

    Returns:
        [N, Q, R] in q's dtype; softmax and sums in float32. Only the slot of a padded lane is read,
        and nothing is written for it. A live lane whose position is negative or past its block
        table is NaN. A lane's bits depend neither on other lanes nor on N, as long as the entries
        of its chunk's later lanes are finite: 0 times what is not is NaN.
    """
    lanes, heads = check_latent_query(
        q_NQE, kv, block_table_SB, slot_N, position_N, rank=rank, scale=scale
    )
    prompts = check_chunks(query_start_P1)
    out = checked_output(out, (lanes, heads, rank), like=q_NQE)
    if not use_triton(q_NQE):
        return latent_attention_reference(
            q_NQE, kv, block_table_SB, slot_N, position_N, rank=rank, scale=scale, out=out
        )
    tiles = prefill_tiles(q_NQE)
    programs = triton.cdiv(lanes * heads, tiles.rows)
    if prompts is not None:
        programs = tile_count(lanes * heads, prompts, size=tiles.rows, spare=1)
    launcher(latent_attention_kernel, (programs,))(
        q_NQE,
        kv,
        block_table_SB,
        query_start_P1,
        slot_N,
        position_N,
        out,
        lanes,
        scale * math.log2(math.e),
        kv.stride(0),
        block_table_SB.stride(0),
        token_capacity(kv, block_table_SB),
        PROMPTS=prompts,
        **latent_shape(q_NQE, kv, rank, tiles),
        **launch_options(pdl),
    )
    return out


def prefill_tiles(q_NQE: torch.Tensor) -> LatentTiles:
    """The tiles, which fix the order of summation; they depend only on dtype and GPU."""
    if q_NQE.dtype.itemsize > 2:
        return TILES_32_BIT
    device = device_of(q_NQE)
    return WGMMA_TILES if device is None or device.has_wgmma else SMALL_TILES
