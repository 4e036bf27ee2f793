"""Puts off Ctrl-C during a step until host and device agree again."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

# What `signal` wraps. Its functions look up each handler that they return in an enum, by an
# exception: in every step that took a third of the engine's own time.
getsignal, set_signal = _signal.getsignal, _signal.signal


class HeldInterrupts:
    """Inside `with`, SIGINT is put off to the end of the block, or to where it is let through.

    Python raises KeyboardInterrupt wherever it happens to be; in the middle of a step it is then
    unknown how far the step has come. Outside the block the program's own handler is in place. It
    is called once the signal is no longer put off, so everything it does works as usual.

    A second SIGINT is not put off: the code in the block may hang.

    It does nothing outside the main thread, which alone runs handlers, and if no Python function
    handles SIGINT. Blocks of one object cannot be nested.

    let_through  an inner block in which SIGINT is handled at once, as nothing is half done there; a
                 SIGINT that was put off is handled at its beginning
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
        before = getsignal(SIGINT)
        if callable(before):
            self._before = before
            set_signal(SIGINT, self._handler)

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is None:
            return
        current = set_signal(SIGINT, before)
        if current is not self._handler:
            # Another handler was set inside the block: keep it.
            set_signal(SIGINT, current)
        self._before = None
        if self._put_off:
            self._put_off = False
            before(SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before, at_once = self._before, self._through or self._put_off
        self._put_off = not at_once
        if at_once and before is not None:
            before(number, frame)


class _LetThrough:
    """See `HeldInterrupts.let_through`; one object is reused, as each step opens the block."""

    __slots__ = ("_held",)

    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        held._through = True
        if held._put_off and held._before is not None:
            held._put_off = False
            try:
                held._before(SIGINT, None)
            except BaseException:
                held._through = False
                raise

    def __exit__(self, *_: object) -> None:
        self._held._through = False
