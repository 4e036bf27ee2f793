"""`graphengine profile nsys`: the command line, and what happens with and without an nsys."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphengine.cli import main as cli
from graphengine.profiles.nsys.nsys import NOT_INSTALLED, nsys_command
from timelines.nsys_files import Export
from timelines.simulated_run import simulate

Profile = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_profile(capfd: pytest.CaptureFixture[str]) -> Profile:
    """`run_profile("--", "true")` -> (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = cli.main(["profile", "nsys", *map(str, arguments)])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def no_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def fake_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """An `nsys` first on the PATH that runs `code`; `arguments` are its own."""
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(f"#!{sys.executable}\nimport sys\narguments = sys.argv[1:]\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_command_line_for_latency_and_for_attribution() -> None:
    command = ["python", "serve.py", "--fast"]
    words = nsys_command(command, trace="graph", out=Path("a/run"))
    assert words == [
        "nsys", "profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=graph",
        "--nvtx-domain-include=graphengine", "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop", "--sample=none", "--cpuctxsw=none", "--export=sqlite",
        "--force-overwrite=true", "--output=a/run", "python", "serve.py", "--fast",
    ]  # fmt: skip
    node = nsys_command(command, trace="node", out=Path("a/run.sqlite"), whole=True)
    assert "--cuda-graph-trace=node" in node and "--output=a/run" in node
    assert not [word for word in node if word.startswith("--capture-range")]


def test_commands_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="known are graph, node"):
        nsys_command(["x"], trace="kernel", out=Path("run"))
    with pytest.raises(ValueError, match="--out run-%h: nsys puts"):
        nsys_command(["x"], trace="node", out=Path("run-%h"))
    with pytest.raises(ValueError, match="nothing to profile"):
        nsys_command([], trace="node", out=Path("run"))


@pytest.mark.usefixtures("no_nsys")
def test_without_nsys_it_says_what_to_run_and_copy(run_profile: Profile, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    status, printed, _ = run_profile(
        "--trace", "node", "--out", out, "--", "graphengine", "profile", "run", "--live", "2"
    )
    assert status == NOT_INSTALLED and not list(tmp_path.iterdir())
    (line,) = [line.strip() for line in printed.splitlines() if "--cuda-graph-trace" in line]
    words = shlex.split(line)
    assert words[-5:] == ["graphengine", "profile", "run", "--live", "2"]
    assert f"--output={out}" in words and "--cuda-graph-trace=node" in words
    assert f"copy {out}.sqlite back" in printed
    assert "graphengine report 'a run.sqlite'" in printed


@pytest.mark.usefixtures("no_nsys")
def test_nothing_to_profile_is_an_error(run_profile: Profile, tmp_path: Path) -> None:
    status, _, error = run_profile("--out", tmp_path / "run")
    assert status == 2 and "nothing to profile" in error


def test_nsys_is_run_and_its_export_reported(
    run_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Export(tmp_path / "made.sqlite", simulate(30), mode="graph").path
    fake_nsys(
        tmp_path / "bin",
        monkeypatch,
        "import shutil\n"
        "(out,) = [word[9:] for word in arguments if word.startswith('--output=')]\n"
        f"shutil.copy({str(made)!r}, out + '.sqlite')\n"
        "print('profiled', arguments[-2:])",
    )
    status, printed, _ = run_profile("--out", tmp_path / "run", "--", "python", "x.py")
    assert status == 0
    assert "profiled ['python', 'x.py']" in printed
    assert f"graphengine report {tmp_path / 'run.sqlite'}" in printed
    assert cli.main(["report", str(tmp_path / "run.sqlite")]) == 0


def test_the_exit_status_of_nsys_is_kept(
    run_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nsys(tmp_path / "bin", monkeypatch, "sys.exit(7)")
    status, _, error = run_profile("--out", tmp_path / "run", "--", "x")
    assert status == 7 and "wrote no" in error


def test_an_nsys_that_wrote_nothing_is_a_failure(
    run_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older export of that name does not count."""
    fake_nsys(tmp_path / "bin", monkeypatch, "")
    (tmp_path / "run.sqlite").write_text("old")
    status, _, error = run_profile("--out", tmp_path / "run", "--", "x")
    assert status == 1 and "did the command call cudaProfilerStart" in error


def test_a_folder_that_is_not_there(run_profile: Profile, tmp_path: Path) -> None:
    status, _, error = run_profile("--out", tmp_path / "none" / "run", "--", "x")
    assert status == 2 and "there is no such folder" in error
