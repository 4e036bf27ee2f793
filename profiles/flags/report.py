"""The flags of `graphengine report`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine report`."""
    add = parser.add_argument
    add("file", type=Path, help="run.jsonl (recorder), run.sqlite (nsys) or trace.json (torch)")
    add("--against", type=Path, metavar="FILE", help="compare with this earlier run")
    add("--deadline-ms", type=float, metavar="X", help="count the gaps that take longer")
    add(
        "--frame-ms",
        type=float,
        metavar="X",
        help="count the frames that a player had in time, which plays each for so long",
    )
    add("--html", type=Path, metavar="FILE", help="write a page with charts and tables")
    add("--out", type=Path, metavar="FILE", help="write the report as JSON")
    add("--json", action="store_true", help="print the JSON instead of tables")
