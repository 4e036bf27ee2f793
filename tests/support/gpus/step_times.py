"""Median steps of a few engines with random weights, and their tokens, with the Triton at hand.

    python tests/support/gpus/step_times.py --out times.jsonl
    PYTHONPATH=/folder/of/another/triton python tests/support/gpus/step_times.py --out times.jsonl

To compare versions run them in turn on one GPU: a line for each engine names the versions. With
--kernels the line also has the time of each kernel, from an engine without programmatic dependent
launch, whose kernels do not overlap.

With --driver-divides no kernel asks for cache (`prefer_cache`): the driver divides the memory of
multiprocessors as it would by itself.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from graphengine import Engine, SamplingParams
from graphengine.buckets.graphs import carveouts
from graphengine.observe.environment import environment
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.kernel_times import decode_launches, kernel_times
from graphengine.profiles.benchmark.measure import Work
from graphengine.profiles.benchmark.shapes import Subject

ENGINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-1b": ("llama-1b", {}),
    "llama-8b in fp8": ("llama-8b", {"quantize": "fp8"}),
    "llama-8b": ("llama-8b", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "qwen3-0.6b": ("qwen3-0.6b", {}),
    "llama-1b, 8 rows": ("llama-1b", {"max_batch": 8}),
    "qwen3-0.6b, 8 rows": ("qwen3-0.6b", {"max_batch": 8}),
    "llama-8b, 8 rows": ("llama-8b", {"max_batch": 8}),
    "llama-8b in int4": ("llama-8b", {"quantize": "int4"}),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "gpt-oss-20b, 8 rows": ("gpt-oss-20b", {"max_batch": 8}),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "qwen3.5-4b": ("qwen3.5-4b", {}),
    "llama-8b, 8,192 tokens, dot": ("llama-8b", {"max_seq_len": 8704, "row_family": "dot"}),
    "llama-8b, 8,192 tokens, fma": ("llama-8b", {"max_seq_len": 8704, "row_family": "fma"}),
    "tiny": ("tiny", {}),
}
SIZES = {"max_batch": 1, "max_seq_len": 512, "prefill_buckets": (64,)}
RUNS, TOKENS = 3, 400
# The first steps still fill the pipeline, the last ones are decided on the host.
_FIRST, _LAST = 40, 10


def run(engine: Engine) -> tuple[float, list[int]]:
    """Microseconds of a step with greedy requests in all rows, the median; the first's tokens."""
    drawn = torch.Generator().manual_seed(100)
    most = engine.model.config.vocab_size
    length = max(40, engine.config.max_seq_len - TOKENS - 112)
    prompt = torch.randint(5, most, (length,), generator=drawn).tolist()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    request, *_ = [engine.submit(prompt[row:], params) for row in range(engine.config.max_batch)]
    ends = []
    while engine.busy:
        engine.step()
        ends.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ends)]
    tokens = [int(token) for token in request.result().token_ids]
    return 1e6 * statistics.median(gaps[_FIRST:-_LAST]), tokens


def measure(name: str, device: str) -> dict[str, Any]:
    shape, options = ENGINES[name]
    engine, start = build_engine(
        Subject.of_shape(shape), {"device": device, "dtype": "bfloat16", **SIZES, **options}
    )
    with engine:
        found = [run(engine) for _ in range(RUNS)]
        report = engine.report().kernels
    steps, tokens = zip(*found, strict=True)
    digests = [hashlib.sha256(json.dumps(each).encode()).hexdigest()[:12] for each in tokens]
    return {
        "engine": name,
        "step_us": [round(step, 2) for step in steps],
        "tokens": digests,
        "first_tokens": tokens[0][:12],
        "opened_s": round(start.total_s, 1),
        "kernels": report,
        "environment": environment(device),
    }


def kernels(name: str, device: str) -> list[list[Any]] | None:
    """Name, part, launches a step and microseconds a launch of each kernel; None on a CPU."""
    shape, options = ENGINES[name]
    engine, _ = build_engine(
        Subject.of_shape(shape),
        {"device": device, "dtype": "bfloat16", "pdl": False, "lookahead": 0, **SIZES, **options},
    )
    with engine:
        work = Work(live=1, prompt_tokens=40, new_tokens=64, runs=1)
        found = kernel_times(engine, work, decode_launches(engine))
    return found and [[k.name, k.part, k.count, round(k.mean_us, 3)] for k in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=[*ENGINES])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel")
    parser.add_argument("--driver-divides", action="store_true", help="no kernel asks for cache")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each")
    options = parser.parse_args(arguments)
    if options.driver_divides:
        carveouts.wants_cache = lambda needs, multiprocessors: False
    for name in options.engines:
        found = measure(name, options.device) | {"driver_divides": options.driver_divides}
        if options.kernels:
            gc.collect()
            found["kernel_us"] = kernels(name, options.device)
        line = json.dumps(found)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
