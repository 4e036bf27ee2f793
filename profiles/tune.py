"""Measure plans for the decode linears of a model, and keep the fastest: `graphengine tune`.

    graphengine tune --shape llama-1b --family dot --only qkv down

What a linear costs depends on its neighbours: launched with PDL they overlap and compete for room
on an SM, and a plan that wins by itself may lose a fifth in the step. So plans are measured in
place. A captured chain runs [qkv, output, gate_up, down] of a few layers as `Chain.decode`
does, on more weights than L2 can hold; lm_head is measured after such a chain. Only attention is
left out: `output` reads the first q_size columns of qkv's result, a strided view.

One linear at a time gets other plans while the others keep theirs: down, gate_up, qkv, output,
lm_head, and once more if that gained anything. Compared plans are replayed alternately, and a
plan's time is the median of its replays. The search minimises its time over that of the plan in
use, averaged over `--rows`: one plan serves them all. A plan whose output does not agree with the
reference is refused.

These were tried on an H200 and were not faster, so plans have no field for them: L2 prefetches of
the program's own or the next weight in bulk (10 to 60 % slower) or of the first tiles line by line
(3 to 5 % slower); first tiles of `dot` in registers before the wait (2 % faster at 8 rows, 20 %
slower at 32; `linear_gluon.py` now has them in shared memory, which is 1 to 4 % faster); triggering
dependents before the wait (`fma` equal, `dot` 20 % slower on the 1B shape) or after the product
(`fma` 8 % slower, `dot` equal).

Letters: N lanes, M weight rows, K input features, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

import torch
import triton
from torch import Tensor

from graphengine.buckets import CapturedGraph
from graphengine.config import DTYPES
from graphengine.kernels import (
    FMA_LANES,
    MAX_LANES,
    Launch,
    LinearPlan,
    Residual,
    RowFamily,
    SamplingTensors,
    heuristic_plan,
    linear,
    linear_reference,
    linear_residual,
    linear_residual_reference,
    linear_sample,
    residual_groups,
)
from graphengine.kernels.linear import linear_gluon
from graphengine.kernels.sample.sampling import token_of_tiles_reference
from graphengine.models import tuning
from graphengine.models.chains import Chain, new_chain
from graphengine.models.checkpoint import Checkpoint, stored_dtype
from graphengine.models.contract import LinearPlans, ModelConfig
from graphengine.models.tuning import TunedPlan, TuningKey
from graphengine.profiles.arguments import integers
from graphengine.profiles.benchmark.shapes import DEMO, NAMES, Subject, fill_random, linear_bytes

Times = tuple[float, ...]
"""Microseconds of a chain, for each number of rows."""

ORDER = ("down", "gate_up", "qkv", "output", "lm_head")
DEFAULT_ROWS: Mapping[RowFamily, tuple[int, ...]] = {"fma": (1,), "dot": (8, 32)}

MAX_ROUNDS = 2
ROUND_GAIN = 0.005
"""Share of the chain's time that a linear must have gained for another round."""
KEEP_MARGIN = 0.002
"""Share that a plan must gain to replace another: two medians of one plan may differ by as much."""

CHAIN_BYTES = 1 << 30
"""Weights of a chain: far beyond four times the 60 MB of an L2."""
FMA_REGISTERS = (12, 96)
"""Weights in a thread's registers: enough in flight, and room for the next kernel beside them."""
DOT_SHARED_BYTES = 200 * 1024
"""Most shared memory of a program: it has to fit an SM."""
DOT_IN_FLIGHT_BYTES = 48 * 1024
"""Least bytes in flight of a program: memory latency is long, and an SM holds few programs."""
DOT_PROGRAMS = (90, 792)
"""Programs of a launch: from two thirds of an H200's 132 SMs to six for each of them."""

_BATCH, _REPLAYS = 16, 15
_MAX_PROCESSES = 16
# Share of the remaining time.
_COMPILE_SHARE = 0.6
# Error over the size of the outputs, after up to three rounded products.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


# The plans to try.


@dataclass(frozen=True, slots=True)
class Target:
    """A shape to find a plan for; `names` are the linears that have it and so share the plan."""

    names: tuple[str, ...]
    key: TuningKey

    def plan(self, plans: LinearPlans) -> LinearPlan:
        return plans[self.names[0]]

    def variants(self, plans: LinearPlans) -> dict[LinearPlan, LinearPlans]:
        """`plans` with each candidate in this place; the first is the plan in use."""
        candidates = dict.fromkeys([self.plan(plans), *candidate_plans(self.key)])
        return {plan: plans.replace(dict.fromkeys(self.names, plan)) for plan in candidates}


def targets_of(
    config: ModelConfig, dtype: torch.dtype, family: RowFamily, only: Sequence[str] = ORDER
) -> list[Target]:
    """A model's linears in the order of the search; with `only`, those that it names."""
    names_of: dict[TuningKey, list[str]] = {}
    for name in ORDER:
        names_of.setdefault(TuningKey.of(config.linears[name], family, dtype), []).append(name)
    return [Target(tuple(n), key) for key, n in names_of.items() if not set(only).isdisjoint(n)]


def candidate_plans(key: TuningKey) -> list[LinearPlan]:
    """The grid that found the best plans on an H200, and the heuristic. Every plan is valid."""
    heuristic = heuristic_plan(key.kind, key.M, key.K, key.dtype, key.family)
    if key.family == "fma":
        grid = _fma_grid(key)
    elif key.kind == "sample" or key.dtype == torch.float32 or key.K % linear_gluon.ALIGNMENT:
        grid = _pipelined_dot_grid(key, heuristic)
    else:
        grid = _dot_grid(key)
    return [plan for plan in dict.fromkeys([heuristic, *grid]) if _is_valid(plan, key)]


def _is_valid(plan: LinearPlan, key: TuningKey) -> bool:
    with contextlib.suppress(ValueError):
        tuning.check_plan(plan, key.kind, key.K, key.dtype)
        return True
    return False


def _fma_grid(key: TuningKey) -> Iterator[LinearPlan]:
    K, (least, most) = key.K, FMA_REGISTERS
    fitting = [size for size in (1024, 2048, 4096) if size <= K and 4 * (-K % size) <= K]
    sizes = fitting or [max(16, int(triton.next_power_of_2(K)))]
    for block_m, block_k, warps in product((1, 2, 4, 8, 16), sizes, (2, 4, 8)):
        plan = LinearPlan("fma", block_m=block_m, block_k=block_k, warps=warps)
        # The cost of many tiles in the sampler after lm_head is not part of the chain.
        few_tiles = key.kind != "sample" or block_m >= 4
        if few_tiles and least <= tuning.weight_registers(plan, K, key.dtype) <= most:
            yield plan


def _dot_grid(key: TuningKey) -> Iterator[LinearPlan]:
    """For the kernel of `linear_gluon.py`."""
    rows = 2 if key.kind == "swiglu" else 1
    for outputs, block_k, splits, stages, warps in product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4), (3, 4, 5, 6), (4, 8)
    ):
        plan = LinearPlan("dot", rows * outputs, block_k, splits, stages, warps)
        programs = triton.cdiv(key.M, plan.block_m) * splits
        least, most = DOT_PROGRAMS
        # A weight too small or too large for that many still gets the fewest or most outputs.
        if programs < least and (outputs, splits) != (32, 1):
            continue
        if programs > most and outputs < 128:
            continue
        even = splits == 1 or key.K % (block_k * splits) == 0
        long = triton.cdiv(key.K, block_k * splits) >= stages - 1
        room = tuning.shared_bytes(plan, key.dtype)
        # With fewer rows, 8 warps would have one instruction each.
        busy = warps == 4 or plan.block_m >= 128
        if even and long and busy and DOT_IN_FLIGHT_BYTES <= room <= DOT_SHARED_BYTES:
            yield plan


def _pipelined_dot_grid(key: TuningKey, heuristic: LinearPlan) -> Iterator[LinearPlan]:
    """For the kernel of `linear_triton.py`, whose loop Triton pipelines."""
    M, K = key.M, key.K
    # float32 multiplies from registers, and large tiles need too many.
    sizes = (16, 32) if key.dtype == torch.float32 else (128, 256)
    fitting = [size for size in sizes if K % size == 0] or [heuristic.block_k]
    for block_m, block_k, splits, stages in product((32, 64), fitting, (1, 2, 4, 8), (3, 4, 5)):
        programs = triton.cdiv(M, block_m) * splits
        # Splits fill SMs that would be idle; an H200 has 132.
        pays = M <= 9000 and K % (block_k * splits) == 0 and 120 <= programs <= 8 * 132
        if splits > 1 and not pays:
            continue
        plan = LinearPlan("dot", block_m=block_m, block_k=block_k, splits=splits, stages=stages)
        long = triton.cdiv(K, block_k * splits) >= stages - 1
        if long and tuning.shared_bytes(plan, key.dtype) <= DOT_SHARED_BYTES:
            yield plan
            yield plan._replace(overlap=False)


# The search.


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
    # All at once, which keeps every core busy. Later only those plans are new that read another
    # number of sums of squares, after a linear whose block_m has changed.
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
        found = bench.times([variants[plan] for plan in batch], head="lm_head" in target.names)
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


# The measurement.


class ChainBench:
    """Runs the linears of `model`, whose layers form the chain; close it after use.

    Plans are compiled in this many `processes` that share Triton's cache on disk; 0: in this one.
    On a CPU `prepare` works, with references in place of kernels; nothing can be timed.
    """

    def __init__(self, model: Chain, rows: tuple[int, ...], *, processes: int = 0) -> None:
        self.model, self.rows, self.device = model, rows, model.weights.embedding.device
        lanes, hidden = max(rows), model.config.hidden_size
        random = torch.Generator(self.device).manual_seed(1)
        self._x = torch.randn((lanes, hidden), generator=random, device=self.device)
        self._slot = torch.arange(lanes, dtype=torch.int32, device=self.device)
        # Greedy, so that the winners are known; without stop ids.
        self._sampling = SamplingTensors.neutral(lanes, stop_ids=16, device=self.device)
        # Two for each tile, of which none has fewer than 16 rows.
        most = max(linear.rows for linear in model.config.linears.values())
        self._arrivals = self._slot.new_zeros(2 * triton.cdiv(most, 16))
        self._failures: dict[LinearPlans, str | None] = {}
        # A forked process could not use CUDA.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=spawn) if processes else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def prepare(self, variants: Sequence[LinearPlans], *, seconds: float) -> dict[LinearPlans, str]:
        """Compile plans and check their outputs; returns a reason for each that must not be used.

        No compilation begins after `seconds`.
        """
        new = [plans for plans in dict.fromkeys(variants) if plans not in self._failures]
        for plans in self._compile(new, seconds):
            self._failures[plans] = self._failure(plans)
        reasons = {plans: self._failures.get(plans, "not compiled in time") for plans in variants}
        return {plans: reason for plans, reason in reasons.items() if reason is not None}

    def times(self, variants: Sequence[LinearPlans], *, head: bool) -> list[Times]:
        """Time chains that `prepare` accepted, with or without lm_head after them."""
        with _on(self.device):
            columns = [self._times_at(rows, variants, head) for rows in self.rows]
        return list(zip(*columns, strict=True))

    def run(self, plans: LinearPlans, rows: int, *, layers: int, head: bool) -> None:
        for _ in self.launches(plans, rows, layers=layers, head=head):
            pass

    def launches(
        self, plans: LinearPlans | None, rows: int, *, layers: int, head: bool
    ) -> Iterator[tuple[str, Any]]:
        """Launch one linear after the other, as the model's decode does, and yield what it gives.

        An output is valid until the next launch. With `plans` None: references, and logits.
        """
        x, config = self._x[:rows], self.model.config
        groups = residual_groups(plans["down"], config.hidden_size) if plans else 1
        squares = (x.square().sum(dim=1) / groups).repeat(groups, 1)
        residual = Residual(x.clone(), x.to(self.model.dtype, copy=True), squares)
        for layer in range(layers):
            product = residual.scaled
            for name, of_layer in config.linears.items():
                if of_layer.kind == "sample":
                    continue
                if of_layer.kind == "residual":
                    part = product[:, : of_layer.columns]
                    residual = self._launch(plans, layer, name, part, residual)
                    yield name, residual
                else:
                    product = self._launch(plans, layer, name, residual.scaled, residual)
                    yield name, product
        if head:
            yield "lm_head", self._launch(plans, 0, "lm_head", residual.scaled, residual)

    def _launch(
        self, plans: LinearPlans | None, layer: int, name: str, x: Tensor, residual: Residual
    ) -> Any:
        config, slot = self.model.config, self._slot[: len(x)]
        kind = config.linears[name].kind
        weight, bias, norm = self.model.linear(layer, name)
        options: dict[str, Any] = {}
        if plans is not None:
            options = {"plan": plans[name], "launch": Launch(arrivals=self._arrivals, pdl=True)}
        if kind == "residual":
            assert norm is not None, f"{name=}"
            add = linear_residual if plans else linear_residual_reference
            return add(x, weight, slot, residual, norm, bias=bias, **options)
        options |= {"squares_TN": residual.squares, "eps": config.norm_eps}
        if kind == "sample":
            if plans is None:
                return linear_reference(x, weight, slot, out_dtype=torch.float32, **options)
            return linear_sample(x, weight, slot, slot, self._sampling, **options)
        multiply = linear if plans else linear_reference
        return multiply(x, weight, slot, bias=bias, swiglu=kind == "swiglu", **options)

    def _compile(self, variants: Sequence[LinearPlans], seconds: float) -> list[LinearPlans]:
        """Plans that were compiled in time, or failed to compile: the failure shows again here."""
        if self._pool is None:
            return list(variants)
        setting = (self.model.config, self.model.dtype, self.device, self.rows)
        futures = {plans: self._pool.submit(_first_launch, setting, plans) for plans in variants}
        _, late = wait(futures.values(), None if seconds == math.inf else max(seconds, 0.0))
        for future in late:
            future.cancel()
        # Some compilations are still running, and nothing may run during a measurement.
        wait(late)
        return [plans for plans, future in futures.items() if not future.cancelled()]

    def _failure(self, plans: LinearPlans) -> str | None:
        """Why a layer and lm_head do not run, or their distance from the reference."""
        allowed = _TOLERANCE[self.model.dtype]
        try:
            with _on(self.device):
                for rows in self.rows:
                    launched = self.launches(plans, rows, layers=1, head=True)
                    for (name, result), expected in zip(launched, self._expected, strict=True):
                        error = _error(result, [part[:rows] for part in expected])
                        if not error <= allowed:
                            return f"{name} of {rows} rows is off by {error:.2g} > {allowed:.2g}"
        except (triton.TritonError, RuntimeError) as error:
            return str(error) or type(error).__name__
        return None

    @functools.cached_property
    def _expected(self) -> list[list[Tensor]]:
        """Reference outputs for the largest number of rows: fewer rows use the first of them."""
        launched = self.launches(None, max(self.rows), layers=1, head=True)
        return [[part.clone() for part in _parts(result)] for _, result in launched]

    def _times_at(self, rows: int, variants: Sequence[LinearPlans], head: bool) -> list[float]:
        """Median microseconds of graphs that are replayed alternately, after a round to warm up."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        event = partial(torch.cuda.Event, enable_timing=True)
        layers, graphs = self.model.config.num_layers, []
        with contextlib.ExitStack() as stack:
            for plans in variants:
                graphs.append(
                    CapturedGraph(
                        partial(self.run, plans, rows, layers=layers, head=head),
                        name=f"tune/{rows}",
                        device=self.device,
                        stream=stream,
                        warmups=1,
                    )
                )
                stack.callback(graphs[-1].close)
                graphs[-1].capture()
            turns = [[(event(), event()) for _ in graphs] for _ in range(1 + _REPLAYS)]
            for turn in turns:
                for graph, (start, end) in zip(graphs, turn, strict=True):
                    start.record(stream)
                    graph.replay()
                    end.record(stream)
            stream.synchronize()
        of_graphs = zip(*turns[1:], strict=True)
        return [1e3 * median(a.elapsed_time(b) for a, b in pairs) for pairs in of_graphs]


def _parts(result: Any) -> Sequence[Tensor]:
    """The outputs to compare; rows come first."""
    if isinstance(result, Residual):
        return result.x, result.scaled, result.squares.sum(dim=0)
    return (result,)


def _error(result: Any, expected: Sequence[Tensor]) -> float:
    """The largest error over the size of the outputs; for tokens, what their logits lack."""
    if isinstance(result, tuple) and not isinstance(result, Residual):
        (logits_NV,), token = expected, token_of_tiles_reference(*result).long()[:, None]
        # -1 stands for no token.
        won = logits_NV.gather(1, token.clamp(min=0)).where(token >= 0, math.nan)
        short = logits_NV.amax(dim=1, keepdim=True) - won
        return float((short / logits_NV.square().mean().sqrt()).max())
    errors = []
    for part, right in zip(_parts(result), map(Tensor.float, expected), strict=True):
        size = right.square().mean().sqrt() + right.abs()
        errors.append(((part.float() - right).abs() / size).max())
    return float(torch.stack(errors).max())


Setting = tuple[ModelConfig, torch.dtype, torch.device, tuple[int, ...]]


def _first_launch(setting: Setting, plans: LinearPlans) -> None:
    """Compile in a process of its own, which leaves kernels in Triton's cache on disk.

    A failure shows again where it can be reported; some of Triton's errors cannot be pickled.
    """
    *_, device, rows = setting
    with contextlib.suppress(Exception), _on(device):
        for count in rows:
            _compiling_bench(setting).run(plans, count, layers=1, head=True)


@functools.cache
def _compiling_bench(setting: Setting) -> ChainBench:
    config, dtype, device, rows = setting
    return ChainBench(chain_model(config, dtype, device, layers=1), rows)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def chain_layers(config: ModelConfig, dtype: torch.dtype) -> int:
    """Layers of about `CHAIN_BYTES`; at least two, and otherwise no more than the model has."""
    weights = linear_bytes(config, dtype.itemsize)
    layer = sum(weights.values()) - weights["lm_head"]
    return max(2, min(config.num_layers, math.ceil(CHAIN_BYTES / layer)))


def chain_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, layers: int
) -> Chain:
    """A chain of so many layers with random weights. ValueError for layers that are not alike."""
    chain = new_chain(config, layers=layers, dtype=dtype, device=device)
    fill_random(chain.weights.named())
    return chain


def compile_processes(model: Chain) -> int:
    """As many as cores, and as there is GPU memory for a layer and lm_head in each of them."""
    free, _ = torch.cuda.mem_get_info(model.weights.embedding.device)
    at_once = free // (model.weights.nbytes + (1 << 30))
    return max(1, min(_MAX_PROCESSES, os.cpu_count() or 1, at_once))


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `graphengine tune`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=NAMES, help="one of the shapes that `bench` measures")
    model.add_argument("--checkpoint", help="directory or hub id; 'demo' is the packaged model")
    add, families = parser.add_argument, get_args(RowFamily)
    add("--family", nargs="+", choices=families, default=families, help="default: both")
    add("--only", nargs="+", choices=ORDER, default=ORDER, help="default: all linears")
    add("--rows", help="to measure at, such as 8,32 (default: 1 for fma; 8,32 for dot)")
    add("--dtype", choices=tuple(DTYPES), help="default: the checkpoint's, or bfloat16")
    add("--seconds", type=float, default=300.0, help="a family; then no more plans are tried")
    add("--device", default="cuda", help="the GPU to measure on")
    add("--out", type=Path, help="the table to add to (default: the user's)")


def tune(options: argparse.Namespace) -> None:
    """Measure plans for a model's decode linears on this GPU and keep the fastest."""
    if not options.seconds > 0:
        raise ValueError(f"--seconds {options.seconds} must be positive")
    rows_of = {family: family_rows(family, options.rows) for family in options.family}
    config, dtype = _model(options)
    device = torch.device(options.device)
    if device.type != "cuda":
        raise ValueError(f"tuning measures on an NVIDIA GPU, and --device is {options.device!r}")
    if not torch.cuda.is_available():
        raise ValueError("tuning measures on an NVIDIA GPU, and torch finds none")
    name = tuning.device_name(device)
    path = options.out or tuning.user_table_path(name)
    # A table that cannot be written is found before the work, not after it.
    tuning.write_table(path, name, {})
    layers = chain_layers(config, dtype)
    print(f"{config.architecture} on {name}, chains of {layers} layers -> {path}", flush=True)
    model = chain_model(config, dtype, device, layers=layers)
    for family, rows in rows_of.items():
        plans, _ = tuning.choose_plans(config.linears, dtype, family, device)
        targets = targets_of(config, dtype, family, options.only)
        bench = ChainBench(model, rows, processes=compile_processes(model))
        with contextlib.closing(bench):
            plans = search(targets, plans, bench, seconds=options.seconds, report=_print_step(rows))
            chain, whole = (bench.times([plans], head=head)[0] for head in (False, True))
        layer_us = [us / layers for us in chain]
        head_us = [both - us for both, us in zip(whole, chain, strict=True)]
        for count, us, head in zip(rows, layer_us, head_us, strict=True):
            print(f"\n{family}, {count} rows: {us:.1f} us a layer, {head:.1f} us lm_head")
        tuning.write_table(path, name, entries(targets, plans, layer_us[0], head_us[0]))


def _print_step(rows: Sequence[int]) -> Callable[[Step], None]:
    return lambda step: print(f"\n{step.table(rows)}", flush=True)


def entries(
    targets: Sequence[Target], plans: LinearPlans, layer_us: float, head_us: float
) -> tuning.Table:
    """The part of `plans` that was searched, for a table."""
    date = datetime.now(UTC).date().isoformat()
    table = {}
    for target in targets:
        us = head_us if "lm_head" in target.names else layer_us
        # A tiny model's time is still a positive number.
        us = max(round(us, 1), 0.1)
        table[target.key] = TunedPlan(
            target.plan(plans), us, torch=torch.__version__, triton=triton.__version__, date=date
        )
    return table


def family_rows(family: RowFamily, text: str | None) -> tuple[int, ...]:
    """Numbers of rows to measure at. ValueError if the family does not serve one of them."""
    if text is None:
        return DEFAULT_ROWS[family]
    rows, most = integers(text, "rows"), FMA_LANES if family == "fma" else MAX_LANES
    if max(rows) > most:
        raise ValueError(f"--rows {text}: {family} serves up to {most}")
    return tuple(dict.fromkeys(rows))


def _model(options: argparse.Namespace) -> tuple[ModelConfig, torch.dtype]:
    if options.shape is not None or options.checkpoint == DEMO:
        subject = Subject.of_shape(options.shape or DEMO)
    else:
        subject = Subject.of_checkpoint(options.checkpoint)
    if options.dtype is not None:
        return subject.model, DTYPES[options.dtype]
    if subject.checkpoint is None:
        return subject.model, torch.bfloat16
    return subject.model, stored_dtype(Checkpoint.open(subject.checkpoint))
