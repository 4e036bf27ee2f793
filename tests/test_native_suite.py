"""`make gpu`: no test is left out, none runs twice, and a failure is one."""

from __future__ import annotations

from pathlib import Path

import native
import pytest
from native import Job, Outcome, files_of, jobs_of, part, summary


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
        "    assert os.environ['CUDA_VISIBLE_DEVICES'] == '3' and n != 4\n"
    )
    outcomes = [
        native.run(Job((str(file),), shard, 2, marker="gpu"), gpu=3, limit=100)
        for shard in range(2)
    ]
    assert [outcome.tests for outcome in outcomes] == [2, 2]
    assert [outcome.passed for outcome in outcomes] == [False, True]
