"""Static buffers, bucket ladders and captured graphs for any step program.

A *bucket* is a fixed shape with one captured CUDA graph; the *ladder* lists them and picks the
smallest that holds the work at hand. *Static buffers* are the tensors a graph sees, which the host
changes only by `load`. Through the *mailbox* the host reads results without a synchronisation:

    buffers = StaticBuffers(fields, device, staging_blocks=3)
    graphs = capture_all({str(n): partial(step, n) for n in reversed(ladder.sizes)}, ...)

    buffers.load({"tokens": tokens}, sequence=n)        # padded lanes are reset; one copy
    graphs[str(ladder.pick(len(tokens)))].replay()      # replay number n
    payloads = mailbox.wait(n, len(tokens))
    buffers.acknowledge(n)                              # its staging block may be reused

On CUDA `load` copies on the current stream, which must be the graphs' stream. A replay runs on its
graph's stream, whichever stream is current. On a CPU device the same classes call the step instead
of replaying it. Nothing here knows what a step computes.

The names are imported when they are first used: buffers and the mailbox need numpy, and the pytest
plugin, which ships these modules without the engine, does not depend on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphengine.buckets.budget import (
        BudgetLine,
        MemoryBudget,
        OutOfBudget,
        Where,
        format_bytes,
    )
    from graphengine.buckets.captured import (
        CapturedGraph,
        CaptureReport,
        PoolHandle,
        Step,
        capture_all,
        clear_blas_workspaces,
    )
    from graphengine.buckets.fields import Field, Owner, buffer_bytes, field_groups
    from graphengine.buckets.graphs.carveouts import prefer_cache
    from graphengine.buckets.graphs.introspect import inspect_graph, programmatic_edges
    from graphengine.buckets.graphs.launches import KernelLaunch, read_launches
    from graphengine.buckets.graphs.nodes import count_nodes
    from graphengine.buckets.graphs.structure import GraphEdge, GraphNode, GraphStructure
    from graphengine.buckets.host_queue import HostQueue
    from graphengine.buckets.ladder import BucketLadder
    from graphengine.buckets.mailbox import Mailbox, MailboxBroken, WaitMode
    from graphengine.buckets.static import CopiedRange, LaneUpdate, StaticBuffers
    from graphengine.buckets.timing import ReplayTimer

__all__ = [
    "BucketLadder",
    "BudgetLine",
    "CaptureReport",
    "CapturedGraph",
    "CopiedRange",
    "Field",
    "GraphEdge",
    "GraphNode",
    "GraphStructure",
    "HostQueue",
    "KernelLaunch",
    "LaneUpdate",
    "Mailbox",
    "MailboxBroken",
    "MemoryBudget",
    "OutOfBudget",
    "Owner",
    "PoolHandle",
    "ReplayTimer",
    "StaticBuffers",
    "Step",
    "WaitMode",
    "Where",
    "buffer_bytes",
    "capture_all",
    "clear_blas_workspaces",
    "count_nodes",
    "field_groups",
    "format_bytes",
    "inspect_graph",
    "prefer_cache",
    "programmatic_edges",
    "read_launches",
]

_HOMES = {
    "BucketLadder": "graphengine.buckets.ladder",
    "BudgetLine": "graphengine.buckets.budget",
    "CaptureReport": "graphengine.buckets.captured",
    "CapturedGraph": "graphengine.buckets.captured",
    "CopiedRange": "graphengine.buckets.static",
    "Field": "graphengine.buckets.fields",
    "GraphEdge": "graphengine.buckets.graphs.structure",
    "GraphNode": "graphengine.buckets.graphs.structure",
    "GraphStructure": "graphengine.buckets.graphs.structure",
    "HostQueue": "graphengine.buckets.host_queue",
    "KernelLaunch": "graphengine.buckets.graphs.launches",
    "Mailbox": "graphengine.buckets.mailbox",
    "MailboxBroken": "graphengine.buckets.mailbox",
    "MemoryBudget": "graphengine.buckets.budget",
    "OutOfBudget": "graphengine.buckets.budget",
    "Owner": "graphengine.buckets.fields",
    "LaneUpdate": "graphengine.buckets.static",
    "PoolHandle": "graphengine.buckets.captured",
    "ReplayTimer": "graphengine.buckets.timing",
    "StaticBuffers": "graphengine.buckets.static",
    "Step": "graphengine.buckets.captured",
    "WaitMode": "graphengine.buckets.mailbox",
    "Where": "graphengine.buckets.budget",
    "buffer_bytes": "graphengine.buckets.fields",
    "capture_all": "graphengine.buckets.captured",
    "clear_blas_workspaces": "graphengine.buckets.captured",
    "count_nodes": "graphengine.buckets.graphs.nodes",
    "field_groups": "graphengine.buckets.fields",
    "format_bytes": "graphengine.buckets.budget",
    "inspect_graph": "graphengine.buckets.graphs.introspect",
    "prefer_cache": "graphengine.buckets.graphs.carveouts",
    "programmatic_edges": "graphengine.buckets.graphs.introspect",
    "read_launches": "graphengine.buckets.graphs.launches",
}

# Type checkers take the names from above; this function would make them allow any other name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
