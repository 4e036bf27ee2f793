"""Caches of more than 2**31 elements: the last block is as good as the first, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.norm_rope.rope import rope_append
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 32, 8, 128, 16, 3
LENGTH = 2000
TABLE = -(-(LENGTH + 1) // BLOCK_SIZE)
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One layer of a cache, and the table of a slot whose blocks are its first or its last ones."""

    kv: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor | None

    @property
    def tokens(self) -> torch.Tensor:
        """What the slot's blocks hold, as bytes."""
        return self.kv[self.table[0].long()].view(torch.uint8)


def draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


def new_cache(dtype: torch.dtype, blocks: int) -> Cache:
    block = (2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    kv = torch.empty((blocks, LAYERS, *block), dtype=dtype, device="cuda")[:, 1]
    table = torch.arange(blocks - TABLE, blocks, dtype=torch.int32, device="cuda")
    kv[blocks - TABLE :] = draw(TABLE, *block, seed=1).to(dtype)
    scales = None
    if dtype == FP8_KV:
        scales = torch.linspace(0.5, 1.0, 2 * KV_HEADS, device="cuda").view(2, KV_HEADS)
    return Cache(kv=kv, table=table[None], scales=scales)


@pytest.fixture(scope="module", params=[BF16, FP8_KV], ids=["bfloat16", "e4m3"])
def caches(request: pytest.FixtureRequest) -> Iterator[tuple[Cache, Cache]]:
    """A large cache and a small one of the same tokens."""
    block = LAYERS * 2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM
    large = new_cache(request.param, 2**31 // block + 2 * TABLE)
    assert int(large.table.min()) * large.kv.stride(0) > 2**31
    yield large, new_cache(request.param, TABLE)
    del large
    torch.cuda.empty_cache()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("split", [64, 256])
def test_decode_attention(caches: tuple[Cache, Cache], split: int) -> None:
    cos, sin = rope_tables(RopeConfig(), head_dim=HEAD_DIM, max_positions=LENGTH + 1, device="cuda")
    qkv = draw(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=2)
    counters = decode_attention_arrivals(1, num_heads=HEADS, num_kv_heads=KV_HEADS)
    results = []
    for cache in caches:
        attended = decode_attention(
            qkv,
            cos,
            sin,
            cache.kv,
            cache.table,
            int32(0),
            int32(LENGTH),
            Launch(arrivals=torch.zeros(counters, dtype=torch.int32, device="cuda")),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=HEAD_DIM**-0.5,
            max_seq_len=LENGTH + 1,
            kv_scales=cache.scales,
            split_tokens=split,
        )
        assert not attended.isnan().any()
        results.append((attended, cache.tokens))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("tokens", [64, 1024])
def test_append_and_prefill_attention(caches: tuple[Cache, Cache], tokens: int) -> None:
    cos, sin = rope_tables(RopeConfig(), head_dim=HEAD_DIM, max_positions=LENGTH + 1, device="cuda")
    qkv = draw(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=3)
    start = LENGTH - tokens
    results = []
    for cache in caches:
        q = rope_append(
            qkv,
            cos,
            sin,
            cache.kv,
            cache.table,
            torch.zeros(tokens, dtype=torch.int32, device="cuda"),
            torch.arange(start, LENGTH, dtype=torch.int32, device="cuda"),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            kv_scales=cache.scales,
        )
        attended = paged_prefill_attention(
            q.view(tokens, HEADS, HEAD_DIM),
            cache.kv,
            cache.table,
            query_start_P1=int32(0, tokens),
            slot_P=int32(0),
            position_P=int32(start),
            scale=HEAD_DIM**-0.5,
            kv_scales=cache.scales,
        )
        assert not attended.isnan().any()
        results.append((attended, cache.tokens))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
