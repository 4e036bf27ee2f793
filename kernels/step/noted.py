"""A request's tokens, noted on the device: how often each occurs, and which is at each position.

    prefill   note_prompt -> (model) -> process_logits -> sample -> commit_prefill -> note_tokens
    decode    (model) -> process_logits -> sample_tiles -> verify_commit_publish -> note_tokens

`process_logits` reads both tables, stop sequences only the history. The tables belong to a slot's
state: they go along when its request pauses. So does the state of the slot's automaton, which
follows the tokens that are noted.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, T lanes of a prompt chunk, V ids,
P positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_steps
from graphengine.kernels.logits.automata import (
    GrammarAutomata,
    check_automata,
    follow,
    follow_reference,
    load_header,
)
from graphengine.kernels.logits.logits import check_noted
from graphengine.kernels.logits.logits_triton import IN_PROMPT, USES_AUTOMATON
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_AUTOMATON = tl.constexpr(USES_AUTOMATON)

_BLOCK_V = 2048
_BLOCK_T = 1024


class FollowedAutomata(NamedTuple):
    """Slots' automata, which follow their tokens."""

    automata: GrammarAutomata
    flags: torch.Tensor
    """int32 [S], host-owned: `flags` of `LogitsTensors`, by which a slot has an automaton."""


def note_tokens(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    counts_SV: torch.Tensor,
    history_SP: torch.Tensor,
    *,
    followed: FollowedAutomata | None = None,
    pdl: bool = False,
) -> None:
    """Note each row's emitted tokens, in place; one launch.

    It also notes the first token, after a prompt's last chunk: the one lane then has the slot and
    the position of the chunk's last lane, and the count is flags & EMITTED.

    Args:
        token_N: int32, the token after each lane; read where the lane emitted it.
        count_R: int32, tokens that each row emitted, those of its first lanes; N is W * R.
        lanes: the lanes that the model was fed; slots and positions are read. The row's first token
            goes to the position after its first lane's.
        counts_SV: int32, dense rows; ids from V on are not counted.
        history_SP: int32, dense rows; tokens from position P on are dropped.
        followed: automata whose states go on by the tokens, in place.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `lanes` must be
            older than that one.

    ValueError for a shape or dtype that does not fit.
    """
    N = check_steps(token_N, count_R, lanes)
    check_noted(counts_SV, history_SP, counts_SV.shape[0])
    check_followed(followed, counts_SV.shape[0])
    if not use_triton(counts_SV):
        note_tokens_reference(token_N, count_R, lanes, counts_SV, history_SP, followed)
        return
    rows = count_R.numel()
    launcher(_note_tokens_kernel, (rows,))(
        token_N,
        count_R,
        lanes.slot,
        lanes.position,
        counts_SV,
        history_SP,
        None if followed is None else followed.automata,
        None if followed is None else followed.flags,
        counts_SV.stride(0),
        history_SP.stride(0),
        counts_SV.shape[1],
        history_SP.shape[1],
        W=N // rows,
        BLOCK_W=triton.next_power_of_2(N // rows),
        num_warps=1,
        **launch_options(pdl),
    )


def note_tokens_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    counts_SV: torch.Tensor,
    history_SP: torch.Tensor,
    followed: FollowedAutomata | None = None,
) -> None:
    """Plain twin of `note_tokens`."""
    V, P = counts_SV.shape[1], history_SP.shape[1]
    W = token_N.numel() // count_R.numel()
    tokens = token_N.tolist()
    for row, (slot, position, count) in enumerate(
        zip(lanes.slot[::W].tolist(), lanes.position[::W].tolist(), count_R.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        for j, token in enumerate(tokens[row * W : row * W + min(count, W)]):
            if 0 <= token < V:
                counts_SV[slot, token] += 1
            if position + 1 + j < P:
                history_SP[slot, position + 1 + j] = token
        if followed is not None and int(followed.flags[slot]) & USES_AUTOMATON:
            automata, said = followed.automata, tokens[row * W : row * W + min(count, W)]
            automata.state[slot] = follow_reference(automata, slot, int(automata.state[slot]), said)


def check_followed(followed: FollowedAutomata | None, slots: int) -> None:
    """ValueError unless the automata, if any, fit the slots."""
    if followed is not None:
        check_automata(followed.automata, slots)
        check_lanes(slots, flags=followed.flags)


def note_prompt(
    chunk: PrefillLanes,
    counts_SV: torch.Tensor,
    history_SP: torch.Tensor,
    *,
    followed: FollowedAutomata | None = None,
    pdl: bool = False,
) -> None:
    """Note a prompt chunk, in place: its ids are marked, its tokens written; one launch.

    A chunk whose first token is at position 0 begins a request: the slot's counts are cleared
    first, and its automaton begins. Older history past the chunk stays, and is never read.

    Args:
        chunk: the chunk's lanes, the live ones first, of one slot and consecutive positions.
        counts_SV, history_SP, followed: as in `note_tokens`.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    tokens = chunk.slot.numel()
    check_lanes(tokens, token=chunk.token, slot=chunk.slot, position=chunk.position)
    check_noted(counts_SV, history_SP, counts_SV.shape[0])
    check_followed(followed, counts_SV.shape[0])
    if not use_triton(counts_SV):
        note_prompt_reference(chunk, counts_SV, history_SP, followed)
        return
    if not tokens:
        return
    V = counts_SV.shape[1]
    block_v = min(triton.next_power_of_2(V), _BLOCK_V)
    block_t = min(triton.next_power_of_2(tokens), _BLOCK_T)
    programs = max(triton.cdiv(V, block_v), triton.cdiv(tokens, block_t))
    launcher(_note_prompt_kernel, (programs,))(
        chunk.token,
        chunk.slot,
        chunk.position,
        counts_SV,
        history_SP,
        None if followed is None else followed.automata.state,
        tokens,
        counts_SV.stride(0),
        history_SP.stride(0),
        V,
        history_SP.shape[1],
        BLOCK_V=block_v,
        BLOCK_T=block_t,
        **launch_options(pdl),
    )


def note_prompt_reference(
    chunk: PrefillLanes,
    counts_SV: torch.Tensor,
    history_SP: torch.Tensor,
    followed: FollowedAutomata | None = None,
) -> None:
    """Plain twin of `note_prompt`."""
    live = live_lanes(chunk.slot)
    if not live.numel():
        return
    slot, tokens, positions = int(chunk.slot[0]), chunk.token[live], chunk.position[live].long()
    if positions[0] == 0:
        counts_SV[slot] = 0
        if followed is not None:
            followed.automata.state[slot] = 0
    inside = (tokens >= 0) & (tokens < counts_SV.shape[1])
    counts_SV[slot, tokens[inside].long()] |= IN_PROMPT
    kept = positions < history_SP.shape[1]
    history_SP[slot, positions[kept]] = tokens[kept]


@triton.jit
def _note_tokens_kernel(
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    counts_ptr,
    history_ptr,
    automata,
    flags_ptr,
    counts_stride,
    history_stride,
    vocabulary,
    positions,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. The fields of `lanes` that it reads are older than the launch before."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg").to(tl.int64)
    live = slot >= 0
    position = tl.load(position_ptr + row * W, mask=live, other=0, cache_modifier=".cg")
    if automata is not None:
        flags = tl.load(flags_ptr + slot, mask=live, other=0)
        uses = live & ((flags & _AUTOMATON) != 0)
        region_ptr, ids, classes, at_next, _ = load_header(automata, slot, uses)
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=live, other=0)
    w = tl.arange(0, BLOCK_W)
    emitted = (w < count) & (w < W)
    token = tl.load(token_ptr + row * W + w, mask=emitted, other=-1)
    target = position + 1 + w
    tl.store(
        history_ptr + slot * history_stride + target, token, mask=emitted & (target < positions)
    )
    # A row may have emitted a token twice.
    counted = emitted & (token >= 0) & (token < vocabulary)
    tl.atomic_add(counts_ptr + slot * counts_stride + token, 1, mask=counted, sem="relaxed")
    if automata is not None:
        state = tl.load(automata.state + slot, mask=uses, other=0, cache_modifier=".cg")
        for k in tl.static_range(W):
            said = uses & (k < count)
            next_token = tl.load(token_ptr + row * W + k, mask=said, other=-1)
            state = follow(region_ptr, ids, classes, at_next, state, next_token, said)
        # Every warp has read the state before one of them overwrites it.
        tl.debug_barrier()
        tl.store(automata.state + slot, state, mask=uses)


@triton.jit
def _note_prompt_kernel(
    token_ptr,
    slot_ptr,
    position_ptr,
    counts_ptr,
    history_ptr,
    state_ptr,
    tokens,
    counts_stride,
    history_stride,
    vocabulary,
    positions,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK_V ids and BLOCK_T tokens of the history. Only it writes the counts of
    its ids; it looks through all tokens for them."""
    part = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot >= 0:
        counts_ptr += slot * counts_stride
        first = part * BLOCK_V
        end = tl.minimum(first + BLOCK_V, vocabulary)
        if tl.load(position_ptr) == 0:
            ids = first + tl.arange(0, BLOCK_V)
            tl.store(counts_ptr + ids, tl.zeros([BLOCK_V], tl.int32), mask=ids < vocabulary)
            if state_ptr is not None:
                tl.store(state_ptr + slot, 0, mask=part == 0)
            # The threads that mark an entry are not those that cleared it.
            tl.debug_barrier()
        for start in range(0, tokens, BLOCK_T):
            lane = start + tl.arange(0, BLOCK_T)
            fed = tl.load(slot_ptr + lane, mask=lane < tokens, other=-1) >= 0
            token = tl.load(token_ptr + lane, mask=fed, other=-1)
            ours = (token >= first) & (token < end)
            # Lanes that mark the same id store the same value.
            before = tl.load(counts_ptr + token, mask=ours, other=0)
            tl.store(counts_ptr + token, before | _IN_PROMPT, mask=ours)

        lane = part * BLOCK_T + tl.arange(0, BLOCK_T)
        fed = tl.load(slot_ptr + lane, mask=lane < tokens, other=-1) >= 0
        target = tl.load(position_ptr + lane, mask=fed, other=0)
        token = tl.load(token_ptr + lane, mask=fed, other=0)
        tl.store(
            history_ptr + slot * history_stride + target, token, mask=fed & (target < positions)
        )
