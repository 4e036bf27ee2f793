"""Automata allow what llguidance allows, bit for bit, and are refused within their limits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from extent import extent
from graphengine import StructuredOutputsParams
from graphengine.automata.byte_automaton import DEAD, byte_automaton
from graphengine.automata.compiling import (
    AutomatonLimits,
    Compiler,
    check_automaton,
    named_class,
    without_forcing,
)
from graphengine.automata.number_patterns import Bounds, any_number, whole_number
from graphengine.automata.patterns import Pattern, Ranges, Unsupported, chars, utf8_sequences
from graphengine.automata.regex_syntax import parse_regex
from graphengine.automata.token_automaton import TokenAutomaton, token_automaton
from graphengine.automata.vocabulary import make_vocabulary
from graphengine.demo import checkpoint_path
from graphengine.requests.grammars import Grammars
from graphengine.sampling_params import SamplingParams
from graphengine.text.tokenizer import Tokenizer
from random_schemas import random_schema

llguidance = pytest.importorskip("llguidance")

VOCABULARY, EOS = 4096, 0
LIMITS = AutomatonLimits(states=4096, nbytes=2**24)
TOKENIZER = Tokenizer.from_directory(checkpoint_path())


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """What compiles requests' grammars, with its tokenizer made."""
    made = Grammars(width=1, vocab_size=VOCABULARY, eos_ids=[EOS])
    asked = StructuredOutputsParams(regex="a")
    made.guide(SamplingParams(structured_outputs=asked), TOKENIZER, None)
    return made


@pytest.fixture(scope="module")
def compiler(grammars: Grammars) -> Compiler:
    return new_compiler(grammars)


def new_compiler(grammars: Grammars, limits: AutomatonLimits = LIMITS) -> Compiler:
    tokenizer = grammars.tokenizer
    assert tokenizer is not None
    return Compiler(tokenizer, size=VOCABULARY, eos_ids=[EOS], limits=limits)


def compiled(compiler: Compiler, grammars: Grammars, **asked: Any) -> TokenAutomaton | Unsupported:
    params = StructuredOutputsParams(**asked)
    return compiler.compile(params, grammars.source(params))


def allowed_by(matcher: Any, words: int) -> NDArray[np.int32]:
    """llguidance's mask; zero where the output has ended."""
    mask = np.zeros(words, dtype=np.int32)
    if not matcher.is_stopped():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_stopped():
        mask[:] = 0
    return mask


def walk(automaton: TokenAutomaton, matcher: Any, dice: random.Random, length: int) -> int:
    """Follow random tokens in both, and compare each mask; returns how many were compared."""
    state, compared = 0, 0
    for _ in range(length):
        mask = automaton.mask(state)
        assert np.array_equal(mask, allowed_by(matcher, mask.size)), f"{state=}"
        compared += 1
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not tokens.size:
            break
        # Every class of tokens comes up, not only the one with the most.
        classes = automaton.class_of_token[tokens]
        token = int(dice.choice(tokens[classes == dice.choice(np.unique(classes).tolist())]))
        state = automaton.follow(state, token)
        if token == EOS:
            assert automaton.ended[state]
            break
        assert matcher.consume_token(token)
    return compared


def random_regex(dice: random.Random, depth: int = 3) -> str:
    """A regular expression over a few characters, without dead ends."""
    if depth == 0 or dice.random() < 0.2:
        return dice.choice(
            ["a", "b", "ab", "[a-c]", "[^a]", ".", "é", r"\d", r"\s", r"\w", "re", ","]
        )
    inner = [random_regex(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    match dice.randrange(4):
        case 0:
            return "(" + "|".join(inner) + ")"
        case 1:
            return f"({inner[0]}){dice.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}', '{0,7}'])}"
    return "".join(inner)


def test_masks_of_regular_expressions_are_llguidances(
    compiler: Compiler, grammars: Grammars
) -> None:
    dice, count, found, compared = random.Random(3), extent(20, 500), 0, 0
    for _ in range(count):
        asked = StructuredOutputsParams(regex=random_regex(dice))
        automaton = compiler.compile(asked, source := grammars.source(asked))
        if isinstance(automaton, Unsupported):
            assert "more than 4096 states" in str(automaton) or "steps" in str(automaton)
            continue
        found += 1
        for _ in range(extent(3, 20)):
            matcher = llguidance.LLMatcher(grammars.tokenizer, without_forcing(source))
            compared += walk(automaton, matcher, dice, 30)
    assert found > 0.9 * count and compared > 10 * count


@pytest.mark.parametrize("compact", [False, True])
def test_masks_of_schemas_are_llguidances(
    compiler: Compiler, grammars: Grammars, compact: bool
) -> None:
    dice, count, found, compared = random.Random(4), extent(25, 300), 0, 0
    for _ in range(count):
        schema = random_schema(dice)
        asked = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
        automaton = compiler.compile(asked, source := grammars.source(asked))
        if isinstance(automaton, Unsupported):
            # llguidance reads some choices between similar values in its own way.
            assert "llguidance" in str(automaton), (schema, automaton)
            continue
        found += 1
        for _ in range(extent(3, 20)):
            matcher = llguidance.LLMatcher(grammars.tokenizer, without_forcing(source))
            compared += walk(automaton, matcher, dice, 60)
    assert found == count and compared > 10 * count


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "a.c"},
    {"type": "string", "pattern": "^[a-f]{1,4}$"},
    {"type": "number"},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 12.25},
    {"type": "number", "exclusiveMinimum": 3},
    {"type": "number", "maximum": 0},
    {"type": "integer", "exclusiveMinimum": -7},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "enum": ["x", "y", 3]},
    {"enum": ["a\nb", "a/b", 'q"', "\x7f", "é\\", 1, None, True, 1.5, {"a": [1]}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"type": "array", "items": {"type": "null"}, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": 2}], "items": {"const": "x"}},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": 2}], "items": False},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"allOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"oneOf": [{"type": "boolean"}]}}},
    {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("a", "b", "é\n", "d")},
        "required": ["b", "d"],
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_every_keyword_has_an_automaton(
    compiler: Compiler, grammars: Grammars, schema: dict[str, Any]
) -> None:
    for compact in (False, True):
        asked = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
        automaton = compiler.compile(asked, source := grammars.source(asked))
        assert isinstance(automaton, TokenAutomaton), automaton
        dice = random.Random(5)
        for _ in range(5):
            matcher = llguidance.LLMatcher(grammars.tokenizer, without_forcing(source))
            walk(automaton, matcher, dice, 40)


def test_choices_are_any_texts(compiler: Compiler, grammars: Grammars) -> None:
    for choices in (
        ["yes", "no", "not at all"],
        ["a.b", "(", "a|b", "é日😀", "\\"],
        ["x", "x\x01"],
    ):
        automaton = compiled(compiler, grammars, choice=choices)
        assert isinstance(automaton, TokenAutomaton)
        for choice in choices:
            state = 0
            for token in TOKENIZER.encode(choice, add_special_tokens=False):
                state = automaton.follow(state, token)
            assert automaton.ended[state] or automaton.follow(state, EOS) != DEAD


# What has no automaton, and why.

NESTED: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}}
OPEN = {"type": "object", "properties": {"a": {"type": "null"}}}


def doubling(levels: int) -> dict[str, Any]:
    """A schema whose references lead to 2**levels values on different ways."""
    pairs = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)
    }
    return {"$defs": pairs | {f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"json": doubling(25)}, "more than 4096 schemas, counted wherever one is referred to"),
    ({"regex": ""}, "allows no text but the empty one"),
    ({"grammar": 'start: "a"'}, "it is context-free"),
    ({"json_object": True}, "an object's other properties are open"),
    ({"json": OPEN}, "an object's other properties are open"),
    ({"json": NESTED | {"additionalProperties": False}}, "# describes values of any depth"),
    ({"json": {}}, "a schema of nothing has no type"),
    ({"json": {"type": "array"}}, "an array's items are open"),
    ({"json": {"type": "array", "items": True}}, "a schema True allows values of any depth"),
    ({"json": {"type": "integer", "multipleOf": 3}}, "has multipleOf"),
    ({"json": {"type": "string", "format": "date"}}, "has format"),
    ({"json": {"anyOf": [{"const": 1}], "type": "integer"}}, "has anyOf, type together"),
    ({"json": {"const": "ab", "maxLength": 3}}, "has const, maxLength together"),
    ({"json": {"allOf": [{"type": "null"}] * 2}}, "allOf of several"),
    ({"json": {"type": "string", "pattern": "^a|b$"}}, "anchors one of several"),
    (
        {"json": {"type": "string", "pattern": "a", "maxLength": 3}},
        "a pattern and a bounded length",
    ),
    ({"json": {"type": "string", "maxLength": 6000}}, "bounded by more than 5000"),
    ({"json": {"type": "object", "required": ["a"]}}, "requires 'a', whose values are open"),
    (
        {"json": {"const": 1}, "whitespace_pattern": " "},
        "it has a whitespace_pattern",
    ),
    ({"regex": "a+?"}, "a lazy quantifier"),
    ({"regex": "^a"}, "has '\\^' at 0"),
    ({"regex": "(?i:a)"}, r"has \(\?i at 2"),
    ({"regex": r"\p{L}"}, r"has \\p"),
    ({"regex": "[[:alpha:]]"}, "has a class inside a class|has"),
    ({"regex": "[a-c&&b]"}, "has '&&' in a class"),
    ({"regex": "a{6000}"}, "repeats more than 5000 times"),
)


@pytest.mark.parametrize(("asked", "reason"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_has_no_automaton_says_why(
    compiler: Compiler, grammars: Grammars, asked: dict[str, Any], reason: str
) -> None:
    found = compiled(compiler, grammars, **asked)
    assert isinstance(found, Unsupported) and re.search(reason, str(found)), found


def test_invalid_expressions_are_unsupported() -> None:
    for text, reason in (
        ("(a", "a group without an end"),
        ("a)", "has '\\)' at 1"),
        ("[a", "ends too early"),
        ("a{x}", r"repeats \{x\}"),
        ("a{3,2}", r"repeats \{3,2\}"),
        (r"\x{110000}", "the character 110000"),
        (r"\xg0", "the digits 'g0'"),
        ("[b-a]", "an invalid range"),
        ("(?=a)", r"has \(\?= at 2"),
        ("(?<=a)", "looks around"),
        ("(" * 101 + ")" * 101, "nested deeper than 100"),
    ):
        with pytest.raises(Unsupported, match=reason):
            parse_regex(text, lambda name: ())


BOMBS = (
    ("(a|b)*a(a|b){14}", "more than 500 states"),
    ("((a{50}){50}){50}", "needs more than 12000 parts"),
    ("[a-z]{0,400}", "more than 100000 steps"),
    ("(yes|no){20}", "tables take [0-9]+ bytes, of at most 20000"),
    ("[^\\x{0}-\\x{10FFFF}]", "a part of it matches no text"),
)


@pytest.mark.parametrize(("pattern", "reason"), BOMBS)
def test_bombs_are_refused_within_their_limits(
    grammars: Grammars, pattern: str, reason: str
) -> None:
    limits = AutomatonLimits(states=500, nbytes=20_000, steps=100_000)
    compiler = new_compiler(grammars, limits)
    found = compiler.compile(StructuredOutputsParams(regex=pattern), _regex_source("a"))
    assert isinstance(found, Unsupported) and re.search(reason, str(found)), found


def _regex_source(pattern: str) -> str:
    source: str = llguidance.LLMatcher.grammar_from_regex(pattern)
    return source


@pytest.mark.parametrize("pattern", ["((a|b){0,20}c?){0,20}", "(a?){300}"])
def test_automata_that_take_long_to_make_are_refused(
    monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Sets of states grow much faster than the pattern. The limit is lower here, to be quick."""
    monkeypatch.setattr("graphengine.automata.byte_automaton._MOST_VISITS", 20_000)
    with pytest.raises(Unsupported, match="takes more than 20000 visits to its parts"):
        byte_automaton(parse_regex(pattern, lambda name: ()), 4096)


def test_remembered_automata_have_a_bound(grammars: Grammars) -> None:
    """At most twice the pool's size, however many there are."""
    compiler = new_compiler(grammars, AutomatonLimits(states=500, nbytes=20_000))
    sizes = []
    for count in range(3, 15):
        found = compiled(compiler, grammars, regex=f"[a-f]{{{count}}}")
        assert isinstance(found, TokenAutomaton)
        sizes.append(found.nbytes)
    assert sum(sizes) > 40_000
    held = [each for each in compiler._known.values() if isinstance(each, TokenAutomaton)]
    assert len(held) > 1 and sum(each.nbytes for each in held) <= 40_000


def test_an_automaton_that_differs_is_refused(compiler: Compiler, grammars: Grammars) -> None:
    asked = StructuredOutputsParams(regex="[a-c]{2,9}x")
    automaton = compiler.compile(asked, source := grammars.source(asked))
    assert isinstance(automaton, TokenAutomaton)
    free = without_forcing(source)
    check_automaton(automaton, grammars.tokenizer, free)
    masks = automaton.masks.copy()
    masks[automaton.mask_of_state[3], 7] ^= 4
    with pytest.raises(Unsupported, match=r"differs from its automaton's by 1 tokens in state \d+"):
        check_automaton(automaton._replace(masks=masks), grammars.tokenizer, free)
    with pytest.raises(Unsupported, match="llguidance"):
        check_automaton(
            automaton, grammars.tokenizer, without_forcing(_regex_source("[a-c]{2,8}x"))
        )
    # A step to a wrong state whose mask is another one.
    next_state = automaton.next_state.copy()
    state = automaton.follow(0, TOKENIZER.encode("a", add_special_tokens=False)[0])
    next_state[next_state == state] = 0
    with pytest.raises(Unsupported, match="llguidance"):
        check_automaton(automaton._replace(next_state=next_state), grammars.tokenizer, free)


def test_outcomes_are_remembered(grammars: Grammars) -> None:
    compiler = new_compiler(grammars)
    first = compiled(compiler, grammars, regex="[a-z]{1,40}")
    assert compiled(compiler, grammars, regex="[a-z]{1,40}") is first
    assert compiled(compiler, grammars, regex="a+?") is compiled(compiler, grammars, regex="a+?")
    for number in range(64):
        compiled(compiler, grammars, choice=[f"c{number}"])
    assert compiled(compiler, grammars, regex="[a-z]{1,40}") is not first
    # Another vocabulary is another automaton.
    other = Compiler(grammars.tokenizer, size=4100, eos_ids=[EOS], limits=LIMITS)
    asked = StructuredOutputsParams(regex="a")
    assert other.digest(asked, "a") != compiler.digest(asked, "a")
    spelled = StructuredOutputsParams(regex="a", spelling="tokenizer")
    assert compiler.digest(spelled, "a") != compiler.digest(asked, "a")


# The parts.


def test_tables_are_those_of_each_token_alone() -> None:
    dice = random.Random(1)
    texts = [bytes(dice.choice(b"ab,") for _ in range(dice.randrange(6))) for _ in range(300)]
    vocabulary = make_vocabulary(texts, [7])
    automaton = byte_automaton(parse_regex("(a{2,3}|b,)+(ab)?", lambda name: ()), 100)
    tables = token_automaton(automaton, vocabulary, max_steps=10**6, max_bytes=10**6)
    assert tables.states == len(automaton.next_state) + 1 and tables.next_state.shape[1] < 60
    for state in range(tables.states - 1):
        for token, text in enumerate(texts):
            expected = automaton.follow(state, text) if text else DEAD
            if token == 7:
                complete = bool(automaton.accepts[state])
                expected = tables.states - 1 if complete and not tables.ended[state] else DEAD
            assert tables.follow(state, token) == expected, f"{state=} {token=} {text=}"
            bit = tables.mask(state)[token // 32] >> token % 32 & 1
            assert bit == (expected != DEAD)
    assert tables.ended[-1] and not tables.mask(tables.states - 1).any()
    assert tables.nbytes == sum(part.nbytes for part in tables)


def accepts(pattern: Pattern) -> Callable[[str], bool]:
    automaton = byte_automaton(pattern, 5000)

    def check(text: str) -> bool:
        state = automaton.follow(0, text.encode())
        return state != DEAD and bool(automaton.accepts[state])

    return check


def test_automata_match_what_expressions_match() -> None:
    dice, matched = random.Random(2), 0
    for _ in range(100):
        text = (
            random_regex(dice).replace(r"\w", "[a-z]").replace(r"\s", " ").replace(r"\d", "[0-9]")
        )
        check, expected = accepts(parse_regex(text, lambda name: ())), re.compile(text)
        for _ in range(60):
            sample = "".join(dice.choice("abcre, é1\n") for _ in range(dice.randrange(9)))
            found = expected.fullmatch(sample) is not None
            assert check(sample) == found, (text, sample)
            matched += found
    assert matched > 300


@pytest.mark.parametrize(
    "bounds",
    [(0, 9), (-5, 99), (7, 1234), (None, 12), (None, -12), (-31, None), (100, None), (-70, -6)],
)
def test_integers_within_bounds(bounds: tuple[int | None, int | None]) -> None:
    low, high = bounds
    check = accepts(whole_number(Bounds(low, high)))
    for number in range(-2000, 2000):
        inside = (low is None or number >= low) and (high is None or number <= high)
        assert check(str(number)) == inside, number
    assert not check("01") and not check("1.0") and not check("")
    above, below = (None if bound is None else bound for bound in bounds)
    check = accepts(whole_number(Bounds(above, below, False, False)))
    assert not any(check(str(bound)) for bound in bounds)


@pytest.mark.parametrize("bounds", [(0.5, 2.25), (-1.5, 3.0), (0.0, 1.0), (-4.0, -0.75), (2, None)])
def test_numbers_within_bounds(bounds: tuple[float | None, float | None]) -> None:
    low, high = bounds
    for includes in (True, False):
        check = accepts(any_number(Bounds(low, high, includes, includes)))
        for hundredths in range(-600, 600):
            number = hundredths / 100
            inside = (low is None or number >= low) and (high is None or number <= high)
            if not includes and number in bounds:
                inside = False
            shown = f"{number:.2f}"
            # A sign before zero, and zeros at the end of a bound, are not decided here.
            if number != 0 and not shown.endswith("0"):
                assert check(shown) == inside, (shown, includes)


def test_numbers_that_no_text_is() -> None:
    for bounds, reason in (
        (Bounds(3, 2), "no integer is from 3 to 2"),
        (Bounds(10**18, None), "more than 18 digits"),
    ):
        with pytest.raises(Unsupported, match=reason):
            whole_number(bounds)
    with pytest.raises(Unsupported, match="more than 18 digits"):
        any_number(Bounds(0.0, 1e18))


def test_utf8_of_all_characters() -> None:
    for ranges in (((0, 0x10FFFF),), ((0x41, 0x7FF),), ((0x7FF, 0x10000),), ((0xE000, 0xE001),)):
        found = utf8_sequences(chars(ranges).ranges)

        def has(point: int, found: Any = found) -> bool:
            text = chr(point).encode()
            return any(
                len(each) == len(text)
                and all(low <= byte <= high for byte, (low, high) in zip(text, each, strict=True))
                for each in found
            )

        for point in (0, 0x41, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
            assert has(point) == any(low <= point <= high for low, high in ranges), point


def test_classes_are_llguidances() -> None:
    def has(ranges: Ranges, char: str) -> bool:
        return any(low <= ord(char) <= high for low, high in ranges)

    digits, spaces = named_class("d"), named_class("s")
    assert has(digits, "0") and has(digits, "٣") and not has(digits, "a")
    assert has(spaces, "\t") and has(spaces, "\u2003") and not has(spaces, "x")
