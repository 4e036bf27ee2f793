"""The time that an opening engine takes to trace the launches of its steps, on this CPU.

Usage: python -m graphengine.profiles.plan_time --shape llama-8b

The steps of all graphs are traced over tensors without memory, as an H200 would launch them, and no
GPU is needed. The first time counts when an engine opens: it has the imports and what is kept
afterwards.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from graphengine import EngineConfig
from graphengine.kernels.core.devices import H200, assumed
from graphengine.opening.budget.footprint import trace_footprint
from graphengine.opening.budget.memory_plan import UNLIMITED, plan_memory
from graphengine.opening.budget.sketch import sketch_steps
from graphengine.opening.budget.workspace import UNLISTED, Footprint
from graphengine.profiles.benchmark.engines import random_drafter, rounded_model
from graphengine.profiles.benchmark.shapes import Subject
from graphengine.profiles.shape_configs import NAMES

_TIMES = 5


def traced(shape: str, rows: int, max_seq_len: int) -> tuple[float, Footprint]:
    """Milliseconds of the whole trace of an engine, and its result."""
    config = EngineConfig(device="cpu", dtype="bfloat16", max_batch=rows, max_seq_len=max_seq_len)
    subject = Subject.of_shape(shape)
    model, drafter = rounded_model(subject.model, config), random_drafter(subject, config)
    sizes = plan_memory(
        model,
        config,
        checkpoint_dtype=torch.bfloat16,
        drafter=drafter,
        footprint=UNLISTED,
        room=UNLIMITED,
    )
    started = time.perf_counter()
    with assumed(H200):
        found = trace_footprint(sketch_steps(model, sizes, config, drafter))
    return 1e3 * (time.perf_counter() - started), found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shape", default="llama-8b", choices=NAMES)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    options = parser.parse_args(arguments)
    sizes = options.shape, options.max_batch, options.max_seq_len
    (first, found), *others = (traced(*sizes) for _ in range(1 + _TIMES))
    later = min(milliseconds for milliseconds, _ in others)
    print(
        f"{options.shape}, {options.max_batch} rows: {first:.0f} ms, then {later:.0f} ms; "
        f"{found.nodes:,} nodes, {found.workspace:,} bytes of intermediates"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
