"""Waits for an event, however long a busy machine takes: the bound only ends a test that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

GENEROUS_S = 600.0
_PAUSE_S = 0.01


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds. AssertionError where it does not for ten minutes."""
    deadline = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {GENEROUS_S:g} s for {what}"
        time.sleep(_PAUSE_S)


def until_stopped(pid: int) -> None:
    """Wait until a process stands still that was sent SIGSTOP: it may run on for a moment."""
    status = Path(f"/proc/{pid}/status")
    until(lambda: "\nState:\tT" in status.read_text(), f"process {pid} to stop")
