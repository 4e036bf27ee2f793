"""Chunks of several prompts in one launch: each has the bits, and leaves the states, of a launch of
its own.

Chunks begin and end anywhere in tiles and pieces, some have no lane, and what lies after them is
poisoned.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.chunks import check_chunks, tile_count
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.recurrent.conv import causal_conv_chunk
from graphengine.kernels.recurrent.gated_delta.gated_delta import gated_delta_prefill
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)
from graphengine.kernels.recurrent.mamba2.mamba2 import mamba2_prefill
from graphengine.kernels.recurrent.mamba2.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.recurrent.pieces import piece_count
from graphengine.kernels.recurrent.short_conv import short_conv_prefill
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

# Triton's interpreter multiplies poison with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN, HUGE = float("nan"), 2**30
CHANNELS, TAPS = 9, 4
DELTA = GatedDeltaSizes(key_heads=1, value_heads=2, key_dim=5, value_dim=6, taps=TAPS)
MAMBA = Mamba2Sizes(heads=2, head_dim=5, groups=1, state_size=7, width=TAPS)


class Chunk(NamedTuple):
    """`count` tokens of a slot from position `start` on."""

    slot: int
    start: int
    count: int


class Lanes(NamedTuple):
    """Where an op finds its chunks."""

    slot: torch.Tensor
    position: torch.Tensor
    query_start: torch.Tensor | None


class Operation(NamedTuple):
    """An op on lanes of `inputs`, that reads and writes `states`, one slot after the other."""

    inputs: torch.Tensor
    states: torch.Tensor
    run: Callable[[torch.Tensor, torch.Tensor, Lanes], torch.Tensor]


def random(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def convolution(tokens: int, slots: int, device: str) -> Operation:
    weight, bias = random(CHANNELS, TAPS, device=device), random(CHANNELS, device=device)

    def run(x: torch.Tensor, ring: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        at = lanes.slot, lanes.position
        options: Any = {"query_start_P1": lanes.query_start, "activation": "silu"}
        return causal_conv_chunk(x, weight, bias, ring, *at, **options)

    ring = random(slots, TAPS, CHANNELS, seed=1, device=device)
    return Operation(random(tokens, CHANNELS, seed=2, device=device), ring, run)


def short_convolution(tokens: int, slots: int, device: str) -> Operation:
    weight, bias = random(CHANNELS, TAPS, device=device), random(CHANNELS, device=device)

    def run(x: torch.Tensor, ring: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        at = lanes.slot, lanes.position
        return short_conv_prefill(x, weight, bias, ring, *at, query_start_P1=lanes.query_start)

    ring = random(slots, TAPS - 1, CHANNELS, seed=1, device=device)
    return Operation(random(tokens, 3 * CHANNELS, seed=2, device=device), ring, run)


def delta_rule(tokens: int, slots: int, device: str) -> Operation:
    heads = DELTA.value_heads
    params = GatedDeltaParams(
        random(DELTA.channels, TAPS, device=device),
        *(random(heads, seed=seed, device=device) for seed in (3, 4)),
        random(DELTA.value_dim, seed=5, device=device),
    )

    def run(x: torch.Tensor, state: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        qkv, at = x[:, : DELTA.channels].contiguous(), (lanes.slot, lanes.position, params, DELTA)
        options: Any = {"query_start_P1": lanes.query_start, "eps": 1e-6}
        return gated_delta_prefill(qkv, x, state, *at, **options)

    state = random(slots, 2, *DELTA.state_shape, seed=1, device=device)
    return Operation(random(tokens, DELTA.projected, seed=2, device=device), state, run)


def mamba(tokens: int, slots: int, device: str) -> Operation:
    params = Mamba2Params(
        random(MAMBA.channels, TAPS, device=device),
        None,
        *(random(MAMBA.heads, seed=seed, device=device) for seed in (3, 4, 5)),
    )

    def run(x: torch.Tensor, state: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        xbc, dt = x[:, : MAMBA.channels], x[:, MAMBA.channels :]
        at = lanes.slot, lanes.position, params, MAMBA
        return mamba2_prefill(xbc, dt, state, *at, query_start=lanes.query_start)

    state = random(slots, 2, *MAMBA.state_shape, seed=1, device=device)
    columns = MAMBA.channels + MAMBA.heads
    return Operation(random(tokens, columns, seed=2, device=device), state, run)


OPERATIONS = [convolution, short_convolution, delta_rule, mamba]


def lanes_of(chunks: Sequence[Chunk], padding: int, device: str) -> Lanes:
    """The lanes of the chunks, one after the other, and poisoned ones."""
    slot = [chunk.slot for chunk in chunks for _ in range(chunk.count)]
    position = [chunk.start + token for chunk in chunks for token in range(chunk.count)]
    starts = accumulate((chunk.count for chunk in chunks), initial=0)
    ints = (slot + [-1] * padding, position + [HUGE] * padding, [*starts])
    return Lanes(*(torch.tensor(each, dtype=torch.int32, device=device) for each in ints))


def check(
    new: Callable[[int, int, str], Operation], chunks: Sequence[Chunk], padding: int, device: str
) -> None:
    """Together, chunks have the bits that each has in a launch of chunks with it alone, and in one
    that may have no others.
    """
    live = sum(chunk.count for chunk in chunks)
    operation = new(live, len(chunks) + 1, device)
    poison = operation.inputs.new_full((padding, operation.inputs.shape[1]), NAN)
    together = operation.states.clone()
    # Nobody has read what no chunk may read.
    together[len(chunks)] = NAN
    for chunk in chunks:
        if not chunk.start:
            together[chunk.slot] = NAN
    states = [together.clone() for _ in range(2)]
    x = torch.cat([operation.inputs, poison])
    y = operation.run(x, together, lanes_of(chunks, padding, device))
    first = 0
    for chunk in chunks:
        if chunk.count:
            own = torch.cat([operation.inputs[first : first + chunk.count], poison])
            lanes = lanes_of([chunk], padding, device)
            for kept, at in zip(states, (lanes, lanes._replace(query_start=None)), strict=True):
                alone = operation.run(own, kept, at)[: chunk.count]
                assert torch.equal(alone, y[first : first + chunk.count]), f"{chunk=}"
                assert torch.isfinite(alone).all(), f"{chunk=}"
        first += chunk.count
    for kept in states:
        assert torch.equal(kept.nan_to_num(7.0), together.nan_to_num(7.0))


# Lengths at the edges of a convolution's tiles and of pieces, and positions at those of pieces.
COUNTS = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 63, 64, 65])
STARTS = st.sampled_from([0, 0, 1, 2, 40, 63, 64, 127])
CHUNKS = st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=4).map(
    lambda drawn: [Chunk(slot, start, count) for slot, (count, start) in enumerate(drawn)]
)


@pytest.mark.parametrize("new", OPERATIONS)
@settings(deadline=None, max_examples=examples(4, 40), derandomize=True)
@given(chunks=CHUNKS.filter(lambda chunks: any(each.count for each in chunks)))
def test_chunks_have_the_bits_of_launches_of_their_own(
    device: str, new: Callable[[int, int, str], Operation], chunks: list[Chunk]
) -> None:
    check(new, chunks, 3, device)


@pytest.mark.parametrize("new", OPERATIONS)
@pytest.mark.parametrize("padding", [0, 5])
def test_edges_at_tiles_and_pieces(
    device: str, new: Callable[[int, int, str], Operation], padding: int
) -> None:
    """Without padding the last chunks, which have no lane, begin past the last lane."""
    chunks = [(64, 0), (0, 5), (1, 63), (33, 30), (30, 64), (0, 0), (0, 9)]
    check(new, [Chunk(slot, *each[::-1]) for slot, each in enumerate(chunks)], padding, device)


@pytest.mark.skipif(INTERPRETED, reason="the references are tested in an ordinary process")
@pytest.mark.parametrize("new", OPERATIONS)
@settings(deadline=None, max_examples=examples(4, 40), derandomize=True)
@given(chunks=CHUNKS.filter(lambda chunks: any(each.count for each in chunks)))
def test_references_have_the_bits_of_launches_of_their_own(
    new: Callable[[int, int, str], Operation], chunks: list[Chunk]
) -> None:
    check(new, chunks, 2, "cpu")


@given(
    counts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 63)), min_size=1, max_size=9),
    size=st.sampled_from([32, 64]),
)
def test_tiles_of_chunks_have_numbers_of_their_own(
    counts: list[tuple[int, int]], size: int
) -> None:
    """Tiles begin with their chunk, or at multiples of positions, and none is past the last."""
    for spare in (1, 2):
        first = taken = 0
        for index, (count, start) in enumerate(counts):
            number = first // size + spare * index
            assert number >= taken
            before = start % size if spare == 2 else 0
            taken = number + -(-(before + count) // size)
            first += count
        assert taken <= tile_count(first, len(counts), size=size, spare=spare)
    assert piece_count(first, len(counts)) == tile_count(first, len(counts), size=64, spare=2)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(1).int(), torch.zeros(3), torch.zeros(2, 2).int(), torch.zeros(6).int()[::2]],
)
def test_chunks_that_do_not_fit_are_an_error_with_numbers(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="query_start must be a dense"):
        check_chunks(wrong)


# What is compiled for sm_90, without a GPU.

KERNELS = ("conv_chunk", "pieces", "scan", "outputs", "pieces", "pass", "outputs")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches_of(lanes: int, prompts: int) -> list[Op]:
    """Launches for the sizes of Qwen3.5-4B and of Nemotron-H, in the order of `KERNELS`."""
    lane, starts = meta(lanes, dtype=torch.int32), meta(prompts + 1, dtype=torch.int32)
    delta = GatedDeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    mamba = Mamba2Sizes(heads=128, head_dim=64, groups=8, state_size=128, width=4)

    def convolve() -> None:
        operands = (meta(lanes, 2048), meta(2048, 4), meta(2048), meta(8, 3, 2048), lane, lane)
        causal_conv_chunk(*operands, query_start_P1=starts, pdl=True)

    def correct() -> None:
        of_heads = [meta(32, dtype=torch.float32) for _ in range(2)]
        params = GatedDeltaParams(meta(delta.channels, 4), *of_heads, meta(128))
        state = meta(8, 1, *delta.state_shape, dtype=torch.float32)
        operands = (meta(lanes, delta.channels), meta(lanes, delta.projected), state, lane, lane)
        options: Any = {"query_start_P1": starts, "eps": 1e-6, "pdl": True}
        gated_delta_prefill(*operands, params, delta, **options)

    def decay() -> None:
        params = Mamba2Params(meta(mamba.channels, 4), None, *(meta(128) for _ in range(3)))
        state = meta(8, 1, *mamba.state_shape, dtype=torch.float32)
        dt = meta(lanes, mamba.projected)[:, -128:]
        operands = (meta(lanes, mamba.channels), dt, state, lane, lane)
        mamba2_prefill(*operands, params, mamba, query_start=starts, pdl=True)

    found: list[Op] = []
    for name, run in (
        ("conv", convolve),
        ("gated_delta.gated_delta", correct),
        ("mamba2.mamba2", decay),
    ):
        module = importlib.import_module(f"graphengine.kernels.recurrent.{name}")
        with launches_handed_to(found.append, module):
            run()
    return found


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("index", range(len(KERNELS)))
def test_kernels_of_several_chunks_compile(index: int) -> None:
    """They wait before they ask where the chunks are."""
    launch = launches_of(2048, prompts=3)[index]
    assert launch.name == f"{KERNELS[index]}_kernel"
    ptx, names = compile_launch(launch)
    assert_waits_before_it_shows(ptx)
    chunks = [load for load in global_loads(ptx, names) if load.argument == "query_start_ptr"]
    assert chunks and all(load.after_wait for load in chunks)
