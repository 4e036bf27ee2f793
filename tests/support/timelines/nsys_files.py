"""SQLite files as nsys exports them, of a simulated run: tables and columns after the schema that
Nsight Systems documents ("SQLite Export Schema Reference"), as far as a reader of them looks.
"""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

from timelines.simulated_run import Simulated, Timeline

PID = 4321
GLOBAL_TID = PID << 24 | 4321
GLOBAL_PID = PID << 24
DOMAIN = 7
RANGE, DOMAIN_CREATE = 59, 75
KERNELS = (("dot_kernel", 0.7), ("attention_kernel", 0.2), ("finish_kernel", 0.1))
"""The kernels of each replay: name and share of its time."""

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, smCount INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL,
    uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT,
    binaryData TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER,
    launchType INTEGER, registersPerThread INTEGER, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
    graphNodeId INTEGER);
"""
GRAPH_SCHEMA = """
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL);
"""


class Export:
    """Writes one export; tables can be changed through `database` before `path` is read."""

    def __init__(self, path: Path, timeline: Timeline, *, mode: str, ranges: bool = True) -> None:
        self.path = path
        self._strings: dict[str, int] = {}
        self._correlations = itertools.count(100)
        with closing(sqlite3.connect(path)) as self.database:
            self.database.executescript(SCHEMA + (GRAPH_SCHEMA if mode == "graph" else ""))
            self._insert("META_DATA_CAPTURE", name="CUDA_GRAPH_TRACE_OPTIONS:MODE", value=mode)
            self._insert("TARGET_INFO_GPU", id=0, name="NVIDIA H200", smCount=132)
            if ranges:
                self._event(0, None, DOMAIN_CREATE, text="graphengine")
                self._ranges(timeline)
            for made in timeline.replays:
                self._replay(made, mode)
            for name, begin, end in timeline.calls:
                self._runtime(f"{name}_v3020", begin, end)
            self.database.commit()

    def _insert(self, table: str, **values: object) -> None:
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        statement = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        self.database.execute(statement, tuple(values.values()))

    def _string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self._insert("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def _event(self, begin: int, end: int | None, kind: int, **values: object) -> None:
        columns = {"globalTid": GLOBAL_TID, "domainId": DOMAIN} | values
        self._insert("NVTX_EVENTS", start=begin, end=end, eventType=kind, **columns)

    def _range(self, name: str, begin: int, end: int, payload: int | None = None) -> None:
        text = self._string(name)
        self._event(begin, end, RANGE, textId=text, int64Value=payload)

    def _ranges(self, timeline: Timeline) -> None:
        """Ranges of each step, and a range of another library's domain."""
        self._event(5, 6, RANGE, textId=self._string("step/plan"), domainId=DOMAIN + 1)
        by_step: dict[int, list[Simulated]] = {}
        for made in timeline.replays:
            by_step.setdefault(made.step, []).append(made)
        for launched in by_step.values():
            first, last = launched[0], launched[-1]
            self._range("step/plan", first.plan, first.load)
            self._range("step/load", first.load, first.replay)
            payload = last.rows << 32 | last.live
            self._range("step/replay", first.replay, last.launched, payload)
            if last.collect:
                self._range("step/collect", last.collect, last.delivered, payload)
            for made in launched:
                if made.kind == "prefill":
                    fed = made.rows << 32 | made.live
                    self._range("prefill", made.replay, made.launched, fed)

    def _runtime(self, name: str, begin: int, end: int) -> int:
        correlation = next(self._correlations)
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=begin, end=end, eventClass=0,
            globalTid=GLOBAL_TID, correlationId=correlation, nameId=self._string(name),
            returnValue=0,
        )  # fmt: skip
        return correlation

    def _replay(self, made: Simulated, mode: str) -> None:
        correlation = self._runtime("cudaGraphLaunch_v10000", made.replay, made.launched)
        place = {"deviceId": 0, "streamId": 13, "correlationId": correlation}
        graph = sum(made.bucket.encode()) % 1000
        if mode == "graph":
            self._insert(
                "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=made.device_begin, end=made.device_end,
                contextId=1, globalPid=GLOBAL_PID, graphId=graph, graphExecId=graph + 1, **place,
            )  # fmt: skip
            return
        begin, took = made.device_begin, made.device_end - made.device_begin
        for node, (name, share) in enumerate(KERNELS):
            last = node == len(KERNELS) - 1
            end = made.device_end if last else begin + round(share * took)
            self._insert(
                "CUPTI_ACTIVITY_KIND_KERNEL", start=begin, end=end, globalPid=GLOBAL_PID,
                demangledName=self._string(f"void {name}(float*)"),
                shortName=self._string(name), gridX=made.rows, gridY=1, gridZ=1, blockX=128,
                blockY=1, blockZ=1, graphNodeId=(graph << 32) + node + 1, **place,
            )  # fmt: skip
            begin = end
