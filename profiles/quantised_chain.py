"""How fast linears with weights of 8 or 4 bits are: a chain of layers in one graph, against bf16.

    python -P -m graphengine.profiles.quantised_chain --shape llama-8b --kind int4 --family fma \\
        --rows 1 --seconds 30 --out chain.json

The chain is that of `graphengine tune`: [qkv, output, gate_up, down] of a few layers with PDL,
without attention, over more weights than L2 holds. The plan of one linear at a time is replaced,
down first, and the fastest stays; then the chain is measured against bf16 in the same process. What
is compared is replayed alternately. `us` is a layer's median, `share` its part of what this device
reads in that time. A plan whose outputs differ from the reference is refused.

On a CPU the references run in place of kernels, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import triton

from graphengine.buckets import CapturedGraph
from graphengine.config import DTYPES
from graphengine.kernels import FMA_LANES, MAX_LANES, RowFamily
from graphengine.kernels.core.launching import compile_kernels
from graphengine.models import tuning
from graphengine.models.contract import LinearPlans, ModelConfig
from graphengine.observe.environment import environment
from graphengine.profiles.arguments import check_out, integers, write_out
from graphengine.profiles.benchmark.ceiling import ReadCeiling, measure_read_ceiling
from graphengine.profiles.benchmark.shapes import NAMES, linear_bytes, model_shape
from graphengine.profiles.tuning.chain_bench import (
    CHAIN_BYTES,
    ChainBench,
    chain_layers,
    chain_model,
)
from graphengine.profiles.tuning.packed_chain import (
    KINDS,
    PackedChain,
    PackedKind,
    candidate_plans,
    packed_plans,
)

SCHEMA = 1
ORDER = ("down", "gate_up", "qkv", "output")
# Error over the size of the outputs, after three rounded products.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
REPLAYS = 15
_BATCH = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A chain with these plans. Without a GPU there is no time."""

    plans: LinearPlans
    us: float | None = None
    refused: str | None = None


class Search:
    """Coordinate descent over the plans of a packed chain."""

    def __init__(
        self, chain: PackedChain, kind: PackedKind, family: RowFamily, rows: int, limit: int
    ) -> None:
        self.chain, self.kind, self.family, self.rows, self.limit = chain, kind, family, rows, limit
        self.plans = packed_plans(chain.config, kind.format, family)
        self.tried: dict[str, list[Measured]] = {}
        self.device = next(iter(chain.weights.values())).codes.device

    def candidates(self, name: str) -> list[LinearPlans]:
        """The plans in use, and others with another plan for this linear."""
        each = self.chain.linears[name]
        grid = candidate_plans(self.kind, each.rows, each.columns, self.family, self.rows)
        # Evenly over the grid, whose neighbours are alike.
        step = max(1, math.ceil(len(grid) / self.limit))
        chosen = [self.plans[name], grid[0], *grid[1::step]]
        return [self.plans.replace({name: plan}) for plan in dict.fromkeys(chosen)]

    def step(self, name: str, deadline: float) -> None:
        """Measure a linear's candidates in place; the fastest stays."""
        found: list[Measured] = []
        kept, *others = self.candidates(name)
        best = kept
        for start in range(0, len(others), _BATCH):
            if time.monotonic() >= deadline:
                break
            batch = [kept, *others[start : start + _BATCH]]
            measured = self.measure(batch)
            found += measured
            times = {each.plans: each.us for each in measured if each.us is not None}
            if kept in times:
                kept = min(times, key=lambda plans: times[plans])
                best = kept
        self.tried[name] = found
        self.plans = best

    def measure(self, variants: Sequence[LinearPlans]) -> list[Measured]:
        """Check variants against the references, and time those that agree."""
        runs = {plans: partial(self.chain.run, plans, self.rows) for plans in variants}
        reasons = {plans: self._failure(plans) for plans in self._compiled(runs)}
        good = [plans for plans in variants if reasons[plans] is None]
        times = alternating_times([runs[plans] for plans in good], self.device)
        layers = self.chain.layers
        us = {plans: t / layers for plans, t in zip(good, times, strict=True) if t is not None}
        return [Measured(plans=p, us=us.get(p), refused=reasons[p]) for p in variants]

    def _compiled(
        self, runs: Mapping[LinearPlans, Callable[[], None]]
    ) -> Mapping[LinearPlans, Callable[[], None]]:
        """The same, with their kernels in memory: compiled side by side. Failures show later."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                compile_kernels({str(i): run for i, run in enumerate(runs.values())})
        return runs

    def _failure(self, plans: LinearPlans) -> str | None:
        allowed = TOLERANCE[self.chain.dtype]
        try:
            error = self.chain.error(plans, self.rows)
        except (triton.TritonError, RuntimeError) as failure:
            return str(failure) or type(failure).__name__
        return None if error <= allowed else f"off by {error:.2g} > {allowed:.2g}"


def alternating_times(
    runs: Sequence[Callable[[], None]], device: torch.device, *, replays: int = REPLAYS
) -> list[float | None]:
    """Median microseconds of runs, captured and replayed alternately; None without a GPU."""
    if device.type != "cuda":
        return [None for _ in runs]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    event = partial(torch.cuda.Event, enable_timing=True)
    with contextlib.ExitStack() as stack:
        graphs = []
        for run in runs:
            graph = CapturedGraph(run, name="chain", device=device, stream=stream, warmups=1)
            stack.callback(graph.close)
            graph.capture()
            graphs.append(graph)
        turns = [[(event(), event()) for _ in graphs] for _ in range(1 + replays)]
        for turn in turns:
            for graph, (start, end) in zip(graphs, turn, strict=True):
                start.record(stream)
                graph.replay()
                end.record(stream)
        stream.synchronize()
    of_graphs = zip(*turns[1:], strict=True)
    return [1e3 * median(a.elapsed_time(b) for a, b in pairs) for pairs in of_graphs]


def measure(
    config: ModelConfig,
    kind_name: str,
    family: RowFamily,
    rows: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    candidates: int,
) -> dict[str, Any]:
    """What the module says, as it is written to the file."""
    kind = KINDS[kind_name]
    deadline = time.monotonic() + seconds
    bits = kind.format.bits
    weights = _layer_bytes(config, 1) * bits / 8
    layers = max(2, min(config.num_layers, math.ceil(CHAIN_BYTES / weights)))
    if device.type != "cuda":
        layers = 2
    chain = PackedChain(config, kind, dtype, device, layers=layers, rows=rows)
    search = Search(chain, kind, family, rows, candidates)
    ceiling = measure_read_ceiling(device)
    for name in ORDER:
        search.step(name, deadline)
    heuristic = packed_plans(config, kind.format, family)
    finalists = list(dict.fromkeys([search.plans, heuristic]))
    checked = {each.plans: each.refused for each in search.measure(finalists)}
    plain_layers = 2 if device.type != "cuda" else chain_layers(config, dtype)
    plain, plain_plans = _plain_run(config, family, rows, dtype, device, plain_layers)
    runs = [partial(chain.run, plans, rows) for plans in finalists if checked[plans] is None]
    plain_us, *times = alternating_times([plain, *runs], device, replays=3 * REPLAYS)
    plain_bytes = _layer_bytes(config, dtype.itemsize)
    final = [plans for plans in finalists if checked[plans] is None]
    return {
        "schema": SCHEMA,
        "environment": environment(str(device)),
        "kind": kind_name,
        "format": kind.format._asdict(),
        "family": family,
        "rows": rows,
        "read_ceiling_tb_s": None if ceiling is None else ceiling.tb_s,
        "plain": _figures(plain_us, plain_layers, plain_bytes, ceiling, plain_plans),
        "packed": [
            _figures(us, layers, chain.layer_bytes, ceiling, plans)
            for us, plans in zip(times, final, strict=True)
        ],
        "refused": [reason for reason in checked.values() if reason is not None],
        "tried": {name: _tried(name, found) for name, found in search.tried.items()},
    }


def _layer_bytes(config: ModelConfig, itemsize: int) -> int:
    weights = linear_bytes(config, itemsize)
    return sum(weights.values()) - weights["lm_head"]


def _plain_run(
    config: ModelConfig,
    family: RowFamily,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: int,
) -> tuple[Callable[[], None], LinearPlans]:
    """The same chain with weights of the model's dtype, with the plans that an engine takes."""
    bench = ChainBench(chain_model(config, dtype, device, layers=layers), (rows,))
    plans, _ = tuning.choose_plans(config.linears, dtype, family, device)
    return partial(bench.run, plans, rows, layers=layers, head=False), plans


def _figures(
    us: float | None, layers: int, layer_bytes: int, ceiling: ReadCeiling | None, plans: LinearPlans
) -> dict[str, Any]:
    """Of a chain: microseconds and bytes of a layer, and the share of the device's read rate."""
    layer_us = None if us is None else us / layers
    share = None
    if ceiling is not None and layer_us is not None:
        share = layer_bytes / (ceiling.tb_s * 1e6) / layer_us
    named = {name: list(plan) for name, plan in plans.items() if name != "lm_head"}
    return {"us": layer_us, "bytes": layer_bytes, "share": share, "plans": named}


def _tried(name: str, found: Sequence[Measured]) -> list[dict[str, Any]]:
    ranked = sorted(found, key=lambda each: math.inf if each.us is None else each.us)
    return [
        {"plan": list(each.plans[name]), "us": each.us, "refused": each.refused} for each in ranked
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; errors in what the user asked for end it with a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--shape", choices=NAMES, required=True)
    add("--kind", nargs="+", choices=tuple(KINDS), required=True)
    add("--family", choices=get_args(RowFamily), required=True)
    add("--rows", default="1", help="to measure at, each by itself, such as 8,32")
    add("--seconds", type=float, default=30.0, help="a kind and number of rows")
    add("--candidates", type=int, default=24, help="plans to try for a linear, at most")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add("--device", default="cuda")
    add("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        rows = integers(options.rows, "rows")
        most = FMA_LANES if options.family == "fma" else MAX_LANES
        if max(rows) > most:
            raise ValueError(f"--rows {options.rows}: {options.family} serves up to {most}")
        if options.seconds <= 0 or options.candidates < 1:
            raise ValueError(f"{options.seconds=} and {options.candidates=} must be positive")
        if options.out is not None:
            check_out(options.out)
    except ValueError as error:
        parser.error(str(error))
    found = []
    for kind in options.kind:
        for count in rows:
            result = measure(
                model_shape(options.shape),
                kind,
                options.family,
                count,
                dtype=DTYPES[options.dtype],
                device=torch.device(options.device),
                seconds=options.seconds,
                candidates=options.candidates,
            )
            found.append({"shape": options.shape, **result})
            print(_line(found[-1]), flush=True)
            if options.out is not None:
                # After each, so that what was measured is kept if a machine goes away.
                write_out(options.out, json.dumps(found, indent=1) + "\n")


def _line(result: Mapping[str, Any]) -> str:
    def said(figures: Mapping[str, Any]) -> str:
        if figures["us"] is None:
            return "not timed"
        return f"{figures['us']:.1f} us a layer ({figures['share']:.0%} of the ceiling)"

    best, *others = result["packed"] or [{"us": None}]
    return (
        f"{result['shape']} {result['kind']} {result['family']} {result['rows']} rows: {said(best)}"
        + "".join(f", heuristic {said(each)}" for each in others)
        + f", {'plain':s} {said(result['plain'])}"
    )


if __name__ == "__main__":
    main()
