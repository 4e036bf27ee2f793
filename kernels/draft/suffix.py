"""Drafts from the longest earlier occurrence of a sequence's last tokens, in a text or a corpus.

It looks in the sequence itself and in a corpus that all requests share for the place that follows
the longest match with the sequence's last tokens, and proposes what comes there: the longer the
match, the more tokens. Of equally long matches the sequence's own ones win over the corpus's, and
the latest over earlier ones. SuffixDecoding drafts this way from suffix trees on the host
(G. Oliaro et al., arXiv:2411.04975); here the tokens themselves are compared.

    scan     (row, part of a text)   append new tokens, find the best place of the part
    propose  one program per row     the best place of all parts, and its drafts

Letters: S slots, P positions, C tokens of the corpus, R rows, W lanes of a row, N = R * W lanes,
M tokens of the longest match, K drafts, B parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.draft.draft import check_draft_table, check_steps
from graphengine.kernels.draft.ngram import check_history
from graphengine.kernels.step.state import DecodeLanes

MAX_CORPUS = 2**22
"""Most tokens of a corpus: each step reads all of it for each row."""

# Places that a program compares.
_BLOCK = 1024

# A match is packed into one int64, the best being the greatest: its length, whether it is the
# sequence's own, and where its continuation starts.
_OWN = tl.constexpr(32)
_LENGTH = tl.constexpr(33)
_START = tl.constexpr(2**32 - 1)


def suffix_propose(
    history_SP: torch.Tensor,
    corpus_C: torch.Tensor | None,
    supported_M1: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    unmatched_S: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Append each row's emitted tokens to its slot's tokens, and propose drafts.

    Two launches. A match must be followed by a token: it ends before the last one of its text.

    Args:
        history_SP: as in `ngram_propose`.
        corpus_C: int32, up to MAX_CORPUS tokens; None: there is none.
        supported_M1: int32 [M + 1]: `[n]` is the most drafts that a match of n tokens proposes,
            0..K. At most M tokens are compared.
        token_N, count_R, lanes: as in `ngram_propose`.
        draft_SK: int32, updated in place: the slot's drafts; -1 past the text's known tokens, past
            the number that its match supports, and if there is no match.
        unmatched_S: int32, counts the proposals for which nothing was found.
        pdl: as in `ngram_propose`.

    Raises:
        ValueError: a shape, dtype or number that does not fit.
    """
    N, rows = check_steps(token_N, count_R, lanes), count_R.numel()
    _check(history_SP, corpus_C, supported_M1, draft_SK, unmatched_S)
    texts = (history_SP, corpus_C, supported_M1)
    if not use_triton(history_SP):
        suffix_propose_reference(*texts, token_N, count_R, lanes, draft_SK, unmatched_S=unmatched_S)
        return
    positions, tokens = history_SP.shape[1], 0 if corpus_C is None else corpus_C.numel()
    own_parts = triton.cdiv(positions, _BLOCK)
    parts = own_parts + triton.cdiv(tokens, _BLOCK)
    best_RB = torch.empty((rows, parts), dtype=torch.int64, device=token_N.device)
    step = (token_N, count_R, lanes.slot, lanes.position)
    W = N // rows
    launcher(_scan_kernel, (rows, parts))(
        history_SP,
        corpus_C,
        *step,
        best_RB,
        history_SP.stride(0),
        positions,
        tokens,
        own_parts,
        supported_M1.numel() - 1,
        W=W,
        BLOCK_W=triton.next_power_of_2(W),
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(pdl),
    )
    launcher(_propose_kernel, (rows,))(
        history_SP,
        corpus_C,
        supported_M1,
        count_R,
        lanes.slot,
        lanes.position,
        best_RB,
        draft_SK,
        unmatched_S,
        history_SP.stride(0),
        positions,
        tokens,
        parts,
        draft_SK.shape[1],
        W=W,
        BLOCK_B=triton.next_power_of_2(parts),
        BLOCK_K=triton.next_power_of_2(draft_SK.shape[1]),
        num_warps=4,
        **launch_options(pdl),
    )


def suffix_propose_reference(
    history_SP: torch.Tensor,
    corpus_C: torch.Tensor | None,
    supported_M1: torch.Tensor,
    token_N: torch.Tensor,
    count_R: torch.Tensor,
    lanes: DecodeLanes,
    draft_SK: torch.Tensor,
    *,
    unmatched_S: torch.Tensor,
) -> None:
    """`suffix_propose` in plain PyTorch."""
    P, most = history_SP.shape[1], supported_M1.numel() - 1
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
        text, (matched, start) = known, _longest_match(known, known, most)
        if corpus_C is not None:
            other = _longest_match(corpus_C, known, most)
            if other[0] > matched:
                text, (matched, start) = corpus_C, other
        draft_SK[slot] = -1
        unmatched_S[slot] += not matched
        proposed = text[start : start + int(supported_M1[matched])] if matched else text[:0]
        draft_SK[slot, : len(proposed)] = proposed


def _longest_match(text: torch.Tensor, known: torch.Tensor, most: int) -> tuple[int, int]:
    """Length of the longest match of the end of `known`, and the last place in `text` after one."""
    matched, start = 0, 0
    place = torch.arange(1, text.numel(), device=text.device)
    for n in range(1, min(most, known.numel()) + 1):
        place = place[place >= n]
        place = place[text[place - n] == known[-n]]
        if not place.numel():
            break
        matched, start = n, int(place[-1])
    return matched, start


def _check(
    history_SP: torch.Tensor,
    corpus_C: torch.Tensor | None,
    supported_M1: torch.Tensor,
    draft_SK: torch.Tensor,
    unmatched_S: torch.Tensor,
) -> None:
    check_draft_table(draft_SK)
    slots, most = draft_SK.shape[0], supported_M1.numel() - 1
    check_history(history_SP, slots)
    check_lanes(slots, unmatched=unmatched_S)
    if most < 1:
        raise ValueError(f"supported has {most + 1} lengths of matches, 0 and at least one more")
    check_lanes(most + 1, supported=supported_M1)
    if corpus_C is not None:
        tokens = corpus_C.numel()
        check_lanes(tokens, corpus=corpus_C)
        if not 1 <= tokens <= MAX_CORPUS:
            raise ValueError(f"a corpus of {tokens} tokens, not of 1 to {MAX_CORPUS}")


@triton.jit
def _scan_kernel(
    history_ptr,
    corpus_ptr,
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    best_ptr,
    history_stride,
    positions,
    tokens,
    own_parts,
    most,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and part. The lanes must be older than the launch before.

    The first program of a row appends the new tokens; all programs read them from `token_ptr`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    position = tl.load(position_ptr + row * W, mask=slot >= 0, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=slot >= 0, other=0)
    if count > 0:
        text_ptr = history_ptr + slot.to(tl.int64) * history_stride
        new_ptr = token_ptr + row * W - (position + 1)
        if part == 0:
            w = tl.arange(0, BLOCK_W)
            target = position + 1 + w
            new = tl.load(token_ptr + row * W + w, mask=w < count, other=0)
            tl.store(text_ptr + target, new, mask=(w < count) & (target < positions))
        length = tl.minimum(position + 1 + count, positions)
        is_own = part < own_parts
        start = tl.where(is_own, part, part - own_parts) * BLOCK
        place = start + tl.arange(0, BLOCK)
        same = (place > 0) & (place < tl.where(is_own, length, tokens))
        matched = tl.zeros((BLOCK,), tl.int32)
        n = 0
        more = tl.max(same.to(tl.int32), 0)
        while (n < tl.minimum(most, length)) & (more > 0):
            n += 1
            same = same & (place >= n)
            at = place - n
            if corpus_ptr is None:
                token = _known_token(text_ptr, new_ptr, at, position, same)
            else:
                token = _known_token(text_ptr, new_ptr, at, position, same & is_own)
                found = tl.load(corpus_ptr + at, mask=same & (part >= own_parts), other=0)
                token = tl.where(is_own, token, found)
            last = length - n
            known = tl.load(text_ptr + last, mask=last <= position, other=0)
            fresh = tl.load(new_ptr + last, mask=last > position, other=0)
            same = same & (token == tl.where(last > position, fresh, known))
            matched += same.to(tl.int32)
            more = tl.max(same.to(tl.int32), 0)
        packed = (matched.to(tl.int64) << _LENGTH) | (is_own.to(tl.int64) << _OWN) | place
        best = tl.max(tl.where(matched > 0, packed, 0), 0)
        tl.store(best_ptr + row * tl.num_programs(1) + part, best)


@triton.jit
def _known_token(text_ptr, new_ptr, at, position, wanted):
    """The tokens of a sequence at these positions; those after `position` are new."""
    is_new = at > position
    known = tl.load(text_ptr + at, mask=wanted & (at <= position), other=0)
    return tl.where(is_new, tl.load(new_ptr + at, mask=wanted & is_new, other=0), known)


@triton.jit
def _propose_kernel(
    history_ptr,
    corpus_ptr,
    supported_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    best_ptr,
    draft_ptr,
    unmatched_ptr,
    history_stride,
    positions,
    tokens,
    parts,
    columns,
    W: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. The launch before is the scan."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row * W, cache_modifier=".cg")
    position = tl.load(position_ptr + row * W, mask=slot >= 0, other=0, cache_modifier=".cg")
    wait_for_inputs(PDL)

    count = tl.load(count_ptr + row, mask=slot >= 0, other=0)
    if count > 0:
        length = tl.minimum(position + 1 + count, positions)
        part = tl.arange(0, BLOCK_B)
        best = tl.max(tl.load(best_ptr + row * parts + part, mask=part < parts, other=0), 0)
        matched = (best >> _LENGTH).to(tl.int32)
        supported = tl.load(supported_ptr + matched, mask=matched > 0, other=0)
        k = tl.arange(0, BLOCK_K)
        source = (best & _START).to(tl.int32) + k
        is_own = ((best >> _OWN) & 1) != 0
        wanted = k < tl.minimum(supported, columns)
        text_ptr = history_ptr + slot.to(tl.int64) * history_stride
        draft = tl.load(text_ptr + source, mask=wanted & is_own & (source < length), other=-1)
        if corpus_ptr is not None:
            inside = wanted & (best > 0) & (source < tokens)
            found = tl.load(corpus_ptr + source, mask=inside & (is_own == 0), other=-1)
            draft = tl.where(is_own, draft, found)
        tl.store(draft_ptr + slot.to(tl.int64) * columns + k, draft, mask=k < columns)
        before = tl.load(unmatched_ptr + slot)
        # Every warp has read the count before one of them overwrites it.
        tl.debug_barrier()
        tl.store(unmatched_ptr + slot, before + 1, mask=matched == 0)
