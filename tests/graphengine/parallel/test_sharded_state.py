"""Tensors that ranks split: the shards of any number of ranks are the same whole."""

from __future__ import annotations

import pytest
import torch

from graphengine.parallel.sharded_state import ShardedAxis


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
def test_shards_are_a_whole(
    whole: tuple[int, ...], own: tuple[int, ...], ranks: int, axis: int
) -> None:
    split = ShardedAxis(whole, own, axis)
    shape = [3, 5, 7]
    shape[axis] = sum(whole)
    tensor = torch.randn(shape)
    shards = [split.shard(tensor, rank, ranks) for rank in range(ranks)]
    assert {shard.shape[axis] for shard in shards} == {sum(own)}
    assert torch.equal(split.join(shards), tensor)
