"""Values of command-line options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from graphengine.options.table import read_integers


def integers(text: str, name: str, least: int = 1) -> list[int]:
    """Comma-separated integers from `least` (0 or 1) up. ValueError names the option and shows the
    text.
    """
    try:
        found = read_integers(text)
    except ValueError:
        found = ()
    if not found or min(found) < least:
        kind = "positive integers" if least else "integers from 0 up"
        raise ValueError(f"{name}={text!r} must be {kind}, comma-separated: {least},8,32")
    return list(found)


def check_out(path: Path, option: str = "--out") -> None:
    """ValueError unless this file can be written; an existing file is left unchanged."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder")
    is_new = not os.path.lexists(path)
    try:
        # Only the attempt shows it on every file system and for every user.
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()


def check_apart(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """ValueError if an option's output file is also another option's input or output file.

    Links are resolved; options without a path are ignored.
    """
    outputs = [(option, path) for option, path in written.items() if path is not None]
    others = [(option, path) for option, path in read.items() if path is not None]
    for option, path in outputs:
        for other, taken in others:
            if _same(path, taken):
                raise ValueError(f"{option} {path} is the file of {other} {taken}: name another")
        others.append((option, path))


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def tell_written(*paths: Path | None) -> None:
    """Say on standard error which files were written; None: that file was not asked for."""
    for path in paths:
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)


def write_out(path: Path, text: str, option: str = "--out") -> None:
    """Write a file. ValueError, with the option, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error
