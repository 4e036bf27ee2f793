"""Drafts out of the request's own tokens, against a plain loop over a Python list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.draft import ngram as module
from graphengine.kernels.draft.ngram import (
    ngram_prompt,
    ngram_prompt_reference,
    ngram_propose,
    ngram_propose_reference,
)
from graphengine.kernels.step.state import DecodeLanes, PrefillLanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)
UNTOUCHED = -7
SLOTS = 6


@dataclass(frozen=True)
class Twin:
    propose: Callable[..., None]
    prompt: Callable[..., None]
    device: str

    def ints(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def table(self, columns: int, value: int = UNTOUCHED) -> torch.Tensor:
        return torch.full((SLOTS, columns), value, dtype=torch.int32, device=self.device)

    def counts(self) -> torch.Tensor:
        return torch.zeros(SLOTS, dtype=torch.int32, device=self.device)

    def chunk(self, slot: int, start: int, tokens: Sequence[int], bucket: int) -> PrefillLanes:
        """Padded lanes are poison."""
        return self.chunks([(slot, start, tokens)], bucket)

    def chunks(self, given: Sequence[tuple[int, int, Sequence[int]]], bucket: int) -> PrefillLanes:
        """The lanes of several chunks, some of which may be empty."""
        tokens = [token for _, _, part in given for token in part]
        slots = [slot for slot, _, part in given for _ in part]
        positions = [at for _, start, part in given for at in range(start, start + len(part))]
        ends = [*accumulate(len(part) for _, _, part in given)]
        padded = bucket - len(tokens)
        return PrefillLanes(
            token=self.ints([*tokens, *[HUGE] * padded]),
            slot=self.ints([*slots, *[-1] * padded]),
            position=self.ints([*positions, *[LOWEST] * padded]),
            query_start=self.ints([0, *ends]),
            last=self.ints(
                [end - 1 if part else 0 for end, (*_, part) in zip(ends, given, strict=True)]
            ),
        )


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(ngram_propose_reference, ngram_prompt_reference, "cpu")
    return Twin(ngram_propose, ngram_prompt, request.getfixturevalue("device"))


def plain_drafts(tokens: Sequence[int], max_n: int, K: int) -> tuple[list[int], bool]:
    """K drafts, -1 for none, and whether anything was found."""
    for n in range(max_n, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                drafts = list(tokens[end : end + K])
                return drafts + [-1] * (K - len(drafts)), True
    return [tokens[-1]] * K, False


class Sequences:
    """What the slots' tables should hold, and what the last proposals should have been."""

    def __init__(self, max_n: int, K: int, columns: int, positions: int) -> None:
        self.max_n, self.K, self.columns = max_n, K, columns
        self.history = [[UNTOUCHED] * positions for _ in range(SLOTS)]
        self.drafts = [[UNTOUCHED] * columns for _ in range(SLOTS)]
        self.unmatched = [0] * SLOTS

    def put(self, slot: int, tokens: Sequence[int], propose: bool) -> None:
        self.history[slot][: len(tokens)] = tokens
        if propose and self.K:
            drafts, found = plain_drafts(tokens, self.max_n, self.K)
            self.drafts[slot] = drafts + [-1] * (self.columns - self.K)
            self.unmatched[slot] += not found

    def check(self, history: torch.Tensor, drafts: torch.Tensor, unmatched: torch.Tensor) -> None:
        assert history.tolist() == self.history
        assert drafts.tolist() == self.drafts
        assert unmatched.tolist() == self.unmatched


@pytest.mark.parametrize(
    "tokens, max_n, K, drafts, found",
    [
        # The latest of the longest: after the second "1 2 3".
        ([1, 2, 3, 4, 1, 2, 3, 5, 9, 3, 7, 1, 2, 3], 3, 3, [5, 9, 3], True),
        # A longer match wins over a later one.
        ([1, 2, 3, 4, 7, 3, 8, 1, 2, 3], 3, 2, [4, 7], True),
        ([1, 2, 3, 4, 7, 3, 8, 1, 2, 3], 1, 2, [8, 1], True),
        # The continuation runs on into what was looked up, and ends where it ends.
        ([5, 6, 5, 6], 2, 4, [5, 6, -1, -1], True),
        ([5, 5, 5], 3, 3, [5, -1, -1], True),
        # The last token itself is no earlier occurrence.
        ([1, 2, 3], 3, 2, [3, 3], False),
        ([4, 4], 5, 1, [4], True),
    ],
)
@pytest.mark.parametrize("block", [2, 8192])
def test_examples(twin: Twin, monkeypatch, block, tokens, max_n, K, drafts, found):
    """With blocks of 2 a longer match lies in another block than a later one."""
    monkeypatch.setattr(module, "_BLOCK", block)
    assert plain_drafts(tokens, max_n, K) == (drafts, found)
    history, table, unmatched = twin.table(20), twin.table(K), twin.counts()
    history[2, : len(tokens) - 1] = twin.ints(tokens[:-1])
    lanes = DecodeLanes(twin.ints([HUGE]), twin.ints([2]), twin.ints([len(tokens) - 2]))
    twin.propose(
        history,
        twin.ints(tokens[-1:]),
        twin.ints([1]),
        lanes,
        table,
        max_n=max_n,
        num_speculative_tokens=K,
        unmatched_S=unmatched,
    )
    assert history[2].tolist() == tokens + [UNTOUCHED] * (20 - len(tokens))
    assert table[2].tolist() == drafts
    assert unmatched.tolist() == [0, 0, 0 if found else 1, 0, 0, 0]


@settings(deadline=None, max_examples=extent(13, 40))
@given(data=st.data())
def test_requests_from_prompt_to_end(twin: Twin, data):
    """Prompts in chunks, steps of several rows of which some are padded, slots used again."""
    max_n, W = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    columns = data.draw(st.integers(1, 5))
    K = data.draw(st.integers(0, columns))
    positions = 40
    alphabet = data.draw(st.integers(1, 4))
    token = st.integers(0, alphabet - 1)
    history, table, unmatched = twin.table(positions), twin.table(columns), twin.counts()
    expected = Sequences(max_n, K, columns, positions)
    options: dict[str, Any] = {
        "max_n": max_n,
        "num_speculative_tokens": K,
        "unmatched_S": unmatched,
    }
    sequences: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", data.draw(st.sampled_from([2, 8, 1024])))
        for _ in range(data.draw(st.integers(1, 6))):
            slot = data.draw(st.integers(0, SLOTS - 1))
            prompt = data.draw(st.lists(token, min_size=1, max_size=16))
            sampled = data.draw(st.one_of(token, st.just(-1)))
            for start in range(0, len(prompt), 7):
                part = prompt[start : start + 7]
                final = start + 7 >= len(prompt)
                twin.prompt(
                    history,
                    twin.chunk(slot, start, part, data.draw(st.sampled_from([7, 9]))),
                    twin.ints([sampled if final else HUGE]),
                    twin.ints([5 if final else 0]),
                    table,
                    **options,
                )
                whole = prompt[: start + 7] + [sampled] * (final and sampled >= 0)
                expected.put(slot, whole, final and sampled >= 0)
            sequences[slot] = whole
            expected.check(history, table, unmatched)
            if sampled < 0:
                del sequences[slot]

            running = [s for s, tokens in sequences.items() if len(tokens) + W <= positions]
            rows = [data.draw(st.sampled_from([s, s, -1])) for s in running] or [-1]
            emitted, lanes = [], ([], [], [])
            counts = []
            for row in rows:
                new = data.draw(st.lists(token, max_size=W)) if row >= 0 else []
                at = len(sequences[row]) - 1 if row >= 0 else LOWEST
                emitted += [*new, *[HUGE] * (W - len(new))]
                counts.append(len(new) if row >= 0 else HUGE)
                for field, value in zip(lanes, (HUGE, row, at), strict=True):
                    field += [value, *[value if field is lanes[1] else HUGE] * (W - 1)]
                if row >= 0 and new:
                    sequences[row] = sequences[row] + new
                    expected.put(row, sequences[row], True)
            twin.propose(
                history,
                twin.ints(emitted),
                twin.ints(counts),
                DecodeLanes(*map(twin.ints, lanes)),
                table,
                **options,
            )
            expected.check(history, table, unmatched)


@pytest.mark.parametrize("where", [None, 3, 8191, 8192, 100_000])
def test_long_sequences(twin: Twin, where):
    """131,072 tokens without a repetition, but for three tokens at one place."""
    positions, K = 131_072, 4
    history = torch.arange(positions, dtype=torch.int32, device=twin.device).repeat(2, 1)
    history[:, -2:] = -1
    tokens = [*range(positions - 2), 200_000, 200_001]
    if where is not None:
        tokens[-3:] = tokens[where : where + 3]
    history[1, -3] = tokens[-3]
    table = torch.full((2, K), UNTOUCHED, dtype=torch.int32, device=twin.device)
    lanes = DecodeLanes(
        twin.ints([0, 0]), twin.ints([1, 1]), twin.ints([positions - 3, positions - 2])
    )
    twin.propose(
        history,
        twin.ints(tokens[-2:]),
        twin.ints([2]),
        lanes,
        table,
        max_n=5,
        num_speculative_tokens=K,
    )
    assert history[1].tolist() == tokens
    drafts = [tokens[-1]] * K if where is None else tokens[where + 3 : where + 3 + K]
    assert table.tolist() == [[UNTOUCHED] * K, drafts]


def test_tokens_past_the_table_are_dropped(twin: Twin):
    """The slot after it must not get them."""
    history, table = twin.table(4), twin.table(2)
    history[1] = twin.ints([8, 9, 8, UNTOUCHED])
    lanes = DecodeLanes(*(twin.ints([value] * 3) for value in (HUGE, 1, 2)))
    options: dict[str, Any] = {"max_n": 2, "num_speculative_tokens": 2}
    twin.propose(history, twin.ints([9, 8, 9]), twin.ints([3]), lanes, table, **options)
    assert history[1].tolist() == [8, 9, 8, 9]
    assert (history[2] == UNTOUCHED).all()
    assert table[1].tolist() == [8, 9]
    chunk = twin.chunk(3, 2, [1, 2, 3, 4], 4)
    twin.prompt(history, chunk, twin.ints([5]), twin.ints([1]), table, **options)
    assert history[3].tolist() == [UNTOUCHED, UNTOUCHED, 1, 2]
    assert (history[4] == UNTOUCHED).all()


def test_no_match_reaches_into_the_slot_before(twin: Twin):
    """There "1" stands in front of this slot's first "2"."""
    history, table = twin.table(6, value=1), twin.table(1)
    history[2] = twin.ints([2, 5, 2, 7, 1, UNTOUCHED])
    lanes = DecodeLanes(*(twin.ints([value]) for value in (HUGE, 2, 4)))
    options: dict[str, Any] = {"max_n": 3, "num_speculative_tokens": 1}
    twin.propose(history, twin.ints([2]), twin.ints([1]), lanes, table, **options)
    assert table[2].tolist() == [7]


@settings(deadline=None, max_examples=extent(10, 40))
@given(data=st.data())
def test_chunks_of_several_prompts(twin: Twin, data):
    """Each is taken in as it would be alone, whether it is a prompt's last one or not."""
    K, positions = 3, 24
    options: dict[str, Any] = {"max_n": 3, "num_speculative_tokens": K}
    slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(2, 4))]
    part = st.lists(st.integers(0, 2), max_size=9)
    given = [(slot, data.draw(st.integers(0, 14)), data.draw(part)) for slot in slots]
    sampled = [data.draw(st.sampled_from([-1, 0, 1])) for _ in slots]
    final = [data.draw(st.sampled_from([0, 1])) for _ in slots]
    # What earlier chunks left.
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    before = torch.randint(3, (SLOTS, positions), generator=seed).tolist()
    found = []
    for together in (True, False):
        history, table, unmatched = twin.ints(before), twin.table(K), twin.counts()
        groups = [[*range(len(given))]] if together else [[index] for index in range(len(given))]
        for group in groups:
            twin.prompt(
                history,
                twin.chunks([given[index] for index in group], 40),
                twin.ints([sampled[index] for index in group]),
                twin.ints([final[index] for index in group]),
                table,
                unmatched_S=unmatched,
                **options,
            )
        found.append([history.tolist(), table.tolist(), unmatched.tolist()])
    assert found[0] == found[1]
    for (slot, start, tokens), token, last in zip(given, sampled, final, strict=True):
        row, drafts = found[0][0][slot], found[0][1][slot]
        assert row[start : start + len(tokens)] == tokens
        proposed = bool(tokens and last and token >= 0)
        assert (drafts != [UNTOUCHED] * K) == proposed
        if proposed:
            end = start + len(tokens) + 1
            assert row[end - 1] == token and drafts == plain_drafts(row[:end], 3, K)[0]


def test_nothing_of_an_empty_chunk(twin: Twin):
    history, table = twin.table(9), twin.table(2)
    chunk = twin.chunk(2, 0, [], 4)
    options: dict[str, Any] = {"max_n": 2, "num_speculative_tokens": 2}
    twin.prompt(history, chunk, twin.ints([5]), twin.ints([1]), table, **options)
    assert (history == UNTOUCHED).all()
    assert (table == UNTOUCHED).all()


@pytest.mark.parametrize("prompt", [False, True])
def test_what_does_not_fit(prompt):
    twin = Twin(ngram_propose, ngram_prompt, "cpu")
    lanes = DecodeLanes(*(twin.ints([0, 0]) for _ in range(3)))
    good: dict[str, Any] = {
        "history_SP": twin.table(9),
        "draft_SK": twin.table(2),
        "max_n": 3,
        "num_speculative_tokens": 2,
        "unmatched_S": twin.counts(),
    }
    if prompt:
        good |= {"chunk": twin.chunk(0, 0, [1], 2)}
        good |= {"token_C": twin.ints([1]), "final_C": twin.ints([1])}
    else:
        good |= {"token_N": twin.ints([1, 1]), "count_R": twin.ints([1]), "lanes": lanes}
    op: Callable[..., None] = ngram_prompt if prompt else ngram_propose
    op(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"history_SP": twin.table(9)[:3]},
            r"history must be int32 \[6, P\] with dense rows, not torch.int32 \(3, 9\)",
        ),
        ({"history_SP": twin.table(9).long()}, "not torch.int64"),
        ({"history_SP": twin.ints([[0] * 6] * 9).t()}, "with dense rows"),
        ({"draft_SK": twin.table(2).long()}, "draft_tokens must be a dense int32"),
        ({"max_n": 0}, "max_n=0 must be 1 or more"),
        ({"num_speculative_tokens": 3}, "3 drafts do not fit a table of 2 drafts a slot"),
        ({"num_speculative_tokens": -1}, "-1 drafts do not fit a table of 2"),
        ({"unmatched_S": twin.ints([0])}, r"unmatched must be a dense \[6\], not \(1,\)"),
    ]
    if prompt:
        wrong.append(({"token_C": twin.ints([1, 2])}, r"token must be a dense \[1\]"))
        wrong.append(({"final_C": twin.ints([1, 2])}, r"final must be a dense \[1\]"))
    else:
        wrong.append(({"count_R": twin.ints([1] * 3)}, "2 lanes are no whole number of lanes"))
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            op(**good | change)


# What the PTX says.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")


@compiles
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("K", [0, 3])
def test_tokens_are_read_after_the_wait(prompt, K):
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    options: dict[str, Any] = {"max_n": 5, "num_speculative_tokens": K, "pdl": True}
    options["unmatched_S"] = ints(4)
    tables = ints(4, 131_072), ints(4, 3)
    chunk = PrefillLanes(ints(256), ints(256), ints(256), ints(2), ints(1))
    lanes = DecodeLanes(ints(8), ints(8), ints(8))

    def call() -> None:
        if prompt:
            ngram_prompt(tables[0], chunk, ints(1), ints(1), tables[1], **options)
        else:
            ngram_propose(tables[0], ints(8), ints(2), lanes, tables[1], **options)

    launch = record_launch(module, call)
    assert launch.grid == ((1,) if prompt else (2,))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait and load.past_l1}
    assert early == (
        {"begin_ptr", "chunk_slot_ptr", "chunk_position_ptr"}
        if prompt
        else {"slot_ptr", "position_ptr"}
    )
    assert not [load for load in loads if not load.after_wait and not load.past_l1]
    assert any(load.argument == "history_ptr" for load in loads) == (K > 0)
