"""Programmatic dependent launch of the prefill kernels, after launches of the BLAS that know
nothing of it: what may be loaded before the wait, read from the PTX without a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.norm_rope.activation import swiglu
from graphengine.kernels.norm_rope.norm import add_rms_norm
from graphengine.kernels.norm_rope.rope import rope_append
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

LANES, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 128, 32, 8, 128, 16


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int32)


def cache(columns: int = 8, *, fp8: bool = False) -> dict[str, torch.Tensor]:
    shape = (9, 2, BLOCK, KV_HEADS, HEAD_DIM)
    table = ints(1, columns)
    if not fp8:
        return {"kv": new(*shape), "block_table_SB": table}
    scales = new(2, KV_HEADS, dtype=torch.float32)
    return {"kv": new(*shape, dtype=FP8_KV), "block_table_SB": table, "kv_scales": scales}


def norm() -> None:
    x = new(LANES, 4096, dtype=torch.float32)
    add_rms_norm(
        x, new(LANES, 4096), new(4096), ints(LANES), eps=1e-5, out_dtype=torch.bfloat16, pdl=True
    )


def activation() -> None:
    swiglu(new(LANES, 2048), ints(LANES), pdl=True)


def rope(*, fp8: bool = False, **norms: Any) -> None:
    angles = {name: new(256, HEAD_DIM // 2, dtype=torch.float32) for name in ("cos", "sin")}
    rope_append(
        new(LANES, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        **angles,
        **cache(fp8=fp8),
        slot_N=ints(LANES),
        position_N=ints(LANES),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        pdl=True,
        **norms,
    )


def rope_then_norms() -> None:
    norm = new(HEAD_DIM)
    rope(q_norm_weight=norm, k_norm_weight=norm, eps=1e-5, norm_after=True)


def rope_fp8() -> None:
    rope(fp8=True)


def split_attention() -> None:
    attention(lanes=16, columns=512, launch=Launch(arrivals=ints(128), pdl=True))


def attention_fp8() -> None:
    attention(fp8=True)


def attention(
    lanes: int = LANES,
    columns: int = 8,
    launch: Launch = Launch(pdl=True),  # noqa: B008
    *,
    fp8: bool = False,
) -> None:
    paged_prefill_attention(
        new(lanes, HEADS, HEAD_DIM),
        **cache(columns, fp8=fp8),
        query_start_P1=ints(2),
        slot_P=ints(1),
        position_P=ints(1),
        scale=1.0,
        launch=launch,
    )


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    "module, call, early",
    [
        ("norm_rope.norm", norm, {"weight_ptr"}),
        ("norm_rope.activation", activation, set()),
        ("norm_rope.rope", rope, set()),
        ("norm_rope.rope", rope_fp8, set()),
        ("norm_rope.rope", rope_then_norms, set()),
        ("attention.prefill", attention, set()),
        ("attention.prefill", attention_fp8, set()),
        ("attention.prefill", split_attention, set()),
    ],
)
def test_loads_nothing_but_weights_before_the_wait(
    module: str, call: Callable[[], Any], early: set[str]
) -> None:
    launch = record_launch(importlib.import_module(f"graphengine.kernels.{module}"), call)
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert {load.argument for load in loads if not load.after_wait} == early
    late = {load.argument for load in loads if load.after_wait}
    assert "slot_ptr" in late
    shape = launch.arguments.get("shape")
    splits = shape is not None and shape.splits.value > 1
    assert splits == (call is split_attention) == ("part_ptr" in late)
