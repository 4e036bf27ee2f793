"""What became of the drafts: against plain loops over the same rows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphengine.requests.acceptance import Acceptance

Row = tuple[int, int, int | None]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """(width, count, matched) of a row; a stop may cut what was accepted."""
    width = draw(st.integers(1, 7))
    matched = draw(st.integers(0, width - 1))
    count = draw(st.integers(0, matched + 1))
    return width, count, draw(st.sampled_from([matched, matched, None]))


def recorded(*records: Row) -> Acceptance:
    acceptance = Acceptance()
    for record in records:
        acceptance.record(*record)
    return acceptance


@given(st.lists(rows(), max_size=30))
def test_counts_are_those_of_a_plain_loop(records: list[Row]) -> None:
    acceptance = recorded(*records)
    judged = [(width, matched) for width, _, matched in records if matched is not None]
    assert acceptance.steps == len(records)
    assert acceptance.tokens == sum(count for _, count, _ in records)
    assert acceptance.proposed == sum(width - 1 for width, _ in judged)
    assert acceptance.accepted == sum(matched for _, matched in judged)
    positions = range(max((width for width, _ in judged), default=1) - 1)
    proposed = [sum(width - 1 > position for width, _ in judged) for position in positions]
    accepted = [sum(matched > position for _, matched in judged) for position in positions]
    assert acceptance.proposed_per_position == proposed
    assert acceptance.per_position == accepted
    assert acceptance.rates == [hit / all_ for hit, all_ in zip(accepted, proposed, strict=True)]
    assert json.loads(json.dumps(acceptance.as_dict())) == acceptance.as_dict()


def test_a_worked_example() -> None:
    """Three steps of three drafts: all accepted, one, none; and one near the end with one draft."""
    acceptance = recorded((4, 4, 3), (4, 2, 1), (4, 1, 0), (2, 2, 1))
    assert acceptance.mean_length == 9 / 4
    assert (acceptance.proposed, acceptance.accepted, acceptance.rate) == (10, 5, 0.5)
    assert acceptance.per_position == [3, 1, 1]
    assert acceptance.proposed_per_position == [4, 3, 3]
    assert acceptance.rates == [3 / 4, 1 / 3, 1 / 3]
    assert acceptance.as_dict() == {
        "steps": 4,
        "tokens": 9,
        "proposed": 10,
        "accepted": 5,
        "mean_length": 2.25,
        "rate": 0.5,
        "per_position": [3, 1, 1],
        "proposed_per_position": [4, 3, 3],
        "rates": [3 / 4, 1 / 3, 1 / 3],
    }
    assert str(acceptance) == (
        "2.25 tokens a step (1.25 of 2.50 drafts; 75% 33% 33% by position) in 4 steps"
    )


def test_nothing_recorded() -> None:
    acceptance = Acceptance()
    assert acceptance.mean_length is None and acceptance.rate is None
    assert acceptance.per_position == acceptance.rates == []
    assert str(acceptance) == "no speculative steps"


def test_a_forced_row_counts_for_the_tokens_a_step_alone() -> None:
    acceptance = recorded((4, 3, None))
    assert acceptance.mean_length == 3
    assert (acceptance.proposed, acceptance.per_position, acceptance.rate) == (0, [], None)
    assert str(acceptance) == "3.00 tokens a step in 1 step"


def test_a_row_without_live_drafts_lowers_no_rate() -> None:
    acceptance = recorded((3, 3, 2), (1, 1, 0))
    assert acceptance.mean_length == 2 and acceptance.rates == [1, 1]
    assert str(recorded((1, 1, 0))) == "1.00 tokens a step in 1 step"


def test_reset_leaves_nothing() -> None:
    acceptance = recorded((4, 3, 2), (2, 1, None))
    acceptance.reset()
    assert acceptance == Acceptance()


@pytest.mark.parametrize(("record", "message"), [((3, 4, 2), "count=4"), ((3, 3, 3), "matched=3")])
def test_more_than_a_row_had_is_refused(record: Row, message: str) -> None:
    with pytest.raises(AssertionError, match=f"{message} of width=3"):
        recorded(record)
