"""The native suite: every test marked `gpu`, in parallel processes and on all GPUs, then those that
run alone.

    python tests/support/native.py --out logs
    python tests/support/native.py tests/kernels/attention --limit 300

A test file is a process, with one of the GPUs that CUDA_VISIBLE_DEVICES leaves, those of ranks with
all of them; the files that take longest are cut into shards, and begin first. A file may have no
test for a GPU. The longest jobs and the output of those that failed are printed at the end. Exit
status 0: all passed; 1: not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Files of over 90 s on an H200 with 30 processes beside each other, the longest first.
SHARDS = {
    "tests/kernels/experts/test_packed_experts_gluon.py": 4,
    "tests/graphengine/models/test_gemma3.py": 4,
    "tests/graphengine/models/test_hybrids.py": 6,
    "tests/kernels/recurrent/test_gated_delta.py": 4,
    "tests/kernels/attention/test_scores.py": 5,
    "tests/kernels/attention/test_prefill.py": 6,
    "tests/graphengine/drafters/test_speculation.py": 3,
    "tests/graphengine/models/test_windows.py": 3,
    "tests/kernels/linear/test_packed_chunk.py": 2,
    "tests/kernels/attention/test_decode_rows.py": 4,
    "tests/graphengine/testing/test_planted_faults.py": 6,
    "tests/graphengine/drafters/test_speculation_churn.py": 2,
    "tests/kernels/linear/test_linear_sample.py": 3,
    "tests/graphengine/models/test_parity.py": 2,
    "tests/kernels/attention/test_decode.py": 3,
    "tests/kernels/sample/test_sampling.py": 2,
    "tests/graphengine/opening/test_compilation.py": 2,
    "tests/kernels/linear/test_linear.py": 2,
    "tests/graphengine/models/test_experts_gpu.py": 2,
    "tests/graphengine/models/test_window_rings.py": 2,
    "tests/kernels/experts/test_experts.py": 2,
    "tests/kernels/attention/test_prefill_gluon.py": 2,
    "tests/kernels/linear/test_packed_linear.py": 3,
    "tests/kernels/linear/test_packed_chunk_fp8.py": 2,
    "tests/graphengine/program/test_graphs.py": 4,
}
OF_RANKS = ("tests/graphengine/parallel/", "tests/kernels/comm/")
"""Whose tests take all GPUs, one a rank."""
ALONE = re.compile(r"\bmark\.alone\b")
"""What a file with a test that runs alone has in it."""
RUN_ALONE = "gpu and alone"
NO_TESTS = 5
SLOWEST = 8


@dataclass(frozen=True, slots=True)
class Job:
    """A shard of a test file, or of all tests that run alone."""

    paths: tuple[str, ...]
    shard: int = 0
    shards: int = 1
    marker: str = "gpu and not alone"

    @property
    def name(self) -> str:
        if self.marker == RUN_ALONE:
            return "tests that run alone"
        return " ".join(self.paths) + (f" {self.shard}/{self.shards}" if self.shards > 1 else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    status: int | None
    """pytest's exit status; None where the time was up."""
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return self.status in (0, NO_TESTS)

    @property
    def tests(self) -> int:
        """How many passed."""
        found = re.findall(r"(\d+) passed", self.output)
        return int(found[-1]) if found else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each `NATIVE_SHARDS`-th test, from the `NATIVE_SHARD`-th on."""
    kept = part(items, int(os.environ["NATIVE_SHARD"]), int(os.environ["NATIVE_SHARDS"]))
    chosen = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def part(items: Sequence[pytest.Item], shard: int, shards: int) -> list[pytest.Item]:
    """A shard's items. Cases of one test stand beside each other, and are spread."""
    return list(items[shard::shards])


def files_of(paths: Iterable[str]) -> list[str]:
    """Of these files and folders, relative to the root; those that take longest first. A file may
    name one of its tests, "test_a.py::test_b". ValueError for a path that does not exist.
    """
    found: set[str] = set()
    for path in paths:
        name, colons, test = path.partition("::")
        at = ROOT / name
        if not at.exists():
            raise ValueError(f"{path}: {at} is neither a file nor a folder")
        files = at.rglob("test_*.py") if at.is_dir() else [at]
        found |= {file.relative_to(ROOT).as_posix() + colons + test for file in files}
    longest = [file for file in SHARDS if file in found]
    return longest + sorted(found.difference(longest))


def alone_of(files: Iterable[str]) -> tuple[str, ...]:
    """Those of the files that have a test that runs alone."""
    return tuple(
        file for file in files if ALONE.search((ROOT / file.partition("::")[0]).read_text())
    )


def jobs_of(files: Iterable[str]) -> list[Job]:
    return [
        Job((file,), shard, SHARDS.get(file, 1))
        for file in files
        for shard in range(SHARDS.get(file, 1))
    ]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, which may be numbers or UUIDs."""
    count, inherited = gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        return [str(number) for number in range(count)]
    # CUDA ignores what follows the first name that is not a GPU's.
    return [name.strip() for name in inherited.split(",")][:count]


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def run(job: Job, gpus: Sequence[str], limit: float) -> Outcome:
    """The job's tests in a process that sees these GPUs; without any, those that this one sees."""
    support = str(Path(__file__).resolve().parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (support, os.environ.get("PYTHONPATH")))),
        "NATIVE_SHARD": str(job.shard),
        "NATIVE_SHARDS": str(job.shards),
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "native", "-m", job.marker, *job.paths]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = None, (error.stdout or b"").decode(errors="replace")
    return Outcome(job, status, time.monotonic() - begun, output)


def report(outcome: Outcome, out: Path | None) -> None:
    """One line as soon as a job has ended, and its log."""
    last = (outcome.output.strip().splitlines() or [""])[-1]
    ended = "time is up" if outcome.status is None else f"status {outcome.status}"
    print(f"{outcome.seconds:5.0f} s  {ended}  {outcome.job.name}  {last}", flush=True)
    if out is not None and not outcome.passed:
        name = re.sub(r"[^\w.]+", "_", outcome.job.name)
        (out / f"{name}.log").write_text(outcome.output)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--processes", type=int, help="by default all cores but two")
    parser.add_argument("--gpus", type=int, help="the first so many; by default all that are seen")
    parser.add_argument("--limit", type=float, default=500, help="seconds of a process")
    parser.add_argument(
        "--alone-limit", type=float, default=1000, help="seconds of the tests that run alone"
    )
    parser.add_argument("--out", type=Path, help="a folder for the logs of those that fail")
    options = parser.parse_args(arguments)
    gpus = visible_gpus()
    if options.gpus is not None:
        if not 1 <= options.gpus <= len(gpus):
            parser.error(f"--gpus {options.gpus}: {len(gpus)} are seen")
        gpus = gpus[: options.gpus]
    try:
        files = files_of(options.paths)
    except ValueError as error:
        parser.error(str(error))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    processes = options.processes or max(1, (os.cpu_count() or 1) - 2)

    def go(numbered: tuple[int, Job]) -> Outcome:
        number, job = numbered
        together = job.paths[0].startswith(OF_RANKS)
        own = list(gpus) if together or not gpus else [gpus[number % len(gpus)]]
        outcome = run(job, own, options.limit)
        report(outcome, options.out)
        return outcome

    begun = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        outcomes = list(pool.map(go, enumerate(jobs_of(files))))
    alone = alone_of(files)
    if alone:
        outcomes.append(run(Job(alone, marker=RUN_ALONE), gpus, options.alone_limit))
        report(outcomes[-1], options.out)
    return summary(outcomes, time.monotonic() - begun)


def summary(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print what failed, the longest jobs, and the sum; the exit status."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        print(f"\n=== {outcome.job.name}\n{outcome.output[-4000:]}")
    print("\nthe longest:")
    for outcome in sorted(outcomes, key=lambda each: -each.seconds)[:SLOWEST]:
        print(f"{outcome.seconds:5.0f} s  {outcome.job.name}")
    tests = sum(outcome.tests for outcome in outcomes)
    print(f"{tests} passed in {seconds:.0f} s; {len(failed)} of {len(outcomes)} jobs failed")
    # Without a single test nothing was shown.
    return 1 if failed or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
