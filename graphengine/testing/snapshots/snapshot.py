"""Golden files of captured graphs: a test fails if a graph is no longer the one on file.

    def test_the_step_keeps_its_kernels(graph_snapshot):
        graph_snapshot(graph, max_kernels=12)

The files are JSON with a line a node, to be committed; `pytest --graph-snapshot-update` writes
them. Names of kernels are stored as normalised by `normalise_name`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from graphengine.buckets import GraphStructure
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.snapshots.golden import file_name, unique_name
from graphengine.testing.snapshots.graph_diff import diff_text, normalise
from graphengine.testing.snapshots.structures import Graph, read_structure, require_known

__tracebackhide__ = hide_frame

RECORD = "--graph-snapshot-update"
"""The option of pytest under which snapshots are written."""


def graph_snapshot(
    folder: Path,
    name: str,
    *,
    update: bool = False,
    owner: str | None = None,
    owners: dict[Path, str] | None = None,
) -> GraphSnapshot:
    """Like the fixture of this name, with the folder and the test's name given as arguments."""
    return GraphSnapshot(folder, name, update=update, owner=owner, owners=owners)


class GraphSnapshot:
    """The golden files of one test; the fixture `graph_snapshot` is one of these.

    folder  folder of the test's module: `__snapshots__/<test module>` next to it
    name    name of the test, with its class and parameters
    update  write the files instead of comparing with them
    owner   name of the test in errors; `name` if left out
    owners  the owner of each file: the same dictionary for all tests, so that no two share a file
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        update: bool,
        owner: str | None = None,
        owners: dict[Path, str] | None = None,
    ) -> None:
        self.folder = folder
        self.name = name
        self.update = update
        self.owner = name if owner is None else owner
        self._owners = {} if owners is None else owners
        self._used: set[Path] = set()

    def __call__(
        self,
        graph: Graph,
        name: str | None = None,
        *,
        key: str | None = None,
        launch_sizes: bool = True,
        max_nodes: int | None = None,
        max_kernels: int | None = None,
    ) -> None:
        """Require that `graph` is the one on file, and that it keeps to its budget.

        graph         a `torch.cuda.CUDAGraph(keep_graph=True)`, a `CapturedGraph` or a structure
        name          distinguishes the graphs of one test
        key           names everything besides the code that the graph depends on, such as
                      `environment_key()`: each key has files of its own, and a key without files
                      fails
        launch_sizes  False leaves out grid, block and shared memory, for kernels tuned at run time
        max_nodes     most nodes of the graph, including nested graphs
        max_kernels   most kernels

        GraphCheckError for another graph, for a file that is missing, unreadable or cannot be
        written, and for a budget that is overrun or cannot be checked; budgets are also checked
        while files are written. ValueError if a test asks for one file twice, or for another test's
        file.
        """
        path = self.path(name, key)
        if path in self._used:
            raise ValueError(f"this test has used {path.name} already: give each graph a name")
        if (owner := self._owners.setdefault(path, self.owner)) != self.owner:
            raise ValueError(f"{path} is that of {owner} already, so {self.owner} needs another")
        self._used.add(path)
        title = self.name if name is None else name
        structure = normalise(read_structure(graph), launch_sizes=launch_sizes)
        check_budget(structure, title, max_nodes=max_nodes, max_kernels=max_kernels)
        if self.update:
            self._write(path, title, structure)
            return
        difference = diff_text(self._read(path, title, key), structure)
        if difference:
            raise GraphCheckError(
                f"graph {title!r} is not the one in {path}\n{difference}\n"
                f"If that is meant: pytest {RECORD}, and commit the file."
            )

    def path(self, name: str | None = None, key: str | None = None) -> Path:
        """The file of a graph: `<folder>[/<key>]/<test>[-<name>].json`, made by `unique_name`."""
        folder = self.folder if key is None else self.folder / unique_name(key)
        return folder / f"{unique_name(self.name, *([] if name is None else [name]))}.json"

    def _write(self, path: Path, title: str, structure: GraphStructure) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(structure.to_json(), encoding="utf-8")
        except OSError as cause:
            raise GraphCheckError(
                f"graph {title!r}: {path} cannot be written ({cause.strerror})"
            ) from cause

    def _read(self, path: Path, title: str, key: str | None) -> GraphStructure:
        try:
            return GraphStructure.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except ValueError as cause:
            raise GraphCheckError(
                f"graph {title!r}: {path} cannot be read ({cause}); pytest {RECORD} writes it anew"
            ) from cause
        except OSError as cause:
            raise GraphCheckError(
                f"graph {title!r}: {path} cannot be read ({cause.strerror})"
            ) from cause
        if key is None:
            what = f"graph {title!r} has no golden file {path}."
        else:
            known = sorted(file.parent.name for file in self.folder.glob(f"*/{path.name}"))
            what = (
                f"graph {title!r} has no golden file for the key {key!r}, "
                f"only for {', '.join(known) or 'no key at all'}."
            )
        raise GraphCheckError(
            f"{what} To record it here: pytest {RECORD}, look at {path}, and commit it."
        )


def check_budget(
    structure: GraphStructure, title: str, *, max_nodes: int | None, max_kernels: int | None
) -> None:
    """GraphCheckError if the graph and its nested graphs have, or may have, more than that."""
    counts = structure.count()
    found = {"nodes": sum(counts.values()), "kernels": counts.get("kernel", 0)}
    allowed = {"nodes": max_nodes, "kernels": max_kernels}
    for what, limit in allowed.items():
        if limit is not None and found[what] > limit:
            raise GraphCheckError(
                f"graph {title!r} has {found[what]} {what}, max_{what}={limit}\n"
                f"{_frequencies(structure)}"
            )
    if any(limit is not None for limit in allowed.values()):
        require_known(structure, f"whether graph {title!r} keeps to its budget")


def environment_key() -> str:
    """A key of all that selects kernels besides the code:
    "nvidia-h200_torch-2.11.0+cu130_triton-3.6.0".

    The current CUDA device, or "cpu", and the versions of torch and triton.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        import triton
    except ImportError:
        found = "none"
    else:
        found = triton.__version__
    return file_name(f"{device.lower()}_torch-{torch.__version__}_triton-{found}")


def _frequencies(structure: GraphStructure, most: int = 12) -> str:
    """The kernels and other kinds of node by number of occurrences, one a line."""
    names = Counter(node.name or node.kind for graph in structure.walk() for node in graph.nodes)
    lines = [f"  {count:>4} x {name}" for name, count in names.most_common(most)]
    if len(names) > most:
        lines.append(f"  ... and {len(names) - most} others")
    return "\n".join(lines)
