"""Tests for captured CUDA graphs of any callable over static tensors, captured in any way.

    from graphengine.testing import (assert_replay_matches_eager, poison_padding)

    assert_replay_matches_eager(step, {"x": x, "y": y}, graph=graph)
    poison_padding({"x": x, "y": y}, graph.replay, padding={"x": unused, "y": unused})

Every check is a function here and a pytest fixture of the same name, and says what happened and
where by raising `GraphCheckError`, an AssertionError. Start with README.md in this folder.

The names are imported when they are first used, so that the pytest plugin can be loaded without
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphengine.testing.checks.dangling import assert_no_dangling_pointers
    from graphengine.testing.checks.host_scalars import assert_no_host_scalars
    from graphengine.testing.checks.invariants import (
        assert_no_host_nodes,
        assert_pdl_edges,
        assert_pointers_stable,
        assert_rng_advances,
    )
    from graphengine.testing.checks.latency import Latency, latency_budget
    from graphengine.testing.checks.logprobs import LogprobAgreement, logprob_agreement
    from graphengine.testing.checks.outputs import assert_outputs_written
    from graphengine.testing.checks.parity import assert_replay_matches_eager
    from graphengine.testing.checks.pdl_waits import assert_pdl_waits
    from graphengine.testing.checks.poison import POISONS, CanaryPages, Poison, poison_padding
    from graphengine.testing.checks.pools import no_leaked_pool
    from graphengine.testing.checks.replayed import assert_replayed
    from graphengine.testing.checks.watch import check_no_alloc, no_alloc, no_sync
    from graphengine.testing.errors import GraphCheckError
    from graphengine.testing.isolated import IsolatedRun, run_isolated
    from graphengine.testing.snapshots.graph_diff import (
        FieldChange,
        GraphChange,
        diff_structures,
        diff_text,
        normalise,
        normalise_name,
    )
    from graphengine.testing.snapshots.keeping import keep_graphs
    from graphengine.testing.snapshots.snapshot import (
        GraphSnapshot,
        environment_key,
        graph_snapshot,
    )
    from graphengine.testing.snapshots.structures import read_structure

__all__ = [
    "POISONS",
    "CanaryPages",
    "FieldChange",
    "GraphChange",
    "GraphCheckError",
    "GraphSnapshot",
    "IsolatedRun",
    "Latency",
    "LogprobAgreement",
    "Poison",
    "assert_no_dangling_pointers",
    "assert_no_host_nodes",
    "assert_no_host_scalars",
    "assert_outputs_written",
    "assert_pdl_edges",
    "assert_pdl_waits",
    "assert_pointers_stable",
    "assert_replay_matches_eager",
    "assert_replayed",
    "assert_rng_advances",
    "check_no_alloc",
    "diff_structures",
    "diff_text",
    "environment_key",
    "graph_snapshot",
    "keep_graphs",
    "latency_budget",
    "logprob_agreement",
    "no_alloc",
    "no_leaked_pool",
    "no_sync",
    "normalise",
    "normalise_name",
    "poison_padding",
    "read_structure",
    "run_isolated",
]

_MODULES = {
    "checks.dangling": ("assert_no_dangling_pointers",),
    "checks.host_scalars": ("assert_no_host_scalars",),
    "checks.outputs": ("assert_outputs_written",),
    "checks.pdl_waits": ("assert_pdl_waits",),
    "checks.pools": ("no_leaked_pool",),
    "checks.replayed": ("assert_replayed",),
    "errors": ("GraphCheckError",),
    "snapshots.graph_diff": (
        "FieldChange",
        "GraphChange",
        "diff_structures",
        "diff_text",
        "normalise",
        "normalise_name",
    ),
    "checks.invariants": (
        "assert_no_host_nodes",
        "assert_pdl_edges",
        "assert_pointers_stable",
        "assert_rng_advances",
    ),
    "isolated": ("IsolatedRun", "run_isolated"),
    "snapshots.keeping": ("keep_graphs",),
    "checks.latency": ("Latency", "latency_budget"),
    "checks.logprobs": ("LogprobAgreement", "logprob_agreement"),
    "checks.parity": ("assert_replay_matches_eager",),
    "checks.poison": ("POISONS", "CanaryPages", "Poison", "poison_padding"),
    "snapshots.snapshot": ("GraphSnapshot", "environment_key", "graph_snapshot"),
    "snapshots.structures": ("read_structure",),
    "checks.watch": ("check_no_alloc", "no_alloc", "no_sync"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

# Type checkers take the names from above; this function would make them allow any other name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
