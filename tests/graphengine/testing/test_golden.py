"""Golden files that no test asks for are reported, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphengine.testing.snapshots.golden import GoldenFiles

pytest_plugins = ["pytester"]

PROGRAM = """
import pytest
from graphengine.buckets import GraphNode, GraphStructure

GRAPH = GraphStructure(nodes=(GraphNode(index=0, kind="kernel", name="norm"),))

def test_step(graph_snapshot):
    graph_snapshot(GRAPH)
    graph_snapshot(GRAPH, "draft", key="h200")

def test_skipped(graph_snapshot):
    pytest.skip("no GPU here")

class TestPrefill:
    @pytest.mark.parametrize("size", [16, 64])
    def test_chunk(self, graph_snapshot, size):
        graph_snapshot(GRAPH)
"""
UPDATE = ("-p", "no:hypothesispytest", "--graph-snapshot-update")


@pytest.fixture
def files(pytester: pytest.Pytester) -> Path:
    """The golden files of a project whose tests have just written them."""
    pytester.makepyfile(test_graphs=PROGRAM)
    pytester.runpytest(*UPDATE).assert_outcomes(passed=3, skipped=1)
    folder = pytester.path / "__snapshots__" / "test_graphs"
    assert len([*folder.rglob("*.json")]) == 4
    return folder


def reported(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """Names of the files in the report, "" where there is none."""
    lines = pytester.runpytest("-p", "no:hypothesispytest", *arguments).outlines
    begin = [place for place, line in enumerate(lines) if "orphaned golden files" in line]
    if not begin:
        return []
    end = next(place for place, line in enumerate(lines) if line.startswith("golden files that"))
    names = [Path(line).name for line in lines[begin[0] + 1 : end] if line]
    assert f"no test asks for: {len(names)}. Delete them" in lines[end]
    return names


def test_files_that_tests_ask_for_are_no_orphans(files: Path, pytester: pytest.Pytester) -> None:
    assert reported(pytester) == []


def test_files_without_a_test_are_reported(files: Path, pytester: pytest.Pytester) -> None:
    (files / "test_gone.json").write_text("{}")
    (files / "a100").mkdir()
    (files / "a100" / "test_gone.json").write_text("{}")
    (files / "a100" / "test_step.json").write_text("{}")  # of another device
    other = files.parent / "test_deleted_module"
    other.mkdir()
    (other / "test_it.json").write_text("{}")
    (other / "notes.txt").write_text("mine")
    assert reported(pytester) == ["test_it.json", "test_gone.json", "test_gone.json"]


def test_files_of_tests_that_did_not_pass_may_be_theirs(
    files: Path, pytester: pytest.Pytester
) -> None:
    (files / "test_skipped.json").write_text("{}")
    (files / "test_skipped-draft-0123456789.json").write_text("{}")
    assert reported(pytester) == []
    assert reported(pytester, "-k", "prefill") == [], "the others are deselected"
    assert reported(pytester, "--collect-only") == []
    (files / "test_gone.json").write_text("{}")
    assert reported(pytester, "-k", "prefill") == ["test_gone.json"]
    assert reported(pytester, "test_graphs.py::test_step") == [], "others were not collected"


def test_workers_of_xdist_tell_what_they_know(tmp_path: Path) -> None:
    """A stand-in for two workers: each has collected all tests and run some."""
    module = tmp_path / "test_it.py"
    module.touch()
    folder = tmp_path / "__snapshots__" / "test_it"
    folder.mkdir(parents=True)
    for name in ("test_a", "test_b", "test_gone"):
        (folder / f"{name}.json").touch()
    all_of_them = GoldenFiles()
    for name in ("test_a", "test_b"):
        worker = GoldenFiles()
        worker.tests = {f"test_it.py::{each}": str(module) for each in ("test_a", "test_b")}
        worker.owners = {folder / f"{name}.json": f"test_it.py::{name}"}
        worker.passed = {f"test_it.py::{name}"}
        all_of_them.merge(worker.to_dict())
    assert all_of_them.orphans() == [folder / "test_gone.json"]
    all_of_them.partial = True
    assert all_of_them.orphans() == []
