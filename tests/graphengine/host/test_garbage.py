"""The collector's turn: whose it is, by made-up counts and by real ones; when a step takes it."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import graphengine.core.engine_core
from engines.small_engine import LONG, PROMPT, assert_idle, greedy, open_engine, run, tokens_of
from graphengine import Engine
from graphengine.host import garbage

THRESHOLDS = (700, 10, 10)


def ran_by(
    monkeypatch: pytest.MonkeyPatch,
    count: tuple[int, int, int],
    threshold: tuple[int, int, int] = THRESHOLDS,
    *,
    enabled: bool = True,
    generations: bool = True,
    there: tuple[int, int] | None = None,
) -> list[int]:
    """The generations that `collect_due` collects by the counts of a collector made up."""
    ran: list[int] = []
    collector = SimpleNamespace(
        isenabled=lambda: enabled,
        get_count=lambda: count,
        get_threshold=lambda: threshold,
        collect=ran.append,
    )
    monkeypatch.setattr(garbage, "gc", collector)
    monkeypatch.setattr(garbage, "_GENERATIONS", generations)
    garbage.collect_due(lambda *replay: replay == there, 7, 2)
    return ran


@pytest.mark.parametrize(
    ("count", "ran"),
    [
        pytest.param((0, 0, 0), [], id="nothing"),
        pytest.param((560, 0, 0), [], id="not yet"),
        pytest.param((561, 0, 0), [0], id="nearly due"),
        pytest.param((701, 10, 0), [0], id="due"),
        pytest.param((561, 11, 0), [1], id="two generations"),
        pytest.param((560, 11, 0), [], id="two generations, not yet"),
        pytest.param((561, 11, 10), [1], id="two generations, of three the next time"),
        pytest.param((561, 0, 10), [0], id="no full one yet"),
        pytest.param((701, 0, 11), [], id="a full one"),
        pytest.param((701, 0, 12), [], id="a full one, which was declined before"),
        pytest.param((561, 1, 11), [0], id="a full one was declined"),
        pytest.param((561, 11, 11), [1], id="two generations, a full one was declined"),
    ],
)
def test_what_is_due_by_the_counts(
    monkeypatch: pytest.MonkeyPatch, count: tuple[int, int, int], ran: list[int]
) -> None:
    assert ran_by(monkeypatch, count) == ran


@pytest.mark.parametrize(
    ("threshold", "ran"),
    [
        pytest.param((0, 10, 10), [], id="off"),
        pytest.param((1000, 10, 10), [], id="later"),
        pytest.param((700, 3, 10), [1], id="two generations sooner"),
        pytest.param((700, 10, 0), [0], id="a full one at each turn of two generations"),
    ],
)
def test_thresholds_of_the_program_count(
    monkeypatch: pytest.MonkeyPatch, threshold: tuple[int, int, int], ran: list[int]
) -> None:
    assert ran_by(monkeypatch, (701, 4, 1), threshold) == ran


def test_nothing_runs_where_the_collector_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran_by(monkeypatch, (701, 11, 0), enabled=False) == []


def test_nothing_runs_where_the_replay_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran_by(monkeypatch, (701, 11, 0), there=(7, 2)) == []
    assert ran_by(monkeypatch, (701, 11, 0), there=(8, 2)) == [1]


def test_nothing_runs_where_there_are_no_three_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran_by(monkeypatch, (701, 11, 0), generations=False) == []


@pytest.fixture
def frozen() -> Iterator[None]:
    """The real collector, on and with nothing to do."""
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    # A full collection is declined while less than a quarter of what this one finds is new.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    if not was_on:
        gc.disable()


@pytest.mark.skipif(not garbage._GENERATIONS, reason="no three generations")
@pytest.mark.usefixtures("frozen")
def test_python_is_left_with_full_collections_alone() -> None:
    """20,000 reference cycles of 16 containers, 8 of them alive at a time.

    So few survive that Python declines a full collection for long, and its count goes far beyond
    the threshold. Of the other collections Python does only the first of the youngest generation
    after each full one.
    """
    python, ours = [0, 0, 0], [0, 0, 0]
    ran = python

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            ran[info["generation"]] += 1

    gc.callbacks.append(note)
    try:
        circles: deque[Any] = deque(maxlen=8)
        for _ in range(20_000):
            circle: list[Any] = [[] for _ in range(15)]
            circle.append(circle)
            circles.append(circle)
            ran = ours
            garbage.collect_due(lambda: False)
            ran = python
        beyond = gc.get_count()[2]
    finally:
        gc.callbacks.remove(note)
    assert ours[2] == python[1] == 0
    assert ours[1] > 30 and ours[0] > 10 * python[0] > 0
    assert beyond > 2 * THRESHOLDS[2]


# In a step.


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What will happen, in order: "launch", "collect", "wait"."""
    seen: list[str] = []
    run_graph, wait = engine.runtime.replay, engine.runtime.mailbox.wait

    def launch(*arguments: Any) -> None:
        seen.append("launch")
        run_graph(*arguments)

    def wait_for(*arguments: Any, **options: Any) -> Any:
        seen.append("wait")
        return wait(*arguments, **options)

    monkeypatch.setattr(engine.runtime, "replay", launch)
    monkeypatch.setattr(engine.runtime.mailbox, "wait", wait_for)

    def collect(arrived: Any, sequence: int, lanes: int) -> None:
        assert arrived(sequence, lanes), "on a CPU, where a replay is done as it returns"
        assert not arrived(sequence + 100, lanes)
        seen.append("collect")

    monkeypatch.setattr(graphengine.core.engine_core, "collect_due", collect)
    return seen


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_collects_between_its_launches_and_its_wait(
    monkeypatch: pytest.MonkeyPatch, lookahead: int, timeout: float | None
) -> None:
    with open_engine(device="cpu", lookahead=lookahead) as engine:
        seen = watch(engine, monkeypatch)
        assert engine.step(timeout) == [] and seen == [], "nothing is in flight"
        engine.submit(PROMPT, greedy(4, ignore_eos=True))
        engine.step(timeout)
        assert seen == ["launch"] * (1 + lookahead) + ["collect", "wait"]
        seen.clear()
        engine.step(timeout)
        assert seen == ["launch", "collect", "wait"]
        run(engine)
        assert seen.count("collect") == seen.count("wait")


@pytest.mark.parametrize(
    ("timeout", "options"),
    [(0, {}), (-1.0, {}), (None, {"collect_while_waiting": False})],
    ids=["no wait", "no wait, in the past", "switched off"],
)
def test_a_step_that_does_not_wait_and_one_that_shall_not_collect_do_not(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, options: dict[str, Any]
) -> None:
    with open_engine(device="cpu", **options) as engine:
        seen = watch(engine, monkeypatch)
        engine.submit(PROMPT, greedy(4))
        for _ in range(3):
            engine.step(timeout)
        assert seen.count("wait") == 3 and "collect" not in seen


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupted_collection_does_no_harm(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """What is in flight then is read by a later step."""
    with open_engine(device="cpu") as engine:
        expected = engine.generate([PROMPT, LONG], greedy())
        calls = iter(range(1, 1000))

        def interrupt(*arguments: Any) -> None:
            if next(calls) == at:
                raise KeyboardInterrupt

        monkeypatch.setattr(graphengine.core.engine_core, "collect_due", interrupt)
        requests = [engine.submit(prompt, greedy()) for prompt in (PROMPT, LONG)]
        events = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                events += engine.step()
        assert engine.core.in_flight
        events += run(engine)
        assert [request.result().token_ids for request in requests] == [
            result.token_ids for result in expected
        ]
        assert len(tokens_of(events)) == sum(len(result.token_ids) for result in expected)
        assert_idle(engine)
