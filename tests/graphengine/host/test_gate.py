"""The gate: its rule step by step, and what holds under any acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.host.gate import Gate


def make_gate(**options: Any) -> Gate:
    defaults = {
        "lengths": (0, 3),
        "window": 4,
        "off_below": 0.5,
        "on_above": 1.0,
        "probe_every": 5,
    }
    return Gate(**(defaults | options))


def step(gate: Gate, rows: int) -> int:
    """The drafts of a step that is launched."""
    drafts = gate.next_drafts(rows)
    assert gate.next_drafts(rows) == drafts, "asking counts for nothing"
    gate.launched(rows)
    return drafts


def widths(gate: Gate, accepted: Iterator[int] | int, *, steps: int, rows: int = 1) -> list[int]:
    """Drafts of `steps` steps of a row that accepts what `accepted` says, as far as it has them."""
    used = []
    for _ in range(steps):
        drafts = step(gate, rows)
        used.append(drafts)
        if drafts:
            hit = accepted if isinstance(accepted, int) else next(accepted)
            gate.record(min(hit, drafts), 1)
    return used


def test_it_stays_on_while_drafts_are_accepted() -> None:
    gate = make_gate()
    assert widths(gate, 1, steps=30) == [3] * 30
    assert gate.counters == {"gate/steps/3": 30}


def test_it_goes_off_after_a_window_and_probes() -> None:
    gate = make_gate()
    # A window; off for 5 steps; a probe of a window; and so on.
    assert widths(gate, 0, steps=22) == [*[3] * 4, *[0] * 5, *[3] * 4, *[0] * 5, *[3] * 4]
    assert gate.counters == {
        "gate/off": 1,
        "gate/probes": 2,
        "gate/on": 0,
        "gate/steps/0": 10,
        "gate/steps/3": 12,
    }
    assert gate.drafts == 0 and not gate.probing and gate.mean is None


def test_it_comes_back_when_a_probe_is_accepted() -> None:
    gate = make_gate()
    widths(gate, 0, steps=9)
    assert widths(gate, 2, steps=40) == [3] * 40
    assert gate.counters["gate/on"] == 1 and gate.counters["gate/probes"] == 1
    assert gate.mean == 2


@pytest.mark.parametrize(("accepted", "kept"), [([1, 1, 1, 1], False), ([1, 1, 1, 2], True)])
def test_a_probe_must_exceed_on_above(accepted: list[int], kept: bool) -> None:
    gate = make_gate()
    widths(gate, 0, steps=9)
    widths(gate, iter(accepted), steps=4)
    assert gate.drafts == (3 if kept else 0)


@pytest.mark.parametrize(("accepted", "kept"), [([0, 1, 0, 1], True), ([0, 1, 0, 0], False)])
def test_a_length_is_kept_at_off_below(accepted: list[int], kept: bool) -> None:
    gate = make_gate()
    widths(gate, iter(accepted), steps=4)
    assert gate.drafts == (3 if kept else 0)


def test_the_window_rolls() -> None:
    gate = make_gate()
    widths(gate, iter([3, 3, 3, 3, 0, 0, 0]), steps=7)
    assert gate.drafts == 3 and gate.mean == 3 / 4
    widths(gate, 0, steps=1)
    assert gate.drafts == 0


def test_a_record_may_stand_for_the_steps_of_a_request() -> None:
    """The mean is that of the steps: one long request outweighs three short ones."""
    gate = make_gate()
    for accepted, steps in ((0, 2), (0, 2), (0, 2), (50, 94)):
        gate.record(accepted, steps)
    assert gate.drafts == 3 and gate.mean == 0.5
    gate.record(0, 0)
    assert gate.mean == 0.5, "without a step it is no record"


def test_what_was_in_flight_when_it_went_off_is_forgotten() -> None:
    gate = make_gate()
    widths(gate, 0, steps=4)
    for _ in range(9):
        gate.record(3, 1)
    assert gate.drafts == 0 and gate.mean is None


def test_many_rows_use_the_first_length_and_leave_the_gate_as_it_was() -> None:
    gate = make_gate(max_live=2)
    widths(gate, 2, steps=3)
    assert widths(gate, 2, steps=50, rows=3) == [0] * 50
    assert gate.mean == 2 and gate.counters["gate/overloaded"] == 50
    assert widths(gate, 2, steps=2, rows=2) == [3, 3]
    gate = make_gate(max_live=2)
    widths(gate, 0, steps=6)
    widths(gate, 0, steps=50, rows=3)
    assert widths(gate, 0, steps=4) == [0, 0, 0, 3], "3 of 5 steps off were left"


def test_more_lengths_are_taken_one_by_one() -> None:
    gate = make_gate(lengths=(0, 1, 3), on_above=0.5)
    assert widths(gate, 0, steps=9) == [*[3] * 4, *[1] * 4, 0]
    up = [*[0] * 4, *[1] * 4, *[1] * 5, *[3] * 4, 3]
    assert widths(gate, 3, steps=len(up)) == up
    assert (gate.counters["gate/off"], gate.counters["gate/on"]) == (2, 2)


def test_one_length_is_always_used() -> None:
    assert widths(make_gate(lengths=(3,)), 0, steps=30) == [3] * 30


def test_counters_may_be_the_caller_s() -> None:
    counters: Counter[str] = Counter(admitted=1)
    gate = make_gate(counters=counters)
    step(gate, 1)
    assert counters == {"admitted": 1, "gate/steps/3": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, r"lengths=\(\) must be ascending"),
        ({"lengths": (3, 0)}, r"lengths=\(3, 0\) must be ascending"),
        ({"lengths": (3, 3)}, r"lengths=\(3, 3\) must be ascending"),
        ({"lengths": (-1, 3)}, r"lengths=\(-1, 3\) must not be negative"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"probe_every": 0}, "probe_every=0 must be at least 1"),
        ({"off_below": -0.1}, r"off_below=-0.1 must lie between 0 and on_above=1.0"),
        ({"off_below": 1.5}, r"off_below=1.5 must lie between 0 and on_above=1.0"),
        ({"off_below": float("nan")}, "off_below=nan must lie"),
        ({"max_live": 0}, "max_live=0 must be at least 1, or None"),
    ],
)
def test_options_that_make_no_rule_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gate(**options)


LENGTHS = st.sampled_from([(0, 3), (0, 1), (1, 4), (0, 1, 3), (2,), (0, 2, 3, 5)])


@given(
    lengths=LENGTHS,
    window=st.integers(1, 6),
    thresholds=st.tuples(st.floats(0, 3), st.floats(0, 3)).map(sorted),
    probe_every=st.integers(1, 9),
    accepted=st.lists(st.integers(0, 5), min_size=1, max_size=200),
)
def test_no_length_is_left_before_its_time_and_none_is_left_for_good(
    lengths: tuple[int, ...],
    window: int,
    thresholds: list[float],
    probe_every: int,
    accepted: list[int],
) -> None:
    """A record a step: a length stays for a window or until a probe, which ends all time off."""
    options: dict[str, Any] = {
        "lengths": lengths,
        "window": window,
        "off_below": thresholds[0],
        "on_above": thresholds[1],
        "probe_every": probe_every,
    }
    gate = make_gate(**options)
    used = widths(gate, iter(accepted), steps=len(accepted))
    assert widths(make_gate(**options), iter(accepted), steps=len(accepted)) == used
    assert used[0] == lengths[-1]
    runs = [(drafts, len(list(steps))) for drafts, steps in groupby(used)]
    for index, (drafts, steps) in enumerate(runs):
        if index + 1 < len(runs):
            # A probe that a step has begun may be judged by that step's own record.
            least = min(window, probe_every) if drafts else probe_every
            assert steps >= max(1, least - 1)
            change = lengths.index(runs[index + 1][0]) - lengths.index(drafts)
            assert abs(change) == 1, "one length at a time"
        if drafts == 0:
            assert steps <= probe_every
    assert gate.counters["gate/probes"] >= gate.counters["gate/on"]
    assert sum(gate.counters[f"gate/steps/{drafts}"] for drafts in lengths) == len(accepted)


@given(
    window=st.integers(1, 5),
    calls=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)))),
        max_size=60,
    ),
)
def test_the_mean_is_that_of_the_latest_records(
    window: int, calls: list[tuple[int, list[tuple[int, int]]]]
) -> None:
    """Any number of records between any two steps, some of steps that overload it."""
    gate = make_gate(window=window, max_live=3)
    kept: list[tuple[int, int]] = []
    for rows, records in calls:
        before = gate.drafts
        step(gate, rows)
        if gate.drafts != before:
            kept = []
        for accepted, steps in records:
            before = gate.drafts, gate.probing
            gate.record(accepted, steps)
            if (gate.drafts, gate.probing) != before:
                kept = []
            elif steps and gate.drafts:
                kept = [*kept, (accepted, steps)][-window:]
        total = sum(steps for _, steps in kept)
        assert gate.mean == (sum(hits for hits, _ in kept) / total if total else None)
