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
    own, original = kind.__dict__.get("__init__"), kind.__init__
    graphs: list[torch.cuda.CUDAGraph] = []

    @functools.wraps(original)
    def construct(self: torch.cuda.CUDAGraph, keep_graph: bool = False) -> None:
        original(self, True)
        graphs.append(self)

    kind.__init__ = construct
    try:
        yield graphs
    finally:
        if own is None:
            del kind.__init__
        else:
            kind.__init__ = own
