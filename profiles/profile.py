"""`graphengine profile`: an engine under Nsight Systems, under torch's profiler, or recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphengine.profiles.arguments import check_out, tell_written
from graphengine.profiles.benchmark.workload import (
    Workload,
    profiled_range,
    recorded,
)
from graphengine.profiles.nsys.nsys import run_nsys
from graphengine.profiles.nsys.torch_trace import torch_profile
from graphengine.profiles.planted import planted_engine, run_planted


def profile(options: argparse.Namespace) -> int:
    """Profile; returns the exit status, which is nsys's where it ran."""
    match options.how:
        case "nsys":
            check_out(Path(f"{options.out}.sqlite"))
            return run_nsys(
                options.words, trace=options.trace, out=options.out, whole=options.whole
            )
        case "torch":
            check_out(options.out)
            workload = Workload.read(options)
            with workload.engine() as engine, torch_profile(engine, options.out):
                workload.run(engine)
            print(f"graphengine report {options.out}, or open it in Perfetto")
        case "run":
            if options.record is not None:
                check_out(options.record, "--record")
            workload = Workload.read(options)
            with (
                workload.engine() as engine,
                profiled_range(engine),
                recorded(engine, options.record),
            ):
                workload.run(engine)
            tell_written(options.record)
        case _:
            check_out(options.record, "--record")
            if options.steps < 1:
                raise ValueError(f"--steps {options.steps} must be at least 1")
            with planted_engine(
                options.cause, shape=options.shape, device=options.device
            ) as engine:
                run_planted(engine, options.cause, options.steps)
                engine.recorder.write(options.record)
            print(f"graphengine report {options.record}")
    return 0
