"""What adapters add, in the products that only Gluon has kernels for: compiled, and emulated."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.kernels.linear.call import LinearCall
from graphengine.kernels.linear.epilogues import STORE, AddResidual, StoreSwiglu
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.packed import pack
from graphengine.kernels.linear.plans import LinearPlan
from graphengine.kernels.linear.prefill.linear_swiglu import linear_swiglu
from graphengine.kernels.linear.prefill.packed_chunk import (
    ChunkTile,
    packed_chunk_product,
    packed_chunk_reference,
)
from graphengine.kernels.linear.quantised import dequantise
from graphengine.kernels.linear.residual import Residual
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)
from launches.hopper_emulation import run_launch
from launches.quantised import inputs_of, random_quantised

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")

MODULE = importlib.import_module("graphengine.kernels.linear.prefill.packed_chunk")
BF16 = torch.bfloat16
PLAN = LinearPlan("dot", block_m=32, block_k=64, stages=2)


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def compiled(run: Callable[[], Any]) -> tuple[str, str, list[str]]:
    """Name, PTX and arguments of the only launch, for an H200."""
    ops: list[Op] = []
    with assumed(H200), ops_handed_to(ops.append):
        run()
    (op,) = ops
    return op.name, *compile_launch(op)


def check_reads_delta_late(ptx: str, names: list[str], name: str) -> None:
    """It is loaded, and not before the launch that wrote it is complete."""
    loads = [load for load in global_loads(ptx, names) if load.argument == name]
    assert loads and all(load.after_wait for load in loads)


@pytest.mark.parametrize("kind", ["store", "swiglu", "residual"])
def test_decode_reads_it_after_its_wait(kind):
    lanes, M, K = 3, 320, 256
    slot, delta = new(lanes, dtype=torch.int32), new(lanes, M, dtype=torch.float32)
    call = LinearCall(
        new(lanes, K), new(M, K), slot, delta_NM=delta, plan=PLAN, launch=Launch(pdl=True)
    )

    def run() -> None:
        if kind == "residual":
            stream = Residual(new(lanes, M, dtype=torch.float32), new(lanes, M), new(0))
            linear(call, AddResidual(stream, new(M)))
        else:
            linear(call, StoreSwiglu() if kind == "swiglu" else STORE)

    name, ptx, names = compiled(run)
    assert name == "dot_kernel"
    assert_waits_before_it_shows(ptx)
    check_reads_delta_late(ptx, names, "delta_ptr")


def test_prefill_reads_it_after_its_wait():
    x, weight, delta = new(1024, 512), new(2 * 8192, 512), new(1024, 2 * 8192)
    name, ptx, names = compiled(lambda: linear_swiglu(x, weight, pdl=True, delta_NM=delta))
    assert name == "_swiglu_kernel"
    check_reads_delta_late(ptx, names, "delta.rows")


@pytest.mark.parametrize(("name", "swiglu"), [("int4", True), ("e4m3", None)])
def test_packed_chunks(monkeypatch, assert_products_close, name, swiglu):
    """-0.0 changes no bit, and other values are added before the activation."""
    monkeypatch.setattr(MODULE, "processors_of", lambda tensor: 3)
    quantised = random_quantised(name, 72, 328)
    weight = pack(quantised, swiglu=swiglu is not None)
    x = inputs_of(dequantise(quantised), 5, BF16)
    bias, delta = torch.randn(72).to(x), torch.randn(5, 72).to(x)

    def product(delta: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_full((5, 36 if swiglu else 72), 7.0)
        options: dict[str, Any] = {"swiglu": bool(swiglu), "tile": ChunkTile(16, 1)}
        run_launch(
            record_launch(
                MODULE,
                lambda: packed_chunk_product(x, weight, bias, out=out, delta=delta, **options),
            )
        )
        return out

    nothing = torch.full_like(delta, -0.0)
    assert torch.equal(product(nothing, bias), product(None, bias))
    expected = x.new_empty(5, 36 if swiglu else 72)
    packed_chunk_reference(x, weight, bias, out=expected, swiglu=bool(swiglu), delta=delta)
    assert_products_close(product(delta, bias), expected, BF16)
