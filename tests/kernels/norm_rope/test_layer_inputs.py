"""Inputs of layers: against the definition, padded lanes, odd tokens, a part of the values."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.layer_inputs import layer_inputs, rounded
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

EPS = 1e-3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MODULE = importlib.import_module("graphengine.kernels.norm_rope.layer_inputs")


@settings(deadline=None, max_examples=extent(10, 40))
@given(
    lanes=st.integers(1, 5),
    layers=st.integers(1, 4),
    size=st.sampled_from([2, 12, 56, 256]),
    ranks=st.sampled_from([1, 2]),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_inputs_are_the_definition(device, dtypes, lanes, layers, size, ranks, dtype, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    token = torch.tensor(data.draw(st.lists(st.integers(-3, 8), min_size=lanes, max_size=lanes)))
    generator = torch.Generator().manual_seed(size + lanes)
    product, table, norm = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((lanes, layers * size + 3), (7, layers * size), (size,))
    )
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[padded], product[padded] = -1, torch.nan
    product, live = product[:, : layers * size], slot >= 0
    known = torch.where((token >= 0) & (token < 7), token, 5)
    x = product.double().unflatten(1, (layers, size)) * 0.4
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    row = table[known].double().unflatten(1, (layers, size)) * 3
    wanted = (x + row) * math.sqrt(0.5)
    own = size // ranks
    for rank in range(ranks):
        got = layer_inputs(
            product.to(device), table.to(device), norm.to(device), token.int().to(device),
            slot.to(device), product_scale=0.4, table_scale=3.0, eps=EPS, pad=5,
            first=rank * own, count=own,
        )  # fmt: skip
        assert got.shape == (lanes, layers, 2 * own) and got.dtype == dtype
        part = wanted[live, :, rank * own :][:, :, :own]
        tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(got[live, :, own:].double().cpu(), part, **tolerance)


@pytest.mark.parametrize("width", [5, 1025])
def test_live_lanes_are_rounded(device, width):
    x = torch.randn(4, width + 3, generator=torch.Generator().manual_seed(width))
    slot = torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    x[slot < 0] = torch.nan
    got = rounded(x[:, :width].to(device), slot.to(device), torch.float16).cpu()
    assert torch.equal(got[[0, 2]], x[[0, 2], :width].half())
    with pytest.raises(ValueError, match=r"slot_N must be a dense \[4\]"):
        rounded(x, slot[:3], torch.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_VM": torch.zeros(7, 13)}, r"must be torch.float32 \[V, 12\], of layers with 4"),
        ({"table_VM": torch.zeros(7, 12).half()}, r"not torch.float16 \[7, 12\]"),
        ({"norm_P": torch.zeros(5)}, r"\[V, 12\], of layers with 5 values"),
        ({"first": 3, "count": 2}, "values 3 to 4 of 4 are wanted"),
        ({"pad": 7}, "row 7 of 7"),
        ({"token_N": torch.zeros(3).int()}, r"token_N must be a dense \[2\]"),
    ],
)
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "product_NM": torch.zeros(2, 12), "table_VM": torch.zeros(7, 12),
        "norm_P": torch.zeros(4), "token_N": torch.zeros(2).int(), "slot_N": torch.zeros(2).int(),
        "product_scale": 1.0, "table_scale": 1.0, "eps": EPS, "pad": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        layer_inputs(**options | changes)


def launch():
    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    lanes = [new(4, dtype=torch.int32) for _ in range(2)]
    options = {"product_scale": 0.1, "table_scale": 16.0, "eps": EPS, "pad": 0, "pdl": True}
    rounded(new(4, 1536, dtype=torch.float32), lanes[0], torch.bfloat16, pdl=True)
    layer_inputs(new(4, 35 * 256), new(1000, 35 * 256), new(256), *lanes, **options)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_nothing_but_the_norm_is_loaded_before_the_wait():
    early: list[set[str]] = []

    def take(op):
        ptx, names = compile_launch(op)
        assert_waits_before_it_shows(ptx)
        early.append({load.argument for load in global_loads(ptx, names) if not load.after_wait})

    with launches_handed_to(take, MODULE):
        launch()
    assert early == [set(), {"norm_ptr"}]
