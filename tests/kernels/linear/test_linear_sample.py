"""`SampleTiles`: its token is the one that the sampler draws from the logits of `linear`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import LOGITS, SampleTiles, StoreLogits
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed, heuristic_plan
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample, sample_reference

# Triton's interpreter multiplies and rounds poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = float("inf"), float("nan")
LAST_ID = 2**31 - 1
FINITE = 1
STOP_IDS = 3
EPS = 1e-5

DOT = LinearPlan("dot", block_m=32, block_k=32, stages=2)
DOT_SPLIT = LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=2)
FMA = LinearPlan("fma", block_m=16, block_k=64, warps=2)

# Each program draws its noise: seconds for the interpreter.
EXAMPLES = examples(12, 40)


def make_params(slots, vocabulary, *, device="cpu", temperatures=(0.0, 0.7, 1.5), seed=0):
    """Every temperature in turn; stop ids within the vocabulary, at the edge and after it."""
    generator = torch.Generator().manual_seed(seed)
    stop_ids = torch.randint(-1, vocabulary + 1, (slots, STOP_IDS), generator=generator)
    params = SamplingTensors.neutral(slots)._replace(
        temperature=torch.tensor(temperatures).repeat(slots)[:slots],
        # The fast sampler looks at no filter.
        top_k=torch.full((slots,), 3, dtype=torch.int32),
        top_p=torch.full((slots,), NAN),
        min_p=torch.full((slots,), NAN),
        seed=torch.randint(-(2**63), 2**63 - 1, (slots,), generator=generator),
        stop_ids=stop_ids.int(),
        min_len=torch.randint(0, 40, (slots,), generator=generator).int(),
    )
    return SamplingTensors(*(tensor.to(device) for tensor in params))


def without_filters(params):
    neutral = SamplingTensors.neutral(params.seed.numel(), device=params.seed.device)
    kept = ("temperature", "seed", "stop_ids", "min_len")
    return neutral._replace(**{name: getattr(params, name) for name in kept})


def positions(lanes, device="cpu"):
    """Below and above the `min_len` of `make_params`; a lane's own."""
    return (torch.arange(lanes, dtype=torch.int32) * 7 % 40).to(device)


def counters(plan, vocabulary, device):
    needed = 0 if plan is None else arrivals_needed(plan, vocabulary)
    return torch.zeros(needed, dtype=torch.int32, device=device)


def tokens(case, position, params, plan=None, **options):
    """Tokens of the live lanes, reduced as a step's last kernel does it."""
    arrivals = counters(plan, case.weight.shape[0], case.x.device)
    call = case.call(eps=EPS, plan=plan, launch=Launch(arrivals=arrivals))
    best, health = linear(call, SampleTiles(position, params, **options))
    assert best.dtype == torch.int64 and health.dtype == torch.int32
    assert best.shape == health.shape and best.shape[0] == case.x.shape[0]
    assert not arrivals.any()
    token = LAST_ID - (best.amax(1) & LAST_ID)
    token[health.amax(1) != FINITE] = -1
    return token[case.slot >= 0].tolist()


def logits_of(case, plan=None, cap=0.0):
    arrivals = counters(plan, case.weight.shape[0], case.x.device)
    call = case.call(eps=EPS, plan=plan, launch=Launch(arrivals=arrivals))
    return linear(call, StoreLogits(cap=cap))


def expected_tokens(case, position, params, plan=None, cap=0.0):
    """What the sampler draws from the logits of `linear` with the same plan and cap."""
    logits = logits_of(case, plan, cap)
    # A GPU's logarithm differs from numpy's by some ulps.
    draw = sample if case.x.is_cuda else sample_reference
    token = draw(logits, case.slot, position, without_filters(params))
    return token[case.slot >= 0].tolist()


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    plan=st.sampled_from([None, DOT, DOT_SPLIT, FMA, LinearPlan("fma", 8, 256, warps=2)]),
    lanes=st.integers(1, 64),
    vocabulary=st.integers(1, 100) | st.sampled_from([32, 64, 128]),
    K=st.integers(1, 100) | st.sampled_from([32, 64]),
    dtype=st.integers(0, 2),
    groups=st.sampled_from([0, 1, 5]),
    cap=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_token_is_that_of_the_logits(
    device, dtypes, make_linear_case, plan, lanes, vocabulary, K, dtype, groups, cap, seed, data
):
    lanes = 1 + lanes % 2 if plan and plan.family == "fma" else lanes
    padded = tuple(data.draw(st.sets(st.integers(0, lanes - 1))))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_linear_case(
        lanes, vocabulary, K, dtype, device=device, groups=groups, padded=padded, seed=seed
    )
    params = make_params(lanes, vocabulary, device=device, seed=seed)
    position = positions(lanes, device)
    wanted = expected_tokens(case, position, params, plan, cap)
    assert tokens(case, position, params, plan, cap=cap) == wanted


@pytest.mark.parametrize("plan", [None, DOT, DOT_SPLIT, FMA])
def test_a_soft_cap_of_logits(device, make_linear_case, plan):
    """Its bits are the same in any launch, and it changes what is drawn."""
    lanes = 2 if plan and plan.family == "fma" else 8
    case = make_linear_case(
        lanes, 70, 40, torch.float32, device=device, groups=5, padded=(1,), seed=4
    )
    plain, live = logits_of(case, plan), case.slot >= 0
    case.x[1], case.squares[:, 1] = float("nan"), float("inf")
    for cap in (0.4, 30.0, 1e6):
        capped = logits_of(case, plan, cap)
        wanted = cap * torch.tanh(plain[live].double() / cap)
        torch.testing.assert_close(capped[live].double(), wanted, rtol=2e-6, atol=3e-7 * cap)
    params = make_params(lanes, 70, device=device, temperatures=(0.6,))
    position, few = positions(lanes, device), logits_of(case, plan, 0.4)
    assert few[live].abs().max() <= 0.4 < plain[live].abs().max()
    drawn = tokens(case, position, params, plan, cap=0.4)
    assert drawn == expected_tokens(case, position, params, plan, cap=0.4)
    assert drawn != tokens(case, position, params, plan)


@pytest.mark.parametrize("plan", [None, DOT, DOT_SPLIT, FMA])
@pytest.mark.parametrize("ahead", [2, 5])
def test_noise_and_stop_ids_are_those_of_the_position_ahead(device, make_linear_case, plan, ahead):
    lanes = 2 if plan and plan.family == "fma" else 8
    case = make_linear_case(lanes, 70, 40, torch.float32, device=device, seed=4)
    params = make_params(lanes, 70, device=device, temperatures=(3.0, 0.0, 9.0))
    position = positions(lanes, device)
    wanted = expected_tokens(case, position + (ahead - 1), params, plan)
    assert tokens(case, position, params, plan, ahead=ahead) == wanted
    assert tokens(case, position, params, plan) != wanted


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    plan=st.sampled_from([None, DOT, DOT_SPLIT, FMA]),
    ids=st.sets(st.integers(0, 199), min_size=1, max_size=90),
    seed=st.integers(0, 1000),
)
def test_a_part_of_the_vocabulary(device, make_linear_case, plan, ids, seed):
    """Tokens are those of logits over the whole one, with -inf for the rest of it."""
    case = make_linear_case(2, len(ids), 40, torch.float32, device=device, seed=seed)
    params = make_params(2, 200, device=device, temperatures=(0.0, 2.0), seed=seed)
    params.stop_ids[:, 0] = min(ids)
    position = positions(2, device)
    arrivals = counters(plan, len(ids), device)
    part = linear(case.call(eps=EPS, plan=plan, launch=Launch(arrivals=arrivals)), LOGITS)
    token_ids = torch.tensor(sorted(ids), device=device)
    logits = part.new_full((2, 200), -INF).index_copy_(1, token_ids, part)
    draw = sample if case.x.is_cuda else sample_reference
    wanted = draw(logits, case.slot, position, without_filters(params)).tolist()
    assert tokens(case, position, params, plan, token_ids=token_ids.int()) == wanted


@pytest.mark.parametrize("plan", [DOT, DOT_SPLIT, FMA])
def test_slots_and_lanes_are_different_things(device, make_linear_case, plan):
    """A lane's parameters are its slot's."""
    case = make_linear_case(2, 70, 40, torch.float32, device=device, seed=3)
    case.slot.copy_(torch.tensor([5, 2]))
    params = make_params(6, 70, device=device, temperatures=(0.0, 1.0, 0.5, 2.0))
    position = positions(2, device)
    assert tokens(case, position, params, plan) == expected_tokens(case, position, params, plan)


@pytest.mark.parametrize("plan", [None, DOT, FMA])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_below_min_len(device, make_linear_case, plan, temperature):
    """Two lanes alike, whose best token is a stop id: the one is too short for it."""
    case = make_linear_case(2, 50, 32, torch.float32, device=device)
    case.x[1] = case.x[0]
    case.weight[[11, 49]] = 10 * case.x[0]
    params = make_params(2, 50, device=device, temperatures=(temperature,))
    params.seed.fill_(1)
    params.stop_ids.copy_(torch.tensor([11, 49, -1]))
    params.min_len.copy_(torch.tensor([8, 7]))
    # The sampled token sits at 7: one short of the first min_len, and no longer of the second.
    position = torch.full((2,), 6, dtype=torch.int32, device=device)
    short, long = tokens(case, position, params, plan)
    assert short not in (11, 49) and long in (11, 49)
    assert [short, long] == expected_tokens(case, position, params, plan)


@pytest.mark.parametrize("plan", [None, DOT, DOT_SPLIT, FMA])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ill_logits_have_no_token(device, make_linear_case, plan, temperature):
    """NaN anywhere, or nothing finite: -1. A NaN at a masked stop id is none."""
    case = make_linear_case(2, 70, 40, torch.float32, device=device)
    params = make_params(2, 70, device=device, temperatures=(temperature,))
    params.stop_ids.copy_(torch.tensor([69, -1, 70]))
    params.min_len.copy_(torch.tensor([100, 0]))
    position = positions(2, device)

    case.weight[69] = NAN
    healthy, ill = tokens(case, position, params, plan)
    assert ill == -1
    assert 0 <= healthy < 69
    assert [healthy, ill] == expected_tokens(case, position, params, plan)

    case.weight[69] = 0
    case.x[0] = NAN
    ill, healthy = tokens(case, position, params, plan)
    assert ill == -1 and 0 <= healthy < 70

    # Products of -inf with positive weights.
    case.x[0] = -INF
    case.weight.abs_().add_(0.1)
    nothing_finite, healthy = tokens(case, position, params, plan)
    assert nothing_finite == -1 and 0 <= healthy < 70


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    plan=st.sampled_from([DOT, DOT_SPLIT, FMA]),
    lanes=st.sampled_from([1, 2, 8, 17, 40]),
    poison=st.sampled_from([NAN, INF, 6e4]),
    data=st.data(),
)
def test_padded_lanes_are_not_read(device, dtypes, make_linear_case, plan, lanes, poison, data):
    lanes = min(lanes, 2) if plan.family == "fma" else lanes
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1)))
    case = make_linear_case(lanes, 70, 80, dtypes[-1], device=device, groups=5, padded=padded)
    params = make_params(lanes, 70, device=device)
    position = positions(lanes, device)
    clean = tokens(case, position, params, plan)
    case.x[padded] = poison
    case.squares[:, padded] = poison
    position[padded] = LAST_ID
    assert tokens(case, position, params, plan) == clean


@pytest.mark.parametrize("family", ["dot", "fma"])
@pytest.mark.parametrize("vocabulary, K", [(128256, 2048), (151936, 1024), (50257, 768)])
def test_large_vocabularies(device, make_linear_case, vocabulary, K, family):
    """On a GPU: the sampler's token, at every lane count."""
    if device != "cuda":
        pytest.skip("too large for the interpreter")
    plan = heuristic_plan("sample", vocabulary, K, torch.bfloat16, family)
    for lanes in (1, 2) if family == "fma" else (1, 8, 17, 64):
        case = make_linear_case(lanes, vocabulary, K, torch.bfloat16, device=device, groups=64)
        params = make_params(lanes, vocabulary, device=device)
        position = positions(lanes, device)
        assert tokens(case, position, params, plan) == expected_tokens(case, position, params, plan)


@pytest.mark.parametrize("plan", [None, DOT, FMA])
def test_dispatches_to_the_reference_on_a_cpu(make_linear_case, plan):
    if INTERPRETED:
        pytest.skip("the interpreter runs the kernel")
    case = make_linear_case(2, 50, 30, torch.bfloat16, groups=2, padded=(0,))
    params, position = make_params(2, 50), positions(2)
    logits = linear_reference(case.call(eps=EPS), LOGITS)
    expected = sample_reference(logits, case.slot, position, without_filters(params))
    assert tokens(case, position, params, plan) == expected[1:].tolist()


def operands() -> dict[str, object]:
    return {
        "x_NK": torch.zeros(2, 16),
        "weight_MK": torch.zeros(8, 16),
        "slot_N": torch.zeros(2, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "params": make_params(2, 8),
    }


def sample_with(**changes):
    given = {**operands(), **changes}
    names = ("position_N", "params", "token_ids")
    options = {name: given.pop(name) for name in names if name in given}
    return linear(LinearCall(**given), SampleTiles(**options))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"position_N": torch.zeros(3).int()}, r"position must be a dense \[2\], not \(3,\)"),
        ({"position_N": torch.zeros(2).long()}, "position must be int32, not torch.int64"),
        ({"token_ids": torch.arange(8)}, r"token_ids must be a dense torch.int32 \[8\].*int64"),
        ({"token_ids": torch.arange(7).int()}, r"token_ids must be a dense torch.int32 \[8\]"),
        ({"squares_TN": torch.zeros(4, 3)}, r"float32 \[T, 2\], not torch.float32 \(4, 3\)"),
        ({"x_NK": torch.zeros(2, 15)}, "K=15 input features, the weight 16"),
        ({"slot_N": torch.zeros(2).long()}, "slot_N must be int32, not torch.int64"),
        (
            {
                "x_NK": torch.zeros(3, 16),
                "slot_N": torch.zeros(3).int(),
                "position_N": torch.zeros(3).int(),
                "plan": FMA,
            },
            "the fma family takes 1 to 2 lanes, not 3",
        ),
        ({"plan": FMA._replace(splits=2)}, r"does not split K: LinearPlan\(family='fma'.*splits=2"),
        ({"plan": DOT._replace(family="wgmma")}, "row family 'wgmma' is none of fma, dot"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        sample_with(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": torch.zeros(3).half()}, "temperature must be a dense torch.float32.*16"),
        ({"top_k": torch.zeros(3).long()}, "top_k must be int32, not torch.int64"),
        ({"top_p": torch.zeros(2)}, r"top_p must be a dense torch.float32 \[3\].*\(2,\)"),
        ({"seed": torch.zeros(3).int()}, r"seed must be a dense torch.int64 \[3\].*int32 \(3,\)"),
        ({"stop_ids": torch.zeros(4, 1).int()}, r"int32 \[3, E\], not torch.int32 \(4, 1\)"),
        ({"stop_ids": torch.zeros(2, 3).int().t()}, r"must be a dense int32 \[3, E\]"),
        ({"min_len": torch.zeros(6).int()[::2]}, r"min_len must be a dense \[3\]"),
    ],
)
def test_bad_parameters_are_errors_with_numbers(changes, message):
    params = make_params(3, 8)._replace(**changes)
    with pytest.raises(ValueError, match=message):
        sample_with(params=params)


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
    position, params = positions(2, device), make_params(2, 70, device=device)
    call = case.call(plan=DOT_SPLIT, launch=Launch(arrivals=arrivals))
    with pytest.raises(ValueError, match=message):
        linear(call, SampleTiles(position, params))
