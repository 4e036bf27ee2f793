"""Drafts of the text that a slot's grammar forces: the automaton's forced tokens from its state on.

They replace the drafts that a drafter made, up to where they end or differ; what the drafter made
after that stays only if all its drafts before are the forced ones.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, K drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_draft_table
from graphengine.kernels.logits.automata import (
    follow,
    follow_reference,
    forced_reference,
    forced_token,
    load_header,
)
from graphengine.kernels.logits.logits_triton import USES_AUTOMATON
from graphengine.kernels.step.noted import FollowedAutomata, check_followed

_AUTOMATON = tl.constexpr(USES_AUTOMATON)


def draft_forced(
    followed: FollowedAutomata,
    slot_N: torch.Tensor,
    draft_SK: torch.Tensor,
    *,
    width: int = 1,
    pdl: bool = False,
) -> None:
    """Write the forced tokens after each row's state as its slot's next drafts; one launch.

    A chain ends at a state without a forced token, or after K of them. Slots without an automaton,
    and those whose chain is empty, keep their drafts.

    Args:
        followed: the automata, at the states after the tokens that the slots have said.
        slot_N: int32, the slot of each lane; a row's first lane is read, -1 for padded rows. Older
            than the launch before.
        draft_SK: int32, dense, updated in place; -1 is no draft.
        width: W, lanes of a row.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape, dtype or number that does not fit.
    """
    columns, lanes = check_draft_table(draft_SK), slot_N.numel()
    check_lanes(lanes, slot=slot_N)
    check_followed(followed, draft_SK.shape[0])
    if width < 1 or not lanes or lanes % width:
        raise ValueError(f"{lanes} lanes must be rows of width={width}")
    if not use_triton(draft_SK):
        draft_forced_reference(followed, slot_N, draft_SK, width=width)
        return
    launcher(_draft_forced_kernel, (lanes // width,))(
        slot_N,
        followed.automata,
        followed.flags,
        draft_SK,
        W=width,
        K=columns,
        num_warps=1,
        **launch_options(pdl),
    )


def draft_forced_reference(
    followed: FollowedAutomata, slot_N: torch.Tensor, draft_SK: torch.Tensor, *, width: int = 1
) -> None:
    """Plain twin of `draft_forced`."""
    automata = followed.automata
    for slot in slot_N[::width].tolist():
        if slot < 0 or not int(followed.flags[slot]) & USES_AUTOMATON:
            continue
        state, agree = int(automata.state[slot]), True
        for k in range(draft_SK.shape[1]):
            token = forced_reference(automata, slot, state)
            if token < 0:
                if not agree:
                    draft_SK[slot, k:] = -1
                break
            agree = agree and int(draft_SK[slot, k]) == token
            draft_SK[slot, k] = token
            state = follow_reference(automata, slot, state, [token])


@triton.jit
def _draft_forced_kernel(
    slot_ptr,
    automata,
    flags_ptr,
    draft_ptr,
    W: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. The slots are older than the launch before; flags and tables are the
    host's."""
    slot = tl.load(slot_ptr + tl.program_id(0) * W, cache_modifier=".cg").to(tl.int64)
    flags = tl.load(flags_ptr + slot, mask=slot >= 0, other=0)
    uses = (slot >= 0) & ((flags & _AUTOMATON) != 0)
    region_ptr, ids, classes, at_next, _ = load_header(automata, slot, uses)
    wait_for_inputs(PDL)

    state = tl.load(automata.state + slot, mask=uses, other=0, cache_modifier=".cg")
    forced = uses
    agree = uses
    for k in tl.static_range(K):
        at = draft_ptr + slot * K + k
        made = tl.load(at, mask=uses, other=-1)
        token = forced_token(region_ptr, state, forced)
        forced = forced & (token >= 0)
        agree = agree & ((forced == 0) | (made == token))
        # Every warp has read the draft before one of them overwrites it.
        tl.debug_barrier()
        tl.store(at, tl.where(forced, token, -1), mask=uses & (forced | (agree == 0)))
        state = follow(region_ptr, ids, classes, at_next, state, token, forced)
