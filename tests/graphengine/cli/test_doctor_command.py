"""`graphengine doctor`: its report, its JSON and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from graphengine.cli.commands import doctor as doctor_command
from graphengine.cli.main import main
from graphengine.observe.doctor import examine
from graphengine.observe.findings import Driver, Finding, Folder, Machine, Software

VERSIONS = {
    "torch": "2.11.0", "triton": "3.6.0", "numpy": "2.4.1", "safetensors": "0.5",
    "tokenizers": "0.22.1", "jinja2": "3.1.6", "nvtx": "0.2.13",
}  # fmt: skip
WHOLE = Machine(
    software=Software(engine="0.1.0", python="3.11.9", system="Linux", versions=VERSIONS),
    driver=Driver(),
    triton_cache=Folder(Path("/home/me/.triton/cache"), writable=True),
)
# Its GPU is there, and torch does not find it.
BROKEN = Machine(
    software=WHOLE.software,
    driver=Driver(version="580.65", gpus=("NVIDIA H200",)),
    compiler="/usr/bin/gcc",
    python_header="/include/Python.h",
    triton_cache=WHOLE.triton_cache,
)


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`doctor(machine, "--json")` -> (exit status, stdout)."""

    def call(machine: Machine, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(doctor_command, "read_machine", lambda *_: machine)
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return call


def test_what_is_optional_does_not_change_the_status(doctor: Any) -> None:
    status, out = doctor(WHOLE)
    assert status == 0 and out.splitlines()[-1] == "everything is there: engines run on the CPU"
    assert "PROBLEM" not in out
    lines = out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if line.startswith("  llguidance "))
    assert lines[number].endswith("missing: extra `guided`, for grammars and JSON schemas")
    assert lines[number + 1].split(maxsplit=1) == ["->", "pip install 'llguidance>=1.8'"]


def test_what_is_broken_is_the_status_and_the_last_line(doctor: Any) -> None:
    status, out = doctor(BROKEN)
    assert status == 1 and out.splitlines()[-1] == "1 problem"
    lines = out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if "PROBLEM" in line)
    assert "torch finds none; the driver has NVIDIA H200" in lines[number - 1]
    assert lines[number].split(maxsplit=1)[1] == "torch 2.11.0 is built without CUDA"
    assert "-> " in lines[number + 1]


def test_the_report_is_aligned_in_groups(doctor: Any) -> None:
    _, out = doctor(BROKEN)
    groups = [line for line in out.split("\n\nsoftware")[0].splitlines() if line[:1].strip()]
    assert groups[:3] == ["software", "driver", "CPU"]
    values = {
        len(line) - len(line[2:].lstrip().partition("  ")[2].lstrip())
        for line in out.splitlines()
        if line.startswith("  ")
    }
    assert len(values) == 1


def test_the_report_fits_the_terminal(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = doctor(BROKEN)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "48")
    status, fitted = doctor(BROKEN)
    assert status == 1 and max(map(len, whole.splitlines())) > 48
    assert max(map(len, fitted.splitlines())) <= 48
    assert fitted.split() == whole.split()
    # What follows begins where the values do.
    assert "\n                   " in fitted


def test_json_has_the_same_findings(doctor: Any) -> None:
    for machine, expected in ((WHOLE, 0), (BROKEN, 1)):
        status, out = doctor(machine, "--json")
        (line,) = out.splitlines()
        document = json.loads(line, parse_constant=pytest.fail)
        assert status == expected
        assert document["findings"] == [asdict(finding) for finding in examine(machine)]
        assert document["problems"] == expected
        assert document["verdict"] == doctor(machine)[1].splitlines()[-1]
    assert document["findings"][0].keys() == {"group", "name", "value", "problem", "remedy"}


def test_problems_and_remedies_are_below_what_they_are_about() -> None:
    findings = [
        Finding("a", "name", "value", "why", "do that"),
        Finding("a", "another", "value"),
        Finding("b", "x", "y", remedy="better"),
    ]
    assert [*doctor_command.report_lines(findings)] == [
        "a",
        "  name     value",
        "  PROBLEM  why",
        "       ->  do that",
        "  another  value",
        "",
        "b",
        "  x        y",
        "       ->  better",
    ]


def test_it_runs_as_a_program_on_this_machine(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "graphengine", "doctor", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "everything is there: engines run on the CPU"
    names = {finding["name"] for finding in document["findings"]}
    assert {"torch", "triton", "NVIDIA driver", "engine", "C compiler", "Triton's cache"} <= names
