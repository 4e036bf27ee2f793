"""DSpark's sequential head: a bias on a block's logits that depends on the token before.

A block's lanes do not know what the other lanes draft. So drafts are drawn from left to right, each
from the logits of its lane plus a low-rank product, w2 w1[token before], which models what follows
that token. Source: deepseek-ai/DeepSpec, whose checkpoints call it a vanilla Markov head.

Filters need the whole row of these logits: `markov_logits`.

Letters: R rows, B lanes of a block, V vocabulary, r the rank, C tiles of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_rows
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import DraftTiles
from graphengine.kernels.logits.logprobs import check_logits
from graphengine.kernels.sample.candidates import SamplingTensors, check_parameters, unfiltered
from graphengine.kernels.sample.sampling import sample_tiles_reference
from graphengine.kernels.sample.tiles import best_of_tile
from graphengine.kernels.step.state import DecodeLanes

MAX_RANK = 1024

# Elements of w2 that a program holds, and the most logits that it computes.
_ELEMENTS = 16384
_MOST = 128


class MarkovHead(NamedTuple):
    """The factors of the bias, in one dtype."""

    w1: torch.Tensor
    """[V, r], dense rows: indexed by the token before."""
    w2: torch.Tensor
    """[V, r], dense rows: indexed by the drafted token."""


def markov_draft(
    logits_MV: torch.Tensor,
    head: MarkovHead,
    lanes: DecodeLanes,
    params: SamplingTensors,
    *,
    index: int,
    pdl: bool = False,
) -> DraftTiles:
    """Draw the draft after each live lane, tile by tile; one launch.

    It is drawn as by `SampleTiles`: greedily or by temperature, with the noise of its position.

    Args:
        logits_MV: float32 [R * B, V], of the lanes of R blocks; row r uses those of lane
            r * B + index, plus the bias.
        lanes: R lanes: the token before each draft, and its position. A token without a row in w1
            makes all logits NaN.
        params: indexed by slot; the filters among them are checked, but not used.
        index: which of a block's lanes, 0 <= index < B.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. That one may
            write logits and lanes.

    Returns:
        New tiles of R lanes; those of padded lanes are not written. ValueError for a shape, dtype
        or number that does not fit.
    """
    _check(logits_MV, head, lanes, index)
    stop_ids, block = check_parameters(params), _block_of(head)
    if not use_triton(logits_MV):
        tiles = markov_draft_reference(logits_MV, head, lanes, params, index=index, tile=block)
        return DraftTiles(*tiles)
    rows, vocabulary = lanes.slot.numel(), logits_MV.shape[1]
    count = triton.cdiv(vocabulary, block)
    best = torch.empty((rows, count), dtype=torch.int64, device=logits_MV.device)
    health = lanes.slot.new_empty(rows, count)
    shape, options = _shape(logits_MV, head, lanes, index)
    launcher(_markov_kernel, (rows, count))(
        logits_MV,
        head,
        lanes,
        params.temperature,
        params.seed,
        params.stop_ids,
        params.min_len,
        best,
        health,
        stop_ids,
        *shape,
        **options,
        **launch_options(pdl),
    )
    return DraftTiles(best, health)


def markov_logits(
    logits_MV: torch.Tensor,
    head: MarkovHead,
    lanes: DecodeLanes,
    *,
    index: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the logits that `markov_draft` draws from, new float32 [R, V]; one launch.

    Arguments as in `markov_draft`. Rows of padded lanes are not written.
    """
    _check(logits_MV, head, lanes, index)
    if not use_triton(logits_MV):
        return markov_logits_reference(logits_MV, head, lanes, index=index)
    rows, vocabulary = lanes.slot.numel(), logits_MV.shape[1]
    out = logits_MV.new_empty(rows, vocabulary)
    shape, options = _shape(logits_MV, head, lanes, index)
    launcher(_markov_logits_kernel, (rows, triton.cdiv(vocabulary, _block_of(head))))(
        logits_MV, head, lanes, out, *shape, **options, **launch_options(pdl)
    )
    return out


def _shape(
    logits_MV: torch.Tensor, head: MarkovHead, lanes: DecodeLanes, index: int
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Last arguments and constants of both kernels."""
    rank = head.w1.shape[1]
    strides = (logits_MV.stride(0), head.w1.stride(0), head.w2.stride(0))
    options = {
        "B": logits_MV.shape[0] // lanes.slot.numel(),
        "RANK": rank,
        "BLOCK_R": triton.next_power_of_2(rank),
        "BLOCK_V": _block_of(head),
        "num_warps": 4,
    }
    return (*strides, head.w1.shape[0], logits_MV.shape[1], index), options


def _block_of(head: MarkovHead) -> int:
    """Number of logits that a program computes."""
    padded: int = triton.next_power_of_2(head.w1.shape[1])
    return min(_MOST, _ELEMENTS // padded)


def markov_draft_reference(
    logits_MV: torch.Tensor,
    head: MarkovHead,
    lanes: DecodeLanes,
    params: SamplingTensors,
    *,
    index: int,
    tile: int = _MOST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`markov_draft` in plain PyTorch."""
    return sample_tiles_reference(
        markov_logits_reference(logits_MV, head, lanes, index=index),
        lanes.slot,
        lanes.position,
        unfiltered(params),
        tile=tile,
    )


def markov_logits_reference(
    logits_MV: torch.Tensor, head: MarkovHead, lanes: DecodeLanes, *, index: int
) -> torch.Tensor:
    """`markov_logits` in plain PyTorch."""
    rows = lanes.slot.numel()
    token = lanes.token.where(lanes.slot >= 0, 0)
    unknown = (token < 0) | (token >= head.w1.shape[0])
    before = head.w1[token.masked_fill(unknown, 0).long()].float()
    bias = torch.stack([(head.w2.float() * row).sum(dim=1) for row in before])
    logits = logits_MV.view(rows, -1, logits_MV.shape[1])[:, index] + bias
    return logits.masked_fill(unknown[:, None], torch.nan)


def _check(logits_MV: torch.Tensor, head: MarkovHead, lanes: DecodeLanes, index: int) -> None:
    M, vocabulary = check_logits(logits_MV)
    rows = lanes.slot.numel()
    check_lanes(rows, **lanes._asdict())
    _check_head(head, vocabulary)
    if rows < 1 or M % rows or not 0 <= index < M // rows:
        raise ValueError(f"lane {index} of {rows} blocks is not among the logits of {M} lanes")


def _check_head(head: MarkovHead, vocabulary: int) -> None:
    """Raise ValueError unless the factors fit each other and the vocabulary."""
    w1, w2 = head
    check_rows(w1=w1, w2=w2)
    if w1.shape[1] != w2.shape[1] or w2.shape[0] != vocabulary or w1.dtype != w2.dtype:
        raise ValueError(
            f"a head of w1 {w1.dtype} {list(w1.shape)} and w2 {w2.dtype} {list(w2.shape)} is none "
            f"of one rank for {vocabulary} tokens"
        )
    if w1.shape[1] > MAX_RANK:
        raise ValueError(f"a head of rank {w1.shape[1]}: at most {MAX_RANK}")


@triton.jit
def _w2_tile(head, v, inside, w2_stride, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load w2's rows `v`, [BLOCK_V, BLOCK_R]; weights may be loaded before the wait."""
    r = tl.arange(0, BLOCK_R)
    source = head.w2 + v[:, None].to(tl.int64) * w2_stride + r[None, :]
    return tl.load(source, mask=inside[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def _following_logits(
    logits_ptr,
    head,
    w2,
    token,
    lane,
    v,
    inside,
    logits_stride,
    w1_stride,
    known_tokens,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A lane's logits of the ids v, plus the bias of the token before."""
    r = tl.arange(0, BLOCK_R)
    known = (token >= 0) & (token < known_tokens)
    source = head.w1 + token.to(tl.int64) * w1_stride + r
    before = tl.load(source, mask=known & (r < RANK), other=0.0)
    bias = tl.sum(w2.to(tl.float32) * before.to(tl.float32)[None, :], 1)
    source = logits_ptr + lane.to(tl.int64) * logits_stride + v
    logits = tl.load(source, mask=inside, other=float("-inf"))
    return tl.where(known, logits + bias, float("nan"))


@triton.jit(do_not_specialize=["index"])
def _markov_kernel(
    logits_ptr,
    head,
    lanes,
    temperature_ptr,
    seed_ptr,
    stop_ids_ptr,
    min_len_ptr,
    best_ptr,
    health_ptr,
    stop_ids,
    logits_stride,
    w1_stride,
    w2_stride,
    known_tokens,
    vocabulary,
    index,
    B: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and tile. Rows vary fastest, so they share reads of w2."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocabulary
    w2 = _w2_tile(head, v, inside, w2_stride, RANK, BLOCK_R)
    wait_for_inputs(PDL)

    slot = tl.load(lanes.slot + row)
    if slot < 0:
        return
    token = tl.load(lanes.token + row)
    position = tl.load(lanes.position + row) + 1
    logits = _following_logits(
        logits_ptr,
        head,
        w2,
        token,
        row * B + index,
        v,
        inside,
        logits_stride,
        w1_stride,
        known_tokens,
        RANK,
        BLOCK_R,
    )
    ones = tl.zeros([1, 1], tl.int32)
    best, health = best_of_tile(
        logits[None, :],
        v[None, :],
        inside[None, :],
        ones + slot,
        ones + position,
        ones == 0,
        temperature_ptr,
        seed_ptr,
        stop_ids_ptr,
        min_len_ptr,
        stop_ids,
    )
    at = row * tl.num_programs(1) + tile + tl.arange(0, 1)
    tl.store(best_ptr + at, best)
    tl.store(health_ptr + at, health)


@triton.jit(do_not_specialize=["index"])
def _markov_logits_kernel(
    logits_ptr,
    head,
    lanes,
    out_ptr,
    logits_stride,
    w1_stride,
    w2_stride,
    known_tokens,
    vocabulary,
    index,
    B: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and tile, as in `_markov_kernel`."""
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v < vocabulary
    w2 = _w2_tile(head, v, inside, w2_stride, RANK, BLOCK_R)
    wait_for_inputs(PDL)

    if tl.load(lanes.slot + row) < 0:
        return
    token = tl.load(lanes.token + row)
    logits = _following_logits(
        logits_ptr,
        head,
        w2,
        token,
        row * B + index,
        v,
        inside,
        logits_stride,
        w1_stride,
        known_tokens,
        RANK,
        BLOCK_R,
    )
    tl.store(out_ptr + row.to(tl.int64) * vocabulary + v, logits, mask=inside)
