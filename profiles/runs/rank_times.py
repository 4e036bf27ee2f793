"""A run's facts about several ranks: skew of their launches, and time in collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from graphengine.profiles.runs.run_file import UNKNOWN, Floats, Integers, Run
from graphengine.profiles.tables.percentiles import percentiles


def latest_launches(run: Run, after: Integers, until: Integers) -> tuple[Floats, Integers]:
    """For each gap, the largest launch skew in microseconds, and the replay that has it.

    A gap's replays are those after index `after`, up to `until`. NaN and `UNKNOWN` where none is
    known.
    """
    skew, replay = np.full(len(after), np.nan), np.full(len(after), UNKNOWN, dtype=np.int64)
    if run.ranks is None:
        return skew, replay
    known = np.nan_to_num(run.ranks.skew_us, nan=-np.inf)
    for gap, (first, last) in enumerate(zip(after.tolist(), until.tolist(), strict=True)):
        worst = first + 1 + int(np.argmax(known[first + 1 : last + 1]))
        if np.isfinite(known[worst]):
            skew[gap], replay[gap] = known[worst], worst
    return skew, replay


def describe_ranks(run: Run) -> dict[str, Any] | None:
    """The report's part on ranks; None for a run of one.

    `waited` is for how long rank 0 waited in collectives; None where the recording cannot tell.
    """
    ranks = run.ranks
    if ranks is None:
        return None
    known = ranks.skew_us[~np.isnan(ranks.skew_us)]
    return {
        "count": ranks.count,
        "option": ranks.option,
        "waited": _waited(run),
        "skew_us": percentiles(known) if len(known) else None,
        "last": _times_last(run),
    }


def _waited(run: Run) -> dict[str, Any] | None:
    ranks = run.ranks
    if ranks is None or ranks.waited_s is None or not ranks.seconds or not ranks.steps:
        return None
    return {
        "s": ranks.waited_s,
        "share": ranks.waited_s / ranks.seconds,
        "us_per_step": 1e6 * ranks.waited_s / ranks.steps,
    }


def _times_last(run: Run) -> list[dict[str, Any]]:
    """How often each rank was the last to launch a replay, among replays with a known skew."""
    assert run.ranks is not None, f"{run.path=}"
    skew, other = run.ranks.skew_us, run.ranks.last
    known = ~np.isnan(skew)
    # A negative skew: all others were earlier than rank 0, the driver's.
    counts = Counter(np.where(skew < 0, 0, other)[known].tolist())
    return [
        {"rank": rank, "replays": counts[rank], "share": counts[rank] / max(1, int(known.sum()))}
        for rank in range(run.ranks.count)
    ]
