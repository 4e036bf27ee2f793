"""Cuts one rank's part out of a weight: codes, with their scales and zero points.

Letters: M weight rows, K input features, R x C the rows and columns that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat
from graphengine.models.checkpoints.tensor_files import TensorSlice
from graphengine.models.quantised.concatenate import each_row

_ROWS = 0


def keeps_groups_of_rows(kind: WeightFormat, cut: TensorSlice) -> bool:
    """Whether rows that share a scale stay together; one scale for all rows also fits a part."""
    return cut.axis != _ROWS or not kind.rows or _is_between(kind.rows, cut)


def check_columns(kind: WeightFormat, cut: TensorSlice, *, ordered: bool) -> None:
    """Raise ValueError, with the numbers, for spans that separate columns of one group or byte, or
    for any spans if columns are `ordered` by their groups.
    """
    if cut.axis == _ROWS:
        return
    if ordered:
        raise ValueError(
            f"{cut.length} of {cut.whole} columns, which are in the order of their groups (g_idx), "
            f"are in no groups of their own"
        )
    together = max(kind.columns, kind.block, 8 // kind.bits)
    if not _is_between(together, cut):
        start, length = next(span for span in cut.spans if _parts(together, *span, cut.whole))
        raise ValueError(
            f"columns {start} to {start + length} of {cut.whole} part some of the {together} that "
            f"share a scale or a byte in {kind.label}"
        )


def part_of(weight: QuantisedWeight, cut: TensorSlice, rows: int) -> QuantisedWeight:
    """The rows or columns of a weight that `cut` names, with the same meaning.

    rows  R of the part: the same as the weight's, or 1, which gives each row its own scale

    ValueError as in `check_columns`.
    """
    if rows == 1 != weight.format.rows:
        weight = each_row(weight)
    kind = weight.format
    if cut.axis == _ROWS:
        return _some_rows(weight, cut)
    check_columns(kind, cut, ordered=weight.order is not None)
    scales, zeros, factors = weight.scales, weight.zeros, weight.factors
    if kind.columns:
        scales = _chosen(scales, 1, kind.columns, cut)
        zeros = None if zeros is None else _chosen(zeros, 1, kind.columns, cut)
        factors = None if factors is None else _chosen(factors, 1, kind.block, cut)
    per_byte = 8 // kind.bits
    codes = _chosen(weight.codes, 1, per_byte, cut)
    return weight._replace(codes=codes, scales=scales, zeros=zeros, factors=factors)


def _some_rows(weight: QuantisedWeight, cut: TensorSlice) -> QuantisedWeight:
    kind, whole = weight.format, weight.whole
    assert keeps_groups_of_rows(kind, cut), f"{cut=} of {kind}"
    scales, zeros, factors = weight.scales, weight.zeros, weight.factors
    if kind.rows:
        scales = _chosen(scales, 0, kind.rows, cut)
        zeros = None if zeros is None else _chosen(zeros, 0, kind.rows, cut)
        factors = None if factors is None else _chosen(factors, 0, kind.rows, cut)
    return weight._replace(
        codes=_chosen(weight.codes, 0, 1, cut),
        scales=scales,
        whole=whole if whole is None or not whole.ndim else _chosen(whole, 0, 1, cut),
        zeros=zeros,
        factors=factors,
    )


def _is_between(together: int, cut: TensorSlice) -> bool:
    return not any(_parts(together, *span, cut.whole) for span in cut.spans)


def _parts(together: int, start: int, length: int, whole: int) -> bool:
    """Whether a span begins or ends inside a group; the last group may be shorter."""
    end = start + length
    return bool(start % together or (end % together and end != whole))


def _chosen(values: Tensor, axis: int, together: int, cut: TensorSlice) -> Tensor:
    """The cut's spans of `values` along `axis`, where a value is for `together` rows or columns."""
    # Not all devices can concatenate floats of 8 bits.
    bits = values.view(BITS[values.element_size()])
    spans = [(start // together, -(-length // together)) for start, length in cut.spans]
    parts = [bits.narrow(axis, *span) for span in spans]
    return torch.cat(parts, axis).view(values.dtype)
