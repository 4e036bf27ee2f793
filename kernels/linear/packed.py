"""Weights of 8 and 4 bits as the decode kernels read them: made once, when a model is loaded.

Codes lie in blocks of 512 bytes, 16 weight rows by 32 (8 bits) or 64 (4 bits) columns. A block is
the left operand of `mma.sync.m16n8k16` for one warp: 16 bytes for each thread in turn, which hold
the columns of two rows that the thread multiplies. So a warp copies and loads whole blocks, and
codes become halves without leaving their thread: the idea of Marlin (E. Frantar et al., 2024).

An `mma.sync` multiplies 16 columns, of which a thread has 4 adjacent ones. A 32-bit word holds
codes of one row: even columns in the lower half, odd ones in the upper half. The same bits of both
halves are a pair of adjacent columns, which is what an operand's register wants: a shift, a mask
and a magic number turn them into halves. The bits of 4-bit floats are rearranged within a halfword,
so that it takes fewer steps to extract them.

Rows of a SwiGLU alternate, 8 gates and their 8 ups, so that a thread holds both of an output.

Letters: M weight rows, K input features, B blocks of rows, C blocks of columns, G groups of
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphengine.kernels.linear.kinds import CODES
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    scales_of_rows,
    unpacked_codes,
)

BLOCK_ROWS = 16
POWER_FACTOR = 0.5
"""Factor on a whole weight whose scales are powers of two: kernels read a scale's byte `b` as
2 ** (b - 126), which is a normal number for every `b` up to 253.
"""
BLOCK_HALFWORDS = 256
# The largest byte of a scale that is a power of two: prefill multiplies a code, whose field begins
# at bfloat16's least exponent, by 2 ** 94 times the scale in one product (`scaled_halves`).
_LARGEST_POWER = 127 + 32
# Fewest columns that share a scale.
_LEAST_GROUP = 16
# Rows of a weight that are laid out at a time: with one code a byte they take twice the memory.
_ROWS_AT_ONCE = 4096
# Rows that are selected at a time, each with the 15 others of its block.
_SELECTED_AT_ONCE = 512


class PackedWeight(NamedTuple):
    """A weight [M, K] for the decode kernels; a SwiGLU has F gate rows, then F up rows.

    codes       int16 [B, C, 256], as the module says; rows and columns are padded with zeros or
                with copies of others
    scales      [B, G, 16] in the weight's own dtype, or None where a scale covers all columns; with
                minimums [B, G, 2, 16], which are the second 16
    zeros       uint8 [B, G, 16] or None, as in `QuantisedWeight`
    row_scales  float32 [16 * B], factors on whole rows; None: 1
    order       as in `QuantisedWeight`
    factors     float16 [B, S, 16], with minimums [B, S, 2, 16], or None: factors on the scales, and
                the minimums, of S blocks of columns
    """

    format: WeightFormat
    shape: tuple[int, int]
    swiglu: bool
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    row_scales: Tensor | None
    order: Tensor | None
    factors: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not None."""
        tensors = (self.codes, self.scales, self.zeros, self.row_scales, self.order, self.factors)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PackedForm(NamedTuple):
    """With a weight's shape this determines the shapes and dtypes of a `PackedWeight`.

    scales      dtype of the scales of groups; None: only rows have scales
    row_scales  whether rows have factors
    ordered     whether columns may be in another order
    """

    format: WeightFormat
    scales: torch.dtype | None
    row_scales: bool
    ordered: bool = False


def packed_form(
    kind: WeightFormat, scales: torch.dtype, *, whole: bool = False, ordered: bool = False
) -> PackedForm:
    """The form that `pack` gives a weight with scales of this dtype.

    whole: the weight has a factor on all scales.
    """
    if kind.columns == 0 and not kind.has_zeros:
        return PackedForm(kind, None, True, ordered)
    return PackedForm(kind, scales, whole or scales == torch.uint8, ordered)


def empty_packed(
    form: PackedForm, shape: tuple[int, int], *, swiglu: bool, device: torch.device | str
) -> PackedWeight:
    """An uninitialised weight [M, K]; on the device "meta" it takes no memory.

    ValueError as in `pack`.
    """
    kind, (M, K) = form.format, shape
    _check(kind, M, swiglu)
    blocks = -(-(M // 2) // (BLOCK_ROWS // 2)) if swiglu else -(-M // BLOCK_ROWS)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def of_columns(columns: int, dtype: torch.dtype, *pair: int) -> Tensor:
        return new(blocks, -(-K // (columns or K)), *pair, BLOCK_ROWS, dtype=dtype)

    pair = (2,) if kind.has_minimums else ()
    scales = factors = None
    if form.scales is not None:
        scales = of_columns(kind.columns, form.scales, *pair)
    if kind.block:
        factors = of_columns(kind.block, torch.float16, *pair)

    return PackedWeight(
        format=kind,
        shape=shape,
        swiglu=swiglu,
        codes=new(blocks, -(-K // block_columns(kind)), BLOCK_HALFWORDS, dtype=torch.int16),
        scales=scales,
        zeros=of_columns(kind.columns, torch.uint8) if kind.has_zeros else None,
        row_scales=new(BLOCK_ROWS * blocks, dtype=torch.float32) if form.row_scales else None,
        order=new(K, dtype=torch.int32) if form.ordered else None,
        factors=factors,
    )


def first_rows(packed: PackedWeight, rows: int) -> PackedWeight:
    """The first rows of a weight, which share its memory. ValueError for a SwiGLU."""
    return rows_of(packed, 0, rows)


def rows_of(packed: PackedWeight, start: int, rows: int) -> PackedWeight:
    """A weight's `rows` rows from `start` on, the start of a block; they share its memory.

    ValueError for a SwiGLU, and for another start.
    """
    if packed.swiglu:
        raise ValueError(f"{packed.shape[0]} rows of a SwiGLU alternate: none are the first")
    if start % BLOCK_ROWS:
        raise ValueError(f"row {start} is inside of a block: these begin every {BLOCK_ROWS} rows")
    first, end = start // BLOCK_ROWS, -(-(start + rows) // BLOCK_ROWS)
    blocks, factors = slice(first, end), slice(first * BLOCK_ROWS, end * BLOCK_ROWS)
    return packed._replace(
        shape=(rows, packed.shape[1]),
        codes=packed.codes[blocks],
        scales=None if packed.scales is None else packed.scales[blocks],
        zeros=None if packed.zeros is None else packed.zeros[blocks],
        row_scales=None if packed.row_scales is None else packed.row_scales[factors],
        factors=None if packed.factors is None else packed.factors[blocks],
    )


def select_rows(packed: PackedWeight, rows: Tensor) -> PackedWeight:
    """Rows of these indices, int64 [R], as a weight of its own, with a scale for every row.

    Apart from the result it takes memory for only some rows at a time. ValueError for a SwiGLU.
    """
    if packed.swiglu:
        raise ValueError(f"{packed.shape[0]} rows of a SwiGLU alternate: none can be selected")
    parts = [_some_rows(packed, part) for part in rows.split(_SELECTED_AT_ONCE)]
    whole = [part.whole for part in parts if part.whole is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    factors = [part.factors for part in parts if part.factors is not None]
    bits = torch.cat([_as_bits(part.scales) for part in parts])
    return pack(
        parts[0]._replace(
            codes=torch.cat([part.codes for part in parts]),
            scales=bits.view(parts[0].scales.dtype),
            whole=torch.cat(whole) if whole else None,
            zeros=torch.cat(zeros) if zeros else None,
            factors=torch.cat(factors) if factors else None,
        )
    )


def _some_rows(packed: PackedWeight, rows: Tensor) -> QuantisedWeight:
    """Unpack some rows, by unpacking their blocks of 16."""
    blocks, count = rows // BLOCK_ROWS, len(rows)
    factors = packed.row_scales
    of_blocks = packed._replace(
        shape=(BLOCK_ROWS * count, packed.shape[1]),
        codes=packed.codes[blocks],
        scales=_at(packed.scales, blocks),
        zeros=_at(packed.zeros, blocks),
        row_scales=None if factors is None else factors.view(-1, BLOCK_ROWS)[blocks].flatten(),
        factors=_at(packed.factors, blocks),
    )
    weight = unpack(of_blocks)
    at = torch.arange(count, device=rows.device) * BLOCK_ROWS + rows % BLOCK_ROWS
    scales = _at(weight.scales, at)
    assert scales is not None
    return weight._replace(
        codes=weight.codes[at],
        scales=scales,
        whole=_at(weight.whole, at),
        zeros=_at(weight.zeros, at),
        factors=_at(weight.factors, at),
    )


def _at(values: Tensor | None, indices: Tensor) -> Tensor | None:
    return None if values is None else _as_bits(values)[indices].view(values.dtype)


def block_columns(kind: WeightFormat) -> int:
    """Columns of a block."""
    return 256 // kind.bits


def pack(weight: QuantisedWeight, *, swiglu: bool = False) -> PackedWeight:
    """Lay out a weight, on its device.

    ValueError for groups that the kernels do not support, and for a SwiGLU with an odd number of
    rows.
    """
    M, kind = weight.shape[0], weight.format
    _check(kind, M, swiglu)
    if weight.scales.dtype == torch.uint8 and int(weight.scales.max()) > _LARGEST_POWER:
        found, most = int(weight.scales.max()) - 127, _LARGEST_POWER - 127
        raise ValueError(f"a scale of 2 ** {found} exceeds 2 ** {most}")
    rows = packed_rows(M, swiglu, weight.codes.device)
    codes = [
        _blocks(unpacked_codes(weight._replace(codes=weight.codes[part])), kind)
        for part in rows.split(_ROWS_AT_ONCE)
    ]
    grouped = kind.columns > 0 or kind.has_zeros
    row_scales = None
    powers = grouped and weight.scales.dtype == torch.uint8
    if not grouped:
        row_scales = scales_of_rows(weight)[rows]
    elif weight.whole is not None or powers:
        whole = torch.tensor(1.0) if weight.whole is None else weight.whole.float()
        whole = (whole * POWER_FACTOR if powers else whole).to(rows.device)
        row_scales = whole[rows, 0] if whole.dim() else whole.expand(len(rows)).contiguous()
    return PackedWeight(
        format=kind,
        shape=weight.shape,
        swiglu=swiglu,
        codes=torch.cat(codes),
        scales=_of_blocks(weight.scales, kind, rows) if grouped else None,
        zeros=None if weight.zeros is None else _of_blocks(weight.zeros, kind, rows),
        row_scales=row_scales,
        order=weight.order,
        factors=None if weight.factors is None else _of_blocks(weight.factors, kind, rows),
    )


def unpack(packed: PackedWeight) -> QuantisedWeight:
    """The weight that was laid out, with a scale for every row: for tests."""
    (M, K), kind = packed.shape, packed.format
    rows = packed_rows(M, packed.swiglu, packed.codes.device)
    # Take the first place of a row: past the last one may lie a row that `first_rows` left out.
    at = torch.arange(len(rows), device=rows.device)
    places = at.new_full((M,), len(rows)).scatter_reduce(0, rows, at, "amin")
    codes = _codes(packed.codes, kind)[places, :K]
    if kind.bits == 4:
        codes = functional.pad(codes, (0, K % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scales, whole = packed.scales, None
    if scales is None:
        assert packed.row_scales is not None, f"{kind=}"
        scales = packed.row_scales[places, None]
    else:
        scales = _of_rows(scales, places)
        if packed.row_scales is not None:
            whole = packed.row_scales[places, None]
            whole = whole / POWER_FACTOR if scales.dtype == torch.uint8 else whole
    zeros = None if packed.zeros is None else _of_rows(packed.zeros, places)
    factors = None if packed.factors is None else _of_rows(packed.factors, places)
    kind = kind._replace(rows=1)
    return QuantisedWeight(kind, codes, scales, whole, zeros, packed.order, factors)


def packed_rows(M: int, swiglu: bool, device: torch.device | str = "cpu") -> Tensor:
    """int64 [16 * B]: the weight row in each row of blocks; past the end the last repeats."""
    if not swiglu:
        blocks = -(-M // BLOCK_ROWS)
        return torch.arange(BLOCK_ROWS * blocks, device=device).clamp_(max=M - 1)
    outputs, half = M // 2, BLOCK_ROWS // 2
    gates = torch.arange(-(-outputs // half) * half, device=device).clamp_(max=outputs - 1)
    return torch.stack((gates, gates + outputs)).view(2, -1, half).transpose(0, 1).flatten()


def _check(kind: WeightFormat, M: int, swiglu: bool) -> None:
    columns = kind.columns
    if columns and (columns < _LEAST_GROUP or columns & (columns - 1)):
        raise ValueError(
            f"groups of {columns} columns of {kind.code}: the kernels have powers of two from "
            f"{_LEAST_GROUP} on"
        )
    if swiglu and M % 2:
        raise ValueError(f"swiglu needs as many gate rows as up rows, not {M} rows in all")


def _blocks(codes: Tensor, kind: WeightFormat) -> Tensor:
    """int16 [B, C, 256] of codes [16 * B, K]."""
    sizes, order = _layout(kind)
    # Inputs past K are zeros, so any code will do.
    codes = functional.pad(codes, (0, -codes.shape[1] % block_columns(kind)))
    pieces = codes.view(-1, 2, 8, codes.shape[1] // block_columns(kind), *sizes).permute(order)
    if kind.bits == 4:
        pieces = pieces[..., 0] | pieces[..., 1] << 4
    halfwords = pieces.contiguous().view(torch.int16).flatten(2)
    moves = CODES[kind.code].moves
    return _moved(halfwords, moves) if moves else halfwords


def _codes(blocks: Tensor, kind: WeightFormat) -> Tensor:
    """uint8 [16 * B, K]: the inverse of `_blocks`."""
    sizes, order = _layout(kind)
    if moves := CODES[kind.code].moves:
        blocks = _moved(blocks, [(to, count, source) for source, count, to in moves])
    pieces = blocks.view(torch.uint8)
    if kind.bits == 4:
        pieces = torch.stack((pieces & 15, pieces >> 4), dim=-1)
    # Gather block by block: a permuted copy of so many axes would move each code by itself.
    columns, one_block = block_columns(kind), (1, 2, 8, 1, *sizes)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    place = torch.arange(BLOCK_ROWS * columns, device=blocks.device)
    place = place.view([one_block[axis] for axis in order]).permute(inverse).flatten()
    codes = pieces.reshape(-1, len(place)).t().contiguous()[place]
    codes = codes.view(BLOCK_ROWS, columns, len(blocks), -1).permute(2, 0, 3, 1)
    return codes.reshape(BLOCK_ROWS * len(blocks), -1)


def _moved(halfwords: Tensor, moves: Sequence[tuple[int, int, int]]) -> Tensor:
    """Move bits within halfwords; a move is the first bit, the number of bits, and their place."""
    words = halfwords.to(torch.int32)
    moved = torch.zeros_like(words)
    for source, count, to in moves:
        moved |= (words >> source & (1 << count) - 1) << to
    return moved.to(torch.int16)


def _layout(kind: WeightFormat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How the columns of a block are split into axes, and the order of all axes in memory.

    The first axes are blocks of rows, upper and lower rows, row of 8, blocks of columns.
    """
    if kind.bits == 8:
        # Word of a row, thread, byte of a half, half.
        return (2, 4, 2, 2), (0, 3, 2, 5, 1, 4, 7, 6)
    # Word of a row, byte of a half, thread, nibble of a byte, half.
    return (2, 2, 4, 2, 2), (0, 3, 2, 6, 4, 1, 8, 5, 7)


def _of_blocks(of_groups: Tensor, kind: WeightFormat, rows: Tensor) -> Tensor:
    """Lay out values of groups, [M / R, G, ...], by blocks: [B, G, ..., 16]."""
    chosen = torch.zeros_like(rows) if kind.rows == 0 else rows // kind.rows
    bits = _as_bits(of_groups)[chosen]
    bits = bits.view(-1, BLOCK_ROWS, *bits.shape[1:])
    return bits.movedim(1, -1).contiguous().view(of_groups.dtype)


def _of_rows(of_blocks: Tensor, places: Tensor) -> Tensor:
    """[M, G, ...]: the inverse of `_of_blocks`, for every row."""
    bits = _as_bits(of_blocks).movedim(-1, 1).flatten(0, 1)[places]
    return bits.contiguous().view(of_blocks.dtype)


def _as_bits(values: Tensor) -> Tensor:
    """View 8-bit values as integers: torch does not gather floats of 8 bits everywhere."""
    return values.view(torch.uint8) if values.itemsize == 1 else values
