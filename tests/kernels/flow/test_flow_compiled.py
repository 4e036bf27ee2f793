"""Both kernels compile for compute capability 9.0, in the dtypes of policies."""

from __future__ import annotations

import importlib

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.flow.euler import euler_step
from graphengine.kernels.flow.noise import normal_noise
from launches.compilation import compile_launch, record_launch

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_noise_compiles() -> None:
    module = importlib.import_module("graphengine.kernels.flow.noise")
    operands = (on_meta(1, dtype=torch.int64), on_meta(50, 32), on_meta(1, dtype=torch.int32))
    ptx, _ = compile_launch(record_launch(module, lambda: normal_noise(*operands, on_meta(50, 32))))
    # Philox's 32-bit products are taken in 64 bits.
    assert "mul.wide.u32" in ptx and "st.global" in ptx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_compiles(dtype: torch.dtype) -> None:
    module = importlib.import_module("graphengine.kernels.flow.euler")

    def launch() -> None:
        euler_step(
            on_meta(50, 32),
            on_meta(50, 32, dtype=dtype),
            dt=-0.1,
            time=0.9,
            noise_MD=on_meta(50, 32),
            fixed_MD=on_meta(50, 32),
            fixed_1=on_meta(1, dtype=torch.int32),
            out_MD=on_meta(50, 32, dtype=dtype),
        )

    ptx, _ = compile_launch(record_launch(module, launch))
    assert "st.global" in ptx
