"""Compiles a request's grammar into an automaton, and compares its masks with llguidance's.

llguidance decides what a grammar means. An automaton whose mask differs from llguidance's in any
state is refused. So is an automaton in which a step leads to a state with another mask; a fixed
number of such steps is compared, chosen by a seeded generator. Forced tokens are found afterwards
(`forced_text.py`): only they may depend on how a tokenizer spells text.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphengine.automata.byte_automaton import DEAD, byte_automaton
from graphengine.automata.forced_text import with_forced_tokens
from graphengine.automata.json_patterns import json_pattern
from graphengine.automata.patterns import Either, Pattern, Ranges, Unsupported, chars, literal
from graphengine.automata.regex_syntax import parse_regex
from graphengine.automata.token_automaton import TokenAutomaton, token_automaton
from graphengine.automata.vocabulary import make_vocabulary, read_texts
from graphengine.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Masks = NDArray[np.int32]
Outcome = TokenAutomaton | Unsupported

_CHECKED_STEPS = 512
"""Steps between states whose masks are compared, besides those by which each state is reached."""
_MOST_STEPS = 40_000_000
"""Visits to nodes of a vocabulary's tree; about 100 ns each."""
_NO_FORCING = '%llguidance {"no_forcing": true}'
_KEPT = 64
"""Grammars whose outcome is remembered."""
_KEPT_POOLS = 2
"""Most bytes of remembered automata, as a multiple of the pool's size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomatonLimits:
    """Limits of one automaton.

    states  states of its automaton over bytes
    nbytes  bytes of its tables
    steps   visits to nodes of the vocabulary's tree while they are made
    """

    states: int
    nbytes: int
    steps: int = _MOST_STEPS


class Compiler:
    """Compiles grammars for one tokenizer, and remembers the last ones by their digests.

    tokenizer  llguidance's
    size       V, ids of the model's vocabulary
    """

    def __init__(
        self, tokenizer: LLTokenizer, *, size: int, eos_ids: Sequence[int], limits: AutomatonLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = read_texts(tokenizer, size)
        self.vocabulary = make_vocabulary(self._texts, eos_ids)
        self._limits = limits
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._classes: dict[str, Ranges] = {}

    def digest(self, asked: StructuredOutputsParams, source: str) -> bytes:
        """A key for a grammar in llguidance's form, with this vocabulary."""
        spelling = b"tokenizer" if asked.spelling == "tokenizer" else b"any"
        return hashlib.sha256(self.vocabulary.digest + spelling + source.encode()).digest()

    def compile(self, asked: StructuredOutputsParams, source: str) -> Outcome:
        """The automaton of a grammar, or why there is none.

        source  the grammar in llguidance's form, which it has compiled before
        """
        digest = self.digest(asked, source)
        found = self._known.pop(digest, None)
        if found is None:
            found = self._compiled(asked, source)
        self._known[digest] = found
        while len(self._known) > 1 and (len(self._known) > _KEPT or self._held > self._most_held):
            self._known.popitem(last=False)
        return found

    @property
    def _held(self) -> int:
        """Bytes of the automata that are remembered."""
        return sum(each.nbytes for each in self._known.values() if isinstance(each, TokenAutomaton))

    @property
    def _most_held(self) -> int:
        return _KEPT_POOLS * self._limits.nbytes

    def _compiled(self, asked: StructuredOutputsParams, source: str) -> Outcome:
        limits = self._limits
        try:
            over_bytes = byte_automaton(self._pattern(asked, source), limits.states)
            found = token_automaton(
                over_bytes, self.vocabulary, max_steps=limits.steps, max_bytes=limits.nbytes
            )
            if found.ended[0]:
                raise Unsupported("it allows no text but the empty one")
            check_automaton(found, self._tokenizer, without_forcing(source))
            found = with_forced_tokens(
                found,
                over_bytes,
                self._texts,
                self._tokenizer.tokenize_bytes,
                narrow=asked.spelling == "tokenizer",
            )
        except Unsupported as error:
            # Kept without its traceback, whose frames hold everything made so far.
            return error.with_traceback(None)
        except RecursionError:
            return Unsupported("it is nested too deep")
        return found

    def _pattern(self, asked: StructuredOutputsParams, source: str) -> Pattern:
        if asked.choice is not None:
            return Either(tuple(literal(choice) for choice in dict.fromkeys(asked.choice)))
        if asked.regex is not None:
            return parse_regex(asked.regex, self._named_class)
        if asked.grammar is not None:
            raise Unsupported("it is context-free")
        if asked.whitespace_pattern is not None:
            raise Unsupported("it has a whitespace_pattern")
        schema, options = _schema_of(source)
        return json_pattern(schema, options, self._named_class)

    def _named_class(self, name: str) -> Ranges:
        if name not in self._classes:
            self._classes[name] = named_class(name)
        return self._classes[name]


def without_forcing(source: str) -> str:
    """A regular expression or a JSON schema, in llguidance's form, whose masks depend on its text
    alone.

    Where only one text can follow, llguidance otherwise allows only the token with which its
    tokenizer would go on after the token before, so that masks also depend on that token.
    """
    whole = json.loads(source)
    (grammar,) = whole["grammars"]
    lark = grammar["lark_grammar"]
    if lark is None:
        lark = f"start: %json {json.dumps(grammar['json_schema'])}"
    grammar |= {"json_schema": None, "lark_grammar": f"{_NO_FORCING}\n{lark}"}
    return json.dumps(whole)


def _schema_of(source: str) -> tuple[Any, dict[str, Any]]:
    """The schema and the options in llguidance's form of a grammar."""
    (grammar,) = json.loads(source)["grammars"]
    schema = grammar["json_schema"]
    return schema, schema.pop("x-guidance", {})


# Bytes as tokens, and the end after them.
_END = 256
_BYTES = [bytes([byte]) for byte in range(256)]


class _ByteTokens:
    """The tokenizer interface of llguidance, with a token for each byte."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*_BYTES, b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def named_class(name: str) -> Ranges:
    """The characters of the classes `d`, `s` and `w`, as llguidance has them.

    llguidance follows the UTF-8 of every one.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokens()))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(f"\\{name}"), log_level=0)
    mask = np.zeros(9, dtype=np.int32)
    found: list[tuple[int, int]] = []

    def walk(text: bytes) -> None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256])
        for byte in allowed.tolist():
            longer = text + bytes([byte])
            if _is_whole(longer):
                point = ord(longer.decode())
                found.append((point, point))
            elif matcher.try_consume_tokens([byte]):
                walk(longer)
                matcher.rollback(1)

    walk(b"")
    return chars(found).ranges


def _is_whole(text: bytes) -> bool:
    """Whether the beginning of a character's UTF-8 is all of it."""
    lead = text[0]
    return len(text) == (1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4)


def check_automaton(
    automaton: TokenAutomaton,
    tokenizer: LLTokenizer,
    source: str,
    *,
    steps: int = _CHECKED_STEPS,
    seed: int = 0,
) -> None:
    """Unsupported unless llguidance's masks equal the automaton's in each of its states, and after
    `steps` further steps, which lead to known states on other paths.
    """
    _Check(automaton, tokenizer, source, steps, random.Random(seed)).run()


class _Check:
    """Visits all states depth first, so that llguidance's matcher follows by single tokens.

    A matcher that was rolled back does not always have the masks of a new one. The new one's masks
    count: where they differ, a new one takes over.
    """

    def __init__(
        self,
        automaton: TokenAutomaton,
        tokenizer: LLTokenizer,
        source: str,
        steps: int,
        dice: random.Random,
    ) -> None:
        self._automaton, self._steps, self._dice = automaton, steps, dice
        self._tokenizer, self._source = tokenizer, source
        # The tokens that lead to the current state.
        self._path: list[int] = []
        self._matcher = self._new_matcher()
        self._mask: Masks = np.zeros(automaton.masks.shape[1], dtype=np.int32)
        order = np.argsort(automaton.class_of_token, kind="stable")
        ends = np.cumsum(np.bincount(automaton.class_of_token))
        self._tokens = np.split(order, ends[:-1])

    def run(self) -> None:
        automaton = self._automaton
        done = automaton.states - 1
        seen = np.zeros(automaton.states, dtype=np.bool_)
        seen[0] = True
        total = int((automaton.next_state != DEAD).sum())
        # Each step to a known state is compared with this chance.
        chance = self._steps / max(total, 1)
        self._compare(0)
        stack = [(0, self._classes_from(0))]
        while stack:
            state, classes = stack[-1]
            if not classes:
                stack.pop()
                if stack:
                    self._back()
                continue
            each = classes.pop()
            after = int(automaton.next_state[state, each])
            # The last state is reached only by end-of-sequence tokens.
            if after == done or (seen[after] and self._dice.random() >= chance):
                continue
            self._step(state, each)
            self._compare(after)
            if seen[after]:
                self._back()
            else:
                seen[after] = True
                stack.append((after, self._classes_from(after)))

    def _classes_from(self, state: int) -> list[int]:
        classes: list[int] = np.flatnonzero(self._automaton.next_state[state] != DEAD).tolist()
        return classes

    def _step(self, state: int, each: int) -> None:
        tokens = self._tokens[each]
        token = int(tokens[self._dice.randrange(len(tokens))])
        taken = bool(self._matcher.try_consume_tokens([token]))
        self._path.append(token)
        if not taken:
            self._matcher = self._new_matcher()
        if self._matcher.is_error():
            raise Unsupported(f"llguidance refuses token {token} in state {state} of its automaton")

    def _back(self) -> None:
        self._path.pop()
        self._matcher.rollback(1)

    def _new_matcher(self) -> LLMatcher:
        """A matcher that has followed the path."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._source, log_level=0)
        matcher.consume_tokens(self._path)
        return matcher

    def _compare(self, state: int) -> None:
        """Compare llguidance's mask with the state's."""
        if not self._differs(state):
            return
        self._matcher = self._new_matcher()
        if wrong := self._differs(state):
            raise Unsupported(
                f"llguidance's mask differs from its automaton's by {wrong} tokens in state "
                f"{state} of {self._automaton.states}"
            )

    def _differs(self, state: int) -> int:
        """The number of tokens by which the matcher's mask differs; the end of an output counts as
        one.
        """
        matcher, mask = self._matcher, self._mask
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise Unsupported("llguidance fails where its automaton does not")
        stopped = bool(matcher.is_stopped())
        if stopped:
            # Only computing the mask may show that nothing more can follow.
            mask[:] = 0
        wrong = np.unpackbits((mask ^ self._automaton.mask(state)).view(np.uint8))
        return int(wrong.sum()) + (stopped != bool(self._automaton.ended[state]))
