"""What a steady decode step costs the host, measured without a GPU, piece by piece.

    python -m graphengine.profiles.host_path [--rows 1,8,32] [--steps 4000]

An engine of the demo model, on the CPU, gets stand-ins for its captured graphs: they compute
nothing and publish tokens into the mailbox at once. So a replay costs nothing but the call, no wait
is ever long, and what is left is the host's share of a step. The driver's part is not in it: on a
GPU add one graph launch.

Only steady steps count: the rows of the step before, nothing submitted, finished or paused, and no
row in a new KV block. Each figure is a median over them in microseconds, without what the
stand-ins' writes took:

    plan      Scheduler.plan
    load      finding that no host-owned field changed
    launch    the bucket, its replay, the record of what is in flight
    collect   mailbox and events
    text      tokens to text and stop strings; nothing where a checkpoint has no tokenizer
    deliver   callbacks (there are none), and the list of events
    step      Engine.step as a whole, text included; the pieces were clocked in steps of their own
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.kernels import EMITTED, EPOCH_MASK

# The larger the fewer steps enter a new block.
BLOCK_SIZE = 128
PROMPT = [1, 2, 3]
PIECES = ("plan", "load", "launch", "collect", "deliver")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPath:
    """Medians in microseconds a steady step of `rows` rows; the module says what each holds."""

    rows: int
    plan: float
    load: float
    launch: float
    collect: float
    text: float
    deliver: float
    step: float


class PublishingGraph:
    """Stands in for a captured graph: `replay` publishes one token for each lane.

    `field` names the host-owned field that says which slot each lane serves. `seconds` sums up what
    the replays have taken.
    """

    def __init__(self, engine: Engine, field: str) -> None:
        self.engine = engine
        self.field = field
        self.seconds = 0.0
        self._items = engine.mailbox.tensor.numpy().view(np.uint64)
        self._lanes = np.zeros((0, self._items.shape[2]), dtype=np.uint64)
        self._loads = -1

    def replay(self) -> None:
        started = time.perf_counter()
        engine = self.engine
        if self._loads != engine.counters["loads"]:
            self._loads = engine.counters["loads"]
            self._lanes = self._live_lanes()
        sequence = engine._launched + 1
        self._lanes[:, 0] = 100 + sequence % 97
        entry = self._items[sequence % len(self._items), : len(self._lanes)]
        np.bitwise_or(self._lanes, np.uint64((sequence & 0xFFFF_FFFF) << 32), out=entry)
        self.seconds += time.perf_counter() - started

    def _live_lanes(self) -> Any:
        """Payloads of the lanes that serve a slot: token, then epoch, counts and flags."""
        slots = self.engine.buffers[self.field].numpy()
        epochs = self.engine.buffers["command_epoch"].numpy()[slots[slots >= 0]]
        states = (epochs.astype(np.uint64) & np.uint64(EPOCH_MASK)) << np.uint64(12)
        # One lane fed, one token emitted.
        said = np.uint64(1 << 8 | 1 << 4 | EMITTED)
        return np.stack([np.zeros_like(states), states | said], axis=1)

    def close(self) -> None:
        """Nothing is held."""


def measure(rows: int, *, steps: int = 4000) -> HostPath:
    """Take `steps` steady steps of `rows` requests in pieces, as many whole, and as many silent.

    ValueError unless both are positive.
    """
    if rows < 1 or steps < 1:
        raise ValueError(f"{rows=} and {steps=} must be positive")
    with Engine.from_pretrained(
        checkpoint_path(),
        device="cpu",
        max_batch=rows,
        buckets=(rows,),
        prefill_buckets=(8,),
        block_size=BLOCK_SIZE,
    ) as engine:
        graphs = _replace_graphs(engine)
        (step,) = _medians(engine, rows, steps, lambda: _whole(engine, graphs))
        with_text = _medians(engine, rows, steps, lambda: _in_pieces(engine, graphs))
        engine._intake.tokenizer = None
        silent = _medians(engine, rows, steps, lambda: _in_pieces(engine, graphs))
    collect = PIECES.index("collect")
    text = max(0.0, with_text[collect] - silent[collect])
    return HostPath(rows=rows, text=text, step=step, **dict(zip(PIECES, silent, strict=True)))


def _replace_graphs(engine: Engine) -> list[PublishingGraph]:
    """Close the engine's graphs and put stand-ins in their places."""
    graphs = []
    for name, graph in engine._graphs.items():
        graph.close()
        field = "slot_of_row" if name.startswith("decode/") else "prefill_slot"
        graphs.append(PublishingGraph(engine, field))
        engine._graphs[name] = graphs[-1]  # type: ignore[assignment]
    return graphs


def _whole(engine: Engine, graphs: Sequence[PublishingGraph]) -> tuple[float]:
    """Seconds of one `Engine.step`."""
    written = sum(graph.seconds for graph in graphs)
    started = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - started
    return (seconds - sum(graph.seconds for graph in graphs) + written,)


def _in_pieces(engine: Engine, graphs: Sequence[PublishingGraph]) -> tuple[float, ...]:
    """Seconds of the `PIECES` of one step, which is what `Engine.step` does, call by call."""
    written = sum(graph.seconds for graph in graphs)
    clock = [time.perf_counter()]
    plan = engine.scheduler.plan()
    assert plan is not None, f"{engine.scheduler.active=}"
    clock.append(time.perf_counter())
    engine._load(plan)
    clock.append(time.perf_counter())
    engine._in_flight.append(engine._replay(plan))
    clock.append(time.perf_counter())
    engine._collect(None)
    clock.append(time.perf_counter())
    engine._delivery.run_callbacks()
    clock.append(time.perf_counter())
    pieces = [after - before for before, after in pairwise(clock)]
    pieces[PIECES.index("launch")] -= sum(graph.seconds for graph in graphs) - written
    return tuple(pieces)


def _medians(
    engine: Engine, rows: int, steps: int, step: Callable[[], tuple[float, ...]]
) -> list[float]:
    """Medians in microseconds of what `step` returns, over `steps` steady ones."""
    kept: list[tuple[float, ...]] = []
    for _ in _rounds(engine, rows):
        loads = engine.counters["loads"]
        seconds = step()
        if engine.counters["loads"] == loads:
            kept.append(seconds)
        if len(kept) == steps:
            break
    return [1e6 * median(column) for column in zip(*kept, strict=True)]


def _rounds(engine: Engine, rows: int) -> Iterator[None]:
    """Yield where the next step is one that decodes `rows` requests; for ever.

    Requests are replaced before they reach their last token, and cancelled when this is closed.
    """
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    while True:
        requests = [engine.submit(PROMPT, params) for _ in range(rows)]
        try:
            while not all(request.token_ids for request in requests):
                engine.step()
            while len(requests[0].token_ids) < requests[0].max_new_tokens - 2:
                yield
        finally:
            for request in requests:
                request.cancel()
            while engine.busy:
                engine.step()


def table(results: Sequence[HostPath]) -> str:
    """The results as aligned text, one line each."""
    names = [field.name for field in fields(HostPath)]
    lines = ["".join(f"{name:>9}" for name in names) + "   (us a step)"]
    for result in results:
        rows, *figures = astuple(result)
        lines.append(f"{rows:>9}" + "".join(f"{figure:>9.2f}" for figure in figures))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.host_path")
    parser.add_argument("--rows", default="1,8,32", help="rows a step, comma-separated")
    parser.add_argument("--steps", type=int, default=4000, help="steady steps of each measurement")
    options = parser.parse_args(arguments)
    print(table([measure(int(rows), steps=options.steps) for rows in options.rows.split(",")]))


if __name__ == "__main__":
    main()
