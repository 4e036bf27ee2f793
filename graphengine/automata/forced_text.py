"""Forced text: where only one text can follow in a grammar, and how the tokenizer spells it.

A state's forced text goes on until the output is complete, or more than one byte can follow. Its
first token is the one with which the tokenizer begins that text, whatever follows it: the last
token of a text is often another one once more text comes. So the text is also tokenized with a few
texts that may follow, and a state has a token only if all of them begin with it.

Letters: S states, C classes of tokens, B classes of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graphengine.automata.byte_automaton import DEAD, ByteAutomaton
from graphengine.automata.token_automaton import Ints, TokenAutomaton, with_steps

Tokenize = Callable[[bytes], Sequence[int]]
"""The tokens of a text, without special ones."""

NONE = -1
"""Stands for a state without a forced token."""

_MOST_TEXT = 64
"""Most bytes of forced text that are followed from a state."""
_SURE = 32
"""Bytes of a longer text up to which its tokens do not depend on what is cut off."""
_PROBES = b"a0 A\"'/-.\\,:{[}]\n_"
"""Bytes that are tried after forced text, besides the first one of each class."""
_MOST_PROBES = 12
_MOST_AFTER = 8
"""Bytes of text that are forced after a tried one, and tokenized with it."""


def with_forced_tokens(
    automaton: TokenAutomaton,
    over_bytes: ByteAutomaton,
    texts: Sequence[bytes],
    tokenize: Tokenize,
    *,
    narrow: bool,
) -> TokenAutomaton:
    """The automaton with the forced token of each state.

    automaton   made of `over_bytes`
    texts       of the vocabulary's tokens; empty for tokens without a text
    narrow      whether a state in which every allowed token spells a part of the forced text allows
                only its first token. If some token goes on past the text, all stay
    """
    members = _Members(automaton)
    forced = _only_tokens(automaton, members)
    only = np.zeros_like(forced, dtype=np.bool_)
    text_of = _ForcedText(over_bytes)
    for state in np.flatnonzero(text_of.next_byte != NONE).tolist():
        text, end = text_of.after(state)
        token = forced[state]
        if token == NONE:
            token = _first_token(text, text_of.following(end, len(text)), texts, tokenize)
            if token == NONE or automaton.follow(state, token) == DEAD:
                continue
            forced[state] = token
        only[state] = narrow and _all_spell(members.allowed(state, len(text)), texts, text)
    found = automaton._replace(forced=forced)
    return _narrowed(found, members, only) if only.any() else found


class _Members:
    """The tokens of each class."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self._next_state = automaton.next_state
        order = np.argsort(automaton.class_of_token, kind="stable")
        self.counts = np.bincount(automaton.class_of_token, minlength=automaton.next_state.shape[1])
        self._of_class = np.split(order, np.cumsum(self.counts)[:-1])

    def of(self, each: int) -> list[int]:
        tokens: list[int] = self._of_class[each].tolist()
        return tokens

    def allowed(self, state: int, most: int) -> list[int] | None:
        """The tokens that a state allows; None if there are more than `most`."""
        classes = np.flatnonzero(self._next_state[state] != DEAD)
        if self.counts[classes].sum() > most:
            return None
        return [token for each in classes.tolist() for token in self.of(each)]


def _only_tokens(automaton: TokenAutomaton, members: _Members) -> Ints:
    """[S]: the token of each state that allows one alone, else NONE."""
    found = np.full(automaton.states, NONE, dtype=np.int32)
    for state, each in _only_classes(automaton.next_state, members.counts):
        (found[state],) = members.of(each)
    return found


def _only_classes(next_state: Ints, counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(state, class) of each state that allows one class alone, which has one member."""
    lives = next_state != DEAD
    only = lives.argmax(axis=1)
    states = np.flatnonzero((lives.sum(axis=1) == 1) & (counts[only] == 1))
    return list(zip(states.tolist(), only[states].tolist(), strict=True))


class _ForcedText:
    """The text that is forced after each state.

    next_byte  [S of bytes]: the byte that alone can follow, or NONE
    """

    def __init__(self, automaton: ByteAutomaton) -> None:
        self._automaton = automaton
        states, classes = automaton.next_state.shape
        sizes = np.bincount(automaton.class_of_byte, minlength=classes)
        # The first byte of each class.
        self._byte = np.zeros(classes, dtype=np.int64)
        self._byte[automaton.class_of_byte[::-1]] = np.arange(256)[::-1]
        self.next_byte = np.full(states, NONE, dtype=np.int64)
        for state, each in _only_classes(automaton.next_state, sizes):
            if not automaton.accepts[state]:
                self.next_byte[state] = self._byte[each]

    def after(self, state: int, most: int = _MOST_TEXT) -> tuple[bytes, int]:
        """The forced text, up to so many bytes, and the state after it."""
        text = bytearray()
        while len(text) < most and (byte := int(self.next_byte[state])) != NONE:
            text.append(byte)
            state = self._automaton.follow(state, bytes([byte]))
        return bytes(text), state

    def following(self, end: int, length: int) -> list[bytes] | None:
        """Texts that may follow a forced text that ends in this state; None if it was cut off."""
        if self.next_byte[end] != NONE:
            return None
        automaton = self._automaton
        lives = automaton.next_state[end] != DEAD
        firsts = self._byte[lives].tolist()
        probes = [byte for byte in _PROBES if lives[automaton.class_of_byte[byte]]]
        found = [b""] if automaton.accepts[end] else []
        for byte in list(dict.fromkeys([*probes, *firsts]))[:_MOST_PROBES]:
            start = bytes([byte])
            more, _ = self.after(automaton.follow(end, start), _MOST_AFTER)
            found.append(start + more)
        return found


def _first_token(
    text: bytes, following: list[bytes] | None, texts: Sequence[bytes], tokenize: Tokenize
) -> int:
    """The token with which the tokenizer begins the text, whatever follows; NONE if that token
    depends on what follows, or goes on past the text.
    """
    wholes = [text] if following is None else [text + more for more in following]
    most = _SURE if following is None else len(text)
    token = NONE
    for whole in wholes:
        first = next(iter(tokenize(whole)), NONE)
        if first == NONE or token not in (NONE, first):
            return NONE
        token = first
    spelled = texts[token]
    return token if 0 < len(spelled) <= most and text.startswith(spelled) else NONE


def _all_spell(tokens: list[int] | None, texts: Sequence[bytes], text: bytes) -> bool:
    """Whether each token spells a part of the text, from its start."""
    return tokens is not None and all(text.startswith(texts[token]) for token in tokens)


def _narrowed(
    automaton: TokenAutomaton, members: _Members, only: NDArray[np.bool_]
) -> TokenAutomaton:
    """The automaton, with these states narrowed to their forced token.

    Tokens that share the forced token's class stay allowed, too, as a class has one next state.
    """
    steps = automaton.next_state.copy()
    for state in np.flatnonzero(only).tolist():
        each = automaton.class_of_token[automaton.forced[state]]
        if members.counts[each] == 1:
            after = steps[state, each]
            steps[state] = DEAD
            steps[state, each] = after
    return with_steps(automaton, steps)
