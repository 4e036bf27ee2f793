"""The host's cost of a steady decode step, measured without a GPU, piece by piece.

    python -m graphengine.profiles.host_path [--rows 1,8,32] [--steps 4000]

An engine of the demo model, on the CPU, gets stand-ins for its captured graphs: they compute
nothing and publish tokens into the mailbox at once. So a replay costs only the call, no wait is
long, and the rest is the host's share of a step. The driver's part is not included: on a GPU add
one graph launch.

Only steady steps count: the same rows as in the step before, nothing submitted, finished or paused,
and no row in a new KV block. Each figure is a median over them in microseconds. The pieces are the
stages of the engine's recorder, without the time of the stand-ins' writes:

    plan      the scheduler's plan
    load      finding that no host-owned field changed, up to the launch
    launch    the call of the graph
    wait      reading the mailbox, where the record is already there
    deliver   tokens to requests and events, callbacks (there are none), and the list of events
    text      tokens to text and stop strings, of all rows; not included in `deliver`
    step      Engine.step as a whole, text included, while nothing is recorded
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np

from graphengine import Engine, SamplingParams
from graphengine.demo import checkpoint_path
from graphengine.kernels.step.record import pack_state
from graphengine.kernels.step.state import EMITTED
from graphengine.observe.recorder import LEAST_CAPACITY
from graphengine.profiles.benchmark.eager import drain
from graphengine.program.graph_key import GraphKey, decode_key

Figure = TypeVar("Figure")

# With larger blocks fewer steps enter a new one.
BLOCK_SIZE = 128
PROMPT = [1, 2, 3]
# The first of many tokens of the demo model that are words or parts of words.
WORDS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPath:
    """Medians in microseconds a steady step of `rows` rows; the module's docstring describes
    each.
    """

    rows: int
    plan: float
    load: float
    launch: float
    wait: float
    deliver: float
    text: float
    step: float


class PublishingGraph:
    """Stands in for the graph of `key`: `replay` publishes one token for each lane.

    `seconds` has the time of each replay.
    """

    def __init__(self, engine: Engine, key: GraphKey) -> None:
        self.seconds: list[float] = []
        self._counters = engine.counters
        self._runtime = engine.runtime
        # The host-owned field that says which slot each lane serves.
        self._field = "slot_of_row" if key.kind == "decode" else "prefill_slot"
        self._items = engine.runtime.mailbox.tensor.numpy().view(np.uint64)
        self._lanes = np.zeros((0, self._items.shape[2]), dtype=np.uint64)
        self._loads = -1

    def replay(self) -> None:
        started = time.perf_counter()
        if self._loads != self._counters["loads"]:
            self._loads = self._counters["loads"]
            self._lanes = self._live_lanes()
        sequence = self._runtime.launched + 1
        self._lanes[:, 0] = WORDS + sequence % 97
        entry = self._items[sequence % len(self._items), : len(self._lanes)]
        np.bitwise_or(self._lanes, np.uint64((sequence & 0xFFFF_FFFF) << 32), out=entry)
        self.seconds.append(time.perf_counter() - started)

    def _live_lanes(self) -> Any:
        """Payloads of the lanes that serve a slot: token, then epoch, counts and flags."""
        buffers = self._runtime.buffers
        slots = buffers[self._field].numpy()
        epochs = buffers["command_epoch"].numpy()[slots[slots >= 0]]
        one = np.ones_like(epochs, dtype=np.int64)
        # One lane fed, one token emitted.
        states = pack_state(epochs.astype(np.int64), one, one, one * EMITTED)
        return np.stack([np.zeros_like(states), states], axis=1).astype(np.uint64)


def measure(rows: int, *, steps: int = 4000) -> HostPath:
    """Record `steps` steady steps of `rows` requests, as many without text; time as many whole.

    ValueError unless both are positive.
    """
    if rows < 1 or steps < 1:
        raise ValueError(f"{rows=} and {steps=} must be positive")
    with publishing(rows) as engine:
        step = whole_step(engine, rows, steps)
        with_text = pieces(engine, rows, steps)
        engine.core.intake.tokenizer = None
        silent = pieces(engine, rows, steps)
    text = max(0.0, with_text["deliver"] - silent["deliver"])
    return HostPath(rows=rows, text=text, step=step, **silent)


@contextmanager
def publishing(rows: int) -> Iterator[Engine]:
    """An engine of `rows` rows whose replays only publish."""
    with Engine.from_pretrained(
        checkpoint_path(),
        device="cpu",
        max_batch=rows,
        buckets=(rows,),
        prefill_buckets=(8,),
        block_size=BLOCK_SIZE,
    ) as engine:
        stand_in = partial(PublishingGraph, engine)
        with engine.runtime.replaced(lambda key, graph: stand_in(key)):
            yield engine
            drain(engine)


def whole_step(engine: Engine, rows: int, steps: int) -> float:
    """Microseconds of one `Engine.step`, the median of this many steady ones."""
    written = _written(engine, rows)

    def take() -> float:
        started = time.perf_counter()
        engine.step()
        return time.perf_counter() - started - written[-1]

    return 1e6 * median(of_steady_steps(engine, rows, steps, take))


def pieces(engine: Engine, rows: int, steps: int) -> dict[str, float]:
    """Microseconds of each stage, medians over this many steady steps."""
    recorder, written = engine.recorder, _written(engine, rows)

    def take() -> tuple[int, float]:
        engine.step()
        return engine.runtime.launched, written[-1]

    recorder.start(capacity=max(LEAST_CAPACITY, 2 * steps))
    recorder.clear()
    sequences, writes = zip(*of_steady_steps(engine, rows, steps, take), strict=True)
    recorder.stop()
    kept = np.isin(recorder.replays()["sequence"], sequences)
    found = {name: float(np.nanmedian(took[kept])) for name, took in recorder.stages().items()}
    return found | {"launch": found["launch"] - 1e6 * median(writes)}


def _written(engine: Engine, rows: int) -> list[float]:
    """Seconds of each replay of the decode stand-in: the list that it appends to."""
    graph = engine.runtime.graphs[decode_key(rows)]
    assert isinstance(graph, PublishingGraph), f"{graph=}"
    return graph.seconds


def of_steady_steps(
    engine: Engine, rows: int, steps: int, take: Callable[[], Figure]
) -> list[Figure]:
    """The results of `take`, which takes a step, for this many steady ones."""
    kept: list[Figure] = []
    with closing(_rounds(engine, rows)) as rounds:
        for _ in rounds:
            loads = engine.counters["loads"]
            figure = take()
            if engine.counters["loads"] == loads:
                kept.append(figure)
            if len(kept) == steps:
                break
    return kept


def _rounds(engine: Engine, rows: int) -> Generator[None, None, None]:
    """Yield before each step that decodes `rows` requests, without end.

    Requests are replaced before they reach their last token, and cancelled when this is closed.
    """
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    while True:
        requests = [engine.submit(PROMPT, params) for _ in range(rows)]
        try:
            while not all(request.token_ids for request in requests):
                engine.step()
            while len(requests[0].token_ids) < requests[0].job.max_new_tokens - 2:
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
    parser.add_argument(
        "--rows", default="1,8,32", help="numbers of rows per step, comma-separated"
    )
    parser.add_argument(
        "--steps", type=int, default=4000, help="steady-state steps per measurement"
    )
    options = parser.parse_args(arguments)
    print(table([measure(int(rows), steps=options.steps) for rows in options.rows.split(",")]))


if __name__ == "__main__":
    main()
