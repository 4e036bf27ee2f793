"""Decode attention in Gluon: which launches it takes, and what it compiles to.

What it computes is for native tests: `test_decode.py`, `test_decode_rows.py`, `test_decode_fp8.py`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from extent import extent
from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.gluon import decode_gluon
from graphengine.kernels.core.devices import H200, Device, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_kernel,
    record_launch,
)

not_interpreted = pytest.mark.skipif(INTERPRETED, reason="an interpreted process has no Gluon")

BF16 = torch.bfloat16
# The module, whose name the package gives to the function.
attention = importlib.import_module("graphengine.kernels.attention.decode")


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attend_nothing(
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    rows: int = 8,
    width: int = 1,
    split: int = 256,
    max_seq_len: int = 4096,
    normed: bool = False,
    norm_after: bool = False,
    norm_dtype: torch.dtype = BF16,
    window: int = 0,
    kv_dtype: torch.dtype = BF16,
) -> None:
    lanes = rows * width
    counters = decode_attention_arrivals(lanes, num_heads=heads, num_kv_heads=kv_heads)
    norm = new(head_dim, dtype=norm_dtype) if normed else None
    decode_attention(
        new(lanes, (heads + 2 * kv_heads) * head_dim),
        new(max_seq_len, head_dim // 2, dtype=torch.float32),
        new(max_seq_len, head_dim // 2, dtype=torch.float32),
        new(9, 2, 16, kv_heads, head_dim, dtype=kv_dtype),
        new(rows, max_seq_len // 16, dtype=torch.int32),
        new(lanes, dtype=torch.int32),
        new(lanes, dtype=torch.int32),
        Launch(arrivals=new(counters, dtype=torch.int32), pdl=True),
        num_heads=heads,
        num_kv_heads=kv_heads,
        scale=0.1,
        max_seq_len=max_seq_len,
        q_norm_weight=norm,
        k_norm_weight=norm,
        norm_after=norm_after,
        kv_scales=new(2, kv_heads, dtype=torch.float32) if kv_dtype == FP8_KV else None,
        window=window,
        split_tokens=split,
        tokens_per_row=width,
    )


def launch_of(**case: Any) -> Any:
    with assumed(H200):
        return record_launch(attention, partial(attend_nothing, **case), decode_gluon)


@pytest.fixture
def on_an_h200() -> Iterator[None]:
    with assumed(H200):
        yield


def test_takes_no_tensors_of_a_cpu() -> None:
    qkv, kv = new(1, 4 * 64), new(9, 2, 16, 1, 64)
    assert not decode_gluon.takes(qkv, kv, 256)
    with assumed(Device((7, 5), processors=40, shared_bytes=64 * 1024)):
        assert not decode_gluon.takes(qkv, kv, 256), "no cp.async"


@not_interpreted
def test_takes_long_splits_of_half_precision(on_an_h200: None) -> None:
    qkv, kv = new(1, 4 * 64), new(9, 2, 16, 1, 64)
    assert all(decode_gluon.takes(qkv, kv, split) for split in (256, 512))
    assert decode_gluon.takes(qkv.half(), kv.half(), 256)
    assert not decode_gluon.takes(qkv, kv, 128)
    assert not decode_gluon.takes(qkv.float(), kv.float(), 256)
    assert decode_gluon.takes(qkv, new(9, 2, 16, 1, 80, dtype=FP8_KV), 256)
    assert not decode_gluon.takes(qkv, new(9, 2, 16, 1, 40, dtype=FP8_KV), 256)
    for head_dim, taken in ((16, False), (24, False), (32, True), (36, False), (256, True)):
        assert decode_gluon.takes(qkv, new(9, 2, 16, 1, head_dim), 256) == taken
    memory = new(9 * 2 * 16 * 64 + 9 * 4)
    apart = memory.as_strided((9, 2, 16, 1, 64), (2 * 16 * 64 + 4, 16 * 64, 64, 64, 1))
    assert not decode_gluon.takes(qkv, apart, 256), "blocks are not aligned to 16 bytes"


@not_interpreted
def test_the_grid_is_what_there_can_be_up_to_two_programs_a_multiprocessor() -> None:
    assert launch_of(rows=1, max_seq_len=512).grid == (1 * 8 * 2,)
    assert launch_of(rows=8, max_seq_len=4096).grid == (264,)
    # A tile of 16 rows holds 4 lanes of 4 query heads; more lanes are another head.
    assert launch_of(rows=1, width=4, max_seq_len=512).grid == (1 * 8 * 2,)
    assert launch_of(rows=1, width=5, max_seq_len=512).grid == (1 * 8 * 2 * 2,)
    # Of 32 rows where the programs are too many to find room at once.
    for max_seq_len, rows in ((16 * 256, 16), (16 * 256 + 1, 32)):
        launch = launch_of(rows=1, width=8, max_seq_len=max_seq_len)
        assert launch.arguments["shape"].rows.value == rows
        assert launch.grid == (min(264, 8 * -(-max_seq_len // 256) * (32 // rows)),)


@not_interpreted
def test_very_long_tables_put_more_splits_together_at_once() -> None:
    """The counters of a head are for 32 groups of splits."""
    for max_seq_len, together in ((131_072, 64), (64 * 32 * 256, 64), (64 * 32 * 256 + 16, 128)):
        launch = launch_of(split=256, rows=1, max_seq_len=max_seq_len)
        assert launch.arguments["shape"].super.value == together
        assert launch.arguments["supers"] == -(-max_seq_len // (256 * together)) <= 32


CASES: dict[str, dict[str, Any]] = {
    "8b": {},
    "rows": {"head_dim": 64, "width": 4, "rows": 2, "normed": True},
    "long heads": {"head_dim": 256, "heads": 8, "kv_heads": 2},
    "gemma": {
        "head_dim": 256,
        "heads": 8,
        "kv_heads": 4,
        "window": 1024,
        "normed": True,
        "norm_dtype": torch.float32,
    },
    "short heads": {"head_dim": 40, "width": 2, "rows": 3, "kv_heads": 4, "normed": True},
    "padded heads": {"head_dim": 80, "width": 9, "rows": 1, "kv_heads": 32, "split": 512},
    "norms after": {"width": 3, "rows": 2, "normed": True, "norm_after": True},
    "fp8": {"kv_dtype": FP8_KV},
    "fp8 rows": {"kv_dtype": FP8_KV, "head_dim": 64, "width": 3, "rows": 2, "normed": True},
}


@not_interpreted
@pytest.mark.parametrize(
    "name", extent(["8b", "gemma", "short heads", "padded heads", "fp8 rows"], [*CASES])
)
def test_copies_begin_before_the_wait_and_products_are_of_16_rows(name: str) -> None:
    launch = launch_of(**CASES[name])
    kernel, _ = compile_kernel(launch)
    ptx = kernel.asm["ptx"]
    assert_waits_before_it_shows(ptx)
    before, after = ptx.split("griddepcontrol.wait")
    shape = launch.arguments["shape"]
    itemsize = 1 if shape.fp8.value else 2
    tile_bytes = 2 * shape.tile.value * shape.padded.value * itemsize
    copies = tile_bytes // (4 * 32 * 16)
    assert before.count("cp.async.cg") == shape.stages.value * copies
    assert after.count("cp.async.cg") == copies
    assert re.findall(r"mma\.sync\S*\.m16n8k16\S*", ptx) and "wgmma" not in ptx
    # Two programs an SM of an H200, which has 227 KB for them.
    assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024
