"""Decode attention: against a dense computation, and the contract on padding and on bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphengine.kernels.attention import (
    SPLIT_TOKENS,
    paged_attention,
    paged_attention_reference,
    paged_attention_workspace_bytes,
)
from graphengine.kernels.dispatch import INTERPRETED
from graphengine.kernels.rope import RopeConfig, rope_append, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
SENTINEL = -555.0
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
SETTINGS = settings(deadline=None, max_examples=40 if NATIVE else 6, derandomize=not NATIVE)

Op = tuple[Callable[..., torch.Tensor], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Slots with `lengths` cached tokens each; a slot's query sits at its last token."""

    lengths: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [S, Q, D], keys and values [S, longest, G, D]: the same whatever the device."""
        generator = torch.Generator().manual_seed(self.seed)
        slots, longest = len(self.lengths), max(self.lengths)
        shapes = (
            (slots, self.kv_heads * self.group, self.head_dim),
            (slots, longest, self.kv_heads, self.head_dim),
            (slots, longest, self.kv_heads, self.head_dim),
        )
        q, k, v = (torch.randn(s, generator=generator).to(self.dtype).to(device) for s in shapes)
        return q, k, v


def dense_attention(problem: Problem) -> torch.Tensor:
    """The definition, in float64: [S, Q * D]."""
    q, k, v = (t.double() for t in problem.tensors("cpu"))
    rows = []
    for slot, length in enumerate(problem.lengths):
        heads = []
        for head in range(q.shape[1]):
            keys = k[slot, :length, head // problem.group]
            weights = torch.softmax(keys @ q[slot, head] * problem.scale, dim=0)
            heads.append(weights @ v[slot, :length, head // problem.group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def attend(
    op: Op,
    place_cache: Callable[..., Any],
    problem: Problem,
    lanes: Sequence[int],
    *,
    placement: int = 0,
    poison: bool = False,
    max_seq_len: int | None = None,
) -> torch.Tensor:
    """[N, Q * D] of lanes that name slots, or -1; asserts that nothing else was written."""
    function, device = op
    q_SQD, keys, values = problem.tensors(device)
    cache = place_cache(
        keys,
        values,
        problem.lengths,
        block_size=problem.block_size,
        placement=placement,
        poison=poison,
    )
    before = cache.all_layers.clone()
    q_NQD = torch.full((len(lanes), *q_SQD.shape[1:]), torch.nan if poison else 0.0).to(q_SQD)
    position = [problem.lengths[slot] - 1 if slot >= 0 else 0 for slot in lanes]
    for lane, slot in enumerate(lanes):
        if slot >= 0:
            q_NQD[lane] = q_SQD[slot]
        elif poison:
            position[lane] = HUGE[lane % len(HUGE)]
    out = torch.full((len(lanes), q_SQD[0].numel()), SENTINEL, dtype=problem.dtype, device=device)
    result = function(
        q_NQD,
        cache.kv,
        cache.block_table_SB,
        torch.tensor(lanes, dtype=torch.int32, device=device),
        torch.tensor(position, dtype=torch.int32, device=device),
        scale=problem.scale,
        max_seq_len=max_seq_len or max(problem.lengths),
        out=out,
    )
    assert result.data_ptr() == out.data_ptr()
    padded = torch.tensor(lanes) < 0
    assert bool((out[padded.to(device)] == SENTINEL).all()), "a padded lane was written"
    # As bytes, so that a NaN equals itself.
    unchanged = torch.equal(cache.all_layers.view(torch.uint8), before.view(torch.uint8))
    assert unchanged, "attention wrote to the cache"
    return result


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return paged_attention_reference, "cpu"
    return paged_attention, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is paged_attention_reference:
        return (torch.float32, torch.float16, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    longest = 1500 if NATIVE else 2 * SPLIT_TOKENS + 40
    interesting = st.sampled_from([1, 2, 63, 64, 65, SPLIT_TOKENS, SPLIT_TOKENS + 1])
    lengths = st.one_of(interesting, st.integers(1, longest))
    return Problem(
        lengths=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        kv_heads=draw(st.sampled_from([1, 2, 8] if NATIVE else [1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 16, 20])),
        head_dim=draw(st.sampled_from([24, 64, 80, 96, 128, 256])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        seed=draw(st.integers(0, 999)),
    )


@SETTINGS
@given(problem=problems())
def test_equals_the_definition(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], problem: Problem
) -> None:
    for dtype in op_dtypes:
        typed = replace(problem, dtype=dtype)
        lanes = range(len(problem.lengths))
        result = attend(op, place_cache, typed, lanes, placement=problem.seed, poison=True)
        torch.testing.assert_close(
            result.cpu().double(),
            dense_attention(typed),
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
        )


@pytest.mark.parametrize("lanes_total", [1, 3, 8, 32])
def test_a_lane_has_the_same_bits_anywhere(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], lanes_total: int
) -> None:
    lengths = (300, 5, 64, 1) if not NATIVE else (3000, 5, 64, 1, 700, 257)
    for dtype in op_dtypes:
        problem = Problem(lengths=lengths, group=3, dtype=dtype)
        alone = {slot: attend(op, place_cache, problem, [slot])[0] for slot in range(len(lengths))}
        shuffle = random.Random(lanes_total)
        lanes = [shuffle.choice([-1, *alone]) for _ in range(lanes_total - 1)]
        lanes.insert(shuffle.randrange(lanes_total), 0)
        crowd = attend(op, place_cache, problem, lanes, placement=lanes_total, poison=True)
        for lane, slot in enumerate(lanes):
            if slot >= 0:
                assert torch.equal(crowd[lane], alone[slot]), f"{lane=} {slot=} {lanes_total=}"


def test_max_seq_len_sets_no_bit(op: Op, place_cache: Callable[..., Any]) -> None:
    problem = Problem(lengths=(SPLIT_TOKENS + 3, 7))
    tight = attend(op, place_cache, problem, [0, 1])
    roomy = attend(op, place_cache, problem, [0, 1], max_seq_len=20 * SPLIT_TOKENS)
    assert torch.equal(tight, roomy)


def test_every_lane_padded(op: Op, place_cache: Callable[..., Any]) -> None:
    attend(op, place_cache, Problem(lengths=(3,)), [-1] * 5, poison=True)


def test_one_split_is_exact(op: Op, place_cache: Callable[..., Any]) -> None:
    """With a single key the weight is 1: the value itself comes out."""
    problem = Problem(lengths=(1,), kv_heads=2, group=2)
    result = attend(op, place_cache, problem, [0])[0].view(2, 2, problem.head_dim)
    value = problem.tensors(op[1])[2][0, 0]
    assert torch.equal(result, value[:, None].expand_as(result))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize("position", [-1, -(2**31), 48, 2**31 - 1])
def test_a_live_lane_out_of_bounds_is_nan(
    op: Op, place_cache: Callable[..., Any], position: int
) -> None:
    function, device = op
    problem = Problem(lengths=(40, 40))
    q, keys, values = problem.tensors(device)
    cache = place_cache(keys, values, (40, 40), block_size=16, placement=0, poison=False)
    result = function(
        q,
        cache.kv,
        cache.block_table_SB,
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([position, 39], dtype=torch.int32, device=device),
        scale=problem.scale,
        max_seq_len=48,
    )
    assert bool(result[0].isnan().all())
    assert torch.equal(result[1], attend(op, place_cache, problem, [1])[0])


def test_strided_queries(op: Op, place_cache: Callable[..., Any]) -> None:
    """Queries may be a view into a wider tensor, as a fused projection leaves them."""
    function, device = op
    problem = Problem(lengths=(20, 33))
    q, keys, values = problem.tensors(device)
    cache = place_cache(keys, values, problem.lengths, block_size=16, placement=0, poison=False)
    wide = torch.full((2, 5, problem.head_dim), torch.nan, device=device)
    wide[:, 1:3] = q
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([19, 32], dtype=torch.int32, device=device)
    arguments = (cache.kv, cache.block_table_SB, slots, positions)
    strided = function(wide[:, 1:3], *arguments, scale=0.125, max_seq_len=64)
    dense = function(q, *arguments, scale=0.125, max_seq_len=64)
    assert torch.equal(strided, dense)


def valid_arguments() -> dict[str, Any]:
    return {
        "q_NQD": torch.zeros(2, 4, 64),
        "kv": torch.zeros(3, 2, 16, 2, 64),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "slot_N": torch.full((2,), -1, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "scale": 0.125,
        "max_seq_len": 32,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_NQD": torch.zeros(2, 4, 512)}, "head_dim=512 is outside 1..256"),
        ({"q_NQD": torch.zeros(2, 3, 64)}, "3 query heads are no multiple of 2"),
        ({"q_NQD": torch.zeros(2, 4, 80)}, "2 heads of 64, expected 2 of 80"),
        ({"q_NQD": torch.zeros(2, 4, 64).half()}, "kv is torch.float32, q torch.float16"),
        ({"q_NQD": torch.zeros(2, 64, 4).mT}, "dense heads"),
        ({"kv": torch.zeros(3, 2, 24, 2, 64)}, "block_size=24"),
        ({"kv": torch.zeros(3, 2, 2, 16, 64).transpose(2, 3)}, "dense within a block"),
        ({"block_table_SB": torch.zeros(2, 2, dtype=torch.int64)}, "must be int32"),
        ({"slot_N": torch.zeros(3, dtype=torch.int32)}, r"slot_N must be a dense \[2\]"),
        ({"position_N": torch.zeros(2)}, "position_N must be int32, not torch.float32"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"out": torch.zeros(2, 255)}, r"\[2, 256\], not torch.float32 \[2, 255\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**(valid_arguments() | change))


def test_workspace_bytes() -> None:
    assert paged_attention_workspace_bytes(
        8, heads=32, head_dim=128, max_seq_len=SPLIT_TOKENS + 1
    ) == (8 * 32 * 2 * 130 * 4)


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_a_captured_append_and_attention_replays_the_eager_bits(
    place_cache: Callable[..., Any],
) -> None:
    problem = Problem(lengths=(300, 20), kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16)
    _, keys, values = problem.tensors("cuda")
    cache = place_cache(keys, values, (300, 20), block_size=16, placement=1, poison=True, room=8)
    cos, sin = rope_tables(RopeConfig(), head_dim=128, max_positions=512, device="cuda")
    qkv = torch.randn(3, (8 + 2 * 2) * 128, device="cuda", dtype=torch.bfloat16)
    slot = torch.tensor([1, -1, 0], dtype=torch.int32, device="cuda")
    position = torch.tensor([20, 0, 300], dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        paged = (cache.kv, cache.block_table_SB, slot, position)
        q = rope_append(qkv, cos, sin, *paged, num_heads=8, num_kv_heads=2)
        return paged_attention(q, *paged, scale=problem.scale, max_seq_len=512)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    live = slot >= 0
    for _ in range(3):
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed[live], step()[live])
        position += 1
        qkv.normal_()
