"""Forced tokens are those with which the tokenizer spells text that alone can follow."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from graphengine.automata.byte_automaton import DEAD, ByteAutomaton, byte_automaton
from graphengine.automata.forced_text import with_forced_tokens
from graphengine.automata.regex_syntax import parse_regex
from graphengine.automata.token_automaton import TokenAutomaton, token_automaton
from graphengine.automata.vocabulary import make_vocabulary

LETTERS = [bytes([byte]) for byte in range(97, 106)]
TEXTS = [*LETTERS, b"ab", b"abc", b"cd", b"de", b"ef", b"hi", b""]
EOS = len(TEXTS) - 1


def tokenize(text: bytes) -> list[int]:
    """The longest token first, wherever one is."""
    ids = []
    while text:
        longest = max((each for each in TEXTS if each and text.startswith(each)), key=len)
        ids.append(TEXTS.index(longest))
        text = text[len(longest) :]
    return ids


def automata(pattern: str, *, narrow: bool = False) -> tuple[ByteAutomaton, TokenAutomaton]:
    over_bytes = byte_automaton(parse_regex(pattern, lambda name: ()), 5000)
    vocabulary = make_vocabulary(TEXTS, [EOS])
    found = token_automaton(over_bytes, vocabulary, max_steps=10**7, max_bytes=10**7)
    return over_bytes, with_forced_tokens(found, over_bytes, TEXTS, tokenize, narrow=narrow)


def spelled(pattern: str, text: str) -> list[bytes | None]:
    """The forced token after each beginning of a text."""
    over_bytes, found = automata(pattern)
    states = [over_bytes.follow(0, text[:end].encode()) for end in range(len(text) + 1)]
    assert DEAD not in states
    forced = [int(found.forced[state]) for state in states]
    return [None if token < 0 else TEXTS[token] for token in forced]


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        # A text alone: each state has the token that begins the rest.
        ("abcd", "abcd", [b"abc", b"b", b"cd", b"d", None]),
        # What may follow decides about the last token: "d" could become "de".
        ("abcd(e|f)", "abcd", [b"abc", b"b", b"cd", None, None]),
        ("abc(d|e)", "abc", [b"abc", b"b", None, None]),
        # It stays where the tokenizer spells it so whatever follows.
        ("ab(g|h)", "ab", [b"ab", b"b", None]),
        # A complete output may end, or go on.
        ("ab(cd)?", "abcd", [None, b"b", None, b"d", None]),
        # Text that is forced after a choice counts, too.
        ("a(bcd|g)", "a", [None, None]),
        ("f(hg|he)", "fh", [b"f", b"h", None]),
    ],
)
def test_forced_tokens(pattern: str, text: str, expected: list[bytes | None]) -> None:
    assert spelled(pattern, text) == expected


def test_long_text_is_forced_throughout() -> None:
    text = "abcdefghi" * 40
    over_bytes, found = automata(text)
    state, said = 0, b""
    while not found.ended[state]:
        token = int(found.forced[state])
        said += TEXTS[token]
        state = found.follow(state, token)
    assert said == text.encode()
    assert over_bytes.follow(0, said) == state


def test_a_state_with_one_token_forces_it_whatever_the_tokenizer_says() -> None:
    over_bytes = byte_automaton(parse_regex("(ab){3}", lambda name: ()), 100)
    vocabulary = make_vocabulary([b"ab", b"c", b""], [2])
    found = token_automaton(over_bytes, vocabulary, max_steps=10**6, max_bytes=10**6)
    found = with_forced_tokens(found, over_bytes, [b"ab", b"c", b""], lambda text: [1], narrow=True)
    # States inside a token are never reached, and have none.
    assert found.forced.tolist() == [0, -1, 0, -1, 0, -1, -1, -1]


@pytest.mark.parametrize("wrong", [[], [7], [4], [0, 1]])
def test_a_tokenizer_that_spells_another_text_forces_nothing(wrong: Sequence[int]) -> None:
    """Ids without text, other texts: the grammar decides."""
    over_bytes, found = automata("abcd")
    found = with_forced_tokens(
        found, over_bytes, TEXTS, lambda text: [EOS, *wrong][1:] or [], narrow=True
    )
    allowed = {TEXTS.index(b"a"), -1} if wrong[:1] == [0] else {-1}
    # The last letter is forced by its mask.
    last = over_bytes.follow(0, b"abc")
    others = np.delete(found.forced, last).tolist()
    assert found.forced[last] == TEXTS.index(b"d") and set(others) - {1} <= allowed


# The tokenizer's spelling.


def outputs(automaton: TokenAutomaton, most: int = 12) -> dict[bytes, int]:
    """All complete texts, and in how many ways each may be spelled."""
    found: dict[bytes, int] = {}
    left = [(0, b"", 0)]
    while left:
        state, said, count = left.pop()
        if automaton.ended[state]:
            found[said] = found.get(said, 0) + 1
            continue
        assert count < most, said
        for token in range(len(TEXTS)):
            after = automaton.follow(state, token)
            if after != DEAD:
                left.append((after, said + TEXTS[token], count + 1))
    return found


@pytest.mark.parametrize(
    "pattern", ["abcdefghi", "abc(d|e)fghi", "ab(cd)?ef", "(ab|c)(de|g)hi", "[a-c]{2}def"]
)
def test_narrow_masks_change_the_spelling_alone(pattern: str) -> None:
    _, free = automata(pattern)
    _, narrow = automata(pattern, narrow=True)
    ways, fewer = outputs(free), outputs(narrow)
    assert ways.keys() == fewer.keys() and all(
        re.fullmatch(pattern, text.decode()) for text in ways
    )
    assert all(fewer[text] <= ways[text] for text in ways) and fewer != ways
    for state in range(narrow.states):
        mask = np.unpackbits(narrow.mask(state).view(np.uint8), bitorder="little")
        tokens = np.flatnonzero(mask).tolist()
        assert tokens == [
            token for token in range(len(TEXTS)) if narrow.follow(state, token) != DEAD
        ]
        if len(tokens) == 1 and tokens[0] != EOS:
            assert narrow.forced[state] == tokens[0]


def test_text_alone_is_spelled_in_one_way() -> None:
    _, narrow = automata("abcdefghi", narrow=True)
    assert outputs(narrow) == {b"abcdefghi": 1}


def test_tokens_that_go_on_past_forced_text_stay() -> None:
    """After "abc" the text goes on with "d", and "de" is a token that goes past it."""
    over_bytes, narrow = automata("abcd(e|f)hi", narrow=True)
    state = over_bytes.follow(0, b"abc")
    allowed = [text for token, text in enumerate(TEXTS) if narrow.follow(state, token) != DEAD]
    assert allowed == [b"d", b"de"] and narrow.forced[state] == -1
    first = [text for token, text in enumerate(TEXTS) if narrow.follow(0, token) != DEAD]
    assert first == [b"abc"]
