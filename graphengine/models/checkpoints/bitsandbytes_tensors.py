"""Weights of bitsandbytes in 4 bits, NF4 and FP4, read as values in their original dtype.

Each block of consecutive values has one scale. The codes stand for 16 numbers of the file's own
table, which no kernel here decodes, so that such weights are widened while they are read.
The layout is that of `QuantState.as_dict(packed=True)` in bitsandbytes.functional.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphengine.models.checkpoints.json_files import parse_json_object
from graphengine.models.checkpoints.tensor_files import TensorInfo
from graphengine.options.checks import INT32_MAX, is_finite, is_int, is_number, shown
from graphengine.options.devices import DTYPES

log = logging.getLogger(__name__)

_STATE = "quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_MOST_STATE_BYTES = 4096
_MOST_BLOCK = 1 << 16
_MIB = 2**20


class FourBits(NamedTuple):
    """A weight in 4 bits.

    codes          the tensor of codes as the file has it, two in a byte: the first in the upper
                   half
    beside         the tensors that belong to it, by their last names
    shape          of the weight
    dtype          of the weight before quantisation, to which it is widened
    block          consecutive values that share a scale
    nested_block   consecutive scales that share a scale of their own; 0: scales are in float32
    nested_offset  added to scales that have scales
    """

    codes: TensorInfo
    beside: Mapping[str, TensorInfo]
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int
    nested_block: int
    nested_offset: float

    @property
    def widened(self) -> TensorInfo:
        """The weight as it is read."""
        return TensorInfo(shape=self.shape, dtype=self.dtype, file=self.codes.file)

    def values(self, name: str, read: Callable[[str, TensorInfo], Tensor]) -> Tensor:
        """The weight's values, computed in float32 and rounded once to its dtype.

        read  returns a tensor by its stored name

        ValueError for scales, or numbers that codes stand for, that are NaN or infinite.
        """
        beside = {end: read(f"{name}.{end}", info) for end, info in self.beside.items()}
        for end, numbers in beside.items():
            wrong = int((~numbers.isfinite()).sum())
            if wrong:
                raise ValueError(
                    f"{name}.{end} has {wrong} of {numbers.numel()} numbers that are not finite"
                )
        scales = beside["absmax"]
        if self.nested_block:
            scales = beside["nested_quant_map"][scales.int()]
            scales = _scaled(scales, beside["nested_absmax"], self.nested_block)
            scales = scales + self.nested_offset
        table = beside["quant_map"]
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=-1)
        packed = read(name, self.codes).contiguous().view(torch.uint8).flatten()
        values = pairs[packed.int()].flatten()[: math.prod(self.shape)]
        return _scaled(values, scales, self.block).to(self.dtype).reshape(self.shape)


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of consecutive values by its scale; the last block may be shorter."""
    blocks = functional.pad(values, (0, -len(values) % block)).view(-1, block)
    return (blocks * scales.flatten()[:, None]).flatten()[: len(values)]


def four_bit_weights(
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str, TensorInfo], Tensor]
) -> dict[str, FourBits]:
    """The weights in 4 bits among a checkpoint's tensors, by their stored names.

    path  the checkpoint's, for errors
    read  returns a tensor by its stored name; only the small descriptions are read

    ValueError, with names and numbers, for a description that is damaged, or differs from the
    shapes and dtypes of the tensors beside it.
    """
    found = {}
    for name, info in tensors.items():
        weight, dot, kind = name.rpartition(f".{_STATE}")
        if not dot:
            continue
        try:
            if kind not in _KINDS:
                raise ValueError(f"{name} is in {kind!r}: {' and '.join(_KINDS)} are read")
            if weight in found:
                raise ValueError(f"{weight} is in {' and '.join(_KINDS)}: only one can be true")
            found[weight] = _described(tensors, weight, name, _state(name, info, read))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


def without_parts(
    tensors: Mapping[str, TensorInfo], weights: Mapping[str, FourBits]
) -> dict[str, TensorInfo]:
    """A checkpoint's tensors, with these weights in place of the tensors that store them."""
    parts = {f"{name}.{end}" for name, weight in weights.items() for end in weight.beside}
    states = {f"{name}.{_STATE}{kind}" for name in weights for kind in _KINDS}
    kept = {name: info for name, info in tensors.items() if name not in parts | states}
    return kept | {name: weight.widened for name, weight in weights.items()}


def log_four_bits(path: Path, weights: Mapping[str, FourBits]) -> None:
    """Log how much memory the weights take."""
    if weights:
        before = sum(weight.codes.nbytes for weight in weights.values())
        after = sum(math.prod(weight.shape) * 2 for weight in weights.values())
        log.info(
            "%s: %d weights of bitsandbytes in 4 bits are widened to 16 bits or rounded again: "
            "%.1f MiB become %.1f",
            path,
            len(weights),
            before / _MIB,
            after / _MIB,
        )


def _state(
    name: str, info: TensorInfo, read: Callable[[str, TensorInfo], Tensor]
) -> dict[str, Any]:
    """The description of a weight: JSON in bytes."""
    if info.dtype != torch.uint8 or info.nbytes > _MOST_STATE_BYTES:
        raise ValueError(
            f"{name} has {info.nbytes} bytes in {info.dtype}: a description is JSON in uint8 of "
            f"at most {_MOST_STATE_BYTES}"
        )
    return parse_json_object(bytes(read(name, info).flatten().tolist()), name)


def _described(
    tensors: Mapping[str, TensorInfo], weight: str, name: str, state: Mapping[str, Any]
) -> FourBits:
    shape, dtype = state.get("shape"), state.get("dtype")
    if not (isinstance(shape, list) and shape and all(map(_is_size, shape))):
        raise ValueError(f"{name} has shape={shown(shape)}: must be sizes in [1, {INT32_MAX}]")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has dtype={shown(dtype)}: must be one of {', '.join(DTYPES)}")
    block = _block(name, state, "blocksize")
    nested = _block(name, state, "nested_blocksize") if "nested_blocksize" in state else 0
    offset = state.get("nested_offset", 0.0)
    if not is_number(offset) or not is_finite(offset):
        raise ValueError(f"{name} has nested_offset={shown(offset)}: must be a finite number")
    count = math.prod(shape)
    blocks = -(-count // block)
    wanted = {
        "absmax": (blocks, torch.uint8 if nested else torch.float32),
        "quant_map": (16, torch.float32),
    }
    if nested:
        wanted["nested_absmax"] = (-(-blocks // nested), torch.float32)
        wanted["nested_quant_map"] = (256, torch.float32)
    for end, (size, kind) in wanted.items():
        _check(tensors, f"{weight}.{end}", size, kind, shape)
    codes = tensors.get(weight)
    if codes is None or codes.nbytes != -(-count // 2):
        given = "is missing" if codes is None else f"has {codes.nbytes} bytes"
        raise ValueError(
            f"{weight} {given}: a weight {shape} in 4 bits takes {-(-count // 2)} bytes"
        )
    beside = {end: tensors[f"{weight}.{end}"] for end in wanted}
    return FourBits(codes, beside, tuple(shape), DTYPES[dtype], block, nested, float(offset))


def _is_size(value: object) -> bool:
    return is_int(value) and 1 <= value <= INT32_MAX


def _block(name: str, state: Mapping[str, Any], key: str) -> int:
    size = state.get(key)
    if not is_int(size) or not 1 <= size <= _MOST_BLOCK:
        raise ValueError(f"{name} has {key}={shown(size)}: must be in [1, {_MOST_BLOCK}]")
    return int(size)


def _check(
    tensors: Mapping[str, TensorInfo], name: str, size: int, dtype: torch.dtype, shape: list[int]
) -> None:
    info = tensors.get(name)
    if info is None:
        raise ValueError(f"{name} is missing: it belongs to a weight {shape} in 4 bits")
    if math.prod(info.shape) != size or info.dtype != dtype:
        raise ValueError(
            f"{name} has {math.prod(info.shape)} values in {info.dtype}: a weight {shape} takes "
            f"{size} in {dtype}"
        )
