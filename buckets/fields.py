"""The field table of static buffers: a description of each tensor, and the layout of a group's
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch

Owner = Literal["host", "device"]
"""Who changes a field: the host, by loading it, or the device, in a replay."""

ALIGNMENT = 64  # bytes; every field starts at a multiple of it

NUMPY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The dtypes that host-owned fields may have, and NumPy's for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One row of the table: a tensor of `shape` (lanes first) and `dtype`, filled with `pad`.

    `meaning` is for people: it describes the values and the pad value. The host-owned fields of one
    `group` are copied together. Processes that work together have the same values in a `replicated`
    field. A field is not replicated if its padded lanes may hold anything, or if each process has
    its own part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: Owner = "host"
    pad: int | float = 0
    meaning: str = ""
    group: str = ""
    replicated: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def field_groups(fields: Sequence[Field]) -> list[list[Field]]:
    """The host-owned fields, by group."""
    owned = [field for field in fields if field.owner == "host"]
    names = dict.fromkeys(field.group for field in owned)
    return [[field for field in owned if field.group == name] for name in names]


def buffer_bytes(fields: Sequence[Field]) -> tuple[int, int]:
    """Bytes that `StaticBuffers` of these fields takes on the device, and how many of them the host
    owns. The host's image and each staging block take the host-owned bytes again.
    """
    owned = sum(layout(group)[1] for group in field_groups(fields))
    return owned + sum(field.nbytes for field in fields if field.owner == "device"), owned


def layout(fields: list[Field]) -> tuple[dict[str, int], int]:
    """Byte offset of each field in the shared block, and the block's size."""
    offsets: dict[str, int] = {}
    end = 0
    for field in fields:
        offsets[field.name] = end
        end += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end
