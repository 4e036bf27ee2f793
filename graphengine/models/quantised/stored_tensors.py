"""A checkpoint's tensors of one linear, each checked when it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphengine.kernels.linear.kinds import FLOATS, POWERS
from graphengine.kernels.linear.quantised import WeightFormat
from graphengine.options.checks import shown

# The byte of e8m0 that is not a number.
_NO_POWER = 255
# All bits of e4m3 except the sign; only a NaN has all of them set.
_NAN = 127
# Rows of codes that are checked at a time.
_ROWS_AT_ONCE = 4096


class LinearTensors:
    """Tensors below the name of a linear, and which of them were used."""

    def __init__(self, tensors: Mapping[str, Any], linear: str) -> None:
        self.linear = linear
        self.used: list[str] = []
        self._tensors = tensors
        self._read: dict[str, Tensor] = {}

    def name(self, *ends: str) -> str:
        """The name of the one tensor that is there. ValueError if there is none, or several."""
        found = self.stored(ends)
        if len(found) != 1:
            raise ValueError(
                f"{self.linear} has {' and '.join(found) or 'no tensor'}: "
                f"one of {', '.join(map(self._below, ends))} is needed"
            )
        return found[0]

    def stored(self, ends: Sequence[str]) -> list[str]:
        """The full names of the tensors that are there."""
        return [name for name in map(self._below, ends) if name in self._tensors]

    def take(
        self, *ends: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], why: str
    ) -> Tensor:
        """The one tensor that is there. ValueError unless it has the shape and one of the dtypes.

        why  the reason for this shape and dtype, for the message
        """
        return self._take(self.name(*ends), shape, dtypes, why)

    def take_any(self, end: str) -> Tensor:
        """The tensor, whatever it is."""
        name = self.name(end)
        self.used.append(name)
        return self._tensor(name)

    def take_groups(
        self,
        ends: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        why: str,
    ) -> Tensor:
        """The tensor, stored in any of these shapes and returned in the first."""
        name = self.name(*ends)
        stored = tuple(self._tensor(name).shape)
        tensor = self._take(name, stored if stored in shapes else shapes[0], dtypes, why)
        return tensor.reshape(shapes[0])

    def take_scales(
        self,
        ends: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        why: str,
        *,
        signed: bool = False,
    ) -> Tensor:
        """Scales as from `take_groups`, e8m0 as uint8. ValueError names the first wrong one.

        signed  whether scales may be negative or 0
        """
        scales = self.take_groups(ends, shapes, dtypes, f"scales, {why},")
        if scales.dtype in POWERS:
            scales = scales.view(torch.uint8)
            wrong = scales == _NO_POWER
        else:
            values = scales.float()
            # A scale that was too small for e4m3 is 0 there.
            high = values >= 0 if scales.dtype == torch.float8_e4m3fn else values > 0
            wrong = ~((high | signed) & values.isfinite())
        if _is_any(wrong):
            where = wrong.nonzero()[0].tolist()
            value = scales[tuple(where)].float().item()
            wanted_text = "finite" if signed else "positive and finite"
            raise ValueError(
                f"{self.name(*ends)} has {int(wrong.sum())} wrong of {wrong.numel()} scales, the "
                f"first {value:.7g} at {where}: scales are {wanted_text}"
            )
        return scales

    def take_whole(self, end: str, *, inverse: bool) -> Tensor:
        """The factor on all scales, float32 []; with `inverse` it is 1 / the stored number."""
        name = self.name(end)
        stored = self._tensor(name)
        if stored.numel() != 1 or stored.dtype not in FLOATS:
            raise ValueError(
                f"{name} is in {_dtype_name(stored.dtype)} with shape {list(stored.shape)}: "
                f"one number is needed, in {', '.join(map(_dtype_name, FLOATS))}"
            )
        self.used.append(name)
        value = stored.reshape(()).float()
        value = 1 / value if inverse else value
        if _is_any(~value.isfinite() | (value <= 0)):
            raise ValueError(f"{name} has {float(stored):.7g}: it must be positive and finite")
        return value

    def skip(self, ends: Sequence[str]) -> None:
        """Count the tensors that are there as used."""
        self.used += self.stored(ends)

    def _take(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], why: str
    ) -> Tensor:
        tensor = self._tensor(name)
        if tensor.dtype not in dtypes:
            known = ", ".join(map(_dtype_name, dtypes))
            raise ValueError(f"{name} is in {_dtype_name(tensor.dtype)}: {why} must be in {known}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: {why} must have shape {list(shape)}"
            )
        self.used.append(name)
        return tensor

    def _tensor(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._tensors[name]
        return self._read[name]

    def _below(self, end: str) -> str:
        return self.linear + (end if end.startswith(("_", ".")) else f".{end}")


def group_shapes(kind: WeightFormat, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes for the scales of a weight [M, K]: [M / R, K / C], and shorter equivalents; two each
    with minimums.
    """
    rows, columns = kind.groups(*shape)
    if kind.has_minimums:
        return [(rows, columns, 2)]
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
        if rows == 1:
            shapes.append(())
    return shapes


def group_text(kind: WeightFormat, shape: tuple[int, int]) -> str:
    """A text for messages: what the values of `group_shapes` apply to."""
    rows, columns = (str(size) if size else "all" for size in (kind.rows, kind.columns))
    beside = " and a minimum" if kind.has_minimums else ""
    return f"one{beside} for {rows} rows and {columns} columns of a weight {list(shape)}"


def check_multiple(name: str, what: str, count: int, of: int) -> None:
    """Raise ValueError unless `count` is a multiple of `of`, as the packing requires."""
    if count % of:
        raise ValueError(f"{name} has {count} {what}: its packing takes a multiple of {of}")


def check_range(name: str, what: str, values: Tensor, least: int, most: int) -> None:
    """Raise ValueError, with the first value and its place, if any is out of [least, most]."""
    wrong = (values < least) | (values > most)
    if _is_any(wrong):
        where = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name} has {int(wrong.sum())} {what} out of range, the first "
            f"{shown(values[tuple(where)].item())} at {where}: they are in [{least}, {most}]"
        )


def check_no_nan(name: str, codes: Tensor) -> None:
    """Raise ValueError, with the first place, if any code of e4m3 [M, K] is a NaN.

    Decode kernels only shift a code's bits, so a NaN would become a number there, unlike in other
    code.
    """
    if codes.is_meta:
        return
    # In slices: temporaries are as large as the slice.
    for start in range(0, len(codes), _ROWS_AT_ONCE):
        wrong = codes[start : start + _ROWS_AT_ONCE].view(torch.uint8) & _NAN == _NAN
        if _is_any(wrong):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{name} has a NaN at {[start + row, column]} of {list(codes.shape)} codes of e4m3"
            )


def _is_any(wrong: Tensor) -> bool:
    """Whether any is true; values on the device "meta" are not known."""
    return not wrong.is_meta and bool(wrong.any())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
