"""Every check lets a sound program pass and fails on the same program with one fault planted.

Each case is a test file of another project. It runs under the installed plugin, first sound, then
with the fault. `planted/table.py` says how the results get into the README.
"""

from __future__ import annotations

import fnmatch
import functools
import sys
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import graphengine.testing
from planted import table as planted_table
from planted.cases import CPU_CASES, Case
from planted.gpu_cases import GPU_CASES

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]


def as_parameter(case: Case, *marks: pytest.MarkDecorator) -> object:
    if case.alone:
        marks = (*marks, pytest.mark.alone)
    return pytest.param(case, id=f"{case.check}: {case.fault}", marks=marks)


@pytest.fixture
def run_here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in this process, which is quick."""
    # The file changes faster than the clock that validates cached bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return pytester.runpytest_inprocess


@pytest.fixture
def run_apart(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a process: it forgets what it imports, and triton cannot be imported twice."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return functools.partial(pytester.runpytest_subprocess, timeout=600)


def judge(case: Case, pytester: pytest.Pytester, run: Run) -> str:
    """Runs both programs of a case. "not run" if they do not show whether it is caught."""
    # hypothesis would be imported, and rewritten, in every run.
    options = "-p", "no:hypothesispytest"
    pytester.makepyfile(test_program=case.source(case.sound))
    if outcome(run(*options, "--graph-snapshot-update")) != "passed":
        return planted_table.NOT_RUN
    pytester.makepyfile(test_program=case.source(case.planted))
    result = run(*options)
    if outcome(result) not in ("passed", "failed"):
        return planted_table.NOT_RUN
    told = any(fnmatch.fnmatchcase(line, case.message) for line in result.outlines)
    return planted_table.CAUGHT if outcome(result) == "failed" and told else planted_table.MISSED


def outcome(result: pytest.RunResult) -> str:
    """Outcome of the test; "errors" if its file did not import, "none" if pytest did not end."""
    try:
        found = result.parseoutcomes()
    except ValueError:
        return "none"
    return ", ".join(name for name in found if not name.startswith("warning"))


Note = Callable[[str, object], None]


def plant(case: Case, device: str, pytester: pytest.Pytester, run: Run, note: Note) -> None:
    """Judges a case, and notes it for the table."""
    result = judge(case, pytester, run)
    found = {"check": case.check, "fault": case.fault, "device": device, "result": result}
    for key, value in found.items():
        note(key, value)
    assert result == planted_table.CAUGHT, "see what both programs printed"


@pytest.mark.parametrize("case", [as_parameter(case) for case in CPU_CASES])
def test_a_planted_fault_is_caught(
    case: Case, pytester: pytest.Pytester, run_here: Run, record_property: Note
) -> None:
    plant(case, "CPU", pytester, run_here, record_property)


@pytest.mark.parametrize("case", [as_parameter(case, pytest.mark.gpu) for case in GPU_CASES])
def test_a_planted_fault_is_caught_natively(
    case: Case, pytester: pytest.Pytester, run_apart: Run, record_property: Note
) -> None:
    plant(case, "GPU", pytester, run_apart, record_property)


# What is reported about a fault?


PROGRAM = """
def test_it():
    <here>
"""


@pytest.mark.parametrize(
    ("sound", "planted", "result"),
    [
        ("pass", "raise ValueError('boom')", "caught"),
        ("pass", "pass", "MISSED"),
        ("pass", "raise ValueError('other')", "MISSED"),
        ("assert False", "raise ValueError('boom')", "not run"),
        ("pytest.skip()", "raise ValueError('boom')", "not run"),
        ("pass\nimport nowhere", "raise ValueError('boom')", "not run"),
        ("pass", "pass\nraise ValueError('boom')", "not run"),
    ],
)
def test_a_fault_is_missed_only_where_both_programs_ran(
    sound: str, planted: str, result: str, pytester: pytest.Pytester, run_here: Run
) -> None:
    case = Case(
        check="a",
        fault="b",
        program=PROGRAM,
        sound=sound,
        planted=planted,
        message="*ValueError: boom*",
    )
    assert judge(case, pytester, run_here) == result


def test_a_run_that_does_not_end_as_pytest_does_tells_nothing(
    pytester: pytest.Pytester, run_apart: Run
) -> None:
    case = Case(
        check="a",
        fault="b",
        program=PROGRAM,
        sound="pass",
        planted="import os; os._exit(1)",
        message="*",
    )
    assert judge(case, pytester, run_apart) == "not run"


def test_both_programs_may_use_triton(pytester: pytest.Pytester, run_apart: Run) -> None:
    case = Case(
        check="a",
        fault="b",
        program="""
        import triton
        from graphengine.kernels.core.pdl import launch_options

        @triton.jit
        def kernel(x):
            pass

        def test_it(assert_pdl_edges):
            <here>
        """,
        sound="pass",
        planted="raise ValueError('boom')",
        message="*ValueError: boom*",
    )
    assert judge(case, pytester, run_apart) == "caught"


# Are the faults complete, and do the results belong to them?


def test_every_check_has_a_planted_fault() -> None:
    names = {name for name in graphengine.testing.__all__ if name.startswith(("assert_", "no_"))}
    names |= {
        "check_no_alloc",
        "graph_snapshot",
        "latency_budget",
        "poison_padding",
        "run_isolated",
    }
    assert {case.check for case in (*CPU_CASES, *GPU_CASES)} == names
    natively = {case.check for case in GPU_CASES}
    assert names - natively == {"assert_pointers_stable"}, "which has nothing native about it"


@pytest.mark.parametrize("device", planted_table.CASES)
def test_faults_have_names_of_their_own(device: str) -> None:
    cases = planted_table.CASES[device]
    assert len(planted_table.by_name(cases)) == len(cases)


def test_results_are_those_of_the_faults_and_none_is_missed() -> None:
    """Every fault has a row. One that takes a GPU may wait for its first run, as "not run"."""
    results = planted_table.read_results()
    assert list(results) == list(planted_table.CASES)
    for device, made in results.items():
        found = {(check, fault): result for check, fault, result in made["rows"]}
        assert list(found) == list(planted_table.by_name(planted_table.CASES[device]))
        assert len(found) == len(made["rows"])
        waiting = {planted_table.NOT_RUN} if device == "GPU" else set()
        others = {name: result for name, result in found.items() if result != planted_table.CAUGHT}
        assert set(others.values()) <= waiting, f"mend these of the {device}: {others}"


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    made = planted_table.render(planted_table.read_results())
    assert planted_table.table_of_readme() == made, "run tests/support/planted/table.py"


def row(case: Case, result: str) -> list[str]:
    return [case.check, case.fault, result]


def test_a_run_replaces_the_rows_of_its_faults(tmp_path: Path) -> None:
    path, (first, second, *others) = tmp_path / "results.json", CPU_CASES

    def write(environment: str, *rows: list[str], device: str = "CPU") -> dict[str, typing.Any]:
        planted_table.write_results(path, {device: {"environment": environment, "rows": [*rows]}})
        return planted_table.read_results(path)

    write("H200", row(GPU_CASES[0], "MISSED"), device="GPU")
    found = write("torch 2", row(second, "caught"))
    assert list(found) == ["CPU", "GPU"]
    waiting = [row(case, "not run") for case in others]
    rows = [row(first, "not run"), row(second, "caught"), *waiting]
    assert found["CPU"] == {"environment": "torch 2", "rows": rows}
    found = write("torch 2", row(first, "MISSED"))
    assert found["CPU"]["rows"] == [row(first, "MISSED"), row(second, "caught"), *waiting]
    text = planted_table.render(found)
    count = len(CPU_CASES)
    assert f"- CPU (torch 2): 1 of {count} faults caught, {count - 2} not run\n" in text
    assert f"- GPU (H200): 0 of {len(GPU_CASES)} faults caught" in text
    assert f"| `{GPU_CASES[0].check}` | {GPU_CASES[0].fault} | GPU | MISSED |\n" in text
    # What another environment found is no result of this one.
    found = write("torch 3", row(first, "caught"))
    assert found["CPU"]["rows"] == [row(first, "caught"), row(second, "not run"), *waiting]
    del found["GPU"]
    assert f"- GPU: {len(GPU_CASES)} faults, which have not been run yet\n" in (
        planted_table.render(found)
    )


def test_runs_side_by_side_keep_each_others_rows(tmp_path: Path) -> None:
    path = tmp_path / "results.json"

    def write(case: Case) -> None:
        made = {"environment": "torch 2", "rows": [row(case, "caught")]}
        planted_table.write_results(path, {"CPU": made})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, CPU_CASES))
    made = planted_table.read_results(path)["CPU"]
    assert made["rows"] == [row(case, "caught") for case in CPU_CASES]
