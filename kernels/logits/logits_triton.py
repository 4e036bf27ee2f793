"""The Triton side of `logits.py`, which defines the results.

Letters: V vocabulary, W lanes of a row, B biases, Q bad words of at most L tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphengine.kernels.core.pdl import wait_for_inputs
from graphengine.kernels.logits.automata import follow, load_header, mask_offset

# Bits of a slot's flags. Tensors that no bit asks for are not read.
USES_MASK = 1
USES_BAD_WORDS = 2
USES_BIAS = 4
USES_REPETITION = 8
USES_COUNTS = 16  # frequency and presence
USES_GRAMMAR = 32  # a mask that changes with every token, instead of a fixed one
USES_AUTOMATON = 64  # the masks of an automaton, instead of those that the host makes
ALL_STEPS = 127

_MASK = tl.constexpr(USES_MASK)
_BAD_WORDS = tl.constexpr(USES_BAD_WORDS)
_BIAS = tl.constexpr(USES_BIAS)
_REPETITION = tl.constexpr(USES_REPETITION)
_COUNTS = tl.constexpr(USES_COUNTS)
_GRAMMAR = tl.constexpr(USES_GRAMMAR)
_AUTOMATON = tl.constexpr(USES_AUTOMATON)

# An entry of `counts`: this bit for the prompt, the others count how often the id was emitted.
IN_PROMPT = -(1 << 31)
COUNT_MASK = (1 << 31) - 1

_COUNT_MASK = tl.constexpr(COUNT_MASK)


@triton.jit
def _add_biases(
    logits_ptr, ids_ptr, values_ptr, first, end, B: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Add a slot's biases to the ids first .. end - 1, in memory."""
    for start in range(0, B, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        ids = tl.load(ids_ptr + b, mask=b < B, other=-1)
        ours = (ids >= first) & (ids < end)
        value = tl.load(values_ptr + b, mask=ours, other=0.0)
        logits = tl.load(logits_ptr + ids, mask=ours, other=0.0)
        tl.store(logits_ptr + ids, logits + value, mask=ours)


@triton.jit
def _ban_words(
    logits_ptr,
    bad_words_ptr,
    history_ptr,
    lane_token_ptr,
    ancestor_ptr,
    position,
    j,
    depth,
    start,
    positions,
    first,
    end,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Set those of the ids first .. end - 1 that would complete a bad word to -inf, in memory.

    `lane_token_ptr` points to the token of the row's lane j. The last `depth` tokens before that
    one are in other lanes: the lanes before it, or its ancestors.
    """
    q = tl.arange(0, BLOCK_Q)
    bad_words_ptr += q * L
    banned = tl.load(bad_words_ptr + L - 1, mask=q < Q, other=-1)
    matched = (banned >= first) & (banned < end)
    if tl.max(matched.to(tl.int32), 0) != 0:
        for column in range(L - 1):
            back = L - 2 - column
            at = position - back
            is_fed = back <= depth
            reaches = (at >= start) & (at >= 0)
            known = reaches & (is_fed == 0) & (at < positions)
            token = tl.load(history_ptr + at, mask=known, other=-2)
            lanes_back = back
            if ancestor_ptr is not None:
                is_ancestor = is_fed & (back > 0)
                lanes_back = j - tl.load(ancestor_ptr + (depth - back), mask=is_ancestor, other=j)
            fed = tl.load(lane_token_ptr - lanes_back, mask=is_fed & reaches, other=-2)
            token = tl.where(is_fed, fed, token)
            wanted = tl.load(bad_words_ptr + column, mask=matched, other=-1)
            matched = matched & ((wanted < 0) | (wanted == token))
        logits = tl.load(logits_ptr + banned, mask=matched, other=0.0)
        matched = matched & (logits == logits)
        tl.store(logits_ptr + banned, tl.full([BLOCK_Q], float("-inf"), tl.float32), mask=matched)


@triton.jit
def _penalise(
    logits,
    ids,
    inside,
    flags,
    counts_ptr,
    draft_ptr,
    ancestor_ptr,
    j,
    depth,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    DRAFTS: tl.constexpr,
):
    """The tile's logits after repetition, frequency and presence.

    `draft_ptr` points to the row's first draft. Lane j comes after `depth` drafts, at most DRAFTS:
    those before it, or its ancestors.
    """
    counts = tl.load(counts_ptr + ids, mask=inside, other=0)
    count = counts & _COUNT_MASK
    for k in tl.static_range(DRAFTS):
        node = k
        if ancestor_ptr is not None:
            # Nodes are numbered from the root, which is no draft.
            node = tl.load(ancestor_ptr + k + 1, mask=k + 1 < depth, other=j) - 1
        draft = tl.load(draft_ptr + node, mask=k < depth, other=-1)
        count += (ids == draft).to(tl.int32)
    if (flags & _REPETITION) != 0:
        penalty = tl.load(repetition_ptr)
        penalised = tl.where(logits > 0, tl.div_rn(logits, penalty), logits * penalty)
        logits = tl.where((counts < 0) | (count > 0), penalised, logits)
    if (flags & _COUNTS) != 0:
        logits = logits - tl.load(frequency_ptr) * count.to(tl.float32)
        logits = logits - tl.load(presence_ptr) * (count > 0).to(tl.float32)
    return logits


@triton.jit
def _automaton_mask(
    automata,
    slot,
    uses,
    lane_token_ptr,
    depth_ptr,
    ancestor_ptr,
    lane,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Pointer to the mask of the slot's automaton after the lane's drafts, and whether it allows
    anything. All that is read here is older than the launch before."""
    region_ptr, vocabulary, classes, at_next, at_state = load_header(automata, slot, uses)
    state = tl.load(automata.state + slot, mask=uses, other=0, cache_modifier=".cg")
    j = lane % W
    depth = j
    if DEPTH > 0:
        depth = tl.load(depth_ptr + lane, mask=uses, other=0, cache_modifier=".cg")
    for k in tl.static_range(1, DEPTH + 1 if DEPTH > 0 else W):
        # The lane that fed the k-th draft: an ancestor's, or at last the lane itself.
        fed = uses & (k <= depth)
        node = k
        if DEPTH > 0:
            ancestor = ancestor_ptr + lane * DEPTH + k
            node = tl.load(ancestor, mask=fed & (k < depth), other=0, cache_modifier=".cg")
            node = tl.where(k < depth, node, j)
        draft_ptr = lane_token_ptr + lane - j + node
        draft = tl.load(draft_ptr, mask=fed, other=-1, cache_modifier=".cg")
        state = follow(region_ptr, vocabulary, classes, at_next, state, draft, fed)
    offset = mask_offset(region_ptr, at_state, state, uses)
    return region_ptr + offset, offset >= 0


@triton.jit
def process_kernel(
    logits_ptr,
    raw_ptr,
    lane_token_ptr,
    lane_slot_ptr,
    lane_position_ptr,
    tensors,
    automata,
    depth_ptr,
    ancestor_ptr,
    wanted_ptr,
    wants_raw_ptr,
    logits_stride,
    raw_stride,
    counts_stride,
    history_stride,
    columns,
    vocabulary,
    positions,
    masks,
    words,
    steps,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a lane and tile. Only the logits may be written by the launch before.

    Changes of few ids are done in memory, only by this program: biases before the tile is read,
    bad words after it is stored. This has the effect of the steps' order, since -inf stays -inf in
    between.
    """
    lane = tl.program_id(0)
    slot = tl.load(lane_slot_ptr + lane, cache_modifier=".cg").to(tl.int64)
    live = slot >= 0
    flags = tl.load(tensors.flags + slot, mask=live, other=0) & steps
    copies = False
    if raw_ptr is not None:
        wanted = tl.load(wanted_ptr + slot, mask=live, other=-1)
        copies = (wanted >= 0) & (tl.load(wants_raw_ptr + slot, mask=live, other=0) != 0)
    if automata is not None:
        automaton_mask_ptr, allows = _automaton_mask(
            automata,
            slot,
            live & ((flags & _AUTOMATON) != 0),
            lane_token_ptr,
            depth_ptr,
            ancestor_ptr,
            lane,
            W,
            DEPTH,
        )
    wait_for_inputs(PDL)

    first = tl.program_id(1) * BLOCK
    end = tl.minimum(first + BLOCK, vocabulary)
    changes = (flags != 0) | (first + BLOCK > vocabulary)
    if live & (changes | copies):
        j = lane % W
        depth = j
        ancestor_row_ptr = None
        if DEPTH > 0:
            depth = tl.load(depth_ptr + lane)
            ancestor_row_ptr = ancestor_ptr + lane * DEPTH
        logits_ptr += lane.to(tl.int64) * logits_stride
        ids = first + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        if raw_ptr is not None and copies:
            raw = tl.load(logits_ptr + ids, mask=inside)
            tl.store(raw_ptr + lane.to(tl.int64) * raw_stride + ids, raw, mask=inside)
            # Threads may still be copying values that others change.
            tl.debug_barrier()
        if (flags & _BIAS) != 0:
            at = slot * B
            _add_biases(
                logits_ptr, tensors.bias_ids + at, tensors.bias_values + at, first, end, B, BLOCK_B
            )
            # The threads that read the biased logits are not those that stored them.
            tl.debug_barrier()
        logits = tl.load(logits_ptr + ids, mask=inside, other=float("-inf"))
        if (flags & (_MASK | _GRAMMAR)) != 0:
            mask = slot * masks + tl.where(masks > 1, j, 0)
            word = tl.load(tensors.bitmask + mask * words + (ids >> 5), mask=inside, other=0)
            allowed = ((word >> (ids & 31)) & 1) != 0
            logits = tl.where(allowed | (logits != logits), logits, float("-inf"))
        if automata is not None and (flags & _AUTOMATON) != 0:
            word = tl.load(automaton_mask_ptr + (ids >> 5), mask=inside & allows, other=0)
            allowed = ((word >> (ids & 31)) & 1) != 0
            logits = tl.where(allowed | (logits != logits), logits, float("-inf"))
        if (flags & (_REPETITION | _COUNTS)) != 0:
            logits = _penalise(
                logits,
                ids,
                inside,
                flags,
                tensors.counts + slot * counts_stride,
                lane_token_ptr + lane - j + 1,
                ancestor_row_ptr,
                j,
                depth,
                tensors.repetition_penalty + slot,
                tensors.frequency_penalty + slot,
                tensors.presence_penalty + slot,
                DEPTH if DEPTH > 0 else W - 1,
            )
        stored = (ids < columns) & ((flags != 0) | (ids >= vocabulary))
        tl.store(logits_ptr + ids, tl.where(inside, logits, float("-inf")), mask=stored)
        if (flags & _BAD_WORDS) != 0:
            # Other threads stored the values that are overwritten here.
            tl.debug_barrier()
            _ban_words(
                logits_ptr,
                tensors.bad_words + slot * (Q * L),
                tensors.history + slot * history_stride,
                lane_token_ptr + lane,
                ancestor_row_ptr,
                tl.load(lane_position_ptr + lane),
                j,
                depth,
                tl.load(tensors.bad_words_start + slot),
                positions,
                first,
                end,
                Q,
                L,
                BLOCK_Q,
            )
