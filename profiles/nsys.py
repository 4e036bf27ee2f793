"""Nsight Systems: the command line that profiles an engine, run where nsys is installed.

Only what lies between `cudaProfilerStart` and `cudaProfilerStop` is collected, so that loading,
compiling and capturing are left out: `graphengine profile run` calls them, an embedder calls
`torch.cuda.profiler.start()` and `stop()`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from graphengine.tracing import DOMAIN

TRACES = {
    "graph": "one entry a replay: nearly no overhead, for latency",
    "node": "each kernel of a replay: for attribution; replays are slower by it",
}
NOT_INSTALLED = 3
"""Exit status where nsys is not: nothing was profiled."""


def nsys_command(
    command: Sequence[str], *, trace: str, out: Path, whole: bool = False, nsys: str = "nsys"
) -> list[str]:
    """The words of a command line that profiles `command` into `out`.nsys-rep and `out`.sqlite.

    trace  of `TRACES`
    whole  from beginning to end, not only between the calls of the CUDA profiler's interface

    An `out` with such an ending counts without it; files of that name are replaced. ValueError for
    an unknown trace and for no command.
    """
    if trace not in TRACES:
        raise ValueError(f"--trace {trace!r}: known are {', '.join(TRACES)}")
    if not command:
        raise ValueError("nothing to profile: name a command behind `--`")
    words = [nsys, "profile", "--trace=cuda,nvtx", f"--cuda-graph-trace={trace}"]
    words += [f"--nvtx-domain-include={DOMAIN}"]
    if not whole:
        words += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    # Samples and context switches cost time on the very cores that launch.
    words += ["--sample=none", "--cpuctxsw=none"]
    words += ["--export=sqlite", "--force-overwrite=true", f"--output={stem(out)}"]
    return [*words, *command]


def stem(out: Path) -> Path:
    """`out` without the ending that nsys appends."""
    return out.with_suffix("") if out.suffix in (".nsys-rep", ".sqlite") else out


def run_nsys(command: Sequence[str], *, trace: str, out: Path, whole: bool = False) -> int:
    """Profile `command`; the exit status: that of nsys, 1 where it wrote nothing.

    Without nsys: say what to run and what to copy back, and `NOT_INSTALLED`.
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
    """What to do on another machine."""
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
