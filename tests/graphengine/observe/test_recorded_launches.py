"""Launches of several steps in the recorder and in reports: each step has a record of its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from engines.simulated_device import simulated
from engines.small_engine import OTHER, PROMPT, open_engine, run, sampled, step_until
from graphengine.observe.recorder import nanoseconds
from graphengine.observe.ring import NEVER
from graphengine.profiles.runs.report_sections import facts
from graphengine.profiles.runs.run_document import describe_run
from graphengine.profiles.runs.run_file import read_recording


def test_each_step_of_a_launch_has_a_record(tmp_path: Path) -> None:
    with open_engine(device="cpu", steps_per_launch=7, lookahead=1) as engine:
        engine.recorder.start(capacity=64)
        requests = [
            engine.submit(PROMPT, sampled(31)),
            engine.submit(OTHER, sampled(30, seed=1, stop=["e"])),
        ]
        run(engine)
        records = engine.recorder.replays()
        several = records[records["steps"] > 1]
        assert len(several) >= 3 * 7 and (several["steps"] == 7).all()
        assert records["sequence"].tolist() == list(range(1, len(records) + 1))
        assert records["step"].tolist() == sorted(records["step"].tolist())
        assert (np.diff(several["step"]) > 0).all(), "each is a step of its own"
        # The host's launch is divided among its steps, and they have one plan.
        for launch in several.reshape(-1, 7):
            assert len(np.unique(launch["plan"])) == len(np.unique(launch["load"])) == 1
            assert (launch["launched"][:-1] == launch["replay"][1:]).all()
            assert (launch["launched"] > launch["replay"]).all()
        assert (np.diff(records["launched"]) > 0).all() and (records["read"] != NEVER).all()
        read = {nanoseconds(t) for request in requests for t in request.timings.tokens}
        assert set(records["read"][records["emitted"] > 0].tolist()) == read
        assert records["emitted"].sum() == engine.counters["tokens"]
        discarded = engine.counters["discarded_tokens"]
        assert records["discarded"].sum() == discarded > 0
        path = tmp_path / "run.jsonl"
        engine.recorder.write(path)
    found = read_recording(path)
    assert found.discarded == discarded
    assert (found.replays.launched - found.replays.launch > 0).all()
    document = describe_run(found)
    assert document["discarded_tokens"] == discarded
    assert f"steps_per_launch 7, {discarded} tokens discarded" in [
        fact.text for fact in facts(document)
    ]
    assert document["itl_ms"]["n"] == sum(len(each.token_ids) - 1 for each in requests)


def test_a_report_of_launches_of_one_step_does_not_mention_them(tmp_path: Path) -> None:
    with open_engine(device="cpu") as engine:
        engine.recorder.start(capacity=64)
        engine.generate(PROMPT, sampled(4))
        assert (engine.recorder.replays()["steps"] == 1).all()
        engine.recorder.write(tmp_path / "run.jsonl")
    shown = facts(describe_run(read_recording(tmp_path / "run.jsonl")))
    assert not any("steps_per_launch" in fact.text for fact in shown)


class Clock:
    """Stands in for a `ReplayTimer`: each launch took 70 us, known once it is `done`."""

    def __init__(self, pairs: int) -> None:
        self.pairs, self.begun, self.done = pairs, [0] * pairs, 0
        self.launches = self.asked = 0

    def begin(self, pair: int) -> None:
        self.launches += 1
        self.begun[pair] = self.launches

    def end(self, pair: int) -> None:
        pass

    def microseconds(self, pair: int) -> float:
        self.asked += 1
        return 70.0 if self.begun[pair] <= self.done else math.nan


def test_steps_share_the_time_of_their_launch_on_the_device() -> None:
    clock = Clock(5)
    with open_engine(device="cpu", steps_per_launch=7, lookahead=1) as engine:
        engine.recorder._timer = clock  # type: ignore[assignment]
        engine.recorder.start(capacity=64)
        with simulated(engine):
            request = engine.submit(PROMPT, sampled(60))
            step_until(engine, lambda: len(request.token_ids) > 20)
            known = engine.recorder.replays()["device_us"]
            assert np.isnan(known).all(), "no launch has ended yet"
            clock.done = clock.launches - 1
            asked = clock.asked
            step_until(engine, lambda: engine.recorder.replays()["read"][-1] != NEVER)
            records = engine.recorder.replays()
            assert clock.asked > asked
        run(engine)
        clock.done = clock.launches
        records = engine.recorder.replays()
        times = records["device_us"]
        # The pairs of the oldest launches have been used again.
        lost = np.isnan(times)
        assert lost.any() and not lost[-5:].any()
        assert (times[~lost] == 70.0 / records["steps"][~lost]).all()
        assert {10.0, 70.0} == set(times[~lost].tolist())
        engine.recorder._timer = None


def test_a_ring_shorter_than_what_is_in_flight_keeps_its_records_apart() -> None:
    with open_engine(device="cpu", steps_per_launch=64, lookahead=1) as engine:
        engine.recorder.start(capacity=64)
        request = engine.submit(PROMPT, sampled(100))
        run(engine)
        records = engine.recorder.replays()
        assert len(records) == 64 and engine.recorder.dropped
        assert records["sequence"].tolist() == list(
            range(engine.runtime.launched - 63, engine.runtime.launched + 1)
        )
        # Records that were overwritten before they were read do not change those that took their
        # places.
        read = records[records["read"] != NEVER]
        assert read["emitted"].sum() <= len(request.token_ids)
        assert (read["launched"] <= read["read"]).all()
