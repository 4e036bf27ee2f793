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
"""

from graphengine.buckets.budget import BudgetLine, MemoryBudget, OutOfBudget, Where, format_bytes
from graphengine.buckets.captured import (
    CapturedGraph,
    CaptureReport,
    PoolHandle,
    Step,
    capture_all,
    clear_blas_workspaces,
)
from graphengine.buckets.fields import Field, Owner, buffer_bytes, field_groups
from graphengine.buckets.graphs.introspect import inspect_graph, programmatic_edges
from graphengine.buckets.graphs.launches import KernelLaunch, read_launches
from graphengine.buckets.graphs.nodes import count_nodes
from graphengine.buckets.graphs.structure import GraphEdge, GraphNode, GraphStructure
from graphengine.buckets.host_queue import HostQueue
from graphengine.buckets.ladder import BucketLadder
from graphengine.buckets.mailbox import Mailbox, MailboxBroken, WaitMode
from graphengine.buckets.static import Copied, Part, StaticBuffers
from graphengine.buckets.timing import ReplayTimer

__all__ = [
    "BucketLadder",
    "BudgetLine",
    "CaptureReport",
    "CapturedGraph",
    "Copied",
    "Field",
    "GraphEdge",
    "GraphNode",
    "GraphStructure",
    "HostQueue",
    "KernelLaunch",
    "Mailbox",
    "MailboxBroken",
    "MemoryBudget",
    "OutOfBudget",
    "Owner",
    "Part",
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
    "programmatic_edges",
    "read_launches",
]
