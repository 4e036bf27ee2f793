"""Pushes on a GPU: ranks on two streams of a process, and in two processes that share one GPU.

The latter take turns of milliseconds, in which they wait for each other.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from events import GENEROUS_S

from graphengine.kernels.comm.items import UNIT, PeerItems, Peers
from graphengine.kernels.comm.push import push_gather, push_sum
from graphengine.kernels.comm.sums import sum_parts_reference
from launches.push_ranks import run_ranks

pytestmark = pytest.mark.gpu


def two_peers(units: int, limit_s: float) -> list[Peers]:
    """Two ranks of this process."""
    items = [torch.zeros(2, 2, units, UNIT, dtype=torch.int64, device="cuda") for _ in range(2)]
    addresses = [each.data_ptr() for each in items]
    found = [Peers(rank, PeerItems.over_items(rank, items[rank], addresses)) for rank in range(2)]
    for peers in found:
        peers.tensors.watch[1] = int(limit_s * 1e9)
        # On a first launch torch and Triton load what they need, for which nothing may wait.
        peers.tensors.over.fill_(1)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            push_sum(peers, torch.zeros(1, 2, device="cuda", dtype=dtype))
        push_gather(peers, torch.zeros(1, 2, device="cuda"))
        torch.cuda.synchronize()
        peers.tensors.over.zero_()
        peers.tensors.watch[0] = 0
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_streams_have_the_same_sums(dtype: torch.dtype) -> None:
    dice = random.Random(1)
    peers, streams = two_peers(150, 20.0), [torch.cuda.Stream() for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(60):
        shape = (dice.choice([1, 2, 8, 64]), 2 * dice.randrange(1, 300))
        parts = torch.randn(2, *shape, generator=generator).to("cuda", dtype)
        # Aligned like the first launches' parts, so that nothing is compiled while one waits.
        own = [part.clone() for part in parts]
        launch = dice.choice([push_sum, push_gather])
        torch.cuda.synchronize()
        found = {}
        for rank in dice.sample(range(2), 2):
            with torch.cuda.stream(streams[rank]):
                found[rank] = launch(peers[rank], own[rank])
            time.sleep(dice.choice([0, 0, 0.002]))
        torch.cuda.synchronize()
        expected = sum_parts_reference(parts) if launch is push_sum else parts
        assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    assert torch.equal(peers[0].tensors.tags, peers[1].tensors.tags)
    assert not peers[0].tensors.watch[0] and not peers[1].tensors.watch[0]


@pytest.mark.parametrize("by", ["limit", "host"])
def test_a_wait_for_nobody_ends(by: str) -> None:
    alone, other = two_peers(4, 0.3 if by == "limit" else GENEROUS_S)
    part = torch.randn(2, 300, device="cuda")
    started = time.monotonic()
    found = push_gather(alone, part)
    if by == "host":
        time.sleep(0.1)
        assert not torch.cuda.current_stream().query()
        alone.tensors.watch[0] = 1
    torch.cuda.synchronize()
    assert time.monotonic() - started < GENEROUS_S
    assert torch.equal(found, torch.stack([part, part]))
    assert alone.tensors.watch[0] == 1 and alone.tensors.over.item() == 1
    # It gives nothing any more.
    before = other.tensors.items.clone()
    push_gather(alone, part)
    torch.cuda.synchronize()
    assert torch.equal(other.tensors.items, before)


def test_processes_replay_the_same_sums(tmp_path: Path) -> None:
    """On a GPU each where there are as many."""
    ranks = 4 if torch.cuda.device_count() > 3 else 2
    # Ranks that share a GPU take turns.
    often = 1000 if torch.cuda.device_count() > 1 else 200
    replays = {(1, torch.bfloat16): often, (1, torch.float32): 50, (7, torch.float16): 50}
    replays |= {(lanes, torch.bfloat16): 20 for lanes in (2, 16, 64)}
    assert run_ranks(tmp_path, ranks, replays | {(64, torch.float32): 20}) == [0] * ranks


def test_three_ranks_sum_large_parts_in_two_shots(tmp_path: Path) -> None:
    replays = {(7, torch.float16): 10, (64, torch.bfloat16): 5}
    assert run_ranks(tmp_path, 3, replays) == [0] * 3
