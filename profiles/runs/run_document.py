"""The figures of a report as one JSON document; text and HTML are made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphengine.profiles.runs.breakdown import Breakdown, covered, replay_times
from graphengine.profiles.runs.causes import REMEDIES
from graphengine.profiles.runs.compare import replay_sums
from graphengine.profiles.runs.findings import SHOWN, Finding, Outlier, judge_run
from graphengine.profiles.runs.playback import describe_playback
from graphengine.profiles.runs.rank_times import describe_ranks
from graphengine.profiles.runs.run_file import Floats, Run, merged
from graphengine.profiles.tables.percentiles import percentiles, rounded

SCHEMA = 1


def describe_run(
    run: Run, *, deadline_ms: float | None = None, frame_ms: float | None = None
) -> dict[str, Any]:
    """Everything that a report says about `run`; null if its source cannot tell."""
    found, judged, findings = judge_run(run)
    document = {
        "schema": SCHEMA,
        "file": run.path.name,
        "source": run.source,
        "notes": list(run.notes),
        "environment": _plain(run.environment),
        "engine": _plain(run.engine),
        "replays": len(run.replays),
        "discarded_tokens": run.discarded,
        "ttft_ms": _first_tokens(run),
        "itl_ms": percentiles(run.gaps.milliseconds, independent=len(found)),
        "itl_basis": run.gap_basis,
        "deadline": _deadline(run, found, deadline_ms),
        "frames": None if frame_ms is None else describe_playback(run, found, frame_ms),
        "step": _step(run, found),
        "launch_us": _percentiles((run.replays.launched - run.replays.launch) / 1e3),
        "idle_us": _percentiles(idle_times(run)),
        "buckets": bucket_rows(run),
        "captures": _captures(run),
        "kernels": kernel_rows(run),
        "ranges": _ranges(run),
        "requests": _requests(run),
        "ranks": describe_ranks(run),
        "thread": _thread(run, found),
        "limit_ms": found.limit_ms,
        "stands_out": [_finding(one) for one in findings],
        "outliers": [_outlier(one) for one in judged[:SHOWN]],
        "against": None,
    }
    rounded_document: dict[str, Any] = rounded(document, 6)
    return rounded_document


def _captures(run: Run) -> list[dict[str, Any]] | None:
    """The captures of a run; None for a CPU, which captures nothing."""
    found = [dict(one) for one in run.captures or ()]
    return found if any(one.get("nodes") is not None for one in found) else None


def _plain(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else dict(found)


def _percentiles(values: Floats) -> dict[str, Any] | None:
    known = values[~np.isnan(values)]
    return percentiles(known) if len(known) else None


def _first_tokens(run: Run) -> dict[str, Any] | None:
    if run.requests is None:
        return None
    return _percentiles((run.requests.first - run.requests.submitted) / 1e6)


def _deadline(run: Run, found: Breakdown, deadline_ms: float | None) -> dict[str, Any] | None:
    """How many gaps took longer, among all and among those that do not share a step."""
    if deadline_ms is None:
        return None
    all_gaps = run.gaps.milliseconds
    missed = int((all_gaps > deadline_ms).sum())
    return {
        "ms": deadline_ms,
        "missed": missed,
        "n": len(all_gaps),
        "rate": missed / len(all_gaps),
        "steps_missed": int((found.milliseconds > deadline_ms).sum()),
        "steps": len(found),
    }


def _step(run: Run, found: Breakdown) -> dict[str, Any]:
    """A usual gap, part by part, in microseconds."""
    # A CPU computes in the launch, which may not be in the gap that it ends.
    on_host = run.on_host and bool(found.parts)
    device = found.usual(found.parts["launch"] if on_host else found.device_us)
    known = not np.isnan(device)
    return {
        "ms": found.typical_ms,
        "parts_us": {name: found.usual(values) for name, values in found.parts.items()} or None,
        "device_us": device if known else None,
        "device_share": device / (1e3 * found.typical_ms) if known and found.typical_ms else None,
        "replay_on_host": run.on_host,
    }


def idle_times(run: Run) -> Floats:
    """Microseconds from the end of each replay on the device to the start of the next, at least 0.

    Only within gaps between tokens: a device without requests does not count as idle. NaN if one of
    the two times is unknown.
    """
    replays = run.replays
    if len(replays) < 2 or run.on_host:
        return np.empty(0)
    begin = replays.device_end[:-1]
    end = np.maximum(begin, (replays.device_end - 1e3 * replays.device_us)[1:])
    waited = merged(np.stack([run.gaps.begin, run.gaps.end], axis=1))
    return np.where(np.isnan(end), np.nan, covered(waited, begin, end)) / 1e3


def bucket_rows(run: Run) -> list[dict[str, Any]]:
    """Hits, padding and times of each bucket, the most used first."""
    replays, times = run.replays, replay_times(run)
    rows = []
    for bucket, hits in Counter(replays.bucket.tolist()).most_common():
        chosen = replays.bucket == bucket
        size, live = replays.rows[chosen], replays.live[chosen]
        known = (size > 0) & (live >= 0)
        total = int(size[known].sum())
        rows.append(
            {
                "bucket": bucket,
                "kind": str(replays.kind[chosen][0]),
                "replays": hits,
                "share": hits / len(replays),
                "rows": int(size.max()) if known.any() else None,
                "live": float(live[known].mean()) if known.any() else None,
                "padding": 1 - int(live[known].sum()) / total if total else None,
                "device_us": _percentiles(times[chosen]),
                "prompt_tokens": int(replays.prompt_tokens[chosen].sum()),
            }
        )
    return rows


def kernel_rows(run: Run) -> list[dict[str, Any]] | None:
    """Kernels of each bucket by their time a replay; None for a source without kernels."""
    if run.kernels is None:
        return None
    per_bucket = Counter(run.replays.bucket[np.isfinite(run.replays.device_us)].tolist())
    rows: list[dict[str, Any]] = []
    for kernel in run.kernels:
        sums = replay_sums([kernel])
        rows.append(
            {
                "bucket": kernel.bucket,
                "name": kernel.name,
                "count": len(kernel.times_us),
                "per_replay": len(kernel.times_us) / max(1, per_bucket[kernel.bucket]),
                "total_us": float(kernel.times_us.sum()),
                "median_us": float(np.median(kernel.times_us)),
                "us_per_replay": float(np.median(sums)),
            }
        )

    def order(row: dict[str, Any]) -> tuple[int, str, float]:
        return -per_bucket[row["bucket"]], row["bucket"], -row["us_per_replay"]

    return sorted(rows, key=order)


def _thread(run: Run, found: Breakdown) -> dict[str, Any] | None:
    """Time in a usual step that the host's thread did not run, and how often it was preempted in
    all; None for a source that does not tell.
    """
    away = found.usual(found.away_us)
    if run.thread is None or np.isnan(away):
        return None
    return {"away_us": away, "preempted": int(np.nansum(found.preempted))}


def _ranges(run: Run) -> list[dict[str, Any]] | None:
    if run.ranges is None:
        return None
    return [
        {"range": name, "us": percentiles((spans[:, 1] - spans[:, 0]) / 1e3)}
        for name, spans in sorted(run.ranges.items())
        if len(spans)
    ]


def _requests(run: Run) -> dict[str, Any] | None:
    if run.requests is None:
        return None
    return {
        "finished": len(run.requests.id),
        "reasons": dict(Counter(run.requests.reason.tolist())),
        "pauses": int(run.requests.pauses.sum()),
        "prompt_tokens": int(run.requests.prompt_tokens.sum()),
        "new_tokens": int(run.requests.new_tokens.sum()),
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "cause": found.cause,
        "remedy": REMEDIES[found.cause],
        "count": found.count,
        "excess_ms": found.excess_ms,
        "text": found.text,
    }


def _outlier(found: Outlier) -> dict[str, Any]:
    return {
        "step": found.step,
        "ms": found.milliseconds,
        "cause": found.cause,
        "text": found.text,
        "grew_us": found.grew_us,
        "overlap": [{"name": name, "us": span} for name, span in found.overlap],
    }
