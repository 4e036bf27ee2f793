"""Golden files of graphs: the class by itself, then as the fixture of a project of its own."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from graph_examples import PLANTED, chain, nested, with_node

from graphengine.buckets import CapturedGraph, GraphStructure
from graphengine.testing.errors import GraphCheckError
from graphengine.testing.snapshot import (
    RECORD,
    GraphSnapshot,
    environment_key,
    file_name,
    read_structure,
)

pytest_plugins = ["pytester"]


def snapshot(folder: Path, *, update: bool = False, name: str = "test_step") -> GraphSnapshot:
    return GraphSnapshot(folder, name, update=update)


def record(folder: Path, graph: GraphStructure, name: str | None = None, **options: str) -> None:
    snapshot(folder, update=True)(graph, name, **options)  # type: ignore[arg-type]


# The class.


def test_what_was_recorded_passes(tmp_path: Path) -> None:
    record(tmp_path / "new" / "folder", chain())
    snapshot(tmp_path / "new" / "folder")(chain())
    written = (tmp_path / "new" / "folder" / "test_step.json").read_text()
    assert GraphStructure.from_json(written) == chain()
    assert len(written.splitlines()) >= len(chain().nodes) + len(chain().edges)


@pytest.mark.parametrize("fault", PLANTED)
def test_every_planted_fault_fails(tmp_path: Path, fault: str) -> None:
    record(tmp_path, chain())
    with pytest.raises(GraphCheckError) as caught:
        snapshot(tmp_path)(PLANTED[fault])
    text = str(caught.value)
    assert text.startswith(f"graph 'test_step' is not the one in {tmp_path / 'test_step.json'}\n")
    assert RECORD in text and text.count("\n") >= 3
    # The other way round: the fault is on file.
    record(tmp_path, PLANTED[fault])
    with pytest.raises(GraphCheckError):
        snapshot(tmp_path)(chain())


def test_an_update_replaces_the_file(tmp_path: Path) -> None:
    record(tmp_path, chain())
    record(tmp_path, PLANTED["an added node"])
    snapshot(tmp_path)(PLANTED["an added node"])


def test_a_missing_file_fails_and_says_how_to_record_it(tmp_path: Path) -> None:
    with pytest.raises(GraphCheckError, match="has no golden file") as caught:
        snapshot(tmp_path)(chain(), "decode/8")
    assert f"pytest {RECORD}" in str(caught.value)
    assert str(tmp_path / "test_step-decode-8.json") in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is written unasked"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 7}', '{"version": 1, "nodes": 3}'])
def test_a_file_that_cannot_be_read_fails(tmp_path: Path, text: str) -> None:
    record(tmp_path, chain())
    (tmp_path / "test_step.json").write_text(text)
    with pytest.raises(GraphCheckError, match=r"test_step\.json cannot be read \(.+\)"):
        snapshot(tmp_path)(chain())
    record(tmp_path, chain())
    snapshot(tmp_path)(chain())


def test_tuned_names_pass_and_tuned_sizes_where_they_are_left_out(tmp_path: Path) -> None:
    before, after = chain(["gemm_128x64x32", "finish"]), chain(["gemm_64x64x64", "finish"])
    record(tmp_path, before)
    snapshot(tmp_path)(after)
    resized = with_node(after, 0, grid=(64, 2, 1), block=(64, 1, 1), shared_bytes=512)
    with pytest.raises(GraphCheckError, match=r"grid 8,1,1 -> 64,2,1; block .*; shared_bytes"):
        snapshot(tmp_path)(resized)
    snapshot(tmp_path, update=True)(before, launch_sizes=False)
    snapshot(tmp_path)(resized, launch_sizes=False)


def test_each_key_has_its_files(tmp_path: Path) -> None:
    record(tmp_path, chain(), key="NVIDIA H200/torch 2.11")
    record(tmp_path, PLANTED["an added node"], key="cpu")
    snapshot(tmp_path)(chain(), key="NVIDIA H200/torch 2.11")
    snapshot(tmp_path)(PLANTED["an added node"], key="cpu")
    assert (tmp_path / "NVIDIA-H200-torch-2.11" / "test_step.json").is_file()
    with pytest.raises(GraphCheckError) as caught:
        snapshot(tmp_path)(chain(), key="other")
    text = str(caught.value)
    assert "for the key 'other', only for NVIDIA-H200-torch-2.11, cpu." in text
    assert f"pytest {RECORD}, look at {tmp_path / 'other' / 'test_step.json'}, and commit" in text


def test_the_first_key_ever_is_asked_for_too(tmp_path: Path) -> None:
    with pytest.raises(GraphCheckError, match="'other', only for no key at all"):
        snapshot(tmp_path)(chain(), key="other")


def test_two_graphs_of_a_test_need_two_names(tmp_path: Path) -> None:
    check = snapshot(tmp_path, update=True)
    check(chain(), "decode/1")
    check(chain(), "decode/2")
    check(chain(), "decode/2", key="cpu")
    for name in ("decode/1", "decode-1"):
        with pytest.raises(ValueError, match=r"used test_step-decode-1\.json already"):
            check(chain(), name)


@pytest.mark.parametrize("update", [False, True])
def test_budgets_hold_also_while_recording(tmp_path: Path, update: bool) -> None:
    record(tmp_path, nested(chain()))
    count = len(chain().nodes)
    snapshot(tmp_path, update=update)(nested(chain()), max_nodes=count + 2, max_kernels=count + 1)
    with pytest.raises(GraphCheckError, match=r"'test_step' has 8 nodes, max_nodes=7") as caught:
        snapshot(tmp_path, update=update)(nested(chain()), max_nodes=count + 1)
    assert "\n     2 x linear\n" in str(caught.value)
    with pytest.raises(GraphCheckError, match="has 7 kernels, max_kernels=6"):
        snapshot(tmp_path, update=update)(nested(chain()), max_kernels=count)


def test_an_overrun_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(GraphCheckError):
        snapshot(tmp_path, update=True)(chain(), max_nodes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_may_be_given_as_what_holds_it() -> None:
    assert read_structure(chain()) == chain()
    with closing(CapturedGraph(lambda: None, name="step", device="cpu")) as graph:
        graph.capture()
        with pytest.raises(ValueError, match="'step' on cpu has no captured graph"):
            read_structure(graph)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("test_step[cuda-8]", "test_step-cuda-8"),
        ("decode/8/k3/fast", "decode-8-k3-fast"),
        ("torch-2.11.0+cu130", "torch-2.11.0+cu130"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "-"),
        ("", "-"),
    ],
)
def test_any_name_becomes_a_file_of_the_folder(text: str, expected: str) -> None:
    assert file_name(text) == expected
    assert file_name(expected) == expected


def test_the_key_names_device_torch_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr("triton.__version__", "3.6.0")
    assert environment_key() == "nvidia-h200_torch-2.11.0+cu130_triton-3.6.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert environment_key() == "cpu_torch-2.11.0+cu130_triton-none"


# The fixture, from outside.

TEST_FILE = """
    from pathlib import Path

    import pytest

    from graphengine.buckets import GraphStructure

    @pytest.mark.parametrize("rows", [1, 2])
    def test_step(graph_snapshot, rows):
        graph = GraphStructure.from_json(Path(f"graph-{rows}.json").read_text())
        graph_snapshot(graph, max_kernels=7)
"""


# hypothesis would be imported, and rewritten, in every run.
QUICK = ("-p", "no:hypothesispytest")


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A test of two graphs, which it reads from files."""
    pytester.makepyfile(test_graphs=TEST_FILE)
    for rows in (1, 2):
        plant(pytester, rows, chain())
    return pytester


def plant(project: pytest.Pytester, rows: int, graph: GraphStructure) -> None:
    (project.path / f"graph-{rows}.json").write_text(graph.to_json())


def test_the_fixture_records_then_passes(project: pytest.Pytester) -> None:
    missing = project.runpytest(*QUICK)
    missing.assert_outcomes(failed=2)
    missing.stdout.fnmatch_lines(["*GraphCheckError: graph 'test_step*1*' has no golden file*"])
    missing.stdout.fnmatch_lines([f"*pytest {RECORD}*"])
    project.runpytest(*QUICK, RECORD).assert_outcomes(passed=2)
    folder = project.path / "__snapshots__" / "test_graphs"
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["test_step-1.json", "test_step-2.json"]
    assert len(json.loads((folder / files[0]).read_text())["nodes"]) == len(chain().nodes)
    project.runpytest(*QUICK).assert_outcomes(passed=2)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_fixture_catches_each_planted_fault(project: pytest.Pytester, fault: str) -> None:
    project.runpytest(*QUICK, RECORD).assert_outcomes(passed=2)
    plant(project, 2, PLANTED[fault])
    result = project.runpytest(*QUICK)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*is not the one in *test_step-2.json"])
    project.runpytest(*QUICK, RECORD).assert_outcomes(passed=2)
    project.runpytest(*QUICK).assert_outcomes(passed=2)


def test_the_fixture_keeps_to_the_budget_while_it_records(project: pytest.Pytester) -> None:
    plant(project, 1, chain("abcdefgh"))
    result = project.runpytest(*QUICK, RECORD)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*has 8 kernels, max_kernels=7*"])
