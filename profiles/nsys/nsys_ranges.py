"""The engine's NVTX ranges in an nsys export, and their facts about the graphs in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graphengine.observe.tracing import DOMAIN, unpack
from graphengine.profiles.nsys.nsys_tables import Tables
from graphengine.profiles.runs.run_file import UNKNOWN, Floats, Replays

NVTX = "NVTX_EVENTS"
RANGES, DOMAIN_CREATE = (59, 60), 75
"""Event types of NVTX_EVENTS: push/pop and start/end ranges; the creation of a domain."""
CLOCK_SLACK_NS = 20_000
"""Largest difference between the clocks of host and device in an export."""


class NvtxRange(NamedTuple):
    """One range of the engine's domain; `payload` is 0 where it has none."""

    name: str
    begin: int
    end: int
    payload: int


OURS = ("step/plan", "step/load", "step/replay", "step/collect", "prefill", "load", "compile")
CAPTURE = "capture/"
"""Names of the engine's ranges, for exports that do not name domains."""


def process_of(identity: int | None) -> int:
    """The process id of a globalTid or globalPid: it is in bits 24 to 47."""
    return 0 if identity is None else identity >> 24 & 0xFF_FFFF


def within(process: int, identity: int | None) -> bool:
    """Whether a globalTid or globalPid is of `process`; one that is missing counts as such."""
    return identity is None or process_of(identity) == process


def engine_ranges(
    tables: Tables, strings: dict[int, str], process: int, notes: list[str]
) -> list[NvtxRange]:
    """Ranges of the engine's domain in `process` that have ended, in order of time.

    A domain's id is valid within one process. If no domain has the engine's name, ranges are taken
    by their own names, and a note says so.
    """
    if NVTX not in tables:
        notes.append("the export has no NVTX ranges: stages and buckets are not known")
        return []
    created = tables.rows(
        NVTX, "globalTid", "domainId", "text", "textId", where=f"eventType = {DOMAIN_CREATE}"
    )
    domains = {
        domain
        for thread, domain, text, text_id in created
        if within(process, thread) and _text(text, text_id, strings) == DOMAIN
    }
    columns = (
        "globalTid", "start", "end", "domainId", "text", "textId", "int64Value", "uint64Value",
    )  # fmt: skip
    where = f"eventType IN {RANGES} AND end IS NOT NULL"
    found, named = [], []
    for thread, begin, end, domain, text, text_id, signed, unsigned in tables.rows(
        NVTX, *columns, where=where
    ):
        if within(process, thread):
            name = _text(text, text_id, strings)
            payload = signed if signed is not None else unsigned
            one = NvtxRange(name, begin, end, payload or 0)
            if domain in domains:
                found.append(one)
            elif name in OURS or name.startswith(CAPTURE):
                named.append(one)
    if named and not domains:
        found = named
        notes.append(f"no domain {DOMAIN!r} is in the export: ranges were taken by their names")
    if not found:
        notes.append(
            f"no range of the domain {DOMAIN!r} is in the export: stages and buckets are not known "
            "(is the nvtx package installed, and NVTX_DISABLE unset?)"
        )
    return sorted(found, key=lambda one: one.begin)


def _text(text: str | None, identity: int | None, strings: dict[int, str]) -> str:
    """An event's text: its own, or the string it refers to."""
    if text is not None:
        return str(text)
    return str(identity) if identity is None else strings.get(identity, str(identity))


class Fact(NamedTuple):
    """The facts about a launch from the ranges around it."""

    kind: str
    rows: int
    live: int
    step: int

    def bucket(self, graph: int | None) -> str:
        """A name; ranges tell a bucket's rows, but not its sampler and drafts."""
        if self.rows != UNKNOWN:
            return f"{self.kind}/{self.rows}"
        return self.kind if graph is None else f"graph {graph}"


def facts_of(launch: Floats, ranges: Sequence[NvtxRange]) -> list[Fact]:
    """The `prefill` or `step/replay` around each launch; decode if none is known."""
    steps = _Places([one for one in ranges if one.name == "step/replay"])
    prefills = _Places([one for one in ranges if one.name == "prefill"])
    found: list[Fact] = []
    for moment in launch:
        step, prefill = steps.around(moment), prefills.around(moment)
        if prefill is not None:
            payload = prefills.ranges[prefill].payload
            found.append(Fact("prefill", *unpack(payload), UNKNOWN if step is None else step))
        elif step is not None and steps.ranges[step].payload:
            found.append(Fact("decode", *unpack(steps.ranges[step].payload), step))
        else:
            found.append(Fact("decode", UNKNOWN, UNKNOWN, UNKNOWN if step is None else step))
    return found


class _Places:
    """Disjoint ranges in order of time."""

    def __init__(self, ranges: Sequence[NvtxRange]) -> None:
        self.ranges = ranges
        self._begins = [one.begin for one in ranges]

    def around(self, moment: float) -> int | None:
        """Index of the range that holds `moment`."""
        index = bisect_right(self._begins, moment) - 1
        inside = index >= 0 and moment < self.ranges[index].end
        return index if inside else None


def collected(replays: Replays, collects: Sequence[tuple[int, int]]) -> Floats:
    """When the host had read each replay: the end of the first `step/collect` that ends after it on
    the device and has not read an earlier step. NaN for replays that were never read.
    """
    found = np.full(len(replays), np.nan)
    place, previous = -1, None
    for index, (step, done) in enumerate(zip(replays.step, replays.device_end, strict=True)):
        if np.isnan(done):
            continue
        if previous is None or step != previous or step == UNKNOWN:
            place += 1
        previous = step
        while place < len(collects) and collects[place][1] < done - CLOCK_SLACK_NS:
            place += 1
        if place >= len(collects):
            break
        found[index] = collects[place][1]
    return found
