"""Two runs compared: the changes, with their confidence.

Gaps are not independent of their neighbours (a busy host, a hot device, a long context last for
many steps), so they are drawn in blocks of consecutive steps, each step with all gaps that end
with it: the circular block bootstrap (D. N. Politis, J. P. Romano, "A circular block-resampling
procedure for stationary data", 1992). Both runs are redrawn each time, and the interval is the
middle of the resulting ratios.

A block has as many steps as D. N. Politis and H. White ("Automatic block-length selection for the
dependent bootstrap", 2004) derive for an autoregression with the series' own correlation. The
correlation is that of ranks, which outliers do not sway. A block has at least n^(1/2) and at most a
tenth of all steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphengine.profiles.runs.breakdown import break_down
from graphengine.profiles.runs.run_file import Floats, Gaps, Integers, Kernel, Run
from graphengine.profiles.tables.percentiles import SHARES, supports

DRAWS = 1000
CONFIDENCE = 95.0
LEAST_VALUES = 20
"""With fewer values than this in either run a bootstrap says nothing."""
LEAST_BEYOND = 2
"""Least number of values beyond a percentile: with fewer, draws repeat a single value."""
LEAST_BLOCKS = 10
COMPARABLE = (
    *("numerics_id", "dtype", "max_batch", "speculative", "lookahead", "steps_per_launch"),
    *("tensor_parallel", "data_parallel", "pipeline_parallel"),
)
"""Facts about the engine that two runs should share, besides device and source."""
CHUNK = 2**22
"""Values drawn at a time."""

Statistic = Callable[[Floats], Floats]
"""Computes a statistic of each row of (draws, values)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure in two runs.

    change    `after` over `before` minus 1; None where `before` is 0
    low, high its interval; None if there are too few values
    verdict   "slower", "faster", "no change shown" or "too few values"
    """

    name: str
    before: float
    after: float
    change: float | None
    low: float | None
    high: float | None
    verdict: str


def compare(before: Run, after: Run, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """All gaps by percentile, and kernels by their time a replay, as a JSON document.

    `notes` list other differences; `steps` is how many gaps are separate. `kernels` has those of
    both runs, by bucket, and `only` those of one run; None if a source has no kernels. The same
    runs and seed give the same document.
    """
    random = np.random.default_rng(seed)
    steps = [break_down(run).milliseconds for run in (before, after)]
    blocks = [block_length(values) for values in steps]
    old, new = (
        _drawn_percentiles(run.gaps, block, draws, random)
        for run, block in zip((before, after), blocks, strict=True)
    )
    counts = [len(values) for values in steps]
    changes = []
    for place, (name, share) in enumerate(SHARES.items()):
        was, now = (_nearest_rank(run.gaps.milliseconds, share) for run in (before, after))
        enough = all(supports(count // LEAST_BEYOND, share) for count in counts)
        wide = enough and min(counts) >= LEAST_VALUES
        changes.append(_change(name, was, now, _middle(old[:, place], new[:, place], wide)))
    was, now = (float(run.gaps.milliseconds.max()) for run in (before, after))
    changes.append(_change("max", was, now, None))
    kernels, only = _kernel_changes(before, after, draws, random)
    return {
        "against": before.path.name,
        "notes": differences(before, after),
        "n": [len(before.gaps), len(after.gaps)],
        "steps": counts,
        "block": blocks,
        "draws": draws,
        "confidence": CONFIDENCE,
        "itl": [asdict(change) for change in changes],
        "kernels": kernels,
        "only": only,
    }


def differences(before: Run, after: Run) -> list[str]:
    """Differences of two runs that a fair comparison would not have."""
    old, new = (
        {"source": run.source, "time between tokens": run.gap_basis}
        | {name: value for name, value in (run.engine or {}).items() if name in COMPARABLE}
        | {"device": (run.environment or {}).get("device")}
        for run in (before, after)
    )
    return [
        f"{name}: {old[name]} before, {new[name]} after"
        for name in old
        if name in new and old[name] != new[name]
    ]


def block_length(values: Floats) -> int:
    """Consecutive values that are drawn together."""
    count = len(values)
    most = max(1, count // LEAST_BLOCKS)
    # Equal values share a rank: ranks in order of time would make neighbours look correlated.
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + count) / 2)[place]
    total = float(ranks @ ranks)
    alike = min(0.99, max(0.0, float(ranks[:-1] @ ranks[1:]) / total)) if total else 0.0
    automatic = math.cbrt(count) * math.pow(math.sqrt(6.0) * alike / (1.0 - alike**2), 2 / 3)
    return min(most, max(1, round(math.sqrt(count)), round(automatic)))


def block_draws(
    count: int, length: int, draws: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Indices (draws, count) into a series of `count` values: blocks of `length` that begin
    anywhere and wrap around the end.
    """
    blocks = -(-count // length)
    starts = random.integers(0, count, size=(draws, blocks, 1))
    indices = (starts + np.arange(length)) % count
    return indices.reshape(draws, -1)[:, :count]


def resampled(
    values: Floats, statistic: Statistic, draws: int, random: np.random.Generator
) -> Floats:
    """`statistic` of each of `draws` block resamples of `values`."""
    at_once, length = max(1, CHUNK // len(values)), block_length(values)
    found = []
    for begin in range(0, draws, at_once):
        indices = block_draws(len(values), length, min(at_once, draws - begin), random)
        found.append(statistic(values[indices]))
    return np.concatenate(found)


def _drawn_percentiles(gaps: Gaps, block: int, draws: int, random: np.random.Generator) -> Floats:
    """Percentiles of all gaps (draws, `SHARES`): a draw takes steps, and each with all its gaps."""
    values = gaps.milliseconds
    order = np.argsort(values, kind="stable")
    # Steps in order of time, as gaps are in order of their ends.
    ends, step = np.unique(gaps.last, return_inverse=True)
    step = step[order]
    at_once = max(1, CHUNK // len(values))
    found = []
    for begin in range(0, draws, at_once):
        rows = min(at_once, draws - begin)
        indices = block_draws(len(ends), block, rows, random)
        indices += len(ends) * np.arange(rows)[:, None]
        drawn = np.bincount(indices.ravel(), minlength=rows * len(ends)).reshape(rows, -1)
        up_to = np.cumsum(drawn[:, step], axis=1)
        found.append(np.stack([_reached(up_to, share) for share in SHARES.values()], axis=1))
    return values[order][np.concatenate(found)]


def _reached(up_to: Integers, share: float) -> Integers:
    """For each row of growing counts, where `share` percent of its last one is reached."""
    wanted = -(round(10 * share) * up_to[:, -1] // -1000)
    rows = zip(up_to, wanted, strict=True)
    return np.array([np.searchsorted(row, least) for row, least in rows], dtype=np.int64)


def _nearest_rank(values: Floats, share: float) -> float:
    return float(np.percentile(values, share, method="inverted_cdf"))


def _middle(before: Floats, after: Floats, wide: bool) -> tuple[float, float] | None:
    """The interval of the change from the drawn statistics; None if it is undefined."""
    if not wide or not (before > 0).all():
        return None
    tail = (100.0 - CONFIDENCE) / 2
    low, high = np.percentile(after / before - 1.0, [tail, 100.0 - tail])
    return float(low), float(high)


def _interval(
    before: Floats, after: Floats, statistic: Statistic, draws: int, random: np.random.Generator
) -> tuple[float, float] | None:
    """The interval of the change from `before` to `after`; None if there are too few values."""
    if min(len(before), len(after)) < LEAST_VALUES:
        return None
    old = resampled(before, statistic, draws, random)
    return _middle(old, resampled(after, statistic, draws, random), wide=True)


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
        change=after / before - 1.0 if before else None,
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
