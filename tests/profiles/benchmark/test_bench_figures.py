"""Figures of one engine beside its steps: first tokens, long runs, host time, admission.

Their arithmetic on made-up times, the checks of their tokens, and small engines.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import graphengine.core.engine_core
from graphengine import Engine, Event, SamplingParams
from graphengine.profiles.benchmark import measure
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.kernel_times import start_decoding, stop_decoding
from graphengine.profiles.benchmark.measure import StepTime
from graphengine.profiles.benchmark.shapes import Subject
from timelines.fake_clock import Clock, Row, TimedEngine, result
from timelines.small_bench import CPU, corrupt_eager_steps, tiny_engine, tiny_work

US = 1e-6


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    yield from tiny_engine()


@pytest.fixture
def corrupted(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt_eager_steps(tiny, monkeypatch)


# First tokens.


def test_time_to_first_token_by_prompt_length(tiny: Engine) -> None:
    """Four tokens after each prompt are checked, or as many as the engine holds."""
    found, checked = measure.time_to_first_token(tiny, (3, 40, 94), runs=1)
    assert found.keys() == {"3", "40", "94"} and min(found.values()) > 0
    assert checked == {"3": 4, "40": 4, "94": 2}


def test_the_first_token_is_timed_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check of the prompt, and without what comes after the token; the first warms up."""
    clock = Clock()
    seconds = iter([9.0, 1.0, 2.0, 4.0, 7.0])

    def generate(prompt: list[int], params: SamplingParams) -> Any:
        took = next(seconds)
        clock.now += took / 2
        found = result(clock.now + took / 2, tokens=(5,))
        found.timings.submitted = clock.now
        clock.now += took + 100.0
        return found

    engine: Any = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(vocab_size=10)),
        memory=SimpleNamespace(max_seq_len=50),
        generate=generate,
    )
    monkeypatch.setattr(measure, "time", clock.module)
    monkeypatch.setattr(
        measure, "check_against_eager", lambda *arguments: [result(tokens=(5, 6, 7, 8))]
    )
    found, checked = measure.time_to_first_token(engine, (20,), runs=1)
    assert found == {"20": pytest.approx(1e3 * 3.0)}
    assert checked == {"20": 4}


@pytest.mark.usefixtures("corrupted")
def test_first_tokens_that_differ_from_the_eager_steps_are_refused(tiny: Engine) -> None:
    with pytest.raises(RuntimeError, match="the eager step and the graphs, prompt 0: "):
        measure.time_to_first_token(tiny, (40,), runs=1)


def test_a_first_token_that_differs_is_refused(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens that are timed are compared with the eager step's, too."""
    generate = tiny.generate

    def otherwise(prompts: Any, params: Any) -> Any:
        found = generate(prompts, params)
        return found if isinstance(found, list) else dataclasses.replace(found, token_ids=(-1,))

    monkeypatch.setattr(tiny, "generate", otherwise)
    with pytest.raises(RuntimeError, match="the first token after 40: "):
        measure.time_to_first_token(tiny, (40,), runs=1)


def test_first_tokens_take_the_sampler_of_the_row(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, generate = [], tiny.generate

    def note(prompts: Any, params: Any) -> Any:
        asked.extend(params if isinstance(params, list) else [params])
        return generate(prompts, params)

    monkeypatch.setattr(tiny, "generate", note)
    measure.time_to_first_token(tiny, (5,), runs=1, sampler="full")
    assert {(params.temperature, params.top_k) for params in asked} == {(1.0, 50)}


# Long runs.


def test_a_long_run_with_notes_gives_the_collector_something_to_do(tiny: Engine) -> None:
    """Also where the program has switched it off; 65 tokens make 1,040 containers."""
    gc.disable()
    try:
        found = measure.long_run(tiny, tiny_work(live=1), 60)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert (found["requests"], found["itl_ms"]["n"], found["collector_on"]) == (5, 65, True)
    assert found["frozen"]
    assert found["thresholds"] == [700, 10, 10] and found["kept_objects"] == 16
    assert len(found["collections"]) == 3 and found["collections"][0] >= 1
    assert [took is None for took in found["pauses_ms"]] == [not n for n in found["collections"]]
    assert found["p99.9/p50"] == found["itl_ms"]["p99.9"] / found["itl_ms"]["p50"]


def test_the_consumers_notes_make_the_collector_run() -> None:
    """10,000 notes of 16 containers: one run for 700 of them, every eleventh of two generations."""
    notes: deque[Any] = deque(maxlen=measure.KEPT_TOKENS)
    before = gc.isenabled(), gc.get_threshold()
    with measure.collecting() as collector:
        assert gc.isenabled() and gc.get_threshold() == measure.COLLECTOR_THRESHOLDS
        assert gc.get_freeze_count() > 50_000, "what was there is left to the full collections"
        for token in range(10_000):
            notes.append(measure._note((token,), measure.KEPT_OBJECTS))
    assert before == (gc.isenabled(), gc.get_threshold())
    assert gc.get_freeze_count() == 0 and collector not in gc.callbacks
    youngest, middle, oldest = collector.collections
    assert 220 <= youngest + middle + oldest <= 240
    assert 18 <= middle + oldest <= 22
    assert len(notes[0]) == 16 and notes[0][-1] is notes[0]


@pytest.mark.parametrize("objects", [0, 16])
def test_consumers_keep_the_latest_events_or_circles(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, objects: int
) -> None:
    made: list[deque[Any]] = []

    def keep(*, maxlen: int) -> deque[Any]:
        made.append(deque(maxlen=maxlen))
        return made[-1]

    monkeypatch.setattr(measure, "deque", keep)
    found = measure.long_run(tiny, tiny_work(live=1), 300, kept_objects=objects)
    (kept,) = made
    assert found["kept_objects"] == objects and found["requests"] == 24
    assert len(kept) == kept.maxlen == 256
    if objects:
        assert all(len(note) == objects and note[-1] is note for note in kept)
    else:
        assert all(isinstance(event, Event) for event in kept)


def test_pauses_are_the_longest_of_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock.module)
    collector = measure.Collector()
    for generation, took in ((0, 3e-3), (1, 8e-3), (0, 5e-3), (0, 4e-3)):
        collector("start", {"generation": generation})
        clock.now += took
        collector("stop", {"generation": generation})
        clock.now += 1.0
    assert collector.collections == [3, 1, 0]
    assert collector.pauses_ms == [pytest.approx(5.0), pytest.approx(8.0), None]


def test_what_the_collector_counts_is_what_python_counts() -> None:
    def counted() -> list[int]:
        return [generation["collections"] for generation in gc.get_stats()]

    with measure.collecting() as collector:
        before = counted()
        for generation in (0, 2, 1, 0):
            gc.collect(generation)
        ran = [now - then for then, now in zip(before, counted(), strict=True)]
        assert collector.collections == ran and min(ran) >= 1
    assert None not in collector.pauses_ms


def test_the_collector_is_left_as_it_was_also_by_an_error() -> None:
    thresholds = gc.get_threshold()
    gc.disable()
    try:
        gc.set_threshold(500, 5, 5)
        with pytest.raises(KeyError), measure.collecting():
            raise KeyError
        assert (gc.isenabled(), gc.get_threshold()) == (False, (500, 5, 5))
        assert not any(isinstance(one, measure.Collector) for one in gc.callbacks)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


# Host time.


def test_host_figures_are_medians_without_the_polling() -> None:
    """Own work of 8, 6 and 20 us; waits of 30, 90 and 40, of which 2 are no polling."""
    steps = [
        StepTime(took=38 * US, waited=30 * US),
        StepTime(took=96 * US, waited=90 * US),
        StepTime(took=60 * US, waited=40 * US),
    ]
    assert measure.host_figures(steps, 2 * US) == pytest.approx(
        {"host_us": 8 + 2, "read_us": 2, "poll_us": 40 - 2, "host_max_us": 20 + 2}
    )


def test_no_wait_is_shorter_than_what_is_no_polling() -> None:
    """A reading that took longer than the shortest wait was disturbed."""
    steps = [StepTime(took=5 * US, waited=1 * US), StepTime(took=5 * US, waited=3 * US)]
    assert measure.host_figures(steps, 9 * US) == pytest.approx(
        {"host_us": 3 + 1, "read_us": 1, "poll_us": 2 - 1, "host_max_us": 4 + 1}
    )


def test_host_time_of_an_engine_whose_times_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two steps and the last one take a thousand times as long, and do not count."""
    clock = Clock()
    before = [5000, 5000, 5, 6, 9, 5000]
    waits = [7000, 7000, 30, 50, 40, 7000]
    after = [1000, 1000, 3, 1, 4, 1000]
    engine: Any = TimedEngine(
        clock,
        before=[US * value for value in before],
        waits=[US * value for value in waits],
        after=[US * value for value in after],
        again=2 * US,
    )
    monkeypatch.setattr(measure, "time", clock.module)
    found = measure.host_time(engine, tiny_work(live=2, new_tokens=6))
    # Own work of 8, 7 and 13 us.
    expected = {"host_us": 8 + 2, "read_us": 2, "poll_us": 40 - 2, "host_max_us": 13 + 2}
    assert found == pytest.approx(expected)


def test_an_engine_that_waits_elsewhere_cannot_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = TimedEngine(
        Clock(), before=[0.0] * 6, waits=[0.0] * 6, after=[0.0] * 6, again=0.0
    )
    elsewhere = SimpleNamespace(wait=lambda *arguments, **options: None)
    step, mailbox = engine.step, engine.runtime.mailbox

    def step_elsewhere() -> Any:
        engine.runtime.mailbox = elsewhere
        try:
            return step()
        finally:
            engine.runtime.mailbox = mailbox

    monkeypatch.setattr(engine, "step", step_elsewhere)
    with pytest.raises(RuntimeError, match=r"did not wait through mailbox\.wait"):
        measure.host_time(engine, tiny_work(live=1, new_tokens=6))


def rows(*times: tuple[float, ...], tokens: int = 9) -> Any:
    found = [Row(tokens=tokens) for _ in times]
    for row, moments in zip(found, times, strict=True):
        row.timings.tokens += moments
    return found


@pytest.mark.parametrize(
    ("times", "events", "steady"),
    [
        pytest.param([(1, 2, 3), (1, 2, 3)], 2, True, id="third step of both"),
        pytest.param([(1, 2, 3), (1, 2, 3)], 1, False, id="one of them heard nothing"),
        pytest.param([(1, 2, 3), (1, 2, 3)], 3, False, id="somebody else heard something"),
        pytest.param([(1, 2, 3), (2, 3)], 2, False, id="second step of one"),
        pytest.param([(1, 2), (1, 2)], 2, False, id="second step of both"),
        pytest.param([(1, 2, 2, 2)], 1, False, id="second step, of three tokens"),
        pytest.param([(1, 2, 2, 2, 3)], 1, True, id="third step, after one of three tokens"),
        pytest.param([(1, *range(2, 10)), (1, 2, 3)], 2, False, id="last step of one"),
    ],
)
def test_a_steady_step_is_one_of_every_request(
    times: list[tuple[float, ...]], events: int, steady: bool
) -> None:
    assert measure._is_steady(rows(*times), events) is steady


def test_host_time_is_apart_from_polling(tiny: Engine) -> None:
    wait = tiny.runtime.mailbox.wait
    found = measure.host_time(tiny, tiny_work())
    assert found["host_us"] >= found["read_us"] > 0 and found["poll_us"] >= 0
    assert found["host_max_us"] >= found["host_us"]
    assert tiny.runtime.mailbox.wait == wait and not tiny.busy


def test_host_time_without_a_steady_step_is_refused(tiny: Engine) -> None:
    with pytest.raises(ValueError, match="no steady step"):
        measure.host_time(tiny, tiny_work(new_tokens=4))


# Admission.


def test_gaps_count_that_share_some_time_with_the_admission() -> None:
    """From 10 to 20: the first request's gaps of 4 and 9, the second's of 30 around it all, and the
    third's within; not those of 7 and 60 that end where it begins, and begin where it ends.
    """
    first = [0.0, 1.0, 9.0, 13.0, 22.0, 72.0]
    second = [0.0, 3.0, 33.0, 35.0]
    third = [3.0, 10.0, 20.0, 80.0]
    inside, outside = measure.admission_gaps([first, second, third], 10.0, 20.0)
    assert inside == [4.0, 9.0, 30.0, 10.0]
    assert outside == [1.0, 8.0, 50.0, 3.0, 2.0, 7.0, 60.0]


@pytest.mark.parametrize("times", [[11.0, 12.0, 13.0], [1.0, 2.0], [5.0]])
def test_an_admission_needs_gaps_within_and_without(times: list[float]) -> None:
    with pytest.raises(ValueError, match="gaps during an admission"):
        measure.admission_gaps([times], 10.0, 20.0)


class Script:
    """Time passes by the steps of an engine: as decoders come in, and after a newcomer's end, a
    step takes long; besides 1 ms, but the first two that a newcomer sees, which take `slow[i]` and
    4 ms in the i-th run. To hand it over takes half a millisecond.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, slow: list[float]) -> None:
        self.clock = Clock()
        self.slow = iter(slow)
        self.costs: Iterator[float] = iter(())
        self.newcomer: Any = None
        self.engine, self._step, self._submit = engine, engine.step, engine.submit
        monkeypatch.setattr(engine, "step", self.step)
        monkeypatch.setattr(engine, "submit", self.submit)
        for module in (measure, graphengine.core.engine_core):
            monkeypatch.setattr(module, "time", self.clock.module)

    def submit(self, prompt: list[int], params: SamplingParams) -> Any:
        self.newcomer = None
        if len(prompt) != 70:
            return self._submit(prompt, params)
        # The caller called when the request is handed over, not when it is queued.
        self.clock.now += 0.5e-3
        self.newcomer, self.costs = self._submit(prompt, params), iter([next(self.slow), 4e-3])
        return self.newcomer

    def step(self) -> Any:
        decoders = [one for one in self.engine.scheduler.active if one is not self.newcomer]
        starting = any(len(one.token_ids) < 3 for one in decoders) or not decoders
        over = self.newcomer is not None and self.newcomer.finished
        self.clock.now += 5.0 if starting or over else next(self.costs, 1e-3)
        return self._step()


def test_the_longest_gap_of_an_admission_is_found(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only runs after the warm-up are read; no gap counts that lies before or after it."""
    # Graphs, eager steps, warm-up; then two runs.
    Script(tiny, monkeypatch, [0.9, 0.9, 0.9, 10e-3, 20e-3])
    work = tiny_work(live=1, new_tokens=4)
    found = measure.admission(tiny, work, decoding=2, admitted_tokens=70)
    assert found["longest_gaps_ms"] == pytest.approx([10.5, 20.5])
    assert found["longest_gap_ms"] == pytest.approx(20.5)
    assert found["undisturbed_gap_ms"] == pytest.approx(1.0)
    # The lookahead's step is collected first, then the prompt's.
    assert found["ttft_ms"] == pytest.approx((10 + 20) / 2 + 4 + 0.5)


def test_admission_measures_the_others(tiny: Engine) -> None:
    work = tiny_work(live=1, sampler="full")
    found = measure.admission(tiny, work, decoding=2, admitted_tokens=70)
    assert len(found["longest_gaps_ms"]) == 2 and found["sampler"] == "full"
    assert found["longest_gap_ms"] == max(found["longest_gaps_ms"]) > 0
    checked = found["checked"]
    assert checked["eager_tokens"] == checked["tokens"] >= 2 * 8 + 2
    assert checked["equal_runs"] == 3
    assert not tiny.busy and tiny.counters["finished/error"] == 0


@pytest.mark.usefixtures("corrupted")
def test_an_admission_that_differs_from_eager_steps_is_refused(tiny: Engine) -> None:
    with pytest.raises(RuntimeError, match="request 0 of 3, eagerly and by graphs: runs 0 and 1"):
        measure.admission(tiny, tiny_work(), decoding=2, admitted_tokens=70)
    assert not tiny.busy


def test_an_admission_whose_runs_differ_is_refused(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer's tokens of the last run."""
    admit, calls = measure._admit, [0]

    def unsteady(*arguments: Any) -> measure.Admission:
        calls[0] += 1
        found = admit(*arguments)
        if calls[0] < 5:
            return found
        return found._replace(newcomer=dataclasses.replace(found.newcomer, token_ids=(-1, -1)))

    monkeypatch.setattr(measure, "_admit", unsteady)
    with pytest.raises(RuntimeError, match=r"request 2 of 3, .* runs 0 and 4 differ"):
        measure.admission(tiny, tiny_work(), decoding=2, admitted_tokens=70)


def test_admission_needs_room_to_decode_meanwhile() -> None:
    """21 new tokens a request do not last for a prompt of 90 fed in chunks of 4."""
    options = CPU | {"max_batch": 2, "prefill_buckets": (4,)}
    engine, _ = build_engine(Subject.of_shape("tiny"), options)
    work = tiny_work(prompt_tokens=75, runs=1)
    with engine, pytest.raises(ValueError, match="max_seq_len=96 leaves 21 new tokens"):
        measure.admission(engine, work, decoding=1, admitted_tokens=90)


# Kernels.


@pytest.mark.parametrize("sampler", ["fast", "full"])
def test_the_kernels_of_a_sampler_are_those_of_its_graph(sampler: str) -> None:
    """What a GPU would trace: the graph that serves all rows, after a measured run."""
    engine, _ = build_engine(Subject.of_shape("tiny"), CPU)
    with engine:
        work = tiny_work(sampler=sampler, live=2)
        measure.decode(engine, dataclasses.replace(work, runs=1))
        graph = start_decoding(engine, work).graph
        assert graph.name == f"decode/2/{sampler}" and graph in engine.runtime.graphs


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_engine_serves_on_after_replays_that_it_did_not_plan(lookahead: int) -> None:
    """The device holds as many tokens of KV as are said, and each replay adds one a row."""
    work = tiny_work(live=2)
    engine, _ = build_engine(Subject.of_shape("tiny"), CPU | {"lookahead": lookahead})
    with engine:
        expected = engine.generate(work.prompts(256), work.params())
        for submit in (None, lambda params: list(map(engine.submit, work.prompts(256), params))):
            decoding = start_decoding(engine, work, submit)
            lengths = engine.runtime.buffers["kv_len"]
            assert int(lengths[:2].sum()) == decoding.tokens
            assert all(len(request.token_ids) >= 2 for request in decoding.requests)
            for _ in range(7):
                engine.runtime.replay(decoding.graph)
            assert int(lengths[:2].sum()) == decoding.tokens + 7 * 2
            stop_decoding(engine, decoding)
            assert not engine.busy
            found = engine.generate(work.prompts(256), work.params())
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
