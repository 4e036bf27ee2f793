"""A benchmark document as text tables; its cells serve docs/numbers.md as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from graphengine.cli.terminal import fit
from graphengine.profiles.tables.policy import describe_policy

Row = Mapping[str, Any]

NOTHING = "-"


class Column(NamedTuple):
    """A column's heading, and its cell for a row; `left` holds words and is aligned to the left.

    meaning  of the heading, where its name does not say it
    """

    title: str
    cell: Callable[[Row], str]
    left: bool = False
    meaning: str = ""


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def percentile(found: Mapping[str, Any], name: str) -> str:
    """Milliseconds; a star marks a percentile that the number of values does not support."""
    star = "*" if name in found["unsupported"] else ""
    return f"{found[name]:.3f}{star}"


def share(row: Row) -> str:
    return NOTHING if row["share"] is None else f"{100 * row['share']:.0f}%"


def first_token(row: Row, tokens: int | str) -> str:
    return number(row["ttft_ms"].get(str(tokens)), 2)


def family(row: Row) -> str:
    return str(row["engine"]["row_family"])


def _itl(name: str) -> Column:
    return Column(f"ITL {name}", lambda row: percentile(row["itl_ms"], name))


def _host(name: str) -> Callable[[Row], str]:
    return lambda row: number((row["host"] or {}).get(name), 1)


def _start(name: str, digits: int) -> Callable[[Row], str]:
    """A cell of a start-up figure; empty for documents that are older than the figure."""
    return lambda row: number(row["start"].get(name), digits)


def row_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns for these rows, with one for the first token of each prompt length."""
    lengths = dict.fromkeys(tokens for row in rows for tokens in row["ttft_ms"])
    firsts = (Column(f"TTFT {n}", partial(first_token, tokens=n)) for n in lengths)
    of_ranks = _RANK_COLUMNS if any(row.get("ranks", 1) > 1 for row in rows) else ()
    return (*_ROW_COLUMNS, *of_ranks, *firsts, *_TIME_COLUMNS)


def _integer(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def _microseconds(name: str) -> Callable[[Row], str]:
    return lambda row: number(row[f"{name}_us"], 2)


_ROW_COLUMNS = (
    Column("live", lambda row: str(row["live"])),
    Column("slots", lambda row: str(row["max_batch"])),
    Column("sampler", lambda row: row["sampler"]),
    Column("family", family),
    Column("ms/step", lambda row: number(row["ms_per_step"], 3)),
    Column("floor", lambda row: number(row["floor_ms"], 3)),
    Column("share", share),
)
_RANK_COLUMNS = (
    Column("ranks", lambda row: f"{'1 of ' * row['lone_rank']}{row['ranks']}"),
    Column("waits us", lambda row: number(row["waited_us"], 1)),
)
COLLECTIVE_COLUMNS = (
    Column("linear", lambda each: each["linear"]),
    *(Column(name, _integer(name)) for name in ("ranks", "lanes", "M", "K")),
    *(Column(name, _microseconds(name)) for name in ("alone", "summed", "apart")),
)
_TIME_COLUMNS = (
    *(_itl(name) for name in ("p50", "p90", "p99", "p99.9")),
    Column("max", lambda row: number(row["itl_ms"]["max"], 3)),
    Column("host us", _host("host_us")),
    Column("poll us", _host("poll_us")),
    Column("compiled", _start("compiled", 0)),
    Column("compile s", _start("compile_s", 2)),
    Column("capture s", _start("capture_s", 2)),
    Column("pool MiB", _start("pool_mib", 1)),
    Column("graphs MiB", _start("graphs_mib", 1)),
    Column("start s", _start("total_s", 2)),
)


def accepted(entry: Row) -> str:
    """Who judges the drafts: the target, or a forced number."""
    if entry["k"] == 0:
        return "plain"
    return "strict" if entry["forced"] is None else f"force {entry['forced']}"


def _ratio(name: str) -> Callable[[Row], str]:
    return lambda entry: number(entry["ratio"][name], 3)


SWEEP_COLUMNS = (
    Column("drafts", lambda entry: str(entry["k"])),
    Column("accepted", accepted),
    Column("family", lambda entry: entry["row_family"]),
    Column("ms/step", lambda entry: number(entry["ms_per_step"], 3)),
    Column("share", lambda entry: share({"share": None, **entry})),
    Column("/same", _ratio("same_family")),
    Column("/fastest", _ratio("fastest")),
    Column("tok/step", lambda entry: number(entry["tokens_per_step"], 2)),
    Column("tok/s", lambda entry: number(entry["tokens_per_s"], 1)),
    *(_itl(name) for name in ("p50", "p99")),
    Column("drafts off", lambda entry: number(entry["drafts_off_ms"], 3)),
)


def _gigabytes(name: str) -> Callable[[Row], str]:
    return lambda cell: number(cell[name] / 1e9, 2)


CONTEXT_COLUMNS = (
    Column("live", lambda cell: str(cell["live"])),
    Column("slots", lambda cell: str(cell["max_batch"])),
    Column("context", lambda cell: str(cell["context"])),
    Column("seq len", lambda cell: str(cell["engine"]["max_seq_len"])),
    Column("family", family),
    Column("ms/step", lambda cell: number(cell["ms_per_step"], 3)),
    Column("floor", lambda cell: number(cell["floor_ms"], 3)),
    Column("share", share),
    *(_itl(name) for name in ("p50", "p99", "p99.9")),
    Column("p99.9/p50", lambda cell: number(cell["p99.9/p50"], 3)),
    Column("weights GB", _gigabytes("weight_bytes")),
    Column("KV GB", _gigabytes("kv_bytes")),
    Column("TB/s", lambda cell: number(cell["tb_s"], 2)),
)

KERNEL_COLUMNS = (
    Column("part", lambda row: row["part"] or NOTHING),
    Column("grid", lambda row: "x".join(map(str, row["grid"]))),
    Column("count", lambda row: str(row["count"])),
    Column("mean us", lambda row: number(row["mean_us"], 2)),
    Column("us/step", lambda row: number(row["step_us"], 1)),
    Column("MB", lambda row: number(_megabytes(row), 2)),
    Column("TB/s", lambda row: number(row["tb_s"], 2)),
)


def _megabytes(row: Row) -> float | None:
    """Megabytes that one launch reads; None for documents that are older than this figure."""
    size = row.get("read_bytes")
    return None if size is None else size / 1e6


def text_table(columns: Sequence[Column], rows: Sequence[Row], *, width: int | None = None) -> str:
    """Right-aligned columns, at least two spaces apart.

    width  most characters of a line: columns that do not fit follow below, after the first column
           again; None: all columns side by side
    """
    parts = [columns] if width is None else _parts_of(columns, width)
    return "\n\n".join(_table(part, rows) for part in parts)


def _parts_of(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Split the columns into tables no wider than `width`; each begins with the first column."""
    first, *others = columns
    parts, taken = [[first]], _width(first)
    for column in others:
        if taken + _width(column) > width and len(parts[-1]) > 1:
            parts.append([first])
            taken = _width(first)
        parts[-1].append(column)
        taken += _width(column)
    return parts


def _width(column: Column) -> int:
    return max(len(column.title), 7) + 2


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    widths = [_width(column) for column in columns]
    lines = [[column.title for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    return "\n".join(
        "".join(f"  {cell:>{width - 2}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def describe_document(document: Mapping[str, Any], width: int | None = None) -> str:
    """All of a document's figures, for a terminal of this width; None: lines of any length."""
    if document.get("policy"):
        return fit(describe_policy(document), width)
    cells = context_cells(document)
    parts = [_heading(document)]
    if document["rows"]:
        columns = row_columns(document["rows"])
        parts.append(text_table(columns, document["rows"], width=width))
    if document.get("contexts"):
        parts += _contexts(document["contexts"], width)
    if any(row["itl_ms"]["unsupported"] for row in [*document["rows"], *cells]):
        parts.append("* too few values for this percentile, which is then the maximum")
    parts += [_speculation(row, width) for row in document["rows"] if row.get("speculation")]
    collectives = [each for row in document["rows"] for each in row.get("collectives") or ()]
    if collectives:
        title = "sums over ranks, us a call: the part alone, summed in its kernel, summed apart"
        parts.append(f"{title}\n{text_table(COLLECTIVE_COLUMNS, collectives, width=width)}")
    parts += [_long(row, found) for row in document["rows"] for found in long_runs(row)]
    parts += [_record(row["record"]) for row in document["rows"] if row.get("record")]
    if document["admission"] is not None:
        parts.append(_admission(document["admission"]))
    parts += [_step_kernels(found) for found in document["kernels"] or ()]
    parts += [_prefill_kernels(found) for found in document.get("prefill_kernels") or ()]
    parts += [_peer(name, peer) for name, peer in document["peers"].items()]
    return fit("\n\n".join(parts), width)


def context_cells(document: Mapping[str, Any]) -> Sequence[Row]:
    """The batches at contexts; none for a document with rows."""
    cells: Sequence[Row] = (document.get("contexts") or {"cells": ()})["cells"]
    return cells


def _heading(document: Mapping[str, Any]) -> str:
    environment, ceiling = document["environment"], document["ceiling"]
    limit = "no read ceiling" if ceiling is None else f"read ceiling {read_ceiling(ceiling)}"
    rows = [*document["rows"], *context_cells(document)]
    if not rows:
        return f"{document['shape']}, on {environment['device']}: {limit}"
    first = rows[0]
    fed = f"{first['prompt_tokens']} prompt" if document["rows"] else "contexts"
    lines = [
        f"{document['shape']}, {first['engine']['dtype']}, on {environment['device']}: {limit}",
        f"{fed} and {first['new_tokens']} new tokens, {first['runs']} "
        f"run{'s' * (first['runs'] > 1)}; milliseconds. "
        f"{_checked(first)}",
    ]
    lines += [
        f"heuristic plans of {plans}: `graphengine tune` measures them"
        for plans in all_heuristic_plans(rows)
    ]
    return "\n".join(lines)


def _contexts(section: Mapping[str, Any], width: int | None) -> list[str]:
    """Cells, skipped ones, speculating engines, first tokens."""
    cells = section["cells"]
    title = f"steps of rows at contexts, {section['kv']} KV"
    parts = [f"{title}\n{text_table(CONTEXT_COLUMNS, cells, width=width)}"] if cells else []
    skipped = [
        f"skipped: {each['live']} live at a context of {each['context']} tokens"
        f"{', ' + each['speculative'] if each['speculative'] else ''}: {each['reason']}"
        for each in section["skipped"]
    ]
    if skipped:
        parts.append("\n".join(skipped))
    parts += [
        f"{cell['live']} live of {cell['max_batch']} at a context of {cell['context']} tokens, "
        f"drafts over plain steps\n{text_table(SWEEP_COLUMNS, cell['speculation'], width=width)}"
        for cell in cells
        if cell["speculation"]
    ]
    firsts = (section.get("first_tokens") or {"ttft_ms": {}})["ttft_ms"]
    if firsts:
        shown = ", ".join(f"{took:.2f} after {tokens}" for tokens, took in firsts.items())
        parts.append(f"TTFT of one request, by the tokens of its prompt: {shown}")
    return parts


def read_ceiling(ceiling: Mapping[str, Any]) -> str:
    """The rates before and after the rows, if both were measured."""
    if ceiling.get("tb_s_after") is None:
        return f"{ceiling['tb_s']:.2f} TB/s"
    return (
        f"{ceiling['tb_s']:.2f} TB/s before the rows and {ceiling['tb_s_after']:.2f} after, shares "
        "of the larger"
    )


def heuristic_plans(row: Row) -> str:
    """Linears whose kernels use plans that were never measured, with their row family.

    Empty on a CPU, which has no kernels, and for documents that do not say.
    """
    engine = row["engine"]
    sources = engine.get("plan_sources")
    if not sources or engine["device"] == "cpu":
        return ""
    names = [name for name, source in sources.items() if source == "heuristic"]
    if not names:
        return ""
    found = "all linears" if len(names) == len(sources) else ", ".join(names)
    return f"{found} ({engine['row_family']})"


def all_heuristic_plans(rows: Sequence[Row]) -> list[str]:
    """The `heuristic_plans` of all rows, each once."""
    return sorted({plans for row in rows if (plans := heuristic_plans(row))})


def _checked(row: Row) -> str:
    """Which tokens were checked before the figures were taken."""
    checked = row["checked"]
    of = f" of {checked['tokens']}" if "tokens" in checked else ""
    firsts = [f"{count} after {n}" for n, count in (checked.get("first_tokens") or {}).items()]
    prefills = f", {', '.join(firsts)} prompt tokens" if firsts else ""
    return (
        f"Tokens checked: {checked['eager_tokens']}{of} by eager steps{prefills}; all runs, alone "
        "and in the batch"
    )


def _speculation(row: Row, width: int | None) -> str:
    found = row["speculation"]
    trimmed = found["random_vocab"]
    title = f"{found['mode']}, {row['live']} live of {row['max_batch']}"
    if trimmed is not None:
        title += f", {trimmed:,} random draft tokens"
    return (
        f"{title}: a step over a plain one of the same row family and of the fastest, which is "
        "as many tokens a step as break even;\nITL is between steps. Strict tokens checked: those "
        "of plain decoding\n" + text_table(SWEEP_COLUMNS, found["entries"], width=width)
    )


def long_runs(row: Row) -> list[Row]:
    """Long runs with a plain consumer, which older documents lack, then those with cycles."""
    return [found for found in (row.get("long_plain"), row["long"]) if found is not None]


def _consumer(found: Row) -> str:
    """A text about what a long run's consumer kept; empty for older documents, where it kept
    nothing.
    """
    objects = found.get("kept_objects")
    if objects is None:
        return ""
    return (
        f", {objects} containers a token kept in reference cycles" if objects else ", events kept"
    )


def pauses(found: Row) -> str:
    """The longest pause of each generation, if they were measured."""
    longest = found.get("pauses_ms")
    return "" if longest is None else ", ".join(number(took, 3) for took in longest)


def _long(row: Row, found: Row) -> str:
    itl = found["itl_ms"]
    collector = "on" if found["collector_on"] else "off"
    collector += ", heap frozen" * bool(found.get("frozen"))
    ran = ", ".join(map(str, found["collections"]))
    ran += f"; longest {longest}" if (longest := pauses(found)) else ""
    return (
        f"{itl['n']} gaps of {found['requests']} requests{_consumer(found)}, slots "
        f"{row['max_batch']}, collector {collector} (runs by generation: {ran}): p50 "
        f"{percentile(itl, 'p50')}, p99 {percentile(itl, 'p99')}, p99.9 "
        f"{percentile(itl, 'p99.9')}, max {itl['max']:.3f}; p99.9/p50 {found['p99.9/p50']:.3f}"
    )


def _record(found: Row) -> str:
    lines = [
        f"recorded {found['replays']} replays, {found['tokens']} tokens of {found['requests']} "
        f"requests, in {found['file']}; {found['dropped']} replays dropped",
        _cost("the recorder", found["cost"]),
    ]
    if found["cost_without_events"] is not None:
        lines.append(_cost("the recorder without events", found["cost_without_events"]))
    if found["host_us"] is not None:
        off, on = found["host_us"]["off"], found["host_us"]["on"]
        lines.append(f"host us a step: {off:.1f} without it, {on:.1f} with it")
    listens = "a tool listens" if found["ranges"] else "no tool listens"
    lines.append(f"one NVTX range: {found['range_ns']:.0f} ns ({listens})")
    return "\n".join(lines)


def _cost(title: str, found: Row) -> str:
    step, itl = found["ms_per_step"], found["itl_ms"]
    low, high = found["more_us_quartiles"]
    tails = ", ".join(
        f"{name} {percentile(itl['off'], name)} and {percentile(itl['on'], name)}"
        for name in ("p50", "p99", "p99.9")
    )
    return (
        f"{title}, off and on in {found['pairs']} pairs: {step['off']:.4f} and {step['on']:.4f} "
        f"ms/step, {found['more_us']:+.2f} us a step (quartiles {low:+.2f} to {high:+.2f}); ITL "
        f"{tails}"
    )


def _admission(found: Mapping[str, Any]) -> str:
    longest, usual = found["longest_gap_ms"], found["undisturbed_gap_ms"]
    bound = found["engine"].get("max_prefill_ms_per_step")
    more = "" if bound is None else f"; {longest - usual:.3f} longer, {bound:g} are allowed"
    return (
        f"{found['decoding']} requests decode, a prompt of {found['admitted_tokens']} tokens is "
        f"admitted: their longest gap is {longest:.3f} ms (undisturbed {usual:.3f}{more}), its "
        f"TTFT {found['ttft_ms']:.3f} ms"
    )


def _step_kernels(found: Mapping[str, Any]) -> str:
    title = f"kernels, {found['live']} live of {found['max_batch']}, {found['sampler']}"
    title += f", at a context of {found['context']} tokens" if "context" in found else ""
    return _kernels(title, found["kernels"], f"a step of {found['ms_per_step']:.3f} ms, PDL off")


def _prefill_kernels(found: Mapping[str, Any]) -> str:
    tokens = found["prompt_tokens"]
    # Documents that do not say have prompts of one chunk.
    chunk = found.get("chunk_tokens", tokens)
    title = f"kernels of a prompt of {tokens} tokens"
    if chunk < tokens:
        title = f"kernels of the last chunk, {chunk} tokens, of a prompt of {tokens}"
    whole = f"{found['ttft_ms']:.3f} ms to the first token"
    return _kernels(title, found["kernels"], whole)


def _kernels(title: str, times: Sequence[Mapping[str, Any]] | None, whole: str) -> str:
    if times is None:
        return f"{title}: none on this device"
    total = sum(time["step_us"] for time in times)
    names = [time["name"] for time in times]
    lines = text_table(KERNEL_COLUMNS, times).splitlines()
    body = [f"{line}  {name}" for line, name in zip(lines, ["kernel", *names], strict=True)]
    return "\n".join([title, *body, f"{total:.1f} us of kernels in {whole}"])


def _peer(name: str, peer: Mapping[str, Any]) -> str:
    lines = [f"{name} {peer['version']}, weights: {peer['weights']}"]
    lines += [
        f"  batch {row['live']}: {row['ms_per_step']:.3f} ms/step, {row['ratio']:.2f} times ours; "
        f"TTFT {row['ttft_ms']:.2f}"
        for row in peer["rows"]
    ]
    return "\n".join(lines)
