"""`graphengine ops`: what the steps of an engine launch, kernel by kernel."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict

from torch import Tensor

from graphengine.cli.given import open_engine, read_engine_options
from graphengine.config import EngineConfig
from graphengine.engine import Engine
from graphengine.kernels import H200, PackedWeight, assumed
from graphengine.observe.op_table import OpRow, op_rows
from graphengine.opening.allocation import graph_steps
from graphengine.program.schedule import record_schedule


def ops(options: argparse.Namespace) -> None:
    """Print the launches of each graph's step; none is made."""
    ranks = EngineConfig(**read_engine_options(options)).ranks
    if ranks > 1:
        raise ValueError(f"ops shows what one GPU launches, and {ranks} ranks were asked for")
    with open_engine(options) as engine:
        tables = engine_ops(engine, options.graph)
        device = engine.memory.device.type
    if options.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}))
        return
    if device == "cpu":
        print("as an H200 would launch them, with plans for a CPU\n")
    print("\n\n".join(_text(name, rows) for name, rows in tables.items()))


def engine_ops(engine: Engine, graph: str | None) -> dict[str, list[OpRow]]:
    """The launches of one graph or of all, by name; on a CPU those that an H200 would be given.

    The engine must be new, or can only be closed afterwards: its static buffers are reset.
    """
    runtime = engine.runtime
    steps = graph_steps(runtime.program, engine.memory)
    if graph is not None:
        names = [key.name for key in steps]
        steps = {key: step for key, step in steps.items() if key.name == graph}
        if not steps:
            raise ValueError(f"--graph {graph}: the graphs are {', '.join(names)}")
    on_gpu = engine.memory.device.type == "cuda"
    with nullcontext() if on_gpu else assumed(H200):
        schedule = record_schedule(steps)
    runtime.buffers.reset()
    caches = [cache for cache, _ in runtime.caches]
    weights = _named_weights(engine)
    return {key.name: op_rows(ops, weights, caches) for key, ops in schedule.items()}


def _named_weights(engine: Engine) -> dict[str, Tensor]:
    """Every weight tensor of the model, by the name of the first checkpoint tensor in it."""
    held = engine.model.weights
    named = dict(held.named())
    for linear in held.linears():
        if isinstance(linear.weight, PackedWeight):
            name = linear.parts[0][0]
            fields = zip(linear.weight._fields, linear.weight, strict=True)
            named |= {f"{name}.{field}": each for field, each in fields if isinstance(each, Tensor)}
    return named


def _text(name: str, rows: list[OpRow]) -> str:
    head = ("stage", "kernel", "grid", "threads", "weights, bytes")
    cells = [
        (
            row.stage,
            row.kernel,
            "x".join(map(str, row.grid)),
            str(row.threads),
            f"{row.weight_bytes:,}" if row.weight_bytes else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *cells)
    ]
    total = sum(row.weight_bytes for row in rows)
    return "\n".join([f"{name}: {len(rows)} launches, {total:,} bytes of weights", *lines])
