"""Faults of an engine's other ranks, and waits that are short from some moment on."""

from __future__ import annotations

import os
import signal

from events import until_stopped

from graphengine import Engine
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.ranks import Ranks


def ranks_of(engine: Engine) -> Ranks:
    """The other ranks of an engine that has some."""
    assert isinstance(engine.runtime, DriverRuntime)
    return engine.runtime.ranks


def stop(ranks: Ranks, rank: int = 1) -> None:
    """A rank stands still from now on."""
    pid = ranks.pids[rank - 1]
    os.kill(pid, signal.SIGSTOP)
    until_stopped(pid)


def limit_waits(engine: Engine, seconds: float) -> None:
    """From now on the driver waits for so long, and until now for as long as the option says: so a
    test has a short limit for a fault alone, which a busy machine may exceed before it.
    """
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime)
    limits = {group.limit_s for group in runtime.groups.all}
    assert {*limits, runtime.ranks._limit} == {engine.config.wait_limit_s}
    runtime.groups.wait_up_to(seconds)
    runtime.ranks._limit = seconds
