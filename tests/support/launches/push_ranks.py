"""Ranks that push on one GPU, each a process, as a native test starts them."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import torch

from graphengine.kernels.comm.add_parts_norm import add_parts_rms_norm, split_lanes
from graphengine.kernels.comm.all_reduce import all_reduce
from graphengine.kernels.comm.layout import PeerTensors
from graphengine.kernels.comm.push import push_gather, push_own_sum, push_sum
from graphengine.kernels.comm.push_candidates import push_candidates
from graphengine.kernels.comm.push_lanes import ExpertLanes, push_lanes, push_lanes_reference
from graphengine.kernels.comm.push_residual import (
    push_own_to_residual,
    push_to_residual,
    push_units,
)
from graphengine.kernels.comm.sums import sum_parts_reference
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import heuristic_plan
from graphengine.kernels.linear.residual import new_residual
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.models.launches import Share
from graphengine.parallel.collectives.peer_memory import PeerMemory
from graphengine.parallel.collectives.process_group import OPENING_LIMIT_S
from graphengine.parallel.collectives.rendezvous import Rendezvous
from launches.split_chunks import SplitChunk

HIDDEN, _COLUMNS = 1536, 512
_WIDER = 9
"""Times as many lanes has what is summed in two shots: some of these sizes are whole blocks."""


def run_ranks(folder: Path, ranks: int, replays: dict[tuple[int, torch.dtype], int]) -> list[int]:
    """Exit codes of ranks that replay a graph of pushes so often, for each number of lanes."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(str(folder / "rendezvous"), Share(rank, ranks), replays))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
        process.join()
    return [process.exitcode or 0 for process in processes]


def _run(file: str, share: Share, replays: dict[tuple[int, torch.dtype], int]) -> None:
    # Ranks share a GPU where there are not as many.
    device = torch.device("cuda", share.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rendezvous = Rendezvous(file, share, OPENING_LIMIT_S)
    # With room for the lanes' experts and sums beside them.
    units = push_units(64, HIDDEN, torch.float32) + 16
    memory = PeerMemory(rendezvous, device, units, summed_words=64 * _WIDER * HIDDEN)
    tensors = memory.tensors
    assert tensors is not None, memory.problem
    tensors.peers.tensors.watch[1] = 60 * 10**9
    for (lanes, dtype), count in replays.items():
        _replay(tensors, share, lanes, dtype, count)
    assert tensors.split is not None
    # The last one's rows are read twice.
    for hidden, dtype in ((1536, torch.bfloat16), (8192, torch.float16), (12288, torch.float32)):
        chunk = SplitChunk(
            share.ranks,
            lanes=70,
            hidden=hidden,
            dtype=dtype,
            biased=hidden > 1536,
            seed=hidden,
            device=device,
        )
        for _ in range(3):
            chunk.assert_is_whole(tensors.peers, tensors.split)
    assert not tensors.peers.tensors.watch[0]
    memory.leave()
    # The others may still have this memory.
    rendezvous.exchange("left", b"yes")
    memory.close()


class _Step:
    """One of each kind of push, of parts that change with each step, held against the plain twins.

    wrong  int64 [13]: values that differ, of all steps
    """

    def __init__(self, tensors: PeerTensors, share: Share, lanes: int, dtype: torch.dtype) -> None:
        assert tensors.summing is not None and tensors.split is not None
        self.summing, self.split = tensors.summing, tensors.split
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.peers, self.rank = tensors.peers, share.rank
        generator = torch.Generator().manual_seed(lanes)
        base = torch.randn(share.ranks, lanes, HIDDEN, generator=generator)
        self.base = base.to(self.device)
        self.dtype = dtype
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.wrong = torch.zeros(13, dtype=torch.int64, device=self.device)
        self.slot = torch.arange(lanes, dtype=torch.int32, device=self.device)
        self.norm = torch.randn(HIDDEN, generator=generator).to(self.device, dtype)
        weights = torch.randn(share.ranks, HIDDEN, _COLUMNS, generator=generator)
        self.weights = weights.to(self.device, dtype)
        family = "fma" if lanes == 1 else "dot"
        self.plan = heuristic_plan("residual", HIDDEN, _COLUMNS, dtype, family)
        self.launch = Launch(arrivals=torch.zeros(1024, dtype=torch.int32, device=self.device))

    def __call__(self) -> None:
        self.step += 1
        parts = (self.base * (1 + self.step % 97)).to(self.dtype)
        own = parts[self.rank].contiguous()
        lanes, total = len(self.slot), sum_parts_reference(parts)
        self.wrong[0] += (push_sum(self.peers, own) != total).sum()
        self.wrong[1] += (push_gather(self.peers, own) != parts).sum()
        found = new_residual(lanes, HIDDEN, 1, dtype=self.dtype, device=self.device)
        found.x.copy_(self.base[0])
        tiles = push_units(1, HIDDEN, self.dtype)
        expected = new_residual(lanes, HIDDEN, tiles, dtype=self.dtype, device=self.device)
        expected.x.copy_(self.base[0])
        push_to_residual(self.peers, own, self.slot, found, self.norm)
        y = parts[0].float()
        for part in parts[1:]:
            y = y + part.float()
        # Of all lanes, without the index that the plain twin takes, which waits for the device.
        expected.x.add_(y)
        expected.scaled.copy_(expected.x * self.norm.float())
        self.wrong[2] += (found.x != expected.x).sum()
        self.wrong[3] += (found.scaled != expected.scaled).sum()
        wide = parts.repeat(1, _WIDER, 1)
        found_sum = all_reduce(self.peers, self.summing, wide[self.rank].contiguous())
        self.wrong[8] += (found_sum != sum_parts_reference(wide)).sum()
        self._split_chunk(wide)
        self._push_candidates(parts)
        self._push_own(parts)
        self._push_products(parts[:, :, :_COLUMNS].contiguous())

    def _push_candidates(self, parts: torch.Tensor) -> None:
        """Push candidates of tiles without noise, whose largest is the best."""
        best = parts[:, :, :_COLUMNS].float().contiguous().view(torch.int32).long() << 32
        health = torch.ones_like(best, dtype=torch.int32)
        found, of_ranks = push_candidates(self.peers, best[self.rank], health[self.rank], pdl=True)
        self.wrong[12] += (found != best.amax(2).t()).sum() + (of_ranks != 1).sum()

    def _split_chunk(self, parts: torch.Tensor) -> None:
        """Twice, as in a layer: parts and lanes are stored where ranks have read those before.

        The norm's own kernel makes the expected lanes of all lanes.
        """
        ranks, lanes, _ = parts.shape
        slot = torch.zeros(lanes, dtype=torch.int32, device=self.device)
        options = {"eps": 1e-5, "pdl": True}
        own = split_lanes(lanes, self.rank, ranks)
        expected = self.base[0].repeat(lanes // len(self.slot), 1)
        found = expected.clone()
        for at, scale in ((9, 1), (10, 2)):
            scaled = parts * scale
            part = scaled[self.rank].contiguous()
            normed = add_parts_rms_norm(
                self.peers, self.split, part, found, self.norm, slot, **options
            )
            total = sum_parts_reference(scaled)
            wanted = add_rms_norm(expected, total, self.norm, slot, out_dtype=self.dtype, **options)
            self.wrong[at] += (normed != wanted).sum()
        self.wrong[11] += (found[own] != expected[own]).sum()

    def _push_products(self, x_RNK: torch.Tensor) -> None:
        """Push products of inputs of all ranks, each with a weight of its own."""
        options = {"plan": self.plan, "launch": self.launch}
        y = None
        for x, weight in zip(x_RNK, self.weights, strict=True):
            part = linear(LinearCall(x, weight, self.slot, **options), StoreSquares()).y
            y = part if y is None else y + part
        found = new_residual(len(self.slot), HIDDEN, 1, dtype=self.dtype, device=self.device)
        found.x.copy_(self.base[0])
        call = LinearCall(x_RNK[self.rank], self.weights[self.rank], self.slot, **options)
        linear(call, AddResidual(found, self.norm, self.peers))
        self.wrong[7] += (found.x != self.base[0] + y).sum()

    def _push_own(self, parts: torch.Tensor) -> None:
        """Push parts of ranks with lanes of their own: here the lanes of a rank are those of all,
        plus it.
        """
        ranks, lanes, _ = parts.shape
        mine = parts[self.rank]
        own = torch.stack([mine + rank for rank in range(ranks)])
        expected = sum_parts_reference(parts + self.rank)
        self.wrong[4] += (push_own_sum(self.peers, own) != expected).sum()
        found = new_residual(lanes, HIDDEN, 1, dtype=self.dtype, device=self.device)
        found.x.copy_(self.base[0])
        push_own_to_residual(
            self.peers, own.float(), self.slot, found, self.norm, own_NH=self.base[1]
        )
        y = (parts[0] + self.rank).float()
        for part in parts[1:]:
            y = y + (part + self.rank).float()
        self.wrong[5] += (found.x != self.base[0] + (y + self.base[1])).sum()
        of_ranks = [
            ExpertLanes(
                part,
                self.slot + rank,
                (self.slot[:, None] * 8 + rank).expand(lanes, 8).contiguous(),
                part[:, :8].float().contiguous(),
                part[:, :6].float().t().contiguous(),
            )
            for rank, part in enumerate(parts)
        ]
        gathered = push_lanes(self.peers, of_ranks[self.rank])
        for one, other in zip(gathered, push_lanes_reference(of_ranks), strict=True):
            self.wrong[6] += (one != other).sum()


def _replay(tensors: PeerTensors, share: Share, lanes: int, dtype: torch.dtype, count: int) -> None:
    step, dice = _Step(tensors, share, lanes, dtype), random.Random(share.rank)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(count):
            if dice.random() < 0.01:
                # One rank after the other is late by milliseconds, with nothing queued.
                stream.synchronize()
                time.sleep(dice.random() * 0.01)
            graph.replay()
        stream.synchronize()
    assert int(step.step) == count + 2
    assert not step.wrong.any(), f"{share=}, {lanes=}, {dtype=}: {step.wrong.tolist()}"
