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


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """A file's text in UTF-8, without a byte order mark; errors name the file as `what` and its
    path.

    FileNotFoundError where there is no such file, ValueError for one that cannot be read.
    """
    name = f"{what} {os.fspath(path)}"
    try:
        return expand_user(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
