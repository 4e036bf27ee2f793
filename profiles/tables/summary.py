"""The ten figures at the head of docs/numbers.md, each taken from a committed result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Document = Mapping[str, Any]
BENCH = "graphengine bench --shape"


class Figure(NamedTuple):
    """One row of the summary.

    what     was measured
    result   the file's name, without `.json`
    read     the figure, with its unit, from the file's document
    command  that repeats it
    """

    what: str
    result: str
    read: Callable[[Document], str]
    command: str


def _row(document: Document, live: int) -> Mapping[str, Any]:
    """The first row where `live` requests decode in an engine of `live` slots."""
    rows: list[Mapping[str, Any]] = document["rows"]
    return next(row for row in rows if row["live"] == row["max_batch"] == live)


def _step(live: int) -> Callable[[Document], str]:
    return lambda document: f"{_row(document, live)['ms_per_step']:.3g} ms a step"


def _first_token(document: Document) -> str:
    return f"{_row(document, 1)['ttft_ms']['1024']:.3g} ms"


def _at_context(context: int) -> Callable[[Document], str]:
    def read(document: Document) -> str:
        cells: list[Mapping[str, Any]] = document["contexts"]["cells"]
        cell = next(one for one in cells if (one["live"], one["context"]) == (1, context))
        return f"{cell['ms_per_step']:.3g} ms a step"

    return read


def _tail(document: Document) -> str:
    found = _row(document, 1)["long"]
    return f"{found['p99.9/p50']:.3g} times the median, of {found['itl_ms']['n']:,} gaps"


def _drafts(document: Document) -> str:
    row = next(one for one in document["rows"] if one["temperature"] == 0.0)
    return f"{row['acceptance']['mean_length']:.2g} tokens a step"


FIGURES = (
    Figure(
        "Llama 3.2 1B, 1 request",
        "bench-llama-1b-h200",
        _step(1),
        f"{BENCH} llama-1b --batch 1,8,32 --long 10000",
    ),
    Figure(
        "Llama 3.2 1B, p99.9 of the time between tokens",
        "bench-llama-1b-h200",
        _tail,
        f"{BENCH} llama-1b --long 10000",
    ),
    Figure(
        "Llama 3.1 8B, 1 request", "bench-llama-8b-h200", _step(1), f"{BENCH} llama-8b --batch 1"
    ),
    Figure(
        "Llama 3.1 8B, 8 requests", "bench-llama-8b-h200", _step(8), f"{BENCH} llama-8b --batch 8"
    ),
    Figure(
        "Llama 3.1 8B, 1 request after 32,768 tokens",
        "bench-llama-8b-context-h200",
        _at_context(32768),
        f"{BENCH} llama-8b --batch 1 --context 32768",
    ),
    Figure(
        "Llama 3.1 8B, first token after a prompt of 1,024",
        "bench-llama-8b-h200",
        _first_token,
        f"{BENCH} llama-8b --batch 1 --ttft-tokens 1024",
    ),
    Figure(
        "Llama 3.1 8B with weights rounded to int4, 1 request",
        "bench-llama-8b-int4-h200",
        _step(1),
        f"{BENCH} llama-8b --batch 1 --quantize int4",
    ),
    Figure(
        "Llama 3.1 8B split between two GPUs, 1 request",
        "bench-llama-8b-2-gpus-h200",
        _step(1),
        f"{BENCH} llama-8b --batch 1 --tensor-parallel 2",
    ),
    Figure(
        "Llama 3 70B split among four GPUs, 1 request",
        "bench-llama-70b-4-gpus-h200",
        _step(1),
        f"{BENCH} llama-70b --batch 1 --tensor-parallel 4",
    ),
    Figure(
        "the demo model with its own three drafts, greedy, on held-out text",
        "acceptance-demo-h200",
        _drafts,
        "graphengine acceptance --speculative mtp:3 --temperature 0",
    ),
)


def summary(results: Path) -> str:
    """The table, in Markdown. OSError where a result is missing."""
    lines = ["| what | on | figure | how to repeat it |", "|---|---|---|---|"]
    for figure in FIGURES:
        path = results / f"{figure.result}.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["rows"] or document["contexts"]["cells"]
        device = document["environment"]["device"].removeprefix("NVIDIA ")
        count = max(1, *(row.get("engine", {}).get("tensor_parallel", 1) for row in rows))
        where = f"{count} x {device}"
        lines.append(f"| {figure.what} | {where} | {figure.read(document)} | `{figure.command}` |")
    return "\n".join(lines)
