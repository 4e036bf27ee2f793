"""A check that memory whose addresses a graph holds still belongs to the same tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from graphengine.buckets import KernelLaunch, format_bytes
from graphengine.testing.allocator import DEFAULT_POOL, Block, Frees, Segment, find, read_segments
from graphengine.testing.errors import GraphCheckError, hide_frame, listed
from graphengine.testing.launches import Launches, describe_launch, read_launches
from graphengine.testing.tensors import Buffers, describe, named_tensors, span

__tracebackhide__ = hide_frame

# Size of a parameter that is an address, or a number that cannot be taken for an address.
_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """An address in the parameters of a kernel, and the block that it was in."""

    launch: KernelLaunch
    parameter: int
    address: int
    block: Block

    def __str__(self) -> str:
        return (
            f"{describe_launch(self.launch)}, parameter {self.parameter}: {self.address:#x} in "
            f"{format_bytes(self.block.size)} at {self.block.address:#x}"
        )


class DanglingCheck:
    """Remembers memory, and checks it again; `assert_no_dangling_pointers` returns one."""

    def __init__(self, graph: Launches, buffers: Buffers | None) -> None:
        launches = read_launches(graph, "whether it holds addresses of freed memory")
        self._names = {} if buffers is None else _spans(named_tensors(buffers))
        segments = read_segments()
        self._held: list[_Held] = []
        freed = []
        for held, is_pointer in _addresses(launches, segments):
            if held.block.in_use:
                self._held.append(held)
            elif is_pointer:
                freed.append(f"{self._name(held)}{held}, which is freed already")
        if not freed and not self._held:
            raise ValueError(
                f"nothing to watch: no parameter of {len(launches)} kernels is an address of "
                "memory that torch's allocator has given out of its default pool"
            )
        self._raise(freed, len(freed) + len(self._held))
        self._frees = Frees()
        self._stack = contextlib.ExitStack()

    def check(self) -> None:
        """GraphCheckError if memory that the graph uses was freed since, or is another tensor's."""
        segments = read_segments()
        found = [
            f"{self._name(held)}{held}, {what}"
            for held in self._held
            if (what := self._change(held, segments))
        ]
        self._raise(found, len(self._held))

    def __enter__(self) -> DanglingCheck:
        self._stack.enter_context(self._frees.recording())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if error is None:
            self.check()

    def _change(self, held: _Held, segments: Sequence[Segment]) -> str:
        """A text about a change of the block; "" if it is unchanged."""
        if (place := self._frees.places.get(held.block.address)) is not None:
            return f"freed at {place}" if place else "freed"
        segment = find(segments, held.address)
        if segment is None:
            return "freed and returned to the driver"
        block = segment.block_at(held.address)
        if block is None or not block.in_use:
            return "freed"
        if (block.address, block.size) != (held.block.address, held.block.size):
            return f"now in another block, of {format_bytes(block.size)} at {block.address:#x}"
        return ""

    def _name(self, held: _Held) -> str:
        return next(
            (
                f"{name}: "
                for name, (first, end) in self._names.items()
                if first <= held.address < end
            ),
            "",
        )

    @staticmethod
    def _raise(found: Sequence[str], total: int) -> None:
        if not found:
            return
        raise GraphCheckError(
            f"{len(found)} of {total} addresses in the graph are of memory that was freed: "
            f"{listed(found)}. Replays go on using it. Keep the tensor as long as the graph, and "
            "write into it in place"
        )


def assert_no_dangling_pointers(
    graph: Launches, *, buffers: Buffers | None = None
) -> DanglingCheck:
    """Remembers the memory that the kernels of a graph use; fails if it is freed later.

    Call it right after the capture. It reads the parameters of all kernel nodes, so it needs no
    list of tensors and sees what raw launches (Triton, CUDA) were given, also tensors that nobody
    has a name for: a workspace that was reallocated, a converted copy of an argument.

        with assert_no_dangling_pointers(graph, buffers={"x": x}):
            serve(...)

    In a `with` block frees are recorded as they happen, and the message says where in the program.
    `check()` of the returned object compares blocks only: memory that was freed and given to a
    tensor of the same size passes. `buffers` gives names to addresses in messages.

    GraphCheckError at once for a parameter that is an address of memory freed already. Only memory
    that torch's allocator has given out of its default pool is watched: memory of a graph's own
    pool is the graph's until it is reset. Parameters larger than an address are searched for
    addresses word by word; nodes that copy or set memory are not read. ValueError if there is
    nothing to watch. RuntimeError without cuda-bindings, and for a torch graph that was not kept.
    """
    return DanglingCheck(graph, buffers)


def _addresses(
    launches: Sequence[KernelLaunch], segments: Sequence[Segment]
) -> list[tuple[_Held, bool]]:
    """Addresses of the default pool in parameters, and whether the parameter is only that."""
    watched = [segment for segment in segments if segment.pool == DEFAULT_POOL]
    found = []
    for launch in launches:
        for parameter, _, address in launch.words():
            segment = find(watched, address)
            block = None if segment is None else segment.block_at(address)
            if block is not None:
                held = _Held(launch=launch, parameter=parameter, address=address, block=block)
                size = len((launch.parameters or ())[parameter])
                found.append((held, size == _POINTER_BYTES))
    return found


def _spans(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {f"{name} ({describe(tensor)})": span(tensor) for name, tensor in tensors.items()}
