"""The Triton side of `logprobs.py`, which defines the results.

Letters: V vocabulary, W lanes of a row, C tiles of the vocabulary, T places for the most probable.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.sample.candidates import LAST_ID, sortable_key

MAX_LOGPROBS = 20
"""The most probable tokens that are published with a token are at most this many."""

_TOP = tl.constexpr(MAX_LOGPROBS)
_BLOCK_TOP = tl.constexpr(32)
# No candidate: below every packed candidate.
_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _load_wants(slot, wanted_ptr, wants_raw_ptr, raw_ptr):
    """(top n, below 0 for nothing; whether the raw logits are read) of a lane's slot."""
    live = slot >= 0
    wanted = tl.minimum(tl.load(wanted_ptr + slot, mask=live, other=-1), _TOP)
    is_raw = False
    if raw_ptr is not None:
        is_raw = tl.load(wants_raw_ptr + slot, mask=live, other=0) != 0
    return wanted, is_raw


@triton.jit
def _logits_row(source_ptr, lane, wants):
    """The row that holds a lane's logits: its own, or its source's."""
    row = lane
    if source_ptr is not None:
        row = tl.load(source_ptr + lane, mask=wants, other=0)
    return row


@triton.jit
def _load_logits(logits_ptr, raw_ptr, logits_stride, raw_stride, row, is_raw, ids, mask):
    """The row's logits at `ids`, -inf where masked."""
    row = row.to(tl.int64)
    source = logits_ptr + row * logits_stride + ids
    if raw_ptr is None:
        logits = tl.load(source, mask=mask, other=float("-inf"))
    else:
        logits = tl.load(source, mask=mask & (is_raw == 0), other=float("-inf"))
        raw = tl.load(raw_ptr + row * raw_stride + ids, mask=mask & is_raw, other=float("-inf"))
        logits = tl.where(is_raw, raw, logits)
    return logits


@triton.jit
def rank_tile_kernel(
    logits_ptr,
    raw_ptr,
    slot_ptr,
    source_ptr,
    wanted_ptr,
    wants_raw_ptr,
    largest_ptr,
    total_ptr,
    top_ptr,
    logits_stride,
    raw_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and tile: its largest logit, sum and top n, packed as key and id."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    wanted, is_raw = _load_wants(slot, wanted_ptr, wants_raw_ptr, raw_ptr)
    wait_for_inputs(PDL)

    if wanted >= 0:
        row = _logits_row(source_ptr, lane, wanted >= 0)
        tile = tl.program_id(1)
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        logits = _load_logits(
            logits_ptr, raw_ptr, logits_stride, raw_stride, row, is_raw, ids, ids < vocabulary
        )
        # Neither NaN nor -inf is greater than -inf.
        is_candidate = logits > float("-inf")
        largest = tl.max(tl.where(is_candidate, logits, float("-inf")), 0)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        at = lane * tl.num_programs(1) + tile
        tl.store(largest_ptr + at, largest)
        tl.store(total_ptr + at, tl.sum(tl.exp(logits - base), 0))
        key = sortable_key(tl.where(is_candidate, logits, 0.0)).to(tl.int64)
        packed = tl.where(is_candidate, (key << 32) | (ids ^ LAST_ID).to(tl.int64), _NOTHING)
        for place in range(wanted):
            best = tl.max(packed, 0)
            tl.store(top_ptr + at * _TOP + place, best)
            packed = tl.where(packed == best, _NOTHING, packed)


@triton.jit
def rank_merge_kernel(
    logits_ptr,
    raw_ptr,
    slot_ptr,
    source_ptr,
    wanted_ptr,
    wants_raw_ptr,
    tile_largest_ptr,
    tile_total_ptr,
    tile_top_ptr,
    largest_ptr,
    log_total_ptr,
    top_id_ptr,
    top_value_ptr,
    logits_stride,
    raw_stride,
    tiles,
    BLOCK_C: tl.constexpr,
    BLOCK_CT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane: combine the results of its tiles."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    wanted, is_raw = _load_wants(slot, wanted_ptr, wants_raw_ptr, raw_ptr)
    wait_for_inputs(PDL)

    if wanted >= 0:
        c = tl.arange(0, BLOCK_C)
        tile_largest = tl.load(
            tile_largest_ptr + lane * tiles + c, mask=c < tiles, other=float("-inf")
        )
        tile_total = tl.load(tile_total_ptr + lane * tiles + c, mask=c < tiles, other=0.0)
        largest = tl.max(tile_largest, 0)
        base = tl.where(largest > float("-inf"), largest, 0.0)
        log_total = tl.log(tl.sum(tile_total * tl.exp(tile_largest - base), 0))
        tl.store(largest_ptr + lane, largest)
        tl.store(log_total_ptr + lane, log_total)

        ct = tl.arange(0, BLOCK_CT)
        there = (ct < tiles * _TOP) & (ct % _TOP < wanted)
        packed = tl.load(tile_top_ptr + lane * tiles * _TOP + ct, mask=there, other=_NOTHING)
        t = tl.arange(0, _BLOCK_TOP)
        ids = tl.full([_BLOCK_TOP], -1, tl.int32)
        for place in range(wanted):
            best = tl.max(packed, 0)
            found = tl.where(best == _NOTHING, -1, (best & LAST_ID).to(tl.int32) ^ LAST_ID)
            ids = tl.where(t == place, found, ids)
            packed = tl.where(packed == best, _NOTHING, packed)
        row = _logits_row(source_ptr, lane, wanted >= 0)
        logits = _load_logits(
            logits_ptr, raw_ptr, logits_stride, raw_stride, row, is_raw, ids, ids >= 0
        )
        value = tl.where(ids >= 0, (logits - largest) - log_total, float("-inf"))
        tl.store(top_id_ptr + lane * _TOP + t, ids, mask=t < _TOP)
        tl.store(top_value_ptr + lane * _TOP + t, value, mask=t < _TOP)


@triton.jit
def token_kernel(
    logits_ptr,
    raw_ptr,
    token_ptr,
    count_ptr,
    slot_ptr,
    source_ptr,
    wanted_ptr,
    wants_raw_ptr,
    largest_ptr,
    log_total_ptr,
    value_ptr,
    rank_ptr,
    logits_stride,
    raw_stride,
    vocabulary,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane."""
    lane = tl.program_id(0)
    slot = tl.load(slot_ptr + lane, cache_modifier=".cg")
    wanted, is_raw = _load_wants(slot, wanted_ptr, wants_raw_ptr, raw_ptr)
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + lane // W, mask=wanted >= 0, other=0)
    if lane % W < count:
        row = _logits_row(source_ptr, lane, wanted >= 0)
        token = tl.load(token_ptr + lane)
        exists = (token >= 0) & (token < vocabulary)
        logit = _load_logits(
            logits_ptr, raw_ptr, logits_stride, raw_stride, row, is_raw, token, exists
        )
        value = (logit - tl.load(largest_ptr + lane)) - tl.load(log_total_ptr + lane)
        ranks = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocabulary, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < vocabulary
            logits = _load_logits(
                logits_ptr, raw_ptr, logits_stride, raw_stride, row, is_raw, ids, inside
            )
            ranks += (inside & (logits > logit)).to(tl.int32)
        tl.store(value_ptr + lane, value)
        tl.store(rank_ptr + lane, 1 + tl.sum(ranks, 0))
