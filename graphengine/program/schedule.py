"""A step as data: for each graph the kernel launches that its step makes, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphengine.kernels import Op, ZeroedMemory, recorded_ops
from graphengine.program.graph_key import GraphKey

Schedule = Mapping[GraphKey, tuple[Op, ...]]
"""The launches of each graph's step. Operations of torch between them are not among them."""


def record_schedule(steps: Mapping[GraphKey, Callable[[], object]]) -> Schedule:
    """Run each step once, with its launches recorded and none of them made.

    What torch computes in a step is computed, with zeros where kernels would have written first;
    what that does to static buffers is for the caller to reset. On a CPU references run in place of
    launches, which leaves the lists empty, unless a GPU is `assumed`.
    """
    schedule: dict[GraphKey, tuple[Op, ...]] = {}
    for key, step in steps.items():
        with recorded_ops() as ops, ZeroedMemory():
            step()
        schedule[key] = tuple(ops)
    return schedule
