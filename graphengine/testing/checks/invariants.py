"""Checks of properties of every graph: addresses, random numbers, kinds of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType

import torch

from graphengine.buckets import GraphStructure
from graphengine.testing.arguments import number, require_callable
from graphengine.testing.errors import GraphCheckError, hide_frame, listed
from graphengine.testing.snapshots.structures import Graph, read_structure, require_known, walk
from graphengine.testing.tensors import (
    Buffers,
    describe,
    describe_difference,
    differing,
    named_tensors,
    require_tensor,
    run_and_wait,
    save,
)

__tracebackhide__ = hide_frame


class PointerCheck:
    """Remembers where tensors are, and checks again; `assert_pointers_stable` returns one."""

    def __init__(self, buffers: Buffers | Callable[[], Buffers]) -> None:
        self._buffers = buffers
        tensors = _read(buffers)
        self._places = _places(tensors)
        if not tensors:
            raise ValueError("no buffers to watch")
        if not any(tensor.numel() for tensor in tensors.values()):
            raise ValueError(f"no buffers to watch: all {len(tensors)} have 0 elements")
        # While it is held, no other tensor can be given the same address.
        self._memory = [tensor.untyped_storage() for tensor in tensors.values()]

    def check(self) -> None:
        """GraphCheckError if a tensor has moved or changed."""
        now = _places(_read(self._buffers))
        changes = [
            f"{name} was {place}, is {now.get(name, 'gone')}"
            for name, place in self._places.items()
            if now.get(name) != place
        ]
        if changes:
            raise GraphCheckError(
                f"{len(changes)} of {len(self._places)} buffers moved or changed, and graphs "
                f"captured before still use their old memory: {'; '.join(changes)}"
            )

    def __enter__(self) -> PointerCheck:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.check()


def assert_pointers_stable(buffers: Buffers | Callable[[], Buffers]) -> PointerCheck:
    """Remember address, shape, strides and dtype of the tensors, as a graph freezes them all.

    Call it right after a capture: `check()` of the returned object raises GraphCheckError, with old
    and new address, if a tensor has moved or changed since then. So does the end of a `with` block:

        with assert_pointers_stable(lambda: {"x": runner.x, "y": runner.y}):
            serve(...)

    `buffers` is read again each time. A function is called again and names the tensors that the
    program uses now, so a tensor that was replaced is seen (`runner.x = torch.zeros(8)`). It is
    also seen in a module, in StaticBuffers and in the dictionary in which the program itself keeps
    its tensors. A dictionary made for this call keeps the old tensors: then only changes of these
    are seen, such as `x.data = ...`, `x.resize_()` or `x.t_()`.

    The old memory is kept as long as the returned object, so that nothing else gets its address.
    """
    return PointerCheck(buffers)


def _read(buffers: Buffers | Callable[[], Buffers]) -> dict[str, torch.Tensor]:
    if callable(buffers) and not isinstance(buffers, torch.nn.Module):
        return named_tensors(buffers())
    return named_tensors(buffers)


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: f"{describe(tensor)} with strides {list(tensor.stride())} at {tensor.data_ptr():#x}"
        for name, tensor in tensors.items()
    }


def assert_rng_advances(
    replay: Callable[[], object],
    output: torch.Tensor,
    *,
    fixed: bool = False,
    generators: Mapping[str, torch.Generator] | None = None,
) -> None:
    """GraphCheckError if two replays leave the same values in `output`; with `fixed`, if they
    differ.

    `replay` writes its random numbers, or what was drawn from them, into `output`. If state must be
    restored so that only the random numbers differ, `replay` does it. Use `fixed` for a step whose
    seed is a constant input. Both replays have effects: torch's generators have advanced when this
    returns, and `output` holds the second replay's values.

    `generators`, by name, are those that the step draws from: each must advance with each replay. A
    generator of your own stands still if it was not registered with the graph and its seed and
    offset went into a kernel as numbers, if the step draws from torch's default generator instead,
    or if the graph is not launched by `CUDAGraph.replay`, which moves the offsets.
    """
    require_callable("replay", replay)
    require_tensor("the output", output)
    if not output.numel():
        raise ValueError(f"nothing to compare: the output ({describe(output)}) has no element")
    if fixed and generators:
        raise ValueError(
            f"fixed=True with {len(generators)} generators, which would have to advance"
        )
    states = [_states(generators or {})]
    results = []
    for _ in range(2):
        results.append(_after(replay, output))
        states.append(_states(generators or {}))
    first, second = results
    wrong = differing(first, second)
    _require_advance(generators or {}, states)
    if not fixed and not wrong.any():
        start = first.flatten()[:4].tolist()
        raise GraphCheckError(
            f"the random numbers are frozen: two replays left the same {first.numel()} elements in "
            f"the output ({describe(first)}), which begins with {start}"
        )
    if fixed and wrong.any():
        sides = "first replay", "second replay"
        what = describe_difference("output", first, second, wrong, sides=sides)
        raise GraphCheckError(f"two replays with a fixed seed differ in {what}")


def _states(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    for name, generator in generators.items():
        if not isinstance(generator, torch.Generator):
            raise ValueError(
                f"generator {name!r} is of type {type(generator).__name__}, not a torch.Generator"
            )
    return {name: generator.get_state() for name, generator in generators.items()}


def _require_advance(
    generators: Mapping[str, torch.Generator], states: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """GraphCheckError for a generator whose state is the same before and after a replay."""
    for replay, (before, after) in enumerate(pairwise(states), 1):
        for name, generator in generators.items():
            if torch.equal(before[name], after[name]):
                raise GraphCheckError(
                    f"generator {name!r} did not advance in replay {replay} of 2"
                    f"{_offset_of(generator)}: the graph does not draw from it. Call "
                    "graph.register_generator_state(generator) before the capture, hand the "
                    "generator to each operation that draws, and replay by CUDAGraph.replay"
                )


def _offset_of(generator: torch.Generator) -> str:
    if generator.device.type != "cuda":
        return ""
    return f" (seed {generator.initial_seed()}, offset {generator.get_offset()})"


def _after(replay: Callable[[], object], output: torch.Tensor) -> torch.Tensor:
    run_and_wait(replay)
    return save({"output": output})["output"]


def assert_no_host_nodes(graph: Graph) -> None:
    """GraphCheckError if a replay would stop for a function on the host; nested graphs included.

    A nested node is named by its path: "4/0/2" is node 2 of graph 0 of node 4. A node whose
    contents cannot be seen is an error, too: it may hold a host node.
    """
    structure = read_structure(graph)
    found = [
        f"node {path}{node.index}"
        for path, nested in walk(structure)
        for node in nested.nodes
        if node.kind == "host"
    ]
    if found:
        raise GraphCheckError(f"{len(found)} host nodes in the graph: {listed(found)}")
    require_known(structure, "whether there are host nodes")


def assert_pdl_edges(graph: Graph, *, least: float = 1.0) -> None:
    """GraphCheckError if less than the share `least` of the edges is programmatic.

    Edges of programmatic dependent launch let a kernel start before the one it waits for has ended.
    All edges count, also those that no launch can make programmatic (from and to a memcpy), and
    those of nested graphs; a node whose contents cannot be seen is an error, since it may hold
    more. ValueError for a graph without edges and for a share outside 0 to 1.
    """
    least = number("least", least, most=1.0)
    structure = read_structure(graph)
    programmatic, edges = structure.programmatic_edges()
    if not edges:
        raise ValueError(f"a graph of {len(structure.nodes)} nodes without edges")
    if programmatic < least * edges:
        full = [
            f"{_end(path, nested, edge.source)} -> {_end(path, nested, edge.target)}"
            for path, nested in walk(structure)
            for edge in nested.edges
            if not edge.programmatic
        ]
        raise GraphCheckError(
            f"{programmatic} of {edges} edges are programmatic ({programmatic / edges:.1%}), "
            f"expected at least {least:.1%}; full: {listed(full)}"
        )
    if least:
        require_known(structure, "the share of programmatic edges")


def _end(path: str, structure: GraphStructure, index: int) -> str:
    node = structure.nodes[index]
    return f"{path}{index} ({node.kind if node.name is None else node.name})"
