"""Rounds weights of 16 or 32 bits to 8 or 4 bits: each number to the nearest code.

Scales are chosen without data. Integers use all of their codes: the scale is the smallest at which
no number lies more than half a step beyond the last code, `max(most / 7.5, -least / 8.5)` for 4
bits. For normally distributed numbers in groups of 128, the mean square error is 9% less than with
the usual `max(abs) / 7.5`, and 19% less than with `max(abs) / 7`, which leaves -8 unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from graphengine.config import RoundedKind
from graphengine.kernels.core.paged import FP8_MAX
from graphengine.kernels.linear.kinds import CODES, KINDS
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    format_of,
    packed_halves,
)

ROUNDED_KINDS = get_args(RoundedKind)
KIND_FORMATS: Mapping[RoundedKind, WeightFormat] = {
    name: format_of(name, *rounded)
    for name in ROUNDED_KINDS
    if (rounded := KINDS[name].rounded) is not None
}
"""Formats of weights quantised here: one scale per row, or one per 128 columns of a row."""

# Float32 bytes of the rows that are rounded at a time; they take a few times this memory.
_SLICE_BYTES = 64 << 20
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantise(weight: Tensor, kind: WeightFormat) -> QuantisedWeight:
    """Round a floating weight [M, K] to one of `KIND_FORMATS`, or to other groups of columns.

    All work is done where the weight lies, some rows at a time. Scales of rows are float32, scales
    of groups bfloat16; codes are found with the scales as they are stored.

    ValueError names the first row with a NaN or an infinity, or a format that is not one of these.
    """
    *others, last = (form.code for form in KIND_FORMATS.values())
    if kind.rows != 1 or kind.has_zeros or kind.code not in (*others, last):
        raise ValueError(
            f"{kind} cannot be made: {', '.join(others)} and {last} with scales of single rows "
            f"can, without zero points"
        )
    M, K = weight.shape
    check_columns(kind, K)
    groups = kind.groups(M, K)
    codes = weight.new_empty((M, K * kind.bits // 8), dtype=torch.uint8)
    dtype = torch.bfloat16 if kind.columns else torch.float32
    scales = weight.new_empty(groups, dtype=dtype)
    step = max(1, _SLICE_BYTES // (4 * K))
    for start in range(0, M, step):
        rows = slice(start, start + step)
        part = _grouped(weight[rows].float(), kind)
        found = _scales(part, kind)
        if not bool(found.isfinite().all()):
            row = start + int((~found.isfinite()).nonzero()[0, 0])
            raise ValueError(f"row {row} of a weight {[M, K]} has a number that is not finite")
        scales[rows] = found
        steps = part / scales[rows].float()[..., None]
        codes[rows] = _codes(steps.flatten(1)[:, :K], kind)
    return QuantisedWeight(kind, codes, scales)


def check_columns(kind: WeightFormat, columns: int) -> None:
    """Raise ValueError if a weight with this many columns cannot be in this format."""
    if kind.bits == 4 and columns % 2:
        raise ValueError(
            f"a weight of {columns} columns cannot have codes of 4 bits: two share a byte"
        )


def _grouped(part: Tensor, kind: WeightFormat) -> Tensor:
    """Reshape to [m, G, C], with the last group padded with zeros."""
    columns = kind.columns or part.shape[1]
    return F.pad(part, (0, -part.shape[1] % columns)).reshape(len(part), -1, columns)


def _scales(part: Tensor, kind: WeightFormat) -> Tensor:
    most, least = part.amax(-1), part.amin(-1)
    if CODES[kind.code].type == "float":
        scales = torch.maximum(most, -least) / FP8_MAX
    else:
        codes = 2 ** (kind.bits - 1)
        scales = torch.maximum(most / (codes - 0.5), -least / (codes + 0.5))
    return torch.where(scales == 0, 1.0, scales.clamp(min=_LEAST_SCALE))


def _codes(steps: Tensor, kind: WeightFormat) -> Tensor:
    """Codes of numbers in units of their scales."""
    if CODES[kind.code].type == "float":
        # Above its largest number, e4m3 has a NaN.
        return steps.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    most = 2 ** (kind.bits - 1)
    codes = steps.round().clamp(-most, most - 1).to(torch.int8)
    return (
        codes.view(torch.uint8)
        if kind.bits == 8
        else packed_halves((codes + most).view(torch.uint8))
    )
