"""Chunks whose stream is split, on a CPU: ranks have what one rank makes of all lanes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from graphengine.kernels.comm.add_parts_norm import split_lanes
from graphengine.models.launches import Share
from graphengine.parallel.collectives.process_group import ProcessGroup
from launches.split_chunks import EPS, SplitChunk


@pytest.mark.parametrize(("ranks", "lanes"), [(2, 8), (3, 7), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_ranks_have_their_lanes_and_all_normed_ones(
    tmp_path: Path, ranks: int, lanes: int, biased: bool
) -> None:
    chunk = SplitChunk(ranks, lanes=lanes, hidden=64, dtype=torch.bfloat16, biased=biased, seed=3)
    expected, normed = chunk.whole()
    live = chunk.slot >= 0
    assert live.sum() > 0

    def work(rank: int) -> None:
        group = ProcessGroup(
            str(tmp_path / "rendezvous"), Share(rank, ranks), torch.device("cpu"), 20.0
        )
        split = group.split_stream(lanes, 64, torch.bfloat16)
        assert split is not None
        own, stream = split_lanes(lanes, rank, ranks), chunk.stream.clone()
        split.normed_NH.fill_(7.0)
        split.add(chunk.parts[rank], stream, chunk.norm, chunk.slot, chunk.bias, EPS)
        after = chunk.stream.clone()
        after[own] = expected[own]
        torch.testing.assert_close(stream, after, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(split.normed_NH[live], normed[live])
        assert (split.normed_NH[~live] == 7.0).all()
        for lane in live.nonzero()[:, 0].tolist():
            found = split.gather_lane(stream, torch.tensor([lane], dtype=torch.int32))
            assert torch.equal(found, expected[[lane]])
        group.close()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))
