"""What the recorder keeps of ranks, from a runtime that tells of made-up ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphengine.buckets import CaptureReport
from graphengine.observe.rank_times import UNKNOWN_LAUNCH, OneRank, RankTimes, WaitMeter
from graphengine.observe.recorder import Recorder
from graphengine.observe.ring import NEVER
from graphengine.program.graph_key import decode_key

DECODE = decode_key(2, 1, "fast")


class Told:
    """Three ranks: the last of them launches `skews` microseconds after the driver."""

    count, option = 3, "tensor_parallel=3"

    def __init__(self, skews: dict[int, tuple[float, int]] | None = None) -> None:
        self.skews = skews or {}
        self.waited: float | None = 100.0
        self.reads = 0
        self.asked: list[tuple[int, int]] = []

    def last_launch(self, sequence: int, when: int) -> tuple[float, int]:
        self.asked.append((sequence, when))
        return self.skews.get(sequence, UNKNOWN_LAUNCH)

    def waited_s(self) -> float | None:
        self.reads += 1
        return self.waited


def recorder_of(ranks: RankTimes) -> Recorder:
    nothing: dict[str, Any] = {
        "node_kinds": None, "warm_up_ms": 1.0, "capture_ms": 1.0, "allocated_bytes": 0,
        "reserved_bytes": 0, "driver_bytes": 0,
    }  # fmt: skip
    captures = [CaptureReport(name=DECODE.name, **nothing)]
    return Recorder(
        description={"device": "cpu"}, graphs=(DECODE,), captures=captures, lanes=2,
        in_flight=2, stream=None, ranks=ranks,
    )  # fmt: skip


def step(recorder: Recorder, sequence: int, *, collect: bool = True) -> None:
    """A step as the engine calls it."""
    recorder.planning()
    recorder.loading()
    recorder.launch(lambda key: None, DECODE, sequence, 1, 2, 0)
    if collect:
        recorder.collecting()
        recorder.collected(sequence, (), (), 1.0)
        recorder.delivered()


def test_the_last_rank_of_each_replay_is_kept() -> None:
    told = Told({1: (50.0, 2), 2: (-3.25, 1)})
    recorder = recorder_of(told)
    recorder.start()
    for sequence in (1, 2, 3):
        step(recorder, sequence)
    step(recorder, 4, collect=False)
    recorder.stop()
    records = recorder.replays()
    # From when a CPU began, not from when it had computed.
    assert told.asked == [
        (int(record["sequence"]), int(record["replay"])) for record in records[:3]
    ]
    np.testing.assert_equal(records["skew_us"], [50.0, -3.25, math.nan, math.nan])
    assert records["last_rank"].tolist() == [2, 1, NEVER, NEVER]
    rows = [row for row in recorder.rows() if row["type"] == "decode"]
    assert [(row["skew_us"], row["last_rank"]) for row in rows] == [
        (50.0, 2), (-3.25, 1), (None, None), (None, None),
    ]  # fmt: skip


def test_a_records_place_that_is_used_again_forgets_its_rank() -> None:
    told = Told(dict.fromkeys(range(1, 65), (1.0, 1)))
    recorder = recorder_of(told)
    recorder.start(capacity=64)
    for sequence in range(1, 65):
        step(recorder, sequence)
    step(recorder, 65)
    assert recorder.replays()["last_rank"].tolist()[-2:] == [1, NEVER]


def test_what_was_waited_is_read_at_starts_and_stops() -> None:
    told = Told()
    recorder = recorder_of(told)

    def run(sequences: range, waited: float) -> None:
        recorder.start()
        assert recorder.header()["ranks"]["waited_s"] is None, "it records"
        for sequence in sequences:
            step(recorder, sequence)
        assert told.waited is not None
        told.waited += waited
        recorder.stop()

    run(range(1, 4), 0.5)
    told.waited = 400.0  # Nobody recorded that.
    run(range(4, 8), 0.25)
    recorder.stop()
    assert told.reads == 4
    found = recorder.header()["ranks"]
    assert found.pop("seconds") > 0
    assert found == {"count": 3, "option": "tensor_parallel=3", "waited_s": 0.75, "steps": 7}
    recorder.clear()
    recorder.start()
    step(recorder, 8)
    recorder.clear()
    step(recorder, 9)
    told.waited += 0.125
    recorder.stop()
    found = recorder.header()["ranks"]
    assert (found["waited_s"], found["steps"]) == (0.125, 1)
    recorder.start(capacity=128)
    recorder.stop()
    assert recorder.header()["ranks"]["waited_s"] == 0.0, "other sizes drop what there was"
    recorder.start()
    told.waited = None  # The ranks have failed.
    recorder.close()
    assert recorder.header()["ranks"]["waited_s"] is None


def test_a_meter_that_never_knew_does_not_know() -> None:
    meter = WaitMeter(OneRank())
    meter.start(NEVER)
    meter.stop(4)
    found: dict[str, Any] = meter.described()
    assert found["waited_s"] is None and found["steps"] == 5


def test_one_rank_has_no_such_lines(tmp_path: Path) -> None:
    recorder = recorder_of(OneRank())
    recorder.start()
    step(recorder, 1)
    recorder.stop()
    assert "ranks" not in recorder.header()
    row = next(recorder.rows())
    assert not {"skew_us", "last_rank"} & row.keys() and row["sequence"] == 1
    recorder.write(tmp_path / "run.jsonl")
    header = (tmp_path / "run.jsonl").read_text().splitlines()[0]
    assert "ranks" not in json.loads(header)
    assert pytest.approx(recorder.replays()["skew_us"], nan_ok=True) == [math.nan]
