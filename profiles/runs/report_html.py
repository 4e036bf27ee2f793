"""A report as one self-contained HTML file: plots, findings and tables."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from graphengine.profiles.runs.findings import judge_run
from graphengine.profiles.runs.plots import all_plots
from graphengine.profiles.runs.report_text import describe_report
from graphengine.profiles.runs.run_file import Run

TITLES = {
    "over-steps": "Time between tokens, step by step",
    "distribution": "How it is distributed",
    "host-and-device": "Host against device",
    "kernels": "Where the device's time goes",
    "buckets": "Buckets and padding",
    "captures": "What the captures cost",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; margin: 2rem auto; max-width: 62rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.facts, figcaption { color: #57606a } .tiles { display: flex; flex-wrap: wrap; gap: .6rem }
.tile { border: 1px solid #d0d7de; border-radius: 6px; padding: .4rem .9rem }
.tile b { display: block; font-size: 1.25rem } figure { margin: 0 }
svg { width: 100%; height: auto } pre { overflow-x: auto; background: #f6f8fa; padding: .8rem;
       font-size: 12px; line-height: 1.35 }
li { margin: .3rem 0 } .cause { font-weight: 600 }
"""


def html_report(run: Run, document: Mapping[str, Any], baseline: Run | None) -> str:
    """The page; ValueError where matplotlib is missing."""
    found, judged, _ = judge_run(run)
    plots = all_plots(run, document, found, judged, baseline)
    parts = [_head(document), _tiles(document), _findings(document)]
    for name, drawn in plots.items():
        parts.append(f'<h2>{TITLES[name]}</h2>\n<figure data-plot="{name}">{drawn}</figure>')
    parts.append(f"<h2>All figures</h2>\n<pre>{escape(describe_report(document))}</pre>")
    # JSON may hold lone surrogates, which cannot be written to a file.
    body = "\n".join(parts).encode(errors="replace").decode()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Whatever a name in a trace holds: a browser fetches nothing for this page.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(document['file'])}: latency</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(document: Mapping[str, Any]) -> str:
    environment, engine = document["environment"] or {}, document["engine"] or {}
    facts = [environment.get("device"), document["source"], f"{document['replays']} replays"]
    facts += [
        f"{name} {engine[name]}" for name in ("dtype", "max_batch", "lookahead") if name in engine
    ]
    facts += [f"{name} {environment[name]}" for name in ("torch", "date") if environment.get(name)]
    shown = escape(", ".join(str(fact) for fact in facts if fact))
    told = [*document["notes"]]
    told += [f"not the same: {note}" for note in (document["against"] or {}).get("notes", ())]
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in told)
    return f'<h1>{escape(document["file"])}</h1>\n<p class="facts">{shown}</p>{notes}'


def _tiles(document: Mapping[str, Any]) -> str:
    found = document["itl_ms"]
    tiles = [
        (f"{found[name]:.3f} ms" + ("*" if name in found["unsupported"] else ""), f"ITL {name}")
        for name in ("p50", "p90", "p99", "p99.9", "max")
    ]
    tiles.append((f"{found['n']:,}", "gaps"))
    if document["ttft_ms"] is not None:
        tiles.append((f"{document['ttft_ms']['p50']:.2f} ms", "TTFT p50"))
    deadline = document["deadline"]
    if deadline is not None:
        tiles.append((f"{100 * deadline['rate']:.3f}%", f"above {deadline['ms']:g} ms"))
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in tiles
    )
    star = (
        ""
        if not found["unsupported"]
        else (
            '<p class="facts">* fewer values than this percentile needs: '
            "a maximum by another name</p>"
        )
    )
    return f'<div class="tiles">{shown}</div>{star}'


def _findings(document: Mapping[str, Any]) -> str:
    items = "".join(
        f'<li><span class="cause">{escape(one["cause"])}</span>: {escape(one["text"])}</li>'
        for one in document["stands_out"]
    )
    return f"<h2>What stands out</h2>\n<ul>{items or '<li>nothing</li>'}</ul>"
