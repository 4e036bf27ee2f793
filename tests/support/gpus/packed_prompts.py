"""What packing prompts gains, and what its products cost.

python tests/support/gpus/packed_prompts.py --out packed.jsonl
python tests/support/gpus/packed_prompts.py --parts prompts --shape tiny --device cpu

products  microseconds of `linear_chunk` with each of its tiles, and of cuBLAS, by lanes; the
          weights come from memory, not from the cache
prompts   milliseconds until all prompts that were submitted together have their first tokens,
          and one prompt alone, of an engine that feeds one prompt a prefill and of one that
          feeds eight; both in one process
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from graphengine import Engine, SamplingParams
from graphengine.kernels.linear.prefill.linear_chunk import linear_chunk, tile_outputs
from graphengine.observe.environment import environment
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject

MODULE = importlib.import_module("graphengine.kernels.linear.prefill.linear_chunk")
# Rows and columns of llama-8b's QKV, output, gates and ups, and down; and of llama-1b's.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (2048, 8192))
LANES = (16, 128, 512, 1024, 4096)
WIDTHS = (64, 128, 256)
# More bytes than the cache of an H200 holds, 50 MB.
FLUSHED = 128 * 2**20
LAUNCHES, RUNS = 24, 8
PROMPTS = 8


def time_of(call: Callable[[int], object], copies: int) -> float:
    """Microseconds of a launch in a graph of many, which read the copies of a weight in turn: the
    median of some replays.
    """
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in range(LAUNCHES):
            call(run % copies)
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / LAUNCHES)
    return round(statistics.median(times[RUNS // 4 :]), 1)


def product_times(x: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """Of cuBLAS, and of each tile, with copies of one weight."""
    out = x.new_empty(len(x), weights.shape[1])

    def blas(copy: int) -> None:
        torch.mm(x, weights[copy].t(), out=out)

    def own(copy: int) -> None:
        linear_chunk(x, weights[copy], out=out)

    times = {"cublas": time_of(blas, len(weights))}
    try:
        for width in WIDTHS:
            MODULE.tile_outputs = lambda *sizes, width=width: width
            times[f"tile_{width}"] = time_of(own, len(weights))
    finally:
        MODULE.tile_outputs = tile_outputs
    return times


def products() -> Iterator[dict[str, Any]]:
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for M, K in SHAPES:
        copies = max(2, -(-FLUSHED // (2 * M * K)))
        weights = torch.randn(copies, M, K, device="cuda", dtype=torch.bfloat16)
        for lanes in LANES:
            x = torch.randn(lanes, K, device="cuda", dtype=torch.bfloat16)
            size = {"rows": M, "columns": K, "lanes": lanes}
            yield size | {"chosen": tile_outputs(lanes, M, processors)} | product_times(x, weights)


def first_tokens_ms(engine: Engine, prompts: int, length: int) -> float:
    """Median time from the first `submit` until the last prompt has its first token."""
    found = []
    for run in range(1 + 5):
        begun = time.perf_counter()
        requests = [
            engine.submit(
                [5 + (run + 7 * number + place) % 200 for place in range(length)],
                SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
            )
            for number in range(prompts)
        ]
        while not all(request.token_ids for request in requests):
            engine.step()
        found.append(1e3 * (time.perf_counter() - begun))
        while engine.busy:
            engine.step()
    return round(statistics.median(found[1:]), 3)


def prompts_of(shape: str, device: str) -> Iterator[dict[str, Any]]:
    positions = Subject.of_shape(shape).model.max_positions
    lengths = [length for length in (20, 128, 1024, 8192) if length + 4 <= positions]
    for packed in (1, PROMPTS):
        options = {
            "device": device,
            "dtype": "bfloat16",
            "max_batch": PROMPTS,
            "max_seq_len": lengths[-1] + 4,
            "prompts_per_prefill": packed,
        }
        engine, _ = build_engine(Subject.of_shape(shape), options)
        with engine:
            for length in lengths:
                together = PROMPTS if length <= 1024 else 1
                alone = first_tokens_ms(engine, 1, length)
                all_ms = first_tokens_ms(engine, together, length) if together > 1 else None
                yield {
                    "prompts_per_prefill": packed,
                    "prompt": length,
                    "alone_ms": alone,
                    "together": together,
                    "all_ms": all_ms,
                    "packed_chunks": engine.counters["packed_chunks"],
                }
        gc.collect()


def measured(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured, and its figures."""
    if "products" in options.parts:
        yield from (("product", row) for row in products())
    if "prompts" in options.parts:
        for shape in options.shape:
            yield from ((shape, row) for row in prompts_of(shape, options.device))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parts = ("products", "prompts")
    parser.add_argument("--parts", nargs="+", default=[*parts], choices=[*parts])
    parser.add_argument("--shape", nargs="+", default=["llama-1b", "llama-8b"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each")
    options = parser.parse_args(arguments)
    for what, row in measured(options):
        facts = {"what": what, **row}
        print(json.dumps(facts), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                line = facts | {"environment": environment(options.device)}
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
