"""A norm before the sum: against its definition, at any lane, poisoned, and what is compiled."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.linear.residual import Product, Residual, StreamCopy, sums_of_squares
from graphengine.kernels.norm_rope.norm import rms_norm
from graphengine.kernels.norm_rope.post_norm import (
    add_normed,
    add_normed_reference,
    add_normed_rms_norm,
    add_normed_rms_norm_reference,
)
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

SENTINEL = 77.0
EPS = 1e-3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MODULE = importlib.import_module("graphengine.kernels.norm_rope.post_norm")


class Case:
    """A stream, a product and the weights of the norms; `padded` lanes hold NaN."""

    def __init__(
        self, lanes, H, device="cpu", *, groups=3, padded=(), weight_dtype=torch.float32,
        factor=None,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(lanes + H)

        def random(*shape, size=1.0):
            return (torch.randn(shape, generator=generator) * size).to(device)

        self.x, self.y = random(lanes, H, size=3.0), random(lanes, H, size=0.1)
        self.post, self.norm = (random(H).to(weight_dtype) for _ in range(2))
        self.factor = None if factor is None else torch.tensor([factor], device=device)
        self.slot = torch.arange(lanes, dtype=torch.int32)
        self.slot[list(padded)] = -1
        self.slot = self.slot.to(device)
        self.squares = sums_of_squares(self.y, groups).contiguous()
        for tensor in (self.x, self.y, self.squares.t()):
            tensor[list(padded)] = float("nan")
        self.live = self.slot >= 0

    def summed(self):
        """The stream after the sum, in float64."""
        x, y = self.x.double(), self.y.double()
        scale = (y.square().mean(1, keepdim=True) + EPS).rsqrt()
        summed = x + y * scale * self.post.double()
        return summed if self.factor is None else summed * self.factor.double()

    def normed(self):
        """What the next norm makes of it, in float64."""
        x = self.summed()
        return x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm.double()

    def take(self, lanes):
        part = object.__new__(Case)
        part.__dict__.update(self.__dict__)
        part.x, part.y, part.slot = self.x[lanes], self.y[lanes], self.slot[lanes]
        part.live = part.slot >= 0
        part.squares = self.squares[:, lanes].contiguous()
        return part

    def decode(self, dtype, call=add_normed):
        empty = torch.full_like(self.x, SENTINEL, dtype=dtype)
        kept = StreamCopy(torch.cat([empty, empty], dim=1)[:, : self.x.shape[1]], 0.3)
        stream = Residual(self.x.clone(), empty, self.x.new_zeros(0), kept)
        if call is add_normed_reference:
            stream = stream._replace(squares=self.x.new_zeros(2, len(self.x)))
        product = Product(self.y, self.squares)
        after = call(
            product, self.post, stream, self.norm, self.slot, eps=EPS, factor_1=self.factor
        )
        assert after.x is stream.x and after.scaled is stream.scaled, "written in place"
        assert torch.equal(kept.rows[self.live], (after.x[self.live] * 0.3).to(dtype))
        assert (kept.rows[~self.live] == SENTINEL).all()
        return after

    def chunk(self, dtype, call=add_normed_rms_norm):
        x = self.x.clone()
        y = self.y.to(dtype, copy=True)
        out = torch.full_like(x, SENTINEL, dtype=dtype)
        options = {"eps": EPS, "out_dtype": dtype, "factor_1": self.factor}
        call(x, y, self.post, self.norm, self.slot, **options, out=out)
        # A product may lie where the result goes.
        again = self.x.clone()
        call(again, y, self.post, self.norm, self.slot, **options, out=y)
        assert torch.equal(again[self.live], x[self.live])
        assert torch.equal(y[self.live], out[self.live])
        return x, out


lanes_and_sizes = given(
    lanes=st.integers(1, 24),
    H=st.integers(1, 700) | st.sampled_from([512, 1024, 2560]),
    groups=st.sampled_from([1, 3, 40]),
    dtype=st.integers(0, 2),
    factor=st.sampled_from([None, 0.0625, 1.75]),
    data=st.data(),
)


@settings(deadline=None, max_examples=extent(10, 30))
@lanes_and_sizes
def test_decode_is_the_definition(device, dtypes, lanes, H, groups, dtype, factor, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    case = Case(lanes, H, device, groups=groups, padded=padded, factor=factor)
    for call in (add_normed, add_normed_reference):
        after = case.decode(dtype, call)
        live, x = case.live, case.summed()
        torch.testing.assert_close(after.x[live].double(), x[live], rtol=1e-5, atol=1e-5)
        # One rounding of the very x that was stored.
        scaled = (after.x * case.norm).to(dtype)
        assert torch.equal(after.scaled[live], scaled[live])
        squares = after.squares[:, live].sum(0).double()
        torch.testing.assert_close(squares, x[live].square().sum(1), rtol=1e-5, atol=1e-5)
        assert (after.scaled[~live] == SENTINEL).all() and after.x[~live].isnan().all()


@settings(deadline=None, max_examples=extent(8, 30))
@lanes_and_sizes
def test_chunk_is_the_definition(device, dtypes, lanes, H, groups, dtype, factor, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    case = Case(lanes, H, device, padded=padded, factor=factor)
    case.y = case.y.to(dtype).float()
    for call in (add_normed_rms_norm, add_normed_rms_norm_reference):
        x, out = case.chunk(dtype, call)
        live = case.live
        torch.testing.assert_close(x[live].double(), case.summed()[live], rtol=1e-5, atol=1e-5)
        tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(out[live].double(), case.normed()[live], **tolerance)
        assert (out[~live] == SENTINEL).all() and x[~live].isnan().all()


@pytest.mark.parametrize("H", [8200, 16400])
def test_rows_of_several_blocks(device, dtypes, H):
    case = Case(3, H, device, padded=(1,))
    case.y = case.y.to(dtypes[-1]).float()
    x, out = case.chunk(dtypes[-1])
    tolerance = TOLERANCE[dtypes[-1]]
    torch.testing.assert_close(
        x[case.live].double(), case.summed()[case.live], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        out[case.live].double(), case.normed()[case.live], rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("reference", [False, True])
def test_bits_do_not_depend_on_company(device, dtypes, reference):
    """Nor do those of the twins, by which an engine on a CPU decodes."""
    case = Case(64, 1100, "cpu" if reference else device, groups=7)
    decode, chunk = (
        (add_normed_reference, add_normed_rms_norm_reference)
        if reference
        else (add_normed, add_normed_rms_norm)
    )
    whole = case.decode(dtypes[-1], decode)
    whole_chunk = case.chunk(dtypes[-1], chunk)
    for count in (1, 8, 17):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(count))[:count]
        part = case.take(order.to(case.x.device))
        after = part.decode(dtypes[-1], decode)
        assert torch.equal(after.x, whole.x[order])
        assert torch.equal(after.scaled, whole.scaled[order])
        assert torch.equal(after.squares, whole.squares[:, order])
        part.live = part.slot >= 0
        for actual, expected in zip(part.chunk(dtypes[-1], chunk), whole_chunk, strict=True):
            assert torch.equal(actual, expected[order])


def test_the_next_norm_is_that_of_rms_norm(device, dtypes):
    """What a chunk's later layers read is rounded as what its first one reads."""
    for weight_dtype in (torch.float32, dtypes[-1]):
        case = Case(5, 300, device, weight_dtype=weight_dtype)
        x, out = case.chunk(dtypes[-1])
        normed = rms_norm(x, case.norm, case.slot, eps=EPS, out_dtype=dtypes[-1])
        assert torch.equal(out, normed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"product": Product(torch.zeros(2, 8).half(), torch.zeros(1, 2))}, "y must be a dense fl"),
        ({"product": Product(torch.zeros(2, 8), torch.zeros(1, 3))}, r"squares must be.*2\]"),
        ({"post_norm_H": torch.zeros(7)}, r"post_norm must be a dense torch.float32 \[8\]"),
        ({"next_norm_H": torch.zeros(8).int()}, "next_norm must be one of"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\]"),
        ({"factor_1": torch.ones(2)}, r"factor_1 must be a dense torch.float32 \[1\]"),
        (
            {"residual": Residual(torch.zeros(2, 7), torch.zeros(2, 8), torch.zeros(0))},
            r"residual.x must be a dense float32 \[2, 8\], not torch.float32 \[2, 7\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(changes, message):
    options = {
        "product": Product(torch.zeros(2, 8), torch.zeros(1, 2)),
        "post_norm_H": torch.zeros(8),
        "residual": Residual(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(0)),
        "next_norm_H": torch.zeros(8),
        "slot_N": torch.zeros(2).int(),
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=message):
        add_normed(**options | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_NH": torch.zeros(2, 8).half()}, "x_NH is torch.float16, not torch.float32"),
        ({"y_NH": torch.zeros(2, 7)}, r"y_NH is \(2, 7\), x_NH \(2, 8\)"),
        ({"post_norm_H": torch.zeros(7)}, r"post_norm_H must be a dense torch.float32 \[8\]"),
        ({"weight_H": torch.zeros(9)}, r"weight_H must be a dense torch.float32 \[8\]"),
        ({"factor_1": torch.ones(1).int()}, "factor_1 must be one of"),
    ],
)
def test_what_does_not_fit_a_chunk_is_an_error(changes, message):
    options = {
        "x_NH": torch.zeros(2, 8),
        "y_NH": torch.zeros(2, 8),
        "post_norm_H": torch.zeros(8),
        "weight_H": torch.zeros(8),
        "slot_N": torch.zeros(2).int(),
        "eps": EPS,
        "out_dtype": torch.float32,
    }
    with pytest.raises(ValueError, match=message):
        add_normed_rms_norm(**options | changes)


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_launch():
    lanes, H = 4, 2560
    product = Product(new(lanes, H, dtype=torch.float32), new(160, lanes, dtype=torch.float32))
    stream = Residual(new(lanes, H, dtype=torch.float32), new(lanes, H), None)
    norms = [new(H, dtype=torch.float32) for _ in range(2)]
    slot = new(lanes, dtype=torch.int32)
    return add_normed(product, norms[0], stream, norms[1], slot, eps=EPS, pdl=True)


def chunk_launch():
    lanes, H = 64, 2560
    norms = [new(H, dtype=torch.float32) for _ in range(2)]
    slot = new(lanes, dtype=torch.int32)
    return add_normed_rms_norm(
        new(lanes, H, dtype=torch.float32), new(lanes, H), *norms, slot,
        eps=EPS, out_dtype=torch.bfloat16, pdl=True,
    )  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("call", "early"),
    [(decode_launch, {"post_ptr", "next_ptr"}), (chunk_launch, {"post_ptr", "weight_ptr"})],
)
def test_nothing_but_weights_is_loaded_before_the_wait(call, early):
    ptx, names = compile_launch(record_launch(MODULE, call))
    assert_waits_before_it_shows(ptx)
    loads = list(global_loads(ptx, names))
    assert {load.argument for load in loads if not load.after_wait} == early
    assert {"slot_ptr", "x_ptr", "y_ptr"} <= {load.argument for load in loads if load.after_wait}
