"""Reads a captured graph into plain data: nodes, typed edges and nested graphs.

    structure = inspect_graph(graph)              # a torch.cuda.CUDAGraph(keep_graph=True)
    print(structure)                              # a line a node, with what it waits for
    structure.programmatic_edges()                # (edges of programmatic dependent launch, all)
    GraphStructure.from_json(structure.to_json()) == structure
    Path("decode.svg").write_text(structure.to_svg())

The data and its JSON are in `structure.py`, text and drawings in `drawing.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsInt

import torch

from graphengine.buckets.graphs import nodes as low_level
from graphengine.buckets.graphs.structure import (
    FULL,
    PROGRAMMATIC,
    GraphEdge,
    GraphNode,
    GraphStructure,
)

# By the numbers of CUgraphNodeType, CUgraphDependencyType, CUmemorytype and
# CUgraphConditionalNodeType. They are the driver's binary interface and never change; a number that
# is not here belongs to a driver newer than CUDA 13.0.
_KINDS = (
    "kernel",
    "memcpy",
    "memset",
    "host",
    "child_graph",
    "empty",
    "event_wait",
    "event_record",
    "semaphores_signal",
    "semaphores_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
)
_EDGE_TYPES = (FULL, PROGRAMMATIC)
_MEMORIES = ("?", "H", "D", "A", "U")
_CONDITIONALS = ("if", "while", "switch")


def inspect_graph(
    graph: torch.cuda.CUDAGraph | SupportsInt,
    *,
    bodies: Mapping[int, Sequence[SupportsInt]] | None = None,
    on_kernel: Callable[[SupportsInt], object] | None = None,
) -> GraphStructure:
    """The structure of a `torch.cuda.CUDAGraph(keep_graph=True)`, or of a raw CUgraph handle.

    Only reads, and does not synchronise: a few milliseconds for hundreds of nodes. RuntimeError
    without cuda-bindings (they come with torch's CUDA wheels), and for a torch graph that was not
    kept.

    The driver of CUDA 13.0 has no call for the bodies of a conditional node (13.2 has). The code
    that made the node has their handles and may pass them: `bodies` is {handle of the node: its
    bodies}.

    `on_kernel` is called with the handle of each kernel node as it is read: node by node, with the
    kernels of a nested graph in the place of its node.
    """
    if low_level.driver is None:
        raise RuntimeError("looking inside a graph needs cuda-bindings (cuda.bindings.driver)")
    handle = graph.raw_cuda_graph() if isinstance(graph, torch.cuda.CUDAGraph) else int(graph)
    return _Walker(bodies or {}, on_kernel).read(handle)


def programmatic_edges(graph: torch.cuda.CUDAGraph | SupportsInt) -> tuple[int, int]:
    """Numbers of programmatic edges and of all edges of `graph`, which is as for `inspect_graph`.

    They are equal if all kernels of the graph were launched with programmatic dependent launch.
    """
    return inspect_graph(graph).programmatic_edges()


def demangle(name: str) -> str:
    """A C++ symbol as in the source. Other names, and all names without torch, stay as they are."""
    # Any other name is a C name, which the demangler would take for a type: "f" for "float".
    if not name.startswith("_Z"):
        return name
    function = getattr(torch._C, "_demangle", None)
    return name if function is None else str(function(name))


class _Walker:
    """Reads graphs through the driver; remembers kernels' names, as there are few of them."""

    def __init__(
        self,
        bodies: Mapping[int, Sequence[SupportsInt]],
        on_kernel: Callable[[SupportsInt], object] | None,
    ) -> None:
        self.bodies = bodies
        self.on_kernel = on_kernel
        self.names: dict[tuple[str, int], str] = {}

    def read(self, graph: int) -> GraphStructure:
        _, size = low_level.driver_call("cuGraphGetNodes", graph, 0)
        handles = low_level.driver_call("cuGraphGetNodes", graph, size)[0][:size] if size else []
        places = {int(handle): place for place, handle in enumerate(handles)}
        edges = low_level.read_edges(graph)
        pairs = [(places[edge.source], places[edge.target]) for edge in edges]
        order = _topological_order(len(handles), pairs)
        index_of = {place: index for index, place in enumerate(order)}
        found = [
            GraphEdge(
                source=index_of[source],
                target=index_of[target],
                type=_entry(_EDGE_TYPES, edge.type, "type"),
                from_port=edge.from_port,
                to_port=edge.to_port,
            )
            for edge, (source, target) in zip(edges, pairs, strict=True)
        ]
        return GraphStructure(
            nodes=tuple(self.node(index, handles[place]) for index, place in enumerate(order)),
            edges=tuple(sorted(found, key=_place_of_edge)),
        )

    def node(self, index: int, handle: Any) -> GraphNode:
        try:
            (number,) = low_level.driver_call("cuGraphNodeGetType", handle)
        except ValueError:  # cuda-bindings older than the driver have no name for the number
            return GraphNode(index=index, kind="unknown")
        kind = _entry(_KINDS, int(number), "type")
        read = getattr(self, f"read_{kind}", None)
        try:
            known = {} if read is None else read(handle)
        except RuntimeError as cause:
            raise RuntimeError(f"node {index} ({kind}) cannot be read: {cause}") from cause
        return GraphNode(index=index, kind=kind, **known)

    def read_kernel(self, handle: Any) -> dict[str, Any]:
        if self.on_kernel is not None:
            self.on_kernel(handle)
        (params,) = low_level.driver_call("cuGraphKernelNodeGetParams", handle)
        return {
            "name": self.kernel_name(params),
            "grid": (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ)),
            "block": (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ)),
            "shared_bytes": int(params.sharedMemBytes),
        }

    def kernel_name(self, params: Any) -> str | None:
        # A kernel is a CUfunction of a module or a context-less CUkernel of a library.
        for call, handle in (("cuFuncGetName", params.func), ("cuKernelGetName", params.kern)):
            key = call, int(handle)
            if not key[1]:
                continue
            if key not in self.names:
                try:
                    (name,) = low_level.driver_call(call, handle)
                except RuntimeError:  # the graph may be read all the same
                    continue
                self.names[key] = demangle(name.decode())
            return self.names[key]
        return None

    def read_memcpy(self, handle: Any) -> dict[str, Any]:
        (params,) = low_level.driver_call("cuGraphMemcpyNodeGetParams", handle)
        size = int(params.WidthInBytes) * int(params.Height) * int(params.Depth)
        source, target = (_memory(params, name) for name in ("srcMemoryType", "dstMemoryType"))
        return {"bytes": size, "detail": f"{source}to{target}"}

    def read_memset(self, handle: Any) -> dict[str, Any]:
        (params,) = low_level.driver_call("cuGraphMemsetNodeGetParams", handle)
        element = int(params.elementSize)
        size = element * int(params.width) * int(params.height)
        return {"bytes": size, "detail": f"{int(params.value)} x {element} B"}

    def read_mem_alloc(self, handle: Any) -> dict[str, Any]:
        (params,) = low_level.driver_call("cuGraphMemAllocNodeGetParams", handle)
        return {"bytes": int(params.bytesize)}

    def read_batch_mem_op(self, handle: Any) -> dict[str, Any]:
        (params,) = low_level.driver_call("cuGraphBatchMemOpNodeGetParams", handle)
        return {"detail": f"{int(params.count)} operations"}

    def read_child_graph(self, handle: Any) -> dict[str, Any]:
        (child,) = low_level.driver_call("cuGraphChildGraphNodeGetGraph", handle)
        return {"graphs": (self.read(int(child)),)}

    def read_conditional(self, handle: Any) -> dict[str, Any]:
        detail = None
        graphs: Sequence[SupportsInt] | None = self.bodies.get(int(handle))
        try:
            # Missing from cuda-bindings, or from the driver, before CUDA 13.2.
            (params,) = low_level.driver_call("cuGraphNodeGetParams", handle)
        except (AttributeError, RuntimeError):
            pass
        else:
            detail = _entry(_CONDITIONALS, int(params.conditional.type), "type")
            graphs = params.conditional.phGraph_out if graphs is None else graphs
        read = None if graphs is None else tuple(self.read(int(graph)) for graph in graphs)
        return {"detail": detail, "graphs": read}


def _place_of_edge(edge: GraphEdge) -> tuple[int, int, str, int, int]:
    return edge.source, edge.target, edge.type, edge.from_port, edge.to_port


def _topological_order(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The indices 0 to count - 1: sources before targets, otherwise the lowest index first."""
    waits = [0] * count
    followers: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        waits[target] += 1
        followers[source].append(target)
    ready = [place for place in range(count) if not waits[place]]
    order = []
    while ready:
        order.append(place := heapq.heappop(ready))
        for target in followers[place]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, target)
    assert len(order) == count, f"cycle among {count} nodes, {len(order)} of them in order"
    return order


def _memory(params: Any, field: str) -> str:
    try:
        return _entry(_MEMORIES, int(getattr(params, field) or 0), "type")
    except ValueError:  # cuda-bindings raise for a number that they have no name for
        return "?"


def _entry(table: Sequence[str], number: int, otherwise: str) -> str:
    return table[number] if 0 <= number < len(table) else f"{otherwise}_{number}"
