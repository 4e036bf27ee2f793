"""The experts' products: against their references, grouped and not, idle experts poisoned."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.experts import (
    expert_inner,
    expert_part,
    expert_residual,
    expert_sum,
    residual_arrivals,
)
from graphengine.kernels.experts.grouping import group_pairs
from graphengine.kernels.experts.plans import (
    DECODE_BLOCK,
    ProductTile,
    chunk_tile,
    counted_block,
    expert_plan,
    groups_pairs,
)
from graphengine.kernels.experts.reference import expert_product_reference, expert_sum_reference
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.residual import Residual, StreamCopy, add_to_residual_reference
from graphengine.kernels.norm_rope.activation import ClampedSwiglu, Gating
from launches.compilation import launches_handed_to
from launches.emulation import run_launch

# Triton's interpreter multiplies and rounds poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN = float("nan")
SENTINEL = 77.0
EPS = 1e-6
SMALL = LinearPlan("dot", block_m=32, block_k=32, stages=2)
FMA = LinearPlan("fma", block_m=16, block_k=32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of a layer of experts; lane n works for slot n, or is padded."""

    x: torch.Tensor
    squares: torch.Tensor
    slot: torch.Tensor
    routes: Routes
    gate_up: torch.Tensor
    down: torch.Tensor
    stream: torch.Tensor
    next_norm: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gating: Gating = "silu"
    gated: bool = True

    @property
    def first(self):
        """What is done with the first product."""
        return {"bias_EM": self.gate_up_bias, "gating": self.gating, "gated": self.gated}

    @property
    def first_reference(self):
        activation = "swiglu" if self.gated else "squared_relu"
        return {
            "bias_EM": self.gate_up_bias,
            "gating": self.gating,
            "activation": activation,
        }

    @property
    def experts(self) -> int:
        return len(self.gate_up)

    def take(self, lane_of, padded=None):
        """Lanes `lane_of` of this case, in that order; those `padded` lose their slot."""
        lane_of = lane_of.to(self.slot.device)
        slot = self.slot[lane_of]
        if padded is not None:
            slot = torch.where(padded.to(slot.device), -1, slot)
        return replace(
            self,
            x=self.x[lane_of],
            squares=self.squares[:, lane_of].contiguous(),
            slot=slot,
            routes=Routes(*(each[lane_of] for each in self.routes)),
            stream=self.stream[lane_of],
        )

    def grouping(self, size=DECODE_BLOCK):
        return group_pairs(self.routes.expert, self.slot, experts=self.experts, size=size)


def make_case(
    lanes,
    hidden,
    ffn,
    experts,
    top_k,
    dtype,
    device,
    *,
    padded=(),
    used=None,
    groups=3,
    seed=0,
    biased=False,
    gated=True,
    gelu=False,
):
    """Random operands; lanes choose among the first `used` experts, the others are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    used = experts if used is None else used
    chosen = [torch.randperm(used, generator=generator)[:top_k] for _ in range(lanes)]
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[list(padded)] = -1
    expert, weight = torch.stack(chosen).int(), random(lanes, top_k).softmax(1)
    x = random(lanes, hidden)
    rows = 2 * ffn if gated else ffn
    gate_up, down = random(experts, rows, hidden), random(experts, hidden, ffn)
    # What padded lanes hold is no index, and no number.
    x[list(padded)], expert[list(padded)], weight[list(padded)] = NAN, 2**31 - 1, NAN
    idle = sorted(set(range(experts)) - set(expert[slot >= 0].flatten().tolist()))
    gate_up[idle], down[idle] = NAN, NAN
    biases = {"gating": "gelu_tanh" if gated and gelu else "silu"}
    if biased:
        gate_up_bias, down_bias = random(experts, rows), random(experts, hidden)
        gate_up_bias[idle], down_bias[idle] = NAN, NAN
        biases = {
            "gate_up_bias": gate_up_bias.to(device, dtype),
            "down_bias": down_bias.to(device, dtype),
            # Many gates and ups are past it.
            "gating": ClampedSwiglu(limit=0.75) if gated and not gelu else biases["gating"],
        }
    sums = (torch.rand(groups, lanes, generator=generator) + 0.5) * hidden / groups
    return Case(
        x=x.to(device, dtype),
        squares=sums.to(device),
        slot=slot.to(device),
        routes=Routes(expert.to(device), weight.to(device)),
        gate_up=(gate_up / hidden**0.5).to(device, dtype),
        down=(down / ffn**0.5).to(device, dtype),
        stream=random(lanes, hidden).to(device),
        # A scaled final norm is a copy in float32.
        next_norm=random(hidden).to(device, torch.float32 if biased else dtype),
        gated=gated,
        **biases,
    )


def decode(case, *, grouped, gate_up_plan=SMALL, down_plan=SMALL):
    """Both products as a decode step runs them: (a, x, scaled, squares by lane).

    What is added to the stream is what a part of a larger sum is, too.
    """
    grouping = case.grouping() if grouped else None
    lanes, top_k = case.routes.expert.shape
    ffn = case.gate_up.shape[-2] // (2 if case.gated else 1)
    out = case.x.new_full((lanes * top_k, ffn), SENTINEL)
    a = expert_inner(
        case.x,
        case.gate_up,
        case.slot,
        case.routes,
        tile=gate_up_plan,
        squares_TN=case.squares,
        eps=EPS,
        **case.first,
        grouping=grouping,
        out=out,
    )
    empty = torch.full_like(case.stream, SENTINEL, dtype=case.x.dtype)
    kept = StreamCopy(torch.cat([empty, empty], dim=1)[:, : case.stream.shape[1]], 0.3)
    before = Residual(case.stream.clone(), empty, None, kept)
    counters = residual_arrivals(lanes, case.stream.shape[1])
    arrivals = torch.zeros(counters, dtype=torch.int32, device=case.x.device)
    operands = (a, case.down, case.slot, case.routes)
    how = {
        "plan": down_plan,
        "arrivals": arrivals,
        "bias_EH": case.down_bias,
        "grouping": grouping,
    }
    after = expert_residual(*operands, before, case.next_norm, **how)
    assert not arrivals.any(), "the next launch finds zeros"
    part = expert_part(*operands, **how)
    assert not arrivals.any(), "the next launch finds zeros"
    assert after.x is before.x and after.scaled is before.scaled, "written in place"
    live = case.slot >= 0
    assert torch.equal((case.stream + part)[live], after.x[live])
    assert torch.equal(kept.rows[live], (after.x[live] * 0.3).to(case.x.dtype))
    assert (kept.rows[~live] == SENTINEL).all()
    return a, after.x, after.scaled, after.squares.t()


def decode_reference(case, a, groups):
    """The twin, of which the second half starts from what the first half left."""
    own = expert_product_reference(
        case.x,
        case.gate_up,
        case.slot,
        case.routes,
        squares_TN=case.squares,
        eps=EPS,
        **case.first_reference,
        out=torch.full_like(a, SENTINEL),
    )
    y = expert_sum_reference(
        a, case.down, case.slot, case.routes, bias_EH=case.down_bias, out_dtype=torch.float32
    )
    stream = Residual(
        case.stream.clone(),
        torch.full_like(case.stream, SENTINEL, dtype=case.x.dtype),
        case.stream.new_empty(groups, len(case.slot)),
    )
    after = add_to_residual_reference(y, case.slot, stream, case.next_norm)
    return own, after.x


@settings(deadline=None, max_examples=examples(8, 40))
@given(
    form=st.sampled_from(["single", "grouped", "fma"]),
    lanes=st.integers(1, 20),
    hidden=st.integers(1, 80) | st.just(64),
    ffn=st.integers(1, 70) | st.just(32),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    dtype=st.integers(0, 2),
    groups=st.sampled_from([1, 3, 130]),
    biased=st.booleans(),
    gated=st.booleans(),
    gelu=st.booleans(),
    data=st.data(),
)
@example(
    # All to one expert, more than a block of them.
    form="grouped", lanes=19, hidden=33, ffn=20, experts=4, top_k=1, dtype=0, groups=3, data=None,
    biased=True, gated=True, gelu=False,
)  # fmt: skip
def test_decode_matches_reference(
    device,
    dtypes,
    assert_products_close,
    form,
    lanes,
    hidden,
    ffn,
    experts,
    top_k,
    dtype,
    groups,
    biased,
    gated,
    gelu,
    data,
):
    top_k = min(top_k, experts)
    used, padded = 1, (3, 18)
    if data is not None:
        used = data.draw(st.integers(top_k, experts))
        padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_case(
        lanes,
        hidden,
        ffn,
        experts,
        top_k,
        dtype,
        device,
        padded=padded,
        used=used,
        groups=groups,
        biased=biased,
        gated=gated,
        gelu=gelu,
    )
    plan = FMA if form == "fma" else SMALL
    a, x, scaled, squares = decode(
        case, grouped=form == "grouped", gate_up_plan=plan, down_plan=plan
    )
    expected_a, expected_x = decode_reference(case, a, squares.shape[1])
    assert_products_close(a, expected_a, dtype)
    assert_products_close(x, expected_x, dtype)
    live = case.slot >= 0
    wanted = (x * case.next_norm.float()).to(dtype)
    assert torch.equal(scaled[live], wanted[live])
    assert (scaled[~live] == SENTINEL).all()
    assert torch.equal(x[~live], case.stream[~live])
    of_each = [part.double().square().sum(1) for part in x[live].split(plan.block_m, dim=1)]
    torch.testing.assert_close(
        squares[live].double(), torch.stack(of_each, dim=1), rtol=1e-5, atol=1e-6
    )


def first_plan(gated, ffn, hidden, dtype, family):
    kind, rows = ("swiglu", 2 * ffn) if gated else ("store", ffn)
    return expert_plan(kind, rows, hidden, dtype, family)


def assert_same(actual, expected, exact):
    """To the bit; in the interpreter, whose BLAS sums by a row's place in a tile, nearly."""
    for one, other in zip(actual, expected, strict=True):
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("gated", [True, False])
def test_single_pairs_of_fma_have_the_same_bits_in_any_company(device, dtypes, gated):
    hidden, ffn = (12, 8) if INTERPRETED else (136, 72)
    for dtype in dtypes:
        plans = {
            "gate_up_plan": first_plan(gated, ffn, hidden, dtype, "fma"),
            "down_plan": FMA,
        }
        assert [plan.family for plan in plans.values()] == ["fma", "fma"]
        case = make_case(2, hidden, ffn, 5, 3, dtype, device, groups=40, biased=True, gated=gated)
        a, *stream = decode(case, grouped=False, **plans)
        for order in ([0], [1], [1, 0]):
            # Alone, and after a padded lane.
            lane, lane_of = order[-1], torch.tensor(order)
            part = case.take(lane_of, lane_of != lane)
            own, *others = decode(part, grouped=False, **plans)
            assert torch.equal(own.view(-1, 3, ffn)[-1], a.view(2, 3, ffn)[lane])
            for one, other in zip(others, stream, strict=True):
                assert torch.equal(one[-1], other[lane])


@pytest.mark.parametrize("shape", [(64, 32), (136, 72), (512, 256)])
def test_grouped_pairs_have_the_bits_of_single_ones(device, dtypes, shape):
    """Alone and in company, grouped and not, in any order, beside padded lanes."""
    hidden, ffn = shape
    if INTERPRETED and hidden > 64:
        pytest.skip("natively")
    for dtype in dtypes[:1] if INTERPRETED else dtypes:
        plans = {
            "gate_up_plan": expert_plan("swiglu", 2 * ffn, hidden, dtype, "dot"),
            "down_plan": expert_plan("residual", hidden, ffn, dtype, "dot"),
        }
        lanes = 6 if INTERPRETED else 40
        case = make_case(lanes, hidden, ffn, 6, 3, dtype, device, used=4, groups=5, biased=True)
        whole = decode(case, grouped=False, **plans)
        assert_same(decode(case, grouped=True, **plans), whole, not INTERPRETED)
        generator = torch.Generator().manual_seed(1)
        for count in (1, 3, lanes):
            lane_of = torch.randperm(lanes, generator=generator)[:count]
            padded = torch.rand(count, generator=generator) < 0.3
            padded[0] = False
            part = case.take(lane_of, padded)
            kept = ~padded
            for grouped in (False, True):
                a, *stream = decode(part, grouped=grouped, **plans)
                a = a.view(count, 3, ffn)
                wanted = [whole[0].view(lanes, 3, ffn), *whole[1:]]
                assert_same(
                    [each[kept] for each in (a, *stream)],
                    [each[lane_of][kept] for each in wanted],
                    not INTERPRETED,
                )


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("dtype", "hidden", "ffn", "experts", "top_k", "late", "gated"),
    [
        (torch.bfloat16, 128, 64, 4, 2, True, True),
        # Tiles that are partly empty, and ids in two numbers.
        (torch.float16, 72, 40, 6, 5, False, True),
        (torch.bfloat16, 72, 40, 4, 2, True, False),
    ],
)
def test_compiled_kernels_have_the_same_bits_grouped_and_not(
    assert_products_close, dtype, hidden, ffn, experts, top_k, late, gated
):
    """Their code for sm_90 is run in numpy, where copies come as late or as early as they may."""
    case = make_case(
        3, hidden, ffn, experts, top_k, dtype, "cpu", padded=(1,), used=top_k + 1, biased=late,
        gated=gated,
    )  # fmt: skip
    plans = {
        "gate_up_plan": first_plan(gated, ffn, hidden, dtype, "dot"),
        "down_plan": expert_plan("residual", hidden, ffn, dtype, "dot"),
    }
    fma = {
        "gate_up_plan": first_plan(gated, ffn, hidden, dtype, "fma"),
        "down_plan": FMA,
    }
    modules = (
        importlib.import_module(f"graphengine.kernels.experts.{name}")
        for name in ("experts", "launches")
    )
    with launches_handed_to(partial(run_launch, late=late), *modules):
        whole = decode(case, grouped=False, **plans)
        grouped = decode(case, grouped=True, **plans)
        single = decode(case, grouped=False, **fma)
    live = case.slot >= 0
    for one, other in zip(grouped, whole, strict=True):
        assert torch.equal(one.view(3, -1)[live], other.view(3, -1)[live])
    expected_a, expected_x = decode_reference(case, whole[0], whole[3].shape[1])
    for results in (whole, grouped, single):
        assert_products_close(results[0], expected_a, dtype)
        assert_products_close(results[1], expected_x, dtype)


@settings(deadline=None, max_examples=examples(6, 30))
@given(
    lanes=st.integers(1, 60),
    hidden=st.integers(1, 70),
    ffn=st.integers(1, 50),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 3),
    size=st.sampled_from([16, 32, 64, 128]),
    dtype=st.integers(0, 2),
    biased=st.booleans(),
    gated=st.booleans(),
    gelu=st.booleans(),
    data=st.data(),
)
def test_chunks_match_reference(
    device,
    dtypes,
    assert_products_close,
    lanes,
    hidden,
    ffn,
    experts,
    top_k,
    size,
    dtype,
    biased,
    gated,
    gelu,
    data,
):
    top_k = min(top_k, experts)
    used = data.draw(st.integers(top_k, experts))
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_case(
        lanes, hidden, ffn, experts, top_k, dtype, device, padded=padded, used=used, biased=biased,
        gated=gated, gelu=gelu,
    )  # fmt: skip
    assert_chunk_is_right(case, ProductTile(size, 32, 32, warps=4, stages=2), assert_products_close)


@pytest.mark.parametrize("lanes", [1, 40, 200, 700])
def test_chunks_in_the_tiles_that_prompts_take(device, dtypes, assert_products_close, lanes):
    """From 16 pairs to 128, of which the last are products of whole warp groups."""
    hidden, ffn, experts, top_k = 320, 192, 6, 2
    if INTERPRETED:
        lanes, hidden, ffn = min(lanes, 40), 24, 8
    for dtype in dtypes:
        tile = chunk_tile(lanes, top_k, experts, hidden, dtype)
        padded = (lanes - 1,) if lanes > 1 else ()
        case = make_case(lanes, hidden, ffn, experts, top_k, dtype, device, padded=padded, used=5)
        assert_chunk_is_right(case, tile, assert_products_close)


def test_bits_of_chunks_do_not_depend_on_company(device, dtypes):
    """In the tile for any number of lanes: pairs and blocks change places, alone and among many."""
    lanes, hidden, ffn = (90, 24, 8) if INTERPRETED else (300, 320, 192)
    random = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        tile = chunk_tile(None, 2, 3, hidden, dtype)
        case = make_case(lanes, hidden, ffn, 3, 2, dtype, device, padded=(1,), biased=True)
        a, y = chunk_in(case, tile)
        assert int(case.grouping(tile.lanes).blocks[0].ge(0).sum()) > 3, "an expert has two blocks"
        for lane_of in ([4], [lanes - 1, 0, 4, 7], torch.randperm(lanes, generator=random)[:50]):
            lane_of = torch.as_tensor(lane_of, device=device)
            some = case.take(lane_of)
            live = some.slot >= 0
            for whole, found in zip((a, y), chunk_in(some, tile), strict=True):
                assert torch.equal(found[live], whole[lane_of][live])


def chunk_in(case, tile):
    """What the first half of a chunk leaves for each lane's pairs, and their sum."""
    options = {"tile": tile, "grouping": case.grouping(tile.lanes)}
    routed = case.slot, case.routes
    a = expert_inner(case.x, case.gate_up, *routed, **case.first, **options)
    y = expert_sum(a, case.down, *routed, bias_EH=case.down_bias, **options)
    return a.view(len(y), -1), y


def assert_chunk_is_right(case, tile, assert_products_close):
    lanes, top_k = case.routes.expert.shape
    dtype, ffn = case.x.dtype, case.down.shape[2]
    grouping = case.grouping(tile.lanes)
    options = {"tile": tile, "grouping": grouping}
    operands = (case.gate_up, case.slot, case.routes)
    a = expert_inner(case.x, *operands, **case.first, **options)
    y = expert_sum(a, case.down, case.slot, case.routes, bias_EH=case.down_bias, **options)
    live = case.slot >= 0
    by_lane = a.view(lanes, top_k, ffn)[live]
    expected = expert_product_reference(
        case.x,
        *operands,
        **case.first_reference,
        out=torch.empty_like(a),
    )
    assert_products_close(by_lane, expected.view(lanes, top_k, ffn)[live], dtype)
    total = expert_sum_reference(
        a, case.down, case.slot, case.routes, bias_EH=case.down_bias, out_dtype=dtype
    )
    assert_products_close(y[live], total[live], dtype)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("threads", [1, 2])
def test_reference_bits_do_not_depend_on_company(threads):
    case = make_case(13, 72, 40, 5, 3, torch.float32, "cpu", used=4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = decode(case, grouped=False)
        for lane in range(13):
            a, *stream = decode(case.take(torch.tensor([lane])), grouped=False)
            assert torch.equal(a, whole[0].view(13, 3, 40)[lane])
            for one, other in zip(stream, whole[1:], strict=True):
                assert torch.equal(one[0], other[lane])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize(("biased", "gelu"), [(False, False), (True, False), (False, True)])
def test_reference_is_the_formula(biased, gelu):
    case = make_case(3, 24, 16, 5, 2, torch.float32, "cpu", biased=biased, gelu=gelu)
    _, x, _, _ = decode(case, grouped=False)
    scale = torch.rsqrt(case.squares.sum(0) / 24 + EPS)
    for lane in range(3):
        expected = case.stream[lane].clone()
        for expert, weight in zip(*(each[lane].tolist() for each in case.routes), strict=True):
            y = case.gate_up[expert] @ case.x[lane] * scale[lane]
            if biased:
                gate, up = (y + case.gate_up_bias[expert]).chunk(2)
                assert (gate > 0.75).any() and (up < -0.75).any() and (up > 0.75).any()
                gate, up = gate.clamp(max=0.75), up.clamp(-0.75, 0.75)
                a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                expected += weight * (case.down[expert] @ a + case.down_bias[expert])
            else:
                gate, up = y.chunk(2)
                functional = torch.nn.functional
                a = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
                a = a * up
                expected += weight * (case.down[expert] @ a)
        torch.testing.assert_close(x[lane], expected, rtol=1e-5, atol=1e-5)


def test_plans_follow_from_the_weight_and_tiles_from_the_chunk():
    for kind, M, K in (("swiglu", 1536, 2048), ("residual", 2048, 768)):
        plan = expert_plan(kind, M, K, torch.bfloat16, "dot")
        assert plan.splits == 1 and M % plan.block_m == 0 and K % plan.block_k == 0
    fma = expert_plan("swiglu", 1536, 2048, torch.bfloat16, "fma")
    assert fma == LinearPlan("fma", block_m=4, block_k=2048)
    down = expert_plan("residual", 2048, 768, torch.bfloat16, "fma")
    assert down == expert_plan("residual", 2048, 768, torch.bfloat16, "dot")
    # Rows of a wide layer fit no thread's registers.
    assert expert_plan("swiglu", 7168, 131072, torch.float32, "fma").family == "dot"
    sizes = [
        chunk_tile(lanes, 8, 128, 2048, torch.bfloat16).lanes
        for lanes in (1, 16, 256, 512, 1024, 4096)
    ]
    assert sizes == [16, 16, 16, 32, 64, 128]
    assert chunk_tile(None, 8, 128, 2048, torch.bfloat16) == ProductTile(64, 128, 64, 4, 4)
    assert [groups_pairs(lanes, 8, 128) for lanes in (1, 4, 8, 64)] == [False, False, True, True]
    assert groups_pairs(4, 8, 128, tokens_per_row=4) and not groups_pairs(2, 8, 128, 2)
    assert not groups_pairs(1, 4, 4)


def test_hoppers_kernel_of_packed_experts_has_blocks_of_its_own():
    """Twice the pairs of an average expert."""
    sizes = [counted_block(lanes, 4, 32, packed=True) for lanes in (1, 256, 257, None)]
    assert sizes == [64, 64, 128, 128]


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(4, 15, 24)}, "not 15 rows in all"),
        ({"gate_up": torch.zeros(4, 16, 23)}, "inputs of 24 features .* experts of 23"),
        ({"gate_up": torch.zeros(4, 16, 24).half()}, "torch.float16"),
        ({"gate_up": torch.zeros(16, 24)}, r"dense \[E, M, K\], not \(16, 24\)"),
        ({"down": torch.zeros(4, 23, 8)}, "stream of 24 columns, and experts of 23 rows"),
        ({"down": torch.zeros(4, 24, 9)}, "inputs of 8 features .* experts of 9"),
        ({"next_norm": torch.zeros(23)}, r"next_norm must be .* \[24\]"),
        ({"slot": torch.zeros(4).int()}, r"\[3\], not \(4,\)"),
        ({"squares": torch.zeros(2, 4)}, r"squares must be a dense float32 \[T, 3\]"),
        ({"routes": Routes(torch.zeros(3, 2), torch.zeros(3, 2))}, "routes.expert must be"),
        ({"routes": Routes(torch.zeros(3, 2).int(), torch.zeros(3, 1))}, "routes.weight must be"),
        ({"stream": torch.zeros(3, 25)}, "stream of 25 columns"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    case = make_case(3, 24, 8, 4, 2, torch.float32, "cpu")
    with pytest.raises(ValueError, match=message):
        decode(replace(case, **change), grouped=False)


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
def test_blocks_that_fit_no_tile_and_splits_are_errors(monkeypatch):
    case = make_case(3, 24, 8, 4, 2, torch.float32, "cpu")
    monkeypatch.setattr("graphengine.kernels.experts.experts.use_triton", lambda x: True)
    operands = (case.x, case.gate_up, case.slot, case.routes)
    grouping = case.grouping(32)
    with pytest.raises(ValueError, match="blocks of 32 pairs, and a tile of 16"):
        expert_inner(*operands, tile=SMALL, grouping=grouping)
    with pytest.raises(ValueError, match="do not split K"):
        expert_inner(*operands, tile=SMALL._replace(splits=2))
    with pytest.raises(ValueError, match="the fma family takes pairs one by one"):
        expert_inner(*operands, tile=FMA, grouping=case.grouping())
    with pytest.raises(ValueError, match=r"without gates have no gating=ClampedSwiglu\(limit=7.0"):
        expert_inner(*operands, tile=SMALL, gated=False, gating=ClampedSwiglu())
    with pytest.raises(ValueError, match="experts without gates have no gating='gelu_tanh'"):
        expert_inner(*operands, tile=SMALL, gated=False, gating="gelu_tanh")
    with pytest.raises(ValueError, match="activation='relu' must be 'silu' or 'gelu_tanh'"):
        expert_inner(*operands, tile=SMALL, gating="relu")
    a = case.x.new_zeros(6, 8)
    stream = Residual(case.stream, case.x.clone(), None)
    down = (a, case.down, case.slot, case.routes, stream, case.next_norm)
    for arrivals, found in (
        (None, "None"),
        (torch.zeros(2, dtype=torch.int32), r"torch.int32 \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"3 lanes wants 3 dense int32 arrivals, not {found}"):
            expert_residual(*down, plan=SMALL, arrivals=arrivals)
    enough = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(ValueError, match="pairs in groups and packed weights want a dot plan"):
        expert_residual(*down, plan=FMA, arrivals=enough, grouping=case.grouping())
