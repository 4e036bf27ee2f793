"""run_isolated: a fresh process, and the report of how it ended."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from graphengine.testing import GraphCheckError, IsolatedRun, run_isolated


def greet() -> None:
    print("hello", __name__)


def test_a_function_of_this_file_runs_in_a_process_of_its_own() -> None:
    assert run_isolated(greet) == IsolatedRun(status=0, stdout="hello isolated\n", stderr="")


def test_source_is_dedented_and_finds_the_same_modules() -> None:
    run = run_isolated(
        """
        import json, sys
        print(json.dumps(sys.path))
        sys.exit(3)
        """,
        status=3,
    )
    assert run.stdout.strip() == str(sys.path).replace("'", '"')


def test_a_failure_shows_what_the_child_wrote() -> None:
    source = "print('so far')\nassert 1 + 1 == 3, 'arithmetic'"
    with pytest.raises(GraphCheckError) as caught:
        run_isolated(source)
    text = str(caught.value)
    assert text.startswith("the program ended with exit status 1, expected exit status 0\nstdout:")
    assert "so far" in text
    assert "line 2" in text and text.endswith("AssertionError: arithmetic")
    assert run_isolated(source, status=None).status == 1


def test_a_child_that_does_not_fail_though_it_should() -> None:
    with pytest.raises(GraphCheckError, match="exit status 0, expected signal 6"):
        run_isolated("pass", status=-6)


def test_only_the_end_of_long_output_is_shown() -> None:
    with pytest.raises(GraphCheckError) as caught:
        run_isolated("print('x' * 10**6); raise ValueError('boom')")
    assert len(str(caught.value)) < 10_000
    assert str(caught.value).endswith("ValueError: boom")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time limits of children, which end once a child has printed "begun", however late."""
    communicate, limits = subprocess.Popen.communicate, list[float]()

    def until_begun(child: subprocess.Popen[str], *, timeout: float) -> tuple[str, str]:
        limits.append(timeout)
        while True:
            try:
                return communicate(child, timeout=0.05)
            except subprocess.TimeoutExpired as late:
                if b"begun" in (late.stdout or b""):
                    raise

    monkeypatch.setattr(subprocess.Popen, "communicate", until_begun)
    return limits


def test_a_child_that_hangs_is_killed_and_its_output_shown(limits: list[float]) -> None:
    with pytest.raises(GraphCheckError, match=r"within 1 s and was killed\nstdout:\nbegun"):
        run_isolated("import time\nprint('begun', flush=True)\ntime.sleep(60)", timeout=1)
    assert limits == [1]


def test_what_a_child_started_is_killed_with_it(limits: list[float], tmp_path: Path) -> None:
    """The grandchild holds the pipes, too: waiting for them would wait until it ends."""
    note, ended = tmp_path / "grandchild", tmp_path / "ended"
    program = f"""
        import subprocess, time
        grandchild = subprocess.Popen(["sh", "-c", "sleep 60; touch {ended}"])
        open({str(note)!r}, "w").write(str(grandchild.pid))
        print("begun", flush=True)
        time.sleep(60)
    """
    with pytest.raises(GraphCheckError, match="did not end within 2 s and was killed"):
        run_isolated(program, timeout=2)
    assert limits == [2] and not ended.exists()
    # Until its new parent has noticed, a dead process is a zombie.
    status = Path("/proc", note.read_text(), "stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert not ended.exists(), f"process {note.read_text()} has gone on"
        time.sleep(0.05)
    assert not ended.exists()


def test_a_signal_without_a_name_has_a_number() -> None:
    number = signal.SIGRTMIN + 6
    assert number not in [int(known) for known in signal.Signals]
    source = f"import os; os.kill(os.getpid(), {number})"
    with pytest.raises(GraphCheckError, match=f"ended with signal {number}, expected exit status"):
        run_isolated(source)
    assert run_isolated(source, status=-number).status == -number


def generate() -> Iterator[None]:
    yield


async def coroutine() -> None: ...


@pytest.mark.parametrize("program", [generate, coroutine])
def test_what_a_call_would_not_run_is_refused(program: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"a call of {program.__name__} runs none of its body"):
        run_isolated(program)


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_time_in_which_nothing_can_end_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout={timeout} must be greater than 0"):
        run_isolated("pass", timeout=timeout)


@pytest.mark.parametrize("program", [lambda: None, [].clear, IsolatedRun])
def test_what_the_child_could_not_find_is_refused(program: object) -> None:
    with pytest.raises(ValueError, match="is no function at the top level of a file"):
        run_isolated(program)  # type: ignore[arg-type]


def break_the_context() -> None:
    torch.zeros(8, device="cuda").index_select(0, torch.tensor([8], device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_broken_context_stays_in_the_child_natively() -> None:
    run = run_isolated(break_the_context, status=1)
    assert "device-side assert" in run.stderr
    assert torch.ones(1, device="cuda").item() == 1
