"""A GGUF file's blocks as integers with scales, and with minimums where there are any.

Their products, less the minimums, are exactly the values that the package `gguf` gives. Blocks lie
as llama.cpp's `ggml-common.h` has them.

Letters: M rows, K columns, n blocks of a row, G groups of columns that share a scale, S blocks of
columns that share a factor on scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphengine.kernels.linear.quantised import packed_halves, unpacked_halves
from graphengine.models.checkpoints.gguf.file import gguf_package

_HALF_ONE = b"\x00\x3c"


class GroupForm(NamedTuple):
    """The form that the blocks of a weight are translated to.

    bits      of a code: 8 in int8, or 4, two in a byte. Codes of 4 bits are stored plus 8; with
              minimums they are numbers from 0 up
    columns   columns that share a scale
    scales    dtype that holds the scales exactly; uint8: they are powers of two, and codes are
              numbers of MXFP4
    minimums  whether each group has a minimum, too
    block     columns that share a factor on scales, and one on minimums; 0: there are none
    """

    bits: Literal[8, 4]
    columns: int
    scales: torch.dtype
    minimums: bool = False
    block: int = 0

    @property
    def pair(self) -> tuple[int, ...]:
        """Last axes of scales, and of factors: the minimum is beside the scale."""
        return (2,) if self.minimums else ()


class _ByOnes(NamedTuple):
    """A format that the package `gguf` decodes.

    So codes are obtained as the values of blocks with all scales set to 1, and scales as the values
    of blocks with all codes set to 1.

    scales_of_one bytes that make all scales 1, by their place in a block; none: after its scale a
                  block has a byte for each code, or the first half of its codes in lower halves of
                  bytes, and the others in upper ones
    codes_of_one  bytes that make all codes 1, likewise; none: a block begins with its scale
    """

    form: GroupForm
    scales_of_one: Mapping[int, bytes] = MappingProxyType({})
    codes_of_one: Mapping[int, bytes] = MappingProxyType({})


class _ByBits(NamedTuple):
    """A format that is decoded here, from blocks uint8 [M, n, bytes].

    codes    one number a byte, [M, n, columns of a block]
    scales   [M, n, groups of a block], and 2 with minimums
    factors  first bytes of the factor on scales, and of the factor on minimums
    """

    form: GroupForm
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]
    factors: tuple[int, ...] = ()


# Scales of the last two are products with an integer of 6 bits a group, which is stored with 32
# added: in IQ4_XS the upper bits of 8, then the lower halves; in Q3_K the lower halves of 16 of
# them, then their upper bits.
_BY_ONES: Mapping[str, _ByOnes] = {
    "Q8_0": _ByOnes(GroupForm(8, 32, torch.float16)),
    "Q4_0": _ByOnes(GroupForm(4, 32, torch.float16)),
    "Q5_0": _ByOnes(GroupForm(8, 32, torch.float16), {0: _HALF_ONE}),
    "IQ4_NL": _ByOnes(GroupForm(8, 32, torch.float16), {0: _HALF_ONE}),
    "IQ4_XS": _ByOnes(
        GroupForm(8, 32, torch.float32),
        {0: _HALF_ONE, 2: b"\xaa" * 2 + b"\x11" * 4},
        {8: b"\x88" * 128},
    ),
    "Q3_K": _ByOnes(
        GroupForm(4, 16, torch.float32),
        {96: b"\x11" * 8 + b"\xaa" * 4, 108: _HALF_ONE},
        {0: b"\xff" * 32 + b"\x55" * 64},
    ),
}


def _nibbles(stored: Tensor, width: int) -> Tensor:
    """Numbers of 4 bits: every `width` bytes hold `width` numbers in their lower halves, then as
    many in the upper halves.
    """
    parts = stored.reshape(*stored.shape[:-1], -1, width)
    return torch.cat((parts & 15, parts >> 4), dim=-1).flatten(-2)


def _pairs(stored: Tensor) -> Tensor:
    """Numbers of 2 bits: every 32 bytes hold 32 numbers in their lowest two bits, then 32 in the
    next two, and so on.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (stored.reshape(*stored.shape[:-1], -1, 1, 32) >> shifts & 3).flatten(-3)


def _fifth_bits(stored: Tensor, low: Tensor) -> Tensor:
    """Numbers whose lower 4 bits are `low`: bit i of byte j is number 32 * i + j's fifth."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    return low | (stored.unsqueeze(-2) >> shifts & 1).flatten(-2) << 4


def _bits(stored: Tensor) -> Tensor:
    """The bits of bytes, the lowest first."""
    return (stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _halves(blocks: Tensor) -> Tensor:
    """A scale and an offset that is added, float16, at the beginning of blocks: [M, n, 1, 2]."""
    found = blocks[..., :4].contiguous().view(torch.float16)
    return torch.stack((found[..., :1], -found[..., 1:]), dim=-1)


def _six_bits(blocks: Tensor) -> Tensor:
    """Eight scales and their minimums of 6 bits, from byte 4 of blocks on: [M, n, 8, 2].

    The last four of each have their upper two bits in the bytes of the first four, above these.
    """
    scales, minimums, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((scales & 63, last & 15 | scales >> 6 << 4), dim=-1)
    minimums = torch.cat((minimums & 63, last >> 4 | minimums >> 6 << 4), dim=-1)
    return torch.stack((scales, minimums), dim=-1).view(torch.int8)


_ADDED = GroupForm(4, 32, torch.float16, minimums=True)
_SUPER = GroupForm(4, 32, torch.int8, minimums=True, block=256)
_BY_BITS: Mapping[str, _ByBits] = {
    "MXFP4": _ByBits(
        GroupForm(4, 32, torch.uint8),
        lambda blocks: _nibbles(blocks[..., 1:], 16),
        lambda blocks: blocks[..., :1],
    ),
    "Q4_1": _ByBits(_ADDED, lambda blocks: _nibbles(blocks[..., 4:], 16), _halves),
    "Q5_1": _ByBits(
        _ADDED._replace(bits=8),
        lambda blocks: _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4,
        _halves,
    ),
    "Q2_K": _ByBits(
        _SUPER._replace(columns=16),
        lambda blocks: _pairs(blocks[..., 16:80]),
        lambda blocks: torch.stack((blocks[..., :16] & 15, blocks[..., :16] >> 4), dim=-1),
        (80, 82),
    ),
    "Q4_K": _ByBits(_SUPER, lambda blocks: _nibbles(blocks[..., 16:], 32), _six_bits, (0, 2)),
    "Q5_K": _ByBits(
        _SUPER._replace(bits=8),
        lambda blocks: _fifth_bits(blocks[..., 16:48], _nibbles(blocks[..., 48:], 32)),
        _six_bits,
        (0, 2),
    ),
    "Q6_K": _ByBits(
        GroupForm(8, 16, torch.int8, block=256),
        lambda blocks: (
            (_nibbles(blocks[..., :128], 64) | _pairs(blocks[..., 128:192]) << 4).view(torch.int8)
            - 32
        ),
        lambda blocks: blocks[..., 192:208],
        (208,),
    ),
}
FORMS: Mapping[str, GroupForm] = {
    **{kind: by_ones.form for kind, by_ones in _BY_ONES.items()},
    **{kind: by_bits.form for kind, by_bits in _BY_BITS.items()},
}
"""The formats whose codes are kept, and the form that each is translated to."""


def joined_form(forms: Sequence[GroupForm]) -> GroupForm | None:
    """The form in which all of these can be stored, to the bit; None: there is none."""
    first = forms[0]
    if all(form == first for form in forms):
        return first
    if any(form.scales == torch.uint8 for form in forms):
        return None
    minimums = any(form.minimums for form in forms)
    blocks = {form.block for form in forms}
    is_one = len({form.scales for form in forms}) == 1 and len(blocks) == 1
    as_stored = all((form.bits, form.minimums) == (4, minimums) for form in forms)
    return GroupForm(
        bits=4 if as_stored else 8,
        columns=min(form.columns for form in forms),
        scales=first.scales if is_one else torch.float32,
        minimums=minimums,
        block=first.block if is_one else 0,
    )


def dequantised(path: Path, rows: Any, kind: str) -> Tensor:
    """The values of rows of blocks, uint8 [..., bytes]: float32 [..., K]."""
    package = gguf_package(path)
    return torch.from_numpy(package.dequantize(rows, package.GGMLQuantizationType[kind]))


def codes_of(path: Path, blocks: Any, kind: str, form: GroupForm) -> Tensor:
    """Codes [M, K], or two in a byte, of blocks [M, n, bytes]."""
    if kind in _BY_ONES:
        codes, own = _codes_by_ones(path, blocks, kind), _BY_ONES[kind].form
        if own.bits == form.bits:
            return codes
        return unpacked_halves(codes).view(torch.int8) - 8
    codes = _BY_BITS[kind].codes(torch.from_numpy(blocks)).flatten(1)
    return packed_halves(codes) if form.bits == 4 else codes.view(torch.int8)


def scales_of(path: Path, blocks: Any, kind: str, form: GroupForm) -> Tensor:
    """Scales [M, G], or with minimums [M, G, 2], of blocks [M, n, bytes]."""
    own = FORMS[kind]
    if kind in _BY_ONES:
        scales = _scales_by_ones(path, blocks, kind)
    else:
        stored = torch.from_numpy(blocks)
        scales = _BY_BITS[kind].scales(stored).contiguous().view(own.scales).flatten(1, 2)
    if form.minimums and not own.minimums:
        scales = torch.stack((scales, torch.zeros_like(scales)), dim=-1)
    if own.block and not form.block:
        factors = factors_of(blocks, kind, form).float()
        scales = scales.float() * factors.repeat_interleave(own.block // own.columns, dim=1)
    if own.columns > form.columns:
        scales = scales.repeat_interleave(own.columns // form.columns, dim=1)
    return scales.to(form.scales)


def factors_of(blocks: Any, kind: str, form: GroupForm) -> Tensor:
    """Factors on scales, float16 [M, S]; with factors on minimums [M, S, 2]."""
    stored = torch.from_numpy(blocks)
    places = _BY_BITS[kind].factors
    found = [stored[..., at : at + 2].contiguous().view(torch.float16)[..., 0] for at in places]
    if form.minimums and len(found) == 1:
        found.append(torch.zeros_like(found[0]))
    return torch.stack(found, dim=-1) if form.minimums else found[0]


def _codes_by_ones(path: Path, blocks: Any, kind: str) -> Tensor:
    (form, ones, _) = _BY_ONES[kind]
    if not ones:
        stored = torch.from_numpy(blocks[..., 2:].copy())
        if form.bits == 8:
            return stored.flatten(1).view(torch.int8)
        return packed_halves(_nibbles(stored, 16).flatten(1))
    values = _with(path, blocks, kind, ones)
    if form.bits == 8:
        return values.to(torch.int8)
    return packed_halves((values + 8).to(torch.uint8))


def _scales_by_ones(path: Path, blocks: Any, kind: str) -> Tensor:
    (form, _, ones) = _BY_ONES[kind]
    if not ones:
        return torch.from_numpy(blocks[..., :2].copy()).view(form.scales).flatten(1)
    return _with(path, blocks, kind, ones)[:, :: form.columns].to(form.scales)


def _with(path: Path, blocks: Any, kind: str, ones: Mapping[int, bytes]) -> Tensor:
    """The values of blocks after these bytes are replaced."""
    blocks = blocks.copy()
    for start, content in ones.items():
        blocks[..., start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
    return dequantised(path, blocks.reshape(blocks.shape[0], -1), kind)
