"""Engines that draft from suffixes: what is drafted is what a plain search finds, step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, sampled
from engines.speculation import (
    ENDLESS,
    Job,
    demo_jobs,
    open_plain,
    open_speculating,
    outcomes,
    random_jobs,
    run_with,
)
from graphengine import Engine, Suffix
from graphengine.demo import heldout_text
from graphengine.drafters.suffix.drafter import SuffixDrafter, supported_drafts
from graphengine.speculative import NGram

K = 4


def plain_drafts(known: list[int], corpus: list[int], mode: Suffix) -> list[int]:
    """What followed the longest match, own text first, and the latest place of it."""
    best, found = (0, False, 0), known
    for text in (known, corpus):
        for place in range(1, len(text)):
            n = 0
            most = min(mode.max_match, place, len(known))
            while n < most and text[place - 1 - n] == known[-1 - n]:
                n += 1
            match = (n, text is known, place)
            if n and match > best:
                best, found = match, text
    n, _, place = best
    return found[place : place + min(mode.k, int(mode.factor * n))] if n else []


def check_each_step(engine: Engine, corpus: list[int]) -> set[int]:
    """Run what was submitted; how many drafts there were after a step, for any request."""
    mode, seen = engine.config.mode, set()
    assert isinstance(mode, Suffix)
    while engine.busy:
        engine.step()
        table = engine.runtime.buffers["draft_tokens"].tolist()
        for request in engine.scheduler.active:
            if request.token_ids and request.finish_reason is None:
                known = [*request.prompt_token_ids, *request.token_ids]
                drafts = plain_drafts(known, corpus, mode)
                padded = drafts + [-1] * (mode.k - len(drafts))
                assert table[request.job.placed.slot] == padded, f"after {known}"
                seen.add(len(drafts))
    return seen


@pytest.mark.parametrize(
    "mode",
    [Suffix(K), Suffix(K, factor=0.5, max_match=8), Suffix(3, factor=2.0)],
    ids=["usual", "half", "double"],
)
@pytest.mark.parametrize("has_corpus", [False, True])
def test_drafts_are_those_of_a_plain_search(
    device: str, tmp_path: Path, mode: Suffix, has_corpus: bool
) -> None:
    """Some rows of a step have more drafts than others."""
    corpus = [5, 6, 7, 8, 5, 6, 9, 9, 1, 2, 3, 4] if has_corpus else []
    file = tmp_path / "ids.npy"
    np.save(file, np.array(corpus, dtype=np.int64))
    mode = Suffix(
        mode.k,
        factor=mode.factor,
        max_match=mode.max_match,
        corpus=file if has_corpus else None,
    )
    options: dict[str, Any] = {"device": device, "lookahead": 0}
    with open_speculating(mode, **options) as engine:
        params = [greedy(20, **ENDLESS), sampled(20, seed=1, logit_bias={5: 9.0, 6: 9.0, 7: 8.0})]
        for prompt in ([1, 2, 3, 1, 2], [5, 6, 7] * 4, [9]):
            for each in params:
                engine.submit(prompt, each)
        seen = check_each_step(engine, corpus)
        assert len(seen) >= 3 and max(seen) >= 3
        counts = engine.acceptance
        assert 0 < counts.accepted < counts.proposed < mode.k * counts.steps
        assert engine.stats()["counters"]["suffix/unmatched"] > 0


def test_a_match_that_is_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults that the tests above are for: the last token is not known, and too many drafts."""
    search, supported = SuffixDrafter._search, supported_drafts

    def late(self: SuffixDrafter, token_N: Any, count_R: Any, lanes: Any, *, pdl: bool) -> None:
        search(self, token_N, (count_R - 1).clamp(min=1), lanes, pdl=pdl)

    def generous(length: int, factor: float, most: int) -> Any:
        return supported(length, factor + 1.0, most)

    faults: dict[str, Any] = {
        "graphengine.drafters.suffix.drafter.SuffixDrafter._search": late,
        "graphengine.drafters.suffix.drafter.supported_drafts": generous,
    }
    for name, wrong in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, wrong)
            with open_speculating(Suffix(K), lookahead=0) as engine:
                engine.submit([1, 2, 3, 1, 2], greedy(20, **ENDLESS))
                with pytest.raises(AssertionError, match="after"):
                    check_each_step(engine, [])


def test_tokens_are_those_of_plain_decoding(device: str, tmp_path: Path) -> None:
    """Greedy and sampled, stops inside drafts, with a corpus that says what comes."""
    text = tmp_path / "corpus.txt"
    text.write_text(heldout_text()[:4000], encoding="utf-8")
    repeated = Job("a b c d " * 12, greedy(40, stop=(" c",)))
    stopped = Job(tuple([7, 8, 9] * 9), sampled(30, seed=2, logit_bias={7: 30.0, 8: 30.0}))
    jobs = [*demo_jobs(), *random_jobs(4096, 3), repeated, stopped]
    with open_plain(device=device) as plain:
        expected = outcomes(plain, jobs)
    with open_speculating(Suffix(K, corpus=text), device=device) as engine:
        assert outcomes(engine, jobs) == expected
        assert engine.acceptance.accepted > 20


def test_a_session_s_earlier_turns_are_searched(device: str) -> None:
    """The second turn begins like the first, whose continuation is drafted."""
    options: dict[str, Any] = {"device": device, "lookahead": 0, "max_seq_len": 256}
    with open_speculating(Suffix(K), **options) as engine, engine.session() as session:
        session.append(LONG)
        session.generate(greedy(12, **ENDLESS))
        session.append(OTHER)
        session.append(session.token_ids[:20])
        before = engine.acceptance.proposed
        request = session.submit(greedy(6, **ENDLESS))
        seen = check_each_step(engine, [])
        assert request.cached_tokens > 0
        assert max(seen) == K and engine.acceptance.proposed > before


def test_a_corpus_is_read_as_text_or_as_ids(tmp_path: Path) -> None:
    """Both are the same tokens, held on the device, and part of the budget."""
    text, ids = tmp_path / "corpus.txt", tmp_path / "corpus.npy"
    text.write_text("def main():\n    return 0\n" * 8, encoding="utf-8-sig")
    found = []
    with open_engine() as engine:
        tokens = engine.tokenizer.encode(text.read_text(encoding="utf-8-sig"))
    np.save(ids, np.array(tokens, dtype=np.uint16))
    for file in (text, ids):
        with open_speculating(Suffix(K, corpus=file)) as engine:
            drafter = engine.core.drafter
            assert isinstance(drafter, SuffixDrafter) and drafter._corpus is not None
            found.append(drafter._corpus.tolist())
            assert drafter.table_bytes(0) == 4 * (len(tokens) + 33)
    assert found == [tokens, tokens]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "", r"corpus .*empty\.txt has 0 tokens, not 1 to 4194304"),
        ("none.txt", None, r"corpus .*none\.txt: there is no such file"),
        ("none.npy", None, r"corpus .*none\.npy: there is no such file"),
        ("far.npy", np.array([1, 4096]), r"token 4096 at index 1, the vocabulary has 4096"),
        ("low.npy", np.array([-1]), r"token -1 at index 0, the vocabulary has 4096"),
        ("float.npy", np.array([0.5]), r"must be integers \[C\], not float64 \(1,\)"),
        ("square.npy", np.zeros((2, 2), int), r"must be integers \[C\], not int64 \(2, 2\)"),
        ("text.npy", "no array", r"corpus .*text\.npy is no array of integers as NumPy saves one"),
        ("text.NPY", "no array", r"corpus .*text\.NPY is no array of integers"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_told(
    tmp_path: Path, name: str, content: Any, said: str
) -> None:
    file = tmp_path / name
    if isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    elif content is not None:
        np.save(file, content)
    error = FileNotFoundError if content is None else ValueError
    with pytest.raises(error, match=said):
        open_speculating(Suffix(corpus=file))


def test_without_a_match_nothing_is_verified() -> None:
    """Where n-grams repeat the last token, a step here feeds one token a row."""
    params = greedy(2, **ENDLESS)
    for mode, proposed in ((NGram(3), 3), (Suffix(3), 0)):
        with open_speculating(mode, lookahead=0) as engine:
            engine.submit([300, 301, 302], sampled(8, seed=1, temperature=50.0))
            run_with(engine)
            assert (engine.acceptance.proposed > 0) == (proposed > 0)
            assert engine.generate(PROMPT, params).token_ids
