"""compute-sanitizer over the kernels' tests and over short engines, a process each.

    python tests/support/sanitize.py --out sanitize.json
    python tests/support/sanitize.py --tools racecheck --targets kernels/norm,engine --jobs 1
    python tests/support/sanitize.py --tools racecheck --targets kernels/linear --split

A target is a file of tests/kernels, some of whose cases are run, or an engine of the demo model.
Each run reports when it has finished, so that a tool that dies can be told from a program that
fails, and from one that never ran. With --split each of a file's cases is a run of its own: this
finds the case for a target that dies. Exit status 0: all clean; 1: not; 3: no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KERNEL_TESTS = Path(__file__).resolve().parent.parent / "kernels"
KERNELS = KERNEL_TESTS.parent.parent / "kernels"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ENGINES = ("plain", "full", "mtp", "ngram")
ERRORS_FOUND = 9
"""Exit status of a run in which the tool found errors."""
NO_SANITIZER = 3
NOTHING_RAN = 5
THROUGH = "sanitizing: through"
KEPT_LINES = 60

_SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (?P<errors>\d+) error"
    r"|RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed"
    r" \((?P<hard>\d+) errors?, (?P<soft>\d+) warnings?\))",
    re.MULTILINE,
)

# A program's own output may come before it in the line.
_RACE = re.compile(r"=+ (?:Error|Warning): Race reported between ")
_PLACE = re.compile(r"access at \S+ in (?P<file>[^:\s]+):(?P<line>\d+)")


@functools.cache
def specialized_lines(file: str) -> range:
    """The lines of a kernel of ours that gives its warps different work; empty without one.

    Triton hands a warp group its function and arguments through shared memory. It orders this by
    a barrier of the whole CTA, which the groups reach at different instructions: racecheck 2025.3
    does not follow that, and reports the hand-over. It has the lines of the kernel itself; what
    the groups do afterwards has those of their functions.
    """
    path = next(KERNELS.rglob(file), None)
    tree = ast.Module([], []) if path is None else ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and "warp_specialize(" in ast.unparse(function):
            assert function.end_lineno is not None, f"{function.name=}"
            return range(function.lineno, function.end_lineno + 1)
    return range(0)


def count_races(output: str) -> tuple[int, int]:
    """Races that racecheck reports: those to look at, and hand-overs to warp groups."""
    unknown = known = 0
    # Before the first one there is no report; a report ends with an empty line of the tool's.
    for report in _RACE.split(output)[1:]:
        places = _PLACE.findall(re.split(r"^=+ *$", report, maxsplit=1, flags=re.MULTILINE)[0])
        handed = all(int(line) in specialized_lines(file) for file, line in places)
        known += bool(places) and handed
        unknown += not (places and handed)
    return unknown, known


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The result of one tool on one target.

    verdict   "clean", "errors" that the tool found, "program failed", "tool died", "timed out" or
              "nothing ran"
    through   whether the program ran to its end
    summary   the tool's last line of numbers; None without one
    errors    errors or hazards in that line, minus the races in `handed`
    handed    races that racecheck reports where Triton hands work to warp groups: not real ones
    reports   the tool's first lines, and `tail` the last of all
    """

    tool: str
    target: str
    verdict: str
    through: bool
    status: int | None
    signal: str | None
    summary: str | None
    errors: int | None
    handed: int
    seconds: float
    command: str
    reports: list[str]
    tail: list[str]


def read_output(output: str) -> tuple[str | None, int | None]:
    """The summary of a tool's output and its number of errors; the last one, if there are more.

    What `count_races` takes for no race is not among the errors.
    """
    found = list(_SUMMARY.finditer(output))
    if not found:
        return None, None
    line = found[-1]
    counted = [line[name] for name in ("errors", "hazards") if line[name] is not None]
    end = output.find("\n", line.start())
    errors = max(0, int(counted[0]) - count_races(output)[1])
    return output[line.start() : end if end >= 0 else None].strip("= "), errors


def judge(status: int | None, output: str) -> str:
    """The verdict on a run with this exit status, None where it was stopped."""
    summary, errors = read_output(output)
    through = THROUGH in output
    if status is None:
        return "timed out"
    if summary is None:
        # The tool writes its summary whatever the program does, unless the tool itself died.
        return "tool died" if status < 0 or status > 128 or through else "program failed"
    if errors:
        return "errors"
    if status == NOTHING_RAN:
        return "nothing ran"
    if status < 0 or status > 128:
        return "tool died" if through else "program failed"
    known = status == ERRORS_FOUND and count_races(output)[1] > 0
    return "clean" if (status == 0 or known) and through else "program failed"


def signal_name(status: int | None) -> str | None:
    """The signal in an exit status of a shell or of Python."""
    number = 0 if status is None else -status if status < 0 else status - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def run(
    tool: str, target: str, program: Sequence[str], *, sanitizer: Sequence[str], limit_s: float
) -> Run:
    """Run `program` under a tool, with a time limit."""
    options = ["--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--target-processes", "all"]
    command = [*sanitizer, *options, *program]
    started = time.monotonic()
    # A group of its own, so that at its limit the tool and what it started are stopped.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = None
    seconds = time.monotonic() - started
    summary, errors = read_output(output)
    lines = output.splitlines()
    return Run(
        tool=tool,
        target=target,
        verdict=judge(status, output),
        through=THROUGH in output,
        status=status,
        signal=signal_name(status),
        summary=summary,
        errors=errors,
        handed=count_races(output)[1],
        seconds=round(seconds, 2),
        command=shlex.join(command),
        reports=[line for line in lines if line.startswith("=========")][:KEPT_LINES],
        tail=lines[-KEPT_LINES:],
    )


# What is run.


def all_targets() -> list[str]:
    files = sorted(KERNEL_TESTS.rglob("test_*.py"), key=lambda file: file.stem)
    kernels = [f"kernels/{file.stem.removeprefix('test_')}" for file in files]
    return [*kernels, *(f"engine/{name}" for name in ENGINES)]


def chosen(names: str | None, known: Sequence[str], option: str) -> list[str]:
    """The `known` targets with these names, or in these folders; ValueError for other names."""
    if names is None:
        return list(known)
    found: list[str] = []
    for name in names.split(","):
        of_name = [each for each in known if each == name or each.startswith(f"{name}/")]
        if not of_name:
            raise ValueError(f"{option} {name!r}: known are {', '.join(known)}")
        found += of_name
    return list(dict.fromkeys(found))


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, evenly spread over them, the first and the last one included."""
    if count >= len(items):
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def child(target: str, options: argparse.Namespace, *more: str) -> list[str]:
    """The command line that runs a target, in a process without the tool's."""
    words = [sys.executable, __file__, "--child", target, "--cases", str(options.cases)]
    words += ["--match", options.match] if options.match else []
    words += ["--one-core"] if options.one_core else []
    words += ["--no-pdl"] if options.no_pdl else []
    return [*words, *more]


def programs(targets: Iterable[str], options: argparse.Namespace) -> dict[str, list[str]]:
    """By name, the command lines of the targets; with --split one for each case."""
    found = {}
    for target in targets:
        if options.split and target.startswith("kernels/"):
            for case in cases_of(target, options):
                found[f"{target}::{case}"] = child(target, options, "--case", case)
        else:
            found[target] = child(target, options)
    return found


def cases_of(target: str, options: argparse.Namespace) -> list[str]:
    """The cases of a target to run, collected by a process without the tool."""
    done = subprocess.run(child(target, options, "--list"), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{target} has no cases: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("cases ")]
    found: list[str] = json.loads(lines[0].removeprefix("cases "))
    return found


def run_child(options: argparse.Namespace) -> int:
    """In a process of its own: some cases of a file, or an engine."""
    if options.one_core:
        # As many threads compile and load kernels as there are cores.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kind, _, name = options.child.partition("/")
    if kind == "kernels":
        status = run_cases(name, options)
    else:
        import torch

        status = 0 if torch.cuda.is_available() else NOTHING_RAN
        if not status:
            run_engine(name, tokens=options.cases, pdl=not options.no_pdl, device="cuda")
    if not options.list:
        print(THROUGH, flush=True)
    return status


def run_cases(name: str, options: argparse.Namespace) -> int:
    import pytest

    class Few:
        """Keeps a few of the cases that all other filters have left."""

        passed = 0

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.when == "call" and report.passed

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
            names = {item.nodeid.partition("::")[2]: item for item in items}
            if options.case is not None:
                items[:] = [names[options.case]]
            else:
                # The others are of errors, and launch nothing.
                launching = [item for item in items if "device" in item.fixturenames]
                items[:] = spread(launching or items, options.cases)
            if options.list:
                kept = {id(item) for item in items}
                found = [name for name, item in names.items() if id(item) in kept]
                print("\ncases", json.dumps(found))
                items.clear()

    root = KERNEL_TESTS.parent.parent
    words = [str(next(KERNEL_TESTS.rglob(f"test_{name}.py"))), "-q", "-p", "no:cacheprovider"]
    words += ["--rootdir", str(root), "-c", str(root / "pyproject.toml")]
    words += ["-k", options.match] if options.match else []
    few = Few()
    status = int(pytest.main(words, plugins=[few]))
    if options.list:
        return 0 if status == NOTHING_RAN else status
    return status if status or few.passed else NOTHING_RAN


def run_engine(name: str, *, tokens: int, pdl: bool, device: str) -> None:
    """Two requests of a few tokens, prefilled in chunks."""
    from graphengine import Engine, SamplingParams
    from graphengine.demo import checkpoint_path
    from graphengine.speculative import MTP, NGram

    speculative = {"mtp": MTP(k=2), "ngram": NGram(k=2)}.get(name)
    sampling: dict[str, Any] = {"temperature": 0.0}
    if name == "full":
        sampling = {
            "top_n_sigma": 3.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3,
            "repetition_penalty": 1.1, "frequency_penalty": 0.5, "logit_bias": {5: 1.0},
            "bad_words": [[7, 8]], "logprobs": 3, "min_tokens": min(2, tokens),
            "stop_token_sequences": [[1, 2]],
        }  # fmt: skip
    with Engine.from_pretrained(
        checkpoint_path(),
        device=device,
        max_batch=2,
        max_seq_len=64,
        block_size=8,
        kv_blocks=10,
        prefill_buckets=(8,),
        pdl=pdl,
        speculative=speculative,
    ) as engine:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
        results = engine.generate(["def read(path):", "a b a b a b a"], params)
    assert [len(result.token_ids) for result in results] == [tokens] * 2


# The command line.


def write(out: Path, environment: dict[str, Any], runs: Sequence[Run]) -> None:
    """Write all runs so far, atomically."""
    made = out.with_name(out.name + ".part")
    document = {"schema": 1, **environment, "runs": [asdict(each) for each in runs]}
    made.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    made.replace(out)


def version(sanitizer: Sequence[str]) -> str | None:
    """The tool's version text; None if it is not installed."""
    if shutil.which(sanitizer[0]) is None:
        return None
    done = subprocess.run([*sanitizer, "--version"], capture_output=True, text=True)
    return " ".join(done.stdout.split()[-6:])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("sanitize.json"), help="the JSON; written after each run")
    add("--tools", default="memcheck,racecheck,initcheck", help=f"of {', '.join(TOOLS)}")
    add("--targets", help="kernels, engine, kernels/linear, engine/mtp, ...; all by default")
    add("--cases", type=int, default=6, help="cases of a file, or new tokens of an engine")
    add("--match", help="of the cases, those that pytest's -k finds")
    add("--split", action="store_true", help="each case of a file in a run of its own")
    add("--repeat", type=int, default=1, help="runs of each: what dies may do so at times")
    add("--jobs", type=int, default=4, help="runs at the same time")
    add("--limit", type=float, default=300.0, help="seconds of a run")
    add("--one-core", action="store_true", help="so that one thread compiles and loads kernels")
    add("--no-pdl", action="store_true", help="engines without programmatic dependent launch")
    add("--sanitizer", default="compute-sanitizer", help="the command, with options of its own")
    add("--child", help=argparse.SUPPRESS)
    add("--case", help=argparse.SUPPRESS)
    add("--list", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("cases", "repeat", "jobs", "limit"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} {getattr(options, name)} must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        return run_child(options)
    sanitizer = shlex.split(options.sanitizer)
    found = version(sanitizer)
    if found is None:
        print(f"{sanitizer[0]} is not installed: it comes with the CUDA toolkit", file=sys.stderr)
        return NO_SANITIZER
    tools = chosen(options.tools, TOOLS, "--tools")
    commands = programs(chosen(options.targets, all_targets(), "--targets"), options)
    environment = {
        "sanitizer": found,
        "arguments": sys.argv[1:] if arguments is None else arguments,
    }
    runs: list[Run] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(run, tool, name, words, sanitizer=sanitizer, limit_s=options.limit)
            for _ in range(options.repeat)
            for tool in tools
            for name, words in commands.items()
        ]
        for done in as_completed(waiting):
            runs.append(done.result())
            write(options.out, environment, runs)
            last = runs[-1]
            said = " ".join(filter(None, (last.signal, last.summary)))
            print(
                f"{len(runs)}/{len(waiting)} {last.tool:<10} {last.target:<40} "
                f"{last.seconds:>7.1f} s  {last.verdict}  {said}",
                flush=True,
            )
    return int(any(each.verdict != "clean" for each in runs))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
