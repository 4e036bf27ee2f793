"""A report's document as sections of sentences and tables, which text and HTML both show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphengine.profiles.runs.units import MS, US, Unit, counted, duration, unit_for
from graphengine.profiles.tables.text import NOTHING, Column, number

KERNELS_SHOWN = 12
NAME_WIDTH = 60
PERCENTILE_NAMES = ("p50", "p90", "p99", "p99.9", "max")
MEANINGS = {
    "n": "how many times were measured",
    "separate": "how many of them are independent, as requests that share a step share its time",
}
STAR = "* too few values for this percentile, which is then the maximum"

Document = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns, and a row for each of `rows`."""

    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A title, and sentences and tables in their order."""

    title: str
    parts: tuple[str | Table, ...]


def sections(document: Document) -> list[Section]:
    """All sections about the run itself for which the document has data."""
    found = (
        _latencies(document),
        _frames(document["frames"]),
        _step(document),
        _ranks(document["ranks"]),
        _buckets(document["buckets"]),
        _kernels(document["kernels"]),
        _ranges(document["ranges"]),
        _captures(document["captures"]),
        _outliers(document),
        _missing(document),
    )
    return [section for section in found if section is not None]


class Fact(NamedTuple):
    """One fact about the run, such as `lookahead 1`.

    title    its first word, where that has a `meaning` to be explained
    """

    text: str
    title: str = ""
    meaning: str = ""


ENGINE_FACTS = {
    "max_batch": "requests that decode at the same time, at most",
    "lookahead": "launches that the host makes before it has read the one before; 0 to 2",
    "speculative": "who drafts tokens, and how many in a step",
    "numerics_id": "names the arithmetic: runs with the same one give the same tokens, bit by bit",
}
"""Facts of the engine that a report shows, with their meanings."""


def legend(named: Iterable[Fact | Column]) -> list[str]:
    """A line that explains the names, if any of them needs it."""
    found = [f"{one.title}: {one.meaning}" for one in named if one.meaning]
    return ["; ".join(found)] if found else []


def facts(document: Document) -> list[Fact]:
    """Where and with what the run was recorded."""
    environment, engine = document["environment"] or {}, document["engine"] or {}
    found = [Fact(str(environment.get("device") or "unknown device")), Fact(document["source"])]
    found.append(Fact(counted(document["replays"], "replay")))
    found += [Fact(str(engine["dtype"]))] if engine.get("dtype") else []
    for name, meaning in ENGINE_FACTS.items():
        if engine.get(name) is not None:
            found.append(Fact(f"{name} {engine[name]}", name, meaning))
    steps, discarded = engine.get("steps_per_launch"), document.get("discarded_tokens")
    if steps not in (None, 1):
        meaning = "decode steps that one launch runs in a row; tokens past an end are discarded"
        text = f"steps_per_launch {steps}, {counted(discarded or 0, 'token')} discarded"
        found.append(Fact(text, "steps_per_launch", meaning))
    for name in ("torch", "date"):
        if environment.get(name):
            found.append(Fact(f"{name} {environment[name]}"))
    commit = str(environment.get("commit") or "")[:10]
    return found + ([Fact(f"commit {commit}")] if commit else [])


def notes(document: Document) -> list[str]:
    """Notes that a reader needs before the figures."""
    differ = (document["against"] or {}).get("notes", ())
    return [*document["notes"], *(f"the two runs differ in {note}" for note in differ)]


def shortened(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def _percentile(found: Row, name: str, unit: Unit, own: Unit, digits: int) -> str:
    """A percentile that is kept in `own`, in `unit`."""
    star = "*" if name in found["unsupported"] else ""
    return f"{found[name] * own.us / unit.us:,.{digits}f}{star}"


def _latencies(document: Document) -> Section:
    kept = (
        ("TTFT", document["ttft_ms"], MS),
        ("ITL", document["itl_ms"], MS),
        ("launch", document["launch_us"], US),
        ("device idle", document["idle_us"], US),
    )
    rows = []
    for name, found, own in kept:
        if found is not None:
            unit = unit_for(found["max"] * own.us, least=own)
            cells = {one: _percentile(found, one, unit, own, 3) for one in PERCENTILE_NAMES}
            counts = {"n": found["n"], "separate": found["independent"]}
            rows.append({"latency": f"{name} {unit.name}", **cells, **counts})
    names = ("latency", *PERCENTILE_NAMES, "n", "separate")
    columns = [
        Column(name, _entry(name), left=name == "latency", meaning=MEANINGS.get(name, ""))
        for name in names
    ]
    parts: list[str | Table] = [Table(columns=columns, rows=rows)]
    parts.append(f"ITL is the time {document['itl_basis']}")
    if any(found["unsupported"] for _, found, _ in kept if found is not None):
        parts.append(STAR)
    deadline = document["deadline"]
    if deadline is not None:
        parts.append(
            f"{deadline['missed']:,} of {counted(deadline['n'], 'gap')} missed the deadline of "
            f"{deadline['ms']:g} ms ({100 * deadline['rate']:.3f}%), in "
            f"{deadline['steps_missed']:,} of {counted(deadline['steps'], 'step')}"
        )
    return Section(title="Latencies", parts=tuple(parts))


def _frames(found: Mapping[str, Any] | None) -> Section | None:
    if found is None:
        return None
    title = f"Frames of {found['ms']:g} ms"
    slack = found["slack_ms"]
    if slack is None:
        return Section(title=title, parts=("no request had a frame after its first",))
    parts = [
        f"{found['met']:,} of {counted(found['n'], 'frame')} came before the player needed them; "
        "each request's first frame starts its player",
        ", ".join(f"{name} {ms:,.3f} ms" for name, ms in slack.items()) + " of slack",
    ]
    if found["late"]:
        waited = (f"{each['cause']} {each['frames']:,}" for each in found["late"])
        parts.append(f"late frames by what they waited for: {', '.join(waited)}")
    return Section(title=title, parts=tuple(parts))


def _entry(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _step(document: Document) -> Section | None:
    step = document["step"]
    parts, device = step["parts_us"], step["device_us"]
    if parts is None and device is None:
        return None
    lines = [", ".join(f"{name} {duration(us)}" for name, us in (parts or {}).items())]
    if device is not None:
        where = "inside the launch" if step["replay_on_host"] else "on the device"
        share = _optional(step["device_share"], 100, 0, "%")
        lines.append(f"{duration(device)} {where}, {share} of the step")
    if document["thread"] is not None:
        lines.append(_thread(document["thread"]))
    title = f"A usual step takes {duration(1e3 * step['ms'], MS)}"
    return Section(title=title, parts=tuple(filter(None, lines)))


def _thread(found: Mapping[str, Any]) -> str:
    times = counted(found["preempted"], "time")
    return (
        f"the host's thread did not run for {duration(found['away_us'])} of it, and lost its core "
        f"{times} in the whole recording"
    )


def _optional(value: float | None, scale: float = 1.0, digits: int = 1, unit: str = "") -> str:
    return NOTHING if value is None else f"{value * scale:.{digits}f}{unit}"


def _times(rows: Sequence[Row], key: str, names: Sequence[str]) -> list[Column]:
    """A column for each percentile of `row[key]`, all in one unit; NOTHING where it is None."""
    unit = unit_for(max((row[key]["max"] for row in rows if row[key] is not None), default=0.0))
    digits = 1 if unit is US else 3

    def cell(name: str) -> Callable[[Row], str]:
        return lambda row: (
            NOTHING if row[key] is None else _percentile(row[key], name, unit, US, digits)
        )

    return [Column(f"{unit.name} {name}", cell(name)) for name in names]


def _ranks(found: Mapping[str, Any] | None) -> Section | None:
    if found is None:
        return None
    parts: list[str | Table] = [
        f"{found['count']} ranks: {found['option']}. All other times are those of rank 0, the "
        "driver's",
        _waited(found["waited"]),
    ]
    skew = found["skew_us"]
    if skew is None:
        return Section(title="Ranks", parts=(*parts, "no launch of another rank is known"))
    rows = [{"skew": "last rank's launch after rank 0's", "us": skew}]
    columns = [
        Column("skew", _entry("skew"), left=True),
        *_times(rows, "us", PERCENTILE_NAMES),
        Column("n", lambda row: str(row["us"]["n"]), meaning=MEANINGS["n"]),
    ]
    parts.append(Table(columns=columns, rows=rows))
    parts += [STAR] if skew["unsupported"] else []
    columns = [
        Column("last to launch", lambda row: f"rank {row['rank']}", left=True),
        Column("replays", lambda row: str(row["replays"])),
        Column("share", lambda row: _optional(row["share"], 100, 1, "%"), meaning="of all replays"),
    ]
    return Section(title="Ranks", parts=(*parts, Table(columns=columns, rows=found["last"])))


def _waited(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "how long rank 0 waited for the others in collectives is not known"
    return (
        f"rank 0 waited {duration(1e6 * found['s'])} for the others in collectives: "
        f"{100 * found['share']:.1f}% of the recorded time, {duration(found['us_per_step'])} a step"
    )


def _buckets(rows: Sequence[Row]) -> Section:
    columns = (
        Column("bucket", lambda row: row["bucket"], left=True),
        Column("replays", lambda row: str(row["replays"])),
        Column("share", lambda row: _optional(row["share"], 100, 1, "%"), meaning="of all replays"),
        Column(
            "live", lambda row: _optional(row["live"], digits=2), meaning="rows in use, on average"
        ),
        Column("padding", lambda row: _optional(row["padding"], 100, 1, "%")),
        *_times(rows, "device_us", ("p50", "p99", "max")),
    )
    return Section(title="Buckets", parts=(Table(columns=columns, rows=rows),))


def _kernels(rows: Sequence[Row] | None) -> Section | None:
    if not rows:
        return None
    columns = (
        Column("bucket", lambda row: row["bucket"], left=True),
        Column("a replay", lambda row: number(row["per_replay"], 1)),
        Column("us/replay", lambda row: number(row["us_per_replay"], 1)),
        Column("median us", lambda row: number(row["median_us"], 2)),
        Column("kernel", lambda row: shortened(row["name"]), left=True),
    )
    parts: list[str | Table] = [Table(columns=columns, rows=rows[:KERNELS_SHOWN])]
    if len(rows) > KERNELS_SHOWN:
        parts.append(f"and {len(rows) - KERNELS_SHOWN} more: --json has all")
    return Section(title="Kernels", parts=tuple(parts))


def _ranges(rows: Sequence[Row] | None) -> Section | None:
    if not rows:
        return None
    columns = [
        Column("range", lambda row: row["range"], left=True),
        *_times(rows, "us", PERCENTILE_NAMES),
        Column("n", lambda row: str(row["us"]["n"]), meaning=MEANINGS["n"]),
    ]
    return Section(title="Ranges of the host", parts=(Table(columns=columns, rows=rows),))


def _captures(rows: Sequence[Row] | None) -> Section | None:
    if not rows:
        return None
    columns = (
        Column("graph", lambda row: str(row.get("bucket")), left=True),
        Column("nodes", lambda row: str(row.get("nodes") or NOTHING)),
        Column("capture s", lambda row: _optional(row.get("seconds"), digits=3)),
        Column("MiB", lambda row: _optional(row.get("bytes"), 2**-20, 2)),
    )
    total = sum(row.get("seconds") or 0.0 for row in rows)
    size = sum(row.get("bytes") or 0 for row in rows) / 2**20
    said = f"{counted(len(rows), 'graph')}: {total:.2f} s, {size:.1f} MiB"
    return Section(title="Captured graphs", parts=(Table(columns=columns, rows=rows), said))


def _outliers(document: Document) -> Section | None:
    rows = document["outliers"]
    if not rows:
        return None
    columns = [
        Column("step", lambda row: str(row["step"])),
        Column("ms", lambda row: number(row["ms"], 3)),
        Column("cause", lambda row: row["cause"]),
        Column("what happened", lambda row: row["text"], left=True),
    ]
    if any(row["overlap"] for row in rows):
        columns.append(Column("meanwhile, in the trace", _overlap, left=True))
    title = f"The longest gaps above the outlier limit of {document['limit_ms']:.3f} ms"
    return Section(title=title, parts=(Table(columns=columns, rows=rows),))


def _overlap(row: Row) -> str:
    return ", ".join(f"{one['name']} {duration(one['us'])}" for one in row["overlap"])


def _signed(change: float | None) -> str:
    # A change that is rounded to zero has no sign of its own.
    return NOTHING if change is None else f"{round(100 * change, 1) + 0.0:+.1f}%"


def _interval(row: Row) -> str:
    if row["low"] is None:
        return NOTHING
    return f"{_signed(row['low'])} to {_signed(row['high'])}"


def _changes(rows: Sequence[Row], title: str, name: Callable[[Row], str], own: Unit) -> Table:
    """A table of changes of figures that are kept in `own`."""
    unit = unit_for(max(max(row["before"], row["after"]) for row in rows) * own.us, least=own)
    scale = own.us / unit.us
    columns = (
        Column(title, name, left=True),
        Column(f"before, {unit.name}", lambda row: number(row["before"] * scale, 3)),
        Column(f"after, {unit.name}", lambda row: number(row["after"] * scale, 3)),
        Column("change", lambda row: _signed(row["change"])),
        Column("interval", _interval),
        Column("verdict", lambda row: row["verdict"], left=True),
    )
    return Table(columns=columns, rows=rows)


def comparison(document: Document) -> list[Section]:
    """The run compared with another one, if there is one."""
    found = document["against"]
    if found is None:
        return []
    parts: list[str | Table] = [_changes(found["itl"], "ITL", _entry("name"), MS)]
    if found["kernels"]:
        rows = found["kernels"][:KERNELS_SHOWN]
        parts.append(_changes(rows, "kernel", _bucket_and_kernel, US))
    if found["only"]:
        columns = (
            Column("kernel of one run only", _bucket_and_kernel, left=True),
            Column("run", _entry("run"), left=True),
            Column("us/replay", lambda row: number(row["us_per_replay"], 1)),
        )
        parts.append(Table(columns=columns, rows=found["only"]))
    parts.append(
        f"Intervals are at {found['confidence']:g}% confidence. They come from "
        f"{counted(found['draws'], 'draw')} of blocks of consecutive steps: {found['block'][0]} "
        f"before, {found['block'][1]} after"
    )
    return [Section(title=f"Compared with {found['against']}", parts=tuple(parts))]


def _bucket_and_kernel(row: Row) -> str:
    return shortened(f"{row['bucket']} {row['name']}")


def _missing(document: Document) -> Section | None:
    """Facts that this source does not have."""
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
    if not absent:
        return None
    return Section(title="Not told by this source", parts=(", ".join(absent),))
