"""Frames of sound that a player had in time, and the causes of late ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from graphengine.observe.playback import check_frame_ms, player_slack
from graphengine.profiles.runs.breakdown import Breakdown
from graphengine.profiles.runs.findings import judge_gap
from graphengine.profiles.runs.run_file import UNKNOWN, Run

SHARES = {"p50": 50.0, "p10": 10.0, "p1": 1.0}
EVERY_STEP = "every step"
"""Stands for a cause where no gap since the player last waited was longer than usual."""


def describe_playback(run: Run, found: Breakdown, frame_ms: float) -> dict[str, Any]:
    """How many frames met their deadlines, slack percentiles, and causes of late frames.

    A late frame waited for the longest gap since the player began or last waited: its cause is that
    of the longest gap that ended in the same step. ValueError for a source that knows no requests.
    """
    length = 1e6 * check_frame_ms(frame_ms, "--frame-ms")
    gaps = run.gaps
    if len(gaps) and (gaps.request == UNKNOWN).any():
        raise ValueError(
            f"--frame-ms {frame_ms:g} wants a recording: a file of {run.source} knows no requests"
        )
    steps = run.replays.step[gaps.last[found.gap]].tolist()
    place_of = {step: place for place, step in enumerate(steps)}
    slack: list[float] = []
    late: Counter[str] = Counter()
    for played in _playbacks(run):
        arrived = np.array([gaps.begin[played[0]], *gaps.end[played]])
        of_frames = player_slack(arrived, length)
        slack += (of_frames / 1e6).tolist()
        first = 0
        for index in np.flatnonzero(of_frames < 0).tolist():
            since = played[first : index + 1]
            longest = max(since, key=lambda gap: gaps.milliseconds[gap])
            place = place_of.get(int(run.replays.step[gaps.last[longest]]))
            late[_cause(run, found, place)] += 1
            first = index + 1
    return {
        "ms": frame_ms,
        "n": len(slack),
        "met": sum(each >= 0 for each in slack),
        "slack_ms": _percentiles(slack),
        "late": [{"cause": cause, "frames": count} for cause, count in late.most_common()],
    }


def _cause(run: Run, found: Breakdown, place: int | None) -> str:
    """Why a step took longer than usual; `EVERY_STEP` if it did not."""
    if place is None or not found.outlier[place]:
        return EVERY_STEP
    return judge_gap(run, found, place).cause


def _playbacks(run: Run) -> list[list[int]]:
    """The gaps of each request in order; a request with a break in between counts as two."""
    gaps = run.gaps
    of_request: dict[int, list[list[int]]] = defaultdict(list)
    for gap, request in enumerate(gaps.request.tolist()):
        parts = of_request[request]
        if not parts or gaps.end[parts[-1][-1]] != gaps.begin[gap]:
            parts.append([])
        parts[-1].append(gap)
    return [part for parts in of_request.values() for part in parts]


def _percentiles(slack: list[float]) -> dict[str, float] | None:
    """Observed values: below p10 lies a tenth of them. None without any."""
    if not slack:
        return None
    found = {
        name: float(np.percentile(slack, share, method="inverted_cdf"))
        for name, share in SHARES.items()
    }
    return found | {"min": min(slack)}
