"""The plots of a report, as data: charts that the page's script draws, and bars that are HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphengine.profiles.runs.breakdown import OUTSIDE, Breakdown
from graphengine.profiles.runs.findings import Outlier
from graphengine.profiles.runs.run_file import UNKNOWN, Floats, Integers, Run
from graphengine.profiles.runs.units import counted, duration

POINTS = 20_000
"""Most points of a line: longer ones are drawn by the largest value of neighbouring steps."""
BARS = 12
BINS = 80
PERCENTILES = {"p50": 2, "p90": 10, "p99": 100, "p99.9": 1000, "p99.99": 10_000}
"""For each percentile by name, the number of gaps of which one is longer."""

Chart = dict[str, Any]
"""A plot for page.js: `name`, the axes `x` and `y`, and lists of `lines`, `bars`, `points` and
`limits`. Times are in microseconds; `time` marks their axes, which choose their own unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A name and a text, with horizontal bars below them that share the plot's scale.

    tracks  the parts of each bar from left to right: (colour, value)
    """

    name: str
    text: str
    tracks: tuple[tuple[tuple[str, float], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A section of the page: charts side by side, or bars with a legend (colour, meaning)."""

    name: str
    title: str
    caption: str
    charts: tuple[Chart, ...] = ()
    bars: tuple[Bar, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()


def all_plots(
    run: Run,
    document: Mapping[str, Any],
    found: Breakdown,
    judged: Sequence[Outlier],
    base: Run | None,
) -> list[Plot]:
    """The plots that `run` has data for."""
    deadline = (document["deadline"] or {}).get("ms")
    plots = (
        over_steps(run, found, judged, deadline),
        distribution(run, base),
        host_and_device(run, found),
        kernels(document),
        buckets(document),
        captures(document),
    )
    return [plot for plot in plots if plot is not None]


def _chart(name: str, x: Chart, y: Chart, **series: Sequence[Chart]) -> Chart:
    kinds = ("lines", "bars", "points", "limits")
    return {"name": name, "x": x, "y": y, **{kind: series.get(kind, ()) for kind in kinds}}


def _plain(values: ArrayLike) -> list[float | None]:
    """Values rounded to hundredths, with None for unknown ones."""
    rounded = np.round(np.asarray(values, dtype=np.float64), 2).tolist()
    return [None if value != value else value for value in rounded]


def _line(
    name: str, colour: str, x: NDArray[Any], y: Floats, *, style: str = "", points: int = POINTS
) -> Chart:
    places, shown = upper_envelope(y, points)
    return {
        "name": name, "colour": colour, "style": style,
        "x": _plain(x[places]), "y": _plain(shown),
    }  # fmt: skip


def upper_envelope(values: Floats, points: int = POINTS) -> tuple[Integers, Floats]:
    """(places, values) of a line: the largest of neighbours if there are more than `points`."""
    if len(values) <= points:
        return np.arange(len(values), dtype=np.int64), values
    edges = np.linspace(0, len(values), points + 1).astype(np.int64)[:-1]
    return edges, np.fmax.reduceat(values, edges)


def step_numbers(run: Run, found: Breakdown) -> tuple[Floats, Chart]:
    """The x value of each gap, and its axis: its step, or its place if steps are not known."""
    steps = run.replays.step[run.gaps.last[found.gap]]
    if (steps == UNKNOWN).any():
        places = np.arange(len(found), dtype=np.float64)
        return places, {"label": "gap, in order of time", "whole": True}
    return steps.astype(np.float64), {"label": "step", "whole": True}


def over_steps(
    run: Run, found: Breakdown, judged: Sequence[Outlier], deadline_ms: float | None = None
) -> Plot:
    """The longest gap of each step, outliers marked by cause."""
    steps, axis = step_numbers(run, found)
    step_of = {int(gap): step for gap, step in zip(found.gap, steps, strict=True)}
    points = []
    for cause in dict.fromkeys(outlier.cause for outlier in judged):
        members = [outlier for outlier in judged if outlier.cause == cause]
        points.append({
            "name": f"{cause} ({len(members):,})", "colour": cause,
            "x": _plain([step_of[outlier.gap] for outlier in members]),
            "y": _plain([1e3 * outlier.milliseconds for outlier in members]),
        })  # fmt: skip
    limits = [("outlier limit", "limit", "dotted", found.limit_ms)]
    if deadline_ms is not None:
        limits.append(("deadline", "deadline", "dashed", deadline_ms))
    return Plot(
        name="over-steps",
        title="Time between tokens, step by step",
        caption="Where several requests share a step, the longest of their gaps is drawn. Marks "
        "are gaps above the outlier limit, by cause.",
        charts=(
            _chart(
                "over-steps",
                axis,
                {"label": "longest gap of the step", "time": True},
                lines=[_line("gap", "line", steps, 1e3 * found.milliseconds)],
                points=points,
                limits=[
                    {"name": name, "colour": colour, "style": style, "y": 1e3 * value}
                    for name, colour, style, value in limits
                ],
            ),
        ),
    )


def distribution(run: Run, base: Run | None) -> Plot:
    """Histogram of all gaps, and the latency at each percentile with a stretched tail."""
    runs = [(run, "run", "this run" if base else "")]
    if base is not None:
        runs.insert(0, (base, "before", "before"))
    # Bars of two runs have the same edges, so that their heights can be compared.
    values_of = [1e3 * one.gaps.milliseconds for one, *_ in runs]
    edges = np.histogram_bin_edges(np.concatenate(values_of), BINS)
    bars, lines = [], []
    for (_, colour, label), values in zip(runs, values_of, strict=True):
        is_base = colour == "before"
        counts = np.histogram(values, edges)[0].tolist()
        bars.append({
            "name": label, "colour": colour,
            "style": "dashed" if is_base else "shaded",
            "edges": _plain(edges), "counts": counts,
        })  # fmt: skip
        lines.append(_percentile_line(np.sort(values), colour, label, "dashed" if is_base else ""))
    marks = [(np.log10(one_in), name) for name, one_in in PERCENTILES.items()]
    return Plot(
        name="distribution",
        title="How these times are distributed",
        caption="The histogram counts the gaps by how long they took; each tick of its upright "
        "axis is ten times the one below. The curve shows the time that a share of the gaps does "
        "not exceed: at p99, 99 of 100.",
        charts=(
            _chart(
                "histogram",
                {"label": "time between tokens", "time": True},
                {"label": "number of gaps", "log": True},
                # The baseline's outline lies over the shaded run.
                bars=bars[::-1],
            ),
            _chart(
                "percentiles",
                {"label": "percentile", "ticks": [mark for mark in marks if mark[0] <= _top(run)]},
                {"label": "time between tokens", "time": True},
                lines=lines,
            ),
        ),
    )


def _top(run: Run) -> float:
    return float(np.log10(len(run.gaps)))


def _percentile_line(values: Floats, colour: str, label: str, style: str) -> Chart:
    """Sorted `values` over log10(n), where one value in n is at least as large: 2 is p99."""
    beyond = len(values) / (len(values) - np.arange(len(values)))
    chosen = np.unique(np.geomspace(1, len(values), 400).astype(np.int64))
    places = (len(values) - chosen)[::-1]
    line = _line(label, colour, beyond[places], values[places], style=style)
    return line | {"x": np.round(np.log10(beyond[places]), 5).tolist()}


def host_and_device(run: Run, found: Breakdown) -> Plot | None:
    """The device's time and the host's work of each step; None where neither is known."""
    steps, axis = step_numbers(run, found)
    work = [values for name, values in found.parts.items() if name not in ("wait", OUTSIDE)]
    lines = [("device", "device", "", found.device_us)]
    if work:
        total: Floats = np.sum(np.stack(work), axis=0)
        lines.append(("host, in the engine", "host", "dotted", total))
        lines.append(("host, outside the engine", "outside", "dashed", found.parts[OUTSIDE]))
    known = [line for line in lines if not np.isnan(line[-1]).all()]
    if not known:
        return None
    return Plot(
        name="host-and-device",
        title="Work of the host and of the device",
        caption="The two overlap where the engine runs ahead (lookahead), so they may add up to "
        "more than the step.",
        charts=(
            _chart(
                "host-and-device",
                axis,
                {"label": "time in the step", "time": True},
                lines=[
                    _line(name, colour, steps, values, style=style)
                    for name, colour, style, values in known
                ],
            ),
        ),
    )


def kernels(document: Mapping[str, Any]) -> Plot | None:
    """The time a replay of each kernel, in the bucket that was replayed most often."""
    rows = document["kernels"]
    if not rows:
        return None
    bucket = rows[0]["bucket"]
    chosen = [row for row in rows if row["bucket"] == bucket][:BARS]
    changes = (document["against"] or {}).get("kernels") or ()
    before = {row["name"]: row["before"] for row in changes if row["bucket"] == bucket}
    bars = []
    for row in chosen:
        now = row["us_per_replay"]
        text, tracks = duration(now), [(("run", now),)]
        if before:
            was = before.get(row["name"], 0.0)
            text += f", before {duration(was)}" if was else ", not in the run before"
            tracks.append((("before", was),))
        bars.append(Bar(name=row["name"], text=text, tracks=tuple(tracks)))
    return Plot(
        name="kernels",
        title="Where the device's time goes",
        caption=f"Time of each kernel in one replay of {bucket}, the bucket replayed most often.",
        bars=tuple(bars),
        legend=(("run", "this run"), ("before", "before")) if before else (),
    )


def buckets(document: Mapping[str, Any]) -> Plot:
    """Replays of each bucket, and the share of their rows that was padding."""
    bars = []
    for row in document["buckets"][:BARS]:
        padded = row["replays"] * (row["padding"] or 0.0)
        share = "" if row["padding"] is None else f", {100 * row['padding']:.0f}% padding"
        bars.append(
            Bar(
                name=row["bucket"],
                text=f"{counted(row['replays'], 'replay')}{share}",
                tracks=((("run", row["replays"] - padded), ("padding", padded)),),
            )
        )
    return Plot(
        name="buckets",
        title="Buckets and padding",
        caption="How often each bucket was replayed; the striped part is the share of its rows "
        "that no request used.",
        bars=tuple(bars),
        legend=(("run", "live rows"), ("padding", "padding")),
    )


def captures(document: Mapping[str, Any]) -> Plot | None:
    """The time and memory of each graph's capture."""
    rows = document["captures"]
    if not rows:
        return None
    bars = []
    for row in rows:
        seconds, size = row.get("seconds") or 0.0, row.get("bytes") or 0
        text = f"{duration(1e6 * seconds)}, {size / 2**20:.1f} MiB"
        bars.append(Bar(name=str(row.get("bucket")), text=text, tracks=((("run", seconds),),)))
    return Plot(
        name="captures",
        title="What capturing the graphs cost",
        caption="The bar is the time to capture the graph; the memory is what it holds.",
        bars=tuple(bars),
    )
