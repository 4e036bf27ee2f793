"""`make gpu`: no test is left out, none runs twice, and a failure is one."""

from __future__ import annotations

import re
from pathlib import Path

import native
import pytest
from native import Job, Outcome, alone_of, files_of, jobs_of, part, summary


def test_every_file_is_run_and_the_longest_begin() -> None:
    files = files_of(["tests"])
    root = Path(__file__).parent
    assert {native.ROOT / file for file in files} == {*root.rglob("test_*.py")}
    assert files[: len(native.SHARDS)] == [*native.SHARDS]
    assert len(set(files)) == len(files)


def test_a_files_shards_are_all_there() -> None:
    (longest, shards), *_ = native.SHARDS.items()
    jobs = jobs_of([longest, "tests/test_house.py"])
    assert [job.shard for job in jobs] == [*range(shards), 0]
    assert [job.shards for job in jobs] == [shards] * shards + [1]


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_have_each_test_once(shards: int) -> None:
    items = list(range(20))
    parts = [part(items, shard, shards) for shard in range(shards)]
    assert sorted(item for each in parts for item in each) == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_file_with_a_test_that_runs_alone_is_found() -> None:
    """Also what such a test is marked in: nothing but test files marks any."""
    root = Path(__file__).parent
    marking = {
        file.relative_to(native.ROOT).as_posix()
        for file in root.rglob("*.py")
        if native.ALONE.search(file.read_text())
    }
    found = alone_of(files_of(["tests"]))
    assert set(found) == marking and len(set(found)) == len(found) > 5
    case = "tests/graphengine/program/test_graphs.py::test_a"
    assert alone_of(files_of([case, "tests/test_house.py"])) == (case,)


@pytest.mark.parametrize(
    ("inherited", "count", "seen"),
    [
        (None, 3, ["0", "1", "2"]),
        ("5, 2", 2, ["5", "2"]),
        ("GPU-8a, MIG-1/2/3,7", 3, ["GPU-8a", "MIG-1/2/3", "7"]),
        # CUDA ends the list before a name that is no GPU's.
        *(("1,-1,3", 1, ["1"]), ("", 0, []), ("-1", 0, []), (None, 0, [])),
    ],
)
def test_an_inherited_list_of_gpus_is_kept(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None, count: int, seen: list[str]
) -> None:
    monkeypatch.setattr(native, "gpu_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    assert native.visible_gpus() == seen


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, list[str], float]]:
    """What is run, with which GPUs and limit, on a machine where 3 GPUs are seen."""
    seen = []

    def run(job: Job, gpus: list[str], limit: float) -> Outcome:
        seen.append((job, gpus, limit))
        return Outcome(job, 0, 1.0, "1 passed")

    monkeypatch.setattr(native, "run", run)
    monkeypatch.setattr(native, "gpu_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8a,4")
    return seen


def test_jobs_share_the_gpus_and_those_that_run_alone_come_last(
    ran: list[tuple[Job, list[str], float]],
) -> None:
    """With paths given too: those of the tests below them, with a limit of their own."""
    paths = ["tests/graphengine/testing", "tests/test_house.py"]
    assert native.main([*paths, "--limit", "7", "--alone-limit", "9"]) == 0
    *beside, (alone, gpus, limit) = ran
    assert {limit for _, _, limit in beside} == {7} and (limit, gpus) == (9, ["6", "GPU-8a", "4"])
    assert {job.marker for job, _, _ in beside} == {"gpu and not alone"}
    assert (alone.marker, alone.name) == ("gpu and alone", "tests that run alone")
    assert alone.paths == alone_of(files_of(paths)) and "tests/test_house.py" not in alone.paths
    counts = [sum(own == [gpu] for _, own, _ in beside) for gpu in gpus]
    assert sum(counts) == len(beside) and max(counts) - min(counts) <= 1


def test_tests_of_ranks_take_all_gpus(ran: list[tuple[Job, list[str], float]]) -> None:
    files = ["tests/kernels/comm/test_sums.py", "tests/test_layering.py"]
    assert native.main([*files, "--processes", "1"]) == 0
    assert [gpus for _, gpus, _ in ran] == [["6", "GPU-8a", "4"], ["GPU-8a"]]


def test_fewer_gpus_are_the_first_and_nothing_runs_alone_without_such_a_test(
    ran: list[tuple[Job, list[str], float]], capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["tests/test_house.py", "tests/test_layering.py"]
    assert native.main([*files, "--gpus", "1", "--processes", "1"]) == 0
    assert [(job.paths, gpus) for job, gpus, _ in ran] == [((file,), ["6"]) for file in files]
    for arguments, message in (
        (["--gpus", "4"], "--gpus 4: 3 are seen"),
        (["--gpus", "0"], "--gpus 0: 3 are seen"),
        (["tests/test_missing.py"], "tests/test_missing.py: .* is neither a file nor a folder"),
    ):
        with pytest.raises(SystemExit):
            native.main(arguments)
        assert re.search(message, capsys.readouterr().err)
    assert len(ran) == len(files)


def test_a_failure_and_a_suite_without_tests_fail(capsys: pytest.CaptureFixture[str]) -> None:
    passed = Outcome(Job(("a.py",)), 0, 1.0, "x\n1 failed, 3 passed in 2 s")
    nothing = Outcome(Job(("b.py",)), native.NO_TESTS, 1.0, "2 deselected")
    assert summary([passed, nothing], 2.0) == 0
    assert "3 passed in 2 s; 0 of 2 jobs failed" in capsys.readouterr().out
    assert summary([nothing], 1.0) == 1
    for status in (1, 2, None):
        assert summary([passed, Outcome(Job(("c.py",)), status, 9.0, "why it failed")], 1.0) == 1
        assert "why it failed" in capsys.readouterr().out


def test_a_job_runs_its_shard_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "@pytest.mark.parametrize('n', range(5))\n"
        "def test_n(n):\n"
        "    assert os.environ['CUDA_VISIBLE_DEVICES'] == '3,GPU-1' and n != 4\n"
    )
    outcomes = [
        native.run(Job((str(file),), shard, 2, marker="gpu"), gpus=["3", "GPU-1"], limit=100)
        for shard in range(2)
    ]
    assert [outcome.tests for outcome in outcomes] == [2, 2]
    assert [outcome.passed for outcome in outcomes] == [False, True]
