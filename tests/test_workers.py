"""`--workers 2`: tests of several folders at a time report what they report one after the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

BODY = """
import os
import pytest

SEEN = []


@pytest.fixture(scope="session")
def process(tmp_path_factory):
    yield os.getpid()
    print("the session's fixture of", os.getpid(), "ends")


@pytest.mark.parametrize("number", range(4))
def test_numbers(process, number, tmp_path):
    SEEN.append(number)
    assert os.getpid() == process != int(os.environ["COLLECTED_BY"])
    assert SEEN == list(range(number + 1))
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of two folders with four tests each."""
    monkeypatch.setenv("COLLECTED_BY", str(os.getpid()))
    pytester.makeconftest('pytest_plugins = ["workers"]')
    for folder in ("one", "graphengine/two"):
        add(pytester, f"{folder}/test_numbers", BODY)
    return pytester


def add(pytester: pytest.Pytester, name: str, text: str) -> None:
    file: Path = pytester.path / "tests" / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    quick = ("-p", "no:hypothesispytest", "-p", "no:cacheprovider", "--import-mode=importlib")
    return pytester.runpytest_inprocess(*quick, "--workers=2", *options)


def test_each_folder_has_a_process_of_its_own(project: pytest.Pytester) -> None:
    result = run(project, "-rP")
    result.assert_outcomes(passed=8)
    ends = {line for line in result.outlines if line.startswith("the session's fixture of")}
    assert len(ends) == 2, "what fixtures print at the session's end is told, too"


def test_all_ways_to_end_are_counted(project: pytest.Pytester) -> None:
    add(
        project,
        "three/test_all",
        """
        import pytest

        def test_fails():
            print("said before")
            assert [1, 2] == [1, 3]

        def test_skipped(): pytest.skip("no wish")

        @pytest.mark.xfail
        def test_expected(): raise ValueError

        @pytest.fixture
        def broken(): raise OSError("no fixture")

        def test_error(broken): ...
        """.replace("\n        ", "\n"),
    )
    result = run(project, "-rs", "--durations=1")
    result.assert_outcomes(passed=8, failed=1, skipped=1, xfailed=1, errors=1)
    result.stdout.fnmatch_lines_random(
        ["*At index 1 diff: 2 != 3", "said before", "*no wish", "*OSError: no fixture"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_process_that_dies_is_a_failure_of_its_test(project: pytest.Pytester) -> None:
    add(
        project,
        "three/test_dies",
        "import os\ndef test_a(): ...\ndef test_b(): os._exit(7)\ndef test_c(): ...\n",
    )
    result = run(project)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines_random(
        ["*test_dies.py::test_b*", "its process ended with status 7; 1 tests did not run"]
    )


def test_the_first_failure_may_end_all(project: pytest.Pytester) -> None:
    waits = "import time\ndef test_waits(): time.sleep(600)\n" + BODY * 2
    add(project, "three/test_waits", waits)
    add(project, "four/test_fails", "def test_fails(): assert False\n" + BODY)
    result = run(project, "-x")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() == {"failed": 1}, "the longest folder was begun, and ended"


def test_one_worker_is_this_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest('pytest_plugins = ["workers"]')
    add(
        pytester,
        "one/test_here",
        f"import os\ndef test_here(): assert os.getpid() == {os.getpid()}",
    )
    run(pytester, "--workers=1").assert_outcomes(passed=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run(pytester).assert_outcomes(passed=1)


def test_all_processes_share_the_folder_of_the_run(project: pytest.Pytester) -> None:
    """That is the one that pytest removes when it is old."""
    base = project.path / "base"
    run(project, f"--basetemp={base}").assert_outcomes(passed=8)
    folders = [each for each in base.iterdir() if each.is_dir() and not each.is_symlink()]
    assert len(folders) == 8 and all(each.name.startswith("test_numbers") for each in folders)
