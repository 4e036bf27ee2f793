"""A step as data: for each graph the kernel launches that its step makes, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from graphengine.kernels.core.launching import ZeroedMemory
from graphengine.kernels.core.op import Op, ops_handed_to
from graphengine.program.graph_key import GraphKey

Schedule = Mapping[GraphKey, tuple[Op, ...]]
"""The launches of each graph's step. Operations of torch between them are not among them."""

Row = TypeVar("Row")


def record_schedule(steps: Mapping[GraphKey, Callable[[], object]]) -> Schedule:
    """Run each step once, with its launches recorded and none of them made.

    Torch's own operations do run, and read zeros where kernels would have written first; the caller
    must reset the static buffers afterwards. On a CPU references run in place of launches, so the
    lists are empty unless a GPU is `assumed`.
    """
    return {key: tuple(describe_launches(step, lambda op: op)) for key, step in steps.items()}


def describe_launches(step: Callable[[], object], describe: Callable[[Op], Row]) -> list[Row]:
    """Run one step as `record_schedule` does; returns `describe(launch)` for each launch.

    No launch is kept, so the step takes no more memory than when it runs: a list of its launches
    would keep the intermediates of all layers.
    """
    rows: list[Row] = []
    with ops_handed_to(lambda op: rows.append(describe(op))), ZeroedMemory():
        step()
    return rows
