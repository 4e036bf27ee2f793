"""Fixtures of the kernel tests: natively on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graphengine.kernels.dispatch import INTERPRETED

_HERE = Path(__file__).parent

if INTERPRETED:
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor_and_index(tensor: Any, scope: Any) -> None:
        """numpy 2.4 refuses `int(array([3]))`, by which triton 3.6 reads a loop's bounds."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor_and_index


# First, because `-m` deselects in a hook of the same name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU machine every test of this folder is a `gpu` test: `pytest -m gpu` runs them all."""
    if not torch.cuda.is_available() or INTERPRETED:
        return
    for item in items:
        # The hook sees the items of the whole session, not only this folder's.
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


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
    """The dtypes the kernels are tested in: the interpreter computes bfloat16 wrongly."""
    if device == "cuda":
        return (torch.float32, torch.float16, torch.bfloat16)
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
        (blocks, 3, 2, block_size, kv_heads, head_dim), CANARY, dtype=dtype, device=device
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
