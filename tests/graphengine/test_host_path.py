"""The measurement of the host's share, on a few steps."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from graphengine import Engine
from graphengine.profiles import host_path


@pytest.mark.parametrize("rows", [1, 3])
def test_every_piece_is_measured_and_they_add_up(rows: int) -> None:
    result = host_path.measure(rows, steps=300)
    assert result.rows == rows
    pieces = sum(getattr(result, name) for name in (*host_path.PIECES, "text"))
    assert min(astuple(result)) >= 0
    # A busy machine may disturb either, but not by an order of magnitude.
    assert pieces / 10 < result.step < pieces * 10


def test_prints_a_line_for_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    host_path.main(["--rows", "2,1", "--steps", "20"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["rows", "plan"]
    assert [line.split()[0] for line in lines] == ["2", "1"]


def test_no_rows_and_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="rows=0 and steps=5"):
        host_path.measure(0, steps=5)


def test_an_engine_has_no_more_attributes_than_cpython_keeps_in_line(engine: Engine) -> None:
    """From 30 on (`SHARED_KEYS_MAX_SIZE`) each access to one of them is slower: a step, by 8 %."""
    for part in (engine, engine._delivery, engine.scheduler):
        assert len(vars(part)) <= 29, f"{type(part).__name__}: {sorted(vars(part))}"
