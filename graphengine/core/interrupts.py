"""Ctrl-C during a step: it is put off until host and device agree again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class HeldInterrupts:
    """Inside `with`, SIGINT is put off to the end of the block, or to where it is let through.

    Python raises KeyboardInterrupt wherever it happens to be: in the middle of a step, how far that
    has come is then unknown. Outside the block the program's handler is in place, unchanged. It is
    called once the signal is no longer put off, so that whatever else it does works as well.

    A second SIGINT is not put off: what the block does may hang.

    Does nothing in other threads than the main one, which alone runs handlers, and where no
    function of Python handles SIGINT. Blocks of one object are not nested.

    let_through  a block, inside the other, in which SIGINT is handled at once, one that was put off
                 at its beginning: nothing is half done there
    """

    __slots__ = ("_before", "_handler", "_put_off", "_through", "let_through")

    def __init__(self) -> None:
        self.let_through = _LetThrough(self)
        self._before: Handler | None = None
        self._handler = self._handle
        self._put_off = self._through = False

    def __enter__(self) -> None:
        self._put_off = self._through = False
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGINT)
        if callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handler)

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is None:
            return
        current = signal.signal(signal.SIGINT, before)
        if current is not self._handler:
            # Somebody has set another handler inside the block.
            signal.signal(signal.SIGINT, current)
        self._before = None
        if self._put_off:
            self._put_off = False
            before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, at_once = self._before, self._through or self._put_off
        self._put_off = not at_once
        if at_once and before is not None:
            before(number, frame)


class _LetThrough:
    """See `HeldInterrupts.let_through`; an object that is kept, as each step opens the block."""

    __slots__ = ("_held",)

    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        held._through = True
        if held._put_off and held._before is not None:
            held._put_off = False
            try:
                held._before(signal.SIGINT, None)
            except BaseException:
                held._through = False
                raise

    def __exit__(self, *_: object) -> None:
        self._held._through = False
