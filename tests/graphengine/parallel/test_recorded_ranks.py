"""A recording of an engine with several ranks: a rank that is late is seen where it was late."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from events import GENEROUS_S, until_stopped
from numpy.typing import NDArray

from engines.small_engine import PROMPT, greedy, open_engine
from graphengine import Engine
from graphengine.parallel import exchange
from graphengine.parallel.leading import LeadingRuntime
from graphengine.profiles.report import make_document
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.runs.run_file import read_recording
from graphengine.speculative import MTP

pytestmark = pytest.mark.usefixtures("forked_ranks")

LATE_S, STEP_S = 0.25, 1e-3
APART_NS = 100_000
"""After the driver any other rank does what it does, as long as nothing is late."""


class SharedClock:
    """The time of all ranks of a forked engine, which goes on when a test says so."""

    def __init__(self) -> None:
        self._now: NDArray[np.int64] = np.frombuffer(mmap(-1, 8), dtype=np.int64)
        self._driver = os.getpid()

    def advance(self, seconds: float) -> None:
        self._now += round(1e9 * seconds)

    def nanoseconds(self) -> int:
        return int(self._now[0]) + (0 if os.getpid() == self._driver else APART_NS)

    def seconds(self) -> float:
        return self.nanoseconds() / 1e9


@pytest.fixture(scope="module")
def clock() -> Iterator[SharedClock]:
    made = SharedClock()
    made.advance(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", made.seconds)
        patch.setattr(time, "perf_counter_ns", made.nanoseconds)
        yield made


@pytest.fixture(scope="module")
def engine(forked_ranks: None, clock: SharedClock) -> Iterator[Engine]:
    """One of two ranks."""
    options = {"lookahead": 1, "speculative": MTP(1), "wait_limit_s": GENEROUS_S}
    with open_engine(device="cpu", tensor_parallel=2, **options) as opened:
        opened.generate(PROMPT, greedy(2))
        yield opened


def step_without(engine: Engine, rank: int, clock: SharedClock) -> None:
    """A step that begins while a rank stands still, until the driver has waited for it."""
    assert isinstance(engine.runtime, LeadingRuntime)
    pid, poll, waits = engine.runtime.ranks.pids[rank - 1], exchange._poll, 0
    # A replay on a CPU is over when it was launched: the rank waits for the next one.
    os.kill(pid, signal.SIGSTOP)
    until_stopped(pid)

    def wait(*arguments: Any) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            clock.advance(LATE_S)
            os.kill(pid, signal.SIGCONT)
        poll(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_poll", wait)
        engine.step()
    assert waits


def test_a_rank_that_is_late_is_seen_in_its_step(
    engine: Engine, clock: SharedClock, tmp_path: Path
) -> None:
    recorder, late = engine.recorder, 12
    began = clock.seconds()
    recorder.start()
    engine.submit(PROMPT, greedy(40, ignore_eos=True))
    while engine.busy:
        clock.advance(STEP_S)
        if len(recorder) and recorder.replays()["step"][-1] == late - 1:
            step_without(engine, 1, clock)
        else:
            engine.step()
    recorder.stop()
    took = clock.seconds() - began
    records = recorder.replays()
    assert (records["last_rank"] == 1).all()
    # The driver begins a replay when it tells the others to.
    expected = np.where(records["step"] == late, 1e6 * LATE_S, 0.0) + APART_NS / 1e3
    np.testing.assert_allclose(records["skew_us"], expected)
    header = recorder.header()["ranks"]
    assert (header["count"], header["option"]) == (2, "tensor_parallel=2")
    assert header["waited_s"] == pytest.approx(LATE_S)
    assert LATE_S < header["seconds"] <= took
    assert header["steps"] == records["step"][-1] + 1
    # The file says the same, and its report names the rank.
    recorder.write(tmp_path / "run.jsonl")
    run = read_recording(tmp_path / "run.jsonl")
    assert run.ranks is not None and run.ranks.waited_s == header["waited_s"]
    np.testing.assert_allclose(run.ranks.skew_us, records["skew_us"], atol=1e-3)
    document = make_document(run)
    # With a lookahead the tokens that came late are those of the step before.
    worst = document["outliers"][0]
    assert worst["cause"] == "skew" and worst["step"] == late - 1
    said = r"rank 1 launched decode/1/k1/fast 250 ms after rank 0, and all waited for it"
    assert re.match(said, worst["text"]), worst
    assert document["ranks"]["last"][1]["replays"] == len(records)
    assert "2 ranks: tensor_parallel=2" in describe_report(document)


def test_what_nothing_counts_is_not_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL carries for GPUs without mapped memory, and what failed ranks leave behind."""
    runtime = engine.runtime
    assert isinstance(runtime, LeadingRuntime) and runtime.rank_times.waited_s() is not None
    with monkeypatch.context() as patch:
        patch.setattr(runtime._joined.group, "_on_gpu", True)
        assert runtime.rank_times.waited_s() is None
    monkeypatch.setattr(runtime.ranks, "broken", True)
    assert runtime.rank_times.waited_s() is None
