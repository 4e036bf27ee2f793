"""The measurement of the host's share, and budgets for it that no busy machine disturbs.

How long a step takes depends on the machine. How much it allocates, and by how much rows add to its
calls, does not.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from types import FrameType

import pytest

from graphengine import Engine
from graphengine.observe.ring import STAGES
from graphengine.profiles import host_path
from graphengine.program.graph_key import decode_key
from timelines.fake_clock import Clock


@contextmanager
def silent(rows: int) -> Iterator[Engine]:
    """An engine whose replays only publish, and whose tokens have no text."""
    with host_path.publishing(rows) as engine:
        engine.core.intake.tokenizer = None
        yield engine


def of_a_step(rows: int, measure: Callable[[Callable[[], object]], int]) -> int:
    """The least that `measure(engine.step)` says of some steady steps of `rows` requests."""
    # A step looks at the mailbox once more where Python's collector is nearly due.
    gc.disable()
    try:
        with silent(rows) as engine:
            found = host_path.of_steady_steps(engine, rows, 5, lambda: measure(engine.step))
    finally:
        gc.enable()
    return min(found)


def calls(run: Callable[[], object]) -> int:
    """How many of the engine's Python functions `run` calls."""
    found = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        module = frame.f_globals["__name__"]
        if event == "call" and module.startswith("graphengine.") and module != host_path.__name__:
            found += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def modules(run: Callable[[], object]) -> set[str]:
    """Modules whose Python functions `run` calls."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_globals["__name__"])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that Python objects which `run` made took together."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_rows_add_no_calls_to_a_steady_step() -> None:
    """Nothing is called for a row: its token is plain.

    Six of the calls of a step hold Ctrl-C back.
    """
    one, three, nine = (of_a_step(rows, calls) for rows in (1, 3, 9))
    assert one == three == nine < 46


def test_a_steady_step_calls_little_of_the_standard_library() -> None:
    with silent(1) as engine:
        found = host_path.of_steady_steps(engine, 1, 3, lambda: modules(engine.step))
    called = {name for each in found for name in each if not name.startswith("graphengine.")}
    # `signal`, for one, would look up each handler in an enum. What named tuples call is unnamed.
    assert called <= {"threading", *(name for name in called if name.startswith("namedtuple_"))}


def test_a_steady_step_allocates_little_and_little_more_for_each_row() -> None:
    one, nine = (of_a_step(rows, allocated) for rows in (1, 9))
    assert 0 < one < 6_000
    assert (nine - one) / 8 < 1_000


def test_what_a_stand_in_takes_is_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is a second further whenever it is asked: twice by each replay."""
    with silent(2) as engine:
        clock = Clock(per_call=1.0)
        monkeypatch.setattr(host_path, "time", clock.module)
        # Two looks of its own, and the second of the stand-in's, which is between them.
        assert host_path.whole_step(engine, 2, 3) == 2e6


def test_only_steps_without_a_load_count() -> None:
    with silent(1) as engine:
        values = iter([1.0, 2.0, 3.0, 4.0, 5.0])

        def step() -> float:
            engine.step()
            value = next(values)
            engine.counters["loads"] += value in (1.0, 4.0)
            return value

        assert host_path.of_steady_steps(engine, 1, 3, step) == [2.0, 3.0, 5.0]


def test_the_pieces_are_those_of_steady_steps() -> None:
    """Pieces of as many steps as were asked for; their replays are the decode graph's alone."""
    with silent(2) as engine:
        before = engine.counters["replays/decode/2/fast"]
        found = host_path.pieces(engine, 2, 30)
        assert set(found) == set(STAGES) and min(found.values()) > 0
        assert engine.counters["replays/decode/2/fast"] - before >= 30
        graph = engine.runtime.graphs[decode_key(2)]
        assert isinstance(graph, host_path.PublishingGraph) and len(graph.seconds) >= 30
        kept = engine.recorder.replays()
        assert (kept["launched"] >= kept["replay"]).all()


def test_every_piece_is_measured() -> None:
    result = host_path.measure(3, steps=50)
    assert result.rows == 3 and min(astuple(result)) >= 0
    assert all(getattr(result, name) > 0 for name in (*STAGES, "step"))


def test_prints_a_line_for_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    host_path.main(["--rows", "2,1", "--steps", "20"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["rows", "plan"]
    assert [line.split()[0] for line in lines] == ["2", "1"]


def test_no_rows_and_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="rows=0 and steps=5"):
        host_path.measure(0, steps=5)


def test_parts_of_a_step_have_no_more_attributes_than_cpython_keeps_in_line() -> None:
    """From 30 on (`SHARED_KEYS_MAX_SIZE`) each access to one of them is slower: a step, by 8 %."""
    with silent(1) as engine:
        core = engine.core
        for part in (core, core.runtime, core.delivery, core.scheduler, core.runtime.mailbox):
            assert len(vars(part)) <= 29, f"{type(part).__name__}: {sorted(vars(part))}"
