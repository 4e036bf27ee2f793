"""Experts of which a rank has some: against the references, where no others exist.

What pairs of other ranks' experts leave in memory is NaN.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.experts import (
    expert_inner,
    expert_part,
    expert_sum,
    residual_arrivals,
)
from graphengine.kernels.experts.grouping import Grouping, group_pairs, group_pairs_reference
from graphengine.kernels.experts.plans import DECODE_BLOCK, ProductTile, expert_plan
from graphengine.kernels.experts.reference import expert_product_reference, expert_sum_reference
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.plans import LinearPlan
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_kernel,
    global_loads,
    launches_handed_to,
)
from launches.emulation import run_launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, EPS = float("nan"), 1e-6
SMALL = LinearPlan("dot", block_m=32, block_k=32, stages=2)
FMA = LinearPlan("fma", block_m=16, block_k=32)
HIDDEN, FFN = 40, 24
EXPERTS = importlib.import_module("graphengine.kernels.experts.experts")
LAUNCHES = importlib.import_module("graphengine.kernels.experts.launches")
GROUPING = importlib.import_module("graphengine.kernels.experts.grouping")


@dataclass(frozen=True)
class Case:
    """Operands of lanes that choose among `experts`; the weights are of those that are held."""

    x: torch.Tensor
    squares: torch.Tensor
    slot: torch.Tensor
    routes: Routes
    held: range
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gated: bool = True

    @classmethod
    def random(
        cls, lanes: int, experts: int, top_k: int, held: range, dtype: torch.dtype, device: str,
        *, padded: Any = (), biased: bool = False, gated: bool = True,
    ) -> Case:  # fmt: skip
        generator = torch.Generator().manual_seed(lanes)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        def weights(*shape: int) -> torch.Tensor:
            return random(experts, *shape)[held.start : held.stop].to(device, dtype)

        rows = 2 * FFN if gated else FFN
        chosen = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(lanes)]
        expert, weight = torch.stack(chosen).int(), random(lanes, top_k).softmax(1)
        slot, x = torch.arange(lanes, dtype=torch.int32), random(lanes, HIDDEN)
        for each, value in ((slot, -1), (x, NAN), (expert, 2**31 - 1), (weight, NAN)):
            each[list(padded)] = value
        sums = (torch.rand(3, lanes, generator=generator) + 0.5) * HIDDEN / 3
        return cls(
            x.to(device, dtype),
            sums.to(device),
            slot.to(device),
            Routes(expert.to(device), weight.to(device)),
            held,
            weights(rows, HIDDEN) / HIDDEN**0.5,
            weights(HIDDEN, FFN) / FFN**0.5,
            weights(rows) if biased else None,
            weights(HIDDEN) if biased else None,
            gated,
        )

    def grouping(self, size: int = DECODE_BLOCK) -> Grouping:
        count = len(self.held)
        routes, slot = self.routes.expert, self.slot
        return group_pairs(routes, slot, experts=count, size=size, held=self.held)

    @property
    def here(self) -> torch.Tensor:
        """Whether each pair's lane is live and its expert held."""
        expert = self.routes.expert
        found = (expert >= self.held.start) & (expert < self.held.stop)
        return (found & (self.slot >= 0)[:, None]).flatten()

    def inner(self, **how: Any) -> torch.Tensor:
        """`expert_inner`; NaN of pairs that it left out."""
        out = self.x.new_full((self.routes.expert.numel(), FFN), NAN)
        return expert_inner(
            self.x, self.gate_up, self.slot, self.routes, squares_TN=self.squares, eps=EPS,
            bias_EM=self.gate_up_bias, held=self.held, gated=self.gated, out=out, **how,
        )  # fmt: skip

    def part(self, a: torch.Tensor, plan: LinearPlan, grouping: Grouping | None) -> torch.Tensor:
        counters = residual_arrivals(len(self.slot), HIDDEN)
        arrivals = torch.zeros(counters, dtype=torch.int32, device=self.x.device)
        part = expert_part(
            a, self.down, self.slot, self.routes, plan=plan, arrivals=arrivals,
            bias_EH=self.down_bias, grouping=grouping, held=self.held,
        )  # fmt: skip
        assert not arrivals.any(), "the next launch finds zeros"
        return part

    def summed(self, a: torch.Tensor, tile: ProductTile, grouping: Grouping) -> torch.Tensor:
        return expert_sum(
            a, self.down, self.slot, self.routes, tile=tile, grouping=grouping, held=self.held,
            bias_EH=self.down_bias, products=a.new_full((len(a), HIDDEN), NAN),
        )  # fmt: skip

    def check(self, a: torch.Tensor, summed: torch.Tensor, close: Any) -> None:
        """Products and sums against the references."""
        expected = expert_product_reference(
            self.x, self.gate_up, self.slot, self.routes, squares_TN=self.squares, eps=EPS,
            activation="swiglu" if self.gated else "squared_relu", bias_EM=self.gate_up_bias,
            held=self.held, out=torch.full_like(a, NAN),
        )  # fmt: skip
        here, live = self.here, self.slot >= 0
        assert a[~here].isnan().all() and expected[~here].isnan().all()
        close(a[here], expected[here], a.dtype)
        of_all = expert_sum_reference(
            a, self.down, self.slot, self.routes, bias_EH=self.down_bias, held=self.held,
            out_dtype=summed.dtype,
        )  # fmt: skip
        close(summed[live], of_all[live], a.dtype)
        without = live & ~here.view(len(live), -1).any(1)
        assert (summed[without] == 0).all()


def drawn_case(data: Any, dtype: torch.dtype, device: str, lanes: int) -> Case:
    experts = data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, experts - 1))
    stop = data.draw(st.integers(start + 1, experts))
    top_k = data.draw(st.integers(1, min(4, experts)))
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    biased = data.draw(st.booleans())
    held, gated = range(start, stop), data.draw(st.booleans())
    return Case.random(
        lanes, experts, top_k, held, dtype, device, padded=padded, biased=biased, gated=gated
    )


@settings(deadline=None, max_examples=examples(10, 40))
@given(
    form=st.sampled_from(["single", "grouped", "fma"]),
    lanes=st.integers(1, 20),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_decode_adds_what_is_held(
    device: str, dtypes: Any, assert_products_close: Any, form: str, lanes: int, dtype: int,
    data: Any,
) -> None:  # fmt: skip
    case = drawn_case(data, dtypes[dtype % len(dtypes)], device, lanes)
    plan = FMA if form == "fma" else SMALL
    grouping = case.grouping() if form == "grouped" else None
    a = case.inner(tile=plan, grouping=grouping)
    case.check(a, case.part(a, plan, grouping), assert_products_close)


@settings(deadline=None, max_examples=examples(5, 20))
@given(
    lanes=st.integers(1, 50),
    size=st.sampled_from([16, 64]),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_chunks_sum_what_is_held(
    device: str, dtypes: Any, assert_products_close: Any, lanes: int, size: int, dtype: int,
    data: Any,
) -> None:  # fmt: skip
    case = drawn_case(data, dtypes[dtype % len(dtypes)], device, lanes)
    tile, grouping = ProductTile(size, 32, 32, warps=4, stages=2), case.grouping(size)
    a = case.inner(tile=tile, grouping=grouping)
    case.check(a, case.summed(a, tile, grouping), assert_products_close)


@settings(deadline=None, max_examples=examples(8, 30))
@given(
    lanes=st.integers(1, 70),
    experts=st.sampled_from([2, 5, 16]),
    size=st.sampled_from([1, 3, 16]),
    data=st.data(),
)
@example(lanes=300, experts=5, size=16, data=None)
def test_pairs_of_other_experts_are_grouped_last(
    device: str, lanes: int, experts: int, size: int, data: Any
) -> None:
    start = 1 if data is None else data.draw(st.integers(0, experts - 1))
    padded = [0] if data is None else sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    held = range(start, min(start + 2, experts))
    case = Case.random(lanes, experts, 2, held, torch.float32, device, padded=padded)
    found = case.grouping(size)
    empty = Grouping(torch.empty_like(found.order), torch.empty_like(found.blocks), size)
    expected = group_pairs_reference(
        case.routes.expert, case.slot, experts=len(held), held=held, out=empty
    )
    used = int((expected.blocks[0] >= 0).sum())
    assert torch.equal(found.blocks[:, :used], expected.blocks[:, :used])
    assert (found.blocks[0, used:] == -1).all()
    there = int(found.blocks[2, :used].sum())
    assert there == 2 * (lanes - len(padded))
    assert torch.equal(found.order[:there], expected.order[:there])
    here = case.here
    for expert, first, count in found.blocks[:, :used].t().tolist():
        pairs = found.order[first : first + count].long()
        assert bool(here[pairs].all()) == (expert < len(held))
        if expert < len(held):
            assert (case.routes.expert.flatten()[pairs] == held[expert]).all()


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("form", "late"), [("single", True), ("grouped", False), ("fma", True), ("chunk", False)]
)
def test_compiled_kernels_add_what_is_held(
    assert_products_close: Any, form: str, late: bool
) -> None:
    """Their code for sm_90 is run in numpy; a lane has no expert here, one is padded."""
    dtype, held = torch.bfloat16, range(2, 4)
    case = Case.random(6, 6, 3, held, dtype, "cpu", padded=(1,), biased=late)
    case.routes.expert[2] = torch.tensor([5, 0, 1])
    plans = [
        expert_plan("swiglu", 2 * FFN, HIDDEN, dtype, "dot"),
        expert_plan("residual", HIDDEN, FFN, dtype, "dot"),
    ]
    if form == "fma":
        plans = [expert_plan("swiglu", 2 * FFN, HIDDEN, dtype, "fma"), FMA]
    with launches_handed_to(partial(run_launch, late=late), EXPERTS, LAUNCHES, GROUPING):
        grouping = case.grouping() if form in ("grouped", "chunk") else None
        if form == "chunk":
            tile = ProductTile(DECODE_BLOCK, 32, 32, warps=4, stages=2)
            a = case.inner(tile=tile, grouping=grouping)
            part = case.summed(a, tile, grouping)
        else:
            a = case.inner(tile=plans[0], grouping=grouping)
            part = case.part(a, plans[1], grouping)
    case.check(a, part, assert_products_close)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_compiled_kernels_wait_and_keep_their_rings() -> None:
    """They are compiled as those of one rank: down of single pairs asks early, if the expert is
    held.
    """
    case = Case.random(6, 6, 3, range(2, 4), torch.bfloat16, "cpu")
    for plan, early in ((SMALL, set()), (FMA, {"slot_ptr", "expert_ptr", "weight_ptr"})):
        found: list[Any] = []
        with launches_handed_to(found.append, EXPERTS, LAUNCHES):
            case.part(case.x.new_zeros(18, FFN), plan, None)
        found[0].arguments["PDL"] = True
        compiled, names = compile_kernel(found[0])
        ptx = compiled.asm["ptx"]
        assert_waits_before_it_shows(ptx)
        loads = [load for load in global_loads(ptx, names) if not load.after_wait]
        assert {load.argument for load in loads} == early
        if plan is SMALL:
            assert compiled.metadata.shared >= DECODE_BLOCK * plan.block_k * 2


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize("held", [range(1, 4), range(0, 4, 2), range(-1, 1)])
def test_ids_that_are_not_those_of_the_weights_are_an_error(held: range) -> None:
    case = replace(Case.random(2, 6, 2, range(2, 4), torch.float32, "cpu"), held=held)
    message = f"weights of 2 experts, and ids range\\({held.start}, "
    for call in (
        lambda: case.inner(tile=SMALL),
        lambda: case.part(case.x.new_zeros(4, FFN), SMALL, None),
        lambda: group_pairs(case.routes.expert, case.slot, experts=2, size=4, held=held),
    ):
        with pytest.raises(ValueError, match=message):
            call()
