"""Text that fits the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO


def columns(stream: TextIO | None = None) -> int | None:
    """The width of the terminal of `stream`, or standard output; None if it is no terminal."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def fit(text: str, width: int | None) -> str:
    """Break lines longer than `width` between words.

    The rest of a line is indented to where its text begins: after a name and spaces, if it has
    them.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    named = re.match(r" *\S+( \S+)*  +(?=\S)", line)
    indent = len(named[0]) if named else len(line) - len(line.lstrip())
    if indent > width // 2:
        indent = 2
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
