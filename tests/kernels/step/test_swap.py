"""Block copies: bit for bit, only the pairs asked for, from and to pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.step.swap import _copy_kernel, copy_blocks, copy_blocks_reference

NATIVE = torch.cuda.is_available() and not INTERPRETED
SETTINGS = settings(deadline=None, max_examples=extent(12, 40), derandomize=not NATIVE)

Op = tuple[Callable[..., None], str]


@pytest.fixture(scope="module", params=["triton", "reference"])
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return copy_blocks_reference, "cpu"
    return copy_blocks, request.getfixturevalue("device")


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: signalling NaNs, denormals, negative zeros."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(shape)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@SETTINGS
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
    layers=st.integers(1, 3),
    block=st.sampled_from([(2, 8, 1, 64), (2, 16, 3, 24), (5,), (2, 64, 2, 128)]),
)
def test_copies_the_pairs_and_nothing_else(
    op: Op, data: st.DataObject, dtype: torch.dtype, layers: int, block: tuple[int, ...]
) -> None:
    function, device = op
    blocks = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    source, destination = (
        random_cache((layers, count, *block), dtype, seed).to(device)
        for seed, count in enumerate(blocks)
    )
    targets = data.draw(st.lists(st.integers(0, blocks[1] - 1), unique=True))
    pairs = [(data.draw(st.integers(0, blocks[0] - 1)), target) for target in targets]
    skipped = data.draw(st.lists(st.sampled_from([(-1, 0), (0, -1), (-1, -1), (-(2**31), 0)])))
    pairs = data.draw(st.permutations(pairs + skipped))
    poison = [(2**31 - 1, 2**31 - 1)] * 2
    expected = as_bytes(destination.clone()).view(layers, blocks[1], -1).clone()
    original = as_bytes(source).view(layers, blocks[0], -1)
    for origin, target in pairs:
        if origin >= 0 and target >= 0:
            expected[:, target] = original[:, origin]

    table = torch.tensor([*pairs, *poison], dtype=torch.int32, device=device)
    function(source, destination, table, len(pairs))
    assert torch.equal(as_bytes(destination).view(layers, blocks[1], -1), expected)
    assert torch.equal(as_bytes(source).view(layers, blocks[0], -1), original)


def test_layers_and_blocks_may_be_strided(op: Op) -> None:
    function, device = op
    wide = random_cache((4, 6, 2, 8, 1, 64), torch.float16, 0).to(device)
    before = wide.clone()
    source, destination = wide[::2, ::2], wide[1::2, 1::2]
    function(source, destination, torch.tensor([[2, 0]], dtype=torch.int32, device=device), 1)
    assert torch.equal(as_bytes(wide[1::2, 1]), as_bytes(before[::2, 4]))
    before[1::2, 1] = before[::2, 4]
    assert torch.equal(as_bytes(wide), as_bytes(before))


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_out_to_pinned_memory_and_back() -> None:
    cache = random_cache((3, 9, 2, 16, 8, 128), torch.bfloat16, 0).cuda()
    before = cache.clone()
    swap = torch.zeros(3, 4, 2, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    out = torch.tensor([[7, 0], [2, 3], [5, 1]], dtype=torch.int32, device="cuda")
    copy_blocks(cache, swap, out, 3)
    cache[:, [7, 2, 5]] = 0
    copy_blocks(swap, cache, out.flip(1).contiguous(), 3)
    assert torch.equal(as_bytes(cache), as_bytes(before))


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_pageable_memory_is_named() -> None:
    cache = torch.zeros(1, 2, 64, device="cuda")
    pairs = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="destination is pageable host memory"):
        copy_blocks(cache, torch.zeros(1, 2, 64), pairs, 1)


@pytest.mark.skipif(not NATIVE, reason="needs a GPU")
def test_no_count_compiles_anything() -> None:
    cache = torch.zeros(1, 40, 64, device="cuda")
    pairs = torch.full((40, 2), -1, dtype=torch.int32, device="cuda")
    copy_blocks(cache, cache, pairs, 1)
    compiled = len(_copy_kernel.device_caches[torch.cuda.current_device()][0])
    for count in (2, 3, 16, 17, 32, 40):
        copy_blocks(cache, cache, pairs, count)
    assert len(_copy_kernel.device_caches[torch.cuda.current_device()][0]) == compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 4}, r"count=4 is outside 0..3"),
        ({"count": -1}, r"count=-1 is outside 0..3"),
        ({"destination": torch.zeros(2, 4, 8).half()}, "source is torch.float32, destination"),
        ({"destination": torch.zeros(2, 4, 9)}, r"\(2, 4, 8\) and destination \(2, 4, 9\)"),
        ({"destination": torch.zeros(3, 4, 8)}, r"\(2, 4, 8\) and destination \(3, 4, 8\)"),
        ({"source": torch.zeros(2, 4, 16)[..., ::2]}, "source must be dense within a block"),
        ({"pairs_P2": torch.zeros(3, 2, dtype=torch.int64)}, "pairs must be int32"),
        ({"pairs_P2": torch.zeros(3, 3, dtype=torch.int32)}, r"\[P, 2\], not \(3, 3\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "source": torch.zeros(2, 4, 8),
        "destination": torch.zeros(2, 4, 8),
        "pairs_P2": torch.zeros(3, 2, dtype=torch.int32),
        "count": 3,
    }
    with pytest.raises(ValueError, match=message):
        copy_blocks(**(arguments | change))
