"""`AddResidual`: the stream in place, what the next norm reads, and what sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples, some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import (
    LinearPlan,
    arrivals_needed,
    heuristic_plan,
    residual_groups,
)
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import (
    Residual,
    StreamCopy,
    add_to_residual_reference,
    new_residual,
)
from launches.split_plans import SPLIT_PLANS

# Triton's interpreter multiplies and rounds poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SENTINEL = 77.0
EPS = 1e-3

DOT = LinearPlan("dot", block_m=32, block_k=32, stages=2)
DOT_SPLIT = LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=2)
FMA = LinearPlan("fma", block_m=4, block_k=64, warps=2)
PLANS = [DOT, DOT_SPLIT, FMA]

# Attention output and down of Llama 3.2 1B and Llama 3.1 8B: M, K.
LLAMA_WEIGHTS = [(2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336)]


def stream_of(case):
    """A residual stream to write to: the case's values, and the sentinel where none is read."""
    return Residual(
        x=case.stream.clone(),
        scaled=torch.full_like(case.stream, SENTINEL, dtype=case.x.dtype),
        squares=torch.empty(0, device=case.x.device),
    )


def run(case, plan=None, kept=None, launch=None):
    """`linear` with counters of its own, which it must leave at zero."""
    needed = 0 if plan is None else arrivals_needed(plan, case.weight.shape[0])
    arrivals = torch.zeros(needed, dtype=torch.int32, device=case.x.device)
    before = stream_of(case)._replace(kept=kept)
    call = case.call(eps=EPS, plan=plan, launch=launch or Launch(arrivals=arrivals))
    after = linear(call, AddResidual(before, case.next_norm))
    assert after.x is before.x and after.scaled is before.scaled, "written in place"
    assert not arrivals.any()
    return after


def reference(case, plan):
    call = case.call(eps=EPS, plan=plan)
    return linear_reference(call, AddResidual(stream_of(case), case.next_norm))


def by_lane(residual):
    """What a launch leaves, with lanes first."""
    return residual.x, residual.scaled, residual.squares.t()


def assert_right(case, actual, plan, assert_products_close):
    groups = residual_groups(plan, case.weight.shape[0])
    expected = reference(case, plan)
    assert_products_close(actual.x, expected.x, case.x.dtype)
    live = case.slot >= 0
    # One rounding of the very x that was stored.
    scaled = (actual.x * case.next_norm.float()).to(case.x.dtype)
    assert torch.equal(actual.scaled[live], scaled[live])
    assert (actual.scaled[~live] == SENTINEL).all()
    assert torch.equal(actual.x[~live], case.stream[~live])

    squares = actual.x[live].double().square()
    assert actual.squares.shape == (groups, len(case.slot))
    actual_squares = actual.squares[:, live].double()
    torch.testing.assert_close(actual_squares.sum(0), squares.sum(1), rtol=1e-5, atol=1e-6)
    of_each = torch.stack([part.sum(1) for part in squares.split(plan.block_m, dim=1)])
    torch.testing.assert_close(actual_squares, of_each, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=examples(13, 40))
@given(
    plan=st.sampled_from(
        [
            DOT,
            LinearPlan("dot", block_m=16, block_k=16, splits=4, stages=2),
            LinearPlan("fma", block_m=2, block_k=256, warps=2),
            LinearPlan("fma", block_m=8, block_k=64, warps=2),
        ]
    ),
    lanes=st.integers(1, 64),
    M=st.integers(1, 80),
    K=st.integers(1, 300) | st.sampled_from([16, 64, 128, 256]),
    dtype=st.integers(0, 2),
    bias=st.booleans(),
    groups=st.sampled_from([0, 1, 70]),
    data=st.data(),
)
def test_matches_reference(
    device,
    dtypes,
    make_linear_case,
    assert_products_close,
    plan,
    lanes,
    M,
    K,
    dtype,
    bias,
    groups,
    data,
):
    """With and without a norm of the inputs."""
    lanes = 1 + lanes % 2 if plan.family == "fma" else lanes
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_linear_case(
        lanes, M, K, dtype, device=device, groups=groups, bias=bias, padded=tuple(padded)
    )
    assert_right(case, run(case, plan), plan, assert_products_close)


def test_default_plan(device, make_linear_case, assert_products_close):
    case = make_linear_case(5, 70, 100, torch.float32, device=device, padded=(2,))
    plan = heuristic_plan("residual", 70, 100, torch.float32, "dot")
    assert_right(case, run(case), plan, assert_products_close)


@pytest.mark.parametrize(
    "K, plan, lanes",
    some_of([(*each, lanes) for each in SPLIT_PLANS for lanes in (3, 19, 40)], *range(0, 18, 2)),
)
def test_split_k(device, dtypes, make_linear_case, assert_products_close, lanes, K, plan):
    for dtype in dtypes:
        case = make_linear_case(lanes, 70, K, dtype, device=device, bias=True, padded=(1,))
        assert_right(case, run(case, plan), plan, assert_products_close)


def test_launches_share_their_counters(device, make_linear_case):
    plan = LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=2)
    counters = torch.zeros(arrivals_needed(plan, 100), dtype=torch.int32, device=device)
    for lanes, M, K in [(3, 100, 128), (40, 70, 130), (3, 100, 128)]:
        case = make_linear_case(lanes, M, K, torch.float32, device=device)
        own = run(case, plan)
        for _ in range(2):
            shared = run(case, plan, launch=Launch(arrivals=counters))
            assert all(map(torch.equal, by_lane(shared), by_lane(own)))


@settings(deadline=None, max_examples=examples(8, 16))
@given(
    plan=st.sampled_from([DOT, LinearPlan("dot", 32, 32, splits=3, stages=2), FMA]),
    lanes=st.sampled_from([1, 2, 8, 16, 17, 32, 64]),
    poison=st.sampled_from([float("nan"), float("inf"), 6e4]),
    data=st.data(),
)
def test_padded_lanes_are_neither_read_nor_written(
    device, dtypes, make_linear_case, plan, lanes, poison, data
):
    lanes = min(lanes, 2) if plan.family == "fma" else lanes
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1)))
    live = [lane for lane in range(lanes) if lane not in padded]
    case = make_linear_case(lanes, 48, 80, dtypes[-1], device=device, bias=True, padded=padded)
    clean = run(case, plan)
    case.x[padded] = poison
    case.stream[padded] = poison
    poisoned = run(case, plan)
    for before, after in zip(by_lane(clean), by_lane(poisoned), strict=True):
        assert torch.equal(before[live], after[live])
    unwritten = poisoned.x[padded]
    assert torch.equal(unwritten.nan_to_num(), torch.full_like(unwritten, poison).nan_to_num())
    assert (poisoned.scaled[padded] == SENTINEL).all()


@pytest.mark.parametrize("plan", [DOT, DOT_SPLIT])
def test_bits_do_not_depend_on_company(
    device, dtypes, make_linear_case, assert_dot_lanes_keep_their_bits, plan
):
    for dtype in dtypes:
        case = make_linear_case(16, 66, 100, dtype, device=device, bias=True)
        assert_dot_lanes_keep_their_bits(case, lambda each: by_lane(run(each, plan)))


def test_fma_bits_do_not_depend_on_company(
    device, dtypes, make_linear_case, assert_lanes_keep_their_bits
):
    for dtype in dtypes:
        case = make_linear_case(3, 22, 100, dtype, device=device, bias=True)
        assert_lanes_keep_their_bits(case, lambda each: by_lane(run(each, FMA)), (1, 2, 2, 2))


def test_squares_do_not_depend_on_company(device, make_linear_case, assert_lanes_keep_their_bits):
    """The product is zero here, so the squares are of the stream, in the interpreter as well."""
    case = make_linear_case(16, 96, 16, torch.float32, device=device)
    case.x.zero_()
    assert_lanes_keep_their_bits(case, lambda each: by_lane(run(each, DOT)), (1, 16, 17, 40))


@pytest.mark.parametrize("family", ["dot", "fma"])
@pytest.mark.parametrize(
    "M, K, dtype",
    [
        *((M, K, torch.bfloat16) for M, K in LLAMA_WEIGHTS),
        # A split of 17.5 tiles.
        (1536, 8960, torch.bfloat16),
        (2048, 2048, torch.float16),
        (1024, 3072, torch.float32),
    ],
)
def test_large_weights(
    device,
    make_linear_case,
    assert_products_close,
    assert_lanes_keep_their_bits,
    M,
    K,
    dtype,
    family,
):
    """On a GPU: right, and the same bits at every lane count, at the sizes the tiles are for."""
    if device != "cuda":
        pytest.skip("too large for the interpreter")
    plan = heuristic_plan("residual", M, K, dtype, family)
    lanes = 2 if family == "fma" else 8
    case = make_linear_case(lanes, M, K, dtype, device=device, bias=True)
    assert_right(case, run(case, plan), plan, assert_products_close)
    counts = (1, 2, 2) if family == "fma" else (1, 8, 16, 17, 32, 64)
    assert_lanes_keep_their_bits(case, lambda each: by_lane(run(each, plan)), counts)


@pytest.mark.parametrize("groups", [1, 4, 7, 80, 100])
def test_reference_fills_any_number_of_groups(make_linear_case, groups):
    """Also more groups than columns, as a stream that `begin` wrote may have them."""
    case = make_linear_case(5, 80, 30, torch.float32, bias=True, padded=(3,))
    live = case.slot >= 0
    stream = stream_of(case)._replace(squares=torch.full((groups, 5), SENTINEL))
    y = case.x @ case.weight.T + case.bias
    after = add_to_residual_reference(y, case.slot, stream, case.next_norm)
    wide = case.stream.double() + case.x.double() @ case.weight.double().T + case.bias.double()
    torch.testing.assert_close(after.x[live].double(), wide[live], rtol=1e-5, atol=1e-5)
    total = after.squares[:, live].double().sum(0)
    torch.testing.assert_close(total, wide[live].square().sum(1), rtol=1e-5, atol=1e-5)
    assert (after.squares[:, 3] == SENTINEL).all()


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@settings(deadline=None, max_examples=examples(10, 25))
@given(
    lanes=st.integers(1, 16),
    M=st.integers(1, 300) | st.sampled_from([64, 1024, 4096]),
    K=st.integers(1, 300) | st.sampled_from([64, 128, 512]),
    num_threads=st.sampled_from([1, 2]),
)
@example(lanes=16, M=40000, K=16, num_threads=1)
@example(lanes=7, M=40000, K=16, num_threads=2)
def test_reference_bits_do_not_depend_on_company(
    make_linear_case, assert_lanes_keep_their_bits, lanes, M, K, num_threads
):
    case = make_linear_case(lanes, M, K, torch.float32, bias=True)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_lanes_keep_their_bits(
            case, lambda each: by_lane(reference(each, DOT)), (lanes, 4, 16, 33)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("plan", PLANS)
def test_dispatches_to_the_reference_on_a_cpu(make_linear_case, plan):
    if INTERPRETED:
        pytest.skip("the interpreter runs the kernel")
    case = make_linear_case(2, 20, 30, torch.bfloat16, bias=True, padded=(0,))
    expected = reference(case, plan)
    actual = run(case, plan)
    assert torch.equal(actual.x, expected.x)
    assert torch.equal(actual.scaled, expected.scaled)
    assert torch.equal(actual.squares[:, 1], expected.squares[:, 1])


def test_new_residual():
    stream = new_residual(3, 8, 5, dtype=torch.bfloat16, device="cpu")
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in stream[:3]]
    assert shapes == [((3, 8), torch.float32), ((3, 8), torch.bfloat16), ((5, 3), torch.float32)]


def test_the_next_norm_may_be_float32_beside_half_precision(make_linear_case, device, dtypes):
    """A norm that was scaled after it was loaded is: it is not rounded to the weight's dtype."""
    case = make_linear_case(3, 40, 64, dtypes[-1], device=device, padded=(1,))
    case = replace(case, next_norm=case.next_norm.float() / 3)
    plan = DOT
    after = run(case, plan)
    live = case.slot >= 0
    scaled = (after.x * case.next_norm).to(case.x.dtype)
    assert torch.equal(after.scaled[live], scaled[live])
    rounded = (after.x * case.next_norm.to(case.x.dtype).float()).to(case.x.dtype)
    assert not torch.equal(after.scaled[live], rounded[live])


def operands() -> dict[str, object]:
    return {
        "x_NK": torch.zeros(2, 16),
        "weight_MK": torch.zeros(8, 16),
        "slot_N": torch.zeros(2, dtype=torch.int32),
        "residual": new_residual(2, 8, 1, dtype=torch.float32, device="cpu"),
        "next_norm_M": torch.zeros(8),
    }


def add_with(residual, next_norm_M, **operands):
    return linear(LinearCall(**operands), AddResidual(residual, next_norm_M))


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"x": torch.zeros(2, 7)}, r"residual.x .*float32 \[2, 8\], not torch.float32 \[2, 7\]"),
        ({"x": torch.zeros(3, 8)}, r"residual.x .*float32 \[2, 8\], not torch.float32 \[3, 8\]"),
        ({"x": torch.zeros(2, 8).half()}, r"residual.x .*, not torch.float16 \[2, 8\]"),
        ({"x": torch.zeros(8, 2).t()}, "residual.x must be a dense torch.float32"),
        ({"scaled": torch.zeros(2, 7)}, r"residual.scaled .*\[2, 8\], not torch.float32 \[2, 7\]"),
        ({"scaled": torch.zeros(2, 8).half()}, r"residual.scaled .*float32.*torch.float16"),
        ({"scaled": torch.zeros(8, 2).t()}, "residual.scaled must be a dense torch.float32"),
    ],
)
def test_bad_streams_are_errors_with_numbers(tensors, message):
    changed = operands()
    changed["residual"] = changed["residual"]._replace(**tensors)
    with pytest.raises(ValueError, match=message):
        add_with(**changed)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"next_norm_M": torch.zeros(7)}, r"next_norm must be a dense torch.float32 \[8\], not"),
        ({"next_norm_M": torch.zeros(8).int()}, r"next_norm must be one of.*not torch.int32"),
        ({"x_NK": torch.zeros(2, 15)}, "K=15 input features, the weight 16"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
        ({"bias": torch.zeros(7)}, r"bias.*\[8\].*\(7,\)"),
        (
            {"x_NK": torch.zeros(3, 16), "slot_N": torch.zeros(3).int(), "plan": FMA},
            "the fma family takes 1 to 2 lanes, not 3",
        ),
        ({"plan": FMA._replace(splits=4)}, r"does not split K: LinearPlan\(family='fma'.*splits=4"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        add_with(**{**operands(), **changes})


@pytest.mark.parametrize(
    "arrivals, message",
    [
        (None, r"LinearPlan\(.*splits=2.* wants 6 dense int32 arrivals, not None"),
        (torch.zeros(5).int(), r"wants 6 dense int32 arrivals, not torch.int32 \[5\]"),
        (torch.zeros(6), r"wants 6 dense int32 arrivals, not torch.float32 \[6\]"),
    ],
)
def test_split_k_wants_counters(device, make_linear_case, arrivals, message):
    case = make_linear_case(2, 70, 64, torch.float32, device=device)
    arrivals = None if arrivals is None else arrivals.to(device)
    with pytest.raises(ValueError, match=message):
        run(case, DOT_SPLIT, launch=Launch(arrivals=arrivals))


@pytest.mark.parametrize("plan", PLANS, ids=["dot", "split", "fma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_stream_is_kept_beside(device, make_linear_case, plan, dtype):
    """Rounded once of the very x that was stored, in rows of any stride; nothing else changes."""
    lanes = 2 if plan is FMA else 5
    case = make_linear_case(lanes, 70, 100, dtype, device=device, groups=3, padded=(1,))
    wide = torch.full((lanes, 150), SENTINEL, dtype=dtype, device=device)
    kept = StreamCopy(wide[:, 30:100], 0.22)
    plain, keeping = run(case, plan), run(case, plan, kept=kept)
    for one, other in zip(by_lane(plain), by_lane(keeping), strict=True):
        live = case.slot >= 0
        assert torch.equal(one[live], other[live])
    live = case.slot >= 0
    assert torch.equal(kept.rows[live], (keeping.x[live] * 0.22).to(dtype))
    kept.rows[live] = SENTINEL
    assert (wide == SENTINEL).all(), "padded lanes and other columns"


def test_what_is_kept_must_fit(make_linear_case):
    case = make_linear_case(3, 70, 100, torch.float16)
    for rows in (torch.zeros(3, 70), torch.zeros(3, 71, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"out must be torch.float16 \[3, 70\]"):
            run(case, kept=StreamCopy(rows))
