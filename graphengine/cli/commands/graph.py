"""`graphengine graph`: an engine's captured graphs as files, and the differences of two dumps.

A dump is a folder: a JSON file for each graph, and `index.json` with the name of each graph's file,
the engine's configuration, and the device and versions of the capture. The detail of a kernel names
its inputs: weights by name, and the KV of a layer. Two dumps, from two commits or two
configurations, can be compared on any machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from graphengine.buckets import GraphStructure
from graphengine.buckets.graphs import nodes
from graphengine.cli.given import open_engine, read_engine_options
from graphengine.config import EngineConfig
from graphengine.core.recorded_rows import record_rows
from graphengine.engine import Engine
from graphengine.kernels.core.op import own_kernels
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.finding import find_local
from graphengine.observe.environment import triton_version
from graphengine.observe.op_table import Misaligned, OpRow, align
from graphengine.testing.snapshots.golden import file_name
from graphengine.testing.snapshots.graph_diff import (
    GraphChange,
    diff_structures,
    normalise,
    summarise,
)
from graphengine.testing.snapshots.structures import read_structure

INDEX = "index.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The graphs of one engine by name, and facts about it by dotted name."""

    graphs: dict[str, GraphStructure]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpDiff:
    """How a dump differs from another one; `changed` has only graphs with changes.

    `facts` has the facts that differ, as (before, after); they alone do not count as a change.
    """

    facts: Mapping[str, tuple[Any, Any]]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, tuple[GraphChange, ...]]
    summaries: Mapping[str, str]
    equal: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether any graph differs."""
        return bool(self.added or self.removed or self.changed)

    def to_json(self) -> str:
        changed = {
            name: {"summary": self.summaries[name], "changes": [asdict(change) for change in found]}
            for name, found in self.changed.items()
        }
        facts = {name: {"old": old, "new": new} for name, (old, new) in self.facts.items()}
        return json.dumps(
            {
                "differs": self.differs,
                "facts": facts,
                "added": self.added,
                "removed": self.removed,
                "changed": changed,
                "equal": self.equal,
            }
        )

    def to_text(self, limit: int) -> str:
        """The differences, at most `limit` changes of each graph, and a last line with counts."""
        lines = [
            f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
            for name, (old, new) in self.facts.items()
        ]
        lines += [f"- {name}  {self.summaries[name]}" for name in self.removed]
        lines += [f"+ {name}  {self.summaries[name]}" for name in self.added]
        for name, changes in self.changed.items():
            lines.append(f"~ {name}  {self.summaries[name]}")
            lines += [f"    {change}" for change in changes[:limit]]
            if len(changes) > limit:
                lines.append(f"    ... and {len(changes) - limit} more of {len(changes)} changes")
        lines.append(
            f"{len(self.equal)} graphs equal, {len(self.changed)} changed, "
            f"{len(self.added)} added, {len(self.removed)} removed"
        )
        return "\n".join(lines)


def graph(options: argparse.Namespace) -> int:
    """Run `graph dump` or `graph diff`; the exit status."""
    if options.kind == "diff":
        return _diff(options)
    _dump(options)
    return 0


def _dump(options: argparse.Namespace) -> None:
    """Write every graph that an engine captures to a folder."""
    # Errors of the checkpoint are reported first, but nothing is downloaded to find them.
    if find_local(options.checkpoint) is not None:
        Checkpoint.open(options.checkpoint)
    prepare_dump(EngineConfig(**read_engine_options(options)), options.out, options.draw)
    with open_engine(options) as engine:
        made = read_engine(engine, checkpoint=options.checkpoint)
    write_dump(made, options.out, drawing=options.draw)
    if options.json:
        print(json.dumps({"out": str(options.out), "graphs": list(made.graphs)}))
        return
    for name, graph in made.graphs.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in graph.count().items())
        programmatic, edges = graph.programmatic_edges()
        print(f"{name:<18} {kinds}; {programmatic} of {edges} edges programmatic")
    print(f"{len(made.graphs)} graphs in {options.out}")


def _diff(options: argparse.Namespace) -> int:
    """Compare two folders of `graph dump`; exit status 1 where a graph differs."""
    if options.limit < 0:
        raise ValueError(f"--limit {options.limit} must be at least 0")
    old, new = read_dump(options.old), read_dump(options.new)
    found = diff_dumps(
        old, new, exact_names=options.exact_names, launch_sizes=not options.ignore_sizes
    )
    print(found.to_json() if options.json else found.to_text(options.limit))
    return int(found.differs)


def prepare_dump(config: EngineConfig, out: Path, drawing: str | None) -> None:
    """Make the folder `out`; ValueError, before anything is loaded, if no dump can be made."""
    if torch.device(config.device).type != "cuda":
        raise ValueError(
            f"device={config.device!r} has no graphs to dump: steps are captured on a GPU only "
            "(`graph diff` works anywhere)"
        )
    if nodes.driver is None:
        raise ValueError("looking inside a graph needs cuda-bindings (cuda.bindings.driver)")
    if drawing == "svg" and shutil.which("dot") is None:
        raise ValueError("--draw svg needs Graphviz's `dot` on the PATH; --draw dot does not")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ValueError(f"--out {out} is no folder and cannot be: {cause.strerror}") from cause
    if any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty: name a new folder")


def read_engine(engine: Engine, *, checkpoint: str) -> Dump:
    """All graphs of `engine`, which is on a GPU, and the facts about their capture.

    The engine must be new, or can only be closed afterwards: see `record_rows`.
    """
    device, keys = engine.memory.device, [*engine.runtime.graphs]
    config = {field.name: getattr(engine.config, field.name) for field in fields(EngineConfig)}
    # A step of one of several ranks would wait for the others.
    rows = record_rows(engine.runtime, engine.memory, keys) if engine.config.ranks == 1 else {}
    return Dump(
        graphs={
            key.name: name_reads(read_structure(graph), rows.get(key, ()))
            for key, graph in zip(keys, engine.runtime.captured, strict=True)
        },
        facts={
            "checkpoint": checkpoint,
            "numerics_id": engine.numerics_id,
            "environment.device": torch.cuda.get_device_name(device),
            "environment.cuda": torch.version.cuda,
            "environment.torch": str(torch.__version__),
            "environment.triton": triton_version(),
            "environment.python": platform.python_version(),
        }
        | {f"config.{name}": _plain(value) for name, value in config.items()},
    )


def name_reads(structure: GraphStructure, rows: Sequence[OpRow]) -> GraphStructure:
    """A copy in which the detail of each kernel names its inputs, taken from the launches of the
    step.

    Returns the graph itself if its kernels do not match the launches.
    """
    kernels = [node for node in structure.nodes if node.kind == "kernel"]
    try:
        found = align([str(node.name) for node in kernels], rows, known=own_kernels())
    except Misaligned:
        return structure
    reads = {
        node.index: row.stage
        for node, row in zip(kernels, found, strict=True)
        if row is not None and row.stage
    }
    named = (replace(node, detail=reads.get(node.index, node.detail)) for node in structure.nodes)
    return replace(structure, nodes=tuple(named))


def write_dump(made: Dump, folder: Path, *, drawing: str | None = None) -> None:
    """Write a dump into `folder`, which exists and is empty.

    drawing  "dot" or "svg": also draw each graph in that format; None: no drawings
    """
    files = {name: f"{file_name(name)}.json" for name in made.graphs}
    assert len({*files.values(), INDEX}) == len(files) + 1, f"{files=}"
    for name, graph in made.graphs.items():
        path = folder / files[name]
        path.write_text(graph.to_json(), encoding="utf-8")
        if drawing is not None:
            text = graph.to_svg(name) if drawing == "svg" else graph.to_dot(name)
            path.with_suffix(f".{drawing}").write_text(text, encoding="utf-8")
    index = {"version": _VERSION, "facts": made.facts, "graphs": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_dump(folder: Path) -> Dump:
    """Read a folder that `write_dump` wrote; ValueError, with the path, for anything else."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files, facts = _parts_of_index(index)
        graphs = {}
        for name, file in files.items():
            path = folder / file
            graphs[name] = GraphStructure.from_json(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ValueError(f"{path} cannot be read: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"{path} is not a part of a dump: {cause}") from cause
    return Dump(graphs=graphs, facts=facts)


def _parts_of_index(index: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """The file of each graph, and the facts; ValueError for another kind of index."""
    if not isinstance(index, dict):
        raise ValueError(f"an index of type {type(index).__name__}, not an object")
    if (version := index.get("version")) != _VERSION:
        raise ValueError(f"version {version!r}, this reads {_VERSION}")
    for key in ("graphs", "facts"):
        if not isinstance(index.get(key), dict):
            raise ValueError(f"{key!r} is {index.get(key)!r}, not an object")
    files = index["graphs"]
    if not files:
        raise ValueError("'graphs' is {}, and no engine is without a graph")
    for name, file in files.items():
        # No file outside the folder is read, whatever an index says.
        if not isinstance(file, str) or file != file_name(file):
            raise ValueError(f"graph {name!r} is in {file!r}, which names no file of a dump")
    return files, index["facts"]


def diff_dumps(
    old: Dump, new: Dump, *, exact_names: bool = False, launch_sizes: bool = True
) -> DumpDiff:
    """Compare graphs of the same name; see `normalise` for `exact_names` and `launch_sizes`."""
    before, after = (
        {
            name: normalise(graph, names=not exact_names, launch_sizes=launch_sizes)
            for name, graph in made.graphs.items()
        }
        for made in (old, new)
    )
    both = [name for name in before if name in after]
    compared = {name: _equally_named(before[name], after[name]) for name in both}
    found = {name: tuple(diff_structures(*pair)) for name, pair in compared.items()}
    nothing = GraphStructure()
    pairs = {name: (before.get(name, nothing), after.get(name, nothing)) for name in before | after}
    facts = {name: (old.facts.get(name), new.facts.get(name)) for name in old.facts | new.facts}
    return DumpDiff(
        facts={name: pair for name, pair in facts.items() if pair[0] != pair[1]},
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed={name: changes for name, changes in found.items() if changes},
        summaries={name: summarise(*pair) for name, pair in pairs.items()},
        equal=tuple(name for name, changes in found.items() if not changes),
    )


def _equally_named(
    old: GraphStructure, new: GraphStructure
) -> tuple[GraphStructure, GraphStructure]:
    """Return both graphs; details of kernels' inputs are dropped unless both have them."""
    pair = (old, new)
    if all(any(node.kind == "kernel" and node.detail for node in each.nodes) for each in pair):
        return pair
    return _without_reads(old), _without_reads(new)


def _without_reads(structure: GraphStructure) -> GraphStructure:
    nodes = (replace(n, detail=None) if n.kind == "kernel" else n for n in structure.nodes)
    return replace(structure, nodes=tuple(nodes))


def _plain(value: Any) -> Any:
    """A value of a configuration as it is after a round trip through JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(map(_plain, value)) if isinstance(value, tuple | list) else str(value)
