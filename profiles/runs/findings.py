"""Findings of a run: each outlier with its cause, and faults of every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphengine.profiles.runs.breakdown import OUTSIDE, Breakdown, break_down, replay_times
from graphengine.profiles.runs.run_file import Run
from graphengine.profiles.runs.units import MS, counted, duration

SHOWN = 10
OVERLAPS = 3
IDLE = 0.2
PADDED = 0.5
"""Shares of the device's time, and of a bucket's rows, above which they are reported."""
SYNC_SLACK = 0.15
SYNC_SLACK_US = 50.0
"""A caller that comes back within this time after the device's end counts as having waited for it:
on an H200 `torch.cuda.synchronize` takes 30 us to return once the device is done."""

LONGEST_TURN_US = 20_000.0
"""Longest time that a thread is without its core after losing it once: a few turns of the
scheduler. A launch that is longer by more than that was not slow for this reason."""

READ_US = 10.0
"""Time within which a record that has already arrived is read."""
SYNCS = "synchronize, .item(), .cpu()"

HOST_STAGES = {
    "plan": "planning the step",
    "load": "copying metadata to the device",
    "launch": "launching the graph",
    "deliver": "handing out tokens (text, callbacks)",
}
CALLERS = (OUTSIDE, "deliver")
"""Parts in which the caller's own code runs, which may sleep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """One gap that stands out.

    cause    a name of `CAUSES`, which groups outliers
    grew_us  by part, how much more it took than usual
    overlap  what a trace shows in the gap, longest first: (name, microseconds)
    """

    gap: int
    step: int
    milliseconds: float
    cause: str
    text: str
    grew_us: dict[str, float]
    overlap: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line for people about an outlier's cause: `count` gaps, `excess_ms` above the usual in
    all.
    """

    cause: str
    count: int
    excess_ms: float
    text: str


def outliers(run: Run, found: Breakdown) -> list[Outlier]:
    """All outliers of `found`, the longest first."""
    usual = {name: found.usual(values) for name, values in found.parts.items()}
    usual_device = found.usual(found.device_us)
    places = np.flatnonzero(found.outlier)
    places = places[np.argsort(-found.milliseconds[places], kind="stable")]
    judged = [_judge(run, found, int(place), usual, usual_device) for place in places]
    return judged


def judge_gap(run: Run, found: Breakdown, place: int) -> Outlier:
    """Why the gap at this place of `found` took longer than usual."""
    usual = {name: found.usual(values) for name, values in found.parts.items()}
    return _judge(run, found, place, usual, found.usual(found.device_us))


def _judge(
    run: Run, found: Breakdown, place: int, usual: dict[str, float], usual_device: float
) -> Outlier:
    gap = int(found.gap[place])
    excess = 1e3 * (found.milliseconds[place] - found.typical_ms)
    grew = {name: float(values[place] - usual[name]) for name, values in found.parts.items()}
    device = float(found.device_us[place] - usual_device)
    overlap = _overlap(run, gap)
    cause, text = _cause(run, found, place, grew, device, excess)
    waited = bool(overlap) and _is_sync(overlap[0][0]) and overlap[0][1] >= 0.5 * excess
    if cause in ("outside", "unknown") and waited:
        cause, text = "sync", f"the caller waited in {overlap[0][0]} ({duration(overlap[0][1])})"
    return Outlier(
        gap=gap,
        step=int(run.replays.step[run.gaps.last[gap]]),
        milliseconds=float(found.milliseconds[place]),
        cause=cause,
        text=text,
        grew_us=grew | ({} if np.isnan(device) else {"device": device}),
        overlap=overlap,
    )


def _cause(
    run: Run, found: Breakdown, place: int, grew: dict[str, float], device: float, excess: float
) -> tuple[str, str]:
    """The part that explains most of the excess, and why it grew, as far as known."""
    # On a CPU the model runs inside the launch, so growth there is the device's.
    waits = ("launch", "wait") if run.on_host else ("wait",)
    host = {name: more for name, more in grew.items() if name not in waits}
    waited = sum(grew.get(name, 0.0) for name in waits)
    device = grew.get("launch", device) if run.on_host else device
    worst = max(host, key=lambda name: host[name], default=None)
    if _lost_its_core(run, found, place, grew, device, excess):
        return "cpu", _without_core(found, place)
    if worst is not None and host[worst] >= max(0.5 * excess, waited):
        if worst != OUTSIDE:
            slept = _slept(found, place, excess) if worst in CALLERS else ""
            return (
                worst,
                f"{HOST_STAGES[worst]} took {duration(host[worst])} more than usual{slept}",
            )
        if synchronised(found)[place]:
            away = duration(found.parts[OUTSIDE][place])
            return "sync", (
                f"the host was outside the engine for {away}, until the device was done: something "
                f"waits for the device there ({SYNCS})"
            )
        return (
            OUTSIDE,
            f"{duration(host[worst])} more between two calls of step(): the caller's code"
            f"{_slept(found, place, excess)}",
        )
    if found.skew_us[place] - found.usual(found.skew_us) >= 0.5 * excess:
        return "skew", _late_rank(run, found, place)
    if found.skipped[place] > 0:
        passed = counted(int(found.skipped[place]), "step")
        return "pause", f"{passed} went by without the request: it was paused"
    if found.prefilled[place] > 0:
        fed = counted(int(found.prefilled[place]), "prompt token")
        return "prefill", f"it waited for {fed} to be fed"
    larger = _larger_bucket(run, found, place)
    if larger is not None and not device < 0.3 * excess:
        return "bucket", larger
    bucket = run.replays.bucket[run.gaps.last[found.gap[place]]]
    where = "to compute" if run.on_host else "on the device"
    if device >= 0.5 * excess:
        lost = found.preempted[place] - found.usual(found.preempted)
        if run.on_host and lost >= 1 and device <= lost * LONGEST_TURN_US:
            return "cpu", _slower_without_cores(found, place, bucket, device)
        return "device", f"{bucket} took {duration(device)} more {where} than usual"
    if worst is None:
        return "unknown", "the source does not tell what the host did meanwhile"
    if np.isnan(device):
        return "late", f"the host waited {duration(waited)} more; the device's time is not known"
    computed = f"only {duration(device)} longer" if device > 0 else "no longer"
    return "late", (
        f"the host waited {duration(waited)} more than usual, though the device computed "
        f"{computed}: {_why_late(run, found, place, excess)}"
    )


def _lost_its_core(
    run: Run, found: Breakdown, place: int, grew: dict[str, float], device: float, excess: float
) -> bool:
    """Whether most of the excess is time in which the thread was ready to run and did not.

    A thread that also gave its core away may have slept in the caller's own code, or on a CPU
    waited for the threads that compute with it. And one that sleeps while it waits for tokens is
    away for as long as the device works.
    """
    away = found.away_us[place] - found.usual(found.away_us)
    if found.yielded[place] > found.usual(found.yielded):
        sleeps = (*CALLERS, "launch") if run.on_host else CALLERS
        away -= sum(max(0.0, grew.get(name, 0.0)) for name in sleeps)
    lost = found.preempted[place] >= 1 and away >= 0.5 * excess
    return bool(lost) and (run.spins or not device >= 0.5 * excess)


def _without_core(found: Breakdown, place: int) -> str:
    times = counted(int(found.preempted[place]), "time")
    return (
        f"the CPU was busy: this thread did not run for {duration(found.away_us[place])}, as its "
        f"core ran something else; it was interrupted {times}"
    )


def _slower_without_cores(found: Breakdown, place: int, bucket: str, device: float) -> str:
    times = counted(int(found.preempted[place]), "time")
    return (
        f"the CPU was busy: {bucket} took {duration(device)} more to compute than usual, and the "
        f"process's threads lost their cores {times} meanwhile"
    )


def _slept(found: Breakdown, place: int, excess: float) -> str:
    """A remark that the thread slept in the caller's code for most of the excess; else empty."""
    away = found.away_us[place]
    if not (found.yielded[place] >= 1 and away >= 0.5 * excess):
        return ""
    return f", which slept or waited for {duration(away)}"


def _why_late(run: Run, found: Breakdown, place: int, excess: float) -> str:
    """The reasons that remain why the host saw a replay late."""
    away = found.away_us[place]
    if np.isnan(away) or not run.spins:
        return (
            "the replay began late, or the host looked late because it was not scheduled or "
            "Python's collector ran"
        )
    if away - found.usual(found.away_us) >= 0.5 * excess:
        return (
            f"this thread did not run for {duration(away)}, though its core was not taken from "
            "it: it waited for the GIL, a lock or memory"
        )
    return "this thread ran all the while, so the replay began late or Python's collector ran"


def _late_rank(run: Run, found: Breakdown, place: int) -> str:
    """Which rank launched its part of the gap's replays late. The gap's skew must be known."""
    assert run.ranks is not None, f"{place=}"
    late = found.late[place]
    skew = duration(found.skew_us[place])
    return (
        f"rank {run.ranks.last[late]} launched {run.replays.bucket[late]} {skew} after rank 0, and "
        "all waited for it: its process was not scheduled, or did other things"
    )


def synchronised(found: Breakdown) -> NDArray[np.bool_]:
    """Mark gaps where the host was outside the engine until the moment the device was done.

    If the caller stalled, the device is done long before the host is back. If the caller
    synchronised, the host is back as soon as the device is done, and finds the record there.
    """
    if not {OUTSIDE, "wait"} <= found.parts.keys():
        return np.zeros(len(found), dtype=np.bool_)
    slack = np.maximum(SYNC_SLACK_US, SYNC_SLACK * found.device_us)
    near = np.abs(found.next_step_us) <= slack
    away = found.parts[OUTSIDE] >= 0.5 * found.device_us
    at_once = found.parts["wait"] <= np.maximum(READ_US, 0.1 * found.device_us)
    return near & away & at_once


def _larger_bucket(run: Run, found: Breakdown, place: int) -> str | None:
    """A text if the gap ended in a bucket with more rows than most gaps do; else None."""
    rows, live = int(found.rows[place]), int(found.live[place])
    known = found.rows[(found.rows > 0) & ~found.outlier]
    if rows < 1 or not len(known):
        return None
    sizes, counts = np.unique(known, return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if rows <= usual:
        return None
    text = f"a bucket of {rows} rows for {counted(live, 'live one')}, while most steps have {usual}"
    return text + (f"; a bucket of {live} would be enough" if live < rows else "")


def _overlap(run: Run, gap: int) -> tuple[tuple[str, float], ...]:
    """The longest other activities that a trace shows in the gap, by name."""
    if run.activities is None:
        return ()
    begin, end = run.gaps.begin[gap], run.gaps.end[gap]
    seen = run.activities
    inside = np.flatnonzero((seen.end > begin) & (seen.begin < end))
    total: dict[str, float] = defaultdict(float)
    for index in inside:
        span = min(seen.end[index], end) - max(seen.begin[index], begin)
        total[str(seen.name[index])] += float(span) / 1e3
    return tuple(sorted(total.items(), key=lambda item: -item[1])[:OVERLAPS])


def _is_sync(name: str) -> bool:
    return "ynchronize" in name or name.startswith(("cudaMemcpy_", "cudaMemcpy "))


def stands_out(run: Run, found: Breakdown, judged: Sequence[Outlier]) -> list[Finding]:
    """Lines for people: causes of outliers, the costliest first, then findings about every step."""
    groups: dict[str, list[Outlier]] = defaultdict(list)
    for outlier in judged:
        groups[outlier.cause].append(outlier)
    lines = []
    for cause, members in groups.items():
        excess = sum(member.milliseconds - found.typical_ms for member in members)
        worst = members[0]
        more = duration(1e3 * excess)
        took = duration(1e3 * worst.milliseconds, MS)
        longest = f"took {took} (step {worst.step}): {worst.text}"
        several = len(members) > 1
        text = (
            f"{len(members):,} of {counted(len(found), 'step')} took longer than usual, by {more}"
            f"{' in all. The longest' if several else '. It'} {longest}"
        )
        lines.append(Finding(cause=cause, count=len(members), excess_ms=excess, text=text))
    lines.sort(key=lambda line: -line.excess_ms)
    return [*lines, *_hidden_syncs(found), *_idle(run, found), *_padding(run)]


def _hidden_syncs(found: Breakdown) -> list[Finding]:
    """Synchronisations in gaps that are not outliers: the host would be quick without them."""
    count = int((synchronised(found) & ~found.outlier).sum())
    if not count:
        return []
    text = (
        f"in {count:,} of {counted(len(found), 'step')}, none of them an outlier, the host was "
        f"outside the engine until the device was done: something waits for the device there "
        f"({SYNCS}). The host's own work then no longer overlaps with the device's"
    )
    return [Finding(cause="sync", count=count, excess_ms=0.0, text=text)]


def _idle(run: Run, found: Breakdown) -> list[Finding]:
    """A finding about a device that is often idle, and the host's work during that time."""
    device = found.usual(found.device_us)
    if run.on_host or np.isnan(device) or not found.parts or not found.typical_ms:
        return []
    idle = 1.0 - device / (1e3 * found.typical_ms)
    if idle < IDLE:
        return []
    usual = {name: found.usual(values) for name, values in found.parts.items() if name != "wait"}
    worst = max(usual, key=lambda name: usual[name])
    where = "outside the engine" if worst == OUTSIDE else HOST_STAGES[worst]
    text = (
        f"the device is idle for {100 * idle:.0f}% of a usual step: it computes for "
        f"{duration(device)} of {duration(1e3 * found.typical_ms)}. The host's longest part is "
        f"{where}, {duration(usual[worst])}"
    )
    return [Finding(cause="idle", count=len(found), excess_ms=0.0, text=text)]


def _padding(run: Run) -> list[Finding]:
    """Buckets whose rows are mostly padding, and buckets that were larger than needed."""
    replays, lines = run.replays, []
    known = replays.decodes & (replays.rows > 0) & (replays.live >= 0)
    sizes = captured_rows(run)
    for rows in np.unique(replays.rows[known]):
        of_bucket = known & (replays.rows == rows)
        live = replays.live[of_bucket]
        padding = 1.0 - live.sum() / (rows * len(live))
        most = int(live.max())
        smaller = [size for size in sizes if most <= size < rows]
        these = f"{counted(len(live), 'replay')} of {counted(int(rows), 'row')}"
        cost = _cost(run, int(rows))
        if smaller:
            text = (
                f"{these} had at most {counted(most, 'live one')}, though a bucket of {smaller[0]} "
                f"is captured{cost}"
            )
        elif padding >= PADDED and most < rows:
            text = (
                f"{100 * padding:.0f}% of the rows of {these} were padding: at most {most} "
                f"{'was' if most == 1 else 'were'} live, and no smaller bucket for so many is "
                f"captured. Add {most} to `buckets`{cost}"
            )
        else:
            continue
        lines.append(Finding(cause="padding", count=len(live), excess_ms=0.0, text=text))
    return lines


def _cost(run: Run, rows: int) -> str:
    """The time of a replay of `rows` rows, compared with the next smaller bucket in use."""
    times, replays = replay_times(run), run.replays
    known = replays.decodes & ~np.isnan(times)
    smaller = replays.rows[known & (replays.rows > 0) & (replays.rows < rows)]
    if not len(smaller):
        return ""
    other = int(smaller.max())
    of_rows = [times[known & (replays.rows == n)] for n in (rows, other)]
    if not all(map(len, of_rows)):
        return ""
    mine, theirs = (float(np.median(values)) for values in of_rows)
    if not theirs:
        return ""
    share = 100 * (mine / theirs - 1)
    more = "more" if share >= 0 else "less"
    return (
        f" (its replays take {duration(mine)}, {abs(share):.0f}% {more} than those of "
        f"{counted(other, 'row')})"
    )


def captured_rows(run: Run) -> list[int]:
    """Sizes of the engine's decode buckets, as far as the file tells; ascending."""
    found = {int(rows) for rows in np.unique(run.replays.rows[run.replays.decodes]) if rows > 0}
    for capture in run.captures or ():
        rows = capture.get("rows")
        if capture.get("type") == "decode" and isinstance(rows, int):
            found.add(rows)
    return sorted(found)


def judge_run(run: Run) -> tuple[Breakdown, list[Outlier], list[Finding]]:
    """Breakdown, outliers and findings of a run."""
    found = break_down(run)
    judged = outliers(run, found)
    return found, judged, stands_out(run, found, judged)
