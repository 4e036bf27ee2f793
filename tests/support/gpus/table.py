"""Compile what engines launch for every GPU that Triton knows, and tell it as a table.

    python tests/support/gpus/table.py --out build/gpus.md
    python tests/support/gpus/table.py --gpus sm_86 sm_120 --subjects llama-8b gemma-3-4b

No GPU is needed. Exit status 0: everything compiles and fits; 1: not.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

# The script's own folder is on the path, its package's is not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import triton

from gpus.compiling import DEVICES, Compiled, compiled_for, without_cache
from gpus.subjects import SUBJECTS, open_subject
from graphengine import Engine
from graphengine.kernels.core.devices import Device

Found = dict[str, list[Compiled]]
"""By the name of a GPU."""


def compile_subject(name: str, gpus: Sequence[str]) -> Found:
    without_cache()
    # Triton prints the whole program of a kernel that does not compile.
    with redirect_stdout(io.StringIO()), open_subject(name) as engine:
        return {
            gpu: compiled_for(DEVICES[gpu], engine) if opens_on(DEVICES[gpu], engine) else []
            for gpu in gpus
        }


def opens_on(device: Device, engine: Engine) -> bool:
    """Whether an engine with these options opens on the GPU: fp8 caches need one that converts."""
    return device.converts_fp8 or "fp8" not in (engine.config.kv_dtype, engine.config.activations)


def problems(gpu: str, compiled: Iterable[Compiled]) -> list[str]:
    """What does not compile for a GPU, and what takes more shared memory than a program has."""
    most = DEVICES[gpu].shared_bytes
    found = []
    for each in compiled:
        if each.error:
            found.append(f"{each.kernel}: {each.error}")
        elif each.shared > most:
            found.append(f"{each.kernel}: {each.shared} bytes of shared memory, {most} exist")
    return found


def row_of(gpu: str, compiled: Sequence[Compiled]) -> str:
    failed = sum(1 for each in compiled if each.error)
    shared = max((each.shared for each in compiled), default=0)
    spilled: dict[str, int] = defaultdict(int)
    for each in compiled:
        spilled[each.kernel] = max(spilled[each.kernel], each.stack)
    worst = ", ".join(
        f"`{name}` {size}"
        for name, size in sorted(spilled.items(), key=lambda s: -s[1])[:3]
        if size
    )
    most = DEVICES[gpu].shared_bytes
    good = len(compiled) - failed
    return f"| {gpu} | {good} of {len(compiled)} | {shared} of {most} | {worst or 'none'} |"


def table_of(found: Mapping[str, Sequence[Compiled]], told: Mapping[str, Iterable[str]]) -> str:
    lines = [
        f"Triton {triton.__version__}",
        "",
        "| GPU | compiled | most shared memory, bytes | most spilled, bytes a thread |",
        "|---|---|---|---|",
        *(row_of(gpu, compiled) for gpu, compiled in found.items()),
        "",
        *(f"- {gpu}, {line}" for gpu, lines in told.items() for line in lines),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpus", nargs="+", default=[*DEVICES], choices=[*DEVICES])
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args(arguments)
    found: Mapping[str, list[Compiled]] = {gpu: [] for gpu in options.gpus}
    told: dict[str, dict[str, None]] = {gpu: {} for gpu in options.gpus}
    with ProcessPoolExecutor(
        options.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        jobs = {name: pool.submit(compile_subject, name, options.gpus) for name in options.subjects}
        for name, job in jobs.items():
            for gpu, compiled in job.result().items():
                found[gpu].extend(compiled)
                told[gpu] |= dict.fromkeys(f"{name}: {each}" for each in problems(gpu, compiled))
            print(f"{name}: compiled", file=sys.stderr, flush=True)
            text = table_of(found, told)
            if options.out is not None:
                # As it goes: one who has seen enough may stop it.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(text)
    print(text, end="")
    return 1 if any(told.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
