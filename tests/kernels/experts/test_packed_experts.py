"""The experts' products with weights of 8 and 4 bits: against what these mean in float32."""

from __future__ import annotations

import pytest
import torch

from extent import extent, some_of
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.experts import (
    expert_inner,
    expert_part,
    expert_residual,
    expert_sum,
    residual_arrivals,
)
from graphengine.kernels.experts.grouping import group_pairs
from graphengine.kernels.experts.packed.weights import PackedExperts, empty_experts, fill_expert
from graphengine.kernels.experts.plans import PACKED_BLOCK, chunk_tile, expert_plan
from graphengine.kernels.experts.reference import expert_product_reference, expert_sum_reference
from graphengine.kernels.experts.router import Routes
from graphengine.kernels.linear.packed import pack, packed_form
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    packed_halves,
)
from graphengine.kernels.linear.residual import Residual, add_to_residual_reference
from graphengine.kernels.norm_rope.activation import ClampedSwiglu

NAN, EPS = float("nan"), 1e-6
FORMATS = {
    "e4m3-128x128": torch.float32,
    "e4m3-1x0": torch.float32,
    "e4m3-0x0": torch.float32,
    "int8-1x0": torch.bfloat16,
    "int8-1x32": torch.float16,
    "int4-1x128": torch.bfloat16,
    "int4-1x32": torch.float16,
    "int4-1x64-zeros": torch.float16,
    "int4-1x0-zeros": torch.float16,
    "int4-1x256": torch.bfloat16,
    "e2m1-1x32": torch.uint8,
    "e2m1-1x16": torch.float8_e4m3fn,
    "int8-1x16": torch.float32,
    "int4-1x64-minimums": torch.bfloat16,
    "uint4-1x32-minimums": torch.float16,
    "uint4-1x16-minimums-of256": torch.int8,
    "uint4-1x32-minimums-of256": torch.int8,
    "int8-1x32-minimums-of256": torch.int8,
    "int8-1x16-of256": torch.int8,
}


def quantised(
    kind: WeightFormat, scales: torch.dtype, M: int, K: int, generator
) -> QuantisedWeight:
    """A weight of random codes, of about 1 / sqrt(K) each."""
    codes = torch.randint(0, 256 if kind.bits == 8 else 16, (M, K), generator=generator).byte()
    if kind.code == "e4m3":
        codes[(codes & 127) == 127] = 0
    sizes = {"e4m3": 100.0, "int8": 75.0, "int4": 4.5, "uint4": 4.5, "e2m1": 2.5}
    size = sizes[kind.code] * K**0.5
    pair = (2,) if kind.has_minimums else ()
    groups = (*kind.groups(M, K), *pair)
    values = (torch.rand(groups, generator=generator) + 0.5) / size
    whole = factors = None
    if scales == torch.uint8:
        values = torch.randint(119, 124, groups, generator=generator).byte()
    elif scales == torch.float8_e4m3fn:
        whole, values = torch.tensor(1 / 64 / size), values * 64 * size
    elif scales == torch.int8:
        # Factors are as large for all columns but the last block's.
        values = values * 40 * size
        factors = values.new_full((M, -(-K // kind.block), *pair), 1 / 40 / size).half()
        factors[:, -1:] *= 2
    if kind.has_minimums:
        # Codes from 0 on have their mean subtracted.
        values[..., 1] *= 7.5 if kind.code == "uint4" else 1
    zeros = None
    if kind.has_zeros:
        zeros = torch.randint(4, 12, groups, generator=generator).byte()
    if kind.bits == 4:
        codes = packed_halves(codes)
    return QuantisedWeight(kind, codes, values.to(scales), whole, zeros, factors=factors)


def packed_experts(label, E, M, K, *, swiglu, device, seed=0, idle=()) -> PackedExperts:
    """Random experts; of those that are `idle` all scales are NaN."""
    kind, scales = WeightFormat.of_label(label), FORMATS[label]
    generator = torch.Generator().manual_seed(seed)
    form = packed_form(kind, scales, whole=scales == torch.float8_e4m3fn)
    experts = empty_experts(form, (E, M, K), swiglu=swiglu, device=device)
    for index in range(E):
        weight = quantised(kind, scales, M, K, generator)
        fill_expert(experts, index, pack(weight, swiglu=swiglu))
        if index in idle:
            place = experts.expert(index)
            for tensor in (place.scales, place.row_scales, place.factors):
                if tensor is not None and tensor.dtype.is_floating_point:
                    tensor.fill_(NAN)
    return experts


class Case:
    """Operands of some lanes, some of them padded; lanes choose among the first `used` experts."""

    def __init__(
        self, label, dtype, device, *, lanes=3, hidden=0, ffn=40, top_k=2, used=3, E=4, gated=True
    ):
        # Two blocks of columns that share factors.
        hidden = hidden or (272 if "of" in label else 136)
        generator = torch.Generator().manual_seed(1)
        self.label, self.E, self.gated = label, E, gated
        self.slot = torch.arange(lanes, dtype=torch.int32)
        chosen = torch.stack([torch.randperm(used, generator=generator) for _ in range(lanes)])
        chosen = chosen[:, :top_k].int()
        weight = torch.rand(lanes, top_k, generator=generator)
        x = torch.randn(lanes, hidden, generator=generator)
        if lanes > 1:
            self.slot[1], x[1], chosen[1], weight[1] = -1, NAN, 2**31 - 1, NAN
        live = chosen[self.slot >= 0].flatten().tolist()
        idle = set(range(E)) - set(live)
        self.slot, self.x = self.slot.to(device), x.to(device, dtype)
        self.routes = Routes(chosen.to(device), weight.to(device))
        sums = (torch.rand(3, lanes, generator=generator) + 0.5) * hidden / 3
        self.squares = sums.to(device)
        made = {"device": device, "idle": idle}
        self.gate_up = packed_experts(
            label, E, 2 * ffn if gated else ffn, hidden, swiglu=gated, **made
        )
        self.down = packed_experts(label, E, hidden, ffn, swiglu=False, seed=2, **made)
        self.stream = torch.randn(lanes, hidden, generator=generator).to(device)
        self.norm = torch.randn(hidden, generator=generator).to(device, dtype)

    def grouping(self, size=PACKED_BLOCK):
        return group_pairs(self.routes.expert, self.slot, experts=self.E, size=size)

    def take(self, lane):
        """One lane alone."""
        one = object.__new__(Case)
        one.__dict__.update(self.__dict__)
        one.slot, one.x, one.stream = (t[[lane]] for t in (self.slot, self.x, self.stream))
        one.squares = self.squares[:, [lane]].contiguous()
        one.routes = Routes(*(each[[lane]] for each in self.routes))
        return one

    def plan(self, kind, weight):
        _, M, K = weight.shape
        return expert_plan(kind, M, K, self.x.dtype, "dot", weight.format)


def swiglu(case, *, grouped=False, tile=None, **options):
    grouping = case.grouping(tile.lanes if tile else PACKED_BLOCK) if grouped else None
    return expert_inner(
        case.x,
        case.gate_up,
        case.slot,
        case.routes,
        tile=tile or case.plan("swiglu" if case.gated else "store", case.gate_up),
        squares_TN=case.squares,
        eps=EPS,
        gated=case.gated,
        grouping=grouping,
        **options,
    )


def residual(case, a, *, grouped, **options):
    lanes, hidden = case.stream.shape
    arrivals = case.slot.new_zeros(residual_arrivals(lanes, hidden))
    stream = Residual(case.stream.clone(), torch.zeros_like(case.x), None)
    operands = (a, case.down, case.slot, case.routes)
    options |= {
        "plan": case.plan("residual", case.down),
        "arrivals": arrivals,
        "grouping": case.grouping() if grouped else None,
    }
    result = expert_residual(*operands, stream, case.norm, **options)
    assert not arrivals.any()
    part = expert_part(*operands, **options)
    live = case.slot >= 0
    assert torch.equal((case.stream + part)[live], result.x[live])
    return result


def reference_swiglu(case, **options):
    shape = (case.routes.expert.numel(), case.down.shape[2])
    return expert_product_reference(
        case.x,
        case.gate_up,
        case.slot,
        case.routes,
        squares_TN=case.squares,
        eps=EPS,
        activation="swiglu" if case.gated else "squared_relu",
        out=case.x.new_zeros(shape),
        **options,
    )


def of_pairs(case, values):
    return values.view(*case.routes.expert.shape, -1)[case.slot >= 0].float()


def tolerance(dtype):
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}


DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16]
# How a format is decoded does not depend on the gate: in a short run each has one, by turns.
GATED = extent(
    [(label, index % 2 == 0) for index, label in enumerate(FORMATS)],
    [(label, gated) for label in FORMATS for gated in (True, False)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("label", "gated"), GATED)
def test_decode_means_what_the_weights_mean(label, gated, dtype, device):
    """In both forms with the same bits, and without a look at experts that nobody has chosen."""
    case = Case(label, dtype, device, gated=gated)
    live = case.slot >= 0
    expected = reference_swiglu(case)
    a, grouped = swiglu(case), swiglu(case, grouped=True)
    assert of_pairs(case, expected).isfinite().all() and of_pairs(case, expected).std() > 0.05
    torch.testing.assert_close(of_pairs(case, a), of_pairs(case, expected), **tolerance(dtype))
    assert torch.equal(of_pairs(case, a), of_pairs(case, grouped))
    y = expert_sum_reference(a, case.down, case.slot, case.routes, out_dtype=torch.float32)
    stream = Residual(case.stream.clone(), torch.zeros_like(case.x), case.squares[:1].clone())
    wanted = add_to_residual_reference(y, case.slot, stream, case.norm)
    one, other = (residual(case, a, grouped=grouped) for grouped in (False, True))
    for name in ("x", "scaled"):
        found, same, want = (getattr(each, name)[live] for each in (one, other, wanted))
        torch.testing.assert_close(found.float(), want.float(), **tolerance(dtype))
        assert torch.equal(found, same)
    assert torch.equal(one.x[~live], case.stream[~live])
    assert torch.equal(one.squares[:, live], other.squares[:, live])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_as_gpt_oss_has_them(dtype, device):
    """MXFP4 with biases and a clamped SwiGLU, of columns that are no multiple of a block's 64."""
    case = Case("e2m1-1x32", dtype, device, lanes=4, hidden=160, ffn=96)
    generator = torch.Generator().manual_seed(5)
    gate_up, down = (
        torch.randn(case.E, rows, generator=generator).to(device, dtype) for rows in (192, 160)
    )
    clamped, live = ClampedSwiglu(limit=0.7, slope=1.7), case.slot >= 0
    expected = reference_swiglu(case, bias_EM=gate_up, gating=clamped)
    biased = {"bias_EM": gate_up, "gating": clamped}
    a, grouped = (swiglu(case, grouped=grouped, **biased) for grouped in (False, True))
    torch.testing.assert_close(of_pairs(case, a), of_pairs(case, expected), **tolerance(dtype))
    assert torch.equal(of_pairs(case, a), of_pairs(case, grouped))
    unclamped = of_pairs(case, swiglu(case, bias_EM=gate_up))
    assert not torch.allclose(of_pairs(case, a), unclamped, atol=0.1)
    y = expert_sum_reference(
        a, case.down, case.slot, case.routes, bias_EH=down, out_dtype=torch.float32
    )
    wanted = case.stream + y
    found = [residual(case, a, grouped=each, bias_EH=down).x for each in (False, True)]
    torch.testing.assert_close(found[0][live], wanted[live], **tolerance(dtype))
    assert torch.equal(found[0][live], found[1][live])
    assert torch.equal(found[0][~live], case.stream[~live])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("used", "top_k", "gated"),
    [(3, 2, True), (1, 1, True), (3, 2, False)],
    ids=["several", "all to one", "no gates"],
)
@pytest.mark.parametrize(
    "label",
    [
        *("e4m3-128x128", "int4-1x32", "int8-1x0", "e2m1-1x32"),
        *("uint4-1x32-minimums-of256", "int8-1x16-of256"),
    ],
)
def test_a_chunk_means_what_the_weights_mean(label, used, top_k, gated, dtype, device):
    case = Case(label, dtype, device, lanes=20, used=used, top_k=top_k, gated=gated)
    _, _, hidden = case.gate_up.shape
    tile = chunk_tile(20, top_k, case.E, hidden, dtype, case.gate_up.format)
    a, live = swiglu(case, grouped=True, tile=tile), case.slot >= 0
    expected = of_pairs(case, reference_swiglu(case))
    torch.testing.assert_close(of_pairs(case, a), expected, **tolerance(dtype))
    if gated:
        gelus = swiglu(case, grouped=True, tile=tile, gating="gelu_tanh")
        wanted = of_pairs(case, reference_swiglu(case, gating="gelu_tanh"))
        torch.testing.assert_close(of_pairs(case, gelus), wanted, **tolerance(dtype))
        assert not torch.allclose(wanted, expected, atol=1e-2)
    y = expert_sum(
        a, case.down, case.slot, case.routes, tile=tile, grouping=case.grouping(tile.lanes)
    )
    wanted = expert_sum_reference(a, case.down, case.slot, case.routes, out_dtype=dtype)
    torch.testing.assert_close(y[live], wanted[live], **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "label", some_of(["e2m1-1x32", "int4-1x32", "uint4-1x32-minimums-of256"], 0)
)
def test_bits_of_chunks_do_not_depend_on_company(label, dtype, device):
    """In the tile for any number of lanes, of which blocks have more than one."""
    case = Case(label, dtype, device, lanes=70, used=2)
    tile = chunk_tile(None, 2, case.E, case.gate_up.shape[2], dtype, case.gate_up.format)
    assert tile.lanes == (32 if dtype == torch.float32 else 64)
    products = []
    for each in (case, case.take(0), case.take(69)):
        a = swiglu(each, grouped=True, tile=tile)
        grouping = each.grouping(tile.lanes)
        y = expert_sum(a, each.down, each.slot, each.routes, tile=tile, grouping=grouping)
        products.append((a.view(len(y), -1), y))
    (all_a, all_y), *single = products
    for lane, (a, y) in zip((0, 69), single, strict=True):
        assert torch.equal(a[0], all_a[lane]) and torch.equal(y[0], all_y[lane])


@pytest.mark.parametrize("label", ["int8-1x0", "e2m1-1x32"])
def test_a_block_of_128_pairs_means_what_the_weights_mean(label, device):
    case = Case(label, torch.float16, device, lanes=20, used=1, top_k=1)
    tile = chunk_tile(1024, 4, 32, case.gate_up.shape[2], torch.float16, case.gate_up.format)
    assert (tile.lanes, tile.block_m) == (128, 64)
    found = of_pairs(case, swiglu(case, grouped=True, tile=tile))
    expected = of_pairs(case, reference_swiglu(case))
    torch.testing.assert_close(found, expected, **tolerance(torch.float16))


def test_what_does_not_fit_is_refused():
    form = packed_form(WeightFormat.of_label("int4-1x32"), torch.float16)
    experts = empty_experts(form, (2, 32, 64), swiglu=True, device="cpu")
    weight = quantised(form.format, torch.float16, 48, 64, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"expert 1 has shape \(48, 64\), the others \(32, 64\)"):
        fill_expert(experts, 1, pack(weight, swiglu=True))
    with pytest.raises(ValueError, match="columns in order, and these have another"):
        empty_experts(form._replace(ordered=True), (2, 32, 64), swiglu=True, device="cpu")
