"""A device whose time is counted in decode steps, for engines on a CPU.

What the engine queues is done in its order, but only as time passes: while the host sleeps, and
while it waits for a record. A decode step takes one tick, everything else no time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from graphengine import Engine
from graphengine.buckets import HostQueue
from graphengine.program.graph_key import GraphKey


class SimulatedDevice(HostQueue):
    """Takes all work of an engine's runtime; the engine has one from `simulated`.

    idle     ticks that passed while nothing was queued
    ticks    ticks that passed
    ahead    most decode steps that were queued at the same time
    """

    __slots__ = ("_engine", "_is_step", "ahead", "idle", "ticks")

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        # Whether each queued call is a decode step.
        self._is_step: list[bool] = []
        self.idle = self.ticks = self.ahead = 0

    def add(self, work: Callable[[], object], *, is_step: bool = False) -> None:
        self._is_step.append(is_step)
        super().add(work)
        self.ahead = max(self.ahead, sum(self._is_step))

    def sleep(self, ticks: int) -> None:
        """Let time pass for the host: the device goes on with what is queued."""
        for _ in range(ticks):
            self.ticks += 1
            self.idle += not any(self._is_step)
            self._tick()

    def _tick(self) -> None:
        """Do one decode step, and what is queued before it and right after it."""
        count = self._is_step.index(True) + 1 if any(self._is_step) else len(self._is_step)
        rest = self._is_step[count:]
        count += rest.index(True) if True in rest else len(rest)
        del self._is_step[:count]
        self.run(self.done + count)

    def wait(self, look: Callable[..., Any], *arguments: Any) -> Any:
        """A wait of the host; `arguments` end with its timeout. Only 0 and None are simulated."""
        found = look(*arguments[:-1], 0)
        while found is None and arguments[-1] is None:
            assert self._is_step, "the host waits for a record that nothing queued publishes"
            self.ticks += 1
            self._tick()
            found = look(*arguments[:-1], 0)
        return found


class _Queued:
    """Stands in for a captured graph: a replay queues each of its steps."""

    def __init__(self, device: SimulatedDevice, engine: Engine, key: GraphKey, graph: Any) -> None:
        self._device, self._steps, self._decodes = device, key.steps, key.kind == "decode"
        one = key._replace(steps=1)
        graphs = dict(zip(engine.runtime.graphs, engine.runtime.captured, strict=True))
        self._step = graphs[one].step

    def replay(self) -> None:
        for _ in range(self._steps):
            self._device.add(self._step, is_step=self._decodes)


@contextmanager
def simulated(engine: Engine) -> Iterator[SimulatedDevice]:
    """Inside, a simulated device does the engine's work. Leave with nothing in flight."""
    runtime: Any = engine.runtime
    device = SimulatedDevice(engine)
    with runtime.replaced(partial(_Queued, device, engine)) as graphs:
        replays = {graph.replay for graph in graphs.values()}

        def launch(work: Callable[[], object]) -> None:
            if work in replays:
                work()
            else:
                device.add(work)

        runtime._copies, runtime._launch = device, launch
        for name in ("wait_tokens", "wait_logprobs", "wait_routes"):
            setattr(runtime, name, partial(device.wait, getattr(runtime, name)))
        try:
            yield device
        finally:
            for name in ("_launch", "wait_tokens", "wait_logprobs", "wait_routes"):
                delattr(runtime, name)
            runtime._copies = None


def naps(dice: random.Random, most: int) -> Iterator[int]:
    """Ticks that a host sleeps between its calls: often none, at times up to `most`."""
    while True:
        yield dice.choice([0, 0, 1, dice.randrange(most + 1)])
