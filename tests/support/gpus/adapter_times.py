"""What LoRA adapters cost a decode step: a shape without slots, with slots, and with an adapter.

    python tests/support/gpus/adapter_times.py --out adapters.jsonl
    python tests/support/gpus/adapter_times.py --shape tiny --device cpu

All linears of all layers have slots of one rank. The three are measured in turn in one process, so
their ratios hold where absolute times move from machine to machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from checkpoints.adapters import write_adapter
from graphengine import Engine, SamplingParams
from graphengine.observe.environment import environment
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.benchmark.stored_shape import stored_shape

TOKENS, RUNS = 200, 3
# The first steps still fill the pipeline, the last ones are decided on the host.
_FIRST, _LAST = 40, 10


def step_us(engine: Engine, rows: int, adapter: str | None) -> list[float]:
    """The median step of each run, in microseconds, with `rows` requests that use the adapter."""
    medians = []
    for _ in range(RUNS):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        for row in range(rows):
            engine.submit([*range(5, 45 + row)], params, adapter=adapter)
        ends = []
        while engine.busy:
            engine.step()
            ends.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(ends)][_FIRST:-_LAST]
        medians.append(round(1e6 * statistics.median(gaps), 1))
    return medians


def measure(shape: str, rank: int, rows: int, device: str) -> dict[str, Any]:
    """Steps of `rows` rows of a shape with random weights, and their ratios."""
    sizes = {"max_batch": rows, "max_seq_len": 512, "prefill_buckets": (64,)}
    options = {"device": device, "dtype": "bfloat16", **sizes}
    slots = {"max_adapters": 4, "max_adapter_rank": rank}
    found: dict[str, Any] = {"shape": shape, "rank": rank, "rows": rows}
    with stored_shape(Subject.of_shape(shape)) as subject, TemporaryDirectory() as folder:
        assert subject.checkpoint is not None
        adapter = write_adapter(Path(folder) / "a", subject.checkpoint, rank=rank)
        plain, _ = build_engine(subject, options)
        with plain:
            found["without_slots_us"] = step_us(plain, rows, None)
        adapted, _ = build_engine(subject, options | slots)
        with adapted:
            adapted.load_adapter("a", adapter)
            found["no_adapter_us"] = step_us(adapted, rows, None)
            found["adapter_us"] = step_us(adapted, rows, "a")
    base = statistics.median(found["without_slots_us"])
    for kind in ("no_adapter", "adapter"):
        found[f"{kind}_ratio"] = round(statistics.median(found[f"{kind}_us"]) / base, 4)
    return found | {"environment": environment(device)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each")
    options = parser.parse_args(arguments)
    for rows in options.rows:
        line = json.dumps(measure(options.shape, options.rank, rows, options.device))
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
