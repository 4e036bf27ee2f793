"""Nsight Systems: the command line that profiles an engine, run where nsys is installed.

Only events between `cudaProfilerStart` and `cudaProfilerStop` are collected, so that loading,
compiling and capturing are left out. `graphengine profile run` calls these; an embedding program
calls `torch.cuda.profiler.start()` and `stop()`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from graphengine.observe.tracing import DOMAIN
from graphengine.profiles.flags.profile import TRACES

NOT_INSTALLED = 3
"""Exit status without nsys: nothing was profiled."""


def nsys_command(
    command: Sequence[str], *, trace: str, out: Path, whole: bool = False, nsys: str = "nsys"
) -> list[str]:
    """The words of a command line that profiles `command` into `out`.nsys-rep and `out`.sqlite.

    In addition to CUDA and the ranges it traces calls of the operating system, which show where a
    late host waited. nsys keeps those of 1 us or more, and makes each a little slower.

    trace  one of `TRACES`
    whole  from beginning to end, not only between the calls of the CUDA profiler's interface

    An ending .nsys-rep or .sqlite of `out` is removed; existing files of that name are replaced.
    ValueError for an unknown trace, for no command, and for a `%` in `out`, which nsys would
    expand.
    """
    if trace not in TRACES:
        raise ValueError(f"--trace {trace!r}: known are {', '.join(TRACES)}")
    if not command:
        raise ValueError("nothing to profile: name a command after `--`")
    if "%" in str(out):
        raise ValueError(f"--out {out}: nsys puts something of its own in place of % and a letter")
    words = [nsys, "profile", "--trace=cuda,nvtx,osrt", f"--cuda-graph-trace={trace}"]
    words += [f"--nvtx-domain-include={DOMAIN}"]
    if not whole:
        words += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    # Samples and context switches cost time on the cores that launch.
    words += ["--sample=none", "--cpuctxsw=none"]
    words += ["--export=sqlite", "--force-overwrite=true", f"--output={stem(out)}"]
    return [*words, *command]


def stem(out: Path) -> Path:
    """`out` without the ending that nsys appends."""
    return out.with_suffix("") if out.suffix in (".nsys-rep", ".sqlite") else out


def run_nsys(command: Sequence[str], *, trace: str, out: Path, whole: bool = False) -> int:
    """Profile `command`; returns the exit status of nsys, or 1 if it wrote nothing.

    Without nsys: print the commands to run and the files to copy back, and return `NOT_INSTALLED`.
    """
    words = nsys_command(command, trace=trace, out=out, whole=whole)
    database = Path(f"{stem(out)}.sqlite")
    if shutil.which(words[0]) is None:
        print(instructions(words, database))
        return NOT_INSTALLED
    before = database.stat().st_mtime_ns if database.exists() else None
    status = subprocess.run(words, check=False).returncode
    written = database.exists() and database.stat().st_mtime_ns != before
    if written:
        print(f"graphengine report {shlex.quote(str(database))}")
    else:
        reason = "" if whole else ": did the command call cudaProfilerStart (or take --whole)?"
        print(f"nsys wrote no {database}{reason}", file=sys.stderr)
    return status or (0 if written else 1)


def instructions(words: Sequence[str], database: Path) -> str:
    """Instructions for another machine."""
    return "\n".join(
        [
            "nsys is not installed here, so nothing was profiled. On a machine that has it "
            "(and this",
            "package, with nvtx), run",
            "",
            f"    {shlex.join(words)}",
            "",
            f"copy {database} back, and here run",
            "",
            f"    graphengine report {shlex.quote(database.name)}",
            "",
            f"Without nsys: `graphengine profile torch --out {stem(database).name}.json` profiles "
            "with torch.",
        ]
    )
