"""`graphengine report`: figures, findings on planted causes, errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphengine.cli import main as cli
from graphengine.profiles.report import make_document
from graphengine.profiles.runs.breakdown import break_down, outlier_limit
from graphengine.profiles.runs.causes import CAUSES
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.sources import read_run
from timelines.chrome_traces import chrome_trace
from timelines.nsys_files import Export
from timelines.simulated_run import Timeline, simulate, write_recording

ROOT = Path(__file__).resolve().parents[2]
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
    "outside": (
        {"stalls": {100: 3000.0, 200: 2500.0}},
        r"2 of 398 steps took longer than usual, by 5\.\d+ ms",
    ),
    "sync": ({"syncs": {50, 51, 90}}, "3 of 398 steps"),
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
        assert "Add 2 to `buckets`" in document["stands_out"][1]["text"]


BUSY: dict[str, tuple[dict[str, Any], str, str]] = {
    "while it waited": (
        {"unseen": {70: 900.0}, "away": {70: 900.0}}, "cpu",
        "this thread did not run for 900 us, as its core ran something else; it was interrupted "
        "1 time",
    ),
    # The event before the launch was early, and the launch late: the device seems slow.
    "while it launched": (
        {"slower": {70: 400.0}, "away": {71: 400.0}}, "cpu", "did not run for 400 us",
    ),
    "while it planned": ({"planning": {70: 900.0}, "away": {70: 900.0}}, "cpu", "900 us"),
    "not at all, but the collector ran": (
        {"unseen": {70: 900.0}}, "late", "this thread ran all the while",
    ),
    "not at all, but the device was slow": ({"slower": {70: 400.0}}, "device", "on the device"),
    "for less than the caller slept": (
        {"stalls": {70: 900.0}, "away": {71: 30.0}}, "outside",
        "the caller's code, which slept or waited for 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("when", BUSY)
def test_a_thread_that_lost_its_core_is_told_from_a_slow_device(when: str, tmp_path: Path) -> None:
    planted, cause, text = BUSY[when]
    path = write_recording(tmp_path / "run.jsonl", simulate(**planted))
    (outlier,) = make_document(read_run(path))["outliers"]
    assert outlier["cause"] == cause and text in outlier["text"], outlier


def test_a_host_that_sleeps_while_it_waits_is_not_taken_for_a_busy_one(tmp_path: Path) -> None:
    timeline = simulate(slower={70: 400.0}, away={71: 400.0})
    causes = {}
    for wait in ("spin", "block"):
        path = write_recording(tmp_path / "run.jsonl", timeline, engine={"wait": wait})
        causes[wait] = [one["cause"] for one in make_document(read_run(path))["outliers"]]
    assert causes == {"spin": ["cpu"], "block": ["device"]}


def test_recordings_of_earlier_versions_are_read(tmp_path: Path) -> None:
    timeline = simulate(unseen={70: 900.0}, away={70: 900.0})
    path = write_recording(tmp_path / "run.jsonl", timeline, counted=False)
    assert "cpu_ns" not in path.read_text()
    document = make_document(read_run(path))
    (outlier,) = document["outliers"]
    assert outlier["cause"] == "late" and "it was not scheduled or" in outlier["text"]
    assert document["thread"] is None


def test_tokens_that_two_threads_read_tell_nothing_of_either(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(unseen={70: 900.0}, away={70: 900.0}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step", 0) >= 69 and line["kind"] == "replay":
            line["cpu_ns"] = 5_000 + line["step"]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = break_down(read_run(path))
    assert np.isnan(found.away_us).sum() == 1


@pytest.mark.parametrize(("more_ms", "cause"), [(5, "cpu"), (500, "device")])
def test_threads_of_a_cpu_that_lose_their_cores_make_a_launch_long(
    more_ms: int, cause: str, tmp_path: Path
) -> None:
    """The thread itself spins at the barrier. Losing a core does not take half a second."""
    path = write_recording(tmp_path / "run.jsonl", simulate(60), engine={"device": "cpu"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shift = 0
    for line in lines[1:-1]:
        for name in ("plan", "load", "replay", "launched", "collect", "read", "delivered"):
            if name == "launched" and line["step"] == 40:
                shift = more_ms * 1_000_000
            line[name] = line[name] and line[name] + shift
        if "cpu_ns" in line:
            line["cpu_ns"] += shift
            line["preempted"] += 3 * (line["step"] >= 40)
    path.write_text("\n".join(map(json.dumps, lines)))
    (outlier,) = make_document(read_run(path))["outliers"]
    assert outlier["cause"] == cause, outlier
    assert (cause == "cpu") == ("lost their cores 3 times" in outlier["text"])


def test_the_page_on_profiling_has_the_table_of_causes() -> None:
    text = (ROOT / "docs" / "profiling.md").read_text("utf-8")
    table = text.partition("| cause | what grew | what to do |\n|---|---|---|\n")[2]
    rows = [f"| `{one.name}` | {one.grew} | {one.remedy} |" for one in CAUSES]
    assert table.partition("\n\n")[0].splitlines() == rows


RANKS = {
    "count": 2, "option": "tensor_parallel=2", "waited_s": 0.025, "seconds": 0.25, "steps": 400,
}  # fmt: skip


def test_a_late_rank_explains_what_its_lateness_cost(tmp_path: Path) -> None:
    late = {70: 2500.0, 71: 100.0}
    path = write_recording(tmp_path / "run.jsonl", simulate(skews=late), ranks=RANKS)
    document = make_document(read_run(path))
    # The second time it had not yet computed the replay before.
    (outlier,) = document["outliers"]
    assert outlier["cause"] == "skew" and outlier["step"] == 70
    assert outlier["text"].startswith("rank 1 launched decode/1/fast 2.50 ms after rank 0")
    assert [one["cause"] for one in document["stands_out"]] == ["skew"]
    # Without a word of ranks in the file it is the device that was slow.
    path = write_recording(tmp_path / "run.jsonl", simulate(skews=late))
    document = make_document(read_run(path))
    assert document["ranks"] is None and document["outliers"][0]["cause"] == "device"
    assert "Ranks" not in describe_report(document)


def test_a_rank_is_not_to_blame_for_what_others_cost(tmp_path: Path) -> None:
    planted = {"slower": {70: 400.0}, "stalls": {100: 3000.0}, "skews": {70: 40.0}}
    path = write_recording(tmp_path / "run.jsonl", simulate(**planted), ranks=RANKS)
    causes = {one["cause"] for one in make_document(read_run(path))["outliers"]}
    assert causes == {"device", "outside"}


def test_the_section_on_ranks(run_report: Report, tmp_path: Path) -> None:
    skews = {50: 1500.0, **dict.fromkeys(range(100, 200), -4.0)}
    path = write_recording(tmp_path / "run.jsonl", simulate(skews=skews), ranks=RANKS)
    status, printed, told = run_report(path, "--html", tmp_path / "run.html")
    assert told == f"wrote {tmp_path / 'run.html'}\n"
    assert status == 0
    section = printed.partition("\nRanks\n")[2].partition("\n\n")[0].splitlines()
    assert section[:2] == [
        "2 ranks: tensor_parallel=2. All other times are those of rank 0, the driver's",
        "rank 0 waited 25.0 ms for the others in collectives: 10.0% of the recorded time, 62.5 us "
        "a step",
    ]
    assert re.match(r"skew +us p50 +us p90 +us p99 +us p99\.9 +us max +n", section[2])
    assert re.match(
        r"last rank's launch after rank 0's +1\.8 +2\.5 +2\.5 +1,500\.0\* +1,500\.0 +399",
        section[3],
    )
    assert section[4] == "n: how many times were measured"
    assert section[5].startswith("* too few")
    assert re.match(r"last to launch +replays +share", section[6])
    assert re.match(r"rank 0 +100 +25\.1%", section[7])
    assert re.match(r"rank 1 +299 +74\.9%", section[8])
    page = (tmp_path / "run.html").read_text()
    assert "<h2>Ranks</h2>" in page and "10.0% of the recorded time" in page
    assert 'class="mark c-skew"' in page


def test_what_is_not_known_of_ranks_is_no_number(run_report: Report, tmp_path: Path) -> None:
    unknown = {"count": 3, "option": "pipeline_parallel=3", "waited_s": None}
    path = write_recording(tmp_path / "run.jsonl", simulate(60), ranks=unknown)
    path.write_text(
        re.sub('"skew_us": [0-9.]+, "last_rank": 1', '"skew_us": null', path.read_text())
    )
    status, printed, _ = run_report(path)
    assert status == 0 and "nan" not in printed
    assert "how long rank 0 waited for the others in collectives is not known" in printed
    assert "no launch of another rank is known" in printed
    _, printed, _ = run_report(path, "--json")
    assert json.loads(printed)["ranks"] == {
        "count": 3, "option": "pipeline_parallel=3", "waited": None, "skew_us": None,
        "last": [{"rank": rank, "replays": 0, "share": 0.0} for rank in range(3)],
    }  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_stands_out_in_a_quiet_run(source: str, tmp_path: Path) -> None:
    document = make_document(read_run(write_source(source, tmp_path, simulate())))
    assert document["stands_out"] == [] and document["outliers"] == []
    assert "What stands out\n- nothing" in describe_report(document)


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
    assert "1 of 398 gaps missed the deadline of 1 ms (0.251%), in 1 of 398 steps" in printed
    assert "TTFT ms" in printed and "3 graphs: 0.30 s, 6.0 MiB" in printed
    assert "Not told by this source\nkernels" in printed


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
    assert status == 0 and "Compared with before.sqlite" in printed
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("{run}", "--html", "{run}"), "--html {run} is the file of the run {run}"),
        (("{run}", "--out", "{link}"), "--out {link} is the file of the run {run}"),
        (("{run}", "--against", "{base}", "--out", "{base}"), "of --against {base}"),
        (("{run}", "--out", "{new}", "--html", "{folder}/./new"), "--out {new} is the file of"),
    ],
)
def test_what_is_read_is_not_written_over(
    run_report: Report, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    names = {name: tmp_path / name for name in ("run", "base", "link", "new")}
    write_recording(names["run"], simulate(9))
    write_recording(names["base"], simulate(9))
    names["link"].symlink_to(names["run"])
    places = {name: str(path) for name, path in names.items()} | {"folder": str(tmp_path)}
    kept = names["run"].read_bytes()
    status, _, error = run_report(*[option.format(**places) for option in options])
    assert status == 2 and said.format(**places) in error and error.count("\n") == 1
    assert names["run"].read_bytes() == kept and not names["new"].exists()


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_the_option_that_cannot_be_written_is_named(
    run_report: Report, tmp_path: Path, option: str
) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(9))
    status, _, error = run_report(path, option, tmp_path / "none" / "x")
    assert status == 2 and f"{option} {tmp_path / 'none' / 'x'}: there is no such folder" in error


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_a_full_disk_is_one_line(run_report: Report, tmp_path: Path, option: str) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(30))
    status, _, error = run_report(path, option, "/dev/full")
    assert status == 2 and error.count("\n") == 1
    assert f"{option} /dev/full cannot be written: No space left" in error


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(400))
    command = [sys.executable, "-m", "graphengine", "report", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "inf"])
def test_a_deadline_is_a_time(run_report: Report, tmp_path: Path, deadline: str) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(9))
    status, _, error = run_report(path, f"--deadline-ms={deadline}")
    assert status == 2 and "--deadline-ms" in error


def test_a_run_without_gaps_is_refused(run_report: Report, tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(2))
    status, _, error = run_report(path)
    assert status == 2 and "no request has two tokens" in error
    # An export knows no requests.
    path = Export(tmp_path / "run.sqlite", simulate(1), mode="graph").path
    status, _, error = run_report(path)
    assert status == 2 and "not two decode replays have a known end" in error


def test_device_times_that_one_bucket_lacks_are_no_number(
    run_report: Report, tmp_path: Path
) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(60, larger={9, 10}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("bucket", "").startswith("decode/32"):
            line["device_us"] = None
    path.write_text("\n".join(map(json.dumps, lines)))
    status, printed, _ = run_report(path)
    assert status == 0 and "nan" not in printed and "Add 2 to `buckets`" in printed


@pytest.mark.parametrize("source", ["recorder", "graph"])
def test_gaps_of_no_time_are_reported(source: str, run_report: Report, tmp_path: Path) -> None:
    timeline = simulate(60)
    for made in timeline.replays:
        made.delivered, made.read = made.delivered and 10**9, made.read and 10**9
    path = write_source(source, tmp_path, timeline)
    status, printed, error = run_report(path, "--html", tmp_path / "x.html")
    assert status == 0 and "nan" not in printed, error
    status, printed, _ = run_report(path, "--against", path, "--json")
    assert status == 0 and "NaN" not in printed
    assert json.loads(printed)["step"]["device_share"] is None


def test_a_launch_on_a_cpu_is_no_more_than_its_gap(run_report: Report, tmp_path: Path) -> None:
    """With a lookahead the replay of a gap was computed in the one before it."""
    header = {"engine": {"device": "cpu"}}
    path = write_recording(tmp_path / "run.jsonl", simulate(3), **header)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:-1]:
        line["launched"] = line["replay"] + 10**8
    path.write_text("\n".join(map(json.dumps, lines)))
    _, printed, _ = run_report(path, "--json")
    assert json.loads(printed)["step"]["device_share"] <= 1.0


def test_parts_add_up_to_the_gap(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(stalls={9: 500.0}, prefills={20}))
    found = break_down(read_run(path))
    total = np.sum(list(found.parts.values()), axis=0)
    np.testing.assert_allclose(total, 1e3 * found.milliseconds, rtol=1e-9)
    # Nothing is counted twice: the rest is the time spent outside.
    *usual, stalled = sorted(found.parts["outside"])
    assert 19.9 <= usual[0] <= usual[-1] <= 20.5 and 520.0 <= stalled <= 531.0


def test_a_prefill_on_a_cpu_is_no_slow_load(tmp_path: Path) -> None:
    """On a CPU the graphs run inside their launches: the decode's begins after the prefill's."""
    path = write_recording(tmp_path / "run.jsonl", simulate(2), engine={"device": "cpu"})
    lines, now = path.read_text().splitlines()[:1], 0
    for step in range(60):
        kinds = ["prefill", "decode"] if step == 40 else ["decode"]
        shared = {"kind": "replay", "step": step, "plan": now, "load": now + 1000}
        now += 2000 + step % 7 * 100
        launches = []
        for kind in kinds:
            took = 900_000 if kind == "prefill" else 300_000
            launches.append((kind, now, now + took))
            now += took + 50
        for kind, begin, end in launches:
            facts = {"type": kind, "bucket": f"{kind}/1", "rows": 1, "live": 1}
            fed = 60 if kind == "prefill" else 0
            stamps = {"replay": begin, "launched": end, "collect": now, "read": now + 500}
            facts |= {"sequence": len(lines), "prompt_tokens": fed, "delivered": now + 900}
            lanes = [] if fed else [[1, 1]]
            lines.append(json.dumps(shared | stamps | facts | {"lanes": lanes}))
        now += 1000
    path.write_text("\n".join(lines))
    (outlier,) = make_document(read_run(path))["outliers"]
    assert outlier["step"] == 40 and outlier["cause"] == "prefill", outlier["text"]


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
