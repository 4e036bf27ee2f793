"""Values of command-line options."""

from __future__ import annotations

import os
from pathlib import Path


def integers(text: str, name: str, least: int = 1) -> list[int]:
    """Comma-separated integers from `least` (0 or 1) up. ValueError names the option and shows the
    text.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        kind = "positive integers" if least else "integers from 0 up"
        raise ValueError(f"{name}={text!r} must be {kind}, comma-separated: {least},8,32")
    return [int(part) for part in parts]


def check_out(path: Path, option: str = "--out") -> None:
    """ValueError unless this file can be written; one that is there stays as it is."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder")
    is_new = not os.path.lexists(path)
    try:
        # Nothing but the attempt tells it of every file system and user.
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()
