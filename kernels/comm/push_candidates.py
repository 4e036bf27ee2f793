"""All-gather of sampling candidates by pushes: for each lane a rank pushes only the best tile of
its part of the vocabulary.

Letters: R ranks, N lanes, C tiles of a rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.comm.items import (
    Peers,
    check_words,
    map_peers,
    next_tags,
    push_options,
    push_words,
    same_for_all,
    take_words,
)
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.sample.sampling import check_tiles
from graphengine.kernels.sample.tiles import best_of_tiles

WORDS = tl.constexpr(4)
"""Words of a lane: two of its best candidate, one of its health, and one of padding to make pairs.
"""
# A lane's tiles are read at once.
_MAX_BLOCK = 4096


def push_candidates(
    peers: Peers, best_NC: torch.Tensor, health_NC: torch.Tensor, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather best and health `[N, R]`, in rank order: one tile in place of all of a rank's tiles.
    `token_of_tiles` finds the same token in them as in all tiles of all ranks.

    All ranks call it with the same number of lanes, after the same calls; the number of tiles may
    differ between ranks.

    Args:
        best_NC, health_NC: from `sample_tiles` or from an lm_head with the sampler folded in, on
            the device of `peers`. Contents of padded lanes do not affect other lanes.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    Returns:
        New tensors. ValueError for a shape or dtype that does not fit, or for more lanes than
        `peers` have words.
    """
    lanes = best_NC.shape[0]
    tiles = check_tiles(best_NC, health_NC, lanes)
    check_words(peers, WORDS.value * lanes, f"candidates of {lanes} lanes")
    best = best_NC.new_empty(lanes, peers.ranks)
    health = health_NC.new_empty(lanes, peers.ranks)
    block = min(triton.next_power_of_2(tiles), _MAX_BLOCK)
    launcher(_push_candidates_kernel, (lanes,))(
        best_NC,
        health_NC,
        best.view(torch.int32),
        health,
        tiles,
        peers.tensors,
        BLOCK_C=block,
        num_warps=min(max(block // 512, 1), 8),
        **push_options(peers),
        **launch_options(pdl),
    )
    return best, health


@triton.jit(do_not_specialize=["tiles"])
def _push_candidates_kernel(
    best_ptr,
    health_ptr,
    out_best_ptr,
    out_health_ptr,
    tiles,
    peers,
    BLOCK_C: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane; `out_best_ptr` points to int32 words."""
    lane = tl.program_id(0)
    lane_W = lane + tl.arange(0, 1)
    mapped = map_peers(peers, RANKS)
    wait_for_inputs(PDL)
    over = tl.load(peers.over)
    best_W, health_W = best_of_tiles(best_ptr, health_ptr, lane_W, tiles, lane_W >= 0, 1, BLOCK_C)
    best, health = tl.max(best_W, 0), tl.max(health_W, 0)
    at = tl.arange(0, WORDS)
    of_best = tl.where(at == 0, best.to(tl.int32), (best >> 32).to(tl.int32))
    own = tl.where(at < 2, of_best, tl.where(at == 2, health, 0))
    word = lane * WORDS + at
    tag = next_tags(peers, word, None)
    push_words(mapped, same_for_all(own, RANKS), word, tag, None, over, RANKS, SIZE)
    found, over = take_words(peers, mapped, word, tag, None, over, RANKS, SIZE, TIMED)
    for rank in tl.static_range(RANKS):
        place = lane * RANKS + rank
        tl.store(out_best_ptr + 2 * place + at, found[rank], mask=at < 2)
        tl.store(out_health_ptr + place + at - 2, found[rank], mask=at == 2)
