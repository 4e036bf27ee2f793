"""Plans of packed weights: whose they are, and the memory that they take."""

from __future__ import annotations

import pytest

from graphengine.kernels.linear.packed_cut import packed_bytes
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.models.linears import Linear, LinearPlans
from graphengine.models.plans.choosing import choose_plan, numerics_id
from graphengine.models.plans.tuning_tables import TunedPlan, TuningKey
from launches.tuning_cases import BF16


def test_a_plan_is_for_one_way_to_store_a_weight() -> None:
    """Weights of equal sizes that are stored in another way have their own plans, or the
    heuristic's.
    """
    formats = [None, WeightFormat("int4", 1, 128), WeightFormat("int4", 1, 128, has_zeros=True)]
    tried = [Linear("store", 2048, 1024, weight) for weight in formats]
    measured = [LinearPlan("dot", rows, 128, 1, 3, 4) for rows in (16, 32)]
    table = {
        TuningKey.of(linear, "dot", BF16): TunedPlan(
            plan, 1.5, torch="2.11.0", triton="3.6.0", date="2026-11-21"
        )
        for linear, plan in zip(tried, measured, strict=False)
    }
    found = [choose_plan(TuningKey.of(linear, "dot", BF16), {"user": table}) for linear in tried]
    assert found[:2] == [(plan, "user") for plan in measured]
    assert found[2][1] == "heuristic"


@pytest.mark.parametrize(
    ("weight", "groups"),
    [
        (WeightFormat("int4", 1, 0), 0),
        # A program has half of the columns.
        (WeightFormat("int4", 1, 32), 64 * 64 * 4),
        (WeightFormat("int4", 1, 32, has_zeros=True), 64 * 64 * 5),
        (WeightFormat("int4", 1, 128), 16 * 64 * 4),
        (WeightFormat("int4", 1, 128, has_minimums=True), 16 * 64 * 8),
        # Integers, and a factor of 16 bits for every 256 columns.
        (WeightFormat("int8", 1, 16, block=256), 128 * 64 + 8 * 64 * 2),
        (WeightFormat("uint4", 1, 32, False, True, 256), 2 * (64 * 64 + 8 * 64 * 2)),
    ],
)
def test_shared_memory_of_a_packed_weight(weight: WeightFormat, groups: int) -> None:
    """Three tiles of 256 columns, of 64 rows in few bits and 8 lanes in 16, and the scales."""
    plan = LinearPlan("dot", 64, 256, splits=2, stages=3, warps=4)
    ring = 3 * 256 * (64 * weight.bits // 8 + 8 * 2)
    assert packed_bytes(plan, weight, 4096, 8, weight.scale_bytes) == ring + groups


def test_numerics_know_how_many_columns_a_stream_of_a_packed_weight_has() -> None:
    """Which follows from the rows of a program; of a plain weight they change the speed alone."""

    def ident(weight: WeightFormat | None, rows: int) -> str:
        plans = LinearPlans({"qkv": LinearPlan("dot", rows, 256, stages=3, warps=4)})
        return numerics_id({"qkv": Linear("store", 512, 512, weight)}, plans, dtype=BF16, extra={})

    assert ident(None, 32) == ident(None, 64)
    packed = WeightFormat("int4", 1, 128)
    assert len({ident(None, 32), ident(packed, 32), ident(packed, 64)}) == 3
