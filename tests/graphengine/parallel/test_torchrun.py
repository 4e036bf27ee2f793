"""Ranks that torchrun starts: the program's rank 0 drives, and the others end with its engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from events import GENEROUS_S
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import main as run

from checkpoints.few_layers import few_layers
from engines import pushing_ranks
from engines.pushing_ranks import PARAMS, PROMPTS, SIZES
from graphengine import Engine, EngineConfig
from graphengine.models.launches import Share
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.parallel import torchrun as launching
from graphengine.parallel import worker
from graphengine.parallel.torchrun import _described, follow, launched_share

PROGRAM = """
import os
import sys
from engines.pushing_ranks import PARAMS, PROMPTS, SIZES
from graphengine import Engine

# A line at once: both processes write to one pipe, without a buffer.
say = sys.stdout.write
say(f"begins {os.environ['RANK']}\\n")
with Engine.from_pretrained(sys.argv[1], tensor_parallel=2, **SIZES) as engine:
    results = engine.generate(PROMPTS, PARAMS)
for result in results:
    say(f"tokens {' '.join(map(str, result.token_ids))}\\n")
try:
    Engine.from_pretrained(sys.argv[1], tensor_parallel=2, **SIZES)
except ValueError as error:
    say(f"{error}\\n")
"""
SUPPORT = str(Path(pushing_ranks.__file__).parent.parent)


def in_a_fork(folder: Path, work: Callable[[], object]) -> tuple[int | None, str, str]:
    """How a process ends that has imported all that this one has, and what it writes."""
    names = ("stdout", "stderr")

    def write_and_work() -> None:
        for descriptor, name in enumerate(names, start=1):
            file = (folder / name).open("w", buffering=1)
            os.dup2(file.fileno(), descriptor)
            setattr(sys, name, file)
        work()

    process = multiprocessing.get_context("fork").Process(target=write_and_work)
    process.start()
    process.join(GENEROUS_S)
    process.kill()
    process.join()
    output, errors = ((folder / name).read_text() for name in names)
    return process.exitcode, output, errors


def torchrun(folder: Path, program: Path, **environment: str) -> list[str]:
    """What the program writes on two ranks, line by line."""

    def work() -> None:
        os.environ.update({"PYTHONPATH": SUPPORT, "OMP_NUM_THREADS": "1"}, **environment)
        run(["--standalone", "--nproc-per-node=2", str(program), str(few_layers())])

    code, output, errors = in_a_fork(folder, work)
    assert code == 0, errors
    return output.splitlines()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with Engine.from_pretrained(few_layers(), **SIZES) as alone:
        results = alone.generate(PROMPTS, PARAMS)
    return [f"tokens {' '.join(map(str, result.token_ids))}" for result in results]


def test_the_first_drives_the_others(tmp_path: Path, expected: list[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = torchrun(tmp_path, program)
    second = (
        "torchrun's other processes (1) have ended with the first engine of this program, which "
        "can have no second one"
    )
    assert sorted(said) == sorted(["begins 0", "begins 1", second, *expected])


def test_a_rank_has_the_drivers_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It leaves nothing of a driver that torchrun is about to end."""
    drivers = EngineConfig(tensor_parallel=2, **SIZES)
    memory = plan_checkpoint(read_checkpoint(few_layers(), drivers, Share(0, 2)), drivers)
    call = {"kv_blocks": 16, "swap_blocks": 0, "plan": _described(memory)}
    folder = tmp_path / "drivers"
    folder.mkdir()
    call |= {"load_bytes": memory.load_bytes, "folder": str(folder)}
    store = SimpleNamespace(get=lambda name: json.dumps(call).encode())
    monkeypatch.setattr(launching, "_store", lambda share: store)
    message = (
        "rank 1 of 2 has other options or another checkpoint than the driver: max_seq_len=72 and "
        "not 64, table_blocks=9 and not 8"
    )
    with pytest.raises(ValueError, match=message):
        follow(few_layers(), replace(drivers, max_seq_len=72), Share(1, 2), ["cpu", "cpu"])
    assert not folder.exists()


def open_without_room() -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room on rank 1")

    if os.environ["RANK"] == "1":
        worker.load_checkpoint = fail  # type: ignore[assignment]
    Engine.from_pretrained(few_layers(), tensor_parallel=2, **SIZES)


def test_what_a_rank_says_that_fails_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun, here with forks, ends the driver, which does not come to say it, nor to remove its
    folder.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="forks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    code, _, errors = in_a_fork(tmp_path, elastic_launch(launch, open_without_room))
    assert code == 1 and "MemoryError: no room on rank 1" in errors
    assert not list(tmp_path.glob("graphengine-*"))


def test_an_engine_whose_ranks_push_says_the_same(tmp_path: Path, expected: list[str]) -> None:
    """Through graphs of all kinds and a cancelled request."""
    said = torchrun(tmp_path, Path(pushing_ranks.__file__), TRITON_INTERPRET="1")
    assert said == ["ranks 2 states 1", *expected]


def test_other_ranks_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", tensor_parallel=2)
    assert launched_share(config) is None
    started = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert launched_share(config) == Share(1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="takes ranks of one host: torchrun has started 1 here"):
        launched_share(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = "tensor_parallel=2, but torchrun has started 4 processes"
    with pytest.raises(ValueError, match=message):
        launched_share(config)
