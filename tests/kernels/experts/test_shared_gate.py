"""The gate of shared experts, with and without a norm of its input; padded lanes poisoned."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import examples
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.experts.shared_gate import gate_lanes
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

NAN = float("nan")
MODULE = importlib.import_module("graphengine.kernels.experts.shared_gate")


def check(device, dtype, lanes, hidden, ffn, groups, padded, assert_close):
    generator = torch.Generator().manual_seed(lanes + hidden)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device)

    # A part of wider rows, as products leave them.
    wide, weight = random(lanes, ffn + 7).to(dtype), random(hidden).to(dtype) * 0.1
    h, squares = random(lanes, hidden).to(dtype), random(max(groups, 1), lanes).square()
    slot = torch.arange(lanes, dtype=torch.int32, device=device)
    wide[padded], h[padded], slot[padded] = NAN, NAN, -1
    x, eps = wide[:, 3:-4], 1e-2
    gate = h.double() @ weight.double()
    if groups:
        gate /= (squares.double().sum(0) / hidden + eps).sqrt()
    expected = (x.double() * torch.sigmoid(gate)[:, None]).to(dtype)
    options = {"squares_TN": squares, "eps": eps} if groups else {}
    beside = wide[:, [0, -1]].clone()
    assert gate_lanes(x, h, weight, slot, **options) is x
    live = slot >= 0
    assert_close(x[live], expected[live], dtype)
    assert x[~live].isnan().all() and torch.equal(wide[live][:, [0, -1]], beside[live])


@settings(deadline=None, max_examples=examples(6, 40))
@given(
    lanes=st.integers(1, 5),
    hidden=st.sampled_from([1, 72, 1024, 1030]),
    ffn=st.sampled_from([1, 40, 1100]),
    groups=st.integers(0, 5),
    padded=st.sets(st.integers(0, 4)),
    dtype=st.integers(0, 5),
)
def test_lanes_are_gated(
    device, dtypes, assert_products_close, lanes, hidden, ffn, groups, padded, dtype
):
    rows = sorted(lane for lane in padded if lane < lanes)
    dtype = dtypes[dtype % len(dtypes)]
    check(device, dtype, lanes, hidden, ffn, groups, rows, assert_products_close)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@pytest.mark.parametrize("groups", [0, 3])
def test_reference(groups):
    def close(found, expected, dtype):
        torch.testing.assert_close(found, expected)

    check("cpu", torch.float32, 4, 72, 40, groups, [1], close)


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
def test_reference_bits_do_not_depend_on_company():
    generator = torch.Generator().manual_seed(0)
    shapes = ((256, 9), (256, 7), (7,))
    x, h, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    slot = torch.zeros(256, dtype=torch.int32)
    whole = gate_lanes(x.clone(), h, weight, slot)
    alone = [
        gate_lanes(*lane, weight, slot[:1]) for lane in zip(x.split(1), h.split(1), strict=True)
    ]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("groups", [0, 3])
def test_it_waits_before_it_reads(groups):
    x, h, weight = (torch.zeros(size, dtype=torch.bfloat16) for size in ((2, 40), (2, 72), 72))
    slot, squares = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 2) if groups else None

    def call():
        return gate_lanes(x, h, weight, slot, squares_TN=squares, eps=1e-3, pdl=True)

    ptx, names = compile_launch(record_launch(MODULE, call))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert {load.argument for load in loads if load.after_wait} >= {"slot_ptr", "x_ptr", "h_ptr"}


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_NF": torch.zeros(3, 16)}, "3 rows of x_NF, 2 of h_NH"),
        ({"weight_H": torch.zeros(7)}, r"weight_H must be .*8"),
        ({"squares_TN": torch.zeros(1, 3)}, "squares"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(change, message):
    operands = {
        "x_NF": torch.zeros(2, 16),
        "h_NH": torch.zeros(2, 8),
        "weight_H": torch.zeros(8),
        "slot_N": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        gate_lanes(**(operands | change))
