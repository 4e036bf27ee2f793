"""The kernels that a graph launches, with the bytes of their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphengine import buckets
from graphengine.buckets import CapturedGraph, KernelLaunch
from graphengine.testing.errors import GraphCheckError, hide_frame

__tracebackhide__ = hide_frame

Launches = torch.cuda.CUDAGraph | CapturedGraph | Sequence[KernelLaunch]
"""A graph that was kept, or its launches as `graphengine.buckets.read_launches` has read them."""

_NAME_WIDTH = 80


def read_launches(graph: Launches, what: str | None) -> list[KernelLaunch]:
    """The launches of a graph.

    ValueError for other objects, and for a `CapturedGraph` on a CPU, which has none.
    GraphCheckError if the driver does not tell a kernel's parameters, so that `what` is unknown;
    without `what` they are not needed.
    """
    launches = _read(graph)
    unknown = [launch for launch in launches if launch.parameters is None]
    if what is not None and unknown:
        raise GraphCheckError(
            f"{what} cannot be told: the driver does not show the parameters of {len(unknown)} of "
            f"{len(launches)} kernels, first {describe_launch(unknown[0])}"
        )
    return launches


def _read(graph: object) -> list[KernelLaunch]:
    if isinstance(graph, CapturedGraph):
        if graph.graph is None:
            raise ValueError(f"bucket {graph.name!r} on {graph.device} has no captured graph")
        graph = graph.graph
    if isinstance(graph, torch.cuda.CUDAGraph):
        return buckets.read_launches(graph)
    if isinstance(graph, Sequence) and all(isinstance(item, KernelLaunch) for item in graph):
        return list(graph)
    raise ValueError(
        f"{graph!r} is of type {type(graph).__name__}: give a torch.cuda.CUDAGraph, a "
        "CapturedGraph, or the KernelLaunches that read_launches returns"
    )


def describe_launch(launch: KernelLaunch) -> str:
    """A launch in messages: "node 3 (attention)"."""
    name = launch.name or "kernel"
    return f"node {launch.path} ({name if len(name) <= _NAME_WIDTH else name[:_NAME_WIDTH] + '…'})"
