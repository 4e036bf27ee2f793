"""Checks of a caller's tensors and arrays: dense with values, or a ValueError that describes them.

The checks of numbers are in `checks.py`, as commands need them before they import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.options.checks import shown


def plain_tensor(name: str, given: Tensor | NDArray[Any]) -> Tensor:
    """A caller's tensor without its history, or a copy of an array of any strides and byte order.

    ValueError for a tensor that is not dense or has no values, and for an array of anything but
    numbers and booleans.
    """
    if isinstance(given, np.ndarray):
        if given.dtype.kind not in "biufc":
            raise ValueError(f"{name} must be numbers, not {shown(given)} of {given.dtype}")
        native = given.dtype.newbyteorder("=")
        # Torch has no wider floats.
        narrow = {np.longdouble: np.float64, np.clongdouble: np.complex128}.get(native.type, native)
        return torch.from_numpy(np.array(given, dtype=narrow, order="C"))
    if given.layout != torch.strided or given.is_meta or given.is_nested or given.is_quantized:
        kind = "nested " if given.is_nested else "quantised " if given.is_quantized else ""
        raise ValueError(
            f"{name} must be dense, with values, not a {kind}tensor of {given.layout} and "
            f"{given.dtype} on {given.device}"
        )
    return given.detach()


def holds_integers(tensor: Tensor) -> bool:
    """Whether its dtype is an integer one; booleans are not integers here."""
    other = tensor.is_floating_point() or tensor.is_complex()
    return not other and tensor.dtype != torch.bool
