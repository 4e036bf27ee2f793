"""How long a thread ran, and how often it had to leave its core, as the operating system counts."""

from __future__ import annotations

import time
from typing import NamedTuple

from graphengine.observe.ring import NEVER

try:
    import resource
except ImportError:  # Not a Unix.
    resource = None  # type: ignore[assignment]

_THREAD = getattr(resource, "RUSAGE_THREAD", None)
_PROCESS = getattr(resource, "RUSAGE_SELF", None)


class ProcessorUse(NamedTuple):
    """Counts that only grow; the difference of two covers the time in between.

    cpu_ns     nanoseconds for which the calling thread ran
    preempted  times it was ready to run and its core was taken away (involuntary context switches)
    yielded    times it gave its core away: it slept, or waited for a lock, the GIL or a file
    """

    cpu_ns: int
    preempted: int
    yielded: int


UNKNOWN_USE = ProcessorUse(NEVER, NEVER, NEVER)


def processor_use(*, whole: bool = False) -> ProcessorUse:
    """The calling thread's counts so far; `UNKNOWN_USE` where the system does not count it.

    It costs two system calls, about a microsecond. With `whole` the switches are those of all
    threads of the process: on a CPU a step is computed by several.
    """
    who = _PROCESS if whole else _THREAD
    if who is None:
        return UNKNOWN_USE
    counted = resource.getrusage(who)
    return ProcessorUse(time.thread_time_ns(), counted.ru_nivcsw, counted.ru_nvcsw)
