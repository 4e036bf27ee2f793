"""A product that is whole before it is added to the stream: at any lane, poisoned, and compiled."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.residual import Residual, StreamCopy
from graphengine.kernels.linear.residual_sum import add_to_residual
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

SENTINEL = 77.0
STREAM = Residual(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(0))
MODULE = importlib.import_module("graphengine.kernels.linear.residual_sum")


def random(*shape, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def added(x, y, slot, norm, bias, dtype):
    scaled = torch.full_like(x, SENTINEL, dtype=dtype)
    kept = StreamCopy(torch.cat([scaled, scaled], dim=1)[:, : x.shape[1]], 0.3)
    stream = Residual(x.clone(), scaled, x.new_zeros(0), kept)
    after = add_to_residual(y, slot, stream, norm, bias_H=bias)
    assert after.x is stream.x and after.scaled is scaled, "written in place"
    live = slot >= 0
    assert torch.equal(kept.rows[live], (after.x[live] * 0.3).to(dtype))
    assert (kept.rows[~live] == SENTINEL).all()
    return after


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 20),
    H=st.integers(1, 700) | st.sampled_from([512, 1024]),
    dtype=st.integers(0, 2),
    has_bias=st.booleans(),
    data=st.data(),
)
def test_is_the_definition(device, dtypes, lanes, H, dtype, has_bias, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    x, y = (random(lanes, H, device=device, seed=seed) for seed in (1, 2))
    norm, bias = (random(H, device=device, seed=seed).to(dtypes[-1]) for seed in (3, 4))
    slot = torch.arange(lanes, dtype=torch.int32, device=device)
    for tensor, poison in ((x, float("nan")), (y, float("nan")), (slot, -1)):
        tensor[padded] = poison
    live = slot >= 0
    after = added(x, y, slot, norm, bias if has_bias else None, dtype)
    expected = x + (y + bias.float() if has_bias else y)
    assert torch.equal(after.x[live], expected[live])
    assert torch.equal(after.scaled[live], (expected * norm.float()).to(dtype)[live])
    squares = after.squares[:, live].sum(0)
    torch.testing.assert_close(squares, expected[live].square().sum(1), rtol=1e-5, atol=1e-5)
    assert (after.scaled[~live] == SENTINEL).all() and after.x[~live].isnan().all()


def test_bits_do_not_depend_on_company(device, dtypes):
    x, y, norm = random(40, 1100, device=device), random(40, 1100, device=device, seed=1), None
    norm = random(1100, device=device, seed=2)
    slot = torch.arange(40, dtype=torch.int32, device=device)
    whole = added(x, y, slot, norm, None, dtypes[-1])
    for count in (1, 8, 17):
        part = added(x[:count], y[:count], slot[:count], norm, None, dtypes[-1])
        assert torch.equal(part.x, whole.x[:count])
        assert torch.equal(part.squares, whole.squares[:, :count])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_NH": torch.zeros(2, 8).half()}, r"y must be a dense float32 \[2, 8\], not torch.flo"),
        ({"next_norm_H": torch.zeros(7)}, r"next_norm must be a dense torch.float32 \[8\]"),
        ({"bias_H": torch.zeros(9)}, r"bias must be a dense torch.float32 \[8\]"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\]"),
        ({"residual": STREAM._replace(kept=StreamCopy(torch.zeros(2, 7)))}, r"\[2, 8\]"),
    ],
)
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "y_NH": torch.zeros(2, 8),
        "slot_N": torch.zeros(2).int(),
        "residual": STREAM,
        "next_norm_H": torch.zeros(8),
    }
    with pytest.raises(ValueError, match=message):
        add_to_residual(**options | changes)


def launch():
    def new(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    stream = Residual(new(4, 2560), new(4, 2560, dtype=torch.bfloat16), new(0))
    slot = new(4, dtype=torch.int32)
    return add_to_residual(new(4, 2560), slot, stream, new(2560), bias_H=new(2560), pdl=True)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_nothing_but_weights_is_loaded_before_the_wait():
    ptx, names = compile_launch(record_launch(MODULE, launch))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    early = {load.argument for load in loads if not load.after_wait}
    assert early == {"next_ptr", "bias_ptr"}
