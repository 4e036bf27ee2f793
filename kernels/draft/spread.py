"""Logits of a draft vocabulary, laid out as the target's: what reads those then reads drafts' too.

Letters: N lanes, D draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.logits.logprobs import check_logits

_BLOCK = 1024


def spread_logits(
    logits_ND: torch.Tensor,
    column_V: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """The logits of each live lane by token, float32 [N, V], new; -inf for tokens without one.

    Args:
        logits_ND: float32, dense rows, any stride between them.
        column_V: int32: the column of each token, or -1; older than the launch before, and so is
        slot_N: int32, -1 = padded lane, whose logits are neither read nor written.
        pdl: the launch may overlap the one before, by the rules of `kernels.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes, _ = check_logits(logits_ND)
    check_lanes(lanes, slot=slot_N)
    vocabulary = column_V.numel()
    check_vector("column", column_V, vocabulary, torch.int32)
    if not use_triton(logits_ND):
        return spread_logits_reference(logits_ND, column_V, slot_N)
    spread_NV = logits_ND.new_empty(lanes, vocabulary)
    launcher(_spread_kernel, (lanes, triton.cdiv(vocabulary, _BLOCK)))(
        logits_ND,
        column_V,
        slot_N,
        spread_NV,
        logits_ND.stride(0),
        vocabulary,
        BLOCK=_BLOCK,
        **launch_options(pdl),
    )
    return spread_NV


def spread_logits_reference(
    logits_ND: torch.Tensor, column_V: torch.Tensor, slot_N: torch.Tensor
) -> torch.Tensor:
    """Plain twin of `spread_logits`."""
    spread_NV = logits_ND.new_empty(len(logits_ND), column_V.numel())
    live = live_lanes(slot_N)
    found = logits_ND[live].index_select(1, column_V.clamp(min=0))
    spread_NV[live] = found.where(column_V >= 0, -torch.inf)
    return spread_NV


@triton.jit
def _spread_kernel(
    logits_ptr,
    column_ptr,
    slot_ptr,
    spread_ptr,
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and tile of the vocabulary."""
    lane = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    column = tl.load(column_ptr + token, mask=inside, other=-1)
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    wait_for_inputs(PDL)
    if live:
        source = logits_ptr + lane * logits_stride + column
        logits = tl.load(source, mask=column >= 0, other=float("-inf"))
        tl.store(spread_ptr + lane * vocabulary + token, logits, mask=inside)
