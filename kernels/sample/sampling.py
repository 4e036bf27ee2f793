"""Sampling one token a row by Gumbel-max, with filters (top-n-sigma, top-k, ...) without a sort.

    cutoff   one program a row   the set that the filters keep, as a threshold (`cutoff.py`)
    tile     (row, vocab tile)   best of the tile: value and id
    reduce   one program a row   best of the tiles -> token

Without filters the first kernel is not needed, and the second may be a part of the kernel that
computes the logits: both use `best_of_tile`. Decode leaves the third to `verify_commit_publish`.

A row's token is a function of its logits, its slot's parameters and its position: not of its lane,
the bucket or the neighbours. All sums are in integers and every tie goes to the lower id, so the
token does not depend on the order of summation or on the tiling either.

What is sampled, for a live row whose query sits at position p and whose token will sit at p + 1:

1. If p + 1 < min_len, the logits of the slot's stop ids are -inf. Ids at -inf are never sampled.
   A row with a NaN left, or with no finite logit, yields token -1.
2. temperature 0: the largest logit. Else l = logit / temperature, clamped to the finite floats.
3. Candidates are ordered by l, then by lower id. Each filter applies to what the filters before it
   keep. top-n-sigma keeps candidates of at least floor / temperature, where floor = max - n * sigma
   of the logits of step 1 (`sigma.py`). top-k keeps the first k. top-p keeps the shortest prefix
   that holds the share p of the mass that is left, at least one candidate. min-p keeps candidates
   of at least min_p times the largest probability, that is l >= max l + log(min_p).
4. token = argmax(l + gumbel(seed, p + 1, id)) over what is kept: a draw from its softmax(l).

Mass is fixed point: floor(exp(l - max l) * 2^40) as int64. Below 2^-40 of the largest it is 0, and
2^22 ids cannot overflow it.

Where l is huge, because of a bias of 1e8 or a temperature of 1e-6, float32 rounds the noise of step
4 away. A row's largest l is not known where lm_head samples, so it is not subtracted. Instead, sums
that are equal in float32 and at least 2^11 are told apart by their rounding errors, which are exact
(Fast2Sum: T. J. Dekker, 1971). Rounding keeps the order, so the pair (sum, error) has the order of
the exact sums, in every tiling. The lowest 2 bits of an error are dropped; then the lower id wins.
Below 2^11 float32 is fine enough for noise, and equal sums tie. So do sums at the largest float.

Letters: R rows, S slots, V vocabulary, E stop ids a slot, C tiles of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.core.philox import gumbel, philox_uint32
from graphengine.kernels.sample.candidates import (
    COARSE,
    LARGEST,
    LAST_ID,
    MASS_SCALE,
    SamplingTensors,
    check_parameters,
)
from graphengine.kernels.sample.cutoff import find_cutoffs
from graphengine.kernels.sample.sigma import sigma_floor_reference
from graphengine.kernels.sample.tiles import (
    FINITE,
    HEALTH,
    NAN,
    NOTHING,
    NOTHING_FINITE,
    best_of_tile,
    token_of_tiles,
)

MAX_VOCABULARY = 1 << 22

_TILE_BLOCK = 1024
_MAX_REDUCE_BLOCK = 4096


def sample(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next token of each live row; the module's docstring says which.

    It launches `sample_tiles` and a third kernel.

    Args:
        out: int32 [R] to write to, instead of a new tensor.
        The others as in `sample_tiles`.

    Returns:
        token_R: int32 [R]; -1 for a row with a NaN or without a finite logit. The token of a padded
        row is left as it is.
    """
    _check(logits_RV, slot_R, position_R, params)
    token_R = torch.empty_like(slot_R) if out is None else out
    check_lanes(slot_R.numel(), out=token_R)
    if not use_triton(logits_RV):
        return sample_reference(logits_RV, slot_R, position_R, params, out=token_R)
    best_RC, health_RC = sample_tiles(logits_RV, slot_R, position_R, params)
    rows, tiles = best_RC.shape
    block = min(triton.next_power_of_2(tiles), _MAX_REDUCE_BLOCK)
    launcher(_reduce_kernel, (rows,))(best_RC, health_RC, slot_R, token_R, tiles, BLOCK=block)
    return token_R


def sample_tiles(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    *,
    ahead: int = 1,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best candidate of each tile of 1,024 logits, and whether they are valid.

    Two kernels on the current stream, without a host sync, capturable. Their scratch is an int32
    for each logit and 12 bytes for every 1,024 of them.

    Args:
        logits_RV: float32 [R, V] with dense rows, any stride between them; only read.
        slot_R: int32 [R], -1 for a padded row.
        position_R: int32 [R], the query's position.
        params: indexed by slot; host-owned.
        ahead: positions from the query to the sampled token, as in `epilogues.SampleTiles`.
        pdl: the launches may overlap the ones before, by the rules of `core.pdl`. `slot_R` and
            `position_R` must be older than the launch before.

    Returns:
        best_RC: new int64 [R, C], value and id of each tile's best.
        health_RC: new int32 [R, C]. `token_of_tiles` reads both; padded rows are not written.
    """
    stop_ids = _check(logits_RV, slot_R, position_R, params)
    rows, vocabulary = logits_RV.shape
    if not use_triton(logits_RV):
        return sample_tiles_reference(logits_RV, slot_R, position_R, params, ahead=ahead)

    cut_key_R, cut_id_R = find_cutoffs(logits_RV, slot_R, position_R, params, ahead=ahead, pdl=pdl)
    tiles = triton.cdiv(vocabulary, _TILE_BLOCK)
    best_RC = torch.empty((rows, tiles), dtype=torch.int64, device=logits_RV.device)
    health_RC = slot_R.new_empty(rows, tiles)
    launcher(_tile_kernel, (rows, tiles))(
        logits_RV,
        slot_R,
        position_R,
        params.temperature,
        params.seed,
        params.stop_ids,
        params.min_len,
        cut_key_R,
        cut_id_R,
        best_RC,
        health_RC,
        logits_RV.stride(0),
        vocabulary,
        stop_ids,
        ahead,
        BLOCK=_TILE_BLOCK,
        **launch_options(pdl),
    )
    return best_RC, health_RC


def sample_reference(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain twin of `sample`, in numpy: one row after the other, whole rows at a time."""
    token_R = torch.empty_like(slot_R) if out is None else out
    id_V = np.arange(logits_RV.shape[1])
    for row, health_V, ids, value in _rows(logits_RV, slot_R, position_R + 1, params, id_V):
        if health_V.max() != FINITE.value:
            token_R[row] = -1
            continue
        # Of equal values argmax takes the first, which has the lowest id.
        largest = np.flatnonzero(value.sum == value.sum.max())
        token_R[row] = int(ids[largest[np.argmax(value.error[largest])]])
    return token_R


def sample_tiles_reference(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    *,
    tile: int = _TILE_BLOCK,
    ahead: int = 1,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `sample_tiles`, for tiles of any width; `ahead` and `token_ids` are those of
    `epilogues.SampleTiles`.
    """
    rows, vocabulary = logits_RV.shape
    id_V = np.arange(vocabulary) if token_ids is None else token_ids.numpy(force=True)
    starts = np.arange(0, vocabulary, tile)
    widths = np.diff(starts, append=vocabulary)
    shape, device = (rows, starts.size), logits_RV.device
    best_RC = torch.empty(shape, dtype=torch.int64, device=device)
    health_RC = torch.empty(shape, dtype=torch.int32, device=device)
    for row, health_V, kept, value in _rows(logits_RV, slot_R, position_R + ahead, params, id_V):
        key_V, second_V = np.full((2, vocabulary), NOTHING.value, np.int64)
        key_V[kept], second_V[kept] = _key(value.sum), _second(value.error, id_V[kept])
        best_C, health_C = (np.maximum.reduceat(each, starts) for each in (key_V, health_V))
        second_V[key_V < best_C.repeat(widths)] = NOTHING.value
        second_C = np.maximum.reduceat(second_V, starts)
        there = best_C > NOTHING.value
        best_C[there] = best_C[there] << 32 | second_C[there] & LAST_ID.value
        health_C[there] |= (second_C[there] >> 32).astype(np.int32)
        best_RC[row], health_RC[row] = torch.from_numpy(best_C), torch.from_numpy(health_C)
    return best_RC, health_RC


def token_of_tiles_reference(best_RC: torch.Tensor, health_RC: torch.Tensor) -> torch.Tensor:
    """Plain twin of `token_of_tiles`, for all rows: new int32 [R]."""
    key_RC, error_RC = best_RC >> 32, (health_RC & ~HEALTH.value).long()
    second_RC = error_RC << 32 | best_RC & LAST_ID.value
    last_R = second_RC.where(key_RC == key_RC.amax(dim=1, keepdim=True), NOTHING.value).amax(dim=1)
    token_R: torch.Tensor = (last_R & LAST_ID.value) ^ LAST_ID.value
    valid_R = (health_RC & HEALTH.value).amax(dim=1) == FINITE.value
    return token_R.where(valid_R, -1).to(torch.int32)


def tile_of_token_reference(
    token_R: torch.Tensor, valid_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain twin of `tile_of_token`, for all rows: new int64 [R] and int32 [R]."""
    health_R = torch.where(valid_R, FINITE.value, NOTHING_FINITE.value)
    return (token_R ^ LAST_ID.value).to(torch.int64), health_R.to(torch.int32)


class _Value(NamedTuple):
    """Values of candidates; the largest is sampled: scaled logit plus noise, or logit."""

    sum: NDArray[np.float32]
    error: NDArray[np.int32]
    """Sortable key of the rounding error of `sum`, without the bits of HEALTH; 0 where it does not
    count."""


Candidates = tuple[int, NDArray[np.int32], NDArray[np.intp], _Value]


def _rows(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
    id_V: NDArray[np.integer[Any]],
) -> Iterator[Candidates]:
    """Yield each live row's number, the health of its logits, and the kept columns with their
    values. The row's token, one of `id_V`, will sit at its position."""
    logits, positions = logits_RV.numpy(force=True), position_R.tolist()
    by_slot: list[NDArray[Any]] = [tensor.numpy(force=True) for tensor in params]
    for row, slot in enumerate(slot_R.tolist()):
        if slot >= 0:
            fields = (tensor[slot] for tensor in by_slot)
            yield row, *_candidates(logits[row], id_V, positions[row], *fields)


def _candidates(
    logits_V: NDArray[np.float32],
    id_V: NDArray[np.integer[Any]],
    position: int,
    temperature: np.float32,
    top_k: np.int32,
    top_p: np.float32,
    min_p: np.float32,
    top_n_sigma: np.float32,
    seed: np.int64,
    stop_ids_E: NDArray[np.int32],
    min_len: np.int32,
) -> tuple[NDArray[np.int32], NDArray[np.intp], _Value]:
    """The health, kept columns and values of a row whose token will sit at `position`."""
    if position < min_len:
        logits_V = np.where(np.isin(id_V, stop_ids_E), np.float32(-np.inf), logits_V)
    health_V = np.where(np.isnan(logits_V), NAN.value, NOTHING_FINITE.value).astype(np.int32)
    health_V[np.isfinite(logits_V)] = FINITE.value

    columns = np.flatnonzero(logits_V > -np.inf)
    value: NDArray[np.float32] = logits_V[columns]
    error = np.zeros(value.size, np.int32)
    if temperature > 0 and columns.size:
        value, kept = kept_reference(value, temperature, top_k, top_p, min_p, top_n_sigma)
        columns, value = columns[kept], value[kept]
        noise = gumbel(philox_uint32(seed, position, id_V[columns]))
        scaled, value = value, value + noise
        left_out = _key(noise - (value - scaled)) & ~HEALTH.value
        size = np.abs(value)
        coarse = (size >= COARSE.value) & (size < LARGEST.value)
        error = np.where(coarse, left_out, 0).astype(np.int32)
    return health_V, columns, _Value(value, error)


def kept_reference(
    logits: NDArray[np.float32],
    temperature: np.float32,
    top_k: np.int32,
    top_p: np.float32,
    min_p: np.float32,
    top_n_sigma: np.float32,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """A sampled row's candidates divided by the temperature, and which of them filters keep."""
    with np.errstate(over="ignore"):
        least = -np.float32(np.inf)
        if top_n_sigma > 0:
            least = sigma_floor_reference(logits, top_n_sigma) / temperature
        scaled = np.clip(logits / temperature, -LARGEST.value, LARGEST.value)
    if 0 < top_k < scaled.size or top_p < 1 or min_p > 0 or top_n_sigma > 0:
        return scaled, _kept(scaled, least, int(top_k), float(top_p), min_p)
    return scaled, np.ones(scaled.size, np.bool_)


def _key(value: NDArray[np.float32]) -> NDArray[np.int64]:
    """`sortable_key` as int64."""
    bits = (value + np.float32(0)).view(np.int32).astype(np.int64)
    key: NDArray[np.int64] = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


def _second(error: NDArray[np.int32], ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """int64 that orders candidates of equal sums: the largest error wins, then the lowest id."""
    second: NDArray[np.int64] = error.astype(np.int64) << 32 | (ids ^ LAST_ID.value)
    return second


def _kept(
    scaled: NDArray[np.float32], least: np.float32, top_k: int, top_p: float, min_p: np.float32
) -> NDArray[np.bool_]:
    """Which candidates the filters keep, of those of at least `least` and the largest. Candidates
    are given in the order of their ids."""
    # Values alone sort much faster than their indices, and are enough: what is kept is a prefix
    # of the candidates by (value, lower id), so values determine all but a tie at its end.
    descending = -np.sort(-scaled)
    largest = descending[0]
    count = int(np.count_nonzero(descending >= min(least, largest)))
    if 0 < top_k < count:
        count = top_k
    if top_p < 1:
        reached = np.cumsum(_mass(descending[:count], largest))
        target = max(math.ceil(top_p * float(reached[-1])), 1)
        count = int(np.searchsorted(reached, target)) + 1
    if min_p > 0:
        share = np.log(np.minimum(min_p, np.float32(1)))
        floor = largest + share
        if COARSE.value <= abs(floor) < LARGEST.value and share - (floor - largest) > 0:
            # Rounded down, it would let in candidates that lie below it.
            floor = np.nextafter(floor, np.float32(np.inf))
        count = min(count, int(np.count_nonzero(descending >= floor)))
    cut = descending[count - 1]
    kept: NDArray[np.bool_] = scaled > cut
    tied = np.flatnonzero(scaled == cut)
    kept[tied[: count - np.count_nonzero(kept)]] = True
    return kept


def _mass(scaled: NDArray[np.float32], largest: np.float32) -> NDArray[np.int64]:
    with np.errstate(over="ignore"):
        mass: NDArray[np.float32] = np.exp(scaled - largest) * np.float32(MASS_SCALE.value)
    return mass.astype(np.int64)


def check_tiles(best_RC: torch.Tensor, health_RC: torch.Tensor, rows: int) -> int:
    """The number of tiles; ValueError unless both are dense [rows, C] of the right dtypes."""
    shape = tuple(best_RC.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] < 1:
        raise ValueError(f"best must be [{rows}, C], not {shape}")
    for name, tensor, dtype in (("best", best_RC, torch.int64), ("health", health_RC, torch.int32)):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a dense {dtype} {list(shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
    return shape[1]


def _check(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    position_R: torch.Tensor,
    params: SamplingTensors,
) -> int:
    """The number of stop ids a slot; ValueError unless everything fits."""
    shape, strides = tuple(logits_RV.shape), logits_RV.stride()
    if len(shape) != 2 or logits_RV.dtype != torch.float32 or strides[1] != 1:
        raise ValueError(
            f"logits must be float32 [R, V] with dense rows, "
            f"not {logits_RV.dtype} {shape} with strides {strides}"
        )
    rows, vocabulary = shape
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocabulary} is outside 1 .. {MAX_VOCABULARY}")
    check_lanes(rows, slot=slot_R, position=position_R)
    return check_parameters(params)


@triton.jit
def _tile_kernel(
    logits_ptr,
    slot_ptr,
    position_ptr,
    temperature_ptr,
    seed_ptr,
    stop_ids_ptr,
    min_len_ptr,
    cut_key_ptr,
    cut_id_ptr,
    best_ptr,
    health_ptr,
    logits_stride,
    vocabulary,
    stop_ids,
    ahead,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`best_of_tile` of one row, [1, BLOCK]. Only the cut may be written by the launch before."""
    row = tl.program_id(0) + tl.arange(0, 1)
    slot = tl.load(slot_ptr + row, cache_modifier=".cg")[:, None]
    live = slot >= 0
    ids = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    source = logits_ptr + row[:, None].to(tl.int64) * logits_stride + ids
    mask = live & (ids < vocabulary)
    logits = tl.load(source, mask=mask, other=float("-inf"), cache_modifier=".cg")
    position = tl.load(position_ptr + row[:, None], mask=live, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    best, health = best_of_tile(
        logits,
        ids,
        ids < vocabulary,
        slot,
        position + ahead,
        live,
        temperature_ptr,
        seed_ptr,
        stop_ids_ptr,
        min_len_ptr,
        stop_ids,
        tl.load(cut_key_ptr + row[:, None], mask=live, other=0),
        tl.load(cut_id_ptr + row[:, None], mask=live, other=0),
    )
    at = row * tl.num_programs(1) + tl.program_id(1)
    stored = tl.max(live.to(tl.int32), 1) != 0
    tl.store(best_ptr + at, best, mask=stored)
    tl.store(health_ptr + at, health, mask=stored)


@triton.jit
def _reduce_kernel(best_ptr, health_ptr, slot_ptr, token_ptr, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    live = tl.load(slot_ptr + row) >= 0
    token = token_of_tiles(best_ptr, health_ptr, row, tiles, live, BLOCK)
    tl.store(token_ptr + row, token, mask=live)
