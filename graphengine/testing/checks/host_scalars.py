"""A check that no kernel of a graph holds a number of the host that changes between steps."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch

from graphengine.buckets import KernelLaunch
from graphengine.buckets.captured import no_garbage_collection
from graphengine.testing.arguments import require_callable
from graphengine.testing.errors import GraphCheckError, hide_frame, listed
from graphengine.testing.launches import Launches, describe_launch, read_launches
from graphengine.testing.tensors import run_and_wait

__tracebackhide__ = hide_frame

_UNKNOWN = "whether kernels hold numbers of the host"

# Captures before the change: words in which these differ are ignored.
_CAPTURES = 3
_WORD = 8
# Size of an empty function object of C++, which is passed as one byte of undefined contents.
_EMPTY_BYTES = 1

Capture = Callable[[Callable[[], object]], Launches]


def assert_no_host_scalars(
    step: Callable[[], object],
    change: Callable[[], object],
    *,
    capture: Capture | None = None,
) -> None:
    """GraphCheckError if host state that `change` changes would be frozen in a graph of `step`.

    `change` does to the host's state what the program does between two steps: the next position,
    another temperature, other lengths. The step is captured three times before and once after it. A
    kernel whose parameters, grid or compiled variant differ only after the change holds a number
    that no replay will see: the message names the kernel, the parameter and both values. Give such
    a number to the kernel in a tensor.

    Differences between the first captures (addresses of temporaries, unused bytes) are ignored, so
    a number in the same 8 bytes as one of these is not seen. Parameters of one byte are ignored,
    too: they are empty function objects in C++. Addresses that only the change exchanges are
    reported: the graph would keep the old one.

    `capture(step)` captures the step your own way and returns a graph that was kept
    (`keep_graph=True`). By default the step is warmed up and captured here, on the current device.
    RuntimeError without cuda-bindings.
    """
    require_callable("step", step)
    require_callable("change", change)
    record = _capture if capture is None else capture
    # All captures are kept until the end, so that none takes the memory of another.
    graphs = [record(step) for _ in range(_CAPTURES)]
    run_and_wait(change)
    graphs.append(record(step))
    *before, after = (read_launches(graph, _UNKNOWN) for graph in graphs)
    if not before[0]:
        raise ValueError("the captured step has no kernel, so there is nothing to compare")
    for again in before[1:]:
        if unstable := _differences(before, again):
            raise GraphCheckError(
                f"{_UNKNOWN} cannot be told: captures differ with nothing changed in between. "
                f"{listed(unstable)}"
            )
    if found := _differences(before, after):
        raise GraphCheckError(
            f"{len(found)} values of the host are frozen in the graph: {listed(found)}. Give them "
            "to the kernel in a tensor on the device, which is written before each replay"
        )


def _capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with no_garbage_collection(), torch.cuda.graph(graph):
        step()
    return graph


def _differences(
    before: Sequence[Sequence[KernelLaunch]], after: Sequence[KernelLaunch]
) -> list[str]:
    """The differences of `after`, leaving out words that differ within `before`."""
    found = []
    for *old, new in zip_longest(*before, after):
        known = [launch for launch in (*old, new) if launch is not None]
        if len(known) <= len(old):
            found.append(
                f"{describe_launch(known[0])} is in {len(known)} of {len(old) + 1} captures"
            )
        else:
            found += _of_kernel(old, new)
    return found


def _of_kernel(before: Sequence[KernelLaunch], after: KernelLaunch) -> list[str]:
    one = before[0]
    what = describe_launch(one)
    if one.name != after.name:
        return [f"{what} has become {describe_launch(after)}"]
    found = [] if one.grid == after.grid else [f"{what}: grid {one.grid} -> {after.grid}"]
    if one.function != after.function:
        return [*found, f"{what}: another compiled variant (a constexpr or a specialised number)"]
    values = zip(*((launch.parameters or ()) for launch in (*before, after)), strict=True)
    return found + [
        f"{what}, parameter {place}{f' at byte {offset}' if offset else ''}: {change}"
        for place, value in enumerate(values)
        if len(value[0]) > _EMPTY_BYTES
        for offset, change in _words(value)
    ]


def _words(values: Sequence[bytes]) -> list[tuple[int, str]]:
    """The offset of each word of 8 bytes that differs only in the last of `values`, and how."""
    found = []
    for offset in range(0, len(values[0]), _WORD):
        *old, new = (value[offset : offset + _WORD] for value in values)
        if new != old[0] and len(set(old)) == 1:
            found.append((offset, f"{_show(old[0])} -> {_show(new)}"))
    return found


def _show(word: bytes) -> str:
    """A word as an integer, and as floating-point numbers where these look like numbers."""
    number = int.from_bytes(word, "little", signed=True)
    formats = {4: "f", 8: "d"}
    if len(word) not in formats or not number:
        return str(number)
    (real,) = struct.unpack(f"<{formats[len(word)]}", word)
    return f"{number} (as a float {real:.6g})" if 1e-6 < abs(real) < 1e9 else str(number)
