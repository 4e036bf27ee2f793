"""A check that kernels which may start early also wait: programmatic dependent launch (PDL)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphengine.buckets import CapturedGraph, GraphNode, GraphStructure
from graphengine.testing.errors import GraphCheckError, hide_frame, listed
from graphengine.testing.launches import read_launches
from graphengine.testing.machine_code import KernelCode, read_code
from graphengine.testing.snapshots.structures import Graph, read_structure, walk

__tracebackhide__ = hide_frame


def assert_pdl_waits(graph: Graph, code: Iterable[object], *, unknown: bool = False) -> None:
    """GraphCheckError if a programmatic edge leads into a kernel that does not wait.

    Such a kernel starts while the one before it still runs. It has to execute
    `griddepcontrol.wait` (`cudaGridDependencySynchronize`, Triton's `gdc_wait`) before it writes
    and before it ends, on every path: the launch after it relies on that as well. A missing wait
    computes right results nearly always.

    `code` has the machine code of the kernels: text of PTX or of `nvdisasm`, the bytes of a cubin,
    or what a launch of a Triton kernel returned. Kernels are matched by the driver's handle where
    the code has one, else by name; then every variant of that name has to wait. Unless `unknown`,
    a kernel with a programmatic edge and without code is an error. `graph` is one that was kept, or
    a structure. A load before the wait is not reported: it may be one of constants.
    """
    codes = [found for source in code for found in read_code(source)]
    structure = read_structure(graph)
    functions = _functions(graph)
    missing, faults = [], []
    edges = list(_programmatic(structure))
    for source, path, target in edges:
        known = _code_of(codes, target, functions.get(path, 0))
        if not known:
            missing.append(f"{path} ({target.name})")
        faults += [
            f"{source} -> {path} ({target.name}): it {each.fault}" for each in known if each.fault
        ]
    if faults:
        raise GraphCheckError(
            f"{len(faults)} of {len(edges)} programmatic edges lead into a kernel that does not "
            f"wait: {listed(faults)}. Wait (Triton: gdc_wait(); CUDA: "
            "cudaGridDependencySynchronize()) before any store and any return, or launch it "
            "without PDL"
        )
    if missing and not unknown:
        raise GraphCheckError(
            f"whether {len(missing)} kernels wait cannot be told, as `code` has {len(codes)} "
            f"kernels and not these: {listed(missing)}. Add them, or pass unknown=True"
        )


def _functions(graph: Graph) -> dict[str, int]:
    """The driver's handle of each kernel by its path; none for a structure read elsewhere."""
    if isinstance(graph, GraphStructure):
        return {}
    kept = graph.graph if isinstance(graph, CapturedGraph) else graph
    assert kept is not None, "read_structure has read it"
    return {launch.path: launch.function for launch in read_launches(kept, None)}


def _programmatic(structure: GraphStructure) -> Iterator[tuple[str, str, GraphNode]]:
    """(path and name of the source, path of the target, target) of each edge into a kernel."""
    for path, graph in walk(structure):
        for edge in graph.edges:
            target = graph.nodes[edge.target]
            if edge.programmatic and target.kind == "kernel":
                source = graph.nodes[edge.source]
                yield f"{path}{edge.source} ({source.name})", f"{path}{edge.target}", target


def _code_of(codes: list[KernelCode], node: GraphNode, function: int) -> list[KernelCode]:
    exact = [each for each in codes if function and each.function == function]
    return exact or [each for each in codes if each.name == node.name]
