"""Structures of graphs made by hand, and the faults that tests plant in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphengine.buckets import GraphEdge, GraphNode, GraphStructure

STEP = ("begin", "norm", "linear", "attention", "linear", "finish")


def chain(names: Sequence[str] = STEP) -> GraphStructure:
    """A kernel of each name, one after the other, launched programmatically."""
    nodes = [
        GraphNode(
            index=index, kind="kernel", name=name, grid=(8, 1, 1), block=(128, 1, 1), shared_bytes=0
        )
        for index, name in enumerate(names)
    ]
    edges = [
        GraphEdge(source=place, target=place + 1, type="programmatic", from_port=1)
        for place in range(len(names) - 1)
    ]
    return GraphStructure(nodes=tuple(nodes), edges=tuple(edges))


def with_node(structure: GraphStructure, index: int, **changes: Any) -> GraphStructure:
    """A copy with other properties of one node."""
    nodes = list(structure.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(structure, nodes=tuple(nodes))


def with_full_edge(structure: GraphStructure, place: int) -> GraphStructure:
    """A copy in which one edge has lost its programmatic dependent launch."""
    edges = list(structure.edges)
    edges[place] = replace(edges[place], type="full", from_port=0)
    return replace(structure, edges=tuple(edges))


def without_edge(structure: GraphStructure, place: int) -> GraphStructure:
    """A copy with one edge fewer."""
    edges = structure.edges[:place] + structure.edges[place + 1 :]
    return replace(structure, edges=edges)


def nested(*bodies: GraphStructure, kind: str = "child_graph") -> GraphStructure:
    """A kernel followed by a node that holds `bodies`."""
    nodes = (*chain(["first"]).nodes, GraphNode(index=1, kind=kind, graphs=bodies))
    return GraphStructure(nodes=nodes, edges=(GraphEdge(source=0, target=1),))


PLANTED = {
    "an added node": chain((*STEP[:3], "scale", *STEP[3:])),
    "a removed node": chain((*STEP[:2], *STEP[3:])),
    "a renamed kernel": with_node(chain(), 3, name="attention_v2"),
    "a changed grid": with_node(chain(), 2, grid=(16, 1, 1)),
    "a changed block": with_node(chain(), 2, block=(256, 1, 1)),
    "more shared memory": with_node(chain(), 2, shared_bytes=1024),
    "a lost programmatic edge": with_full_edge(chain(), 2),
    "a lost edge": without_edge(chain(), 2),
}
"""Faulty variants of `chain()`: {fault: structure}."""
