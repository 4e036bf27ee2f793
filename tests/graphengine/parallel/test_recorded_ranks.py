"""A recording of an engine with several ranks: a rank that is late is seen where it was late."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engines.small_engine import PROMPT, greedy, open_engine
from graphengine import Engine
from graphengine.observe.ring import KINDS, NEVER
from graphengine.parallel.leading import LeadingRuntime
from graphengine.profiles.report import make_document
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.runs.run_file import UNKNOWN, read_recording
from graphengine.speculative import MTP

pytestmark = pytest.mark.usefixtures("forked_ranks")

LATE_S = 0.25
"""Far above what a busy machine takes from a rank by itself."""


@pytest.fixture(scope="module")
def engine(forked_ranks: None) -> Iterator[Engine]:
    """One of two ranks, with graphs that publish nothing between those that do."""
    options = {"lookahead": 1, "speculative": MTP(1, own_graph=True), "wait_limit_s": 60.0}
    with open_engine(device="cpu", tensor_parallel=2, **options) as opened:
        opened.generate(PROMPT, greedy(2))
        yield opened


def step_without(engine: Engine, rank: int) -> None:
    """A step that begins while a rank stands still."""
    assert isinstance(engine.runtime, LeadingRuntime)
    pid = engine.runtime.ranks.pids[rank - 1]
    # A replay on a CPU is over when it was launched: the rank waits for the next one.
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(LATE_S, os.kill, (pid, signal.SIGCONT))
    waker.start()
    engine.step()
    waker.join()


def test_a_rank_that_is_late_is_seen_in_its_step(engine: Engine, tmp_path: Path) -> None:
    recorder, late = engine.recorder, 12
    began = time.perf_counter()
    recorder.start()
    engine.submit(PROMPT, greedy(40, ignore_eos=True))
    while engine.busy:
        if len(recorder) and recorder.replays()["step"][-1] == late - 1:
            step_without(engine, 1)
        else:
            engine.step()
    recorder.stop()
    took = time.perf_counter() - began
    records = recorder.replays()
    drafts = records["kind"] == KINDS.index("draft")
    assert (records["last_rank"][drafts] == NEVER).all()
    assert np.isnan(records["skew_us"][drafts]).all()
    records = records[~drafts]
    assert (records["last_rank"] == 1).all()
    latest = records[np.argmax(records["skew_us"])]
    assert latest["step"] == late and 0.8 * LATE_S < latest["skew_us"] / 1e6 < took
    # The driver begins a replay when it tells the others to.
    assert 0 < np.median(records["skew_us"]) < 0.2e6 * LATE_S
    header = recorder.header()["ranks"]
    assert (header["count"], header["option"]) == (2, "tensor_parallel=2")
    assert 0.8 * LATE_S < header["waited_s"] < header["seconds"] < took
    assert header["steps"] == records["step"][-1] + 1
    # The file says the same, and its report names the rank.
    recorder.write(tmp_path / "run.jsonl")
    run = read_recording(tmp_path / "run.jsonl")
    assert run.ranks is not None and run.ranks.waited_s == header["waited_s"]
    of_file = run.ranks.skew_us[run.replays.kind != "draft"]
    np.testing.assert_allclose(of_file, records["skew_us"], atol=1e-3)
    assert set(run.ranks.last[run.replays.kind == "draft"]) == {UNKNOWN}
    document = make_document(run)
    # With a lookahead the tokens that came late are those of the step before.
    worst = document["outliers"][0]
    assert worst["cause"] == "skew" and worst["step"] == late - 1
    said = r"rank 1 launched decode/1/k1/fast \d+ ms after rank 0, and all waited for it"
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
