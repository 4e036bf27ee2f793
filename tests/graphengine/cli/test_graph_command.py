"""`graphengine graph`: dumps of ladders made by hand, compared; a real one on a GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphengine import Engine, EngineConfig
from graphengine.buckets import GraphStructure
from graphengine.buckets.graphs import nodes
from graphengine.cli.commands import graph as graph_command
from graphengine.cli.commands.graph import (
    INDEX,
    Dump,
    DumpDiff,
    diff_dumps,
    name_reads,
    prepare_dump,
    read_dump,
    read_engine,
    write_dump,
)
from graphengine.cli.main import main
from graphengine.core.recorded_rows import record_rows
from graphengine.demo import checkpoint_path
from graphengine.observe.op_table import OpRow
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject
from planted.graphs import PLANTED, chain, with_node

NAMES = ("prefill/16", "decode/8/k3/fast", "decode/8/k3/full", "draft/8/k3")
SMALL = ("--max-batch", "2", "--max-seq-len", "96")


def ladder(**facts: Any) -> Dump:
    return Dump(graphs={name: chain() for name in NAMES}, facts={"config.pdl": True, **facts})


def with_graph(made: Dump, name: str, graph: GraphStructure) -> Dump:
    return replace(made, graphs=made.graphs | {name: graph})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two dumps of equal graphs."""
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        save(ladder(), folder)
    return folders


def save(made: Dump, folder: Path, drawing: str | None = None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_dump(made, folder, drawing=drawing)


# Files.


def test_a_dump_is_read_back(tmp_path: Path) -> None:
    made = ladder(**{"environment.torch": "2.11", "config.buckets": [1, 2]})
    save(made, tmp_path / "a")
    assert read_dump(tmp_path / "a") == made
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "decode-8-k3-fast.json",
        "decode-8-k3-full.json",
        "draft-8-k3.json",
        INDEX,
        "prefill-16.json",
    ]


def test_a_dump_may_have_drawings(tmp_path: Path) -> None:
    save(ladder(), tmp_path / "a", "dot")
    drawn = (tmp_path / "a" / "decode-8-k3-fast.dot").read_text()
    assert drawn.startswith('digraph "decode/8/k3/fast"')
    assert len(list((tmp_path / "a").glob("*.dot"))) == len(NAMES)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "an index of type list, not an object"),
        ("{}", "version None, this reads 1"),
        ("[" * 100_000, "recursion"),
        ('{"version": 2, "facts": {}, "graphs": {}}', "version 2, this reads 1"),
        ('{"version": 1, "facts": {}}', "'graphs'"),
        ('{"version": 1, "facts": {}, "graphs": []}', r"'graphs' is \[\], not an object"),
        ('{"version": 1, "facts": {}, "graphs": {}}', "no engine is without a graph"),
        ('{"version": 1, "facts": {}, "graphs": {"a": 3}}', "graph 'a' is in 3, which names no"),
        ('{"version": 1, "facts": {}, "graphs": {"a": ""}}', "graph 'a' is in '', which names no"),
        (
            '{"version": 1, "facts": {}, "graphs": {"a": "../b.json"}}',
            r"graph 'a' is in '\.\./b\.json', which names no file of a dump",
        ),
        ('{"version": 1, "facts": [], "graphs": {"a": "b"}}', r"'facts' is \[\], not an object"),
    ],
    ids=lambda text: text[:60],
)
def test_an_index_of_another_make_is_refused(
    folders: tuple[Path, Path], index: str, reason: str
) -> None:
    (folders[0] / INDEX).write_text(index)
    with pytest.raises(ValueError, match=rf"index\.json is not a part of a dump: .*{reason}"):
        read_dump(folders[0])


def test_files_that_are_missing_damaged_or_elsewhere_are_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = folders
    (old / "draft-8-k3.json").unlink()
    with pytest.raises(ValueError, match=r"draft-8-k3\.json cannot be read: No such file"):
        read_dump(old)
    (new / "draft-8-k3.json").write_text('{"version": 9}')
    with pytest.raises(ValueError, match=r"draft-8-k3\.json is not a part of a dump: .*version 9"):
        read_dump(new)
    (new / "draft-8-k3.json").unlink()
    (new / "draft-8-k3.json").mkdir()
    with pytest.raises(ValueError, match=r"draft-8-k3\.json cannot be read: Is a directory"):
        read_dump(new)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_dump(tmp_path / "nowhere")


# Differences.


def test_equal_dumps_do_not_differ() -> None:
    found = diff_dumps(ladder(), ladder())
    assert not found.differs and found.equal == NAMES
    assert found.to_text(20) == "4 graphs equal, 0 changed, 0 added, 0 removed"


def test_facts_are_told_but_are_no_difference() -> None:
    found = diff_dumps(ladder(torch="2.11"), ladder(torch="2.13", **{"config.new": None}))
    assert not found.differs and found.facts == {"torch": ("2.11", "2.13")}
    assert found.to_text(20).splitlines()[0] == 'torch: "2.11" -> "2.13"'


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_in_its_graph(fault: str) -> None:
    found = diff_dumps(ladder(), with_graph(ladder(), NAMES[1], PLANTED[fault]))
    assert found.differs and list(found.changed) == [NAMES[1]]
    assert found.equal == (NAMES[0], *NAMES[2:])
    text = found.to_text(20)
    assert f"~ {NAMES[1]}  nodes 6" in text
    assert all(f"    {change}" in text.splitlines() for change in found.changed[NAMES[1]])


def test_graphs_that_came_and_went() -> None:
    graphs = {name: chain() for name in (*NAMES[1:], "decode/4/fast")}
    found = diff_dumps(ladder(), replace(ladder(), graphs=graphs))
    assert (found.added, found.removed) == (("decode/4/fast",), ("prefill/16",))
    assert found.differs and not found.changed
    text = found.to_text(20)
    assert "+ decode/4/fast  nodes 0 -> 6" in text and "- prefill/16  nodes 6 -> 0" in text
    assert text.endswith("3 graphs equal, 0 changed, 1 added, 1 removed")


def test_tuning_is_a_difference_where_it_is_asked_for() -> None:
    before = with_graph(ladder(), "a", chain(["gemm_64x64"]))
    renamed = with_graph(ladder(), "a", chain(["gemm_128x64"]))
    resized = with_graph(ladder(), "a", with_node(chain(["gemm_64x64"]), 0, grid=(9, 1, 1)))
    assert not diff_dumps(before, renamed).differs
    assert diff_dumps(before, renamed, exact_names=True).differs
    assert diff_dumps(before, resized).differs
    assert not diff_dumps(before, resized, launch_sizes=False).differs


def test_text_is_bounded_and_json_is_not() -> None:
    new = with_graph(ladder(), NAMES[0], chain([f"k{index}" for index in range(6)]))
    found = diff_dumps(ladder(), new)
    assert "    ... and 4 more of 6 changes" in found.to_text(2).splitlines()
    document = json.loads(found.to_json())
    changes = document["changed"][NAMES[0]]["changes"]
    assert document["differs"] is True and len(changes) == 6
    assert changes[0]["fields"] == [{"field": "name", "old": "begin", "new": "k0"}]
    assert document.keys() == {"differs", "facts", "added", "removed", "changed", "equal"}
    assert isinstance(found, DumpDiff)


# The command.


def test_the_exit_status_tells_whether_graphs_differ(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = folders
    arguments = ["graph", "diff", str(old), str(new)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("4 graphs equal")
    save(with_graph(ladder(), NAMES[0], PLANTED["a lost programmatic edge"]), new)
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "    ~ edge [2 -> 3] linear -> attention: type programmatic -> full" in out.splitlines()
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differs"] is True
    for text in ('{"version": 1, "nodes": [], "edges": [[0, 1]]}', "[" * 100_000):
        (new / "prefill-16.json").write_text(text)
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("graphengine: error: ")
        assert "prefill-16.json is not a part of a dump" in captured.err
    (new / INDEX).unlink()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("graphengine: error: ")
    assert main([*arguments[:3], str(old), "--limit", "-1"]) == 2
    assert "--limit -1" in capsys.readouterr().err


def test_options_of_diff_are_passed_on(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = folders
    save(with_graph(ladder(), NAMES[0], chain(["k_1x1"])), old)
    save(with_graph(ladder(), NAMES[0], with_node(chain(["k_2x2"]), 0, grid=(1, 2, 3))), new)
    arguments = ["graph", "diff", str(old), str(new)]
    assert main([*arguments, "--ignore-sizes"]) == 0
    assert main([*arguments, "--ignore-sizes", "--exact-names"]) == 1
    assert main([*arguments, "--limit", "0"]) == 1
    assert "... and 1 more of 1 changes" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["graph"], ["graph", "dump"], ["graph", "diff", "a"]])
def test_incomplete_commands_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: graphengine graph" in capsys.readouterr().err


@pytest.fixture
def nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: pytest.fail("engine opened"))


@pytest.mark.usefixtures("nothing_is_opened")
def test_a_cpu_has_no_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dump"
    assert main(["graph", "dump", "--device", "cpu", *SMALL, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "device='cpu' has no graphs to dump: steps are captured on a GPU only" in error
    assert not out.exists()


@pytest.mark.usefixtures("nothing_is_opened")
def test_what_is_wrong_with_a_checkpoint_is_told_before_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["graph", "dump", "--device", "cpu", *SMALL, "--out", str(tmp_path / "dump")]
    (tmp_path / "empty").mkdir()
    for checkpoint, message in {
        str(tmp_path / "empty"): "config.json",
        str(tmp_path / "nowhere"): "there is no such directory",
        "org/name": "device='cpu' has no graphs to dump",  # is not downloaded for that
    }.items():
        assert main([*arguments, "--checkpoint", checkpoint]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """The configuration of an engine on a GPU, where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nodes, "driver", SimpleNamespace())
    return EngineConfig(device="cuda")


def test_what_stands_in_the_way_of_a_dump_is_told_first(
    on_a_gpu: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_dump(on_a_gpu, tmp_path / "a" / "b", None)
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ValueError, match="is not empty: name a new folder"):
        prepare_dump(on_a_gpu, tmp_path / "a", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is no folder and cannot be: File exists"):
        prepare_dump(on_a_gpu, tmp_path / "file", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    prepare_dump(on_a_gpu, tmp_path / "c", "dot")
    with pytest.raises(ValueError, match="needs Graphviz's `dot`"):
        prepare_dump(on_a_gpu, tmp_path / "d", "svg")
    monkeypatch.setattr(nodes, "driver", None)
    with pytest.raises(ValueError, match="needs cuda-bindings"):
        prepare_dump(on_a_gpu, tmp_path / "d", None)
    assert not (tmp_path / "d").exists()


class FakeKey(NamedTuple):
    name: str


class FakeEngine:
    """The part of an engine that is dumped."""

    memory = SimpleNamespace(device=torch.device("cuda", 0))
    numerics_id = "0123456789ab"

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runtime = SimpleNamespace(
            graphs=[FakeKey(name) for name in NAMES],
            captured=[chain() for _ in NAMES],
        )

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime = None


def test_a_dump_has_the_ladder_and_what_it_was_made_with(
    on_a_gpu: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(graph_command, "record_rows", lambda *_: {})
    config = replace(on_a_gpu, dtype=torch.bfloat16, buckets=(1, 8))
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: FakeEngine(config))
    arguments = ["graph", "dump", "--device", "cuda", *SMALL, "--draw", "dot", "--out"]
    assert main([*arguments, str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "decode/8/k3/fast   6 kernel; 5 of 5 edges programmatic"
    assert lines[-1] == f"4 graphs in {tmp_path / 'a'}"
    made = read_dump(tmp_path / "a")
    assert made.graphs == {name: chain() for name in NAMES}
    for name, value in {
        "checkpoint": "demo",
        "numerics_id": "0123456789ab",
        "environment.device": "NVIDIA H200",
        "environment.torch": torch.__version__,
        "config.dtype": "torch.bfloat16",
        "config.buckets": [1, 8],
        "config.pdl": True,
        "config.speculative": None,
    }.items():
        assert made.facts[name] == value, name
    assert (tmp_path / "a" / "draft-8-k3.dot").is_file()
    assert main([*arguments, str(tmp_path / "b"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"out": str(tmp_path / "b"), "graphs": list(NAMES)}
    assert main(["graph", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def recorded(shape: str = "tiny") -> list[OpRow]:
    """The launches of a decode graph."""
    options = {"device": "cpu", "max_batch": 1, "max_seq_len": 96, "row_family": "dot"}
    engine, _ = build_engine(Subject.of_shape(shape), options)
    with engine:
        (key,) = [key for key in engine.memory.graphs if key.name == "decode/1/fast"]
        return record_rows(engine.runtime, engine.memory, [key])[key]


def test_kernels_tell_what_they_read() -> None:
    rows = recorded()
    captured = chain(["void at::fill", *(row.kernel for row in rows)])
    named = name_reads(captured, rows)
    assert [node.detail for node in named.nodes] == [None, *(row.stage or None for row in rows)]
    assert named.nodes[2].detail == "layers.0.self_attn.q_proj"
    assert "kernel  dot_kernel  layers.0.self_attn.q_proj  grid" in named.to_text()
    assert GraphStructure.from_json(named.to_json()) == named
    for other in (chain(), chain([row.kernel for row in rows[:-1]])):
        assert name_reads(other, rows) is other, "kernels of another step keep their names"
    assert name_reads(captured, []) == captured, "nothing is recorded of one of several ranks"


def test_dumps_of_which_one_tells_no_reads_are_compared_without() -> None:
    rows = recorded()
    plain = chain([row.kernel for row in rows])
    named = name_reads(plain, rows)
    old, new = (Dump(graphs={"decode/1/fast": graph}, facts={}) for graph in (plain, named))
    assert not diff_dumps(old, new).differs and not diff_dumps(new, old).differs
    moved = replace(new, graphs={"decode/1/fast": with_node(named, 1, detail="layers.9.x")})
    (change,) = diff_dumps(new, moved).changed["decode/1/fast"]
    assert "detail layers.0.self_attn.q_proj -> layers.9.x" in str(change)


@pytest.mark.gpu
def test_a_gpus_graphs_tell_what_their_kernels_read() -> None:
    """The kernels of every graph are the recorded launches."""
    made = read_small(device="cuda", dtype="bfloat16", max_batch=2, max_seq_len=96)
    for name, graph in made.graphs.items():
        details = [node.detail or "" for node in graph.nodes if node.kind == "kernel"]
        assert any("KV 0" in detail for detail in details) or name.endswith("note"), name


@pytest.mark.gpu
def test_dumps_of_equal_engines_are_equal_and_of_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [*SMALL, "--dtype", "bfloat16", "--device", "cuda"]
    for name, options in {"a": [], "b": [], "mtp": ["--speculative", "mtp:2"]}.items():
        out = str(tmp_path / name)
        assert main(["graph", "dump", *sizes, *options, "--out", out]) == 0, capsys.readouterr().err
    assert main(["graph", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--exact-names"]) == 0
    capsys.readouterr()
    assert main(["graph", "diff", str(tmp_path / "a"), str(tmp_path / "mtp"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert "config.speculative" in document["facts"]
    assert "decode/2/k2/fast" in document["added"]
    one = {"device": "cuda", "dtype": "bfloat16", "max_batch": 1, "max_seq_len": 96}
    with_pdl, without = (read_small(**one, pdl=pdl) for pdl in (True, False))
    found = diff_dumps(with_pdl, without)
    assert found.changed["decode/1/fast"], "every programmatic edge is gone"
    assert found.facts["config.pdl"] == (True, False)


def read_small(**options: Any) -> Dump:
    with Engine.from_pretrained(checkpoint_path(), **options) as engine:
        return read_engine(engine, checkpoint="demo")
