"""Looking inside a captured graph, through NVIDIA's cuda-bindings (they come with torch's wheels).

Counting nodes does not use them, as every capture does it: `driver.py` says why.

The driver interface is used throughout, never the runtime's: a failing driver call sets no "last
error" that torch would find later.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from typing import Any, NamedTuple

import torch

from graphengine.buckets import driver as direct

driver: Any = None
with contextlib.suppress(ImportError):
    driver = importlib.import_module("cuda.bindings.driver")

# The first three in the order of CUgraphNodeType, where they are 0, 1 and 2.
KINDS = ("kernel", "memcpy", "memset", "other")


def count_nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int] | None:
    """Number of nodes of each of `KINDS` in a graph captured with `keep_graph=True`.

    None where there is no driver. Child graphs and conditional nodes count as one
    "other" each. A decode graph that is all kernels has zero everywhere but in "kernel".
    """
    library = direct.driver()
    if library is None:
        return None
    counts = dict.fromkeys(KINDS, 0)
    for _, number in library.nodes(int(graph.raw_cuda_graph())):
        counts[KINDS[min(number, len(KINDS) - 1)]] += 1
    return counts


def driver_call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Results of the driver function `name` without its status; RuntimeError when that is bad."""
    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {status.name}")
    return tuple(results)


class RawEdge(NamedTuple):
    """An edge as the driver has it: handles of two nodes, its type and ports as numbers."""

    source: int
    target: int
    type: int
    from_port: int
    to_port: int


def read_edges(graph: int) -> list[RawEdge]:
    """All edges of the graph with the CUgraph handle `graph`, in the driver's order.

    RuntimeError when the driver refuses. Calls the driver directly, not through cuda-bindings'
    function: before 13.3 and 12.9.7 its edge data lie in freed memory (cuda-python #1804).
    """
    # Since CUDA 12.3 the function of this name fills in edge data.
    address, _ = driver_call("cuGetProcAddress", b"cuGraphGetEdges", 12030, 0)
    if not int(address):
        raise RuntimeError("the driver has no cuGraphGetEdges of CUDA 12.3")
    get_edges = _GetEdges(int(address))
    count = ctypes.c_size_t()
    _require_success("cuGraphGetEdges", get_edges(graph, None, None, None, ctypes.byref(count)))
    if not count.value:
        return []
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (_EdgeData * count.value)()
    status = get_edges(graph, sources, targets, data, ctypes.byref(count))
    _require_success("cuGraphGetEdges", status)
    return [
        RawEdge(source, target, edge.type, edge.from_port, edge.to_port)
        for source, target, edge in zip(sources, targets, data, strict=True)
    ]


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


_GetEdges = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(_EdgeData),
    ctypes.POINTER(ctypes.c_size_t),
)


def _require_success(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with CUresult {status}")
