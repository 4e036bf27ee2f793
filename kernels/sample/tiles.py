"""The best token of a tile of the vocabulary, and of a row's tiles, as kernels find it.

`sampling.py` says what is sampled.

Letters: R rows, S slots, V vocabulary, E stop ids a slot, C tiles of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.philox import gumbel_tile, philox_uint32_tile
from graphengine.kernels.sample.candidates import (
    LAST_ID,
    is_coarse,
    mask_stop_ids,
    scaled_tile,
    sortable_key,
    value_of_key,
)

NOTHING = tl.constexpr(-(2**63))

# The lowest bits of a tile's health: whether its logits are valid; the row's is the largest. The
# other bits are the sortable key of its best's rounding error, 0 where that does not count.
NOTHING_FINITE = tl.constexpr(0)
FINITE = tl.constexpr(1)
NAN = tl.constexpr(2)
HEALTH = tl.constexpr(3)


@triton.jit
def _any(flags):
    """Whether one of the [L, 1] flags is set; a scalar."""
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) != 0


@triton.jit
def _pack_tile(key, ids):
    """int64 whose largest is the largest key, then the lowest id: key << 32 | (2^31 - 1 - id)."""
    return (key.to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def is_best_coarse(best):
    """Whether rounding errors decide between tiles, or candidates, with this best's value."""
    return is_coarse(value_of_key((best >> 32).to(tl.int32)))


@triton.jit
def best_of_tile(
    logits,
    ids,
    inside,
    slot,
    position,
    live,
    temperature_ptr,
    seed_ptr,
    stop_ids_ptr,
    min_len_ptr,
    stop_ids,
    cut_key=None,
    cut_id=None,
):
    """The best candidate of each lane's tile of logits; its bits do not depend on the tiling.

    Args:
        logits: float32 [L, B]; anything in lanes that are not live and outside the vocabulary.
        ids: int32 [1, B], the tokens' ids, ascending over the tiles.
        inside: int1 [1, B], whether the token exists.
        slot: int32 or int64 [L, 1]. position: int32 [L, 1], of the token that is sampled.
        live: int1 [L, 1]; other lanes' parameters are not read.
        temperature_ptr, seed_ptr, stop_ids_ptr, min_len_ptr: of `SamplingTensors`.
        stop_ids: E.
        cut_key, cut_id: int32 [L, 1], from the cutoff kernel; None without filters.

    Returns:
        best int64 [L], `NOTHING` if there is no candidate, and health int32 [L]; both mean nothing
        in lanes that are not live.
    """
    slot = slot.to(tl.int64)
    logits = tl.where(inside, logits, float("-inf"))
    waits = live & (position < tl.load(min_len_ptr + slot, mask=live, other=0))
    if _any(waits):
        logits = mask_stop_ids(logits, ids, waits, stop_ids_ptr + slot * stop_ids, stop_ids)
    finite = tl.abs(logits) < float("inf")
    health = tl.where(finite, FINITE, tl.where(logits != logits, NAN, NOTHING_FINITE))

    health = tl.max(health, 1)
    kept = logits > float("-inf")
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    draws = temperature > 0
    if _any(draws):
        scaled = scaled_tile(logits, tl.where(draws, temperature, 1.0))
        if cut_key is not None:
            key = sortable_key(scaled)
            passes = (key > cut_key) | ((key == cut_key) & (ids <= cut_id))
            kept = kept & (passes | (temperature <= 0))
        seed = tl.load(seed_ptr + slot, mask=live, other=0)
        noise = gumbel_tile(philox_uint32_tile(seed, position, ids))
        value = tl.where(draws, scaled + noise, logits)
        best = tl.max(tl.where(kept, _pack_tile(sortable_key(value), ids), NOTHING), 1)
        coarse = draws & is_best_coarse(best)[:, None]
        if _any(coarse):
            tied = kept & coarse & (sortable_key(value) == (best >> 32).to(tl.int32)[:, None])
            error = noise - (value - tl.where(tied, scaled, 0.0))
            second = _pack_tile(sortable_key(error) & ~HEALTH, ids)
            second = tl.max(tl.where(tied, second, NOTHING), 1)
            found = second > NOTHING
            best = tl.where(found, (best & ~LAST_ID) | (second & LAST_ID), best)
            health = tl.where(found, health | (second >> 32).to(tl.int32), health)
    else:
        best = tl.max(tl.where(kept, _pack_tile(sortable_key(logits), ids), NOTHING), 1)
    return best, health


@triton.jit
def tile_of_token(token, valid):
    """Best and health of a row's only tile: `token_of_tiles` makes it `token`, or -1 if invalid."""
    return (token ^ LAST_ID).to(tl.int64), tl.where(valid, FINITE, NOTHING_FINITE)


@triton.jit
def token_of_tiles(best_ptr, health_ptr, row, tiles, live, BLOCK: tl.constexpr):
    """The token of a row, -1 without valid logits; undefined if the row is not live."""
    lane = row + tl.zeros([1], tl.int32)
    live = live & (tl.zeros([1], tl.int32) == 0)
    return tl.max(tokens_of_tiles(best_ptr, health_ptr, lane, tiles, live, 1, BLOCK), 0)


@triton.jit
def tokens_of_tiles(
    best_ptr, health_ptr, lane_W, tiles, live_W, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr
):
    """`token_of_tiles` for several rows at once: their loads overlap."""
    best_W, health_W = best_of_tiles(best_ptr, health_ptr, lane_W, tiles, live_W, BLOCK_W, BLOCK_C)
    token_W = (best_W & LAST_ID).to(tl.int32) ^ LAST_ID
    return tl.where((health_W & HEALTH) == FINITE, token_W, -1)


@triton.jit
def best_of_tiles(
    best_ptr, health_ptr, lane_W, tiles, live_W, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Combine all tiles of each row into one: best int64 and health int32 [W]. Among further tiles
    it decides as they would.
    """
    best = tl.full([BLOCK_W, BLOCK_C], NOTHING, tl.int64)
    health = tl.full([BLOCK_W, BLOCK_C], NOTHING_FINITE, tl.int32)
    for start in range(0, tiles, BLOCK_C):
        tile = (start + tl.arange(0, BLOCK_C))[None, :]
        inside = live_W[:, None] & (tile < tiles)
        at = lane_W[:, None] * tiles + tile
        best = tl.maximum(best, tl.load(best_ptr + at, mask=inside, other=NOTHING))
        status = tl.load(health_ptr + at, mask=inside, other=NOTHING_FINITE) & HEALTH
        health = tl.maximum(health, status)
    best_W, health_W = tl.max(best, 1), tl.max(health, 1)
    if tl.max(is_best_coarse(best_W).to(tl.int32), 0) != 0:
        # Tiles may tie in the sum. Only then is a pass over their errors needed.
        last = tl.full([BLOCK_W, BLOCK_C], NOTHING, tl.int64)
        for start in range(0, tiles, BLOCK_C):
            tile = (start + tl.arange(0, BLOCK_C))[None, :]
            inside = live_W[:, None] & (tile < tiles)
            at = lane_W[:, None] * tiles + tile
            packed = tl.load(best_ptr + at, mask=inside, other=NOTHING)
            error_key = tl.load(health_ptr + at, mask=inside, other=0) & ~HEALTH
            second = (error_key.to(tl.int64) << 32) | (packed & LAST_ID)
            tied = inside & ((packed >> 32) == (best_W >> 32)[:, None])
            last = tl.maximum(last, tl.where(tied, second, NOTHING))
        second_W = tl.max(last, 1)
        best_W = ((best_W >> 32) << 32) | (second_W & LAST_ID)
        health_W |= (second_W >> 32).to(tl.int32)
    return best_W, health_W
