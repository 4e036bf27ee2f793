"""RMSNorm: against its reference and transformers', at any lane, poisoned."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extent import extent
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.norm_rope.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from launches.compilation import compile_launch, record_launch

SENTINEL = 77.0
EPS = 1e-5
# Two roundings, each of which may fall the other way.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_rows(rows: int, H: int, weight_dtype: torch.dtype, device: str = "cpu", seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, H, generator=generator) * 3
    weight = torch.randn(H, generator=generator)
    return x.to(device), weight.to(device, weight_dtype)


def live_slots(lanes: int, padded: set[int] | None = None, device: str = "cpu") -> torch.Tensor:
    slot = torch.arange(lanes, dtype=torch.int32)
    slot[sorted(padded or ())] = -1
    return slot.to(device)


@settings(deadline=None, max_examples=extent(10, 30))
@given(
    lanes=st.integers(1, 40),
    H=st.integers(1, 700) | st.sampled_from([64, 1024, 8192, 8200, 16400]),
    dtype=st.integers(0, 2),
    data=st.data(),
)
def test_matches_reference(device, dtypes, lanes, H, dtype, data):
    dtype = dtypes[dtype % len(dtypes)]
    padded = data.draw(st.sets(st.integers(0, lanes - 1)))
    x, weight = random_rows(lanes, H, dtype, device)
    options = {"eps": EPS, "out_dtype": dtype}
    slot = live_slots(lanes, padded, device)
    outs = [torch.full((lanes, H), SENTINEL, dtype=dtype, device=device) for _ in range(2)]
    rms_norm(x, weight, slot, out=outs[0], **options)
    rms_norm_reference(x, weight, slot, out=outs[1], **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)
    assert (outs[0][sorted(padded)] == SENTINEL).all()


@pytest.mark.parametrize("H", [48, 9000])
def test_bits_do_not_depend_on_company(device, dtypes, H):
    dtype = dtypes[-1]
    x, weight = random_rows(64, H, dtype, device)
    options = {"eps": EPS, "out_dtype": dtype}
    whole = rms_norm(x, weight, live_slots(64, device=device), **options)
    for count in (1, 8, 16, 17, 32):
        order = torch.randperm(64)[:count].to(device)
        part = rms_norm(x[order], weight, live_slots(count, device=device), **options)
        assert torch.equal(part, whole[order])


@pytest.mark.skipif(INTERPRETED, reason="the reference is tested in an ordinary process")
@settings(deadline=None, max_examples=extent(20, 60))
@given(
    lanes=st.integers(2, 40),
    H=st.integers(1, 5000) | st.sampled_from([4096, 40_000]),
    num_threads=st.sampled_from([1, 2]),
)
def test_reference_bits_do_not_depend_on_company(lanes, H, num_threads):
    x, weight = random_rows(lanes, H, torch.float32)
    options = {"eps": EPS, "out_dtype": torch.float32}
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = rms_norm_reference(x, weight, live_slots(lanes), **options)
        for lane in {0, 1, lanes - 1}:
            alone = rms_norm_reference(x[lane : lane + 1], weight, live_slots(1), **options)
            assert torch.equal(alone[0], whole[lane])
    finally:
        torch.set_num_threads(before)


@settings(deadline=None, max_examples=extent(8, 15))
@given(
    lanes=st.integers(1, 20),
    poison=st.sampled_from([float("nan"), float("inf"), 3e38]),
    data=st.data(),
)
def test_padded_lanes_are_neither_read_nor_written(device, dtypes, lanes, poison, data):
    padded = data.draw(st.sets(st.integers(0, lanes - 1), min_size=1))
    dtype = dtypes[-1]
    x, weight = random_rows(lanes, 100, dtype, device)
    slot = live_slots(lanes, padded, device)
    outs = []
    for value in (0.0, poison):
        x[sorted(padded)] = value
        out = torch.full((lanes, 100), SENTINEL, dtype=dtype, device=device)
        outs.append(rms_norm(x, weight, slot, eps=EPS, out_dtype=dtype, out=out))
    assert torch.equal(*outs)
    assert (outs[0][sorted(padded)] == SENTINEL).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_rounds_as_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, weight = random_rows(9, 96, dtype)
    x = x.to(dtype)
    norm = llama.LlamaRMSNorm(96, eps=EPS).to(dtype)
    norm.weight.data.copy_(weight)
    actual = rms_norm_reference(x.float(), weight, live_slots(9), eps=EPS, out_dtype=dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(actual, norm(x).detach(), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(actual, norm(x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_of_a_float32_weight_rounds_as_gemma(dtype):
    gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    x, weight = random_rows(9, 96, dtype)
    x = x.to(dtype)
    norm = gemma3.Gemma3RMSNorm(96, eps=EPS).to(dtype)
    norm.weight.data.copy_(weight)
    plus_one = 1.0 + weight.float()
    actual = rms_norm_reference(x.float(), plus_one, live_slots(9), eps=EPS, out_dtype=dtype)
    torch.testing.assert_close(actual, norm(x).detach(), rtol=1e-6, atol=1e-6)


def test_rounds_once_with_a_float32_weight(device):
    x, weight = random_rows(64, 128, torch.float32, device)
    slot = live_slots(64, device=device)
    actual = rms_norm(x, weight, slot, eps=EPS, out_dtype=torch.float16)
    exact = rms_norm(x, weight, slot, eps=EPS, out_dtype=torch.float32)
    assert torch.equal(actual, exact.half())


def test_rounds_before_the_weight(device):
    """Llama does so; a single rounding after the weight gives other bits."""
    x, weight = random_rows(64, 128, torch.float16, device)
    slot = live_slots(64, device=device)
    actual = rms_norm(x, weight, slot, eps=EPS, out_dtype=torch.float16)
    normed = rms_norm(x, torch.ones_like(weight), slot, eps=EPS, out_dtype=torch.float16)
    assert torch.equal(actual, (normed.float() * weight.float()).half())


def operands() -> dict[str, object]:
    return {
        "x_NH": torch.zeros(2, 8),
        "weight_H": torch.zeros(8),
        "slot_N": torch.zeros(2).int(),
        "eps": EPS,
        "out_dtype": torch.float32,
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x_NH": torch.zeros(8)}, r"\(8,\)"),
        ({"x_NH": torch.zeros(8, 2).t()}, r"strides \(1, 2\)"),
        ({"x_NH": torch.zeros(2, 8).int()}, "x_NH is torch.int32"),
        ({"weight_H": torch.zeros(7)}, r"\[8\].*\(7,\)"),
        ({"weight_H": torch.zeros(8).int()}, "weight_H is torch.int32"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
        ({"slot_N": torch.zeros(2)}, "slot_N must be int32, not torch.float32"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
        ({"out": torch.zeros(2, 7)}, r"\[2, 8\].*\[2, 7\]"),
        ({"out": torch.zeros(2, 8).half()}, "out must be torch.float32.*float16"),
    ],
)
def test_bad_operands_are_errors_with_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{**operands(), **changes})


@settings(deadline=None, max_examples=extent(8, 20))
@given(
    lanes=st.integers(1, 20),
    H=st.integers(1, 700) | st.sampled_from([64, 1024, 8192, 8200, 16400]),
    dtype=st.integers(0, 2),
    poison=st.sampled_from([0.0, float("nan"), float("inf")]),
    data=st.data(),
)
def test_add_rms_norm(device, dtypes, lanes, H, dtype, poison, data):
    """The exact float32 sum, its norm, and nothing of a padded lane."""
    dtype = dtypes[dtype % len(dtypes)]
    padded = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    x, weight = random_rows(lanes, H, dtype, device)
    y = random_rows(lanes, H, dtype, device, seed=1)[0].to(dtype)
    x[padded] = y[padded] = poison
    slot = live_slots(lanes, set(padded), device)
    options = {"eps": EPS, "out_dtype": dtype}
    wanted = x + y.float()
    wanted[padded] = x[padded]
    for op in (add_rms_norm, add_rms_norm_reference):
        summed = x.clone()
        out = torch.full((lanes, H), SENTINEL, dtype=dtype, device=device)
        assert op(summed, y, weight, slot, out=out, **options) is out
        torch.testing.assert_close(summed, wanted, rtol=0, atol=0, equal_nan=True)
        assert (out[padded] == SENTINEL).all()
        normed = torch.full_like(out, SENTINEL)
        rms_norm_reference(summed, weight, slot, out=normed, **options)
        torch.testing.assert_close(out, normed, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("H", [48, 9000])
def test_add_rms_norm_bits_do_not_depend_on_company(device, dtypes, H):
    dtype = dtypes[-1]
    x, weight = random_rows(64, H, dtype, device)
    y = random_rows(64, H, dtype, device, seed=1)[0].to(dtype)
    options = {"eps": EPS, "out_dtype": dtype}
    whole = add_rms_norm(x.clone(), y, weight, live_slots(64, device=device), **options)
    for count in (1, 8, 17):
        order = torch.randperm(64)[:count].to(device)
        # In place on y's rows, as `out` may be.
        part = y[order]
        slot = live_slots(count, device=device)
        add_rms_norm(x[order], part, weight, slot, out=part, **options)
        assert torch.equal(part, whole[order])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x_NH": torch.zeros(2, 8).half()}, "x_NH is torch.float16, not torch.float32"),
        ({"y_NH": torch.zeros(3, 8)}, r"y_NH is \(3, 8\), x_NH \(2, 8\)"),
        ({"y_NH": torch.zeros(8, 2).t()}, r"strides \(1, 2\)"),
        ({"slot_N": torch.zeros(3).int()}, r"slot_N must be a dense \[2\], not \(3,\)"),
        ({"weight_H": torch.zeros(7)}, r"\[8\].*\(7,\)"),
        ({"out": torch.zeros(2, 7)}, r"\[2, 8\].*\[2, 7\]"),
    ],
)
def test_bad_operands_of_add_rms_norm(changes, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**{**operands(), "y_NH": torch.zeros(2, 8), **changes})


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize("added", [False, True])
def test_no_product_is_fused_with_a_sum(added):
    """Kernels with other code around the same sums have the same bits."""
    x, y, norm = (torch.zeros(shape, dtype=torch.float32) for shape in ((4, 96), (4, 96), 96))
    options = {"eps": EPS, "out_dtype": torch.bfloat16}

    def call() -> None:
        if added:
            add_rms_norm(x, y, norm, live_slots(4), **options)
        else:
            rms_norm(x, norm, live_slots(4), **options)

    ptx, _ = compile_launch(record_launch(importlib.import_module(rms_norm.__module__), call))
    assert "mul.rn.f32" in ptx and "fma.rn.f32" not in ptx
