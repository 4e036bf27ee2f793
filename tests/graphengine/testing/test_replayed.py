"""assert_replayed: counts of replays, of eager operations, and of kernels in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.buckets import CapturedGraph, GraphStructure
from graphengine.testing import GraphCheckError, assert_replayed
from planted.graphs import chain


class Graph:
    """Counts its replays, as a runner's own class may."""

    def __init__(self, structure: GraphStructure | None = None) -> None:
        self.replays = 3  # from before
        self.structure = structure

    def replay(self) -> None:
        self.replays += 1


def captured(name: str) -> CapturedGraph:
    graph = CapturedGraph(lambda: None, name=name, device="cpu")
    graph.capture()
    return graph


def test_the_replays_of_the_block_are_counted() -> None:
    graphs = {"4": Graph(chain()), "8": captured("8")}
    graphs["8"].replay()
    with assert_replayed(graphs, {"4": 2, "8": 1}) as counts:
        graphs["4"].replay()
        assert counts() == {"4": 1, "8": 0}
        graphs["4"].replay()
        graphs["8"].replay()


def test_a_graph_that_is_not_expected_must_not_be_replayed() -> None:
    graphs = {"4": Graph(), "8": Graph()}
    message = r"bucket '8' was replayed 1 times, expected 0$"
    with pytest.raises(GraphCheckError, match=message), assert_replayed(graphs, {"4": 1}):
        graphs["4"].replay()
        graphs["8"].replay()


def test_steps_without_a_graph_are_told() -> None:
    message = r"bucket '4' was replayed 1 times, expected 3. 2 of 3 steps ran without a graph"
    graph = Graph()
    with pytest.raises(GraphCheckError, match=message), assert_replayed({"4": graph}, {"4": 3}):
        graph.replay()


def test_eager_operations_are_counted_by_name() -> None:
    x, graph = torch.zeros(4), Graph()
    with assert_replayed({"4": graph}, {"4": 1}, most_eager=1):
        x.add_(1)
        graph.replay()
    message = r"3 of torch's operations ran eagerly beside 1 replays, most_eager=1: 2 x aten.exp_"
    with (
        pytest.raises(GraphCheckError, match=message),
        assert_replayed({"4": graph}, {"4": 1}, most_eager=1),
    ):
        x.exp_(), x.exp_(), x.add_(1)
        graph.replay()


def test_an_empty_graph_is_told() -> None:
    message = "graph '4' has 0 nodes: its step was not captured"
    graphs = {"4": Graph(GraphStructure())}
    with pytest.raises(GraphCheckError, match=message), assert_replayed(graphs, {"4": 1}):
        pass


def test_torchs_graphs_are_counted_by_bound_methods_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's classes; natively in test_planted_faults.py."""

    class Native:
        def replay(self) -> None:
            pass

    class Torchs(Native):
        def replay(self) -> None:
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Torchs)
    original, graph, other = Native.replay, Torchs(), Torchs()
    bound = graph.replay
    with assert_replayed({"4": graph, "8": other}, {"4": 2}):
        bound()
        bound()
    assert Native.replay is original
    message = "bucket '8' was replayed 0 times, expected 1"
    with (
        pytest.raises(GraphCheckError, match=message),
        assert_replayed({"4": graph, "8": other}, {"4": 1, "8": 1}),
    ):
        bound()


def test_an_error_of_the_block_passes() -> None:
    with pytest.raises(KeyError), assert_replayed({"4": Graph()}, {"4": 1}):
        raise KeyError


@pytest.mark.parametrize(
    ("graphs", "expected", "message"),
    [
        ({}, {}, "graphs={} leaves nothing to count"),
        ({"4": Graph()}, {"5": 1}, "no graph 5: the graphs are 4"),
        ({"4": lambda: None}, {"4": 1}, "graph '4' is of type function: give a torch.cuda"),
        ({"4": Graph()}, {"4": -1}, r"expected\['4'\]=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    graphs: dict[str, Any], expected: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message), assert_replayed(graphs, expected):
        pass
