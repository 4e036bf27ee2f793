"""Safetensors files that other processes may read at any time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


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
