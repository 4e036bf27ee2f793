"""Keeps graphs that other code captures, so that they can be inspected."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def keep_graphs() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """All `torch.cuda.CUDAGraph`s that are made in the block, as if with `keep_graph=True`.

        with keep_graphs() as graphs:
            for _ in range(3):
                compiled(x)                # torch.compile(mode="reduce-overhead")
        assert_no_host_nodes(graphs[-1])

    For captures by other code: torch.compile, which first makes an empty graph for each device, or
    `torch.cuda.make_graphed_callables`. The list is in the order of creation, and a graph can be
    read as soon as its capture has ended. A kept graph that was not instantiated before is
    instantiated by its first replay, which then takes longer. The list keeps graphs and their pools
    alive: drop it after reading.

    The constructor is changed for the whole process: graphs that other threads make meanwhile are
    kept too. It is restored at the end. RuntimeError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("keep_graphs needs a CUDA device: torch.cuda.is_available() is False")
    # Patched on the class, so that code that imported it by name earlier is covered as well.
    kind: Any = torch.cuda.CUDAGraph
    own = {name: vars(kind).get(name) for name in ("__new__", "__init__")}
    new, initialise = kind.__new__, kind.__init__
    graphs: list[torch.cuda.CUDAGraph] = []

    @functools.wraps(new)
    def make(made: type[torch.cuda.CUDAGraph], keep_graph: bool = False) -> torch.cuda.CUDAGraph:
        # torch.cuda.CUDAGraph keeps a note of its own here, from torch 2.14 on.
        graph: torch.cuda.CUDAGraph = new(made, True)
        return graph

    @functools.wraps(initialise)
    def construct(self: torch.cuda.CUDAGraph, keep_graph: bool = False) -> None:
        initialise(self, True)
        graphs.append(self)

    if own["__new__"] is not None:
        kind.__new__ = staticmethod(make)
    kind.__init__ = construct
    try:
        yield graphs
    finally:
        for name, value in own.items():
            if value is not None:
                setattr(kind, name, value)
            elif name in vars(kind):
                delattr(kind, name)
