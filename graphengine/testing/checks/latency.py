"""Checks a replay's time as a ratio to a reference that is measured together with it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphengine.testing.arguments import integer, number, require_callable, require_end
from graphengine.testing.errors import GraphCheckError, hide_frame
from graphengine.testing.tensors import cuda_in_use, wait_for_device

__tracebackhide__ = hide_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Microseconds of one call, from `repeats` measured calls of each side."""

    repeats: int
    median_us: float
    p99_us: float
    reference_median_us: float
    reference_p99_us: float

    @property
    def median_ratio(self) -> float:
        return self.median_us / self.reference_median_us

    @property
    def p99_ratio(self) -> float:
        return self.p99_us / self.reference_p99_us

    def __str__(self) -> str:
        return (
            f"median {self.median_us:.1f} us against {self.reference_median_us:.1f} us of the "
            f"reference (ratio {self.median_ratio:.3f}), p99 {self.p99_us:.1f} us against "
            f"{self.reference_p99_us:.1f} us (ratio {self.p99_ratio:.3f}), {self.repeats} calls "
            "each, alternately"
        )


def latency_budget(
    replay: Callable[[], object],
    reference: Callable[[], object],
    *,
    median: float,
    p99: float | None = None,
    repeats: int = 200,
    warmup: int = 20,
    stream: torch.cuda.Stream | None = None,
) -> Latency:
    """GraphCheckError if `replay` takes more than `median` times as long as `reference`.

    The two are called alternately, so that a changing clock or another program on the machine
    affects both; the ratio is that of the medians of `repeats` calls. `p99`, if given, bounds the
    ratio of the 99th percentiles in the same way; with less than 100 calls these are the slowest
    calls. 1.0 means "not slower than". `warmup` pairs of calls come first and are not counted.

    On CUDA a call is measured by events on `stream`, by default the current one, which is also made
    current around both callables. A `CapturedGraph` replays on a stream of its own: give that one,
    since work on other streams is not measured. Without CUDA, or before its first use in the
    process, the host's clock is used. Before each call, all other work of the device is waited for.
    ValueError for a budget that is not greater than 0, less than 1 of `repeats`, and a negative
    `warmup`.
    """
    require_callable("replay", replay)
    require_callable("reference", reference)
    number("median", median, zero=False)
    if p99 is not None:
        number("p99", p99, zero=False)
    integer("repeats", repeats, least=1)
    integer("warmup", warmup, least=0)
    on_cuda = cuda_in_use()
    measure = _measure_on_stream if on_cuda else _measure_on_host
    times: list[float] = []
    reference_times: list[float] = []
    with torch.cuda.stream(stream) if on_cuda else contextlib.nullcontext():
        for turn in range(warmup + repeats):
            pair = measure(reference), measure(replay)
            if turn >= warmup:
                reference_times.append(pair[0])
                times.append(pair[1])
    found = Latency(
        repeats=repeats,
        median_us=statistics.median(times),
        p99_us=_p99(times),
        reference_median_us=statistics.median(reference_times),
        reference_p99_us=_p99(reference_times),
    )
    late = [
        f"{name} ratio {ratio:.3f} is over its budget of {budget:g}"
        for name, ratio, budget in (
            ("median", found.median_ratio, median),
            ("p99", found.p99_ratio, math.inf if p99 is None else p99),
        )
        if ratio > budget
    ]
    if late:
        raise GraphCheckError(f"{' and '.join(late)}: {found}")
    return found


def _measure_on_stream(call: Callable[[], object]) -> float:
    begin, end = _timing_event(), _timing_event()
    wait_for_device()
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    require_end(result)
    return float(begin.elapsed_time(end)) * 1e3


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _measure_on_host(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    result = call()
    microseconds = (time.perf_counter() - begin) * 1e6
    require_end(result)
    return microseconds


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]
