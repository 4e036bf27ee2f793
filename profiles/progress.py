"""Tell on standard error what a measurement is doing, until its figures are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from graphengine.cli.terminal import columns, fit

_CLEAR = "\r\x1b[K"


class Progress:
    """Tells what is being done, on a line that a terminal shows in place of the last one.

    stream  where it is told; a stream that is no terminal gets a line each time. None: nowhere
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._width = None if stream is None else columns(stream)

    def doing(self, text: str) -> None:
        """Say what begins now."""
        if self._stream is None:
            return
        if self._width is None:
            print(f"{text} ...", file=self._stream, flush=True)
            return
        # A line that is longer than the terminal could not be taken back.
        shown = f"{text} ..."[: self._width - 1]
        print(f"{_CLEAR}{shown}", end="", file=self._stream, flush=True)

    def done(self, text: str) -> None:
        """Say what has come of it; the line stays."""
        if self._stream is not None:
            print(f"{self._clear()}{fit(text, self._width)}", file=self._stream, flush=True)

    def end(self) -> None:
        """Take back the line of what was being done."""
        if self._stream is not None:
            print(self._clear(), end="", file=self._stream, flush=True)

    def _clear(self) -> str:
        return "" if self._width is None else _CLEAR


SILENT = Progress(None)


@contextmanager
def told(*, quiet: bool) -> Iterator[Progress]:
    """Tell on standard error what is done in the block, unless `quiet`."""
    progress = SILENT if quiet else Progress(sys.stderr)
    try:
        yield progress
    finally:
        progress.end()
