"""Grammars decide which tokens a request may sample next, through `llguidance` on the host. Those
that have automata may move to the device afterwards (`grammar_pool.py`).

A grammar is compiled when its request is submitted. A request has W masks, one for each lane of its
row. Mask 0 is for the next token; mask j is for the token after drafts 1 .. j, or in a tree for the
token after the drafts on the path to node j. After a draft that the grammar forbids, or that ends
the output, masks allow nothing: those lanes emit no token, so a step emits what plain decoding
would.

The grammar decides where the output ends: where nothing more can follow, or where the output is
complete and the model samples an end-of-sequence token. A stop string may end it before that, as it
is found in the text. Options that act on the device, or keep the output from ending, are refused
together with a grammar.

Letters: W tokens of a row in the widest step, V ids of the model's vocabulary.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from graphengine.automata.compiling import AutomatonLimits, Compiler, without_forcing
from graphengine.automata.patterns import Unsupported
from graphengine.requests.grammar_pool import (
    MAX_GRAMMAR_STATES,
    CompiledGrammar,
    DeviceGuide,
    TableGuide,
)
from graphengine.requests.result import FinishReason
from graphengine.requests.schemas import for_llguidance, read_number
from graphengine.sampling_params import SamplingParams
from graphengine.structured_outputs import StructuredOutputsParams
from graphengine.text.tokenizer import Tokenizer
from graphengine.text.tokenizer_files import WRITE_TOKENIZER

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

Masks = NDArray[np.int32]

# A noncharacter, appended to the names of special tokens, so that no text of a grammar has them.
_HIDDEN = "\ufffe"
# Characters with a meaning in a regular expression.
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")
# A token's name in Lark. Strings, comments and expressions are matched first: they hold no names.
_LARK_NAME = re.compile(
    r'"(?:\\.|[^"\\])*"|(?://|\#)[^\n]*|/(?:\\.|[^/\\])+/|(?P<name><[^<>\s]+>)', re.DOTALL
)


class Guide:
    """The state of a request's output in its grammar.

    compiled  the grammar's automaton, or why it has none; None where nobody asked for one
    reason    why the host follows the grammar, and not the device
    masks  int32 [W, V / 32 rounded up]: bit id % 32 of word id // 32 is 1 if the id is allowed.
           They are the next step's once `take` and `follow` have run, and valid until these run
           again

    Nothing is raised, whatever a model samples: a grammar that fails ends its request.
    """

    __slots__ = (
        "_allowed",
        "_grammar",
        "_inside",
        "_said",
        "_tokenizer",
        "_vocabulary",
        "compiled",
        "masks",
        "matcher",
        "reason",
    )

    where: ClassVar[str] = "host"

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar: str,
        *,
        width: int,
        words: int,
        vocabulary: int,
        allowed: Masks | None,
        inside: Masks | None = None,
    ) -> None:
        """Compile `grammar`, which is in llguidance's form.

        allowed  mask of up to `words` words that limits the tokens further
        inside   mask of `words` words that limits them while the output is not complete

        ValueError, with llguidance's message, for an invalid grammar, for one that no output meets,
        and for one that fails after a first token.
        """
        self._tokenizer, self._grammar = tokenizer, grammar
        self.compiled: CompiledGrammar | None = None
        self.reason = "the engine has no grammar_pool_mib"
        self._vocabulary = vocabulary
        self._allowed: Masks | None = None
        if allowed is not None:
            self._allowed = np.zeros(words, dtype=np.int32)
            self._allowed[: allowed.size] = allowed
        self._inside = inside
        self._said: list[int] = []
        self.masks: Masks = np.zeros((width, words), dtype=np.int32)
        self.matcher = self._compile()
        if self.matcher.is_error() or self._fill(0) is not None:
            raise ValueError(self.trouble)
        self._try_token()

    def _try_token(self) -> None:
        """Consume a token and roll back: a grammar that is too large may fail only here."""
        bits = np.unpackbits(self.masks[0].view(np.uint8), bitorder="little")
        ends = self._tokenizer.eos_tokens
        token = next((int(token) for token in np.flatnonzero(bits) if token not in ends), None)
        if token is None:
            return
        matcher = self.matcher
        if matcher.try_consume_tokens([token]):
            matcher.compute_bitmask()
            if not matcher.is_error():
                matcher.rollback(1)
        if matcher.is_error():
            raise ValueError(self.trouble)

    def _compile(self) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, self._grammar, log_level=0)

    def release(self) -> None:
        """Called once the request has ended; nothing is shared with others."""

    def take(self, tokens: Sequence[int], *, more: bool = True) -> tuple[int, FinishReason | None]:
        """Follow the tokens that a step emitted, and make mask 0 unless the step is the last (not
        `more`).

        Returns how many of the tokens count, and why the request ends after them, if it does.
        """
        matcher = self.matcher
        for index, token in enumerate(tokens):
            # `try_consume_tokens` refuses an end-of-sequence token that the grammar itself names.
            if not matcher.consume_token(token):
                return index, "error"
            if matcher.is_stopped():
                return index + 1, self._ended()
        self._said += tokens
        return len(tokens), self._fill(0) if more else None

    def follow(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Make masks 1 .. W - 1, after the drafts of the next step; a value below 0 is no draft.

        Draft i is in lane i + 1, which follows lane `parents[i]`; with None, lane i. Drafts without
        an entry in `parents` get no masks.
        """
        self.masks[1:] = 0
        children: dict[int, list[int]] = {}
        lanes = range(len(drafts)) if parents is None else parents
        for lane, parent in enumerate(lanes, start=1):
            children.setdefault(parent, []).append(lane)
        followed = self._follow_from(0, drafts, children)
        if followed is not None:
            # The token that failed may never be sampled, but the matcher cannot recover from it.
            log.warning(
                "a grammar failed after %d drafts: %s", followed, _first_lines(self.matcher)
            )
            self.matcher = self._compile()
            self.matcher.consume_tokens(self._said)

    def _follow_from(
        self, lane: int, drafts: Sequence[int], children: Mapping[int, list[int]]
    ) -> int | None:
        """Make the masks of the lanes after `lane`; the matcher returns to the state at `lane`.

        Returns None; if the grammar fails, how many drafts it had followed since `lane`.
        """
        matcher = self.matcher
        for child in children.get(lane, ()):
            draft = drafts[child - 1]
            if not 0 <= draft < self._vocabulary or not self._allows(lane, draft):
                continue
            if matcher.try_consume_tokens([draft]):
                followed = None
                if not matcher.is_stopped():
                    if self._fill(child) is None:
                        followed = self._follow_from(child, drafts, children)
                    else:
                        self.masks[child] = 0
                if followed is not None:
                    return 1 + followed
                if matcher.is_error():
                    return 1
                matcher.rollback(1)
            elif matcher.is_error():
                return 0
        return None

    def _allows(self, index: int, token: int) -> bool:
        return bool(int(self.masks[index, token // 32]) >> token % 32 & 1)

    def _fill(self, index: int) -> FinishReason | None:
        """Make mask `index` for the matcher's state; returns why nothing can follow, or None."""
        mask, matcher = self.masks[index], self.matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_stopped():
            # Only computing the mask may show that nothing more can follow.
            return self._ended()
        if self._allowed is not None:
            np.bitwise_and(mask, self._allowed, out=mask)
        if self._inside is not None and not matcher.is_accepting():
            np.bitwise_and(mask, self._inside, out=mask)
        return None if mask.any() else "error"

    def _ended(self) -> FinishReason:
        return "error" if self.matcher.is_error() else "stop"

    @property
    def trouble(self) -> str:
        """What went wrong if the request ends with "error", as a message for people."""
        if self.matcher.is_error():
            return _first_lines(self.matcher)
        return "no token that the grammar allows is one that may be sampled"


HostGuide = Guide | TableGuide
"""Guides whose masks the host makes."""
AnyGuide = HostGuide | DeviceGuide


class Grammars:
    """Makes the guides of an engine; llguidance's tokenizer is made for the first one.

    width       W
    vocab_size  V
    eos_ids     tokens that end a complete output
    pool_bytes  bytes of the pool for automata; 0: none are made
    """

    def __init__(
        self, *, width: int, vocab_size: int, eos_ids: Sequence[int], pool_bytes: int = 0
    ) -> None:
        self._width = width
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        # Special tokens, by the names that a Lark grammar may use.
        self._special: dict[str, int] = {}
        self._inside: Masks | None = None
        self._pool_bytes = pool_bytes
        self._compiler: Compiler | None = None

    @property
    def tokenizer(self) -> LLTokenizer | None:
        """llguidance's tokenizer; None before the first grammar."""
        return self._tokenizer

    def source(self, asked: StructuredOutputsParams) -> str:
        """A grammar in llguidance's form. ValueError for an invalid one."""
        return _source(asked, self._special)

    def _guided_by(self, asked: StructuredOutputsParams, source: str) -> str:
        """The form in which a request's matcher has its grammar.

        Beside automata, whose masks depend on the text alone, all others do, too, unless a request
        asks for the tokenizer's spelling.
        """
        usual = "any" if self._pool_bytes else "tokenizer"
        spelling = asked.spelling or usual
        return without_forcing(source) if spelling == "any" and asked.grammar is None else source

    def _compile(
        self, guide: Guide, asked: StructuredOutputsParams, source: str, allowed: Masks | None
    ) -> None:
        """Have the grammar's automaton made, and the reason noted if it has none."""
        if not self._pool_bytes or self._tokenizer is None:
            return
        if allowed is not None or self._inside is not None:
            what = (
                "allowed_token_ids" if allowed is not None else "end-of-sequence ids that are text"
            )
            guide.reason = f"there are {what} beside it"
            return
        if self._compiler is None:
            limits = AutomatonLimits(states=MAX_GRAMMAR_STATES, nbytes=self._pool_bytes)
            self._compiler = Compiler(
                self._tokenizer, size=self._vocab_size, eos_ids=self._eos_ids, limits=limits
            )
        outcome = self._compiler.compile(asked, source)
        guide.compiled = CompiledGrammar(self._compiler.digest(asked, source), outcome)
        if isinstance(outcome, Unsupported):
            guide.reason = str(outcome)

    def guide(
        self, params: SamplingParams, tokenizer: Tokenizer | None, allowed: Masks | None
    ) -> Guide | None:
        """The guide of a request with these parameters; None without a grammar. ValueError for a
        grammar that cannot be compiled or met, and for options that contradict it.

        allowed  the first words of the mask of `allowed_token_ids`, up to the last one with an id
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        self._check(params, tokenizer)
        if self._tokenizer is None:
            assert tokenizer is not None
            self._tokenizer = self._make_tokenizer(tokenizer)
            self._inside = self._make_inside(self._tokenizer)
        try:
            source = self.source(asked)
            guide = Guide(
                self._tokenizer,
                self._guided_by(asked, source),
                width=self._width,
                words=-(-self._vocab_size // 32),
                vocabulary=self._vocab_size,
                allowed=allowed,
                inside=self._inside,
            )
        except (ValueError, RecursionError) as error:
            beside = "" if allowed is None else ", with allowed_token_ids beside it"
            raise ValueError(f"{_shown(asked)} cannot be served{beside}: {error}") from error
        self._compile(guide, asked, source, allowed)
        return guide

    def _check(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise ValueError(
                "structured_outputs need a tokenizer; the checkpoint has no tokenizer.json. "
                f"{WRITE_TOKENIZER}"
            )
        if not self._eos_ids:
            raise ValueError(
                "structured_outputs need an end-of-sequence token; the checkpoint names none"
            )
        others = [token for token in params.stop_tokens if token not in self._eos_ids]
        contradicting = {
            "min_tokens": params.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": tuple(others),
            "stop_token_sequences": params.stop_token_sequences,
        }
        for name, value in contradicting.items():
            if value:
                raise ValueError(
                    f"{name}={value!r} contradicts structured_outputs: the grammar and stop "
                    f"strings alone decide where the output ends"
                )

    def _make_tokenizer(self, tokenizer: Tokenizer) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(
                "structured_outputs need llguidance: pip install '.[guided]' in the checkout "
                "of graphengine, or pip install 'llguidance>=1.8'"
            ) from error
        try:
            text, self._special = _hidden(tokenizer.to_json(), self._eos_ids)
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except Exception as error:  # the library has its own exception types
            raise ValueError(
                f"structured_outputs: llguidance cannot use the tokenizer: {error}"
            ) from error

    def _make_inside(self, tokenizer: LLTokenizer) -> Masks | None:
        """A mask [words] without the end-of-sequence ids that are also text; None if there are
        none.

        llguidance takes these ids for text if that fits the grammar, but they always end the
        output.
        """
        ids = [token for token in self._eos_ids if not tokenizer.is_special_token(token)]
        if not ids:
            return None
        bits = np.ones(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[ids] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


def _hidden(text: str, eos_ids: Sequence[int]) -> tuple[str, dict[str, int]]:
    """A `tokenizer.json` with renamed special tokens, and their ids by their original names.

    llguidance tokenises forced text with this tokenizer, which would otherwise find the names of
    special tokens inside text. Added tokens that end an output are special whatever the file says.
    """
    content = json.loads(text)
    special: dict[str, int] = {}
    for token in content["added_tokens"]:
        if token["special"] or token["id"] in eos_ids:
            special[token["content"]] = token["id"]
            token["special"] = True
            token["content"] += _HIDDEN
    model = content["model"]

    def renamed(name: str) -> str:
        return name + _HIDDEN if name in special else name

    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(name): index for name, index in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(name), score] for name, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = renamed(unknown)
    if merges := model.get("merges"):
        # Converted files have merges that make a special token out of text.
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & special.keys()]
    content["decoder"] = _without_metaspace(content["decoder"])
    return json.dumps(content), special


def _without_metaspace(decoder: Any) -> Any:
    """The decoder with Metaspace replaced by Replace, as llguidance does not know Metaspace."""
    match decoder:
        case {"type": "Sequence", "decoders": members}:
            return decoder | {"decoders": [_without_metaspace(each) for each in members]}
        case {"type": "Metaspace", "replacement": mark}:
            return {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return decoder


def _with_ids(lark: str, special: Mapping[str, int]) -> str:
    """The grammar with special tokens' names replaced by their ids."""

    def by_id(found: re.Match[str]) -> str:
        index = special.get(found["name"] or "")
        return found[0] if index is None else f"<[{index}]>"

    return _LARK_NAME.sub(by_id, lark)


def _source(asked: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The grammar in llguidance's form. ValueError for an invalid one."""
    from llguidance import LLMatcher

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(_with_ids(asked.grammar, special))
    if asked.choice is not None:
        # As a regular expression: Lark limits the number of alternatives.
        choices = (_META.sub(r"\\\g<0>", choice) for choice in asked.choice)
        return LLMatcher.grammar_from_regex("|".join(choices))
    schema, options = for_llguidance(asked.read_schema(read_number))
    options["whitespace_flexible"] = not asked.disable_any_whitespace
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, options))


def _shown(asked: StructuredOutputsParams) -> str:
    """The option that was given, shortened: schemas may be long."""
    name = next(
        name
        for name in ("json", "regex", "choice", "grammar", "json_object")
        if getattr(asked, name) is not None
    )
    text = repr(getattr(asked, name))
    return f"structured_outputs: {name}={text if len(text) <= 200 else text[:200] + '...'}"


def _first_lines(matcher: LLMatcher) -> str:
    """llguidance's message, without the state of its parser."""
    message = matcher.get_error().partition("\n<state>")[0].replace(_HIDDEN, "").strip()
    if message == "NoExtensionBias":
        return (
            f"no text meets the grammar: a rule or a $ref may lead only back to itself ({message})"
        )
    return message
