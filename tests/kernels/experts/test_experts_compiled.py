"""What the experts' kernels are compiled to for sm_90, without a GPU: waits, products, stages."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.grouping import Grouping, group_pairs, most_blocks
from graphengine.kernels.experts.packed.weights import empty_experts
from graphengine.kernels.experts.plans import DECODE_BLOCK, chunk_tile, expert_plan
from graphengine.kernels.experts.records import given_routes, publish_routes, route_items
from graphengine.kernels.experts.router import Router, Routes, route
from graphengine.kernels.linear.packed import packed_form
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.norm_rope.activation import ClampedSwiglu, Gating
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_kernel,
    compile_launch,
    global_loads,
    record_launch,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

HIDDEN, FFN, EXPERTS, TOP_K = 2048, 768, 128, 8
experts = importlib.import_module("graphengine.kernels.experts.experts")
launchers = [
    importlib.import_module(f"graphengine.kernels.experts.{name}")
    for name in ("launches", "packed.packed_decode")
]


class Operands:
    """Operands of Qwen3-30B-A3B in bfloat16, without memory; pairs in blocks of `size`, 0: not
    grouped.
    """

    def __init__(self, lanes: int, size: int = 0, biased: bool = False, gated: bool = True) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        pairs = lanes * TOP_K
        self.x, self.a, self.norm = new(lanes, HIDDEN), new(pairs, FFN), new(HIDDEN)
        rows, self.gated = 2 * FFN if gated else FFN, gated
        self.gate_up, self.down = new(EXPERTS, rows, HIDDEN), new(EXPERTS, HIDDEN, FFN)
        self.slot = new(lanes, dtype=torch.int32)
        self.routes = Routes(
            new(lanes, TOP_K, dtype=torch.int32), new(lanes, TOP_K, dtype=torch.float32)
        )
        self.squares = new(64, lanes, dtype=torch.float32)
        self.stream = Residual(new(lanes, HIDDEN, dtype=torch.float32), new(lanes, HIDDEN), None)
        self.arrivals = new(experts.residual_arrivals(lanes, HIDDEN), dtype=torch.int32)
        self.gate_up_bias = new(EXPERTS, 2 * FFN) if biased else None
        self.down_bias = new(EXPERTS, HIDDEN) if biased else None
        self.gating: Gating = ClampedSwiglu() if biased else "silu"
        self.grouping = None
        if size:
            blocks = most_blocks(pairs, EXPERTS, size)
            order, found = new(pairs, dtype=torch.int32), new(3, blocks, dtype=torch.int32)
            self.grouping = Grouping(order, found, size)


def of_gate_up(operands, tile, squares=True):
    return record_launch(
        experts,
        lambda: experts.expert_inner(
            operands.x,
            operands.gate_up,
            operands.slot,
            operands.routes,
            tile=tile,
            squares_TN=operands.squares if squares else None,
            eps=1e-6,
            bias_EM=operands.gate_up_bias,
            gating=operands.gating,
            gated=operands.gated,
            grouping=operands.grouping,
            pdl=True,
        ),
        *launchers,
    )


def of_down(operands, plan):
    return record_launch(
        experts,
        lambda: experts.expert_residual(
            operands.a,
            operands.down,
            operands.slot,
            operands.routes,
            operands.stream,
            operands.norm,
            plan=plan,
            arrivals=operands.arrivals,
            bias_EH=operands.down_bias,
            grouping=operands.grouping,
            pdl=True,
        ),
        *launchers,
    )


def products(ptx):
    """The tensor cores' instructions."""
    return {
        word.partition(".row")[0] for word in re.findall(r"(?:wgmma|mma)\.\S*m\d+n\d+k\S*", ptx)
    }


@pytest.mark.parametrize("size", [0, DECODE_BLOCK])
def test_decode_multiplies_in_one_order(size):
    """A `wgmma`, or another shape of `mma.sync`, would sum a pair's products otherwise."""
    plan = expert_plan("swiglu", 2 * FFN, HIDDEN, torch.bfloat16, "dot")
    ptx, names = compile_launch(of_gate_up(Operands(8, size), plan))
    assert_waits_before_it_shows(ptx)
    assert products(ptx) == {"mma.sync.aligned.m16n8k16"}
    loads = list(global_loads(ptx, names))
    assert all(load.after_wait for load in loads)
    # Weights go to shared memory in pieces of 16 bytes.
    assert {load.size for load in loads if load.argument == "weight_ptr"} == {16}


@pytest.mark.parametrize("family", ["fma", "dot"])
def test_ups_without_gates_wait_for_the_ids(family):
    """They wait as gates and ups do, whose products they are."""
    plan = expert_plan("store", FFN, HIDDEN, torch.bfloat16, family)
    assert plan.family == family
    ptx, names = compile_launch(of_gate_up(Operands(1, gated=False), plan))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert all(load.after_wait for load in loads)
    assert {load.size for load in loads if load.argument == "weight_ptr"} == {16}
    assert products(ptx) == ({"mma.sync.aligned.m16n8k16"} if family == "dot" else set())


@pytest.mark.parametrize("size", [0, DECODE_BLOCK])
def test_down_multiplies_in_one_order_and_adds_up_in_the_last_program(size):
    plan = expert_plan("residual", HIDDEN, FFN, torch.bfloat16, "dot")
    compiled, _ = compile_kernel(of_down(Operands(8, size), plan))
    ptx = compiled.asm["ptx"]
    assert_waits_before_it_shows(ptx)
    assert products(ptx) == {"mma.sync.aligned.m16n8k16"}
    assert re.search(r"atom\.\S*acq_rel\S*add", ptx)
    stage = (DECODE_BLOCK + plan.block_m) * plan.block_k * 2
    assert compiled.metadata.shared >= (plan.stages - 1) * stage


def test_down_of_single_pairs_asks_for_its_weights_before_the_wait():
    """Slots and experts are of two launches before, and are not looked for in L1."""
    launch = of_down(Operands(1), LinearPlan("fma", block_m=16, block_k=256))
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    assert early == {"slot_ptr", "expert_ptr", "weight_ptr"}
    weights = [load for load in loads if load.argument == "weight_ptr"]
    assert {(load.size, load.after_wait) for load in weights} == {(16, False)}
    assert len(re.findall(r"ld\.global\.cg", ptx)) == 2


@pytest.mark.parametrize("gating", ["gelu_tanh", ClampedSwiglu()], ids=["gelu", "clamped"])
@pytest.mark.parametrize("family", ["fma", "dot"])
def test_biases_and_other_gates_are_compiled(family, gating):
    # The family `fma` takes pairs one by one.
    size = DECODE_BLOCK if family == "dot" else 0
    operands = Operands(8, size, biased=True)
    operands.gating = gating
    gate_up = expert_plan("swiglu", 2 * FFN, HIDDEN, torch.bfloat16, family)
    down = expert_plan("residual", HIDDEN, FFN, torch.bfloat16, family)
    for launch in (of_gate_up(operands, gate_up), of_down(operands, down)):
        ptx, names = compile_launch(launch)
        assert_waits_before_it_shows(ptx)
        assert any(load.argument == "bias_ptr" for load in global_loads(ptx, names))


def test_fma_waits_for_the_ids_of_gate_and_up():
    plan = expert_plan("swiglu", 2 * FFN, HIDDEN, torch.bfloat16, "fma")
    assert plan.family == "fma"
    ptx, names = compile_launch(of_gate_up(Operands(1), plan))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert all(load.after_wait for load in loads)
    assert sum(load.size for load in loads if load.argument == "weight_ptr") == (
        plan.block_m * HIDDEN * 2 // (32 * plan.warps)
    )


@pytest.mark.parametrize(
    ("lanes", "product"),
    [(16, "mma.sync.aligned.m16n8k16"), (1024, "wgmma.mma_async.sync.aligned.m64n128k16")],
)
def test_chunks_take_the_tensor_cores(lanes, product):
    tile = chunk_tile(lanes, TOP_K, EXPERTS, HIDDEN, torch.bfloat16)
    ptx, _ = compile_launch(of_gate_up(Operands(lanes, tile.lanes), tile, squares=False))
    assert_waits_before_it_shows(ptx)
    assert {word.partition(".f32")[0] for word in products(ptx)} == {product}


@pytest.mark.parametrize("label", extent([""], ["", "e2m1-1x32"]))
def test_chunks_of_any_number_of_lanes_multiply_in_one_order(label):
    """By the same instructions, as many of them, in one tile."""
    kind = WeightFormat.of_label(label) if label else None
    tile, found = chunk_tile(None, TOP_K, EXPERTS, HIDDEN, torch.bfloat16, kind), []
    for lanes in (1, 1024):
        size = tile.lanes
        operands = packed_operands(label, lanes, size) if label else Operands(lanes, size)
        ptx, _ = compile_launch(of_gate_up(operands, tile, squares=False))
        found.append(re.findall(r"(?:wgmma|mma)\.\S*m\d+n\d+k\S*", ptx))
    assert found[0] == found[1] and {word.partition("_")[0] for word in found[0]} == {"wgmma.mma"}


def test_router_and_grouping_wait():
    lanes = Operands(8)
    logits = torch.empty((8, EXPERTS), device="meta")
    correction = torch.empty(EXPERTS, device="meta")
    router = Router(top_k=TOP_K, scores="sigmoid", groups=8, top_groups=4)
    ptx, names = compile_launch(
        record_launch(
            importlib.import_module("graphengine.kernels.experts.router"),
            lambda: route(logits, lanes.slot, router, correction_E=correction, pdl=True),
        )
    )
    assert_waits_before_it_shows(ptx)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert early == {"correction_ptr"}
    grouping = record_launch(
        importlib.import_module("graphengine.kernels.experts.grouping"),
        lambda: group_pairs(
            lanes.routes.expert, lanes.slot, experts=EXPERTS, size=DECODE_BLOCK, pdl=True
        ),
    )
    assert_waits_before_it_shows(compile_launch(grouping)[0])


def test_kernels_of_records_wait_and_store_whole_words():
    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    records = importlib.import_module("graphengine.kernels.experts.records")
    layers, rows, drafts = 48, 4, 3
    lanes = rows * (1 + drafts)
    expert = new(layers, lanes, TOP_K)
    mailbox = new(6, rows, (1 + drafts) * route_items(layers, TOP_K), dtype=torch.int64)
    publishing = record_launch(
        records,
        lambda: publish_routes(
            mailbox, new(1, dtype=torch.int64), new(rows), new(lanes), expert, pdl=True
        ),
    )
    ptx, names = compile_launch(publishing)
    assert_waits_before_it_shows(ptx)
    assert all(load.after_wait for load in global_loads(ptx, names))
    # Two aligned words in a store are as whole as one.
    stores = set(re.findall(r"st\.global\S*", ptx))
    assert stores and stores <= {"st.global.b64", "st.global.v2.b64"}, f"{stores=}"
    table = new(rows, 4096, layers, TOP_K, dtype=torch.int16)
    fetching = record_launch(
        records,
        lambda: given_routes(table, new(rows), new(lanes), new(lanes), pdl=True),
    )
    ptx, names = compile_launch(fetching)
    assert_waits_before_it_shows(ptx)
    assert all(load.after_wait for load in global_loads(ptx, names))


def test_a_router_without_given_ids_has_no_code_for_them():
    module = importlib.import_module("graphengine.kernels.experts.router")
    lanes, router = Operands(8), Router(top_k=TOP_K, normalised=True)
    logits = torch.empty((8, EXPERTS), device="meta")
    loads = []
    for given in (None, lanes.routes.expert):
        launch = record_launch(
            module,
            lambda given=given: route(logits, lanes.slot, router, given_Nk=given, pdl=True),
        )
        loads.append({load.argument for load in global_loads(*compile_launch(launch))})
    assert loads == [{"slot_ptr", "logits_ptr"}, {"slot_ptr", "logits_ptr", "given_ptr"}]


PACKED = {
    "e4m3-128x128": torch.float32,
    "int4-1x64-zeros": torch.float16,
    "int8-1x0": torch.bfloat16,
    "e2m1-1x32": torch.uint8,
    "uint4-1x32-minimums-of256": torch.int8,
    "int8-1x16-of256": torch.int8,
}


def packed_operands(label, lanes, size=0, gated=True):
    operands = Operands(lanes, size, gated=gated)
    form = packed_form(WeightFormat.of_label(label), PACKED[label])
    for name, swiglu in (("gate_up", gated), ("down", False)):
        shape = tuple(getattr(operands, name).shape)
        setattr(operands, name, empty_experts(form, shape, swiglu=swiglu, device="meta"))
    return operands


@pytest.mark.parametrize("label", PACKED)
def test_packed_experts_are_multiplied_by_the_tensor_cores(label):
    """In decode by the one shape of instruction that dense experts have, too."""
    kind, dtype = WeightFormat.of_label(label), torch.bfloat16
    alone = packed_operands(label, 8)
    gate_up = expert_plan("swiglu", 2 * FFN, HIDDEN, dtype, "dot", kind)
    down = expert_plan("residual", HIDDEN, FFN, dtype, "dot", kind)
    for launch in (of_gate_up(alone, gate_up, squares=False), of_down(alone, down)):
        ptx, _ = compile_launch(launch)
        assert_waits_before_it_shows(ptx)
        assert products(ptx) == {"mma.sync.aligned.m16n8k16"}
    tile = chunk_tile(1024, TOP_K, EXPERTS, HIDDEN, dtype, kind)
    chunk = packed_operands(label, 1024, tile.lanes)
    ptx, _ = compile_launch(of_gate_up(chunk, tile, squares=False))
    assert_waits_before_it_shows(ptx)
    assert products(ptx)


@pytest.mark.parametrize("label", [label for label in PACKED if not re.search("zeros|of", label)])
@pytest.mark.parametrize("lanes", [8, 1024])
def test_codes_become_halves_by_bit_operations(label, lanes):
    """Neither integers nor bytes of floats are converted one by one, and codes come in pieces of 8
    bytes or more, in decode of 16.
    """
    kind = WeightFormat.of_label(label)
    if lanes == 8:
        tile, size = expert_plan("swiglu", 2 * FFN, HIDDEN, torch.bfloat16, "dot", kind), 0
    else:
        tile = chunk_tile(lanes, TOP_K, EXPERTS, HIDDEN, torch.bfloat16, kind)
        size = tile.lanes
    launch = of_gate_up(packed_operands(label, lanes, size), tile, squares=False)
    ptx, names = compile_launch(launch)
    assert not re.findall(r"cvt\.rn\.f(?:32|16)\.[su]\d+|cvt\S*e4m3x2", ptx)
    codes = {load.size for load in global_loads(ptx, names) if load.argument.endswith(".codes")}
    assert codes and max(codes) >= 8, f"{codes=}"
    assert lanes != 8 or codes == {16}


@pytest.mark.parametrize("size", [0, 8])
def test_packed_codes_of_down_are_asked_for_before_the_wait(size):
    """Who the experts are was known two launches before, and is not looked for in L1; gates and ups
    wait for the router.
    """
    kind, dtype = WeightFormat.of_label("e2m1-1x32"), torch.bfloat16
    operands = packed_operands("e2m1-1x32", 8, size)
    found = []
    for name, of in (("gate_up", of_gate_up), ("down", of_down)):
        _, M, K = getattr(operands, name).shape
        plan = expert_plan("swiglu" if name == "gate_up" else "residual", M, K, dtype, "dot", kind)
        ptx, names = compile_launch(of(operands, plan))
        assert_waits_before_it_shows(ptx)
        found.append([load for load in global_loads(ptx, names) if not load.after_wait])
    ids = {"blocks_ptr", "order_ptr"} if size else {"slot_ptr", "expert_ptr"}
    weights = {"weight.codes", "weight.scales", "weight.row_scales", "stream.next_norm"}
    ups = expert_plan("store", FFN, HIDDEN, dtype, "dot", kind)
    ptx, names = compile_launch(of_gate_up(packed_operands("e2m1-1x32", 8, size, gated=False), ups))
    assert_waits_before_it_shows(ptx)
    assert all(load.after_wait for load in global_loads(ptx, names))
    gate_up, down = found
    assert not gate_up and {load.argument for load in down} == ids | weights
    assert all(load.past_l1 for load in down if load.argument in ids)
