"""Stop sequences: a request ends where it has emitted one of several token sequences.

A sequence matches after an emitted token if that is its last token, and its other tokens are those
before it, in history and in the same step. The first token of a step after which any sequence
matches is the request's last; if several sequences match there, the one of the lowest index counts.

A match has two limits: it may not begin before `start`, so that the prompt's end does not become
part of it, and it may not end below position `min_len`, where the sampler would not draw a stop id
either (vLLM's `min_tokens`).

    match_stop_sequences        a separate kernel
    stop_sequence_of_tokens     its device function, for kernels with a row's tokens in registers

The first token, which the prompt's last chunk samples, can only complete sequences of one token:
`commit_prefill` looks for those.

Letters: S slots, R rows, W lanes of a row, N = R * W lanes, P positions, Q sequences of at most L
tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_table
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_steps
from graphengine.kernels.logits.logits import tokens_from
from graphengine.kernels.step.state import DecodeLanes, StopSequences, check_draft_count


class History(NamedTuple):
    """The tokens of each slot's sequence by position, for a kernel."""

    tokens: Any
    """Pointer to int32 [S, P]."""
    stride: Any
    positions: Any
    """P"""


class StopMatch(NamedTuple):
    """A step cut at stop sequences, in new tensors."""

    count_R: torch.Tensor
    """int32: tokens that the row keeps, up to the one that completes a sequence; 0 for a padded
    row."""
    index_R: torch.Tensor
    """int32: the sequence that ends the request; -1 for none."""


def match_stop_sequences(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    history_SP: torch.Tensor,
    sequences: StopSequences,
    *,
    pdl: bool = False,
) -> StopMatch:
    """Cut each row's emitted tokens after the first match; the module's docstring defines a match.

    Args:
        token_N: int32, the token after each lane; read where the lane emitted it.
        count_R: int32, tokens that each row emitted, those of its first lanes; N is W * R.
        lanes: the lanes that the model was fed; slots and positions are read. The row's first token
            sits at the position after its first lane's.
        history_SP: int32, dense rows; only read: the token at each position up to the row's first
            lane. P is at least the length of the longest sequence.
        sequences: indexed by slot.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `lanes` and
            `history_SP` must be older than that one.

    ValueError for a shape or dtype that does not fit.
    """
    N = check_steps(token_N, count_R, lanes)
    rows = count_R.numel()
    width = check_draft_count(N // rows - 1)
    check_stop_sequences(sequences, history_SP)
    if not use_triton(history_SP):
        return match_stop_sequences_reference(token_N, count_R, lanes, history_SP, sequences)
    match = StopMatch(torch.empty_like(count_R), torch.empty_like(count_R))
    Q, L = sequences.tokens.shape[1:]
    launcher(_match_kernel, (rows,))(
        token_N,
        count_R,
        lanes.slot,
        lanes.position,
        history_SP,
        sequences,
        *match,
        history_SP.stride(0),
        history_SP.shape[1],
        W=width,
        Q=Q,
        L=L,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_Q=triton.next_power_of_2(max(Q, 1)),
        BLOCK_L=triton.next_power_of_2(L),
        **launch_options(pdl),
    )
    return match


def match_stop_sequences_reference(
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    history_SP: torch.Tensor,
    sequences: StopSequences,
) -> StopMatch:
    """Plain twin of `match_stop_sequences`."""
    match = StopMatch(torch.zeros_like(count_R), torch.full_like(count_R, -1))
    W = token_N.numel() // count_R.numel()
    slots, positions = lanes.slot[::W].tolist(), lanes.position[::W].tolist()
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue
        emitted = token_N[row * W : row * W + min(max(int(count_R[row]), 0), W)].tolist()
        match.count_R[row] = len(emitted)
        indices = stop_sequence_of_tokens_reference(emitted, slot, position, history_SP, sequences)
        for j, index in enumerate(indices):
            if index >= 0:
                match.count_R[row], match.index_R[row] = j + 1, index
                break
    return match


def stop_sequence_of_tokens_reference(
    emitted: list[int],
    slot: int,
    position: int,
    history_SP: torch.Tensor,
    sequences: StopSequences,
) -> list[int]:
    """Plain twin of `stop_sequence_of_tokens`, for a live row."""
    start, min_len = int(sequences.start[slot]), int(sequences.min_len[slot])
    wanted = [
        [token for token in padded if token >= 0] for padded in sequences.tokens[slot].tolist()
    ]
    if not any(wanted):
        return [-1] * len(emitted)
    indices = []
    for j in range(len(emitted)):
        said = tokens_from(start, history_SP[slot], position + 1, emitted[: j + 1])
        index = -1
        for number, sequence in enumerate(wanted):
            fits = 0 < len(sequence) <= len(said) and position + 1 + j >= min_len
            if fits and said[-len(sequence) :] == sequence:
                index = number
                break
        indices.append(index)
    return indices


def check_stop_sequences(sequences: StopSequences, history_SP: torch.Tensor) -> int:
    """The number of slots; ValueError unless all shapes and dtypes fit it."""
    slots = sequences.start.numel()
    check_lanes(slots, start=sequences.start, min_len=sequences.min_len)
    check_table("stop sequences", sequences.tokens, slots, 3)
    if sequences.tokens.shape[2] < 1:
        raise ValueError(f"stop sequences of 0 tokens: {tuple(sequences.tokens.shape)}")
    shape, dtype = tuple(history_SP.shape), history_SP.dtype
    fits = len(shape) == 2 and shape[0] == slots and shape[1] > 0 and history_SP.stride(1) == 1
    if dtype != torch.int32 or not fits:
        raise ValueError(
            f"history must be int32 [{slots}, 1 or more] with dense rows, not {dtype} {shape}"
        )
    return slots


@triton.jit
def stop_sequence_of_tokens(
    token_W,
    position,
    slot,
    live,
    sequences,
    history,
    W: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """int32 [BLOCK_W]: the stop sequence that each of a row's tokens completes; -1 for none.

    Each token is matched as if those before it were emitted, whether or not they are in the end.
    Everything else that is read is host-owned or history, and may be read before the wait.

    Args:
        token_W: int32 [BLOCK_W], of which the first W count; -1 completes nothing.
        position: of the row's first lane; the row's first token sits after it.
        slot: the row's; nothing is read if the row is not live.
        sequences: `StopSequences`.
        history: a `History`.
    """
    slot = slot.to(tl.int64)
    q = tl.arange(0, BLOCK_Q)[:, None]
    # Columns count from the end: 0 is the sequence's last token.
    back = tl.arange(0, BLOCK_L)[None, :]
    inside = live & (q < Q) & (back < L)
    at = slot * (Q * L) + q * L + (L - 1 - back)
    sequence_QL = tl.load(sequences.tokens + at, mask=inside, other=-1)
    start = tl.load(sequences.start + slot, mask=live, other=0)
    min_len = tl.load(sequences.min_len + slot, mask=live, other=0)
    there_Q = tl.max(tl.where(back == 0, sequence_QL, -1), 1) >= 0

    w = tl.arange(0, BLOCK_W)
    index_W = tl.full([BLOCK_W], -1, tl.int32)
    tokens = ()
    for j in tl.static_range(W):
        tokens += (tl.sum(tl.where(w == j, token_W, 0), 0),)  # type: ignore[assignment]
        # Before the step's own tokens the window comes from history.
        source = position + 1 + j - back
        known = live & (back > j) & (back < L) & (source >= 0) & (source < history.positions)
        window_L = tl.load(
            history.tokens + slot * history.stride + source,
            mask=known,
            other=-2,
            cache_modifier=".cg",
        )
        for i in tl.static_range(j + 1):
            window_L = tl.where(back == j - i, tokens[i], window_L)
        same_QL = (sequence_QL < 0) | ((sequence_QL == window_L) & (source >= start))
        matched_Q = there_Q & (tl.min(same_QL.to(tl.int32), 1) != 0)
        number_Q = tl.where(matched_Q, tl.arange(0, BLOCK_Q), BLOCK_Q)
        index = tl.min(number_Q, 0)
        ends = (index < BLOCK_Q) & (position + 1 + j >= min_len)
        index_W = tl.where((w == j) & ends, index, index_W)
    return index_W


@triton.jit
def _match_kernel(
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    history_ptr,
    sequences,
    kept_ptr,
    index_ptr,
    history_stride,
    positions,
    W: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. Only tokens and counts may be written by the launch before."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    live = slot >= 0
    position = tl.load(position_ptr + row * W, mask=live, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=live, other=0)
    count = tl.minimum(tl.maximum(count, 0), W)
    w = tl.arange(0, BLOCK_W)
    token_W = tl.load(token_ptr + row * W + w, mask=w < count, other=-1)
    history = History(history_ptr, history_stride, positions)
    index_W = stop_sequence_of_tokens(
        token_W, position, slot, live, sequences, history, W, Q, L, BLOCK_W, BLOCK_Q, BLOCK_L
    )
    end = tl.min(tl.where((index_W >= 0) & (w < count), w, BLOCK_W), 0)
    stops = end < BLOCK_W
    index = tl.max(tl.where(w == end, index_W, -1), 0)
    tl.store(kept_ptr + row, tl.where(stops, end + 1, count))
    tl.store(index_ptr + row, tl.where(stops, index, -1))
