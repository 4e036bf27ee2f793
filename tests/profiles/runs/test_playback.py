"""Frames of sound: which of them a player had in time, and what late ones waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphengine.cli import main as cli
from graphengine.profiles.report import make_document
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.sources import read_run
from timelines.nsys_files import Export
from timelines.simulated_run import simulate, write_recording


def described(folder: Path, frame_ms: float, **planted: Any) -> dict[str, Any]:
    path = write_recording(folder / "run.jsonl", simulate(**planted))
    document = make_document(read_run(path), frame_ms=frame_ms)
    assert f"Frames of {frame_ms:g} ms" in describe_report(document)
    frames: dict[str, Any] = document["frames"]
    assert frames["n"] == 398
    return frames


def test_a_lead_absorbs_what_would_be_late(tmp_path: Path) -> None:
    """Steps of 0.3 ms: after 100 frames of 0.5 ms the player is 20 ms behind them."""
    frames = described(tmp_path, 0.5, stalls={100: 3000.0})
    assert frames["met"] == frames["n"] and not frames["late"]
    assert 0 < frames["slack_ms"]["min"] < frames["slack_ms"]["p10"] < frames["slack_ms"]["p50"]


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({"stalls": {5: 3000.0}}, "outside"),
        ({"slower": {5: 3000.0}}, "device"),
        ({"planning": {5: 3000.0}}, "plan"),
    ],
)
def test_late_frames_have_causes(tmp_path: Path, planted: dict[str, Any], cause: str) -> None:
    frames = described(tmp_path, 0.5, **planted)
    assert frames["late"] == [{"cause": cause, "frames": 1}]
    assert frames["met"] == frames["n"] - 1
    assert -3 < frames["slack_ms"]["min"] < -1


def test_steps_that_are_always_too_long_are_their_own_cause(tmp_path: Path) -> None:
    frames = described(tmp_path, 0.2)
    assert frames["met"] == 0 and frames["late"] == [{"cause": "every step", "frames": 398}]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recording(tmp_path / "run.jsonl", simulate(stalls={5: 3000.0}))
    assert cli.main(["report", str(path), "--frame-ms", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "397 of 398 frames came before the player needed them" in shown
    assert "late frames by what they waited for: outside 1" in shown
    for wrong in ("0", "-1", "nan"):
        assert cli.main(["report", str(path), f"--frame-ms={wrong}"]) == 2
        assert "must be a positive number of milliseconds" in capsys.readouterr().err
    export = Export(tmp_path / "run.sqlite", simulate(), mode="graph").path
    assert cli.main(["report", str(export), "--frame-ms", "80"]) == 2
    assert "a file of nsys graph knows no requests" in capsys.readouterr().err
