"""The best drafts after each lane, from which a tree takes a node's children.

A draft is drawn as the target will draw the token at its position, with the request's temperature
and the noise of that position (`sampling.py`), so the best one is the draft of a chain. The others
are the next best with the same noise: the target picks them most often where it disagrees. How
often depends on their distance to the best with noise, not on the probabilities without it: a token
that the noise put first is the target's choice as well, however improbable it was before.

    tile    (lane, vocab tile)     the best of the tile, and its sum of exponentials
    merge   one program per lane   the best of all tiles, and their log-probabilities

Letters: N lanes, D draft vocabulary, T drafts of a lane, C tiles of the vocabulary, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.philox import gumbel, gumbel_tile, philox_uint32, philox_uint32_tile
from graphengine.kernels.logits.logprobs import check_logits
from graphengine.kernels.sample.candidates import (
    LARGEST,
    LAST_ID,
    SamplingTensors,
    check_parameters,
    mask_stop_ids,
    scaled_tile,
    sortable_key,
    value_of_key,
)

MAX_CHILDREN = 16
"""Most drafts of a lane."""

_BLOCK = 1024
_NOTHING = tl.constexpr(-(2**63))


class TopDrafts(NamedTuple):
    """The best drafts after each lane, in new tensors; undefined in padded lanes."""

    token: torch.Tensor
    """int32 [N, T]: the best first; -1 where there are fewer, or the logits hold a NaN."""
    log_probability: torch.Tensor
    """float32 [N, T]: log-softmax of the scores that rank the drafts: logits over temperature plus
    noise, or the logits alone if the request is greedy. It falls with the rank; -inf where there is
    no draft."""


def top_drafts(
    logits_ND: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    count: int,
    ahead: int,
    token_ids: torch.Tensor | None = None,
    pdl: bool = False,
) -> TopDrafts:
    """Find the `count` best drafts after each live lane; two launches.

    Of the request's parameters only temperature, seed, stop ids and min_len count. Among equally
    good drafts the lowest id goes first.

    Args:
        logits_ND: float32, dense rows, any stride between them.
        slot_N, position_N: int32; older than the launch before.
        params: indexed by slot; host-owned.
        count: T, 1..MAX_CHILDREN.
        ahead: positions from a lane to its draft, whose position determines the noise.
        token_ids: int32 [D], ascending: the token of each column; None: the column's number.
        pdl: the launches may overlap the ones before, by the rules of `core.pdl`.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, vocabulary = check_logits(logits_ND)
    check_lanes(lanes, slot=slot_N, position=position_N)
    stop_ids = check_parameters(params)
    if token_ids is not None:
        check_vector("token_ids", token_ids, vocabulary, torch.int32)
    if not 1 <= count <= min(MAX_CHILDREN, vocabulary):
        raise ValueError(
            f"{count} drafts of a lane, not 1..{min(MAX_CHILDREN, vocabulary)}, of a draft "
            f"vocabulary of {vocabulary}"
        )
    if not use_triton(logits_ND):
        return top_drafts_reference(
            logits_ND, slot_N, position_N, params, count=count, ahead=ahead, token_ids=token_ids
        )
    drafts = _new_drafts(slot_N, count)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    tiles = triton.cdiv(vocabulary, block)
    top_NCT = torch.empty((lanes, tiles, count), dtype=torch.int64, device=slot_N.device)
    largest_NC = logits_ND.new_empty(lanes, tiles)
    total_NC = torch.empty_like(largest_NC)
    sampler = (params.temperature, params.seed, params.stop_ids, params.min_len)
    launcher(_tile_kernel, (lanes, tiles))(
        logits_ND,
        slot_N,
        position_N,
        *sampler,
        token_ids,
        top_NCT,
        largest_NC,
        total_NC,
        logits_ND.stride(0),
        vocabulary,
        stop_ids,
        ahead,
        COUNT=count,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 4),
        **launch_options(pdl),
    )
    block_ct = triton.next_power_of_2(tiles * count)
    launcher(_merge_kernel, (lanes,))(
        slot_N,
        token_ids,
        top_NCT,
        largest_NC,
        total_NC,
        *drafts,
        tiles,
        COUNT=count,
        BLOCK_C=triton.next_power_of_2(tiles),
        BLOCK_CT=block_ct,
        BLOCK_T=triton.next_power_of_2(count),
        num_warps=min(max(block_ct // 256, 1), 16),
        **launch_options(pdl),
    )
    return drafts


def top_drafts_reference(
    logits_ND: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    params: SamplingTensors,
    *,
    count: int,
    ahead: int,
    token_ids: torch.Tensor | None = None,
) -> TopDrafts:
    """Plain twin of `top_drafts`: one lane after the other."""
    drafts = _new_drafts(slot_N, count)
    columns = np.arange(logits_ND.shape[1])
    ids = columns if token_ids is None else token_ids.numpy(force=True)
    for lane in live_lanes(slot_N).tolist():
        slot, position = int(slot_N[lane]), int(position_N[lane]) + ahead
        logits = logits_ND[lane].numpy(force=True)
        if position < int(params.min_len[slot]):
            stops = params.stop_ids[slot].numpy(force=True)
            logits = np.where(np.isin(ids, stops), np.float32(-np.inf), logits)
        drafts.token[lane], drafts.log_probability[lane] = -1, -np.inf
        kept = np.flatnonzero(logits > -np.inf)
        if np.isnan(logits).any() or not kept.size:
            continue
        score = logits[kept]
        temperature = params.temperature[slot].numpy(force=True)
        if temperature > 0:
            with np.errstate(over="ignore"):
                score = np.clip(score / temperature, -LARGEST.value, LARGEST.value)
            score = score + gumbel(philox_uint32(int(params.seed[slot]), position, ids[kept]))
        order = np.argsort(-score, kind="stable")[:count]
        with np.errstate(over="ignore"):
            total = np.log(np.exp(score - score.max()).sum(dtype=np.float32))
            values = (score[order] - score.max()) - total
        places = slice(order.size)
        drafts.token[lane, places] = torch.from_numpy(ids[kept[order]].astype(np.int32))
        drafts.log_probability[lane, places] = torch.from_numpy(values)
    return drafts


def _new_drafts(like: torch.Tensor, count: int) -> TopDrafts:
    token = like.new_empty(like.numel(), count)
    return TopDrafts(token, torch.empty_like(token, dtype=torch.float32))


@triton.jit
def _tile_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    stop_ids_ptr,
    min_len_ptr,
    token_ids_ptr,
    top_ptr,
    largest_ptr,
    total_ptr,
    logits_stride,
    vocabulary,
    stop_ids,
    ahead,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane and tile. Only the logits may come from the launch before."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    live = slot >= 0
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    token = column
    if token_ids_ptr is not None:
        token = tl.load(token_ids_ptr + column, mask=inside, other=-1)
    position = tl.load(position_ptr + lane, mask=live, other=0, cache_modifier=".cg") + ahead
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    waits = live & (position < tl.load(min_len_ptr + slot, mask=live, other=0))
    wait_for_inputs(PDL)

    if live:
        source = logits_ptr + lane.to(tl.int64) * logits_stride + column
        logits = tl.load(source, mask=inside, other=float("-inf"))
        stops = stop_ids_ptr + slot.to(tl.int64) * stop_ids
        logits = mask_stop_ids(logits, token, waits, stops, stop_ids)
        is_candidate = logits > float("-inf")
        score = logits
        if temperature > 0:
            seed = tl.load(seed_ptr + slot)
            noise = gumbel_tile(philox_uint32_tile(seed, position, token))
            score = scaled_tile(logits, temperature) + noise
        largest = tl.max(tl.where(is_candidate, score, float("-inf")), 0)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        at = lane * tl.num_programs(1) + tl.program_id(1)
        # A NaN among the logits makes the total NaN, which the next kernel checks.
        broken = tl.max((logits != logits).to(tl.int32), 0) != 0
        weights = tl.where(is_candidate, tl.exp(score - base), 0.0)
        tl.store(largest_ptr + at, largest)
        tl.store(total_ptr + at, tl.where(broken, float("nan"), tl.sum(weights, 0)))
        key = sortable_key(tl.where(is_candidate, score, 0.0)).to(tl.int64)
        packed = (key << 32) | (column ^ LAST_ID).to(tl.int64)
        packed = tl.where(is_candidate, packed, _NOTHING)
        for place in tl.static_range(COUNT):
            best = tl.max(packed, 0)
            tl.store(top_ptr + at * COUNT + place, best)
            packed = tl.where(packed == best, _NOTHING, packed)


@triton.jit
def _merge_kernel(
    slot_ptr,
    token_ids_ptr,
    tile_top_ptr,
    tile_largest_ptr,
    tile_total_ptr,
    token_ptr,
    log_probability_ptr,
    tiles,
    COUNT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_CT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane merges the results of its tiles."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    live = slot >= 0
    wait_for_inputs(PDL)

    if live:
        c = tl.arange(0, BLOCK_C)
        at = lane * tiles + c
        tile_largest = tl.load(tile_largest_ptr + at, mask=c < tiles, other=float("-inf"))
        tile_total = tl.load(tile_total_ptr + at, mask=c < tiles, other=0.0)
        largest = tl.max(tile_largest, 0)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        total = tl.sum(tile_total * tl.exp(tile_largest - base), 0)
        valid = total == total

        ct = tl.arange(0, BLOCK_CT)
        found = lane * tiles * COUNT + ct
        packed = tl.load(tile_top_ptr + found, mask=ct < tiles * COUNT, other=_NOTHING)
        t = tl.arange(0, BLOCK_T)
        column = tl.full([BLOCK_T], -1, tl.int32)
        score = tl.zeros([BLOCK_T], tl.float32)
        for place in tl.static_range(COUNT):
            best = tl.max(packed, 0)
            is_there = valid & (best != _NOTHING)
            found_at = tl.where(is_there, (best & LAST_ID).to(tl.int32) ^ LAST_ID, -1)
            column = tl.where(t == place, found_at, column)
            score = tl.where(t == place, value_of_key((best >> 32).to(tl.int32)), score)
            packed = tl.where(packed == best, _NOTHING, packed)
        there = column >= 0
        value = tl.where(there, (score - largest) - tl.log(total), float("-inf"))
        token = column
        if token_ids_ptr is not None:
            token = tl.load(token_ids_ptr + column, mask=there, other=-1)
        tl.store(token_ptr + lane * COUNT + t, token, mask=t < COUNT)
        tl.store(log_probability_ptr + lane * COUNT + t, value, mask=t < COUNT)
