"""Withhold drafts that are likely to be rejected: their lanes stay padded, which costs less.

A draft's chance is sqrt(p * share): p is its own probability, and the share is that of drafts which
its slot's latest steps accepted. A draft is verified if the product of all chances up to its own
reaches a threshold. A drafter's probability tracks how often it is right (EAGLE-2,
arXiv:2406.16858, section 3.2); the share corrects it where a request is harder than it looks. A
step that verified no draft counts as fully accepted, so that a slot tries again.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, M lanes of the run before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import DraftTiles
from graphengine.kernels.draft.trees.top_drafts import TopDrafts
from graphengine.kernels.sample.sampling import tile_of_token_reference
from graphengine.kernels.sample.tiles import tile_of_token

# Weight of the newest step in the share.
_RATE = tl.constexpr(1 / 16)


def follow_acceptance(
    recent_S: torch.Tensor, count_R: torch.Tensor, slot_N: torch.Tensor, *, pdl: bool = False
) -> None:
    """Move each live row's share of accepted drafts towards its step's share.

    Args:
        recent_S: float32, updated in place: in [0, 1], and 1 before a slot's first step.
        count_R: int32, tokens that each row emitted; a row that emitted none is skipped.
        slot_N: int32, slots of the verified lanes, W for each row.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `slot_N` must be
            older than that one.

    ValueError for a shape or dtype that does not fit.
    """
    N, rows = slot_N.numel(), count_R.numel()
    check_lanes(N, slot=slot_N)
    check_lanes(rows, count=count_R)
    check_vector("recent", recent_S, recent_S.numel(), torch.float32)
    if rows < 1 or N < 1 or N % rows:
        raise ValueError(f"{N} lanes are no whole number of lanes for each of {rows} rows")
    if not use_triton(recent_S):
        follow_acceptance_reference(recent_S, count_R, slot_N)
        return
    W = N // rows
    launcher(_follow_kernel, (rows,))(
        recent_S,
        count_R,
        slot_N,
        W=W,
        BLOCK_W=triton.next_power_of_2(W),
        num_warps=1,
        **launch_options(pdl),
    )


def follow_acceptance_reference(
    recent_S: torch.Tensor, count_R: torch.Tensor, slot_N: torch.Tensor
) -> None:
    """`follow_acceptance` in plain PyTorch."""
    slot_RW = slot_N.view(count_R.numel(), -1)
    row = torch.nonzero((slot_RW[:, 0] >= 0) & (count_R > 0)).flatten()
    slot, drafts = slot_RW[row, 0].long(), (slot_RW[row] >= 0).sum(1) - 1
    accepted = (count_R[row] - 1) / drafts.clamp(min=1).float()
    seen = torch.where(drafts > 0, accepted, 1.0)
    recent = recent_S[slot]
    recent_S[slot] = recent + (seen - recent) * _RATE.value


def withhold_drafts(
    drafts: TopDrafts,
    slot_R: torch.Tensor,
    source_R: torch.Tensor | None,
    recent_S: torch.Tensor,
    sure_R: torch.Tensor,
    *,
    least: float,
    first: bool,
    pdl: bool = False,
) -> DraftTiles:
    """Select the drafts that are worth verifying, for the kernels that commit them; one launch.

    Args:
        drafts: one draft for each of M lanes.
        slot_R: int32, slots of the lanes that the drafts follow, one per row.
        source_R: int32, the lane of the drafts for each row; None: row r uses lane r, and M is R.
        recent_S: float32, as `follow_acceptance` leaves it.
        sure_R: float32, updated in place: the product of the row's chances so far.
        least: the product below which a draft is withheld, in (0, 1].
        first: whether these are the chain's first drafts; `sure_R` is then not read.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. Of the inputs,
            that one may write only the drafts.

    Returns:
        New tiles [M, 1], written for the lanes that live rows use. Tiles of withheld drafts are not
        valid, so nothing is drafted there. ValueError for a shape, dtype or number that does not
        fit.
    """
    lanes, rows = drafts.token.shape[0], slot_R.numel()
    check_lanes(rows, slot=slot_R, **({} if source_R is None else {"source": source_R}))
    check_vector("recent", recent_S, recent_S.numel(), torch.float32)
    check_vector("sure", sure_R, rows, torch.float32)
    if drafts.token.shape != (lanes, 1) or (source_R is None and lanes != rows):
        shape = tuple(drafts.token.shape)
        raise ValueError(f"drafts must be [{rows if source_R is None else 'M'}, 1], not {shape}")
    if not 0 < least <= 1:
        raise ValueError(f"least={least} must be above 0 and at most 1")
    if not use_triton(recent_S):
        return withhold_drafts_reference(
            drafts, slot_R, source_R, recent_S, sure_R, least=least, first=first
        )
    best = torch.empty((lanes, 1), dtype=torch.int64, device=slot_R.device)
    tiles = DraftTiles(best, torch.empty_like(best, dtype=torch.int32))
    launcher(_withhold_kernel, (rows,))(
        *drafts,
        slot_R,
        source_R,
        recent_S,
        sure_R,
        *tiles,
        least,
        FIRST=first,
        num_warps=1,
        **launch_options(pdl),
    )
    return tiles


def withhold_drafts_reference(
    drafts: TopDrafts,
    slot_R: torch.Tensor,
    source_R: torch.Tensor | None,
    recent_S: torch.Tensor,
    sure_R: torch.Tensor,
    *,
    least: float,
    first: bool,
) -> DraftTiles:
    """`withhold_drafts` in plain PyTorch."""
    row = live_lanes(slot_R)
    lane = row if source_R is None else source_R[row].long()
    token, log_probability = drafts.token[lane, 0], drafts.log_probability[lane, 0]
    chance = (log_probability.exp() * recent_S[slot_R[row].long()]).sqrt()
    sure_R[row] = chance if first else sure_R[row] * chance
    best = torch.empty(drafts.token.shape, dtype=torch.int64, device=slot_R.device)
    tiles = DraftTiles(best, torch.empty_like(best, dtype=torch.int32))
    kept = (token >= 0) & (sure_R[row] >= least)
    tiles.best[lane, 0], tiles.health[lane, 0] = tile_of_token_reference(token, kept)
    return tiles


@triton.jit
def _follow_kernel(
    recent_ptr, count_ptr, slot_ptr, W: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0)
    w = tl.arange(0, BLOCK_W)
    fed_slot = tl.load(slot_ptr + row * W + w, mask=w < W, other=-1, cache_modifier=".cg")
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=slot >= 0, other=0)
    if count > 0:
        drafts = tl.sum((fed_slot >= 0).to(tl.int32), 0) - 1
        accepted = (count - 1).to(tl.float32) / tl.maximum(drafts, 1).to(tl.float32)
        seen = tl.where(drafts > 0, accepted, 1.0)
        recent = tl.load(recent_ptr + slot)
        tl.store(recent_ptr + slot, recent + (seen - recent) * _RATE)


@triton.jit
def _withhold_kernel(
    token_ptr,
    log_probability_ptr,
    slot_ptr,
    source_ptr,
    recent_ptr,
    sure_ptr,
    best_ptr,
    health_ptr,
    least,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. Only the drafts may come from the launch before."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row, cache_modifier=".cg")
    live = slot >= 0
    lane = row
    if source_ptr is not None:
        lane = tl.load(source_ptr + row, mask=live, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    if live:
        token = tl.load(token_ptr + lane)
        chance = tl.sqrt(tl.exp(tl.load(log_probability_ptr + lane)) * tl.load(recent_ptr + slot))
        sure = chance
        if not FIRST:
            sure = chance * tl.load(sure_ptr + row)
        tl.store(sure_ptr + row, sure)
        best, health = tile_of_token(token, (token >= 0) & (sure >= least))
        tl.store(best_ptr + lane, best)
        tl.store(health_ptr + lane, health)
