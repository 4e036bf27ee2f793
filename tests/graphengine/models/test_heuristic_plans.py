"""Heuristic plans fit the shared memory of every GPU, and those of an H200 stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
from gpus.compiling import DEVICES

from graphengine.kernels.core.devices import H200, KIB, Device
from graphengine.kernels.experts.plans import DECODE_BLOCK
from graphengine.kernels.linear.packed_cut import check_packed_plan, packed_bytes
from graphengine.kernels.linear.plans import (
    FMA_LANES,
    LinearKind,
    LinearPlan,
    RowFamily,
    dot_bytes,
    heuristic_plan,
)
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.linears import Linear, heuristic_linear_plan
from graphengine.models.plans.plan_limits import check_plan
from launches.quantised import FORMATS
from launches.tuning_cases import BF16

KINDS, FAMILIES = get_args(LinearKind), get_args(RowFamily)
STORED = {name: weight for name, (weight, _) in FORMATS.items()}
STORED["q3_k"] = WeightFormat("int4", 1, 16)
ROWS = (72, 4096, 28_672)
ROOMY = replace(H200, shared_bytes=1 << 30)


def packed_plans(device: Device) -> Iterator[tuple[str, int, LinearPlan, int]]:
    """The format, the columns, the plan and its lanes for a GPU."""
    columns = [64, 896, 2880, 4096, 8192, 14_336]
    if device.shared_bytes > 99 * KIB:
        # Shorter memory holds groups of 16 of such rows on no plan.
        columns.append(28_672)
    for name, family, M, K in itertools.product(STORED, FAMILIES, ROWS, columns):
        weight = STORED[name]
        linear = Linear("store", M, K, weight)
        lanes = FMA_LANES if family == "fma" else 32
        yield name, K, heuristic_linear_plan(linear, BF16, family, device), lanes
        of_experts = heuristic_linear_plan(linear._replace(experts=8), BF16, family, device)
        yield name, K, of_experts, DECODE_BLOCK


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_plans_of_plain_weights_fit(device: Device, dtype: torch.dtype) -> None:
    columns = (15, 64, 100, 896, 2048, 4096, 14_336, 24_577)
    for kind, family, M, K in itertools.product(KINDS, FAMILIES, ROWS, columns):
        for experts in (0, 8) if kind != "sample" else (0,):
            linear = Linear(kind, M, K, experts=experts)
            plan = heuristic_linear_plan(linear, dtype, family, device)
            most = device.shared_bytes
            check_plan(plan, kind, K, dtype, expert=experts > 0, most_shared=most)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_plans_of_packed_weights_fit(device: Device) -> None:
    """With scales as most checkpoints have them: of 4 bytes in Q3_K, of 2 in other integers."""
    for name, K, plan, lanes in packed_plans(device):
        weight = STORED[name]
        check_packed_plan(plan, weight)
        taken = packed_bytes(plan, weight, K, lanes, weight.usual_scale_bytes)
        assert taken <= device.shared_bytes, f"{name} K={K}: {plan} takes {taken} bytes"


def test_a_gated_product_has_fewer_stages_where_memory_is_short() -> None:
    found = {}
    for name in ("sm_86", "sm_80", "sm_90"):
        plan = heuristic_plan("swiglu", 28_672, 4096, torch.float16, "dot", DEVICES[name])
        found[name] = plan.block_m, plan.stages
    assert found == {"sm_86": (128, 2), "sm_80": (128, 4), "sm_90": (128, 5)}


def test_plans_that_fit_an_h200_are_as_if_memory_were_endless() -> None:
    """The limit changes plans that could not be launched, and stages that the launch leaves out."""
    for kind, family, M, K in itertools.product(KINDS, FAMILIES, ROWS, (64, 2048, 14_336)):
        for dtype in (torch.float32, BF16):
            plain = heuristic_plan(kind, M, K, dtype, family, ROOMY)
            assert plain == heuristic_plan(kind, M, K, dtype, family)
            assert plain.family == "fma" or dot_bytes(plain, dtype) <= 200 * KIB
    for (name, K, plan, lanes), (*_, roomy, _) in zip(
        packed_plans(H200), packed_plans(ROOMY), strict=True
    ):
        weight = STORED[name]
        two = packed_bytes(roomy._replace(stages=2), weight, K, lanes, weight.usual_scale_bytes)
        if two > H200.shared_bytes:
            assert plan.block_m < roomy.block_m
        else:
            assert plan._replace(stages=0) == roomy._replace(stages=0), name
        if K <= 14_336 and weight.is_common and name != "q3_k":
            assert plan == roomy, f"{name} K={K}"


def test_scales_of_q3_k_fit() -> None:
    """With 64 rows a program they would take 256 KiB."""
    weight = STORED["q3_k"]
    roomy = heuristic_linear_plan(Linear("residual", 8192, 14_336, weight), BF16, "dot", ROOMY)
    assert packed_bytes(roomy._replace(stages=0), weight, 14_336, 32, 4) >= 256 * KIB
    plan = heuristic_linear_plan(Linear("residual", 8192, 14_336, weight), BF16, "dot")
    assert plan == LinearPlan("dot", 32, 256, stages=4)
    check_plan(plan, "residual", 14_336, BF16, weight)
