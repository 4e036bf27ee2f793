"""Graph tests of a runner that pads batches to buckets, as serving engines do: run it with pytest.

    pytest examples/test_bucket_runner.py

One graph for each bucket, one set of static buffers for all. Without a GPU the runner calls its
step in place of a replay, and the tests that need no graph run all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.testing import Poison

BUCKETS = (1, 4, 8)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Eager:
    """Stands in for a graph on a machine without one, and counts replays like one."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.step()


class Runner:
    """Attention-free decoding of up to 8 rows: `ids` and `lengths` in, `logits` out."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(64, 16, generator=generator).to(DEVICE)
        self.head = torch.randn(16, 64, generator=generator).to(DEVICE)
        self.ids = torch.zeros(BUCKETS[-1], dtype=torch.int64, device=DEVICE)
        self.lengths = torch.ones(BUCKETS[-1], device=DEVICE)
        self.logits = torch.zeros(BUCKETS[-1], 64, device=DEVICE)
        self.graphs = {rows: self.capture(rows) for rows in reversed(BUCKETS)}

    @torch.no_grad()
    def step(self, rows: int) -> None:
        hidden = self.table[self.ids[:rows]] / self.lengths[:rows, None]
        torch.matmul(hidden, self.head, out=self.logits[:rows])

    def capture(self, rows: int) -> torch.cuda.CUDAGraph | Eager:
        self.step(rows)  # a warm-up
        if DEVICE == "cpu":
            return Eager(lambda: self.step(rows))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(rows)
        return graph

    def run(self, ids: list[int]) -> Tensor:
        """Logits of the first `len(ids)` rows; the rest of the bucket is padding."""
        rows = next(bucket for bucket in BUCKETS if bucket >= len(ids))
        self.ids[: len(ids)] = torch.tensor(ids, device=DEVICE)
        self.graphs[rows].replay()
        return self.logits[: len(ids)]

    def tensors(self) -> dict[str, Tensor]:
        """The runner's current tensors that the graphs read and write."""
        names = ("table", "head", "ids", "lengths", "logits")
        return {name: getattr(self, name) for name in names}


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner()


@pytest.mark.parametrize("rows", BUCKETS)
def test_a_replay_computes_what_the_step_computes(
    runner: Runner, rows: int, assert_replay_matches_eager: Any
) -> None:
    buffers = {name: runner.tensors()[name][:rows] for name in ("ids", "lengths", "logits")}
    assert_replay_matches_eager(
        lambda: runner.step(rows),
        buffers,
        graph=runner.graphs[rows],
        draw={"ids": range(len(runner.table))},  # which integers are valid
    )


def test_padded_rows_change_nothing(runner: Runner, poison_padding: Any) -> None:
    runner.ids.copy_(torch.arange(8))
    # Any id may be left in the padding, but no other number: the table is read there, too.
    poison = Poison(name="NaN, the last id", floating=math.nan, integer=len(runner.table) - 1)
    padding = dict.fromkeys(("ids", "lengths", "logits"), slice(5, None))
    poison_padding(runner.tensors(), runner.graphs[8].replay, padding=padding, values=[poison])


def test_a_batch_goes_to_the_smallest_bucket_that_holds_it(
    runner: Runner, assert_replayed: Any
) -> None:
    graphs = {str(rows): graph for rows, graph in runner.graphs.items()}
    with assert_replayed(graphs, {"4": 2, "8": 1}):
        runner.run([3, 1, 4])
        runner.run([3, 1, 4, 1])
        runner.run([3, 1, 4, 1, 5])


@pytest.mark.parametrize("rows", BUCKETS)
def test_every_row_of_the_bucket_is_written(
    runner: Runner, rows: int, assert_outputs_written: Any
) -> None:
    assert_outputs_written(runner.graphs[rows].replay, {"logits": runner.logits[:rows]})


def test_a_batch_leaves_the_buffers_where_they_were(
    runner: Runner, assert_pointers_stable: Any
) -> None:
    # The function itself: its names are read anew, so that an attribute that was rebound is seen.
    with assert_pointers_stable(runner.tensors):
        runner.run([3, 1, 4])


def test_a_row_is_that_of_its_token_in_every_bucket(runner: Runner) -> None:
    expected = runner.table[7] @ runner.head
    for ids in ([7], [7, 1, 2], [3, 1, 4, 1, 7]):
        row = runner.run(ids)[ids.index(7)]
        assert torch.allclose(row, expected, atol=1e-5), ids
