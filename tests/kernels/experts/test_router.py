"""The router: against its reference and against transformers, in ties, poisoned, at any lane."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.router import Router, Routes, route, route_reference
from launches.compilation import launches_handed_to
from launches.emulation import run_launch

# Triton's interpreter computes padded experts with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SENTINEL = 77
NAN, INF = float("nan"), float("inf")

ROUTERS = {
    "qwen3": Router(top_k=3, normalised=True),
    "qwen2": Router(top_k=2),
    "deepseek-v3": Router(
        top_k=4, scores="sigmoid", normalised=True, scale=2.5, groups=4, top_groups=2
    ),
    "deepseek-v2": Router(top_k=4, scale=1.7, groups=4, top_groups=2, group_best=1),
    "gpt-oss": Router(top_k=4, scores="softmax_of_chosen"),
    # What LFM2 adds is less, and would not show.
    "lfm2": Router(top_k=3, scores="sigmoid", normalised=True, least_sum=0.5),
}


def live_slots(lanes, padded=(), device="cpu"):
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[list(padded)] = -1
    return slot.to(device)


def run(function, logits, slot, router, correction=None, factor=None):
    """Routes with the sentinel where nothing is written."""
    lanes = len(slot)
    if function is route_reference:
        out = Routes(
            slot.new_full((lanes, router.top_k), SENTINEL),
            logits.new_full((lanes, router.top_k), SENTINEL),
        )
        return route_reference(
            logits, slot, router, correction_E=correction, factor_E=factor, out=out
        )
    return route(logits, slot, router, correction_E=correction, factor_E=factor)


def random_logits(lanes, experts, seed, device="cpu", *, ties=False):
    generator = torch.Generator().manual_seed(seed)
    if ties:
        logits = torch.randint(-1, 2, (lanes, experts), generator=generator).float()
        # Both zeros are equal.
        return (logits * 0.5).to(device)
    return torch.randn(lanes, experts, generator=generator).to(device) * 2


@settings(deadline=None, max_examples=extent(25, 80))
@given(
    lanes=st.integers(1, 6),
    groups=st.sampled_from([1, 1, 2, 3, 8]),
    size=st.integers(2, 16) | st.sampled_from([64, 128, 512]),
    scores=st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"]),
    normalised=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    corrected=st.booleans(),
    factors=st.sampled_from([None, torch.float32, torch.bfloat16]),
    ties=st.booleans(),
    poison=st.sampled_from([0.0, NAN, INF]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_matches_reference(
    device, lanes, groups, size, scores, normalised, scale, corrected, factors, ties, poison, seed,
    data,
):  # fmt: skip
    experts = min(groups * size, 512 // groups * groups)
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(10, top_groups * (experts // groups))))
    group_best = data.draw(st.sampled_from([1, 2]))
    router = Router(
        top_k=top_k,
        scores=scores,
        normalised=normalised,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        group_best=group_best,
    )
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    logits = random_logits(lanes, experts, seed, device, ties=ties)
    logits[padded] = poison
    correction = None
    if corrected and scores != "softmax_of_chosen":
        correction = torch.linspace(-1, 1, experts, device=device)
        # Sums that tie, or nearly so, may round otherwise on another path.
        ties and correction.zero_()
    factor = None
    if factors is not None:
        factor = torch.linspace(-1, 2, experts, device=device).to(factors)
    slot = live_slots(lanes, padded, device)
    actual = run(route, logits, slot, router, correction, factor)
    expected = run(route_reference, logits, slot, router, correction, factor)
    live = slot >= 0
    assert torch.equal(actual.expert[live], expected.expert[live])
    torch.testing.assert_close(actual.weight[live], expected.weight[live], rtol=1e-5, atol=1e-7)
    assert (expected.expert[~live] == SENTINEL).all()


@pytest.mark.parametrize("function", [route, route_reference])
def test_a_group_is_as_good_as_its_best_or_as_its_best_two(device, function):
    logits = torch.tensor([[1.0, -4.0, 0.8, 0.7, -3.0, -3.0]], device=device)
    for group_best, chosen in ((1, [0, 1]), (2, [2, 3])):
        router = Router(top_k=2, scores="sigmoid", groups=3, group_best=group_best)
        routes = run(function, logits, live_slots(1, device=device), router)
        assert routes.expert.tolist() == [chosen]


@pytest.mark.parametrize("function", [route, route_reference])
def test_equal_scores_go_to_the_lower_ids(device, function):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, -0.0, 0.0]], device=device)
    routes = run(function, logits, live_slots(1, device=device), Router(top_k=6))
    assert routes.expert.tolist() == [[1, 2, 4, 0, 3, 5]]


@pytest.mark.parametrize("function", [route, route_reference])
def test_sigmoids_that_are_all_0_have_weights_of_0(device, function):
    """DeepSeek-V3's router has none: there is no sum to divide by."""
    logits = torch.full((2, 16), -200.0, device=device)
    found = run(function, logits, live_slots(2, device=device), ROUTERS["deepseek-v3"])
    assert found.expert.tolist() == [[0, 1, 2, 3]] * 2
    assert found.weight.tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("function", [route, route_reference])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_ids_are_different_experts_whatever_the_logits_are(device, function, name, poison):
    """The ids are addresses: NaN must not lead outside of the weights, nor choose one twice."""
    router = ROUTERS[name]
    logits = random_logits(2, 12, 0, device)
    logits[0] = poison
    logits[1, ::2] = poison
    chosen = run(function, logits, live_slots(2, device=device), router).expert.tolist()
    for ids in chosen:
        assert len({*ids}) == router.top_k and all(0 <= index < 12 for index in ids)
    if poison != INF and name == "qwen3":
        assert all(index % 2 for index in chosen[1]), "the least are not taken"


@pytest.mark.parametrize("function", [route, route_reference])
@pytest.mark.parametrize("name", ROUTERS)
def test_bits_do_not_depend_on_company(device, function, name):
    logits = random_logits(33, 24, 1, device)
    whole = run(function, logits, live_slots(33, device=device), ROUTERS[name])
    for count in (1, 2, 7):
        order = torch.randperm(33, generator=torch.Generator().manual_seed(count))[:count]
        order = order.to(device)
        part = run(function, logits[order], live_slots(count, device=device), ROUTERS[name])
        assert torch.equal(part.expert, whole.expert[order])
        assert torch.equal(part.weight, whole.weight[order])


def by_expert(experts, weights):
    """Weights [N, E], 0 for experts that are not taken."""
    return torch.zeros(len(experts), 24).scatter(1, experts.long().cpu(), weights.cpu())


@settings(deadline=None, max_examples=extent(8, 30))
@given(name=st.sampled_from(sorted(ROUTERS)), seed=st.integers(0, 10_000))
@example(name="deepseek-v3", seed=0)
def test_matches_transformers(device, name, seed):
    """Weights of each expert, as transformers' own modules give them."""
    router = ROUTERS[name]
    logits = random_logits(9, 24, seed)
    bias = torch.linspace(-0.2, 0.3, 24) if name == "deepseek-v3" else None
    module = transformers_router(name, router, bias)
    with torch.no_grad():
        _, weights, experts = module(logits)
    slot = live_slots(9, device=device)
    correction = None if bias is None else bias.to(device)
    actual = run(route, logits.to(device), slot, router, correction)
    expected = by_expert(experts, weights)
    torch.testing.assert_close(by_expert(*actual), expected, rtol=1e-5, atol=1e-7)


class _Lfm2(torch.nn.Module):
    """transformers' Lfm2MoeTopKRouter, which the oldest one that is admitted lacks."""

    def __init__(self, router):
        super().__init__()
        self.router, self.weight = router, torch.nn.Parameter(torch.empty(24, 24))

    def forward(self, x):
        logits = x @ self.weight.t()
        weights, experts = logits.sigmoid().topk(self.router.top_k, dim=-1)
        return logits, weights / (weights.sum(-1, keepdim=True) + self.router.least_sum), experts


def transformers_router(name, router, bias):
    """The module of transformers whose logits are its inputs."""
    if name == "deepseek-v3":
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as module

        config = module.DeepseekV3Config(
            hidden_size=24,
            n_routed_experts=24,
            num_experts_per_tok=router.top_k,
            n_group=router.groups,
            topk_group=router.top_groups,
            norm_topk_prob=router.normalised,
            routed_scaling_factor=router.scale,
        )
        made = module.DeepseekV3TopkRouter(config)
        made.e_score_correction_bias.copy_(bias)
    elif name == "deepseek-v2":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as module

        config = module.DeepseekV2Config(
            hidden_size=32,
            n_routed_experts=24,
            num_experts_per_tok=router.top_k,
            n_group=router.groups,
            topk_group=router.top_groups,
            topk_method="group_limited_greedy",
            routed_scaling_factor=router.scale,
        )
        made = module.DeepseekV2TopkRouter(config)
        made.hidden_dim = 24
        made.weight = torch.nn.Parameter(torch.empty(24, 24))
    elif name == "gpt-oss":
        from transformers.models.gpt_oss import modeling_gpt_oss as module

        config = module.GptOssConfig(
            hidden_size=24, num_local_experts=24, num_experts_per_tok=router.top_k
        )
        made = module.GptOssTopKRouter(config)
        torch.nn.init.zeros_(made.bias)
    elif name == "lfm2":
        made = _Lfm2(router)
    else:
        from transformers.models.qwen3_moe import modeling_qwen3_moe as module

        config = module.Qwen3MoeConfig(
            hidden_size=24,
            num_experts=24,
            num_experts_per_tok=router.top_k,
            norm_topk_prob=router.normalised,
        )
        made = module.Qwen3MoeTopKRouter(config)
    torch.nn.init.eye_(made.weight)
    return made


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("router", "experts", "corrected"),
    [
        (Router(top_k=8, normalised=True), 128, False),
        (ROUTERS["deepseek-v3"], 24, True),
        (ROUTERS["gpt-oss"], 160, False),
    ],
)
def test_compiled_kernel_matches_reference(router, experts, corrected):
    """Its code for sm_90, run in numpy: of one warp, of several, and with ties."""
    logits = random_logits(3, experts, 5)
    logits[1] = random_logits(1, experts, 5, ties=True)
    correction = torch.linspace(-1, 1, experts) if corrected else None
    slot = live_slots(3, padded=(2,))
    module = importlib.import_module("graphengine.kernels.experts.router")
    with launches_handed_to(run_launch, module):
        actual = route(logits, slot, router, correction_E=correction, pdl=True)
    expected = route_reference(logits, slot, router, correction_E=correction)
    assert torch.equal(actual.expert[:2], expected.expert[:2])
    torch.testing.assert_close(actual.weight[:2], expected.weight[:2], rtol=1e-5, atol=1e-7)


def test_strided_logits(device):
    wide = random_logits(3, 40, 2, device)
    slot = live_slots(3, device=device)
    actual = route(wide[:, :24], slot, ROUTERS["qwen3"])
    expected = route(wide[:, :24].contiguous(), slot, ROUTERS["qwen3"])
    assert torch.equal(actual.expert, expected.expert)
    assert torch.equal(actual.weight, expected.weight)


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("router", "logits", "correction", "message"),
    [
        (Router(top_k=9), torch.zeros(2, 8), None, "top_k=9 of 8 experts"),
        (Router(top_k=0), torch.zeros(2, 8), None, "top_k=0"),
        (Router(top_k=1, scores="tanh"), torch.zeros(2, 8), None, "scores='tanh' is none of soft"),
        (Router(top_k=1), torch.zeros(2, 513), None, "1 to 512 experts, not 513"),
        (Router(top_k=1, groups=3), torch.zeros(2, 8), None, "8 experts in 3 groups"),
        (Router(top_k=1, groups=2, top_groups=3), torch.zeros(2, 8), None, "of which 3 are taken"),
        (Router(top_k=5, groups=2), torch.zeros(2, 8), None, "top_k=5 of 4 experts"),
        (Router(top_k=1, group_best=3), torch.zeros(2, 8), None, "group_best=3 is neither"),
        (Router(top_k=1, groups=8), torch.zeros(2, 8), None, "8 of 8 have 1"),
        (Router(top_k=1), torch.zeros(2, 8).half(), None, "float32 with dense rows, not torch.flo"),
        (Router(top_k=1), torch.zeros(3, 8), None, r"\[3\], not \(2,\)"),
        (Router(top_k=1), torch.zeros(2, 8), torch.zeros(7), r"correction_E must be .* \[8\]"),
        (
            Router(top_k=1, scores="softmax_of_chosen"),
            torch.zeros(2, 8),
            torch.zeros(8),
            "softmax_of_chosen has none of all",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(router, logits, correction, message):
    with pytest.raises(ValueError, match=message):
        route(logits, live_slots(2), router, correction_E=correction)
