"""Steps of an engine on a GPU without their graphs."""

from __future__ import annotations

import torch

from graphengine.buckets import CapturedGraph
from graphengine.program.graph_key import GraphKey


class Eager:
    """The step of a graph, launched kernel by kernel."""

    def __init__(self, key: GraphKey, graph: CapturedGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        with torch.cuda.stream(self._graph.stream):
            self._graph.step()
