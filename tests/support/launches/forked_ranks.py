"""Ranks that wait for each other in the interpreter: forked processes, which share memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from events import GENEROUS_S


def fork_ranks(work: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments, found)` puts into `found` once on each rank, in any order.

    AssertionError where a rank fails, or does not end within ten minutes.
    """
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    processes = [
        context.Process(target=work, args=(rank, *arguments, found)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + GENEROUS_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [found.get() for _ in processes]
