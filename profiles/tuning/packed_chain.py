"""A chain of a model's linears with packed weights of random codes, and plans to try for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from graphengine.kernels import Launch, LinearPlan, Residual, RowFamily, residual_groups
from graphengine.kernels.linear.packed import POWER_FACTOR, PackedWeight, block_columns, unpack
from graphengine.kernels.linear.packed_linear import (
    check_packed_plan,
    packed_linear,
    packed_linear_reference,
    packed_linear_residual,
    packed_plan,
    streams,
)
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.kernels.linear.reference import linear_residual_reference
from graphengine.models.contract import LinearPlans, ModelConfig

SHARED_BYTES = 100 * 1024
"""Most shared memory of a program: two fit an SM, also one of this launch and one of the next."""
IN_FLIGHT_BYTES = 8 * 1024
"""Least bytes of codes in a program's ring."""
PROGRAMS = (64, 2400)
"""Programs of a launch, of which an H200 has 132 SMs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedKind:
    """A kind of weight to measure: its format, and the dtype of the scales of its groups."""

    format: WeightFormat
    scales: torch.dtype = torch.float32


KINDS: Mapping[str, PackedKind] = {
    "e4m3": PackedKind(format=WeightFormat("e4m3", 1, 0)),
    "e4m3-block": PackedKind(format=WeightFormat("e4m3", 128, 128)),
    "int8": PackedKind(format=WeightFormat("int8", 1, 0)),
    "int8-group": PackedKind(format=WeightFormat("int8", 1, 128), scales=torch.bfloat16),
    "int4": PackedKind(format=WeightFormat("int4", 1, 128), scales=torch.bfloat16),
    "int4-zeros": PackedKind(format=WeightFormat("int4", 1, 128, True), scales=torch.float16),
    "mxfp4": PackedKind(format=WeightFormat("e2m1", 1, 32), scales=torch.uint8),
    "nvfp4": PackedKind(format=WeightFormat("e2m1", 1, 16), scales=torch.float8_e4m3fn),
}


def random_weight(
    kind: PackedKind, M: int, K: int, *, swiglu: bool, device: torch.device, seed: int
) -> PackedWeight:
    """A packed weight of random codes whose products with inputs of order 1 are of order 1."""
    random = torch.Generator(device).manual_seed(seed)
    of = kind.format
    blocks = -(-M // 2 // 8) if swiglu else -(-M // 16)
    shape = (blocks, -(-K // block_columns(of)), 512)
    codes = torch.randint(256, shape, generator=random, device=device, dtype=torch.uint8)
    if of.code == "e4m3":
        # Numbers below 2, and so no NaN.
        codes &= 0xBF
    size = {"e4m3": 0.4, "int8": 74.0, "int4": 4.6, "e2m1": 2.7}[of.code]
    if of.columns == 0:
        scale = torch.full((16 * blocks,), 1 / (size * K**0.5), device=device)
        return PackedWeight(of, (M, K), swiglu, codes.view(torch.int16), None, None, scale, None)
    groups = (blocks, -(-K // of.columns), 16)
    exponent = round(-math.log2(size * K**0.5))
    if kind.scales == torch.uint8:
        scales = torch.full(groups, 127 + exponent, dtype=torch.uint8, device=device)
    else:
        scales = torch.full(groups, 2.0**exponent, device=device).to(kind.scales)
    zeros = None
    if of.has_zeros:
        zeros = torch.randint(6, 11, groups, generator=random, device=device, dtype=torch.uint8)
    factor = None
    if kind.scales == torch.uint8:
        factor = torch.full((16 * blocks,), POWER_FACTOR, device=device)
    return PackedWeight(of, (M, K), swiglu, codes.view(torch.int16), scales, zeros, factor, None)


class PackedChain:
    """The linears of some layers, one after the other as decode runs them, without attention."""

    def __init__(
        self,
        config: ModelConfig,
        kind: PackedKind,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layers: int,
        rows: int,
    ) -> None:
        self.config, self.layers, self.dtype = config, layers, dtype
        self.linears = {n: each for n, each in config.linears.items() if each.kind != "sample"}
        self.weights = {
            (layer, name): random_weight(
                kind,
                each.rows,
                each.columns,
                swiglu=each.kind == "swiglu",
                device=device,
                seed=layer * len(self.linears) + index,
            )
            for layer in range(layers)
            for index, (name, each) in enumerate(self.linears.items())
        }
        random = torch.Generator(device).manual_seed(1)
        self._x = torch.randn((rows, config.hidden_size), generator=random, device=device)
        self._slot = torch.arange(rows, dtype=torch.int32, device=device)
        self._norm = torch.ones(config.hidden_size, dtype=dtype, device=device)
        most = max(each.rows for each in self.linears.values())
        self._arrivals = self._slot.new_zeros(2 * triton.cdiv(most, 16))
        self._expected: list[tuple[Tensor, ...]] | None = None

    @property
    def layer_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values()) // self.layers

    def run(self, plans: LinearPlans, rows: int) -> None:
        for _ in self.launches(plans, rows, self.layers):
            pass

    def error(self, plans: LinearPlans, rows: int) -> float:
        """The largest difference of a layer's outputs from the references, over their size."""
        if self._expected is None or len(self._expected[0][0]) != rows:
            self._expected = [_parts(each) for each in self.launches(None, rows, 1)]
        worst = 0.0
        for found, expected in zip(self.launches(plans, rows, 1), self._expected, strict=True):
            for part, right in zip(_parts(found), expected, strict=True):
                size = right.square().mean().sqrt() + right.abs()
                # A NaN is larger than any number.
                error = float(((part - right).abs() / size).nan_to_num(math.inf).max())
                worst = max(worst, error)
        return worst

    def launches(self, plans: LinearPlans | None, rows: int, layers: int) -> Iterator[Any]:
        """Each linear's output, valid until the next; of references where there are no plans."""
        x, slot = self._x[:rows], self._slot[:rows]
        groups = residual_groups(plans["down"], self.config.hidden_size) if plans else 1
        squares = (x.square().sum(dim=1) / groups).repeat(groups, 1)
        residual = Residual(x.clone(), x.to(self.dtype, copy=True), squares)
        out = residual.scaled
        for layer in range(layers):
            for name, each in self.linears.items():
                weight = self.weights[layer, name]
                options: dict[str, Any] = {}
                if plans is not None:
                    launch = Launch(arrivals=self._arrivals, pdl=True)
                    options = {"plan": plans[name], "launch": launch}
                if each.kind == "residual":
                    part = out[:, : each.columns]
                    if plans is None:
                        floats = dequantise(unpack(weight))
                        residual = linear_residual_reference(
                            part, floats, slot, residual, self._norm
                        )
                    else:
                        residual = packed_linear_residual(
                            part, weight, slot, residual, self._norm, **options
                        )
                    yield residual
                    continue
                multiply = packed_linear_reference if plans is None else packed_linear
                options |= {"squares_TN": residual.squares, "eps": self.config.norm_eps}
                out = multiply(residual.scaled, weight, slot, **options)
                yield out


def _parts(result: Any) -> tuple[Tensor, ...]:
    """Outputs to compare, in float32; rows come first."""
    if isinstance(result, Residual):
        return result.x.clone(), result.scaled.float(), result.squares.sum(dim=0)
    return (result.float(),)


def packed_plans(config: ModelConfig, kind: WeightFormat, family: RowFamily) -> LinearPlans:
    """The heuristic plans of all linears but lm_head."""
    return LinearPlans(
        {
            name: packed_plan(kind, each.rows, each.columns, family)
            for name, each in config.linears.items()
            if each.kind != "sample"
        }
    )


def shared_bytes(plan: LinearPlan, kind: PackedKind, K: int, lanes: int) -> int:
    """Shared memory of a program of so many lanes: codes, inputs and scales."""
    stages = min(max(2, plan.stages), -(-K // (plan.block_k * plan.splits)))
    held = 1 if lanes == 1 else next(L for L in (8, 16, 32) if lanes <= L or L == 32)
    ring = plan.block_k * (plan.block_m * kind.format.bits // 8 + 2 * held)
    scales = 0
    if kind.format.columns:
        piece = min(kind.format.columns, plan.block_k // streams(plan))
        pieces = triton.next_power_of_2(-(-K // (piece * plan.splits)))
        scales = pieces * plan.block_m * (kind.scales.itemsize + kind.format.has_zeros)
    return stages * ring + scales


def candidate_plans(
    kind: PackedKind, M: int, K: int, family: RowFamily, lanes: int
) -> list[LinearPlan]:
    """The heuristic plan, and a grid around what should be fast."""
    of = kind.format
    if family == "fma":
        rows: tuple[int, ...] = (16, 32, 64)
        splits: tuple[int, ...] = (1,)
        stages: tuple[int, ...] = (2, 3, 4, 6, 8)
    else:
        rows, splits, stages = (16, 32, 64, 128), (1, 2, 4), (2, 3, 4, 6)
    found = [packed_plan(of, M, K, family)]
    for block_m, warps, block_k, parts, depth in product(
        rows, (4, 8), (128, 256, 512, 1024, 2048), splits, stages
    ):
        plan = LinearPlan(family, block_m, block_k, parts, depth, warps)
        programs = triton.cdiv(M, block_m) * parts
        tiles = triton.cdiv(K, block_k * parts)
        codes = min(depth, tiles) * block_m * block_k * of.bits // 8
        fits = (
            PROGRAMS[0] <= programs <= PROGRAMS[1]
            and depth <= max(2, tiles)
            and (parts == 1 or (K % (block_k * parts) == 0 and programs <= 6 * 132))
            # A warp has several pieces of a tile to work on between two barriers.
            and block_m * block_k * of.bits // 8 >= 2048 * warps // 4
            and codes >= IN_FLIGHT_BYTES
            and shared_bytes(plan, kind, K, lanes) <= SHARED_BYTES
        )
        if fits and streams(plan) * max(64, block_columns(of)) <= block_k:
            check_packed_plan(plan, of)
            found.append(plan)
    return list(dict.fromkeys(found))
