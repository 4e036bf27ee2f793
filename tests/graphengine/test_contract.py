"""What goes by the names of a model's linears."""

from __future__ import annotations

import pickle

import pytest
import torch

from graphengine.kernels import LinearPlan, arrivals_needed
from graphengine.models.contract import (
    ByLinear,
    Linear,
    LinearPlans,
    heuristic_plans,
    linear_arrivals,
)

LINEARS = {"up": Linear("store", 4096, 512), "down": Linear("residual", 512, 4096)}


def test_values_are_found_by_name_in_the_order_of_the_step() -> None:
    plans = heuristic_plans(LINEARS, torch.bfloat16, "dot")
    assert list(plans) == ["up", "down"] and len(plans) == 2
    assert plans.family == "dot" and all(plan.family == "dot" for plan in plans.values())
    assert repr(plans).startswith("LinearPlans(up=LinearPlan(family='dot'")


def test_equal_values_are_equal_and_hash_alike() -> None:
    plans = heuristic_plans(LINEARS, torch.bfloat16, "dot")
    same = LinearPlans({name: plans[name] for name in ("down", "up")})
    other = plans.replace({"up": LinearPlan("dot", block_m=16, block_k=16)})
    assert plans == same and hash(plans) == hash(same)
    assert plans != other and len({plans, same, other}) == 2
    assert pickle.loads(pickle.dumps(plans)) == plans


def test_a_copy_changes_what_is_there_and_nothing_else() -> None:
    values = ByLinear({"up": 1, "down": 2})
    assert values.replace({"down": 3}) == {"up": 1, "down": 3} and values["down"] == 2
    with pytest.raises(KeyError, match=r"no linear head, side; there are up, down"):
        values.replace({"side": 1, "head": 2})


def test_the_neediest_linear_decides_how_many_counters_there_are() -> None:
    split = LinearPlan("dot", block_m=32, block_k=64, splits=4)
    plans = LinearPlans({"up": split, "down": split._replace(splits=1)})
    assert linear_arrivals(LINEARS, plans) == arrivals_needed(split, 4096) > 0
