"""The recorder of each replay's work and times, in a ring that is allocated before the first
replay.

It is off until `engine.recorder.start()`. Then it adds a few clock reads to a step, two writes into
the ring and two CUDA events around each replay, and never waits. Once a step it asks the operating
system for how long this thread ran and how often it lost its core.

    engine.recorder.start()
    ...                                       # any use of the engine
    engine.recorder.stop()
    engine.recorder.write("run.jsonl")        # or look at `replays()`, `requests()`, `stages()`

A step is the launches of one plan: at most a prefill and a decode. These replays share all times
but `replay` and `launched`. Where one launch runs several decode steps, each is a step with a
record of its own: they share `plan` and `load`, and divide the launch's time, on the host and on
the device.

    plan       the scheduler began
    load       it had finished; changes are staged, copied and swapped until the first launch
    replay     the launch of this replay began
    launched   it returned
    collect    the `Engine.step` call that read the step began to wait for it
    read       its tokens had arrived: the time of its events
    delivered  its callbacks had run: that `Engine.step` call returned

Where an engine has several ranks, all of these are the driver's. The others' launch times are read
once a replay's tokens have arrived, so without a wait.

With a lookahead the next step is planned and launched between `launched` and `collect`.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphengine.buckets import CaptureReport, ReplayTimer
from graphengine.observe.environment import environment
from graphengine.observe.playback import check_frame_ms, player_slack
from graphengine.observe.processor_use import UNKNOWN_USE, processor_use
from graphengine.observe.rank_times import UNKNOWN_LAUNCH, RankTimes, WaitMeter
from graphengine.observe.record_lines import SCHEMA, capture_object, replay_object, request_object
from graphengine.observe.ring import (
    FINISHED,
    KINDS,
    NEVER,
    REASONS,
    REPLAY,
    STAGES,
    Ring,
    first_launches,
)
from graphengine.options.checks import is_int
from graphengine.program.graph_key import GraphKey

if TYPE_CHECKING:
    import torch

    from graphengine.requests.request import Request

LEAST_CAPACITY = 64

_REPLAY = struct.Struct("<7q8id3q4id2q2i")
_COLLECTED = struct.Struct("<3q4id2q2i")
_TIME = struct.Struct("<q")
_COUNT = struct.Struct("<i")
_MICROSECONDS = struct.Struct("<d")
_FINISHED = struct.Struct("<4q4i")
_AT = {name: field[1] for name, field in (REPLAY.fields or {}).items()}
_NO_REQUESTS: tuple[Request, ...] = ()


class Recorder:
    """Records the replays and finished requests of one engine, which creates it and calls it.

    buckets      names of the engine's graphs, as the records count them
    description  facts about the engine: at least its `device`
    graphs       the engine's graphs; `captures` has the time and memory of each capture
    lanes        most requests of a replay
    in_flight    most replays launched and not collected
    stream       the replays' stream; None on a CPU
    ranks        facts about the engine's ranks

    Records stay until `clear()`, also after the engine's `close()`. Only the engine calls the
    methods after `write`, and only while `recording`.
    """

    def __init__(
        self,
        *,
        description: Mapping[str, Any],
        graphs: Sequence[GraphKey],
        captures: Sequence[CaptureReport],
        lanes: int,
        in_flight: int,
        stream: torch.cuda.Stream | None,
        ranks: RankTimes,
    ) -> None:
        self.recording = False
        self.buckets = tuple(capture.name for capture in captures)
        self._description = dict(description)
        self._captures = tuple(captures)
        self._shapes = {
            key: (index, KINDS.index(key.kind), key.size) for index, key in enumerate(graphs)
        }
        self._lanes = lanes
        self._stream = stream
        self._ranks = ranks
        self._waits = WaitMeter(ranks)
        # The time from which the device could begin: a CPU computes in the launch.
        self._could_begin = _AT["replay" if stream is None else "launched"]
        self._closed = False
        # Records whose replay is in flight, by sequence number; and a pair of events for each.
        self._launches = [(NEVER, NEVER)] * max(16, 4 * in_flight)
        self._timer: ReplayTimer | None = None
        # For each launch whose device time is still to be read, oldest first: its pair of events,
        # the number of its first record, and how many records it has. If the events have been used
        # again, the time is lost. `_timed` is the pair of the next launch.
        self._untimed: deque[tuple[int, int, int]] = deque()
        self._timed = 0
        self._times_device = True
        self._allocate(0, 0)
        self._plan = self._load = self._collect = NEVER
        self._step = NEVER
        self._starts = 0
        self._on_host = stream is None
        self._use, self._used_at = UNKNOWN_USE, math.nan
        self._undelivered: list[int] = []
        # Lanes seldom change, so their ids are packed once for many replays.
        self._requests, self._ids = _NO_REQUESTS, b""

    def _allocate(self, capacity: int, requests: int) -> None:
        """Make new rings; if memory has no room for all of them, keep the old ones."""
        made = (
            Ring(REPLAY, capacity),
            Ring(np.int64, capacity, self._lanes),
            Ring(np.uint8, capacity, self._lanes),
            Ring(FINISHED, requests),
        )
        self._replays, self._lane_ids, self._lane_tokens, self._finished = made
        self._untimed.clear()

    # Methods for users.

    def start(
        self, capacity: int = 65536, *, requests: int = 4096, device_times: bool = True
    ) -> None:
        """Begin to record, or continue after a `stop()`. New sizes drop the old records.

        The records of each start have its number, and no gap between tokens spans two starts.

        capacity      replays to keep, each 168 bytes and 9 bytes for each slot of the engine
        requests      finished requests to keep
        device_times  time each replay with a pair of CUDA events; no effect on a CPU

        With several ranks on GPUs it reads from the device how long the driver's rank has waited
        for others, and so does `stop()`, and a `clear()` in between.

        Replays already in flight are not recorded. ValueError while it records, for `capacity`
        below 64 or `requests` below 1, for sizes that memory has no room for, and once the engine
        is closed.
        """
        if self._closed:
            raise ValueError("the engine is closed: nothing is left to record")
        if self.recording:
            raise ValueError("it is recording: stop() comes first")
        for name, value, least in (
            ("capacity", capacity, LEAST_CAPACITY),
            ("requests", requests, 1),
        ):
            if not is_int(value) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer, at least {least}")
        if not isinstance(device_times, bool):
            raise ValueError(f"device_times={device_times!r} must be True or False")
        # Replays that were in flight at a stop; their events are about to be reused.
        self._read_times(self._replays.made)
        if (capacity, requests) != (self._replays.capacity, self._finished.capacity):
            try:
                self._allocate(capacity, requests)
            except (MemoryError, ValueError) as error:
                raise ValueError(
                    f"capacity={capacity}, requests={requests}: memory has no room for as many"
                ) from error
            self._waits.clear()
        if self._timer is None and self._stream is not None and device_times:
            self._timer = ReplayTimer(self._stream, len(self._launches))
        self._times_device = device_times and self._timer is not None
        self._untimed.clear()
        self._starts += 1
        self._waits.start(self._step)
        self.recording = True

    def stop(self) -> None:
        """Stop recording; records stay. Replays in flight remain without their later times."""
        self.recording = False
        self._waits.stop(self._step)
        self._read_times(self._replays.made)
        self._forget_launches()

    def clear(self) -> None:
        """Drop all records; recording continues if it was on."""
        self._replays.made = self._finished.made = 0
        self._untimed.clear()
        self._step = NEVER
        self._waits.clear()
        self._forget_launches()

    def _forget_launches(self) -> None:
        self._launches = [(NEVER, NEVER)] * len(self._launches)
        self._undelivered.clear()
        self._requests, self._ids = _NO_REQUESTS, b""

    def __len__(self) -> int:
        """Number of replays kept."""
        return len(self._replays)

    @property
    def dropped(self) -> int:
        """Number of replays overwritten by later ones."""
        return self._replays.dropped

    @property
    def dropped_requests(self) -> int:
        """Number of finished requests overwritten by later ones."""
        return self._finished.dropped

    def replays(self) -> NDArray[np.void]:
        """The replays, oldest first: a column for each name of `REPLAY`, `replays()["device_us"]`.

        A view that further replays change; a copy once the ring has wrapped round.
        """
        self._read_times(self._replays.made)
        return self._replays.oldest_first()

    def lanes(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Request ids and token counts, both [replays, slots], in the order of `replays()`.

        Only the first `lanes` entries of a row are valid.
        """
        made = self._replays.made
        return self._lane_ids.oldest_first(made), self._lane_tokens.oldest_first(made)

    def requests(self) -> NDArray[np.void]:
        """The finished requests, oldest first: columns with the names of `FINISHED`."""
        return self._finished.oldest_first()

    def stages(self) -> dict[str, NDArray[np.float64]]:
        """Microseconds of each replay in each of `STAGES`; NaN where a begin or end is missing.

        Replays of one step share all but "launch".
        """
        records = self.replays()
        found = {}
        for stage, (begin, end) in STAGES.items():
            ends = records[end]
            if stage == "load":
                ends = first_launches(records["load"], ends)
            known = (records[begin] != NEVER) & (ends != NEVER)
            took = (ends - records[begin]) / 1e3
            found[stage] = np.where(known, took, math.nan)
        return found

    def frame_slack_ms(self, frame_ms: float) -> NDArray[np.float64]:
        """How many milliseconds before its deadline each frame was read, for players of frames of
        `frame_ms`, such as 80 for CSM: `(slack >= 0).mean()` is the share that met it.

        The player of a request begins with its first frame, which has no deadline, and waits for a
        frame that is late (`observe/playback.py`). Requests come in the order of their first
        frames; one whose frames span two recordings counts as two. ValueError unless `frame_ms` is
        positive.
        """
        length = 1e6 * check_frame_ms(frame_ms, "frame_ms")
        replays, (ids, tokens) = self.replays(), self.lanes()
        arrived: dict[tuple[int, int], list[int]] = {}
        for record, of_lane, given in zip(replays, ids, tokens, strict=True):
            for lane in range(record["lanes"]):
                if given[lane] and record["read"] != NEVER:
                    key = int(record["recording"]), int(of_lane[lane])
                    arrived.setdefault(key, []).append(int(record["read"]))
        found = [player_slack(np.array(times, float), length) / 1e6 for times in arrived.values()]
        return np.concatenate(found) if found else np.empty(0)

    def header(self) -> dict[str, Any]:
        """The first line of a file: a description of the recording, the device, and how many
        records were kept.

        With several ranks, `ranks` has their `count`, the `option` that asks for them, the
        `seconds` and `steps` between starts and stops, and `waited_s`, for how long the driver's
        rank waited for the others' parts in these; None while it records, or if nothing counts it.
        """
        ranks = self._ranks
        described = {"count": ranks.count, "option": ranks.option, **self._waits.described()}
        return {
            "schema": SCHEMA,
            "kind": "header",
            "environment": environment(str(self._description["device"])),
            "engine": self._description,
            **({"ranks": described} if ranks.count > 1 else {}),
            "captures": list(map(capture_object, self._shapes, self._captures)),
            "recorder": {
                "capacity": self._replays.capacity,
                "records": len(self),
                "dropped": self.dropped,
                "requests": len(self._finished),
                "dropped_requests": self.dropped_requests,
                "device_times": self._times_device,
            },
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of a file after its header: the replays, then the finished requests.

        Times are nanoseconds since the first replay's plan began; None where there is none. A
        request that was submitted earlier has a negative time.
        """
        replays, (ids, tokens) = self.replays(), self.lanes()
        origin = int(replays["plan"][0]) if len(replays) else 0
        for record, of_lane, given in zip(replays, ids, tokens, strict=True):
            yield replay_object(
                record, of_lane, given, self.buckets, origin, ranks=self._ranks.count
            )
        for record in self.requests():
            yield request_object(record, origin)

    def write(self, path: str | Path) -> None:
        """Write JSON lines: `header()`, then `rows()`. OSError where the file cannot be written."""
        with Path(path).open("w", encoding="utf-8") as file:
            for line in (self.header(), *self.rows()):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    # Methods for the engine, in the order of a step.

    def planning(self) -> None:
        """The scheduler is about to plan."""
        self._plan = time.perf_counter_ns()

    def loading(self) -> None:
        """The scheduler has made a plan: a step begins."""
        self._load = time.perf_counter_ns()
        self._step += 1

    def launch(
        self,
        replay: Callable[[GraphKey], None],
        key: GraphKey,
        sequence: int,
        live: int,
        width: int,
        fed: int,
    ) -> None:
        """Launch a graph with `replay(key)` and record it; a launch that raises is not recorded.

        live, width  requests, and tokens that a decode feeds to each
        fed          prompt tokens that a prefill feeds
        """
        ring, steps = self._replays, key.steps
        timer = self._timer if self._times_device else None
        number = ring.made
        if timer is not None:
            pair, self._timed = self._timed, (self._timed + 1) % timer.pairs
            if len(self._untimed) == timer.pairs:
                self._untimed.popleft()
            self._untimed.append((pair, number, steps))
            timer.begin(pair)
        began = time.perf_counter_ns()
        replay(key)
        launched = time.perf_counter_ns()
        if timer is not None:
            timer.end(pair)
        index, kind, rows = self._shapes[key]
        for step in range(steps):
            _REPLAY.pack_into(
                ring.memory, number % ring.capacity * ring.stride,
                self._starts, self._step + step, sequence + step, self._plan, self._load,
                began + (launched - began) * step // steps,
                began + (launched - began) * (step + 1) // steps,
                fed, index, rows, fed or live, width, kind, steps, 0,
                math.nan, NEVER, NEVER, NEVER, 0, 0, 0, 0, *UNKNOWN_LAUNCH, *UNKNOWN_USE,
            )  # fmt: skip
            self._launches[(sequence + step) % len(self._launches)] = (sequence + step, number)
            number += 1
        self._step += steps - 1
        ring.made = number

    def collecting(self) -> None:
        """`Engine.step` is about to wait."""
        self._collect = time.perf_counter_ns()

    def collected(
        self,
        sequence: int,
        requests: tuple[Request, ...],
        given: Sequence[int],
        now: float,
        drafted: int = 0,
        accepted: int = 0,
        sampled: int = 0,
    ) -> None:
        """Step `sequence` was read at `now` seconds; lane i's request got `given[i]` of the
        `sampled` tokens of all lanes.
        """
        launched, number = self._launches[sequence % len(self._launches)]
        ring, lanes = self._replays, len(requests)
        if launched != sequence or number < ring.made - ring.capacity:
            return
        if requests is not self._requests:
            self._requests = requests
            self._ids = struct.pack(f"<{len(requests)}q", *[request.id for request in requests])
        if now != self._used_at:
            # Replays of one step are read at the same time.
            self._use, self._used_at = processor_use(whole=self._on_host), now
        row, emitted = number % ring.capacity, sum(given)
        (began,) = _TIME.unpack_from(ring.memory, row * ring.stride + self._could_begin)
        _COLLECTED.pack_into(
            ring.memory, row * ring.stride + _AT["collect"],
            self._collect, nanoseconds(now), NEVER, emitted, drafted, accepted, lanes,
            *self._ranks.last_launch(sequence, began), *self._use,
        )  # fmt: skip
        if sampled > emitted:
            at = row * ring.stride + _AT["discarded"]
            _COUNT.pack_into(ring.memory, at, sampled - emitted)
        start = row * self._lane_ids.stride
        self._lane_ids.memory[start : start + 8 * lanes] = self._ids
        start = row * self._lane_tokens.stride
        self._lane_tokens.memory[start : start + lanes] = bytes(given)
        self._undelivered.append(row)
        # Replays of a stream end in the order of their launches.
        self._read_times(number)

    def delivered(self) -> None:
        """`Engine.step` is about to return."""
        if self._undelivered:
            now, ring = time.perf_counter_ns(), self._replays
            for row in self._undelivered:
                _TIME.pack_into(ring.memory, row * ring.stride + _AT["delivered"], now)
            self._undelivered.clear()

    def finished(self, request: Request) -> None:
        """A request has ended."""
        ring, timings = self._finished, request.timings
        assert timings.finished is not None and request.finish_reason is not None, f"{request=}"
        _FINISHED.pack_into(
            ring.memory, ring.made % ring.capacity * ring.stride,
            request.id, nanoseconds(timings.submitted),
            nanoseconds(timings.tokens[0]) if timings.tokens else NEVER,
            nanoseconds(timings.finished), len(request.prompt_token_ids), len(request.job.tokens),
            REASONS.index(request.finish_reason), request.pauses,
        )  # fmt: skip
        ring.made += 1

    def close(self) -> None:
        """The engine closes, its stream idle or broken: read the last times, release the events."""
        self.stop()
        self._closed = True
        self._timer = self._stream = None

    def _read_times(self, until: int) -> None:
        """Read the device times of the records before number `until`, as far as they have come."""
        timer, ring, untimed = self._timer, self._replays, self._untimed
        if timer is None or not self._times_device:
            return
        while untimed and untimed[0][1] + untimed[0][2] <= until:
            pair, first, steps = untimed[0]
            microseconds = timer.microseconds(pair)
            if math.isnan(microseconds):
                return
            untimed.popleft()
            for number in range(max(first, ring.made - ring.capacity), first + steps):
                offset = number % ring.capacity * ring.stride + _AT["device_us"]
                _MICROSECONDS.pack_into(ring.memory, offset, microseconds / steps)


def nanoseconds(seconds: float) -> int:
    """Seconds of `time.perf_counter()` as nanoseconds of `time.perf_counter_ns()`, within 1 ns."""
    return int(seconds * 1e9)
