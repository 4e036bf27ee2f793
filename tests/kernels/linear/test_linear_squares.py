"""`StoreSquares`: the very product that `AddResidual` adds, from every kernel."""

from __future__ import annotations

import importlib
from itertools import product
from typing import Any

import pytest
import torch

from extent import some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, Epilogue, StoreSquares
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import PackedWeight, pack
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed, residual_groups
from graphengine.kernels.linear.residual import Product, Residual
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch
from launches.emulation import run_launch
from launches.quantised import random_quantised, to_device

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")

LAUNCHES = importlib.import_module("graphengine.kernels.linear.launches")
DOT = LinearPlan("dot", block_m=32, block_k=32, stages=2)
SPLIT = DOT._replace(splits=2)
FMA = LinearPlan("fma", block_m=4, block_k=64, warps=2)
PACKED_PLANS = {
    1: LinearPlan("fma", block_m=16, block_k=256, stages=2),
    9: LinearPlan("dot", block_m=32, block_k=128, splits=2, stages=2),
}


def both(
    case: Any, weight: torch.Tensor | PackedWeight, plan: LinearPlan, *, emulated: bool = False
) -> tuple[Product, Residual]:
    """The product, and a stream of zeros after it; what is not written is NaN."""
    needed = arrivals_needed(plan, case.weight.shape[0])
    arrivals = torch.zeros(needed, dtype=torch.int32, device=case.x.device)
    product = case.call(weight_MK=weight, plan=plan, launch=Launch(arrivals=arrivals))
    stream = Residual(
        torch.zeros_like(case.stream), torch.zeros_like(case.stream, dtype=case.x.dtype), case.x
    )
    found: list[Any] = []
    for epilogue in (StoreSquares(), AddResidual(stream, case.next_norm)):

        def run(epilogue: Epilogue[Any] = epilogue) -> None:
            found.append(linear(product, epilogue))

        if emulated:
            run_launch(record_launch(LAUNCHES, run))
        else:
            run()
    assert not arrivals.any()
    return found[0], found[1]


def assert_same(case: Any, product: Product, after: Residual, plan: LinearPlan) -> None:
    live = case.slot >= 0
    assert product.y.dtype == torch.float32
    assert product.squares.shape == (residual_groups(plan, case.weight.shape[0]), len(live))
    assert torch.equal(product.y[live], after.x[live])
    assert torch.equal(product.squares[:, live], after.squares[:, live])
    sums = product.y[live].double().square().sum(1)
    torch.testing.assert_close(product.squares[:, live].sum(0).double(), sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", [DOT, SPLIT, FMA])
@pytest.mark.parametrize(("M", "K"), [(70, 136), (33, 100)])
def test_product_of_every_family(device, dtypes, make_linear_case, plan, M, K):
    """In half precision on a GPU the first shape is Gluon's."""
    for dtype in dtypes:
        lanes = 2 if plan.family == "fma" else 19
        case = make_linear_case(lanes, M, K, dtype, device=device, bias=True, padded=(1,))
        assert_same(case, *both(case, case.weight, plan), plan)


def test_padded_lanes_are_not_written(device, make_linear_case):
    case = make_linear_case(5, 70, 136, torch.float32, device=device, padded=(1, 4))
    product, _ = both(case, case.weight, DOT)
    again, _ = both(case, case.weight, DOT)
    for tensor in (product.y, product.squares.t()):
        tensor[~(case.slot >= 0)] = 5.0
    call = case.call(plan=DOT)
    if LAUNCHES.is_launched(call):
        LAUNCHES.launch_linear(call, StoreSquares().targets(product))
    live = case.slot >= 0
    assert torch.equal(product.y[live], again.y[live])
    assert (product.y[~live] == 5.0).all() and (product.squares[:, ~live] == 5.0).all()


@compiles
@pytest.mark.parametrize(
    ("name", "lanes"), some_of([*product(["e4m3", "int4"], PACKED_PLANS)], 1, 2)
)
def test_product_of_packed_weights(make_linear_case, name, lanes):
    """On a CPU the kernel is emulated."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = PACKED_PLANS[lanes]
    padded = (1,) if lanes > 1 else ()
    case = make_linear_case(lanes, 40, 328, torch.bfloat16, device=device, bias=True, padded=padded)
    weight = to_device(pack(random_quantised(name, 40, 328)), device)
    assert_same(case, *both(case, weight, plan, emulated=device == "cpu"), plan)


def test_a_swiglu_has_no_norm(make_linear_case):
    case = make_linear_case(1, 40, 328, torch.float32)
    weight = pack(random_quantised("e4m3", 40, 328), swiglu=True)
    with pytest.raises(ValueError, match=r"40 packed rows with swiglu=True do not fit .* residual"):
        linear(case.call(weight_MK=weight), StoreSquares())


@compiles
@pytest.mark.parametrize("gluon", [False, True])
@pytest.mark.parametrize("plan", [DOT, SPLIT])
def test_gluon_stores_the_product_alone(monkeypatch, gluon, plan):
    """Neither a stream nor a next norm is read, and nothing of 16 bits is written."""
    linear_gluon = importlib.import_module("graphengine.kernels.linear.gluon.linear_gluon")
    monkeypatch.setattr(linear_gluon, "use_gluon", lambda tensor: gluon)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    counters = new(arrivals_needed(plan, 2560), dtype=torch.int32)
    operands = (new(8, 2048), new(2560, 2048), new(8, dtype=torch.int32))
    call = LinearCall(*operands, plan=plan, launch=Launch(arrivals=counters, pdl=True))
    launch = record_launch(LAUNCHES, lambda: linear(call, StoreSquares()), linear_gluon)
    assert launch.kernel.is_gluon() == gluon
    ptx, _ = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    assert "st.global.b16" not in ptx and "st.global.v2.b16" not in ptx
