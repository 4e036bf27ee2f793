"""What follows and precedes each lane of packed chunks, and rows that chunks write by slot."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from graphengine.kernels.core.lanes import write_rows
from graphengine.kernels.step.state import PrefillLanes, gather_prefill


def lanes_of(counts: list[int], slots: list[int], tokens: int = 12) -> PrefillLanes:
    fields = (slots, [10 * place for place in range(len(counts))], counts)
    return gather_prefill(
        torch.arange(100, 100 + tokens, dtype=torch.int32),
        *(torch.tensor(field, dtype=torch.int32) for field in fields),
    )


@pytest.mark.parametrize(
    "counts, slots",
    [([3, 1, 5], [2, 0, 1]), ([4, 2, 0], [1, 2, -1]), ([12], [0]), ([0, 0], [-1, -1])],
)
def test_neighbours_of_lanes(counts: list[int], slots: list[int]) -> None:
    chunk, rows = lanes_of(counts, slots), torch.randn(12, 2)
    followed = chunk.followed_by(torch.arange(len(counts), dtype=torch.int32)).tolist()
    preceded = chunk.preceded_by(rows, before := torch.randn(len(counts), 2))
    assert chunk.slot_of_chunk.tolist() == slots
    for place, (first, end) in enumerate(pairwise(chunk.query_start.tolist())):
        assert end - first == counts[place]
        if counts[place]:
            assert int(chunk.start_of_chunk[place]) == 10 * place
            assert followed[first:end] == [*range(101 + first, 100 + end), place]
            expected = torch.cat([before[place : place + 1], rows[first : end - 1]])
            assert torch.equal(preceded[first:end], expected)
            assert chunk.chunk_of_lane[first:end].tolist() == [place] * counts[place]


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3)])
def test_rows_of_live_lanes_are_written(shape: tuple[int, ...]) -> None:
    table, slot = torch.randn(shape), torch.tensor([3, -1, 0, -1], dtype=torch.int32)
    rows, expected = torch.randn(4, *shape[1:]), table.clone()
    expected[[3, 0]] = rows[[0, 2]]
    write_rows(table, slot, rows)
    assert torch.equal(table, expected)
