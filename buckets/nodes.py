"""Looking inside a captured graph, through NVIDIA's cuda-bindings (they come with torch's wheels).

The driver interface is used throughout, never the runtime's: a failing driver call leaves no
"last error" behind for torch to trip over.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

driver: Any = None
with contextlib.suppress(ImportError):
    driver = importlib.import_module("cuda.bindings.driver")

KINDS = ("kernel", "memcpy", "memset", "other")


def count_nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int] | None:
    """Number of nodes of each of `KINDS` in a graph captured with `keep_graph=True`.

    None where cuda-bindings are not installed. Child graphs and conditional nodes count as one
    "other" each. A decode graph that is all kernels has zero everywhere but in "kernel".
    """
    if driver is None:
        return None
    types = driver.CUgraphNodeType
    kinds = {
        types.CU_GRAPH_NODE_TYPE_KERNEL: "kernel",
        types.CU_GRAPH_NODE_TYPE_MEMCPY: "memcpy",
        types.CU_GRAPH_NODE_TYPE_MEMSET: "memset",
    }
    raw = graph.raw_cuda_graph()
    _, size = driver_call("cuGraphGetNodes", raw, 0)
    nodes, _ = driver_call("cuGraphGetNodes", raw, size)
    counts = dict.fromkeys(KINDS, 0)
    for node in nodes:
        (node_type,) = driver_call("cuGraphNodeGetType", node)
        counts[kinds.get(node_type, "other")] += 1
    return counts


def driver_call(name: str, *arguments: object) -> tuple[Any, ...]:
    """Results of the driver function `name` without its status; RuntimeError when that is bad."""
    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {status.name}")
    return tuple(results)
