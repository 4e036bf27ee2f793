"""What codes and scales mean, number by number."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphengine.kernels.linear.kinds import CODES, CodeKind
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    dequantise,
    packed_halves,
    scale_values,
    unpacked_codes,
    unpacked_halves,
)

# What all codes of 4 bits stand for, as the Open Compute Project's table of E2M1 has them.
E2M1_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def meaning(kind: CodeKind, code: int) -> float:
    """The value of one code, from bits; a NaN for e4m3's two."""
    if kind == "int8":
        return code - 256 if code >= 128 else code
    if kind == "int4":
        return code - 8
    if kind == "uint4":
        return code
    if kind == "e2m1":
        return E2M1_VALUES[code]
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = (mantissa + 8 * (exponent > 0)) / 8 * 2.0 ** (max(exponent, 1) - 7)
    return -value if sign else value


@st.composite
def weights(draw: st.DrawFn) -> QuantisedWeight:
    """Weights of any format, whose last groups and blocks are cut off at any place."""
    code = draw(st.sampled_from([*CODES]))
    rows, columns = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([0, 2, 5]))
    zeros, minimums = code.startswith("int") and draw(st.booleans()), draw(st.booleans())
    block = draw(st.sampled_from([0, columns, 2 * columns]))
    kind = WeightFormat(code, rows, columns, zeros, minimums, block)
    M, K = draw(st.integers(1, 7)), 2 * draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    most = 2**kind.bits

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)

    codes = random((M, K))
    if code == "e4m3":
        codes[codes & 127 == 127] = 0
    pair = (2,) if minimums else ()
    scales = torch.rand((*kind.groups(M, K), *pair), generator=generator) + 0.5
    factors = None
    if block:
        shape = (kind.groups(M, K)[0], -(-K // block), *pair)
        scales = random(scales.shape).view(torch.int8)
        factors = torch.randn(shape, generator=generator).half()
    elif draw(st.booleans()):
        # Up to 239: 255 is no number.
        scales = scales.mul(160).to(torch.uint8)
    else:
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
        scales = scales.to(draw(st.sampled_from(dtypes)))
    return QuantisedWeight(
        format=kind,
        codes=codes if kind.bits == 8 else packed_halves(codes),
        scales=scales,
        whole=torch.tensor(0.3) if draw(st.booleans()) else None,
        zeros=random(kind.groups(M, K)) if kind.has_zeros else None,
        order=torch.randperm(K, generator=generator).int() if draw(st.booleans()) else None,
        factors=factors,
    )


@given(weight=weights())
def test_a_weight_is_its_codes_less_zeros_times_scales_less_minimums(
    weight: QuantisedWeight,
) -> None:
    (M, K), kind = weight.shape, weight.format
    codes, wanted = unpacked_codes(weight).tolist(), torch.zeros(M, K)
    scales = weight.scales.float()
    if weight.scales.dtype == torch.uint8:
        scales = torch.tensor([2.0 ** (int(e) - 127) for e in scales.flatten()]).view_as(scales)
    if weight.factors is not None:
        for group in range(scales.shape[1]):
            scales[:, group] *= weight.factors[:, group * kind.columns // kind.block].float()
    scales = scales if weight.whole is None else scales * weight.whole
    for row in range(M):
        for column in range(K):
            group = row // (kind.rows or M), column // (kind.columns or K)
            zero = 0.0
            if weight.zeros is not None:
                zero = meaning(kind.code, int(weight.zeros[group]))
            place = column if weight.order is None else int(weight.order[column])
            value = torch.tensor(meaning(kind.code, codes[row][column]) - zero)
            if kind.has_minimums:
                wanted[row, place] = value * scales[group][0] - scales[group][1]
            else:
                wanted[row, place] = value * scales[group]
    assert torch.equal(dequantise(weight), wanted)
    assert torch.equal(scale_values(weight), scales)


@given(rows=st.integers(1, 5), halves=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_two_codes_in_a_byte_come_back(rows: int, halves: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 2 * halves), dtype=torch.uint8, generator=generator)
    packed = packed_halves(codes)
    assert packed.shape == (rows, halves)
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, 1]
    assert torch.equal(unpacked_halves(packed), codes)


def test_the_shapes_and_bytes_of_a_weight() -> None:
    kind = WeightFormat("int4", 1, 128, True)
    assert kind.bits == 4
    assert kind.groups(6, 300) == (6, 3)
    assert WeightFormat("e4m3", 128, 128).groups(130, 128) == (2, 1)
    assert WeightFormat("e4m3", 0, 0).groups(130, 300) == (1, 1)
    weight = QuantisedWeight(
        kind,
        torch.zeros(6, 150, dtype=torch.uint8),
        torch.ones(6, 3, dtype=torch.bfloat16),
        zeros=torch.zeros(6, 3, dtype=torch.uint8),
        order=torch.arange(300, dtype=torch.int32),
    )
    assert weight.shape == (6, 300)
    assert weight.nbytes == 6 * 150 + 6 * 3 * 2 + 6 * 3 + 300 * 4


def test_the_ends_of_e8m0_are_powers_of_two() -> None:
    scales = torch.tensor([[0], [1], [127], [254]], dtype=torch.uint8)
    codes = torch.ones(4, 2, dtype=torch.uint8)
    values = dequantise(QuantisedWeight(WeightFormat("int8", 1, 0), codes, scales))
    assert values[:, 0].tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]
