"""`graphengine profile`: an engine under Nsight Systems, under torch's profiler, or recorded."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphengine.profiles.arguments import check_out, tell_written
from graphengine.profiles.benchmark.workload import (
    Workload,
    add_workload_arguments,
    profiled_range,
    recorded,
)
from graphengine.profiles.nsys.nsys import TRACES, run_nsys
from graphengine.profiles.nsys.torch_trace import torch_profile
from graphengine.profiles.planted import CAUSES, planted_engine, run_planted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine profile` and its subcommands."""
    commands = parser.add_subparsers(required=True, metavar="how", dest="how")
    nsys = commands.add_parser(
        "nsys", help="run a command under nsys, or show how to", description=run_nsys.__doc__
    )
    nsys.add_argument(
        "--trace",
        choices=tuple(TRACES),
        default="graph",
        help="; ".join(f"{name}: {what}" for name, what in TRACES.items()),
    )
    nsys.add_argument(
        "--out",
        type=Path,
        default=Path("profile"),
        help="path and name of the output files",
    )
    nsys.add_argument(
        "--whole",
        action="store_true",
        help="profile the whole command, not only its profiled range",
    )
    nsys.add_argument("words", nargs="*", metavar="command", help="command to profile, after --")
    traced = commands.add_parser(
        "torch", help="write a Chrome trace with torch's profiler, for Perfetto"
    )
    add_workload_arguments(traced)
    traced.add_argument(
        "--out", type=Path, default=Path("trace.json"), help="file to write; may end in .gz"
    )
    run = commands.add_parser("run", help="only decode, inside the range that nsys collects")
    add_workload_arguments(run)
    run.add_argument("--record", type=Path, metavar="FILE", help="write a recording to this file")
    planted = commands.add_parser("planted", help="record a run with a planted cause")
    planted.add_argument(
        "cause",
        choices=tuple(CAUSES),
        help="; ".join(f"{name}: {what}" for name, what in CAUSES.items()),
    )
    planted.add_argument("--record", type=Path, required=True, metavar="FILE")
    planted.add_argument("--shape", default="demo")
    planted.add_argument("--steps", type=int, default=1200)
    planted.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")


def profile(options: argparse.Namespace) -> int:
    """Profile; the exit status, which is that of nsys where it ran."""
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
