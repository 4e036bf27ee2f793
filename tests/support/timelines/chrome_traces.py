"""Chrome traces of a simulated run, as torch's profiler writes them on a GPU."""

from __future__ import annotations

import json
from typing import Any

from timelines.nsys_files import KERNELS
from timelines.simulated_run import US, Timeline, recording_lines

EPOCH_US = 1_700_000.25
"""From the simulated clock's zero to the trace's."""
PID = 77


def chrome_trace(timeline: Timeline, *, recorder: bool = True, skip: int = 0) -> dict[str, Any]:
    """The trace, with the recorder's lines in it. `skip` launches from the front are missing."""

    def event(name: str, kind: str, begin: int, end: int, **arguments: Any) -> dict[str, Any]:
        return {
            "ph": "X", "cat": kind, "name": name, "pid": PID, "tid": PID,
            "ts": EPOCH_US + begin / US, "dur": (end - begin) / US, "args": arguments,
        }  # fmt: skip

    events = [event("graphengine/clock", "user_annotation", 0, 900)]
    for number, made in enumerate(timeline.replays[skip:], start=1000):
        events.append(
            event("cudaGraphLaunch", "cuda_runtime", made.replay, made.launched, correlation=number)
        )
        begin, took = made.device_begin, made.device_end - made.device_begin
        for index, (name, share) in enumerate(KERNELS):
            end = made.device_end if index == len(KERNELS) - 1 else begin + round(share * took)
            events.append(event(name, "kernel", begin, end, correlation=number, grid=[1, 1, 1]))
            begin = end
    for name, begin, end in timeline.calls:
        events.append(event(name, "cuda_runtime", begin, end, correlation=7))
    events.append(event("copy", "gpu_memcpy", 0, 10, correlation=8))
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
    }
    if recorder:
        lines = [json.loads(line) for line in recording_lines(timeline)]
        trace["graphengine"] = {"clock_ns": 0, "lines": lines}
    return trace
