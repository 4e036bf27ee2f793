"""Prefill attention over latents: tiles of rows and keys, packed chunks, and bits."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from gpus.compiling import stack_of
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.attention.latent import LatentTiles
from graphengine.kernels.attention.latent_prefill import (
    SMALL_TILES,
    TILES_32_BIT,
    WGMMA_TILES,
    latent_attention,
    prefill_tiles,
)
from graphengine.kernels.attention.latent_reference import latent_attention_reference
from graphengine.kernels.core.devices import H200, SHARED_BYTES, Device, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_kernel,
    global_loads,
    record_launch,
)

MODULE = importlib.import_module("graphengine.kernels.attention.latent_prefill")
RTX_3090 = Device((8, 6), processors=82, shared_bytes=SHARED_BYTES[8, 6])
SENTINEL = -555.0
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BLOCK = 16


class Chunk(NamedTuple):
    """`tokens` lanes of `slot` from `position` on; slot -1: padded lanes."""

    slot: int
    position: int
    tokens: int


class Prompts:
    """Slots with `lengths` cached tokens, each with a query; memory past them is NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        dtype: torch.dtype,
        device: str,
        sizes: tuple[int, int] = (24, 8),
    ) -> None:
        self.heads, (self.rank, rotated), self.device = heads, sizes, device
        generator = torch.Generator().manual_seed(len(lengths) + heads)
        columns = max(lengths) // BLOCK + 1
        order = torch.randperm(len(lengths) * columns, generator=generator) + 1
        self.table = order.view(len(lengths), columns).int()
        shape = (len(lengths), columns * BLOCK, heads, self.rank + rotated)
        self.q = torch.randn(shape, generator=generator).to(device, dtype)
        kv = torch.full((order.numel() + 1, 1, BLOCK, self.rank + rotated), math.nan)
        for slot, length in enumerate(lengths):
            for token in range(length):
                block = int(self.table[slot, token // BLOCK])
                kv[block, 0, token % BLOCK] = torch.randn(kv.shape[3], generator=generator)
        self.kv, self.table = kv.to(device, dtype), self.table.to(device)

    def lanes(self, chunks: Sequence[Chunk], padded: int = 0) -> dict[str, torch.Tensor]:
        """The arguments that differ between launches; `padded` lanes follow the chunks."""
        q, slots, positions = [], [], []
        for slot, position, tokens in [*chunks, Chunk(-1, 0, padded)]:
            live = slot >= 0
            rows = self.q[slot, position : position + tokens] if live else self.q[0, :tokens]
            q.append(rows if live else torch.full_like(rows, math.nan))
            slots += [slot] * tokens
            at = range(position, position + tokens)
            positions += [token if live else HUGE[token % 4] for token in at]
        ints = {"dtype": torch.int32, "device": self.device}
        return {
            "q_NQE": torch.cat(q),
            "slot_N": torch.tensor(slots, **ints),
            "position_N": torch.tensor(positions, **ints),
        }

    def attend(
        self,
        chunks: Sequence[Chunk],
        function: Any = latent_attention,
        *,
        padded: int = 0,
        packed: bool = True,
    ) -> torch.Tensor:
        """The results of all lanes; a launch of one chunk need not be `packed`."""
        lanes = self.lanes(chunks, padded)
        out = self.kv.new_full((len(lanes["slot_N"]), self.heads, self.rank), SENTINEL)
        starts = [sum(chunk.tokens for chunk in chunks[:end]) for end in range(len(chunks) + 1)]
        if packed:
            starts_P1 = torch.tensor(starts, dtype=torch.int32, device=self.device)
            lanes["query_start_P1"] = starts_P1
        common = {"kv": self.kv, "block_table_SB": self.table, "rank": self.rank, "scale": 0.17}
        return function(**lanes, **common, out=out)

    def expected(self, chunks: Sequence[Chunk], padded: int = 0) -> torch.Tensor:
        return self.attend(chunks, latent_attention_reference, padded=padded, packed=False)


@st.composite
def packed_chunks(draw: st.DrawFn, lengths: Sequence[int]) -> list[Chunk]:
    """A chunk of each slot, which may be empty, and padded ones among them."""
    chunks = []
    for slot, length in enumerate(lengths):
        position = draw(st.integers(0, length - 1))
        chunks.append(Chunk(slot, position, draw(st.integers(0, min(14, length - position)))))
    chunks.insert(draw(st.integers(0, len(chunks))), Chunk(-1, 0, draw(st.integers(0, 3))))
    return chunks


@settings(deadline=None, max_examples=examples(8, 60))
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.sampled_from([1, 3, 16, 20, 128]),
    padded=st.integers(0, 5),
)
def test_packed_chunks_are_as_the_reference(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    data: st.DataObject,
    lengths: list[int],
    heads: int,
    padded: int,
) -> None:
    chunks = data.draw(packed_chunks(lengths))
    if not sum(chunk.tokens for chunk in chunks) + padded:
        padded = 1
    for dtype in dtypes:
        prompts = Prompts(lengths, heads, dtype, device)
        actual = prompts.attend(chunks, padded=padded)
        expected = prompts.expected(chunks, padded)
        near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(actual, expected, **near)


@pytest.mark.parametrize("heads", [5, 16, 20, 128])
def test_packed_chunks_have_the_bits_of_launches_of_their_own(
    device: str, dtypes: tuple[torch.dtype, ...], heads: int
) -> None:
    """Odd lengths, an empty chunk and a padded one, and chunks that end at the edge of a tile."""
    chunks = [
        *(Chunk(0, 61, 7), Chunk(1, 0, 4), Chunk(-1, 0, 3), Chunk(2, 5, 0)),
        *(Chunk(3, 127, 3), Chunk(4, 0, 1)),
    ]
    for dtype in dtypes:
        prompts = Prompts([70, 4, 9, 130, 1], heads, dtype, device)
        together = prompts.attend(chunks, padded=2)
        assert not together.isnan().any()
        first = 0
        for chunk in chunks:
            mine = together[first : first + chunk.tokens]
            first += chunk.tokens
            if chunk.slot < 0:
                assert bool((mine == SENTINEL).all())
            elif chunk.tokens:
                assert torch.equal(prompts.attend([chunk], packed=False), mine), f"{chunk}"
                for packed in (False, True):
                    found = prompts.attend([chunk], padded=5, packed=packed)
                    assert torch.equal(found[: chunk.tokens], mine)
                    assert bool((found[chunk.tokens :] == SENTINEL).all())
        assert bool((together[first:] == SENTINEL).all())


@pytest.mark.parametrize(("heads", "tiles"), [(3, None), (20, None), (16, SMALL_TILES)])
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    heads: int,
    tiles: LatentTiles | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole, in chunks of many lengths, and its tokens around edges of key tiles one by one."""
    length = 134
    if tiles is not None:
        monkeypatch.setattr(MODULE, "prefill_tiles", lambda q: tiles)
    for dtype in dtypes:
        prompts = Prompts([length], heads, dtype, device)
        whole = prompts.attend([Chunk(0, 0, length)], packed=False)
        near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(whole, prompts.expected([Chunk(0, 0, length)]), **near)
        cuts = [0, 1, 4, 11, 63, 64, 65, 100, 128, 130, length]
        for start, end in pairwise(cuts):
            part = prompts.attend([Chunk(0, start, end - start)], packed=False)
            assert torch.equal(part, whole[start:end]), f"{start=} {end=} {dtype=}"
        for token in (0, 15, 16, 31, 32, 63, 64, 127, 128, 133):
            one = prompts.attend([Chunk(0, token, 1)], packed=False)
            assert torch.equal(one[0], whole[token]), f"{token=} {dtype=}"


def test_another_prompt_that_is_not_finite_does_not_show(device: str) -> None:
    prompts = Prompts([9, 30], 5, torch.float32, device)
    chunks = [Chunk(0, 0, 9), Chunk(1, 3, 20)]
    before = prompts.attend(chunks)
    prompts.kv[prompts.table[0].long()] = math.inf
    assert torch.equal(prompts.attend(chunks)[9:], before[9:])


# What is compiled for a GPU.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")


def launch_of(heads: int, dtype: torch.dtype = torch.bfloat16, chunks: int | None = 8) -> Op:
    """A launch of 1,024 tokens of DeepSeek's sizes."""
    lanes, rank, rotated = 1024, 512, 64

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return record_launch(
        MODULE,
        lambda: latent_attention(
            new(lanes, heads, rank + rotated, dtype=dtype),
            new(99, 1, 16, rank + rotated, dtype=dtype),
            *(new(8, 512), new(lanes), new(lanes)),
            rank=rank,
            scale=0.1,
            query_start_P1=None if chunks is None else new(chunks + 1),
            pdl=True,
        ),
    )


@compiles
@pytest.mark.parametrize(("heads", "chunks"), [(16, None), (20, 8), (128, None)])
def test_it_compiles_to_wgmma_for_sm_90(heads: int, chunks: int | None) -> None:
    """Half of the columns in each of two warp groups; sums stay in registers."""
    launch = launch_of(heads, chunks=chunks)
    assert launch.grid[0] == 1024 * heads // 64 + (chunks or 0)
    compiled, names = compile_kernel(launch)
    ptx = compiled.asm["ptx"]
    assert set(re.findall(r"wgmma\.mma_async\S*\.(m\d+n\d+)k", ptx)) == {"m64n32", "m64n256"}
    assert "mma.sync" not in ptx
    assert compiled.metadata.shared <= SHARED_BYTES[9, 0]
    assert stack_of(compiled.asm["cubin"]) <= 16
    assert_waits_before_it_shows(ptx)
    assert all(load.after_wait for load in global_loads(ptx, names))


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_other_gpus_fit_their_shared_memory(dtype: torch.dtype) -> None:
    with assumed(RTX_3090):
        launch = launch_of(16, dtype)
    compiled, _ = compile_kernel(launch)
    assert compiled.metadata.shared <= RTX_3090.shared_bytes


def test_tiles_follow_dtype_and_gpu() -> None:
    q = torch.empty(3, 4, 5, dtype=torch.bfloat16)
    assert prefill_tiles(q.float()) == TILES_32_BIT
    for capability, tiles in (((8, 0), SMALL_TILES), ((8, 6), SMALL_TILES), ((9, 0), WGMMA_TILES)):
        with assumed(Device(capability, H200.processors, SHARED_BYTES[capability])):
            assert prefill_tiles(q) == tiles
            assert prefill_tiles(q.float()) == TILES_32_BIT
