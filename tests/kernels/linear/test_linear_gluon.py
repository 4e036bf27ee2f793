"""The Gluon kernel of `linear`: which launches it gets, its code for sm_90, and a lane's bits.

Gluon has no interpreter. What it compiles to can be read without a GPU; what that computes is also
held against the reference by `test_linear.py` and `test_linear_residual.py`, on a GPU.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples, some_of
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import MAX_LANES, LinearCall
from graphengine.kernels.linear.epilogues import STORE, AddResidual, Store, StoreSwiglu
from graphengine.kernels.linear.gluon import linear_gluon
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual, StreamCopy
from launches.compilation import Op, compile_kernel, record_launch

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="an interpreted process has no Gluon")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16 = torch.bfloat16
PLAN = LinearPlan("dot", block_m=64, block_k=128, stages=5)
SPLIT = PLAN._replace(splits=4)
# Of Llama 3.2 1B. The last one has a tile and a part of one more, and rows that end in a tile.
SHAPES = [
    ("store", 3072, 2048, SPLIT._replace(block_k=256, splits=2, stages=4)),
    ("residual", 2048, 8192, SPLIT),
    ("swiglu", 16384, 2048, PLAN._replace(block_m=128)),
    ("swiglu", 3000, 1000, SPLIT._replace(block_m=128, splits=2, stages=3)),
]


def launch_of(
    kind: str,
    M: int,
    K: int,
    plan: LinearPlan,
    *,
    lanes: int = 8,
    groups: int = 64,
    bias: bool = False,
    pdl: bool = True,
) -> Op:
    """How a linear of this kind launches the kernel in bfloat16."""

    def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    counters = new(arrivals_needed(plan, M), dtype=torch.int32)
    call = LinearCall(
        *(new(lanes, K), new(M, K), new(lanes, dtype=torch.int32)),
        bias=new(M) if bias else None,
        plan=plan,
        launch=Launch(arrivals=counters, pdl=pdl),
    )

    def run() -> None:
        if kind in ("residual", "keeping"):
            kept = StreamCopy(new(lanes, 3 * M)[:, :M], 0.5) if kind == "keeping" else None
            stream = Residual(new(lanes, M, dtype=torch.float32), new(lanes, M), new(0), kept)
            linear(call, AddResidual(stream, new(M)))
        else:
            squares = new(groups, lanes, dtype=torch.float32) if groups else None
            store = StoreSwiglu() if kind == "swiglu" else STORE
            linear(call._replace(squares_TN=squares), store)

    with assumed(H200):
        module = importlib.import_module("graphengine.kernels.linear.launches")
        return record_launch(module, run, linear_gluon)


def compile_linear(kind: str, M: int, K: int, plan: LinearPlan, **case: Any) -> Any:
    """What the launch of `launch_of` compiles to for sm_90."""
    compiled, _ = compile_kernel(launch_of(kind, M, K, plan, **case))
    return compiled


# Which launches.


def takes(weight: torch.Tensor, plan: LinearPlan = PLAN, **options: Any) -> bool:
    options = {"swiglu": False, "out_dtype": BF16, **options}
    with assumed(H200):
        return linear_gluon.takes(weight, plan, **options)


@not_interpreted
def test_takes_half_precision_with_aligned_rows():
    whole = torch.empty(80, 80, dtype=BF16)
    assert takes(whole) and takes(whole.half(), out_dtype=torch.float16)
    assert takes(whole[:, 8:]), "aligned rows that lie apart"
    assert not takes(whole.float(), out_dtype=torch.float32)
    assert not takes(whole[:, :76]), "K ends within 16 bytes"
    assert not takes(whole[:, 4:76]), "rows start within 16 bytes"
    assert not takes(torch.empty(80, 84, dtype=BF16)[:, :80]), "some rows start within 16 bytes"


def test_leaves_logits_to_the_kernel_of_the_sampler():
    """The sampler inside lm_head promises the token of these logits, to the last bit."""
    assert not takes(torch.empty(80, 80, dtype=BF16), out_dtype=torch.float32)


@not_interpreted
def test_takes_no_fewer_outputs_than_an_instruction_has():
    weight, least = torch.empty(80, 80, dtype=BF16), PLAN._replace(block_m=8)
    assert takes(weight, least) and takes(weight, least._replace(block_m=16), swiglu=True)
    assert not takes(weight, least._replace(block_m=4))
    assert not takes(weight, least, swiglu=True)


def test_leaves_other_families_alone():
    assert not takes(torch.empty(80, 80, dtype=BF16), LinearPlan("fma", block_m=16, block_k=64))


def test_nothing_runs_on_a_cpu():
    weight = torch.empty(80, 80, dtype=BF16)
    assert not linear_gluon.takes(weight, PLAN, swiglu=False, out_dtype=BF16)


@not_interpreted
@pytest.mark.parametrize("plan", [PLAN, SPLIT])
@pytest.mark.parametrize(
    "lanes, programs, L", [(1, 1, 16), (16, 1, 16), (17, 1, 32), (32, 1, 32), (33, 2, 32)]
)
def test_lanes_are_cut_into_programs(plan, lanes, programs, L):
    launch = launch_of("store", 3072, 2048, plan, lanes=lanes)
    assert launch.grid == (programs, 3072 // plan.block_m, plan.splits)
    assert launch.arguments["L"] == L
    assert launch.arguments["x_pitch"] == launch.arguments["weight_pitch"] == 2048 // 8
    if plan.splits > 1:
        assert programs * launch.grid[1] <= arrivals_needed(plan, 3072)


@pytest.mark.parametrize(
    "planned, splits, K, expected",
    [(5, 1, 2048, 5), (5, 4, 2048, 4), (1, 1, 2048, 2), (1, 1, 128, 1), (6, 2, 1000, 4)],
)
def test_stages(planned, splits, K, expected):
    """Two at least for a loop, and no more than there are tiles."""
    assert linear_gluon.stages(PLAN._replace(stages=planned), splits, K) == expected


# The code.


@not_interpreted
@pytest.mark.parametrize(
    "kind, M, K, plan, lanes",
    some_of([(*shape, lanes) for shape in SHAPES for lanes in (8, 32, 64)], 0, 2, 4, 6, 7, 11),
)
def test_first_tiles_of_weights_are_asked_for_before_the_wait(kind, M, K, plan, lanes):
    code = compile_linear(kind, M, K, plan, lanes=lanes)
    before, after = code.asm["ptx"].split("griddepcontrol.wait")
    stages = linear_gluon.stages(plan, plan.splits, K)
    copies = stages * plan.block_m * plan.block_k * 2 // (16 * 32 * plan.warps)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .* 0x10,", before)) == copies
    assert "cp.async.ca" not in code.asm["ptx"], "16 bytes a copy, past L1"
    # The weights of the next norm, and no inputs.
    assert ("ld.global" in before) == (kind == "residual")
    assert "griddepcontrol.launch_dependents" in after
    for word in (r"\bst\.global", r"\batom\.", r"\bred\.global", r"\bret;"):
        assert not re.search(word, before), f"{word} before the wait"


@not_interpreted
@pytest.mark.parametrize("splits", [1, 4])
def test_a_stream_that_is_kept_costs_stores_alone(splits):
    plan = PLAN._replace(splits=splits)
    plain, keeping = (
        compile_linear(kind, 4096, 4096, plan, lanes=8).asm["ptx"]
        for kind in ("residual", "keeping")
    )
    for word in (r"\bld\.global", r"cp\.async\.cg", r"mma\.sync", r"bar\.sync"):
        assert len(re.findall(word, keeping)) == len(re.findall(word, plain)), word
    stores = [len(re.findall(r"\bst\.global", ptx)) for ptx in (plain, keeping)]
    assert stores[0] < stores[1] <= 2 * stores[0], f"{stores=}"


@not_interpreted
@pytest.mark.parametrize(
    "kind, M, K, plan, lanes",
    some_of([(*shape, lanes) for shape in SHAPES for lanes in (8, 32)], 0, 3, 4, 7),
)
def test_multiplies_by_mma_from_as_much_shared_memory_as_planned(kind, M, K, plan, lanes):
    code = compile_linear(kind, M, K, plan, lanes=lanes, bias=True)
    assert "mma.sync.aligned.m16n8k16" in code.asm["ptx"]
    assert "wgmma" not in code.asm["ptx"], "it sums in another order"
    L, stages = 16 if lanes <= 16 else 32, linear_gluon.stages(plan, plan.splits, K)
    assert code.metadata.shared == stages * (plan.block_m + L) * plan.block_k * 2


@not_interpreted
def test_pdl_and_overlap_say_when_the_next_launch_starts():
    shape = ("store", 3072, 2048)
    quiet = compile_linear(*shape, PLAN, pdl=False).asm["ptx"]
    assert "griddepcontrol" not in quiet
    alone = compile_linear(*shape, PLAN._replace(overlap=False)).asm["ptx"]
    assert "griddepcontrol.wait" in alone and "launch_dependents" not in alone


def float_sums(ttgir: str) -> set[tuple[str, str]]:
    """The axis and the layout of each sum of floats over a 2D tile, which say its order."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    reduction = r'"tt\.reduce"(?:(?!tt\.reduce\.return).)*?axis = (\d).*?tt\.reduce\.return.*?'
    found = re.findall(reduction + r"\(tensor<\d+x\d+xf32, (#\w+)>\)", ttgir, re.DOTALL)
    return {(axis, layouts[layout]) for axis, layout in found}


@not_interpreted
@pytest.mark.parametrize(
    "kind, M, K, plan, groups",
    some_of([(*shape, groups) for shape in SHAPES for groups in (1, 64, 500)], 2, 3, 7, 10),
)
def test_sums_have_one_order_at_every_number_of_lanes(kind, M, K, plan, groups):
    few, *more = (
        float_sums(compile_linear(kind, M, K, plan, lanes=lanes, groups=groups).asm["ttgir"])
        for lanes in (1, 32, 64)
    )
    assert len(few) == 1 and all(sums == few for sums in more)


OTHER_PLANS = [
    # One tile a split; outputs that fill no warp; and more warps than outputs.
    LinearPlan("dot", block_m=16, block_k=16, splits=4, stages=2),
    LinearPlan("dot", block_m=16, block_k=32, stages=3, warps=8),
    LinearPlan("dot", block_m=128, block_k=64, splits=2, stages=6, warps=8),
    LinearPlan("dot", block_m=32, block_k=256, stages=3, warps=2),
]


@not_interpreted
@pytest.mark.parametrize(
    "plan, kind, lanes",
    some_of(
        [*product(OTHER_PLANS, ["store", "swiglu", "residual"], [5, 20])],
        *(0, 3, 5, 6, 8, 11, 13, 14, 16, 19, 20, 22),
    ),
)
def test_other_plans_compile(kind, plan, lanes):
    code = compile_linear(kind, 150, 72, plan, lanes=lanes, groups=3, bias=True)
    assert "mma.sync" in code.asm["ptx"]


# What a GPU does.


def outputs_of(
    kind: str, plan: LinearPlan, case: Any, *, pdl: bool = False
) -> tuple[torch.Tensor, ...]:
    """What a linear of this kind leaves, with lanes first."""
    counters = torch.zeros(
        arrivals_needed(plan, case.weight.shape[0]), dtype=torch.int32, device="cuda"
    )
    launch = Launch(arrivals=counters, pdl=pdl)
    call = case.call(eps=1e-5, plan=plan, launch=launch)
    if kind == "residual":
        before = Residual(
            case.stream.clone(), torch.zeros_like(case.stream, dtype=case.x.dtype), case.x
        )
        after = linear(call, AddResidual(before, case.next_norm))
        found: tuple[torch.Tensor, ...] = (after.x, after.scaled, after.squares.t())
    else:
        found = (linear(call, StoreSwiglu() if kind == "swiglu" else STORE),)
    assert not counters.any()
    return found


@gpu
@settings(deadline=None, max_examples=examples(20, 60))
@given(
    kind=st.sampled_from(["store", "swiglu", "residual"]),
    plan=st.sampled_from(
        [
            LinearPlan("dot", block_m=32, block_k=64, stages=3),
            LinearPlan("dot", block_m=64, block_k=32, splits=2, stages=4, warps=8),
            LinearPlan("dot", block_m=16, block_k=128, stages=2),
        ]
    ),
    lanes=st.integers(1, MAX_LANES),
    outputs=st.integers(1, 150),
    eighths=st.integers(1, 60),
    dtype=st.sampled_from([torch.float16, BF16]),
    bias=st.booleans(),
    pdl=st.booleans(),
    padded=st.integers(0, 63),
)
def test_matches_reference(
    make_linear_case,
    assert_products_close,
    kind,
    plan,
    lanes,
    outputs,
    eighths,
    dtype,
    bias,
    pdl,
    padded,
):
    """Whatever M and N; K that ends in the middle of a tile, and in the middle of a split."""
    M, K = 2 * outputs if kind == "swiglu" else outputs, 8 * eighths
    padding = (padded,) if padded < lanes else ()
    case = make_linear_case(lanes, M, K, dtype, device="cuda", groups=5, bias=bias, padded=padding)
    assert linear_gluon.takes(case.weight, plan, swiglu=kind == "swiglu", out_dtype=dtype)
    actual, *_ = outputs_of(kind, plan, case, pdl=pdl)
    store = StoreSwiglu if kind == "swiglu" else Store
    expected = linear_reference(case.call(eps=1e-5), store(dtype=torch.float32))
    expected = case.stream + expected if kind == "residual" else expected.to(dtype)
    live = case.slot >= 0
    assert_products_close(actual[live], expected[live], dtype)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("kind, M, K, plan", SHAPES)
def test_bits_are_the_same_at_every_number_of_lanes(
    make_linear_case, assert_lanes_keep_their_bits, kind, M, K, plan, pdl
):
    case = make_linear_case(16, M, K, BF16, device="cuda", groups=64, bias=True)
    assert_lanes_keep_their_bits(
        case, lambda each: outputs_of(kind, plan, each, pdl=pdl), (1, 16, 17, 32, 48, 64)
    )


@gpu
@pytest.mark.parametrize("kind, M, K, plan", SHAPES)
def test_bits_do_not_depend_on_where_inputs_lie(make_linear_case, kind, M, K, plan):
    case = make_linear_case(20, M, K, BF16, device="cuda", bias=True)
    expected = outputs_of(kind, plan, case)
    for gap, offset in ((8, 8), (3, 1), (8, 4)):
        x = torch.zeros(20, K + gap, dtype=BF16, device="cuda")[:, offset : offset + K]
        x.copy_(case.x)
        assert all(map(torch.equal, outputs_of(kind, plan, replace(case, x=x)), expected))


@gpu
def test_stages_do_not_change_the_bits(make_linear_case):
    case = make_linear_case(20, 3072, 2048, BF16, device="cuda", groups=64)
    few, *more = (
        outputs_of("store", PLAN._replace(stages=stages), case) for stages in (1, 2, 3, 6)
    )
    assert all(torch.equal(few[0], each[0]) for each in more)
