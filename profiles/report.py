"""`graphengine report`: the latency in a run's file, alone or compared with another run."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from graphengine.profiles.arguments import check_apart, check_out, tell_written, write_out
from graphengine.profiles.runs.compare import compare
from graphengine.profiles.runs.report_html import html_report
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.runs.run_document import describe_run
from graphengine.profiles.runs.run_file import Run
from graphengine.profiles.sources import read_run
from graphengine.profiles.tables.percentiles import rounded


def report(options: argparse.Namespace) -> None:
    """Read, print, write. ValueError for files that cannot be read and bad options."""
    deadline = options.deadline_ms
    if deadline is not None and not (deadline > 0 and math.isfinite(deadline)):
        raise ValueError(f"--deadline-ms {deadline} must be a positive number of milliseconds")
    outputs = {"--html": options.html, "--out": options.out}
    check_apart({"the run": options.file, "--against": options.against}, outputs)
    for option, path in outputs.items():
        if path is not None:
            check_out(path, option)
    run = read_run(options.file)
    baseline = None if options.against is None else read_run(options.against)
    document = make_document(run, baseline, deadline_ms=deadline, frame_ms=options.frame_ms)
    if options.html is not None:
        write_out(options.html, html_report(run, document, baseline), "--html")
    text = json.dumps(document, indent=2, allow_nan=False)
    if options.out is not None:
        write_out(options.out, text + "\n")
    print(text if options.json else describe_report(document), flush=True)
    tell_written(options.html, options.out)


def make_document(
    run: Run,
    baseline: Run | None = None,
    *,
    deadline_ms: float | None = None,
    frame_ms: float | None = None,
) -> dict[str, Any]:
    """The report of `run` as a JSON document, compared with `baseline` if given."""
    document = describe_run(run, deadline_ms=deadline_ms, frame_ms=frame_ms)
    if baseline is not None:
        document["against"] = rounded(compare(baseline, run), 6)
    return document
