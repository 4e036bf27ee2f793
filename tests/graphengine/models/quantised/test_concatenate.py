"""Several linears as one weight: what each means stays as it is, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphengine.kernels.linear.packed import pack, unpack
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, dequantise
from graphengine.models.quantised.concatenate import (
    concatenate,
    in_order,
    joined_format,
    ordered_format,
)

K = 192
BLOCKS = WeightFormat("uint4", 1, 32, has_minimums=True, block=64)


def random_weight(kind: WeightFormat, M: int, columns: int = K, **changes: Any) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(M)
    shape, factors = kind.groups(M, columns), None
    of_groups = (*shape, 2) if kind.has_minimums else shape
    scales = torch.rand(of_groups, generator=generator) + 0.5
    if kind.block:
        scales = scales.mul(80).to(torch.int8)
        blocks = (shape[0], columns // kind.block, *of_groups[2:])
        factors = torch.rand(blocks, generator=generator).half()

    def codes(shape: tuple[int, int], most: int) -> Tensor:
        return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)

    weight = QuantisedWeight(
        format=kind,
        # The highest codes of e4m3 are NaN.
        codes=codes((M, columns * kind.bits // 8), 127 if kind.code == "e4m3" else 256),
        scales=scales,
        zeros=codes(shape, 2**kind.bits) if kind.has_zeros else None,
        factors=factors,
    )
    return weight._replace(**changes)


@pytest.mark.parametrize(
    ("kind", "rows", "joined"),
    [
        (WeightFormat("e4m3", 0, 0), (5, 3, 3), WeightFormat("e4m3", 1, 0)),
        (WeightFormat("e4m3", 0, 0), (5,), WeightFormat("e4m3", 0, 0)),
        (WeightFormat("e4m3", 1, 0), (5, 3, 3), WeightFormat("e4m3", 1, 0)),
        (WeightFormat("e4m3", 128, 128), (256, 128, 60), WeightFormat("e4m3", 128, 128)),
        (WeightFormat("e4m3", 128, 128), (192, 64, 64), WeightFormat("e4m3", 1, 128)),
        (WeightFormat("int8", 0, 64, True), (5, 3), WeightFormat("int8", 1, 64, True)),
        (WeightFormat("int4", 1, 64), (5, 3), WeightFormat("int4", 1, 64)),
        (WeightFormat("int4", 1, 128, True), (5, 3), WeightFormat("int4", 1, 128, True)),
        (WeightFormat("e2m1", 1, 32), (5, 3), WeightFormat("e2m1", 1, 32)),
        (BLOCKS, (5, 3), BLOCKS),
        (BLOCKS._replace(rows=4), (5, 3), BLOCKS),
    ],
)
def test_parts_keep_their_meaning(
    kind: WeightFormat, rows: tuple[int, ...], joined: WeightFormat
) -> None:
    parts = [random_weight(kind, count) for count in rows]
    weight = concatenate(parts)
    assert weight.format == joined == joined_format(kind, rows)
    assert weight.shape == (sum(rows), K)
    assert weight.scales.shape[:2] == joined.groups(sum(rows), K)
    assert torch.equal(dequantise(weight), torch.cat([dequantise(part) for part in parts]))


def nvfp4(M: int, whole: float) -> QuantisedWeight:
    weight = random_weight(WeightFormat("e2m1", 1, 16), M)
    scales = weight.scales.to(torch.float8_e4m3fn)
    return weight._replace(scales=scales, whole=torch.tensor(whole))


def test_one_factor_of_all_scales_stays_one() -> None:
    parts = [nvfp4(5, 0.3), nvfp4(3, 0.3)]
    weight = concatenate(parts)
    assert weight.scales.dtype == torch.float8_e4m3fn
    assert weight.whole is parts[0].whole
    assert torch.equal(dequantise(weight), torch.cat([dequantise(part) for part in parts]))


def test_of_different_factors_each_row_has_its_own() -> None:
    parts = [nvfp4(5, 0.3), nvfp4(3, 0.7)]
    weight = concatenate(parts)
    assert weight.format == parts[0].format
    assert weight.scales.dtype == torch.float8_e4m3fn
    assert weight.whole is not None and weight.whole.shape == (8, 1)
    packed = unpack(pack(weight))
    assert torch.equal(dequantise(packed), dequantise(weight))
    assert torch.equal(dequantise(weight), torch.cat([dequantise(part) for part in parts]))


def test_scales_of_different_dtypes_become_float32() -> None:
    parts = [random_weight(WeightFormat("int4", 1, 64), M) for M in (5, 3)]
    parts[1] = parts[1]._replace(scales=parts[1].scales.bfloat16())
    weight = concatenate(parts)
    assert weight.scales.dtype == torch.float32
    assert torch.equal(dequantise(weight), torch.cat([dequantise(part) for part in parts]))


def test_one_order_of_columns_stays() -> None:
    order = torch.randperm(K).int()
    kind = WeightFormat("int4", 1, 64)
    parts = [random_weight(kind, M, order=order.clone()) for M in (5, 3)]
    weight = concatenate(parts)
    assert torch.equal(dequantise(weight), torch.cat([dequantise(part) for part in parts]))


INT4 = WeightFormat("int4", 1, 64)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (random_weight(WeightFormat("int8", 1, 64), 3), r"different formats: part 0 is WeightFormat"
         r"\(code='int4', rows=1, columns=64, .* part 1 is WeightFormat\(code='int8'"),
        (random_weight(WeightFormat("int4", 1, 32), 3), "columns=64, .* part 1 is .*columns=32"),
        (random_weight(INT4, 3, 128), "192 columns in part 0, and 128 in part 1"),
        (random_weight(INT4, 3, order=torch.randperm(K)), "different orders in part 0 and part 1"),
        (random_weight(INT4, 3, order=torch.arange(K).flip(0)), "different orders"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(second: QuantisedWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        concatenate([random_weight(INT4, 5), second])
    with pytest.raises(ValueError, match="part 2"):
        concatenate([random_weight(INT4, 5), random_weight(INT4, 5), second])


@pytest.mark.parametrize(
    "kind",
    [
        WeightFormat("e4m3", 0, 0),
        WeightFormat("e4m3", 1, 0),
        WeightFormat("e4m3", 128, 128),
        WeightFormat("int4", 1, 64, True),
        WeightFormat("e2m1", 1, 32),
        BLOCKS,
        BLOCKS._replace(rows=128),
    ],
)
def test_rows_in_another_order_keep_their_meaning(kind: WeightFormat) -> None:
    weight = random_weight(kind, 512)
    if kind.rows == 1:
        weight = weight._replace(whole=torch.rand(512, 1))
    # Two heads of 64 share a scale, where 128 rows do; the last 128 rows stay.
    order = torch.arange(512).view(8, 2, 2, 16).transpose(1, 2).flatten()
    order[384:] = torch.arange(384, 512)
    moved = in_order(weight, order)
    assert torch.equal(dequantise(moved), dequantise(weight)[order])
    assert torch.equal(dequantise(unpack(pack(moved))), dequantise(weight)[order])
    assert in_order(weight, None) is weight


def test_rows_that_share_a_scale_get_their_own_where_they_part() -> None:
    kind = WeightFormat("e4m3", 128, 128)
    weight = random_weight(kind, 512)
    order = torch.arange(512).view(2, 2, 2, 64).transpose(1, 2).flatten()
    moved = in_order(weight, order)
    assert moved.format == ordered_format(kind, order) == WeightFormat("e4m3", 1, 128)
    assert torch.equal(dequantise(moved), dequantise(weight)[order])
    assert ordered_format(kind, torch.arange(512)) == ordered_format(kind, None) == kind
