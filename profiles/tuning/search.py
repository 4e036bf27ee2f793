"""The search: one linear at a time gets other plans, while the others keep theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from graphengine.kernels.linear.plans import LinearPlan
from graphengine.models.linears import LinearPlans
from graphengine.models.plans.tuning_tables import TuningKey
from graphengine.profiles.tuning.candidates import Target
from graphengine.profiles.tuning.chain_bench import ChainBench, Times

MAX_ROUNDS = 2
ROUND_GAIN = 0.005
"""Share of the chain's time that a linear must have gained for another round."""
KEEP_MARGIN = 0.002
"""Share that a plan must gain to replace another: two medians of one plan may differ by as much."""
_BATCH = 16
# Share of the remaining time.
_COMPILE_SHARE = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The results of a target's candidates in place; the search continues with `plans`.

    `scores` are times over those of the plan `before`, which is timed in every batch.
    """

    target: Target
    plans: LinearPlans
    before: LinearPlan
    times: Mapping[LinearPlan, Times]
    scores: Mapping[LinearPlan, float]
    refused: Mapping[LinearPlan, str]
    untried: int

    @property
    def gain(self) -> float:
        """Share of the chain's time that was gained."""
        return 1 - self.scores[self.target.plan(self.plans)]

    def table(self, rows: Sequence[int], best: int = 5) -> str:
        """The best plans and the previous one; a star marks the plan that is kept."""
        columns = [f"us at {count}" for count in rows] + ["change"]
        lines = [
            f"{', '.join(self.target.names)}: {self.target.key}; {len(self.times)} plans measured, "
            f"{len(self.refused)} refused, {self.untried} not tried",
            f"  {'M':>4}{'K':>6}{'splits':>8}{'stages':>8}{'warps':>7}{'overlap':>9}"
            + "".join(f"{name:>12}" for name in columns),
        ]
        ranked = sorted(self.times, key=self.scores.__getitem__)
        for plan in [plan for plan in ranked if plan in ranked[:best] or plan == self.before]:
            star = "*" if plan == self.target.plan(self.plans) else " "
            cells = [f"{us:.2f}" for us in self.times[plan]] + [f"{self.scores[plan] - 1:+.2%}"]
            lines.append(
                f"{star} {plan.block_m:>4}{plan.block_k:>6}{plan.splits:>8}{plan.stages:>8}"
                f"{plan.warps:>7}{'yes' if plan.overlap else 'no':>9}"
                + "".join(f"{cell:>12}" for cell in cells)
            )
        reasons = sorted({reason.splitlines()[0] for reason in self.refused.values()})
        return "\n".join([*lines, *(f"  refused: {reason}" for reason in reasons[:3])])


def search(
    targets: Sequence[Target],
    plans: LinearPlans,
    bench: ChainBench,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[Step], object] = lambda step: None,
) -> LinearPlans:
    """Coordinate descent over `targets` from `plans`; `report` gets each step as it is taken.

    After `seconds` no further plans are measured; a batch that has begun is finished.

    Raises:
        RuntimeError: the plans to start from do not run or do not agree with the reference.
    """
    deadline = clock() + seconds
    for reason in bench.prepare([plans], seconds=math.inf).values():
        raise RuntimeError(f"{plans} cannot be measured: {reason}")
    # All at once, which keeps every core busy. Later, a plan is new only if it reads another number
    # of sums of squares, after a linear whose block_m has changed.
    everything = [variant for target in targets for variant in target.variants(plans).values()]
    bench.prepare(everything, seconds=_COMPILE_SHARE * (deadline - clock()))
    searched: dict[TuningKey, LinearPlans] = {}
    for _ in range(MAX_ROUNDS):
        gains = [0.0]
        for target in targets:
            # With the same neighbours there is nothing new to find.
            if searched.get(target.key) != plans and clock() < deadline:
                step = _step(target, plans, bench, deadline, clock)
                report(step)
                searched[target.key] = plans = step.plans
                gains.append(step.gain)
        if max(gains) <= ROUND_GAIN:
            break
    return plans


def _step(
    target: Target,
    plans: LinearPlans,
    bench: ChainBench,
    deadline: float,
    clock: Callable[[], float],
) -> Step:
    variants, before = target.variants(plans), target.plan(plans)
    refusals = bench.prepare([*variants.values()], seconds=_COMPILE_SHARE * (deadline - clock()))
    refused = {plan: refusals[chain] for plan, chain in variants.items() if chain in refusals}
    others = [plan for plan in variants if plan != before and plan not in refused]
    times: dict[LinearPlan, Times] = {}
    scores = {before: 1.0}
    for start in range(0, len(others), _BATCH):
        if clock() >= deadline:
            break
        batch = [before, *others[start : start + _BATCH]]
        found = bench.times([variants[plan] for plan in batch], head=target.key.kind == "sample")
        times |= zip(batch, found, strict=True)
        for plan in batch:
            scores[plan] = fmean(a / b for a, b in zip(times[plan], times[before], strict=True))
    best = min(scores, key=scores.__getitem__)
    return Step(
        target=target,
        plans=variants[best if scores[best] <= 1 - KEEP_MARGIN else before],
        before=before,
        times=times,
        scores=scores,
        refused=refused,
        untried=len(others) + 1 - len(scores),
    )
