"""The Gluon kernel of experts in 8 and 4 bits: its code for sm_90 in an emulation, and natively."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.experts import (
    expert_inner,
    expert_part,
    expert_residual,
    residual_arrivals,
)
from graphengine.kernels.experts.plans import check_expert_plan, decode_block, expert_plan
from graphengine.kernels.experts.reference import expert_product_reference, expert_sum_reference
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.linear.residual import Residual, add_to_residual_reference
from launches.compilation import record_launch
from launches.emulation import run_launch
from launches.packed_experts import Case, slice_experts
from launches.quantised import COMMON

EXPERTS = importlib.import_module("graphengine.kernels.experts.experts")
DECODE = importlib.import_module("graphengine.kernels.experts.packed.packed_decode")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
NAN, EPS = float("nan"), 1e-6
# Programs of 4 streams of a tile's columns, 2, and one.
THIN = LinearPlan("dot", block_m=16, block_k=256, stages=2)
WIDE = LinearPlan("dot", block_m=32, block_k=128, stages=3)
TALL = LinearPlan("dot", block_m=64, block_k=64, stages=2)


def launch(case: Case, call: Any) -> Any:
    """Run the launch; without a GPU in an emulation, with copies late and early."""
    if case.device == "cuda":
        return call()
    found: list[Any] = []
    recorded = record_launch(EXPERTS, lambda: found.append(call()), DECODE)
    run_launch(recorded, late=len(case.slot) % 2 == 0)
    return found[0]


def swiglu(case: Case, plan: LinearPlan, size: int = 0) -> torch.Tensor:
    """The SwiGLU of live pairs."""
    out = torch.full_like(case.a, 7.0)
    launch(
        case,
        lambda: expert_inner(
            case.x, case.gate_up, case.slot, case.routes, tile=plan, squares_TN=case.squares,
            eps=EPS, **case.first,
            grouping=case.grouping(size), out=out, pdl=True,
        ),
    )  # fmt: skip
    padded = out.view(*case.routes.expert.shape, -1)[case.slot < 0]
    assert (padded == 7.0).all(), "a padded lane was written"
    return case.live(out)


def residual(
    case: Case, plan: LinearPlan, size: int = 0, *, part: bool = False
) -> tuple[torch.Tensor, ...]:
    """Stream, scaled and squares of live lanes; with `part` also checks the sum alone."""
    lanes, hidden = case.stream.shape
    arrivals = case.slot.new_zeros(residual_arrivals(lanes, hidden))
    stream = Residual(case.stream.clone(), torch.full_like(case.x, 7.0), case.stream)
    operands = (case.a, case.down, case.slot, case.routes)
    options = {
        "plan": plan, "arrivals": arrivals, "bias_EH": case.down_bias,
        "grouping": case.grouping(size), "pdl": True,
    }  # fmt: skip
    after = launch(case, lambda: expert_residual(*operands, stream, case.norm, **options))
    live = case.slot >= 0
    assert not arrivals.any()
    if part:
        alone = launch(case, lambda: expert_part(*operands, **options))
        assert not arrivals.any() and torch.equal((case.stream + alone)[live], after.x[live])
    assert torch.equal(after.x[~live], case.stream[~live]) and (after.scaled[~live] == 7.0).all()
    return after.x[live], after.scaled[live], after.squares[:, live]


def expected_swiglu(case: Case) -> torch.Tensor:
    out = expert_product_reference(
        case.x, case.gate_up, case.slot, case.routes, squares_TN=case.squares, eps=EPS,
        **case.first_reference, out=torch.zeros_like(case.a),
    )  # fmt: skip
    return case.live(out)


def expected_residual(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    y = expert_sum_reference(
        case.a, case.down, case.slot, case.routes, out_dtype=torch.float32, bias_EH=case.down_bias
    )
    stream = Residual(case.stream.clone(), torch.zeros_like(case.x), case.squares[:1].clone())
    after = add_to_residual_reference(y, case.slot, stream, case.norm)
    live = case.slot >= 0
    return after.x[live], after.scaled[live]


def check(case: Case, plan: LinearPlan, sizes: tuple[int, ...], close: Any) -> None:
    """Both products against the references, and in all forms with the same bits."""
    one, *others = (swiglu(case, plan, size) for size in sizes)
    close(one, expected_swiglu(case), case.x.dtype)
    assert all(torch.equal(one, other) for other in others)
    # That a sum may stand alone does not depend on the format.
    whole = case.device == "cuda" or len(sizes) > 1
    first, *more = (residual(case, plan, size, part=whole and size == sizes[-1]) for size in sizes)
    for found, wanted in zip(first, expected_residual(case), strict=False):
        close(found, wanted, case.x.dtype)
    for other in more:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@compiles
@pytest.mark.parametrize(
    "name, dtype, lanes, hidden, ffn, plan, sizes, gated",
    [
        # Rows that end in a block, and columns in a tile; rings of fewer tiles than there are.
        ("mxfp4", BF16, 1, 352, 40, THIN, (0, 8), True),
        ("mxfp4", FP16, 4, 160, 96, WIDE, extent((0, 16), (0, 8, 16)), True),
        # How pairs are found does not depend on the format.
        ("e4m3 in blocks", BF16, 3, 264, 40, TALL, extent((8,), (0, 8)), True),
        ("e4m3", BF16, 2, 136, 40, WIDE, extent((0,), (0, 8)), True),
        ("int8 in groups", FP16, 2, 104, 24, THIN, extent((8,), (0, 8)), True),
        ("int4 with zeros", FP16, 3, 136, 40, THIN, extent((8,), (0, 8)), True),
        ("nvfp4", BF16, 2, 136, 40, WIDE, extent((0,), (0, 8)), True),
        # Minimums, and factors of blocks of columns, of which each weight has two.
        ("q4_k", BF16, 2, 264, 264, WIDE, extent((8,), (0, 8)), True),
        ("q6_k", FP16, 2, 264, 40, THIN, extent((0,), (0, 8)), True),
        # Squared ReLUs of rows that end in a block.
        ("e4m3 in blocks", BF16, 3, 136, 40, THIN, extent((8,), (0, 8)), False),
        *extent([], [("nvfp4", FP16, 2, 136, 96, WIDE, (0, 8), False)]),
    ],
)
def test_experts_mean_what_their_weights_mean(
    assert_products_close, name, dtype, lanes, hidden, ffn, plan, sizes, gated
):
    case = Case(name, dtype, lanes=lanes, hidden=hidden, ffn=ffn, gated=gated)
    check(case, plan, sizes, assert_products_close)


@compiles
def test_gates_may_go_through_a_gelu(assert_products_close):
    case = Case("nvfp4", BF16, lanes=2, hidden=104, ffn=24, gating="gelu_tanh")
    check(case, THIN, (0,), assert_products_close)


def check_held(
    case: Case, plan: LinearPlan, held: range, sizes: tuple[int, ...], close: Any
) -> None:
    """Both products with the weights of some experts alone, in all forms with the same bits."""
    case.gate_up, case.down = (slice_experts(each, held) for each in (case.gate_up, case.down))
    case.gate_up_bias, case.down_bias = (
        each[held.start : held.stop].clone() for each in (case.gate_up_bias, case.down_bias)
    )
    expert, live = case.routes.expert, case.slot >= 0
    here = ((expert >= held.start) & (expert < held.stop) & live[:, None]).flatten()
    of_stream = {"squares_TN": case.squares, "eps": EPS, "held": held}
    found = []
    for size in sizes:
        grouping = case.grouping(size, held)
        a = torch.full_like(case.a, NAN)
        forms = {"grouping": grouping, "held": held, "pdl": True}
        operands = (case.x, case.gate_up, case.slot, case.routes)
        launch(
            case,
            lambda a=a, operands=operands, forms=forms: expert_inner(
                *operands, tile=plan, out=a, **case.first, **of_stream | forms
            ),
        )
        arrivals = case.slot.new_zeros(residual_arrivals(*case.stream.shape))
        forms |= {"plan": plan, "arrivals": arrivals, "bias_EH": case.down_bias}
        operands = (a, case.down, case.slot, case.routes)
        part = launch(case, lambda operands=operands, forms=forms: expert_part(*operands, **forms))
        assert not arrivals.any() and a[~here].isnan().all()
        found.append((a, part))
    (a, part), *others = found
    expected = expert_product_reference(
        case.x, case.gate_up, case.slot, case.routes, out=torch.zeros_like(a),
        **case.first_reference, **of_stream,
    )  # fmt: skip
    close(a[here], expected[here], a.dtype)
    summed = expert_sum_reference(
        a, case.down, case.slot, case.routes, out_dtype=torch.float32, bias_EH=case.down_bias,
        held=held,
    )  # fmt: skip
    close(part[live], summed[live], a.dtype)
    for other, other_part in others:
        assert torch.equal(other[here], a[here]) and torch.equal(other_part[live], part[live])


@compiles
@pytest.mark.parametrize(
    "name, dtype, hidden, ffn, plan, sizes, gated",
    [
        ("mxfp4", BF16, 160, 96, WIDE, (0, 8), True),
        ("int4 with zeros", FP16, 136, 40, THIN, extent((8,), (0, 8)), True),
        ("e4m3", BF16, 136, 40, THIN, extent((0,), (0, 8)), False),
    ],
)
def test_experts_of_other_ranks_add_nothing(
    assert_products_close, name, dtype, hidden, ffn, plan, sizes, gated
):
    """A lane has some of both, a lane has none here, and a lane has no others."""
    routed = {0: [2, 0], 2: [0, 4], 3: [2, 1], 4: [1, 3]}
    options = {"used": 5, "E": 5, "routed": routed, "gated": gated}
    case = Case(name, dtype, lanes=5, hidden=hidden, ffn=ffn, **options)
    check_held(case, plan, range(1, 3), sizes, assert_products_close)


@compiles
@pytest.mark.parametrize(
    "plan, size, message",
    [
        (THIN, 4, r"take blocks of \(8, 16, 32\) pairs, not 4"),
        (THIN._replace(splits=2), 0, "splits=2 must be 1: .* experts do not split K"),
        (THIN._replace(family="fma"), 0, "experts in e2m1-1x32 want a plan of the family dot"),
        (THIN._replace(block_m=8), 0, "block_m=8 of .* experts must be at least 16"),
        (THIN._replace(block_k=128), 0, "4 streams of packed e2m1 want a power .* at least 256"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error(plan, size, message):
    case = Case("mxfp4", BF16, lanes=4, hidden=64, ffn=32)
    for product in (swiglu, residual):
        with pytest.raises(ValueError, match=message):
            product(case, plan, size)


def test_plans_and_blocks_of_packed_experts():
    """With several pairs four times the rows share inputs; blocks are small where pairs are few."""
    mxfp4, fp8 = WeightFormat("e2m1", 1, 32), WeightFormat("e4m3", 128, 128)
    plans = {
        (kind.code, family): expert_plan("swiglu", 5760, 2880, BF16, family, kind)
        for kind in (mxfp4, fp8)
        for family in ("fma", "dot")
    }
    assert plans == {
        ("e2m1", "fma"): LinearPlan("dot", block_m=16, block_k=1024, stages=3),
        ("e2m1", "dot"): LinearPlan("dot", block_m=64, block_k=256, stages=3),
        ("e4m3", "fma"): LinearPlan("dot", block_m=16, block_k=512, stages=3),
        ("e4m3", "dot"): LinearPlan("dot", block_m=64, block_k=128, stages=3),
    }
    short = expert_plan("residual", 40, 40, BF16, "dot", mxfp4)
    check_expert_plan(short, "residual", mxfp4)
    assert [decode_block(lanes, 4, 32, mxfp4) for lanes in (1, 8, 48, 49)] == [8, 8, 8, 16]
    assert decode_block(8, 4, 32) == 16


# What a GPU does.

GPT_OSS = {"lanes": 8, "hidden": 2880, "ffn": 2880, "top_k": 4, "used": 5, "E": 6}


@gpu
@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("plan", [None, WIDE, TALL], ids=str)
def test_a_gpu_matches_the_reference_at_the_shape_of_gpt_oss(assert_products_close, lanes, plan):
    """Alone and in groups, with experts that hold NaN and huge scales where nobody may look."""
    case = Case("mxfp4", BF16, device="cuda", **GPT_OSS | {"lanes": lanes})
    plan = plan or expert_plan("swiglu", 5760, 2880, BF16, "dot", case.gate_up.format)
    check(case, plan, (0, 8, 16), assert_products_close)


@gpu
@pytest.mark.parametrize("dtype, plan", [(BF16, THIN), (FP16, WIDE), (BF16, TALL)], ids=str)
@pytest.mark.parametrize("name", COMMON)
def test_a_gpu_matches_the_reference_in_every_format(assert_products_close, name, dtype, plan):
    """Shapes fill no block, no tile and no ring, with more pairs of an expert than a block has."""
    case = Case(name, dtype, lanes=24, hidden=328, ffn=200, top_k=3, used=5, E=7, device="cuda")
    check(case, plan, (0, 8, 32), assert_products_close)


@gpu
def test_a_gpu_gives_a_pair_the_same_bits_in_any_company(assert_products_close):
    case = Case("mxfp4", BF16, device="cuda", **GPT_OSS)
    plan = expert_plan("swiglu", 5760, 2880, BF16, "dot", case.gate_up.format)
    all_of = swiglu(case, plan, 8), *residual(case, plan, 8)[:2]
    lanes = (case.slot >= 0).nonzero().flatten().tolist()
    for place, lane in enumerate(lanes):
        one = case.take(lane)
        alone = swiglu(one, plan), *residual(one, plan)[:2]
        for found, among in zip(alone, all_of, strict=True):
            assert torch.equal(found[0], among[place])


@gpu
@pytest.mark.parametrize("plan", [None, WIDE, TALL], ids=str)
def test_a_gpu_adds_what_is_held_alone(assert_products_close, plan):
    case = Case("mxfp4", BF16, device="cuda", **GPT_OSS | {"used": 6})
    plan = plan or expert_plan("swiglu", 5760, 2880, BF16, "dot", case.gate_up.format)
    check_held(case, plan, range(1, 4), (0, 8, 16), assert_products_close)
