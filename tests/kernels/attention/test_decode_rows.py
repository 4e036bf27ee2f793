"""Decode attention of rows of several tokens: the bits of decoding their tokens one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples, some_of
from graphengine.kernels.attention import decode as attention
from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.reference import decode_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.linear.plans import dot_columns
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables
from launches.compilation import compile_kernel, record_launch

NATIVE = torch.cuda.is_available() and not INTERPRETED
compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
SENTINEL = -555.0
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
SETTINGS = settings(deadline=None, max_examples=examples(9, 12), derandomize=not NATIVE)

Op = tuple[Callable[..., torch.Tensor], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Slot r has `lengths[r]` cached tokens; row r brings the next `width`."""

    lengths: tuple[int, ...]
    width: int
    live: tuple[int, ...] | None = None
    """Live lanes of each row; None is all."""
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    split: int = 64
    normed: bool = True
    after: bool = False
    """Whether norms follow the rotation."""
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def max_seq_len(self) -> int:
        return max(self.lengths) + self.width

    def draw(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)

    def lanes(self, *, padded_rows: int = 0) -> tuple[list[int], list[int]]:
        """Slots, and positions in poison where a lane is padded."""
        live = (*(self.live or [self.width] * len(self.lengths)), *[0] * padded_rows)
        slots, positions = [], []
        for row, count in enumerate(live):
            for j in range(self.width):
                slots.append(row if j < count else -1)
                positions.append(self.lengths[row] + j if j < count else HUGE[j % len(HUGE)])
        return slots, positions

    def parameters(self, device: str) -> dict[str, Any]:
        shared: dict[str, Any] = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        shared |= {"scale": self.head_dim**-0.5, "max_seq_len": self.max_seq_len}
        if self.normed:
            weights = (1 + 0.2 * self.draw(2, self.head_dim)).to(device)
            shared |= {"q_norm_weight": weights[0].contiguous(), "eps": 1e-6}
            shared |= {"k_norm_weight": weights[1].contiguous(), "norm_after": self.after}
        return shared


def int32(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Setup:
    """A cache with the rows' older tokens, NaN wherever nothing may be read."""

    def __init__(self, op: Op, place_cache: Callable[..., Any], rows: Rows) -> None:
        self.function, self.device = op
        self.rows = rows
        cached = rows.draw(
            2, len(rows.lengths), max(1, *rows.lengths), rows.kv_heads, rows.head_dim
        )
        self.cache = place_cache(
            *cached.to(self.device),
            rows.lengths,
            block_size=rows.block_size,
            placement=rows.seed,
            poison=True,
            room=rows.width,
        )
        self.tables = rope_tables(
            RopeConfig(),
            head_dim=rows.head_dim,
            max_positions=rows.max_seq_len,
            device=self.device,
        )
        width = (rows.heads + 2 * rows.kv_heads) * rows.head_dim
        self.qkv_NX = rows.draw(len(rows.lengths) * rows.width, width)

    def run(
        self,
        qkv_NX: torch.Tensor,
        slots: list[int],
        positions: list[int],
        tokens_per_row: int,
        *,
        hide_padded: bool = True,
    ) -> torch.Tensor:
        """The outputs; of padded lanes neither the product is read nor the output written."""
        rows, device = self.rows, self.device
        # A view with NaN around it: a sibling is found by the stride of the rows.
        wide = torch.full((len(slots), qkv_NX.shape[1] + 32), torch.nan, dtype=rows.dtype)
        padded = torch.tensor(slots) < 0
        wide[: len(qkv_NX), 16:-16] = qkv_NX
        if hide_padded:
            wide[padded] = torch.nan
        out = torch.full((len(slots), rows.heads * rows.head_dim), SENTINEL, dtype=rows.dtype)
        out = out.to(device)
        arguments = (
            wide.to(device)[:, 16:-16],
            *self.tables,
            self.cache.kv,
            self.cache.block_table_SB,
            int32(slots, device),
            int32(positions, device),
        )
        options = rows.parameters(device) | {"out": out}
        if self.function is decode_attention_reference:
            decode_attention_reference(*arguments, **options)
        else:
            options |= {"split_tokens": rows.split, "tokens_per_row": tokens_per_row}
            counters = decode_attention_arrivals(
                len(slots), num_heads=rows.heads, num_kv_heads=rows.kv_heads
            )
            arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
            decode_attention(*arguments, Launch(arrivals=arrivals), **options)
            assert not arrivals.any()
        assert bool((out[padded.to(device)] == SENTINEL).all()), "a padded lane was written"
        return out

    def at_once(self, *, padded_rows: int = 0) -> torch.Tensor:
        slots, positions = self.rows.lanes(padded_rows=padded_rows)
        return self.run(self.qkv_NX, slots, positions, self.rows.width)[: len(self.qkv_NX)]

    def one_by_one(self) -> torch.Tensor:
        """A launch for each place in a row, with a lane a row."""
        slots, positions = self.rows.lanes()
        width = self.rows.width
        outs = [
            self.run(self.qkv_NX[j::width], slots[j::width], positions[j::width], 1)
            for j in range(width)
        ]
        return torch.stack(outs, dim=1).flatten(0, 1)

    def cache_bytes(self) -> torch.Tensor:
        return self.cache.all_layers.view(torch.uint8)


def assert_rows_are_tokens_one_by_one(
    op: Op, place_cache: Callable[..., Any], rows: Rows, *, padded_rows: int = 0
) -> None:
    """Outputs and every byte of the cache."""
    single = Setup(op, place_cache, rows)
    expected = single.one_by_one()
    whole = Setup(op, place_cache, rows)
    actual = whole.at_once(padded_rows=padded_rows)
    assert not torch.isnan(expected).any()
    for lane, same in enumerate((actual == expected).all(dim=1).tolist()):
        row, j = divmod(lane, rows.width)
        assert same, f"{row=} {j=} length={rows.lengths[row]} {rows.dtype=}"
    assert torch.equal(whole.cache_bytes(), single.cache_bytes())


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return decode_attention_reference, "cpu"
    return decode_attention, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def kernel(device: str) -> Op:
    return decode_attention, device


@st.composite
def problems(draw: st.DrawFn) -> Rows:
    width = draw(st.integers(1, 7))
    split = draw(st.sampled_from([64, 128, 256] if NATIVE else [64, 128]))
    lengths = st.one_of(
        st.integers(0, 2 * split + 2),
        st.integers(max(0, split - width), split + 1),
        st.integers(0, 1500 if NATIVE else 2 * split),
    )
    chosen = draw(st.lists(lengths, min_size=1, max_size=3))
    return Rows(
        lengths=tuple(chosen),
        width=width,
        live=tuple(draw(st.integers(0, width)) for _ in chosen),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 8, 20])),
        head_dim=draw(st.sampled_from([4, 12, 24, 64, 128, *([80, 256] if NATIVE else [])])),
        block_size=draw(st.sampled_from([8, 16, 32, 128])),
        split=split,
        normed=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@SETTINGS
@given(rows=problems(), padded_rows=st.integers(0, 2))
def test_rows_are_tokens_one_by_one(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    rows: Rows,
    padded_rows: int,
) -> None:
    # One of them: natively every example waits for the compiler.
    dtype = dtypes[rows.seed % len(dtypes)]
    typed = replace(rows, dtype=dtype)
    assert_rows_are_tokens_one_by_one(kernel, place_cache, typed, padded_rows=padded_rows)


def affordable(dtypes: tuple[torch.dtype, ...], turn: int) -> tuple[torch.dtype, ...]:
    """All of them natively; the interpreter, which takes seconds for each, gets them by turns."""
    return dtypes if NATIVE else (dtypes[turn % len(dtypes)],)


@pytest.mark.parametrize(
    ("width", "split"),
    some_of([(2, 128), (6, 64), (4, 64), *([(6, 128)] if NATIVE else [])], 0, 1),
)
def test_every_offset_to_the_ends_of_splits_and_blocks(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    width: int,
    split: int,
) -> None:
    """First tokens too: 0, 1 and 2 cached ones. Blocks are shorter than the span of offsets."""
    lengths = (0, 1, 2, *range(split - 8, split + 2))
    for dtype in affordable(dtypes, width // 2):
        rows = Rows(lengths=lengths, width=width, split=split, block_size=8, dtype=dtype)
        assert_rows_are_tokens_one_by_one(kernel, place_cache, rows)


@pytest.mark.parametrize(
    ("group", "normed"),
    some_of([(group, normed) for group in (1, 2, 4, 8) for normed in (False, True)], 0, 3, 4, 7),
)
def test_groups_of_heads(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    group: int,
    normed: bool,
) -> None:
    for dtype in dtypes[1:]:
        rows = Rows(
            lengths=(62, 5, 126) if NATIVE else (62,),
            width=4,
            kv_heads=2,
            group=group,
            head_dim=128 if NATIVE else 64,
            normed=normed,
            dtype=dtype,
        )
        assert_rows_are_tokens_one_by_one(kernel, place_cache, rows)


def test_norms_after_the_rotation(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    rows = Rows(lengths=(62, 5), width=3, live=(3, 2), after=True, dtype=dtypes[-1])
    assert_rows_are_tokens_one_by_one(kernel, place_cache, rows, padded_rows=1)


@pytest.mark.parametrize("width", some_of([2, 4, 6], 0, 2))
def test_padded_lanes_are_not_read(op: Op, place_cache: Callable[..., Any], width: int) -> None:
    """Their product is NaN, their position huge; rows of padding stand after the others."""
    rows = Rows(lengths=(63, 61, 0, 7, 64), width=width, live=(width, 1, 0, width - 1, 1))
    single, whole = Setup(op, place_cache, rows), Setup(op, place_cache, rows)
    expected, actual = single.one_by_one(), whole.at_once(padded_rows=2)
    assert torch.equal(actual, expected)
    assert torch.equal(whole.cache_bytes(), single.cache_bytes())


@pytest.mark.parametrize("width", some_of([2, 4, 6], 1, 2))
def test_equals_the_reference(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], width: int
) -> None:
    for dtype in affordable(dtypes, width // 2):
        rows = Rows(lengths=(0, 2, 63, 62, 125), width=width, group=4, kv_heads=2, dtype=dtype)
        ours = Setup(kernel, place_cache, rows)
        theirs = Setup((decode_attention_reference, "cpu"), place_cache, rows)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            ours.at_once().cpu(), theirs.at_once(), rtol=tolerance, atol=tolerance
        )
        ulps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            ours.cache.kv.cpu(), theirs.cache.kv, rtol=ulps, atol=2 * ulps, equal_nan=True
        )


@pytest.mark.parametrize(
    ("head_dim", "most"), [(64, 0), (128, 3), *([(64, 3), (128, 0)] if NATIVE else [])]
)
def test_few_programs(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    most: int,
) -> None:
    """Programs of several splits, of which siblings are in the last or in the last two."""
    lengths = (0, 3 * 64 - 2, 4 * 64 - 1, 4 * 64, 4 * 64 + 5)
    for dtype in affordable(dtypes, most):
        rows = Rows(lengths=lengths, width=4, head_dim=head_dim, dtype=dtype)
        expected = Setup(kernel, place_cache, rows).one_by_one()
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_LEAST_PROGRAMS", 1)
            patch.setattr(attention, "_MAX_KEYS", most * 64 * len(lengths) * rows.width)
            actual = Setup(kernel, place_cache, rows).at_once()
        assert torch.equal(actual, expected)


def test_a_long_row(kernel: Op, place_cache: Callable[..., Any]) -> None:
    rows = Rows(lengths=(55,), width=16, dtype=torch.float16)
    assert_rows_are_tokens_one_by_one(kernel, place_cache, rows)


@pytest.mark.parametrize("normed", [False, True])
def test_siblings_are_not_read_from_the_cache(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], normed: bool
) -> None:
    """Nobody appends them here, as in a launch in which this lane's programs come first."""
    for dtype in dtypes:
        rows = Rows(lengths=(62,), width=4, kv_heads=2, normed=normed, dtype=dtype)
        expected = Setup(kernel, place_cache, rows).one_by_one()
        alone = Setup(kernel, place_cache, rows)
        lanes = ([-1, -1, -1, 0], [62, 63, 64, 65], 4)
        actual = alone.run(alone.qkv_NX, *lanes, hide_padded=False)
        assert torch.equal(actual[3], expected[3])


@pytest.mark.parametrize("first", [-2, 6])
def test_lanes_out_of_bounds_are_nan_and_append_nothing(
    op: Op, place_cache: Callable[..., Any], first: int
) -> None:
    """A row may leave the allowed positions at either end; its other lanes attend what is there."""
    rows = Rows(lengths=(max(first, 0),), width=4)
    inside = [j for j in range(4) if 0 <= first + j < 8]
    single, whole = Setup(op, place_cache, rows), Setup(op, place_cache, rows)
    for setup in (single, whole):
        setup.tables = tuple(table[:8].contiguous() for table in setup.tables)
    actual = whole.run(whole.qkv_NX, [0] * 4, [first + j for j in range(4)], 4)
    for j in range(4):
        alone = single.run(single.qkv_NX[j : j + 1], [0], [first + j], 1)
        assert bool(actual[j].isnan().all()) == (j not in inside)
        assert torch.equal(actual[j : j + 1].nan_to_num(), alone.nan_to_num())
    assert torch.equal(whole.cache_bytes(), single.cache_bytes())


@pytest.mark.parametrize("tokens_per_row", [-2, 0, 4, 5, 66])
def test_lanes_that_are_no_rows(tokens_per_row: int) -> None:
    lanes = 66
    with pytest.raises(ValueError, match=f"tokens_per_row={tokens_per_row} must divide 66 lanes"):
        decode_attention(
            torch.zeros(lanes, 3 * 64),
            torch.zeros(16, 32),
            torch.zeros(16, 32),
            torch.zeros(3, 2, 16, 1, 64),
            torch.zeros(2, 2, dtype=torch.int32),
            torch.full((lanes,), -1, dtype=torch.int32),
            torch.zeros(lanes, dtype=torch.int32),
            Launch(arrivals=torch.zeros(lanes, dtype=torch.int32)),
            num_heads=1,
            num_kv_heads=1,
            scale=0.125,
            max_seq_len=16,
            tokens_per_row=tokens_per_row,
        )


def compile_rows(
    tokens_per_row: int,
    *,
    head_dim: int,
    split_tokens: int,
    kv_dtype: torch.dtype = torch.bfloat16,
    norm_after: bool = False,
) -> dict[str, str]:
    """The code for sm_90 of a launch in bfloat16 with norms and PDL."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lanes, heads, kv_heads = 3 * tokens_per_row, 8, 2
    integers = (new(lanes, dtype=torch.int32), new(lanes, dtype=torch.int32))
    angles = new(256, head_dim // 2, dtype=torch.float32)
    launch = record_launch(
        attention,
        lambda: decode_attention(
            new(lanes, (heads + 2 * kv_heads) * head_dim),
            angles,
            angles,
            new(9, 2, 16, kv_heads, head_dim, dtype=kv_dtype),
            new(4, 16, dtype=torch.int32),
            *integers,
            Launch(arrivals=new(lanes * kv_heads * 33, dtype=torch.int32), pdl=True),
            num_heads=heads,
            num_kv_heads=kv_heads,
            scale=0.125,
            max_seq_len=256,
            q_norm_weight=new(head_dim),
            k_norm_weight=new(head_dim),
            norm_after=norm_after,
            kv_scales=new(2, kv_heads, dtype=torch.float32) if kv_dtype == FP8_KV else None,
            split_tokens=split_tokens,
            tokens_per_row=tokens_per_row,
        ),
    )
    return compile_kernel(launch)[0].asm


def sums(ttgir: str) -> list[tuple[str, str]]:
    """Shape and layout of registers of everything that is reduced: they fix the order of sums."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<(\w+), (#\w+)>\) ->", ttgir)
    return [(shape, layouts[name]) for shape, name in reduced]


@compiles
@pytest.mark.parametrize(
    ("head_dim", "split_tokens", "norm_after"),
    some_of([(64, 64, False), (128, 128, False), (12, 64, False), (80, 64, True)], 0, 2, 3),
)
def test_the_compiler_sums_alike_for_rows_of_any_length(
    head_dim: int, split_tokens: int, norm_after: bool
) -> None:
    """A sibling's norm above all: it must not be computed in the layout of the tile of keys."""
    shape = {"head_dim": head_dim, "split_tokens": split_tokens, "norm_after": norm_after}
    one = sums(compile_rows(1, **shape)["ttgir"])
    compiled = compile_rows(4, **shape)
    four = sums(compiled["ttgir"])
    key = f"1x{dot_columns(head_dim)}xf32"
    own = [entry for entry in one if entry[0] == key]
    assert len(own) == 1
    assert [entry for entry in four if entry[0] == key] == own * 4
    assert sorted(entry for entry in four if entry[0] != key) == sorted(
        entry for entry in one if entry[0] != key
    )
    assert "wgmma" not in compiled["ptx"]


@compiles
@pytest.mark.parametrize(("width", "head_dim"), some_of([(1, 128), (4, 64), (1, 256)], 1, 2))
def test_a_cache_of_e4m3_is_read_as_such(width: int, head_dim: int) -> None:
    shape = {"head_dim": head_dim, "split_tokens": 64, "kv_dtype": FP8_KV}
    ptx = compile_rows(width, **shape)["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert "mma.sync" in ptx and "wgmma" not in ptx


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
@pytest.mark.parametrize("split", [64, 128, 256])
@pytest.mark.parametrize("pdl", [False, True])
def test_captured_rows_replay_the_eager_bits(
    place_cache: Callable[..., Any], pdl: bool, split: int
) -> None:
    """Replays of growing rows, against lanes one by one over a copy of the cache."""
    rows = Rows(
        lengths=(split - 3, 20), width=4, kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16
    )
    cached = rows.draw(2, 2, split, 2, 128).cuda()
    cache = place_cache(*cached, rows.lengths, block_size=16, placement=1, poison=True, room=64)
    tables = rope_tables(RopeConfig(), head_dim=128, max_positions=512, device="cuda")
    qkv = torch.randn(12, (8 + 2 * 2) * 128, device="cuda", dtype=torch.bfloat16)
    slot = int32([1, 1, 1, -1, 0, 0, 0, 0, *[-1] * 4], "cuda")
    position = int32([20, 21, 22, 0, *range(split - 3, split + 1), *[0] * 4], "cuda")
    counters = decode_attention_arrivals(12, num_heads=8, num_kv_heads=2)
    arrivals = torch.zeros(counters, dtype=torch.int32, device="cuda")
    options = rows.parameters("cuda") | {"max_seq_len": 512, "split_tokens": split}

    launch = Launch(arrivals=arrivals, pdl=pdl)

    def step(
        kv: torch.Tensor, lanes: slice = slice(None), how: Launch = launch, **row: Any
    ) -> torch.Tensor:
        paged = (kv, cache.block_table_SB, slot[lanes].contiguous(), position[lanes].contiguous())
        return decode_attention(qkv[lanes], *tables, *paged, how, **row, **options)

    step(cache.kv, tokens_per_row=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged = (cache.kv, cache.block_table_SB, slot, position, launch)
        captured = decode_attention(qkv, *tables, *paged, tokens_per_row=4, **options)
    for replay in range(6):
        copy = cache.kv.clone()
        graph.replay()
        for j in range(4):
            lanes = slice(j, None, 4)
            live = slot[lanes] >= 0
            expected = step(copy, lanes, Launch(arrivals=arrivals))
            assert torch.equal(captured[lanes][live], expected[live]), f"{replay=} {j=}"
        assert torch.equal(
            copy.contiguous().view(torch.uint8), cache.kv.contiguous().view(torch.uint8)
        )
        assert not arrivals.any()
        # No further than the three live lanes of the shorter row have written.
        position += 1 + replay % 3
        qkv.normal_()


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (96, r"split_tokens=96 is not one of \(64, 128, 256, 512\)"),
        (0, "split_tokens=0 is not one of"),
    ],
)
def test_splits_that_no_kernel_has(
    place_cache: Callable[..., Any], split: int, message: str
) -> None:
    rows = Rows(lengths=(3,), width=1, head_dim=256, split=split)
    setup = Setup((decode_attention, "cpu"), place_cache, rows)
    with pytest.raises(ValueError, match=message):
        setup.at_once()
