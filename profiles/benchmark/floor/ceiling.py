"""The rate at which this device reads memory: the limit that a decode step is compared with.

A persistent grid streams a buffer far larger than the caches and adds it up. Decoding reads weights
and writes almost nothing, so a copy, which pays for bus turnarounds, would give too low a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor

GIB = 2**30
BUFFER_BYTES = 4 * GIB
# Integers per load of a program, programs per multiprocessor, warps: the fastest of these is used.
BLOCKS = (4096, 8192)
PROGRAMS_PER_SM = (8, 16)
WARPS = (4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCeiling:
    """The best rate found and the launch that reached it. `tb_s` is in 10**12 bytes a second."""

    tb_s: float
    buffer_bytes: int
    block: int
    programs: int
    warps: int

    def milliseconds(self, size: int) -> float:
        """The least time to read `size` bytes."""
        return size / self.tb_s / 1e9


def floor_and_share(
    ceiling: ReadCeiling | None, size: int, ms_per_step: float
) -> dict[str, float | None]:
    """`floor_ms`, the least time to read `size` bytes, and its `share` of the step's time."""
    floor = None if ceiling is None else ceiling.milliseconds(size)
    return {"floor_ms": floor, "share": None if floor is None else floor / ms_per_step}


def sum_stream(x: Tensor, sums: Tensor, *, block: int, warps: int) -> None:
    """Add up int32 `x` `[n]` into int32 `sums`, one for each of the programs that share it.

    The programs take blocks alternately, so `sums.sum()` is that of `x`, modulo 2**32. ValueError
    unless every program gets the same number of blocks.
    """
    # Only a GPU needs it, and triton is not everywhere.
    from graphengine.profiles.benchmark.floor.stream_triton import sum_stream_kernel

    rounds = _rounds(x, sums, block)
    sum_stream_kernel[(len(sums),)](x, sums, ROUNDS=rounds, BLOCK=block, num_warps=warps)


def sum_stream_reference(x: Tensor, sums: Tensor, *, block: int) -> None:
    """`sum_stream` in plain PyTorch."""
    sums.copy_(x.view(_rounds(x, sums, block), len(sums), block).sum((0, 2)))


def _rounds(x: Tensor, sums: Tensor, block: int) -> int:
    rounds, left = divmod(len(x), len(sums) * block)
    if left or not rounds:
        raise ValueError(f"{len(x)} integers are no multiple of {len(sums)} blocks of {block}")
    return rounds


def measure_read_ceiling(
    device: str | torch.device, *, buffer_bytes: int = BUFFER_BYTES, repeats: int = 5
) -> ReadCeiling | None:
    """The median rate of the fastest launch; None on a device that is not a GPU.

    Takes `buffer_bytes` of device memory meanwhile; each launch reads all of it except a remainder
    that its programs cannot share equally.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        x = torch.ones(buffer_bytes // 4, dtype=torch.int32, device=device)
        found = [
            _measure(x, block, per_sm, warps, repeats)
            for block, per_sm, warps in product(BLOCKS, PROGRAMS_PER_SM, WARPS)
        ]
        del x
        torch.cuda.empty_cache()
    return max(found, key=lambda ceiling: ceiling.tb_s)


def _measure(x: Tensor, block: int, per_sm: int, warps: int, repeats: int) -> ReadCeiling:
    programs = per_sm * torch.cuda.get_device_properties(x.device).multi_processor_count
    sums = torch.zeros(programs, dtype=torch.int32, device=x.device)
    x = x[: len(x) // (programs * block) * programs * block]
    milliseconds = []
    # The first two compile and wake the clocks.
    for repeat in range(repeats + 2):
        begin, end = _event(), _event()
        begin.record()
        sum_stream(x, sums, block=block, warps=warps)
        end.record()
        end.synchronize()
        if repeat >= 2:
            milliseconds.append(begin.elapsed_time(end))
    total = int(sums.sum(dtype=torch.int64))
    if total != len(x):
        raise RuntimeError(f"the read kernel summed {total} of {len(x)} ones: it skipped some")
    rate = x.nbytes / median(milliseconds) / 1e9
    assert math.isfinite(rate), f"{milliseconds=}"
    return ReadCeiling(
        tb_s=rate, buffer_bytes=x.nbytes, block=block, programs=programs, warps=warps
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
