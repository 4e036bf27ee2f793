"""The parts of a request's job by themselves: its stop tokens, and the drafts of its caller."""

from __future__ import annotations

import re

import pytest

from graphengine import Request
from graphengine.requests.caller_drafts import NO_DRAFTS, CallerDrafts
from graphengine.requests.stop_tokens import Stops

STOPS = Stops(ids=(2, 5, 6), eos_ids=(2,), tokens=(5, 6), sequences=((8,), (7, 1), (1, 7, 1)))


def test_the_handle_has_what_its_user_reads_and_one_link_to_the_engines_record() -> None:
    described, _, _ = (Request.__doc__ or "").partition("id      ")
    named = set(re.findall(r"`(\w+)`", described)) - {"text", "token_ids"}
    assert named == {name for name in Request.__slots__ if name[0] != "_"} - {"job"}


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([5, 2], None),
        ([2, 5], 5),
        ([7, 6], 6),
        ([7, 8], (8,)),
        ([7, 1], (7, 1)),
        # The first of the list, not the longest.
        ([1, 7, 1], (7, 1)),
    ],
)
def test_the_reason_is_what_the_output_ends_with(
    token_ids: list[int], reason: int | tuple[int, ...] | None
) -> None:
    assert STOPS.reason(token_ids) == reason


def test_eos_goes_before_a_stop_token_of_the_same_id() -> None:
    assert Stops(ids=(2,), eos_ids=(2,), tokens=(2,)).reason([2]) is None


def test_stop_tokens_have_no_text_but_the_tokens_of_sequences_have() -> None:
    assert [token for token in range(10) if STOPS.hides(token)] == [2, 5, 6]
    shown = Stops(ids=(2, 5), eos_ids=(2,), tokens=(5,), in_text=True)
    assert not shown.hides(2) and not shown.hides(5)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ([9], (4, 5, 6)),
        ([9, 4], (5, 6)),
        ([9, 4, 5, 6], ()),
        ([9, 4, 5, 6, 7], ()),
        ([9, 5], ()),
        ([9, 4, 4], ()),
    ],
)
def test_drafts_hold_while_the_output_says_them(said: list[int], left: tuple[int, ...]) -> None:
    """Proposed after the first token."""
    assert CallerDrafts((4, 5, 6), 1).after(said) == left
    assert NO_DRAFTS.after(said) == ()
