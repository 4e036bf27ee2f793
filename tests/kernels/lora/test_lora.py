"""Adapters of linears: against plain formulas, poisoned, and what they leave alone."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import AddResidual, Store, StoreSquares, StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed
from graphengine.kernels.linear.prefill.linear_swiglu import linear_swiglu_reference
from graphengine.kernels.linear.prefill.packed_chunk import packed_chunk_reference
from graphengine.kernels.linear.reference import linear_reference
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.lora.chunk import add_chunk_delta, chunk_delta
from graphengine.kernels.lora.decode import lora_delta
from graphengine.kernels.lora.slots import LoraSlots
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
    record_launch,
)
from launches.emulation import run_launch
from launches.quantised import random_quantised, to_device

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")

DECODE = importlib.import_module("graphengine.kernels.lora.decode")
CHUNK = importlib.import_module("graphengine.kernels.lora.chunk")
LAUNCHES = importlib.import_module("graphengine.kernels.linear.launches")
CHUNK_PACKED = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk")
MATRICES = {"down_ptr", "scale_ptr", "up_ptr", "part_ptr"}
EPS = 1e-5
ADAPTERS = 3
DOT = LinearPlan("dot", block_m=32, block_k=32, stages=2)
FMA = LinearPlan("fma", block_m=4, block_k=64, warps=2)


def make_slots(
    M: int, K: int, rank: int, parts: int, dtype: torch.dtype, device: str = "cpu"
) -> LoraSlots:
    """Random adapters; rows of parts are mixed, and the last slot, which nobody uses, is NaN."""
    random = torch.Generator().manual_seed(rank)
    part_M = torch.randint(parts, (M,), generator=random).to(torch.int32)
    slots = LoraSlots.new(ADAPTERS, part_M, parts=parts, columns=K, rank=rank, dtype=dtype)
    for each in slots[:3]:
        each.copy_(torch.randn(each.shape, generator=random) / 4)
        each[-1] = torch.nan
    return LoraSlots(*(each.to(device) for each in slots))


def product_of(slots: LoraSlots, adapter: int, x: torch.Tensor) -> torch.Tensor:
    """scale * B (A x) of each row of x, float64, by the definition."""
    down, up, scale = (each[adapter].double() for each in slots[:3])
    parts = [
        scale[p] * (up @ (down[p * slots.rank : (p + 1) * slots.rank] @ x.double().t())).t()
        for p in range(slots.parts)
    ]
    return torch.stack(parts).gather(0, slots.part_M.long().expand(1, len(x), -1))[0]


def adapters_by_slot(slot: torch.Tensor) -> torch.Tensor:
    """Requests in slots 0, 1, 2, ... use adapters -1, 0, 1, -1, ...; no others' are read."""
    found = torch.arange(64, dtype=torch.int32) % ADAPTERS - 1
    used = torch.zeros(64, dtype=torch.bool)
    used[slot[slot >= 0].long().cpu()] = True
    return torch.where(used, found, 2**31 - 1).to(torch.int32).to(slot.device)


@settings(deadline=None, max_examples=examples(6, 30))
@given(
    lanes=st.integers(1, 7),
    M=st.integers(1, 150),
    K=st.integers(1, 200) | st.just(4100),
    rank=st.integers(1, 9) | st.just(16),
    parts=st.integers(1, 3),
    dtype=st.integers(0, 2),
    groups=st.sampled_from([0, 1, 5]),
    data=st.data(),
)
def test_each_lane_gets_its_adapter(
    device, dtypes, make_linear_case, lanes, M, K, rank, parts, dtype, groups, data
):
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    dtype = dtypes[dtype % len(dtypes)]
    case = make_linear_case(lanes, M, K, dtype, device=device, groups=groups, padded=tuple(padded))
    slots = make_slots(M, K, rank, parts, dtype, device)
    adapter_S = adapters_by_slot(case.slot)
    case.x[case.slot < 0] = torch.nan
    delta = lora_delta(case.call(eps=EPS), slots, adapter_S)
    for lane in torch.nonzero(case.slot >= 0).flatten().tolist():
        adapter = int(adapter_S[case.slot[lane]])
        if adapter < 0:
            assert (delta[lane] == 0).all() and delta[lane].signbit().all()
            continue
        x = case.x[lane : lane + 1].double()
        if groups:
            x = x / (case.squares[:, lane].double().sum() / K + EPS).sqrt()
        expected = product_of(slots, adapter, x)[0]
        error = (delta[lane].double() - expected).abs().max()
        assert error <= 1e-5 * (1 + expected.abs().max()) * K**0.5, f"{lane=}, {error=}"


def test_bits_do_not_depend_on_neighbours(
    device, dtypes, make_linear_case, assert_lanes_keep_their_bits
):
    for dtype in dtypes:
        case = make_linear_case(7, 70, 136, dtype, device=device, groups=3)
        slots = make_slots(70, 136, 5, 2, dtype, device)
        adapter_S = adapters_by_slot(case.slot)

        def run(case: Any, slots: LoraSlots = slots, adapter_S: Any = adapter_S) -> Any:
            return (lora_delta(case.call(eps=EPS), slots, adapter_S),)

        assert_lanes_keep_their_bits(case, run, (1, 2, 5, 12))


# The product that it is added to.


def epilogue_of(kind: str, case: Any) -> tuple[Any, list[torch.Tensor]]:
    """An epilogue into fresh memory, and what it leaves."""
    lanes, M = len(case.x), len(case.weight)
    if kind == "store":
        out = torch.full((lanes, M), 77.0, dtype=case.x.dtype, device=case.x.device)
        return Store(out=out), [out]
    if kind == "swiglu":
        out = torch.full((lanes, M // 2), 77.0, dtype=case.x.dtype, device=case.x.device)
        return StoreSwiglu(out=out), [out]
    if kind == "product":
        return StoreSquares(), []
    stream = Residual(case.stream.clone(), torch.zeros_like(case.stream, dtype=case.x.dtype), None)
    return AddResidual(stream, case.next_norm), [stream.x, stream.scaled]


def outputs_of(call: LinearCall, kind: str, case: Any, *, emulated: bool = False) -> list[Any]:
    """What the live lanes of a product become."""
    needed = arrivals_needed(call.cut, len(case.weight))
    arrivals = torch.zeros(needed, dtype=torch.int32, device=case.x.device)
    call = call._replace(launch=Launch(arrivals=arrivals))
    epilogue, left = epilogue_of(kind, case)
    found: list[Any] = []

    def run() -> None:
        found.append(linear(call, epilogue))

    if emulated:
        run_launch(record_launch(LAUNCHES, run))
    else:
        run()
    live = call.slot_N >= 0
    if kind == "product":
        return [found[0].y[live], found[0].squares[:, live]]
    return [each[live] for each in left]


def check_added(case: Any, plan: LinearPlan, kind: str, close: Any, **options: Any) -> None:
    """-0.0 changes no bit; anything else is added, and to no padded lane."""
    call = case.call(eps=EPS, plan=plan)
    lanes, M = len(case.x), call.rows
    nothing = torch.full((lanes, M), -0.0, device=case.x.device)
    nothing[case.slot < 0] = torch.nan
    without = outputs_of(call, kind, case, **options)
    for delta in (nothing, nothing.to(case.x.dtype)):
        for one, other in zip(
            outputs_of(call._replace(delta_NM=delta), kind, case, **options), without, strict=True
        ):
            assert torch.equal(one, other)
    delta = torch.randn(lanes, M).to(case.x.device)
    call = call._replace(delta_NM=delta)
    epilogue, left = epilogue_of(kind, case)
    expected = linear_reference(call, epilogue)
    left = [expected.y] if kind == "product" else left
    found = outputs_of(call, kind, case, **options)
    for one, other in zip(found, left, strict=False):
        close(one, other[case.slot >= 0], case.x.dtype)


@pytest.mark.parametrize("plan", [DOT, DOT._replace(splits=2), FMA])
@pytest.mark.parametrize("kind", ["store", "swiglu", "residual", "product"])
def test_is_added_to_products(device, dtypes, make_linear_case, assert_products_close, plan, kind):
    lanes = 2 if plan.family == "fma" else 19
    for dtype in dtypes:
        for bias in (False, True):
            case = make_linear_case(
                lanes, 70, 136, dtype, device=device, bias=bias, padded=(1,),
                groups=3 if kind in ("store", "swiglu") else 0,
            )  # fmt: skip
            check_added(case, plan, kind, assert_products_close)


@compiles
@pytest.mark.parametrize(
    ("kind", "bias"), [("store", True), ("swiglu", False), ("residual", False)]
)
@pytest.mark.parametrize("name", ["e4m3", "int4"])
def test_is_added_to_products_of_packed_weights(
    make_linear_case, assert_products_close, name, kind, bias
):
    """On a CPU the kernel is emulated, so bits are those that sm_90's fused sums have."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = LinearPlan("dot", block_m=32, block_k=128, splits=1, stages=2)
    case = make_linear_case(
        5, 40, 328, torch.bfloat16, device=device, bias=bias, padded=(1,),
        groups=0 if kind == "residual" else 2,
    )  # fmt: skip
    weight = to_device(pack(random_quantised(name, 40, 328), swiglu=kind == "swiglu"), device)
    packed = _Packed(case, weight)
    check_added(packed, plan, kind, assert_products_close, emulated=device == "cpu")


class _Packed:
    """A case whose products have a packed weight."""

    def __init__(self, case: Any, weight: Any) -> None:
        self._case, self._packed = case, weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._case, name)

    def call(self, **changes: Any) -> LinearCall:
        return self._case.call(weight_MK=self._packed, **changes)


@pytest.mark.parametrize(
    "delta", [torch.zeros(2, 5), torch.zeros(3, 6).t()[:3], torch.zeros(3, 6, dtype=torch.float64)]
)
def test_refuses_a_delta_that_does_not_fit(make_linear_case, delta):
    case = make_linear_case(3, 6, 8, torch.float32)
    with pytest.raises(ValueError, match=r"delta must be a dense torch.float32 .* \[3, 6\], not"):
        case.call(delta_NM=delta).checked("store")


# A chunk of a prompt.


@settings(deadline=None, max_examples=examples(6, 30))
@given(
    lanes=st.integers(2, 70),
    M=st.integers(1, 150),
    K=st.integers(1, 200),
    rank=st.integers(1, 9) | st.just(20),
    parts=st.integers(1, 3),
    dtype=st.integers(0, 2),
    adapter=st.integers(-1, ADAPTERS - 2),
)
@example(lanes=33, M=129, K=65, rank=17, parts=3, dtype=0, adapter=0)
def test_a_chunk_has_one_adapter(device, dtypes, lanes, M, K, rank, parts, dtype, adapter):
    dtype = dtypes[dtype % len(dtypes)]
    slots = make_slots(M, K, rank, parts, dtype, device)
    x = torch.randn(lanes, K).to(device, dtype)
    x[lanes // 2] = torch.nan
    live = torch.arange(lanes, device=device) != lanes // 2
    adapter_1 = torch.tensor([adapter], dtype=torch.int32, device=device)
    room = torch.randn(lanes + 1, M + 4).to(device, dtype)
    before = room.clone()
    out = room[:lanes, :M]
    assert add_chunk_delta(out, x, slots, adapter_1) is out
    delta = chunk_delta(x, slots, adapter_1)
    if adapter < 0:
        assert torch.equal(room, before)
        assert (delta == 0).all() and delta.signbit().all()
        return
    expected = product_of(slots, adapter, x[live])
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    bound = tolerance * (1 + expected.abs().max()) * (1 + rank**0.5)
    assert ((delta[live].double() - expected).abs().max()) <= bound
    added = out[live].double() - before[:lanes, :M][live].double()
    assert (added - expected).abs().max() <= 3 * bound
    out.copy_(before[:lanes, :M])
    assert torch.equal(room, before), "something past the outputs was written"


@settings(deadline=None, max_examples=examples(6, 30))
@given(
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    absent=st.integers(0, 2),
    padded=st.integers(0, 40),
    dtype=st.integers(0, 2),
    data=st.data(),
)
@example(counts=[32, 1, 33], absent=1, padded=0, dtype=0, data=None)
def test_chunks_of_several_prompts_have_their_own(
    device, dtypes, counts, absent, padded, dtype, data
):
    """The bits of each chunk alone; lanes past the chunks are neither read nor written."""
    dtype = dtypes[dtype % len(dtypes)]
    slots = make_slots(133, 72, 5, 2, dtype, device)
    adapter = st.integers(-1, ADAPTERS - 2)
    adapters = [0, -1, 1] if data is None else [data.draw(adapter) for _ in counts]
    ends = torch.tensor([0, *counts, *[0] * absent], dtype=torch.int32).cumsum(0).int().to(device)
    adapter_P = torch.tensor([*adapters, *[-1] * absent], dtype=torch.int32, device=device)
    total = sum(counts)
    x = torch.randn(total + padded, 72).to(device, dtype)
    x[total:] = torch.nan
    before = torch.randn(total + padded, 133).to(device, dtype)
    out = add_chunk_delta(before.clone(), x, slots, adapter_P, ends)
    delta = chunk_delta(x, slots, adapter_P, ends)
    assert torch.equal(out[total:], before[total:])
    first = 0
    for chunk, count in enumerate(counts):
        lanes, own = slice(first, first + count), adapter_P[chunk : chunk + 1]
        alone = add_chunk_delta(before[lanes].clone(), x[lanes], slots, own)
        assert torch.equal(out[lanes], alone), f"{chunk=}"
        bits = chunk_delta(x[lanes], slots, own).float().view(torch.int32)
        assert torch.equal(delta[lanes].float().view(torch.int32), bits), f"{chunk=}"
        first += count


def test_chunks_and_adapters_must_be_as_many():
    slots, x = make_slots(6, 8, 2, 2, torch.float32), torch.zeros(4, 8)
    one, starts = torch.zeros(1).int(), torch.tensor([0, 2, 4]).int()
    with pytest.raises(ValueError, match=r"adapter_P must be a dense torch.int32 \[2\], not .*1,"):
        chunk_delta(x, slots, one, starts)
    with pytest.raises(ValueError, match=r"adapter_P must be a dense torch.int32 \[1\], not .*2,"):
        chunk_delta(x, slots, starts[:2])
    with pytest.raises(ValueError, match=r"query_start must be a dense int32 .* not torch.int64"):
        chunk_delta(x, slots, one, starts.long())


def test_is_added_before_the_activation():
    x, weight, delta = torch.randn(5, 8), torch.randn(12, 8), torch.randn(5, 12)
    gate, up = (x @ weight.t() + delta).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(linear_swiglu_reference(x, weight, delta_NM=delta), expected)
    packed = pack(random_quantised("int4", 12, 32), swiglu=True)
    x = torch.randn(5, 32)
    whole, with_delta = torch.empty(5, 12), torch.empty(5, 12)
    packed_chunk_reference(x, packed, None, out=whole)
    packed_chunk_reference(x, packed, None, out=with_delta, delta=delta)
    torch.testing.assert_close(with_delta, whole + delta)


# What it refuses, and what it compiles to.


def test_sizes_must_fit(make_linear_case):
    case = make_linear_case(2, 6, 8, torch.float32)
    adapter_S = torch.full((4,), -1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"down of 3 slots must be .* \[3, 4, 8\], not .* \[3, 4, 9\]"
    ):
        lora_delta(case.call(), make_slots(6, 9, 2, 2, torch.float32), adapter_S)
    with pytest.raises(ValueError, match="slots for M=7 weight rows, and the weight has 6"):
        lora_delta(case.call(), make_slots(7, 8, 2, 2, torch.float32), adapter_S)


@compiles
def test_compiles_for_hopper(make_linear_case):
    """Each of the four kernels waits once before it shows anything; those that start the next
    launch early load their matrices early, too.
    """
    case = make_linear_case(2, 300, 512, torch.bfloat16, groups=8)
    slots = make_slots(300, 512, 16, 3, torch.bfloat16)
    adapter_S = adapters_by_slot(case.slot)
    launch = Launch(pdl=True)
    compiled: list[str] = []

    def take(op: Any, starts_early: bool) -> None:
        ptx, names = compile_launch(op)
        assert_waits_before_it_shows(ptx, starts_early=starts_early)
        compiled.append(op.name)
        if starts_early:
            loads = [each for each in global_loads(ptx, names) if each.argument in MATRICES]
            assert loads and not any(each.after_wait for each in loads)

    with launches_handed_to(partial(take, starts_early=True), DECODE):
        lora_delta(case.call(eps=EPS, launch=launch), slots, adapter_S, starts_early=True)
    with launches_handed_to(partial(take, starts_early=False), DECODE):
        lora_delta(case.call(eps=EPS, launch=launch), slots, adapter_S)
    with launches_handed_to(partial(take, starts_early=False), CHUNK):
        chunk_delta(case.x, slots, adapter_S[:1], pdl=True)
        chunk_delta(case.x, slots, adapter_S[:3], torch.zeros(4).int(), pdl=True)
    lanes = ["_shrink_lanes_kernel", "_expand_lanes_kernel"]
    assert compiled == [*lanes, *lanes, *["_shrink_kernel", "_expand_kernel"] * 2]
