"""Fixtures of the kernel tests: natively on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.call import LinearCall

_HERE = Path(__file__).parent

if INTERPRETED:
    from launches.interpreted import prepare_interpreter

    prepare_interpreter()


# First, because `-m` deselects in a hook of the same name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU machine every test of this folder is a `gpu` test: `pytest -m gpu` runs them all.

    Tests of a kernel and of its reference are parametrised; the interpreter runs the kernel only.
    """
    ordinary = pytest.mark.skip(reason="the reference is tested in an ordinary process")
    for item in items:
        # The hook sees the items of the whole session, not only this folder's.
        if _HERE not in item.path.parents:
            continue
        if INTERPRETED and _is_of_a_reference(item):
            item.add_marker(ordinary)
        elif torch.cuda.is_available() and not INTERPRETED:
            item.add_marker(pytest.mark.gpu)


def _is_of_a_reference(item: pytest.Item) -> bool:
    """Whether this case calls the reference, and runs where there are no kernels."""
    if not isinstance(item, pytest.Function) or "device" in item.fixturenames:
        return False
    call = getattr(item, "callspec", None)
    values = [] if call is None else call.params.values()
    return any(isinstance(value, str) and value == "reference" for value in values)


@pytest.fixture(scope="session")
def device() -> str:
    """The device the kernels run on; a test that takes it is skipped where they cannot run."""
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("kernels run natively on a GPU or with TRITON_INTERPRET=1")


@pytest.fixture(scope="session")
def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """The dtypes the kernels are tested in: the interpreter computes bfloat16 wrongly, and natively
    each dtype is compiled for seconds.
    """
    if device == "cuda":
        two = (torch.float32, torch.bfloat16)
        return extent(two, (torch.float32, torch.float16, torch.bfloat16))
    return (torch.float32, torch.float16)


# What poisoned integers hold: far outside every table, and negative.
HUGE_INTEGERS = (2**31 - 1, -(2**31), 10**9, -2)
CANARY = 777.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCache:
    """The paged cache of layer 1, and the tensor of three layers that it is a view of."""

    kv: torch.Tensor
    block_table_SB: torch.Tensor
    all_layers: torch.Tensor


def place_cache(
    keys_SLGD: torch.Tensor,
    values_SLGD: torch.Tensor,
    lengths: Sequence[int],
    *,
    block_size: int,
    placement: int,
    poison: bool,
    room: int = 0,
) -> PlacedCache:
    """Lay out each slot's first `length` tokens in physical blocks drawn by the seed `placement`.

    The same tokens under another `placement` are the same problem. `poison` fills what must not be
    read: tail entries of the last block and unused blocks with NaN, the table's tail with huge
    integers. `room` more tokens a slot get blocks without content.
    """
    slots, _, kv_heads, head_dim = keys_SLGD.shape
    device, dtype = keys_SLGD.device, keys_SLGD.dtype
    columns = [-(-(length + room) // block_size) for length in lengths]
    blocks = 1 + sum(columns) + 2
    all_layers = torch.full(
        (blocks, 3, 2, block_size, kv_heads, head_dim),
        min(CANARY, torch.finfo(dtype).max),
        dtype=dtype,
        device=device,
    )
    kv = all_layers[:, 1]
    kv.fill_(torch.nan if poison else 0.0)

    shuffle = torch.Generator().manual_seed(placement)
    free = (torch.randperm(blocks - 1, generator=shuffle) + 1).tolist()
    table = torch.zeros(slots, max(columns) + 2, dtype=torch.int32)
    if poison:
        table[:] = torch.tensor(HUGE_INTEGERS, dtype=torch.int32).repeat(table.shape[1])[
            : table.shape[1]
        ]
    for slot, (length, count) in enumerate(zip(lengths, columns, strict=True)):
        owned, free = free[:count], free[count:]
        table[slot, :count] = torch.tensor(owned, dtype=torch.int32)
        for index, block in enumerate(owned):
            first = index * block_size
            tokens = max(0, min(length - first, block_size))
            kv[block, 0, :tokens] = keys_SLGD[slot, first : first + tokens]
            kv[block, 1, :tokens] = values_SLGD[slot, first : first + tokens]
    return PlacedCache(kv=kv, block_table_SB=table.to(device), all_layers=all_layers)


@pytest.fixture(scope="session", name="place_cache")
def place_cache_fixture() -> Callable[..., PlacedCache]:
    """`place_cache`; test folders are no packages, so helpers travel as fixtures."""
    return place_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """Operands of a decode linear: lane n works for slot n, or is padded."""

    x: torch.Tensor
    """dtype [N, K]"""
    slot: torch.Tensor
    squares: torch.Tensor | None
    """float32 [T, N], of a mean square of order 1"""
    stream: torch.Tensor
    """float32 [N, M]: a residual stream to add the product to."""
    weight: torch.Tensor
    """dtype [M, K], such that products are of order 1"""
    bias: torch.Tensor | None
    next_norm: torch.Tensor
    """dtype [M]"""

    def call(self, **changes: Any) -> LinearCall:
        """The product of these lanes, with some of its arguments changed."""
        call = LinearCall(self.x, self.weight, self.slot, self.squares, bias=self.bias)
        return call._replace(**changes)

    def take(self, lane_of: torch.Tensor, padded: torch.Tensor | None = None) -> LinearCase:
        """Lanes `lane_of` [L] of this case, in that order; those `padded` [L] lose their slot."""
        chosen = lane_of.to(self.slot.device)
        slot = self.slot[chosen]
        if padded is not None:
            slot = torch.where(padded.to(slot.device), -1, slot)
        return replace(
            self,
            x=self.x[chosen],
            slot=slot,
            squares=None if self.squares is None else self.squares[:, chosen].contiguous(),
            stream=self.stream[chosen],
        )


def make_linear_case(
    lanes: int,
    M: int,
    K: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    groups: int = 0,
    bias: bool = False,
    padded: Sequence[int] = (),
    seed: int = 0,
) -> LinearCase:
    """Random operands for a weight [M, K]; `groups` partial sums of squares a lane, 0 for none."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    slot = torch.arange(lanes, dtype=torch.int32)
    slot[list(padded)] = -1
    sums = torch.rand(groups, lanes, generator=generator) + 0.5
    return LinearCase(
        x=random(lanes, K).to(device, dtype),
        slot=slot.to(device),
        squares=(sums * K / groups).to(device) if groups else None,
        stream=random(lanes, M).to(device),
        weight=(random(M, K) / K**0.5).to(device, dtype),
        bias=random(M).to(device, dtype) if bias else None,
        next_norm=random(M).to(device, dtype),
    )


def assert_lanes_keep_their_bits(
    case: LinearCase,
    run: Callable[[LinearCase], tuple[torch.Tensor, ...]],
    counts: Sequence[int],
) -> None:
    """Each lane alone, and all shuffled among padded ones at each count, gives the same bits.

    `run` returns tensors whose first dimension counts lanes.
    """
    generator = torch.Generator().manual_seed(0)
    lanes = case.x.shape[0]
    each_alone = [run(case.take(torch.tensor([lane]))) for lane in range(lanes)]
    alone = [torch.cat(parts) for parts in zip(*each_alone, strict=True)]
    for count in counts:
        lane_of = torch.randint(lanes, (count,), generator=generator)
        padded = torch.rand(count, generator=generator) < 0.2
        padded[torch.randint(count, (1,), generator=generator)] = False
        together = run(case.take(lane_of, padded))
        for index, (actual, expected) in enumerate(zip(together, alone, strict=True)):
            live = (~padded).to(actual.device)
            wanted = expected[lane_of.to(actual.device)]
            assert torch.equal(actual[live], wanted[live]), f"output {index}, {count=}, {lanes=}"


def assert_fewer_lanes_keep_their_bits(
    case: LinearCase,
    run: Callable[[LinearCase], tuple[torch.Tensor, ...]],
    counts: Sequence[int],
) -> None:
    """The first lanes give the same bits without the others.

    That much holds in the interpreter too, which multiplies in a BLAS: to it a row's place and the
    tile's height matter.
    """
    whole = run(case)
    for count in counts:
        part = run(case.take(torch.arange(count)))
        for index, (actual, expected) in enumerate(zip(part, whole, strict=True)):
            assert torch.equal(actual, expected[:count]), f"output {index}, {count=}"


@pytest.fixture(scope="session", name="make_linear_case")
def make_linear_case_fixture() -> Callable[..., LinearCase]:
    return make_linear_case


@pytest.fixture(scope="session", name="assert_lanes_keep_their_bits")
def assert_lanes_keep_their_bits_fixture() -> Callable[..., None]:
    return assert_lanes_keep_their_bits


@pytest.fixture(scope="session")
def assert_dot_lanes_keep_their_bits(device: str) -> Callable[..., None]:
    """For kernels of the family `dot`: (case, run), at every lane count that makes a difference."""

    def check(case: LinearCase, run: Callable[[LinearCase], tuple[torch.Tensor, ...]]) -> None:
        if device == "cuda":
            assert_lanes_keep_their_bits(case, run, (1, 8, 16, 17, 32, 64))
        else:
            assert_fewer_lanes_keep_their_bits(case, run, (1, 5, 8))

    return check


# Sums of K products in float32, rounded to the dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="session")
def assert_products_close() -> Callable[..., None]:
    """(actual, expected, dtype): equal but for the order of summation and a rounding to `dtype`."""

    def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
        tolerance = _TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check
