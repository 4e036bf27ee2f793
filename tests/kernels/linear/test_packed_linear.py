"""Linears with packed weights: against references, at other lane counts, poisoned, and their code.

Their kernel is Gluon's. Without a GPU its code for sm_90 is run in an emulation.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import MAX_LANES, LinearCall
from graphengine.kernels.linear.epilogues import STORE, AddResidual, SampleTiles, Store, StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import PackedWeight, pack
from graphengine.kernels.linear.packed_cut import (
    check_packed_plan,
    group_bytes,
    packed_plan,
    streams,
)
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed
from graphengine.kernels.linear.quantised import WeightFormat, dequantise
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual, StreamCopy
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_tiles_reference, token_of_tiles_reference
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_kernel,
    record_launch,
)
from launches.emulation import run_launch
from launches.quantised import FORMATS, random_quantised

MODULE = importlib.import_module("graphengine.kernels.linear.launches")
LINEAR = importlib.import_module("graphengine.kernels.linear.linear")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16 = torch.bfloat16, torch.float16
EPS, SENTINEL, NAN = 1e-5, 7.0, float("nan")
# One program has 4 streams of a tile's columns; 2 in the split one; and one.
FMA = LinearPlan("fma", block_m=16, block_k=256, stages=2)
SPLIT = LinearPlan("dot", block_m=32, block_k=128, splits=2, stages=2)
DOT = LinearPlan("dot", block_m=64, block_k=128, stages=3)


def launch_with(call: Any, case: Any, counters: torch.Tensor | None, pdl: bool) -> None:
    launch = Launch(arrivals=counters, pdl=pdl)
    if case.x.is_cuda:
        call(launch)
    else:
        recorded = record_launch(MODULE, lambda: call(launch))
        # Both as late and as early as a copy may complete.
        run_launch(recorded, late=case.x.shape[0] % 2 == 0)


def outputs_of(
    case: Any,
    weight: PackedWeight,
    plan: LinearPlan,
    *,
    residual: bool = False,
    pdl: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """What a linear leaves, with lanes first; what it leaves alone holds the sentinel."""
    lanes, M = len(case.x), weight.shape[0]
    counters = torch.zeros(arrivals_needed(plan, M), dtype=torch.int32, device=case.x.device)
    product = case.call(weight_MK=weight, eps=EPS, plan=plan)
    if residual:
        scaled = torch.full_like(case.stream, SENTINEL, dtype=case.x.dtype)
        kept = StreamCopy(torch.cat([scaled, scaled], dim=1)[:, : scaled.shape[1]], 0.3)
        stream = Residual(case.stream.clone(), scaled, case.stream, kept)
        found: list[Residual] = []

        def call(launch: Launch) -> None:
            epilogue = AddResidual(stream, case.next_norm)
            found.append(linear(product._replace(launch=launch), epilogue))

        launch_with(call, case, counters, pdl)
        (after,) = found
        live = case.slot >= 0
        assert torch.equal(kept.rows[live], (after.x[live] * 0.3).to(case.x.dtype))
        outputs: tuple[torch.Tensor, ...] = (after.x, after.scaled, after.squares.t())
    else:
        # Rows that lie apart as a kernel's rows do.
        width = M // 2 if weight.swiglu else M
        room = torch.full((lanes, -(-width // 16) * 16), SENTINEL, device=case.x.device)
        out = room.to(out_dtype or case.x.dtype)[:, :width]

        def call(launch: Launch) -> None:
            store = StoreSwiglu if weight.swiglu else Store
            linear(product._replace(launch=launch), store(dtype=out_dtype, out=out))

        launch_with(call, case, counters, pdl)
        outputs = (out,)
    assert not counters.any()
    return outputs


def expected_of(case: Any, floats: torch.Tensor, *, swiglu: bool, residual: bool) -> torch.Tensor:
    store = StoreSwiglu if swiglu else Store
    product = linear_reference(case.call(weight_MK=floats, eps=EPS), store(dtype=torch.float32))
    return case.stream + product if residual else product.to(case.x.dtype)


def check(
    make_case: Any,
    close: Any,
    name: str,
    kind: str,
    lanes: int,
    M: int,
    K: int,
    plan: LinearPlan,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    padded: tuple[int, ...] = (),
    pdl: bool = True,
) -> None:
    """One launch against the reference; padded lanes hold NaN, and theirs stay as they were."""
    swiglu, residual = kind == "swiglu", kind == "residual"
    case = make_case(lanes, M, K, dtype, device=device, groups=5, bias=True, padded=padded)
    quantised = random_quantised(name, M, K)
    floats = dequantise(quantised).to(device)
    # Products of order 1.
    case = replace(case, x=(case.x.float() / (floats.square().mean().sqrt() * K**0.5)).to(dtype))
    case.x[list(padded)] = NAN
    weight = pack(quantised, swiglu=swiglu)
    weight = PackedWeight(*(p.to(device) if isinstance(p, torch.Tensor) else p for p in weight))
    actual, *_ = outputs_of(case, weight, plan, residual=residual, pdl=pdl)
    live = case.slot >= 0
    expected = expected_of(case, floats, swiglu=swiglu, residual=residual)
    close(actual[live], expected[live], dtype)
    untouched = case.stream if residual else torch.full_like(actual, SENTINEL)
    assert torch.equal(actual[~live], untouched[~live])


@compiles
@pytest.mark.parametrize(
    "name, kind, lanes, M, K, plan, dtype, padded",
    [
        # Rows that end in a block, and columns in a tile; rings of fewer tiles than there are, with
        # copies that complete at once (of an odd number of lanes) and late.
        ("e4m3", "store", 1, 40, 648, FMA, BF16, ()),
        ("e4m3", "swiglu", 20, 72, 512, SPLIT, FP16, (0, 7)),
        ("e4m3 in blocks", "swiglu", 2, 40, 520, FMA, BF16, (1,)),
        ("int8", "residual", 5, 70, 776, DOT, BF16, (2,)),
        ("int8 with a zero a row", "store", 1, 40, 328, FMA, BF16, ()),
        # Fewer columns than a block has.
        ("int8 with a zero a row", "store", 2, 20, 8, DOT, FP16, ()),
        ("int8 in groups", "store", 9, 33, 200, SPLIT, FP16, ()),
        ("int4", "store", 1, 40, 648, FMA, BF16, ()),
        ("int4 with zeros", "residual", 40, 130, 648, DOT, FP16, (39,)),
        ("int4 in small groups", "store", 2, 20, 328, FMA, BF16, ()),
        ("mxfp4", "swiglu", 9, 72, 264, SPLIT, FP16, ()),
        ("nvfp4", "store", 1, 40, 328, FMA, BF16, ()),
        # Minimums, and factors of blocks of columns, the last of which is shorter.
        ("q4_1", "store", 1, 40, 328, FMA, FP16, ()),
        ("q2_k", "store", 2, 20, 328, SPLIT, FP16, ()),
        ("q4_k", "residual", 5, 70, 776, DOT, BF16, (2,)),
        ("q5_k", "swiglu", 9, 72, 264, SPLIT, FP16, ()),
        ("q6_k", "store", 1, 40, 648, FMA, BF16, ()),
        ("int4 with minimums", "store", 1, 40, 328, FMA, BF16, ()),
        ("int8 in groups of 16", "store", 2, 20, 328, SPLIT, BF16, ()),
        ("int8 with minimums of 16", "swiglu", 20, 40, 520, DOT, FP16, (0, 7)),
    ],
)
def test_matches_reference(
    make_linear_case, assert_products_close, name, kind, lanes, M, K, plan, dtype, padded
):
    close = assert_products_close
    check(make_linear_case, close, name, kind, lanes, M, K, plan, dtype, padded=padded)


@compiles
@pytest.mark.parametrize("name, plan, groups", [("int4", SPLIT, 5)])
def test_bits_are_the_same_at_every_number_of_lanes(make_linear_case, name, plan, groups):
    """A lane alone, which is all that shared memory holds then, and among others."""
    case = make_linear_case(20, 40, 328, BF16, groups=groups, bias=True)
    weight = pack(random_quantised(name, 40, 328))
    residual = groups == 0
    whole = outputs_of(case, weight, plan, residual=residual)
    for lane_of in ([4], [19, 0, 4, 4, 7], [*range(9, 20)]):
        part = outputs_of(case.take(torch.tensor(lane_of)), weight, plan, residual=residual)
        for actual, all_lanes in zip(part, whole, strict=True):
            assert torch.equal(actual, all_lanes[lane_of])


def sampling(lanes: int) -> SamplingTensors:
    """Greedy and hot slots, the hottest of which follow the noise; every other must not stop at an
    id yet.
    """
    return SamplingTensors.neutral(lanes)._replace(
        temperature=torch.tensor([0.0, 1.0, 99.0]).repeat(lanes)[:lanes],
        seed=torch.arange(lanes) * 7919 - 3,
        stop_ids=torch.arange(9).repeat(lanes, 1).int() * 3,
        min_len=torch.tensor([99, 0]).repeat(lanes)[:lanes].int(),
    )


@compiles
@pytest.mark.parametrize(
    "name, lanes, K, plan, part",
    [("int4", 1, 256, FMA, False), ("e4m3", 5, 256, SPLIT, True), ("int8", 6, 512, DOT, False)],
)
def test_the_sampler_takes_the_token_of_the_logits(make_linear_case, name, lanes, K, plan, part):
    """It samples from the whole vocabulary, or from a part with ids of its own; with more tiles
    than a ring has, too.
    """
    case = make_linear_case(lanes, 100, K, BF16, groups=2, padded=(2,) if lanes > 2 else ())
    weight, params = pack(random_quantised(name, 100, K)), sampling(lanes)
    ids = (torch.arange(100) * 3).int() if part else None
    counters = torch.zeros(arrivals_needed(plan, 100), dtype=torch.int32)
    product = case.call(weight_MK=weight, eps=EPS, plan=plan)
    sampler = SampleTiles(case.slot, params, ahead=2, token_ids=ids)
    found: list[Any] = []

    def call(launch: Launch) -> None:
        found.extend(linear(product._replace(launch=launch), sampler))

    launch_with(call, case, counters, True)
    (logits,) = outputs_of(case, weight, plan, out_dtype=torch.float32)
    expected = sample_tiles_reference(
        logits, case.slot, case.slot, params, tile=plan.block_m, ahead=2, token_ids=ids
    )
    live = case.slot >= 0
    tokens = token_of_tiles_reference(*found)[live]
    assert torch.equal(tokens, token_of_tiles_reference(*expected)[live])
    assert len(set(tokens.tolist())) > lanes // 3
    on_a_cpu = linear(product, sampler)
    assert torch.equal(tokens, token_of_tiles_reference(*on_a_cpu)[live])


def test_a_swiglu_makes_no_logits():
    weight = pack(random_quantised("int4", 16, 64), swiglu=True)
    slot = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"16 packed rows with swiglu=True do not fit .* sample"):
        linear(LinearCall(torch.zeros(1, 64), weight, slot), SampleTiles(slot, sampling(1)))


# What a CPU engine runs, and what is refused.


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_cpu_multiplies_by_what_the_weight_means(make_linear_case, name):
    case = make_linear_case(3, 40, 66, BF16, groups=2, bias=True, padded=(1,))
    quantised = random_quantised(name, 40, 66)
    for swiglu in (False, True):
        weight = pack(quantised, swiglu=swiglu)
        store = StoreSwiglu() if swiglu else STORE
        found = linear(case.call(weight_MK=weight, eps=EPS), store)
        live = case.slot >= 0
        expected = expected_of(case, dequantise(quantised), swiglu=swiglu, residual=False)
        assert torch.equal(found[live], expected[live])
    weight = pack(quantised)
    stream = Residual(case.stream.clone(), torch.zeros(3, 40, dtype=BF16), case.stream)
    call = case.call(weight_MK=weight, eps=EPS, bias=None)
    after = linear(call, AddResidual(stream, case.next_norm))
    without_bias = replace(case, bias=None)
    expected = expected_of(without_bias, dequantise(quantised), swiglu=False, residual=True)
    assert torch.equal(after.x[case.slot >= 0], expected[case.slot >= 0])
    assert torch.equal(after.x[1], case.stream[1])


@pytest.mark.parametrize(
    "lanes, K, plan, message",
    [
        (65, 64, None, "linear takes 1 to 64 lanes, not 65"),
        (2, 62, None, "x has K=62 input features, the weight 64"),
        (3, 64, FMA, "the fma family takes 1 to 2 lanes, not 3"),
        (2, 64, FMA._replace(block_m=8), "packed weights take a power of two of at least 16 rows"),
        (2, 64, FMA._replace(warps=3), "power of two of at least 16 rows a program and of warps"),
        (2, 64, FMA._replace(block_k=128), "4 streams of packed int4 want a power .* at least 256"),
        (2, 64, FMA._replace(block_k=320), "4 streams of packed int4 want a power .* at least 256"),
    ],
)
def test_operands_that_do_not_fit_are_errors(lanes, K, plan, message):
    weight = pack(random_quantised("int4", 16, 64))
    x, slot = torch.zeros(lanes, K), torch.zeros(lanes, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        linear(LinearCall(x, weight, slot, plan=plan), STORE)


def test_a_swiglu_is_no_sum_for_the_stream(make_linear_case):
    case = make_linear_case(1, 16, 64, BF16)
    weight = pack(random_quantised("int4", 16, 64), swiglu=True)
    stream = Residual(case.stream, case.stream.to(BF16), case.stream)
    with pytest.raises(ValueError, match=r"16 packed rows with swiglu=True do not fit .* residual"):
        linear(case.call(weight_MK=weight), AddResidual(stream, case.next_norm))


def test_rows_in_order_are_no_swiglu(make_linear_case):
    case = make_linear_case(1, 16, 64, BF16)
    weight = pack(random_quantised("int4", 16, 64))
    with pytest.raises(ValueError, match=r"16 packed rows with swiglu=False do not fit .* swiglu"):
        linear(case.call(weight_MK=weight), StoreSwiglu())


def test_inputs_follow_the_order_of_columns():
    quantised = random_quantised("int4", 16, 64)
    quantised = quantised._replace(order=torch.arange(64).flip(0).int())
    x, slot = torch.randn(3, 64), torch.zeros(3, dtype=torch.int32)
    found = linear(LinearCall(x, pack(quantised), slot), STORE)
    torch.testing.assert_close(found, x @ dequantise(quantised).t())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": torch.float32}, "take float16 and bfloat16 inputs, not torch.float32"),
        ({"K": 68}, "a multiple of 8 input features on a GPU, not K=68"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error_where_it_runs(monkeypatch, changes, message):
    monkeypatch.setattr(LINEAR, "is_launched", lambda call: True)
    K = changes.get("K", 64)
    weight = pack(random_quantised("int4", 16, K))
    x = torch.zeros(2, K, dtype=changes.get("dtype", BF16))
    with pytest.raises(ValueError, match=message):
        linear(LinearCall(x, weight, torch.zeros(2, dtype=torch.int32)), STORE)


def test_split_k_wants_counters(monkeypatch):
    monkeypatch.setattr(LINEAR, "is_launched", lambda call: True)
    weight = pack(random_quantised("int4", 64, 256))
    x, slot = torch.zeros(2, 256, dtype=BF16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="wants 4 dense int32 arrivals"):
        linear(LinearCall(x, weight, slot, plan=SPLIT), STORE)


@pytest.mark.parametrize("family", ["fma", "dot"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("M, K", [(6144, 4096), (4096, 14336), (28672, 4096), (40, 64), (7, 8)])
def test_heuristic_plans_are_valid(family, bits, M, K):
    kind = WeightFormat("int4" if bits == 4 else "e4m3", 1, 0)
    plan = packed_plan(kind, M, K, family)
    check_packed_plan(plan, kind)
    assert streams(plan) == (4 if family == "fma" else 4 * 16 // plan.block_m)


@pytest.mark.parametrize("family, ring", [("fma", 48 * 1024), ("dot", 96 * 1024)])
@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q5_k", "q6_k"])
def test_scales_of_long_rows_leave_room_for_tiles(family, ring, name):
    """With minimums and factors they are many: of two programs of an SM each has its own."""
    kind = FORMATS[name][0]
    for K in (4096, 14336):
        plan = packed_plan(kind, 4096, K, family)
        check_packed_plan(plan, kind)
        lanes = 1 if family == "fma" else 32
        tile = plan.block_k * (plan.block_m * kind.bits // 8 + 2 * lanes)
        assert plan.stages * tile + group_bytes(plan, kind, K) <= ring


# The code.


def compiled(name: str, plan: LinearPlan, *, lanes: int = 1, kind: str = "store") -> Any:
    weight = pack(random_quantised(name, 256, 1024), swiglu=kind == "swiglu")
    new = torch.empty
    x, slot = new(lanes, 1024, dtype=BF16), new(lanes, dtype=torch.int32)

    def call() -> None:
        launch = Launch(arrivals=slot.new_empty(64), pdl=True)
        call = LinearCall(x, weight, slot, plan=plan, launch=launch)
        if kind == "residual":
            stream = Residual(
                new(lanes, 256), x[:, :256].contiguous(), x, StreamCopy(x[:, 512:768])
            )
            linear(call, AddResidual(stream, new(256, dtype=BF16)))
        else:
            store = StoreSwiglu() if kind == "swiglu" else STORE
            linear(call._replace(squares_TN=new(64, lanes)), store)

    recorded: Op = record_launch(MODULE, call)
    return compile_kernel(recorded)[0]


@compiles
@pytest.mark.parametrize(
    "name, plan, lanes, kind",
    [
        ("e4m3", FMA, 1, "store"),
        ("e4m3", DOT, 32, "swiglu"),
        ("int4", FMA, 2, "swiglu"),
        ("int4", SPLIT._replace(stages=4), 8, "residual"),
    ],
)
def test_codes_and_scales_are_asked_for_before_the_wait(name, plan, lanes, kind):
    ptx = compiled(name, plan, lanes=lanes, kind=kind).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait")
    asked = len(re.findall(r"cp\.async\.cg\.shared\.global .* 0x10,", before))
    bits = FORMATS[name][0].bits
    codes = plan.stages * plan.block_m * plan.block_k * bits // 8 // (16 * 32 * plan.warps)
    assert asked > codes if name == "int4" else asked == codes
    if plan.stages * plan.block_k * plan.splits == 1024:
        assert "cp.async.cg" not in after, "all of a weight was on its way"
    assert "mma.sync.aligned.m16n8k16" in after and "wgmma" not in ptx
    assert_waits_before_it_shows(ptx)


@compiles
@pytest.mark.parametrize(
    "name, most", [("e4m3", 56), ("int8", 50), ("int4", 78), ("q4_k", 124), ("q6_k", 70)]
)
def test_codes_cost_few_instructions(name, most):
    """Instructions of a loop over tiles, for the 16 bytes that a thread loads at a time: memory
    takes about 104 issue slots for them (`packed_gluon.py`). In PTX, where constants are
    instructions too.
    """
    plan = LinearPlan("fma", block_m=16, block_k=512, stages=2)
    ptx = compiled(name, plan).asm["ptx"]
    label, loop = re.search(r"(\$L__BB0_\d+):(.*?bra\s+\1;)", ptx, re.DOTALL).groups()
    lines = [line for line in loop.splitlines() if re.match(r"\s*(@!?%p\d+ )?[a-z].*;", line)]
    instructions = [line for line in lines if not re.match(r"\s*(mov|\.reg)", line)]
    bits = FORMATS[name][0].bits
    loads = plan.block_m * plan.block_k * bits // 8 // (16 * 32 * plan.warps)
    assert len(instructions) / loads <= most, f"{label}: {len(instructions)} for {loads} loads"


# What a GPU does.


@gpu
@settings(deadline=None, max_examples=examples(20, 60))
@given(
    name=st.sampled_from(sorted(FORMATS)),
    kind=st.sampled_from(["store", "swiglu", "residual"]),
    plan=st.sampled_from([FMA._replace(family="dot"), SPLIT, DOT, DOT._replace(warps=8)]),
    lanes=st.integers(1, MAX_LANES),
    outputs=st.integers(1, 150),
    eighths=st.integers(1, 90),
    dtype=st.sampled_from([FP16, BF16]),
    pdl=st.booleans(),
    padded=st.integers(0, 63),
)
def test_a_gpu_matches_the_reference(
    make_linear_case,
    assert_products_close,
    name,
    kind,
    plan,
    lanes,
    outputs,
    eighths,
    dtype,
    pdl,
    padded,
):
    M, K = 2 * outputs if kind == "swiglu" else outputs, 8 * eighths
    padding = (padded,) if padded < lanes else ()
    options = {"device": "cuda", "padded": padding, "pdl": pdl}
    close = assert_products_close
    check(make_linear_case, close, name, kind, lanes, M, K, plan, dtype, **options)


@gpu
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("plan", [FMA._replace(family="dot"), SPLIT, DOT])
def test_a_gpu_gives_the_same_bits_at_every_number_of_lanes(
    make_linear_case, assert_lanes_keep_their_bits, name, plan
):
    case = make_linear_case(16, 200, 1024, BF16, device="cuda", groups=64, bias=True)
    weight = pack(random_quantised(name, 200, 1024))
    weight = PackedWeight(*(p.cuda() if isinstance(p, torch.Tensor) else p for p in weight))
    assert_lanes_keep_their_bits(
        case, lambda each: outputs_of(each, weight, plan), (1, 8, 9, 16, 17, 32, 64)
    )
