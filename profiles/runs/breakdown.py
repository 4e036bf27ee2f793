"""Where each gap between tokens went: host stages, time outside the engine, the device's time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphengine.profiles.runs.rank_times import latest_launches
from graphengine.profiles.runs.run_file import Floats, Gaps, Integers, Run

OUTSIDE = "outside"
"""The part of a gap that the host spent outside the engine, in the caller's own code."""
LEAST_EXCESS = 0.05
DEVIATIONS = 5.0
MAD_TO_SIGMA = 1.4826
THREAD_SLACK_US = 1000.0
"""A thread's own time is read some microseconds after a gap's ends, or later if it is preempted in
between. Beyond this the two ends were read by different threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """The longest gap of each step that requests share; columns in order of their ends.

    gap           indices into the run's `gaps`
    parts         microseconds by part of the host's time: the stages, and `OUTSIDE`; empty where
                  the source has no stages
    device_us     device time of the replays that the gap waited for: those launched after the one
                  that begins it, up to the one that ends it; on a CPU those that the host ran in
                  it. NaN if unknown
    rows, live    of the last of these replays
    prefilled     prompt tokens that these replays fed
    skipped       decode replays in between from which the request got no token: it was paused
    next_step_us  from the device's end of the gap's last replay to the nearest begin of a step
                  on the host, within the gap; NaN if unknown or if there is none
    skew_us       the largest skew of the ranks' launches of these replays, and `late` the replay
                  that has it; NaN and `UNKNOWN` if unknown, and with one rank
    away_us       for how long in the gap the host's thread did not run; NaN if unknown
    preempted     how often it lost its core in the gap, and `yielded` how often it gave it away;
                  NaN if unknown
    limit_ms      a gap above it is an outlier; `outlier` marks these
    """

    gap: Integers
    milliseconds: Floats
    parts: Mapping[str, Floats]
    device_us: Floats
    rows: Integers
    live: Integers
    prefilled: Integers
    skipped: Integers
    next_step_us: Floats
    skew_us: Floats
    late: Integers
    away_us: Floats
    preempted: Floats
    yielded: Floats
    typical_ms: float
    limit_ms: float
    outlier: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.gap)

    def usual(self, values: Floats) -> float:
        """The median without outliers; of all values if all are outliers; NaN without values."""
        kept = values[~self.outlier]
        kept = kept if len(kept) else values
        kept = kept[~np.isnan(kept)]
        return float(np.median(kept)) if len(kept) else float("nan")


def break_down(run: Run) -> Breakdown:
    """The gaps of `run`, part by part. ValueError without gaps."""
    gaps, replays = run.gaps, run.replays
    if not len(gaps):
        what = (
            "not two decode replays have a known end"
            if run.requests is None
            else "no request has two tokens in one recording"
        )
        raise ValueError(f"{run.path}: {what}, so there is no gap to report")
    chosen = _one_a_step(gaps, replays.step)
    begin, end = gaps.begin[chosen], gaps.end[chosen]
    first, last = gaps.first[chosen], gaps.last[chosen]
    milliseconds = (end - begin) / 1e6

    parts: dict[str, Floats] = {}
    if any(len(spans) for spans in run.stages.values()):
        parts = {name: covered(spans, begin, end) / 1e3 for name, spans in run.stages.items()}
        parts[OUTSIDE] = np.maximum(0.0, milliseconds * 1e3 - sum(parts.values()))
    after, until = _computed(run, first, last, begin, end)
    fed = np.concatenate([[0], np.cumsum(replays.prompt_tokens)])
    decodes = np.concatenate([[0], np.cumsum(replays.decodes)])
    skew, late = latest_launches(run, after, until)
    away, preempted, yielded = _away(run, first, last, end - begin)
    typical, limit = outlier_limit(milliseconds)
    return Breakdown(
        gap=chosen,
        milliseconds=milliseconds,
        parts=parts,
        device_us=_device_time(run, after, until),
        rows=replays.rows[until],
        live=replays.live[until],
        prefilled=fed[until] - fed[after + 1],
        skipped=decodes[last] - decodes[first + 1] - _shared(run, first, last),
        next_step_us=_next_step(run, begin, end, last),
        skew_us=skew,
        late=late,
        away_us=away,
        preempted=preempted,
        yielded=yielded,
        typical_ms=typical,
        limit_ms=limit,
        outlier=milliseconds > limit,
    )


def _computed(
    run: Run, first: Integers, last: Integers, begin: Floats, end: Floats
) -> tuple[Integers, Integers]:
    """The replays that each gap waited for: those after the first index, up to the second one.

    A CPU computes a replay when it is launched; with a lookahead that is in an earlier gap than the
    one it ends.
    """
    if not run.on_host:
        return first, last
    after = np.searchsorted(run.replays.launch, begin).astype(np.int64) - 1
    until = np.searchsorted(run.replays.launch, end).astype(np.int64) - 1
    ran = until > after
    return np.where(ran, after, first), np.where(ran, until, last)


def _shared(run: Run, first: Integers, last: Integers) -> Integers:
    """1 where a gap begins with a prefill whose step decoded other requests, too; else 0."""
    steps, after = run.replays.step, np.minimum(first + 1, last)
    same = (after < last) & run.replays.decodes[after] & (steps[after] == steps[first])
    return np.asarray(same, dtype=np.int64)


def _next_step(run: Run, begin: Floats, end: Floats, last: Integers) -> Floats:
    """The `next_step_us` of a breakdown."""
    plans = run.stages.get("plan", np.empty((0, 2)))[:, 0]
    if run.on_host or not len(plans):
        return np.full(len(begin), np.nan)
    done = run.replays.device_end[last]
    after = np.searchsorted(plans, np.nan_to_num(done))
    found = np.full(len(begin), np.nan)
    for index in (np.maximum(after - 1, 0), np.minimum(after, len(plans) - 1)):
        distance = (plans[index] - done) / 1e3
        distance[(plans[index] <= begin) | (plans[index] > end)] = np.nan
        nearer = np.isnan(found) | (np.abs(distance) < np.abs(found))
        found = np.where(nearer & ~np.isnan(distance), distance, found)
    return found


def _away(run: Run, first: Integers, last: Integers, took: Floats) -> tuple[Floats, Floats, Floats]:
    """The `away_us`, `preempted` and `yielded` of gaps that take `took` nanoseconds.

    Unknown where two threads read the tokens, as the times of both cannot be compared.
    """
    if run.thread is None:
        unknown = np.full(len(took), np.nan)
        return unknown, unknown, unknown
    use = run.thread
    ran, preempted, yielded = (
        column[last] - column[first] for column in (use.cpu_ns, use.preempted, use.yielded)
    )
    other = ~((ran >= 0) & (ran <= took + 1e3 * THREAD_SLACK_US))
    away = np.where(other, np.nan, np.maximum(0.0, took - ran) / 1e3)
    return away, np.where(other, np.nan, preempted), np.where(other, np.nan, yielded)


def _one_a_step(gaps: Gaps, steps: Integers) -> Integers:
    """For each replay, the longest of the gaps that end with it; indices in order of their ends."""
    order = np.lexsort((gaps.end - gaps.begin, gaps.last))
    last = np.append(np.diff(gaps.last[order]) != 0, True)
    chosen = order[last]
    ordered: Integers = chosen[np.argsort(gaps.end[chosen], kind="stable")].astype(np.int64)
    return ordered


def outlier_limit(values: Floats) -> tuple[float, float]:
    """The median, and the limit above which a value stands out.

    The limit is at least a twentieth above the median, and at least five standard deviations,
    estimated from the median absolute deviation (Hampel's identifier), which outliers do not move.
    """
    median = float(np.median(values))
    deviation = MAD_TO_SIGMA * float(np.median(np.abs(values - median)))
    return median, median + max(LEAST_EXCESS * median, DEVIATIONS * deviation)


def covered(spans: Floats, begin: Floats, end: Floats) -> Floats:
    """How much of each interval [begin, end] is covered by the disjoint sorted `spans` (n, 2)."""
    if not len(spans):
        return np.zeros(len(begin))
    lengths = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])

    def up_to(moment: Floats) -> Floats:
        index = np.searchsorted(spans[:, 0], moment, side="right") - 1
        inside = np.maximum(index, 0)
        partial = np.minimum(moment, spans[inside, 1]) - spans[inside, 0]
        return np.where(index < 0, 0.0, lengths[inside] + partial)

    return up_to(end) - up_to(begin)


def replay_times(run: Run) -> Floats:
    """Microseconds that each replay computed: on the device; on a CPU, in the host's launch."""
    if run.on_host and np.isnan(run.replays.device_us).all():
        return (run.replays.launched - run.replays.launch) / 1e3
    return run.replays.device_us


def _device_time(run: Run, first: Integers, last: Integers) -> Floats:
    """The sum over replays first + 1 to last; NaN if one of them is unknown."""
    times = replay_times(run)
    unknown = np.concatenate([[0], np.cumsum(np.isnan(times))])
    total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(times))])
    found = total[last + 1] - total[first + 1]
    return np.where(unknown[last + 1] == unknown[first + 1], found, np.nan)
