"""`make gpu`: no test is left out, none runs twice, and a failure is one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import native
import pytest
from native import Job, Outcome, Suite, alone_of, files_of, jobs_of, part
from native_cases import CASES, chosen, spread


def test_every_file_is_run_and_the_longest_begin() -> None:
    files = files_of(["tests"])
    root = Path(__file__).parent
    assert {native.ROOT / file for file in files} == {*root.rglob("test_*.py")}
    assert files[: len(native.SHARDS)] == [*native.SHARDS]
    assert len(set(files)) == len(files)


def test_a_files_shards_are_all_there() -> None:
    (longest, shards), *_ = native.SHARDS.items()
    jobs = jobs_of([longest, "tests/kernels/step/test_begin.py"])
    assert [job.shard for job in jobs] == [*range(shards), 0]
    assert [job.shards for job in jobs] == [shards] * shards + [1]


def test_each_file_is_in_one_job_and_those_without_a_gpu_run_together() -> None:
    files = files_of(["tests"])
    first = [job for job in jobs_of(files) if job.shard == 0]
    assert sorted(path for job in first for path in job.paths) == sorted(files)
    together = [job for job in first if len(job.paths) > 1]
    assert together and all(len(job.paths) <= native.TOGETHER for job in together)
    assert not any(path.startswith("tests/kernels/") for job in together for path in job.paths)


# Which cases of a matrix are tried?


def test_each_test_whose_cases_are_chosen_is_there() -> None:
    for file, tests in CASES.items():
        text = (native.ROOT / file).read_text()
        for test, count in tests.items():
            assert f"def {test}(" in text and count > 0, f"{file}::{test}"


def test_chosen_cases_have_each_value_of_each_parameter() -> None:
    values = [(model, kind) for model in range(4) for kind in range(3)]
    kept = chosen(values, values, 4)
    assert len(kept) == 4 and kept == sorted(kept)
    assert {model for model, _ in kept} == {*range(4)} and {kind for _, kind in kept} == {*range(3)}
    assert chosen(values, values, 99) == values
    assert len({(*chosen(values, values, 1, name),) for name in "abcdefgh"}) > 3


def test_the_beginning_of_a_spread_order_is_spread() -> None:
    assert sorted(spread(20)) == list(range(20))
    for count in (4, 8):
        kept = sorted(spread(20)[:count])
        gaps = [after - before for before, after in pairwise(kept)]
        assert max(gaps) <= 3 * 20 / count, kept


class Item:
    """Stands for pytest's item."""

    def __init__(self, nodeid: str, **params: object) -> None:
        self.nodeid = nodeid
        if params:
            self.callspec = type("CallSpec", (), {"indices": params, "params": params})


def test_tests_that_are_not_named_keep_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CASES", {"a.py": {"test_many": 2}})
    many = [Item(f"a.py::test_many[{n}]", n=n) for n in range(5)]
    others = [Item("a.py::test_one"), *(Item(f"b.py::test_many[{n}]", n=n) for n in range(3))]
    kept = native.chosen_of([*many, *others])
    assert [item for item in kept if item not in many] == others
    assert len(kept) == len(others) + 2


def test_chosen_cases_are_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CASES", {"a.py": {"test_op": 2, "test_twin": 1, "test_all": 9}})
    ops = [Item(f"a.py::test_op[{op}]", op=op) for op in ("reference", "triton", "split")]
    twins = [Item(f"a.py::test_twin[{twin}]", reference=twin) for twin in (True, False)]
    everything = [Item(f"a.py::test_all[{op}]", op=op) for op in ("reference", "triton")]
    assert native.chosen_of([*ops, *twins, *everything]) == [*ops[1:], twins[1], *everything]


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


# What is run where?


class Pretended:
    """A job's process that has ended."""

    def __init__(self, job: Job, gpus: Sequence[str], status: int = 0) -> None:
        self.job, self.gpus, self.seconds = job, tuple(gpus), 1.0
        self._status = status

    def ended(self) -> Outcome:
        return Outcome(self.job, self._status, 1.0, "1 passed", Counter(passed=1))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, tuple[str, ...]]]:
    """What is run, with which GPUs, on a machine where 3 GPUs are seen."""
    seen: list[tuple[Job, tuple[str, ...]]] = []

    def start(job: Job, gpus: Sequence[str], folder: Path, lines: Path) -> Pretended:
        seen.append((job, tuple(gpus)))
        return Pretended(job, gpus)

    monkeypatch.setattr(native, "Running", start)
    monkeypatch.setattr(native, "import_once", lambda: None)
    monkeypatch.setattr(native, "gpu_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8a,4")
    return seen


Ran = list[tuple[Job, tuple[str, ...]]]
ALL = ("6", "GPU-8a", "4")


def test_jobs_share_the_gpus_and_those_that_run_alone_come_last(ran: Ran) -> None:
    """With paths given too: those of the tests below them."""
    paths = ["tests/graphengine/testing", "tests/kernels/step"]
    assert native.main([*paths, "--processes", "3"]) == 0
    *beside, (alone, gpus) = ran
    assert gpus == ALL
    assert {job.marker for job, _ in beside} == {"gpu and not alone"}
    assert (alone.marker, alone.name) == ("gpu and alone", "tests that run alone")
    assert alone.paths == alone_of(files_of(paths)) != ()
    counts = Counter(own for _, own in beside)
    assert counts.keys() == {("6",), ("GPU-8a",), ("4",)}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_tests_of_ranks_take_all_gpus(ran: Ran) -> None:
    files = ["tests/kernels/comm/test_sums.py", "tests/kernels/step/test_swap.py"]
    assert native.main([*files, "--processes", "1"]) == 0
    assert [gpus for _, gpus in ran] == [ALL, ("6",)]


def test_fewer_gpus_are_the_first_and_nothing_runs_alone_without_such_a_test(
    ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["tests/kernels/step/test_begin.py", "tests/kernels/step/test_swap.py"]
    assert native.main([*files, "--gpus", "1", "--processes", "1"]) == 0
    assert [(job.paths, gpus) for job, gpus in ran] == [((file,), ("6",)) for file in files]
    for arguments, message in (
        (["--gpus", "4"], "--gpus 4: 3 are seen"),
        (["--gpus", "0"], "--gpus 0: 3 are seen"),
        (["tests/test_missing.py"], "tests/test_missing.py: .* is neither a file nor a folder"),
    ):
        with pytest.raises(SystemExit):
            native.main(arguments)
        assert re.search(message, capsys.readouterr().err)
    assert len(ran) == len(files)


# What is said of it?


def test_a_failure_and_a_suite_without_tests_fail(capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (Job((f"{name}.py",)) for name in "abc")
    passed = Outcome(a, 0, 1.0, "x\n3 passed in 2 s", Counter(passed=3))
    nothing = Outcome(b, native.NO_TESTS, 1.0, "2 deselected")
    suite = Suite([a, b], None)
    suite.add(passed)
    assert not suite.passed and "not reached: b.py" in suite.summary()
    suite.add(nothing)
    assert suite.passed and suite.summary().endswith("3 passed, 0 failed\n")
    suite = Suite([b], None)
    suite.add(nothing)
    assert not suite.passed
    for status in (1, 2, -11, None):
        suite = Suite([a, c], None)
        suite.add(passed)
        suite.add(Outcome(c, status, 9.0, "FAILED c.py::test_x - why", Counter(failed=1)))
        assert not suite.passed
        assert "failed: c.py\nFAILED c.py::test_x - why\n" in suite.summary()
        assert suite.summary().endswith("3 passed, 1 failed\n")


def test_a_suite_that_is_cut_off_has_said_what_was_not_reached(tmp_path: Path) -> None:
    jobs = [Job((f"{name}.py",)) for name in "abc"]
    suite = Suite(jobs, tmp_path)
    suite.add(Outcome(jobs[0], 1, 2.0, "the reason", Counter(failed=1)))
    summary = (tmp_path / "summary.txt").read_text()
    assert "failed: a.py" in summary
    assert "not reached: b.py\nnot reached: c.py\n" in summary
    assert "the reason" in (tmp_path / "failures.txt").read_text()


PROGRAM = """
import os, time, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(5))
def test_n(n):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,GPU-1" and n != 4

def test_that_hangs():
    if "{hang}":
        time.sleep(1000)
"""


def run_job(folder: Path, hang: str = "", **places: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    file, lines = folder / "test_some.py", folder / "lines"
    file.write_text(PROGRAM.format(hang=hang))
    running = native.Running(
        Job((str(file),), marker="gpu", **places), ["3", "GPU-1"], folder, lines
    )
    outcome = None
    while outcome is None and not (hang and lines.exists() and lines.read_text().count("\n") == 5):
        outcome = running.ended()
    outcome = outcome or running.end()
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    lines.unlink()
    return outcome, written


@pytest.mark.skipif(native.gpu_count() > 0, reason="a process that uses a GPU cannot be forked")
def test_a_job_runs_its_shard_of_a_file_and_notes_each_test(tmp_path: Path) -> None:
    (first, of_first), (second, of_second) = (
        run_job(tmp_path, shard=shard, shards=2) for shard in range(2)
    )
    assert (first.passed, dict(first.tests)) == (False, {"passed": 2, "failed": 1})
    assert (second.passed, dict(second.tests)) == (True, {"passed": 3})
    tests = [line["test"].rpartition("::")[2] for line in of_first + of_second]
    assert sorted(tests) == [*(f"test_n[{n}]" for n in range(5)), "test_that_hangs"]
    failed = [line["test"] for line in of_first + of_second if line["outcome"] == "failed"]
    assert [name.rpartition("::")[2] for name in failed] == ["test_n[4]"]
    assert all(line["seconds"] >= 0 and line["compiled"] == 0 for line in of_first)


@pytest.mark.skipif(native.gpu_count() > 0, reason="a process that uses a GPU cannot be forked")
def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    outcome, written = run_job(tmp_path, hang="yes")
    assert outcome.status is None and not outcome.passed and len(written) == 5
