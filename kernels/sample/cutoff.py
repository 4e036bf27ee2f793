"""The set that top-n-sigma, top-k, top-p and min-p keep of each row, found without a sort.

Each filter keeps a prefix of the row's candidates, ordered by scaled logit and then by lower id;
`sampling.py` says which one. So the key and id of the last kept candidate describe the set. They
are found by tallying the keys above thresholds: by counts, or by fixed-point masses.

Letters: R rows, V vocabulary, W vocabulary padded to whole blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.sample.candidates import (
    LAST_ID,
    MASS_SCALE,
    NO_KEY,
    CandidateRow,
    SamplingTensors,
    is_coarse,
    row_tile,
    scaled_tile,
    sortable_key,
    value_of_key,
)
from graphengine.kernels.sample.sigma import sigma_floor

_BLOCK = 4096
_WARPS = 32


def find_cutoffs(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last candidate that each row's filters keep: part of `sample_tiles`, which checks.

    One Triton kernel on the current stream, with an int32 [R, W] of scratch.

    Args:
        As in `sample_tiles`; they are neither written nor held on to.

    Returns:
        cut_key_R, cut_id_R: new int32 [R]. Candidates with key > cut_key, or with key == cut_key
        and id <= cut_id, are kept; in a row without filters that is all of them. Padded rows are
        not written.
    """
    rows, vocabulary = logits_RV.shape
    block = min(_BLOCK, triton.next_power_of_2(max(vocabulary, _WARPS * 32)))
    width = triton.cdiv(vocabulary, block) * block
    key_RW = slot_R.new_empty(rows, width)
    cut_key_R, cut_id_R = torch.empty_like(slot_R), torch.empty_like(slot_R)
    launcher(_cutoff_kernel, (rows,))(
        logits_RV,
        slot_R,
        position_R,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.top_n_sigma,
        params.stop_ids,
        params.min_len,
        key_RW,
        cut_key_R,
        cut_id_R,
        logits_RV.stride(0),
        vocabulary,
        width,
        params.stop_ids.shape[1],
        ahead,
        BLOCK=block,
        num_warps=_WARPS,
        **launch_options(pdl),
    )
    return cut_key_R, cut_id_R


@triton.jit
def _mass_tile(key, largest):
    """Fixed-point mass of candidates; equal keys have equal masses, `NO_KEY` has 0."""
    return (tl.exp(value_of_key(key) - largest) * MASS_SCALE).to(tl.int64)


@triton.jit
def _select(
    key_ptr,
    width,
    target,
    largest,
    BY_MASS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key t such that the keys >= t tally to at least `target`; the tally of keys > t.

    The tally counts keys or adds up their masses. Radix select, two bits of the key a pass: each
    pass tallies above three thresholds at once. After 16 passes t is exact; after fewer its last
    bits are 0, so that it is a lower bound. Keys of the row: key_ptr[0 .. width).
    """
    # Thresholds have 64 bits, so that none wraps. They start from the lowest int32.
    cut = tl.full((), -(2**31), tl.int64)
    step = tl.full((), 2**30, tl.int64)
    above = tl.full((), 0, tl.int64)
    if BY_MASS:
        nothing = tl.zeros([BLOCK], tl.int64)
    else:
        nothing = tl.zeros([BLOCK], tl.int32)
    for _ in range(PASSES):
        threshold_1 = (cut + step).to(tl.int32)
        threshold_2 = (cut + 2 * step).to(tl.int32)
        threshold_3 = (cut + 3 * step).to(tl.int32)
        lanes_1 = nothing
        lanes_2 = nothing
        lanes_3 = nothing
        for start in range(0, width, BLOCK):
            key = tl.load(key_ptr + start + tl.arange(0, BLOCK))
            if BY_MASS:
                weight = _mass_tile(key, largest)
            else:
                weight = nothing + 1
            lanes_1 += tl.where(key >= threshold_1, weight, 0)
            lanes_2 += tl.where(key >= threshold_2, weight, 0)
            lanes_3 += tl.where(key >= threshold_3, weight, 0)
        tally_1 = tl.sum(lanes_1, 0).to(tl.int64)
        tally_2 = tl.sum(lanes_2, 0).to(tl.int64)
        tally_3 = tl.sum(lanes_3, 0).to(tl.int64)
        if tally_3 >= target:
            cut += 3 * step
        elif tally_2 >= target:
            cut += 2 * step
            above = tally_3
        elif tally_1 >= target:
            cut += step
            above = tally_2
        else:
            above = tally_1
        step = step >> 2
    return cut.to(tl.int32), above


@triton.jit
def _mass_above(key_ptr, width, cut, largest, BLOCK: tl.constexpr):
    """Mass of the keys > cut."""
    lanes = tl.zeros([BLOCK], tl.int64)
    for start in range(0, width, BLOCK):
        key = tl.load(key_ptr + start + tl.arange(0, BLOCK))
        lanes += tl.where(key > cut, _mass_tile(key, largest), 0)
    return tl.sum(lanes, 0)


@triton.jit
def _row_keys(row, start, BLOCK: tl.constexpr):
    """Keys of the ids start .. start + BLOCK - 1; `NO_KEY` where there is no candidate."""
    return sortable_key(scaled_tile(row_tile(row, start, BLOCK), row.temperature))


@triton.jit
def _column_keys(row, BLOCK: tl.constexpr):
    """The largest key of each column of the row, which is [width / BLOCK, BLOCK]."""
    column_key = tl.full([BLOCK], NO_KEY, tl.int32)
    for start in range(0, row.width, BLOCK):
        column_key = tl.maximum(column_key, _row_keys(row, start, BLOCK))
    return column_key


@triton.jit
def _gather_keys(row, key_ptr, floor, least, largest, weighs, BLOCK: tl.constexpr):
    """Write the keys >= floor and >= least, in any order, to key_ptr[0 .. first result).

    The second result is the mass of all keys >= least, if `weighs`.

    Each column of the row moves its keys to its front, and each thread counts those of its own
    columns. Shorter columns are filled up with `NO_KEY`.
    """
    column = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    # Threads may still be reading the old contents of the scratch.
    tl.debug_barrier()
    for start in range(0, row.width, BLOCK):
        key = _row_keys(row, start, BLOCK)
        if weighs:
            mass += tl.where(key >= least, _mass_tile(key, largest), 0)
        taken = key >= tl.maximum(floor, least)
        tl.store(key_ptr + count * BLOCK + column, key, mask=taken)
        count += taken.to(tl.int32)
    depth = tl.max(count, 0)
    for level in range(depth):
        tl.store(key_ptr + level * BLOCK + column, NO_KEY, mask=count <= level)
    # The passes over the keys read values that other threads of this program stored.
    tl.debug_barrier()
    return depth * BLOCK, tl.sum(mass, 0)


@triton.jit
def _id_of_tie(row, cut, ties, BLOCK: tl.constexpr):
    """The `ties`-th lowest id among those with key == cut; -1 if there are fewer."""
    tie_id = tl.full((), -1, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, row.width, BLOCK):
        key = _row_keys(row, start, BLOCK)
        tied = (key == cut).to(tl.int32)
        count = tl.sum(tied, 0)
        if (seen < ties) & (seen + count >= ties):
            rank = seen + tl.cumsum(tied, 0)
            ids = start + tl.arange(0, BLOCK)
            tie_id = tl.max(tl.where((tied != 0) & (rank <= ties), ids, -1), 0)
        seen += count
    return tie_id


class _Filters(NamedTuple):
    """The filters that a row's slot asks for."""

    top_k: Any
    top_p: Any
    min_p: Any
    top_n_sigma: Any
    by_count: Any
    """Whether top-k leaves anything out."""
    by_mass: Any
    by_sigma: Any


@triton.jit
def _last_kept(row, filters, key_ptr, column_key, largest_key, BLOCK: tl.constexpr):
    """Key and id of the last candidate that the filters keep, in a row that has candidates."""
    largest = value_of_key(largest_key)
    cut = tl.full((), NO_KEY, tl.int32)
    cut_id = tl.full((), LAST_ID, tl.int32)
    ties = tl.full((), 0, tl.int64)
    # Keys below this no longer count.
    least_key = tl.full((), NO_KEY, tl.int32)
    if filters.by_sigma:
        reached = sigma_floor(row, filters.top_n_sigma, BLOCK)
        least_key = sortable_key(scaled_tile(reached, row.temperature))
    if filters.by_count | filters.by_mass:
        cut, ties = _cut_by_tallies(row, filters, key_ptr, column_key, least_key, largest, BLOCK)
    floor = least_key
    if filters.min_p > 0:
        floor = tl.maximum(floor, _min_p_key(filters.min_p, largest))
    if floor > cut:
        cut = floor
    elif cut > NO_KEY:
        cut_id = _id_of_tie(row, cut, ties, BLOCK)
    return cut, cut_id


@triton.jit
def _min_p_key(min_p, largest):
    """The least key that min-p keeps."""
    share = tl.log(tl.minimum(min_p, 1.0))
    least = largest + share
    key = sortable_key(least)
    # Rounded down, it would let in candidates that lie below it.
    if is_coarse(least) & (share - (least - largest) > 0):
        key += 1
    return key


@triton.jit
def _cut_by_tallies(row, filters, key_ptr, column_key, least_key, largest, BLOCK: tl.constexpr):
    """The last key that top-k and top-p keep, and how many candidates with that key they keep."""
    cut = tl.full((), NO_KEY, tl.int32)
    ties = tl.full((), 0, tl.int64)
    floor = _gather_floor(row, filters, key_ptr, column_key, largest, BLOCK)
    weighs = filters.by_count == 0
    used, mass = _gather_keys(row, key_ptr, floor, least_key, largest, weighs, BLOCK)
    if filters.by_count:
        cut, above = _select(
            key_ptr, used, filters.top_k, largest, BY_MASS=False, PASSES=16, BLOCK=BLOCK
        )
        # With fewer candidates than k all are kept, and fewer keys than k may have been
        # gathered: then no key was found, not even `NO_KEY`.
        cut = tl.maximum(cut, NO_KEY)
        ties = filters.top_k - above
    if filters.by_mass:
        gathered = _mass_above(key_ptr, used, cut, largest, BLOCK=BLOCK)
        if filters.by_count:
            mass = gathered + ties * _mass_tile(cut, largest)
        target = tl.ceil(filters.top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        target = tl.maximum(target, 1)
        if (filters.by_count == 0) & (gathered < target):
            # The gathered keys do not reach that far: the whole row is needed.
            used, _ = _gather_keys(row, key_ptr, NO_KEY, least_key, largest, False, BLOCK)
        # The target is reached within the first k, so the other candidates do not matter.
        cut, above = _select(key_ptr, used, target, largest, BY_MASS=True, PASSES=16, BLOCK=BLOCK)
        ties = tl.cdiv(target - above, tl.maximum(_mass_tile(cut, largest), 1))
    return cut, ties


@triton.jit
def _gather_floor(row, filters, key_ptr, column_key, largest, BLOCK: tl.constexpr):
    """A key below which nothing needs to be gathered at first.

    If `wanted` columns of the row have a key >= floor, at least as many keys are >= floor. The few
    keys among which the cut lies are worth gathering, as many passes go over them.
    """
    floor = tl.full((), -(2**31), tl.int32)
    wanted = tl.where(filters.by_count, filters.top_k, BLOCK // 4)
    if (wanted <= BLOCK // 2) & (row.width > 2 * BLOCK):
        tl.store(key_ptr + tl.arange(0, BLOCK), column_key)
        tl.debug_barrier()
        floor, _ = _select(key_ptr, BLOCK, wanted, largest, BY_MASS=False, PASSES=8, BLOCK=BLOCK)
    return floor


@triton.jit
def _cutoff_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_n_sigma_ptr,
    stop_ids_ptr,
    min_len_ptr,
    key_ptr,
    cut_key_ptr,
    cut_id_ptr,
    logits_stride,
    vocabulary,
    width,
    stop_ids,
    ahead,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find each row's cut: it keeps candidates with key > cut_key, or key == cut_key and
    id <= cut_id.

    `key_ptr` is scratch, [R, width].
    """
    index = tl.program_id(0)
    slot = tl.load(slot_ptr + index, cache_modifier=".cg").to(tl.int64)
    live = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=live, other=0)
    top_p = tl.load(top_p_ptr + slot, mask=live, other=1.0)
    min_p = tl.load(min_p_ptr + slot, mask=live, other=0.0)
    top_n_sigma = tl.load(top_n_sigma_ptr + slot, mask=live, other=0.0)
    wait_for_inputs(PDL)
    if slot < 0:
        return

    by_count = (top_k > 0) & (top_k < vocabulary)
    by_mass = top_p < 1.0
    cut = tl.full((), NO_KEY, tl.int32)
    cut_id = tl.full((), LAST_ID, tl.int32)
    by_sigma = top_n_sigma > 0
    if (temperature > 0) & (by_count | by_mass | by_sigma | (min_p > 0)):
        waits = tl.load(position_ptr + index) + ahead < tl.load(min_len_ptr + slot)
        row = CandidateRow(
            logits=logits_ptr + index.to(tl.int64) * logits_stride,
            vocabulary=vocabulary,
            width=width,
            temperature=temperature,
            waits=waits,
            stop_ids=stop_ids_ptr + slot * stop_ids,
            stop_count=stop_ids,
        )
        key_ptr += index.to(tl.int64) * width
        column_key = _column_keys(row, BLOCK)
        largest_key = tl.max(column_key, 0)
        if largest_key > NO_KEY:
            filters = _Filters(top_k, top_p, min_p, top_n_sigma, by_count, by_mass, by_sigma)
            cut, cut_id = _last_kept(row, filters, key_ptr, column_key, largest_key, BLOCK)
    tl.store(cut_key_ptr + index, cut)
    tl.store(cut_id_ptr + index, cut_id)
