"""Modes of speculation on command lines."""

from __future__ import annotations

from typing import Any

import pytest

from graphengine.options.drafts.draft_trees import DynamicTree
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.options.option_syntax import GRAMMAR, RELAXED_GRAMMAR
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
from graphengine.speculative_text import (
    parse_draft_vocabulary,
    parse_relaxed_acceptance,
    parse_speculative,
    with_draft_vocabulary,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("auto", Auto()),
        ("mtp", MTP()),
        ("mtp:2", MTP(k=2)),
        ("mtp:3:vanilla", MTP(k=3, style="vanilla")),
        ("mtp:3:target", MTP(k=3, style="vanilla", feed="target")),
        ("mtp:1:eagle", MTP(k=1)),
        ("ngram", NGram()),
        ("ngram:5", NGram(k=5)),
        ("ngram:5:3", NGram(k=5, max_n=3)),
        ("suffix", Suffix()),
        ("suffix:4", Suffix(k=4)),
        ("jump", JumpForward()),
        ("jump:7", JumpForward(k=7)),
        ("model:a/b", DraftModel("a/b")),
        ("model:a/b:2", DraftModel("a/b", 2)),
        ("model:c:/d:2", DraftModel("c:/d", 2)),
        ("model:c:/d", DraftModel("c:/d")),
        ("model:7", DraftModel("7")),
        ("eagle3:a/b", Eagle3("a/b")),
        ("eagle3:c:/d:5", Eagle3("c:/d", 5)),
        ("dflash:a/b", DFlash("a/b")),
        ("dflash:c:/d:15", DFlash("c:/d", 15)),
        ("mtp:tree:9:3:4", MTP(tree=DynamicTree(nodes=9, top_k=3, depth=4))),
        ("eagle3:a:tree:9:3:4", Eagle3("a", tree=DynamicTree(nodes=9, top_k=3, depth=4))),
        ("save-hidden:c:/states", SaveHiddenStates("c:/states")),
    ],
)
def test_a_text_names_a_mode(text: str, expected: Speculative | None) -> None:
    assert parse_speculative(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "none", "off:1", "auto:3", "mtp:", "mtp:x", "mtp:-1", "mtp:3:other", "mtp:3:vanilla:1",
        "ngram:3:", "ngram:٣", "ngram:1:2:3", "suffix:", "suffix:3:1", "jump:", "jump:1:2",
        "model", "model:", "model::", "MTP", "eagle3",
        "eagle3:", "dflash", "dflash::", "ngram:tree:9:3:4", "off:tree:9:3:4", "mtp:tree:9:3",
        "mtp:tree:9:3:x", "mtp:tree:9:3:4:tree:9:3:4", "save-hidden", "save-hidden:",
    ],
)  # fmt: skip
def test_any_other_text_shows_the_grammar(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_speculative(text)
    assert repr(text) in str(caught.value) and GRAMMAR in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("mtp:0", "k=0 drafts"), ("mtp:32", "k=32 drafts"), ("ngram:3:0", "max_n=0"),
     ("model:a:99", "k=99 drafts"), ("mtp:tree:9:3:99", "a tree's depth=99 must be"),
     ("mtp:4:tree:9:3:4", "k=4 drafts a step, and the tree has 9 nodes")],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_speculative(text)


def test_a_draft_vocabulary_is_a_text_and_a_size() -> None:
    vocabulary = parse_draft_vocabulary("c:/some.txt:512")
    assert vocabulary == DraftVocabulary(text="c:/some.txt", size=512)
    assert with_draft_vocabulary(MTP(k=2), vocabulary) == MTP(k=2, draft_vocab=vocabulary)
    for text in ("512", ":512", "some.txt", "some.txt:", "some.txt:-1", "some.txt:x"):
        with pytest.raises(ValueError, match="must be TEXT:SIZE"):
            parse_draft_vocabulary(text)
    with pytest.raises(ValueError, match="size=0"):
        parse_draft_vocabulary("some.txt:0")
    for mode in (None, NGram(), Auto()):
        with pytest.raises(ValueError, match="a draft vocabulary is for mtp"):
            with_draft_vocabulary(mode, vocabulary)


@pytest.mark.parametrize(
    ("text", "numbers"), [("", {}), (":3", {"topk": 3}), (":3:0.25", {"topk": 3, "delta": 0.25})]
)
def test_relaxed_acceptance_is_ids_and_numbers(text: str, numbers: dict[str, Any]) -> None:
    expected = RelaxedAcceptance(begin_token_ids=(7,), end_token_ids=(8, 9), **numbers)
    assert parse_relaxed_acceptance(f"7:8,9{text}") == expected


@pytest.mark.parametrize("text", ["", "7", "7:", "a:8", "7:8:x", "7:8:3:x", "7:8:3:0.5:1"])
def test_any_other_relaxed_acceptance_shows_the_grammar(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_relaxed_acceptance(text)
    assert f"relaxed_acceptance={text!r} must be {RELAXED_GRAMMAR}" == str(caught.value)
    with pytest.raises(ValueError, match="topk=0"):
        parse_relaxed_acceptance("7:8:0")
