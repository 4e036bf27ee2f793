"""Weights of 8 and 4 bits: codes, and the scales that turn them into numbers.

A weight is `(code - zero) * scale - minimum`, in float32 and never rounded: what a code stands for
is exact in float16 and bfloat16, so kernels multiply codes on tensor cores and apply scales to
sums, and minimums to sums of inputs. So prefill and decode use the same weight.

Letters: M weight rows, K input features, R x C the rows and columns that share a scale, S blocks of
columns that share a factor on scales.
"""

from __future__ import annotations

import re
from typing import NamedTuple, cast

import torch
from torch import Tensor

from graphengine.kernels.linear.kinds import CODES, KINDS, CodeKind, KindName

_LABEL = re.compile(
    r"(?P<code>[a-z0-9]+)-(?P<rows>[0-9]{1,9})x(?P<columns>[0-9]{1,9})(?P<zeros>-zeros)?"
    r"(?P<minimums>-minimums)?(-of(?P<block>[0-9]{1,9}))?"
)


class WeightFormat(NamedTuple):
    """How a weight is stored: part of an engine's numerics.

    code       the type of its codes
    rows       weight rows that share a scale; 0: all of them
    columns    weight columns that share a scale; 0: all of them
    has_zeros  whether each group has a zero point too: only with integers
    has_minimums
               whether each group has a number that is subtracted, too
    block      columns of a row that share factors on scales and on minimums: a multiple of
               `columns`; 0: there are none
    """

    code: CodeKind
    rows: int
    columns: int
    has_zeros: bool = False
    has_minimums: bool = False
    block: int = 0

    @property
    def label(self) -> str:
        """A short, unambiguous name: "int4-1x128" has a scale for 128 columns of a row; 0: all."""
        ends = ("-zeros" if self.has_zeros else "", "-minimums" if self.has_minimums else "")
        of_block = f"-of{self.block}" if self.block else ""
        return f"{self.code}-{self.rows}x{self.columns}" + "".join(ends) + of_block

    @classmethod
    def of_label(cls, label: str) -> WeightFormat:
        """The format that `label` names. ValueError for another text."""
        found = _LABEL.fullmatch(label)
        if found is None or found["code"] not in CODES:
            raise ValueError(
                f"{label!r} is no format of weights: of {', '.join(CODES)}, then rows x "
                f"columns that share a scale, as in int4-1x128, int4-1x128-zeros or "
                f"uint4-1x32-minimums-of256"
            )
        return cls(
            cast(CodeKind, found["code"]),
            int(found["rows"]),
            int(found["columns"]),
            found["zeros"] is not None,
            found["minimums"] is not None,
            int(found["block"] or 0),
        )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODES[self.code].bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scale, at most."""
        if self.block:
            return 1
        kinds = [kind for kind in KINDS.values() if kind.code.name == self.code]
        return max(scale.itemsize for kind in kinds for scale in kind.scales)

    @property
    def usual_scale_bytes(self) -> int:
        """Bytes of a group's scale in most checkpoints."""
        # Groups of 16 integers are those of GGUF files, which become products in float32.
        return self.scale_bytes if 0 < self.columns < 32 else min(2, self.scale_bytes)

    def groups(self, M: int, K: int) -> tuple[int, int]:
        """Shape of the scales of a weight [M, K]."""
        return -(-M // (self.rows or M)), -(-K // (self.columns or K))

    @property
    def is_common(self) -> bool:
        """Whether prefill's kernels of linears take it, too. They do not take minimums, factors of
        blocks, nor groups of fewer than 32 columns of 8 bits.
        """
        small = self.bits == 8 and 0 < self.columns < 32
        return not self.has_minimums and not self.block and not small


def format_of(
    kind: KindName, rows: int = 1, columns: int | None = None, has_zeros: bool = False
) -> WeightFormat:
    """The format of a kind of weights; columns None: those that the kind has."""
    row = KINDS[kind]
    columns = row.columns if columns is None else columns
    return WeightFormat(row.code.name, rows, columns, has_zeros, row.minimums, row.block)


class QuantisedWeight(NamedTuple):
    """A weight [M, K] in a format.

    codes    uint8 [M, K], or [M, K // 2] of 4 bits: the lower half is the even column
    scales   [M / R, K / C]: float32, bfloat16, float16, `torch.float8_e4m3fn`, or uint8 for powers
             of two (e8m0: 2**(byte - 127)); any finite numbers, 0 and negative ones too. In a
             format of blocks int8. In one with minimums [M / R, K / C, 2]: these are the second
    whole    float32, a factor on all scales [], or on those of each row [M, 1] where no rows share
             any; None: 1
    zeros    uint8 [M / R, K / C], codes that stand for 0; None: the usual zero of `code`
    order    int32 [K]: column k of the codes is column `order[k]` of the weight; None: as it is
    factors  float16 [M / R, S], factors on the scales of blocks, with those on minimums [M / R, S,
             2]; None: 1
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    whole: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None
    factors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)"""
        rows, columns = self.codes.shape
        return rows, columns * 8 // self.format.bits

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.whole, self.zeros, self.order, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def unpacked_codes(weight: QuantisedWeight) -> Tensor:
    """uint8 [M, K]: one code each."""
    return weight.codes if weight.format.bits == 8 else unpacked_halves(weight.codes)


def unpacked_halves(packed: Tensor) -> Tensor:
    """Unpack uint8 [M, K // 2] into uint8 [M, K]: the lower halves are the even columns."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def packed_halves(codes: Tensor) -> Tensor:
    """Pack uint8 [M, K] below 16 into uint8 [M, K // 2]: the inverse of `unpacked_halves`."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def scale_values(weight: QuantisedWeight) -> Tensor:
    """The values of the scales, and of minimums beside them, all factors included: float32, in
    their shape.
    """
    scales, kind = weight.scales, weight.format
    if scales.dtype == torch.uint8:
        values = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    else:
        values = scales.float()
    if weight.factors is not None:
        of_groups = weight.factors.float().repeat_interleave(kind.block // kind.columns, dim=1)
        values = values * of_groups[:, : values.shape[1]]
    whole = weight.whole
    if whole is not None and whole.dim() and kind.has_minimums:
        whole = whole[..., None]
    return values if whole is None else values * whole


def dequantise(weight: QuantisedWeight) -> Tensor:
    """The weight's values: float32 [M, K], columns in the order of the inputs."""
    (M, K), kind = weight.shape, weight.format
    numbers = CODES[kind.code].values
    values = numbers(unpacked_codes(weight))
    if weight.zeros is not None:
        values = values - _spread(numbers(weight.zeros), kind, M, K)
    scales = scale_values(weight)
    if kind.has_minimums:
        scales, minimums = scales.unbind(-1)
        values = values * _spread(scales, kind, M, K) - _spread(minimums, kind, M, K)
    else:
        values = values * _spread(scales, kind, M, K)
    if weight.order is None:
        return values
    result = torch.empty_like(values)
    result[:, weight.order.long()] = values
    return result


def scales_of_rows(weight: QuantisedWeight) -> Tensor:
    """A scale for each row, float32 [M], of a weight whose columns share them."""
    assert weight.format.columns == 0, f"{weight.format=}"
    rows, columns = weight.shape
    return _spread(scale_values(weight), weight.format, rows, columns).expand(rows, 1)[:, 0]


def _spread(of_groups: Tensor, kind: WeightFormat, M: int, K: int) -> Tensor:
    """Repeat a value for each group to [M, K], or to what broadcasts to it."""
    if kind.rows:
        of_groups = of_groups.repeat_interleave(kind.rows, dim=0)[:M]
    if kind.columns:
        of_groups = of_groups.repeat_interleave(kind.columns, dim=1)[:, :K]
    return of_groups
