"""`graphengine ops`: the launches of an engine's steps, kernel by kernel."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict

from graphengine.cli.given import open_engine, read_engine_options
from graphengine.config import EngineConfig
from graphengine.core.recorded_rows import record_rows
from graphengine.engine import Engine
from graphengine.observe.op_table import OpRow
from graphengine.program.graph_key import GraphKey


def ops(options: argparse.Namespace) -> None:
    """Print the launches of each graph's step, without launching any."""
    ranks = EngineConfig(**read_engine_options(options)).ranks
    if ranks > 1:
        raise ValueError(f"ops shows what one GPU launches, and {ranks} ranks were asked for")
    with open_engine(options) as engine:
        tables = engine_ops(engine, options.graph)
        device = engine.memory.device.type
    note = "as an H200 would launch them, with plans for a CPU" if device == "cpu" else ""
    show_tables(tables, note, json_only=options.json)


def show_tables(tables: Mapping[str, list[OpRow]], note: str, *, json_only: bool) -> None:
    """Print the launches of each graph by name, after a note where there is one."""
    if json_only:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}))
        return
    if note:
        print(f"{note}\n")
    print("\n\n".join(_text(name, rows) for name, rows in tables.items()))


def chosen_graphs(keys: Collection[GraphKey], graph: str | None) -> list[GraphKey]:
    """The graph of this name, or all; ValueError with their names where there is none."""
    chosen = [key for key in keys if graph is None or key.name == graph]
    if not chosen:
        raise ValueError(f"--graph {graph}: the graphs are {', '.join(key.name for key in keys)}")
    return chosen


def engine_ops(engine: Engine, graph: str | None) -> dict[str, list[OpRow]]:
    """The launches of one graph or of all, by name; see `record_rows`."""
    chosen = chosen_graphs(engine.memory.graphs, graph)
    rows = record_rows(engine.runtime, engine.memory, chosen)
    return {key.name: of_graph for key, of_graph in rows.items()}


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
