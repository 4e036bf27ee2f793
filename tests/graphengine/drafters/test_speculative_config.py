"""Options of speculation, the environment's override, and trimmed draft vocabularies."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from graphengine.options.drafts.draft_vocabulary import (
    DraftVocabulary,
    frequent_tokens,
    read_offsets,
    target_ids,
)
from graphengine.options.drafts.jump_forward import JumpForward
from graphengine.speculative import (
    AUTO_MAX_LIVE,
    FORCE_ACCEPTED,
    MAX_DRAFTS,
    MTP,
    Auto,
    DFlash,
    DraftModel,
    Eagle3,
    GateOptions,
    NGram,
    RelaxedAcceptance,
    SaveHiddenStates,
    Suffix,
    UserProvided,
    check_rows,
    check_speculative,
    describe,
    forced_acceptance,
    resolve_auto,
)

WORDS = DraftVocabulary(text="corpora/words.txt", size=32768)
MARKS: dict[str, Any] = {"begin_token_ids": [7], "end_token_ids": [9]}

MADE = [
    MTP(),
    NGram(),
    Suffix(),
    DraftModel("small"),
    Eagle3("head"),
    DFlash("block"),
    JumpForward(),
    UserProvided(),
    SaveHiddenStates("states"),
    Auto(),
    WORDS,
    RelaxedAcceptance(**MARKS),
    GateOptions(),
]


def values(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            MTP(),
            {
                "k": 3,
                "style": "eagle",
                "draft_vocab": None,
                "feed": "chained",
                "tree": None,
                "min_confidence": None,
            },
        ),
        (MTP(5, draft_vocab=WORDS).k, 5),
        (NGram(), {"k": 3, "max_n": 5}),
        (NGram(31, max_n=16), {"k": 31, "max_n": 16}),
        (Suffix(), {"k": 7, "factor": 1.0, "max_match": 32, "corpus": None}),
        (Suffix(1, factor=0.5, max_match=2, corpus="c").factor, 0.5),
        (DraftModel("small"), {"path": "small", "k": 3, "min_confidence": None}),
        (DraftModel(Path("small"), 1, min_confidence=1).min_confidence, 1),
        (
            Eagle3("head"),
            {
                "path": "head",
                "k": 3,
                "layers": None,
                "tree": None,
                "min_confidence": None,
            },
        ),
        (
            Eagle3(Path("head"), 1, layers=[4, 2]),
            {
                "path": Path("head"),
                "k": 1,
                "layers": (4, 2),
                "tree": None,
                "min_confidence": None,
            },
        ),
        (DFlash("block"), {"path": "block", "k": 7, "layers": None}),
        (DFlash(Path("b"), 15, layers=[4, 2]), {"path": Path("b"), "k": 15, "layers": (4, 2)}),
        (JumpForward(k=2), {"k": 2}),
        (UserProvided(k=2), {"k": 2}),
        (Auto(), {}),
        (
            SaveHiddenStates("states"),
            {"directory": "states", "layers": None, "write_interval": 20},
        ),
        (WORDS, {"text": "corpora/words.txt", "size": 32768, "tensor": None}),
        (DraftVocabulary(tensor="d2t"), {"text": None, "size": None, "tensor": "d2t"}),
        (
            RelaxedAcceptance(**MARKS),
            {"topk": 10, "delta": 0.6, "begin_token_ids": (7,), "end_token_ids": (9,)},
        ),
        (RelaxedAcceptance(delta=0, topk=1, **MARKS).delta, 0),
        (RelaxedAcceptance(delta=1, **MARKS).delta, 1),
        (
            GateOptions(),
            {
                "window": 64,
                "off_below": 0.3,
                "on_above": 0.5,
                "probe_every": 512,
                "max_live": None,
            },
        ),
        (GateOptions(off_below=0, on_above=0, window=1, probe_every=1, max_live=1).max_live, 1),
    ],
)
def test_defaults_and_the_ends_of_the_ranges(made: Any, expected: Any) -> None:
    assert (values(made) if dataclasses.is_dataclass(made) else made) == expected


K_ERROR = "drafts a step must be an integer in [1, 31]"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (MTP, {"k": 0}, f"k=0 {K_ERROR}"),
        (MTP, {"k": 32}, f"k=32 {K_ERROR}"),
        (MTP, {"k": 3.0}, f"k=3.0 {K_ERROR}"),
        (NGram, {"k": True}, f"k=True {K_ERROR}"),
        (DraftModel, {"path": "small", "k": -1}, f"k=-1 {K_ERROR}"),
        (UserProvided, {"k": None}, f"k=None {K_ERROR}"),
        (MTP, {"style": "medusa"}, "style='medusa' must be 'eagle' or 'vanilla'"),
        (MTP, {"style": ["eagle"]}, "style=['eagle'] must be 'eagle' or 'vanilla'"),
        (MTP, {"style": "vanilla", "feed": "own"}, "feed='own' must be 'chained' or 'target'"),
        (MTP, {"feed": "target"}, "feed='target' goes with style='vanilla', not 'eagle'"),
        (MTP, {"draft_vocab": 5}, "draft_vocab=5 must be a DraftVocabulary or None"),
        (MTP, {"min_confidence": 0}, "min_confidence=0 must be a number in (0, 1], or None"),
        (
            Eagle3,
            {"path": "head", "min_confidence": 1.5},
            "min_confidence=1.5 must be a number in (0, 1], or None",
        ),
        (
            DraftModel,
            {"path": "a", "min_confidence": "1"},
            "min_confidence='1' must be a number in (0, 1], or None",
        ),
        (
            MTP,
            {"style": "vanilla", "min_confidence": 0.5},
            "min_confidence=0.5 goes with style='eagle' and without a tree, not with "
            "style='vanilla', tree=None",
        ),
        (NGram, {"max_n": 0}, "max_n=0 must be an integer in [1, 16]"),
        (NGram, {"max_n": 17}, "max_n=17 must be an integer in [1, 16]"),
        (NGram, {"max_n": "3"}, "max_n='3' must be an integer in [1, 16]"),
        (JumpForward, {"k": 64}, f"k=64 {K_ERROR}"),
        (Suffix, {"k": 0}, f"k=0 {K_ERROR}"),
        (Suffix, {"factor": 0}, "factor=0 must be a finite number above 0"),
        (Suffix, {"factor": math.inf}, "factor=inf must be a finite number above 0"),
        (Suffix, {"max_match": 65}, "max_match=65 must be an integer in [1, 64]"),
        (
            Suffix,
            {"factor": 0.3, "max_match": 3},
            "factor=0.3 supports no draft of a match of max_match=3 tokens",
        ),
        (Suffix, {"corpus": ""}, "corpus='' must be a path"),
        (DraftModel, {"path": ""}, "path='' must be a path"),
        (DraftModel, {"path": None}, "path=None must be a path"),
        (DFlash, {"path": ""}, "path='' must be a path"),
        (DFlash, {"path": "block", "k": 0}, f"k=0 {K_ERROR}"),
        (
            DFlash,
            {"path": "block", "layers": [-1]},
            "layers holds -1, which is none of layer numbers",
        ),
        (Eagle3, {"path": 5}, "path=5 must be a path"),
        (Eagle3, {"path": "head", "k": 32}, f"k=32 {K_ERROR}"),
        (Eagle3, {"path": "head", "layers": 3}, "layers=3 must be a list of layer numbers"),
        (
            Eagle3,
            {"path": "head", "layers": [1, -2]},
            "layers holds -2, which is none of layer numbers",
        ),
        (Eagle3, {"path": "head", "layers": [2, 2]}, "layers=(2, 2) repeats itself"),
        (SaveHiddenStates, {"directory": 3}, "directory=3 must be a path"),
        (
            SaveHiddenStates,
            {"directory": "d", "write_interval": 0},
            "write_interval=0 must be an integer in [1, 2147483647]",
        ),
        (
            SaveHiddenStates,
            {"directory": "d", "layers": 3},
            "layers=3 must be a list of layer numbers",
        ),
        (
            SaveHiddenStates,
            {"directory": "d", "layers": [1, -1]},
            "layers holds -1, which is none of layer numbers",
        ),
        (SaveHiddenStates, {"directory": "d", "layers": [1, 1]}, "layers=(1, 1) repeats itself"),
        (
            DraftVocabulary,
            {},
            "a draft vocabulary is of a text or of a tensor, one of them: text=None, tensor=None",
        ),
        (
            DraftVocabulary,
            {"text": "a", "tensor": "d2t"},
            "a draft vocabulary is of a text or of a tensor, one of them: text='a', tensor='d2t'",
        ),
        (DraftVocabulary, {"text": "a"}, "size=None must be an integer in [1, 2147483647]"),
        (
            DraftVocabulary,
            {"text": "a", "size": 0},
            "size=0 must be an integer in [1, 2147483647]",
        ),
        (DraftVocabulary, {"text": b"a", "size": 4}, "text=b'a' must be a path"),
        (DraftVocabulary, {"tensor": ""}, "tensor='' must be the name of a tensor"),
        (DraftVocabulary, {"tensor": 3}, "tensor=3 must be the name of a tensor"),
        (
            DraftVocabulary,
            {"tensor": "d2t", "size": 8},
            "size=8 is for a text: the tensor has its own",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"topk": 0},
            "topk=0 must be an integer in [1, 2147483647]",
        ),
        (RelaxedAcceptance, MARKS | {"delta": -0.1}, "delta=-0.1 must be a number in [0, 1]"),
        (RelaxedAcceptance, MARKS | {"delta": 1.5}, "delta=1.5 must be a number in [0, 1]"),
        (RelaxedAcceptance, MARKS | {"delta": math.nan}, "delta=nan must be a number in [0, 1]"),
        (RelaxedAcceptance, MARKS | {"delta": True}, "delta=True must be a number in [0, 1]"),
        (RelaxedAcceptance, MARKS | {"delta": "1"}, "delta='1' must be a number in [0, 1]"),
        (
            RelaxedAcceptance,
            MARKS | {"begin_token_ids": []},
            "begin_token_ids must name at least one token",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"end_token_ids": ()},
            "end_token_ids must name at least one token",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"begin_token_ids": 7},
            "begin_token_ids=7 must be a list of token ids",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"begin_token_ids": "<think>"},
            "begin_token_ids='<think>' must be a list of token ids",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"end_token_ids": [9, -1]},
            "end_token_ids holds -1, which is none of token ids",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"end_token_ids": [9.0]},
            "end_token_ids holds 9.0, which is none of token ids",
        ),
        (
            RelaxedAcceptance,
            MARKS | {"end_token_ids": [2**31]},
            "end_token_ids holds 2147483648, which is none of token ids",
        ),
        (
            RelaxedAcceptance,
            {"begin_token_ids": [1, 5, 3], "end_token_ids": [3, 1]},
            "tokens [1, 3] are among both begin_token_ids and end_token_ids",
        ),
        (GateOptions, {"window": 0}, "window=0 must be an integer in [1, 2147483647]"),
        (
            GateOptions,
            {"probe_every": 1.5},
            "probe_every=1.5 must be an integer in [1, 2147483647]",
        ),
        (GateOptions, {"max_live": 0}, "max_live=0 must be an integer in [1, 2147483647]"),
        (GateOptions, {"off_below": -1}, "off_below=-1 must be a finite number from 0 up"),
        (GateOptions, {"on_above": math.inf}, "on_above=inf must be a finite number from 0 up"),
        (GateOptions, {"on_above": math.nan}, "on_above=nan must be a finite number from 0 up"),
        (GateOptions, {"on_above": None}, "on_above=None must be a finite number from 0 up"),
        (
            GateOptions,
            {"off_below": 0.6, "on_above": 0.5},
            "off_below=0.6 exceeds on_above=0.5",
        ),
    ],
)
def test_errors_name_the_field_and_its_value(
    kind: type, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        kind(**options)
    assert str(refused.value) == message


@pytest.mark.parametrize("made", MADE)
def test_options_are_frozen_slotted_and_equal_by_value(made: Any) -> None:
    assert not hasattr(made, "__dict__")
    assert dataclasses.replace(made) == made and hash(dataclasses.replace(made)) == hash(made)
    for name in values(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, getattr(made, name))
    with pytest.raises(TypeError, match="unknown"):
        type(made)(unknown=1)


@pytest.mark.parametrize("kind", [MTP, NGram])
def test_only_the_draft_length_is_positional(kind: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(3, 4)


@pytest.mark.parametrize("kind", [DraftVocabulary, RelaxedAcceptance, GateOptions])
def test_the_rest_goes_by_keyword(kind: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(3)


@pytest.mark.parametrize("made", MADE)
def test_every_field_is_documented(made: Any) -> None:
    described = re.findall(r"^ {4}(\w+) {2,}\S", type(made).__doc__, flags=re.MULTILINE)
    assert described == list(values(made))


def test_lists_are_copied() -> None:
    ids = [7, 8]
    relaxed = RelaxedAcceptance(begin_token_ids=ids, end_token_ids=np.array([9]).tolist())
    ids.append(9)
    assert relaxed.begin_token_ids == (7, 8)


def test_marks_must_be_in_the_vocabulary() -> None:
    relaxed = RelaxedAcceptance(begin_token_ids=[7, 3], end_token_ids=[9])
    relaxed.check_vocabulary(10)
    with pytest.raises(ValueError) as refused:
        relaxed.check_vocabulary(9)
    assert str(refused.value) == "end_token_ids=(9,) exceed the vocabulary of 9 tokens"
    with pytest.raises(ValueError, match=r"begin_token_ids=\(7, 3\) exceed the vocabulary of 5"):
        relaxed.check_vocabulary(5)


@pytest.mark.parametrize(
    ("layers", "model_layers", "expected"),
    [
        (None, 36, (1, 17, 32)),
        (None, 16, (1, 7, 12)),
        (None, 4, (0, 1)),
        (None, 2, (0, 1)),
        (None, 1, ()),
        ([], 4, ()),
        ([3, 0], 4, (0, 3)),
    ],
)
def test_auxiliary_layers(layers: Any, model_layers: int, expected: tuple[int, ...]) -> None:
    saved = SaveHiddenStates("states", layers=layers)
    assert saved.layers_of(model_layers) == expected
    assert saved.k == 0


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError) as refused:
        SaveHiddenStates("states", layers=[0, 4]).layers_of(4)
    assert str(refused.value) == "layers=(0, 4): the model has layers 0 to 3"


@pytest.mark.parametrize(
    ("speculative", "text"),
    [
        (None, "off"),
        (MTP(), "mtp eagle, k=3"),
        (MTP(1, style="vanilla"), "mtp vanilla, k=1"),
        (
            MTP(2, style="vanilla", feed="target"),
            "mtp vanilla, k=2, the target's hidden states",
        ),
        (
            MTP(k=5, draft_vocab=WORDS),
            "mtp eagle, k=5, draft vocabulary of 32768 tokens from words.txt",
        ),
        (
            MTP(draft_vocab=DraftVocabulary(tensor="d2t")),
            "mtp eagle, k=3, draft vocabulary d2t",
        ),
        (NGram(5, max_n=3), "n-gram, k=5, max_n=3"),
        (Suffix(5), "suffix, k=5, factor=1, max_match=32"),
        (
            Suffix(factor=1.5, corpus=Path("a.txt")),
            "suffix, k=7, factor=1.5, max_match=32, corpus a.txt",
        ),
        (DraftModel(Path("models/small"), 2), "draft model models/small, k=2"),
        (
            DraftModel("small", min_confidence=0.25),
            "draft model small, k=3, confidence from 0.25",
        ),
        (MTP(min_confidence=0.5), "mtp eagle, k=3, confidence from 0.5"),
        (Eagle3("head", min_confidence=0.5), "eagle3 head, k=3, confidence from 0.5"),
        (Eagle3(Path("models/head"), 5), "eagle3 models/head, k=5"),
        (
            Eagle3("head", layers=(1, 5)),
            "eagle3 head, k=3, after layers 1, 5",
        ),
        (DFlash(Path("models/block"), 5), "dflash models/block, k=5"),
        (DFlash("block", layers=(1, 5)), "dflash block, k=7, after layers 1, 5"),
        (JumpForward(5), "jump-forward, k=5"),
        (UserProvided(4), "user-provided, k=4"),
        (SaveHiddenStates("out"), "hidden states to out"),
        (Auto(), "auto"),
    ],
)
def test_modes_describe_themselves(speculative: Any, text: str) -> None:
    check_speculative(speculative)
    assert describe(speculative) == text


@pytest.mark.parametrize("wrong", ["mtp", MTP, 3, GateOptions()])
def test_what_is_no_mode_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError) as refused:
        check_speculative(wrong)
    assert str(refused.value) == (
        f"speculative={wrong!r} must be one of "
        "MTP, NGram, Suffix, DraftModel, Eagle3, DFlash, JumpForward, UserProvided, "
        "SaveHiddenStates, Auto, or None"
    )


@pytest.mark.parametrize(
    ("max_batch", "expected"),
    [(1, NGram(5, max_n=3)), (4, NGram(5, max_n=3)), (5, NGram(3, max_n=5)), (64, NGram(3))],
)
def test_auto_follows_max_batch(max_batch: int, expected: NGram) -> None:
    assert resolve_auto(max_batch) == expected
    assert AUTO_MAX_LIVE == 32


@pytest.mark.parametrize(
    ("rows", "k"), [(1, MAX_DRAFTS), (2, MAX_DRAFTS), (4, 15), (16, 3), (32, 1), (64, 0), (8, 7)]
)
def test_rows_that_fit(rows: int, k: int) -> None:
    check_rows(rows, k)


@pytest.mark.parametrize(
    ("rows", "k", "max_live", "message"),
    [
        (
            17,
            3,
            None,
            "17 rows with k=3 drafts feed 68 tokens a step, and at most 64 fit: max_batch=16 does "
            "with k=3, or a larger one with a bucket of at most 16 rows and a gate whose max_live "
            "it serves; k=2 does with 17 rows",
        ),
        (
            64,
            1,
            33,
            "64 rows (the bucket that serves max_live=33) with k=1 drafts feed 128 tokens a step, "
            "and at most 64 fit: max_batch=32 does with k=1, or a larger one with a bucket of at "
            "most 32 rows and a gate whose max_live it serves",
        ),
    ],
)
def test_rows_that_do_not_fit(rows: int, k: int, max_live: int | None, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_rows(rows, k, max_live)
    assert str(refused.value) == message


# Forced acceptance.


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        (None, {}, None),
        (0, {}, 0),
        (3, {}, 3),
        (None, {FORCE_ACCEPTED: "2"}, 2),
        (None, {FORCE_ACCEPTED: "0"}, 0),
        (3, {FORCE_ACCEPTED: "1"}, 1),
        (3, {FORCE_ACCEPTED: "007"}, 7),
    ],
)
def test_the_environment_goes_before_the_config(
    configured: int | None,
    environ: dict[str, str],
    expected: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert forced_acceptance(configured, environ) == expected
    messages = [(record.levelno, record.getMessage()) for record in caplog.records]
    if expected is None:
        assert messages == []
    else:
        origin = FORCE_ACCEPTED if environ else "forced_acceptance"
        assert messages == [
            (
                logging.WARNING,
                f"{origin}={expected}: EVERY STEP ACCEPTS THAT MANY DRAFTS, RIGHT OR WRONG. "
                "The text is nonsense; this is for measuring speed alone.",
            )
        ]


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_ACCEPTED, raising=False)
    assert forced_acceptance(None) is None
    monkeypatch.setenv("GRAPHENGINE_FORCE_ACCEPTED", "2")
    assert forced_acceptance(None) == 2


@pytest.mark.parametrize("text", ["", " ", "-1", "+1", "1.0", "two", "1 ", "²", "٣", "None"])
def test_a_bad_value_in_the_environment_is_an_error(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        forced_acceptance(1, {FORCE_ACCEPTED: text})
    assert str(refused.value) == (
        f"GRAPHENGINE_FORCE_ACCEPTED={text!r} must be an integer from 0 up, or unset"
    )


@pytest.mark.parametrize("configured", [-1, 1.5, True, "2"])
def test_a_bad_value_in_the_config_is_an_error(configured: Any) -> None:
    with pytest.raises(ValueError) as refused:
        forced_acceptance(configured, {})
    assert str(refused.value) == (
        f"forced_acceptance={configured!r} must be an integer from 0 up, or None"
    )


# Trimmed vocabularies.


def test_the_most_frequent_tokens_ascend() -> None:
    text = [5, 9, 9, 2, 9, 5, 7, 7]
    assert frequent_tokens(text, 2, 10).tolist() == [5, 9]
    assert frequent_tokens(iter(text), 3, 10).tolist() == [5, 7, 9]
    assert frequent_tokens(text, 2, 10, always=[0]).tolist() == [0, 9]
    assert frequent_tokens(text, 2, 10, always=(9, 9)).tolist() == [5, 9]
    assert frequent_tokens(text, 6, 10).tolist() == [0, 1, 2, 5, 7, 9]
    assert frequent_tokens([], 3, 10, always=[4]).tolist() == [0, 1, 4]
    assert frequent_tokens(np.array(text), 3, 10, always=np.array([1])).tolist() == [1, 5, 9]
    assert frequent_tokens(text, 10, 10).tolist() == list(range(10))
    assert frequent_tokens(text, 2, 10).dtype == torch.int64


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_frequent_tokens_against_a_sort(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 12))
    token = st.integers(0, vocab - 1)
    text = data.draw(st.lists(token))
    size = data.draw(st.integers(1, vocab))
    always = data.draw(st.sets(token, max_size=size))
    counts = Counter(text)
    order = sorted(range(vocab), key=lambda i: (i not in always, -counts[i], i))
    ids = frequent_tokens(text, size, vocab, always)
    assert ids.tolist() == sorted(order[:size])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 0, 10), "size=0 must be an integer in [1, 10], the vocabulary"),
        (([1], 11, 10), "size=11 must be an integer in [1, 10], the vocabulary"),
        (([1], 2.0, 10), "size=2.0 must be an integer in [1, 10], the vocabulary"),
        (([1, 10], 2, 10), "the text has token 10, the vocabulary has 10"),
        (([-1], 2, 10), "the text has token -1, the vocabulary has 10"),
        (([1.0], 2, 10), "the text has token 1.0, the vocabulary has 10"),
        (([1], 2, 10, [12]), "always has token 12, the vocabulary has 10"),
        (([1], 2, 10, [3, 4, 5]), "always has 3 tokens, more than size=2"),
    ],
)
def test_wrong_texts_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        frequent_tokens(*arguments)
    assert str(refused.value) == message


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_offsets_become_ids() -> None:
    d2t = int64(0, 1, 1, 6)
    assert target_ids(d2t, 10).tolist() == [0, 2, 3, 9]
    assert d2t.tolist() == [0, 1, 1, 6]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), "must be int64 [N], not torch.int32 (2,)"),
        (int64(1, 2)[None], "must be int64 [N], not torch.int64 (1, 2)"),
        (int64(1)[0], "must be int64 [N], not torch.int64 ()"),
        (int64(), "must be int64 [N], not torch.int64 (0,)"),
        (int64(1, 3, 10), "maps draft 2 to token 10, the vocabulary has 10"),
        (int64(-1, 3), "maps draft 0 to token -1, the vocabulary has 10"),
        (int64(1, 3, 3), "maps drafts 1 and 2 to tokens 3 and 3: they must ascend"),
        (int64(5, 3), "maps drafts 0 and 1 to tokens 5 and 3: they must ascend"),
    ],
)
def test_what_is_no_vocabulary_is_refused(ids: torch.Tensor, message: str, tmp_path: Path) -> None:
    d2t = ids - torch.arange(ids.numel(), dtype=ids.dtype) if ids.dim() == 1 else ids
    with pytest.raises(ValueError) as refused:
        target_ids(d2t, 10)
    assert str(refused.value) == f"d2t {message}"
    file = tmp_path / "model.safetensors"
    save_file({"draft.d2t": d2t.contiguous()}, file)
    with pytest.raises(ValueError) as refused:
        read_offsets(file, "draft.d2t", 10)
    assert str(refused.value) == f"{file}: draft.d2t {message}"


def test_offsets_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"d2t": int64(0, 1, 1, 6), "w": torch.ones(2)}, file)
    d2t = read_offsets(file, "d2t", 10)
    assert d2t.dtype == torch.int64 and d2t.tolist() == [0, 1, 1, 6]
    with pytest.raises(ValueError) as refused:
        read_offsets(file, "t2d", 10)
    assert str(refused.value) == f"{file} has no tensor t2d"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.safetensors cannot be read: "):
        read_offsets(tmp_path / "none.safetensors", "d2t", 10)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"12345678 no header")
    with pytest.raises(ValueError, match=r"broken\.safetensors cannot be read: "):
        read_offsets(broken, "d2t", 10)
