"""Sums over ranks: in their order to the bit, and what is compiled."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.comm.sums import sum_parts, sum_parts_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

MODULE = importlib.import_module("graphengine.kernels.comm.sums")


def random_parts(ranks, lanes, H, dtype, device):
    generator = torch.Generator().manual_seed(ranks + lanes + H)
    return (torch.randn(ranks, lanes, H, generator=generator) * 5).to(device, dtype)


@settings(deadline=None, max_examples=extent(8, 30))
@given(
    ranks=st.integers(1, 8),
    lanes=st.integers(1, 20),
    H=st.integers(1, 300) | st.just(1024),
    dtype=st.integers(0, 2),
)
def test_is_the_sum_in_the_order_of_ranks(device, dtypes, ranks, lanes, H, dtype):
    dtype = dtypes[dtype % len(dtypes)]
    parts = random_parts(ranks, lanes, H, dtype, device)
    parts[0, lanes - 1] = float("nan")
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    for call in (sum_parts, sum_parts_reference):
        found = call(parts)
        assert found.dtype == dtype
        torch.testing.assert_close(found, total.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert parts[0, lanes - 1].isnan().all() and not sum_parts(parts)[: lanes - 1].isnan().any()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.zeros(2, 3), r"parts must be a dense \[R, N, H\], not \[2, 3\]"),
        (torch.zeros(2, 4, 3).mT, r"parts must be a dense \[R, N, H\], not \[2, 3, 4\]"),
        (torch.zeros(2, 3, 4, dtype=torch.int32), "parts are torch.int32, not one of"),
    ],
)
def test_what_does_not_fit_is_an_error(parts, message):
    with pytest.raises(ValueError, match=message):
        sum_parts(parts)


def launch():
    parts = torch.empty(4, 8, 4096, dtype=torch.float32, device="meta")
    return sum_parts(parts, pdl=True)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_nothing_is_loaded_before_the_wait():
    ptx, names = compile_launch(record_launch(MODULE, launch))
    assert_waits_before_it_shows(ptx)
    assert all(load.after_wait for load in global_loads(ptx, names))
