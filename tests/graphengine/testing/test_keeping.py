"""keep_graphs: over a stand-in for torch's graph without a GPU, and over others' captures with one.

torch.compile is in test_compiled.py.
"""

from __future__ import annotations

import pytest
import torch

from graphengine.testing import assert_no_host_nodes, keep_graphs, read_structure


class Base:
    """As torch's C++ class has it."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept = keep_graph


class Graph(Base):
    """As torch.cuda.CUDAGraph has it."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("stand_in")
def test_graphs_of_the_block_are_kept_in_their_order() -> None:
    before = Graph()
    with keep_graphs() as graphs:
        made = [Graph(), Graph(keep_graph=False), Graph(True)]
    assert graphs == made
    assert [graph.kept for graph in (before, *made, Graph())] == [False, True, True, True, False]
    assert "__init__" not in vars(Graph)


@pytest.mark.usefixtures("stand_in")
def test_the_constructor_is_put_back_after_an_error_and_from_inside() -> None:
    with pytest.raises(KeyError), keep_graphs() as outer, keep_graphs() as inner:
        graph = Graph()
        raise KeyError
    assert outer == inner == [graph]
    assert "__init__" not in vars(Graph) and not Graph().kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="keep_graphs needs a CUDA device"), keep_graphs():
        pass


@pytest.mark.gpu
def test_graphs_of_another_library_can_be_read_natively() -> None:
    """`make_graphed_callables` captures by itself and hands out functions."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()).to("cuda")
    x = torch.ones(4, 8, device="cuda")
    with keep_graphs() as graphs, torch.no_grad():
        graphed = torch.cuda.make_graphed_callables(model.eval().requires_grad_(False), (x,))
    assert len(graphs) >= 1
    forward = read_structure(graphs[0])
    assert forward.count()["kernel"] >= 1
    assert_no_host_nodes(graphs[0])
    with torch.no_grad():
        assert torch.allclose(graphed(x), model(x))


@pytest.mark.gpu
def test_a_graph_after_the_block_is_as_it_was_natively() -> None:
    x = torch.zeros(8, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    with keep_graphs():
        pass
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    with pytest.raises(RuntimeError):
        read_structure(graph)
    graph.replay()
    assert x.tolist() == [2] * 8
