"""Processes of other ranks, spawned by the driver or started by another program."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Protocol

from graphengine.config import EngineConfig

_PAUSE_S = 1e-2
# Longest wait for a killed process to be reaped by its parent.
_REAPED_S = 10.0


def check_may_start(config: EngineConfig) -> None:
    """ValueError in a daemon of multiprocessing, which may have no children."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise ValueError(
            f"{config.ranks_option} takes {config.ranks} processes, and this one, {process.name} "
            f"({process.pid}), cannot start the others: it is a daemon of multiprocessing. Start "
            f"it with daemon=False; workers of a multiprocessing.Pool are daemons, those of a "
            f"concurrent.futures.ProcessPoolExecutor are not"
        )


class RankProcess(Protocol):
    """The driver's handle of a rank's process."""

    @property
    def pid(self) -> int: ...

    def ending(self) -> str | None:
        """How the process has ended, for a message; None while it runs."""
        ...

    @property
    def raised(self) -> bool:
        """Whether a Python exception has ended it; False where that is not known."""
        ...

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        ...

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended."""
        ...

    def close(self) -> None:
        """Forget it, once it has ended."""
        ...


class SpawnedRank:
    """A child of this process."""

    def __init__(self, process: SpawnProcess) -> None:
        self._process = process
        assert process.pid is not None, "not started"
        self.pid = process.pid

    def ending(self) -> str | None:
        code = self._process.exitcode
        if code is None:
            return None
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    @property
    def raised(self) -> bool:
        return self._process.exitcode == 1

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_s: float | None = None) -> None:
        self._process.join(timeout_s)

    def close(self) -> None:
        self._process.close()


class ForeignRank:
    """A process of this host that is not a child of this one; its parent knows how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def ending(self) -> str | None:
        return None if is_running(self.pid) else "has ended"

    @property
    def raised(self) -> bool:
        return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        deadline = time.perf_counter() + (_REAPED_S if timeout_s is None else timeout_s)
        while is_running(self.pid) and time.perf_counter() < deadline:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        pass


def is_running(pid: int) -> bool:
    """Whether this process of this user exists; a zombie, not yet reaped, counts as running."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
