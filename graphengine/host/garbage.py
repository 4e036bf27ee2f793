"""Runs Python's collector of reference cycles while the host waits anyway, if possible."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable

NEARLY_DUE = 0.8
"""Share of the youngest generation's threshold from which a collection counts as due. The rest is
left for what one step and its consumer allocate before the next wait: 140 of CPython's 700
containers, and 400 of its 2,000 from 3.13 on. With a lower share collections would be more
frequent."""
_GENERATIONS = sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def collect_due(arrived: Callable[..., bool], *arguments: object) -> None:
    """Collect one or two generations now if Python, by its own rule, is about to.

    It does not if `arrived(*arguments)` is true, as there is then nothing to wait for; `arrived` is
    called only if a collection is due.

    Once the youngest generation's count nears its threshold, it is collected, together with the
    middle generation if that one's count exceeds its threshold. A full collection is left to
    Python, which declines one until a quarter of the heap is new, and does not say so. So when the
    count for a full one is reached, the first collection after one of two generations is left to
    Python. If Python does not run a full one then, it will not until two generations are collected
    again.

    Nothing happens if the collector is disabled, or its first threshold is 0; nor in a Python
    without three generations, whose counts mean something else: 3.14 with its incremental
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
