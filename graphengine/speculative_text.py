"""Modes of speculation as text, for command lines and files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphengine.options.drafts.draft_trees import DynamicTree
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.options.drafts.mode import Mode
from graphengine.options.option_syntax import GRAMMAR, RELAXED_GRAMMAR, VOCABULARY_GRAMMAR
from graphengine.options.table import read_integers
from graphengine.speculative import (
    MTP,
    Auto,
    DFlash,
    DraftModel,
    Eagle3,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    Speculative,
    Suffix,
)

_OF_PATHS: dict[str, type[DraftModel | Eagle3 | DFlash]] = {
    "model": DraftModel,
    "eagle3": Eagle3,
    "dflash": DFlash,
}


def parse_speculative(text: str) -> Speculative | None:
    """The options that a `GRAMMAR` text names, with defaults for omitted ones; None for "off".

    `mtp:K:target` is vanilla with modules that all read the target's hidden states. The last part
    of `model:PATH:K`, `eagle3:PATH:K` and `dflash:PATH:K` is K where it is a number, so that a path
    may hold colons. With `:tree:` and three numbers it is a `DynamicTree` of these. ValueError
    shows the text and the grammar, or says which value is invalid.
    """
    front, mark, sizes = text.rpartition(":tree:")
    if mark:
        chain = parse_speculative(front)
        numbers = [_number(value, text) for value in sizes.split(":")]
        if not isinstance(chain, Mode) or not chain.takes("tree"):
            raise _wrong(text)
        if chain.shape is not None or len(numbers) != 3:
            raise _wrong(text)
        nodes, top_k, depth = numbers
        return chain.with_options(tree=DynamicTree(nodes=nodes, top_k=top_k, depth=depth))
    name, *values = text.split(":")
    match name, values:
        case "off", []:
            return None
        case "auto", []:
            return Auto()
        case "mtp", [] | [_] | [_, _]:
            options = MTP() if not values else MTP(_number(values[0], text))
            return _styled(options, values[1], text) if values[1:] else options
        case "ngram", [] | [_] | [_, _]:
            numbers = [_number(value, text) for value in values]
            ngram = NGram(*numbers[:1])
            return replace(ngram, max_n=numbers[1]) if numbers[1:] else ngram
        case "suffix", [] | [_]:
            return Suffix(*(_number(value, text) for value in values))
        case "jump", [] | [_]:
            return JumpForward(*(_number(value, text) for value in values))
        case "save-hidden", [_, *_] if any(values):
            return SaveHiddenStates(":".join(values))
        case "model" | "eagle3" | "dflash", [_, *_] if any(values):
            mode = _OF_PATHS[name]
            *path, last = values
            if path and last.isdecimal():
                return mode(":".join(path), _number(last, text))
            return mode(":".join(values))
    raise _wrong(text)


def parse_relaxed_acceptance(text: str) -> RelaxedAcceptance:
    """The options that a `RELAXED_GRAMMAR` text names, with defaults for omitted ones.

    ValueError shows the text and the grammar, or says which value is invalid.
    """
    begin, *parts = text.split(":")
    kinds = (("topk", int), ("delta", float))
    try:
        end, *numbers = parts
        options: dict[str, Any] = {
            name: kind(number)
            for (name, kind), number in zip(kinds[: len(numbers)], numbers, strict=True)
        }
        options |= {"begin_token_ids": read_integers(begin), "end_token_ids": read_integers(end)}
    except ValueError:
        raise ValueError(f"relaxed_acceptance={text!r} must be {RELAXED_GRAMMAR}") from None
    return RelaxedAcceptance(**options)


def parse_draft_vocabulary(text: str) -> DraftVocabulary:
    """The vocabulary that `TEXT:SIZE` names. ValueError for any other text."""
    path, _, size = text.rpartition(":")
    if not path or not (size.isascii() and size.isdecimal()):
        raise ValueError(f"draft vocabulary {text!r} must be {VOCABULARY_GRAMMAR}")
    return DraftVocabulary(text=path, size=int(size))


def with_draft_vocabulary(
    speculative: Speculative | None, vocabulary: DraftVocabulary
) -> Speculative:
    """The mode, scoring only this part of the vocabulary. ValueError if it has no vocabulary."""
    if not isinstance(speculative, Mode) or not speculative.takes("draft_vocab"):
        raise ValueError(f"a draft vocabulary is for mtp, not for speculative={speculative!r}")
    return speculative.with_options(draft_vocab=vocabulary)


def _number(value: str, text: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise _wrong(text)
    return int(value)


def _styled(options: MTP, value: str, text: str) -> MTP:
    match value:
        case "eagle" | "vanilla":
            return replace(options, style=value)
        case "target":
            return replace(options, style="vanilla", feed="target")
    raise _wrong(text)


def _wrong(text: str) -> ValueError:
    return ValueError(f"speculative={text!r} must be {GRAMMAR}")
