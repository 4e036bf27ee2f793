"""A simulated engine's time line, with planted causes, for recordings and traces in tests.

One request, one replay ahead of the host, as an engine with lookahead 1 on a GPU: `step` launches
replay n + 1, then waits for replay n.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

US = 1000
DEVICE_US = {"decode/1/fast": 300.0, "decode/32/fast": 420.0, "prefill/64": 900.0}
HOST_US = {"plan": 12.0, "load": 6.0, "launch": 9.0, "deliver": 14.0, "outside": 20.0}
REQUEST = 1
THREAD = ("cpu_ns", "preempted", "yielded")


@dataclass(kw_only=True, slots=True)
class Simulated:
    """One replay: nanoseconds of the host's stages, and its time on the device.

    skew_us  by which rank 1 launches it later than the driver, where there are two ranks
    cpu_ns   for how long the thread had run when it read the tokens; it had lost its core
             `preempted` times, and given it away `yielded` times
    """

    step: int
    bucket: str
    live: int = 1
    prompt_tokens: int = 0
    plan: int = 0
    load: int = 0
    replay: int = 0
    launched: int = 0
    collect: int = 0
    read: int = 0
    delivered: int = 0
    device_begin: int = 0
    device_end: int = 0
    skew_us: float = 0.0
    cpu_ns: int = 0
    preempted: int = 0
    yielded: int = 0

    @property
    def rows(self) -> int:
        return int(self.bucket.split("/")[1])

    @property
    def kind(self) -> str:
        return self.bucket.split("/")[0]

    @property
    def device_us(self) -> float:
        return (self.device_end - self.device_begin) / US


@dataclass(kw_only=True, slots=True)
class Timeline:
    """All replays, and calls of the caller's: (name, begin, end)."""

    replays: list[Simulated] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)


def simulate(
    steps: int = 400,
    *,
    stalls: Mapping[int, float] | None = None,
    syncs: frozenset[int] | set[int] = frozenset(),
    larger: frozenset[int] | set[int] = frozenset(),
    prefills: frozenset[int] | set[int] = frozenset(),
    slower: Mapping[int, float] | None = None,
    planning: Mapping[int, float] | None = None,
    skews: Mapping[int, float] | None = None,
    unseen: Mapping[int, float] | None = None,
    away: Mapping[int, float] | None = None,
    factor: float = 1.0,
    seed: int = 0,
) -> Timeline:
    """A run of `steps` steps. Sets and keys are numbers of steps.

    stalls    microseconds that the caller spends after the step
    syncs     the caller waits for the device after the step
    larger    two live rows, for which there is only a bucket of 32
    prefills  a prompt of 60 tokens is fed in the step
    slower    microseconds more on the device
    planning  microseconds more to plan
    unseen    microseconds by which the host reads the step before this one late
    away      microseconds of the step for which the thread ran nothing, as its core was taken
    skews     microseconds by which rank 1 launches later than the driver, else some 2
    factor    all device times are multiplied by it
    """
    dice = random.Random(seed)
    found = Timeline()
    now = device = 1_000_000
    waiting: list[list[Simulated]] = []
    unran, preempted, yielded = 0, 0, 0

    def noise(us: float) -> int:
        return round(us * US * (1 + 0.02 * dice.random()))

    for step in range(steps):
        plan = now
        now += noise(HOST_US["plan"] + (planning or {}).get(step, 0.0))
        load = now
        now += noise(HOST_US["load"])
        buckets = ["prefill/64"] if step in prefills else []
        buckets.append("decode/32/fast" if step in larger else "decode/1/fast")
        launched = []
        for bucket in buckets:
            made = Simulated(step=step, bucket=bucket, plan=plan, load=load, replay=now)
            made.prompt_tokens = 60 if made.kind == "prefill" else 0
            made.live = made.prompt_tokens or (2 if step in larger else 1)
            now += noise(HOST_US["launch"])
            made.launched = now
            took = noise(DEVICE_US[bucket] * factor + (slower or {}).get(step, 0.0))
            made.device_begin = max(made.launched + 2 * US, device)
            late = (skews or {}).get(step, 0.0)
            made.skew_us = late or 1.5 + step % 5 / 4
            both = max(made.device_begin, made.launched + round(late * US))
            made.device_end = device = both + took
            launched.append(made)
        found.replays += launched
        waiting.append(launched)
        if len(waiting) < 2:
            continue
        collected = waiting.pop(0)
        begin = now
        now = max(now, collected[-1].device_end) + round((3 + (unseen or {}).get(step, 0.0)) * US)
        if step in (away or {}):
            unran, preempted = unran + round((away or {})[step] * US), preempted + 1
        for made in collected:
            made.collect, made.read = begin, now
            made.cpu_ns, made.preempted, made.yielded = now - unran, preempted, yielded
        now += noise(HOST_US["deliver"])
        for made in collected:
            made.delivered = now
        begin = now
        now += noise(HOST_US["outside"] + (stalls or {}).get(step, 0.0))
        if step in (stalls or {}):
            unran, yielded = unran + round((stalls or {})[step] * US), yielded + 1
        if step in syncs:
            begin, now = now, max(now, device) + 2 * US
            found.calls.append(("cudaDeviceSynchronize", begin, now))
    return found


def recording_lines(timeline: Timeline, *, counted: bool = True, **header: Any) -> list[str]:
    """The recorder's lines; keyword arguments replace parts of the header.

    Those of two ranks where the header has `ranks`; those of an earlier version, which did not ask
    what the thread used, without `counted`.
    """
    engine = {
        "max_batch": 32, "lookahead": 1, "row_family": "dot", "numerics_id": "0123456789ab",
        "speculative": None, "dtype": "bfloat16", "device": "cuda:0", "pdl": True,
    }  # fmt: skip
    captures = [
        {"bucket": name, "seconds": 0.05 * index, "bytes": index << 20, "nodes": 100 + index}
        for index, name in enumerate(DEVICE_US, start=1)
    ]
    first = {
        "schema": 1, "kind": "header",
        "environment": {"device": "NVIDIA H200", "torch": "2.11", "commit": "0" * 40},
        "engine": engine, "captures": captures,
        "recorder": {"capacity": 65536, "dropped": 0, "records": len(timeline.replays)},
    } | header  # fmt: skip
    lines = [json.dumps(first)]
    for sequence, made in enumerate(timeline.replays, start=1):
        stamps = ("plan", "load", "replay", "launched", "collect", "read", "delivered")
        lanes = [[REQUEST, 1]] if made.kind == "decode" and made.read else []
        known = (made.skew_us, 1) if made.read else (None, None)
        launches = dict(zip(("skew_us", "last_rank"), known, strict=True))
        document = {
            "kind": "replay", "step": made.step, "sequence": sequence, "bucket": made.bucket,
            "type": made.kind, "rows": made.rows, "live": made.live,
            "prompt_tokens": made.prompt_tokens,
            **{name: getattr(made, name) or None for name in stamps},
            "device_us": made.device_us, "emitted": len(lanes), "drafted": 0, "accepted": 0,
            "lanes": lanes, "a key of a later version": 1,
            **{name: getattr(made, name) for name in THREAD if counted and made.read},
            **(launches if "ranks" in header else {}),
        }  # fmt: skip
        lines.append(json.dumps(document))
    tokens = [made for made in timeline.replays if made.kind == "decode" and made.read]
    request = {
        "kind": "request", "id": REQUEST, "submitted": 500_000, "first": tokens[0].read,
        "finished": tokens[-1].read, "prompt_tokens": 9, "new_tokens": len(tokens),
        "reason": "length", "pauses": 0,
    }  # fmt: skip
    return [*lines, json.dumps(request)]


def write_recording(path: Path, timeline: Timeline, *, counted: bool = True, **header: Any) -> Path:
    lines = recording_lines(timeline, counted=counted, **header)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
