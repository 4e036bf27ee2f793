"""`graphengine report`: figures, findings on planted causes, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chrome_traces import chrome_trace
from nsys_files import Export
from simulated import Timeline, simulate, write_recording

from graphengine import cli
from graphengine.profiles.breakdown import break_down, outlier_limit
from graphengine.profiles.report import make_document
from graphengine.profiles.report_text import describe_report
from graphengine.profiles.sources import read_run

Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_report(capsys: pytest.CaptureFixture[str]) -> Report:
    """`run_report("run.jsonl", "--json")` -> (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(["report", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def write_source(kind: str, folder: Path, timeline: Timeline) -> Path:
    if kind == "recorder":
        return write_recording(folder / "run.jsonl", timeline)
    if kind == "torch":
        path = folder / "trace.json"
        path.write_text(json.dumps(chrome_trace(timeline)))
        return path
    return Export(folder / "run.sqlite", timeline, mode=kind).path


SOURCES = ("recorder", "graph", "node", "torch")
PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "outside": ({"stalls": {100: 3000.0, 200: 2500.0}}, r"2 of 398 gaps, 5\.\d+ ms above"),
    "sync": ({"syncs": {50, 51, 90}}, "3 of 398 gaps"),
    "bucket": ({"larger": set(range(100, 130))}, "a bucket of 32 rows for 2 live ones"),
    "prefill": ({"prefills": {60}}, "it waited for 60 prompt tokens"),
    "device": ({"slower": {70: 200.0}}, "took 20. us more on the device"),
    "plan": ({"planning": {30: 800.0}}, "planning the step took 80. us more"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_found(source: str, cause: str, tmp_path: Path) -> None:
    planted, text = PLANTED[cause]
    document = make_document(read_run(write_source(source, tmp_path, simulate(**planted))))
    causes = [one["cause"] for one in document["stands_out"]]
    assert causes == ([cause, "padding"] if cause == "bucket" else [cause])
    assert re.search(text, document["stands_out"][0]["text"])
    assert {one["cause"] for one in document["outliers"]} == {cause}
    if cause == "bucket":
        assert "add 2 to `buckets`" in document["stands_out"][1]["text"]


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_stands_out_in_a_quiet_run(source: str, tmp_path: Path) -> None:
    document = make_document(read_run(write_source(source, tmp_path, simulate())))
    assert document["stands_out"] == [] and document["outliers"] == []
    assert "what stands out\n- nothing" in describe_report(document)


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_tell_the_same_latencies(source: str, tmp_path: Path) -> None:
    timeline = simulate(stalls={100: 3000.0}, prefills={60})
    found = make_document(read_run(write_source(source, tmp_path, timeline)))
    expected = make_document(read_run(write_source("recorder", tmp_path, timeline)))
    for name in ("p50", "p99", "max"):
        assert found["itl_ms"][name] == pytest.approx(expected["itl_ms"][name], rel=0.005), name
    assert [row["replays"] for row in found["buckets"]] == [400, 1]
    assert found["step"]["device_us"] == pytest.approx(303, rel=0.01)
    assert found["launch_us"]["p50"] == pytest.approx(9.09, rel=0.01)


def test_a_sync_after_every_step_is_found_without_outliers(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(syncs=set(range(400))))
    document = make_document(read_run(path))
    (finding,) = document["stands_out"]
    assert finding["cause"] == "sync" and finding["count"] == 398 and not document["outliers"]


def test_a_slow_caller_leaves_the_device_idle(tmp_path: Path) -> None:
    stalls = dict.fromkeys(range(400), 500.0)
    path = write_recording(tmp_path / "run.jsonl", simulate(stalls=stalls))
    (finding,) = make_document(read_run(path))["stands_out"]
    assert finding["cause"] == "idle" and "outside the engine" in finding["text"]


def test_a_trace_names_what_the_caller_waited_in(tmp_path: Path) -> None:
    path = write_source("node", tmp_path, simulate(syncs={50}, stalls={50: 400.0}))
    (outlier,) = make_document(read_run(path))["outliers"]
    assert outlier["cause"] == "outside"
    trace = write_source("torch", tmp_path, simulate(syncs={50}))
    (outlier,) = make_document(read_run(trace))["outliers"]
    assert outlier["overlap"][0]["name"] == "cudaDeviceSynchronize"


def test_the_table_tells_percentiles_and_marks_those_without_support(
    run_report: Report, tmp_path: Path
) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(stalls={100: 3000.0}))
    status, printed, _ = run_report(path, "--deadline-ms", "1")
    assert status == 0
    assert re.search(r"ITL ms +0\.303 +0\.305 +0\.306 +3\.\d+\* +3\.\d+ +398 +398", printed)
    assert "deadline 1 ms: 1 of 398 gaps missed it, 0.251%" in printed
    assert "TTFT ms" in printed and "3 graphs: 0.30 s, 6.0 MiB" in printed
    assert "not told by this source: kernels" in printed


def test_the_json_is_the_document(run_report: Report, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate())
    out = tmp_path / "report.json"
    status, printed, _ = run_report(path, "--json", "--out", out, "--deadline-ms", "0.3")
    document = json.loads(printed)
    assert status == 0 and document == json.loads(out.read_text())
    assert document["schema"] == 1 and document["itl_ms"]["unsupported"] == ["p99.9"]
    assert document["deadline"]["rate"] > 0.5
    assert document["requests"] == {
        "finished": 1, "reasons": {"length": 1}, "pauses": 0, "prompt_tokens": 9,
        "new_tokens": 399,
    }  # fmt: skip


def test_two_runs_side_by_side(run_report: Report, tmp_path: Path) -> None:
    before = Export(tmp_path / "before.sqlite", simulate(seed=1), mode="node").path
    after = Export(tmp_path / "after.sqlite", simulate(factor=1.05, seed=2), mode="node").path
    status, printed, _ = run_report(after, "--against", before)
    assert status == 0 and "against before.sqlite" in printed
    assert re.search(r"p50 +0\.\d+ +0\.\d+ +\+[45]\.\d% .* slower", printed)
    assert re.search(r"decode/1 dot_kernel +212\.\d+ +222\.\d+ +\+[45]\.\d% .* slower", printed)


def test_a_request_that_was_paused_is_told(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(300))
    lines = path.read_text().splitlines()
    for number in range(100, 120):
        document = json.loads(lines[number])
        lines[number] = json.dumps(document | {"lanes": [[2, 1]]})
    path.write_text("\n".join(lines))
    document = make_document(read_run(path))
    assert document["outliers"][0]["cause"] == "pause"
    assert "20 steps went by" in document["outliers"][0]["text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "No such file"),
        ("empty.jsonl", "", "is empty"),
        ("words.sqlite", "hello", "is not an SQLite database"),
        ("run.nsys-rep", "hello", "nsys export --type sqlite"),
        ("words.json", "hello", "line 1 is not the header"),
        ("other.json", '{"traceEvents": 3}', "no list of traceEvents"),
        ("cut.json", '{"schemaVersion": 1, "traceEvents": [', "cut off"),
    ],
)
def test_files_that_are_none_of_these_are_one_line(
    run_report: Report, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    status, _, error = run_report(path)
    assert status == 2 and error.count("\n") == 1
    assert message in error and str(path) in error


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "inf"])
def test_a_deadline_is_a_time(run_report: Report, tmp_path: Path, deadline: str) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(9))
    status, _, error = run_report(path, f"--deadline-ms={deadline}")
    assert status == 2 and "--deadline-ms" in error


def test_a_run_without_gaps_is_refused(run_report: Report, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(2))
    status, _, error = run_report(path)
    assert status == 2 and "no request has two tokens" in error


def test_parts_add_up_to_the_gap(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(stalls={9: 500.0}, prefills={20}))
    found = break_down(read_run(path))
    total = np.sum(list(found.parts.values()), axis=0)
    np.testing.assert_allclose(total, 1e3 * found.milliseconds, rtol=1e-9)


def test_the_limit_is_not_moved_by_outliers() -> None:
    quiet = np.full(200, 1.0) + np.arange(200) % 10 * 1e-3
    median, limit = outlier_limit(quiet)
    worse = np.concatenate([quiet, np.full(20, 50.0)])
    assert outlier_limit(worse)[1] == pytest.approx(limit, rel=0.01)
    assert median < limit < 1.1


def test_a_device_without_requests_is_not_idle(tmp_path: Path) -> None:
    """Two requests with a second of nothing between."""
    path = write_recording(tmp_path / "run.jsonl", simulate(300, stalls={150: 1e6}))
    assert make_document(read_run(path))["idle_us"]["max"] > 900_000
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        document = json.loads(line)
        if document.get("step", 0) >= 150:
            lines[number] = json.dumps(document | {"lanes": [[2, 1]]})
    path.write_text("\n".join(lines))
    document = make_document(read_run(path))
    assert document["idle_us"]["max"] < 50 and document["stands_out"] == []
