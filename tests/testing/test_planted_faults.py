"""Every check lets a sound program pass and fails on the same program with one fault planted.

Each case is a test file of somebody else's project. It runs under the installed plugin, first
sound, then with the fault. `planted_table.py` says how the results come into the README.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import planted_table
import pytest
from planted_cases import CPU_CASES, Case
from planted_gpu_cases import GPU_CASES

import graphengine.testing

pytest_plugins = ["pytester"]


def as_parameter(case: Case, *marks: pytest.MarkDecorator) -> object:
    if case.alone:
        marks = (*marks, pytest.mark.alone)
    return pytest.param(case, id=f"{case.check}: {case.fault}", marks=marks)


@pytest.fixture
def plant(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> Callable[[Case, str], None]:
    """Runs both programs of a case, and notes it for the table."""

    def run(case: Case, device: str) -> None:
        for key, value in (("check", case.check), ("fault", case.fault), ("device", device)):
            record_property(key, value)
        # The file changes faster than the clock by which cached bytecode is judged.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        pytester.makepyfile(test_program=case.source(case.sound))
        # hypothesis would be imported, and rewritten, in every run.
        options = "-p", "no:hypothesispytest"
        pytester.runpytest(*options, "--graph-snapshot-update").assert_outcomes(passed=1)
        pytester.makepyfile(test_program=case.source(case.planted))
        result = pytester.runpytest(*options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([case.message])

    return run


@pytest.mark.parametrize("case", [as_parameter(case) for case in CPU_CASES])
def test_a_planted_fault_is_caught(case: Case, plant: Callable[[Case, str], None]) -> None:
    plant(case, "CPU")


@pytest.mark.parametrize("case", [as_parameter(case, pytest.mark.gpu) for case in GPU_CASES])
def test_a_planted_fault_is_caught_natively(case: Case, plant: Callable[[Case, str], None]) -> None:
    # A run under pytester forgets what it imported, and triton cannot be imported twice.
    importlib.import_module("triton")
    plant(case, "GPU")


# Are the faults complete, and the results those of these faults?


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


def test_results_are_those_of_the_faults_and_all_are_caught() -> None:
    results = planted_table.read_results()
    assert "CPU" in results
    for device, made in results.items():
        rows = [[case.check, case.fault, "caught"] for case in planted_table.CASES[device]]
        assert made["rows"] == rows, f"record those of the {device} again"


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    made = planted_table.render(planted_table.read_results())
    assert planted_table.table_of_readme() == made, "run tests/support/planted_table.py"


def test_a_run_replaces_the_rows_of_its_devices(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "results.json", CPU_CASES[:2]
    rows = [[case.check, case.fault, "caught"] for case in (second, first)]
    gpu = [[GPU_CASES[0].check, GPU_CASES[0].fault, "MISSED"]]
    planted_table.write_results(path, {"GPU": {"environment": "H200", "rows": gpu}})
    planted_table.write_results(path, {"CPU": {"environment": "torch 2", "rows": rows}})
    found = planted_table.read_results(path)
    assert list(found) == ["CPU", "GPU"]
    assert found["CPU"] == {"environment": "torch 2", "rows": rows[::-1]}
    text = planted_table.render(found)
    assert "- CPU (torch 2): 2 of 2 faults caught\n- GPU (H200): 0 of 1 faults caught\n" in text
    assert f"| `{gpu[0][0]}` | {gpu[0][1]} | GPU | MISSED |\n" in text
    del found["GPU"]
    assert f"- GPU: {len(GPU_CASES)} faults, which have not been run yet\n" in (
        planted_table.render(found)
    )
