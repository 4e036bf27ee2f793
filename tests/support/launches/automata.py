"""Automata in a pool, for tests of the kernels that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from graphengine.kernels.logits.automata import DEAD, GrammarAutomata, region, region_words
from graphengine.kernels.logits.logits_triton import USES_AUTOMATON, USES_BIAS

HUGE = 2**31 - 1
SLOTS = 5


class Tables(NamedTuple):
    """An automaton, as plain arrays."""

    class_of_token: np.ndarray
    next_state: np.ndarray
    mask_of_state: np.ndarray
    masks: np.ndarray
    forced: np.ndarray

    @classmethod
    def draw(cls, seed: int, vocabulary: int, states: int, classes: int) -> Tables:
        rng = np.random.default_rng(seed)
        next_state = rng.integers(-1, states, (states, classes)).astype(np.int32)
        # Masks are independent of the steps: a kernel must not tell one from the other.
        masks = rng.integers(-(2**31), 2**31, (3, -(-vocabulary // 32))).astype(np.int32)
        return cls(
            rng.integers(0, classes, vocabulary).astype(np.int32),
            next_state,
            rng.integers(0, 3, states).astype(np.int32),
            masks,
            # Some ids are no tokens: forced tokens are independent of the steps, too.
            rng.integers(-1, vocabulary + 1, states).astype(np.int32),
        )

    def follow(self, state: int, tokens: Sequence[int]) -> int:
        for token in tokens:
            if state == DEAD or not 0 <= token < len(self.class_of_token):
                return DEAD
            after = int(self.next_state[state, self.class_of_token[token]])
            state = DEAD if after < 0 else after
        return state

    def forced_from(self, state: int, most: int) -> list[int]:
        """The forced tokens from a state on."""
        found: list[int] = []
        while state != DEAD and len(found) < most and (token := int(self.forced[state])) >= 0:
            found.append(token)
            state = self.follow(state, [token])
        return found

    def allows(self, state: int) -> np.ndarray:
        """[V]"""
        vocabulary = len(self.class_of_token)
        if state == DEAD:
            return np.zeros(vocabulary, dtype=bool)
        bits = np.unpackbits(
            self.masks[self.mask_of_state[state]].view(np.uint8), bitorder="little"
        )
        return bits[:vocabulary].astype(bool)


class Pool(NamedTuple):
    """A pool with an automaton for each slot that has one, garbage elsewhere."""

    automata: GrammarAutomata
    flags: torch.Tensor
    held: list[Tables | None]

    @classmethod
    def draw(cls, seed: int, vocabulary: int, device: str) -> Pool:
        rng = np.random.default_rng(seed)
        held: list[Tables | None] = []
        words: list[np.ndarray] = []
        starts, states = [], []
        for slot in range(SLOTS):
            words.append(np.full(rng.integers(0, 9), HUGE, dtype=np.int32))
            tables = None
            starts.append(HUGE)
            states.append(HUGE)
            if slot != 2:
                count, classes = int(rng.integers(1, 40)), int(rng.integers(1, 9))
                tables = Tables.draw(seed + slot, vocabulary, count, classes)
                starts[slot] = sum(map(len, words))
                states[slot] = DEAD if slot == 3 else int(rng.integers(0, count))
                words.append(region(*tables))
                assert len(words[-1]) == region_words(count, classes, 3, vocabulary)
            held.append(tables)
        pool = np.concatenate([*words, np.full(5, HUGE, np.int32)])
        flags = [USES_BIAS if tables is None else USES_AUTOMATON for tables in held]
        parts = (pool.tolist(), starts, states)
        automata = GrammarAutomata(*(ints(part, device) for part in parts))
        return cls(automata, ints(flags, device), held)


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
