"""The native suite: every test marked `gpu`, in parallel processes and on all GPUs, then those that
run alone.

    python tests/support/native.py --out logs
    python tests/support/native.py tests/kernels/attention --limit 300
    python tests/support/native.py --long

A job is a test file in a process of its own. The process is forked from this one, which has
imported torch and transformers, so that a job starts in a second. A job sees one of the GPUs that
CUDA_VISIBLE_DEVICES leaves; tests of ranks see all of them. The files that take longest are cut
into shards and begin first. Kernels are compiled once for all: Triton's cache on disk is shared.

Of matrices whose cases have kernels of their own, native_cases.py says how many are tried; --long
tries all, with all examples and seeds.

With --out, everything is written as the suite goes: `summary.txt` (what passed, failed and was not
reached), `failures.txt` (the output of jobs that failed) and `tests.jsonl` (a line for each test,
with its seconds and what it compiled). With --time, what is not reached by then is named, and the
suite fails. Exit status 0: all passed; 1: not.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from native_cases import CASES, chosen

ROOT = Path(__file__).resolve().parent.parent.parent
# Files that take longest on an H200 with 16 cores, the longest first.
SHARDS = {
    "tests/graphengine/core/test_packing_gpu.py": 4,
    "tests/graphengine/models/test_gguf.py": 2,
    "tests/kernels/recurrent/test_packed_chunks.py": 2,
    "tests/kernels/experts/test_packed_experts_chunk.py": 3,
    "tests/kernels/attention/test_decode.py": 2,
    "tests/graphengine/models/test_hybrids.py": 4,
    "tests/kernels/core/test_pdl.py": 1,
    "tests/graphengine/models/test_gpt_oss.py": 2,
    "tests/graphengine/drafters/test_speculation.py": 3,
    "tests/graphengine/drafters/eagle3/test_eagle3.py": 1,
    "tests/graphengine/test_fp8_kv.py": 1,
    "tests/kernels/sample/test_sampling.py": 1,
    "tests/graphengine/models/test_dense_families.py": 1,
    "tests/graphengine/drafters/test_speculation_graphs.py": 1,
    "tests/graphengine/parallel/test_ranks_gpu.py": 2,
    "tests/graphengine/models/test_multimodal_rope.py": 1,
    "tests/graphengine/drafters/test_speculation_options.py": 2,
    "tests/graphengine/models/test_random_models.py": 1,
    "tests/kernels/linear/test_packed_linear.py": 1,
    "tests/graphengine/models/test_windows.py": 1,
    "tests/kernels/experts/test_packed_experts_gluon.py": 1,
    "tests/graphengine/drafters/test_speculation_counts.py": 1,
    "tests/graphengine/models/test_experts_gpu.py": 1,
    "tests/kernels/recurrent/test_gated_delta.py": 2,
    "tests/kernels/attention/test_prefill_gluon.py": 1,
    "tests/kernels/linear/test_packed_chunk_fp8.py": 1,
    "tests/graphengine/drafters/modules/test_trees.py": 2,
    "tests/kernels/attention/test_decode_rows.py": 3,
    "tests/kernels/linear/test_linear.py": 1,
    "tests/kernels/lora/test_lora.py": 1,
    "tests/graphengine/models/test_gemma4.py": 3,
    "tests/kernels/linear/test_packed_chunk.py": 2,
    "tests/kernels/attention/test_prefill_seen.py": 1,
    "tests/graphengine/models/test_gemma3.py": 2,
    "tests/graphengine/program/test_request_options.py": 1,
    "tests/graphengine/parallel/test_data_parallel_gpu.py": 1,
    "tests/kernels/experts/test_experts.py": 1,
    "tests/graphengine/models/test_latent.py": 1,
    "tests/kernels/draft/test_vanilla.py": 1,
    "tests/kernels/attention/test_scores.py": 2,
    "tests/graphengine/test_prompt_embeds.py": 1,
    "tests/kernels/linear/test_linear_gluon.py": 1,
    "tests/graphengine/program/test_graphs.py": 2,
    "tests/graphengine/models/test_parity.py": 1,
    "tests/profiles/test_bench_command.py": 2,
    "tests/kernels/attention/test_prefill.py": 2,
    "tests/kernels/linear/test_linear_sample.py": 2,
    "tests/kernels/recurrent/test_mamba2.py": 1,
    "tests/graphengine/models/test_window_rings.py": 2,
    "tests/graphengine/models/test_beside_towers.py": 1,
    "tests/graphengine/drafters/test_speculation_churn.py": 1,
    "tests/graphengine/program/test_option_parity.py": 1,
    "tests/graphengine/models/test_head_sizes.py": 2,
    "tests/graphengine/models/test_precision.py": 1,
    "tests/graphengine/drafters/test_draft_schedule.py": 1,
    "tests/graphengine/program/test_decode_step.py": 2,
    "tests/profiles/test_tune.py": 2,
    "tests/kernels/comm/test_push_gpu.py": 2,
    "tests/kernels/attention/test_decode_trees.py": 1,
    "tests/graphengine/models/quantised/test_gpu_engines.py": 1,
    "tests/graphengine/models/test_published_configs.py": 1,
    "tests/graphengine/host/test_churn.py": 2,
    "tests/kernels/step/test_begin.py": 1,
    "tests/graphengine/models/test_partial_rope.py": 2,
    "tests/graphengine/models/test_glm4_moe.py": 1,
    "tests/graphengine/models/test_routing.py": 1,
    "tests/kernels/linear/test_linear_residual.py": 1,
    "tests/graphengine/drafters/block/test_block.py": 1,
    "tests/graphengine/models/test_gemma2.py": 1,
    "tests/graphengine/opening/test_compilation.py": 1,
    "tests/kernels/norm_rope/test_rope_rows.py": 1,
    "tests/kernels/attention/test_decode_fp8.py": 1,
    "tests/graphengine/models/test_bidirectional_images.py": 1,
    "tests/kernels/experts/test_packed_experts.py": 1,
    "tests/graphengine/testing/test_plugin.py": 1,
    "tests/graphengine/cli/test_graph_command.py": 1,
    "tests/graphengine/models/test_experts.py": 1,
    "tests/graphengine/program/test_golden_graphs.py": 1,
    "tests/graphengine/test_sessions.py": 1,
    "tests/graphengine/drafters/mtp/test_layer.py": 1,
    "tests/kernels/segment/test_segment.py": 1,
}
OF_RANKS = ("tests/graphengine/parallel/", "tests/kernels/comm/")
"""Whose tests take all GPUs, one a rank."""
ALONE = re.compile(r"\bmark\.alone\b")
"""What a file with a test that runs alone has in it."""
RUN_ALONE = "gpu and alone"
FOR_A_GPU = re.compile(r"\bmark\.gpu\b|\bdef test_\w+\([^)]*\bdevice\b")
"""What stands in nearly every file with a test for a GPU, but for those of kernels/, which are all
for it. The others run together, as a few have such a test."""
TOGETHER = 24
NO_TESTS = 5
SLOWEST = 8
TAIL = 6_000
"""Characters of a failed job's output that are kept."""


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
        if len(self.paths) > 1:
            return f"{self.paths[0]} and {len(self.paths) - 1} more without a GPU"
        return " ".join(self.paths) + (f" {self.shard}/{self.shards}" if self.shards > 1 else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    status: int | None
    """pytest's exit status, negative the signal that ended it; None where the time was up."""
    seconds: float
    output: str
    tests: Counter[str] = field(default_factory=Counter)
    """How many passed, failed, ..."""

    @property
    def passed(self) -> bool:
        return self.status in (0, NO_TESTS)


class Recording:
    """A pytest plugin: keeps a shard's items and appends a line for each test to a file."""

    def __init__(self, job: Job, lines: Path, locks: Path) -> None:
        self._job, self._lines, self._locks = job, lines, locks
        self._outcomes: dict[str, str] = {}
        self._compiled: list[float] = []

    def pytest_sessionstart(self) -> None:
        from triton import knobs

        knobs.compilation.listener = self._note_compilation
        compile_once(self._locks)

    def _note_compilation(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self._compiled.append(times.total / 1e6)

    # Last, so that a shard counts what the marker left.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tried = items if int(os.environ.get("GRAPHENGINE_LONG", "0")) else chosen_of(items)
        kept = part(tried, self._job.shard, self._job.shards)
        chosen = {id(item) for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        begun = time.monotonic()
        self._compiled.clear()
        result = yield
        line = {
            "test": item.nodeid,
            "outcome": self._outcomes.get(item.nodeid, "passed"),
            "seconds": round(time.monotonic() - begun, 3),
            "compiled": len(self._compiled),
            "compiling": round(sum(self._compiled), 3),
        }
        with self._lines.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result


def compile_once(folder: Path) -> None:
    """From here on, a kernel that another job compiles is waited for, and read from the disk."""
    from triton import compiler

    compile_kernel = compiler.compile

    def compile_alone(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        asked = f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}"
        lock = folder / f"{hashlib.sha256(asked.encode()).hexdigest()}.lock"
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compile_kernel(src, target=target, options=options, **others)

    compiler.compile = compile_alone


def chosen_of(items: Sequence[Any]) -> list[Any]:
    """The cases of `native_cases`, and all tests that it does not name."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: list[Any] = []
    for name, cases in groups.items():
        file, _, test = name.partition("::")
        count = CASES.get(file, {}).get(test, len(cases))
        if count < len(cases):
            cases = [case for case in cases if not of_a_twin(case)]
            cases = chosen(cases, [values_of(case) for case in cases], count, name)
        kept += cases
    return kept


def of_a_twin(case: Any) -> bool:
    """Whether it tries the kernel's definition in plain torch, which a CPU shows as well."""
    params = case.callspec.params
    return params.get("reference") is True or "reference" in values_of(case)


def values_of(case: Any) -> tuple[Hashable, ...]:
    """A case's parameters; of what is no number or text, which one it is."""
    found = case.callspec
    return tuple(
        value if isinstance(value, (str, int, float, type(None))) else ("case", found.indices[name])
        for name, value in found.params.items()
    )


def part(items: Sequence[Any], shard: int, shards: int) -> list[Any]:
    """A shard's items. Cases of one test stand beside each other, and are spread."""
    return list(items[shard::shards])


def files_of(paths: Iterable[str]) -> list[str]:
    """Test files of these files and folders, relative to the root; those that take longest first. A
    file may name one of its tests, "test_a.py::test_b". ValueError for a path that does not exist.
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
    """The files that have a test that runs alone."""
    return tuple(file for file in files if says(file, ALONE))


def jobs_of(files: Iterable[str]) -> list[Job]:
    jobs, others = [], []
    for file in files:
        if not file.startswith("tests/kernels/") and not says(file, FOR_A_GPU):
            others.append(file)
            continue
        shards = SHARDS.get(file, 1)
        jobs += [Job((file,), shard, shards) for shard in range(shards)]
    groups = [others[first : first + TOGETHER] for first in range(0, len(others), TOGETHER)]
    return jobs + [Job(tuple(group)) for group in groups]


def says(file: str, words: re.Pattern[str]) -> bool:
    return words.search((ROOT / file.partition("::")[0]).read_text()) is not None


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them, which may be numbers or UUIDs."""
    count, inherited = gpu_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        return [str(number) for number in range(count)]
    # CUDA ignores what follows the first name that is not a GPU's.
    return [name.strip() for name in inherited.split(",")][:count]


def gpu_count() -> int:
    """Counted by a child: a process that has asked CUDA cannot fork others that use it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import torch

        os.write(write, str(torch.cuda.device_count()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as counted:
        count = counted.read()
    os.waitpid(child, 0)
    return int(count)


def import_once() -> None:
    """What every job would import for itself; nothing that asks CUDA."""
    for name in (
        "torch",
        "transformers",
        "hypothesis.strategies",
        "triton.experimental.gluon.language.nvidia.hopper",
    ):
        importlib.import_module(name)
    from transformers import (  # noqa: F401
        DeepseekV3ForCausalLM,
        LlamaForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
    )

    importlib.import_module("graphengine.engine")
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()


class Running:
    """A job's process, which sees these GPUs; without any, those that this one sees.

    Its output goes to a file of `folder`, a line for each test to `lines`.
    """

    def __init__(self, job: Job, gpus: Sequence[str], folder: Path, lines: Path) -> None:
        self.job, self.gpus = job, tuple(gpus)
        self._begun = time.monotonic()
        self._output = folder / f"{time.monotonic_ns()}.log"
        self._lines, self._folder = lines, folder
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._run()

    def _run(self) -> None:
        """The child: pytest, and no way back."""
        status = 1
        try:
            os.setpgid(0, 0)
            file = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
            if self.gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            os.chdir(ROOT)
            arguments = ["-q", "-m", self.job.marker, *self.job.paths]
            recording = Recording(self.job, self._lines, self._folder)
            status = int(pytest.main(arguments, plugins=[recording]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def ended(self) -> Outcome | None:
        """How it ended, or None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return self._outcome(os.waitstatus_to_exitcode(status)) if pid else None

    def end(self) -> Outcome:
        """Stop it: its time is up."""
        self._kill_group()
        os.waitpid(self._pid, 0)
        return self._outcome(None)

    def _kill_group(self) -> None:
        """Also what its tests have left running."""
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def _outcome(self, status: int | None) -> Outcome:
        self._kill_group()
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        self._output.unlink(missing_ok=True)
        counted: Counter[str] = Counter()
        for count, what in re.findall(r"(\d+) (passed|failed|error|skipped)", last_line(output)):
            counted[what] += int(count)
        return Outcome(self.job, status, self.seconds, output, counted)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


class Suite:
    """What has ended, told as it goes and, with a folder, written there."""

    def __init__(self, jobs: Sequence[Job], out: Path | None) -> None:
        self._waiting = {job.name: None for job in jobs}
        self._out = out
        self.began_at = time.monotonic()
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        del self._waiting[outcome.job.name]
        ended = "time is up" if outcome.status is None else f"status {outcome.status}"
        line = f"{outcome.seconds:5.0f} s  {ended}  {outcome.job.name}  {last_line(outcome.output)}"
        print(line, flush=True)
        if self._out is None:
            return
        if not outcome.passed:
            with (self._out / "failures.txt").open("a") as file:
                file.write(f"=== {line}\n{outcome.output[-10 * TAIL :]}\n")
        # A reader of the file, or of what is left after the machine has gone, finds all of it.
        draft = self._out / "summary.txt.new"
        draft.write_text(self.summary())
        draft.replace(self._out / "summary.txt")

    @property
    def passed(self) -> bool:
        """Without a single test nothing was shown."""
        good = all(outcome.passed for outcome in self.outcomes) and not self._waiting
        return good and any(outcome.tests["passed"] for outcome in self.outcomes)

    def summary(self) -> str:
        failed = [outcome for outcome in self.outcomes if not outcome.passed]
        tests: Counter[str] = sum((outcome.tests for outcome in self.outcomes), Counter())
        longest = sorted(self.outcomes, key=lambda each: -each.seconds)[:SLOWEST]
        lines = ["the longest:", *(f"{each.seconds:5.0f} s  {each.job.name}" for each in longest)]
        for outcome in failed:
            lines.append(f"failed: {outcome.job.name}")
            lines += re.findall(r"^(?:FAILED|ERROR) .*", outcome.output, re.MULTILINE)
        lines += [f"not reached: {name}" for name in self._waiting]
        sums = f"{tests['passed']} passed, {tests['failed'] + tests['error']} failed"
        return "\n".join(
            [
                *lines,
                f"{len(failed)} of {len(self.outcomes)} jobs failed, {len(self._waiting)} were not"
                f" reached, in {time.monotonic() - self.began_at:.0f} s",
                sums + (f", {tests['skipped']} skipped" if tests["skipped"] else ""),
                "",
            ]
        )


Start = Callable[[Job, Sequence[str]], Running]


def run_all(
    jobs: Sequence[Job], gpus: Sequence[str], start: Start, suite: Suite, *, options: Any
) -> None:
    """All jobs, so many at a time; what is running when the suite's time is up is stopped."""
    running: list[Running] = []
    waiting = list(jobs)
    until = suite.began_at + options.time
    while waiting or running:
        while waiting and len(running) < options.processes and time.monotonic() < until:
            job = waiting.pop(0)
            running.append(start(job, gpus_for(job, gpus, running)))
        for each in list(running):
            limit = options.alone_limit if each.job.marker == RUN_ALONE else options.limit
            outcome = each.ended()
            if outcome is None and (each.seconds > limit or time.monotonic() >= until):
                outcome = each.end()
            if outcome is not None:
                running.remove(each)
                suite.add(outcome)
        if time.monotonic() >= until and not running:
            return
        time.sleep(0.05)


def gpus_for(job: Job, gpus: Sequence[str], running: Iterable[Running]) -> list[str]:
    """All GPUs for ranks and for tests that run alone; else the one with the fewest jobs."""
    if job.marker == RUN_ALONE or job.paths[0].startswith(OF_RANKS) or not gpus:
        return list(gpus)
    busy = Counter(each.gpus[0] for each in running if len(each.gpus) == 1)
    return [min(gpus, key=lambda gpu: busy[gpu])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--gpus", type=int, help="the first so many; by default all that are seen")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a process")
    parser.add_argument(
        "--alone-limit", type=float, default=1000, help="seconds of the tests that run alone"
    )
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds of all")
    parser.add_argument("--long", action="store_true", help="all examples, matrices and seeds")
    parser.add_argument("--out", type=Path, help="a folder for the summary, failures and times")
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
    if options.long:
        os.environ["GRAPHENGINE_LONG"] = "1"
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    jobs, alone = jobs_of(files), alone_of(files)
    last = [Job(alone, marker=RUN_ALONE)] if alone else []
    suite = Suite([*jobs, *last], options.out)
    # What pytest rewrites is kept for the next job that imports it.
    sys.dont_write_bytecode = False
    import_once()
    with TemporaryDirectory() as folder:
        lines = (options.out or Path(folder)) / "tests.jsonl"

        def start(job: Job, own: Sequence[str]) -> Running:
            return Running(job, own, Path(folder), lines)

        run_all(jobs, gpus, start, suite, options=options)
        run_all(last, gpus, start, suite, options=options)
    for outcome in suite.outcomes:
        if not outcome.passed:
            print(f"\n=== {outcome.job.name}\n{outcome.output[-TAIL:]}")
    print("\n" + suite.summary(), end="")
    return 0 if suite.passed else 1


if __name__ == "__main__":
    sys.exit(main())
