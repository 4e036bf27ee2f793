"""`linear`: against its reference, against itself at other lane counts, and poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples, some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import MAX_LANES, LinearCall
from graphengine.kernels.linear.epilogues import STORE, Store, StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed, heuristic_plan
from graphengine.kernels.linear.reference import REFERENCE_ROWS, linear_reference
from launches.split_plans import SPLIT_PLANS

# Triton's interpreter multiplies and rounds poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SENTINEL = 77.0
EPS = 1e-5

DOT = LinearPlan("dot", block_m=32, block_k=32, stages=2)
DOT_SPLIT = LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=2)
FMA = LinearPlan("fma", block_m=4, block_k=64, warps=2)
PLANS = [DOT, DOT_SPLIT, FMA]

# Llama 3.2 1B and Llama 3.1 8B: M, K of qkv and gate-up; the 1B's lm_head.
LLAMA_WEIGHTS = [
    ("store", 3072, 2048),
    ("swiglu", 16384, 2048),
    ("store", 6144, 4096),
    ("swiglu", 28672, 4096),
    ("store", 128256, 2048),
]


def epilogue(case, *, swiglu=False, dtype=None):
    """Where a case's product is stored; the output is filled with the sentinel."""
    lanes, M = case.x.shape[0], case.weight.shape[0]
    dtype = dtype or case.x.dtype
    shape = (lanes, M // 2 if swiglu else M)
    out = torch.full(shape, SENTINEL, dtype=dtype, device=case.x.device)
    return (StoreSwiglu if swiglu else Store)(dtype=dtype, out=out)


def run(case, plan=None, *, launch=None, **options):
    """`linear` with counters of its own, which it must leave at zero."""
    needed = 0 if plan is None else arrivals_needed(plan, case.weight.shape[0])
    arrivals = torch.zeros(needed, dtype=torch.int32, device=case.x.device)
    call = case.call(eps=EPS, plan=plan, launch=launch or Launch(arrivals=arrivals))
    store = epilogue(case, **options)
    assert linear(call, store) is store.out
    assert not arrivals.any()
    return store.out


def reference(case, **options):
    return linear_reference(case.call(eps=EPS), epilogue(case, **options))


@settings(deadline=None, max_examples=examples(10, 30))
@given(
    lanes=st.integers(1, MAX_LANES),
    outputs=st.integers(1, 80),
    K=st.integers(1, 300) | st.sampled_from([16, 64, 128, 256]),
    dtype=st.integers(0, 2),
    swiglu=st.booleans(),
    bias=st.booleans(),
    groups=st.sampled_from([0, 1, 5, 64]),
    wide_output=st.booleans(),
    data=st.data(),
)
def test_matches_reference(
    device,
    dtypes,
    make_linear_case,
    assert_products_close,
    lanes,
    outputs,
    K,
    dtype,
    swiglu,
    bias,
    groups,
    wide_output,
    data,
):
    """With the default plan, which is of the family `dot`. Padded lanes hold the sentinel."""
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    dtype = dtypes[dtype % len(dtypes)]
    M = 2 * outputs if swiglu else outputs
    case = make_linear_case(
        lanes, M, K, dtype, device=device, groups=groups, bias=bias, padded=tuple(padded)
    )
    options = {"swiglu": swiglu, "dtype": torch.float32 if wide_output else None}
    assert_products_close(run(case, **options), reference(case, **options), dtype)


@settings(deadline=None, max_examples=examples(10, 30))
@given(
    lanes=st.integers(1, 2),
    outputs=st.integers(1, 40),
    K=st.integers(1, 300) | st.sampled_from([16, 64, 128, 256]),
    block_m=st.sampled_from([2, 4, 16]),
    block_k=st.sampled_from([16, 64, 256]),
    dtype=st.integers(0, 2),
    swiglu=st.booleans(),
    bias=st.booleans(),
    groups=st.sampled_from([0, 1, 5, 64]),
    wide_output=st.booleans(),
    padded=st.integers(0, 2),
)
@example(2, 9, 300, 4, 64, 0, True, True, 5, True, 2)  # Several tiles, the last one ragged.
def test_fma_matches_reference(
    device,
    dtypes,
    make_linear_case,
    assert_products_close,
    lanes,
    outputs,
    K,
    block_m,
    block_k,
    dtype,
    swiglu,
    bias,
    groups,
    wide_output,
    padded,
):
    dtype = dtypes[dtype % len(dtypes)]
    M = 2 * outputs if swiglu else outputs
    padded = (padded,) if padded < lanes else ()
    case = make_linear_case(
        lanes, M, K, dtype, device=device, groups=groups, bias=bias, padded=padded
    )
    options = {"swiglu": swiglu, "dtype": torch.float32 if wide_output else None}
    actual = run(case, LinearPlan("fma", block_m, block_k, warps=2), **options)
    assert_products_close(actual, reference(case, **options), dtype)


BOTH = (False, True)
WIDE_TILES = (128, LinearPlan("dot", block_m=64, block_k=64, splits=2, stages=3))
PLANS_OF_SPLITS = [SPLIT_PLANS[0], WIDE_TILES, *SPLIT_PLANS[1:]]


# Each plan with and without a SwiGLU, by turns for few and many lanes.
@pytest.mark.parametrize(
    "K, plan, lanes, swiglu",
    some_of(
        [(*each, n, swiglu) for each in PLANS_OF_SPLITS for n in (3, 19, 40) for swiglu in BOTH],
        *range(0, 42, 4),
        *range(1, 42, 4),
    ),
)
def test_split_k(device, dtypes, make_linear_case, assert_products_close, swiglu, lanes, K, plan):
    for dtype in dtypes:
        case = make_linear_case(
            lanes, 70, K, dtype, device=device, groups=3, bias=True, padded=(1,)
        )
        assert_products_close(run(case, plan, swiglu=swiglu), reference(case, swiglu=swiglu), dtype)


def test_launches_share_their_counters(device, make_linear_case):
    """Every launch leaves the counters as it found them, whatever the next one's shape."""
    splits = LinearPlan("dot", block_m=32, block_k=32, splits=4, stages=2)
    counters = torch.zeros(arrivals_needed(splits, 200), dtype=torch.int32, device=device)
    for lanes, M, K in [(3, 200, 128), (40, 70, 130), (3, 200, 128)]:
        case = make_linear_case(lanes, M, K, torch.float32, device=device)
        own = run(case, splits)
        for _ in range(2):
            assert torch.equal(run(case, splits, launch=Launch(arrivals=counters)), own)
            assert not counters.any()


@pytest.mark.parametrize("plan", PLANS)
def test_strided_operands(device, make_linear_case, plan):
    """Rows may lie apart: a slice of a wider matrix, as a fused projection leaves it."""
    case = make_linear_case(2, 48, 64, torch.float16, device=device)
    x, weight = torch.zeros(2, 100).to(case.x), torch.zeros(48, 80).to(case.weight)
    x[:, :64], weight[:, 16:] = case.x, case.weight
    out = torch.zeros(2, 60, dtype=torch.float16, device=device)
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    call = case.call(x_NK=x[:, :64], weight_MK=weight[:, 16:], plan=plan)
    linear(call._replace(launch=Launch(arrivals=counters)), Store(out=out[:, :48]))
    assert torch.equal(out[:, :48], run(case, plan))
    assert (out[:, 48:] == 0).all()


@settings(deadline=None, max_examples=examples(8, 16))
@given(
    lanes=st.sampled_from([1, 2, 8, 16, 17, 32, 64]),
    swiglu=st.booleans(),
    plan=st.sampled_from([DOT, LinearPlan("dot", 32, 32, splits=3, stages=2), FMA]),
    poison=st.sampled_from([float("nan"), float("inf"), 6e4]),
    data=st.data(),
)
def test_padded_lanes_are_neither_read_nor_written(
    device, dtypes, make_linear_case, lanes, swiglu, plan, poison, data
):
    lanes = min(lanes, 2) if plan.family == "fma" else lanes
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1)))
    case = make_linear_case(
        lanes, 48, 80, dtypes[-1], device=device, groups=5, bias=True, padded=padded
    )
    clean = run(case, plan, swiglu=swiglu)
    case.x[padded] = poison
    case.squares[:, padded] = poison
    poisoned = run(case, plan, swiglu=swiglu)
    assert torch.equal(clean, poisoned)
    assert (poisoned[padded] == SENTINEL).all()


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("plan", [DOT, DOT_SPLIT])
def test_bits_do_not_depend_on_company(
    device, dtypes, make_linear_case, assert_dot_lanes_keep_their_bits, plan, swiglu
):
    for dtype in dtypes:
        case = make_linear_case(16, 66, 100, dtype, device=device, groups=70, bias=True)
        assert_dot_lanes_keep_their_bits(case, lambda each: (run(each, plan, swiglu=swiglu),))


@pytest.mark.parametrize("swiglu", [False, True])
def test_fma_bits_do_not_depend_on_company(
    device, dtypes, make_linear_case, assert_lanes_keep_their_bits, swiglu
):
    for dtype in dtypes:
        case = make_linear_case(3, 22, 100, dtype, device=device, groups=70, bias=True)
        assert_lanes_keep_their_bits(
            case, lambda each: (run(each, FMA, swiglu=swiglu),), (1, 2, 2, 2)
        )


@pytest.mark.parametrize("groups", [3, 64, 200])
def test_sum_of_squares_does_not_depend_on_company(
    device, make_linear_case, assert_lanes_keep_their_bits, groups
):
    """The product is exact here, so the outputs are the inverse RMS, in the interpreter as well."""
    case = make_linear_case(16, 32, 16, torch.float32, device=device, groups=groups)
    case.x.zero_()
    case.x[:, 0] = 1
    case.weight.fill_(1)
    assert_lanes_keep_their_bits(case, lambda each: (run(each, DOT),), (1, 16, 17, 40))


@pytest.mark.parametrize("family", ["dot", "fma"])
@pytest.mark.parametrize(
    "kind, M, K, dtype",
    [
        *((kind, M, K, torch.bfloat16) for kind, M, K in LLAMA_WEIGHTS),
        # Off the path without masks: K, then M.
        ("swiglu", 1002, 1003, torch.bfloat16),
        ("store", 9001, 1024, torch.bfloat16),
        ("store", 2048, 2048, torch.float16),
        ("swiglu", 2048, 2048, torch.float32),
    ],
)
def test_large_weights(
    device,
    make_linear_case,
    assert_products_close,
    assert_lanes_keep_their_bits,
    kind,
    M,
    K,
    dtype,
    family,
):
    """On a GPU: right, and the same bits at every lane count, at the sizes the tiles are for."""
    if device != "cuda":
        pytest.skip("too large for the interpreter")
    plan = heuristic_plan(kind, M, K, dtype, family)
    swiglu = kind == "swiglu"
    lanes = 2 if family == "fma" else 8
    case = make_linear_case(lanes, M, K, dtype, device=device, groups=64, bias=True)
    assert_products_close(run(case, plan, swiglu=swiglu), reference(case, swiglu=swiglu), dtype)
    assert_lanes_keep_their_bits(
        case,
        lambda each: (run(each, plan, swiglu=swiglu),),
        (1, 2, 2) if family == "fma" else (1, 8, 16, 17, 32, 64),
    )


@pytest.mark.parametrize("plan", [LinearPlan("dot", 64, 128, stages=3), LinearPlan("fma", 4, 1024)])
def test_weight_beyond_int32_offsets(device, make_linear_case, assert_products_close, plan):
    if device != "cuda":
        pytest.skip("needs 4.5 GB on a GPU")
    M, K = 2_200_000, 1024
    assert M * K > 2**31
    weight = torch.empty(M, K, dtype=torch.bfloat16, device=device).normal_(std=K**-0.5)
    case = make_linear_case(2, 64, K, torch.bfloat16, device=device)
    last = linear(case.call(weight_MK=weight, plan=plan), STORE)[:, -64:]
    expected = linear_reference(case.call(weight_MK=weight[-64:].clone()), STORE)
    assert_products_close(last, expected, torch.bfloat16)


@pytest.mark.parametrize("family", ["dot", "fma"])
@pytest.mark.parametrize("M, K", [(3072, 2048), (2048, 8192)])
def test_capture_holds_kernels_that_replay_the_same_bits(device, make_linear_case, M, K, family):
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    lanes = 2 if family == "fma" else 8
    plan = heuristic_plan("store", M, K, torch.bfloat16, family)
    case = make_linear_case(lanes, M, K, torch.bfloat16, device=device, groups=64, padded=(1,))
    expected = run(case, plan)
    store = epilogue(case)
    counters = torch.zeros(arrivals_needed(plan, M), dtype=torch.int32, device=device)
    call = case.call(eps=EPS, plan=plan, launch=Launch(arrivals=counters))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(call, store)
    for _ in range(3):
        store.out.fill_(SENTINEL)
        graph.replay()
        assert torch.equal(store.out, expected)


def test_reference_matches_float64(make_linear_case):
    case = make_linear_case(7, 30, 50, torch.float32, groups=4, bias=True)
    rms = (case.squares.double().sum(0) / 50 + EPS).sqrt()
    wide = case.x.double() @ case.weight.double().T / rms[:, None] + case.bias.double()
    torch.testing.assert_close(reference(case).double(), wide, rtol=1e-5, atol=1e-5)

    gate, up = wide.chunk(2, dim=1)
    wide = torch.nn.functional.silu(gate) * up
    actual = reference(case, swiglu=True).double()
    torch.testing.assert_close(actual, wide, rtol=1e-5, atol=1e-5)


def test_reference_of_a_scaled_stream_is_a_linear_of_its_norm(make_linear_case):
    """What `Residual` promises: W (g * x) / rms(x) = W rms_norm(x, g)."""
    case = make_linear_case(5, 24, 40, torch.float64)
    x, weight = case.x, case.weight
    norm = torch.randn(40, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (40,), norm, eps=EPS) @ weight.T
    squares = torch.stack([part.square().sum(1).float() for part in x.split(15, dim=1)])
    call = LinearCall((x * norm).float(), weight.float(), case.slot, squares, EPS)
    actual = linear_reference(call, STORE)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@settings(deadline=None, max_examples=examples(15, 45))
@given(
    lanes=st.integers(1, 16),
    M=st.integers(1, 300) | st.sampled_from([64, 128, 512, 1024, 4096]),
    K=st.integers(1, 300) | st.sampled_from([64, 128, 512, 1024, 2048]),
    swiglu=st.booleans(),
    groups=st.sampled_from([0, 1, 7]),
    num_threads=st.sampled_from([1, 2]),
)
@example(lanes=16, M=1, K=1, swiglu=False, groups=0, num_threads=2)
@example(lanes=16, M=3 * 257, K=1025, swiglu=False, groups=3, num_threads=2)
@example(lanes=13, M=2 * 1000, K=333, swiglu=True, groups=3, num_threads=2)
@example(lanes=5, M=4096, K=4096, swiglu=False, groups=1, num_threads=1)
def test_reference_bits_do_not_depend_on_company(
    make_linear_case, assert_lanes_keep_their_bits, lanes, M, K, swiglu, groups, num_threads
):
    """A BLAS picks its kernel by the shape; elementwise loops treat an array's tail apart."""
    M += M % 2 if swiglu else 0
    case = make_linear_case(lanes, M, K, torch.float32, groups=groups, bias=True)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_lanes_keep_their_bits(
            case,
            lambda each: (reference(each, swiglu=swiglu),),
            (lanes, REFERENCE_ROWS, 16, 33),
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_dispatches_to_the_reference_on_a_cpu(make_linear_case, plan):
    if INTERPRETED:
        pytest.skip("the interpreter runs the kernel")
    case = make_linear_case(2, 20, 30, torch.bfloat16, groups=2, bias=True, padded=(0,))
    assert torch.equal(run(case, plan, swiglu=True), reference(case, swiglu=True))


def operands() -> dict[str, object]:
    return {
        "x_NK": torch.zeros(2, 16),
        "weight_MK": torch.zeros(8, 16),
        "slot_N": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x_NK": torch.zeros(65, 16), "slot_N": torch.zeros(65).int()}, "1 to 64 lanes, not 65"),
        ({"x_NK": torch.zeros(0, 16), "slot_N": torch.zeros(0).int()}, r"\(0, 16\)"),
        ({"x_NK": torch.zeros(2, 15)}, "K=15 input features, the weight 16"),
        ({"x_NK": torch.zeros(2, 16).half()}, "float16, the weight torch.float32"),
        ({"x_NK": torch.zeros(16, 2).t()}, r"dense rows.*strides \(1, 2\)"),
        ({"x_NK": torch.zeros(16)}, r"\(16,\)"),
        ({"weight_MK": torch.zeros(8, 16).int()}, "weight_MK is torch.int32"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
        ({"slot_N": torch.zeros(2).long()}, "slot_N must be int32, not torch.int64"),
        ({"squares_TN": torch.zeros(4, 3)}, r"float32 \[T, 2\], not torch.float32 \(4, 3\)"),
        ({"squares_TN": torch.zeros(2)}, r"float32 \[T, 2\], not torch.float32 \(2,\)"),
        ({"squares_TN": torch.zeros(4, 2).half()}, r"\[T, 2\], not torch.float16 \(4, 2\)"),
        ({"squares_TN": torch.zeros(2, 4).t()}, r"must be a dense float32 \[T, 2\]"),
        ({"bias": torch.zeros(7)}, r"bias.*\[8\].*\(7,\)"),
        ({"bias": torch.zeros(8).half()}, "bias must be a dense torch.float32.*float16"),
        (
            {"x_NK": torch.zeros(3, 16), "slot_N": torch.zeros(3).int(), "plan": FMA},
            "the fma family takes 1 to 2 lanes, not 3",
        ),
        ({"plan": FMA._replace(splits=2)}, r"does not split K: LinearPlan\(family='fma'.*splits=2"),
        ({"plan": DOT._replace(family="wgmma")}, "row family 'wgmma' is none of fma, dot"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        linear(LinearCall(**{**operands(), **changes}), STORE)


@pytest.mark.parametrize(
    "rows, epilogue, message",
    [
        (7, StoreSwiglu(), "not 7 rows"),
        (8, Store(out=torch.zeros(2, 7)), r"\[2, 8\].*\[2, 7\]"),
        (8, StoreSwiglu(out=torch.zeros(2, 8)), r"\[2, 4\].*\[2, 8\]"),
        (8, Store(out=torch.zeros(2, 8).half()), "out must be torch.float32.*float16"),
        (8, Store(dtype=torch.int32), "out_dtype is torch.int32"),
        (8, StoreSwiglu(activation="relu"), "activation='relu' must be 'silu' or 'gelu_tanh'"),
    ],
)
def test_outputs_that_do_not_fit_are_errors(rows, epilogue, message):
    call = LinearCall(**{**operands(), "weight_MK": torch.zeros(rows, 16)})
    with pytest.raises(ValueError, match=message):
        linear(call, epilogue)


# 70 weight rows make three tiles, for two lane tiles each.
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
        linear(case.call(plan=DOT_SPLIT, launch=Launch(arrivals=arrivals)), STORE)
