"""The graphs of an engine by the names that reports give them."""

from __future__ import annotations

from typing import Any

from graphengine import Engine
from graphengine.program.graph_key import GraphKey


def graph_names(engine: Engine) -> list[str]:
    """In the order of capture."""
    return [key.name for key in engine.runtime.graphs]


def key_of(engine: Engine, name: str) -> GraphKey:
    (key,) = (key for key in engine.runtime.graphs if key.name == name)
    return key


def graph_of(engine: Engine, name: str) -> Any:
    return engine.runtime.graphs[key_of(engine, name)]


def replace_graph(engine: Engine, name: str, graph: Any) -> None:
    """Let the engine replay `graph` for it, until the engine is closed."""
    engine.runtime.graphs[key_of(engine, name)] = graph
