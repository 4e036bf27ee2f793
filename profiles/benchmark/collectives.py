"""The cost of summing a product over ranks: chains of the launches that a decode step makes.

A lone rank measures them on one GPU, without transfers to others. Each product whose parts ranks
sum is timed in three ways: one rank's part alone, with the sum in the same kernel, and with the sum
in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine import Engine
from graphengine.buckets import CapturedGraph, ReplayTimer
from graphengine.kernels.comm.items import Peers
from graphengine.kernels.comm.push_residual import push_to_residual
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, Store
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import Residual, new_residual
from graphengine.models.linears import LinearPlans, Linears

CALLS, REPLAYS = 64, 20
# Bytes of all weights of a chain: several times an L2 cache.
_BYTES = 512 << 20


class CollectiveTime(NamedTuple):
    """Microseconds a call, in a chain of `CALLS`; medians of `REPLAYS`.

    linear     the product's name
    ranks      number of ranks; `lanes`, `M`, `K` are the sizes of one rank's part
    alone_us   one rank's part, added to the residual stream without the others' parts
    summed_us  the sum of all parts, pushed from the product's kernel
    apart_us   the sum of all parts, by two kernels
    """

    linear: str
    ranks: int
    lanes: int
    M: int
    K: int
    alone_us: float
    summed_us: float
    apart_us: float


def collective_times(engine: Engine) -> Iterator[CollectiveTime]:
    """Time each product that ranks sum, with as many lanes as the engine has slots.

    Yields nothing on a CPU, and nothing for weights in 8 or 4 bits. The engine's peers are used:
    nothing of it may be in flight.
    """
    group, runtime = engine.runtime.group, engine.runtime
    if group is None or group.peers is None:
        return
    assert runtime.stream is not None, "a GPU has a stream"
    yield from product_times(
        group.peers,
        engine.model.config.linears,
        runtime.plans,
        engine.config.max_batch,
        engine.memory.dtype,
        runtime.stream,
        Launch(pdl=engine.config.pdl, arrivals=runtime.buffers["arrivals"]),
    )


def product_times(
    peers: Peers,
    linears: Linears,
    plans: LinearPlans,
    lanes: int,
    dtype: torch.dtype,
    stream: torch.cuda.Stream,
    launch: Launch,
) -> Iterator[CollectiveTime]:
    """Time each of the `linears` that ranks sum, with `lanes` lanes; see `Chain`."""
    for name, each in linears.items():
        if each.shard == "columns" and each.weight is None and not each.experts:
            size = (lanes, each.rows, each.columns)
            chain = Chain(peers, size, plans[name], dtype, stream, launch)
            times = chain.microseconds(chain.alone, chain.summed, chain.apart)
            yield CollectiveTime(name, peers.ranks, *size, *times)


class Chain:
    """Products one after the other, each with a weight that is in no cache.

    size    (N, M, K)
    stream  the graphs' stream, not the default one
    """

    def __init__(
        self,
        peers: Peers,
        size: tuple[int, int, int],
        plan: LinearPlan,
        dtype: torch.dtype,
        stream: torch.cuda.Stream,
        launch: Launch,
    ) -> None:
        (lanes, M, K), device = size, stream.device
        self._peers, self._plan, self._launch, self._on = peers, plan, launch, stream

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).mul_(0.02)

        count = min(CALLS, max(2, -(-_BYTES // (M * K * dtype.itemsize))))
        self._weights = [random(M, K) for _ in range(count)]
        self._x, self._norm = random(lanes, K), random(M)
        self._slot = torch.arange(lanes, dtype=torch.int32, device=device)
        self._stream = new_residual(lanes, M, 1, dtype=dtype, device=device)
        self._stream.x.zero_()

    def alone(self, weight: Tensor) -> Residual:
        return self._product(weight, None)

    def summed(self, weight: Tensor) -> Residual:
        return self._product(weight, self._peers)

    def _product(self, weight: Tensor, peers: Peers | None) -> Residual:
        return linear(self._call(weight), AddResidual(self._stream, self._norm, peers))

    def _call(self, weight: Tensor) -> LinearCall:
        return LinearCall(self._x, weight, self._slot, plan=self._plan, launch=self._launch)

    def apart(self, weight: Tensor) -> Residual:
        part = linear(self._call(weight), Store(dtype=torch.float32))
        pdl = self._launch.pdl
        return push_to_residual(self._peers, part, self._slot, self._stream, self._norm, pdl=pdl)

    def microseconds(self, *calls: Callable[[Tensor], Residual]) -> list[float]:
        """Microseconds of a call in a chain of each of `calls`; see `microseconds_of`."""
        return microseconds_of(self._on, *(partial(self._run, call) for call in calls))

    def _run(self, call: Callable[[Tensor], Residual]) -> None:
        for index in range(CALLS):
            call(self._weights[index % len(self._weights)])


def microseconds_of(stream: torch.cuda.Stream, *chains: Callable[[], None]) -> list[float]:
    """Microseconds of a call, for each chain of `CALLS` calls.

    Chains are captured as graphs and replayed in turn, so ranks that meet in them must all call
    this with the same chains.
    """
    graphs = list[CapturedGraph]()
    with ExitStack() as stack:
        for chain in chains:
            graphs.append(CapturedGraph(chain, name="chain", device=stream.device, stream=stream))
            stack.callback(graphs[-1].close)
            graphs[-1].capture()
        timer = ReplayTimer(stream, REPLAYS * len(graphs))
        for pair in range(timer.pairs):
            timer.begin(pair)
            graphs[pair % len(graphs)].replay()
            timer.end(pair)
        stream.synchronize()
    found = [timer.microseconds(pair) for pair in range(timer.pairs)]
    return [median(found[index :: len(chains)]) / CALLS for index in range(len(chains))]
