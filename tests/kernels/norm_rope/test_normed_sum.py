"""Two products, each after a norm, summed: against the definition, at any lane, poisoned."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.normed_sum import normed_sum, normed_sum_reference
from launches.compilation import assert_waits_before_it_shows, compile_launch, record_launch

SENTINEL = 77.0
EPS = 1e-3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def operands(lanes, H, dtype, weight_dtype=torch.float32, device="cpu", padded=()):
    """Two products, the weights of their norms, and slots; padded lanes hold NaN."""
    generator = torch.Generator().manual_seed(lanes + H)
    a, b = (torch.randn(lanes, H, generator=generator) * size for size in (0.1, 3.0))
    norms = [torch.randn(H, generator=generator).to(device, weight_dtype) for _ in range(2)]
    slot = torch.arange(lanes, dtype=torch.int32)
    for tensor, poison in ((slot, -1), (a, float("nan")), (b, float("nan"))):
        tensor[list(padded)] = poison
    return a.to(device, dtype), b.to(device, dtype), *norms, slot.to(device)


def defined(a, b, a_norm, b_norm, slot):
    """The sum in float64."""
    y = 0
    for x, norm in ((a, a_norm), (b, b_norm)):
        x = x.double()
        y = y + x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    return y


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 12),
    H=st.integers(1, 700) | st.sampled_from([1024, 2816]),
    dtype=st.integers(0, 2),
    weight=st.sampled_from([torch.float32, torch.bfloat16]),
    function=st.sampled_from([normed_sum, normed_sum_reference]),
    data=st.data(),
)
@example(
    lanes=2, H=8192 + 40, dtype=0, weight=torch.float32, function=normed_sum, data=None
)  # More than one block.
def test_is_the_definition(device, dtypes, lanes, H, dtype, weight, function, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = [] if data is None else sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    given_ = operands(lanes, H, dtype, weight, device, padded)
    wanted, live = defined(*given_), given_[-1] >= 0
    out = torch.full((lanes, 2 * H), SENTINEL, dtype=dtype, device=device)[:, :H]
    y, squares = function(*given_, eps=EPS, out=out)
    assert y is out and (out[~live] == SENTINEL).all()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y[live].double(), wanted[live], rtol=tolerance, atol=tolerance)
    of_each = wanted[live].square().sum(1)
    torch.testing.assert_close(squares[0, live].double(), of_each, rtol=1e-4, atol=1e-5)
    for place in (0, 1):
        again = [each.clone() for each in given_]
        function(*again, eps=EPS, out=again[place])
        assert torch.equal(again[place][live], y[live]), "one of the products itself"


def test_bits_do_not_depend_on_company(device, dtypes):
    a, b, a_norm, b_norm, slot = operands(9, 300, dtypes[-1], device=device)
    whole = normed_sum(a, b, a_norm, b_norm, slot, eps=EPS)
    for lanes in ([4], [8, 2], [3, 0, 7, 5]):
        part = normed_sum(a[lanes], b[lanes], a_norm, b_norm, slot[: len(lanes)], eps=EPS)
        assert torch.equal(part.y, whole.y[lanes])
        assert torch.equal(part.squares, whole.squares[:, lanes])


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
def test_it_waits_for_the_launch_before():
    def new(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, norm = new(8, 2816), new(2816, dtype=torch.bfloat16)
    launch = record_launch(
        importlib.import_module("graphengine.kernels.norm_rope.normed_sum"),
        lambda: normed_sum(
            rows, new(8, 2816), norm, norm, new(8, dtype=torch.int32), eps=EPS, pdl=True
        ),
    )
    ptx, _ = compile_launch(launch)
    assert_waits_before_it_shows(ptx)


@pytest.mark.skipif(INTERPRETED, reason="the checks are the same")
@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        (1, torch.zeros(3, 5), r"a_NH is torch.float32 \[3, 4\], b_NH torch.float32 \[3, 5\]"),
        (1, torch.zeros(3, 4).half(), r"b_NH torch.float16 \[3, 4\]"),
        (2, torch.zeros(5), r"a_norm_H must be .* \[4\]"),
        (3, torch.zeros(4).int(), "b_norm_H must be one of .*, not torch.int32"),
        (4, torch.zeros(2).int(), r"\[3\], not \(2,\)"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(place, tensor, message):
    given_ = [*operands(3, 4, torch.float32)]
    given_[place] = tensor
    with pytest.raises(ValueError, match=message):
        normed_sum(*given_, eps=EPS)
    good = operands(3, 4, torch.float32)
    with pytest.raises(ValueError, match=r"out must be torch.float32 \[3, 4\] .* \[3, 5\]"):
        normed_sum(*good, eps=EPS, out=torch.zeros(3, 5))
