"""Weights of all experts of a layer in 8 and 4 bits, each laid out by `linear/packed.py`.

An expert starts at a block of rows, so its codes and scales are a `PackedWeight` that is a view of
the memory of all experts. A model fills it expert by expert as it is loaded.

Letters: E experts, M weight rows and K input features of an expert, B blocks of rows, C blocks of
columns, G groups of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.linear.packed import (
    BLOCK_ROWS,
    PackedForm,
    PackedWeight,
    block_columns,
    empty_packed,
    unpack,
)
from graphengine.kernels.linear.quantised import WeightFormat, dequantise


class PackedExperts(NamedTuple):
    """Weights [E, M, K] in a format; each SwiGLU weight has F gate rows, then F up rows.

    codes       int16 [E, B, C, 256]
    scales      [E, B, G, 16] or None; like the others, as in a `PackedWeight`
    zeros       uint8 [E, B, G, 16] or None
    row_scales  float32 [E, 16 * B] or None
    factors     float16 [E, B, S, 16] or None, for S blocks of columns
    """

    format: WeightFormat
    shape: tuple[int, int, int]
    swiglu: bool
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    row_scales: Tensor | None
    factors: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not None."""
        tensors = (self.codes, self.scales, self.zeros, self.row_scales, self.factors)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def expert(self, index: int) -> PackedWeight:
        """The weight of an expert, which shares this one's memory."""

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        return PackedWeight(
            format=self.format,
            shape=self.shape[1:],
            swiglu=self.swiglu,
            codes=self.codes[index],
            scales=of(self.scales),
            zeros=of(self.zeros),
            row_scales=of(self.row_scales),
            order=None,
            factors=of(self.factors),
        )

    def floats(self, index: int) -> Tensor:
        """The dequantised weight of an expert, float32 [M, K]."""
        return dequantise(unpack(self.expert(index)))


def empty_experts(
    form: PackedForm, shape: tuple[int, int, int], *, swiglu: bool, device: torch.device | str
) -> PackedExperts:
    """Uninitialised weights [E, M, K]; on the device "meta" they take no memory.

    ValueError as in `linear.packed.pack`, and for reordered columns.
    """
    if form.ordered:
        raise ValueError("the kernels of experts take columns in order, and these have another")
    experts, M, K = shape
    one = empty_packed(form, (M, K), swiglu=swiglu, device="meta")

    def all_of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty((experts, *tensor.shape), dtype=tensor.dtype, device=device)

    codes = all_of(one.codes)
    assert codes is not None
    return PackedExperts(
        format=form.format,
        shape=shape,
        swiglu=swiglu,
        codes=codes,
        scales=all_of(one.scales),
        zeros=all_of(one.zeros),
        row_scales=all_of(one.row_scales),
        factors=all_of(one.factors),
    )


def fill_expert(experts: PackedExperts, index: int, weight: PackedWeight) -> None:
    """Copy a weight to its place. ValueError for a weight that is stored differently."""
    place = experts.expert(index)
    for name in ("format", "shape", "swiglu"):
        if getattr(place, name) != getattr(weight, name):
            raise ValueError(
                f"expert {index} has {name} {getattr(weight, name)}, the others "
                f"{getattr(place, name)}"
            )
    kinds = [[t.dtype for t in each.tensors] for each in (place, weight)]
    if weight.order is not None or kinds[0] != kinds[1]:
        raise ValueError(f"expert {index} has tensors of {kinds[1]}, the others {kinds[0]}")
    for to, source in zip(place.tensors, weight.tensors, strict=True):
        to.copy_(source)


class CodeArgs(NamedTuple):
    """The tensors of `PackedExperts` as kernel arguments.

    `codes` stands in for a missing tensor, since Triton's interpreter takes no None in a tuple; no
    other tensor has its dtype, int16.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    row_scales: Tensor
    factors: Tensor


def code_args(experts: PackedExperts) -> CodeArgs:
    """The kernel arguments of packed experts."""
    codes = experts.codes

    def given(tensor: Tensor | None) -> Tensor:
        return codes if tensor is None else tensor

    tensors = (experts.scales, experts.zeros, experts.row_scales, experts.factors)
    return CodeArgs(codes, *map(given, tensors))


def step_columns(kind: WeightFormat) -> int:
    """Columns that a kernel multiplies at a time: a group's, or 128 without groups; at most 128,
    and at least a block's.
    """
    return max(block_columns(kind), min(kind.columns or 128, 128))


def packed_block_rows(rows: int) -> int:
    """Blocks in `rows` of a plan or tile. ValueError unless `rows` is a power of two >= 16."""
    if rows < BLOCK_ROWS or rows & (rows - 1):
        raise ValueError(
            f"packed experts take a power of two of at least {BLOCK_ROWS} rows a program, "
            f"not {rows}"
        )
    return rows // BLOCK_ROWS
