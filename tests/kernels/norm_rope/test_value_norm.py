"""Norms of heads' values: against the definition, in place, with padded lanes and poisoned ends."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.value_norm import norm_values, norm_values_reference
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

EPS = 1e-3
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MODULE = importlib.import_module("graphengine.kernels.norm_rope.value_norm")


@settings(deadline=None, max_examples=extent(10, 40))
@given(
    lanes=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (20, 5)]),
    head_dim=st.sampled_from([2, 12, 40, 64, 256, 512]),
    of_keys=st.booleans(),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_values_are_the_definition(device, dtypes, lanes, heads, head_dim, of_keys, dtype, data):
    dtype, (queries, kv) = dtypes[dtype % len(dtypes)], heads
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    width = (queries + 2 * kv) * head_dim
    generator = torch.Generator().manual_seed(width + lanes)
    # Rows of a wider tensor, whose ends nobody may touch.
    whole = torch.randn(lanes, width + 7, generator=generator).to(dtype).to(device)
    whole[padded] = torch.nan
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[padded] = -1
    first = (queries + kv) * head_dim
    x = whole[:, first - (kv * head_dim if of_keys else 0) :][:, : kv * head_dim].double()
    x = x.unflatten(1, (kv, head_dim))
    wanted = (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(1)
    if of_keys:
        whole[:, first:width] = torch.nan
    for norm in (norm_values, norm_values_reference):
        got = whole.clone()
        sizes = {"num_heads": queries, "num_kv_heads": kv, "eps": EPS, "of_keys": of_keys}
        assert norm(got[:, :width], slot.to(device), **sizes) is None
        live = slot >= 0
        tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(
            got[live, first:width].double().cpu(), wanted[live].cpu(), **tolerance
        )
        bits = (got.view(torch.uint8), whole.view(torch.uint8))
        got[live, first:width] = whole[live, first:width]
        assert torch.equal(*bits), "only values of live lanes change"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_NX": torch.zeros(2, 33)}, r"rows of 33 values are not those of 4 \+ 2 \* 2 heads"),
        ({"num_kv_heads": 0}, r"4 \+ 2 \* 0 heads"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\]"),
        ({"qkv_NX": torch.zeros(32, 2).t()}, "qkv_NX"),
    ],
)
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "qkv_NX": torch.zeros(2, 32), "slot_N": torch.zeros(2).int(), "num_heads": 4,
        "num_kv_heads": 2, "eps": EPS,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        norm_values(**options | changes)


def launch():
    qkv = torch.empty(4, 24 * 512, dtype=torch.bfloat16, device="meta")
    slot = torch.empty(4, dtype=torch.int32, device="meta")
    norm_values(qkv, slot, num_heads=16, num_kv_heads=4, eps=EPS, of_keys=True, pdl=True)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_it_waits_before_it_shows():
    ptx, _ = compile_launch(record_launch(MODULE, launch))
    assert_waits_before_it_shows(ptx)
