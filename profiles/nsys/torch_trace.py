"""Chrome traces of torch's profiler (CUPTI): writes them with the recorder's lines, and reads them.

A trace opens in Perfetto (https://ui.perfetto.dev). Its replays are the kernels that carry the
correlation of one cudaGraphLaunch. Facts that the trace alone does not have (buckets, live rows,
stages, requests) comes from the recorder, whose lines travel in the same file under the key
`graphengine`, and are drawn as a track of their own.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphengine import Engine
from graphengine.observe.ring import STAGES
from graphengine.profiles.nsys.nsys_export import activities_of, kernels_of
from graphengine.profiles.runs.run_file import (
    UNKNOWN,
    Activities,
    Floats,
    Kernel,
    Replays,
    Run,
    names,
    recording_from_lines,
    replay_gaps,
)

GZIP = b"\x1f\x8b"
KEY = "graphengine"
"""The key of the recorder's lines and of `clock_ns` in the trace."""
CLOCK = "graphengine/clock"
"""A mark whose time is known on both clocks."""
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
TRACK = 999_999
"""Thread id of the recorder's track: beyond Linux's usual ones."""


@contextmanager
def torch_profile(engine: Engine, path: str | Path) -> Iterator[None]:
    """Profile `engine` inside the block; at its end write a Chrome trace to `path`.

    Meanwhile `engine.recorder` records, from an empty start: its earlier records are dropped. A
    file whose name ends in `.gz` is compressed. ValueError while the recorder is in use.
    """
    recorder = engine.recorder
    if recorder.recording:
        raise ValueError("the engine's recorder is in use: stop it, then profile")
    on_gpu = engine.memory.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    recorder.clear()
    device = torch.cuda.device(engine.memory.device) if on_gpu else nullcontext()
    with device, torch.profiler.profile(activities=activities) as profiler:
        clock = _mark()
        # CUPTI times the replays: events around them would be extra work.
        recorder.start(device_times=False)
        try:
            yield
        finally:
            recorder.stop()
            if on_gpu:
                torch.cuda.synchronize()
    path = Path(path)
    profiler.export_chrome_trace(str(path))
    lines = [recorder.header(), *recorder.rows()]
    origin = int(recorder.replays()["plan"][0]) if len(recorder) else clock
    _embed(path, lines, clock_ns=clock - origin)


def _mark() -> int:
    """Put `CLOCK` into the trace; returns the recorder's clock at that moment."""
    now = time.perf_counter_ns()
    with torch.profiler.record_function(CLOCK):
        pass
    return now


def _embed(path: Path, lines: Sequence[Mapping[str, Any]], *, clock_ns: int) -> None:
    """Add the recorder's lines to the trace in `path`, and its stages as events."""
    trace = _load(path)
    events = trace["traceEvents"]
    trace[KEY] = {"clock_ns": clock_ns, "lines": list(lines)}
    offset = _clock_offset(events, trace[KEY])
    if offset is not None:
        process = next((event["pid"] for event in events if event.get("name") == CLOCK), 0)
        events += _track(lines, process, offset)
    _save(path, trace)


def _track(
    lines: Sequence[Mapping[str, Any]], process: Any, offset_us: float
) -> Iterator[dict[str, Any]]:
    """The recorder's stages as events of a track; `offset_us` brings its times to the trace's."""
    yield {
        "ph": "M", "name": "thread_name", "pid": process, "tid": TRACK,
        "args": {"name": "graphengine"},
    }  # fmt: skip
    seen = set()
    for line in lines:
        if line.get("kind") != "replay":
            continue
        facts = {key: line[key] for key in ("step", "bucket", "live", "device_us")}
        for stage, (first, last) in STAGES.items():
            begin, end = line[first], line[last]
            # Replays of one step share all stages but the launch; its first one ends the load.
            known = (stage, begin) if stage != "launch" else (stage, begin, end)
            if begin is None or end is None or known in seen:
                continue
            seen.add(known)
            yield {
                "ph": "X", "cat": KEY, "name": f"step/{stage}", "pid": process, "tid": TRACK,
                "ts": begin / 1e3 + offset_us, "dur": (end - begin) / 1e3, "args": facts,
            }  # fmt: skip


def _load(path: Path) -> dict[str, Any]:
    """The trace. ValueError if it is not a trace, or is truncated."""
    try:
        data = path.read_bytes()
        if data.startswith(GZIP):
            data = gzip.decompress(data)
        trace = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: cut off, or no JSON: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path}: no Chrome trace, for it has no list of traceEvents")
    return trace


def _save(path: Path, trace: Mapping[str, Any]) -> None:
    data = json.dumps(trace, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def is_trace(head: bytes) -> bool:
    """Whether a file that begins with `head` is a Chrome trace and not a recording's lines."""
    first = head.lstrip().split(b"\n", 1)[0]
    return head.lstrip().startswith(b"{") and (
        b'"traceEvents"' in head or first.strip() == b"{" or b'"schemaVersion"' in first
    )


def _clock_offset(events: Sequence[Mapping[str, Any]], ours: Mapping[str, Any]) -> float | None:
    """Microseconds from the recorder's clock to the trace's, by the mark."""
    mark = next((event for event in events if event.get("name") == CLOCK), None)
    return None if mark is None else float(mark["ts"]) - ours["clock_ns"] / 1e3


def read_trace(path: Path) -> Run:
    """The run of a Chrome trace. ValueError for anything else, and for one without a replay."""
    trace = _load(path)
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    try:
        return _read(trace, events, path)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: an event lacks or garbles {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read(trace: Mapping[str, Any], events: Sequence[Mapping[str, Any]], path: Path) -> Run:
    launches = _launch_events(events)
    work = _work_of_launches(events, {launch["args"]["correlation"] for launch in launches})
    ours = trace.get(KEY)
    if ours is not None:
        if not isinstance(ours, dict) or not isinstance(ours.get("lines"), list):
            raise ValueError(f"{KEY!r} holds no recorder's lines")
        run = recording_from_lines([json.dumps(line) for line in ours["lines"]], path)
        return _with_recorder(run, events, ours, launches, work)
    if not work:
        raise ValueError(
            "it shows no replay of a CUDA graph, and has no recorder's lines: profile with "
            "`graphengine profile torch`, or torch_profile(engine, path)"
        )
    notes = ["no recorder's lines in this trace: buckets, stages and requests are not known"]
    replays = _replays_alone(launches, work)
    devices = trace.get("deviceProperties")
    device = devices[0] if isinstance(devices, list) and devices else {}
    return Run(
        source="torch",
        path=path,
        notes=tuple(notes),
        replays=replays,
        gaps=replay_gaps(replays),
        gap_basis="between the ends of replays on the device: requests are not in the trace",
        environment={"device": device.get("name") if isinstance(device, dict) else None},
        kernels=_kernels(replays, [work.get(number, []) for number in _numbers(launches, work)]),
        activities=_activities(events, 0.0),
    )


def _launch_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Launches of graphs, in order of time."""
    found = [
        event
        for event in events
        if event.get("cat") in HOST_CALLS and str(event.get("name")).startswith(LAUNCHES)
    ]
    return sorted(found, key=lambda event: float(event["ts"]))


def _work_of_launches(
    events: Sequence[Mapping[str, Any]], launched: set[int]
) -> dict[int, list[Mapping[str, Any]]]:
    """Kernels, copies and fills of each launch, by its correlation, in order of time."""
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            number = _arguments(event).get("correlation")
            if number in launched:
                found[number].append(event)
    for of_launch in found.values():
        of_launch.sort(key=lambda event: float(event["ts"]))
    return found


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """An event's arguments; empty for a foreign event without usable ones."""
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0.0))


def _with_recorder(
    run: Run,
    events: Sequence[Mapping[str, Any]],
    ours: Mapping[str, Any],
    launches: Sequence[Mapping[str, Any]],
    work: Mapping[int, list[Mapping[str, Any]]],
) -> Run:
    """The recorder's run and clock, with the trace's kernels and CUPTI's device times."""
    notes, replays, kernels = list(run.notes), run.replays, None
    offset = _clock_offset(events, ours)
    if launches and len(launches) != len(replays):
        notes.append(
            f"the trace has {len(launches)} launches of graphs and the recorder {len(replays)}: "
            "kernels cannot be told by bucket"
        )
    elif launches:
        # Both in launch order, which gives the clocks' offset more exactly than the mark.
        began = np.array([float(launch["ts"]) for launch in launches])
        offset = float(np.median(began - replays.launch / 1e3))
        of_replay = [work.get(launch["args"]["correlation"], []) for launch in launches]
        begin = [float(nodes[0]["ts"]) if nodes else np.nan for nodes in of_replay]
        end = [max(map(_end, nodes)) if nodes else np.nan for nodes in of_replay]
        replays = replace(
            replays,
            device_us=np.subtract(end, begin),
            device_end=(np.array(end) - offset) * 1e3,
        )
        kernels = _kernels(replays, of_replay)
    elif not run.on_host:
        notes.append("the trace shows no launch of a graph, though the engine was on a GPU")
    return replace(
        run,
        source="torch",
        notes=tuple(notes),
        replays=replays,
        kernels=kernels,
        activities=None if offset is None else _activities(events, offset),
    )


def _numbers(
    launches: Sequence[Mapping[str, Any]], work: Mapping[int, list[Mapping[str, Any]]]
) -> list[int]:
    """Correlations of the launches whose work is in the trace."""
    found = [launch["args"]["correlation"] for launch in launches]
    return [number for number in found if number in work]


def _replays_alone(
    launches: Sequence[Mapping[str, Any]], work: Mapping[int, list[Mapping[str, Any]]]
) -> Replays:
    """The facts about replays from a trace alone: their times, and how many kernels they had."""
    numbers = _numbers(launches, work)
    by_number = {launch["args"]["correlation"]: launch for launch in launches}
    launch = _nanoseconds(float(by_number[number]["ts"]) for number in numbers)
    launched = _nanoseconds(_end(by_number[number]) for number in numbers)
    begin = _nanoseconds(float(work[number][0]["ts"]) for number in numbers)
    end = _nanoseconds(max(map(_end, work[number])) for number in numbers)
    count = len(numbers)
    zeros, unknown = np.zeros(count, dtype=np.int64), np.full(count, UNKNOWN, dtype=np.int64)
    return Replays(
        step=np.arange(count, dtype=np.int64),
        bucket=names(f"graph of {len(work[number])} nodes" for number in numbers),
        kind=names("decode" for _ in numbers),
        rows=unknown,
        live=unknown,
        prompt_tokens=zeros,
        launch=launch,
        launched=launched,
        device_us=(end - begin) / 1e3,
        arrived=end,
        emitted=zeros,
        drafted=zeros,
        accepted=zeros,
        device_end=end,
    )


def _nanoseconds(values: Iterator[float]) -> Floats:
    """Microseconds as nanoseconds."""
    return np.array(list(values), dtype=np.float64) * 1e3


def _kernels(
    replays: Replays, of_replay: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[Kernel, ...]:
    groups: dict[tuple[str, str], tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
    for index, nodes in enumerate(of_replay):
        for node in nodes:
            times, where = groups[str(replays.bucket[index]), str(node["name"])]
            times.append(float(node.get("dur", 0.0)))
            where.append(index)
    return kernels_of(groups)


def _activities(events: Sequence[Mapping[str, Any]], offset_us: float) -> Activities:
    """Calls other than graph launches, and the device's work outside of graphs."""
    found = []
    launched = {launch["args"]["correlation"] for launch in _launch_events(events)}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if event.get("ph") != "X" or name == CLOCK or name.startswith(LAUNCHES):
            continue
        on_device = kind in DEVICE_WORK
        if on_device and _arguments(event).get("correlation") in launched:
            continue
        if on_device or kind in HOST_CALLS:
            begin = (float(event["ts"]) - offset_us) * 1e3
            end = (_end(event) - offset_us) * 1e3
            found.append((name, begin, end, on_device))
    return activities_of(found)
