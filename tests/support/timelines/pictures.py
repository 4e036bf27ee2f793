"""The pictures of docs/profiling.md, from simulated runs: `make pictures`, which needs Chromium.

The causes are planted where `graphengine profile planted` plants them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphengine.cli import main as cli
from graphengine.profiles.planted import JOIN_EVERY, STALL_EVERY, STALL_STEPS, SYNC_EVERY
from timelines.browsers import find_chromium, run_chromium
from timelines.simulated_run import simulate, write_recording

STEPS = 1200
STEP_US = 300.0
JOINED_STEPS = 8
SIZE = "1060,1230"
JOINS = range(JOIN_EVERY, STEPS, JOIN_EVERY)
PLANTED: dict[str, dict[str, Any]] = {
    "stall": {
        "stalls": dict.fromkeys(range(STALL_EVERY, STEPS, STALL_EVERY), STALL_STEPS * STEP_US)
    },
    "sync": {"syncs": set(range(SYNC_EVERY, STEPS, SYNC_EVERY))},
    "bucket": {
        "prefills": set(JOINS),
        "larger": {step + more for step in JOINS for more in range(1, JOINED_STEPS)},
    },
}


def draw(folder: Path) -> None:
    """Write a picture of each report's beginning. SystemExit where there is no Chromium."""
    chromium, reason = find_chromium()
    if chromium is None:
        sys.exit(reason)
    with TemporaryDirectory() as name:
        work = Path(name)
        for cause, planted in PLANTED.items():
            run = work / f"{cause}.jsonl"
            write_recording(run, simulate(STEPS, **planted), environment={"device": "simulated"})
            page = run.with_suffix(".html")
            if cli.main(["report", str(run), "--html", str(page)]):
                sys.exit(f"no report of {cause}")
            picture = folder / f"{cause}.png"
            run_chromium(chromium, page, work, f"--window-size={SIZE}", f"--screenshot={picture}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
