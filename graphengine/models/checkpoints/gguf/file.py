"""Reads the header of a GGUF file, llama.cpp's format: metadata by key, and where each tensor lies.

Every count, length and offset is checked against the file's size before memory is taken for it.
The package `gguf` knows the formats of tensors; its own reader checks none of this.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from graphengine.options.checks import shown, some

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Formats of `struct` by the number of a metadata value's type; strings are 8, arrays are 9.
_NUMBERS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MOST_DIMENSIONS = 4
_MOST_PARTS = 10_000
# Least number of bytes of an entry: of a metadata value, and of a tensor.
_LEAST_VALUE, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


class GgufTensor(NamedTuple):
    """A tensor as the file describes it.

    shape   rows first, as in PyTorch
    kind    name of its format: "F16", "Q4_0", ...
    block   values that are stored together, along the last dimension
    start   its first byte in the file
    nbytes  its bytes in the file
    file    where it lies: a split model has several files
    """

    shape: tuple[int, ...]
    kind: str
    block: int
    start: int
    nbytes: int
    file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """The header of a GGUF file, with the tensors of all parts if it is split. Holds no open file.

    path  the file, or the first part
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def value(self, key: str, *kinds: type) -> Any:
        """The value of a metadata key. ValueError if it is missing, or of none of these types."""
        if key not in self.metadata:
            raise ValueError(f"{self.path} lacks the metadata key {key}")
        found = self.metadata[key]
        if type(found) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{self.path} has {key}={shown(found)}: must be {wanted}")
        return found


def gguf_package(file: Path) -> Any:
    """The package `gguf`. ValueError, with what to install, where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"{file} is a GGUF file, and reading one needs the package gguf: pip install '.[gguf]' "
            f"in the checkout of graphengine, or pip install gguf"
        ) from error
    return gguf


def is_gguf(path: Path) -> bool:
    """Whether this is a file whose name ends with .gguf."""
    return path.suffix == ".gguf" and path.is_file()


def read_gguf(path: Path) -> GgufFile:
    """Read the header, and those of the other parts if the file is the first part of a split one.

    ValueError, with numbers, for a file that is damaged or not supported, and for parts that are
    missing, or do not belong together.
    """
    package = gguf_package(path)
    _refuse_other_part(path)
    first = _read_header(path, package)
    count = _parts_of(first)
    if count == 1:
        return first
    tensors = dict(first.tensors)
    for number, other in enumerate(_other_parts(path, count), start=1):
        part = _read_header(other, package)
        own = part.metadata.get("split.no"), part.metadata.get("split.count")
        if own != (number, count):
            raise ValueError(
                f"{other} has split.no={own[0]} and split.count={own[1]}: part {number + 1} of "
                f"{count} has {number} and {count}"
            )
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise ValueError(f"{other} has tensors of an earlier part again: {some(twice)}")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(
            f"the {count} parts of {path} have {len(tensors)} tensors: split.tensors.count is "
            f"{total}"
        )
    return replace(first, tensors=tensors)


def _read_header(path: Path, package: Any) -> GgufFile:
    with path.open("rb") as stream:
        if path.stat().st_size < 24:
            raise ValueError(f"{path} is truncated: {path.stat().st_size} bytes, a header takes 24")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read(package)


def _parts_of(file: GgufFile) -> int:
    """How many files a model has, of which this one is the first."""
    count, number = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
    if type(count) is not int or not 1 <= count <= _MOST_PARTS or number != 0:
        raise ValueError(
            f"{file.path} has split.count={shown(count)} and split.no={shown(number)}: a first "
            f"part has 1 to {_MOST_PARTS}, and 0"
        )
    return count


def _other_parts(path: Path, count: int) -> list[Path]:
    """The files of parts 2 and on. ValueError for a first part of another name, or a lost part."""
    found = _PART.search(path.name)
    if found is None or (int(found[1]), int(found[2])) != (1, count):
        raise ValueError(
            f"{path} is part 1 of {count} of a split GGUF file: its name must end with "
            f"-00001-of-{count:05}.gguf, so that the others are found"
        )
    stem = path.name[: found.start()]
    parts = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    lost = [part.name for part in parts if not part.is_file()]
    if lost:
        raise ValueError(f"{path} lacks {len(lost)} of {count - 1} other parts: {some(lost)}")
    return parts


def _refuse_other_part(path: Path) -> None:
    part = _PART.search(path.name)
    if part is not None and int(part[1]) > 1:
        first = f"{path.name[: part.start()]}-00001-of-{part[2]}.gguf"
        raise ValueError(
            f"{path} is part {int(part[1])} of {int(part[2])} of a split GGUF file: open {first}"
        )


class _Reader:
    """Reads a mapped header from its start."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self, package: Any) -> GgufFile:
        magic = self._bytes(4, "the magic number")
        if magic != _MAGIC:
            raise ValueError(f"{self._path} is no GGUF file: it begins with {magic!r}")
        version = self._number("I", "the version")
        if version & 0xFFFF == 0:
            raise ValueError(f"{self._path} is a big-endian GGUF file: only little-endian is read")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise ValueError(f"{self._path} has GGUF version {version}: {known} are read")
        tensors = self._count("the number of tensors", _LEAST_TENSOR)
        metadata = self._metadata(self._count("the number of metadata keys", _LEAST_VALUE))
        found = [self._entry(package) for _ in range(tensors)]
        start = self._data_start(metadata)
        return GgufFile(
            path=self._path, metadata=metadata, tensors=self._placed(found, start, metadata)
        )

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key")
            if key in metadata:
                raise ValueError(f"{self._path} has the metadata key {shown(key)} twice")
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> Any:
        kind = self._number("I", f"the type of {key}")
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(self._format(kind, key), key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", f"the type of {key}")
        if kind == _STRING:
            return self._strings(key)
        form = self._format(kind, key)
        size = struct.calcsize(f"<{form}")
        count = self._count(f"the length of {key}", size)
        return list(struct.unpack(f"<{count}{form}", self._bytes(count * size, key)))

    def _strings(self, key: str) -> list[str]:
        """An array of strings: a tokenizer has hundreds of thousands."""
        count = self._count(f"the length of {key}", _LENGTH.size)
        data, at, size, texts = self._data, self._at, len(self._data), []
        for number in range(count):
            start = at + _LENGTH.size
            at = start + (_LENGTH.unpack_from(data, at)[0] if start <= size else 0)
            if at > size:
                raise ValueError(
                    f"{self._path} is truncated: string {number} of {count} of {key} ends at byte "
                    f"{at}, the file has {size}"
                )
            texts.append(data[start:at])
        self._at = at
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path} has {key} that is not UTF-8: {error}") from error

    def _format(self, kind: int, key: str) -> str:
        if kind >= len(_NUMBERS) or kind in (_STRING, _ARRAY):
            raise ValueError(
                f"{self._path} has {key} of the metadata type {kind}: 0 to {len(_NUMBERS) - 1} "
                f"are known, and arrays hold numbers or strings"
            )
        return _NUMBERS[kind]

    def _entry(self, package: Any) -> tuple[str, GgufTensor]:
        """A tensor's name and place, counted from the start of the data."""
        name = self._string("a tensor's name")
        dimensions = self._number("I", f"the dimensions of {name}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(
                f"{self._path} gives tensor {shown(name)} {dimensions} dimensions: "
                f"1 to {_MOST_DIMENSIONS} are possible"
            )
        sizes = [self._number("Q", f"the shape of {name}") for _ in range(dimensions)]
        number = self._number("I", f"the type of {name}")
        offset = self._number("Q", f"the place of {name}")
        try:
            kind = package.GGMLQuantizationType(number)
        except ValueError as error:
            known = ", ".join(f"{each.name} ({each})" for each in package.GGML_QUANT_SIZES)
            raise ValueError(
                f"{self._path} has tensor {shown(name)} of the unknown type {number}; "
                f"gguf knows {known}"
            ) from error
        block, nbytes = package.GGML_QUANT_SIZES[kind]
        if min(sizes) < 1 or sizes[0] % block:
            raise ValueError(
                f"{self._path} has tensor {shown(name)} with shape {sizes[::-1]}: rows of "
                f"{kind.name} take a multiple of {block} values"
            )
        size = math.prod(sizes) // block * nbytes
        return name, GgufTensor(
            tuple(sizes[::-1]), kind.name, block, start=offset, nbytes=size, file=self._path
        )

    def _data_start(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(
                f"{self._path} has general.alignment={shown(alignment)}: must be a power of two, "
                f"8 or more"
            )
        return -(-self._at // alignment) * alignment

    def _placed(
        self, entries: list[tuple[str, GgufTensor]], start: int, metadata: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        """The tensors with their places in the file: one follows the other, aligned."""
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        found: dict[str, GgufTensor] = {}
        end, before = 0, ""
        for name, tensor in sorted(entries, key=lambda entry: entry[1].start):
            if name in found:
                raise ValueError(f"{self._path} has two tensors named {shown(name)}")
            expected = -(-end // alignment) * alignment
            if tensor.start != expected:
                raise ValueError(
                    f"{self._path} puts tensor {shown(name)} at byte {tensor.start} of the data: "
                    f"expected {expected}, after {shown(before) if before else 'the header'}"
                )
            end, before = tensor.start + tensor.nbytes, name
            if start + end > len(self._data):
                raise ValueError(
                    f"{self._path} is truncated: tensor {shown(name)} ends at byte {start + end}, "
                    f"the file has {len(self._data)}"
                )
            found[name] = tensor._replace(start=start + tensor.start)
        # The first part of a split file may have the metadata alone.
        if not found and "split.count" not in metadata:
            raise ValueError(f"{self._path} holds no tensor")
        return found

    def _string(self, what: str) -> str:
        length = self._count(f"the length of {what}", 1)
        text = self._bytes(length, what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path} has {what} that is not UTF-8: {error}") from error

    def _count(self, what: str, least: int) -> int:
        """Read a count of entries of at least `least` bytes each. An error if the file is too short
        for them.
        """
        count: int = self._number("Q", what)
        left = len(self._data) - self._at
        if count * least > left:
            raise ValueError(
                f"{self._path} is truncated or damaged: {what} is {count}, which takes "
                f"{count * least} bytes or more, and {left} of {len(self._data)} are left"
            )
        return count

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}"), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        start = self._at
        if start + count > len(self._data):
            raise ValueError(
                f"{self._path} is truncated: {what} takes the bytes up to {start + count}, "
                f"the file has {len(self._data)}"
            )
        self._at = start + count
        return self._data[start : self._at]


def one_gguf(directory: Path) -> Path | None:
    """The folder's one GGUF file, or the first part of it, projectors of images apart; None: it has
    none.

    ValueError names the files where there are several.
    """
    files = sorted(directory.glob("*.gguf"))
    found = [file for file in files if not file.name.startswith("mmproj")]
    wholes = [file for file in found if not _is_later_part(file)]
    if len(wholes) > 1:
        names = some([file.name for file in wholes], 5)
        raise ValueError(f"{directory} has {len(wholes)} GGUF files: open one of {names}")
    if found and not wholes:
        _refuse_other_part(found[0])
    return wholes[0] if wholes else None


def _is_later_part(file: Path) -> bool:
    part = _PART.search(file.name)
    return part is not None and int(part[1]) > 1
