"""The script that runs compute-sanitizer: what it reads, and its verdict on each kind of end."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sanitize
from sanitize import THROUGH, judge, main, read_output, signal_name, spread

CLEAN = "========= COMPUTE-SANITIZER\n...\n========= ERROR SUMMARY: 0 errors\n"
FOUND = "========= Invalid __global__ read\n========= ERROR SUMMARY: 12 errors\n"
RACES = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("output", "summary", "errors"),
    [
        ("", None, None),
        ("ERROR SUMMARY: 3 errors", None, None),
        (CLEAN, "ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 1 error", "ERROR SUMMARY: 1 error", 1),
        (FOUND, "ERROR SUMMARY: 12 errors", 12),
        (CLEAN + FOUND, "ERROR SUMMARY: 12 errors", 12),
        (RACES, "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 3),
        (NO_RACES, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
    ],
)
def test_summaries(output: str, summary: str | None, errors: int | None) -> None:
    assert read_output(output) == (summary, errors)


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, THROUGH + "\n" + CLEAN, "clean"),
        (0, THROUGH + "\n" + NO_RACES, "clean"),
        (9, THROUGH + "\n" + FOUND, "errors"),
        # Whatever the exit status is.
        (0, THROUGH + "\n" + RACES, "errors"),
        (1, THROUGH + "\n" + FOUND, "errors"),
        (None, THROUGH + "\n" + CLEAN, "timed out"),
        # The tool died: by a signal, or without output.
        (-11, "first words\n", "tool died"),
        (139, THROUGH + "\n", "tool died"),
        (0, THROUGH + "\n", "tool died"),
        (0, "first words\n", "program failed"),
        # The program died: the tool had time to say so.
        (1, THROUGH + "\n" + CLEAN, "program failed"),
        (1, "Traceback\n" + CLEAN, "program failed"),
        (-6, "first words\n" + CLEAN, "program failed"),
        (0, CLEAN, "program failed"),
        (255, THROUGH + CLEAN, "tool died"),
        (5, THROUGH + "\n" + CLEAN, "nothing ran"),
    ],
)
def test_verdicts(status: int | None, output: str, verdict: str) -> None:
    assert judge(status, output) == verdict


RACE = """\
..========= Error: Race reported between Read access at _attend_kernel+0x110 in {file}:{first}
=========     and Write access at _attend_kernel+0x7850 in {file}:{second} [2 hazards]
=========
"""
FILE = "prefill_gluon.py"


def test_hand_overs_to_warp_groups_are_no_races() -> None:
    """Only where both ends are: not what a group does afterwards, nor another file."""
    own = sanitize.specialized_lines(FILE)
    source = next(sanitize.KERNELS.rglob(FILE)).read_text().splitlines()
    assert "warp_specialize" in "".join(source[own[0] - 1 : own[-1]])
    assert source[own[0] - 1].startswith("def _attend_kernel")
    group = next(n for n, line in enumerate(source, 1) if line.startswith("def _attend_rows"))
    handed = RACE.format(file=FILE, first=own[0], second=own[-1])
    inside = RACE.format(file=FILE, first=own[0], second=group + 5)
    elsewhere = RACE.format(file="norm.py", first=own[0], second=own[-1])
    assert sanitize.count_races(handed + inside + handed + elsewhere) == (2, 2)
    ending = (
        THROUGH + "\n========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)\n"
    )
    assert judge(9, handed + handed + ending.format(2, 2)) == "clean"
    assert judge(9, handed + inside + ending.format(2, 2)) == "errors"
    assert judge(0, handed + ending.format(2, 2)) == "errors"
    assert sanitize.count_races("========= Error: Race reported between nothing") == (1, 0)


@pytest.mark.parametrize(
    ("status", "name"), [(None, None), (0, None), (9, None), (-11, "SIGSEGV"), (139, "SIGSEGV")]
)
def test_signals_have_names(status: int | None, name: str | None) -> None:
    assert signal_name(status) == name


def test_cases_are_spread_over_a_file() -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 5) == [0, 1, 2] and spread(range(5), 1) == [0]
    assert spread([], 3) == []


STAND_IN = """
    import os, signal, subprocess, sys, time

    if sys.argv[1:] == ["--version"]:
        print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1")
        sys.exit()
    options, program = sys.argv[1:7], sys.argv[7:]
    assert options[::2] == ["--tool", "--error-exitcode", "--target-processes"], options
    tool, target = options[1], program[program.index("--child") + 1]
    print("========= COMPUTE-SANITIZER", flush=True)
    if (tool, target) == ("racecheck", "engine/mtp"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if target != "engine/plain":
        print("sanitizing: through")
    if target == "engine/ngram":
        print("========= ERROR SUMMARY: 2 errors")
        sys.exit(9)
    print("========= ERROR SUMMARY: 0 errors")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    script = tmp_path / "compute-sanitizer.py"
    script.write_text(textwrap.dedent(STAND_IN))
    return f"{sys.executable} -S {script}"


def test_each_end_is_told_apart(
    tmp_path: Path, stand_in: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--sanitizer", stand_in, "--targets", "engine"]
    assert main([*words, "--tools", "racecheck,memcheck", "--jobs", "2"]) == 1
    document = json.loads(out.read_text())
    assert document["sanitizer"].endswith("Sanitizer Version 2025.3.1")
    runs: dict[tuple[str, str], dict[str, Any]] = {
        (each["tool"], each["target"].removeprefix("engine/")): each for each in document["runs"]
    }
    assert {key: each["verdict"] for key, each in runs.items()} == {
        ("racecheck", "plain"): "program failed",
        ("racecheck", "full"): "clean",
        ("racecheck", "mtp"): "tool died",
        ("racecheck", "ngram"): "errors",
        ("memcheck", "plain"): "program failed",
        ("memcheck", "full"): "clean",
        ("memcheck", "mtp"): "clean",
        ("memcheck", "ngram"): "errors",
    }
    died = runs["racecheck", "mtp"]
    assert (died["signal"], died["status"], died["summary"]) == ("SIGSEGV", -11, None)
    assert "--child engine/mtp" in died["command"] and died["tail"] == died["reports"]
    assert runs["memcheck", "ngram"]["errors"] == 2
    assert "racecheck  engine/mtp" in capsys.readouterr().out


def test_what_takes_too_long_is_stopped_with_all_that_it_started() -> None:
    """`run` reads until the last process that holds its output's pipe has ended."""
    slow = ["sh", "-c", "echo begun; sleep 600 & sleep 600", "stand-in"]
    found = sanitize.run("racecheck", "x", ["program"], sanitizer=slow, limit_s=0.3)
    assert (found.verdict, found.status, found.signal) == ("timed out", None, None)
    assert found.seconds < 600


def test_a_clean_sheet_is_exit_status_0(tmp_path: Path, stand_in: str) -> None:
    words = ["--out", str(tmp_path / "found.json"), "--sanitizer", stand_in, "--tools", "memcheck"]
    assert main([*words, "--targets", "engine/mtp,engine/full", "--repeat", "2"]) == 0
    assert len(json.loads((tmp_path / "found.json").read_text())["runs"]) == 4


def test_what_cannot_be_run_is_said(tmp_path: Path, stand_in: str, capsys: Any) -> None:
    assert main(["--sanitizer", str(tmp_path / "nowhere")]) == sanitize.NO_SANITIZER
    assert "is not installed" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--tools 'leakcheck': known are memcheck, racecheck"):
        main(["--sanitizer", stand_in, "--tools", "leakcheck"])
    with pytest.raises(
        ValueError, match="--targets 'kernels/nor': known are kernels/accesses, kernels/activation"
    ):
        main(["--sanitizer", stand_in, "--targets", "kernels/nor"])
    with pytest.raises(SystemExit):
        main(["--cases", "0"])
    assert "--cases 0 must be positive" in capsys.readouterr().err


def test_the_cases_of_a_file_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options = sanitize.parse(["--split", "--cases", "2", "--no-pdl", "--one-core"])
    lists = "print('2 collected'); print('cases', '[\"test_a[1]\", \"test_b[x y]\"]')"
    make = sanitize.child

    def child(target: str, asked: Any, *more: str) -> list[str]:
        return [sys.executable, "-c", lists] if "--list" in more else make(target, asked, *more)

    monkeypatch.setattr(sanitize, "child", child)
    found = sanitize.programs(["kernels/swap", "engine/mtp"], options)
    assert [*found] == ["kernels/swap::test_a[1]", "kernels/swap::test_b[x y]", "engine/mtp"]
    assert found["kernels/swap::test_b[x y]"][-2:] == ["--case", "test_b[x y]"]
    for words in found.values():
        assert {"--child", "--no-pdl", "--one-core"} < {*words}


def test_an_engine_runs_its_requests_to_the_end() -> None:
    sanitize.run_engine("full", tokens=1, pdl=False, device="cpu")
    assert set(sanitize.ENGINES) == {"plain", "full", "mtp", "ngram"}
