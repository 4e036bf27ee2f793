"""A recorded run of the benchmark: its file, and the reported cost of recording."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphengine import Engine
from graphengine.cli import main as cli
from graphengine.profiles.benchmark import recording
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.measure import Steady, Work
from graphengine.profiles.benchmark.recording import LEAST_PAIRS, Turns, record
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.tables import text

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WORK = Work(live=2, prompt_tokens=9, new_tokens=14, runs=2)


@pytest.fixture(params=DEVICES)
def tiny(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"device": request.param, "max_batch": 3, "max_seq_len": 96}
    engine, _ = build_engine(Subject.of_shape("tiny"), options)
    with engine:
        yield engine


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The header, the replays, the requests."""
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return (
        header,
        [row for row in rows if row["kind"] == "replay"],
        [row for row in rows if row["kind"] == "request"],
    )


def test_a_run_is_recorded_and_its_cost_is_told(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "range_ns", lambda: 7)
    path = tmp_path / "run.jsonl"
    wanted = 2 * 14 * (LEAST_PAIRS + 1) - 5
    found = record(tiny, WORK, path, wanted)
    header, replays, requests = read(path)
    rounds = LEAST_PAIRS + 1
    assert found["cost"]["pairs"] == rounds
    # Rounds without the recorder, and rounds after the file's end, are not in the file.
    assert found["tokens"] == sum(row["emitted"] for row in replays) == 2 * 14 * rounds >= wanted
    assert found["requests"] == len(requests) == 2 * rounds
    assert found["replays"] == len(replays) == header["recorder"]["records"]
    assert found["dropped"] == 0 and found["finished"] == {"length": 2 * rounds}
    assert header["engine"]["max_batch"] == 3 and found["file"] == "run.jsonl"
    cost = found["cost"]
    assert min(cost["ms_per_step"].values()) > 0
    low, high = cost["more_us_quartiles"]
    assert low <= cost["more_us"] <= high
    assert cost["itl_ms"]["on"]["n"] == cost["itl_ms"]["off"]["n"] > 0
    assert found["range_ns"] == 7
    on_gpu = tiny.memory.device.type == "cuda"
    assert (found["host_us"] is not None) == (found["cost_without_events"] is not None) == on_gpu
    assert all((row["device_us"] or 0) > 0 for row in replays) == on_gpu
    # The engine is as it was.
    assert not tiny.recorder.recording and len(tiny.recorder) == 0 and not tiny.busy
    json.dumps(found)
    told = text._record(found)
    assert "recorded" in told and f"in {rounds} pairs" in told and "ns (" in told


def test_other_tokens_with_the_recorder_are_an_error(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Work.prompts

    def changing(work: Work, vocab_size: int) -> list[list[int]]:
        found = prompts(work, vocab_size)
        return [[1, *prompt[1:]] for prompt in found] if tiny.recorder.recording else found

    monkeypatch.setattr(Work, "prompts", changing)
    with pytest.raises(RuntimeError, match=r"prompt 0, recorded or not"):
        record(tiny, WORK, tmp_path / "run.jsonl", 1)


def test_a_difference_is_that_of_pairs() -> None:
    def run(milliseconds: float) -> Steady:
        seconds = milliseconds * 1e-3
        return Steady(
            gaps=[seconds] * 3, steps=2, seconds=2 * seconds, tokens=1, longest_outside=None
        )

    slow, fast = 4.0, 1.0
    turns = Turns(
        off=[run(slow), run(fast), run(slow)],
        on=[run(slow + 0.002), run(fast + 0.002), run(slow + 0.003)],
    )
    cost = turns.cost()
    assert cost["more_us"] == pytest.approx(2.0)
    assert cost["ms_per_step"] == pytest.approx({"off": 4.0, "on": 4.002})


@pytest.mark.parametrize("per_range", [50, 700])
def test_a_range_is_clocked_without_its_loop(
    per_range: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0

    class Slow:
        def __enter__(self) -> None:
            nonlocal now
            now += per_range

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(recording, "span", lambda *_, **__: Slow())
    monkeypatch.setattr(recording.time, "perf_counter_ns", lambda: now)
    assert recording.range_ns(10) == per_range


# The command.

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        small = ("--prompt-tokens", "9", "--new-tokens", "8", "--runs", "1", "--device", "cpu")
        capsys.readouterr()
        status = cli.main(["bench", "--shape", "tiny", "--ttft-tokens", "5", *small, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command_records_one_row(bench: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "bench.json"
    status, printed, _ = bench("--record", str(path), "--long", "90", "--out", str(out))
    assert status == 0
    (row,) = json.loads(out.read_text())["rows"]
    _, replays, _ = read(path)
    assert row["live"] == 1 and row["record"]["replays"] == len(replays)
    # 90 tokens are twelve rounds of eight.
    assert row["record"]["tokens"] == 96 and row["record"]["cost"]["pairs"] == 12
    assert "the recorder, off and on in 12 pairs" in printed
    assert "one NVTX range" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--record", "{}/run.jsonl", "--batch", "1,2"), "takes one batch, not 1,2"),
        (("--record", "{}"), "--record {} is a folder"),
        (("--record", "{}/none/run.jsonl"), "there is no such folder"),
        (("--record", "{}/x", "--out", "{}/x"), "--record {}/x is the file of --out {}/x"),
    ],
)
def test_what_cannot_be_recorded_is_said_first(
    bench: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    given = [argument.format(tmp_path) for argument in arguments]
    status, printed, errors = bench(*given)
    assert status == 2 and printed == ""
    assert errors.count("\n") == 1 and said.replace("{}", str(tmp_path)) in errors
