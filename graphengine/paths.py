"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_user(path: str | os.PathLike[str]) -> Path:
    """The path with `~` and `~user` expanded. ValueError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"path {os.fspath(path)!r}: {error}") from error
