"""What ranks keep, put together and taken apart again: any number of ranks has the same whole."""

from __future__ import annotations

import pytest
import torch

from graphengine.parallel.kept_parts import Pieces


@pytest.mark.parametrize(
    ("whole", "own", "ranks"),
    [
        ((8,), (4,), 2),
        ((2,), (1,), 4),  # KV heads that two ranks share.
        ((192, 24, 24), (96, 24, 24), 2),  # Of one group, which all have.
        ((12, 12, 20), (3, 3, 5), 4),
    ],
)
@pytest.mark.parametrize("axis", [1, -2])
def test_parts_are_a_whole(
    whole: tuple[int, ...], own: tuple[int, ...], ranks: int, axis: int
) -> None:
    pieces = Pieces(whole, own, axis)
    shape = [3, 5, 7]
    shape[axis] = sum(whole)
    tensor = torch.randn(shape)
    parts = [pieces.of_rank(tensor, rank, ranks) for rank in range(ranks)]
    assert {part.shape[axis] for part in parts} == {sum(own)}
    assert torch.equal(pieces.together(parts), tensor)
