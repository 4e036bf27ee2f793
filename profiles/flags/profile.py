"""The flags of `graphengine profile`."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphengine.cli.option_flags import add_flags, kept_facts
from graphengine.profiles.flags import DTYPE_NAMES, SAMPLERS
from graphengine.profiles.shape_configs import NAMES

TRACES = {
    "graph": "one entry per replay; nearly no overhead, for latency",
    "node": "one entry per kernel, for attribution; makes replays slower",
}
CAUSES = {
    "none": "nothing planted, the baseline of the others",
    "stall": "every 50th step the caller sleeps for ten steps' time",
    "sync": "every 20th step the caller waits for the device (GPU only)",
    "bucket": "now and then a second request joins, and the only larger bucket has 32 rows",
    "prefill": "now and then a request with a long prompt joins",
}
"""Causes that `profile planted` plants, and their effects."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine profile` and its subcommands."""
    commands = parser.add_subparsers(required=True, metavar="how", dest="how")
    nsys = commands.add_parser(
        "nsys",
        help="run a command under nsys, or show how to",
        description="Profile a command. Without nsys, print what to run where it is installed, and "
        "which file to copy back; exit status 3.",
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
    _add_workload(traced)
    traced.add_argument(
        "--out", type=Path, default=Path("trace.json"), help="file to write; may end in .gz"
    )
    run = commands.add_parser("run", help="only decode, inside the range that nsys collects")
    _add_workload(run)
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


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", help=f"{', '.join(NAMES)} (default: demo); random weights but for demo")
    add("--checkpoint", help="directory or hub id, in place of a shape")
    add("--live", type=int, default=1, help="requests that decode at the same time")
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=256)
    add("--sampler", choices=SAMPLERS, default="fast", help="greedy, or top-k 50")
    add("--max-batch", type=int, help="slots (default: --live)")
    add("--max-seq-len", type=int, help="longest request (default: what the requests need)")
    add_flags(parser, kept_facts("EngineConfig"), only=("device", "lookahead"))
    add("--dtype", choices=DTYPE_NAMES)
    add(
        "--no-pdl",
        action="store_true",
        help="run kernels one after another, so that their times add up",
    )
    add("--verbose", action="store_true", help="log the memory budget and captures")
