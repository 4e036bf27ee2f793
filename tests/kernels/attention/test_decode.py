"""Decode attention: against the definition, and the contract on padding, cache and bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples, some_of
from graphengine.kernels.attention import decode as attention
from graphengine.kernels.attention.decode import (
    SPLIT_TOKENS,
    SPLITS,
    decode_attention,
    decode_attention_arrivals,
    decode_attention_workspace_bytes,
)
from graphengine.kernels.attention.gluon import decode_gluon
from graphengine.kernels.attention.reference import decode_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.norm_rope.rope import rope_append, rope_append_reference
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
SENTINEL = -555.0
EPS = 1e-6
# Of float32 sums of order 1. A norm's statistics may round a query or key the other way: by an ulp.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HUGE = (2**31 - 1, -(2**31), 10**9, -7)
SETTINGS = settings(deadline=None, max_examples=examples(9, 24), derandomize=not NATIVE)
# In half precision on a GPU long splits have a kernel of their own.
KERNELS_SPLITS = (SPLIT_TOKENS, 256) if NATIVE else (SPLIT_TOKENS,)


def edges(split: int) -> tuple[int, ...]:
    """Positions where a split, a tile or a block begins or ends; one split is used, or several."""
    return (0, 1, 7, 8, 63, 64, 127, split - 1, split, split + 1, 2 * split)


EDGES = edges(SPLIT_TOKENS)

Op = tuple[Callable[..., torch.Tensor], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Slots with `lengths` cached tokens each; a slot's lane brings the next one."""

    lengths: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    normed: bool = True
    plus_one: bool = False
    """Norms are Gemma 3's, in float32."""
    after: bool = False
    """Norms are Hunyuan's: after the rotation."""
    dtype: torch.dtype = torch.float32
    split: int = SPLIT_TOKENS
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def positions(self) -> int:
        """Enough for every slot's new token."""
        return max(self.lengths) + 1

    def draw(self, *shape: int) -> torch.Tensor:
        """Random numbers that depend on the shape and the seed, not on device or dtype."""
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=generator).to(self.dtype)

    def qkv_SX(self) -> torch.Tensor:
        return self.draw(len(self.lengths), (self.heads + 2 * self.kv_heads) * self.head_dim)

    def cached_2SLGD(self) -> torch.Tensor:
        shape = (max(1, *self.lengths), self.kv_heads, self.head_dim)
        return self.draw(2, len(self.lengths), *shape)

    def tables(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(
            RopeConfig(), head_dim=self.head_dim, max_positions=self.positions, device=device
        )

    def parameters(self, device: str) -> dict[str, Any]:
        """Keyword arguments of `rope_append` and `decode_attention`."""
        shared: dict[str, Any] = {"num_heads": self.heads, "num_kv_heads": self.kv_heads}
        if self.normed:
            weights = (1 + 0.2 * self.draw(2, self.head_dim)).to(device)
            weights = weights.float() if self.plus_one else weights
            shared |= {"q_norm_weight": weights[0].contiguous(), "eps": EPS}
            shared |= {"k_norm_weight": weights[1].contiguous(), "norm_after": self.after}
        return shared


@dataclass(frozen=True, slots=True)
class Decoded:
    out_NX: torch.Tensor
    """[N, Q * D]"""
    key_SGD: torch.Tensor
    """What the launch appended; NaN for slots without a lane."""
    value_SGD: torch.Tensor


def int32(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def counters(lanes: int, heads: int, kv_heads: int, device: str) -> torch.Tensor:
    """Some more than needed: that nobody else's is touched is part of the test."""
    needed = decode_attention_arrivals(lanes, num_heads=heads, num_kv_heads=kv_heads)
    return torch.zeros(needed + 3, dtype=torch.int32, device=device)


def run(op: Op, *arguments: Any, **parameters: Any) -> torch.Tensor:
    """`op` with counters if it takes some, which must be zero again after it."""
    function, device = op
    if function is decode_attention_reference:
        parameters.pop("split_tokens", None)
        return function(*arguments, **parameters)
    lanes = arguments[0].shape[0]
    arrivals = counters(lanes, parameters["num_heads"], parameters["num_kv_heads"], device)
    result = function(*arguments, Launch(arrivals=arrivals), **parameters)
    assert not arrivals.any(), "arrivals are not zero after the kernel"
    return result


def decode(
    op: Op,
    place_cache: Callable[..., Any],
    problem: Problem,
    lanes: Sequence[int],
    *,
    placement: int = 0,
    poison: bool = False,
    max_seq_len: int | None = None,
) -> Decoded:
    """Run lanes that name slots, or -1; asserts that nothing but their own entries was written."""
    device = op[1]
    keys, values = problem.cached_2SLGD().to(device)
    cache = place_cache(
        keys,
        values,
        problem.lengths,
        block_size=problem.block_size,
        placement=placement,
        poison=poison,
        room=1,
    )
    before = cache.all_layers.clone()
    qkv_SX = problem.qkv_SX()
    qkv_NX = torch.full((len(lanes), qkv_SX.shape[1]), torch.nan if poison else 0.0).to(qkv_SX)
    position = [problem.lengths[slot] if slot >= 0 else 0 for slot in lanes]
    for lane, slot in enumerate(lanes):
        if slot >= 0:
            qkv_NX[lane] = qkv_SX[slot]
        elif poison:
            position[lane] = HUGE[lane % len(HUGE)]
    width = problem.heads * problem.head_dim
    out = torch.full((len(lanes), width), SENTINEL, dtype=problem.dtype, device=device)
    result = run(
        op,
        qkv_NX.to(device),
        *problem.tables(device),
        cache.kv,
        cache.block_table_SB,
        int32(lanes, device),
        int32(position, device),
        scale=problem.head_dim**-0.5,
        max_seq_len=max_seq_len or problem.positions,
        split_tokens=problem.split,
        out=out,
        **problem.parameters(device),
    )
    assert result.data_ptr() == out.data_ptr()
    padded = (torch.tensor(lanes) < 0).to(device)
    assert bool((out[padded] == SENTINEL).all()), "a padded lane was written"

    # Take the appended entries out of the cache; what remains must be as it was.
    appended = torch.full_like(keys[:, 0], torch.nan).repeat(2, 1, 1, 1)
    for slot in {slot for slot in lanes if slot >= 0}:
        length = problem.lengths[slot]
        block = int(cache.block_table_SB[slot, length // problem.block_size])
        entry = (block, slice(None), length % problem.block_size)
        appended[:, slot] = cache.kv[entry]
        cache.kv[entry] = before[:, 1][entry]
    # As bytes, so that a NaN equals itself.
    unchanged = torch.equal(cache.all_layers.view(torch.uint8), before.view(torch.uint8))
    assert unchanged, "an entry that is no lane's was written"
    return Decoded(result, appended[0], appended[1])


def rotated(problem: Problem, op: Callable[..., torch.Tensor], device: str) -> Decoded:
    """Queries, and appended keys and values, by `rope_append` or its reference."""
    slots = len(problem.lengths)
    # A cache of one block a slot: positions count only for the angles.
    cos, sin = (table[list(problem.lengths)] for table in problem.tables(device))
    kv = torch.zeros(slots, 2, 64, problem.kv_heads, problem.head_dim, dtype=problem.dtype)
    kv = kv.to(device)
    slot = int32(range(slots), device)
    table = slot[:, None].contiguous()
    qkv = problem.qkv_SX().to(device)
    q = op(qkv, cos, sin, kv, table, slot, slot, **problem.parameters(device))
    index = torch.arange(slots)
    return Decoded(q, kv[index, 0, index], kv[index, 1, index])


def definition(problem: Problem) -> tuple[torch.Tensor, Decoded]:
    """[S, Q * D] in float64 of rotated and rounded queries and keys, and those."""
    new = rotated(problem, rope_append_reference, "cpu")
    keys, values = problem.cached_2SLGD().double()
    rows = []
    for slot, length in enumerate(problem.lengths):
        k = torch.cat((keys[slot, :length], new.key_SGD[slot, None].double())).transpose(0, 1)
        v = torch.cat((values[slot, :length], new.value_SGD[slot, None].double())).transpose(0, 1)
        q = new.out_NX[slot].double().view(problem.kv_heads, problem.group, problem.head_dim)
        weights = torch.softmax(q @ k.mT * problem.head_dim**-0.5, dim=-1)
        rows.append((weights @ v).flatten())
    return torch.stack(rows), new


def assert_equals_the_definition(
    op: Op, dtypes: Sequence[torch.dtype], place_cache: Callable[..., Any], problem: Problem
) -> None:
    for dtype in dtypes:
        typed = replace(problem, dtype=dtype)
        lanes = range(len(problem.lengths))
        ours = decode(op, place_cache, typed, lanes, placement=problem.seed, poison=True)
        expected, new = definition(typed)
        torch.testing.assert_close(
            ours.out_NX.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        assert torch.equal(ours.value_SGD.cpu(), new.value_SGD)
        ulps = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.key_SGD.cpu(), new.key_SGD, rtol=ulps, atol=2 * ulps)


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return decode_attention_reference, "cpu"
    return decode_attention, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is decode_attention_reference:
        return (torch.float32, torch.float16, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    longest = 1500 if NATIVE else 2 * SPLIT_TOKENS + 40
    split = draw(st.sampled_from(SPLITS if NATIVE else (64, 128)))
    lengths = st.one_of(st.sampled_from(edges(split)), st.integers(0, longest))
    return Problem(
        lengths=tuple(draw(st.lists(lengths, min_size=1, max_size=3))),
        kv_heads=draw(st.sampled_from([1, 2, 8] if NATIVE else [1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 20])),
        head_dim=draw(st.sampled_from([2, 4, 12, 24, 64, 80, 96, 100, 128, 160, 256])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        normed=draw(st.booleans()),
        split=split,
        seed=draw(st.integers(0, 999)),
    )


def test_norms_may_be_in_float32(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    for split in KERNELS_SPLITS:
        problem = Problem(lengths=(0, 70), kv_heads=2, head_dim=256, plus_one=True, split=split)
        assert_equals_the_definition(op, op_dtypes, place_cache, problem)


def test_norms_may_follow_the_rotation(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    for split in KERNELS_SPLITS:
        problem = Problem(lengths=(0, 70), kv_heads=2, head_dim=80, after=True, split=split)
        assert_equals_the_definition(op, op_dtypes, place_cache, problem)


def test_heads_of_512(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    """In 16 bits: in float32 a program's keys and values fit no GPU's shared memory."""
    for dtype in op_dtypes:
        problem = Problem(lengths=(0, 70, 131), kv_heads=2, group=3, head_dim=512, normed=True)
        if dtype.itemsize == 2 or op[0] is decode_attention_reference:
            assert_equals_the_definition(op, [dtype], place_cache, problem)
            continue
        with pytest.raises(ValueError, match=r"64 keys of 512 .* take 294912 bytes"):
            assert_equals_the_definition(op, [dtype], place_cache, problem)


@SETTINGS
@given(problem=problems())
def test_equals_the_definition(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any], problem: Problem
) -> None:
    # One of them: natively every example waits for the compiler.
    dtype = op_dtypes[problem.seed % len(op_dtypes)]
    assert_equals_the_definition(op, [dtype], place_cache, problem)


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    some_of(
        [
            *((1, 64, 8), (4, 128, 16), (5, 80, 32), (8, 96, 128), (16, 64, 64), (20, 256, 8)),
            *((3, 4, 16), (2, 12, 8), (1, 100, 64), (2, 160, 16)),
        ],
        *(0, 2, 3, 5, 6, 7),
    ),
)
@pytest.mark.parametrize("split", KERNELS_SPLITS)
def test_edges_of_splits_and_blocks(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    split: int,
    group: int,
    head_dim: int,
    block_size: int,
) -> None:
    shape = {"group": group, "head_dim": head_dim, "block_size": block_size}
    problem = Problem(lengths=edges(split), split=split, **shape)
    assert_equals_the_definition(op, op_dtypes, place_cache, problem)


@pytest.mark.parametrize("lanes_total", some_of([1, 3, 8, 32], 1, 3))
@pytest.mark.parametrize("split", KERNELS_SPLITS)
def test_a_lane_has_the_same_bits_anywhere(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    split: int,
    lanes_total: int,
) -> None:
    lengths = (300, 5, 64, 0) if not NATIVE else (3000, 5, 64, 0, 700, split)
    for dtype in op_dtypes:
        problem = Problem(lengths=lengths, group=3, dtype=dtype, split=split)
        alone = {slot: decode(op, place_cache, problem, [slot]) for slot in range(len(lengths))}
        shuffle = random.Random(lanes_total)
        lanes = [*alone, *[-1] * 32][:lanes_total]
        shuffle.shuffle(lanes)
        crowd = decode(op, place_cache, problem, lanes, placement=lanes_total, poison=True)
        for lane, slot in enumerate(lanes):
            if slot >= 0:
                message = f"{lane=} {slot=} {lanes_total=} {dtype=}"
                assert torch.equal(crowd.out_NX[lane], alone[slot].out_NX[0]), message
                assert torch.equal(crowd.key_SGD[slot], alone[slot].key_SGD[slot]), message
                assert torch.equal(crowd.value_SGD[slot], alone[slot].value_SGD[slot]), message


@pytest.mark.parametrize("group", [4, 20])
def test_the_grid_sets_no_bit(
    op: Op,
    op_dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    group: int,
) -> None:
    """Neither the limit on positions nor how many programs share a lane's splits."""
    lengths = (4 * SPLIT_TOKENS + 9, SPLIT_TOKENS + 3, 7)
    for dtype in op_dtypes:
        problem = Problem(lengths=lengths, group=group, dtype=dtype)
        lanes = range(len(lengths))
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_MAX_KEYS", 10**9)
            tight = decode(op, place_cache, problem, lanes)
            roomy = decode(op, place_cache, problem, lanes, max_seq_len=20 * SPLIT_TOKENS)
        assert torch.equal(tight.out_NX, roomy.out_NX)
        for programs in (1, 2, 3):
            with monkeypatch.context() as patch:
                tiles = -(-group // 16)
                patch.setattr(attention, "_LEAST_PROGRAMS", 1)
                keys = programs * len(lengths) * tiles * SPLIT_TOKENS
                patch.setattr(attention, "_MAX_KEYS", keys)
                shared = decode(op, place_cache, problem, lanes)
            assert torch.equal(shared.out_NX, tight.out_NX), f"{programs=} {dtype=}"
            assert torch.equal(shared.key_SGD, tight.key_SGD), f"{programs=} {dtype=}"


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
@pytest.mark.parametrize(("head_dim", "split"), [(64, 256), (128, 256), (128, 512)])
def test_programs_that_share_splits_set_no_bit(
    place_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, head_dim: int, split: int
) -> None:
    """Neither where their shares are cut, nor the limit on positions."""
    lengths = (40 * split + 9, split + 3, 7, 3 * split - 1)
    problem = Problem(
        lengths=lengths, kv_heads=2, head_dim=head_dim, split=split, dtype=torch.bfloat16
    )
    op = (decode_attention, "cuda")
    expected = decode(op, place_cache, problem, range(4))
    for multiprocessors in (1, 2, 3, 31):
        with monkeypatch.context() as patch:
            patch.setattr(decode_gluon, "processors_of", lambda tensor, m=multiprocessors: m)
            shared = decode(op, place_cache, problem, range(4), max_seq_len=100_000)
        assert torch.equal(shared.out_NX, expected.out_NX), f"{multiprocessors=}"
        assert torch.equal(shared.key_SGD, expected.key_SGD), f"{multiprocessors=}"


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
@pytest.mark.parametrize("split", [256, 512])
def test_lengths_from_1_to_131072_in_one_batch(place_cache: Callable[..., Any], split: int) -> None:
    """Also where more splits than are put together at once make a part of a lane's sum."""
    lengths = (131_071, 0, 1, 64 * split - 1, 64 * split, 64 * split + 1, 1000, 40_000)
    problem = Problem(lengths=lengths, group=4, split=split, dtype=torch.bfloat16, normed=False)
    crowd = decode((decode_attention, "cuda"), place_cache, problem, range(8), poison=True)
    expected = decode((decode_attention_reference, "cuda"), place_cache, problem, range(8))
    torch.testing.assert_close(crowd.out_NX, expected.out_NX, rtol=2e-2, atol=2e-2)
    for slot in (0, 4, 7):
        alone = decode((decode_attention, "cuda"), place_cache, problem, [slot])
        assert torch.equal(crowd.out_NX[slot], alone.out_NX[0]), f"{slot=}"


def test_every_lane_padded(op: Op, place_cache: Callable[..., Any]) -> None:
    decode(op, place_cache, Problem(lengths=(3,)), [-1] * 5, poison=True)


def test_a_first_token_is_its_own_value(op: Op, place_cache: Callable[..., Any]) -> None:
    """With a single key the weight is 1: the value itself comes out."""
    problem = Problem(lengths=(0,), kv_heads=2, group=2)
    result = decode(op, place_cache, problem, [0])
    heads = result.out_NX[0].view(2, 2, problem.head_dim)
    assert torch.equal(heads, result.value_SGD[0][:, None].expand_as(heads))


def test_appends_what_rope_append_appends(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    """Prefill fills the same cache. Bit for bit where no compiler may fuse multiply and add."""
    function = rope_append_reference if op[0] is decode_attention_reference else rope_append
    for dtype in op_dtypes:
        problem = Problem(lengths=(0, 9, 40), kv_heads=2, normed=False, dtype=dtype)
        ours = decode(op, place_cache, problem, range(3))
        theirs = rotated(problem, function, op[1])
        assert torch.equal(ours.value_SGD, theirs.value_SGD)
        ulps = 0 if op[1] == "cpu" else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.key_SGD, theirs.key_SGD, rtol=ulps, atol=ulps)


def test_steps_read_what_steps_appended(op: Op) -> None:
    """Across the end of a split: each step equals one over a cache that was filled at once."""
    function, device = op
    first, tokens, problem = SPLIT_TOKENS - 4, SPLIT_TOKENS + 4, Problem(lengths=(0,), normed=False)
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=tokens, device=device)
    table = int32(range(1, 1 + -(-tokens // 16)), device)[None]
    filled = torch.zeros(table.shape[1] + 1, 2, 16, 1, 64, device=device)
    qkv_TX = problem.draw(tokens, 4 * 64).to(device)
    slot, token = int32([0] * tokens, device), int32(range(tokens), device)
    parameters = problem.parameters(device)
    append = rope_append_reference if function is decode_attention_reference else rope_append
    q_TQD = append(qkv_TX, cos, sin, filled, table, slot, token, **parameters)
    keys, values = filled[table[0].long()].transpose(0, 1).reshape(2, -1, 64)

    kv = torch.zeros_like(filled)
    append(qkv_TX[:first], cos, sin, kv, table, slot[:first], token[:first], **parameters)
    for step in range(first, tokens):
        lane = slice(step, step + 1)
        arguments = (qkv_TX[lane], cos, sin, kv, table, slot[lane], token[lane])
        result = run(op, *arguments, scale=0.125, max_seq_len=tokens, **parameters)
        weights = torch.softmax(q_TQD[step] @ keys[: step + 1].T * 0.125, dim=-1)
        expected = (weights @ values[: step + 1]).flatten()
        torch.testing.assert_close(result[0], expected, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(kv, filled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("position", [-1, -(2**31), 40, 2**31 - 1])
@pytest.mark.parametrize("limit", ["max_seq_len", "tables", "block_table"])
def test_a_live_lane_out_of_bounds_is_nan_and_appends_nothing(
    op: Op, position: int, limit: str
) -> None:
    device = op[1]
    table_positions = 40 if limit == "tables" else 64
    cos, sin = rope_tables(RopeConfig(), head_dim=64, max_positions=table_positions, device=device)
    blocks = 5 if limit == "block_table" else 8
    table = int32(range(2 * blocks), device).view(2, blocks)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2 * blocks, 2, 8, 1, 64, generator=generator).to(device)
    before = kv.clone()
    qkv = torch.randn(2, 4 * 64, generator=generator).to(device)
    parameters = {"num_heads": 2, "num_kv_heads": 1, "scale": 0.125}
    parameters["max_seq_len"] = 40 if limit == "max_seq_len" else 64

    def attend(lanes: slice, positions: list[int]) -> torch.Tensor:
        slot = int32([0, 1][lanes], device)
        arguments = (cos, sin, kv, table, slot, int32(positions, device))
        return run(op, qkv[lanes], *arguments, **parameters)

    result = attend(slice(0, 2), [position, 39])
    assert bool(result[0].isnan().all())
    assert torch.equal(kv[:blocks], before[:blocks])
    assert torch.equal(result[1], attend(slice(1, 2), [39])[0])


def test_strided_lanes(op: Op, place_cache: Callable[..., Any]) -> None:
    """The product may be a view into a wider tensor."""
    device = op[1]
    problem = Problem(lengths=(20, 33))
    cached = problem.cached_2SLGD().to(device)
    qkv = problem.qkv_SX().to(device)
    wide = torch.full((2, qkv.shape[1] + 128), torch.nan, device=device)
    wide[:, 64:-64] = qkv
    results = []
    for product in (wide[:, 64:-64], qkv):
        cache = place_cache(
            *cached, problem.lengths, block_size=16, placement=0, poison=False, room=1
        )
        results.append(
            run(
                op,
                product,
                *problem.tables(device),
                cache.kv,
                cache.block_table_SB,
                int32([0, 1], device),
                int32(problem.lengths, device),
                scale=0.125,
                max_seq_len=64,
                **problem.parameters(device),
            )
        )
    assert torch.equal(*results)


def test_counters_serve_launch_after_launch(device: str, place_cache: Callable[..., Any]) -> None:
    """Also launches of other lane counts, as the buckets of a ladder share them."""
    problem = Problem(lengths=(3 * SPLIT_TOKENS, SPLIT_TOKENS, 5), group=20)
    arrivals = counters(3, problem.heads, problem.kv_heads, device)

    def shared(*arguments: Any, **parameters: Any) -> torch.Tensor:
        *arguments, own = arguments
        assert arrivals.numel() >= own.arrivals.numel()
        result = decode_attention(*arguments, Launch(arrivals=arrivals), **parameters)
        assert not arrivals.any()
        return result

    alone = decode((decode_attention, device), place_cache, problem, [0, 1, 2])
    for lanes in ([0, 1, 2], [0], [1, 2], [0, 1, 2]):
        again = decode((shared, device), place_cache, problem, lanes)
        assert torch.equal(again.out_NX, alone.out_NX[lanes])


def valid_arguments() -> dict[str, Any]:
    return {
        "qkv_NX": torch.zeros(2, 8 * 64),
        "cos": torch.zeros(16, 32),
        "sin": torch.zeros(16, 32),
        "kv": torch.zeros(3, 2, 16, 2, 64),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "slot_N": torch.full((2,), -1, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "launch": Launch(arrivals=torch.zeros(4 * 33, dtype=torch.int32)),
        "num_heads": 4,
        "num_kv_heads": 2,
        "scale": 0.125,
        "max_seq_len": 32,
    }


def test_the_arguments_that_are_changed_below_are_valid() -> None:
    assert decode_attention(**valid_arguments()).shape == (2, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_NX": torch.zeros(2, 8 * 64 + 1)}, r"\[N, D \* 8\]"),
        ({"qkv_NX": torch.zeros(8 * 64, 2).mT}, "with dense rows"),
        ({"qkv_NX": torch.zeros(2, 8 * 63)}, "head_dim=63 must be even"),
        ({"qkv_NX": torch.zeros(2, 8 * 64).half()}, "kv is torch.float32, qkv torch.float16"),
        (
            {
                "qkv_NX": torch.zeros(2, 8 * 514),
                "cos": torch.zeros(16, 257),
                "sin": torch.zeros(16, 257),
            },
            "head_dim=514 is outside 1..512",
        ),
        ({"cos": torch.zeros(16, 64)}, r"cos must be float32 \[P, 32\]"),
        ({"sin": torch.zeros(15, 32)}, r"sin must be float32 \[P, 32\]"),
        ({"sin": torch.zeros(16, 32).half()}, r"not torch.float16 \(16, 32\)"),
        ({"cos": torch.zeros(32, 16).mT}, "cos must be dense"),
        ({"kv": torch.zeros(3, 16, 2, 64)}, r"kv must be \[blocks, 2, block_size, G, D\]"),
        ({"kv": torch.zeros(3, 2, 16, 2, 80)}, "2 heads of 80, expected 2 of 64"),
        ({"kv": torch.zeros(3, 2, 24, 2, 64)}, "block_size=24"),
        ({"kv": torch.zeros(3, 2, 2, 16, 64).transpose(2, 3)}, "dense within a block"),
        (
            {"qkv_NX": torch.zeros(2, 7 * 64), "num_heads": 3},
            "3 query heads are no multiple of 2",
        ),
        ({"block_table_SB": torch.zeros(2, 2, dtype=torch.int64)}, "must be int32"),
        ({"block_table_SB": torch.zeros(2, dtype=torch.int32)}, r"must be \[S, B\]"),
        ({"slot_N": torch.zeros(3, dtype=torch.int32)}, r"slot_N must be a dense \[2\]"),
        ({"position_N": torch.zeros(2)}, "position_N must be int32, not torch.float32"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"q_norm_weight": torch.ones(64)}, "come together or not at all"),
        (
            {"q_norm_weight": torch.ones(64), "k_norm_weight": torch.ones(32)},
            r"k_norm_weight must be a dense torch.float32 \[64\]",
        ),
        ({"out": torch.zeros(2, 255)}, r"\[2, 256\], not torch.float32 \[2, 255\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_attention(**(valid_arguments() | change))


def test_workspace_and_counters() -> None:
    assert decode_attention_workspace_bytes(
        8, num_heads=32, head_dim=128, max_seq_len=SPLIT_TOKENS + 1
    ) == (8 * 32 * 3 * 130 * 4)
    assert decode_attention_arrivals(3, num_heads=32, num_kv_heads=8) == 3 * 8 * 33
    # A kv head of 20 query heads is two tiles of them.
    assert decode_attention_arrivals(3, num_heads=40, num_kv_heads=2) == 3 * 2 * 2 * 33


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
@pytest.mark.parametrize("pdl", [False, True])
def test_captured_steps_replay_the_eager_bits(place_cache: Callable[..., Any], pdl: bool) -> None:
    problem = Problem(
        lengths=(300, 20), kv_heads=2, group=4, head_dim=128, dtype=torch.bfloat16, normed=False
    )
    cached = problem.cached_2SLGD().cuda()
    cache = place_cache(*cached, problem.lengths, block_size=16, placement=1, poison=True, room=8)
    tables = rope_tables(RopeConfig(), head_dim=128, max_positions=512, device="cuda")
    qkv = torch.randn(3, (8 + 2 * 2) * 128, device="cuda", dtype=torch.bfloat16)
    slot, position = int32([1, -1, 0], "cuda"), int32([20, 0, 300], "cuda")
    arrivals = counters(3, 8, 2, "cuda")

    def step() -> torch.Tensor:
        paged = (cache.kv, cache.block_table_SB, slot, position)
        shape = {"num_heads": 8, "num_kv_heads": 2, "max_seq_len": 512}
        launch = Launch(arrivals=arrivals, pdl=pdl)
        return decode_attention(qkv, *tables, *paged, launch, scale=128**-0.5, **shape)

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
        assert not arrivals.any()
        position += 1
        qkv.normal_()


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_a_cache_of_more_than_2_to_the_31_elements(place_cache: Callable[..., Any]) -> None:
    """Equal blocks at the far end of a large cache give the same bits."""
    problem = Problem(lengths=(300,), kv_heads=8, head_dim=128, block_size=128)
    problem = replace(problem, dtype=torch.bfloat16)
    cached = problem.cached_2SLGD().cuda()
    small = place_cache(*cached, problem.lengths, block_size=128, placement=0, poison=True, room=1)
    blocks = 2**31 // small.kv[0].numel() + 8
    assert small.kv.shape[0] <= 8
    large = torch.zeros(blocks, *small.kv.shape[1:], device="cuda", dtype=problem.dtype)
    large[-small.kv.shape[0] :] = small.kv
    columns = -(-301 // 128)
    far_table = small.block_table_SB[:, :columns] + (blocks - small.kv.shape[0])
    results = []
    for kv, table in ((small.kv, small.block_table_SB), (large, far_table)):
        results.append(
            run(
                (decode_attention, "cuda"),
                problem.qkv_SX().cuda(),
                *problem.tables("cuda"),
                kv,
                table.contiguous(),
                int32([0], "cuda"),
                int32(problem.lengths, "cuda"),
                scale=128**-0.5,
                max_seq_len=301,
                **problem.parameters("cuda"),
            )
        )
    assert torch.equal(*results)
    appended = large[-small.kv.shape[0] :].view(torch.uint8)
    assert torch.equal(appended, small.kv.contiguous().view(torch.uint8))
