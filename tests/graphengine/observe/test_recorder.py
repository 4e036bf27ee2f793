"""The recorder: what it says against what the engine's requests and events say."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.named_graphs import graph_of, replace_graph
from engines.small_engine import LONG, OTHER, PROMPT, greedy, open_engine, run, sampled, step_until
from graphengine import Engine, Event, Request
from graphengine.observe import processor_use
from graphengine.observe.recorder import Recorder, nanoseconds
from graphengine.observe.ring import FINISHED, KINDS, NEVER, REASONS, REPLAY, STAGES, STAMPS, Ring
from graphengine.profiles.runs.breakdown import break_down
from graphengine.profiles.runs.run_file import read_recording
from graphengine.speculative import MTP, NGram


@contextmanager
def recorded(engine: Engine, **options: Any) -> Iterator[Recorder]:
    """Recording inside; what was recorded is dropped after."""
    engine.recorder.start(**options)
    try:
        yield engine.recorder
    finally:
        engine.recorder.stop()
        engine.recorder.clear()


def rows_of(recorder: Recorder, kind: str) -> list[dict[str, Any]]:
    return [row for row in recorder.rows() if row["kind"] == kind]


def tokens_by_request(recorder: Recorder) -> dict[int, list[tuple[int, int]]]:
    """By request id: (when, how many tokens) of the replays that gave it some."""
    found = defaultdict(list)
    ids, given = recorder.lanes()
    for record, of_lane, tokens in zip(recorder.replays(), ids, given, strict=True):
        for lane in range(record["lanes"]):
            if tokens[lane]:
                found[int(of_lane[lane])].append((int(record["read"]), int(tokens[lane])))
    return found


def assert_tells(recorder: Recorder, requests: list[Request]) -> None:
    """Each request's tokens, times and end are in the records."""
    found = tokens_by_request(recorder)
    for request in requests:
        times = [time for time, count in found.get(request.id, []) for _ in range(count)]
        assert times == [nanoseconds(time) for time in request.timings.tokens], request
    ends = {int(record["id"]): record for record in recorder.requests()}
    for request in requests:
        end, timings = ends[request.id], request.timings
        assert end["submitted"] == nanoseconds(timings.submitted)
        assert end["finished"] == nanoseconds(timings.finished)
        assert end["first"] == (nanoseconds(timings.tokens[0]) if timings.tokens else NEVER)
        assert end["prompt_tokens"] == len(request.prompt_token_ids)
        assert end["new_tokens"] == len(request.token_ids)
        assert REASONS[end["reason"]] == request.finish_reason
        assert end["pauses"] == request.pauses


def assert_ordered(recorder: Recorder, lookahead: int) -> None:
    """Stamps of a replay come in their order, steps one after another."""
    records = recorder.replays()
    for before, after in pairwise(("plan", "load", "replay", "launched")):
        assert (records[before] <= records[after]).all(), (before, after)
    read = records[records["read"] != NEVER]
    for before, after in pairwise(("launched", "read", "delivered")):
        assert (read[before] <= read[after]).all(), (before, after)
    assert (read["collect"] <= read["read"]).all()
    assert (np.diff(records["step"]) >= 0).all() and (np.diff(records["launched"]) > 0).all()
    decodes = records[records["kind"] == KINDS.index("decode")]
    steps = {name: {} for name in ("plan", "load", "collect", "read", "delivered")}
    for record in read:
        for name, seen in steps.items():
            assert seen.setdefault(int(record["step"]), record[name]) == record[name]
    if lookahead and len(decodes) > 3:
        # The next step was launched before this one was waited for.
        assert (decodes["launched"][1:3] < decodes["collect"][:2]).all()


# What is recorded.


def test_off_it_records_nothing(engine: Engine) -> None:
    assert not engine.recorder.recording
    engine.generate(PROMPT, greedy(5))
    assert len(engine.recorder) == 0 == len(engine.recorder.requests())
    assert list(engine.recorder.rows()) == []


@pytest.mark.parametrize("lookahead", [0, 1])
def test_it_tells_what_every_request_got_and_when(device: str, lookahead: int) -> None:
    with (
        open_engine(device=device, lookahead=lookahead) as engine,
        recorded(engine, requests=64) as recorder,
    ):
        requests = [
            engine.submit(prompt, params)
            for prompt, params in (
                (PROMPT, greedy(9)),
                (LONG, sampled(20, seed=1)),
                (OTHER, sampled(15, seed=2, top_k=5)),
                (LONG + OTHER, greedy(4)),
                ("x", greedy(1)),
            )
        ]
        events: list[Event] = run(engine)
        assert_tells(recorder, requests)
        assert_ordered(recorder, lookahead)
        records = recorder.replays()
        assert records["emitted"].sum() == sum(len(event.token_ids) for event in events)
        assert records["emitted"].sum() == engine.counters["tokens"]
        assert records["sequence"].tolist() == list(range(1, len(records) + 1))
        names = [recorder.buckets[index] for index in records["bucket"]]
        for name in set(names):
            assert names.count(name) == engine.counters[f"replays/{name}"]
        assert recorder.dropped == 0 == recorder.dropped_requests


def test_it_knows_buckets_rows_and_prompt_tokens(device: str) -> None:
    with (
        open_engine(device=device, max_batch=4, buckets=(1, 4), lookahead=0) as engine,
        recorded(engine) as recorder,
    ):
        engine.generate([list(range(40)), [5, 6]], greedy(6, ignore_eos=True))
        rows = rows_of(recorder, "replay")
    prefills = [row for row in rows if row["type"] == "prefill"]
    assert [(row["bucket"], row["rows"], row["live"]) for row in prefills] == [
        ("prefill/32", 32, 32),
        ("prefill/8", 8, 8),
        ("prefill/8", 8, 2),
    ]
    assert [row["prompt_tokens"] for row in prefills] == [32, 8, 2]
    assert [row["emitted"] for row in prefills] == [0, 1, 1]
    assert [row["lanes"] for row in prefills] == [[[1, 0]], [[1, 1]], [[2, 1]]]
    decodes = [row for row in rows if row["type"] == "decode"]
    assert {(row["bucket"], row["rows"], row["live"]) for row in decodes} == {
        ("decode/1/fast", 1, 1),
        ("decode/4/fast", 4, 2),
    }
    both = [row for row in decodes if row["live"] == 2]
    assert all(row["lanes"] == [[1, 1], [2, 1]] and row["emitted"] == 2 for row in both)
    # A prompt's chunk and the decode after it are one step.
    fed = next(row for row in prefills if row["prompt_tokens"] == 2)
    beside = [row for row in decodes if row["step"] == fed["step"]]
    assert [(row["live"], row["plan"], row["read"]) for row in beside] == [
        (1, fed["plan"], fed["read"])
    ]


def test_a_cancelled_request_gets_none_of_what_was_in_flight(device: str) -> None:
    with open_engine(device=device) as engine, recorded(engine) as recorder:
        requests = [engine.submit(prompt, sampled(40)) for prompt in (PROMPT, OTHER)]
        waiting = engine.submit(LONG, greedy())
        step_until(engine, lambda: len(requests[0].token_ids) >= 5)
        requests[0].cancel()
        waiting.cancel()
        run(engine)
        assert engine.counters["discarded_tokens"] > 0
        assert_tells(recorder, [*requests, waiting])
        reasons = {row["id"]: row["reason"] for row in rows_of(recorder, "request")}
        assert list(reasons.values()).count("cancelled") == 2 and reasons[2] == "length"


def test_pauses_are_told(device: str) -> None:
    with (
        open_engine(device=device, kv_blocks=17, swap_blocks=17) as engine,
        recorded(engine) as recorder,
    ):
        requests = [engine.submit(prompt, sampled(90)) for prompt in (PROMPT, OTHER)]
        run(engine)
        assert engine.counters["pauses"] > 0
        assert_tells(recorder, requests)
        assert recorder.requests()["pauses"].sum() == engine.counters["pauses"]


def test_a_stop_string_cuts_what_a_lane_gave(device: str) -> None:
    with open_engine(device=device) as engine, recorded(engine) as recorder:
        text = engine.generate(PROMPT, greedy(30)).text
        request = engine.submit(PROMPT, greedy(30, stop=text[8:11]))
        run(engine)
        assert request.finish_reason == "stop"
        assert_tells(recorder, [request])


# Speculation.


@pytest.mark.parametrize("mode", [NGram(3, max_n=2), MTP(3)], ids=["ngram", "mtp"])
def test_drafts_are_counted_as_the_engine_counts_them(device: str, mode: Any) -> None:
    with open_engine(device=device, speculative=mode) as engine, recorded(engine) as recorder:
        requests = [engine.submit(prompt, greedy(40)) for prompt in (PROMPT, LONG, OTHER)]
        run(engine)
        assert_tells(recorder, requests)
        assert_ordered(recorder, engine.config.launched_ahead)
        records = recorder.replays()
        decodes = records[records["kind"] == KINDS.index("decode")]
        assert (decodes["width"] == 1 + mode.k).all()
        assert decodes["drafted"].sum() == engine.acceptance.proposed > 0
        assert decodes["accepted"].sum() == engine.acceptance.accepted


def test_a_stop_string_inside_accepted_drafts_cuts_what_a_lane_gave(device: str) -> None:
    with open_engine(device=device, speculative=MTP(3)) as engine, recorded(engine) as recorder:
        text = engine.generate(PROMPT, greedy(40)).text
        stops = {text[start : start + 2] for start in range(0, len(text) - 2, 8)}
        discarded = engine.counters["discarded_tokens"]
        requests = [engine.submit(PROMPT, greedy(40, stop=stop)) for stop in sorted(stops)]
        run(engine)
        assert engine.counters["discarded_tokens"] > discarded
        assert_tells(recorder, requests)


# The ring, starting and stopping.


def test_the_oldest_replays_are_overwritten_and_counted(device: str) -> None:
    with (
        open_engine(device=device) as engine,
        recorded(engine, capacity=64, requests=2) as recorder,
    ):
        requests = []
        for _ in range(4):
            requests.append(engine.submit(PROMPT, sampled(30)))
            run(engine)
        assert recorder.dropped == engine.runtime.launched - 64 > 0 and len(recorder) == 64
        assert recorder.dropped_requests == 2
        records = recorder.replays()
        kept = range(recorder.dropped + 1, engine.runtime.launched + 1)
        assert records["sequence"].tolist() == list(kept)
        assert recorder.requests()["id"].tolist() == [request.id for request in requests[2:]]
        # The last request's lanes stand beside its replays.
        times = [time for time, _ in tokens_by_request(recorder)[requests[-1].id]]
        assert times == [nanoseconds(time) for time in requests[-1].timings.tokens]
        header = recorder.header()["recorder"]
        assert (header["capacity"], header["records"], header["dropped"]) == (
            64, 64, recorder.dropped,
        )  # fmt: skip
        first = next(recorder.rows())
        assert first["plan"] == 0 and first["sequence"] == recorder.dropped + 1


@pytest.mark.parametrize("made", [0, 3, 5, 7, 13])
def test_a_ring_gives_its_records_oldest_first(made: int) -> None:
    ring = Ring(np.int64, 5)
    for number in range(made):
        ring.array[number % 5] = number
        ring.made += 1
    assert len(ring) == min(made, 5) and ring.dropped == max(0, made - 5)
    assert ring.oldest_first().tolist() == list(range(ring.dropped, made))
    # A view while nothing was overwritten.
    assert np.shares_memory(ring.oldest_first(), ring.array) == (0 < made <= 5)


def test_packed_records_are_laid_out_as_the_columns_say() -> None:
    from graphengine.observe import recorder

    assert recorder._REPLAY.size == REPLAY.itemsize
    assert recorder._FINISHED.size == FINISHED.itemsize
    assert recorder._AT["collect"] + recorder._COLLECTED.size == REPLAY.itemsize
    names = list(REPLAY.names or ())
    values = list(range(1, len(names) + 1))
    packed = np.frombuffer(recorder._REPLAY.pack(*values), REPLAY)[0]
    assert [packed[name] for name in names] == values


def test_stopping_keeps_and_clearing_forgets(engine: Engine) -> None:
    with recorded(engine) as recorder:
        engine.generate(PROMPT, greedy(5))
        recorder.stop()
        recorder.stop()
        kept = len(recorder)
        engine.generate(PROMPT, greedy(5))
        assert len(recorder) == kept > 0
        # Of the same sizes, it goes on.
        recorder.start()
        engine.generate(PROMPT, greedy(5))
        assert len(recorder) == 2 * kept
        steps = recorder.replays()["step"]
        assert (np.diff(steps) >= 0).all() and steps[-1] == steps[kept - 1] * 2 + 1
        recorder.clear()
        assert recorder.recording and len(recorder) == 0 == len(recorder.requests())
        engine.generate(PROMPT, greedy(5))
        assert len(recorder) == kept and recorder.replays()["step"][0] == 0
        recorder.stop()
        recorder.start(capacity=128)
        assert len(recorder) == 0


def test_replays_in_flight_at_the_start_are_not_recorded(device: str) -> None:
    with open_engine(device=device) as engine:
        request = engine.submit(PROMPT, sampled(20))
        step_until(engine, lambda: len(request.token_ids) >= 3)
        in_flight = engine.runtime.launched
        assert engine.core.in_flight
        with recorded(engine) as recorder:
            run(engine)
            assert recorder.replays()["sequence"][0] == in_flight + 1
            assert not recorder._replays.array["lanes"][len(recorder) :].any()
            assert (recorder.replays()["read"] != NEVER).all()


def test_replays_in_flight_at_the_end_have_no_end(device: str) -> None:
    with open_engine(device=device) as engine:
        engine.recorder.start()
        request = engine.submit(PROMPT, sampled(20))
        step_until(engine, lambda: len(request.token_ids) >= 3)
        engine.recorder.stop()
        unread = len(engine.core.in_flight)
        run(engine)
        rows = rows_of(engine.recorder, "replay")
        assert [row["read"] is None for row in rows] == [False] * (len(rows) - unread) + [True]
        assert rows[-1]["lanes"] == [] and rows[-1]["launched"] is not None
        assert rows_of(engine.recorder, "request") == []
        # What they bring belongs to none of the later records.
        engine.recorder.start()
        engine.generate(OTHER, greedy(4))
        assert rows_of(engine.recorder, "replay")[len(rows) - 1]["read"] is None


def test_a_callback_may_stop_and_start_it_and_may_fail(engine: Engine) -> None:
    recorder = engine.recorder

    def toggle(event: Event) -> None:
        if len(event.request.token_ids) % 3 == 0:
            recorder.stop() if recorder.recording else recorder.start()

    def fail(event: Event) -> None:
        raise ArithmeticError("no")

    with recorded(engine):
        engine.submit(PROMPT, greedy(12), on_event=toggle)
        run(engine)
        if not recorder.recording:
            recorder.start()
        recorder.clear()
        engine.submit(PROMPT, greedy(1), on_event=fail)
        with pytest.raises(ArithmeticError):
            run(engine)
        assert (recorder.replays()["delivered"] != NEVER).all()
        run(engine)


def test_waits_that_time_out_leave_a_replay_unread(device: str) -> None:
    with open_engine(device=device) as engine, recorded(engine) as recorder:
        request = engine.submit(PROMPT, greedy(8))
        while engine.busy:
            engine.step(timeout=0)
        assert_tells(recorder, [request])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 63}, "capacity=63 must be an integer, at least 64"),
        ({"capacity": 64.5}, "capacity=64.5 must be"),
        ({"capacity": math.nan}, "capacity=nan must be"),
        ({"capacity": "x"}, "capacity='x' must be"),
        ({"capacity": None}, "capacity=None must be"),
        ({"requests": 0}, "requests=0 must be an integer, at least 1"),
        ({"requests": 1.5}, r"requests=1\.5 must be"),
        ({"requests": True}, "requests=True must be"),
        ({"requests": 10**15}, "requests=1000000000000000: memory has no room"),
        ({"capacity": 2**70}, f"capacity={2**70}, requests=4096: memory has no room"),
        ({"device_times": "no"}, "device_times='no' must be True or False"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    engine: Engine, options: dict[str, Any], said: str
) -> None:
    with recorded(engine) as recorder:
        engine.generate(PROMPT, greedy(3))
        recorder.stop()
        kept = recorder.replays().copy()
        with pytest.raises(ValueError, match=said):
            recorder.start(**options)
        assert not recorder.recording
        # What was there is still whole, and goes on.
        assert recorder.replays().tobytes() == kept.tobytes()
        assert len(recorder.lanes()[0]) == len(kept)
        recorder.start()
        engine.generate(PROMPT, greedy(3))
        assert len(recorder) == 2 * len(kept)


def test_starting_twice_or_after_the_end_is_refused() -> None:
    with open_engine(device="cpu") as engine:
        engine.recorder.start()
        with pytest.raises(ValueError, match=r"stop\(\) comes first"):
            engine.recorder.start()
        engine.generate(PROMPT, greedy(3))
    assert not engine.recorder.recording and len(engine.recorder) == 3
    with pytest.raises(ValueError, match="closed"):
        engine.recorder.start()


class Failing:
    """A captured graph that fails at its replay number `at`."""

    def __init__(self, graph: Any, at: int) -> None:
        self.graph, self.left = graph, at
        self.close, self.report = graph.close, graph.report

    def replay(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the device is gone")
        self.graph.replay()


def test_what_a_broken_engine_did_can_still_be_read(device: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_engine(device=device) as engine:
        engine.recorder.start()
        replace_graph(engine, "decode/1/fast", Failing(graph_of(engine, "decode/1/fast"), 4))
        engine.submit(PROMPT, greedy())
        with pytest.raises(RuntimeError, match="the device is gone"):
            run(engine)
        launched = engine.runtime.launched
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
        engine.recorder.write(path)
    assert len(engine.recorder) == launched == 4
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["header", *["replay"] * launched]
    # The one that was in flight when the next launch failed.
    assert [row["read"] is None for row in rows[1:]] == [False] * 3 + [True]


# Files.


def test_a_file_holds_a_header_and_a_line_for_each_record(device: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_engine(device=device, speculative=MTP(2)) as engine:
        before = engine.submit(LONG, greedy(9))
        engine.recorder.start(device_times=False)
        other = engine.submit(PROMPT, greedy(12))
        run(engine)
        numerics = engine.numerics_id
    # After the engine's end, too.
    engine.recorder.write(path)
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["schema"], header["kind"]) == (1, "header")
    assert header["environment"]["torch"] == torch.__version__
    facts = {
        "max_batch": 3, "lookahead": 1, "row_family": "dot", "numerics_id": numerics,
        "speculative": "mtp eagle, k=2", "pdl": True, "collect_while_waiting": True,
        "dtype": header["engine"]["dtype"],
    }  # fmt: skip
    assert facts.items() <= header["engine"].items()
    assert header["engine"]["device"].startswith(device)
    assert [capture["bucket"] for capture in header["captures"]] == list(engine.recorder.buckets)
    assert all(capture.keys() >= {"seconds", "bytes", "nodes"} for capture in header["captures"])
    replays = [row for row in rows if row["kind"] == "replay"]
    assert header["recorder"]["records"] == len(replays) == len(engine.recorder)
    assert header["recorder"]["dropped"] == 0
    assert replays[0]["plan"] == 0 and all(row["device_us"] is None for row in replays)
    assert {
        "step", "sequence", "bucket", "type", "rows", "live", "prompt_tokens", *STAMPS,
        "device_us", "emitted", "drafted", "accepted", "lanes",
    } <= replays[0].keys()  # fmt: skip
    for stamp in STAMPS:
        assert all(isinstance(row[stamp], int) for row in replays), stamp
    requests = {row["id"]: row for row in rows if row["kind"] == "request"}
    assert requests.keys() == {before.id, other.id}
    assert requests[before.id]["submitted"] < 0 < requests[before.id]["first"]
    first = requests[other.id]["first"] - requests[other.id]["submitted"]
    assert first / 1e9 == pytest.approx(other.timings.time_to_first_token, abs=1e-8)
    assert requests[other.id]["new_tokens"] == 12 and requests[other.id]["reason"] == "length"


def test_it_tells_how_long_the_thread_ran_and_how_often_it_slept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def sleep(event: Event) -> None:
        time.sleep(0.02)

    with open_engine(device="cpu") as engine, recorded(engine) as recorder:
        engine.submit(PROMPT, greedy(5), on_event=sleep)
        run(engine)
        records = recorder.replays()
        assert (records["cpu_ns"] > 0).all() and (np.diff(records["cpu_ns"]) >= 0).all()
        assert (np.diff(records["yielded"]) >= 0).all() and (records["preempted"] >= 0).all()
        # Read once a step.
        steps = {(int(one["step"]), int(one["cpu_ns"])) for one in records}
        assert len(steps) == len(np.unique(records["step"]))
        recorder.write(path)
    found = break_down(read_recording(path))
    assert (found.away_us > 15_000).all() and (found.yielded >= 1).all()


def test_a_system_that_does_not_count_leaves_it_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_use, "_PROCESS", None)
    path = tmp_path / "run.jsonl"
    with open_engine(device="cpu") as engine, recorded(engine) as recorder:
        engine.generate(PROMPT, greedy(4))
        recorder.write(path)
    row = json.loads(path.read_text().splitlines()[1])
    assert row["cpu_ns"] is row["preempted"] is row["yielded"] is None
    assert read_recording(path).thread is None


def test_a_file_of_nothing_is_its_header(tmp_path: Path) -> None:
    with open_engine(device="cpu") as engine:
        engine.recorder.write(tmp_path / "empty.jsonl")
        with pytest.raises(OSError):
            engine.recorder.write(tmp_path / "no such folder" / "run.jsonl")
    (line,) = (tmp_path / "empty.jsonl").read_text().splitlines()
    assert json.loads(line)["recorder"]["records"] == 0


def test_stages_add_up_to_the_time_of_a_step() -> None:
    with open_engine(device="cpu", lookahead=0) as engine, recorded(engine) as recorder:
        engine.generate(PROMPT, greedy(20))
        stages, records = recorder.stages(), recorder.replays()
        assert stages.keys() == STAGES.keys()
        assert all(len(took) == len(records) and (took >= 0).all() for took in stages.values())
        whole = (records["delivered"] - records["plan"]) / 1e3
        between = (records["collect"] - records["launched"]) / 1e3
        assert np.allclose(sum(stages.values()) + between, whole)
    with open_engine(device="cpu") as engine:
        engine.recorder.start()
        request = engine.submit(PROMPT, greedy(30))
        step_until(engine, lambda: len(request.token_ids) > 2)
        # A replay in flight has been in some of them.
        unread = {stage: math.isnan(took[-1]) for stage, took in engine.recorder.stages().items()}
        assert [stage for stage, unknown in unread.items() if unknown] == ["wait", "deliver"]


def test_stages_of_a_step_are_disjoint_whatever_it_launches(tmp_path: Path) -> None:
    """Neither prefill nor decode is in the stage that was before its launch."""
    with (
        open_engine(device="cpu", speculative=MTP(2)) as engine,
        recorded(engine) as recorder,
    ):
        for prompt in (LONG, OTHER, PROMPT):
            engine.submit(prompt, greedy(12))
            engine.step()
        run(engine)
        records, stages = recorder.replays(), recorder.stages()
        for step in np.unique(records["step"]):
            first, *later = np.flatnonzero(records["step"] == step)
            load = (records["replay"][first] - records["load"][first]) / 1e3
            assert stages["load"][first] == load
            assert all(stages["load"][index] == load for index in later)
        recorder.write(tmp_path / "run.jsonl")
    assert len(np.unique(records["step"])) < len(records)
    run_ = read_recording(tmp_path / "run.jsonl")
    spans = np.concatenate(list(run_.stages.values()))
    spans = spans[np.argsort(spans[:, 0])]
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    found = break_down(run_)
    total = np.sum(list(found.parts.values()), axis=0)
    np.testing.assert_allclose(total, 1e3 * found.milliseconds)


def test_no_gap_reaches_over_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_engine(device="cpu", max_seq_len=512) as engine:
        request = engine.submit(PROMPT, sampled(300))
        # Steps that are not recorded, and a stop that only the replay in flight falls into.
        for unrecorded in (5, 0, 0):
            engine.recorder.start()
            for _ in range(20):
                engine.step()
            engine.recorder.stop()
            for _ in range(unrecorded):
                engine.step()
        assert not request.finished
        engine.recorder.write(path)
    gaps = read_recording(path).gaps
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "sequence" in row]
    of_gaps = [(rows[a], rows[b]) for a, b in zip(gaps.first, gaps.last, strict=True)]
    assert of_gaps and all(a["recording"] == b["recording"] for a, b in of_gaps)
    assert {a["recording"] for a, _ in of_gaps} == {1, 2, 3}


# What it costs.


def test_steps_leave_nothing_behind_that_was_allocated_for_them() -> None:
    """Only what the ring holds changes: no object of the recorder outlives its step."""
    own = [tracemalloc.Filter(True, sys.modules[module].__file__ or "") for module in (
        "graphengine.observe.recorder", "graphengine.observe.ring", "graphengine.observe.tracing",
        "graphengine.buckets.timing",
    )]  # fmt: skip
    with open_engine(device="cpu", max_seq_len=512) as engine, recorded(engine):
        requests = [engine.submit(prompt, sampled(200)) for prompt in (PROMPT, OTHER)]
        step_until(engine, lambda: all(len(request.token_ids) > 20 for request in requests))
        tracemalloc.start()
        try:
            for _ in range(20):
                engine.step()
            gc.collect()
            before = tracemalloc.take_snapshot().filter_traces(own)
            for _ in range(60):
                engine.step()
            gc.collect()
            after = tracemalloc.take_snapshot().filter_traces(own)
        finally:
            tracemalloc.stop()
        size, size_after = (
            sum(trace.size for trace in snapshot.traces) for snapshot in (before, after)
        )
        # The last times are integers of their own in each step.
        assert size_after <= size + 256, after.compare_to(before, "lineno")[:5]
        assert not any(request.finished for request in requests)
        for request in requests:
            request.cancel()
        run(engine)


def test_what_stops_lets_go_of_requests() -> None:
    with open_engine(device="cpu") as engine:
        with recorded(engine) as recorder:
            engine.generate([PROMPT, OTHER], greedy(5))
        assert recorder._requests == () and recorder._undelivered == []


class Clock:
    """Stands in for a `ReplayTimer`: the n-th replay took n us, known once `done` exceeds n."""

    def __init__(self, pairs: int) -> None:
        self.pairs, self.done, self.begun = pairs, 0, 0
        self.times = [math.nan] * pairs
        self.asked = 0

    def begin(self, pair: int) -> None:
        self.times[pair] = math.nan

    def end(self, pair: int) -> None:
        assert math.isnan(self.times[pair]), "begin() comes first"
        self.times[pair] = float(self.begun)
        self.begun += 1

    def microseconds(self, pair: int) -> float:
        self.asked += 1
        time = self.times[pair]
        return time if time < self.done else math.nan


@contextmanager
def clocked(engine: Engine, clock: Clock) -> Iterator[Recorder]:
    engine.recorder._timer = clock  # type: ignore[assignment]
    with recorded(engine, capacity=64) as recorder:
        yield recorder
    engine.recorder._timer = None


def test_device_times_belong_to_their_replays() -> None:
    clock = Clock(16)
    with (
        open_engine(device="cpu", speculative=MTP(2)) as engine,
        clocked(engine, clock) as recorder,
    ):
        request = engine.submit(LONG, sampled(60))
        while engine.busy:
            # All but the replays in flight are done, as their records tell.
            clock.done = clock.begun
            engine.step()
        made = clock.begun
        assert made > 40 and request.finished
        # One look at each, as soon as a later one was read: none is asked for in vain.
        known = recorder.replays()["device_us"]
        assert clock.asked == made or math.isnan(known[-1])
        clock.done = made
        first = recorder.dropped
        assert recorder.replays()["device_us"].tolist() == list(range(first, made))
        # They go on after a pause, and are unknown in between where none are taken.
        recorder.stop()
        recorder.start(capacity=64, device_times=False)
        engine.generate("x", greedy(1))
        assert math.isnan(recorder.replays()["device_us"][-1])
        recorder.stop()
        recorder.start(capacity=64)
        engine.generate("x", greedy(1))
        clock.done = clock.begun
        assert recorder.replays()["device_us"][-1] == made
        assert math.isnan(recorder.replays()["device_us"][-2])


def test_times_that_come_too_late_are_given_up() -> None:
    clock = Clock(16)
    with open_engine(device="cpu") as engine, clocked(engine, clock) as recorder:
        engine.generate(PROMPT, sampled(30))
        assert np.isnan(recorder.replays()["device_us"]).all()
        clock.done = made = clock.begun
        times = recorder.replays()["device_us"]
        assert np.isnan(times[: made - 16]).all()
        assert times[made - 16 :].tolist() == list(range(made - 16, made))


# From here on: a GPU.


def idle_free(engine: Engine) -> None:
    torch.cuda.synchronize()
    gc.collect()


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_replay_but_those_in_flight_has_its_device_time(lookahead: int) -> None:
    with (
        open_engine(device="cuda", lookahead=lookahead) as engine,
        recorded(engine) as recorder,
    ):
        engine.generate([PROMPT, LONG, OTHER], sampled(60))
        torch.cuda.synchronize()
        records = recorder.replays()
        times = records["device_us"]
        assert not np.isnan(times).any() and (times > 1).all()
        decodes = records[records["kind"] == KINDS.index("decode")]
        # On a stream that is never idle, steps come no faster than replays take.
        gap = np.median(np.diff(decodes["read"])) / 1e3
        assert np.median(decodes["device_us"]) <= 1.05 * gap + 2
        print(f"\nmedian of a replay {np.median(decodes['device_us']):.1f} us, gap {gap:.1f} us")
        rows = rows_of(recorder, "replay")
        assert all(row["device_us"] > 0 for row in rows)


@pytest.mark.gpu
def test_without_events_device_times_are_unknown() -> None:
    with open_engine(device="cuda") as engine:
        with recorded(engine, device_times=False) as recorder:
            engine.generate(PROMPT, sampled(20))
            assert np.isnan(recorder.replays()["device_us"]).all()
        with recorded(engine) as recorder:
            engine.generate(PROMPT, sampled(20))
            torch.cuda.synchronize()
            assert not np.isnan(recorder.replays()["device_us"]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_are_the_same_with_it(lookahead: int) -> None:
    with open_engine(device="cuda", lookahead=lookahead) as engine:
        prompts = [PROMPT, LONG, OTHER, PROMPT + LONG]
        params = [sampled(50, seed=seed) for seed in range(4)]
        expected = [result.token_ids for result in engine.generate(prompts, params)]
        with recorded(engine):
            found = [result.token_ids for result in engine.generate(prompts, params)]
        assert found == expected


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("lookahead", [0, 1])
def test_recording_allocates_and_synchronises_nothing(lookahead: int) -> None:
    steps = 1000
    with open_engine(device="cuda", lookahead=lookahead, max_seq_len=1280) as engine:
        requests = [engine.submit(prompt, sampled(1200)) for prompt in (PROMPT, OTHER)]
        engine.recorder.start()
        step_until(engine, lambda: all(len(request.token_ids) > 20 for request in requests))
        idle_free(engine)
        before, (free, _) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(steps):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after, (free_after, _) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        counters = [key for key in before if key.endswith((".allocated", ".freed"))]
        grown = {key: (before[key], after[key]) for key in counters if before[key] != after[key]}
        assert not grown and free_after == free
        assert not any(request.finished for request in requests)
        # All but what has not been read yet: nothing waited for an event, and none was lost.
        unknown = np.isnan(engine.recorder.replays()["device_us"]).sum()
        assert unknown <= 1 + lookahead
        assert not math.isnan(engine.recorder.replays()["device_us"][0])


@pytest.mark.gpu
def test_a_trace_of_the_driver_shows_two_events_a_step_and_no_wait(tmp_path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with open_engine(device="cuda", max_seq_len=512) as engine:
        request = engine.submit(PROMPT, sampled(400))
        engine.recorder.start()
        step_until(engine, lambda: len(request.token_ids) > 20)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(200):
                engine.step()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    names = [event["name"] for event in sorted(calls, key=lambda event: event["ts"])]
    launches = [index for index, name in enumerate(names) if name.startswith("cudaGraphLaunch")]
    between = names[launches[0] : launches[-1]]
    print(f"\n{ {name: between.count(name) for name in set(between)} }")
    assert len(launches) == 200
    assert not any("Synchronize" in name or "Malloc" in name for name in between), set(between)
    recorded_events = sum(name.startswith("cudaEventRecord") for name in between)
    # Not every version of CUPTI tells of them.
    assert recorded_events in (0, *range(2 * (len(launches) - 1), 2 * len(launches) + 1))
