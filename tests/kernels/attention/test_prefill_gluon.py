"""Prefill attention on Hopper: when it is taken, its code for sm_90, and, on such a GPU, that it is
the Triton kernel bit for bit, whatever lies in memory that is not its own.

Gluon has no interpreter; what it compiles to is read without a GPU.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extent import examples, extent
from graphengine.kernels.attention.gluon.prefill_gluon import (
    KEYS,
    LEAST_PROGRAMS,
    attend,
    has_token_rows,
    takes_wgmma,
)
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV
from launches.compilation import assert_waits_before_it_shows, compile_kernel, record_launch
from launches.prefill import TOLERANCE, Problem, Segment, dense_attention, prefill, segments_of

gluon_module = importlib.import_module("graphengine.kernels.attention.gluon.prefill_gluon")
attention_module = importlib.import_module("graphengine.kernels.attention.prefill")

hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

NONE, ALL = range(0), range(10**9)
"""The other side of `FEW_PROGRAMS`."""


# When it is taken.


def test_a_cpu_keeps_the_triton_kernel() -> None:
    q = torch.empty(4096, 32, 128, dtype=torch.bfloat16)
    assert not takes_wgmma(q, torch.empty(2, 2, 16, 8, 128, dtype=torch.bfloat16), 1)


@hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_rows_keep_the_triton_kernel(head_dim: int) -> None:
    """With 32 query heads and 8 of keys, as llama 8B and 1B have."""
    kv = torch.empty(2, 2, 16, 8, head_dim, dtype=torch.bfloat16, device="cuda")

    def taken(lanes: int, dtype: torch.dtype = torch.bfloat16, dim: int = head_dim) -> bool:
        q = torch.empty(lanes, 32, dim, dtype=dtype, device="cuda")
        return takes_wgmma(q, kv[..., :dim], 1)

    # Of tiles of 64 rows: 8 for each 16 tokens.
    assert not taken(112) and taken(113) and taken(256)
    # Those do not run at once.
    assert taken(257) == (head_dim == 128) and taken(512)
    assert not taken(4096, torch.float32) and not taken(4096, dim=32)


def test_its_tiles_of_keys_are_those_of_the_triton_kernel() -> None:
    tiles = attention_module.TILES_16_BIT
    assert {tiles[head_dim].keys for head_dim in LEAST_PROGRAMS} == {KEYS}


def test_a_cache_needs_rows_of_tokens() -> None:
    layers = torch.empty(3, 5, 2, 16, 2, 64, dtype=torch.float16)
    assert has_token_rows(layers[0]) and has_token_rows(layers[:, 1])
    memory = torch.empty(3 * 4200, dtype=torch.float16)
    shape = (3, 2, 16, 2, 64)
    inside = (16 * 128, 128, 64, 1)
    assert has_token_rows(memory[8:].as_strided(shape, (4096, *inside)))
    assert not has_token_rows(memory[4:].as_strided(shape, (4096, *inside))), "8 bytes off"
    assert not has_token_rows(memory.as_strided(shape, (4096 + 64, *inside))), "half a token apart"


# What it compiles to.


@pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
@pytest.mark.parametrize(
    "head_dim, block_size, fp8, groups",
    extent(
        [(64, 128, False, 2), (128, 8, False, 2), (128, 16, True, 2), (64, 16, False, 1)],
        [
            (64, 128, False, 2),
            (128, 8, False, 2),
            (128, 16, False, 2),
            (64, 16, True, 2),
            (128, 16, True, 2),
            (64, 16, False, 1),
            (128, 16, False, 1),
        ],
    ),
)
def test_sums_are_under_way_while_scores_become_weights(
    head_dim: int,
    block_size: int,
    fp8: bool,
    groups: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "takes_wgmma", lambda *arguments: True)
    monkeypatch.setattr(gluon_module, "FEW_PROGRAMS", ALL if groups == 1 else NONE)
    call = partial(attend_nothing, head_dim, block_size, fp8)
    kernel, _ = compile_kernel(record_launch(attention_module, call, gluon_module))
    ptx = kernel.asm["ptx"]
    assert_waits_before_it_shows(ptx)
    before, _ = ptx.split("griddepcontrol.wait")
    assert "ld.global" not in before and "cp.async" not in before
    # For each block of a tile of keys, and of values, as many pieces of 64 columns as a head has.
    pieces = 2 * (KEYS // block_size) * (head_dim // 64)
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == (0 if fp8 else pieces)
    # Two numbers of e4m3 at a time, of a tile of keys and one of values, by 128 threads.
    assert ptx.count("mul.rn.bf16x2") == (2 * KEYS * head_dim // 2 // 128 if fp8 else 0)
    assert kernel.metadata.shared <= 232_448

    # In machine code each warp group waits for scores alone, has a tile's exponentials, and waits
    # for sums then.
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([01])", machine_code(kernel, tmp_path))
    steps = zip(waits[1::2], waits[2::2], strict=True)
    after_scores = [text for under_way, text in steps if under_way == "1"]
    assert len(after_scores) == groups
    for text in after_scores:
        assert text.count("MUFU.EX2") >= KEYS * 64 // 128


def attend_nothing(head_dim: int, block_size: int, fp8: bool) -> None:
    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return new(*shape, dtype=torch.int32)

    paged_prefill_attention(
        new(64, 8, head_dim),
        new(3, 2, block_size, 2, head_dim, dtype=FP8_KV if fp8 else torch.bfloat16),
        ints(1, 3),
        query_start_P1=ints(2),
        slot_P=ints(1),
        position_P=ints(1),
        scale=0.1,
        kv_scales=new(2, 2, dtype=torch.float32) if fp8 else None,
        out=new(64, 8 * head_dim),
        launch=Launch(pdl=True),
    )


def machine_code(kernel: Any, folder: Path) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.check_output([triton.knobs.nvidia.nvdisasm.path, cubin], text=True)


# What it computes.


@pytest.fixture
def pair(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.Tensor]]:
    """The segments of a problem by this kernel, with two warp groups and, but of e4m3, with one; it
    was launched once each time, and is the Triton kernel.
    """
    launches: list[int] = []

    def counted(q: torch.Tensor, *arguments: Any, **named: Any) -> None:
        launches.append(len(q))
        attend(q, *arguments, **named)

    monkeypatch.setattr(attention_module, "attend", counted)

    def run(place_cache: Callable[..., Any], *problem: Any, **named: Any) -> list[torch.Tensor]:
        found = []
        for least, few in ((1, NONE), (1, ALL), (10**9, NONE)):
            monkeypatch.setattr(gluon_module, "LEAST_PROGRAMS", dict.fromkeys((64, 128), least))
            monkeypatch.setattr(gluon_module, "FEW_PROGRAMS", few)
            launches.clear()
            launch = Launch(pdl=named["placement"] % 2 == 1)
            op = partial(paged_prefill_attention, launch=launch), device
            found.append(prefill(op, place_cache, *problem, **named))
            assert len(launches) == (least == 1)
        for segment in zip(*found, strict=True):
            for other in segment[1:]:
                assert torch.equal(segment[0].view(torch.int16), other.view(torch.int16))
        return found[0]

    return run


# kv heads, query heads of each, head_dim, block size, dtype: few, as each is compiled.
SHAPES = [
    (1, 1, 64, 8, torch.float16),
    (2, 3, 64, 16, torch.bfloat16),
    (2, 4, 128, 16, torch.bfloat16),
    (1, 16, 128, 128, torch.float16),
]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, list[Segment]]:
    kv_heads, group, head_dim, block_size, dtype = draw(st.sampled_from(SHAPES))
    lengths = draw(st.lists(st.integers(1, 900), min_size=1, max_size=3))
    problem = Problem(
        lengths=tuple(lengths),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        fp8=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    return problem, draw(segments_of(lengths))


@hopper
@settings(
    deadline=None,
    max_examples=examples(8, 60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=problems(), tail=st.integers(1, 9), apart=st.sampled_from([0, 1, 1024]))
def test_is_the_triton_kernel_and_the_definition(
    pair: Callable[..., list[torch.Tensor]],
    place_cache: Callable[..., Any],
    drawn: tuple[Problem, list[Segment]],
    tail: int,
    apart: int,
) -> None:
    problem, segments = drawn
    named = {"tail": tail, "apart": apart, "placement": problem.seed, "poison": True}
    results = pair(place_cache, problem, segments, **named)
    expected = dense_attention(problem)
    tolerance = TOLERANCE[problem.dtype]
    for segment, rows in zip(segments, results, strict=True):
        if segment.slot >= 0:
            wanted = expected[segment.slot, segment.position : segment.position + segment.tokens]
            torch.testing.assert_close(rows.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


@hopper
@pytest.mark.parametrize("position", [12, 14, 16, 2**30, -2, -200])
@pytest.mark.parametrize("few", [NONE, ALL])
def test_tokens_outside_the_block_table_are_nan(
    position: int, few: range, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens around the ends of a table of one block of 16."""
    monkeypatch.setattr(gluon_module, "FEW_PROGRAMS", few)
    like = {"dtype": torch.bfloat16, "device": device}
    result = torch.zeros(4, 128, **like)
    attend(
        torch.ones(4, 2, 64, **like),
        torch.ones(2, 2, 16, 1, 64, **like),
        torch.ones(1, 1, dtype=torch.int32, device=device),
        query_start_P1=torch.tensor([0, 4], dtype=torch.int32, device=device),
        slot_P=torch.zeros(1, dtype=torch.int32, device=device),
        position_P=torch.tensor([position], dtype=torch.int32, device=device),
        scale=0.125,
        out=result,
        pdl=False,
    )
    for token in range(4):
        inside = 0 <= position + token < 16
        assert bool((result[token] == 1).all() if inside else result[token].isnan().all())


@hopper
@pytest.mark.parametrize("kind", ["", "fp8", "few"])
@pytest.mark.parametrize("head_dim", sorted(LEAST_PROGRAMS))
def test_the_same_bits_every_time(
    head_dim: int, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps ahead of their tiles, and launches ahead of their queries, are caught out now and then.

    100 times on each of two streams that disturb each other, what one launch finds is the queries
    of another, which may begin before it has.
    """
    generator = torch.Generator(device).manual_seed(head_dim)
    new = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
    lanes, blocks = 1024, 200
    q, kv = new(lanes, 32, head_dim), new(blocks + 1, 2, 16, 8, head_dim)
    monkeypatch.setattr(gluon_module, "FEW_PROGRAMS", ALL if kind == "few" else NONE)
    scales = None
    if kind == "fp8":
        kv, scales = kv.to(FP8_KV), torch.linspace(0.5, 2.0, 16, device=device).view(2, 8)
    table = 1 + torch.randperm(blocks, device=device, generator=generator, dtype=torch.int32)[None]

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    named = {"query_start_P1": ints(0, lanes), "slot_P": ints(0), "position_P": ints(2000)}
    assert takes_wgmma(q, kv, 1)

    def run(found: torch.Tensor, again: torch.Tensor, pdl: bool) -> None:
        launch = Launch(pdl=pdl)
        for queries, out in ((q, found), (found.view_as(q), again)):
            paged_prefill_attention(
                queries, kv, table, **named, scale=0.1, kv_scales=scales, out=out, launch=launch
            )

    expected = torch.empty(2, lanes, 32 * head_dim, device=device, dtype=torch.bfloat16)
    run(*expected, pdl=False)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = [torch.empty_like(expected) for _ in streams]
    different = [ints(0) for _ in streams]
    torch.cuda.synchronize()
    for turn in range(100):
        for stream, found, count in zip(streams, results, different, strict=True):
            with torch.cuda.stream(stream):
                found.fill_(torch.nan)
                run(*found, pdl=turn % 2 == 1)
                count += (found.view(torch.int16) != expected.view(torch.int16)).sum().int()
    torch.cuda.synchronize()
    assert [count.item() for count in different] == [0, 0]
