"""One recorded run: the data that every reader fills, and the reader of the recorder's JSON lines.

Times are nanoseconds on one clock of the run, as float64; NaN where a source lacks them. Data that
a source never has is None, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphengine.observe.ring import STAGES, first_launches
from graphengine.profiles.runs.run_lines import read_lines

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Names = NDArray[np.str_]

UNKNOWN = -1
"""Unknown values in columns of integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replays:
    """Columns with one element a replay, in the order of launches.

    step                 number of the step that launched it
    bucket, kind         the graph's name; "decode" or "prefill"
    rows, live           rows of the bucket, and how many of them belonged to a request
    prompt_tokens        prompt tokens that a prefill fed
    launch, launched     begin and end of the host's launch
    device_us            its time on the device
    arrived              when the host had its tokens; in a trace: when it ended on the device
    emitted              tokens given; `drafted` and `accepted` for speculation
    device_end           when it ended on the device, if the source shares a clock with it
    """

    step: Integers
    bucket: Names
    kind: Names
    rows: Integers
    live: Integers
    prompt_tokens: Integers
    launch: Floats
    launched: Floats
    device_us: Floats
    arrived: Floats
    emitted: Integers
    drafted: Integers
    accepted: Integers
    device_end: Floats

    def __len__(self) -> int:
        return len(self.step)

    @property
    def decodes(self) -> NDArray[np.bool_]:
        return np.asarray(self.kind == "decode", dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Times between two deliveries of tokens to a request, in order of their ends.

    begin, end   of the gap
    first, last  indices of the replays whose tokens begin and end it
    request      its id; `UNKNOWN` if the source knows none: then gaps are between decode replays
    """

    begin: Floats
    end: Floats
    first: Integers
    last: Integers
    request: Integers

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def milliseconds(self) -> Floats:
        return (self.end - self.begin) / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Columns with one element a finished request; `first` is NaN for those without a token."""

    id: Integers
    submitted: Floats
    first: Floats
    finished: Floats
    prompt_tokens: Integers
    new_tokens: Integers
    reason: Names
    pauses: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """All launches of one kernel within the replays of one bucket, in order of time.

    times_us  of each launch on the device; `replay` is the index of its replay
    """

    name: str
    bucket: str
    times_us: Floats
    replay: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Activities:
    """Other events of a trace, in order of `begin`; `device` marks copies and kernels."""

    name: Names
    begin: Floats
    end: Floats
    device: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A recording's facts about several ranks. All other times of a run are rank 0's, the driver's.

    count, option  their number, and the engine's option that asks for them
    waited_s       seconds that rank 0 waited for the others' parts; None if unknown
    seconds        recorded seconds in all; `steps` is the number of steps in them
    skew_us        of each replay: from when rank 0 launched it until the last other rank did,
                   negative where that was earlier; NaN if unknown
    last           which other rank that was; `UNKNOWN` if unknown
    """

    count: int
    option: str
    waited_s: float | None
    seconds: float
    steps: int
    skew_us: Floats
    last: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadUse:
    """Processor use, by each replay, of the thread that read its tokens. Columns with one element a
    replay; NaN if unknown.

    cpu_ns     nanoseconds that it had run
    preempted  how often it, or on a CPU any thread of the process, had lost its core to others
    yielded    how often it had given its core away, to sleep or to wait
    """

    cpu_ns: Floats
    preempted: Floats
    yielded: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run, as its file describes it.

    source      "recorder", "nsys graph", "nsys node" or "torch"
    notes       for the reader: parts that are missing, a file that was cut off
    stages      by the names of `STAGES`: begin and end of each time that the host was in it, (n, 2)
    gap_basis   the events between which `gaps` are measured
    ranges      by name of the NVTX range: begin and end of each, (n, 2)
    dropped     replays that the recorder's ring had no room for
    discarded   tokens that were sampled and not given to requests
    ranks       for an engine with several; None for one rank, and for a source that does not tell
    thread      None for a source that does not tell, such as recordings of earlier versions
    """

    source: str
    path: Path
    notes: tuple[str, ...]
    replays: Replays
    gaps: Gaps
    gap_basis: str
    stages: Mapping[str, Floats] = field(default_factory=dict)
    environment: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    captures: tuple[Mapping[str, Any], ...] | None = None
    requests: Requests | None = None
    kernels: tuple[Kernel, ...] | None = None
    ranges: Mapping[str, Floats] | None = None
    activities: Activities | None = None
    dropped: int | None = None
    discarded: int | None = None
    ranks: Ranks | None = None
    thread: ThreadUse | None = None

    @property
    def on_host(self) -> bool:
        """Whether a replay is a call that computes, as on a CPU device."""
        return self.engine is not None and str(self.engine.get("device", "")).startswith("cpu")

    @property
    def spins(self) -> bool:
        """Whether the host keeps its core while it waits for tokens, as with `wait="spin"`."""
        return self.on_host or (self.engine or {}).get("wait", "spin") == "spin"


def read_recording(path: Path) -> Run:
    """Read a file of the recorder. ValueError, with the line, for any other file.

    A truncated file is read as far as it goes; `notes` say so.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a recording: {error}") from error
    try:
        return recording_from_lines(text.splitlines(), path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def recording_from_lines(lines: Iterable[str], path: Path) -> Run:
    """The run in `lines`. ValueError, with the line but without `path`, for invalid ones."""
    lines_read = read_lines(lines)
    header, replays, requests = lines_read.header, lines_read.replays, lines_read.requests
    notes, dropped = list(lines_read.notes), lines_read.dropped
    columns = replay_columns(replays)
    captures = header.get("captures")
    return Run(
        source="recorder",
        path=path,
        notes=tuple(notes),
        replays=columns,
        gaps=request_gaps(
            columns,
            [document.get("lanes") or [] for document in replays],
            recording_numbers(replays),
        ),
        gap_basis="between the deliveries of a request's tokens to the host",
        stages=host_stages(replays),
        environment=header.get("environment"),
        engine=header.get("engine"),
        captures=None if captures is None else tuple(captures),
        requests=request_columns(requests),
        dropped=dropped,
        discarded=int(integers(replays, "discarded").sum()),
        ranks=ranks_of(header.get("ranks"), replays),
        thread=thread_use(replays),
    )


def floats(rows: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """A column; NaN where `key` is missing or null."""
    values = [row.get(key) for row in rows]
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def integers(rows: Sequence[Mapping[str, Any]], key: str, otherwise: int = 0) -> Integers:
    values = [row.get(key) for row in rows]
    return np.array([otherwise if v is None else v for v in values], dtype=np.int64)


def names(values: Iterable[Any]) -> Names:
    return np.array([str(value) for value in values], dtype=np.str_)


def replay_columns(rows: Sequence[Mapping[str, Any]]) -> Replays:
    """Columns of the recorder's replays."""
    launched, device_us = floats(rows, "launched"), floats(rows, "device_us")
    return Replays(
        step=integers(rows, "step", UNKNOWN),
        bucket=names(row["bucket"] for row in rows),
        kind=names(row["type"] for row in rows),
        rows=integers(rows, "rows", UNKNOWN),
        live=integers(rows, "live", UNKNOWN),
        prompt_tokens=integers(rows, "prompt_tokens"),
        launch=floats(rows, "replay"),
        launched=launched,
        device_us=device_us,
        arrived=floats(rows, "read"),
        emitted=integers(rows, "emitted"),
        drafted=integers(rows, "drafted"),
        accepted=integers(rows, "accepted"),
        device_end=device_ends(launched, device_us),
    )


def device_ends(launched: Floats, device_us: Floats) -> Floats:
    """When each replay must have ended on the device: a stream runs them one after another.

    Each starts when it was launched and the one before it has ended; accurate to the microseconds
    that a launch takes to reach the device. NaN from an unknown time until the next known one.
    """
    ends = np.full(len(launched), np.nan)
    previous = -np.inf
    for index, (start, took) in enumerate(zip(launched, device_us, strict=True)):
        if np.isnan(start) or np.isnan(took):
            previous = -np.inf
            continue
        previous = ends[index] = max(start, previous) + 1e3 * took
    return ends


def request_columns(rows: Sequence[Mapping[str, Any]]) -> Requests:
    return Requests(
        id=integers(rows, "id", UNKNOWN),
        submitted=floats(rows, "submitted"),
        first=floats(rows, "first"),
        finished=floats(rows, "finished"),
        prompt_tokens=integers(rows, "prompt_tokens"),
        new_tokens=integers(rows, "new_tokens"),
        reason=names(row.get("reason") for row in rows),
        pauses=integers(rows, "pauses"),
    )


def ranks_of(header: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> Ranks | None:
    """The facts about several ranks in the header and the replays; None where the header has
    none.
    """
    if header is None:
        return None
    return Ranks(
        count=header["count"],
        option=header["option"],
        waited_s=header.get("waited_s"),
        seconds=header.get("seconds") or 0.0,
        steps=header.get("steps") or 0,
        skew_us=floats(rows, "skew_us"),
        last=integers(rows, "last_rank", UNKNOWN),
    )


def thread_use(rows: Sequence[Mapping[str, Any]]) -> ThreadUse | None:
    """Columns of the recorder's processor times; None if no replay has them."""
    found = ThreadUse(
        cpu_ns=floats(rows, "cpu_ns"),
        preempted=floats(rows, "preempted"),
        yielded=floats(rows, "yielded"),
    )
    return None if np.isnan(found.cpu_ns).all() else found


def host_stages(rows: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """When the host was in each stage. Replays of one step share all stages but the launch."""
    found = {}
    for stage, (begin, end) in STAGES.items():
        begins, ends = floats(rows, begin), floats(rows, end)
        if stage == "load":
            ends = first_launches(begins, ends)
        spans = np.stack([begins, ends], axis=1)
        found[stage] = merged(spans[~np.isnan(spans).any(axis=1)])
    return found


def merged(spans: Floats) -> Floats:
    """The union of the intervals (n, 2), sorted and disjoint."""
    if not len(spans):
        return np.empty((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    starts_new = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    groups = np.flatnonzero(starts_new)
    last = np.concatenate([groups[1:] - 1, [len(spans) - 1]])
    return np.stack([spans[groups, 0], ends[last]], axis=1)


def recording_numbers(rows: Sequence[Mapping[str, Any]]) -> Integers:
    """The recording of each replay; in files without it, a skipped `sequence` begins a new one."""
    sequence, recording = integers(rows, "sequence"), integers(rows, "recording")
    changed = (np.diff(sequence) > 1) | (np.diff(recording) != 0)
    return np.concatenate([[0], np.cumsum(changed)])


def request_gaps(
    replays: Replays, lanes: Sequence[Sequence[Sequence[int]]], recording: Integers
) -> Gaps:
    """Gaps between the deliveries of each request's tokens.

    lanes      for each replay, (request id, tokens) of its rows
    recording  for each replay a number that changes where the recorder was off in between

    Tokens of one step come together, also those of its prefill and its decode replay. No gap spans
    two recordings, as the tokens in between are missing.
    """
    last_of: dict[int, int] = {}
    found: list[tuple[float, float, int, int, int]] = []
    for index, of_replay in enumerate(lanes):
        moment = replays.arrived[index]
        if index and recording[index] != recording[index - 1]:
            last_of.clear()
        if np.isnan(moment):
            continue
        for request, tokens in of_replay:
            if not tokens:
                continue
            previous = last_of.get(request)
            last_of[request] = index
            if previous is None or replays.step[previous] == replays.step[index]:
                continue
            found.append((replays.arrived[previous], moment, previous, index, request))
    return gaps_of(found)


def replay_gaps(replays: Replays) -> Gaps:
    """Gaps between the arrivals of decode replays, if nothing is known about requests."""
    known = np.flatnonzero(replays.decodes & ~np.isnan(replays.arrived))
    return gaps_of(
        [
            (replays.arrived[a], replays.arrived[b], a, b, UNKNOWN)
            for a, b in zip(known[:-1].tolist(), known[1:].tolist(), strict=True)
        ]
    )


def gaps_of(found: Sequence[tuple[float, float, int, int, int]]) -> Gaps:
    """(begin, end, first, last, request) as columns, in order of their ends."""
    order = sorted(found, key=lambda gap: gap[1])
    begin, end, first, last, request = zip(*order, strict=True) if order else ((),) * 5
    return Gaps(
        begin=np.array(begin, dtype=np.float64),
        end=np.array(end, dtype=np.float64),
        first=np.array(first, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        request=np.array(request, dtype=np.int64),
    )
