"""A report as one self-contained HTML file: findings, plots and tables.

The folder `page` has its frame, its looks, and the script that draws the charts. The page's own
policy lets a browser run that script, known by its hash, and nothing else, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from graphengine.profiles.runs.causes import CAUSES
from graphengine.profiles.runs.findings import judge_run
from graphengine.profiles.runs.plots import Bar, Plot, all_plots
from graphengine.profiles.runs.report_sections import (
    STAR,
    Fact,
    Section,
    Table,
    comparison,
    facts,
    legend,
    notes,
    sections,
)
from graphengine.profiles.runs.run_file import Run
from graphengine.profiles.runs.units import MS, counted, duration
from graphengine.profiles.tables.text import Column

MARKS = tuple(cause.name for cause in CAUSES if cause.name not in ("idle", "padding"))
"""Causes of single gaps: each has a mark of its own in page.html, and its colour in page.css."""


def html_report(run: Run, document: Mapping[str, Any], baseline: Run | None) -> str:
    """The page of a report."""
    found, judged, _ = judge_run(run)
    plots = all_plots(run, document, found, judged, baseline)
    parts = [_head(document), _tiles(document), _findings(document), _NO_SCRIPT]
    parts += map(_section, comparison(document))
    parts += map(_plot, plots)
    parts += map(_section, sections(document))
    charts = json.dumps([chart for plot in plots for chart in plot.charts], allow_nan=False)
    script = _part("page.js")
    page = Template(_part("page.html")).substitute(
        title=escape(document["file"]),
        style=_part("page.css"),
        body="\n".join(parts),
        # Within a script element only the end tag has a meaning.
        charts=charts.replace("<", "\\u003c"),
        script=script,
        script_hash=policy_hash(script),
    )
    # JSON may hold lone surrogates, which cannot be written to a file.
    return page.encode(errors="replace").decode()


def policy_hash(script: str) -> str:
    """`script` as a content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _part(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


_NO_SCRIPT = (
    "<noscript><p>The charts are drawn by a script in this file, which this browser does not run. "
    "The bars and tables need none.</p></noscript>"
)


def _head(document: Mapping[str, Any]) -> str:
    told = "".join(f"<p>Note: {escape(note)}</p>" for note in notes(document))
    shown = ", ".join(_with_meaning(one.text, one) for one in facts(document))
    words = "".join(f'<p class="muted">{escape(line)}.</p>' for line in legend(facts(document)))
    return f'<h1>{escape(document["file"])}</h1>\n<p class="muted">{shown}</p>{words}{told}'


def _with_meaning(text: str, named: Fact | Column) -> str:
    """`text`, whose name shows its meaning, if it has one, when pointed at or read aloud."""
    if not named.meaning:
        return escape(text)
    name = escape(named.title)
    marked = f'<abbr title="{escape(named.meaning)}">{name}</abbr>'
    return escape(text).replace(name, marked, 1)


def _with_code(text: str) -> str:
    """A text of ours, with words between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _tiles(document: Mapping[str, Any]) -> str:
    found = document["itl_ms"]
    tiles = [
        (
            duration(1e3 * found[name], MS) + ("*" if name in found["unsupported"] else ""),
            f"ITL {name}",
        )
        for name in ("p50", "p90", "p99", "p99.9", "max")
    ]
    count, _, what = counted(found["n"], "gap").partition(" ")
    tiles.append((count, what))
    if document["ttft_ms"] is not None:
        tiles.append((duration(1e3 * document["ttft_ms"]["p50"], MS), "TTFT p50"))
    deadline = document["deadline"]
    if deadline is not None:
        tiles.append((f"{100 * deadline['rate']:.3f}%", f"above {deadline['ms']:g} ms"))
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in tiles
    )
    words = "ITL is the time between two tokens of a request, TTFT the time to its first token."
    star = f" {STAR}." if found["unsupported"] else ""
    return f'<div class="tiles">{shown}</div>\n<p class="muted">{words}{escape(star)}</p>'


def _mark(cause: str) -> str:
    if cause not in MARKS:
        return ""
    return f'<svg class="mark c-{cause}" aria-hidden="true"><use href="#mark-{cause}"/></svg> '


def _findings(document: Mapping[str, Any]) -> str:
    items = "".join(
        f'<li>{_mark(one["cause"])}<span class="cause">{escape(one["cause"])}</span>: '
        f"{_with_code(one['text'])}"
        f'<div class="remedy">What to do: {_with_code(one["remedy"])}.</div></li>'
        for one in document["stands_out"]
    )
    return f"<h2>What stands out</h2>\n<ul>{items or '<li>Nothing.</li>'}</ul>"


def _plot(plot: Plot) -> str:
    charts = "".join(
        f'<div class="chart" data-chart="{chart["name"]}"></div>' for chart in plot.charts
    )
    legend = "".join(
        f'<li><span class="swatch fill c-{colour}"></span>{escape(meaning)}</li>'
        for colour, meaning in plot.legend
    )
    return (
        f'<h2>{escape(plot.title)}</h2>\n<figure data-plot="{plot.name}">'
        f"<figcaption>{escape(plot.caption)}</figcaption>"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + (f'<div class="charts">{charts}</div>' if charts else _bars(plot.bars))
        + "</figure>"
    )


def _bars(bars: Sequence[Bar]) -> str:
    whole = [sum(value for _, value in track) for bar in bars for track in bar.tracks]
    longest = max(whole) or 1.0

    def track(parts: Sequence[tuple[str, float]]) -> str:
        return "".join(
            f'<span class="fill c-{colour}" style="width:{100 * value / longest:.2f}%"></span>'
            for colour, value in parts
            if value
        )

    return "".join(
        f'<div class="bar"><div class="bar-text"><span>{escape(bar.name)}</span>'
        f"<span>{escape(bar.text)}</span></div>"
        + "".join(f'<div class="track">{track(parts)}</div>' for parts in bar.tracks)
        + "</div>"
        for bar in bars
    )


def _section(section: Section) -> str:
    shown = [f"<h2>{escape(section.title)}</h2>"]
    shown += [
        _table(part) if isinstance(part, Table) else f"<p>{escape(part)}</p>"
        for part in section.parts
    ]
    return "\n".join(shown)


def _table(table: Table) -> str:
    """On a narrow page each row becomes a block of its own, in which cells show their heading."""

    def kind(column: Column) -> str:
        return ' class="left name"' if column.left else ""

    head = "".join(
        f"<th{kind(column)}>{_with_meaning(column.title, column)}</th>" for column in table.columns
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind(column)} data-head="{escape(column.title)}">{escape(column.cell(one))}</td>'
            for column in table.columns
        )
        + "</tr>"
        for one in table.rows
    )
    words = "".join(f'<p class="muted">{escape(line)}.</p>' for line in legend(table.columns))
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{words}"
    )
