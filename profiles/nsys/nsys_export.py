"""Reads files of `nsys export --type sqlite`, in either mode of `--cuda-graph-trace`.

nsys creates tables as it needs them, and versions differ in their columns, so each is looked up
before it is used. Names follow the "SQLite Export Schema Reference" of Nsight Systems: with
`graph`, CUPTI_ACTIVITY_KIND_GRAPH_TRACE has one row a replay; with `node`, the kernels of replays
are in CUPTI_ACTIVITY_KIND_KERNEL with a graphNodeId. Both carry the correlationId of the call that
launched the graph.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graphengine.profiles.nsys.nsys_ranges import (
    NvtxRange,
    collected,
    engine_ranges,
    facts_of,
    process_of,
    within,
)
from graphengine.profiles.nsys.nsys_tables import Tables, check_file
from graphengine.profiles.runs.run_file import (
    Activities,
    Floats,
    Kernel,
    Replays,
    Run,
    merged,
    names,
    replay_gaps,
)
from graphengine.profiles.runs.units import counted

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPH_TRACE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
OTHERS = {"OSRT_API": "host", "PROFILER_OVERHEAD": "profiler"}
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
STAGE_RANGES = {
    "plan": "step/plan",
    "load": "step/load",
    "launch": "step/replay",
    "wait": "step/collect",
}


class Launch(NamedTuple):
    """A call that launched a graph, with facts about it."""

    process: int
    correlation: int
    begin: int
    end: int


def read_export(path: Path) -> Run:
    """The run of an export. ValueError if it is not one, is damaged, or shows no graph's replay."""
    check_file(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _read(Tables(database), path)
    except sqlite3.Error as error:
        raise ValueError(f"{path}: damaged or cut off: {error}") from error
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"{path}: a table has a value of another type: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read(tables: Tables, path: Path) -> Run:
    if RUNTIME not in tables and GRAPH_TRACE not in tables and KERNEL not in tables:
        known = ", ".join(sorted(tables.columns)) or "none"
        raise ValueError(
            "there is no table of CUDA activity, so it is no export of nsys with "
            f"--trace=cuda; its tables: {known}"
        )
    notes: list[str] = []
    strings = {
        identity: str(text) for identity, text in tables.rows("StringIds", "id", "value") if text
    }
    if not strings:
        notes.append("the export has no StringIds: kernels and calls have numbers for names")
    launches = _launches(tables, strings)
    work, mode, kernels = _device_work(tables, strings, notes)
    if not work:
        raise ValueError(
            "it shows no replay of a CUDA graph: profile with --trace=cuda and "
            "--cuda-graph-trace=graph or node, and a capture range in which the engine steps"
        )
    busiest = _busiest(work, notes)
    ranges = engine_ranges(tables, strings, busiest, notes)
    keys = [key for key in work if key[0] == busiest]
    replays, places = _replays({key: work[key] for key in keys}, launches, ranges, notes)
    collects = [(one.begin, one.end) for one in ranges if one.name == "step/collect"]
    basis = "between the ends of decode replays on the device: the export has no step/collect"
    if collects:
        replays = replace(replays, arrived=collected(replays, collects))
        basis = "between the host's reads of decode steps: an export knows no requests"
    by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in ranges:
        by_name[one.name].append((one.begin, one.end))
    all_ranges = {name: _spans(spans) for name, spans in by_name.items()}
    device = next((name for (name,) in tables.rows("TARGET_INFO_GPU", "name") if name), None)
    return Run(
        source=f"nsys {mode}",
        path=path,
        notes=tuple(notes),
        replays=replays,
        gaps=replay_gaps(replays),
        gap_basis=basis,
        stages={
            stage: merged(all_ranges[name])
            for stage, name in STAGE_RANGES.items()
            if name in all_ranges
        },
        environment=None if device is None else {"device": device},
        kernels=_kernels(kernels, replays, places) if mode == "node" else None,
        ranges=all_ranges or None,
        activities=_activities(tables, strings, busiest),
    )


def _spans(spans: Sequence[tuple[float, float]]) -> Floats:
    return np.array(spans, dtype=np.float64).reshape(-1, 2)


def _launches(tables: Tables, strings: dict[int, str]) -> dict[tuple[int, int], Launch]:
    """Calls that launch graphs, by process and correlation."""
    chosen = [identity for identity, text in strings.items() if text.startswith(LAUNCHES)]
    where = f"nameId IN ({', '.join(map(str, chosen))})"
    if not chosen or not tables.has(RUNTIME, "nameId"):
        return {}
    rows = tables.rows(RUNTIME, "globalTid", "correlationId", "start", "end", where=where)
    found = [Launch(process_of(thread), number, begin, end) for thread, number, begin, end in rows]
    return {(launch.process, launch.correlation): launch for launch in found}


class _Work(NamedTuple):
    """A launch's work on the device; times are 0 if CUPTI could not tell them."""

    begin: int
    end: int
    graph: int | None


class _Node(NamedTuple):
    """One kernel or copy of a replay."""

    key: tuple[int, int]
    name: str
    begin: int
    end: int


def _device_work(
    tables: Tables, strings: dict[int, str], notes: list[str]
) -> tuple[dict[tuple[int, int], _Work], str, list[_Node]]:
    """Replays by process and correlation; the mode; the kernels of replays in mode `node`."""
    columns = ("globalPid", "correlationId", "start", "end", "graphExecId", "graphId")
    work = {}
    for process, number, begin, end, executable, graph in tables.rows(GRAPH_TRACE, *columns):
        graph = graph if executable is None else executable
        work[process_of(process), number] = _Work(begin, end, graph)
    nodes = _nodes(tables, strings)
    if work:
        if nodes:
            notes.append("both modes of --cuda-graph-trace are in this file: `graph` is reported")
        return work, "graph", []
    for key, _, begin, end in nodes:
        known = work.get(key)
        if known is not None:
            begin, end = min(begin, known.begin), max(end, known.end)
        work[key] = _Work(begin, end, None)
    return work, "node", nodes


def _nodes(tables: Tables, strings: dict[int, str]) -> list[_Node]:
    """Kernels, copies and fills inside graphs, in order of time."""
    found = []
    names_of = ("shortName", "demangledName")
    for table, what in ({KERNEL: ""} | COPIES).items():
        if not tables.has(table, "graphNodeId"):
            continue
        columns = ("globalPid", "correlationId", "start", "end", *names_of)
        where = "graphNodeId IS NOT NULL AND graphNodeId != 0"
        for process, number, begin, end, short, long in tables.rows(table, *columns, where=where):
            identity = long if short is None else short
            name = what or strings.get(identity, f"kernel {identity}")
            found.append(_Node((process_of(process), number), name, begin, end))
    found.sort(key=lambda node: node.begin)
    return found


def _busiest(work: dict[tuple[int, int], _Work], notes: list[str]) -> int:
    """The process with the most replays."""
    processes = Counter(process for process, _ in work)
    busiest = processes.most_common(1)[0][0]
    if len(processes) > 1:
        notes.append(
            f"{len(processes)} processes replayed graphs: only {busiest}, with the most, is shown"
        )
    return busiest


def _replays(
    work: dict[tuple[int, int], _Work],
    launches: dict[tuple[int, int], Launch],
    ranges: Sequence[NvtxRange],
    notes: list[str],
) -> tuple[Replays, dict[tuple[int, int], int]]:
    """Columns in order of launch, and the index of each (process, correlation) in them."""
    keys = list(work)
    missing = sum(key not in launches for key in keys)
    if missing:
        notes.append(
            f"the launch of {missing} of {counted(len(keys), 'replay')} is not in the export"
        )
    untimed = sum(work[key].end <= work[key].begin for key in keys)
    if untimed:
        notes.append(f"CUPTI could not time {untimed} of {counted(len(keys), 'replay')}")

    def order(key: tuple[int, int]) -> tuple[float, int]:
        launch = launches.get(key)
        return (work[key].begin if launch is None else launch.begin, key[1])

    keys.sort(key=order)
    count = len(keys)
    launch, launched, begin, end = (np.full(count, np.nan) for _ in range(4))
    for index, key in enumerate(keys):
        if key in launches:
            launch[index], launched[index] = launches[key].begin, launches[key].end
        if work[key].end > work[key].begin:
            begin[index], end[index] = work[key].begin, work[key].end
    facts = facts_of(launch, ranges)
    graphs = [work[key].graph for key in keys]
    replays = Replays(
        step=np.array([fact.step for fact in facts], dtype=np.int64),
        bucket=names(fact.bucket(graph) for fact, graph in zip(facts, graphs, strict=True)),
        kind=names(fact.kind for fact in facts),
        rows=np.array([fact.rows for fact in facts], dtype=np.int64),
        live=np.array([fact.live for fact in facts], dtype=np.int64),
        prompt_tokens=np.array(
            [fact.live if fact.kind == "prefill" else 0 for fact in facts], dtype=np.int64
        ),
        launch=launch,
        launched=launched,
        device_us=(end - begin) / 1e3,
        arrived=end,
        emitted=np.zeros(count, dtype=np.int64),
        drafted=np.zeros(count, dtype=np.int64),
        accepted=np.zeros(count, dtype=np.int64),
        device_end=end,
    )
    return replays, {key: index for index, key in enumerate(keys)}


def _kernels(
    nodes: Sequence[_Node], replays: Replays, keys: dict[tuple[int, int], int]
) -> tuple[Kernel, ...]:
    """Launches inside replays, by bucket and name."""
    groups: dict[tuple[str, str], tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
    for key, name, begin, end in nodes:
        index = keys.get(key)
        if index is not None:
            times, where = groups[str(replays.bucket[index]), name]
            times.append((end - begin) / 1e3)
            where.append(index)
    return kernels_of(groups)


def kernels_of(
    groups: dict[tuple[str, str], tuple[list[float], list[int]]],
) -> tuple[Kernel, ...]:
    """Kernels of {(bucket, name): (microseconds, replays)}."""
    return tuple(
        Kernel(
            name=name,
            bucket=bucket,
            times_us=np.array(times, dtype=np.float64),
            replay=np.array(where, dtype=np.int64),
        )
        for (bucket, name), (times, where) in groups.items()
    )


def _activities(tables: Tables, strings: dict[int, str], process: int) -> Activities:
    """Calls of `process` other than graph launches, and its work on the device outside graphs."""
    found: list[tuple[str, float, float, bool]] = []
    for table, what in ({RUNTIME: ""} | OTHERS).items():
        columns = ("globalTid", "start", "end", "nameId")
        for thread, begin, end, identity in tables.rows(table, *columns):
            name = strings.get(identity, f"call {identity}")
            known = within(process, thread) and end is not None
            if known and not name.startswith(LAUNCHES):
                found.append((f"{what} {name}".strip(), begin, end, False))
    for table, what in ({KERNEL: "kernel"} | COPIES).items():
        of_work = ("globalPid", "start", "end", "shortName", "graphNodeId")
        for owner, begin, end, identity, node in tables.rows(table, *of_work):
            if not node and within(process, owner):
                found.append((f"{what} {strings.get(identity, '')}".strip(), begin, end, True))
    return activities_of(found)


def activities_of(found: list[tuple[str, float, float, bool]]) -> Activities:
    """(name, begin, end, whether on the device) as columns, in order of time."""
    found.sort(key=lambda one: one[1])
    return Activities(
        name=names(one[0] for one in found),
        begin=np.array([one[1] for one in found], dtype=np.float64),
        end=np.array([one[2] for one in found], dtype=np.float64),
        device=np.array([one[3] for one in found], dtype=np.bool_),
    )
