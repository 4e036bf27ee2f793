"""Gates that go through gelu in place of silu, in every kernel that fuses them with a product."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan, arrivals_needed
from graphengine.kernels.linear.prefill.lane_codes import lane_values, quantise_lanes
from graphengine.kernels.linear.prefill.linear_swiglu import linear_swiglu
from graphengine.kernels.linear.prefill.packed_chunk import ChunkTile, packed_chunk_product
from graphengine.kernels.linear.quantised import dequantise
from launches import emulation, hopper_emulation
from launches.compilation import record_launch
from launches.quantised import inputs_of, random_quantised, to_device

GELU = "gelu_tanh"
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
MODULES = {
    name: importlib.import_module(f"graphengine.kernels.linear.{name}")
    for name in ("launches", "prefill.packed_chunk", "prefill.packed_chunk_fp8")
}
ON_GPU = torch.cuda.is_available() and not INTERPRETED


def geglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    return functional.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize(
    "plan",
    [
        LinearPlan("dot", block_m=32, block_k=32, stages=2),
        LinearPlan("dot", block_m=32, block_k=32, splits=2, stages=2),
        LinearPlan("fma", block_m=4, block_k=64, warps=2),
    ],
)
def test_decode(device, dtypes, make_linear_case, assert_products_close, plan):
    """In half precision the kernel is Gluon's on a GPU, but for the family `fma`."""
    for dtype in dtypes:
        case = make_linear_case(2, 80, 136, dtype, device=device)
        counters = torch.zeros(arrivals_needed(plan, 80), dtype=torch.int32, device=device)
        call = case.call(plan=plan, launch=Launch(arrivals=counters))
        actual = linear(call, StoreSwiglu(activation=GELU))
        expected = geglu(case.x, case.weight).to(dtype)
        assert_products_close(actual, expected, dtype)


def run_packed(module: str, call: Any) -> None:
    """Natively, or, without a GPU, emulated."""
    if ON_GPU:
        call()
        return
    emulator: Any = emulation if module == "launches" else hopper_emulation
    emulator.run_launch(record_launch(MODULES[module], call, *MODULES.values()))


@pytest.fixture
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        for name in ("prefill.packed_chunk", "prefill.packed_chunk_fp8"):
            monkeypatch.setattr(MODULES[name], "processors_of", lambda tensor: 3)


@compiles
@pytest.mark.parametrize("name", ["e4m3", "int4"])
@pytest.mark.parametrize("module", ["launches", "prefill.packed_chunk"])
def test_packed(assert_products_close, few_processors, name, module):
    device = "cuda" if ON_GPU else "cpu"
    quantised = random_quantised(name, 64, 328)
    weight = to_device(pack(quantised, swiglu=True), device)
    floats = dequantise(quantised)
    x = inputs_of(floats, 9, torch.bfloat16).to(device)
    out = torch.zeros(9, 32, dtype=torch.bfloat16, device=device)
    slot = torch.arange(9, dtype=torch.int32, device=device)

    def decode() -> None:
        linear(LinearCall(x, weight, slot), StoreSwiglu(activation=GELU, out=out))

    def chunk() -> None:
        tile = ChunkTile(16, 1)
        packed_chunk_product(x, weight, None, out=out, swiglu=True, activation=GELU, tile=tile)

    run_packed(module, decode if module == "launches" else chunk)
    expected = geglu(x.cpu(), floats).to(torch.bfloat16)
    assert_products_close(out.cpu(), expected, torch.bfloat16)


@compiles
def test_packed_with_rounded_lanes(assert_products_close, few_processors):
    device = "cuda" if ON_GPU else "cpu"
    quantised = random_quantised("e4m3 in blocks", 64, 384)
    weight = to_device(pack(quantised, swiglu=True), device)
    floats = dequantise(quantised)
    codes = quantise_lanes(inputs_of(floats, 9, torch.bfloat16).to(device), pdl=False)
    out = torch.zeros(9, 32, dtype=torch.bfloat16, device=device)

    def call() -> None:
        packed_chunk_product(codes, weight, None, out=out, swiglu=True, activation=GELU)

    run_packed("prefill.packed_chunk", call)
    expected = geglu(lane_values(codes).cpu(), floats).to(torch.bfloat16)
    assert_products_close(out.cpu(), expected, torch.bfloat16)


@hopper
def test_fused_prefill(assert_products_close):
    for dtype in (torch.float16, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(200, 264, generator=generator).to("cuda", dtype)
        weight = (torch.randn(2 * 520, 264, generator=generator) / 16).to("cuda", dtype)
        actual = linear_swiglu(x, weight, activation=GELU)
        assert_products_close(actual, geglu(x, weight).to(dtype), dtype)


def test_references(assert_products_close):
    """What a CPU runs, of each of them."""
    quantised = random_quantised("e4m3 in blocks", 64, 384)
    weight, floats = pack(quantised, swiglu=True), dequantise(quantised)
    x = inputs_of(floats, 5, torch.float32)
    slot = torch.arange(5, dtype=torch.int32)
    out = torch.zeros(5, 32)
    expected = geglu(x, floats).float()
    options: dict[str, Any] = {"swiglu": True, "activation": GELU}
    for each in (weight, floats):
        store = StoreSwiglu(activation=GELU, dtype=torch.float32)
        actual = linear(LinearCall(x, each, slot), store)
        assert_products_close(actual, expected, torch.float32)
    assert_products_close(
        packed_chunk_product(x, weight, None, out=out, **options), expected, torch.float32
    )
    assert_products_close(linear_swiglu(x, floats, activation=GELU), expected, torch.float32)
    codes = quantise_lanes(x)
    packed_chunk_product(codes, weight, None, out=out, **options)
    assert_products_close(out, geglu(lane_values(codes), floats).float(), torch.float32)
