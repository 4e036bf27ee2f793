"""Tell on standard error how a measurement goes, until its figures are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from graphengine.cli.terminal import columns, fit

_CLEAR = "\r\x1b[K"


class Progress:
    """Shows the current work, on a line that replaces the last one on a terminal.

    stream  where it is told; a stream that is no terminal gets a line each time. None: nowhere
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._width = None if stream is None else columns(stream)

    def doing(self, text: str) -> None:
        """Say which work begins now."""
        if self._stream is None:
            return
        if self._width is None:
            print(f"{text} ...", file=self._stream, flush=True)
            return
        # A line that is longer than the terminal could not be taken back.
        shown = f"{text} ..."[: self._width - 1]
        print(f"{_CLEAR}{shown}", end="", file=self._stream, flush=True)

    def done(self, text: str) -> None:
        """Say its result; the line stays."""
        if self._stream is not None:
            print(f"{self._clear()}{fit(text, self._width)}", file=self._stream, flush=True)

    def end(self) -> None:
        """Remove the line of the current work."""
        if self._stream is not None:
            print(self._clear(), end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "" if self._width is None else _CLEAR


SILENT = Progress(None)


@contextmanager
def told(*, quiet: bool) -> Iterator[Progress]:
    """Tell the progress in the block on standard error, unless `quiet`."""
    progress = SILENT if quiet else Progress(sys.stderr)
    try:
        yield progress
    finally:
        progress.end()
