"""Makes the tables of docs/numbers.md and its appendix from the committed results.

    python -m graphengine.profiles.tables.pages            # write them
    python -m graphengine.profiles.tables.pages --check    # or fail if one differs from the results

Every `bench-*.json` under `results/` is a document of `graphengine bench`. If its `environment`
holds `recorded`, commit and changes were set afterwards, and `recorded` has what the run had
written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

from graphengine.profiles.tables.summary import summary
from graphengine.profiles.tables.text import (
    NOTHING,
    Column,
    Row,
    all_heuristic_plans,
    context_cells,
    family,
    first_token,
    long_runs,
    number,
    pauses,
    percentile,
    share,
)

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "profiles" / "results"
SUMMARY_PAGE = ROOT / "docs" / "numbers.md"
PAGE = ROOT / "docs" / "numbers_appendix.md"
SUMMARY_BEGIN = "<!-- summary: made by `python -m graphengine.profiles.tables.pages` -->"
SUMMARY_END = "<!-- end of summary -->"
BEGIN = (
    "<!-- numbers: made by `python -m graphengine.profiles.tables.pages` from profiles/results -->"
)
END = "<!-- end of numbers -->"


def markdown(results: Path = RESULTS) -> str:
    """The page's tables. ValueError if there is no result to make them from.

    Each row and each note has the number of the file that it comes from, in the list at the end.
    """
    paths = sorted(results.glob("bench-*.json"))
    found = [_read(path) for path in paths]
    if not found:
        raise ValueError(f"{results} holds no bench-*.json")
    devices = [document["environment"]["device"] for document in found]
    documents = [
        document | {"number": number, "elsewhere": _elsewhere(device, mode(devices))}
        for number, (document, device) in enumerate(zip(found, devices, strict=True), start=1)
    ]
    rows = [
        dict(row) | {"shape": _model(document, row), "number": document["number"]}
        for document in documents
        for row in document["rows"]
        # A speculating run has its plain engine in the other table, and what was measured for a
        # note, with long prompts, is in that note.
        if row.get("speculation") is None and row["engine"]["max_seq_len"] <= MOST_TOKENS
    ]
    rows.sort(key=lambda row: (row["shape"], row["sampler"]))
    one_dtype = len({row["engine"]["dtype"] for row in rows}) == 1
    columns = [column for column in COLUMNS if not (one_dtype and column.title == "dtype")]
    sections = {
        "Steps after short prompts": [*_head(columns), *(_line(columns, row) for row in rows)],
        "Steps at long contexts": _contexts(documents),
        "Speculation": _speculation(documents),
        "Thousands of tokens in a row": _long_runs(documents),
        "Single measurements": [note for document in documents for note in _notes(document)],
        "Files": _files(paths, documents),
    }
    parts = [f"### {title}\n\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    return "\n\n".join(parts)


def _contexts(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each batch at each context; no lines if there is none."""
    cells = [
        dict(cell) | {"shape": _model(document, cell), "number": document["number"]}
        for document in documents
        for cell in context_cells(document)
    ]
    if not cells:
        return []
    return [*_head(CONTEXT_COLUMNS), *(_line(CONTEXT_COLUMNS, cell) for cell in cells)]


def _long_runs(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each long run of one row; no lines if there is none."""
    runs = [
        dict(found) | {"row": row, "shape": _model(document, row), "number": document["number"]}
        for document in documents
        for row in document["rows"]
        for found in long_runs(row)
    ]
    if not runs:
        return []
    return [*_head(LONG_COLUMNS), *(_line(LONG_COLUMNS, found) for found in runs)]


def _speculation(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table with a line for each draft length of each speculating run; no lines without one."""
    titles = ("shape", "live", "drafts", "family", "ms/step", "/same", "/fastest", "K = 0 ms")
    head = [*titles, "tokens/s by accepted drafts", "#"]
    lines = []
    for document in documents:
        for row in document["rows"]:
            entries = (row.get("speculation") or {"entries": []})["entries"]
            for entry in (entry for entry in entries if entry["forced"] is None):
                forced = [
                    f"{other['forced']}: {other['tokens_per_s']:,.0f}"
                    for other in entries
                    if other["forced"] is not None and other["k"] == entry["k"]
                ]
                vocab = row["speculation"]["random_vocab"]
                of = f", {vocab:,} tokens drafted" if vocab else ""
                cells = (
                    document["shape"],
                    str(row["live"]),
                    f"{entry['k']}{of if entry['k'] else ''}",
                    entry["row_family"],
                    number(entry["ms_per_step"], 3),
                    number(entry["ratio"]["same_family"], 2),
                    number(entry["ratio"]["fastest"], 2),
                    number(entry["drafts_off_ms"], 3),
                    "; ".join(forced) or f"0: {entry['tokens_per_s']:,.0f}",
                    str(document["number"]),
                )
                lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


MOST_TOKENS = 4096
"""max_seq_len of the engines in the rows' table."""
IN_COLUMNS = ("128", "1024")
"""Prompts whose time to the first token is in a column of the rows' table."""

COLUMNS = (
    Column("shape", lambda row: row["shape"]),
    Column("dtype", lambda row: row["engine"]["dtype"]),
    Column("live/slots", lambda row: f"{row['live']}/{row['max_batch']}"),
    Column("sampler", lambda row: row["sampler"]),
    Column("family", family),
    Column("ms/step", lambda row: number(row["ms_per_step"], 3)),
    Column("share", share),
    Column("TTFT 128", lambda row: first_token(row, 128)),
    Column("1k", lambda row: first_token(row, 1024)),
    Column("ITL p50", lambda row: percentile(row["itl_ms"], "p50")),
    Column("p99", lambda row: percentile(row["itl_ms"], "p99")),
    Column("p99.9", lambda row: percentile(row["itl_ms"], "p99.9")),
    Column("host", lambda row: number((row["host"] or {}).get("host_us"), 1)),
    Column("#", lambda row: str(row["number"])),
)


def _drafts(cell: Row) -> str:
    """Steps with drafts over plain ones, by the number of drafts."""
    strict = [entry for entry in cell["speculation"] if entry["forced"] is None]
    shown = (f"{entry['k']}: {number(entry['ratio']['fastest'], 2)}" for entry in strict)
    return "; ".join(shown) or NOTHING


CONTEXT_COLUMNS = (
    Column("shape", lambda cell: cell["shape"]),
    Column("live x context", lambda cell: f"{cell['live']} x {cell['context']:,}"),
    Column("KV", lambda cell: cell["engine"]["kv_dtype"].replace("float8_e4m3fn", "e4m3")),
    Column("max_seq_len", lambda cell: f"{cell['engine']['max_seq_len']:,}"),
    Column("ms/step", lambda cell: number(cell["ms_per_step"], 3)),
    Column("share", share),
    Column("ITL p99", lambda cell: percentile(cell["itl_ms"], "p99")),
    Column("p99.9/p50", lambda cell: number(cell["p99.9/p50"], 3)),
    Column("drafts: /fastest", _drafts),
    Column("#", lambda cell: str(cell["number"])),
)

LONG_COLUMNS = (
    Column("shape", lambda found: found["shape"]),
    Column("slots", lambda found: str(found["row"]["max_batch"])),
    Column("gaps", lambda found: f"{found['itl_ms']['n']:,}"),
    Column("kept", lambda found: _kept(found)),
    Column("heap", lambda found: "frozen" if found.get("frozen") else NOTHING),
    Column("collections", lambda found: _collections(found)),
    Column("longest", lambda found: pauses(found).replace(", ", " / ") or NOTHING),
    Column("p99.9/p50", lambda found: number(found["p99.9/p50"], 3)),
    Column("longest gap", lambda found: number(found["itl_ms"]["max"], 3)),
    Column("#", lambda found: str(found["number"])),
)


def _kept(found: Row) -> str:
    """The objects that the program kept for the newest tokens, so that the collector had work."""
    objects = found.get("kept_objects")
    if objects is None:
        return "nothing"
    return f"{objects} cyclic" if objects else "events"


def _collections(found: Row) -> str:
    """How often Python's collector ran in each generation, the youngest first."""
    if not found["collector_on"]:
        return "off"
    return " / ".join(map(str, found["collections"]))


def _head(columns: Sequence[Column]) -> list[str]:
    titles = " | ".join(column.title for column in columns)
    return [f"| {titles} |", "|" + "---|" * len(columns)]


def _line(columns: Sequence[Column], row: Row) -> str:
    # The text tables mark a percentile with a star, which Markdown would read as italics.
    cells = " | ".join(column.cell(row).replace("*", "\\*") for column in columns)
    return f"| {cells} |"


def _kv_of(measured: Mapping[str, Any]) -> str:
    """A remark that KV is in e4m3; empty if it is not."""
    engine = measured.get("engine") or {}
    return ", KV in e4m3" if engine.get("kv_dtype") == "float8_e4m3fn" else ""


def _model(document: Mapping[str, Any], row: Row) -> str:
    """The shape, how its weights are stored if not all are in one dtype, its ranks, and the device
    where most results have another one.
    """
    engine = row.get("engine") or {}
    _, *formats = engine.get("weights", ("",))
    codes = dict.fromkeys(label.partition("-")[0].replace("e4m3", "fp8") for label in formats)
    rounded = ", activations in fp8" if engine.get("activations") else ""
    ranks = engine.get("tensor_parallel", 1)
    split = f" x{ranks}" if ranks > 1 else ""
    elsewhere: str = document["elsewhere"]
    return " ".join([document["shape"], *codes]) + rounded + split + elsewhere


def _elsewhere(device: str, usual: str) -> str:
    """The device's name in short, where it is not the usual one."""
    return "" if device == usual else f" {device.removeprefix('NVIDIA ').partition(' ')[0]}"


def _notes(document: Mapping[str, Any]) -> list[str]:
    """List items for a document's contents other than its rows."""
    notes, file = [], f"(file {document['number']})"
    if document["admission"] is not None:
        found = document["admission"]
        bound = found["engine"].get("max_prefill_ms_per_step")
        allowed = "" if bound is None else f" with `max_prefill_ms_per_step={bound:g}`"
        notes.append(
            f"- {document['shape']}, {found['decoding']} requests decoding after "
            f"{found['prompt_tokens']:,} tokens each: admitting a prompt of "
            f"{found['admitted_tokens']:,} tokens lengthens their longest gap to "
            f"{found['longest_gap_ms']:.2f} ms{allowed}; its own first token takes "
            f"{found['ttft_ms']:,.0f} ms {file}."
        )
    section = document.get("contexts") or {}
    measured = [section.get("first_tokens") or {"ttft_ms": {}}, *document["rows"]]
    notes += [
        f"- {_model(document, each)}{_kv_of(each)}: TTFT after a prompt of "
        f"{int(tokens):,} tokens is {took:,.2f} ms {file}."
        for each in measured
        for tokens, took in each["ttft_ms"].items()
        if tokens not in IN_COLUMNS
    ]
    notes += [
        f"- {document['shape']}, {each['live']} rows at a context of {each['context']:,} tokens"
        f"{' with ' + each['speculative'] if each['speculative'] else ''} were not measured, "
        f"because they do not fit: {each['reason']} {file}."
        for each in section.get("skipped", ())
    ]
    notes += [
        f"- {document['shape']}, batch {row['live']}: {name} {peer['version']} takes "
        f"{row['ms_per_step']:.3f} ms a step, {row['ratio']:.1f} times as long {file}."
        for name, peer in sorted(document["peers"].items())
        for row in peer["rows"]
    ]
    return notes


def _files(paths: Sequence[Path], documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The list of numbered files. Facts that all of them share are told once."""
    machines = dict.fromkeys(_machine(document["environment"]) for document in documents)
    told = (
        f"Device and versions of all of these: {next(iter(machines))}. "
        if len(machines) == 1
        else ""
    )
    return [
        f"{told}{FILES}",
        "",
        *(
            _source(path.name, document, "" if told else _machine(document["environment"]))
            for path, document in zip(paths, documents, strict=True)
        ),
    ]


FILES = (
    "TB/s is the bandwidth of reading memory, measured before and after the rows; shares are of "
    "the larger. A star marks a commit that was noted after the run. Linears are called untuned if "
    "their kernels used plans that `graphengine tune` had not measured."
)


def _machine(environment: Mapping[str, Any]) -> str:
    return (
        f"{environment['device']}, driver {environment['driver'] or NOTHING}, torch "
        f"{environment['torch']}, triton {environment['triton']}"
    )


def _source(name: str, document: Mapping[str, Any], machine: str) -> str:
    """A list item: the file, the code that was measured, and the conditions."""
    environment, ceiling = document["environment"], document["ceiling"]
    commit = f"commit {(environment['commit'] or 'unknown')[:12]}"
    commit += r"\*" if "recorded" in environment else ""
    commit += " with uncommitted changes" if environment["uncommitted_changes"] else ""
    rows = [*document["rows"], *context_cells(document)]
    first = rows[0]
    engine = first["engine"]
    fed = f"{first['prompt_tokens']} prompt"
    if not document["rows"]:
        fed = f"contexts of {document['contexts']['kv']} KV"
    facts = [machine, commit, "" if ceiling is None else _bandwidth(ceiling), engine["dtype"]]
    facts.append(f"{fed} and {first['new_tokens']} new tokens")
    facts.append(f"{first['runs']} run{'s' * (first['runs'] > 1)}")
    chunk = engine["max_prefill_tokens_per_step"]
    facts.append("" if chunk is None else f"at most {chunk} prompt tokens a step")
    bound = engine.get("max_prefill_ms_per_step")
    facts.append("" if bound is None else f"at most {bound:g} ms of prefill a step")
    largest = max(engine["prefill_buckets"])
    facts.append("" if largest <= 1024 else f"token buckets up to {largest:,}")
    facts.append("" if engine["pdl"] else "without PDL")
    plans = all_heuristic_plans(rows)
    untuned = f" Untuned: {' and '.join(plans)}." if plans else ""
    shown = ", ".join(filter(None, facts))
    return f"{document['number']}. `profiles/results/{name}`: {shown}.{untuned}"


def _bandwidth(ceiling: Mapping[str, Any]) -> str:
    after = ceiling.get("tb_s_after")
    return f"{ceiling['tb_s']:.2f}{'' if after is None else f' and {after:.2f}'} TB/s"


def render(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """`page` with `table` between the markers. ValueError unless each marker is there once."""
    for marker in (begin, end):
        if page.count(marker) != 1:
            raise ValueError(f"the page has {page.count(marker)} times the marker {marker}")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphengine.profiles.tables.pages")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if it differs"
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="write only this page, from --results (default: both pages in docs/)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        present, wanted = _pages(options.page, options.results)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    differing = [page for page, text in wanted.items() if text != present[page]]
    for page in differing:
        if options.check:
            print(f"{page} is not what {options.results} says", file=sys.stderr)
        else:
            page.write_text(wanted[page], encoding="utf-8")
    return int(bool(differing) and options.check)


def _pages(page: Path | None, results: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Each page's text, as it is and as it must be."""
    appendix = PAGE if page is None else page
    pages = [appendix] if page else [appendix, SUMMARY_PAGE]
    present = {each: each.read_text(encoding="utf-8") for each in pages}
    wanted = {appendix: render(present[appendix], markdown(results))}
    if page is None:
        shown = summary(results)
        wanted[SUMMARY_PAGE] = render(present[SUMMARY_PAGE], shown, SUMMARY_BEGIN, SUMMARY_END)
    return present, wanted


if __name__ == "__main__":
    sys.exit(main())
