"""A captured graph as plain data: nodes, typed edges and nested graphs; as JSON, text or a drawing.

    structure = inspect_graph(graph)              # a torch.cuda.CUDAGraph(keep_graph=True)
    print(structure)                              # a line a node, with what it waits for
    structure.programmatic_edges()                # (edges of programmatic dependent launch, all)
    GraphStructure.from_json(structure.to_json()) == structure
    Path("decode.svg").write_text(structure.to_svg())

The structure holds numbers and strings alone: it outlives the graph, compares by value, and has no
address in it, so two captures of the same program give the same structure.
"""

from __future__ import annotations

import heapq
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, SupportsInt

import torch

from graphengine.buckets import nodes as low_level
from graphengine.buckets.budget import format_bytes

FULL, PROGRAMMATIC = "full", "programmatic"

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

# Where a programmatic edge leaves its kernel. Launch order waits for the start of the blocks only.
_PORTS = ("default", "programmatic", "launch order")

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node. What its kind does not have, or the driver does not tell, is None or empty.

    `index` is its place in `GraphStructure.nodes`, a topological order. `kind` is "kernel",
    "memcpy", "memset", "host", "child_graph", "empty", "event_wait", "event_record",
    "semaphores_signal", "semaphores_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional",
    for one that CUDA 13.0 does not know "type_14" and the like, or "unknown" where cuda-bindings
    hide the number.

    Kernels have `name` (demangled where that is possible), `grid`, `block` (x, y, z) and
    `shared_bytes`, the dynamic shared memory. `bytes` is what a memcpy, memset or mem_alloc moves,
    sets or allocates. `detail` is, of a memcpy, where from and to ("HtoD"; H host, D device,
    A array, U unified address), of a memset its value and element size ("0 x 4 B"), of a
    conditional "if", "while" or "switch", of a batch_mem_op the number of its operations.

    `graphs` holds a child graph, or the bodies of a conditional. The bodies are None where they are
    unknown: see `inspect_graph`.
    """

    index: int
    kind: str
    name: str | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int | None = None
    bytes: int | None = None
    detail: str | None = None
    graphs: tuple[GraphStructure, ...] | None = ()

    def describe(self, name_width: int | None = None) -> str:
        """The node in one line, without its index; `name_width` cuts a longer kernel name."""
        parts = [self.kind]
        if self.name is not None:
            parts.append(_shorten(self.name, name_width))
        if self.detail is not None:
            parts.append(self.detail)
        if self.grid is not None and self.block is not None:
            parts.append(f"grid {_triple(self.grid)} block {_triple(self.block)}")
        if self.shared_bytes:
            parts.append(f"shared {format_bytes(self.shared_bytes)}")
        if self.bytes is not None:
            parts.append(format_bytes(self.bytes))
        if self.graphs is None:
            parts.append("(bodies unknown)")
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """`target` waits for `source`, both indices of nodes of the same graph.

    `type` is "full" (all of the source's work) or "programmatic" (the target may start early and
    waits inside, as programmatic dependent launch has it). The ports are the driver's numbers: 0
    but where an edge leaves a kernel programmatically (1), or on the start of its blocks (2).
    """

    source: int
    target: int
    type: str = FULL
    from_port: int = 0
    to_port: int = 0

    def describe(self) -> str:
        """Type and ports in words; of a full edge with default ports: nothing."""
        parts = [] if self.type == FULL else [self.type]
        if self.from_port != (1 if self.type == PROGRAMMATIC else 0):
            parts.append(f"from port {_entry(_PORTS, self.from_port, 'port')}")
        if self.to_port:
            parts.append(f"to port {self.to_port}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStructure:
    """The nodes of a graph in a topological order, and its edges by (source, target).

    The order is the driver's (that of the capture) wherever it is topological already. ValueError
    if an index is not its node's place or an edge leaves the graph.
    """

    nodes: tuple[GraphNode, ...] = ()
    edges: tuple[GraphEdge, ...] = ()

    def __post_init__(self) -> None:
        for place, node in enumerate(self.nodes):
            if node.index != place:
                raise ValueError(f"node {place} of {len(self.nodes)} has index {node.index}")
        for edge in self.edges:
            if not (0 <= edge.source < len(self.nodes) and 0 <= edge.target < len(self.nodes)):
                raise ValueError(
                    f"edge {edge.source} -> {edge.target} in a graph of {len(self.nodes)} nodes"
                )

    def walk(self) -> Iterator[GraphStructure]:
        """This graph and all that are nested in it, depth first."""
        yield self
        for node in self.nodes:
            for graph in node.graphs or ():
                yield from graph.walk()

    def count(self) -> dict[str, int]:
        """Number of nodes of each kind that occurs, nested graphs included."""
        return dict(Counter(node.kind for graph in self.walk() for node in graph.nodes))

    def programmatic_edges(self) -> tuple[int, int]:
        """Numbers of programmatic edges and of all edges, nested graphs included."""
        edges = [edge for graph in self.walk() for edge in graph.edges]
        return sum(edge.type == PROGRAMMATIC for edge in edges), len(edges)

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and integers only, for JSON; fields at their default are left out."""
        return {
            "nodes": [_node_to_dict(node) for node in self.nodes],
            "edges": [_edge_to_dict(edge) for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphStructure:
        """What `to_dict` was called on; ValueError for anything else."""
        try:
            return cls(
                nodes=tuple(_node_from_dict(node) for node in data["nodes"]),
                edges=tuple(_edge_from_dict(edge) for edge in data["edges"]),
            )
        except (KeyError, TypeError) as cause:
            raise ValueError(f"not the structure of a graph: {cause!r}") from cause

    def to_json(self) -> str:
        """JSON with a line for each node and each edge, so that versions of a file diff well."""
        data = self.to_dict()
        lists = ",\n".join(
            f'  "{key}": [' + ",".join(f"\n    {json.dumps(item)}" for item in items) + "\n  ]"
            for key, items in data.items()
        )
        return f'{{\n  "version": {_VERSION},\n{lists}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> GraphStructure:
        """What `to_json` was called on; ValueError for other text and for another version."""
        data = json.loads(text)
        version = data.get("version") if isinstance(data, dict) else None
        if version != _VERSION:
            raise ValueError(f"structure of version {version!r}, this reads {_VERSION}")
        return cls.from_dict(data)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, name_width: int | None = 80) -> str:
        """A heading, then each node with the edges it waits for; nested graphs are indented.

        Kernel names longer than `name_width` characters are cut; None cuts none.
        """
        return "\n".join(_text_lines(self, name_width))

    def to_dot(self, title: str = "graph", name_width: int | None = 60) -> str:
        """Graphviz text: a box a node, programmatic edges dashed and blue, nested graphs framed.

        Kernel names longer than `name_width` characters are cut in the box; its tooltip has all.
        """
        lines = [
            f"digraph {_quote(title)} {{",
            "  compound=true;",
            '  node [shape=box, style=filled, fillcolor=white, fontname="monospace"];',
            *_dot_lines(self, "n", name_width, "  "),
            "}",
        ]
        return "\n".join(lines) + "\n"

    def to_svg(self, title: str = "graph", name_width: int | None = 60) -> str:
        """`to_dot` drawn by Graphviz's `dot`; RuntimeError where that is missing or fails."""
        program = shutil.which("dot")
        if program is None:
            raise RuntimeError(
                "drawing a graph as SVG needs Graphviz's `dot` on the PATH; `to_dot()` gives the "
                "text to draw elsewhere"
            )
        done = subprocess.run(
            [program, "-Tsvg"],
            input=self.to_dot(title, name_width),
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout


def inspect_graph(
    graph: torch.cuda.CUDAGraph | SupportsInt,
    *,
    bodies: Mapping[int, Sequence[SupportsInt]] | None = None,
) -> GraphStructure:
    """The structure of a `torch.cuda.CUDAGraph(keep_graph=True)`, or of a raw CUgraph handle.

    Only reads, and does not synchronise: a few milliseconds for hundreds of nodes. RuntimeError
    without cuda-bindings (they come with torch's CUDA wheels), and for a torch graph that was not
    kept.

    The driver of CUDA 13.0 has no call for the bodies of a conditional node (13.2 has). Who made
    the node has their handles and may give them: `bodies` is {handle of the node: its bodies}.
    """
    if low_level.driver is None:
        raise RuntimeError("looking inside a graph needs cuda-bindings (cuda.bindings.driver)")
    handle = graph.raw_cuda_graph() if isinstance(graph, torch.cuda.CUDAGraph) else int(graph)
    return _Walker(bodies or {}).read(handle)


def programmatic_edges(graph: torch.cuda.CUDAGraph | SupportsInt) -> tuple[int, int]:
    """Numbers of programmatic edges and of all edges of `graph`, which is as `inspect_graph`'s.

    Equal in a graph all of whose kernels were launched with programmatic dependent launch.
    """
    return inspect_graph(graph).programmatic_edges()


def demangle(name: str) -> str:
    """A C++ symbol as it reads in the source; other names, and all without torch's help, as is."""
    # Any other name is one of C, which the demangler would take for a type: "f" for "float".
    if not name.startswith("_Z"):
        return name
    function = getattr(torch._C, "_demangle", None)
    return name if function is None else str(function(name))


class _Walker:
    """Reads graphs through the driver; remembers kernels' names, of which there are few."""

    def __init__(self, bodies: Mapping[int, Sequence[SupportsInt]]) -> None:
        self.bodies = bodies
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
    """The places 0 to count - 1, sources before targets, otherwise the lowest place first."""
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


def _node_to_dict(node: GraphNode) -> dict[str, Any]:
    data: dict[str, Any] = {
        field.name: value
        for field in fields(node)
        if field.name != "graphs" and (value := getattr(node, field.name)) is not None
    }
    if node.graphs is None:
        data["graphs"] = None
    elif node.graphs:
        data["graphs"] = [graph.to_dict() for graph in node.graphs]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def _node_from_dict(data: Mapping[str, Any]) -> GraphNode:
    known = dict(data)
    for key in ("grid", "block"):
        if key in known:
            x, y, z = known[key]
            known[key] = (x, y, z)
    graphs = known.pop("graphs", ())
    if graphs is not None:
        graphs = tuple(GraphStructure.from_dict(graph) for graph in graphs)
    return GraphNode(graphs=graphs, **known)


def _edge_to_dict(edge: GraphEdge) -> dict[str, Any]:
    data = asdict(edge)
    ports = [data.pop("from_port"), data.pop("to_port")]
    data = {"from": data["source"], "to": data["target"], "type": data["type"]}
    return data | {"ports": ports} if any(ports) else data


def _edge_from_dict(data: Mapping[str, Any]) -> GraphEdge:
    if unknown := set(data) - {"from", "to", "type", "ports"}:
        raise ValueError(f"edge with unknown fields {sorted(unknown)}")
    from_port, to_port = data.get("ports", (0, 0))
    return GraphEdge(
        source=data["from"],
        target=data["to"],
        type=data["type"],
        from_port=from_port,
        to_port=to_port,
    )


def _text_lines(graph: GraphStructure, name_width: int | None) -> Iterator[str]:
    programmatic = sum(edge.type == PROGRAMMATIC for edge in graph.edges)
    kinds = Counter(node.kind for node in graph.nodes)
    of_kinds = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield (
        f"{len(graph.nodes)} nodes ({of_kinds or 'empty graph'}), "
        f"{len(graph.edges)} edges ({programmatic} programmatic)"
    )
    incoming: dict[int, list[str]] = {}
    for edge in graph.edges:
        words = edge.describe()
        text = f"{edge.source} ({words})" if words else str(edge.source)
        incoming.setdefault(edge.target, []).append(text)
    width = len(str(len(graph.nodes)))
    for node in graph.nodes:
        waits = incoming.get(node.index)
        after = f"  <- {', '.join(waits)}" if waits else ""
        yield f"[{node.index:>{width}}] {node.describe(name_width)}{after}"
        for nested in node.graphs or ():
            yield from (f"{'':{width + 3}}| {line}" for line in _text_lines(nested, name_width))


_COLOURS = {
    "kernel": "honeydew",
    "memcpy": "lightyellow",
    "memset": "lightyellow",
    "host": "mistyrose",
    "mem_alloc": "mistyrose",
    "mem_free": "mistyrose",
}


def _dot_lines(
    graph: GraphStructure, prefix: str, name_width: int | None, indent: str
) -> Iterator[str]:
    """Statements for `graph`; its nodes are called `prefix` and their index."""
    for node in graph.nodes:
        label = f"{node.index}: " + node.describe(name_width).replace("  ", "\n")
        colour = _COLOURS.get(node.kind, "white")
        tooltip = node.describe()
        yield (
            f"{indent}{prefix}{node.index} "
            f"[label={_quote(label)}, tooltip={_quote(tooltip)}, fillcolor={colour}];"
        )
        for number, nested in enumerate(node.graphs or ()):
            inner = f"{prefix}{node.index}_{number}_"
            yield f"{indent}subgraph cluster_{inner} {{"
            yield f"{indent}  label={_quote(f'{node.kind} {node.index}, graph {number}')};"
            yield from _dot_lines(nested, inner, name_width, indent + "  ")
            yield f"{indent}}}"
            if nested.nodes:
                link = f"{prefix}{node.index} -> {inner}0"
                yield f"{indent}{link} [lhead=cluster_{inner}, style=dotted, arrowhead=none];"
    for edge in graph.edges:
        words = edge.describe()
        # The usual programmatic edge is told by its looks; a label on each would fill the picture.
        options = [] if words in ("", PROGRAMMATIC) else [f"label={_quote(words)}"]
        if edge.type == PROGRAMMATIC:
            options += ["style=dashed", "color=blue"]
        after = f" [{', '.join(options)}]" if options else ""
        yield f"{indent}{prefix}{edge.source} -> {prefix}{edge.target}{after};"


def _quote(text: str) -> str:
    """A string of DOT that shows `text`, on as many lines."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _shorten(name: str, width: int | None) -> str:
    return name if width is None or len(name) <= width else name[: width - 1] + "…"


def _triple(size: tuple[int, int, int]) -> str:
    return ",".join(map(str, size))
