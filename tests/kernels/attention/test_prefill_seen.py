"""Attention of tokens that see later ones: of a drafter's blocks, and within images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels.attention import prefill as prefill_attention
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS, paged_prefill_attention
from graphengine.kernels.attention.reference import paged_prefill_attention_reference
from graphengine.kernels.attention.triton import prefill_triton
from graphengine.kernels.core.devices import SHARED_BYTES
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from launches.compilation import compile_kernel, compile_launch, record_launch

Op = tuple[Callable[..., torch.Tensor], str]
SENTINEL = -555.0


@pytest.fixture(params=["kernel", "split", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Op:
    if request.param == "reference":
        return paged_prefill_attention_reference, "cpu"
    device = request.getfixturevalue("device")
    if request.param == "kernel":
        return paged_prefill_attention, device
    monkeypatch.setattr(prefill_attention, "FEW_LEAST_SPLIT", 32)
    arrivals = torch.zeros(PREFILL_ARRIVALS, dtype=torch.int32, device=device)

    def split(*arguments: Any, **named: Any) -> torch.Tensor:
        launch = Launch(arrivals=arrivals)
        result = paged_prefill_attention(*arguments, **named, launch=launch, few_lanes=True)
        assert not arrivals.any(), "a counter was not reset"
        return result

    return split, device


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("window", [0, 11, 40])
def test_equals_the_definition(
    op: Op, place_cache: Callable[..., Any], window: int, group: int
) -> None:
    """One block is in the middle of the keys that are seen, one past them, and one padded."""
    function, device = op
    heads, head_dim, tokens, lengths = 2, 64, 8, (83, 150)
    draw = torch.Generator().manual_seed(group)
    keys, values = torch.randn(2, 2, max(lengths), heads, head_dim, generator=draw)
    query = torch.randn(3 * tokens, heads * group, head_dim, generator=draw)
    cache = place_cache(
        keys.to(device), values.to(device), lengths, block_size=16, placement=1, poison=True
    )
    slots, positions, seen = [1, -1, 0], [139, 2**31 - 1, 79], [150, 2**31 - 1, 83]

    def ints(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    out = torch.full((3 * tokens, heads * group * head_dim), SENTINEL, device=device)
    function(
        query.to(device), cache.kv, cache.block_table_SB, query_start_P1=ints([0, 8, 16, 24]),
        slot_P=ints(slots), position_P=ints(positions), seen_P=ints(seen), scale=0.125,
        window=window, out=out,
    )  # fmt: skip
    assert bool((out[tokens : 2 * tokens] == SENTINEL).all())
    for segment in (0, 2):
        slot, lanes = slots[segment], slice(segment * tokens, (segment + 1) * tokens)
        k, v = (
            t[slot, : seen[segment]].repeat_interleave(group, 1).double() for t in (keys, values)
        )
        scores = torch.einsum("tqd,kqd->qtk", query[lanes].double(), k) * 0.125
        position = positions[segment] + torch.arange(tokens)
        if window:
            hidden = torch.arange(seen[segment]) <= (position - window)[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        expected = torch.einsum("qtk,kqd->tqd", scores.softmax(-1), v).flatten(1)
        torch.testing.assert_close(out[lanes].cpu().double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("window", [0, 11, 40])
def test_lanes_see_to_the_end_of_their_image(
    op: Op, place_cache: Callable[..., Any], window: int, group: int
) -> None:
    """Two images in a chunk, one of them as long as its segment; poison after its live lanes."""
    function, device = op
    heads, head_dim, lengths = 2, 64, (83, 150)
    draw = torch.Generator().manual_seed(group)
    keys, values = torch.randn(2, 2, max(lengths), heads, head_dim, generator=draw)
    query = torch.randn(96, heads * group, head_dim, generator=draw)
    cache = place_cache(
        keys.to(device), values.to(device), lengths, block_size=16, placement=1, poison=True
    )
    starts, slots, positions = [0, 64, 64, 83], [1, -1, 0], [86, 2**31 - 1, 64]
    seen = torch.full((96,), 2**31 - 1, dtype=torch.int32)
    seen[:64] = torch.arange(87, 151)
    seen[5:40], seen[42:51] = 126, 137
    seen[64:83] = 83

    def ints(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    out = torch.full((96, heads * group * head_dim), SENTINEL, device=device)
    function(
        query.to(device), cache.kv, cache.block_table_SB, query_start_P1=ints(starts),
        slot_P=ints(slots), position_P=ints(positions), seen_N=seen.to(device), scale=0.125,
        window=window, out=out,
    )  # fmt: skip
    assert bool((out[83:] == SENTINEL).all())
    for segment in (0, 2):
        slot, lanes = slots[segment], slice(starts[segment], starts[segment + 1])
        k, v = (
            t[slot, : lengths[slot]].repeat_interleave(group, 1).double() for t in (keys, values)
        )
        scores = torch.einsum("tqd,kqd->qtk", query[lanes].double(), k) * 0.125
        position = positions[segment] + torch.arange(lanes.stop - lanes.start)
        key = torch.arange(lengths[slot])
        hidden = key >= seen[lanes, None]
        if window:
            hidden |= key <= (position - window)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        expected = torch.einsum("qtk,kqd->tqd", scores.softmax(-1), v).flatten(1)
        torch.testing.assert_close(out[lanes].cpu().double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("window", [0, 16])
def test_lanes_that_see_no_later_one_have_the_bits_of_causal_ones(
    op: Op, place_cache: Callable[..., Any], window: int
) -> None:
    function, device = op
    keys, values = torch.randn(2, 1, 70, 1, 64, generator=torch.Generator().manual_seed(1))
    query = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(2)).to(device)
    cache = place_cache(
        keys.to(device), values.to(device), (70,), block_size=16, placement=1, poison=True
    )
    numbers = {"query_start_P1": [0, 40], "slot_P": [0], "position_P": [30]}
    named = {
        name: torch.tensor(value, dtype=torch.int32, device=device)
        for name, value in numbers.items()
    }
    seen = torch.arange(31, 71, dtype=torch.int32, device=device)
    made = [
        function(query, cache.kv, cache.block_table_SB, scale=0.1, window=window, **named, **more)
        for more in ({}, {"seen_N": seen})
    ]
    assert torch.equal(*made)


def test_few_lanes_of_long_heads(
    device: str, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    """A policy's 50 actions after a prefix and a state: in 16 bits their tiles have 16 rows, and
    two programs share the keys of each.
    """
    heads, head_dim, count, length = 8, 256, 50, 430
    arrivals = torch.zeros(PREFILL_ARRIVALS, dtype=torch.int32, device=device)
    sixteen = [dtype for dtype in dtypes if dtype != torch.float32]
    assert sixteen
    for dtype in sixteen:
        draw = torch.Generator().manual_seed(3)
        keys, values = torch.randn(2, 1, length, 1, head_dim, generator=draw).to(dtype)
        query = torch.randn(count, heads, head_dim, generator=draw).to(dtype)
        cache = place_cache(
            keys.to(device), values.to(device), (length,), block_size=16, placement=1, poison=True
        )
        seen = torch.full((count,), length, dtype=torch.int32)
        # Some see no key of the second program.
        seen[7:20] = 190
        numbers = {"query_start_P1": [0, count], "slot_P": [0], "position_P": [length - count]}
        named = {
            name: torch.tensor(value, dtype=torch.int32, device=device)
            for name, value in numbers.items()
        }
        found = paged_prefill_attention(
            query.to(device), cache.kv, cache.block_table_SB, scale=1 / 16, few_lanes=True,
            seen_N=seen.to(device), launch=Launch(arrivals=arrivals), **named,
        )  # fmt: skip
        assert not arrivals.any(), "a counter was not reset"
        k, v = keys[0, :, 0].double(), values[0, :, 0].double()
        scores = query.double() @ k.T / 16
        hidden = torch.arange(length) >= seen[:, None, None]
        wanted = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).flatten(1)
        error = 2e-3 if dtype == torch.float16 else 1.6e-2
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=error, atol=error)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_tiles_of_few_lanes_fit_small_gpus() -> None:
    """Sixteen rows, shared among five programs, where others have more and are not shared."""

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16, found = torch.bfloat16, {}
    for few_lanes in (False, True):
        launch = record_launch(
            prefill_attention,
            lambda few=few_lanes: paged_prefill_attention(
                new(50, 8, 256, dtype=bf16), new(57, 2, 16, 1, 256, dtype=bf16), new(1, 56),
                query_start_P1=new(2), slot_P=new(1), position_P=new(1), seen_N=new(50),
                scale=0.1, launch=Launch(arrivals=new(PREFILL_ARRIVALS)), few_lanes=few,
            ),
            prefill_triton,
        )  # fmt: skip
        shape = launch.arguments["shape"]
        found[few_lanes] = shape.rows.value, shape.splits.value, launch.grid
    assert found == {False: (64, 2, (1, 7, 2)), True: (16, 5, (1, 25, 5))}
    compiled, _ = compile_kernel(launch)
    assert compiled.metadata.shared <= SHARED_BYTES[8, 6]


def test_a_count_of_each_lane_is_wanted() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    named = {"slot_P": one, "position_P": one, "scale": 1.0}
    named["query_start_P1"] = torch.tensor([0, 2], dtype=torch.int32)
    place = torch.zeros(2, 1, 64), torch.zeros(2, 2, 16, 1, 64), one[None]
    with pytest.raises(ValueError, match=r"seen_N must be a dense \[2\], not \(1,\)"):
        paged_prefill_attention(*place, seen_N=one, **named)
    with pytest.raises(ValueError, match="seen_P of 1 segments beside seen_N of each lane"):
        paged_prefill_attention(*place, seen_N=one.repeat(2), seen_P=one, **named)


def test_a_count_of_each_segment_is_wanted() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seen_P must be a dense \[1\], not \(2,\)"):
        paged_prefill_attention(
            torch.zeros(1, 1, 64), torch.zeros(2, 2, 16, 1, 64), one[None],
            query_start_P1=torch.tensor([0, 1], dtype=torch.int32), slot_P=one, position_P=one,
            seen_P=one.repeat(2), scale=1.0,
        )  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(("lanes", "window"), [(0, 0), (256, 0), (256, 1024)])
def test_it_compiles_for_sm_90(lanes: int, window: int) -> None:
    """Keys are split: a block of 8 of Qwen3-8B at two rows; a chunk of Gemma 3's width."""

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16, P = torch.bfloat16, 1 if lanes else 2
    shapes = new(16, 32, 128, dtype=bf16), new(99, 2, 64, 8, 128, dtype=bf16), new(4, 64)
    seen = {"seen_P": new(P)}
    if lanes:
        shapes = new(lanes, 8, 256, dtype=bf16), new(99, 2, 64, 4, 256, dtype=bf16), new(4, 64)
        seen = {"seen_N": new(lanes)}
    launch = record_launch(
        prefill_attention,
        lambda: paged_prefill_attention(
            *shapes, **seen, query_start_P1=new(P + 1), slot_P=new(P), position_P=new(P),
            scale=0.1, window=window, launch=Launch(arrivals=new(PREFILL_ARRIVALS), pdl=True),
        ),
        prefill_triton,
    )  # fmt: skip
    assert launch.arguments["shape"].splits.value > 1
    ptx, _ = compile_launch(launch)
    assert "mma" in ptx
