"""Ranks that are killed, stopped, late or raise, and drivers that are: all ends, and says why.

The programs that are run here stand for a user's own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.few_layers import few_layers
from engines.small_engine import greedy, open_engine
from graphengine import Engine, EngineConfig
from graphengine.models.contract import Share
from graphengine.opening.inventory import LinkShape
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.parallel.leading import LeadingRuntime
from graphengine.parallel.link import DriverEnd, Kind, LinkMemory, Stage
from graphengine.parallel.rank import RankStart, run_rank
from graphengine.parallel.ranks import RankFailed, Ranks, rank_devices

PROMPT = "def fib(n):"


def is_there(pid: int) -> bool:
    """Whether a process runs; one that is nobody's any more but not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, f"{pids=} are left"
        time.sleep(0.02)


def ranks_of(engine: Engine) -> Ranks:
    assert isinstance(engine.runtime, LeadingRuntime)
    return engine.runtime.ranks


def kill(ranks: Ranks) -> None:
    os.kill(ranks.pids[0], signal.SIGKILL)


def stop(ranks: Ranks) -> None:
    os.kill(ranks.pids[0], signal.SIGSTOP)


def confuse(ranks: Ranks) -> None:
    """A rank is told to replay what it does not have."""
    ranks.send(Kind.REPLAY, (999,))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (kill, r"rank 1 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"),
        (confuse, r"rank 1 \(process \d+, cpu\) failed: IndexError: tuple index out of range"),
        (
            stop,
            r"ranks did not come within 3 s: rank 1 \(process \d+, cpu\) has done \d+ of \d+ "
            r"commands",
        ),
    ],
)
def test_a_fault_of_a_rank_is_the_next_calls_error(
    fault: Callable[[Ranks], None], message: str
) -> None:
    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=3.0) as engine:
        pids = ranks_of(engine).pids
        assert len(engine.generate(PROMPT, greedy(4)).token_ids) == 4
        engine.submit(PROMPT, greedy(20))
        engine.step()
        fault(ranks_of(engine))
        started = time.monotonic()
        with pytest.raises(RankFailed, match=message) as error:
            while engine.busy:
                engine.step()
        assert time.monotonic() - started < 15
        assert error.value.__cause__ is not None
        with pytest.raises(RuntimeError, match="the engine is broken, close it: RankFailed: rank"):
            engine.step()
    assert_gone(pids, within_s=1.0)


def test_a_rank_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is to close. Ctrl-C, which reaches ranks, too, does nothing to them."""
    monkeypatch.setattr("graphengine.parallel.ranks._CLOSE_S", 0.3)
    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=20.0) as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        request = engine.submit(PROMPT, greedy())
        engine.step()
        (pid,) = ranks_of(engine).pids
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGSTOP)
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -CONT {pid}"])
        while engine.busy:
            engine.step()
        assert tuple(request.token_ids) == expected
        stop(ranks_of(engine))
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert_gone([pid], within_s=1.0)


def test_what_a_rank_says_while_it_opens(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(few_layers(), config)
    memory, gone = plan_checkpoint(found, config), replace(found.checkpoint, path=tmp_path)
    ranks = Ranks(gone, config, [memory] * 2, rank_devices(config))
    pids = ranks.pids
    message = r"rank 1 .* failed: FileNotFoundError: .*has no config.json\nTraceback"
    with pytest.raises(RankFailed, match=message):
        ranks.wait_for(Stage.LOADED)
    ranks.close()
    assert_gone(pids, within_s=1.0)


def test_a_rank_that_is_killed_while_it_starts() -> None:
    """No advice to a program that has nothing to do with it."""
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(few_layers(), config)
    memory = plan_checkpoint(found, config)
    ranks = Ranks(found.checkpoint, config, [memory] * 2, rank_devices(config))
    kill(ranks)
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+, cpu\) was ended by .*KILL\)$"):
        ranks.wait_for(Stage.LOADED)
    ranks.close()


def test_a_rank_whose_driver_is_gone_while_it_opens_removes_its_folder(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(few_layers(), config)
    memory = plan_checkpoint(found, config)
    context = multiprocessing.get_context("fork")
    link = LinkMemory.allocate(context, LinkShape.of_loads(1, memory.load_bytes))
    folder = tmp_path / "ranks"
    folder.mkdir()
    start = RankStart(
        share=Share(1, 2),
        path=str(few_layers()),
        digest=found.checkpoint.digest,
        config=config,
        memory=memory,
        link=link,
        meeting=str(folder / "meeting"),
        driver=0,  # Nobody's parent.
        threads=1,
    )
    process = context.Process(target=run_rank, args=(start,))
    process.start()
    process.join()
    said = DriverEnd(link).text(1)
    assert process.exitcode == 1 and said.startswith("DriverGone: the driver, process 0, has ended")
    assert not folder.exists()


def test_a_checkpoint_that_changes_while_ranks_open_is_an_error(tmp_path: Path) -> None:
    """The driver has read it when the change comes; ranks read what is there then."""
    path = tmp_path / "changing"
    shutil.copytree(few_layers(), path)
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(path, config, Share(0, 2))
    memory = plan_checkpoint(found, config)
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(told | {"rms_norm_eps": 0.5}))
    ranks = Ranks(found.checkpoint, config, [memory] * 2, ["cpu"] * 2)
    message = f"rank 1 of 2 finds other configs or tensors in {path} than the driver has read"
    with pytest.raises(RankFailed, match=message):
        ranks.wait_for(Stage.LOADED)
    ranks.close()


# What is wrong before there is a process.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide the"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be"),
        (
            {"expert_parallel": True, "tensor_parallel": 1},
            "expert_parallel=True is for several ranks, not tensor_parallel=1",
        ),
    ],
)
def test_what_ranks_cannot_do_is_an_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("graphengine.parallel.leading.Ranks", None)
    with pytest.raises(ValueError, match=message):
        open_engine(**{"device": "cpu", "tensor_parallel": 2} | options)


def errors_of_opening(connection: Connection) -> None:
    """Each way to open ranks, in a process of its own; sends what it raises."""
    for option in ("tensor_parallel", "pipeline_parallel"):
        try:
            open_engine(device="cpu", **{option: 2}).close()
            connection.send("no error")
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


def test_a_daemon_is_told_that_it_may_start_no_ranks() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=errors_of_opening, args=(theirs,), name="worker 7", daemon=True
    )
    process.start()
    for option in ("tensor_parallel", "pipeline_parallel"):
        assert ours.poll(30), "it says nothing"
        assert ours.recv().startswith(
            f"ValueError: {option}=2 takes 2 processes, and this one, worker 7 ({process.pid}), "
            f"cannot start the others: it is a daemon of multiprocessing. Start it with "
            f"daemon=False; "
        )
    process.join()


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 4), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert rank_devices(EngineConfig(device="cuda", tensor_parallel=3)) == [
        "cuda:1", "cuda:2", "cuda:3"
    ]  # fmt: skip
    assert rank_devices(EngineConfig(device="cuda:0", tensor_parallel=2)) == ["cuda:0", "cuda:1"]
    message = (
        "tensor_parallel=3 from device cuda:2 on takes 3 devices: torch finds 4, of which 2 are "
        "left"
    )
    with pytest.raises(ValueError, match=message):
        rank_devices(EngineConfig(device="cuda:2", tensor_parallel=3))


# Whole programs.

PROGRAM = """
import sys
from graphengine import Engine, SamplingParams

def main():
    with Engine.from_pretrained(sys.argv[1], device="cpu", tensor_parallel=2, max_seq_len=256,
                                max_batch=1, prefill_buckets=(16,)) as engine:
        print(*engine.runtime.ranks.pids, flush=True)
        while True:
            engine.generate("def fib(n):", SamplingParams(max_tokens=200, ignore_eos=True))

{guard}main()
"""
GUARD = 'if __name__ == "__main__": '


def start(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(program), str(few_layers())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ignored by the tests' own process, as in a shell's background, it would be ignored here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def kill_once_there(
    program: subprocess.Popen[str], folder: Path, pattern: str, deadline: float
) -> None:
    """When the program has a file there."""
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.kill()
    program.wait()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_driver(tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C reaches all processes of a terminal, a kill the driver alone."""
    program = start(tmp_path, PROGRAM.format(guard=GUARD))
    assert program.stdout is not None
    pids = list(map(int, program.stdout.readline().split()))
    assert pids and all(map(is_there, pids))
    if sent is signal.SIGINT:
        os.killpg(program.pid, sent)
    else:
        program.kill()
    try:
        _, errors = program.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        raise
    assert program.returncode in (-sent, 130)
    if sent is signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_gone(pids)


def test_a_driver_that_is_killed_while_it_opens_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sees the end of their connection before that of the driver."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = start(tmp_path, PROGRAM.format(guard=GUARD))
    deadline = time.monotonic() + 30
    kill_once_there(program, tmp_path, "graphengine-ranks-*/meeting-0", deadline)
    while list(tmp_path.glob("graphengine-*")):
        assert time.monotonic() < deadline, "its folder is left"
        time.sleep(0.02)


UPDATES = """
import os
import signal
import sys
import torch
from graphengine import Engine

if __name__ == "__main__":
    with Engine.from_pretrained(sys.argv[1], device="cpu", tensor_parallel=2, max_seq_len=64,
                                max_batch=1, prefill_buckets=(16,)) as engine:
        (pid,) = engine.runtime.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        print(pid, flush=True)
        width = engine.model.config.hidden_size
        engine.update_weights({"model.norm.weight": torch.ones(width)})
"""


def test_new_weights_of_a_driver_that_is_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a rank, which was to read them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = start(tmp_path, UPDATES)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    deadline = time.monotonic() + 20
    kill_once_there(program, tmp_path, "graphengine-weights-*/config.json", deadline)
    os.kill(pid, signal.SIGCONT)
    assert_gone([pid])
    assert not list(tmp_path.glob("graphengine-*"))


def test_a_program_without_a_guard_is_told(tmp_path: Path) -> None:
    _, errors = start(tmp_path, PROGRAM.format(guard="")).communicate(timeout=60)
    assert "RankFailed: rank 1 " in errors and "ended with exit code 1 before it began" in errors
    assert 'so it is a file, and opens such an engine under `if __name__ == "__main__":`' in errors
