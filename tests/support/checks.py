"""Run make's targets, two at a time, to the last one, and end with the sum of their tests.

    python tests/support/checks.py --jobs 2 tests types lint

They begin in the order given. A target's output is printed when it has ended, whether it failed or
not, and the closing lines say which targets failed, how long each took, and how many tests passed,
failed and were skipped. Exit status 0: every target passed; 1: not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_CLOSING = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)
"""The line with which a run of pytest ends."""
_COUNT = re.compile(r"(\d+) ([a-z]+)")


@dataclass(frozen=True, slots=True)
class Ended:
    """A target that has run."""

    target: str
    status: int
    seconds: float
    output: str

    @property
    def tests(self) -> Counter[str]:
        """How many passed, failed, were skipped, ...: the sum over pytest's closing lines."""
        counts: Counter[str] = Counter()
        for line in _CLOSING.findall(self.output):
            for count, what in _COUNT.findall(line):
                counts["error" if what == "errors" else what] += int(count)
        return counts


def run(target: str) -> Ended:
    """The installation is done: a target that asks for one must not replace files under others."""
    begun = time.monotonic()
    done = subprocess.run(
        ["make", "-o", "install", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ended(target, done.returncode, time.monotonic() - begun, done.stdout)


def run_all(targets: Sequence[str], jobs: int, run: Callable[[str], Ended] = run) -> list[Ended]:
    """Each is told of as soon as it has ended."""

    def tell(target: str) -> Ended:
        ended = run(target)
        # One write, so that no other target's output comes between.
        sys.stdout.write(f"--- {target}\n{ended.output.rstrip()}\n")
        sys.stdout.flush()
        return ended

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(tell, targets))


def summary(all_ended: Sequence[Ended]) -> str:
    """The closing lines. A target that failed without a failed test counts as one failure."""
    sums: Counter[str] = Counter()
    lines = ["", "=== all targets"]
    for ended in all_ended:
        tests = ended.tests
        failed = tests["failed"] + tests["error"]
        sums.update(tests)
        sums["bad"] += max(failed, 1) if ended.status else failed
        said = ", ".join(
            f"{count} {what}" for what, count in tests.items() if "warning" not in what
        )
        verdict = f"FAILED, status {ended.status}" if ended.status else "passed"
        lines.append(f"{ended.target:16} {verdict} in {ended.seconds:.0f} s  {said}".rstrip())
    last = f"{sums['passed']} passed, {sums['bad']} failed, {sums['skipped']} skipped"
    return "\n".join([*lines, last])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--jobs", type=int, default=2, help="targets at the same time")
    options = parser.parse_args(arguments)
    ended = run_all(options.targets, options.jobs)
    print(summary(ended))
    return 1 if any(each.status for each in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
