"""The candidates of all ranks: one tile of each decides as all of its own do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.comm.push_candidates import push_candidates
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from launches.push_world import World

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="ranks of one process need TRITON_INTERPRET=1"
)
NOTHING, LAST_ID = -(2**63), 2**31 - 1
# At the latter float32 is so coarse that rounding errors decide between tiles.
VALUES = (-4096.0, -1.5, 0.25, 3.0, 5000.0)


def random_tiles(lanes: int, tiles: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Best and health; many have this value, no two one token. Some have no candidate."""
    values = torch.tensor(VALUES)[torch.randint(0, len(VALUES), (lanes, tiles))]
    values[torch.rand(lanes, tiles) < 0.5] = value
    values = values.clamp(max=value)
    bits = values.view(torch.int32)
    key = bits ^ ((bits >> 31) & LAST_ID)
    ids = torch.rand(lanes, 4 * tiles).argsort(dim=1)[:, :tiles]
    best = (key.long() << 32) | (ids ^ LAST_ID)
    error = 4 * torch.randint(-3, 4, (lanes, tiles))
    health = torch.where(values.abs() >= 2048, error, 0) | 1
    none = torch.rand(lanes, tiles) < 0.2
    best[none], health[none] = NOTHING, 0
    # Of some lanes a logit is no number.
    health[torch.rand(lanes, tiles) < 0.02] |= 2
    return best, health.int()


def alone(best: torch.Tensor, health: torch.Tensor) -> torch.Tensor:
    """The words of one rank's tiles, int32 `[N, 4]`: a rank alone has what it pushes."""
    best, health = push_candidates(World(1, 4).peers[0], best, health)
    return torch.cat([best.view(torch.int32), health, torch.zeros_like(health)], dim=1)


@interpreted
@settings(deadline=None, max_examples=extent(10, 100))
@given(
    ranks=st.integers(1, 4),
    lanes=st.integers(1, 5),
    value=st.sampled_from(VALUES),
    tag=st.sampled_from([0, 2**31 - 1, -2]),
    seed=st.integers(0, 999),
)
def test_ranks_agree_on_the_token_of_all_tiles(ranks, lanes, value, tag, seed):
    torch.manual_seed(seed)
    dice = random.Random(seed)
    world = World(ranks, 1, tag)

    def store(rank: int, part: Any, row: int) -> None:
        for items in world.items:
            world.store_words([items], rank, alone(*part))

    for _ in range(2):
        # Ranks need not have as many.
        parts = [random_tiles(lanes, dice.choice([1, 3, 40]), value) for _ in range(ranks)]
        order = dice.sample(range(ranks), ranks)
        found = world.run(lambda peers, part: push_candidates(peers, *part), parts, 0, order, store)
        whole = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
        expected = token_of_tiles_reference(*whole)
        for best, health in found:
            assert best.shape == health.shape == (lanes, ranks)
            assert torch.equal(best, found[0][0]) and torch.equal(health, found[0][1])
            assert torch.equal(token_of_tiles_reference(best, health), expected)
    assert not any(peers.tensors.over.item() for peers in world.peers)


@interpreted
def test_more_tiles_than_are_read_at_once():
    best, health = random_tiles(2, 5000, 5000.0)
    found = push_candidates(World(1, 1).peers[0], best, health)
    assert torch.equal(token_of_tiles_reference(*found), token_of_tiles_reference(best, health))


@pytest.mark.parametrize(
    ("best", "health", "message"),
    [
        ((2, 3), (2, 4), r"health must be a dense torch.int32 \[2, 3\]"),
        ((65, 3), (65, 3), "candidates of 65 lanes takes 260 words: there are 256 in 1 units"),
    ],
)
def test_what_does_not_fit_is_an_error(
    best: tuple[int, int], health: tuple[int, int], message: str
):
    with pytest.raises(ValueError, match=message):
        push_candidates(
            World(1, 1).peers[0],
            torch.zeros(best, dtype=torch.int64),
            torch.zeros(health, dtype=torch.int32),
        )
