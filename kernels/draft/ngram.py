"""Drafts from the request's own tokens: those that followed the last occurrence of the same tokens.

With n from max_n down to 1, the *latest* earlier occurrence of the sequence's last n tokens is
looked up, and its continuation proposed (prompt lookup decoding, A. Saxena 2023). An occurrence
ends before the last token. Its continuation may run into the tokens that were looked up, and ends
where the known tokens end. If not even the last token occurred before, that token is repeated.

The table of tokens lives on the device, one row per slot, and each launch first appends new tokens.

Letters: S slots, P positions, R rows, W lanes of a row, N = R * W lanes, C chunks of prompts, K
drafts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, live_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_draft_table, check_steps
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes

# Positions that are compared at a time, and the warps that compare them.
_BLOCK = 8192
_WARPS = 16


def ngram_propose(
    history_SP: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    max_n: int,
    num_speculative_tokens: int,
    unmatched_S: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Append each row's emitted tokens to its slot's tokens, and propose drafts.

    Args:
        history_SP: int32, dense rows, updated in place: `[slot, p]` is the token at position p.
            Tokens up to the position of the row's first lane are already there. P is at least the
            greatest length of a sequence; tokens past it are dropped.
        token_N: int32, the target's token after each lane; read where the lane emitted it.
        count_R: int32, tokens that each row emitted, at most its live lanes; N is W * R. A row that
            emitted none is skipped.
        lanes: the lanes that the target was fed.
        draft_SK: int32, updated in place: the slot's drafts, -1 past the known tokens and past
            `num_speculative_tokens`. If that is 0, tokens are appended but drafts do not change.
        unmatched_S: int32, counts the proposals for which nothing was found.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`. `lanes` must be
            older than that one.

    Raises:
        ValueError: a shape, dtype or number that does not fit.
    """
    N = check_steps(token_N, count_R, lanes)
    _check(history_SP, draft_SK, max_n, num_speculative_tokens, unmatched_S)
    options: dict[str, Any] = {
        "max_n": max_n,
        "num_speculative_tokens": num_speculative_tokens,
        "unmatched_S": unmatched_S,
    }
    if not use_triton(history_SP):
        ngram_propose_reference(history_SP, token_N, count_R, lanes, draft_SK, **options)
        return
    rows = count_R.numel()
    W = N // rows
    launcher(_propose_kernel, (rows,))(
        history_SP,
        token_N,
        count_R,
        lanes.slot,
        lanes.position,
        draft_SK,
        unmatched_S,
        *_sizes(history_SP, draft_SK),
        W=W,
        BLOCK_W=triton.next_power_of_2(W),
        **_blocks(history_SP, draft_SK, max_n, num_speculative_tokens),
        **launch_options(pdl),
    )


def ngram_propose_reference(
    history_SP: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    max_n: int,
    num_speculative_tokens: int,
    unmatched_S: torch.Tensor | None = None,
) -> None:
    """`ngram_propose` in plain PyTorch."""
    P = history_SP.shape[1]
    W = token_N.numel() // count_R.numel()
    for row, (slot, position, count) in enumerate(
        zip(lanes.slot[::W].tolist(), lanes.position[::W].tolist(), count_R.tolist(), strict=True)
    ):
        if slot < 0 or count < 1:
            continue
        length = min(position + 1 + count, P)
        new = token_N[row * W : row * W + count]
        history_SP[slot, position + 1 : length] = new[: max(length - position - 1, 0)]
        known = history_SP[slot, :length]
        _write_drafts(known, slot, draft_SK, max_n, num_speculative_tokens, unmatched_S)


def ngram_prompt(
    history_SP: torch.Tensor,
    chunk: PrefillLanes,
    token_C: torch.Tensor,
    final_C: torch.Tensor,
    draft_SK: torch.Tensor,
    *,
    max_n: int,
    num_speculative_tokens: int,
    unmatched_S: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write prompts' chunks into their slots' tokens; after a last chunk propose drafts.

    Args:
        history_SP, draft_SK, max_n, num_speculative_tokens, unmatched_S: as in `ngram_propose`.
        chunk: the lanes of C chunks, whose slots differ.
        token_C: int32, the sampled tokens; read only after last chunks. One below 0, whose logits
            were not valid, is not appended, and nothing is proposed.
        final_C: int32, not 0 for a prompt's last chunk.
        pdl: as in `ngram_propose`, with `chunk` for `lanes`.

    Raises:
        ValueError: a shape, dtype or number that does not fit.
    """
    tokens, chunks = chunk.slot.numel(), chunk.last.numel()
    check_lanes(tokens, token=chunk.token, slot=chunk.slot, position=chunk.position)
    check_lanes(chunks, last=chunk.last, token=token_C, final=final_C)
    check_lanes(chunks + 1, query_start=chunk.query_start)
    _check(history_SP, draft_SK, max_n, num_speculative_tokens, unmatched_S)
    options: dict[str, Any] = {
        "max_n": max_n,
        "num_speculative_tokens": num_speculative_tokens,
        "unmatched_S": unmatched_S,
    }
    if not use_triton(history_SP):
        ngram_prompt_reference(history_SP, chunk, token_C, final_C, draft_SK, **options)
        return
    launcher(_prompt_kernel, (chunks,))(
        history_SP,
        chunk.token,
        chunk.slot,
        chunk.position,
        chunk.query_start,
        token_C,
        final_C,
        draft_SK,
        unmatched_S,
        *_sizes(history_SP, draft_SK),
        BLOCK_N=min(triton.next_power_of_2(tokens), 1024),
        **_blocks(history_SP, draft_SK, max_n, num_speculative_tokens),
        **launch_options(pdl),
    )


def ngram_prompt_reference(
    history_SP: torch.Tensor,
    chunk: PrefillLanes,
    token_C: torch.Tensor,
    final_C: torch.Tensor,
    draft_SK: torch.Tensor,
    *,
    max_n: int,
    num_speculative_tokens: int,
    unmatched_S: torch.Tensor | None = None,
) -> None:
    """`ngram_prompt` in plain PyTorch."""
    P = history_SP.shape[1]
    live = live_lanes(chunk.slot)
    live = live[chunk.position[live] < P]
    history_SP[chunk.slot[live].long(), chunk.position[live].long()] = chunk.token[live]
    begin = chunk.query_start.tolist()
    for index, (first, end) in enumerate(pairwise(begin)):
        token = int(token_C[index])
        if end == first or not int(final_C[index]) or token < 0:
            continue
        slot, position = int(chunk.slot[end - 1]), int(chunk.position[end - 1])
        length = min(position + 2, P)
        history_SP[slot, position + 1 : length] = token
        known = history_SP[slot, :length]
        _write_drafts(known, slot, draft_SK, max_n, num_speculative_tokens, unmatched_S)


def _write_drafts(
    known_L: torch.Tensor,
    slot: int,
    draft_SK: torch.Tensor,
    max_n: int,
    drafts: int,
    unmatched_S: torch.Tensor | None,
) -> None:
    """Propose drafts for one slot; with 0 drafts do nothing."""
    if drafts == 0:
        return
    draft_SK[slot] = -1
    start = _continuation(known_L, max_n)
    if start:
        proposed = known_L[start : start + drafts]
        draft_SK[slot, : len(proposed)] = proposed
        return
    draft_SK[slot, :drafts] = known_L[-1]
    if unmatched_S is not None:
        unmatched_S[slot] += 1


def _continuation(known_L: torch.Tensor, max_n: int) -> int:
    """Where the continuation of the best occurrence starts; 0 if there is none."""
    for n in range(min(max_n, len(known_L) - 1), 0, -1):
        windows = known_L[:-1].unfold(0, n, 1)
        starts = (windows == known_L[-n:]).all(dim=1).nonzero()
        if len(starts):
            return int(starts[-1]) + n
    return 0


def _check(
    history_SP: torch.Tensor,
    draft_SK: torch.Tensor,
    max_n: int,
    drafts: int,
    unmatched_S: torch.Tensor | None,
) -> None:
    columns, slots = check_draft_table(draft_SK), draft_SK.shape[0]
    check_history(history_SP, slots)
    if max_n < 1:
        raise ValueError(f"max_n={max_n} must be 1 or more")
    if not 0 <= drafts <= columns:
        raise ValueError(f"{drafts} drafts do not fit a table of {columns} drafts a slot")
    if unmatched_S is not None:
        check_lanes(slots, unmatched=unmatched_S)


def check_history(history_SP: torch.Tensor, slots: int) -> None:
    """Raise ValueError unless `history_SP` is a table of tokens for `slots` slots."""
    shape, dtype = tuple(history_SP.shape), history_SP.dtype
    dense = dtype == torch.int32 and history_SP.dim() == 2 and history_SP.stride(1) == 1
    if not dense or shape[0] != slots or shape[1] < 1:
        raise ValueError(f"history must be int32 [{slots}, P] with dense rows, not {dtype} {shape}")


def _sizes(history_SP: torch.Tensor, draft_SK: torch.Tensor) -> tuple[int, int, int]:
    return history_SP.stride(0), history_SP.shape[1], draft_SK.shape[1]


def _blocks(
    history_SP: torch.Tensor, draft_SK: torch.Tensor, max_n: int, drafts: int
) -> dict[str, int]:
    return {
        "MAX_N": max_n,
        "K": drafts,
        "BLOCK": min(triton.next_power_of_2(history_SP.shape[1]), _BLOCK),
        "BLOCK_K": triton.next_power_of_2(draft_SK.shape[1]),
        "num_warps": _WARPS,
    }


@triton.jit
def _propose_kernel(
    history_ptr,
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    draft_ptr,
    unmatched_ptr,
    history_stride,
    positions,
    columns,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MAX_N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. The lanes must be older than the launch before."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    position = tl.load(position_ptr + row * W, mask=slot >= 0, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=slot >= 0, other=0)
    if count > 0:
        tokens_ptr = history_ptr + slot.to(tl.int64) * history_stride
        w = tl.arange(0, BLOCK_W)
        target = position + 1 + w
        new = tl.load(token_ptr + row * W + w, mask=w < count, other=0)
        tl.store(tokens_ptr + target, new, mask=(w < count) & (target < positions))
        _propose(
            tokens_ptr,
            position,
            count,
            positions,
            slot,
            draft_ptr,
            unmatched_ptr,
            columns,
            MAX_N,
            K,
            BLOCK,
            BLOCK_K,
        )


@triton.jit
def _prompt_kernel(
    history_ptr,
    chunk_token_ptr,
    chunk_slot_ptr,
    chunk_position_ptr,
    begin_ptr,
    token_ptr,
    final_ptr,
    draft_ptr,
    unmatched_ptr,
    history_stride,
    positions,
    columns,
    BLOCK_N: tl.constexpr,
    MAX_N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for the whole of a chunk: it saves a launch, and chunks are short."""
    chunk = tl.program_id(0)
    begin = tl.load(begin_ptr + chunk, cache_modifier=".cg")
    end = tl.load(begin_ptr + chunk + 1, cache_modifier=".cg")
    live = end > begin
    last = tl.maximum(end, 1) - 1
    slot = tl.load(chunk_slot_ptr + last, mask=live, other=-1, cache_modifier=".cg")
    position = tl.load(chunk_position_ptr + last, mask=live, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    tokens_ptr = history_ptr + slot.to(tl.int64) * history_stride
    for start in range(begin, end, BLOCK_N):
        lane = start + tl.arange(0, BLOCK_N)
        target = tl.load(chunk_position_ptr + lane, mask=lane < end, other=0)
        token = tl.load(chunk_token_ptr + lane, mask=lane < end, other=0)
        tl.store(tokens_ptr + target, token, mask=(lane < end) & (target < positions))
    final = tl.load(final_ptr + chunk) != 0
    sampled = tl.load(token_ptr + chunk, mask=live & final, other=-1)
    if sampled >= 0:
        tl.store(tokens_ptr + position + 1, sampled, mask=position + 1 < positions)
        _propose(
            tokens_ptr,
            position,
            1,
            positions,
            slot,
            draft_ptr,
            unmatched_ptr,
            columns,
            MAX_N,
            K,
            BLOCK,
            BLOCK_K,
        )


@triton.jit
def _propose(
    tokens_ptr,
    position,
    count,
    positions,
    slot,
    draft_ptr,
    unmatched_ptr,
    columns,
    MAX_N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Look up the end of a slot's tokens and write the slot's drafts; with K = 0 do nothing.

    The `count` tokens after `position` have just been stored; there are none from `positions` on.
    """
    if K == 0:
        return
    # The threads that read the new tokens are not those that stored them.
    tl.debug_barrier()
    length = tl.minimum(position + 1 + count, positions)
    found = _longest_match(tokens_ptr, length, MAX_N, BLOCK)
    matched = found > 0
    k = tl.arange(0, BLOCK_K)
    source = (found & 0xFFFFFFFF).to(tl.int32) + k
    wanted = k < K
    draft = tl.load(tokens_ptr + source, mask=matched & wanted & (source < length), other=-1)
    last = tl.load(tokens_ptr + length - 1)
    draft = tl.where(wanted & (found == 0), last, draft)
    tl.store(draft_ptr + slot.to(tl.int64) * columns + k, draft, mask=k < columns)
    if unmatched_ptr is not None:
        before = tl.load(unmatched_ptr + slot)
        # Every warp has read the count before one of them overwrites it.
        tl.debug_barrier()
        tl.store(unmatched_ptr + slot, before + 1, mask=found == 0)


@triton.jit
def _longest_match(tokens_ptr, length, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """int64 n << 32 | p: the n tokens before position p are the sequence's last n; 0 if none.

    It picks, of all p in 1 .. length - 1, the last one with the greatest n <= MAX_N. It searches
    backwards and stops once n is MAX_N: all other matches are earlier.
    """
    suffix = ()
    for n in tl.static_range(1, MAX_N + 1):
        token = tl.load(tokens_ptr + length - n, mask=n <= length, other=0)
        suffix += (token,)  # type: ignore[assignment]
    found = length.to(tl.int64) * 0
    end = length
    while (end > 1) & (found >> 32 < MAX_N):
        found = tl.maximum(found, _best_of_block(tokens_ptr, suffix, end, MAX_N, BLOCK))
        end -= BLOCK
    return found


@triton.jit
def _best_of_block(tokens_ptr, suffix, end, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """`_longest_match` among the positions end - BLOCK .. end - 1."""
    p = end - 1 - tl.arange(0, BLOCK)
    same = p > 0
    matched = tl.zeros((BLOCK,), tl.int64)
    for n in tl.static_range(1, MAX_N + 1):
        # Few positions still match after the first token, so this loads little.
        same = same & (p >= n)
        token = tl.load(tokens_ptr + p - n, mask=same, other=0)
        same = same & (token == suffix[n - 1])
        matched += same.to(tl.int64)
    return tl.max(tl.where(matched > 0, matched << 32 | p.to(tl.int64), 0), 0)
