"""Safetensors files: finding a directory's tensors, and writing a file atomically.

A file's header is fully checked against the file before any weight is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor

from graphengine.models.checkpoints.json_files import parse_json_object, read_json_object
from graphengine.options.checks import some

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
# Advice about pickled weights.
_CONVERSION = (
    ". If you trust the files, this writes such a folder, NEW: "
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('FOLDER', dtype='auto').save_pretrained('NEW', safe_serialization=True)\"; "
    "copy the tokenizer's files to it"
)
# Dtypes of weights.
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WEIGHT_DTYPES = tuple(_DTYPES.values())
"""Dtypes of weights that are not quantised."""
# Dtypes of other tensors, such as the offsets of a draft vocabulary and masks.
_OTHER_DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in (_DTYPES | _OTHER_DTYPES).items()}
"""Names of dtypes in a header."""
# safetensors itself refuses larger headers.
_MAX_HEADER_BYTES = 100_000_000
MOST_NAMED = 5
"""Most tensors that a message names: a file may lack thousands."""


class TensorSlice(NamedTuple):
    """Some spans of the `whole` values that a tensor has along `axis`.

    spans  (start, length) of each, in the order in which they are read
    """

    axis: int
    spans: tuple[tuple[int, int], ...]
    whole: int

    @property
    def length(self) -> int:
        """Values of all spans."""
        return sum(length for _, length in self.spans)

    def narrowed(self, inner: TensorSlice) -> TensorSlice:
        """The part `inner` of this part, as a part of the whole."""
        assert inner.axis == self.axis and inner.whole == self.length, f"{inner=} of {self}"
        spans = []
        for start, length in inner.spans:
            at = 0
            for own, count in self.spans:
                low, high = max(start, at), min(start + length, at + count)
                if low < high:
                    spans.append((own + low - at, high - low))
                at += count
        return TensorSlice(self.axis, tuple(spans), self.whole)

    def part(self, tensor: Tensor) -> Tensor:
        """The tensor's values in the spans: a view if there is one span, else a copy."""
        parts = [tensor.narrow(self.axis, *span) for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


class ReorderedTensor(NamedTuple):
    """A tensor whose rows are a checkpoint's in another order.

    order  int64 `[rows]`, on the CPU: row i is the checkpoint's row `order[i]`
    """

    tensor: Tensor
    order: Tensor

    def place(self, rows: slice, values: Tensor) -> None:
        """Write some rows of the checkpoint where they belong."""
        places = torch.argsort(self.order)[rows].to(self.tensor.device)
        self.tensor[places] = values.to(self.tensor)


def spans_of(
    whole: Sequence[int], part: Sequence[int], rank: int, ranks: int
) -> tuple[tuple[int, int], ...]:
    """The (start, length) of a rank's part of each of several consecutive pieces. Pieces have the
    lengths `whole`, and `part` on one rank. Neighbouring ranks may have the same part.
    """
    spans, start = [], 0
    for length, own in zip(whole, part, strict=True):
        spans.append((start + rank * (length // own) // ranks * own, own))
        start += length
    return tuple(spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors file, or a part of it: `shape` is that of the `cut`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    cut: TensorSlice | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, cut: TensorSlice) -> TensorInfo:
        """The tensor, of which only this part is read; `cut` is relative to the part read so
        far.
        """
        ends = max(map(sum, cut.spans))
        assert ends <= cut.whole == self.shape[cut.axis], f"{cut=} of {self}"
        shape = self._shape_with(cut.axis, cut.length)
        return replace(self, shape=shape, cut=cut if self.cut is None else self.cut.narrowed(cut))

    @property
    def stored(self) -> TensorInfo:
        """The whole tensor, as the file has it."""
        if self.cut is None:
            return self
        return replace(self, shape=self._shape_with(self.cut.axis, self.cut.whole), cut=None)

    def _shape_with(self, axis: int, length: int) -> tuple[int, ...]:
        return (*self.shape[:axis], length, *self.shape[axis + 1 :])


def find_tensors(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of a directory's safetensors file, or those that an index of shards names.

    ValueError if there are none, or a file is damaged or in an unsupported format.
    """
    single, index = directory / _SINGLE_FILE, directory / _INDEX_FILE
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _read_sharded(index)
    others = sorted(f.name for f in directory.iterdir() if f.suffix in _OTHER_FORMATS)
    if others:
        pickled = any(name.endswith(".bin") for name in others)
        raise ValueError(
            f"{directory} has {some(others, MOST_NAMED)}: only safetensors are read "
            f"({_SINGLE_FILE}, or shards and {_INDEX_FILE}){_CONVERSION if pickled else ''}"
        )
    raise ValueError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")


def _read_sharded(index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ValueError(
                f"{index} puts tensor {name} into {shard!r}: "
                "must be the name of a .safetensors file beside the index"
            )
    headers = {}
    for shard in dict.fromkeys(weight_map.values()):
        file = index.parent / shard
        if not file.is_file():
            count = sum(value == shard for value in weight_map.values())
            raise ValueError(f"{index} names {shard} for {count} tensors, but there is no {file}")
        headers[shard] = read_header(file)
    astray = [
        f"{name} in {shard}" for name, shard in weight_map.items() if name not in headers[shard]
    ]
    if astray:
        raise ValueError(
            f"{index} names {len(astray)} tensors that are not there: {some(astray, MOST_NAMED)}"
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _is_plain_name(shard: str) -> bool:
    """Whether the name is that of a safetensors file in the index's own directory."""
    return shard.endswith(".safetensors") and not re.search(r"[/\\\0]", shard)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, the data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise ValueError(
                f"{file} is truncated or no safetensors file: it has {size} bytes, "
                f"8 and a header of {length} are needed"
            )
        if length > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{file} has a header of {length} bytes, the limit is {_MAX_HEADER_BYTES}"
            )
        text = stream.read(length)
    header = parse_json_object(text, f"the header of {file}")
    header.pop("__metadata__", None)
    if not header:
        raise ValueError(f"{file} holds no tensor")
    spans = {name: _parse_entry(file, name, entry) for name, entry in header.items()}
    _check_layout(file, {name: span for name, (_, span) in spans.items()}, size - 8 - length)
    return {name: info for name, (info, _) in spans.items()}


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """A header entry as (tensor, (begin, end)) with offsets into the data."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(span, 2):
        raise ValueError(f"{file} describes tensor {name} as {entry!r}: not a safetensors entry")
    dtypes = _DTYPES | _OTHER_DTYPES
    if dtype not in dtypes:
        raise ValueError(
            f"{file} has tensor {name} in {dtype} with shape {shape}: "
            f"tensors must be one of {', '.join(dtypes)}"
        )
    info = TensorInfo(shape=tuple(shape), dtype=dtypes[dtype], file=file)
    begin, end = span
    if end - begin != info.nbytes:
        raise ValueError(
            f"{file} gives tensor {name} {end - begin} bytes, but {dtype} with shape {shape} "
            f"takes {info.nbytes}"
        )
    return info, (begin, end)


def _check_layout(file: Path, spans: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    """Tensors follow each other without gap or overlap, from the first byte of data to the last."""
    position = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            raise ValueError(
                f"{file} puts tensor {name} at byte {begin} of the data: expected {position}"
            )
        if end > data_bytes:
            raise ValueError(
                f"{file} is truncated: tensor {name} ends at byte {end} of the data, "
                f"the file has {data_bytes}"
            )
        position = end
    if position != data_bytes:
        raise ValueError(f"{file} has {data_bytes} bytes of data, its tensors take {position}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_counts(value: Any, length: int | None = None) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and (length is None or len(value) == length)
        and all(_is_count(item) for item in value)
    )


def save_whole(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically: it appears whole or not at all.

    Errors pass through, usually OSError or SafetensorError, and leave no partial file.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        save_file(dict(tensors), unfinished, None if metadata is None else dict(metadata))
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink()
        raise
