"""Drafts from the longest match in a text and a corpus, against a plain loop over Python lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import suffix as module
from graphengine.kernels.draft.suffix import MAX_CORPUS, suffix_propose, suffix_propose_reference
from graphengine.kernels.step.state import DecodeLanes
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_launch,
    launches_handed_to,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
UNTOUCHED = -7
SLOTS = 4


@dataclass(frozen=True)
class Twin:
    propose: Callable[..., None]
    device: str

    def ints(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def table(self, columns: int) -> torch.Tensor:
        return torch.full((SLOTS, columns), UNTOUCHED, dtype=torch.int32, device=self.device)


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(suffix_propose_reference, "cpu")
    return Twin(suffix_propose, request.getfixturevalue("device"))


def plain_match(text: Sequence[int], known: Sequence[int], most: int) -> tuple[int, int]:
    """Length of the longest match of the end of `known`, and the last place after one."""
    best = (0, 0)
    for place in range(1, len(text)):
        n = 0
        while n < min(most, place, len(known)) and text[place - 1 - n] == known[-1 - n]:
            n += 1
        if n:
            best = max(best, (n, place))
    return best


def plain_drafts(known: list[int], corpus: list[int], supported: list[int]) -> list[int]:
    most = len(supported) - 1
    own, other = plain_match(known, known, most), plain_match(corpus, known, most)
    text, (n, place) = (corpus, other) if other[0] > own[0] else (known, own)
    return text[place : place + supported[n]] if n else []


def propose_once(
    twin: Twin, known: list[int], corpus: list[int], supported: list[int], columns: int
) -> tuple[list[int], int]:
    """The drafts after the last of the tokens comes, and how many proposals found nothing."""
    history, table = twin.table(24), twin.table(columns)
    history[2, : len(known) - 1] = twin.ints(known[:-1])
    unmatched = twin.ints([0] * SLOTS)
    lanes = DecodeLanes(twin.ints([HUGE]), twin.ints([2]), twin.ints([len(known) - 2]))
    twin.propose(
        history,
        twin.ints(corpus) if corpus else None,
        twin.ints(supported),
        twin.ints(known[-1:]),
        twin.ints([1]),
        lanes,
        table,
        unmatched_S=unmatched,
    )
    assert history[2].tolist() == known + [UNTOUCHED] * (24 - len(known))
    assert (table[[0, 1, 3]] == UNTOUCHED).all()
    return table[2].tolist(), int(unmatched[2])


EXAMPLES = {
    # The longest match wins over a later one, and supports as many drafts as it is long.
    "longest": ([1, 2, 3, 4, 7, 3, 8, 1, 2, 3], [], [4, 7, 3]),
    "latest": ([1, 2, 4, 1, 2, 5, 9, 1, 2], [], [5, 9]),
    "short": ([3, 4, 5, 6, 3], [], [4]),
    "nothing": ([1, 2, 3], [], []),
    # The sequence's own match wins over one as long; a longer one of the corpus wins.
    "own first": ([1, 2, 4, 1, 2], [1, 2, 6, 6], [4, 1]),
    "corpus": ([2, 4, 1, 2], [9, 1, 2, 6, 7], [6, 7]),
    "its end": ([8, 1, 2, 3], [0, 1, 2, 3], []),
    "up to its end": ([8, 1, 2, 3], [1, 2, 3, 5], [5]),
    "not from its start": ([5, 9], [9, 3, 4], [3]),
}


@pytest.mark.parametrize("block", [2, 1024])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(twin: Twin, monkeypatch: pytest.MonkeyPatch, block: int, name: str) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    known, corpus, drafts = EXAMPLES[name]
    supported = [0, 1, 2, 3, 4]
    assert plain_drafts(known, corpus, supported) == drafts
    found, unmatched = propose_once(twin, known, corpus, supported, 4)
    assert found == drafts + [-1] * (4 - len(drafts))
    assert unmatched == (not drafts)


@settings(deadline=None, max_examples=extent(20, 200))
@given(data=st.data())
def test_streams_of_tokens(twin: Twin, data: st.DataObject) -> None:
    """Rows that grow by several tokens a step, beside padded ones, up to the table's end."""
    positions, W = 24, data.draw(st.integers(1, 4))
    columns, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    drafts = st.integers(0, columns)
    supported = [0, *data.draw(st.lists(drafts, min_size=most, max_size=most))]
    token = st.integers(0, data.draw(st.integers(0, 2)))
    corpus = data.draw(st.lists(token, max_size=20))
    history, table, unmatched = twin.table(positions), twin.table(columns), twin.ints([0] * SLOTS)
    expected, missed = table.tolist(), [0] * SLOTS
    sequences = {slot: data.draw(st.lists(token, min_size=1, max_size=12)) for slot in (0, 1, 3)}
    for slot, tokens in sequences.items():
        history[slot, : len(tokens)] = twin.ints(tokens)
    block = data.draw(st.sampled_from([2, 8, 1024]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        for _ in range(4):
            rows = data.draw(st.permutations([0, 1, 3, -1]))
            emitted, counts = [], []
            fields: tuple[list[int], ...] = ([], [], [])
            for row in rows:
                new = data.draw(st.lists(token, max_size=W)) if row >= 0 else []
                at = len(sequences[row]) - 1 if row >= 0 else LOWEST
                emitted += [*new, *[HUGE] * (W - len(new))]
                counts.append(len(new) if row >= 0 else HUGE)
                for field, value in zip(fields, (HUGE, row, at), strict=True):
                    field += [value, *[value if field is fields[1] else HUGE] * (W - 1)]
                if new:
                    sequences[row] = (sequences[row] + new)[:positions]
                    found = plain_drafts(sequences[row], corpus, supported)
                    expected[row] = found + [-1] * (columns - len(found))
                    missed[row] += (
                        not plain_match(sequences[row], sequences[row], 1)[0]
                        and not (plain_match(corpus, sequences[row], 1)[0])
                    )
            twin.propose(
                history,
                twin.ints(corpus) if corpus else None,
                twin.ints(supported),
                twin.ints(emitted),
                twin.ints(counts),
                DecodeLanes(*map(twin.ints, fields)),
                table,
                unmatched_S=unmatched,
            )
            assert table.tolist() == expected
            assert unmatched.tolist() == missed
            for slot, tokens in sequences.items():
                assert history[slot, : len(tokens)].tolist() == tokens
        assert (history[2] == UNTOUCHED).all()


def test_an_oracle_with_other_matches_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match that is a token off gives other drafts: so do the examples above see one."""

    def off_by_one(text: torch.Tensor, known: torch.Tensor, most: int) -> tuple[int, int]:
        return plain_match(text.tolist(), known[:-1].tolist(), most)

    twin = Twin(suffix_propose_reference, "cpu")
    monkeypatch.setattr(module, "_longest_match", off_by_one)
    wrong = 0
    for known, corpus, drafts in EXAMPLES.values():
        found, _ = propose_once(twin, known, corpus, [0, 1, 2, 3, 4], 4)
        wrong += found != drafts + [-1] * (4 - len(drafts))
    assert wrong >= 6


def test_what_does_not_fit() -> None:
    twin = Twin(suffix_propose, "cpu")
    good: dict[str, Any] = {
        "history_SP": twin.table(9),
        "corpus_C": twin.ints([1, 2]),
        "supported_M1": twin.ints([0, 1]),
        "token_N": twin.ints([1, 1]),
        "count_R": twin.ints([1]),
        "lanes": DecodeLanes(*(twin.ints([0, 0]) for _ in range(3))),
        "draft_SK": twin.table(2),
        "unmatched_S": twin.ints([0] * SLOTS),
    }
    suffix_propose(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"history_SP": twin.table(9)[:3]}, r"history must be int32 \[4, P\] .* \(3, 9\)"),
        ({"corpus_C": twin.ints([])}, f"a corpus of 0 tokens, not of 1 to {MAX_CORPUS}"),
        ({"corpus_C": twin.ints([1]).long()}, "corpus must be int32, not torch.int64"),
        ({"supported_M1": twin.ints([0])}, "supported has 1 lengths of matches"),
        ({"draft_SK": twin.table(2).long()}, "draft_tokens must be a dense int32"),
        ({"unmatched_S": twin.ints([0])}, r"unmatched must be a dense \[4\], not \(1,\)"),
        ({"count_R": twin.ints([1] * 3)}, "2 lanes are no whole number of lanes"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            suffix_propose(**good | change)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("tokens", [0, 5000])
def test_tokens_are_read_after_the_wait(tokens: int) -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def call() -> None:
        suffix_propose(
            ints(4, 4096),
            ints(tokens) if tokens else None,
            ints(33),
            ints(8),
            ints(2),
            DecodeLanes(ints(8), ints(8), ints(8)),
            ints(4, 3),
            unmatched_S=ints(4),
            pdl=True,
        )

    launches: list[Op] = []
    with launches_handed_to(launches.append, module):
        call()
    scan, propose = launches
    assert scan.grid == (2, 4 + -(-tokens // 1024)) and propose.grid == (2,)
    for launch in (scan, propose):
        ptx, _ = compile_launch(launch)
        assert_waits_before_it_shows(ptx)
