"""The structure of a graph as text to read and as a drawing by Graphviz."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Drawable(Protocol):
    """A `GraphStructure`, whose nodes and edges are drawn."""

    @property
    def nodes(self) -> Sequence[Any]: ...

    @property
    def edges(self) -> Sequence[Any]: ...


def text_lines(graph: Drawable, name_width: int | None) -> Iterator[str]:
    """See `GraphStructure.to_text`."""
    programmatic = sum(edge.programmatic for edge in graph.edges)
    kinds = Counter(node.kind for node in graph.nodes)
    of_kinds = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield (
        f"{len(graph.nodes)} nodes ({of_kinds or 'empty graph'}), "
        f"{len(graph.edges)} edges ({programmatic} programmatic)"
    )
    incoming: dict[int, list[str]] = {}
    for edge in graph.edges:
        words = edge.describe()
        text = f"{edge.source} ({words})" if words else str(edge.source)
        incoming.setdefault(edge.target, []).append(text)
    width = len(str(len(graph.nodes)))
    for node in graph.nodes:
        waits = incoming.get(node.index)
        after = f"  <- {', '.join(waits)}" if waits else ""
        yield f"[{node.index:>{width}}] {node.describe(name_width)}{after}"
        for nested in node.graphs or ():
            yield from (f"{'':{width + 3}}| {line}" for line in text_lines(nested, name_width))


def dot_text(graph: Drawable, title: str, name_width: int | None) -> str:
    """See `GraphStructure.to_dot`."""
    lines = [
        f"digraph {_quote(title)} {{",
        "  compound=true;",
        '  node [shape=box, style=filled, fillcolor=white, fontname="monospace"];',
        *_dot_lines(graph, "n", name_width, "  "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def draw_svg(dot: str) -> str:
    """Text for Graphviz drawn as SVG by its `dot`; RuntimeError where that is missing or fails."""
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            "drawing a graph as SVG needs Graphviz's `dot` on the PATH; `to_dot()` gives the "
            "text to draw elsewhere"
        )
    done = subprocess.run(
        [program, "-Tsvg"], input=dot, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


_COLOURS = {
    "kernel": "honeydew",
    "memcpy": "lightyellow",
    "memset": "lightyellow",
    "host": "mistyrose",
    "mem_alloc": "mistyrose",
    "mem_free": "mistyrose",
}


def _dot_lines(graph: Drawable, prefix: str, name_width: int | None, indent: str) -> Iterator[str]:
    """Statements for `graph`; its nodes are called `prefix` and their index."""
    for node in graph.nodes:
        label = f"{node.index}: " + node.describe(name_width).replace("  ", "\n")
        colour = _COLOURS.get(node.kind, "white")
        tooltip = node.describe()
        yield (
            f"{indent}{prefix}{node.index} "
            f"[label={_quote(label)}, tooltip={_quote(tooltip)}, fillcolor={colour}];"
        )
        for number, nested in enumerate(node.graphs or ()):
            inner = f"{prefix}{node.index}_{number}_"
            yield f"{indent}subgraph cluster_{inner} {{"
            yield f"{indent}  label={_quote(f'{node.kind} {node.index}, graph {number}')};"
            yield from _dot_lines(nested, inner, name_width, indent + "  ")
            yield f"{indent}}}"
            if nested.nodes:
                link = f"{prefix}{node.index} -> {inner}0"
                yield f"{indent}{link} [lhead=cluster_{inner}, style=dotted, arrowhead=none];"
    for edge in graph.edges:
        words = edge.describe()
        # The usual programmatic edge shows by its style; a label on each would fill the picture.
        options = [] if words in ("", edge.type) else [f"label={_quote(words)}"]
        if edge.programmatic:
            options += ["style=dashed", "color=blue"]
        after = f" [{', '.join(options)}]" if options else ""
        yield f"{indent}{prefix}{edge.source} -> {prefix}{edge.target}{after};"


def _quote(text: str) -> str:
    """A DOT string that shows `text`, with its line breaks."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
