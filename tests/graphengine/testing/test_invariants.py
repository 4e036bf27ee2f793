"""Addresses, random numbers and kinds of nodes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from graphengine.buckets import (
    CapturedGraph,
    Field,
    GraphEdge,
    GraphNode,
    GraphStructure,
    StaticBuffers,
)
from graphengine.testing import (
    GraphCheckError,
    assert_no_host_nodes,
    assert_pdl_edges,
    assert_pointers_stable,
    assert_rng_advances,
)

# Addresses.


def test_a_tensor_that_moved_is_named_with_both_addresses() -> None:
    buffers = {"x": torch.zeros(4), "y": torch.zeros(4)}
    old, new = buffers["x"], torch.zeros(5)
    pointers = assert_pointers_stable(buffers)
    pointers.check()
    buffers["x"] = new
    with pytest.raises(GraphCheckError) as caught:
        pointers.check()
    assert f"x was float32 [4] with strides [1] at {old.data_ptr():#x}" in str(caught.value)
    assert f"is float32 [5] with strides [1] at {new.data_ptr():#x}" in str(caught.value)
    assert "1 of 2 buffers" in str(caught.value)


class Runner:
    def __init__(self) -> None:
        self.x, self.y = torch.zeros(4), torch.zeros(4)


def test_a_function_names_the_tensors_that_are_in_use_now() -> None:
    runner = Runner()
    with assert_pointers_stable(lambda: {"x": runner.x, "y": runner.y}):
        runner.x.copy_(torch.ones(4))
    with (
        pytest.raises(GraphCheckError, match=r"1 of 2 buffers moved .*: y was float32"),
        assert_pointers_stable(lambda: {"x": runner.x, "y": runner.y}),
    ):
        runner.y = runner.y.clone()
    with pytest.raises(ValueError, match="the buffers are of type list: give tensors by name"):
        assert_pointers_stable(lambda: [runner.x])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no buffers to watch"):
        assert_pointers_stable(dict)


def test_a_new_tensor_does_not_come_to_the_old_address() -> None:
    """Its memory would be free after the second time, and be given out to the third."""
    runner = Runner()
    pointers = assert_pointers_stable(lambda: {"x": runner.x})
    for _ in range(8):
        runner.x = torch.zeros(4)
        with pytest.raises(GraphCheckError, match="x was"):
            pointers.check()


def test_a_tensor_that_is_gone_is_named() -> None:
    buffers = {"x": torch.zeros(4), "y": torch.zeros(4)}
    pointers = assert_pointers_stable(buffers)
    del buffers["y"]
    with pytest.raises(GraphCheckError, match=r"1 of 2 buffers .*: y was .*, is gone"):
        pointers.check()


def test_the_parameters_of_a_module_are_watched() -> None:
    model = torch.nn.BatchNorm1d(4)
    with assert_pointers_stable(model):
        model(torch.ones(2, 4))
    with pytest.raises(GraphCheckError, match="weight was"), assert_pointers_stable(model):
        model.weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(GraphCheckError, match="running_mean was"), assert_pointers_stable(model):
        model.double()


def test_static_buffers_are_watched() -> None:
    buffers = StaticBuffers([Field(name="x", shape=(4,), dtype=torch.float32)], "cpu")
    with assert_pointers_stable(buffers):
        buffers.load({"x": [1]}, sequence=1)
    with pytest.raises(GraphCheckError, match="x was"), assert_pointers_stable(buffers):
        buffers.x.data = torch.zeros(4)


def test_an_error_of_the_block_comes_first() -> None:
    buffers = {"x": torch.zeros(4)}
    with pytest.raises(KeyError), assert_pointers_stable(buffers):
        buffers["x"] = torch.zeros(4)
        raise KeyError


def test_nothing_to_watch_is_refused() -> None:
    with pytest.raises(ValueError, match="no buffers to watch"):
        assert_pointers_stable({})
    with pytest.raises(ValueError, match="no buffers to watch: all 2 have 0 elements"):
        assert_pointers_stable({"x": torch.zeros(0), "y": torch.zeros(4, 0)})
    with pytest.raises(ValueError, match="the buffers are of type Tensor: give tensors by name"):
        assert_pointers_stable(torch.zeros(4))  # type: ignore[arg-type]


# Random numbers.


def test_one_number_that_differs_is_enough() -> None:
    y, numbers = torch.zeros(4), itertools.count()
    assert_rng_advances(lambda: y[3].fill_(next(numbers)), y)


def test_a_fixed_seed_names_the_first_difference() -> None:
    y, numbers = torch.zeros(4), itertools.count()
    with pytest.raises(GraphCheckError, match=r"row 3, .* first replay 0.0, second replay 1.0"):
        assert_rng_advances(lambda: y[3].fill_(next(numbers)), y, fixed=True)


def test_an_output_that_can_hold_no_numbers_is_refused() -> None:
    for fixed in (False, True):
        with pytest.raises(ValueError, match=r"the output \(float32 \[0, 4\]\) has no element"):
            assert_rng_advances(lambda: None, torch.zeros(0, 4), fixed=fixed)
    with pytest.raises(ValueError, match="the output is of type list, not a torch"):
        assert_rng_advances(lambda: None, [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replay=None is not callable"):
        assert_rng_advances(None, torch.zeros(4))  # type: ignore[arg-type]


def test_a_replay_of_which_a_call_runs_nothing_is_refused() -> None:
    y = torch.zeros(4)

    async def replay() -> None:
        y.uniform_()

    with pytest.raises(ValueError, match="returned a coroutine, so none of its body ran"):
        assert_rng_advances(replay, y, fixed=True)


def test_every_generator_advances_with_each_replay() -> None:
    y, first, second = torch.zeros(8), torch.Generator(), torch.Generator()
    generators = {"first": first, "second": second}

    def replay() -> None:
        y[:4].uniform_(generator=first)
        y[4:].uniform_(generator=second)

    assert_rng_advances(replay, y, generators=generators)
    message = (
        r"generator 'second' did not advance in replay 1 of 2: the graph does not draw from it"
    )
    with pytest.raises(GraphCheckError, match=message):
        assert_rng_advances(lambda: y.uniform_(generator=first), y, generators=generators)

    remaining = iter([second])

    def draw_once() -> None:
        y[:4].uniform_(generator=first)
        y[4:].uniform_(generator=next(remaining, first))

    with pytest.raises(
        GraphCheckError, match="generator 'second' did not advance in replay 2 of 2"
    ):
        assert_rng_advances(draw_once, y, generators=generators)


def test_generators_of_which_nothing_can_be_told_are_refused() -> None:
    y = torch.zeros(8)
    with pytest.raises(ValueError, match="generator 'mine' is of type int, not a torch"):
        assert_rng_advances(y.uniform_, y, generators={"mine": 7})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="fixed=True with 1 generators, which would have to advan"):
        assert_rng_advances(y.uniform_, y, fixed=True, generators={"mine": torch.Generator()})


# Nodes and edges.


def kernels(count: int, *programmatic: bool) -> GraphStructure:
    """A chain of kernels k0, k1, ..."""
    return GraphStructure(
        nodes=tuple(GraphNode(index=i, kind="kernel", name=f"k{i}") for i in range(count)),
        edges=tuple(
            GraphEdge(source=i, target=i + 1, type="programmatic" if is_programmatic else "full")
            for i, is_programmatic in enumerate(programmatic)
        ),
    )


def test_host_nodes_are_listed_up_to_ten() -> None:
    assert_no_host_nodes(kernels(2, True))
    hosts = GraphStructure(nodes=tuple(GraphNode(index=i, kind="host") for i in range(12)))
    with pytest.raises(GraphCheckError, match=r"12 host nodes .*: node 0; .*; node 9; and 2 more$"):
        assert_no_host_nodes(hosts)


def test_a_share_of_programmatic_edges_is_enough() -> None:
    structure = kernels(4, True, False, True)
    assert_pdl_edges(structure, least=0.5)
    with pytest.raises(GraphCheckError, match=r"2 of 3 .* \(66.7%\), .* 100.0%; full: 1 \(k1\) ->"):
        assert_pdl_edges(structure)


def test_a_graph_without_edges_says_nothing() -> None:
    with pytest.raises(ValueError, match="a graph of 1 nodes without edges"):
        assert_pdl_edges(kernels(1))


@pytest.mark.parametrize("least", [math.nan, -0.1, 1.1, 80])
def test_a_share_that_is_none_is_refused(least: float) -> None:
    with pytest.raises(ValueError, match=rf"least={least} must be at least 0 and at most 1"):
        assert_pdl_edges(kernels(2, True), least=least)


@pytest.mark.parametrize(
    "node",
    [
        GraphNode(index=3, kind="conditional", detail="if", graphs=None),
        GraphNode(index=3, kind="unknown"),
        GraphNode(index=3, kind="type_14"),
    ],
    ids=lambda node: node.kind,
)
def test_what_cannot_be_looked_into_is_an_error(node: GraphNode) -> None:
    chain = kernels(3, True, True)
    graph = GraphStructure(nodes=(*chain.nodes, node), edges=chain.edges)
    message = rf"cannot be told: node 3 \({node.kind}\) cannot be looked into; if .*bodies=...\)"
    with pytest.raises(GraphCheckError, match=f"whether there are host nodes {message}"):
        assert_no_host_nodes(graph)
    with pytest.raises(GraphCheckError, match=f"the share of programmatic edges {message}"):
        assert_pdl_edges(graph, least=0.5)
    assert_pdl_edges(graph, least=0)
    # What was found is reported, not that there may be more.
    host = GraphNode(index=4, kind="host")
    with pytest.raises(GraphCheckError, match="1 host nodes in the graph: node 4"):
        assert_no_host_nodes(GraphStructure(nodes=(*graph.nodes, host), edges=graph.edges))


def test_bodies_that_are_known_are_looked_into() -> None:
    node = GraphNode(index=1, kind="conditional", graphs=(kernels(2, True),))
    graph = GraphStructure(nodes=(*kernels(1).nodes, node))
    assert_no_host_nodes(graph)
    assert_pdl_edges(graph)


# From here on: a GPU.


@pytest.mark.gpu
def test_graphs_of_every_kind_are_read_natively() -> None:
    x = torch.zeros(8, device="cuda")
    captured = CapturedGraph(lambda: (x.add_(1), x.add_(2)), name="b", device="cuda")
    captured.capture()
    for graph in (captured, captured.graph):
        assert graph is not None
        assert_no_host_nodes(graph)
        assert_pdl_edges(graph, least=0)
        with pytest.raises(GraphCheckError, match=r"0 of 1 .* full: 0 \(.*\) -> 1 \(.*\)"):
            assert_pdl_edges(graph)
    captured.close()


@pytest.mark.gpu
def test_random_numbers_of_a_captured_graph_advance_natively() -> None:
    y = torch.zeros(8, device="cuda")
    captured = CapturedGraph(y.uniform_, name="b", device="cuda")
    captured.capture()
    assert_rng_advances(captured.replay, y)
    captured.close()
