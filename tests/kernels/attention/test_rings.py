"""A block table that repeats the blocks of a ring: the bits are those of a table of all blocks.

A ring has a place for each token that a launch writes or sees, and for no other one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS, paged_prefill_attention
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV, quantise
from graphengine.kernels.norm_rope.rope import rope_append
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
SIZE, GROUP, DIM = 16, 2, 64
G = 2 if NATIVE else 1
HEADS = {"num_heads": G * GROUP, "num_kv_heads": G}
LONGEST = 2048 if NATIVE else 128


class Caches:
    """One sequence of `start` tokens in two caches, of all its blocks and of a ring of `blocks`.

    In the ring all but the last `window` - 1 tokens are NaN.
    """

    def __init__(self, start: int, window: int, blocks: int, dtype: torch.dtype, device: str):
        generator = torch.Generator().manual_seed(start + window)
        all_blocks = LONGEST // SIZE
        block = torch.arange(all_blocks, dtype=torch.int32)
        tables = (1 + block.flip(0), 1 + block % blocks)
        kv = torch.full((1 + all_blocks, 2, SIZE, G, DIM), torch.nan)
        ring = torch.full((1 + blocks, 2, SIZE, G, DIM), torch.nan)
        for position in range(start):
            entry = torch.randn(2, G, DIM, generator=generator)
            kv[tables[0][position // SIZE], :, position % SIZE] = entry
            if position > start - window:
                ring[tables[1][position // SIZE], :, position % SIZE] = entry
        self.scales = None
        if dtype == FP8_KV:
            self.scales = torch.full((2, G), 0.02, device=device)
            kv, ring = (quantise(each, torch.tensor(0.02)) for each in (kv, ring))
        self.caches = tuple(each.to(dtype).to(device) for each in (kv, ring))
        self.tables = tuple(each[None].contiguous().to(device) for each in tables)

    def both(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.caches, self.tables, strict=True))


def ints(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def drawn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def ring_of(window: int, tokens: int) -> int:
    return -(-(window - 1 + tokens) // SIZE)


STARTS = (0, 5, 100, 511, 1500) if NATIVE else (90,)
KINDS = (
    [(dtype, kv) for dtype in (torch.float16, torch.bfloat16) for kv in (dtype, FP8_KV)]
    if NATIVE
    else [(torch.float32, torch.float32), (torch.float16, FP8_KV)]
)


@pytest.mark.parametrize(("window", "width"), [(16, 1), (30, 3), (12, 5)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
def test_decode(
    device: str, window: int, width: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    qkv = drawn(width, (GROUP + 2) * G * DIM, dtype=dtype, device=device)
    cos, sin = rope_tables(RopeConfig(), head_dim=DIM, max_positions=LONGEST, device=device)
    needed = decode_attention_arrivals(width, **HEADS)
    arrivals = torch.zeros(needed, dtype=torch.int32, device=device)
    # Natively the longer splits of half precision are Gluon's.
    for split in (64, 256) if NATIVE else (64,):
        for start in STARTS:
            caches = Caches(start, window, ring_of(window, width), kv_dtype, device)
            outs = [
                decode_attention(
                    qkv,
                    cos,
                    sin,
                    kv,
                    table,
                    ints(*(0 for _ in range(width)), device=device),
                    ints(*(start + lane for lane in range(width)), device=device),
                    Launch(arrivals=arrivals),
                    scale=DIM**-0.5,
                    max_seq_len=LONGEST,
                    kv_scales=caches.scales,
                    window=window,
                    split_tokens=split,
                    tokens_per_row=width,
                    **HEADS,
                )
                for kv, table in caches.both()
            ]
            assert not outs[0].isnan().any(), f"{start=} {split=}"
            assert torch.equal(*outs), f"{start=} {split=}"


@pytest.mark.parametrize(("window", "tokens"), [(16, 33), (40, 9), (1, 16)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
def test_a_chunk(
    device: str, window: int, tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Which appends all of its tokens before it attends."""
    qkv = drawn(tokens, (GROUP + 2) * G * DIM, dtype=dtype, device=device)
    cos, sin = rope_tables(RopeConfig(), head_dim=DIM, max_positions=LONGEST, device=device)
    arrivals = torch.zeros(PREFILL_ARRIVALS, dtype=torch.int32, device=device)
    for start in STARTS:
        caches = Caches(start, window, ring_of(window, tokens), kv_dtype, device)
        scaled: dict[str, Any] = {"kv_scales": caches.scales}
        outs = []
        for kv, table in caches.both():
            slot = torch.zeros(tokens, dtype=torch.int32, device=device)
            position = torch.arange(start, start + tokens, dtype=torch.int32, device=device)
            q = rope_append(qkv, cos, sin, kv, table, slot, position, **HEADS, **scaled)
            outs.append(
                paged_prefill_attention(
                    q.view(tokens, G * GROUP, DIM),
                    kv,
                    table,
                    query_start_P1=ints(0, tokens, device=device),
                    slot_P=ints(0, device=device),
                    position_P=ints(start, device=device),
                    scale=DIM**-0.5,
                    window=window,
                    launch=Launch(arrivals=arrivals),
                    **scaled,
                )
            )
        assert not outs[0].isnan().any(), f"{start=}"
        assert torch.equal(*outs), f"{start=}"
