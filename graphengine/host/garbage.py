"""When Python's collector of cyclic garbage runs: while the host waits anyway, where it can."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable

NEARLY_DUE = 0.8
"""Share of the youngest generation's threshold. The rest is left for what one step and its consumer
allocate before the next wait: 140 of CPython's 700 containers, and 400 of its 2,000 from 3.13 on.
With a lower share collections would be more frequent."""
_GENERATIONS = sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def collect_due(arrived: Callable[..., bool], *arguments: object) -> None:
    """Collect one generation or two now if Python is about to, by its own rule.

    But not if `arrived(*arguments)`, which is called only then: there would be nothing to wait for.

    It collects the oldest generation whose count exceeds its threshold, once the youngest's does. A
    full collection is left to Python, which declines one until a quarter of the heap is new, and
    does not say so. So when the count for a full one is reached, the first collection after one of
    two generations is left to Python. If Python does not run a full one then, it will not until two
    generations are collected again.

    Nothing happens where the collector is disabled, or its first threshold is 0. Nor in a Python
    whose counts mean something else, for lack of three generations: 3.14 with its incremental
    collector, and free threading, where every collection is full.
    """
    if not (_GENERATIONS and gc.isenabled()):
        return
    youngest, middle, oldest = gc.get_threshold()
    allocated, of_youngest, of_middle = gc.get_count()
    if not youngest or allocated <= NEARLY_DUE * youngest:
        return
    if of_middle > oldest and not of_youngest:
        return
    if not arrived(*arguments):
        gc.collect(1 if of_youngest > middle else 0)
