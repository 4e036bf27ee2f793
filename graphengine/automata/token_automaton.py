"""The tables of a grammar for a vocabulary: its automaton over token ids.

Tokens that lead to the same next state from every state form one class, and states that allow the
same tokens share one mask, so that both tables stay small.

Letters: V ids, S states, C classes of tokens, M masks, D states of the automaton over bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphengine.automata.byte_automaton import DEAD, ByteAutomaton
from graphengine.automata.patterns import Unsupported
from graphengine.automata.vocabulary import Vocabulary

Ints = NDArray[np.int32]

MOST_STATES = 65_000
"""States, and classes, are numbered in 16 bits; one number stands for none."""

_STATES_AT_ONCE = 64


class TokenAutomaton(NamedTuple):
    """Which tokens each state allows, and where they lead. A request's output starts in state 0."""

    class_of_token: Ints
    """[V]; class 0 has the tokens that no state allows."""
    next_state: Ints
    """[S, C]: DEAD where the class is not allowed."""
    mask_of_state: Ints
    """[S]"""
    masks: Ints
    """[M, V / 32 rounded up]: bit id % 32 of word id // 32 is 1 if the id is allowed."""
    ended: NDArray[np.bool_]
    """[S]: whether the output has ended there. Nothing is allowed in these states."""
    forced: Ints
    """[S]: the first token of the text, where only one text can follow; -1 for none. It is a draft
    (`forced_text.py`), and need not be the only token that is allowed."""

    @property
    def states(self) -> int:
        """S"""
        return len(self.next_state)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)

    def follow(self, state: int, token: int) -> int:
        """The state after a token; DEAD if it is not allowed."""
        return int(self.next_state[state, self.class_of_token[token]])

    def mask(self, state: int) -> Ints:
        """The mask of a state; a view."""
        mask: Ints = self.masks[self.mask_of_state[state]]
        return mask


def token_automaton(
    automaton: ByteAutomaton, vocabulary: Vocabulary, *, max_steps: int, max_bytes: int
) -> TokenAutomaton:
    """The tables of an automaton over bytes for a vocabulary.

    max_steps  most nodes of the vocabulary's tree that may be visited, from all states together
    max_bytes  most bytes of the tables

    Unsupported beyond one of these limits.
    """
    origins, nodes, targets = _reached(automaton, vocabulary, max_steps)
    class_of_node, next_state = _classes(
        len(automaton.next_state), vocabulary.nodes, origins, nodes, targets
    )
    states, classes = next_state.shape
    has_text = vocabulary.node_of_token >= 0
    class_of_token = np.where(
        has_text, class_of_node[vocabulary.node_of_token.clip(min=0)], 0
    ).astype(np.int32)
    # One more class for the end-of-sequence tokens, and one more state after them.
    class_of_token[list(vocabulary.eos_ids)] = classes
    whole = np.full((states + 1, classes + 1), DEAD, dtype=np.int32)
    whole[:states, :classes] = next_state
    ended = np.append((next_state == DEAD).all(axis=1), True)
    goes_on = automaton.accepts & ~ended[:states]
    whole[:states, classes] = np.where(goes_on, states, DEAD)
    if max(whole.shape) > MOST_STATES:
        raise Unsupported(f"it has {whole.shape[0]} states and {whole.shape[1]} classes of tokens")
    allowed, mask_of_state = _masks(whole)
    words = -(-vocabulary.size // 32)
    size = 4 * (vocabulary.size + whole.size + 2 * len(whole) + len(allowed) * words)
    if size > max_bytes:
        raise Unsupported(f"its tables take {size} bytes, of at most {max_bytes}")
    masks = _packed(allowed, class_of_token, words)
    forced = np.full(len(whole), -1, dtype=np.int32)
    return TokenAutomaton(class_of_token, whole, mask_of_state, masks, ended, forced)


def with_steps(automaton: TokenAutomaton, next_state: Ints) -> TokenAutomaton:
    """The automaton with other next states, and with the masks that they imply."""
    allowed, mask_of_state = _masks(next_state)
    masks = _packed(allowed, automaton.class_of_token, automaton.masks.shape[1])
    return automaton._replace(next_state=next_state, mask_of_state=mask_of_state, masks=masks)


def _masks(next_state: Ints) -> tuple[NDArray[np.bool_], Ints]:
    """The sets of classes that states allow, [M, C], and each state's, [S]."""
    allowed, mask_of_state = np.unique(next_state != DEAD, axis=0, return_inverse=True)
    return allowed, mask_of_state.reshape(-1).astype(np.int32)


def _reached(
    automaton: ByteAutomaton, vocabulary: Vocabulary, max_steps: int
) -> tuple[Ints, Ints, Ints]:
    """(state, node, state after the node's text), for all nodes that a state allows."""
    has_token = np.zeros(vocabulary.nodes, dtype=np.bool_)
    has_token[vocabulary.node_of_token[vocabulary.node_of_token >= 0]] = True
    class_of_node = automaton.class_of_byte[vocabulary.byte]
    found: list[tuple[Ints, Ints, Ints]] = []
    steps, states = 0, len(automaton.next_state)
    for start in range(0, states, _STATES_AT_ONCE):
        origin = np.arange(start, min(start + _STATES_AT_ONCE, states), dtype=np.int32)
        node, here = np.zeros_like(origin), origin
        while origin.size:
            counts = vocabulary.children[node]
            steps += int(counts.sum())
            if steps > max_steps:
                raise Unsupported(f"its tables take more than {max_steps} steps to make")
            ends = np.cumsum(counts)
            within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - counts, counts)
            child = np.repeat(vocabulary.first_child[node], counts) + within.astype(np.int32)
            after = automaton.next_state[np.repeat(here, counts), class_of_node[child]]
            lives = after != DEAD
            origin, node, here = np.repeat(origin, counts)[lives], child[lives], after[lives]
            told = has_token[node]
            found.append((origin[told], node[told], here[told]))
    origins, nodes, targets = (np.concatenate(column) for column in zip(*found, strict=True))
    return origins, nodes, targets


def _classes(
    states: int, nodes: int, origins: Ints, reached: Ints, targets: Ints
) -> tuple[Ints, Ints]:
    """(class of each node, next state of each class): nodes of a class lead to the same states."""
    salts = np.random.default_rng(0).integers(1, 2**63, size=2 * states, dtype=np.uint64)
    # A node's digest sums up all its steps; salts make equal digests of different nodes unlikely.
    mixed = salts[origins] * (salts[states + targets] | np.uint64(1))
    digests = np.zeros(nodes, dtype=np.uint64)
    np.add.at(digests, reached, mixed ^ (mixed >> np.uint64(29)))
    live = np.unique(reached)
    _, found = np.unique(digests[live], return_inverse=True)
    found = found.reshape(-1)
    class_of_node = np.zeros(nodes, dtype=np.int32)
    class_of_node[live] = 1 + found
    members = np.bincount(class_of_node[live])
    next_state = np.full((states, len(members)), DEAD, dtype=np.int32)
    next_state[origins, class_of_node[reached]] = targets
    # Different nodes with equal digests would be noticed here.
    same = bool((next_state[origins, class_of_node[reached]] == targets).all())
    total = int(((next_state != DEAD).sum(axis=0) * members).sum())
    assert same and total == len(reached), f"{total=} of {len(reached)}, {same=}"
    return class_of_node, next_state


def _packed(allowed: NDArray[np.bool_], class_of_token: Ints, words: int) -> Ints:
    """The masks [M, words] of these sets of classes [M, C]."""
    masks = np.zeros((len(allowed), words * 4), dtype=np.uint8)
    for row, classes in zip(masks, allowed, strict=True):
        bits = np.packbits(classes[class_of_token], bitorder="little")
        row[: len(bits)] = bits
    return masks.view(np.int32)
