"""Automata of grammars in a pool on the device: which tokens a state allows, and where they lead.

    prefill   note_prompt (state 0) -> process_logits (its mask) -> sample -> note_tokens (follow)
    decode    process_logits (the mask after each lane's drafts) -> ... -> note_tokens (follow)
    drafts    after either, `draft/forced.py` writes the forced tokens from there on

An automaton's tables are one region of the pool, an array of int32. Numbers of states and classes
of tokens are packed in pairs, the lower 16 bits first.

    V, C, then where the next states, the states' masks and the forced tokens are: offsets from the
                                region's start
    the class of each token     [V], packed
    the next state              [states, C], packed; DEAD where the class is not allowed
    where each state's mask is  [states]: offsets from the region's start
    each state's forced token   [states]: -1 for none
    masks                       [masks, V / 32 rounded up]: bit id % 32 of word id // 32

Letters: S slots, V ids, C classes of tokens, P words of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from graphengine.kernels.core.lanes import check_lanes

DEAD = 0xFFFF
"""Stands for the state after a token that is not allowed."""
HEADER = 5
"""Words before the classes."""

_DEAD = tl.constexpr(DEAD)
_HEADER = tl.constexpr(HEADER)

Words = NDArray[np.int32]


class GrammarAutomata(NamedTuple):
    """The automata that slots follow."""

    tables: torch.Tensor
    """int32 [P]: the pool; the host writes regions that no slot uses."""
    start: torch.Tensor
    """int32 [S], host-owned: where the slot's region starts."""
    state: torch.Tensor
    """int32 [S], device-owned: the state after the tokens that the slot has said; DEAD after one
    that its automaton does not allow."""


def region_words(states: int, classes: int, masks: int, vocabulary: int) -> int:
    """Words of an automaton's region."""
    mask = -(-vocabulary // 32)
    return HEADER + _half(vocabulary) + _half(states * classes) + 2 * states + masks * mask


def region(
    class_of_token_V: Words,
    next_state_SC: Words,
    mask_of_state_S: Words,
    masks_MW: Words,
    forced_S: Words,
) -> Words:
    """An automaton's region of the pool.

    next_state_SC  below 0 where the class is not allowed
    forced_S       -1 for states without a forced token

    ValueError for more states or classes than have numbers.
    """
    (states, classes), vocabulary = next_state_SC.shape, len(class_of_token_V)
    if max(states, classes) > DEAD:
        raise ValueError(f"{states} states and {classes} classes: at most {DEAD} have numbers")
    at_next = HEADER + _half(vocabulary)
    at_state = at_next + _half(states * classes)
    at_forced = at_state + states
    at_masks = at_forced + states
    header = np.array([vocabulary, classes, at_next, at_state, at_forced], dtype=np.int32)
    where = (at_masks + mask_of_state_S * masks_MW.shape[1]).astype(np.int32)
    nexts = np.where(next_state_SC < 0, DEAD, next_state_SC)
    parts = [header, _packed(class_of_token_V), _packed(nexts.reshape(-1)), where]
    parts.append(forced_S.astype(np.int32))
    return np.concatenate([*parts, masks_MW.reshape(-1)])


def _half(count: int) -> int:
    return -(-count // 2)


def _packed(numbers: Words) -> Words:
    halves = np.zeros(2 * _half(len(numbers)), dtype="<u2")
    halves[: len(numbers)] = numbers
    return halves.view("<i4")


def check_automata(automata: GrammarAutomata, slots: int) -> None:
    """ValueError unless the tensors are dense int32 and fit the slots."""
    check_lanes(slots, start=automata.start, state=automata.state)
    tables = automata.tables
    if tables.dtype != torch.int32 or tables.dim() != 1 or not tables.is_contiguous():
        raise ValueError(
            f"tables of automata must be a dense int32 [P], not {tables.dtype} {list(tables.shape)}"
        )


def follow_reference(
    automata: GrammarAutomata, slot: int, state: int, tokens: Iterable[int]
) -> int:
    """Plain twin of `follow`: the slot's state after these tokens, from `state`."""
    start = int(automata.start[slot])
    words = automata.tables[start:]
    vocabulary, classes, at_next, *_ = words[:HEADER].tolist()
    for token in tokens:
        if state == DEAD or not 0 <= token < vocabulary:
            return DEAD
        each = _unpacked(words[HEADER:], token)
        state = _unpacked(words[at_next:], state * classes + each)
    return state


def _unpacked(words: torch.Tensor, index: int) -> int:
    return int(words[index // 2]) >> index % 2 * 16 & 0xFFFF


def mask_reference(automata: GrammarAutomata, slot: int, state: int) -> torch.Tensor:
    """int32 [V / 32 rounded up]: the mask of a slot's state; a view, unless nothing is allowed."""
    words = automata.tables[int(automata.start[slot]) :]
    vocabulary, _, _, at_state, _ = words[:HEADER].tolist()
    count = -(-vocabulary // 32)
    if state == DEAD:
        return words.new_zeros(count)
    first = int(words[at_state + state])
    return words[first : first + count]


def forced_reference(automata: GrammarAutomata, slot: int, state: int) -> int:
    """Plain twin of `forced_token`."""
    words = automata.tables[int(automata.start[slot]) :]
    return -1 if state == DEAD else int(words[int(words[HEADER - 1]) + state])


@triton.jit
def load_half(words_ptr, index, mask):
    """One of the numbers that are packed in pairs; 0 where `mask` is not set."""
    word = tl.load(words_ptr + (index >> 1), mask=mask, other=0, cache_modifier=".cg")
    return (word >> ((index & 1) * 16).to(tl.int32)) & 0xFFFF


@triton.jit
def load_header(automata, slot, uses):
    """(region, V, C, next states, masks of states) of a slot that uses an automaton."""
    start = tl.load(automata.start + slot, mask=uses, other=0).to(tl.int64)
    region_ptr = automata.tables + start
    vocabulary = tl.load(region_ptr, mask=uses, other=0, cache_modifier=".cg")
    classes = tl.load(region_ptr + 1, mask=uses, other=0, cache_modifier=".cg")
    at_next = tl.load(region_ptr + 2, mask=uses, other=0, cache_modifier=".cg")
    at_state = tl.load(region_ptr + 3, mask=uses, other=0, cache_modifier=".cg")
    return region_ptr, vocabulary, classes, at_next, at_state


@triton.jit
def follow(region_ptr, vocabulary, classes, at_next, state, token, uses):
    """The state after one token; the state itself where `uses` is not set."""
    known = uses & (token >= 0) & (token < vocabulary) & (state != _DEAD)
    each = load_half(region_ptr + _HEADER, token, known)
    index = state.to(tl.int64) * classes + each
    after = load_half(region_ptr + at_next, index, known)
    return tl.where(uses, tl.where(known, after, _DEAD), state)


@triton.jit
def forced_token(region_ptr, state, uses):
    """The state's forced token; -1 for none, and where `uses` is not set."""
    at_forced = tl.load(region_ptr + _HEADER - 1, mask=uses, other=0, cache_modifier=".cg")
    lives = uses & (state != _DEAD)
    return tl.load(region_ptr + at_forced + state, mask=lives, other=-1, cache_modifier=".cg")


@triton.jit
def mask_offset(region_ptr, at_state, state, uses):
    """Where the state's mask is in the region; -1 if nothing is allowed."""
    lives = uses & (state != _DEAD)
    return tl.load(region_ptr + at_state + state, mask=lives, other=-1, cache_modifier=".cg")
