"""The router with its product: what `linear` and `route` come to, poisoned, in any company."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.router import Router, Routes, route_reference
from graphengine.kernels.experts.router_product import route_product
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import LOGITS
from graphengine.kernels.linear.reference import linear_reference
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

# Triton's interpreter computes padded experts with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS = 1e-5
ROUTERS = {
    "softmax": Router(top_k=3, normalised=True),
    "sigmoid": Router(top_k=3, scores="sigmoid", scale=2.5, groups=2, top_groups=1),
    "softmax_of_chosen": Router(top_k=3, scores="softmax_of_chosen"),
}


def operands(lanes, experts, hidden, seed, device, dtype=torch.float32, groups=3):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    x, gate = random(lanes, hidden), random(experts, hidden)
    squares = random(groups, lanes).square() * hidden
    slot = torch.arange(lanes, dtype=torch.int32)
    return x.to(device, dtype), gate.to(device, dtype), squares.to(device), slot.to(device)


def logits_of(x, gate, slot, squares, bias=None):
    return linear_reference(LinearCall(x, gate, slot, squares, EPS, bias), LOGITS)


@settings(deadline=None, max_examples=extent(20, 60))
@given(
    lanes=st.integers(1, 5),
    experts=st.sampled_from([4, 5, 24, 130]),
    hidden=st.sampled_from([8, 24, 100, 4200]),
    groups=st.sampled_from([0, 1, 3]),
    name=st.sampled_from(sorted(ROUTERS)),
    corrected=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_is_the_route_of_the_product(
    device, lanes, experts, hidden, groups, name, corrected, biased, seed, data
):
    router = ROUTERS[name]
    if experts % router.groups or experts // router.groups < router.top_k:
        router = Router(top_k=3, scores=router.scores)
    x, gate, squares, slot = operands(lanes, experts, hidden, seed, device, groups=max(groups, 1))
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    slot[padded] = -1
    x[padded], squares[:, padded] = float("nan"), float("nan")
    given_squares = squares if groups else None
    correction = None
    if corrected and name != "softmax_of_chosen":
        correction = torch.linspace(-1, 1, experts, device=device)
    bias = torch.linspace(9, -9, experts, device=device) if biased else None
    logits = logits_of(x, gate, slot, given_squares, bias)
    factor = torch.linspace(0.5, 2, experts, device=device) if seed % 2 else None
    expected = route_reference(logits, slot, router, correction_E=correction, factor_E=factor)
    arrivals = torch.zeros(lanes + 1, dtype=torch.int32, device=device)
    actual = route_product(
        x,
        gate,
        slot,
        router,
        arrivals=arrivals,
        squares_TN=given_squares,
        eps=EPS,
        bias_E=bias,
        correction_E=correction,
        factor_E=factor,
    )
    assert not arrivals.any()
    live = slot >= 0
    scores = logits if name == "softmax_of_chosen" else logits.sigmoid()
    ranked = (scores if correction is None else scores + correction).sort(1, descending=True)
    near = (ranked.values[:, :-1] - ranked.values[:, 1:] < 1e-4).any(dim=1)
    clear = live & ~near
    assert torch.equal(actual.expert[clear], expected.expert[clear])
    torch.testing.assert_close(actual.weight[clear], expected.weight[clear], rtol=1e-3, atol=1e-5)


def test_bits_do_not_depend_on_company(device):
    router = ROUTERS["softmax"]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, gate, squares, slot = operands(9, 24, 200, 1, device, dtype)
    arrivals = torch.zeros(9, dtype=torch.int32, device=device)

    def run(lanes):
        return route_product(
            x[lanes],
            gate,
            slot[: len(lanes)],
            router,
            arrivals=arrivals,
            squares_TN=squares[:, lanes].contiguous(),
            eps=EPS,
        )

    whole = run(list(range(9)))
    for lanes in ([4], [8, 2], [3, 0, 7, 5]):
        part = run(lanes)
        assert torch.equal(part.expert, whole.expert[lanes])
        assert torch.equal(part.weight, whole.weight[lanes])


def test_given_ids_take_the_place_of_the_choice_and_ids_are_kept(device):
    router = ROUTERS["softmax"]
    x, gate, squares, slot = operands(3, 24, 40, 2, device)
    given_ids = torch.full((3, 3), -1, dtype=torch.int32, device=device)
    given_ids[1] = torch.tensor([7, 2, 23])
    kept = torch.empty_like(given_ids)
    arrivals = torch.zeros(3, dtype=torch.int32, device=device)
    options = {"arrivals": arrivals, "squares_TN": squares, "eps": EPS}
    free = route_product(x, gate, slot, router, **options)
    routes = route_product(x, gate, slot, router, given_Nk=given_ids, expert_Nk=kept, **options)
    assert routes.expert is kept or routes.expert.data_ptr() == kept.data_ptr()
    assert kept[1].tolist() == [7, 2, 23]
    assert torch.equal(kept[::2], free.expert[::2])
    logits = logits_of(x, gate, slot, squares)
    expected = logits[1].softmax(0)[given_ids[1].long()]
    torch.testing.assert_close(routes.weight[1], expected / expected.sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(("experts", "hidden", "warps"), [(128, 2048, 1), (256, 7168, 4)])
def test_weights_are_on_the_way_before_it_waits(experts, hidden, warps):
    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    lanes = 8
    launch = record_launch(
        importlib.import_module("graphengine.kernels.experts.router_product"),
        lambda: route_product(
            new(lanes, hidden),
            new(experts, hidden),
            new(lanes, dtype=torch.int32),
            Router(top_k=8, scores="sigmoid", groups=8, top_groups=4),
            arrivals=new(lanes, dtype=torch.int32),
            squares_TN=new(64, lanes, dtype=torch.float32),
            eps=EPS,
            correction_E=new(experts, dtype=torch.float32),
            pdl=True,
        ),
    )
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = [load for load in loads if not load.after_wait]
    assert {load.argument for load in early} == {"gate_ptr", "correction_ptr"}
    held = sum(load.size for load in loads if load.argument == "gate_ptr")
    assert held * 32 * warps >= 2 * hidden * 2
    assert all(load.size == 16 for load in early if load.argument == "gate_ptr")


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_EH": torch.zeros(8, 5)}, r"dense \[E, 4\], not \[8, 5\]"),
        ({"gate_EH": torch.zeros(8, 4).half()}, "weight in torch.float16, and inputs in torch.fl"),
        ({"router": Router(top_k=9)}, "top_k=9 of 8 experts"),
        ({"squares_TN": torch.zeros(1, 3)}, "3"),
        ({"slot_N": torch.zeros(3, dtype=torch.int32)}, r"\[2\], not \(3,\)"),
        ({"correction_E": torch.zeros(7)}, r"correction_E must be .* \[8\]"),
        ({"factor_E": torch.zeros(9)}, r"factor_E must be .* \[8\]"),
        ({"factor_E": torch.zeros(8).int()}, "factor_E must be one of .*, not torch.int32"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    good = {
        "x_NH": torch.zeros(2, 4),
        "gate_EH": torch.zeros(8, 4),
        "slot_N": torch.zeros(2, dtype=torch.int32),
        "router": Router(top_k=2),
        "arrivals": None,
    }
    assert isinstance(route_product(**good), Routes)
    with pytest.raises(ValueError, match=message):
        route_product(**{**good, **change})


@pytest.mark.gpu
def test_a_gpu_wants_a_counter_a_lane():
    x, gate, _, slot = operands(2, 8, 16, 0, "cuda")
    for arrivals, message in ((None, "2 lanes wants 2"), (slot[:1], r"\[1\]")):
        with pytest.raises(ValueError, match=message):
            route_product(x, gate, slot, ROUTERS["softmax"], arrivals=arrivals)
