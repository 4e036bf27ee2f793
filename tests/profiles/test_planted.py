"""`graphengine profile run`, `torch` and `planted`, from the engine to the report."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphengine.cli import main as cli
from graphengine.profiles import planted
from graphengine.profiles.planted import planted_engine, run_planted
from graphengine.profiles.report import make_document
from graphengine.profiles.sources import read_run
from timelines.fake_clock import Clock

TINY = ("--shape", "tiny", "--device", "cpu")


def document(path: Path) -> dict[str, Any]:
    return make_document(read_run(path))


def test_a_stall_is_found_in_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(per_call=1e-5)
    for name, stand_in in vars(clock.module).items():
        monkeypatch.setattr(time, name, stand_in)
    path = tmp_path / "stall.jsonl"
    options = ("--record", str(path), "--steps", "120")
    assert cli.main(["profile", "planted", "stall", *options, *TINY]) == 0
    assert f"graphengine report {path}" in capsys.readouterr().out
    found = document(path)
    longest = found["outliers"][:2]
    assert [one["cause"] for one in longest] == ["outside", "outside"]
    assert abs(longest[0]["step"] - longest[1]["step"]) == planted.STALL_EVERY


def test_a_bucket_that_is_too_large_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bucket.jsonl"
    with planted_engine("bucket", shape="tiny", device="cpu") as engine:
        run_planted(engine, "bucket", 140)
        engine.recorder.write(path)
    found = document(path)
    buckets = {row["bucket"]: row for row in found["buckets"]}
    assert buckets["decode/32/fast"]["padding"] == pytest.approx(30 / 32)
    assert "Add 2 to `buckets`" in " ".join(one["text"] for one in found["stands_out"])


def test_a_long_prompt_is_recorded_as_a_prefill(tmp_path: Path) -> None:
    path = tmp_path / "prefill.jsonl"
    with planted_engine("prefill", shape="tiny", device="cpu") as engine:
        run_planted(engine, "prefill", 70)
        assert not engine.busy
        engine.recorder.write(path)
    run = read_run(path)
    assert (run.replays.prompt_tokens >= planted.LONG_PROMPT).sum() == 1


@pytest.mark.parametrize(
    ("cause", "message"), [("noise", "known are none, stall"), ("sync", "needs a GPU")]
)
def test_what_cannot_be_planted(cause: str, message: str) -> None:
    with (
        pytest.raises(ValueError, match=message),
        planted_engine(cause, shape="tiny", device="cpu"),
    ):
        pass


def test_run_decodes_and_records(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    work = ("--live", "3", "--prompt-tokens", "5", "--new-tokens", "8")
    assert cli.main(["profile", "run", *TINY, *work, "--record", str(path)]) == 0
    requests = document(path)["requests"]
    assert (requests["finished"], requests["new_tokens"]) == (3, 24)


def test_torch_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    work = ("--prompt-tokens", "5", "--new-tokens", "8")
    assert cli.main(["profile", "torch", *TINY, *work, "--out", str(path)]) == 0
    assert json.loads(path.read_text())["traceEvents"]
    assert document(path)["source"] == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run", "--shape", "huge"], "unknown shape"),
        (["run", "--shape", "tiny", "--checkpoint", "x"], "give one"),
        (["run", "--live", "0"], "live=0"),
        (["torch", "--out", "/none/trace.json"], "no such folder"),
        (["planted", "stall", "--record", "/none/x.jsonl"], "--record /none/x.jsonl: there is no"),
        (["run", "--record", "/none/x.jsonl"], "--record /none/x.jsonl: there is no such folder"),
        (["planted", "stall", "--record", "x.jsonl", "--steps", "0"], "--steps 0"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("cause", ["stall", "sync", "bucket", "prefill"])
def test_planted_causes_are_found_on_a_gpu(cause: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    # 32 rows of a small model take as long as one. A wait is known by the host's return as soon as
    # the device is done: a slow host's own delay must be small beside a step.
    shape = "llama-1b" if cause in ("bucket", "sync") else "demo"
    with planted_engine(cause, shape=shape) as engine:
        run_planted(engine, cause, 1200)
        engine.recorder.write(path)
    found = document(path)
    # A cause may show in outliers, and not in other steps.
    counts = Counter[str]()
    for one in found["stands_out"]:
        counts[one["cause"]] += one["count"]
    # Of 60 waits: gaps of a busy host's own hide some.
    expected, least = {
        "stall": ("outside", 20), "sync": ("sync", 20), "bucket": ("bucket", 60),
        "prefill": ("prefill", 15),
    }[cause]  # fmt: skip
    assert counts[expected] >= least, found["stands_out"]


@pytest.mark.gpu
def test_a_trace_of_a_gpu_has_kernels_by_bucket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert cli.main(["profile", "torch", "--new-tokens", "64", "--out", str(path)]) == 0
    run = read_run(path)
    assert run.notes == () and run.kernels
    assert {kernel.bucket for kernel in run.kernels} == set(run.replays.bucket.tolist())
    assert (run.replays.device_us > 0).all()
