"""Golden files of graphs: the class by itself, then as the fixture of a project of its own."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from graphengine.buckets import CapturedGraph, GraphNode, GraphStructure
from graphengine.testing.errors import GraphCheckError
from graphengine.testing.snapshots.golden import file_name, unique_name
from graphengine.testing.snapshots.snapshot import RECORD, GraphSnapshot, environment_key
from graphengine.testing.snapshots.structures import read_structure
from planted.graphs import PLANTED, chain, nested, with_node

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
    # The other way round: the fault is in the file.
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
    assert str(snapshot(tmp_path).path("decode/8")) in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is written unasked"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 7}',
        '{"version": 1, "nodes": 3}',
        '{"version": 1, "nodes": [], "edges": [[0, 1]]}',
        '{"version": 1, "nodes": [{"index": 0, "kind": "kernel", "name": 7}], "edges": []}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
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
    folder = unique_name("NVIDIA H200/torch 2.11")
    assert folder.startswith("NVIDIA-H200-torch-2.11-")
    assert (tmp_path / folder / "test_step.json").is_file()
    with pytest.raises(GraphCheckError) as caught:
        snapshot(tmp_path)(chain(), key="other")
    text = str(caught.value)
    assert f"for the key 'other', only for {folder}, cpu." in text
    assert f"pytest {RECORD}, look at {tmp_path / 'other' / 'test_step.json'}, and commit" in text


def test_the_first_key_ever_is_asked_for_too(tmp_path: Path) -> None:
    with pytest.raises(GraphCheckError, match="'other', only for no key at all"):
        snapshot(tmp_path)(chain(), key="other")


def test_two_graphs_of_a_test_need_two_names(tmp_path: Path) -> None:
    check = snapshot(tmp_path, update=True)
    check(chain(), "decode/1")
    check(chain(), "decode/2")
    check(chain(), "decode/2", key="cpu")
    check(chain(), "decode-1")
    with pytest.raises(ValueError, match=r"used test_step-decode-1-\w{10}\.json already"):
        check(chain(), "decode/1")


def test_two_tests_share_no_file(tmp_path: Path) -> None:
    owners: dict[Path, str] = {}
    for owner in ("test_a.py::test_it", "test_a.py::test_it"):  # run again, as after a failure
        GraphSnapshot(tmp_path, "mlp", update=True, owner=owner, owners=owners)(chain())
    other = GraphSnapshot(tmp_path, "mlp", update=True, owner="test_b.py::test_it", owners=owners)
    message = r"mlp\.json is that of test_a\.py::test_it already, so test_b\.py::test_it needs"
    with pytest.raises(ValueError, match=message):
        other(chain())


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_step.json").mkdir()
    (tmp_path / "key").write_text("")
    for update, key, reason in (
        (False, None, r"test_step\.json cannot be read \(Is a directory\)"),
        (True, None, r"test_step\.json cannot be written \(Is a directory\)"),
        (False, "key", r"key/test_step\.json cannot be read \(Not a directory\)"),
        (True, "key", r"key/test_step\.json cannot be written \(File exists\)"),
    ):
        with pytest.raises(GraphCheckError, match=f"graph 'test_step': .*{reason}"):
            snapshot(tmp_path, update=update)(chain(), key=key)
    with pytest.raises(ValueError, match="8 is of type int, and a name is text"):
        snapshot(tmp_path)(chain(), 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "node",
    [
        GraphNode(index=0, kind="conditional", graphs=None),
        GraphNode(index=0, kind="unknown"),
        GraphNode(index=0, kind="type_14"),
    ],
    ids=lambda node: node.kind,
)
def test_a_budget_that_cannot_be_told_fails(tmp_path: Path, node: GraphNode) -> None:
    graph = nested(GraphStructure(nodes=(node,)))
    check = snapshot(tmp_path, update=True)
    check(graph, "without a budget")
    message = rf"'test_step' keeps to its budget cannot be told: node 1/0/0 \({node.kind}\) cannot"
    for budget in ({"max_nodes": 9}, {"max_kernels": 9}):
        with pytest.raises(GraphCheckError, match=message):
            snapshot(tmp_path, update=True)(graph, **budget)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("graph", [None, 3, "abc", object()])
def test_what_is_no_graph_is_refused(graph: object) -> None:
    with pytest.raises(ValueError, match=rf"is of type {type(graph).__name__}: give a torch.cuda"):
        read_structure(graph)  # type: ignore[arg-type]


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


def test_names_of_files_are_told_apart() -> None:
    assert unique_name("test_step") == "test_step"
    parts = [
        ("test_step[a/b]",),
        ("test_step[a-b]",),
        ("test_step[a b]",),
        ("test_step-a-b",),
        ("test_step", "a/b"),
        ("test_step", "a-b"),
        ("test_step", "a", "b"),
        ("TestA::test_step",),
        ("TestB::test_step",),
        ("",),
        ("-",),
        ("..",),
        ("x" * 300,),
        ("x" * 301,),
        ("ü" * 300,),
        ("\udc80",),
    ]
    names = [unique_name(*some) for some in parts]
    assert len({*names}) == len(names)
    assert names[0].startswith("test_step-a-b-")
    for name in names:
        assert name == file_name(name) or name.startswith("-"), name
        assert len(f"{name}.json".encode()) <= 255


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
    assert [name[:12] for name in files] == ["test_step-1-", "test_step-2-"]
    assert len(json.loads((folder / files[0]).read_text())["nodes"]) == len(chain().nodes)
    project.runpytest(*QUICK).assert_outcomes(passed=2)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_fixture_catches_each_planted_fault(project: pytest.Pytester, fault: str) -> None:
    project.runpytest(*QUICK, RECORD).assert_outcomes(passed=2)
    plant(project, 2, PLANTED[fault])
    result = project.runpytest(*QUICK)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*is not the one in *test_step-2-*.json"])
    project.runpytest(*QUICK, RECORD).assert_outcomes(passed=2)
    project.runpytest(*QUICK).assert_outcomes(passed=2)


def test_the_fixture_keeps_to_the_budget_while_it_records(project: pytest.Pytester) -> None:
    plant(project, 1, chain("abcdefgh"))
    result = project.runpytest(*QUICK, RECORD)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*has 8 kernels, max_kernels=7*"])


NAMESAKES = """
    import pytest

    from graphengine.buckets import GraphNode, GraphStructure

    def check(graph_snapshot, *names):
        nodes = [GraphNode(index=i, kind="kernel", name=n) for i, n in enumerate(names)]
        graph_snapshot(GraphStructure(nodes=tuple(nodes)))

    class TestA:
        def test_it(self, graph_snapshot):
            check(graph_snapshot, "a")

    class TestB:
        def test_it(self, graph_snapshot):
            check(graph_snapshot, "a", "b")

    @pytest.mark.parametrize("text", ["a/b", "a-b", "a b", "a::b", "x" * 300])
    def test_it(graph_snapshot, text):
        check(graph_snapshot, text[:5], "c")
"""


def test_tests_of_one_name_or_of_ids_that_look_alike_have_their_own_files(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_names=NAMESAKES)
    for options in ([RECORD], []):
        pytester.runpytest(*QUICK, *options).assert_outcomes(passed=7)
    assert len(list((pytester.path / "__snapshots__" / "test_names").iterdir())) == 7


def test_two_tests_that_take_one_file_are_both_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_one_file="""
        import pytest

        from graphengine.buckets import GraphNode, GraphStructure

        @pytest.mark.parametrize("number", [1, 2])
        def test_it(graph_snapshot, number):
            graph_snapshot.name = "mlp"
            graph_snapshot(GraphStructure(nodes=(GraphNode(index=0, kind="kernel"),)))
        """
    )
    result = pytester.runpytest(*QUICK, RECORD)
    result.assert_outcomes(passed=1, failed=1)
    line = "*mlp.json is that of test_one_file.py::test_it[[]1] already, so *::test_it[[]2] needs*"
    result.stdout.fnmatch_lines([line])
