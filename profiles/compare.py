"""Two runs side by side: what changed, and how sure that is.

Gaps are not independent of their neighbours (a busy host, a hot device, a long context last for
many steps), so values are drawn in blocks of consecutive steps: the circular block bootstrap
(D. N. Politis, J. P. Romano, "A circular block-resampling procedure for stationary data", 1992).
Blocks have n^(1/3) values, the order of magnitude that P. Hall, J. L. Horowitz and B.-Y. Jing ("On
blocking rules for the bootstrap with dependent data", 1995) derive. Both runs are drawn afresh each
time, and the interval is the middle of the ratios so found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphengine.profiles.breakdown import break_down
from graphengine.profiles.percentiles import SHARES, supports
from graphengine.profiles.run_file import Floats, Kernel, Run

DRAWS = 1000
CONFIDENCE = 95.0
LEAST_VALUES = 20
"""Below as many a bootstrap of either run says nothing."""
CHUNK = 2**22
"""Values drawn at a time."""

Statistic = Callable[[Floats], Floats]
"""Of each row of (draws, values)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure in two runs.

    change    of `after` over `before`, as a fraction
    low, high its interval; None where the values are too few for one
    verdict   "slower", "faster", "no change shown" or "too few values"
    """

    name: str
    before: float
    after: float
    change: float
    low: float | None
    high: float | None
    verdict: str


def compare(before: Run, after: Run, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """Gaps by percentile, and kernels by their time a replay, as a JSON document.

    `kernels` are those of both runs, by bucket, and `only` those of one. It is None where a source
    has no kernels. The same runs and seed give the same document.
    """
    random = np.random.default_rng(seed)
    first, second = break_down(before).milliseconds, break_down(after).milliseconds
    changes = [
        _percentile_change(name, share, first, second, draws, random)
        for name, share in SHARES.items()
    ]
    changes.append(_change("max", float(first.max()), float(second.max()), None))
    kernels, only = _kernel_changes(before, after, draws, random)
    return {
        "against": before.path.name,
        "n": [len(first), len(second)],
        "block": [block_length(len(first)), block_length(len(second))],
        "draws": draws,
        "confidence": CONFIDENCE,
        "itl": [asdict(change) for change in changes],
        "kernels": kernels,
        "only": only,
    }


def block_length(count: int) -> int:
    """Consecutive values that are drawn together."""
    return max(1, round(math.cbrt(count)))


def block_draws(count: int, draws: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Indices (draws, count) into a series of `count` values: blocks from anywhere, round the end
    to the beginning.
    """
    length = block_length(count)
    blocks = -(-count // length)
    starts = random.integers(0, count, size=(draws, blocks, 1))
    indices = (starts + np.arange(length)) % count
    return indices.reshape(draws, -1)[:, :count]


def resampled(
    values: Floats, statistic: Statistic, draws: int, random: np.random.Generator
) -> Floats:
    """`statistic` of each of `draws` block resamples of `values`."""
    at_once = max(1, CHUNK // len(values))
    found = []
    for begin in range(0, draws, at_once):
        indices = block_draws(len(values), min(at_once, draws - begin), random)
        found.append(statistic(values[indices]))
    return np.concatenate(found)


def _interval(
    before: Floats, after: Floats, statistic: Statistic, draws: int, random: np.random.Generator
) -> tuple[float, float] | None:
    """Of the change from `before` to `after`; None if there are too few values."""
    if min(len(before), len(after)) < LEAST_VALUES:
        return None
    old = resampled(before, statistic, draws, random)
    new = resampled(after, statistic, draws, random)
    tail = (100.0 - CONFIDENCE) / 2
    low, high = np.percentile(new / old - 1.0, [tail, 100.0 - tail])
    return float(low), float(high)


def _percentile_change(
    name: str,
    share: float,
    before: Floats,
    after: Floats,
    draws: int,
    random: np.random.Generator,
) -> Change:
    def statistic(rows: Floats) -> Floats:
        return np.percentile(rows, share, axis=-1, method="inverted_cdf")

    enough = all(supports(len(values), share) for values in (before, after))
    interval = _interval(before, after, statistic, draws, random) if enough else None
    old, new = float(statistic(before)), float(statistic(after))
    return _change(name, old, new, interval)


def _change(name: str, before: float, after: float, interval: tuple[float, float] | None) -> Change:
    verdict = "too few values"
    if interval is not None:
        low, high = interval
        verdict = "slower" if low > 0 else "faster" if high < 0 else "no change shown"
    low_high = (None, None) if interval is None else interval
    return Change(
        name=name,
        before=before,
        after=after,
        change=after / before - 1.0 if before else float("nan"),
        low=low_high[0],
        high=low_high[1],
        verdict=verdict,
    )


def _kernel_changes(
    before: Run, after: Run, draws: int, random: np.random.Generator
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
    """Changes of microseconds a replay, largest in microseconds first; kernels of one run only."""
    if before.kernels is None or after.kernels is None:
        return None, None
    old = {key: replay_sums(kernels) for key, kernels in _by_key(before.kernels).items()}
    new = {key: replay_sums(kernels) for key, kernels in _by_key(after.kernels).items()}
    found = []
    for key in old.keys() & new.keys():
        bucket, name = key
        interval = _interval(old[key], new[key], _median, draws, random)
        change = _change(name, float(np.median(old[key])), float(np.median(new[key])), interval)
        found.append({"bucket": bucket, **asdict(change)})
    found.sort(key=lambda row: (-abs(row["after"] - row["before"]), row["bucket"], row["name"]))
    only = [
        {"run": run, "bucket": key[0], "name": key[1], "us_per_replay": float(np.median(sums[key]))}
        for run, sums, others in (("before", old, new), ("after", new, old))
        for key in sorted(sums.keys() - others.keys())
    ]
    return found, only


def _median(rows: Floats) -> Floats:
    return np.median(rows, axis=-1)


def _by_key(kernels: tuple[Kernel, ...]) -> dict[tuple[str, str], list[Kernel]]:
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.bucket, kernel.name].append(kernel)
    return groups


def replay_sums(kernels: list[Kernel]) -> Floats:
    """Microseconds of all launches of `kernels` in each replay that has one, in order of time."""
    replay = np.concatenate([kernel.replay for kernel in kernels])
    times = np.concatenate([kernel.times_us for kernel in kernels])
    found, index = np.unique(replay, return_inverse=True)
    return np.bincount(index, weights=times, minlength=len(found)).astype(np.float64)
