"""The checks on results of torch.compile(mode="reduce-overhead"), as far as it exposes a graph.

A compiled function is a callable that replays; its graphs belong to torch ("cudagraph trees") and
can be inspected only if they were made under `keep_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from graphengine.buckets import GraphStructure
from graphengine.testing import (
    GraphCheckError,
    GraphSnapshot,
    assert_no_host_nodes,
    assert_pointers_stable,
    assert_replay_matches_eager,
    assert_rng_advances,
    check_no_alloc,
    keep_graphs,
    latency_budget,
    no_alloc,
    no_sync,
    poison_padding,
    read_structure,
)

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# The compiler computes in another order than the module.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """`replay` leaves `model(x)` in `y`; `graphs` are the structures that are not empty."""

    model: torch.nn.Module
    function: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor
    graphs: tuple[GraphStructure, ...]

    def replay(self) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return self.y.copy_(self.function(self.x))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def mlp() -> Compiled:
    with torch.no_grad():
        return compile_and_warm_up(
            torch.nn.Sequential(
                torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
            ).to("cuda")
        )


def compile_and_warm_up(model: torch.nn.Module) -> Compiled:
    """The first call compiles, the second records, and others replay."""
    x, y = torch.randn(8, 16, device="cuda"), torch.zeros(8, 4, device="cuda")
    function = torch.compile(model, mode="reduce-overhead")
    with keep_graphs() as graphs:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            y.copy_(function(x))
    torch.cuda.synchronize()
    found = tuple(structure for structure in map(read_structure, graphs) if structure.nodes)
    return Compiled(model=model, function=function, x=x, y=y, graphs=found)


def test_its_graph_can_be_read_where_it_was_kept(mlp: Compiled, tmp_path: Path) -> None:
    graph = mlp.graphs[-1]
    assert graph.count()["kernel"] >= 2
    assert_no_host_nodes(graph)
    GraphSnapshot(tmp_path, "mlp", update=True)(graph, max_kernels=12)
    with torch.no_grad():
        again = compile_and_warm_up(torch.nn.Sequential(mlp.model, torch.nn.Sigmoid()))
    with pytest.raises(GraphCheckError, match="is not the one in"):
        GraphSnapshot(tmp_path, "mlp", update=False)(again.graphs[-1])


def test_a_replay_is_compared_with_the_module(mlp: Compiled) -> None:
    scale = 1.0

    def replay() -> torch.Tensor:
        return mlp.replay() * scale

    assert_replay_matches_eager(lambda: mlp.model(mlp.x), {"x": mlp.x}, graph=replay, **CLOSE)
    scale = 1.01
    with pytest.raises(GraphCheckError, match="differs from eager in returned"):
        assert_replay_matches_eager(lambda: mlp.model(mlp.x), {"x": mlp.x}, graph=replay, **CLOSE)


def test_padding_is_poisoned(mlp: Compiled) -> None:
    unused = slice(5, None)
    poison_padding({"x": mlp.x, "y": mlp.y}, mlp.replay, padding={"x": unused, "y": unused})
    with pytest.raises(GraphCheckError, match="changed y"):
        poison_padding({"x": mlp.x, "y": mlp.y}, mlp.replay, padding={"x": unused})


def test_replays_neither_wait_nor_allocate(mlp: Compiled) -> None:
    with no_sync(), no_alloc():
        for _ in range(10):
            mlp.replay()
    with pytest.raises(GraphCheckError, match="waits for the device"), no_sync():
        mlp.replay()[0, 0].item()
    with pytest.raises(GraphCheckError, match="the block allocated"), no_alloc():
        mlp.replay().clone()


def test_its_parameters_stay_where_they_are(mlp: Compiled) -> None:
    with assert_pointers_stable(mlp.model):
        mlp.replay()


def test_its_random_numbers_advance() -> None:
    function = torch.compile(
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True), mode="reduce-overhead"
    )
    x, y = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def replay() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        y.copy_(function(x))

    for _ in range(3):
        replay()
    assert_rng_advances(replay, y)


@pytest.mark.alone
def test_it_keeps_to_budgets(mlp: Compiled) -> None:
    check_no_alloc(mlp.replay)
    eager = latency_budget(mlp.replay, lambda: mlp.model(mlp.x), median=10)
    assert eager.median_us > 0
    with pytest.raises(GraphCheckError, match="median ratio"):
        latency_budget(
            lambda: (torch.cuda._sleep(5_000_000), mlp.replay()), mlp.replay, median=5, repeats=20
        )
