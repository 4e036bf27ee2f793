"""Windows, sinks and soft caps of attention: against the definition, and what is not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from transformers.masking_utils import sliding_window_overlay

from extent import extent
from graphengine.kernels.attention import decode as decode_module
from graphengine.kernels.attention import prefill as prefill_module
from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.gluon import decode_gluon
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS, paged_prefill_attention
from graphengine.kernels.attention.reference import (
    decode_attention_reference,
    paged_prefill_attention_reference,
)
from graphengine.kernels.attention.scores import MAX_WINDOW, first_key_of
from graphengine.kernels.attention.triton import prefill_triton
from graphengine.kernels.core.devices import H200, assumed
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import gather_cache, quantise
from graphengine.kernels.norm_rope.rope import rope_append_reference
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables
from launches.compilation import record_launch
from launches.emulation import run_launch
from launches.prefill import Problem, Segment, dense_attention, prefill

NATIVE = torch.cuda.is_available() and not INTERPRETED
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
DECODE_TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
PREFILL_TOLERANCE = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Op = tuple[Callable[..., torch.Tensor], str]


def test_windows_are_those_of_transformers() -> None:
    for window in (1, 2, 5, 64):
        inside = sliding_window_overlay(window)
        for position in (0, 1, 4, 5, 63, 64, 65, 130):
            seen = [key for key in range(position + 1) if inside(0, 0, position, key)]
            assert seen[0] == first_key_of(position, window)
            assert seen == list(range(seen[0], position + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Row r brings the tokens `lengths[r]` .. of slot r, `width` of them."""

    lengths: tuple[int, ...]
    width: int = 1
    window: int = 0
    softcap: float = 0.0
    sunk: bool = False
    fp8: bool = False
    kv_heads: int = 2 if NATIVE else 1
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    split: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def lanes(self) -> list[tuple[int, int]]:
        """Slot and position of each lane."""
        return [(r, n + j) for r, n in enumerate(self.lengths) for j in range(self.width)]

    def draw(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if self.sunk:
            options["sinks"] = 3 * self.draw(self.heads)
        if self.fp8:
            options["kv_scales"] = 0.02 + 0.01 * self.draw(2, self.kv_heads).abs()
        return options


def ints(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Decoding:
    """A cache in which nothing but the rows' windows can be read."""

    def __init__(self, op: Op, place_cache: Callable[..., Any], rows: Rows) -> None:
        self.function, self.device = op
        self.rows = rows
        options = rows.options()
        shape = (max(1, *rows.lengths), rows.kv_heads, rows.head_dim)
        cached = rows.draw(2, len(rows.lengths), *shape).to(rows.dtype)
        if rows.fp8:
            scales = options["kv_scales"][:, None, None, :, None]
            cached = quantise(cached, scales)
        self.cache = place_cache(
            *cached.to(self.device),
            rows.lengths,
            block_size=rows.block_size,
            placement=1,
            poison=True,
            room=rows.width,
        )
        for slot, length in enumerate(rows.lengths):
            unseen = first_key_of(length, rows.window)
            blocks, entries = divmod(unseen, rows.block_size)
            row = self.cache.block_table_SB[slot]
            if entries:
                self.cache.kv[int(row[blocks]), :, :entries] = torch.nan
            row[:blocks] = HUGE[slot % len(HUGE)]
        width = (rows.heads + 2 * rows.kv_heads) * rows.head_dim
        self.qkv_NX = rows.draw(len(rows.lanes), width).to(rows.dtype).to(self.device)
        self.options = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
        self.options |= {"num_heads": rows.heads, "num_kv_heads": rows.kv_heads}
        self.longest = max(rows.lengths) + rows.width

    def tables(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(
            RopeConfig(),
            head_dim=self.rows.head_dim,
            max_positions=self.longest,
            device=device,
        )

    def run(self, lanes: Sequence[int], tokens_per_row: int) -> torch.Tensor:
        """The outputs of these lanes, by their index; -1 is a padded one."""
        slots = [self.rows.lanes[lane][0] if lane >= 0 else -1 for lane in lanes]
        positions = [self.rows.lanes[lane][1] if lane >= 0 else HUGE[0] for lane in lanes]
        arguments = (
            self.qkv_NX[[max(lane, 0) for lane in lanes]].contiguous(),
            *self.tables(self.device),
            self.cache.kv,
            self.cache.block_table_SB,
            ints(slots, self.device),
            ints(positions, self.device),
        )
        options = self.options | {
            "scale": self.rows.head_dim**-0.5,
            "max_seq_len": self.longest,
        }
        if self.function is decode_attention_reference:
            return decode_attention_reference(*arguments, **options)
        needed = decode_attention_arrivals(
            len(lanes), num_heads=self.rows.heads, num_kv_heads=self.rows.kv_heads
        )
        arrivals = torch.zeros(needed, dtype=torch.int32, device=self.device)
        how = {"split_tokens": self.rows.split, "tokens_per_row": tokens_per_row}
        result = self.function(*arguments, Launch(arrivals=arrivals), **options, **how)
        assert not arrivals.any()
        return result

    def at_once(self) -> torch.Tensor:
        return self.run(range(len(self.rows.lanes)), self.rows.width)

    def definition(self) -> torch.Tensor:
        """Float64 [N, Q * D], of the cache as the launches have left it and of rotated queries."""
        rows, scales = self.rows, self.options.get("kv_scales")
        scales = None if scales is None else scales.cpu()
        kv, table = self.cache.kv.cpu(), self.cache.block_table_SB.cpu()
        # Any block: what must not be read is hidden below.
        table = torch.where((table < 0) | (table >= len(kv)), 0, table)
        outs = []
        for lane, (slot, position) in enumerate(rows.lanes):
            scratch = torch.zeros(1, 2, 64, rows.kv_heads, rows.head_dim, dtype=rows.dtype)
            tables = [each[position : position + 1] for each in self.tables("cpu")]
            zero = torch.zeros(1, dtype=torch.int32)
            qkv = self.qkv_NX[lane, None].cpu()
            heads = {"num_heads": rows.heads, "num_kv_heads": rows.kv_heads}
            q = rope_append_reference(qkv, *tables, scratch, zero[:, None], zero, zero, **heads)
            first = max(0, position - rows.window + 1) if rows.window else 0
            keys, values = (
                each[first:].double()
                for each in gather_cache(kv, table, slot, position + 1, scales)
            )
            grouped = q.double().view(rows.kv_heads, rows.group, rows.head_dim)
            scores = torch.einsum("ghd,kgd->ghk", grouped, keys) * rows.head_dim**-0.5
            if rows.softcap:
                scores = rows.softcap * torch.tanh(scores / rows.softcap)
            scores = scores.flatten(0, 1)
            if rows.sunk:
                sinks = self.options["sinks"].cpu().double()[:, None]
                scores = torch.cat((scores, sinks), dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(keys)]
            weights = weights.view(rows.kv_heads, rows.group, -1)
            outs.append(torch.einsum("ghk,kgd->ghd", weights, values).flatten())
        return torch.stack(outs)


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return decode_attention_reference, "cpu"
    return decode_attention, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is decode_attention_reference:
        return (torch.float32, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


# Around a split's edge, and past more splits than a window touches.
LENGTHS = (0, 1, 63, 64, 65, 129, 256, 600, 1500) if NATIVE else (1, 64, 129)
# The interpreter takes its time.
# Natively long splits are asked for, too, which Gluon's kernel would take without a window.
SPLITS = extent((64, 256), (64, 256, 512)) if NATIVE else (64,)
SOME = 7 if NATIVE else 1
CASES = {
    "window of one": {"window": 1},
    "window of two": {"window": 2},
    "window in a split": {"window": 20},
    "window of a split": {"window": 64},
    "window and one": {"window": 65},
    "window longer than all": {"window": 1000},
    "sinks": {"sunk": True},
    "soft cap": {"softcap": 0.7},
    "all": {"window": 70, "softcap": 2.0, "sunk": True},
    "all of fp8": {"window": 70, "softcap": 2.0, "sunk": True, "fp8": True},
}


@pytest.mark.parametrize(
    ("width", "case"),
    [
        *((1, case) for case in CASES),
        *((3, case) for case in ("window of one", "window of two", "all of fp8")),
    ],
)
def test_decode_equals_the_definition(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    case: str,
    width: int,
) -> None:
    for split in SPLITS:
        for dtype in op_dtypes[:SOME]:
            rows = Rows(lengths=LENGTHS, width=width, split=split, dtype=dtype, **CASES[case])
            decoding = Decoding(op, place_cache, rows)
            ours = decoding.at_once().cpu().double()
            tolerance = DECODE_TOLERANCE[dtype]
            torch.testing.assert_close(ours, decoding.definition(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["window of two", "all of fp8"])
def test_a_lane_has_the_same_bits_anywhere(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], case: str
) -> None:
    lengths = (1500, 511, 62, 5) if NATIVE else (126, 0)
    # Natively the longer splits of half precision are Gluon's.
    for split in SPLITS:
        for dtype in op_dtypes[:SOME]:
            rows = Rows(lengths=lengths, width=3, split=split, dtype=dtype, **CASES[case])
            together = Decoding(op, place_cache, rows).at_once()
            alone = Decoding(op, place_cache, rows)
            for lane in range(len(rows.lanes)):
                out = alone.run([-1, lane, -1], 1)[1]
                assert torch.equal(out, together[lane]), f"{lane=} {dtype=} {split=}"


def test_decode_attends_to_the_splits_of_a_window_alone(
    device: str, place_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grid and the partials of a short window are those of a short sequence."""
    grids = []
    original = decode_module.launcher

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        grids.append(grid)
        return original(kernel, grid)

    monkeypatch.setattr(decode_module, "launcher", launcher)
    for window in (0, 65, 66):
        rows = Rows(lengths=(300,), window=window)
        Decoding((decode_attention, device), place_cache, rows).at_once()
    assert [grid[2] for grid in grids] == [5, 2, 3]


def emulated(*arguments: Any, **options: Any) -> torch.Tensor:
    """`decode_attention` by Gluon's kernel, compiled for sm_90 and run without a GPU."""
    out = torch.zeros(len(arguments[0]), options["num_heads"] * arguments[3].shape[4])
    options |= {"out": out.to(arguments[0].dtype)}
    with assumed(H200):
        call = partial(decode_attention, *arguments, **options)
        launch = record_launch(decode_module, call, decode_gluon)
    assert launch.kernel is decode_gluon.decode_attention_kernel
    run_launch(launch)
    return options["out"]


# Windows over a split's edge, for some lanes of a row alone, and of three splits.
EMULATED = {
    "a split of some lanes": {"lengths": (257,), "width": 3, "window": 2},
    "one token": {"lengths": (256,), "width": 2, "window": 1},
    "three splits": {"lengths": (640,), "width": 2, "window": 257},
    "all of fp8": {"lengths": (300,), "window": 60, "softcap": 2.0, "sunk": True, "fp8": True},
    "sinks of a split": {"lengths": (9,), "sunk": True},
}


@pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
@pytest.mark.parametrize("case", extent(["a split of some lanes", "all of fp8"], list(EMULATED)))
def test_gluon_equals_the_definition_in_emulation(
    place_cache: Callable[..., Any], case: str
) -> None:
    shape: dict[str, Any] = {"kv_heads": 1, "group": 2, "split": 256, "dtype": torch.float16}
    rows = Rows(**shape, **EMULATED[case])
    decoding = Decoding((emulated, "cpu"), place_cache, rows)
    ours = decoding.at_once()
    tolerance = DECODE_TOLERANCE[torch.float16]
    torch.testing.assert_close(ours.double(), decoding.definition(), rtol=tolerance, atol=tolerance)
    if rows.width > 1:
        last = rows.width - 1
        assert torch.equal(decoding.run([last], 1)[0], ours[last]), "bits depend on the row"


class Splitting:
    """Prefill with counters, and few keys a split."""

    def __init__(self, device: str) -> None:
        self.arrivals = torch.zeros(PREFILL_ARRIVALS, dtype=torch.int32, device=device)

    def __call__(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill_module, "LEAST_SPLIT", 32)
            launch = Launch(arrivals=self.arrivals)
            result = paged_prefill_attention(*arguments, **named, launch=launch)
        assert not self.arrivals.any(), "a counter was not reset"
        return result


@pytest.fixture(scope="module", params=["triton", "split", "reference"])
def prefill_op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return paged_prefill_attention_reference, "cpu"
    device = request.getfixturevalue("device")
    return (Splitting(device) if request.param == "split" else paged_prefill_attention), device


SEGMENTS = [Segment(0, 0, 40), Segment(1, 77, 30), Segment(-1, 0, 3), Segment(2, 129, 1)]


@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_the_definition(
    prefill_op: Op,
    request: pytest.FixtureRequest,
    place_cache: Callable[..., Any],
    case: str,
) -> None:
    dtypes = [torch.float32, torch.float16]
    if prefill_op[0] is not paged_prefill_attention_reference:
        dtypes = request.getfixturevalue("dtypes")
    for dtype in dtypes[:SOME]:
        heads = 2 if NATIVE else 1
        problem = Problem(
            lengths=(40, 107, 130), group=3, kv_heads=heads, dtype=dtype, **CASES[case]
        )
        results = prefill(prefill_op, place_cache, problem, SEGMENTS, tail=2, poison=True)
        expected = dense_attention(problem)
        for segment, rows in zip(SEGMENTS, results, strict=True):
            if segment.slot < 0:
                continue
            wanted = expected[segment.slot, segment.position :][: segment.tokens]
            tolerance = PREFILL_TOLERANCE[dtype]
            torch.testing.assert_close(rows.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["window of two", "window and one", "all", "all of fp8"])
def test_chunks_have_the_bits_of_the_whole(
    device: str, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], case: str
) -> None:
    length, chunk = 1000 if NATIVE else 192, 64
    kernel = (paged_prefill_attention, device)
    for dtype in dtypes[:SOME]:
        problem = Problem(lengths=(length,), dtype=dtype, **CASES[case])
        (whole,) = prefill(kernel, place_cache, problem, [Segment(0, 0, length)])
        for position in range(0, length, chunk):
            tokens = min(chunk, length - position)
            segments = [Segment(0, position, tokens)]
            (part,) = prefill(kernel, place_cache, problem, segments, poison=True)
            assert torch.equal(part, whole[position : position + tokens]), f"{position=} {dtype=}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, rf"window=-1 must be in 0\.\.{MAX_WINDOW}"),
        ({"softcap": -1.0}, r"softcap=-1\.0 must be in 0\.\.1e\+06"),
        ({"softcap": float("nan")}, "softcap=nan must be"),
        (
            {"sinks": torch.zeros(5)},
            r"sinks must be a dense torch.float32 \[6\] on cpu, not .*\[5\]",
        ),
        ({"sinks": torch.zeros(6).half()}, r"not torch.float16 \[6\]"),
    ],
)
def test_errors(place_cache: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    rows = Rows(lengths=(3,), group=6, kv_heads=1)
    decoding = Decoding((decode_attention, "cpu"), place_cache, rows)
    decoding.options |= change
    with pytest.raises(ValueError, match=message):
        decoding.at_once()
    problem = Problem(lengths=(3,), group=6)
    function = partial(paged_prefill_attention, **change)
    with pytest.raises(ValueError, match=message):
        prefill((function, "cpu"), place_cache, problem, [Segment(0, 0, 3)])


def test_a_token_of_its_row_that_a_lane_does_not_see_may_be_anything(
    op: Op, place_cache: Callable[..., Any]
) -> None:
    decoding = Decoding(op, place_cache, Rows(lengths=(62, 5), width=3, window=2))
    expected = decoding.at_once()
    first = [lane for lane in range(6) if lane % 3 == 0]
    decoding.qkv_NX[first] = torch.nan
    found = decoding.at_once()
    assert bool(found[first].isnan().all())
    assert torch.equal(found[2::3], expected[2::3])


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter calls")
@pytest.mark.parametrize(("window", "tiles"), [(0, 20), (2, 11), (65, 14)])
def test_prefill_goes_over_the_tiles_of_windows_alone(
    place_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, window: int, tiles: int
) -> None:
    """Tiles have 32 rows, here of as many tokens, and 64 keys."""
    called = []
    original = prefill_triton.cache_offsets

    def cache_offsets(*arguments: Any) -> Any:
        called.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(prefill_triton, "cache_offsets", cache_offsets)
    problem = Problem(lengths=(256,), group=1, window=window)
    prefill((paged_prefill_attention, "cpu"), place_cache, problem, [Segment(0, 0, 256)])
    assert len(called) == tiles


@pytest.mark.parametrize("change", [{"window": 5}, {"softcap": 1.0}, {"sinks": torch.zeros(2)}])
def test_prefill_on_hopper_is_tritons_with_any_of_them(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The kernel on wgmma has none of the three."""
    monkeypatch.setattr(prefill_module, "takes_wgmma", lambda *_: True)
    starts, slots = ints([0, 3], "cpu"), ints([0], "cpu")
    arguments = (torch.zeros(3, 2, 64), torch.zeros(2, 2, 8, 1, 64), torch.ones(1, 1).int())
    named = {"query_start_P1": starts, "slot_P": slots, "position_P": slots, "scale": 1.0}
    call = partial(paged_prefill_attention, *arguments, **named, **change)
    launch = record_launch(prefill_module, call)
    assert launch.kernel is prefill_triton.prefill_attention_kernel
