"""Microseconds of a prefill product with packed weights, for each kernel that can serve it.

    python tests/support/gpus/chunk_times.py --out chunks.json

The kernels are Hopper's, the portable one that other GPUs run, and the PyTorch reference; beside
them is cuBLAS with the weight in bfloat16. Needs a Hopper GPU, as only there all of them run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from graphengine.kernels.linear.packed import PackedWeight, pack
from graphengine.kernels.linear.prefill.packed_chunk import (
    decode_chunk,
    packed_chunk_product,
    packed_chunk_reference,
)
from graphengine.kernels.linear.quantised import dequantise
from graphengine.observe.environment import environment
from launches.quantised import inputs_of, random_quantised, to_device

FORMATS = ("e4m3", "e4m3 in blocks", "int8", "int4", "mxfp4", "nvfp4")
# Rows and columns of Llama 8B's gates and ups, and of its down projection.
SHAPES = ((28672, 4096), (4096, 14336))
LANES = (16, 64, 256, 1024)
RUNS, LAUNCHES = 5, 10


def time_of(call: Callable[[], object]) -> float:
    """The median of a few runs, each of several launches in a row."""
    call()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / LAUNCHES)
    return round(statistics.median(times), 1)


def measure(x: torch.Tensor, weight: PackedWeight, whole: torch.Tensor) -> dict[str, float]:
    """Times by kernel, after their outputs were compared."""
    out, other, plain = (x.new_empty(len(x), len(whole)) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "hopper": lambda: packed_chunk_product(x, weight, None, out=out),
        "portable": lambda: decode_chunk(x, weight, None, out=other),
        "reference": lambda: packed_chunk_reference(x, weight, None, out=plain),
        "cublas_bf16": lambda: torch.mm(x, whole.t()),
    }
    times = {kernel: time_of(call) for kernel, call in calls.items()}
    for result in (out, other):
        torch.testing.assert_close(result, plain, rtol=0.02, atol=0.02)
    return times


def measure_shape(name: str, rows: int, columns: int) -> list[dict[str, Any]]:
    """A row for each number of lanes."""
    quantised = random_quantised(name, rows, columns)
    floats = dequantise(quantised)
    weight = to_device(pack(quantised), "cuda")
    whole = floats.to("cuda", torch.bfloat16)
    found = []
    for lanes in LANES:
        times = measure(inputs_of(floats, lanes, torch.bfloat16).cuda(), weight, whole)
        found.append({"format": name, "rows": rows, "columns": columns, "lanes": lanes, **times})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = []
    for name in options.formats:
        for rows, columns in SHAPES:
            found += measure_shape(name, rows, columns)
            for row in found[-len(LANES) :]:
                print(json.dumps(row), flush=True)
    options.out.write_text(
        json.dumps({"rows": found, "environment": environment("cuda")}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
