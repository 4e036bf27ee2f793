"""Grammars: what a request's next tokens may be, by `llguidance`, on the host.

A grammar is compiled when its request is submitted. The masks of a request, W of them, are for the
W lanes of its row: mask 0 is for the next token, mask j for the one behind drafts 1 .. j. Behind a
draft that the grammar forbids, or that ends the output, masks allow nothing: no token comes from
there, so that a step emits what plain decoding would.

A grammar alone decides where its output ends: where nothing more can follow, or where the output is
whole and the model says an end-of-sequence token. So other ways to stop, and those not to, are
refused beside it.

Letters: W tokens of a row in the widest step, V ids of the model's vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphengine.result import FinishReason
from graphengine.sampling_params import SamplingParams
from graphengine.structured_outputs import StructuredOutputsParams
from graphengine.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

Masks = NDArray[np.int32]


class Guide:
    """How far the output of one request has come in its grammar.

    masks  int32 [W, V / 32 rounded up]: bit id % 32 of word id // 32 is 1 where the id may come. Of
           the next step, once `take` and `follow` have run; valid until they run again

    Raises nothing for what a model says: what goes wrong with a grammar ends its request.
    """

    __slots__ = ("_allowed", "_grammar", "_said", "_tokenizer", "_vocabulary", "masks", "matcher")

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar: str,
        *,
        width: int,
        words: int,
        vocabulary: int,
        allowed: Masks | None,
    ) -> None:
        """`grammar` is in llguidance's form; `allowed`, of up to `words`, limits the tokens, too.

        ValueError, with llguidance's words, for a grammar that is none or that nothing meets.
        """
        self._tokenizer, self._grammar = tokenizer, grammar
        self._vocabulary = vocabulary
        self._allowed: Masks | None = None
        if allowed is not None:
            self._allowed = np.zeros(words, dtype=np.int32)
            self._allowed[: allowed.size] = allowed
        self._said: list[int] = []
        self.masks: Masks = np.zeros((width, words), dtype=np.int32)
        self.matcher = self._compile()
        if self.matcher.is_error() or self._fill(0) is not None:
            raise ValueError(self.trouble)

    def _compile(self) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, self._grammar, log_level=0)

    def take(self, tokens: Sequence[int], *, more: bool = True) -> tuple[int, FinishReason | None]:
        """Follow what a step emitted; unless it is the last one (not `more`), mask 0 is made.

        Returns how many of the tokens count, and why the request ends behind them, if it does.
        """
        matcher = self.matcher
        for index, token in enumerate(tokens):
            if not matcher.try_consume_tokens([token]):
                return index, "error"
            if matcher.is_stopped():
                return index + 1, self._ended()
        self._said += tokens
        return len(tokens), self._fill(0) if more else None

    def follow(self, drafts: Sequence[int]) -> None:
        """Make masks 1 .. W - 1, behind the drafts of the next step; less than 0 is no draft."""
        matcher, made = self.matcher, 0
        self.masks[1:] = 0
        for draft in drafts:
            if not 0 <= draft < self._vocabulary or not self._allows(made, draft):
                break
            if not matcher.try_consume_tokens([draft]):
                break
            made += 1
            if matcher.is_stopped():
                break
            if self._fill(made) is not None:
                self.masks[made] = 0
                break
        if matcher.is_error():
            # By what may never be said; the matcher cannot come back from it.
            log.warning("a grammar failed behind %d drafts: %s", made, _first_lines(matcher))
            self.matcher = self._compile()
            self.matcher.consume_tokens(self._said)
        elif made:
            matcher.rollback(made)

    def _allows(self, index: int, token: int) -> bool:
        return bool(int(self.masks[index, token // 32]) >> token % 32 & 1)

    def _fill(self, index: int) -> FinishReason | None:
        """Make mask `index` for the matcher's state; why nothing can follow, if so."""
        mask, matcher = self.masks[index], self.matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_stopped():
            # That nothing more can follow may be found out only here.
            return self._ended()
        if self._allowed is not None:
            np.bitwise_and(mask, self._allowed, out=mask)
        return None if mask.any() else "error"

    def _ended(self) -> FinishReason:
        return "error" if self.matcher.is_error() else "stop"

    @property
    def trouble(self) -> str:
        """What is wrong, where the request ends with "error"; for people."""
        if self.matcher.is_error():
            return _first_lines(self.matcher)
        return "no token that the grammar allows is one that may be sampled"


class Grammars:
    """Makes the guides of an engine; llguidance's tokenizer is made for the first one.

    width       W
    vocab_size  V
    eos_ids     tokens that end an output where it is whole
    """

    def __init__(self, *, width: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._width = width
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None

    def guide(
        self, params: SamplingParams, tokenizer: Tokenizer | None, allowed: Masks | None
    ) -> Guide | None:
        """The guide of a request with these parameters, None without a grammar. ValueError for a
        grammar that cannot be compiled or met, and for what contradicts it.

        allowed  the mask of `allowed_token_ids`, of its first words: it has no ids behind them
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        self._check(params, tokenizer)
        if self._tokenizer is None:
            assert tokenizer is not None
            self._tokenizer = self._make_tokenizer(tokenizer)
        try:
            return Guide(
                self._tokenizer,
                _source(asked),
                width=self._width,
                words=-(-self._vocab_size // 32),
                vocabulary=self._vocab_size,
                allowed=allowed,
            )
        except ValueError as error:
            beside = "" if allowed is None else ", with allowed_token_ids beside it"
            raise ValueError(f"{_shown(asked)} cannot be served{beside}: {error}") from error

    def _check(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise ValueError(
                "structured_outputs need a tokenizer; the checkpoint has no tokenizer.json"
            )
        if not self._eos_ids:
            raise ValueError(
                "structured_outputs need an end-of-sequence token; the checkpoint names none"
            )
        others = [token for token in params.stop_token_ids or () if token not in self._eos_ids]
        contradicting = {
            "min_tokens": params.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop": params.stop_strings,
            "stop_token_ids": tuple(others),
            "stop_token_sequences": params.stop_token_sequences,
        }
        for name, value in contradicting.items():
            if value:
                raise ValueError(
                    f"{name}={value!r} contradicts structured_outputs: the grammar alone decides "
                    f"where the output ends"
                )

    def _make_tokenizer(self, tokenizer: Tokenizer) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(
                "structured_outputs need llguidance: pip install 'graphengine[guided]'"
            ) from error
        try:
            return LLTokenizer(
                tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_ids
            )
        except Exception as error:  # the library's own kinds
            raise ValueError(
                f"structured_outputs: llguidance cannot use the tokenizer: {error}"
            ) from error


def _source(asked: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form. ValueError for what is none."""
    from llguidance import LLMatcher

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    if asked.choice is not None:
        choices = " | ".join(json.dumps(choice) for choice in asked.choice)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    options: Any = {"whitespace_flexible": not asked.disable_any_whitespace}
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(asked.schema), overrides=options)


def _shown(asked: StructuredOutputsParams) -> str:
    """The one that was asked for, shortened: schemas may be long."""
    name = next(
        name
        for name in ("json", "regex", "choice", "grammar", "json_object")
        if getattr(asked, name) is not None
    )
    text = repr(getattr(asked, name))
    return f"structured_outputs: {name}={text if len(text) <= 200 else text[:200] + '...'}"


def _first_lines(matcher: LLMatcher) -> str:
    """llguidance's message, without the state of its parser."""
    return matcher.get_error().partition("\n<state>")[0].strip()
