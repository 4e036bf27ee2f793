"""Prefill attention: against a dense computation, and the contract on padding and on bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.attention import prefill as prefill_attention
from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS, paged_prefill_attention
from graphengine.kernels.attention.reference import paged_prefill_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from launches.prefill import TOLERANCE, Op, Problem, Segment, dense_attention, prefill, segments_of

NATIVE = torch.cuda.is_available() and not INTERPRETED
SETTINGS = settings(deadline=None, max_examples=examples(6, 40), derandomize=not NATIVE)


class Splitting:
    """`paged_prefill_attention` with counters, which it must leave at zero, and few keys a split.

    The interpreter runs one program after the other: the last one puts the parts together.
    """

    def __init__(self, device: str, keys: int = 0) -> None:
        self.keys = keys
        self.arrivals = torch.zeros(PREFILL_ARRIVALS + 3, dtype=torch.int32, device=device)

    def __call__(self, *arguments: Any, **named: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if self.keys:
                patch.setattr(prefill_attention, "LEAST_SPLIT", self.keys)
            result = paged_prefill_attention(
                *arguments, **named, launch=Launch(arrivals=self.arrivals)
            )
        assert not self.arrivals.any(), "a counter was not reset"
        return result


@pytest.fixture(scope="module", params=["triton", "split", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return paged_prefill_attention_reference, "cpu"
    device = request.getfixturevalue("device")
    if request.param == "split":
        return Splitting(device, keys=32), device
    return paged_prefill_attention, device


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is paged_prefill_attention_reference:
        return (torch.float32, torch.float16, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, list[Segment]]:
    longest = 700 if NATIVE else 100
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    problem = Problem(
        lengths=tuple(lengths),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        head_dim=draw(st.sampled_from([2, 4, 12, 24, 64, 80, 96, 100, 128, 160, 256, 512])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        seed=draw(st.integers(0, 999)),
    )
    return problem, draw(segments_of(lengths))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@SETTINGS
@given(drawn=problems(), tail=st.integers(1, 9))
def test_equals_the_definition(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    fp8: bool,
    drawn: tuple[Problem, list[Segment]],
    tail: int,
) -> None:
    problem, segments = drawn
    # One of them: natively every example waits for the compiler.
    dtype = op_dtypes[problem.seed % len(op_dtypes)]
    typed = replace(problem, dtype=dtype, fp8=fp8)
    results = prefill(
        op, place_cache, typed, segments, tail=tail, placement=problem.seed, poison=True
    )
    expected = dense_attention(typed)
    for segment, rows in zip(segments, results, strict=True):
        if segment.slot >= 0:
            last = segment.position + segment.tokens
            wanted = expected[segment.slot, segment.position : last]
            torch.testing.assert_close(
                rows.cpu().double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.fixture(scope="module")
def kernel(device: str) -> Op:
    """The kernel alone: its reference multiplies whole segments and promises no bits."""
    return paged_prefill_attention, device


@pytest.mark.parametrize("chunk", [1, 16, 37])
@pytest.mark.parametrize("group", [2, 3])
def test_chunks_have_the_bits_of_the_whole(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    chunk: int,
    group: int,
) -> None:
    length = 1500 if NATIVE and chunk > 1 else 75
    for dtype in dtypes:
        problem = Problem(lengths=(length,), group=group, dtype=dtype)
        (whole,) = prefill(kernel, place_cache, problem, [Segment(0, 0, length)])
        for index, position in enumerate(range(0, length, chunk)):
            # One-token chunks at a few places are enough.
            if chunk == 1 and index % 20:
                continue
            tokens = min(chunk, length - position)
            (part,) = prefill(
                kernel,
                place_cache,
                problem,
                [Segment(0, position, tokens)],
                placement=index,
                poison=True,
            )
            wanted = whole[position : position + tokens]
            # In the interpreter `tl.dot` is numpy's matmul, whose bits depend on a row's place.
            exact = NATIVE or chunk * group % 32 == 0
            tolerance = 0 if exact else TOLERANCE[dtype]
            torch.testing.assert_close(part, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_a_segment_has_the_same_bits_among_others(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], fp8: bool
) -> None:
    lengths = (900, 130, 70, 64) if NATIVE else (90, 13, 70, 64)
    for dtype in dtypes:
        problem = Problem(lengths=lengths, kv_heads=2, dtype=dtype, fp8=fp8)
        segments = [
            Segment(2, 30, 40),
            Segment(-1, 0, 7),
            Segment(0, 5, lengths[0] - 5),
            Segment(1, 0, 0),
            Segment(3, 63, 1),
        ]
        crowd = prefill(kernel, place_cache, problem, segments, tail=70, placement=5, poison=True)
        for segment, rows in zip(segments, crowd, strict=True):
            if segment.slot >= 0 and segment.tokens:
                (alone,) = prefill(kernel, place_cache, problem, [segment])
                assert torch.equal(rows, alone), f"{segment=}"


@pytest.mark.parametrize("many", [1, 10**9])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_height_of_a_tile_is_not_seen(
    kernel: Op,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    many: int,
) -> None:
    """Tall tiles, then short ones, for a launch that would get either."""
    lengths = (90, 70)
    # The interpreter gets its two by turns.
    turn = head_dim // 64 + many
    for dtype in dtypes if NATIVE else (dtypes[turn % len(dtypes)],):
        problem = Problem(
            lengths=lengths, group=4, kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=8
        )
        segments = [Segment(0, 3, 87), Segment(-1, 0, 3), Segment(1, 0, 70)]
        default = prefill(kernel, place_cache, problem, segments, tail=3, poison=True)
        monkeypatch.setattr(prefill_attention, "MANY_PROGRAMS", many)
        forced = prefill(kernel, place_cache, problem, segments, tail=3, poison=True)
        monkeypatch.undo()
        # In the interpreter `tl.dot` is numpy's matmul, whose bits depend on a matrix's shape.
        tolerance = 0 if NATIVE else TOLERANCE[dtype]
        for rows, wanted in zip(forced, default, strict=True):
            torch.testing.assert_close(rows, wanted, rtol=0, atol=tolerance)


def test_every_segment_padded(op: Op, place_cache: Callable[..., Any]) -> None:
    prefill(op, place_cache, Problem(lengths=(3,)), [Segment(-1, 0, 5)] * 2, tail=3, poison=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("position", [12, 14, 16, 2**30, -2])
def test_tokens_outside_the_block_table_are_nan(op: Op, position: int) -> None:
    """Four tokens around the ends of a table of one block of 16."""
    function, device = op
    kv = torch.ones(2, 2, 16, 1, 64, device=device)
    result = function(
        torch.ones(4, 2, 64, device=device),
        kv,
        torch.ones(1, 1, dtype=torch.int32, device=device),
        query_start_P1=torch.tensor([0, 4], dtype=torch.int32, device=device),
        slot_P=torch.zeros(1, dtype=torch.int32, device=device),
        position_P=torch.tensor([position], dtype=torch.int32, device=device),
        scale=0.125,
    )
    for token in range(4):
        if 0 <= position + token < 16:
            torch.testing.assert_close(result[token], torch.ones_like(result[token]))
        else:
            assert bool(result[token].isnan().all()), f"{token=}"


# Keys that are split among programs.


def test_keys_are_split_where_programs_are_few() -> None:
    picks = prefill_attention._pick_shares
    assert picks(1) == picks(8) == 16, "no more than that share a tile"
    assert (picks(16), picks(33), picks(64)) == (8, 3, 2)
    assert picks(65) == picks(10_000) == 1


def test_the_length_of_a_table_is_not_seen(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    """With more columns more programs are launched: of another `max_seq_len`, say."""
    function, device = Splitting(kernel[1], keys=64), kernel[1]

    def longer(q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, **named: Any) -> Any:
        table = torch.cat([table, torch.zeros_like(table), torch.zeros_like(table)], dim=1)
        return function(q, kv, table, **named)

    for dtype in dtypes:
        problem = Problem(lengths=(300,) if NATIVE else (140,), group=4, dtype=dtype)
        segment = Segment(0, problem.lengths[0] - 9, 9)
        (short,) = prefill((function, device), place_cache, problem, [segment])
        (long,) = prefill((longer, device), place_cache, problem, [segment])
        assert torch.equal(short, long)


@pytest.mark.parametrize("position", [0, 40, 230])
def test_parts_are_really_put_together(
    device: str, place_cache: Callable[..., Any], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that find keys: as many as there are splits up to the chunk's end."""
    problem = Problem(lengths=(240,), group=4)
    segment = Segment(0, position, 8)
    (whole,) = prefill((paged_prefill_attention, device), place_cache, problem, [segment])
    parts: list[torch.Tensor] = []
    empty = torch.empty

    def remembered(*size: Any, **named: Any) -> torch.Tensor:
        tensor = empty(*size, **named)
        if tensor.dim() == 1 and tensor.dtype == torch.float32:
            parts.append(tensor.fill_(torch.nan))
        return tensor

    monkeypatch.setattr(torch, "empty", remembered)
    op = Splitting(device, keys=64), device
    (rows,) = prefill(op, place_cache, problem, [segment])
    monkeypatch.undo()
    torch.testing.assert_close(rows, whole, rtol=0, atol=TOLERANCE[torch.float32])
    splits = -(-(position + 8) // 64)
    # A table of two blocks more than the tokens need.
    programs = -(-(16 * -(-(position + 8) // 16) + 32) // 64)
    if programs == 1:
        assert not parts
        return
    (memory,) = parts
    written = ~memory.view(programs, -1).isnan().any(1)
    assert written.tolist() == [splits > 1 and index < splits for index in range(programs)]


def test_a_split_token_does_not_know_how_many_follow(
    kernel: Op, dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    """Launches have equally many lanes: dead lanes after a chunk are not seen."""
    for dtype in dtypes:
        problem = Problem(lengths=(600,) if NATIVE else (140,), group=4, dtype=dtype)
        position = problem.lengths[0] - 20
        op = Splitting(kernel[1], keys=64), kernel[1]
        (all_tokens,) = prefill(op, place_cache, problem, [Segment(0, position, 20)], tail=1)
        for tokens in (1, 7):
            chunk = Segment(0, position, tokens)
            (few,) = prefill(op, place_cache, problem, [chunk], tail=21 - tokens)
            assert torch.equal(few, all_tokens[:tokens])


def valid_arguments() -> dict[str, Any]:
    return {
        "q_NQD": torch.zeros(5, 4, 64),
        "kv": torch.zeros(3, 2, 16, 2, 64),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "query_start_P1": torch.tensor([0, 2, 5], dtype=torch.int32),
        "slot_P": torch.full((2,), -1, dtype=torch.int32),
        "position_P": torch.zeros(2, dtype=torch.int32),
        "scale": 0.125,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_NQD": torch.zeros(5, 4, 513)}, "head_dim=513 is outside 1..512"),
        ({"q_NQD": torch.zeros(5, 4, 64).half()}, "kv is torch.float32, q torch.float16: it must"),
        ({"q_NQD": torch.zeros(5, 5, 64)}, "5 query heads are no multiple of 2"),
        ({"scale": 0.0}, "scale=0.0 must be above 0"),
        ({"slot_P": torch.zeros(1, dtype=torch.int32)}, r"position_P must be a dense \[1\]"),
        ({"query_start_P1": torch.zeros(2, dtype=torch.int32)}, r"query_start_P1 .* \[3\]"),
        ({"slot_P": torch.zeros(2)}, "slot_P must be int32, not torch.float32"),
        ({"out": torch.zeros(4, 256)}, r"\[5, 256\], not torch.float32 \[4, 256\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(**(valid_arguments() | change))
