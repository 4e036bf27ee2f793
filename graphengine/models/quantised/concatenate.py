"""Concatenates the rows of several linears' weights, as fused linears need them.

The parts keep their values to the bit. Scales that no longer fit the rows are stored once for each
row; the whole then has another format than its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat, scale_values


def joined_format(kind: WeightFormat, rows: Sequence[int]) -> WeightFormat:
    """The format after `concatenate` of parts in the format `kind`, with these numbers of rows.

    It does not depend on values, so that memory can be planned before any is read: if each part has
    one scale for all its rows, the whole has one per row, even if they are equal.
    """
    if len(rows) < 2:
        return kind
    fits = kind.rows > 0 and all(count % kind.rows == 0 for count in rows[:-1])
    return kind if fits else kind._replace(rows=1)


def concatenate(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One weight whose rows are those of the parts, one part after another.

    ValueError, with numbers, if the parts differ in format, columns or column order.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for number, part in enumerate(parts):
        if part.format != first.format:
            raise ValueError(
                f"linears that are computed as one have different formats: part 0 is "
                f"{first.format}, part {number} is {part.format}"
            )
        if part.shape[1] != first.shape[1]:
            raise ValueError(
                f"linears that are computed as one have {first.shape[1]} columns in part 0, and "
                f"{part.shape[1]} in part {number}"
            )
        if not are_same(part.order, first.order):
            raise ValueError(
                f"linears that are computed as one have their columns in different orders in part "
                f"0 and part {number}: g_idx must be the same for all"
            )
    kind = joined_format(first.format, [part.shape[0] for part in parts])
    whole, scales = _joined_scales(parts)
    zeros = factors = None
    if first.format.has_zeros:
        zeros = _cat([part.zeros for part in parts if part.zeros is not None], parts, kind)
    if first.format.block:
        factors = _cat([part.factors for part in parts if part.factors is not None], parts, kind)
    return QuantisedWeight(
        format=kind,
        codes=torch.cat([part.codes for part in parts]),
        scales=_cat(scales, parts, kind),
        whole=whole,
        zeros=zeros,
        order=first.order,
        factors=factors,
    )


def _joined_scales(parts: Sequence[QuantisedWeight]) -> tuple[Tensor | None, list[Tensor]]:
    """The factor on scales, and the scales: float32 if parts store them in different dtypes.

    If parts have different factors, and rows share no scale, the factor has one value per row.
    """
    first, scales = parts[0], [part.scales for part in parts]
    if len({each.dtype for each in scales}) == 1:
        if all(are_same(part.whole, first.whole) for part in parts):
            return first.whole, scales
        if first.format.rows == 1:
            return torch.cat([_whole_of_rows(part) for part in parts]), scales
    return None, [scale_values(part) for part in parts]


def _whole_of_rows(part: QuantisedWeight) -> Tensor:
    """The factor on each row's scales, float32 [M, 1]."""
    whole = torch.ones((), device=part.codes.device) if part.whole is None else part.whole
    return whole.float().expand(part.shape[0], 1)


def _cat(values: list[Tensor], parts: Sequence[QuantisedWeight], kind: WeightFormat) -> Tensor:
    if kind != parts[0].format:
        values = [_each_row(value, part) for value, part in zip(values, parts, strict=True)]
    if values[0].dtype == torch.float8_e4m3fn:
        # Not all devices can concatenate these.
        return torch.cat([value.view(torch.uint8) for value in values]).view(torch.float8_e4m3fn)
    return torch.cat(values)


def _each_row(value: Tensor, part: QuantisedWeight) -> Tensor:
    """Repeat the values of groups of rows for each row: [M / R, ...] to [M, ...]."""
    M = part.shape[0]
    bits = value.view(BITS[value.element_size()])
    return bits.repeat_interleave(part.format.rows or M, dim=0)[:M].view(value.dtype)


def each_row(weight: QuantisedWeight) -> QuantisedWeight:
    """The weight with a scale, and a zero point, for each row."""
    zeros, factors = weight.zeros, weight.factors
    return weight._replace(
        format=weight.format._replace(rows=1),
        scales=_each_row(weight.scales, weight),
        zeros=None if zeros is None else _each_row(zeros, weight),
        factors=None if factors is None else _each_row(factors, weight),
    )


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two orders of columns, or two factors, are equal; None equals only None."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def ordered_format(kind: WeightFormat, order: Tensor | None) -> WeightFormat:
    """The format of a weight after `in_order`: one scale per row if `order` separates rows that
    share one.
    """
    if order is None or _groups_in_order(kind, order) is not None:
        return kind
    return kind._replace(rows=1)


def _groups_in_order(kind: WeightFormat, order: Tensor) -> Tensor | None:
    """The group of rows in each group's place; None if rows that share scales are separated."""
    shared = kind.rows or len(order)
    groups = order[::shared] // shared
    together = torch.equal(order // shared, groups.repeat_interleave(shared)[: len(order)])
    return groups if together else None


def in_order(weight: QuantisedWeight, order: Tensor | None) -> QuantisedWeight:
    """The weight whose row i is row `order[i]`, in `ordered_format`."""
    if order is None:
        return weight
    groups = _groups_in_order(weight.format, order)
    if groups is None:
        weight, groups = each_row(weight), order
    order, blocks = (index.to(weight.codes.device) for index in (order, groups))
    whole = weight.whole
    return weight._replace(
        codes=weight.codes[order],
        scales=weight.scales[blocks],
        whole=whole if whole is None or whole.ndim == 0 else whole[order],
        zeros=None if weight.zeros is None else weight.zeros[blocks],
        factors=None if weight.factors is None else weight.factors[blocks],
    )
