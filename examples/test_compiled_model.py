"""Graph tests of a model under torch.compile(mode="reduce-overhead"): run it with pytest on a GPU.

    pytest examples/test_compiled_model.py

torch keeps the graphs of a compiled function to itself and may go back to eager execution without a
word. `keep_graphs` collects what it captures, and the function itself is checked like a replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.testing import read_structure

ROWS = 8


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Compiled:
    """`replay` leaves the model's result for `x` in `y`."""

    def __init__(self, keep_graphs: Any) -> None:
        layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
        self.model = torch.nn.Sequential(*layers).to("cuda")
        self.x = torch.randn(ROWS, 16, device="cuda")
        self.y = torch.zeros(ROWS, 4, device="cuda")
        self.function = torch.compile(self.model, mode="reduce-overhead")
        # The first call compiles, the second records, the others replay.
        with torch.no_grad(), keep_graphs() as self.graphs:
            for _ in range(4):
                self.replay()
        torch.cuda.synchronize()

    def replay(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.y.copy_(self.function(self.x))


@pytest.fixture(scope="module")
def compiled(keep_graphs: Any) -> Compiled:
    return Compiled(keep_graphs)


def test_it_computes_what_the_model_computes(
    compiled: Compiled, assert_replay_matches_eager: Any
) -> None:
    # The compiler computes in another order, so not the last bits.
    assert_replay_matches_eager(
        lambda: compiled.model(compiled.x),
        {"x": compiled.x},
        graph=compiled.replay,
        rtol=1e-4,
        atol=1e-5,
    )


def test_it_was_captured(compiled: Compiled, assert_no_host_nodes: Any) -> None:
    # torch first captures an empty graph. A model that fell back to eager has no other.
    kernels = [read_structure(graph).count().get("kernel", 0) for graph in compiled.graphs]
    assert sum(kernels) >= 2, kernels
    assert_no_host_nodes(compiled.graphs[-1])


def test_unused_rows_change_nothing(compiled: Compiled, poison_padding: Any) -> None:
    unused = slice(5, None)
    buffers = {"x": compiled.x, "y": compiled.y}
    poison_padding(buffers, compiled.replay, padding={"x": unused, "y": unused})


def test_every_element_is_written(compiled: Compiled, assert_outputs_written: Any) -> None:
    assert_outputs_written(compiled.replay, {"y": compiled.y})


def test_replays_neither_wait_nor_allocate(compiled: Compiled, no_sync: Any, no_alloc: Any) -> None:
    with no_sync(), no_alloc():
        for _ in range(10):
            compiled.replay()
