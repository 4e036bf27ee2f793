"""The plots of a report, as self-contained SVG elements."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphengine.profiles.runs.breakdown import OUTSIDE, Breakdown
from graphengine.profiles.runs.findings import Outlier
from graphengine.profiles.runs.report_text import shortened
from graphengine.profiles.runs.run_file import UNKNOWN, Floats, Integers, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 2000
"""Most points of a line: longer ones are drawn by the largest value of neighbouring steps."""
BARS = 12
COLOURS = {
    "outside": "#d55e00", "sync": "#cc79a7", "prefill": "#0072b2", "bucket": "#e69f00",
    "device": "#009e73", "pause": "#56b4e9", "late": "#999999",
}  # fmt: skip
OTHER = "#000000"
LINE, BASE, ACCENT = "#4c78a8", "#b0b0b0", "#d55e00"


def _figure(height: float = 2.6, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure and its axes. ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib: pip install '.[report]' in the checkout of graphengine, or "
            "pip install matplotlib, or leave out --html"
        ) from error
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, place + 1) for place in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
    return figure, axes


def svg(figure: Figure, name: str) -> str:
    """`figure` as an SVG element for HTML; its ids begin with `name`, and it has no URLs."""
    import matplotlib

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graphengine"}):
        figure.savefig(text, format="svg", metadata=nothing)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    # Only XML files need namespaces: in HTML the parser knows them.
    drawn = re.sub(r' xmlns(:xlink)?="[^"]*"', "", drawn)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", drawn)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def plain(name: str) -> str:
    """A name from a file as plain text: two dollar signs would make it a formula."""
    return name.encode(errors="replace").decode().replace("$", r"\$")


def upper_envelope(values: Floats, points: int = POINTS) -> tuple[Integers, Floats]:
    """(places, values) of a line: the largest of neighbours if there are more than `points`."""
    if len(values) <= points:
        return np.arange(len(values), dtype=np.int64), values
    edges = np.linspace(0, len(values), points + 1).astype(np.int64)[:-1]
    return edges, np.fmax.reduceat(values, edges)


def step_numbers(run: Run, found: Breakdown) -> tuple[NDArray[np.float64], str]:
    """The x value of each gap, and its label: its step, or its place if steps are not known."""
    steps = run.replays.step[run.gaps.last[found.gap]]
    if (steps == UNKNOWN).any():
        return np.arange(len(found), dtype=np.float64), "gap, in order of time"
    return steps.astype(np.float64), "step"


def over_steps(
    run: Run, found: Breakdown, judged: Sequence[Outlier], deadline_ms: float | None = None
) -> Figure:
    """The longest gap of each step, outliers marked by cause."""
    figure, (axis,) = _figure()
    steps, what = step_numbers(run, found)
    places, values = upper_envelope(found.milliseconds)
    axis.plot(steps[places], values, color=LINE, linewidth=0.8)
    place_of = {int(gap): step for gap, step in zip(found.gap, steps, strict=True)}
    for cause in dict.fromkeys(outlier.cause for outlier in judged):
        members = [outlier for outlier in judged if outlier.cause == cause]
        axis.scatter(
            [place_of[outlier.gap] for outlier in members],
            [outlier.milliseconds for outlier in members],
            s=18,
            color=COLOURS.get(cause, OTHER),
            label=f"{cause} ({len(members)})",
            zorder=3,
        )
    axis.axhline(found.limit_ms, color=BASE, linewidth=0.8, linestyle=":", label="outlier limit")
    if deadline_ms is not None:
        axis.axhline(deadline_ms, color=ACCENT, linewidth=0.8, linestyle="--", label="deadline")
    _name(axis, f"{what}; of requests that share one the longest gap", "ms")
    axis.set_ylim(bottom=0)
    _legend_above(axis)
    return figure


def _legend_above(axis: Axes) -> None:
    """Put the legend where it hides no peaks."""
    axis.legend(fontsize=8, ncols=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _name(axis: Axes, x: str, y: str, title: str = "") -> None:
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.set_title(title, fontsize=10)
    axis.tick_params(labelsize=8)


def distribution(run: Run, base: Run | None) -> Figure:
    """Histogram of all gaps, and the latency at each percentile with a stretched tail."""
    figure, (left, right) = _figure(columns=2)
    runs = [(run, LINE, "this run")]
    if base is not None:
        runs.insert(0, (base, BASE, "before"))
    # Bars of two runs have the same edges, so that their heights can be compared.
    edges = np.histogram_bin_edges(np.concatenate([one.gaps.milliseconds for one, *_ in runs]), 80)
    for one, colour, label in runs:
        values = np.sort(one.gaps.milliseconds)
        left.hist(values, bins=edges.tolist(), color=colour, alpha=0.7, label=label, log=True)
        # One value in `beyond` is at least as large: 100 is p99.
        beyond = len(values) / (len(values) - np.arange(len(values)))
        chosen = np.unique(np.geomspace(1, len(values), 400).astype(np.int64))
        places = len(values) - chosen
        right.plot(beyond[places], values[places], color=colour, label=label, linewidth=1.2)
    right.set_xscale("log")
    marks = [(2, "p50"), (10, "p90"), (100, "p99"), (1000, "p99.9"), (10000, "p99.99")]
    marks = [(place, name) for place, name in marks if place <= len(run.gaps)]
    right.set_xticks([place for place, _ in marks], [name for _, name in marks])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    _name(left, "ms between tokens", "gaps", "histogram, logarithmic")
    _name(right, "percentile", "ms", "percentiles")
    if base is not None:
        right.legend(fontsize=8)
    return figure


def host_and_device(run: Run, found: Breakdown) -> Figure | None:
    """The device's time and the host's work of each step; None where neither is known."""
    figure, (axis,) = _figure()
    steps, what = step_numbers(run, found)
    work = [values for name, values in found.parts.items() if name not in ("wait", OUTSIDE)]
    lines = [("device", found.device_us, COLOURS["device"])]
    if work:
        total: Floats = np.sum(np.stack(work), axis=0)
        lines.append(("host, in the engine", total, COLOURS["prefill"]))
        lines.append(("host, outside", found.parts[OUTSIDE], COLOURS["outside"]))
    drawn = False
    for label, values, colour in lines:
        if np.isnan(values).all():
            continue
        drawn = True
        places, shown = upper_envelope(values)
        axis.plot(steps[places], shown, color=colour, linewidth=0.8, label=label)
    if not drawn:
        return None
    axis.set_ylim(bottom=0)
    _name(axis, what, "us")
    _legend_above(axis)
    return figure


def kernels(document: Mapping[str, Any]) -> Figure | None:
    """Microseconds a replay of each kernel, in the bucket that was replayed most often."""
    rows = document["kernels"]
    if not rows:
        return None
    bucket = rows[0]["bucket"]
    chosen = [row for row in rows if row["bucket"] == bucket][:BARS]
    changes = (document["against"] or {}).get("kernels") or ()
    before = {row["name"]: row["before"] for row in changes if row["bucket"] == bucket}
    figure, (axis,) = _figure(1.0 + 0.28 * len(chosen))
    places = np.arange(len(chosen))
    if before:
        old = [before.get(row["name"], 0.0) for row in chosen]
        axis.barh(places + 0.2, old, height=0.38, color=BASE, label="before")
    new = [row["us_per_replay"] for row in chosen]
    height, shift = (0.38, -0.2) if before else (0.7, 0.0)
    axis.barh(places + shift, new, height=height, color=LINE, label="this run")
    axis.set_yticks(places, [plain(shortened(row["name"])) for row in chosen])
    axis.invert_yaxis()
    _name(axis, "us a replay", "", f"kernels of {plain(bucket)}")
    if before:
        axis.legend(fontsize=8)
    return figure


def buckets(document: Mapping[str, Any]) -> Figure:
    """Replays of each bucket, and the share of their rows that was padding."""
    rows = document["buckets"][:BARS]
    figure, (axis,) = _figure(1.0 + 0.28 * len(rows))
    places = np.arange(len(rows))
    hits = np.array([row["replays"] for row in rows], dtype=np.float64)
    padding = np.array([row["padding"] or 0.0 for row in rows])
    axis.barh(places, hits * (1 - padding), color=LINE, label="live rows")
    axis.barh(places, hits * padding, left=hits * (1 - padding), color=ACCENT, label="padding")
    for place, row in enumerate(rows):
        share = "" if row["padding"] is None else f", {100 * row['padding']:.0f}% padding"
        axis.text(hits[place], place, f" {row['replays']}{share}", va="center", fontsize=8)
    axis.set_yticks(places, [plain(row["bucket"]) for row in rows])
    axis.set_xlim(right=1.25 * max(hits))
    axis.invert_yaxis()
    _name(axis, "replays, divided by the share of live and padded rows", "")
    axis.legend(fontsize=8, loc="lower right")
    return figure


def captures(document: Mapping[str, Any]) -> Figure | None:
    """What each graph took to capture, in time and memory."""
    rows = document["captures"]
    if not rows:
        return None
    figure, axes = _figure(1.0 + 0.22 * len(rows), columns=2)
    places = np.arange(len(rows))
    for axis, key, scale, unit in (
        (axes[0], "seconds", 1.0, "s to capture"),
        (axes[1], "bytes", 2**-20, "MiB"),
    ):
        axis.barh(places, [(row.get(key) or 0) * scale for row in rows], color=LINE)
        axis.set_yticks(places, [plain(str(row.get("bucket"))) for row in rows])
        axis.invert_yaxis()
        _name(axis, unit, "")
    return figure


def all_plots(
    run: Run,
    document: Mapping[str, Any],
    found: Breakdown,
    judged: Sequence[Outlier],
    base: Run | None,
) -> dict[str, str]:
    """SVG by name, for the plots that `run` has data for."""
    deadline = (document["deadline"] or {}).get("ms")
    made: dict[str, Callable[[], Figure | None]] = {
        "over-steps": lambda: over_steps(run, found, judged, deadline),
        "distribution": lambda: distribution(run, base),
        "host-and-device": lambda: host_and_device(run, found),
        "kernels": lambda: kernels(document),
        "buckets": lambda: buckets(document),
        "captures": lambda: captures(document),
    }
    drawn = {name: make() for name, make in made.items()}
    return {name: svg(figure, name) for name, figure in drawn.items() if figure is not None}
