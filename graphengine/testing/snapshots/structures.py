"""Structures of graphs: reading them, and walking them with a path to each node."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphengine.buckets import CapturedGraph, GraphNode, GraphStructure, inspect_graph
from graphengine.testing.errors import GraphCheckError, hide_frame

__tracebackhide__ = hide_frame

Graph = torch.cuda.CUDAGraph | CapturedGraph | GraphStructure


def read_structure(graph: Graph) -> GraphStructure:
    """The structure of a graph; ValueError for a `CapturedGraph` on a CPU, which has none."""
    if isinstance(graph, GraphStructure):
        return graph
    if isinstance(graph, CapturedGraph):
        if graph.graph is None:
            raise ValueError(f"bucket {graph.name!r} on {graph.device} has no captured graph")
        return inspect_graph(graph.graph)
    _require_graph(graph)
    return inspect_graph(graph)


def _require_graph(graph: object) -> None:
    if not isinstance(graph, torch.cuda.CUDAGraph):
        raise ValueError(
            f"{graph!r} is of type {type(graph).__name__}: give a torch.cuda.CUDAGraph, a "
            "CapturedGraph, or the GraphStructure that inspect_graph returns"
        )


def walk(structure: GraphStructure, path: str = "") -> Iterator[tuple[str, GraphStructure]]:
    """Each graph in `structure`, itself first, with the prefix of its nodes' paths.

    A nested node is named by its path: "4/0/2" is node 2 of graph 0 of node 4.
    """
    yield path, structure
    for node in structure.nodes:
        for number, nested in enumerate(node.graphs or ()):
            yield from walk(nested, f"{path}{node.index}/{number}/")


def require_known(structure: GraphStructure, what: str) -> None:
    """GraphCheckError if a node may hold others that cannot be seen, so that `what` is unknown."""
    for path, nested in walk(structure):
        for node in nested.nodes:
            if not _is_known(node):
                raise GraphCheckError(
                    f"{what} cannot be told: node {path}{node.index} ({node.kind}) cannot be "
                    "looked into; if you have the handles of its bodies, check what "
                    "graphengine.buckets.inspect_graph(graph, bodies=...) returns"
                )


def _is_known(node: GraphNode) -> bool:
    newer = node.kind == "unknown" or node.kind.startswith("type_")
    return node.graphs is not None and not newer
