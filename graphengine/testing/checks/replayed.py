"""A check that work was dispatched to the graphs that were captured for it, and not run eagerly."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphengine.buckets import CapturedGraph, GraphStructure
from graphengine.testing.arguments import integer
from graphengine.testing.errors import GraphCheckError, hide_frame, listed
from graphengine.testing.snapshots.structures import read_structure

__tracebackhide__ = hide_frame


@contextlib.contextmanager
def assert_replayed(
    graphs: Mapping[str, object],
    expected: Mapping[str, int],
    *,
    most_eager: int | None = None,
) -> Iterator[Callable[[], dict[str, int]]]:
    """GraphCheckError unless the block replays each graph as often as `expected` says.

        with assert_replayed({"4": graph_4, "8": graph_8}, {"8": 1}):
            runner.run(five_requests)

    In most engines a batch without a bucket silently runs eagerly: the results are right, the
    latency is not. `graphs` are a runner's graphs by bucket; those that `expected` leaves out must
    not be replayed. Each is a `torch.cuda.CUDAGraph`, a `CapturedGraph`, or an object that counts
    its own replays in `replays`. The block gets a function that returns the counts so far.

    most_eager  also fail if the block calls more of torch's operations than that, copies of inputs
                included. Replays do not count; kernels launched without torch are not seen

    A graph that can be read (`keep_graph=True`) and is empty is an error, too: the step ran outside
    its capture, on a stream that was not captured. Counting the replays of a CUDAGraph changes
    torch's class for all threads until the block ends.
    """
    wanted = _require_counts(graphs, expected)
    if most_eager is not None:
        integer("most_eager", most_eager, least=0)
    for name, graph in graphs.items():
        _require_nodes(name, graph)
    operations = _Operations()
    with contextlib.ExitStack() as undo:
        torch_replays = undo.enter_context(_counting_replays())
        before = {name: _own_count(graph) for name, graph in graphs.items()}

        def counts() -> dict[str, int]:
            return {
                name: torch_replays[id(graph)] + _own_count(graph) - before[name]
                for name, graph in graphs.items()
            }

        if most_eager is not None:
            undo.enter_context(operations)
        yield counts
    _require_replays(wanted, counts())
    if most_eager is not None and operations.calls.total() > most_eager:
        raise GraphCheckError(
            f"{operations.calls.total()} of torch's operations ran eagerly beside "
            f"{sum(wanted.values())} replays, most_eager={most_eager}: "
            f"{_listed(operations.calls)}. Move them into the captured step"
        )


def _require_counts(graphs: Mapping[str, object], expected: Mapping[str, int]) -> dict[str, int]:
    """The expected number of each graph's replays; ValueError for names that are no graph's."""
    if not graphs:
        raise ValueError("graphs={} leaves nothing to count")
    if unknown := sorted(expected.keys() - graphs.keys()):
        raise ValueError(f"no graph {', '.join(unknown)}: the graphs are {', '.join(graphs)}")
    for name, graph in graphs.items():
        if not isinstance(graph, torch.cuda.CUDAGraph) and not isinstance(_replays(graph), int):
            raise ValueError(
                f"graph {name!r} is of type {type(graph).__name__}: give a torch.cuda.CUDAGraph, a "
                "CapturedGraph, or an object that counts its replays in `replays`"
            )
    return {name: integer(f"expected[{name!r}]", expected.get(name, 0), least=0) for name in graphs}


def _replays(graph: object) -> object:
    return getattr(graph, "replays", None)


def _own_count(graph: object) -> int:
    """Replays that the graph itself has counted; 0 for torch's, which does not count."""
    found = None if isinstance(graph, torch.cuda.CUDAGraph) else _replays(graph)
    return found if isinstance(found, int) else 0


def _require_nodes(name: str, graph: object) -> None:
    if (structure := _readable(graph)) is not None and not structure.nodes:
        raise GraphCheckError(
            f"graph {name!r} has 0 nodes: its step was not captured. Launch on the stream that is "
            "being captured (torch.cuda.current_stream())"
        )


def _readable(graph: object) -> GraphStructure | None:
    """The structure of a graph that was kept, or of an object that has one; else None."""
    found = getattr(graph, "structure", None)
    if isinstance(found, GraphStructure):
        return found
    if isinstance(graph, torch.cuda.CUDAGraph | CapturedGraph):
        # Not kept, on a CPU, or without cuda-bindings.
        with contextlib.suppress(RuntimeError, ValueError):
            return read_structure(graph)
    return None


def _require_replays(wanted: Mapping[str, int], found: Mapping[str, int]) -> None:
    wrong = [
        f"bucket {name!r} was replayed {found[name]} times, expected {count}"
        for name, count in wanted.items()
        if found[name] != count
    ]
    if not wrong:
        return
    text = "; ".join(wrong)
    if sum(found.values()) < sum(wanted.values()):
        missing = sum(wanted.values()) - sum(found.values())
        text += (
            f". {missing} of {sum(wanted.values())} steps ran without a graph: look at how the "
            "dispatch picks a bucket (a size that was not captured, a key that differs)"
        )
    raise GraphCheckError(text)


@contextlib.contextmanager
def _counting_replays() -> Iterator[Counter[int]]:
    """Replays of torch's graphs in the block, by the `id` of the graph."""
    # The base class of torch.cuda.CUDAGraph: each call looks up its `replay`, so that methods that
    # were bound before the block are counted as well.
    kind: Any = torch.cuda.CUDAGraph.__mro__[1]
    calls: Counter[int] = Counter()
    original = getattr(kind, "replay", None)
    if original is None:  # torch without CUDA has a stand-in, of which nothing can be replayed
        yield calls
        return

    def replay(graph: Any) -> None:
        calls[id(graph)] += 1
        original(graph)

    kind.replay = replay
    try:
        yield calls
    finally:
        kind.replay = original


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        self.calls[str(function)] += 1
        return function(*arguments, **(options or {}))


def _listed(calls: Counter[str]) -> str:
    return listed([f"{count} x {name}" for name, count in calls.most_common()])
