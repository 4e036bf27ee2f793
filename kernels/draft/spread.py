"""Spread logits of a draft vocabulary into the target's layout, so that kernels read both alike.

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

_BLOCK = 4096
_WARPS = 16


def spread_logits(
    logits_ND: torch.Tensor,
    token_ids: torch.Tensor | None,
    slot_N: torch.Tensor,
    *,
    vocabulary: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Return each live lane's logits by token, new float32 [N, V]; -inf for tokens without one.

    Args:
        logits_ND: float32, dense rows, any stride between them.
        token_ids: int32 [D]: the token of each column, without repeats; None: the column's number.
            Columns of tokens outside 0 .. V - 1 are left out.
        slot_N: int32, -1 = padded lane, whose logits are neither read nor written. Like
            `token_ids`, older than the launch before.
        vocabulary: V
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape, dtype or number that does not fit.
    """
    lanes, drafted = check_logits(logits_ND)
    check_lanes(lanes, slot=slot_N)
    if token_ids is not None:
        check_vector("token_ids", token_ids, drafted, torch.int32)
    if vocabulary < 1:
        raise ValueError(f"vocabulary={vocabulary} must be at least 1")
    if not use_triton(logits_ND):
        return spread_logits_reference(logits_ND, token_ids, slot_N, vocabulary=vocabulary)
    spread_NV = logits_ND.new_empty(lanes, vocabulary)
    launcher(_spread_kernel, (lanes,))(
        logits_ND,
        token_ids,
        slot_N,
        spread_NV,
        logits_ND.stride(0),
        drafted,
        vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=_WARPS,
        **launch_options(pdl),
    )
    return spread_NV


def spread_logits_reference(
    logits_ND: torch.Tensor,
    token_ids: torch.Tensor | None,
    slot_N: torch.Tensor,
    *,
    vocabulary: int,
) -> torch.Tensor:
    """Plain twin of `spread_logits`."""
    lanes, drafted = logits_ND.shape
    token = torch.arange(drafted, device=slot_N.device) if token_ids is None else token_ids.long()
    known = (token >= 0) & (token < vocabulary)
    spread_NV = logits_ND.new_empty(lanes, vocabulary)
    live = live_lanes(slot_N)
    by_token = logits_ND.new_full((len(live), vocabulary), -torch.inf)
    by_token[:, token[known]] = logits_ND[live][:, known]
    spread_NV[live] = by_token
    return spread_NV


@triton.jit
def _spread_kernel(
    logits_ptr,
    token_ids_ptr,
    slot_ptr,
    spread_ptr,
    logits_stride,
    drafted,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per lane: all tokens get -inf, then those with a column get its logit."""
    lane = tl.program_id(0).to(tl.int64)
    live = tl.load(slot_ptr + lane, cache_modifier=".cg") >= 0
    wait_for_inputs(PDL)
    if live:
        spread_ptr += lane * vocabulary
        logits_ptr += lane * logits_stride
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            tl.store(spread_ptr + token, nothing, mask=token < vocabulary)
        # Other threads overwrite it with logits.
        tl.debug_barrier()
        for start in range(0, drafted, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < drafted
            token = column
            if token_ids_ptr is not None:
                token = tl.load(token_ids_ptr + column, mask=inside, other=-1)
            logits = tl.load(logits_ptr + column, mask=inside)
            known = inside & (token >= 0) & (token < vocabulary)
            tl.store(spread_ptr + token, logits, mask=known)
