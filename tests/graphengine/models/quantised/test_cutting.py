"""Parts of packed weights, as ranks have them: each means what the whole means there."""

from __future__ import annotations

import re

import pytest
import torch

from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, dequantise
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.quantised.cutting import check_columns, keeps_groups_of_rows, part_of

FORMATS = [
    WeightFormat("e4m3", 0, 0),
    WeightFormat("e4m3", 1, 0),
    WeightFormat("e4m3", 128, 128),
    WeightFormat("int8", 1, 32, True),
    WeightFormat("int4", 1, 64, True),
    WeightFormat("int4", 1, 0),
    WeightFormat("e2m1", 1, 32),
    WeightFormat("uint4", 1, 64, has_minimums=True),
    WeightFormat("int8", 1, 16, has_minimums=True, block=128),
]
M, K = 384, 256


def random_weight(kind: WeightFormat) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(1)
    groups, factors = kind.groups(M, K), None
    of_groups = (*groups, 2) if kind.has_minimums else groups
    scales = torch.rand(of_groups, generator=generator) + 0.5
    if kind.block:
        scales = scales.mul(80).to(torch.int8)
        factors = torch.rand(M, K // kind.block, *of_groups[2:], generator=generator).half()
    most = 127 if kind.code == "e4m3" else 256
    return QuantisedWeight(
        format=kind,
        codes=torch.randint(0, most, (M, K * kind.bits // 8), generator=generator).byte(),
        scales=scales,
        whole=torch.rand(M, 1, generator=generator) if kind.rows == 1 else torch.tensor(0.5),
        zeros=torch.randint(0, 16, groups, generator=generator).byte() if kind.has_zeros else None,
        factors=factors,
    )


@pytest.mark.parametrize("kind", FORMATS, ids=[kind.label for kind in FORMATS])
@pytest.mark.parametrize(
    "cut",
    [
        TensorSlice(0, ((128, 128),), M),
        TensorSlice(0, ((0, 128), (256, 128)), M),
        TensorSlice(0, ((60, 7), (200, 64)), M),
        TensorSlice(1, ((128, 128),), K),
    ],
    ids=["rows", "spans", "rows of a block", "columns"],
)
def test_a_part_means_what_the_whole_does(kind: WeightFormat, cut: TensorSlice) -> None:
    weight = random_weight(kind)
    rows = kind.rows if keeps_groups_of_rows(kind, cut) else 1
    check_columns(kind, cut, ordered=False)
    part = part_of(weight, cut, rows)
    assert part.format == kind._replace(rows=rows)
    assert part.scales.shape[:2] == part.format.groups(*part.shape)
    assert torch.equal(dequantise(part), cut.part(dequantise(weight)))
    each = part_of(weight, cut, 1)
    assert each.format.rows == 1 and torch.equal(dequantise(each), dequantise(part))


@pytest.mark.parametrize(
    ("kind", "span", "message"),
    [
        (FORMATS[2], (64, 128), "columns 64 to 192 of 256 part some of the 128 that share a"),
        (FORMATS[3], (0, 40), "columns 0 to 40 of 256 part some of the 32 that share a scale or"),
        (FORMATS[5], (0, 3), "columns 0 to 3 of 256 part some of the 2 that share a scale or a"),
        (FORMATS[8], (0, 32), "columns 0 to 32 of 256 part some of the 128 that share a scale"),
    ],
)
def test_columns_that_part_groups(kind: WeightFormat, span: tuple[int, int], message: str) -> None:
    cut = TensorSlice(1, (span,), K)
    with pytest.raises(ValueError, match=message):
        part_of(random_weight(kind), cut, kind.rows)


def test_columns_in_the_order_of_their_groups() -> None:
    """Rows of such a weight are a part with the same order; some columns are in no whole group."""
    weight = random_weight(FORMATS[4])._replace(order=torch.randperm(K).int())
    rows = TensorSlice(0, ((8, 16),), M)
    part = part_of(weight, rows, 1)
    assert torch.equal(dequantise(part), rows.part(dequantise(weight)))
    message = "128 of 256 columns, which are in the order of their groups (g_idx), are in no groups"
    with pytest.raises(ValueError, match=re.escape(message)):
        part_of(weight, TensorSlice(1, ((128, 128),), K), 1)
