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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from events import GENEROUS_S, until

from checkpoints.few_layers import few_layers
from engines.failing_ranks import limit_waits, ranks_of, stop
from engines.small_engine import greedy, open_engine
from graphengine import EngineConfig
from graphengine.core.commands import ReplayGraph
from graphengine.host.state_checkpoints import BlockCopy
from graphengine.models.launches import Share
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.inventory import LinkShape
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.parallel import worker
from graphengine.parallel.collectives import exchange
from graphengine.parallel.collectives.exchange import Exchange
from graphengine.parallel.collectives.process_group import OPENING_LIMIT_S, ProcessGroup
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.link import DriverEnd, LinkMemory, Stage
from graphengine.parallel.process_handles import SpawnedRank
from graphengine.parallel.ranks import RankFailed, Ranks, rank_devices
from graphengine.parallel.worker import RankStart, run_rank

PROMPT = "def fib(n):"


def is_there(pid: int) -> bool:
    """Whether a process runs; one that is nobody's any more but not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    until(lambda: not any(map(is_there, pids)), f"the end of {pids=}")


def kill(ranks: Ranks) -> None:
    os.kill(ranks.pids[0], signal.SIGKILL)


def confuse(ranks: Ranks) -> None:
    """A rank is told to copy a block that it does not have."""
    ranks.send(BlockCopy(0, 999_999))


@pytest.mark.parametrize(
    ("fault", "grace_s", "message"),
    [
        (kill, GENEROUS_S, r"rank 1 \(process \d+, cpu\) was ended by signal 9 \(SIGKILL\)"),
        (
            confuse,
            GENEROUS_S,
            r"rank 1 \(process \d+, cpu\) failed: IndexError: index 999999 is out of bounds",
        ),
        (
            stop,
            0.0,
            r"ranks did not come within 0.5 s: rank 1 \(process \d+, cpu\) has done \d+ of \d+ "
            r"commands; rank 0 of 2 waited 0.5 s for rank 1 in exchange \d+, gather of \d+ bytes$",
        ),
    ],
)
def test_a_fault_of_a_rank_is_the_next_calls_error(
    forked_ranks: None,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Ranks], None],
    grace_s: float,
    message: str,
) -> None:
    monkeypatch.setattr("graphengine.parallel.ranks._GRACE_S", grace_s)
    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=GENEROUS_S) as engine:
        pids = ranks_of(engine).pids
        assert len(engine.generate(PROMPT, greedy(4)).token_ids) == 4
        engine.submit(PROMPT, greedy(20))
        engine.step()
        if fault is stop:
            limit_waits(engine, 0.5)
        fault(ranks_of(engine))
        with pytest.raises(RankFailed, match=message) as error:
            while engine.busy:
                engine.step()
        assert error.value.__cause__ is not None
        with pytest.raises(RuntimeError, match="the engine is broken, close it: RankFailed: rank"):
            engine.step()
    assert not any(map(is_there, pids))


def test_a_rank_that_waits_in_vain_says_for_whom(forked_ranks: None) -> None:
    """Here for the driver, which never comes to the replay that it has told."""
    message = r"rank 1 .* failed: GroupError: rank 1 of 2 waited 0\.2 s for rank 0 in exchange "
    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=0.2) as engine:
        ranks = ranks_of(engine)
        with pytest.raises(RankFailed, match=message + r"\d+, gather of \d+ bytes"):
            ranks.wait_done(1, ranks.send(ReplayGraph(engine.memory.graphs[0])), GENEROUS_S)
        ranks.broken = True


def test_a_rank_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is to close. Ctrl-C, which reaches ranks, too, does nothing to them."""
    monkeypatch.setattr("graphengine.parallel.ranks._CLOSE_S", 0.1)
    poll, waits = exchange._poll, 0

    def go_on(*arguments: Any) -> None:
        """The driver waits: only now the rank goes on."""
        nonlocal waits
        waits += 1
        os.kill(pid, signal.SIGCONT)
        poll(*arguments)

    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=GENEROUS_S) as engine:
        expected = engine.generate(PROMPT, greedy()).token_ids
        request = engine.submit(PROMPT, greedy())
        engine.step()
        (pid,) = ranks_of(engine).pids
        os.kill(pid, signal.SIGINT)
        stop(ranks_of(engine))
        with monkeypatch.context() as patch:
            patch.setattr(exchange, "_poll", go_on)
            while engine.busy:
                engine.step()
        assert waits and tuple(request.token_ids) == expected
        stop(ranks_of(engine))
    assert not is_there(pid)


def test_what_a_rank_says_while_it_opens(
    forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it says it, and ends, between two looks of the driver."""
    ending = SpawnedRank.ending

    def after_its_end(process: SpawnedRank) -> str | None:
        process.join()
        return ending(process)

    monkeypatch.setattr(SpawnedRank, "ending", after_its_end)
    monkeypatch.setattr("graphengine.parallel.worker._DRIVER_STAYS_S", 0.0)
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(few_layers(), config)
    memory, gone = plan_checkpoint(found, config), replace(found.checkpoint, path=tmp_path)
    ranks = Ranks(gone, config, [memory] * 2, rank_devices(config))
    pids = ranks.pids
    message = r"rank 1 .* failed: FileNotFoundError: .*has no config.json\nTraceback"
    with pytest.raises(RankFailed, match=message):
        ranks.wait_for(Stage.LOADED)
    ranks.close()
    assert not any(map(is_there, pids))


def test_a_rank_that_is_killed_while_it_starts(forked_ranks: None) -> None:
    """No advice to a program that has nothing to do with it."""
    config = EngineConfig(device="cpu", tensor_parallel=2, max_batch=2, max_seq_len=64)
    found = read_checkpoint(few_layers(), config)
    memory = plan_checkpoint(found, config)
    ranks = Ranks(found.checkpoint, config, [memory] * 2, rank_devices(config))
    kill(ranks)
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+, cpu\) was ended by .*KILL\)$"):
        ranks.wait_for(Stage.LOADED)
    ranks.close()


@pytest.mark.parametrize("blocked", [False, True])
def test_a_rank_whose_driver_is_gone_while_it_opens_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    """It says why, too, where it finds that out while something else does not return."""
    if blocked:
        monkeypatch.setattr(worker, "read_checkpoint", lambda *_: threading.Event().wait())
    else:
        monkeypatch.setattr(worker, "_LONG_LOOK_S", GENEROUS_S)
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
        rendezvous=str(folder / "rendezvous"),
        driver=0,  # Nobody's parent.
        threads=1,
    )
    process = context.Process(target=run_rank, args=(start,))
    process.start()
    process.join()
    said = DriverEnd(link, memory.graphs).text(1)
    assert process.exitcode == 1 and said.startswith("DriverGone: the driver, process 0, has ended")
    assert not folder.exists()


@pytest.mark.parametrize("option", ["tensor_parallel", "pipeline_parallel"])
def test_a_rank_that_is_killed_before_the_rendezvous_is_not_waited_for(
    forked_ranks: None, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The driver waits for it there; without a look at it, for two minutes."""

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(worker, "ProcessGroups", end)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+, cpu\) was ended by .*KILL\)$"):
        open_engine(device="cpu", **{option: 2})
    assert time.monotonic() - began < OPENING_LIMIT_S / 2


def test_a_rank_that_is_killed_during_capture_is_not_waited_for(
    forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the driver waits for its part until somebody ends the wait."""
    abandoned = threading.Event()

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait(runtime: DriverRuntime, memory: MemoryPlan) -> None:
        assert abandoned.wait(OPENING_LIMIT_S)
        runtime._around_capture("decode/1/fast")

    monkeypatch.setattr(worker.WorkerRuntime, "_capture", end)
    monkeypatch.setattr(DriverRuntime, "_capture", wait)
    monkeypatch.setattr(ProcessGroup, "abandon", lambda group: abandoned.set())
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+, cpu\) was ended by .*KILL\)$"):
        open_engine(device="cpu", tensor_parallel=2)
    assert time.monotonic() - began < OPENING_LIMIT_S / 2


def test_a_checkpoint_that_changes_while_ranks_open_is_an_error(
    forked_ranks: None, tmp_path: Path
) -> None:
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
    monkeypatch.setattr("graphengine.parallel.driver_runtime.Ranks", None)
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
        assert ours.poll(GENEROUS_S), "it says nothing"
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
from graphengine import (Engine, SamplingParams)

def main():
    with Engine.from_pretrained(sys.argv[1], device="cpu", tensor_parallel=2, max_seq_len=256,
                                max_batch=1, prefill_buckets=(16,)) as engine:
        print(*engine.runtime.ranks.pids, flush=True)
        while True:
            engine.generate("def fib(n):", SamplingParams(max_tokens=200, ignore_eos=True))

{guard}main()
"""
GUARD = 'if __name__ == "__main__": '


def test_ranks_end_with_their_driver(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(guard=GUARD))
    program = subprocess.Popen(
        [sys.executable, str(file), str(few_layers())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ignored by the tests' own process, as in a shell's background, it would be ignored here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert program.stdout is not None
    pids = list(map(int, program.stdout.readline().split()))
    assert pids and all(map(is_there, pids))
    os.killpg(program.pid, signal.SIGINT)
    try:
        _, errors = program.communicate(timeout=GENEROUS_S)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        raise
    assert program.returncode in (-signal.SIGINT, 130)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until_gone(pids)


# Drivers that are killed: forks of this process, which have imported everything.


@pytest.fixture
def fork_driver(
    forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[ForkProcess, Connection]]]:
    """`fork_driver(work)`: a process that calls `work(connection)`, and the other end of that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker, "_DRIVER_STAYS_S", GENEROUS_S)
    context, started = multiprocessing.get_context("fork"), list[ForkProcess]()

    def fork(work: Callable[[Connection], None]) -> tuple[ForkProcess, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield fork
    for process in started:
        process.kill()
        process.join()


def decode(connection: Connection) -> None:
    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=GENEROUS_S) as engine:
        connection.send(ranks_of(engine).pids)
        while True:
            engine.generate(PROMPT, greedy(100, ignore_eos=True))


def stand_where_ranks_meet(connection: Connection) -> None:
    """All are connected, and wait for the driver's first part."""

    def stand(*_: object) -> None:
        connection.send(None)
        threading.Event().wait()

    spawn = Ranks._spawn

    def then_stand(*arguments: Any) -> Any:
        link = spawn(*arguments)
        Exchange.swap = stand  # type: ignore[method-assign]
        return link

    Ranks._spawn = then_stand  # type: ignore[method-assign]
    open_engine(device="cpu", tensor_parallel=2)


def update_without_rank(connection: Connection) -> None:
    """New weights are written, the rank is told of them, and the driver waits for it."""

    def stand(*_: object) -> None:
        connection.send(None)
        threading.Event().wait()

    with open_engine(device="cpu", tensor_parallel=2, wait_limit_s=GENEROUS_S) as engine:
        stop(ranks_of(engine))
        connection.send(ranks_of(engine).pids)
        width = engine.model.config.hidden_size
        Ranks.wait_until_updated = stand  # type: ignore[method-assign]
        engine.update_weights({"model.norm.weight": torch.ones(width)})


def test_ranks_end_with_a_driver_that_is_killed(fork_driver: Any) -> None:
    driver, connection = fork_driver(decode)
    pids = connection.recv()
    assert pids and all(map(is_there, pids))
    driver.kill()
    driver.join()
    wait_until_gone(pids)


def test_a_driver_that_is_killed_while_it_opens_leaves_nothing(
    fork_driver: Any, tmp_path: Path
) -> None:
    """A rank sees the end of their connection before that of the driver."""
    driver, connection = fork_driver(stand_where_ranks_meet)
    connection.recv()
    assert list(tmp_path.glob("graphengine-ranks-*"))
    driver.kill()
    driver.join()
    until(lambda: not list(tmp_path.glob("graphengine-*")), "a rank to remove the folder")


def test_new_weights_of_a_driver_that_is_killed_are_removed(
    fork_driver: Any, tmp_path: Path
) -> None:
    """By a rank, which was to read them."""
    driver, connection = fork_driver(update_without_rank)
    (pid,) = connection.recv()
    connection.recv()
    assert list(tmp_path.glob("graphengine-weights-*/config.json"))
    driver.kill()
    driver.join()
    os.kill(pid, signal.SIGCONT)
    wait_until_gone([pid])
    assert not list(tmp_path.glob("graphengine-*"))


def test_a_program_without_a_guard_is_told(
    spawned_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process stands for the program; its rank imports that."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(guard=""))
    main = ModuleType("__main__")
    main.__file__ = str(program)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(program), str(few_layers())])
    message = (
        r"^rank 1 .* ended with exit code 1 before it began: .*so it is a file, and opens such an "
        r'engine under `if __name__ == "__main__":`$'
    )
    with pytest.raises(RankFailed, match=message):
        open_engine(device="cpu", tensor_parallel=2)
