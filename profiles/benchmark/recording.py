"""A recorded run, and the cost of recording it: recorder on and off, alternately, in one engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from graphengine import Engine, Result
from graphengine.observe.ring import REASONS
from graphengine.observe.tracing import span, tracer
from graphengine.profiles.benchmark.eager import require_equal
from graphengine.profiles.benchmark.measure import Steady, Work, host_time, steady
from graphengine.profiles.tables.percentiles import percentiles

LEAST_PAIRS = 8
"""Least number of rounds with and without the recorder, however few tokens are asked for."""
HOST_PAIRS = 3
CAPACITY = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Rounds with the recorder off and on; neighbouring rounds form pairs with the same index."""

    off: list[Steady] = field(default_factory=list)
    on: list[Steady] = field(default_factory=list)

    def cost(self) -> dict[str, Any]:
        """Medians of milliseconds a step, and by how many microseconds pairs differ.

        A difference below the spread of the pairs (their quartiles) is not significant.
        """
        off, on = ([1e3 * run.seconds / run.steps for run in runs] for runs in (self.off, self.on))
        more = [1e3 * (with_it - without) for without, with_it in zip(off, on, strict=True)]
        low, _, high = quantiles(more, n=4)
        return {
            "pairs": len(more),
            "ms_per_step": {"off": median(off), "on": median(on)},
            "more_us": median(more),
            "more_us_quartiles": [low, high],
            "itl_ms": {"off": _gaps(self.off), "on": _gaps(self.on)},
        }


def _gaps(runs: Sequence[Steady]) -> dict[str, Any]:
    gaps = [1e3 * gap for run in runs for gap in run.gaps]
    return percentiles(gaps, independent=sum(run.steps for run in runs))


def record(engine: Engine, work: Work, path: Path, tokens: int) -> dict[str, Any]:
    """Record at least `tokens` new tokens of `work`, round by round, and write them to `path`.

    Rounds with and without the recorder come in pairs, and alternately one or the other goes first.
    Then the same, in fewer rounds, without the events that time replays on the device. All rounds
    must give the same tokens; RuntimeError if not.

    cost              with events, as `Turns.cost`; the records of these rounds are in the file
    cost_without_events, host_us
                      the same without; microseconds of a step's host work, off and on: on a GPU
    range_ns          nanoseconds of one NVTX range; `ranges`: whether a tool listens to it
    """
    recorder = engine.recorder
    on_gpu = engine.memory.device.type == "cuda"
    rounds = max(LEAST_PAIRS, math.ceil(tokens / (work.live * work.new_tokens)))
    # A step has at most a decode and a drafter's replay; a prompt has a prefill for each chunk.
    chunks = work.live * (1 + work.prompt_tokens // engine.memory.prefill_ladder.sizes[0])
    sizes = {
        "capacity": max(CAPACITY, rounds * (2 * (work.new_tokens + work.live) + chunks)),
        "requests": max(4096, rounds * work.live),
    }
    expected = _round(engine, work)
    recorder.clear()
    turns = _take_turns(engine, work, rounds, expected, sizes)
    recorder.write(path)
    found = {
        "file": path.name,
        "replays": len(recorder),
        "dropped": recorder.dropped,
        "requests": len(recorder.requests()),
        "tokens": int(recorder.replays()["emitted"].sum()),
        "finished": _reasons(engine),
        "cost": turns.cost(),
        "cost_without_events": None,
        "host_us": None,
        "ranges": tracer.enabled,
        "range_ns": range_ns(),
    }
    if on_gpu:
        timeless = sizes | {"device_times": False}
        turns = _take_turns(engine, work, LEAST_PAIRS, expected, timeless)
        found["cost_without_events"] = turns.cost()
        found["host_us"] = _host_cost(engine, work, sizes)
    recorder.clear()
    return found


def _round(engine: Engine, work: Work) -> list[Result]:
    results: list[Result] = engine.generate(
        work.prompts(engine.model.config.vocab_size), work.params()
    )
    return results


def _take_turns(
    engine: Engine, work: Work, rounds: int, expected: Sequence[Result], sizes: dict[str, Any]
) -> Turns:
    turns = Turns()
    for index in range(rounds):
        for recorded in (index % 2 == 0, index % 2 == 1):
            if recorded:
                engine.recorder.start(**sizes)
            results = _round(engine, work)
            engine.recorder.stop()
            for row, pair in enumerate(zip(expected, results, strict=True)):
                require_equal(pair, f"prompt {row}, recorded or not:")
            (turns.on if recorded else turns.off).append(steady(results))
    return turns


def _host_cost(engine: Engine, work: Work, sizes: dict[str, Any]) -> dict[str, float]:
    """Median `host_us` with the recorder off and on, measured alternately."""
    off, on = [], []
    for _ in range(HOST_PAIRS):
        off.append(host_time(engine, work)["host_us"])
        engine.recorder.start(**sizes)
        on.append(host_time(engine, work)["host_us"])
        engine.recorder.stop()
    return {"off": median(off), "on": median(on)}


def _reasons(engine: Engine) -> dict[str, int]:
    reasons = engine.recorder.requests()["reason"].tolist()
    return {name: reasons.count(index) for index, name in enumerate(REASONS) if index in reasons}


def range_ns(repeats: int = 20_000) -> float:
    """Nanoseconds of one range as things are: the least of five attempts, minus an empty loop."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(5):
        started = clock()
        for _ in range(repeats):
            with span("step/plan", live=1):
                pass
        ranges = clock() - started
        started = clock()
        for _ in range(repeats):
            pass
        times.append((ranges - (clock() - started)) / repeats)
    return min(times)
