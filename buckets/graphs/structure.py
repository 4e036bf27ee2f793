"""The structure of a captured graph as plain data, as `inspect_graph` returns it.

It holds only numbers and strings: it outlives the graph, compares by value, and has no address in
it, so two captures of the same program give the same structure. JSON is written and read here; text
and drawings are made in `drawing.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from graphengine.buckets.budget import format_bytes
from graphengine.buckets.graphs import drawing

FULL, PROGRAMMATIC = "full", "programmatic"

# The port where a programmatic edge leaves its kernel. Launch order waits only for the start of the
# blocks.
_PORTS = ("default", "programmatic", "launch order")

_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node. A field that its kind lacks, or that the driver does not tell, is None or empty.

    `index` is its place in `GraphStructure.nodes`, a topological order. `kind` is "kernel",
    "memcpy", "memset", "host", "child_graph", "empty", "event_wait", "event_record",
    "semaphores_signal", "semaphores_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional";
    for a kind that CUDA 13.0 does not know "type_14" and the like, or "unknown" where cuda-bindings
    hide the number.

    Kernels have `name` (demangled where that is possible), `grid`, `block` (x, y, z) and
    `shared_bytes`, the dynamic shared memory. `bytes` is the number of bytes that a memcpy, memset
    or mem_alloc moves, sets or allocates. `detail` is the direction of a memcpy ("HtoD"; H host, D
    device, A array, U unified address), the value and element size of a memset ("0 x 4 B"), "if",
    "while" or "switch" of a conditional, the number of operations of a batch_mem_op.
    `inspect_graph` gives a kernel none; the code that captured it may name its inputs there.

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
    waits inside: programmatic dependent launch). The ports are the driver's numbers: 1 where an
    edge leaves a kernel programmatically, 2 where it leaves on the start of its blocks, else 0.
    """

    source: int
    target: int
    type: str = FULL
    from_port: int = 0
    to_port: int = 0

    @property
    def programmatic(self) -> bool:
        return self.type == PROGRAMMATIC

    def describe(self) -> str:
        """Type and ports in words; empty for a full edge with default ports."""
        parts = [] if self.type == FULL else [self.type]
        if self.from_port != int(self.programmatic):
            parts.append(f"from port {_port(self.from_port)}")
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
        return sum(edge.programmatic for edge in edges), len(edges)

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and integers only, for JSON; fields at their default are left out."""
        return {
            "nodes": [_node_to_dict(node) for node in self.nodes],
            "edges": [_edge_to_dict(edge) for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphStructure:
        """The inverse of `to_dict`; ValueError for anything else."""
        _require_fields("graph", data, required=("nodes", "edges"))
        nodes, edges = (_typed(data[key], list, key) for key in ("nodes", "edges"))
        return cls(
            nodes=tuple(_node_from_dict(node, place) for place, node in enumerate(nodes)),
            edges=tuple(_edge_from_dict(edge, place) for place, edge in enumerate(edges)),
        )

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
        """The inverse of `to_json`; ValueError for other text and for another version."""
        try:
            data = json.loads(text)
            version = data.pop("version", None) if isinstance(data, dict) else None
            if version != _VERSION:
                raise ValueError(f"structure of version {version!r}, this reads {_VERSION}")
            return cls.from_dict(data)
        except RecursionError as cause:
            raise ValueError(f"nested too deeply, in {len(text)} characters") from cause

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, name_width: int | None = 80) -> str:
        """A heading, then each node with the edges it waits for; nested graphs are indented.

        Kernel names longer than `name_width` characters are cut; None cuts none.
        """
        return "\n".join(drawing.text_lines(self, name_width))

    def to_dot(self, title: str = "graph", name_width: int | None = 60) -> str:
        """Graphviz text: a box a node, programmatic edges dashed and blue, nested graphs framed.

        Kernel names longer than `name_width` characters are cut in the box; its tooltip has all.
        """
        return drawing.dot_text(self, title, name_width)

    def to_svg(self, title: str = "graph", name_width: int | None = 60) -> str:
        """`to_dot` drawn by Graphviz's `dot`; RuntimeError where that is missing or fails."""
        return drawing.draw_svg(self.to_dot(title, name_width))


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


_SCALARS = {
    "index": int,
    "kind": str,
    "name": str,
    "shared_bytes": int,
    "bytes": int,
    "detail": str,
}


def _node_from_dict(data: Mapping[str, Any], place: int) -> GraphNode:
    what = f"node {place}"
    optional = (*(_SCALARS.keys() - {"index", "kind"}), "grid", "block", "graphs")
    _require_fields(what, data, required=("index", "kind"), optional=optional)
    known = dict(data)
    for key in known.keys() & _SCALARS.keys():
        _typed(known[key], _SCALARS[key], f"{what}: {key}")
    for key in known.keys() & {"grid", "block"}:
        known[key] = _integers(known[key], 3, f"{what}: {key}")
    graphs = known.pop("graphs", ())
    if graphs is not None:
        listed = _typed(graphs, list, f"{what}: graphs") if "graphs" in data else ()
        graphs = tuple(GraphStructure.from_dict(graph) for graph in listed)
    return GraphNode(graphs=graphs, **known)


def _edge_to_dict(edge: GraphEdge) -> dict[str, Any]:
    data = asdict(edge)
    ports = [data.pop("from_port"), data.pop("to_port")]
    data = {"from": data["source"], "to": data["target"], "type": data["type"]}
    return data | {"ports": ports} if any(ports) else data


def _edge_from_dict(data: Mapping[str, Any], place: int) -> GraphEdge:
    what = f"edge {place}"
    _require_fields(what, data, required=("from", "to", "type"), optional=("ports",))
    from_port, to_port = _integers(data.get("ports", [0, 0]), 2, f"{what}: ports")
    return GraphEdge(
        source=_typed(data["from"], int, f"{what}: from"),
        target=_typed(data["to"], int, f"{what}: to"),
        type=_typed(data["type"], str, f"{what}: type"),
        from_port=from_port,
        to_port=to_port,
    )


def _require_fields(
    what: str, data: object, *, required: Collection[str], optional: Collection[str] = ()
) -> None:
    """ValueError unless `data` is a mapping with these keys and no others."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is {_brief(data)}, not an object")
    if unknown := [str(key) for key in data if key not in (*required, *optional)]:
        raise ValueError(f"{what} has unknown fields {', '.join(unknown)}")
    if missing := [key for key in required if key not in data]:
        raise ValueError(f"{what} has no {', '.join(missing)}")


def _typed(value: object, kind: type[T], what: str) -> T:
    # True does not count as a number here, though it is an int in Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} is {_brief(value)}, not of type {kind.__name__}")
    return value


def _integers(value: object, count: int, what: str) -> tuple[int, ...]:
    found = tuple(_typed(item, int, what) for item in _typed(value, list, what))
    if len(found) != count:
        raise ValueError(f"{what} has {len(found)} numbers, not {count}")
    return found


def _brief(value: object) -> str:
    return _shorten(repr(value), 60)


def _port(number: int) -> str:
    return _PORTS[number] if 0 <= number < len(_PORTS) else f"port_{number}"


def _shorten(name: str, width: int | None) -> str:
    return name if width is None or len(name) <= width else name[: width - 1] + "…"


def _triple(size: tuple[int, int, int]) -> str:
    return ",".join(map(str, size))
