"""The plans that decode's linear kernels can run, given the registers and shared memory of
sm_90.
"""

from __future__ import annotations

import torch

from graphengine.kernels.core.devices import H200
from graphengine.kernels.experts.plans import DECODE_BLOCK, check_expert_plan
from graphengine.kernels.linear.packed_cut import check_packed_plan, packed_bytes
from graphengine.kernels.linear.plans import (
    DOT_LANES,
    FMA_LANES,
    LinearKind,
    LinearPlan,
    dot_bytes,
)
from graphengine.kernels.linear.quantised import WeightFormat

MAX_WEIGHT_REGISTERS = 255
"""Most registers that a thread has; an `fma` program keeps its weights in them."""

SM_REGISTERS = 64 * 1024
"""Registers of all threads on an SM: with 16 warps a thread has half of the above."""

MAX_SHARED_BYTES = H200.shared_bytes
"""Shared memory of a program on sm_90."""

MAX_SPLITS = 16
"""Most parts of K. Each is a float32 [N, M] in the workspace, budgeted for this many."""

_BLOCK_M = {"fma": (1, 16), "dot": (16, 256), "packed": (16, 256)}
_BLOCK_K = (16, 8192)
_WARPS = (1, 16)
_STAGES = (1, 8)


def check_plan(
    plan: LinearPlan,
    kind: LinearKind,
    K: int,
    dtype: torch.dtype,
    weight: WeightFormat | None = None,
    *,
    expert: bool = False,
    most_shared: int = MAX_SHARED_BYTES,
) -> None:
    """Raise ValueError for a plan that the kernels cannot run, or only by spilling registers.

    weight       format of the weight; None: it is in `dtype`
    expert       whether the weight is an expert's; experts have their own kernels
    most_shared  bytes of shared memory that a program may have
    """
    if expert:
        check_expert_plan(plan, kind, weight)
    least_m, most_m = _BLOCK_M[plan.family if weight is None else "packed"]
    # A thread of a SwiGLU holds a gate and its up row.
    least_m = max(least_m, 2) if kind == "swiglu" else least_m
    for name, (least, most) in {
        "block_m": (least_m, most_m),
        "block_k": _BLOCK_K,
        "splits": (1, MAX_SPLITS),
        "warps": _WARPS,
    }.items():
        value = getattr(plan, name)
        if not least <= value <= most or value & (value - 1):
            raise ValueError(
                f"{name}={value} must be a power of two from {least} to {most} "
                f"for {kind} in {plan.family}"
            )
    least, most = _STAGES
    if not least <= plan.stages <= most:
        raise ValueError(f"stages={plan.stages} must be in [{least}, {most}]")
    if kind == "sample" and plan.splits > 1:
        raise ValueError(
            f"splits={plan.splits} must be 1 for sample: its M is a vocabulary, which fills a GPU "
            "by itself, and parts of that size are not in the memory budget"
        )
    if weight is not None:
        lanes = DECODE_BLOCK if expert else FMA_LANES if plan.family == "fma" else DOT_LANES
        _check_packed(plan, K, weight, lanes, most_shared)
    elif plan.family == "fma":
        _check_fma(plan, K, dtype)
    else:
        _check_dot(plan, K, dtype, most_shared)


def _check_packed(
    plan: LinearPlan, K: int, weight: WeightFormat, lanes: int, most_shared: int
) -> None:
    check_packed_plan(plan, weight)
    if plan.family == "fma" and plan.splits > 1:
        raise ValueError(f"splits={plan.splits} must be 1 in fma")
    _check_splits(plan, K)
    shared = packed_bytes(plan, weight, K, lanes, weight.scale_bytes)
    if shared > most_shared:
        raise ValueError(
            f"stages={plan.stages} of block_m={plan.block_m} x block_k={plan.block_k} in "
            f"{weight.label} take {shared} bytes of shared memory with the inputs of {lanes} "
            f"lanes, at most {most_shared} exist"
        )


def _check_fma(plan: LinearPlan, K: int, dtype: torch.dtype) -> None:
    if plan.splits > 1 or plan.stages > 1:
        raise ValueError(
            f"splits={plan.splits} and stages={plan.stages} must be 1: fma has no loop over K"
        )
    registers = weight_registers(plan, K, dtype)
    most = min(MAX_WEIGHT_REGISTERS, SM_REGISTERS // (32 * plan.warps))
    if registers > most:
        raise ValueError(
            f"block_m={plan.block_m} rows of K={K} take {registers} registers a thread with "
            f"warps={plan.warps}, at most {most} exist"
        )


def _check_splits(plan: LinearPlan, K: int) -> None:
    tiles = -(-K // plan.block_k)
    if plan.splits > tiles:
        raise ValueError(
            f"splits={plan.splits} want more than the {tiles} tiles of block_k={plan.block_k} in "
            f"K={K}"
        )


def _check_dot(plan: LinearPlan, K: int, dtype: torch.dtype, most_shared: int) -> None:
    _check_splits(plan, K)
    shared = dot_bytes(plan, dtype)
    if shared > most_shared:
        raise ValueError(
            f"stages={plan.stages} of block_m={plan.block_m} x block_k={plan.block_k} take "
            f"{shared} bytes of shared memory, at most {most_shared} exist"
        )


def weight_registers(plan: LinearPlan, K: int, dtype: torch.dtype) -> int:
    """32-bit registers per thread that hold the weight rows of an `fma` program."""
    tiles = -(-K // plan.block_k)
    held = plan.block_m * plan.block_k * tiles * dtype.itemsize
    return -(-held // (4 * 32 * plan.warps))
