"""A report's document as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphengine.profiles.text import NOTHING, Column, number

KERNELS_SHOWN = 12
NAME_WIDTH = 60

Document = Mapping[str, Any]


def describe_report(document: Document) -> str:
    """All sections that the document has data for."""
    parts = [_heading(document), _latencies(document), _stands_out(document), _step(document)]
    parts += [_buckets(document), _kernels(document), _ranges(document), _captures(document)]
    parts += [_outliers(document), _comparison(document.get("against")), _missing(document)]
    return "\n\n".join(part for part in parts if part)


def _heading(document: Document) -> str:
    environment, engine = document["environment"] or {}, document["engine"] or {}
    facts = [str(environment.get("device") or "unknown device")]
    facts += [f"torch {environment['torch']}"] if environment.get("torch") else []
    facts += [str(engine["dtype"])] if engine.get("dtype") else []
    for name in ("max_batch", "lookahead", "speculative", "numerics_id"):
        if engine.get(name) is not None:
            facts.append(f"{name} {engine[name]}")
    commit = str(environment.get("commit") or "")[:10]
    facts += [f"commit {commit}"] if commit else []
    lines = [
        f"{document['file']} ({document['source']}): {document['replays']} replays",
        ", ".join(facts),
    ]
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join(lines)


PERCENTILE_NAMES = ("p50", "p90", "p99", "p99.9", "max")


def _percentile(found: Mapping[str, Any], name: str, digits: int = 3) -> str:
    star = "*" if name in found["unsupported"] else ""
    return f"{found[name]:.{digits}f}{star}"


def _latencies(document: Document) -> str:
    rows = [("TTFT ms", document["ttft_ms"]), ("ITL ms", document["itl_ms"])]
    rows += [("launch us", document["launch_us"]), ("device idle us", document["idle_us"])]
    known = [{"name": name, **found} for name, found in rows if found is not None]
    columns = [Column("latency", lambda row: str(row["name"]))]
    columns += [Column(name, _cell(name)) for name in PERCENTILE_NAMES]
    columns += [Column("n", lambda row: str(row["n"]))]
    columns += [Column("separate", lambda row: str(row["independent"]))]
    lines = [wide_table(columns, known), f"ITL is {document['itl_basis']}"]
    if any(row["unsupported"] for row in known):
        lines.append("* fewer values than this percentile needs: their maximum by another name")
    deadline = document["deadline"]
    if deadline is not None:
        lines.append(
            f"deadline {deadline['ms']:g} ms: {deadline['missed']} of {deadline['n']} gaps missed "
            f"it, {100 * deadline['rate']:.3f}%, in {deadline['steps_missed']} of "
            f"{deadline['steps']} steps"
        )
    return "\n".join(lines)


def _cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: _percentile(row, name)


def _stands_out(document: Document) -> str:
    lines = [f"- {found['cause']}: {found['text']}" for found in document["stands_out"]]
    return "\n".join(["what stands out", *(lines or ["- nothing"])])


def _step(document: Document) -> str:
    step = document["step"]
    parts, device = step["parts_us"], step["device_us"]
    if parts is None and device is None:
        return ""
    line = f"a usual step, {step['ms']:.3f} ms: "
    line += "; ".join(f"{name} {value:.0f} us" for name, value in (parts or {}).items())
    if device is not None:
        where = "inside the launch" if step["replay_on_host"] else "on the device"
        share = _optional(step["device_share"], 100, 0, "%")
        line += f"\n{device:.0f} us {where}, {share} of it"
    return line


def _optional(value: float | None, scale: float = 1.0, digits: int = 1, unit: str = "") -> str:
    return NOTHING if value is None else f"{value * scale:.{digits}f}{unit}"


def _buckets(document: Document) -> str:
    columns = (
        Column("bucket", lambda row: row["bucket"]),
        Column("replays", lambda row: str(row["replays"])),
        Column("share", lambda row: _optional(row["share"], 100, 1, "%")),
        Column("live", lambda row: _optional(row["live"], digits=2)),
        Column("padding", lambda row: _optional(row["padding"], 100, 1, "%")),
        Column("us p50", lambda row: _time(row, "p50")),
        Column("us p99", lambda row: _time(row, "p99")),
        Column("us max", lambda row: _time(row, "max")),
    )
    return wide_table(columns, document["buckets"])


def _time(row: Mapping[str, Any], name: str) -> str:
    return NOTHING if row["device_us"] is None else _percentile(row["device_us"], name, 1)


def _kernels(document: Document) -> str:
    rows = document["kernels"]
    if not rows:
        return ""
    columns = (
        Column("bucket", lambda row: row["bucket"]),
        Column("a replay", lambda row: number(row["per_replay"], 1)),
        Column("us/replay", lambda row: number(row["us_per_replay"], 1)),
        Column("median us", lambda row: number(row["median_us"], 2)),
        Column("kernel", lambda row: shortened(row["name"])),
    )
    lines = [wide_table(columns, rows[:KERNELS_SHOWN])]
    if len(rows) > KERNELS_SHOWN:
        lines.append(f"and {len(rows) - KERNELS_SHOWN} more: --json has all")
    return "\n".join(lines)


def shortened(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _ranges(document: Document) -> str:
    rows = document["ranges"]
    if not rows:
        return ""
    columns = [Column("range", lambda row: row["range"])]
    columns += [Column(f"us {name}", _range_cell(name)) for name in PERCENTILE_NAMES]
    columns += [Column("n", lambda row: str(row["us"]["n"]))]
    return wide_table(columns, rows)


def _range_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: _percentile(row["us"], name, 1)


def _captures(document: Document) -> str:
    rows = document["captures"]
    if not rows:
        return ""
    columns = (
        Column("graph", lambda row: str(row.get("bucket"))),
        Column("nodes", lambda row: str(row.get("nodes") or NOTHING)),
        Column("capture s", lambda row: _optional(row.get("seconds"), digits=3)),
        Column("MiB", lambda row: _optional(row.get("bytes"), 2**-20, 2)),
    )
    total = sum(row.get("seconds") or 0.0 for row in rows)
    size = sum(row.get("bytes") or 0 for row in rows) / 2**20
    return f"{wide_table(columns, rows)}\n{len(rows)} graphs: {total:.2f} s, {size:.1f} MiB"


def _outliers(document: Document) -> str:
    rows = document["outliers"]
    if not rows:
        return ""
    lines = [f"largest of the gaps above {document['limit_ms']:.3f} ms"]
    for row in rows:
        seen = ", ".join(f"{one['name']} {one['us']:.0f} us" for one in row["overlap"])
        lines.append(
            f"  step {row['step']}: {row['ms']:.3f} ms, {row['cause']}: {row['text']}"
            + (f" [{seen}]" if seen else "")
        )
    return "\n".join(lines)


def _signed(change: float | None) -> str:
    return NOTHING if change is None else f"{100 * change:+.1f}%"


def _change(row: Mapping[str, Any]) -> str:
    if row["low"] is None:
        return NOTHING
    return f"{100 * row['low']:+.1f}..{100 * row['high']:+.1f}%"


def _comparison(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    columns = [
        Column("ITL", lambda row: row["name"]),
        Column("before", lambda row: number(row["before"], 3)),
        Column("after", lambda row: number(row["after"], 3)),
        Column("change", lambda row: _signed(row["change"])),
        Column("interval", _change),
        Column("verdict", lambda row: row["verdict"]),
    ]
    lines = [f"against {found['against']}"]
    lines += [f"note: not the same: {note}" for note in found["notes"]]
    lines += [wide_table(columns, found["itl"])]
    if found["kernels"]:
        columns[0] = Column("kernel", lambda row: shortened(f"{row['bucket']} {row['name']}"))
        lines += [wide_table(columns, found["kernels"][:KERNELS_SHOWN])]
    for row in found["only"] or ():
        lines.append(f"only in the run {row['run']}: {row['bucket']} {row['name']}")
    lines.append(
        f"{found['confidence']:g}% intervals of the change, {found['draws']} draws of blocks of "
        f"{found['block'][0]} and {found['block'][1]} consecutive steps"
    )
    return "\n".join(lines)


def _missing(document: Document) -> str:
    """What this source cannot tell."""
    absent = [
        what
        for what, value in (
            ("time to first token", document["ttft_ms"]),
            ("host stages", document["step"]["parts_us"]),
            ("device times", document["step"]["device_us"]),
            ("kernels", document["kernels"]),
            ("captures", document["captures"]),
        )
        if value is None
    ]
    return f"not told by this source: {', '.join(absent)}" if absent else ""


def wide_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with columns as wide as their cells; the first and a last name are left-aligned."""
    cells = [[column.title for column in columns]]
    cells += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    last_left = columns[-1].title in ("kernel", "verdict")
    lines = []
    for line in cells:
        shown = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
        shown[0] = f"{line[0]:<{widths[0]}}"
        if last_left:
            shown[-1] = line[-1]
        lines.append("  ".join(shown).rstrip())
    return "\n".join(lines)
