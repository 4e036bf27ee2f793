"""The measurement of the host's share: its arithmetic by a clock that ticks, and what a step calls.

How long a step takes depends on the machine. How many functions it calls does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple
from types import FrameType
from typing import Any

import pytest
from timed import Clock

from graphengine import Engine
from graphengine.demo import checkpoint_path
from graphengine.profiles import host_path

SHELL = ("step", "_enter", "_check_open", "end_due", "_plan")
"""What `Engine.step` calls beside its pieces."""


Opened = tuple[Engine, list[host_path.PublishingGraph]]


@contextmanager
def stand_ins(rows: int) -> Iterator[Opened]:
    """An engine without graphs."""
    options: Any = {"device": "cpu", "max_batch": rows, "buckets": (rows,), "block_size": 128}
    with Engine.from_pretrained(checkpoint_path(), prefill_buckets=(8,), **options) as engine:
        engine._intake.tokenizer = None
        yield engine, host_path._replace_graphs(engine)


@contextmanager
def steady(rows: int) -> Iterator[Opened]:
    """The same in the midst of decoding `rows` requests."""
    with stand_ins(rows) as (engine, graphs), closing(host_path._rounds(engine, rows)) as rounds:
        next(rounds)
        engine.step()
        yield engine, graphs


def calls(run: Callable[[], object]) -> Counter[str]:
    """The Python functions of the engine that `run` calls, by name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals["__name__"]
        if event == "call" and module.startswith("graphengine.") and module != host_path.__name__:
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_the_pieces_are_the_whole_step(rows: int) -> None:
    """But for the shell around them, which calls nothing else."""
    with steady(rows) as (engine, graphs):
        whole = calls(lambda: host_path._whole(engine, graphs))
        pieces = calls(lambda: host_path._in_pieces(engine, graphs))
    assert whole - pieces == Counter(SHELL) and not pieces - whole


def test_a_steady_step_calls_few_functions_and_one_more_for_each_row() -> None:
    """26 with one row, and little room for more: no busy machine disturbs that."""
    found = {}
    for rows in (1, 3, 9):
        with steady(rows) as (engine, _):
            before = Counter(engine.counters)
            found[rows] = calls(engine.step)
            counted = engine.counters - before
        replays = [name for name in counted if name.startswith("replays/")]
        assert replays == [f"replays/decode/{rows}/fast"] and counted[replays[0]] == 1
        assert "loads" not in counted
        # Nothing is looped over the rows but what delivers a token.
        assert found[rows]["read"] == rows
        assert max(count for name, count in found[rows].items() if name != "read") <= 2
    one, three, nine = (found[rows].total() for rows in (1, 3, 9))
    assert one <= 27
    assert (three - one, nine - three) == (2, 6)


def test_what_a_stand_in_takes_is_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is a second further whenever it is asked: twice by each replay."""
    with steady(2) as (engine, graphs):
        monkeypatch.setattr(host_path, "time", Clock(per_call=1.0).module)
        assert host_path._in_pieces(engine, graphs) == (1.0, 1.0, 2.0, 1.0, 1.0)
        assert host_path._whole(engine, graphs) == (2.0,)


def test_only_steps_without_a_load_count() -> None:
    """Three of the five, in microseconds: a load is part of no steady step."""
    with stand_ins(1) as (engine, _):
        seconds = iter([1.0, 2.0, 3.0, 4.0, 5.0])

        def step() -> tuple[float]:
            engine.step()
            value = next(seconds)
            engine.counters["loads"] += value in (1.0, 4.0)
            return (value,)

        (median,) = host_path._medians(engine, 1, 3, step)
    assert median == pytest.approx(3.0 * 1e6) and next(seconds, None) is None


def test_every_piece_is_measured() -> None:
    result = host_path.measure(3, steps=50)
    assert result.rows == 3 and min(astuple(result)) >= 0
    assert all(getattr(result, name) > 0 for name in (*host_path.PIECES, "step"))


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
