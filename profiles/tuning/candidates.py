"""The plans to try for each linear of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import triton

from graphengine.kernels.core.devices import H200, Device
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.packed_cut import packed_bytes
from graphengine.kernels.linear.plans import LinearPlan, RowFamily, dot_bytes
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.contract import ModelConfig
from graphengine.models.linears import LinearPlans, heuristic_linear_plan
from graphengine.models.plans import plan_limits
from graphengine.models.plans.tuning_tables import TuningKey
from graphengine.profiles.flags.tune import ORDER

FMA_REGISTERS = (12, 96)
"""Weights in a thread's registers: enough in flight, and room for the next kernel beside them."""
DOT_SHARED_BYTES = 200 * 1024
"""Most shared memory of a program: it has to fit an SM."""
DOT_IN_FLIGHT_BYTES = 48 * 1024
"""Least bytes in flight of a program: memory latency is long, and an SM holds few programs."""
PACKED_SHARED_BYTES = 100 * 1024
"""Most shared memory of an `fma` program with a packed weight: two fit an SM, so that programs of
the next launch begin beside the last of this one."""
PACKED_PROGRAMS = (90, 4096)
"""Programs of a launch with a packed weight; an lm_head of 128,256 rows in 32 each has 4,008."""
PACKED_EXPERT_PROGRAMS = (16, 1024)
"""Programs of a pair of lane and expert with a packed weight: a step has several pairs."""
DOT_PROGRAMS = (90, 792)
"""Programs of a launch: from two thirds of an H200's 132 SMs to six for each of them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A shape to find a plan for; `names` are the linears that have it and so share the plan."""

    names: tuple[str, ...]
    key: TuningKey
    device: Device = H200

    def plan(self, plans: LinearPlans) -> LinearPlan:
        return plans[self.names[0]]

    def variants(self, plans: LinearPlans) -> dict[LinearPlan, LinearPlans]:
        """`plans` with each candidate in this place; the first is the plan in use."""
        candidates = dict.fromkeys([self.plan(plans), *candidate_plans(self.key, self.device)])
        return {plan: plans.replace(dict.fromkeys(self.names, plan)) for plan in candidates}


def targets_of(
    config: ModelConfig,
    dtype: torch.dtype,
    family: RowFamily,
    only: Sequence[str] = ORDER,
    device: Device = H200,
) -> list[Target]:
    """A model's linears in the order of the search; with `only`, those that it names."""
    names_of: dict[TuningKey, list[str]] = {}
    wanted: set[TuningKey] = set()
    for name in sorted(config.linears, key=lambda name: ORDER.index(base_name(name))):
        key = TuningKey.of(config.linears[name], family, dtype)
        names_of.setdefault(key, []).append(name)
        if base_name(name) in only:
            wanted.add(key)
    return [Target(tuple(names), key, device) for key, names in names_of.items() if key in wanted]


def base_name(name: str) -> str:
    """A linear's name without its weight's format."""
    return name.partition(".")[0]


def candidate_plans(key: TuningKey, device: Device = H200) -> list[LinearPlan]:
    """The grid that found the best plans on an H200, and the heuristic. Every plan is valid.

    For other GPUs the grid is adapted to their multiprocessors and their shared memory.
    """
    heuristic = heuristic_linear_plan(key.linear, key.dtype, key.family, device)
    if key.weight is not None:
        grid = _packed_grid(key, key.weight, device)
    elif key.expert:
        grid = _expert_grid(key, heuristic, device)
    elif key.family == "fma":
        grid = _fma_grid(key)
    elif key.kind == "sample" or key.dtype == torch.float32 or key.K % linear_gluon.ALIGNMENT:
        grid = _pipelined_dot_grid(key, heuristic, device)
    else:
        grid = _dot_grid(key, device)
    return [plan for plan in dict.fromkeys([heuristic, *grid]) if _is_valid(plan, key, device)]


def _is_valid(plan: LinearPlan, key: TuningKey, device: Device) -> bool:
    most = device.shared_bytes
    with contextlib.suppress(ValueError):
        plan_limits.check_plan(
            plan, key.kind, key.K, key.dtype, key.weight, expert=key.expert, most_shared=most
        )
        return True
    return False


def _least_programs(least: int, device: Device) -> int:
    """`least` programs on an H200, reduced for a device with fewer multiprocessors."""
    return min(least, max(1, least * device.processors // H200.processors))


def _dot_shared(device: Device) -> int:
    return min(DOT_SHARED_BYTES, device.shared_bytes)


def _packed_grid(key: TuningKey, weight: WeightFormat, device: Device) -> Iterator[LinearPlan]:
    """Plans for the kernels of `packed_gluon.py`: programs by rows, and by splits if rows are few.

    A tile has at least 4 KB of codes, and at least 16 KB are in flight. Each pair of lane and
    expert has programs of its own.
    """
    fma = key.family == "fma"
    few = fma or key.expert
    shared = PACKED_SHARED_BYTES if few else _dot_shared(device)
    least, most = PACKED_EXPERT_PROGRAMS if key.expert else PACKED_PROGRAMS
    least = _least_programs(least, device)
    for block_m, tile_bytes, splits, stages, warps in product(
        (16, 32) if fma and not key.expert else (16, 32, 64, 128),
        (4096, 8192, 16384, 32768),
        (1,) if few else (1, 2, 4),
        (2, 3, 4, 6),
        (2, 4, 8) if key.expert else (4, 8),
    ):
        if warps == 8 and block_m < 128:
            continue
        block_k = tile_bytes * 8 // weight.bits // block_m
        family: RowFamily = "dot" if key.expert else key.family
        plan = LinearPlan(family, block_m, block_k, splits, stages, warps)
        programs = triton.cdiv(key.M, block_m) * splits
        if not least <= programs <= (most if splits == 1 else 3 * least):
            continue
        tiles = triton.cdiv(key.K, block_k * splits)
        if key.expert and stages > max(2, tiles):
            continue
        flight = min(stages, tiles) * tile_bytes
        even = splits == 1 or key.K % (block_k * splits) == 0
        # A warp has some pieces of a tile between two barriers.
        busy = tile_bytes >= 2048 * warps
        if even and busy and 16384 <= flight <= 65536 and block_k < 2 * key.K:
            lanes = 1 if fma and not key.expert else 8
            if packed_bytes(plan, weight, key.K, lanes, weight.scale_bytes) <= shared:
                yield plan


def _expert_grid(key: TuningKey, heuristic: LinearPlan, device: Device) -> Iterator[LinearPlan]:
    """Plans for dense `experts/`: an engine of `fma` may have plans of both families."""
    if key.family == "fma":
        yield from _fma_grid(key)
    sizes: tuple[int, ...] = (heuristic.block_k,)
    if key.dtype != torch.float32:
        sizes = tuple(size for size in (64, 128, 256) if key.K % size == 0) or sizes
    for block_m, block_k, stages, warps in product((16, 32, 64, 128), sizes, (3, 4, 5, 6), (4, 8)):
        plan = LinearPlan("dot", block_m=block_m, block_k=block_k, stages=stages, warps=warps)
        long = triton.cdiv(key.K, block_k) >= stages - 1
        busy = warps == 4 or block_m >= 64
        if long and busy and dot_bytes(plan, key.dtype) <= _dot_shared(device):
            yield plan


def _fma_grid(key: TuningKey) -> Iterator[LinearPlan]:
    K, (least, most) = key.K, FMA_REGISTERS
    fitting = [size for size in (1024, 2048, 4096) if size <= K and 4 * (-K % size) <= K]
    if key.expert:
        fitting = [size for size in (256, 512, 1024, 2048) if size <= K and 8 * (-K % size) <= K]
    sizes = fitting or [max(16, int(triton.next_power_of_2(K)))]
    for block_m, block_k, warps in product((1, 2, 4, 8, 16), sizes, (2, 4, 8)):
        plan = LinearPlan("fma", block_m=block_m, block_k=block_k, warps=warps)
        # The cost of many tiles in the sampler after lm_head is not part of the chain.
        few_tiles = key.kind != "sample" or block_m >= 4
        if few_tiles and least <= plan_limits.weight_registers(plan, K, key.dtype) <= most:
            yield plan


def _dot_grid(key: TuningKey, device: Device) -> Iterator[LinearPlan]:
    """Plans for the kernel of `linear_gluon.py`."""
    rows = 2 if key.kind == "swiglu" else 1
    for outputs, block_k, splits, stages, warps in product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4), (3, 4, 5, 6), (4, 8)
    ):
        plan = LinearPlan("dot", rows * outputs, block_k, splits, stages, warps)
        programs = triton.cdiv(key.M, plan.block_m) * splits
        least, most = _least_programs(DOT_PROGRAMS[0], device), DOT_PROGRAMS[1]
        # A weight too small or too large for that many still gets the fewest or most outputs.
        if programs < least and (outputs, splits) != (32, 1):
            continue
        if programs > most and outputs < 128:
            continue
        even = splits == 1 or key.K % (block_k * splits) == 0
        long = triton.cdiv(key.K, block_k * splits) >= stages - 1
        room = dot_bytes(plan, key.dtype)
        # With fewer rows, 8 warps would have one instruction each.
        busy = warps == 4 or plan.block_m >= 128
        if even and long and busy and DOT_IN_FLIGHT_BYTES <= room <= _dot_shared(device):
            yield plan


def _pipelined_dot_grid(
    key: TuningKey, heuristic: LinearPlan, device: Device
) -> Iterator[LinearPlan]:
    """Plans for the kernel of `linear_triton.py`, whose loop Triton pipelines."""
    M, K = key.M, key.K
    # float32 multiplies from registers, and large tiles need too many.
    sizes = (16, 32) if key.dtype == torch.float32 else (128, 256)
    fitting = [size for size in sizes if K % size == 0] or [heuristic.block_k]
    for block_m, block_k, splits, stages in product((32, 64), fitting, (1, 2, 4, 8), (3, 4, 5)):
        programs = triton.cdiv(M, block_m) * splits
        # Splits fill SMs that would be idle; an H200 has 132.
        pays = (
            M <= 9000
            and K % (block_k * splits) == 0
            and _least_programs(120, device) <= programs <= 8 * 132
        )
        if splits > 1 and not pays:
            continue
        plan = LinearPlan("dot", block_m=block_m, block_k=block_k, splits=splits, stages=stages)
        long = triton.cdiv(K, block_k * splits) >= stages - 1
        if long and dot_bytes(plan, key.dtype) <= _dot_shared(device):
            yield plan
            yield plan._replace(overlap=False)
