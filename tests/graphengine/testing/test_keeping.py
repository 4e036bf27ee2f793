"""keep_graphs: over a stand-in for torch's graph without a GPU, and over others' captures with one.

torch.compile is in test_compiled.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.testing import assert_no_host_nodes, keep_graphs, read_structure


class Base:
    """Stands for torch's C++ class."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.kept = keep_graph


def of_torch_2_10() -> type[Any]:
    class Graph(Base):
        """Stands for torch.cuda.CUDAGraph."""

    return Graph


def of_torch_2_14() -> type[Any]:
    class Graph(Base):
        """It keeps a note of its own of how it was made, and goes by both."""

        def __new__(cls, keep_graph: bool = False) -> Any:
            instance = super().__new__(cls)
            instance.noted = keep_graph
            return instance

    return Graph


@pytest.fixture(params=[of_torch_2_10, of_torch_2_14])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Stands in for torch.cuda.CUDAGraph."""
    made: type[Any] = request.param()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


def is_kept(graph: Any) -> bool:
    kept: bool = graph.kept
    assert getattr(graph, "noted", kept) == kept
    return kept


def test_graphs_of_the_block_are_kept_in_their_order(kind: type[Any]) -> None:
    own = dict(vars(kind))
    before = kind()
    with keep_graphs() as graphs:
        made = [kind(), kind(keep_graph=False), kind(True)]
    assert graphs == made
    assert [is_kept(graph) for graph in (before, *made, kind())] == [False, True, True, True, False]
    assert dict(vars(kind)) == own


def test_the_constructor_is_put_back_after_an_error_and_from_inside(kind: type[Any]) -> None:
    own = dict(vars(kind))
    with pytest.raises(KeyError), keep_graphs() as outer, keep_graphs() as inner:
        graph = kind()
        raise KeyError
    assert outer == inner == [graph] and is_kept(graph)
    assert dict(vars(kind)) == own and not is_kept(kind())


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
