"""Stop sequences, against a loop over Python lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.step import stop_sequences as module
from graphengine.kernels.step.state import DecodeLanes
from graphengine.kernels.step.stop_sequences import (
    StopMatch,
    StopSequences,
    match_stop_sequences,
    match_stop_sequences_reference,
)
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

HUGE, LOWEST = 2**31 - 1, -(2**31)


@dataclass(frozen=True)
class Row:
    """A row's slot, what that had said before the step, and what the step emits."""

    slot: int
    said: Sequence[int]
    emitted: Sequence[int]
    sequences: Sequence[Sequence[int]]
    start: int = 0
    min_len: int = 0

    def match(self) -> tuple[int, int]:
        """(tokens kept, index of the sequence), token by token."""
        for kept in range(1, len(self.emitted) + 1):
            all_said = [*self.said, *self.emitted[:kept]]
            if len(all_said) - 1 < self.min_len:
                continue
            for index, sequence in enumerate(self.sequences):
                begin = len(all_said) - len(sequence)
                matches = begin >= self.start and all_said[begin:] == list(sequence)
                if sequence and begin >= 0 and matches:
                    return kept, index
        return len(self.emitted), -1


@dataclass(frozen=True)
class Twin:
    match: Callable[..., StopMatch]
    device: str

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def check(
        self,
        rows: Sequence[Row | None],
        width: int,
        *,
        slots: int = 6,
        sequences: int = 3,
        length: int = 4,
        positions: int = 40,
        expected: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Each row against the loop, if not against `expected`. Padded rows, and
        whatever of the tables is not theirs, are poison."""
        wanted = np.zeros((slots, sequences, length), np.int32)
        start, min_len = np.full(slots, LOWEST, np.int32), np.full(slots, LOWEST, np.int32)
        history = np.zeros((slots, positions + 5), np.int32)
        token: list[int] = []
        count: list[int] = []
        lanes: tuple[list[int], ...] = ([], [], [])
        for row in rows:
            emitted = row.emitted if row else []
            token += [*emitted, *[0] * (width - len(emitted))]
            count.append(len(emitted) if row else HUGE)
            first = len(row.said) - 1 if row else LOWEST
            number = row.slot if row else -1
            for column, value in zip(lanes, (HUGE, number, first), strict=True):
                column += [value, *[HUGE] * (width - 1)]
            if row is None:
                continue
            wanted[row.slot] = -1
            for index, sequence in enumerate(row.sequences):
                if sequence:
                    wanted[row.slot, index, length - len(sequence) :] = sequence
            start[row.slot], min_len[row.slot] = row.start, row.min_len
            history[row.slot, : len(row.said)] = row.said
        tensors = StopSequences(*map(self.ints, (wanted, start, min_len)))
        match = self.match(
            self.ints(token),
            self.ints(count),
            DecodeLanes(*map(self.ints, lanes)),
            # Rows that are not dense.
            self.ints(history)[:, :positions],
            tensors,
        )
        actual = list(zip(match.count_R.tolist(), match.index_R.tolist(), strict=True))
        assert actual == (expected or [row.match() if row else (0, -1) for row in rows])


@pytest.fixture(scope="module", params=["reference", "kernel"])
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(match_stop_sequences_reference, "cpu")
    return Twin(match_stop_sequences, request.getfixturevalue("device"))


ROWS = {
    "all of it in history but the last": (Row(0, [1, 2, 3], [4], [[2, 3, 4]]), (1, 0)),
    "all of it emitted": (Row(0, [1], [2, 3, 4, 5], [[3, 4]]), (3, 0)),
    "across the step": (Row(0, [1, 2], [3, 4, 5], [[2, 3, 4]]), (2, 0)),
    "the earliest wins": (Row(0, [1], [2, 3, 4], [[3, 4], [3]]), (2, 1)),
    "of those at one place the lowest index": (Row(0, [1], [2, 3], [[], [3], [2, 3]]), (2, 1)),
    "the last emitted token": (Row(0, [1], [2, 3, 4], [[9], [4]]), (3, 1)),
    "nothing matches": (Row(0, [1, 2], [3, 4], [[3, 5], [2, 4]]), (2, -1)),
    "nothing is wanted": (Row(0, [1, 2], [3, 4], []), (2, -1)),
    "nothing is emitted": (Row(0, [1, 2], [], [[2]]), (0, -1)),
    "longer than what was said": (Row(0, [1], [2], [[5, 1, 2], [7, 5, 1, 2]]), (1, -1)),
    "as long as what was said": (Row(0, [1, 5], [2], [[1, 5, 2]]), (1, 0)),
    "it may not begin in the prompt": (Row(0, [1, 2], [3, 2, 3], [[2, 3]], start=2), (3, 0)),
    "it may begin in the prompt": (Row(0, [1, 2], [3, 2, 3], [[2, 3]], start=1), (1, 0)),
    "not before min_len": (Row(0, [1, 2], [3, 3, 3], [[3]], min_len=4), (3, 0)),
    "its last token is the wanted one": (Row(0, [1, 2, 2], [2, 2], [[2, 3]]), (2, -1)),
}


@pytest.mark.parametrize("case", ROWS)
def test_one_row(twin: Twin, case: str):
    row, expected = ROWS[case]
    assert row.match() == expected, "the loop of the tests is wrong"
    twin.check([row], 4)
    twin.check([None, row, None], 5)


@settings(deadline=None, max_examples=extent(30, 80), derandomize=True)
@given(data=st.data())
def test_matches_a_plain_loop(twin: Twin, data: st.DataObject):
    width, length = data.draw(st.sampled_from([1, 1, 2, 4, 5])), data.draw(st.integers(1, 5))
    number = data.draw(st.integers(0, 4))
    token = st.integers(0, data.draw(st.sampled_from([0, 1, 2, 5])))
    rows: list[Row | None] = []
    for slot in data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 4))]:
        said = data.draw(st.lists(token, min_size=1, max_size=9))
        rows.append(
            Row(
                slot,
                said,
                data.draw(st.lists(token, max_size=width)),
                data.draw(st.lists(st.lists(token, max_size=length), max_size=number)),
                start=data.draw(st.sampled_from([0, len(said), len(said) - 1])),
                min_len=data.draw(st.sampled_from([0, 0, len(said) + 1])),
            )
        )
    padded = [None] * data.draw(st.integers(0, 2))
    rows = data.draw(st.permutations([*rows, *padded]))
    twin.check(rows, width, sequences=number, length=length)


def test_many_long_sequences(twin: Twin):
    rng = np.random.default_rng(0)
    said = rng.integers(0, 70_000, 60).tolist()
    emitted = rng.integers(0, 70_000, 15).tolist()
    sequences = [rng.integers(0, 70_000, rng.integers(1, 17)).tolist() for _ in range(40)]
    sequences[29] = [*said[-9:], *emitted[:7]]
    sequences[33] = sequences[29][-3:]
    row = Row(1, said, emitted, sequences, start=20, min_len=40)
    assert row.match() == (7, 29)
    twin.check([None, row], 15, sequences=40, length=17, positions=100)


def test_history_that_ends_early_matches_nothing(twin: Twin):
    """Tokens past the table's end are unknown."""
    twin.check([Row(0, [1, 2, 3], [4], [[3, 4], [4]])], 1, positions=3)
    twin.check([Row(0, [0, 0, 0], [4], [[0, 4]])], 1, positions=2, expected=[(1, -1)])


def good_arguments(**changes: Any) -> dict[str, Any]:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    good: dict[str, Any] = {
        "token_N": ints(4),
        "count_R": ints(2),
        "lanes": DecodeLanes(ints(4), ints(4), ints(4)),
        "history_SP": ints(3, 9),
        "sequences": StopSequences(ints(3, 2, 4), ints(3), ints(3)),
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_N": torch.zeros(4)}, r"token must be int32, not torch.float32"),
        ({"count_R": torch.zeros(3, dtype=torch.int32)}, r"4 lanes are no whole number of lanes"),
        ({"history_SP": torch.zeros(2, 9).int()}, r"history must be int32 \[3, .* \(2, 9\)"),
        ({"history_SP": torch.zeros(9, 3).int().t()}, r"history must be .* with dense rows"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str):
    match_stop_sequences(**good_arguments())
    with pytest.raises(ValueError, match=message):
        match_stop_sequences(**good_arguments(**changes))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", torch.zeros(2, 2, 4).int(), r"stop sequences must be .* for 3 slots, not .*"),
        ("tokens", torch.zeros(3, 2, 4), r"stop sequences must be a dense int32 .*float32"),
        ("tokens", torch.zeros(3, 2, 0).int(), r"stop sequences of 0 tokens: \(3, 2, 0\)"),
        ("min_len", torch.zeros(2).int(), r"min_len must be a dense \[3\], not \(2,\)"),
        ("start", torch.zeros(3), r"start must be int32, not torch.float32"),
    ],
)
def test_wrong_sequences_are_refused(field: str, value: torch.Tensor, message: str):
    sequences = good_arguments()["sequences"]._replace(**{field: value})
    with pytest.raises(ValueError, match=message):
        match_stop_sequences(**good_arguments(sequences=sequences))


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("width", [1, 4])
def test_tokens_are_read_after_the_wait(width: int):
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def call() -> None:
        match_stop_sequences(
            ints(2 * width),
            ints(2),
            DecodeLanes(ints(2 * width), ints(2 * width), ints(2 * width)),
            ints(4, 8192),
            StopSequences(ints(4, 8, 16), ints(4), ints(4)),
            pdl=True,
        )

    launch = record_launch(module, call)
    assert launch.grid == (2,)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait and load.past_l1}
    assert early == {"slot_ptr", "position_ptr"}
    assert not [load for load in loads if not load.after_wait and not load.past_l1]
    # The device function may stand in front of a wait.
    assert all(load.past_l1 for load in loads if load.argument == "history_ptr")
