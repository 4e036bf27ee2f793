"""Latent attention: kernels against references, and references against the plain form of MLA."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.attention import latent as attention
from graphengine.kernels.attention import latent_decode
from graphengine.kernels.attention.head_product import (
    CHUNK_LANES,
    head_product,
    head_product_reference,
)
from graphengine.kernels.attention.latent import latent_append
from graphengine.kernels.attention.latent_decode import (
    latent_values,
    latent_values_workspace_bytes,
)
from graphengine.kernels.attention.latent_prefill import latent_attention
from graphengine.kernels.attention.latent_reference import (
    latent_append_reference,
    latent_attention_reference,
)
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_kernel,
    global_loads,
    launches_handed_to,
    record_launch,
)

SENTINEL = -555.0
HUGE = 2**31 - 1
EPS = 1e-6
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Slot n has a token at position `positions[n]`; the older ones are cached."""

    positions: tuple[int, ...]
    heads: int = 5
    rank: int = 48
    rotated: int = 16
    plain: int = 24
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        slots, entry = len(self.positions), self.rank + self.rotated
        columns = max(self.positions) // self.block_size + 1
        blocks = slots * columns + 1
        order = torch.randperm(blocks - 1, generator=generator) + 1
        self.table = order.view(slots, columns).int().to(self.device)
        self.entries = random(slots, columns * self.block_size, entry)
        self.q = random(slots, self.heads * (self.plain + self.rotated))
        self.latent = random(slots, entry)
        self.norm = 1 + 0.2 * random(self.rank)
        self.absorbed = random(slots, self.heads, entry)
        self.tables = rope_tables(
            RopeConfig(), head_dim=self.rotated, max_positions=4096, device=self.device
        )

    def cache(self, ahead: int = 1) -> torch.Tensor:
        """NaN but for the slots' older entries, and those of `ahead` tokens from the position."""
        kv = torch.full(
            (self.table.numel() + 1, 1, self.block_size, self.entries.shape[2]),
            math.nan,
            dtype=self.dtype,
            device=self.device,
        )
        for slot, position in enumerate(self.positions):
            for token in range(position + ahead):
                block = int(self.table[slot, token // self.block_size])
                kv[block, 0, token % self.block_size] = self.entries[slot, token]
        return kv

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def attend(
        self,
        function: Callable[..., torch.Tensor],
        kv: torch.Tensor,
        slots: list[int],
        positions: list[int],
        **options: Any,
    ) -> torch.Tensor:
        """What `function` makes of slots at positions, whose padded lanes have NaN as queries."""
        shape = (len(slots), self.heads, self.rank)
        out = torch.full(shape, SENTINEL, dtype=self.dtype, device=self.device)
        lanes = (self.queries(slots), kv, self.table, self.ints(slots), self.ints(positions))
        return function(*lanes, rank=self.rank, scale=0.17, out=out, **options)

    def attend_chunks(
        self, kv: torch.Tensor, slots: list[int], positions: list[int]
    ) -> torch.Tensor:
        """What `latent_attention` makes of the same, each a chunk of its own."""
        starts = self.ints(range(len(slots) + 1))
        return self.attend(latent_attention, kv, slots, positions, query_start_P1=starts, pdl=True)

    def queries(self, slots: list[int]) -> torch.Tensor:
        q = self.absorbed[[max(slot, 0) for slot in slots]].contiguous()
        q[[index for index, slot in enumerate(slots) if slot < 0]] = math.nan
        return q

    def weight(self, values: int) -> torch.Tensor:
        """`[Q, V, R]` within a larger one, as heads' keys lie between values."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        whole = torch.randn(self.heads, values + 3, self.rank, generator=generator)
        return (whole / self.rank**0.5).to(self.device, self.dtype)[:, 3:]

    def values(
        self, kv: torch.Tensor, slots: list[int], positions: list[int], values: int = 12
    ) -> torch.Tensor:
        """What `latent_values` makes of the same."""
        shape = (len(slots), self.heads, values)
        out = torch.full(shape, SENTINEL, dtype=self.dtype, device=self.device)
        lanes = (self.queries(slots), kv, self.table, self.ints(slots), self.ints(positions))
        return latent_values(*lanes, self.weight(values), scale=0.17, out=out, pdl=True)

    def expected_values(
        self, kv: torch.Tensor, slots: list[int], positions: list[int], values: int = 12
    ) -> torch.Tensor:
        """The values in float32 instead of float64, from sums of attention that are not rounded."""
        sums = torch.full((len(slots), self.heads, self.rank), SENTINEL, device=self.device)
        latent_attention_reference(
            self.queries(slots).float(), kv.float(), self.table, self.ints(slots),
            self.ints(positions), rank=self.rank, scale=0.17, out=sums,
        )  # fmt: skip
        return torch.einsum("nqr,qvr->nqv", sums, self.weight(values).float()).to(self.dtype)


@settings(deadline=None, max_examples=examples(4, 40))
@given(
    positions=st.lists(st.integers(0, 300), min_size=1, max_size=4).map(tuple),
    heads=st.sampled_from([1, 5, 16, 20]),
    sizes=st.sampled_from([(48, 16), (32, 6), (20, 8)]),
    block_size=st.sampled_from([8, 32]),
    seed=st.integers(0, 99),
)
def test_attention_is_as_the_reference(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    positions: tuple[int, ...],
    heads: int,
    sizes: tuple[int, int],
    block_size: int,
    seed: int,
) -> None:
    rank, rotated = sizes
    for dtype in dtypes:
        case = Case(
            positions, heads, rank, rotated, block_size=block_size, dtype=dtype, seed=seed,
            device=device,
        )  # fmt: skip
        slots = [*range(len(positions)), -1]
        at = [*positions, HUGE]
        kv = case.cache()
        near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        actual = case.attend_chunks(kv, slots, at)
        torch.testing.assert_close(
            actual, case.attend(latent_attention_reference, kv, slots, at), **near
        )
        assert bool((actual[-1] == SENTINEL).all())
        values = case.values(kv, slots, at)
        assert bool((values[-1] == SENTINEL).all())
        torch.testing.assert_close(values[:-1], case.expected_values(kv, slots, at)[:-1], **near)


@pytest.mark.parametrize("decode", [False, True])
def test_a_lane_knows_of_no_other(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    decode: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, among others, and as one of a row whose later tokens are cached already."""
    if device == "cpu":
        # Splits of several tiles, without so many tokens.
        monkeypatch.setattr(latent_decode, "_SPLITS", 4)

    def run(case: Case, kv: torch.Tensor, slots: list[int], positions: list[int]) -> torch.Tensor:
        if decode:
            return case.values(kv, slots, positions)
        return case.attend_chunks(kv, slots, positions)

    for dtype in dtypes:
        positions = (2200 if device == "cuda" else 250, 0, 63, 64, 70)
        case = Case(positions, dtype=dtype, device=device, block_size=32)
        positions = list(case.positions)
        kv = case.cache()
        slots = list(range(len(positions)))
        together = run(case, kv, [-1, *slots, -1, *slots], [HUGE, *positions, -7, *positions])
        # Entries of tokens that come later do not show.
        ahead = Case(tuple(p + 3 for p in positions), dtype=dtype, device=device, block_size=32)
        assert bool((together[1:6] == together[7:]).all())
        for slot, position in enumerate(positions):
            alone = run(case, kv, [slot], [position])
            assert torch.equal(alone[0], together[1 + slot]), f"{slot=} {dtype=}"
        row_slots, row_at = [4, 4, 4], [70, 71, 72]
        full = ahead.cache()
        row = run(ahead, full, row_slots, row_at)
        for index, position in enumerate(row_at):
            before = full.clone()
            for token in range(position + 1, 74):
                before[ahead.table[4, token // 32], 0, token % 32] = math.nan
            one = run(ahead, before, [4], [position])
            assert torch.equal(one[0], row[index]), f"{position=} {dtype=}"


def test_positions_that_no_table_has_are_nan(device: str) -> None:
    case = Case((5, 9), device=device)
    kv = case.cache()
    slots, at = [0, 1, 1, -1], [5, -1, 16, 3]
    out = case.attend_chunks(kv, slots, at)
    reference = case.attend(latent_attention_reference, kv, slots, at)
    for result in (out, reference):
        assert result[1:3].isnan().all() and not result[0].isnan().any()
        assert bool((result[3] == SENTINEL).all())
    torch.testing.assert_close(out[0], reference[0], rtol=1e-5, atol=1e-5)
    values = case.values(kv, slots, at)
    assert values[1:3].isnan().all() and not values[0].isnan().any()
    assert bool((values[3] == SENTINEL).all())


@settings(deadline=None, max_examples=examples(6, 40))
@given(
    lanes=st.integers(1, 6),
    heads=st.sampled_from([1, 5, 70]),
    sizes=st.sampled_from([(48, 16, 24), (20, 6, 0), (64, 64, 8)]),
    seed=st.integers(0, 99),
)
def test_append_is_as_the_reference(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    lanes: int,
    heads: int,
    sizes: tuple[int, int, int],
    seed: int,
) -> None:
    rank, rotated, plain = sizes
    for dtype in dtypes:
        case = Case(
            tuple(range(3, 3 + lanes * 7, 7)), heads, rank, rotated, plain, dtype=dtype, seed=seed,
            device=device,
        )  # fmt: skip
        # One is padded, one is past the tables.
        slots, positions = [*range(lanes), -1, 0], [*case.positions, HUGE, HUGE]
        results = []
        for name in ("kernel", "reference"):
            kv = case.cache(ahead=0)
            out = kv.new_full((lanes + 2, heads, rank + rotated), SENTINEL)
            # The product has other columns on both sides.
            product = torch.cat((case.q, case.latent), dim=1)
            product = torch.cat((product, product.new_full((2, product.shape[1]), 3.0)))
            product[-2] = math.nan
            q, latent = product.split([case.q.shape[1], case.latent.shape[1]], dim=1)
            arguments = (
                q, latent, case.norm, *case.tables, kv, case.table, case.ints(slots),
                case.ints(positions),
            )  # fmt: skip
            if name == "kernel":
                latent_append(*arguments, num_heads=heads, eps=EPS, out=out, pdl=True)
            else:
                limit = case.table.shape[1] * case.block_size
                latent_append_reference(*arguments, num_heads=heads, eps=EPS, limit=limit, out=out)
            assert bool((out[-2] == SENTINEL).all()) and bool((out[:, :, :rank] == SENTINEL).all())
            assert bool(out[-1, :, rank:].isnan().all())
            results.append((out, kv))
        for actual, expected in zip(*results, strict=True):
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(
                actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )


def test_absorbed_attention_is_attention() -> None:
    """In float64's place float32: expanded keys and values, by the formulas of the paper."""
    case = Case((40, 7), heads=3)
    plain, rank, heads = case.plain, case.rank, case.heads
    generator = torch.Generator().manual_seed(1)
    to_keys = torch.randn(heads, plain, rank, generator=generator) / rank**0.5
    to_values = torch.randn(heads, 10, rank, generator=generator) / rank**0.5
    slots, positions = case.ints([0, 1]), case.ints(case.positions)
    kv = case.cache(ahead=0)
    q_absorbed = torch.empty(2, heads, rank + case.rotated)
    latent_append_reference(
        case.q, case.latent, case.norm, *case.tables, kv, case.table, slots, positions,
        num_heads=heads, eps=EPS, limit=4096, out=q_absorbed,
    )  # fmt: skip
    q = case.q.view(2, heads, -1)
    head_product_reference(q[:, :, :plain], to_keys, slots, out=q_absorbed[:, :, :rank])
    attended = torch.empty(2, heads, rank)
    latent_attention_reference(
        q_absorbed, kv, case.table, slots, positions, rank=rank, scale=0.2, out=attended
    )
    out = torch.empty(2, heads, 10)
    head_product_reference(attended, to_values.transpose(1, 2), slots, out=out)
    for slot, position in enumerate(case.positions):
        normed = case.latent[slot, :rank]
        normed = normed / (normed.square().mean() + EPS).sqrt() * case.norm
        latents = torch.cat((case.entries[slot, :position, :rank], normed[None]))
        angle = [table[position] for table in case.tables]

        def turned(x: torch.Tensor, angle: list[torch.Tensor] = angle) -> torch.Tensor:
            whole = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(whole * torch.complex(*angle)).flatten(-2)

        own_key = turned(case.latent[slot, rank:])
        shared = torch.cat((case.entries[slot, :position, rank:], own_key[None]))
        for head in range(heads):
            keys = torch.cat((latents @ to_keys[head].t(), shared), dim=1)
            query = torch.cat((q[slot, head, :plain], turned(q[slot, head, plain:])))
            weights = torch.softmax(keys @ query * 0.2, dim=0)
            expected = weights @ (latents @ to_values[head].t())
            torch.testing.assert_close(out[slot, head], expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=examples(6, 40))
@given(
    lanes=st.integers(1, 40),
    heads=st.integers(1, 4),
    columns=st.sampled_from([7, 24, 130]),
    outputs=st.sampled_from([5, 48, 70]),
    transposed=st.booleans(),
    block_lanes=st.sampled_from([16, CHUNK_LANES]),
)
def test_head_product_is_as_the_reference(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    lanes: int,
    heads: int,
    columns: int,
    outputs: int,
    transposed: bool,
    block_lanes: int,
) -> None:
    generator = torch.Generator().manual_seed(lanes)
    x = torch.randn(lanes, heads, columns + 3, generator=generator)[:, :, :columns]
    shape = (heads, outputs, columns) if transposed else (heads, columns, outputs)
    weight = torch.randn(shape, generator=generator) / columns**0.5
    slot = torch.where(torch.rand(lanes, generator=generator) < 0.3, -1, 0).int().to(device)
    x[slot.cpu() < 0] = math.nan
    for dtype in dtypes:
        w = weight.to(device, dtype)
        w = w.transpose(1, 2) if transposed else w
        outs = [torch.full((lanes, heads, outputs + 9), SENTINEL).to(device, dtype) for _ in "ab"]
        views = [out[:, :, 9:] for out in outs]
        x_own = x.to(device, dtype)
        head_product(x_own, w, slot, out=views[0], block_lanes=block_lanes, pdl=True)
        head_product_reference(x.to(device, dtype), w, slot, out=views[1])
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)
        assert bool((outs[0][:, :, :9] == SENTINEL).all())
        assert bool((outs[0][slot < 0] == SENTINEL).all())


@pytest.mark.parametrize("block_lanes", [16, CHUNK_LANES])
def test_lanes_of_a_head_product_keep_their_bits(device: str, block_lanes: int) -> None:
    """The first lanes without the others; on a GPU also each one alone, in another row."""
    x = torch.randn(37, 3, 24, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.randn(3, 24, 33, generator=torch.Generator().manual_seed(1)).to(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        slot = torch.zeros(len(x), dtype=torch.int32, device=device)
        out = x.new_empty(len(x), 3, 33)
        return head_product(x, weight, slot, out=out, block_lanes=block_lanes)

    whole = run(x)
    for count in (1, 5, 16, 17):
        assert torch.equal(run(x[:count]), whole[:count]), f"{count=}"
    if device == "cuda":
        assert torch.equal(torch.cat([run(lane[None]) for lane in x]), whole)


@pytest.mark.parametrize("block_lanes", [8, 24])
def test_blocks_of_other_lanes_are_refused(block_lanes: int) -> None:
    slot, out = torch.zeros(2, dtype=torch.int32), torch.empty(2, 3, 5)
    with pytest.raises(ValueError, match=f"block_lanes={block_lanes} must be a power of two from"):
        head_product(out, torch.empty(3, 5, 5), slot, out=out.clone(), block_lanes=block_lanes)


def test_workspace_holds_every_part() -> None:
    for heads, rank in ((1, 512), (17, 48), (128, 500)):
        needed = 3 * heads * latent_decode._SPLITS * (rank + 2) * 4
        assert latent_values_workspace_bytes(3, num_heads=heads, rank=rank) == needed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.empty(3, 2, 16, 1, 64)}, "kv must be"),
        ({"kv": torch.empty(3, 1, 12, 64)}, "block_size=12"),
        ({"kv": torch.empty(3, 1, 16, 60)}, "entries of 60, expected 64"),
        ({"kv": torch.empty(3, 1, 16, 64, dtype=torch.float8_e4m3fn)}, "kv is torch.float8_e4m3fn"),
        ({"rank": 49}, "a rotated key of 15 values"),
        ({"rank": 0}, "a latent of 0 values"),
        ({"scale": 0.0}, "scale=0.0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv": torch.empty(3, 1, 16, 64),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "slot_N": torch.zeros(2, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "rank": 48,
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        latent_attention(torch.zeros(2, 5, 64), **(arguments | change))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.empty(4, 12, 48), r"for q \(2, 5, 64\), not \(4, 12, 48\)"),
        (torch.empty(5, 48, 12).transpose(1, 2), "with R dense"),
        (torch.empty(5, 12, 48, dtype=torch.float16), "weight is torch.float16"),
    ],
)
def test_weights_of_other_heads_are_refused(weight: torch.Tensor, message: str) -> None:
    at = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        latent_values(
            torch.zeros(2, 5, 64), torch.empty(3, 1, 16, 64), table, at, at, weight, scale=1.0
        )


# What is compiled for a GPU.

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def launches() -> dict[str, Op]:
    """The launches of DeepSeek-V2-Lite's decode step, and a product of prompts that are packed."""
    lanes, rank, entry = 4, 512, 576
    at = (indices(4, 8), indices(lanes), indices(lanes))
    kv, pdl = meta(9, 1, 16, entry), {"pdl": True}
    tables = [meta(99, 32, dtype=torch.float32)] * 2
    product = importlib.import_module("graphengine.kernels.attention.head_product")

    def decode() -> torch.Tensor:
        weight = meta(16, 256, rank)[:, 128:]
        return latent_values(meta(lanes, 16, entry), kv, *at, weight, scale=0.1, **pdl)

    def append() -> None:
        out = meta(lanes, 16, entry)
        product = meta(lanes, 16 * 192 + entry)
        q, latent = product.split([16 * 192, entry], dim=1)
        norm = meta(rank)
        latent_append(q, latent, norm, *tables, kv, *at, num_heads=16, eps=EPS, out=out, **pdl)

    def multiply(weight: torch.Tensor, **options: int) -> None:
        heads, columns, outputs = weight.shape
        x, out = meta(lanes, heads, columns), meta(lanes, heads, outputs)
        head_product(x, weight, at[1], out=out, **pdl, **options)

    def multiply_chunk() -> None:
        multiply(meta(16, rank, 128), block_lanes=CHUNK_LANES)

    split: list[Op] = []
    with launches_handed_to(split.append, latent_decode):
        decode()
    return {
        "append": record_launch(attention, append),
        "to latents": record_launch(product, lambda: multiply(meta(16, 128, rank))),
        "chunk to values": record_launch(product, multiply_chunk),
        "split": split[0],
        "merge": split[1],
    }


EARLY = {
    "to latents": {"weight_ptr"},
    "chunk to values": {"weight_ptr"},
    "split": {"slot_ptr", "position_ptr", "block_table_ptr", "kv_ptr"},
    "merge": {"slot_ptr", "position_ptr", "weight_ptr"},
}
"""What is loaded before the wait: weights and tables, and what an older launch wrote."""


@compiles
def test_kernels_wait_before_they_load_or_show_anything() -> None:
    for name, launch in launches().items():
        compiled, names = compile_kernel(launch)
        ptx = compiled.asm["ptx"]
        assert_waits_before_it_shows(ptx)
        early = [load for load in global_loads(ptx, names) if not load.after_wait]
        assert {load.argument for load in early} == EARLY.get(name, set()), f"{name}: {early}"
        written = {"slot_ptr", "position_ptr", "kv_ptr"}
        assert all(load.past_l1 for load in early if load.argument in written), f"{name}: {early}"
        # Two programs to an SM.
        assert compiled.metadata.shared <= 113 * 1024, name
