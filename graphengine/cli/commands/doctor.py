"""`graphengine doctor`: whether and how an engine runs on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from graphengine import __version__
from graphengine.cli.terminal import columns, fit
from graphengine.observe.doctor import READ_VERSIONS, examine, problems, verdict
from graphengine.observe.findings import Finding
from graphengine.observe.machine import read_machine

_REMEDY = "->"


def doctor(options: argparse.Namespace) -> int:
    """Print the findings; returns 0 if an engine runs on the best device here, 1 if something is
    broken.
    """
    machine = read_machine(__version__, READ_VERSIONS)
    findings = examine(machine)
    broken, summary = problems(findings), verdict(findings, machine)
    if options.json:
        found = [asdict(finding) for finding in findings]
        print(json.dumps({"findings": found, "problems": len(broken), "verdict": summary}))
    else:
        width = columns()
        for line in report_lines(findings):
            print(fit(line, width))
        print(f"\n{fit(summary, width)}")
    return 1 if broken else 0


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Groups of findings in aligned lines; problems and remedies come below their finding."""
    names = max(len(finding.name) for finding in findings)
    for number, (group, members) in enumerate(groupby(findings, lambda each: each.group)):
        if number:
            yield ""
        yield group
        for finding in members:
            yield f"  {finding.name:<{names}}  {finding.value}"
            if finding.problem is not None:
                yield f"  {'PROBLEM':>{names}}  {finding.problem}"
            if finding.remedy is not None:
                yield f"  {_REMEDY:>{names}}  {finding.remedy}"
