"""Attention of blocks whose tokens see each other, whatever their positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphengine.kernels.attention import prefill as prefill_attention
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS, paged_prefill_attention
from graphengine.kernels.attention.reference import paged_prefill_attention_reference
from graphengine.kernels.attention.triton import prefill_triton
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from launches.compilation import compile_launch, record_launch

Op = tuple[Callable[..., torch.Tensor], str]
SENTINEL = -555.0


@pytest.fixture(params=["kernel", "split", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Op:
    if request.param == "reference":
        return paged_prefill_attention_reference, "cpu"
    device = request.getfixturevalue("device")
    if request.param == "kernel":
        return paged_prefill_attention, device
    monkeypatch.setattr(prefill_attention, "LEAST_SPLIT", 32)
    arrivals = torch.zeros(PREFILL_ARRIVALS, dtype=torch.int32, device=device)

    def split(*arguments: Any, **named: Any) -> torch.Tensor:
        result = paged_prefill_attention(*arguments, **named, launch=Launch(arrivals=arrivals))
        assert not arrivals.any(), "a counter was not reset"
        return result

    return split, device


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("window", [0, 11, 40])
def test_equals_the_definition(
    op: Op, place_cache: Callable[..., Any], window: int, group: int
) -> None:
    """Of a block in the middle of the keys that are seen, of one past them, and a padded one."""
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


def test_a_count_of_each_segment_is_wanted() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seen_P must be a dense \[1\], not \(2,\)"):
        paged_prefill_attention(
            torch.zeros(1, 1, 64), torch.zeros(2, 2, 16, 1, 64), one[None],
            query_start_P1=torch.tensor([0, 1], dtype=torch.int32), slot_P=one, position_P=one,
            seen_P=one.repeat(2), scale=1.0,
        )  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_it_compiles_for_sm_90() -> None:
    """A block of 8 of Qwen3-8B at two rows, whose keys are split."""

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16 = torch.bfloat16
    launch = record_launch(
        prefill_attention,
        lambda: paged_prefill_attention(
            new(16, 32, 128, dtype=bf16), new(99, 2, 64, 8, 128, dtype=bf16), new(4, 64),
            query_start_P1=new(3), slot_P=new(2), position_P=new(2), seen_P=new(2), scale=0.1,
            launch=Launch(arrivals=new(PREFILL_ARRIVALS), pdl=True),
        ),
        prefill_triton,
    )  # fmt: skip
    assert launch.arguments["shape"].splits.value > 1
    ptx, _ = compile_launch(launch)
    assert "mma" in ptx
