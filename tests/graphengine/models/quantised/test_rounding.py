"""Weights that are rounded to 8 and 4 bits here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    dequantise,
    scale_values,
    unpacked_codes,
)
from graphengine.models.quantised import rounding
from graphengine.models.quantised.rounding import KIND_FORMATS, ROUNDED_KINDS, quantise

INT4 = KIND_FORMATS["int4"]


def random_weight(M: int, K: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(M, 1, generator=generator))
    return torch.randn(M, K, generator=generator) * rows * 0.02


def steps(weight: QuantisedWeight, K: int) -> torch.Tensor:
    """The scale of each number."""
    columns = weight.format.columns or K
    return scale_values(weight).repeat_interleave(columns, dim=1)[:, :K]


@given(
    kind=st.sampled_from(ROUNDED_KINDS),
    M=st.integers(1, 5),
    K=st.integers(1, 200).map(lambda half: 2 * half),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_no_number_is_further_from_its_code_than_half_a_step(
    kind: rounding.RoundedKind, M: int, K: int, seed: int, dtype: torch.dtype
) -> None:
    weight = random_weight(M, K, seed).to(dtype)
    found = quantise(weight, KIND_FORMATS[kind])
    assert found.shape == (M, K)
    assert found.scales.shape == found.format.groups(M, K)
    assert found.scales.dtype == (torch.bfloat16 if kind == "int4" else torch.float32)
    error = (dequantise(found) - weight.float()).abs()
    if kind == "fp8":
        # Three bits of mantissa, and the least step below the least exponent.
        bound = torch.maximum(weight.float().abs() / 16, steps(found, K) * 2**-10)
    else:
        bound = steps(found, K) / 2
    # But for the last codes, the nearest is that by the scale as it is stored.
    if kind != "fp8":
        inside = weight.float().abs() < steps(found, K) * (2 ** (found.format.bits - 1) - 1)
        assert bool((error <= bound * (1 + 2**-15))[inside].all())
    # A scale of bfloat16 is up to 2^-8 off the one that was chosen, and 8.5 steps are so much off.
    slack = 17 * 2**-8 if kind == "int4" else 2**-15
    assert bool((error <= bound * (1 + slack)).all())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_all_codes_of_integers_are_used(kind: rounding.RoundedKind) -> None:
    form = KIND_FORMATS[kind]
    most = 2 ** (form.bits - 1)
    weight = torch.zeros(2, 128)
    # The last codes of both sides are as near to these as they can be.
    weight[0, :2] = torch.tensor([1.0, -1.01])
    weight[1, :2] = torch.tensor([most - 0.6, -most - 0.5])
    codes = unpacked_codes(quantise(weight, form))[:, :2].int()
    codes = codes - 8 if kind == "int4" else codes.to(torch.int8).int()
    assert codes[0].tolist() == [most - 1, -most]
    assert codes[1].tolist() == [most - 1, -most]


def test_the_error_is_less_than_with_the_largest_magnitude() -> None:
    weight = random_weight(64, 512)
    error = (dequantise(quantise(weight, INT4)) - weight).square().sum()
    for divisor, gain in ((7.5, 0.95), (7, 0.85)):
        groups = weight.view(64, 4, 128)
        scales = groups.abs().amax(-1, keepdim=True) / divisor
        usual = (groups / scales).round().clamp(-8, 7) * scales
        assert error < gain * (usual.view_as(weight) - weight).square().sum()


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_rows_at_a_time_change_nothing(
    kind: rounding.RoundedKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(37, 256).bfloat16()
    whole = quantise(weight, KIND_FORMATS[kind])
    monkeypatch.setattr(rounding, "_SLICE_BYTES", 5 * 4 * 256)
    sliced = quantise(weight, KIND_FORMATS[kind])
    assert torch.equal(whole.codes, sliced.codes)
    assert torch.equal(whole.scales, sliced.scales)


@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_rows_of_zeros_and_of_tiny_numbers(kind: rounding.RoundedKind) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 1e-38
    weight[2] = 3e38
    found = quantise(weight, KIND_FORMATS[kind])
    assert bool((found.scales > 0).all()) and bool(found.scales.isfinite().all())
    values = dequantise(found)
    assert bool((values[0] == 0).all())
    assert bool(values.isfinite().all())
    assert values[2, 0] == pytest.approx(3e38, rel=0.07)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ROUNDED_KINDS)
def test_what_is_not_finite_is_an_error(
    kind: rounding.RoundedKind, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "_SLICE_BYTES", 2 * 4 * 128)
    weight = torch.ones(9, 128)
    weight[7, 100] = value
    with pytest.raises(ValueError, match=r"row 7 of a weight \[9, 128\] has a number that is not"):
        quantise(weight, KIND_FORMATS[kind])


@pytest.mark.parametrize(
    ("kind", "K", "message"),
    [
        (WeightFormat("e2m1", 1, 16), 32, "code='e2m1'.* cannot be made: e4m3, int8 and int4"),
        (WeightFormat("e4m3", 128, 128), 128, "rows=128.* cannot be made"),
        (WeightFormat("int4", 1, 128, True), 128, "has_zeros=True.* cannot be made"),
        (INT4, 33, "33 columns cannot have codes of 4 bits"),
    ],
)
def test_formats_that_are_not_made(kind: WeightFormat, K: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(torch.ones(2, K), kind)
